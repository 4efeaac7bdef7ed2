"""The kernel that runs the program of a schema over columns, and so makes the bytes of Avro values.

As ``decode_kernels``: instructions of eight words, addresses, and a row for which there is no room is written again in
more memory.  Columns lie as ``messages.column_memory`` says.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.connectors.avro.decode_kernels import COUNT, HIGH, LOW, SLOT, STEP, TABLE
from cutwater.connectors.messages.byte_kernels import int32_at, int_at
from cutwater.state.kernels import byte_at, copy_bytes, kernel, set_byte, set_int32, set_int64, set_word, word_at

_VALID, _ENDS = 8, 16

INT, LONG, FLOAT, DOUBLE, BOOLEAN, BYTES = 0, 1, 2, 3, 4, 5
"""A value; bytes with their number in front."""
FIXED = 6
"""``COUNT`` bytes, and no other number."""
DECIMAL = 7
"""Of ``COUNT`` bytes, or -1: as few as it needs, and their number in front.  At most ``LOW`` (upper) and ``HIGH``."""
_CONTROL = 8
NOT_NULL = 8
"""The value must be there."""
BRANCH = 9
"""Of a union: byte ``LOW`` if the value is there; else byte ``HIGH``, and it goes on at ``TABLE``."""
OPEN, NEXT = 10, 11
"""Begin an array or a map, or, if it is empty, go on at ``TABLE``; another item from ``TABLE`` on, or its end."""
CONSTANT = 12
"""The constant from ``TABLE`` to ``COUNT``."""
END = 13

NO_ROOM, NULL, WRONG_SIZE, OUT_OF_RANGE = -1, -2, -3, -4
"""What is wrong with a row."""
_FRAME = 16
_LONGEST = 32
"""Bytes of a value that is no text and no constant, at most, with what is in front of it."""


@kernel
def write_long(to: Any, value: Any) -> Any:
    """A number of variable length; the byte behind it."""
    word = np.uint64(value << 1) ^ np.uint64(value >> 63)
    while word >= np.uint64(128):
        set_byte(to, np.int64(word & np.uint64(127)) | 128)
        word >>= np.uint64(7)
        to += 1
    set_byte(to, np.int64(word))
    return to + 1


@kernel
def _decimal(pc: Any, to: Any, limit: Any, at: Any) -> Any:
    """Sixteen little-endian bytes, to big-endian ones."""
    low, high = word_at(at), word_at(at + 8)
    sign = np.uint64(0) - (high >> np.uint64(63))
    big, small = high ^ sign, (low ^ sign) + (sign & np.uint64(1))
    big += np.uint64(sign != np.uint64(0) and small == np.uint64(0))
    if big > word_at(pc + LOW) or (big == word_at(pc + LOW) and small > word_at(pc + HIGH)):
        return np.int64(OUT_OF_RANGE)
    size = int_at(pc + COUNT)
    filler = np.int64(sign & np.uint64(255))
    needed = 16
    while needed > 1 and byte_at(at + needed - 1) == filler and (byte_at(at + needed - 2) ^ filler) < 128:
        needed -= 1
    if size < 0:
        size = needed
        to = write_long(to, size)
    elif needed > size:
        return np.int64(OUT_OF_RANGE)
    elif size > limit - to:
        return np.int64(NO_ROOM)
    for i in range(size):
        set_byte(to + size - 1 - i, byte_at(at + i) if i < 16 else filler)
    return to + size


@kernel
def _bytes(op: Any, pc: Any, to: Any, limit: Any, column: Any, index: Any) -> Any:
    ends = int_at(column + _ENDS) + 4 * index
    begin = int32_at(ends)
    length = int32_at(ends + 4) - begin
    if length > limit - to - _LONGEST:
        return np.int64(NO_ROOM)
    if op == BYTES:
        to = write_long(to, length)
    elif length != int_at(pc + COUNT):
        return np.int64(WRONG_SIZE)
    copy_bytes(to, int_at(column) + begin, length)
    return to + length


@kernel
def _value(op: Any, pc: Any, to: Any, limit: Any, column: Any, index: Any) -> Any:
    """One value: the byte behind it, or what is wrong."""
    values = int_at(column)
    if op == INT:
        return write_long(to, int32_at(values + 4 * index))
    if op == LONG:
        return write_long(to, int_at(values + 8 * index))
    if op in (BYTES, FIXED):
        return _bytes(op, pc, to, limit, column, index)
    if op == FLOAT:
        set_int32(to, int32_at(values + 4 * index))
        return to + 4
    if op == DOUBLE:
        set_word(to, word_at(values + 8 * index))
        return to + 8
    if op == BOOLEAN:
        set_byte(to, byte_at(values + index))
        return to + 1
    return _decimal(pc, to, limit, values + 16 * index)


@kernel
def _there(column: Any, index: Any) -> Any:
    valid = int_at(column + _VALID)
    return valid == 0 or byte_at(valid + index) != 0


@kernel
def _row(to: Any, limit: Any, index: Any, code: Any, constants: Any, columns: Any, frames: Any) -> Any:
    """One row: (the byte behind it, or what is wrong; the instruction where)."""
    frame, pc = frames - _FRAME, code
    while True:
        op, column = int_at(pc), columns + int_at(pc + SLOT)
        if limit - to < _LONGEST:
            return np.int64(NO_ROOM), pc
        if op < _CONTROL:
            to = _value(op, pc, to, limit, column, index)
            if to < 0:
                return to, pc
            pc += STEP
        elif op == BRANCH:
            there = _there(column, index)
            set_byte(to, int_at(pc + LOW) if there else int_at(pc + HIGH))
            to += 1
            pc = pc + STEP if there else code + int_at(pc + TABLE)
        elif op == NOT_NULL:
            if not _there(column, index):
                return np.int64(NULL), pc
            pc += STEP
        elif op == OPEN:
            ends = int_at(column + _ENDS) + 4 * index
            begin, stop = int32_at(ends), int32_at(ends + 4)
            if begin == stop:
                set_byte(to, 0)
                to += 1
                pc = code + int_at(pc + TABLE)
            else:
                to = write_long(to, stop - begin)
                frame += _FRAME
                set_int64(frame, index)
                set_int64(frame + 8, stop)
                index = begin
                pc += STEP
        elif op == NEXT:
            index += 1
            if index < int_at(frame + 8):
                pc = code + int_at(pc + TABLE)
            else:
                set_byte(to, 0)
                to += 1
                index = int_at(frame)
                frame -= _FRAME
                pc += STEP
        elif op == CONSTANT:
            length = int_at(pc + COUNT) - int_at(pc + TABLE)
            if limit - to < length + _LONGEST:
                return np.int64(NO_ROOM), pc
            copy_bytes(to, constants + int_at(pc + TABLE), length)
            to += length
            pc += STEP
        else:
            return to, pc


@kernel
def encode(
    first: Any,
    rows: Any,
    out: Any,
    at: Any,
    size: Any,
    code: Any,
    constants: Any,
    columns: Any,
    frames: Any,
    starts: Any,
    lengths: Any,
    wrong: Any,
) -> Any:
    """Rows to values one behind the other, from the row ``first`` on, at the place ``at`` of ``out``.

    Args:
        out, code, constants, columns, frames: addresses; ``size`` are the bytes of ``out``.
        starts, lengths: where each value begins, and how long it is.
        wrong: what is wrong with the row at which it stopped, and the instruction.

    Returns:
        The row at which it stopped; their number, when all are done.
    """
    for row in range(first, rows):
        behind, pc = _row(out + at, out + size, row, code, constants, columns, frames)
        if behind < 0:
            wrong[0], wrong[1] = behind, (pc - code) // STEP
            return row
        starts[row] = at
        lengths[row] = behind - out - at
        at += lengths[row]
    return rows
