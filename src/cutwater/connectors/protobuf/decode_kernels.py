"""The kernel that runs the program of a message type over the bytes of messages, and so makes columns of them.

A program is a table of instructions of eight words, one for each field and way of framing it, the fields of a message
one behind the other.  Fields come in any order, so the tag of each is compared with the instruction that follows the
last one, where it is most often, and then looked up in a table of the message.

Where values lie is said by slots and spaces (``layout``).  A slot is eight words: where it lies; of the bytes of texts
how many are used and how many there are; its kind, its space, the width of a value; the space of its items, or the
table of a oneof; and how many bytes a row wanted.  A space is four: its entries, for how many there is room, how many
are to be kept, and for how many a row wanted room.

What comes again replaces what was there (numbers, texts, a oneof's other field) or is added to it (lists, messages),
as Protobuf says.  All that belongs to the entry being read is the last in its slots, so it can be cut off: so a row
that is bad, or for which there is no room, is taken back.

Nothing is read that was not compared with the end of the value before, and nothing is written that was not compared
with the room: at most as many items as the values have bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.connectors.messages.byte_kernels import copied, int32_at, int_at, is_utf8
from cutwater.state.kernels import byte_at, copy_bytes, kernel, set_byte, set_int32, set_int64, set_word, word_at

STEP = 64
"""Bytes of an instruction, and of the header of a message in front of its instructions."""
SLOT, TAG, VALID, ONEOF, CHOICE, MORE, COUNT = 8, 16, 24, 32, 40, 48, 56
"""Where operands lie in an instruction: a slot; the tag; slots of validity and of a oneof, or -1; which of the oneof
this is; the header of a message, or a table of a closed enum and how many numbers that has."""
DENSE, DENSE_COUNT, SPARSE, SPARSE_COUNT, CHECK, FIRST_PART, SECOND_PART = 0, 8, 16, 24, 32, 40, 48
"""Where operands lie in a header: a table by tags, one of pairs for larger tags, and what is checked at the end."""
SLOT_BYTES, SPACE_BYTES, FRAME_BYTES = 64, 32, 32
_AT, _USED, _SIZE, _KIND, _SPACE, _WIDTH, _CHILD, _BYTES_WANTED = 0, 8, 16, 24, 32, 40, 48, 56
_ENTRIES, _CAPACITY, _KEPT, _ROOM_WANTED = 0, 8, 16, 24
_FRAME_END, _FRAME_ENTRY, _FRAME_HEADER, _FRAME_PC = 0, 8, 16, 24

VALUES, LENGTHS, ITEMS, CONTENT = 0, 1, 2, 3
"""Kinds of slots."""
VARINT32, VARINT64, ZIGZAG32, ZIGZAG64, BOOL, CLOSED, FIXED32, FIXED64, TEXT, BYTES, MESSAGE = range(11)
ITEM, PACKED = 16, 32
"""Added to what a value is: one more item, or many of them in one piece."""
NO_FIELD, OTHER_FRAME = 0, -1
"""In the tables: the tag is unknown, or is a known field's, framed in a way that its type is not."""
OF_TIMESTAMP, OF_DURATION = 1, 2
"""What is checked at the end of a message."""

CUT_SHORT, TOO_LONG, NO_ROOM, OUT_OF_RANGE, NOT_UTF8, WRONG_FRAME = -1, -2, -3, -4, -5, -6
NO_TAG, NO_GROUP, TOO_DEEP, NOT_WHOLE = -7, -8, -9, -10
"""What is wrong with a value."""

_FIRST_SECOND, _LAST_SECOND = -62135596800, 253402300799
"""Of the years 1 to 9999."""
_MOST_SECONDS, _NANOS = 315576000000, 1_000_000_000
GROUPS = 100
"""Unknown groups in each other, at most."""
_SEVEN = np.uint64(7)
_LOW_32 = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)


@kernel
def read_varint(at: Any, end: Any) -> Any:
    """A number of variable length: (its 64 bits, byte behind it, or what is wrong with it)."""
    if at < end and byte_at(at) < 128:
        return np.uint64(byte_at(at)), at + 1
    word, shift = np.uint64(0), np.uint64(0)
    for _ in range(10):
        if at >= end:
            return word, np.int64(CUT_SHORT)
        bits = np.uint64(byte_at(at))
        at += 1
        word |= (bits & np.uint64(127)) << shift
        if bits < np.uint64(128):
            return word, at
        shift += _SEVEN
    return word, np.int64(TOO_LONG)


@kernel
def _tag(at: Any, end: Any) -> Any:
    """A tag: (it, byte behind it, or what is wrong)."""
    word, behind = read_varint(at, end)
    if behind >= 0 and (behind - at > 5 or word > _LOW_32 or word < np.uint64(8)):
        return np.int64(0), np.int64(NO_TAG)
    return np.int64(word), behind


@kernel
def _length(at: Any, end: Any) -> Any:
    """How many bytes follow: (length, where they begin, or what is wrong)."""
    word, at = read_varint(at, end)
    if at >= 0 and word > np.uint64(end - at):
        return np.int64(0), np.int64(CUT_SHORT)
    return np.int64(word), at


@kernel
def _skip(tag: Any, at: Any, end: Any) -> Any:
    """The byte behind a field that is unknown, and no group."""
    frame = tag & 7
    if frame == 0:
        _, at = read_varint(at, end)
        return at
    if frame == 2:
        length, at = _length(at, end)
        return at + length if at >= 0 else at
    if frame == 1 or frame == 5:
        size = 8 if frame == 1 else 4
        return at + size if end - at >= size else np.int64(CUT_SHORT)
    return np.int64(NO_GROUP if frame == 4 else NO_TAG)


@kernel
def _skip_group(tag: Any, at: Any, end: Any, stack: Any) -> Any:
    """The byte behind a group with all that is in it."""
    depth = 1
    set_int64(stack, tag >> 3)
    while depth:
        tag, at = _tag(at, end)
        if at < 0:
            return at
        if tag & 7 == 3:
            if depth == GROUPS:
                return np.int64(TOO_DEEP)
            set_int64(stack + 8 * depth, tag >> 3)
            depth += 1
        elif tag & 7 == 4:
            depth -= 1
            if int_at(stack + 8 * depth) != tag >> 3:
                return np.int64(NO_GROUP)
        else:
            at = _skip(tag, at, end)
            if at < 0:
                return at
    return at


@kernel
def _found(header: Any, tag: Any, tables: Any) -> Any:
    """The instruction for a tag (behind the first header), ``NO_FIELD`` or ``OTHER_FRAME``."""
    if tag < int_at(header + DENSE_COUNT):
        return int_at(tables + 8 * (int_at(header + DENSE) + tag))
    low, high = np.int64(0), int_at(header + SPARSE_COUNT)
    pairs = tables + 8 * int_at(header + SPARSE)
    while low < high:
        middle = (low + high) >> 1
        one = int_at(pairs + 16 * middle)
        if one == tag:
            return int_at(pairs + 16 * middle + 8)
        if one < tag:
            low = middle + 1
        else:
            high = middle
    return np.int64(NO_FIELD)


# --------------------------------------------------------------------------------------------------- taking back


@kernel
def _cut(first: Any, last: Any, slots: Any, spaces: Any) -> None:
    """Cut the entries of slots from the number on that their space keeps, and what belongs to these."""
    for slot in range(slots + first, slots + last, SLOT_BYTES):
        kind, space = int_at(slot + _KIND), spaces + int_at(slot + _SPACE)
        if kind == CONTENT:
            continue
        at, width = int_at(slot + _AT), int_at(slot + _WIDTH)
        kept, entries = int_at(space + _KEPT), int_at(space + _ENTRIES)
        gone = np.int64(0)
        if kind != VALUES:
            for entry in range(kept, entries):
                gone += int32_at(at + 4 * entry)
        if kind == LENGTHS:
            set_int64(slot + SLOT_BYTES + _USED, int_at(slot + SLOT_BYTES + _USED) - gone)
        elif kind == ITEMS:
            child = spaces + int_at(slot + _CHILD)
            set_int64(child + _KEPT, int_at(child + _ENTRIES) - gone)
        for byte in range(at + width * kept, at + width * entries):
            set_byte(byte, 0)
    for slot in range(slots + first, slots + last, SLOT_BYTES):
        if int_at(slot + _KIND) == ITEMS:
            child = spaces + int_at(slot + _CHILD)
            set_int64(child + _ENTRIES, int_at(child + _KEPT))


@kernel
def _there(pc: Any, entry: Any, slots: Any, spaces: Any, tables: Any) -> None:
    """Note that a field is there, and so no other one of its oneof."""
    valid, oneof = int_at(pc + VALID), int_at(pc + ONEOF)
    if valid >= 0:
        set_byte(int_at(slots + valid + _AT) + entry, 1)
    if oneof >= 0:
        at = int_at(slots + oneof + _AT) + 4 * entry
        before = int32_at(at)
        if before != int_at(pc + CHOICE):
            if before:
                set_int64(spaces + int_at(slots + oneof + _SPACE) + _KEPT, entry)
                members = tables + 8 * (int_at(slots + oneof + _CHILD) + 2 * before)
                _cut(int_at(members), int_at(members + 8), slots, spaces)
            set_int32(at, int_at(pc + CHOICE))


# -------------------------------------------------------------------------------------------------------- values


@kernel
def _is_known(number: Any, pc: Any, tables: Any) -> Any:
    """True if a closed enum has the number."""
    low, high = np.int64(0), int_at(pc + COUNT)
    table = tables + 8 * int_at(pc + MORE)
    while low < high:
        middle = (low + high) >> 1
        one = int_at(table + 8 * middle)
        if one == number:
            return True
        if one < number:
            low = middle + 1
        else:
            high = middle
    return False


@kernel
def _number(kind: Any, pc: Any, at: Any, end: Any, to: Any, tables: Any) -> Any:
    """A number to where it belongs: (the byte behind it, or what is wrong; whether it counts)."""
    if kind == FIXED64:
        if end - at < 8:
            return np.int64(CUT_SHORT), False
        set_word(to, word_at(at))
        return at + 8, True
    if kind == FIXED32:
        if end - at < 4:
            return np.int64(CUT_SHORT), False
        set_int32(to, int32_at(at))
        return at + 4, True
    word, at = read_varint(at, end)
    if at < 0:
        return at, False
    if kind == VARINT64:
        set_word(to, word)
    elif kind == VARINT32:
        set_int32(to, np.int64(word))
    elif kind == ZIGZAG64:
        set_word(to, (word >> _ONE) ^ (np.uint64(0) - (word & _ONE)))
    elif kind == ZIGZAG32:
        low = word & _LOW_32
        set_int32(to, np.int64((low >> _ONE) ^ (np.uint64(0) - (low & _ONE))))
    elif kind == BOOL:
        set_byte(to, np.int64(word != np.uint64(0)))
    else:
        number = np.int64(np.int32(np.int64(word & _LOW_32)))
        if not _is_known(number, pc, tables):
            return at, False
        set_int32(to, number)
    return at, True


@kernel
def _text(kind: Any, at: Any, end: Any, limit: Any, slot: Any, entry: Any) -> Any:
    """A text or bytes, instead of what the entry may hold: the byte behind it, or what is wrong."""
    length, at = _length(at, end)
    if at < 0:
        return at
    lengths, content = int_at(slot + _AT) + 4 * entry, slot + SLOT_BYTES
    used = int_at(content + _USED) - int32_at(lengths)
    if used + length > int_at(content + _SIZE):
        set_int64(content + _BYTES_WANTED, used + length)
        return np.int64(NO_ROOM)
    if copied(int_at(content + _AT) + used, at, length, limit) and kind == TEXT and not is_utf8(at, at + length):
        set_int64(content + _USED, used)
        set_int32(lengths, 0)
        return np.int64(NOT_UTF8)
    set_int64(content + _USED, used + length)
    set_int32(lengths, length)
    return at + length


@kernel
def _room(slot: Any, items: Any, spaces: Any) -> Any:
    """The number of a further item of a list, for which and for those behind it there is room; or ``NO_ROOM``."""
    child = spaces + int_at(slot + _CHILD)
    entries = int_at(child + _ENTRIES)
    if entries + items > int_at(child + _CAPACITY):
        set_int64(child + _ROOM_WANTED, entries + items)
        return np.int64(NO_ROOM)
    return entries


@kernel
def _count(slot: Any, entry: Any, items: Any, spaces: Any) -> None:
    """Note that a list has more items."""
    child, at = spaces + int_at(slot + _CHILD), int_at(slot + _AT) + 4 * entry
    set_int64(child + _ENTRIES, int_at(child + _ENTRIES) + items)
    set_int32(at, int32_at(at) + items)


@kernel
def _item(kind: Any, pc: Any, at: Any, end: Any, limit: Any, slot: Any, entry: Any, spaces: Any, tables: Any) -> Any:
    """One more item of a list of numbers or texts: the byte behind it, or what is wrong."""
    number = _room(slot, 1, spaces)
    if number < 0:
        return number
    held = slot + SLOT_BYTES
    counts = True
    if kind in (TEXT, BYTES):
        at = _text(kind, at, end, limit, held, number)
    else:
        at, counts = _number(kind, pc, at, end, int_at(held + _AT) + int_at(held + _WIDTH) * number, tables)
    if at >= 0 and counts:
        _count(slot, entry, 1, spaces)
    return at


@kernel
def _packed(kind: Any, pc: Any, at: Any, end: Any, slot: Any, entry: Any, spaces: Any, tables: Any) -> Any:
    """Many numbers in one piece: the byte behind it, or what is wrong."""
    length, at = _length(at, end)
    if at < 0:
        return at
    stop, held = at + length, slot + SLOT_BYTES
    width = int_at(held + _WIDTH)
    if kind in (FIXED32, FIXED64):
        if length % width:
            return np.int64(NOT_WHOLE)
        items = length // width
        number = _room(slot, items, spaces)
        if number < 0:
            return number
        copy_bytes(int_at(held + _AT) + width * number, at, length)
        _count(slot, entry, items, spaces)
        return stop
    while at < stop:
        number = _room(slot, 1, spaces)
        if number < 0:
            return number
        at, counts = _number(kind, pc, at, stop, int_at(held + _AT) + width * number, tables)
        if at < 0:
            return at
        if counts:
            _count(slot, entry, 1, spaces)
    return stop


@kernel
def _checked(header: Any, entry: Any, slots: Any) -> Any:
    """Zero, or what is wrong with a message as a whole."""
    check = int_at(header + CHECK)
    if check == 0:
        return np.int64(0)
    seconds = int_at(int_at(slots + int_at(header + FIRST_PART) + _AT) + 8 * entry)
    nanos = int32_at(int_at(slots + int_at(header + SECOND_PART) + _AT) + 4 * entry)
    if check == OF_TIMESTAMP:
        good = seconds >= _FIRST_SECOND and seconds <= _LAST_SECOND and nanos >= 0 and nanos < _NANOS
    else:
        good = seconds >= -_MOST_SECONDS and seconds <= _MOST_SECONDS and nanos > -_NANOS and nanos < _NANOS
        good = good and not (seconds > 0 and nanos < 0) and not (seconds < 0 and nanos > 0)
    return np.int64(0) if good else np.int64(OUT_OF_RANGE)


@kernel
def _plain(
    op: Any, pc: Any, at: Any, end: Any, limit: Any, slot: Any, entry: Any, slots: Any, spaces: Any, tables: Any
) -> Any:
    """A field that is no message: the byte behind it, or what is wrong."""
    if op >= PACKED:
        return _packed(op & 15, pc, at, end, slot, entry, spaces, tables)
    if op >= ITEM:
        return _item(op & 15, pc, at, end, limit, slot, entry, spaces, tables)
    counts = True
    if op in (TEXT, BYTES):
        at = _text(op, at, end, limit, slot, entry)
    else:
        at, counts = _number(op, pc, at, end, int_at(slot + _AT) + int_at(slot + _WIDTH) * entry, tables)
    if at >= 0 and counts:
        _there(pc, entry, slots, spaces, tables)
    return at


@kernel
def _row(
    header: Any, at: Any, end: Any, limit: Any, entry: Any, code: Any, tables: Any, slots: Any, spaces: Any, frames: Any
) -> Any:
    """One message: (0, or what is wrong; the instruction where, or header of the message)."""
    frame = frames + 8 * GROUPS
    bottom = frame
    pc = header + STEP
    while True:
        if at == end:
            wrong = _checked(header, entry, slots)
            if wrong < 0:
                return wrong, header
            if frame == bottom:
                return np.int64(0), header
            frame -= FRAME_BYTES
            end, entry = int_at(frame + _FRAME_END), int_at(frame + _FRAME_ENTRY)
            header, pc = int_at(frame + _FRAME_HEADER), int_at(frame + _FRAME_PC)
            continue
        tag = byte_at(at)
        if tag < 128 and tag > 7:
            at += 1
        else:
            tag, at = _tag(at, end)
            if at < 0:
                return at, header
        if tag != int_at(pc + TAG):
            found = _found(header, tag, tables)
            if found == NO_FIELD:
                at = _skip_group(tag, at, end, frames) if tag & 7 == 3 else _skip(tag, at, end)
                if at < 0:
                    return at, header
                continue
            if found == OTHER_FRAME:
                return np.int64(WRONG_FRAME), header
            pc = code + found
        op, slot, inner = int_at(pc), slots + int_at(pc + SLOT), entry
        if op & 15 == MESSAGE:
            length, at = _length(at, end)
            if at < 0:
                return at, pc
            if op & ITEM:
                inner = _room(slot, 1, spaces)
                if inner < 0:
                    return inner, pc
                _count(slot, entry, 1, spaces)
            else:
                _there(pc, entry, slots, spaces, tables)
            set_int64(frame + _FRAME_END, end)
            set_int64(frame + _FRAME_ENTRY, entry)
            set_int64(frame + _FRAME_HEADER, header)
            set_int64(frame + _FRAME_PC, pc if op & ITEM else pc + STEP)
            frame += FRAME_BYTES
            end, entry, header = at + length, inner, code + int_at(pc + MORE)
            pc = header + STEP
            continue
        at = _plain(op, pc, at, end, limit, slot, entry, slots, spaces, tables)
        if at < 0:
            return at, pc
        pc += STEP if op < ITEM else 0


@kernel
def decode(
    data: Any,
    begins: Any,
    ends: Any,
    first: Any,
    code: Any,
    tables: Any,
    slots: Any,
    slot_count: Any,
    spaces: Any,
    frames: Any,
    limit: Any,
    bad: Any,
    found: Any,
) -> Any:
    """Messages to columns, from the message ``first`` on.

    Args:
        data: address of the messages; ``begins`` (-1: it is passed over) and ``ends`` are places behind it, and
            ``limit`` ends all of them.
        code, tables, slots, spaces, frames: addresses; the code begins with the header of the message.
        bad: for each bad message its number, what is wrong, and the instruction; no more are looked for than it has
            rows.
        found: how many of them there are.

    Returns:
        The message for which there was no room; their number, when all are done.
    """
    for row in range(first, begins.shape[0]):
        if begins[row] < 0:
            continue
        entry = int_at(spaces + _ENTRIES)
        set_int64(spaces + _ENTRIES, entry + 1)
        at = data + begins[row]
        wrong, pc = _row(code, at, data + ends[row], limit, entry, code, tables, slots, spaces, frames)
        if wrong < 0:
            set_int64(spaces + _KEPT, entry)
            _cut(0, slot_count * SLOT_BYTES, slots, spaces)
            set_int64(spaces + _ENTRIES, entry)
            if wrong == NO_ROOM:
                return row
            bad[found[0], 0], bad[found[0], 1], bad[found[0], 2] = row, wrong, (pc - code) // STEP
            found[0] += 1
            if found[0] == bad.shape[0]:
                return begins.shape[0]
    return begins.shape[0]


NULL, SHORT, NO_HEADER, NO_INDEXES = -1, -2, -3, -4
"""Instead of the id of a schema."""
INDEX_BITS, MOST_INDEXES = 15, 4
"""Bits of a number of the path to a message type, plus one, and how many of them there may be."""
_MOST_INDEX = (1 << INDEX_BITS) - 1


@kernel
def headers(data: Any, starts: Any, ends: Any, valid: Any, ids: Any, paths: Any, begins: Any) -> None:
    """What is in front of each message: a zero byte, the four of an id, and the path to its type in the schema.

    Args:
        ids: gets the ids, or why there is none.
        paths: gets the numbers of the path, ``INDEX_BITS`` for each, plus one; the outermost lowest.
        begins: gets where the message begins.
    """
    for row in range(starts.shape[0]):
        at, end = data + starts[row], data + ends[row]
        paths[row], begins[row] = 1, starts[row] + 6
        if not valid[row]:
            ids[row] = NULL
        elif end - at < 6:
            ids[row] = SHORT
        elif byte_at(at) != 0:
            ids[row] = NO_HEADER
        else:
            ids[row] = byte_at(at + 1) << 24 | byte_at(at + 2) << 16 | byte_at(at + 3) << 8 | byte_at(at + 4)
            if byte_at(at + 5) != 0:  # a zero stands for the first type
                path, behind = _path(at + 5, end)
                paths[row], begins[row] = path, behind - data
                if path < 0:
                    ids[row] = NO_INDEXES


@kernel
def _path(at: Any, end: Any) -> Any:
    """The path of a type: (its numbers, or -1; the byte behind)."""
    word, at = read_varint(at, end)
    if at < 0 or (word & _ONE) != np.uint64(0) or word >> _ONE > np.uint64(MOST_INDEXES):
        return np.int64(-1), end
    path = np.int64(0)
    for n in range(np.int64(word >> _ONE)):
        index, at = read_varint(at, end)
        if at < 0 or (index & _ONE) != np.uint64(0) or index >> _ONE >= np.uint64(_MOST_INDEX):
            return np.int64(-1), end
        path |= (np.int64(index >> _ONE) + 1) << (INDEX_BITS * n)
    return path, at
