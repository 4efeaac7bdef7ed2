"""The kernel that runs the program of a schema over the bytes of Avro values, and so makes columns of them.

A program is a table of instructions of eight words: what to do (``INT`` ... ``END``) and operands (``SLOT`` ...).  So
there is one kernel for all schemas, compiled once and kept on disk as all are.

What values become lies in slots: growing pieces of memory that hold the values, the offsets, the bytes or the validity
(a byte for each) of a column.  A slot is six words, the last one unused: where it lies; how many bytes are used, and
how many there are; how many were used before this row; and how many a row wanted.  A row for which there is no room is
taken back, the kernel returns, and goes on with that row in larger slots.  A row that is bad is taken back, too.

All memory is named by its address: an array that is handed from function to function costs more than most values.
Nothing is read that was not compared with the end of the value before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.connectors.messages.byte_kernels import big_endian, copied, int32_at, int_at, is_utf8
from cutwater.state.kernels import byte_at, kernel, set_byte, set_int32, set_int64, set_real, set_word, word_at

STEP = 64
"""Bytes of an instruction."""
SLOT, TABLE, COUNT, LOW, HIGH = 8, 16, 24, 32, 40
"""Where operands lie in an instruction: a slot (in bytes from the first, -1: none), and what the instructions say."""
SLOT_BYTES = 48
_AT, _USED, _SIZE, _MARK, _WANTED = 0, 8, 16, 24, 32

INT, LONG, FLOAT_OF_LONG, DOUBLE_OF_LONG = 0, 1, 2, 3
"""A number of variable length between ``LOW`` and ``HIGH``, ``LONG`` times ``TABLE``."""
FLOAT, DOUBLE, DOUBLE_OF_FLOAT, BOOLEAN = 4, 5, 6, 7
BYTES, TEXT = 8, 9
"""To offsets and, in the next slot, bytes; of ``COUNT`` bytes, or -1: it says how many.  A text must be UTF-8."""
DECIMAL, UUID = 10, 11
"""At most ``LOW`` (upper) and ``HIGH`` (lower 64 bits); of ``COUNT`` bytes, or -1."""
ENUM = 12
"""One of ``COUNT``: ``TABLE`` says which of ours that is, or -1."""
FILL, FILL_ENDS = 13, 14
"""``COUNT`` zeros, or another offset as the last: what lies under a null."""
VALID = 15
"""``COUNT``: 1, or 0 for null."""
SKIP_NUMBER, SKIP_BYTES, SKIP = 16, 17, 18
"""A value that nobody reads: ``COUNT`` bytes."""
_CONTROL = 19
SWITCH = 19
"""One of ``COUNT`` branches: ``TABLE`` says where it goes on, times 4, and 0 or 1 to write into the slot, or 2."""
JUMP = 20
"""To ``TABLE``."""
OPEN, NEXT = 21, 22
"""Begin an array or a map; another item, or, if there is none, on at ``TABLE``.  ``COUNT``: 1 if items may be empty."""
ENTER, LEAVE = 23, 24
"""Read from the constants, from ``TABLE`` to ``COUNT``, and again from the value."""
FAIL = 25
END = 26

CUT_SHORT, TOO_LONG, NO_ROOM, OUT_OF_RANGE, NEGATIVE, NOT_UTF8 = -1, -2, -3, -4, -5, -6
NO_BRANCH, DOES_NOT_FIT, TOO_MANY, NOT_BOOLEAN, TRAILING, NO_SYMBOL, FULL = -7, -8, -9, -10, -11, -12, -13
"""What is wrong with a value.  ``FULL``: offsets have 32 bits."""

_MOST = 2**31 - 1
_MOST_EMPTY = 65_536
"""Items without a byte in one value, of which a hostile one could claim any number."""
_SEVEN = np.uint64(7)
_LAST_SHIFT = np.uint64(63)
_FRAME = 16


@kernel
def read_long(at: Any, end: Any) -> Any:
    """A number of variable length: (value, byte behind it, or what is wrong with it)."""
    if at < end and byte_at(at) < 128:
        byte = byte_at(at)
        return (byte >> 1) ^ -(byte & 1), at + 1
    word, shift = np.uint64(0), np.uint64(0)
    while at < end:
        bits = np.uint64(byte_at(at))
        at += 1
        word |= (bits & np.uint64(127)) << shift
        if bits < np.uint64(128):
            if shift == _LAST_SHIFT and bits > np.uint64(1):
                return np.int64(0), np.int64(TOO_LONG)
            return np.int64(word >> np.uint64(1)) ^ -np.int64(word & np.uint64(1)), at
        shift += _SEVEN
        if shift > _LAST_SHIFT:
            return np.int64(0), np.int64(TOO_LONG)
    return np.int64(0), np.int64(CUT_SHORT)


@kernel
def _room(slot: Any, size: Any) -> Any:
    """Where to write so many bytes, which count as used from now on; 0: there is no room."""
    used = int_at(slot + _USED)
    if used + size > int_at(slot + _SIZE):
        set_int64(slot + _WANTED, used + size)
        return 0
    set_int64(slot + _USED, used + size)
    return int_at(slot + _AT) + used


@kernel
def _number(op: Any, pc: Any, at: Any, end: Any, slot: Any) -> Any:
    value, behind = read_long(at, end)
    if behind < 0:
        return behind
    if op == SKIP_NUMBER:
        return behind
    if value < int_at(pc + LOW) or value > int_at(pc + HIGH):
        return np.int64(OUT_OF_RANGE)
    to = _room(slot, 8 if op in (LONG, DOUBLE_OF_LONG) else 4)
    if to == 0:
        return np.int64(NO_ROOM)
    if op == LONG:
        set_int64(to, value * int_at(pc + TABLE))
    elif op == INT:
        set_int32(to, value)
    elif op == DOUBLE_OF_LONG:
        set_real(to, np.float64(value))
    else:
        set_int32(to, np.int64(np.float32(value).view(np.int32)))
    return behind


@kernel
def _fixed_width(op: Any, at: Any, end: Any, slot: Any) -> Any:
    """A float, a double, or a boolean."""
    size = 8 if op == DOUBLE else 1 if op == BOOLEAN else 4
    if end - at < size:
        return np.int64(CUT_SHORT)
    to = _room(slot, 8 if op == DOUBLE_OF_FLOAT else size)
    if to == 0:
        return np.int64(NO_ROOM)
    if op == DOUBLE:
        set_word(to, word_at(at))
    elif op == BOOLEAN:
        if byte_at(at) > 1:
            return np.int64(NOT_BOOLEAN)
        set_byte(to, byte_at(at))
    elif op == FLOAT:
        set_int32(to, int32_at(at))
    else:
        set_real(to, np.float64(np.int32(int32_at(at)).view(np.float32)))
    return at + size


@kernel
def _length(pc: Any, at: Any, end: Any) -> Any:
    """How many bytes follow: (length, where they begin, or what is wrong)."""
    length = int_at(pc + COUNT)
    if length < 0:
        length, at = read_long(at, end)
        if at < 0:
            return length, at
        if length < 0:
            return length, np.int64(NEGATIVE)
    if length > end - at:
        return length, np.int64(CUT_SHORT)
    return length, at


@kernel
def _bytes(op: Any, pc: Any, at: Any, end: Any, limit: Any, slot: Any) -> Any:
    length, at = _length(pc, at, end)
    if at < 0 or op == SKIP_BYTES:
        return at + length if at >= 0 else at
    ends, to = _room(slot, 4), _room(slot + SLOT_BYTES, length)
    if ends == 0 or to == 0:
        return np.int64(NO_ROOM)
    used = int_at(slot + SLOT_BYTES + _USED)
    if used > _MOST:
        return np.int64(FULL)
    set_int32(ends, used)
    if copied(to, at, length, limit) and op == TEXT and not is_utf8(at, at + length):
        return np.int64(NOT_UTF8)
    return at + length


@kernel
def _decimal(pc: Any, at: Any, end: Any, slot: Any) -> Any:
    """A big-endian number in two's complement, to 16 little-endian bytes."""
    length, at = _length(pc, at, end)
    if at < 0:
        return at
    to = _room(slot, 16)
    if to == 0:
        return np.int64(NO_ROOM)
    good, high, low = big_endian(at, length, word_at(pc + LOW), word_at(pc + HIGH))
    if not good:
        return np.int64(OUT_OF_RANGE)
    set_word(to, low)
    set_word(to + 8, high)
    return at + length


@kernel
def _uuid(at: Any, end: Any, slot: Any) -> Any:
    """Sixteen bytes as a text."""
    if end - at < 16:
        return np.int64(CUT_SHORT)
    ends, to = _room(slot, 4), _room(slot + SLOT_BYTES, 36)
    if ends == 0 or to == 0:
        return np.int64(NO_ROOM)
    used = int_at(slot + SLOT_BYTES + _USED)
    if used > _MOST:
        return np.int64(FULL)
    set_int32(ends, used)
    for i in range(16):
        if i in (4, 6, 8, 10):
            set_byte(to, 45)
            to += 1
        for digit in (byte_at(at + i) >> 4, byte_at(at + i) & 15):
            set_byte(to, digit + (48 if digit < 10 else 87))
            to += 1
    return at + 16


@kernel
def _symbol(pc: Any, at: Any, end: Any, slot: Any, tables: Any) -> Any:
    index, at = read_long(at, end)
    if at < 0:
        return at
    if index < 0 or index >= int_at(pc + COUNT):
        return np.int64(NO_BRANCH)
    ours = int_at(tables + 8 * (int_at(pc + TABLE) + index))
    if ours < 0:
        return np.int64(NO_SYMBOL)
    to = _room(slot, 4)
    if to == 0:
        return np.int64(NO_ROOM)
    set_int32(to, ours)
    return at


@kernel
def _filled(op: Any, pc: Any, at: Any, slot: Any) -> Any:
    """What lies under a null, or whether something is null."""
    size = 4 if op == FILL_ENDS else 1 if op == VALID else int_at(pc + COUNT)
    to = _room(slot, size)
    if to == 0:
        return np.int64(NO_ROOM)
    if op == VALID:
        set_byte(to, int_at(pc + COUNT))
    elif op == FILL_ENDS:
        set_int32(to, int32_at(to - 4))
    else:
        for i in range(size):
            set_byte(to + i, 0)
    return at


@kernel
def _value(op: Any, pc: Any, at: Any, end: Any, limit: Any, slot: Any, tables: Any) -> Any:
    """One instruction that is no jump: the byte behind what it read, or what is wrong."""
    if op <= DOUBLE_OF_LONG or op == SKIP_NUMBER:
        return _number(op, pc, at, end, slot)
    if op <= BOOLEAN:
        return _fixed_width(op, at, end, slot)
    if op <= TEXT or op == SKIP_BYTES:
        return _bytes(op, pc, at, end, limit, slot)
    if op >= FILL and op <= VALID:
        return _filled(op, pc, at, slot)
    if op == ENUM:
        return _symbol(pc, at, end, slot, tables)
    if op == DECIMAL:
        return _decimal(pc, at, end, slot)
    if op == UUID:
        return _uuid(at, end, slot)
    return at + int_at(pc + COUNT) if end - at >= int_at(pc + COUNT) else np.int64(CUT_SHORT)


@kernel
def _next(pc: Any, at: Any, end: Any, slots: Any, frame: Any, empty: Any) -> Any:
    """Another item of an array: (the byte where it begins, or what is wrong; 1, or 0 if there is none).

    ``frame`` holds how many are left of a block, and how many there are with all blocks; ``empty`` how many of this
    value may have been without a byte.
    """
    left, slot = int_at(frame), int_at(pc + SLOT)
    while left == 0:
        left, at = read_long(at, end)
        if at < 0:
            return at, 0
        size = np.int64(-1)
        if left < 0:
            left = -left
            size, at = read_long(at, end)
            if at < 0 or size < 0:
                return np.int64(NEGATIVE) if at >= 0 else at, 0
        if left == 0:
            if slot < 0:
                return at, 0
            ends = _room(slots + slot, 4)
            if ends == 0:
                return np.int64(NO_ROOM), 0
            stop = int32_at(ends - 4) + int_at(frame + 8)
            set_int32(ends, stop)
            return at if stop <= _MOST else np.int64(FULL), 0
        if slot < 0 and size >= 0:
            if size > end - at:
                return np.int64(CUT_SHORT), 0
            at, left = at + size, np.int64(0)
            continue
        if int_at(pc + COUNT):
            if left < 0 or left > _MOST_EMPTY - int_at(empty):
                return np.int64(TOO_MANY), 0
            set_int64(empty, int_at(empty) + left)
        set_int64(frame + 8, int_at(frame + 8) + left)
    set_int64(frame, left - 1)
    return at, 1


@kernel
def _branch(pc: Any, at: Any, end: Any, slots: Any, tables: Any) -> Any:
    """A branch of a union: (the byte behind its number, or what is wrong; where it goes on)."""
    index, at = read_long(at, end)
    if at < 0:
        return at, 0
    if index < 0 or index >= int_at(pc + COUNT):
        return np.int64(NO_BRANCH), 0
    entry = int_at(tables + 8 * (int_at(pc + TABLE) + index))
    if entry & 3 < 2:
        to = _room(slots + int_at(pc + SLOT), 1)
        if to == 0:
            return np.int64(NO_ROOM), 0
        set_byte(to, entry & 3)
    return at, entry >> 2


@kernel
def _row(
    pc: Any, at: Any, end: Any, limit: Any, code: Any, tables: Any, constants: Any, slots: Any, frames: Any
) -> Any:
    """One value: (0, or what is wrong; the instruction where)."""
    kept_at, kept_end, kept_limit = at, end, limit
    frame = frames + 8 - _FRAME
    set_int64(frames, 0)
    while True:
        op = int_at(pc)
        if op < _CONTROL:
            at = _value(op, pc, at, end, limit, slots + int_at(pc + SLOT), tables)
            if at < 0:
                return at, pc
            pc += STEP
        elif op == SWITCH:
            at, to = _branch(pc, at, end, slots, tables)
            if at < 0:
                return at, pc
            pc = code + to
        elif op == JUMP:
            pc = code + int_at(pc + TABLE)
        elif op == OPEN:
            frame += _FRAME
            set_int64(frame, 0)
            set_int64(frame + 8, 0)
            pc += STEP
        elif op == NEXT:
            at, more = _next(pc, at, end, slots, frame, frames)
            if at < 0:
                return at, pc
            if more:
                pc += STEP
            else:
                frame -= _FRAME
                pc = code + int_at(pc + TABLE)
        elif op == ENTER:
            kept_at, kept_end, kept_limit = at, end, limit
            at, end = constants + int_at(pc + TABLE), constants + int_at(pc + COUNT)
            limit = end
            pc += STEP
        elif op == LEAVE:
            at, end, limit = kept_at, kept_end, kept_limit
            pc += STEP
        elif op == FAIL:
            return np.int64(DOES_NOT_FIT), pc
        else:
            return np.int64(0) if at == end else np.int64(TRAILING), pc


@kernel
def decode(
    data: Any,
    starts: Any,
    ends: Any,
    entries: Any,
    first: Any,
    header: Any,
    code: Any,
    tables: Any,
    constants: Any,
    slots: Any,
    slot_count: Any,
    frames: Any,
    limit: Any,
    bad: Any,
    found: Any,
) -> Any:
    """Values to columns, from the value ``first`` on.

    Args:
        data: address of the values; ``starts`` and ``ends`` are places behind it, and ``limit`` ends all of them.
        entries: the instruction to begin with for each value, in bytes; -1: it is passed over.
        header: bytes before the Avro value.
        code, tables, constants, slots, frames: addresses.
        bad: for each bad value its number, what is wrong, and the instruction; no more are looked for than it has rows.
        found: how many of them there are.

    Returns:
        The value for which there was no room; their number, when all are done.
    """
    for row in range(first, entries.shape[0]):
        if entries[row] < 0:
            continue
        for slot in range(slots, slots + slot_count * SLOT_BYTES, SLOT_BYTES):
            set_word(slot + _MARK, word_at(slot + _USED))
        at = data + starts[row] + header
        wrong, pc = _row(code + entries[row], at, data + ends[row], limit, code, tables, constants, slots, frames)
        if wrong < 0:
            for slot in range(slots, slots + slot_count * SLOT_BYTES, SLOT_BYTES):
                set_word(slot + _USED, word_at(slot + _MARK))
            if wrong in (NO_ROOM, FULL):
                return row
            bad[found[0], 0], bad[found[0], 1], bad[found[0], 2] = row, wrong, (pc - code) // STEP
            found[0] += 1
            if found[0] == bad.shape[0]:
                return entries.shape[0]
    return entries.shape[0]


@kernel
def schema_ids(data: Any, starts: Any, ends: Any, valid: Any, out: Any) -> None:
    """The number in the header of each value: a zero byte and its four; -1: null, -2: too short, -3: no zero."""
    for row in range(starts.shape[0]):
        at = data + starts[row]
        if not valid[row]:
            out[row] = -1
        elif ends[row] - starts[row] < 5:
            out[row] = -2
        elif byte_at(at) != 0:
            out[row] = -3
        else:
            out[row] = byte_at(at + 1) << 24 | byte_at(at + 2) << 16 | byte_at(at + 3) << 8 | byte_at(at + 4)
