"""The kernel that runs the program of a message type over columns, and so makes the bytes of messages.

It writes from the end: a message follows its length, which is known once the message is there.  So the program of a
message has its fields in the opposite order, a field its value before its tag, lists go from their last item to the
first, and rows from the last to the first.  A row for which there is no room is written again in more memory.

Instructions are eight words; columns lie as ``messages.column_memory`` says.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.connectors.messages.byte_kernels import int32_at, int_at
from cutwater.connectors.messages.column_memory import COLUMN_BYTES as COLUMN_BYTES
from cutwater.state.kernels import byte_at, copy_bytes, kernel, set_byte, set_int32, set_int64, set_word, word_at

STEP = 64
COLUMN, TAG, TARGET, COUNT = 8, 16, 24, 32
"""Where operands lie: a column, a tag (0: none is written), where to go on, and what the instructions say."""
_VALID, _ENDS = 8, 16

SIGNED32, UNSIGNED32, VARINT64, ZIGZAG32, ZIGZAG64, BOOL, FIXED32, FIXED64, BYTES, TIMESTAMP, DURATION = range(11)
"""A value, and its tag."""
_CONTROL = 11
NOT_NULL = 11
"""The value must be there."""
SKIP_NULL, SKIP_ZERO = 12, 13
"""Go on at ``TARGET`` if the value is null, or what stands for none (``COUNT``: bytes of it; 0: of a text)."""
OPEN, CLOSE = 14, 15
"""A message or packed numbers; ``CLOSE`` writes length and tag, with ``COUNT`` 1 only if there is something."""
FIRST, NEXT = 16, 17
"""Begin a list with its last item, or go on at ``TARGET``; another item from ``TARGET`` on, or its end."""
CONSTANT = 18
"""The constant from ``TARGET`` to ``COUNT``."""
END = 19

NO_ROOM, NULL, OUT_OF_RANGE = -1, -2, -3
"""What is wrong with a row."""
_FRAME = 16
_LONGEST = 64
"""Bytes of a value that is no text and no constant, at most, with its tag and length."""
_SECOND = 1_000_000
_FIRST_SECOND, _LAST_SECOND = -62135596800, 253402300799
_MOST_SECONDS = 315576000000
_SEVEN, _128 = np.uint64(7), np.uint64(128)
_ONE = np.uint64(1)
_LOW_32 = np.uint64(0xFFFFFFFF)


@kernel
def write_varint(to: Any, word: Any) -> Any:
    """A number of variable length before a place; where it begins."""
    size, left = np.int64(1), word >> _SEVEN
    while left != np.uint64(0):
        size += 1
        left >>= _SEVEN
    begin = to - size
    for at in range(begin, to - 1):
        set_byte(at, np.int64(word & np.uint64(127)) | 128)
        word >>= _SEVEN
    set_byte(to - 1, np.int64(word))
    return begin


@kernel
def _time(op: Any, to: Any, micros: Any) -> Any:
    """A timestamp or a duration as a message: where it begins, or what is wrong."""
    seconds = micros // _SECOND
    if op == DURATION and micros < 0:
        seconds = -(-micros // _SECOND)
        if seconds < -_MOST_SECONDS:
            return np.int64(OUT_OF_RANGE)
    elif seconds < _FIRST_SECOND or seconds > (_LAST_SECOND if op == TIMESTAMP else _MOST_SECONDS):
        return np.int64(OUT_OF_RANGE)
    nanos = (micros - seconds * _SECOND) * 1000
    begin = to
    if nanos != 0:
        begin = write_varint(begin, np.uint64(nanos)) - 1
        set_byte(begin, 16)
    if seconds != 0:
        begin = write_varint(begin, np.uint64(seconds)) - 1
        set_byte(begin, 8)
    return write_varint(begin, np.uint64(to - begin))


@kernel
def _bytes(to: Any, start: Any, column: Any, index: Any) -> Any:
    ends = int_at(column + _ENDS) + 4 * index
    begin = int32_at(ends)
    length = int32_at(ends + 4) - begin
    if length > to - start - _LONGEST:
        return np.int64(NO_ROOM)
    copy_bytes(to - length, int_at(column) + begin, length)
    return write_varint(to - length, np.uint64(length))


@kernel
def _value(op: Any, to: Any, start: Any, column: Any, index: Any) -> Any:
    """One value: where it begins, or what is wrong."""
    values = int_at(column)
    if op == BYTES:
        return _bytes(to, start, column, index)
    if op == VARINT64:
        return write_varint(to, word_at(values + 8 * index))
    if op == SIGNED32:
        return write_varint(to, np.uint64(int32_at(values + 4 * index)))
    if op == UNSIGNED32:
        return write_varint(to, np.uint64(int32_at(values + 4 * index)) & _LOW_32)
    if op == FIXED64:
        set_word(to - 8, word_at(values + 8 * index))
        return to - 8
    if op == FIXED32:
        set_int32(to - 4, int32_at(values + 4 * index))
        return to - 4
    if op == BOOL:
        set_byte(to - 1, byte_at(values + index))
        return to - 1
    if op == ZIGZAG64:
        number = int_at(values + 8 * index)
        return write_varint(to, np.uint64(number << 1) ^ np.uint64(number >> 63))
    if op == ZIGZAG32:
        number = int32_at(values + 4 * index)
        return write_varint(to, (np.uint64(number << 1) ^ np.uint64(number >> 63)) & _LOW_32)
    return _time(op, to, int_at(values + 8 * index))


@kernel
def _is_zero(pc: Any, column: Any, index: Any) -> Any:
    size, values = int_at(pc + COUNT), int_at(column)
    if size == 0:
        ends = int_at(column + _ENDS) + 4 * index
        return int32_at(ends) == int32_at(ends + 4)
    if size == 8:
        return int_at(values + 8 * index) == 0
    return (int32_at(values + 4 * index) if size == 4 else byte_at(values + index)) == 0


@kernel
def _there(column: Any, index: Any) -> Any:
    valid = int_at(column + _VALID)
    return valid == 0 or byte_at(valid + index) != 0


@kernel
def _tagged(pc: Any, to: Any) -> Any:
    tag = int_at(pc + TAG)
    return write_varint(to, np.uint64(tag)) if tag else to


@kernel
def _row(to: Any, start: Any, index: Any, code: Any, constants: Any, columns: Any, frames: Any) -> Any:
    """One row: (where it begins, or what is wrong; the instruction where)."""
    frame, pc = frames - _FRAME, code
    while True:
        op, column = int_at(pc), columns + int_at(pc + COLUMN)
        if to - start < _LONGEST:
            return np.int64(NO_ROOM), pc
        if op < _CONTROL:
            to = _value(op, to, start, column, index)
            if to < 0:
                return to, pc
            to = _tagged(pc, to)
            pc += STEP
        elif op == NOT_NULL:
            if not _there(column, index):
                return np.int64(NULL), pc
            pc += STEP
        elif op == SKIP_NULL:
            pc = pc + STEP if _there(column, index) else code + int_at(pc + TARGET)
        elif op == SKIP_ZERO:
            pc = code + int_at(pc + TARGET) if _is_zero(pc, column, index) else pc + STEP
        elif op == OPEN:
            frame += _FRAME
            set_int64(frame, to)
            pc += STEP
        elif op == CLOSE:
            length = int_at(frame) - to
            frame -= _FRAME
            if length or int_at(pc + COUNT) == 0:
                to = _tagged(pc, write_varint(to, np.uint64(length)))
            pc += STEP
        elif op == FIRST:
            ends = int_at(column + _ENDS) + 4 * index
            begin, stop = int32_at(ends), int32_at(ends + 4)
            if begin == stop:
                pc = code + int_at(pc + TARGET)
            else:
                frame += _FRAME
                set_int64(frame, index)
                set_int64(frame + 8, begin)
                index = stop - 1
                pc += STEP
        elif op == NEXT:
            if index > int_at(frame + 8):
                index -= 1
                pc = code + int_at(pc + TARGET)
            else:
                index = int_at(frame)
                frame -= _FRAME
                pc += STEP
        elif op == CONSTANT:
            length = int_at(pc + COUNT) - int_at(pc + TARGET)
            to -= length  # shorter than the room that there is for any value
            copy_bytes(to, constants + int_at(pc + TARGET), length)
            pc += STEP
        else:
            return to, pc


@kernel
def encode(
    rows: Any,
    out: Any,
    to: Any,
    size: Any,
    code: Any,
    constants: Any,
    columns: Any,
    frames: Any,
    behind: Any,
    lengths: Any,
    wrong: Any,
) -> Any:
    """Rows to messages one before the other, from the last of ``rows`` to the first, before a place of ``out``.

    Args:
        out, code, constants, columns, frames: addresses; ``size`` are the bytes of ``out``, ``to`` is the place.
        behind, lengths: how far from the end of ``out`` each message begins, and how long it is.
        wrong: what is wrong with the row at which it stopped, and the instruction.

    Returns:
        How many rows are left; zero, when all are done.
    """
    for row in range(rows - 1, -1, -1):
        begin, pc = _row(out + to, out, row, code, constants, columns, frames)
        if begin < 0:
            wrong[0], wrong[1] = begin, (pc - code) // STEP
            return row + 1
        lengths[row] = out + to - begin
        to -= lengths[row]
        behind[row] = size - to
    return 0
