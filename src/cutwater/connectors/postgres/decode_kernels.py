"""What a Postgres server sends, to columns: messages of ``pgoutput``, rows of COPY, values in binary form.

Numbers are big-endian.  A row is a list of fields; for each, kernels note where its value lies in the data and how long
it is, ``NULL`` or ``UNCHANGED`` where it has none.  A second kernel for each type makes the column.  (PostgreSQL
documentation, "Logical Replication Message Formats", "COPY: Binary Format".)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import kernel

NULL, UNCHANGED = -1, -2
"""In place of a length."""
INSERT, BEFORE, AFTER, DELETE = 0, 1, 2, 3
"""As in ``cutwater.data.changes``."""
ROWS, ENDED, INSIDE, XID, KEYED = 0, 1, 2, 3, 4
"""Places in the state of ``take_changes``."""
HEADER = 25
"""Bytes before what ``pgoutput`` says, in a message of the stream."""
_B, _C, _I, _U, _D, _R, _T = 66, 67, 73, 85, 68, 82, 84
_KEY, _OLD, _NEW = 75, 79, 78
_N, _UNCHANGED, _W, _K = 110, 117, 119, 107
_MAX, _MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min


@kernel
def _u16(data: Any, at: Any) -> Any:
    return np.int64(data[at]) << 8 | np.int64(data[at + 1])


@kernel
def _i32(data: Any, at: Any) -> Any:
    value = np.int64(data[at]) << 24 | np.int64(data[at + 1]) << 16 | np.int64(data[at + 2]) << 8
    value |= np.int64(data[at + 3])
    return value - ((value & np.int64(0x80000000)) << 1)


@kernel
def _i64(data: Any, at: Any) -> Any:
    value = np.int64(0)
    for i in range(8):
        value = value << 8 | np.int64(data[at + i])
    return value


@kernel
def heard(data: Any, starts: Any, count: Any, told: Any) -> None:
    """What a receiver must know of messages: the end of the last transaction or the server's place, and a wish.

    ``told``: the place in the log, which only grows; then 1 if the server wants an answer.
    """
    for i in range(count):
        at = starts[i]
        if data[at] == _K:
            told[0] = max(told[0], _i64(data, at + 1))
            told[1] |= np.int64(data[at + 17])
        elif data[at] == _W and data[at + HEADER] == _C:
            told[0] = max(told[0], _i64(data, at + HEADER + 10))


@kernel
def next_special(data: Any, starts: Any, first: Any, stop: Any) -> Any:
    """The first message that describes a table or empties some; ``stop`` if there is none."""
    for i in range(first, stop):
        at = starts[i]
        if data[at] == _W and (data[at + HEADER] == _R or data[at + HEADER] == _T):
            return i
    return stop


@kernel
def _behind(data: Any, at: Any) -> Any:
    """Where the tuple at a place ends."""
    columns = _u16(data, at)
    at += 2
    for _ in range(columns):
        kind = data[at]
        at += 1
        if kind != _N and kind != _UNCHANGED:
            at += 4 + _i32(data, at)
    return at


@kernel
def _number(oids: Any, oid: Any, guess: Any) -> Any:
    """The number of a table, most likely that of the last change; -1 if it is not read."""
    if guess >= 0 and oids[guess] == oid:
        return guess
    for i in range(len(oids)):
        if oids[i] == oid:
            return i
    return -1


@kernel
def _take_change(data: Any, at: Any, table: Any, state: Any, ops: Any, tables: Any, tuples: Any, xids: Any) -> None:
    """The one or two rows of a message."""
    row = state[ROWS]
    kind, part = data[at], data[at + 5]
    at += 6
    if part == _KEY:
        state[KEYED] = table + 1
    if part in (_KEY, _OLD):
        ops[row] = DELETE if kind == _D or part == _KEY else BEFORE
        tables[row], tuples[row], xids[row] = table, at, state[XID]
        row += 1
    if kind != _D:
        after = AFTER
        if kind == _I or part == _KEY:
            after = INSERT
        if part != _NEW:
            at = _behind(data, at) + 1
        ops[row] = after
        tables[row], tuples[row], xids[row] = table, at, state[XID]
        row += 1
    state[ROWS] = row


@kernel
def take_changes(
    data: Any,
    starts: Any,
    first: Any,
    stop: Any,
    oids: Any,
    state: Any,
    ops: Any,
    tables: Any,
    tuples: Any,
    xids: Any,
    end_rows: Any,
    end_places: Any,
) -> None:
    """The rows of messages, and where transactions end.

    Args:
        oids: of the tables that are read.
        state: rows so far, transactions ended so far, 1 inside of one, its xid, 1 and the number
            of a table of which an old row came with its key only (0: none); goes on.
        ops, tables, tuples, xids: of each row: what it is, number of its table, where its tuple lies, whose it is.
        end_rows, end_places: of each transaction, or word of the server that nothing else came: rows before it, and
            the place in the log.
    """
    ended = state[ENDED]
    table = 0
    for i in range(first, stop):
        at = starts[i]
        if data[at] == _K:
            if state[INSIDE] == 0:
                end_rows[ended], end_places[ended] = state[ROWS], _i64(data, at + 1)
                ended += 1
            continue
        if data[at] != _W:
            continue
        at += HEADER
        kind = data[at]
        if kind == _B:
            state[INSIDE], state[XID] = 1, _i32(data, at + 17) & 0xFFFFFFFF
        elif kind == _C:
            end_rows[ended], end_places[ended] = state[ROWS], _i64(data, at + 10)
            ended += 1
            state[INSIDE] = 0
        elif kind in (_I, _U, _D):
            table = _number(oids, _i32(data, at + 1) & 0xFFFFFFFF, table)
            if table >= 0:
                _take_change(data, at, table, state, ops, tables, tuples, xids)
    state[ENDED] = ended


@kernel
def tuple_fields(data: Any, tuples: Any, at: Any, length: Any) -> Any:
    """Where the fields of tuples lie, each column's one behind the other; the first row of another width, or -1."""
    width = len(at)
    for i in range(len(tuples)):
        place = tuples[i]
        if _u16(data, place) != width:
            return i
        place += 2
        for j in range(width):
            kind = data[place]
            place += 1
            at[j, i] = place + 4
            if kind == _N:
                length[j, i] = NULL
            elif kind == _UNCHANGED:
                length[j, i] = UNCHANGED
            else:
                size = _i32(data, place)
                length[j, i] = size
                place += 4 + size
    return -1


@kernel
def copied_fields(data: Any, starts: Any, at: Any, length: Any) -> Any:
    """As ``tuple_fields``, of rows of a binary COPY."""
    width = len(at)
    for i in range(len(starts)):
        place = starts[i]
        if _u16(data, place) != width:
            return i
        place += 2
        for j in range(width):
            size = _i32(data, place)
            at[j, i], length[j, i] = place + 4, size
            place += 4 + max(size, 0)
    return -1


@kernel
def fill_unchanged(at: Any, length: Any, before: Any, after: Any) -> Any:
    """Values that an update left as they were, from the row as it was; returns how many columns of rows lack one."""
    missing = 0
    for i in range(len(after)):
        for j in range(len(at)):
            if length[j, after[i]] == UNCHANGED:
                if before[i] < 0 or length[j, before[i]] == UNCHANGED:
                    missing += 1
                else:
                    at[j, after[i]], length[j, after[i]] = at[j, before[i]], length[j, before[i]]
    return missing


@kernel
def differs(data: Any, at: Any, length: Any, columns: Any, before: Any, after: Any, out: Any) -> None:
    """Whether two rows, in pairs, differ in one of some columns."""
    for i in range(len(before)):
        a, b = before[i], after[i]
        out[i] = False
        for j in columns:
            if length[j, a] != length[j, b]:
                out[i] = True
                continue
            for k in range(max(length[j, a], 0)):
                if data[at[j, a] + k] != data[at[j, b] + k]:
                    out[i] = True
                    break


@kernel
def integers(data: Any, at: Any, length: Any, width: Any, out: Any) -> Any:
    """Numbers of ``width`` bytes, with their sign; the first row of another width, or -1."""
    for i in range(len(at)):
        out[i] = 0
        if length[i] < 0:
            continue
        if length[i] != width:
            return i
        if width == 8:
            out[i] = _i64(data, at[i])
        elif width == 4:
            out[i] = _i32(data, at[i])
        elif width == 2:
            value = _u16(data, at[i])
            out[i] = value - ((value & 0x8000) << 1)
        else:
            out[i] = data[at[i]]
    return -1


@kernel
def moved(values: Any, by: Any, low: Any, high: Any) -> None:
    """Times from another epoch on; what is for ever, ``low`` and ``high``, becomes the ends of the range."""
    for i in range(len(values)):
        if values[i] >= high:
            values[i] = _MAX
        elif values[i] <= low:
            values[i] = _MIN
        elif values[i] > _MAX - by:
            values[i] = _MAX
        else:
            values[i] += by


@kernel
def offsets_of(length: Any, skip: Any, out: Any) -> Any:
    """Where each value ends in a column of them, ``skip`` bytes of each left away; returns the size."""
    total = np.int64(0)
    for i in range(len(length)):
        total += max(length[i] - skip, 0)
        out[i] = total
    return total


@kernel
def copy_values(data: Any, at: Any, length: Any, skip: Any, out: Any) -> None:
    """Values one behind the other."""
    place = 0
    for i in range(len(at)):
        for k in range(at[i] + skip, at[i] + max(length[i], skip)):
            out[place] = data[k]
            place += 1


@kernel
def uuid_texts(data: Any, at: Any, length: Any, out: Any) -> Any:
    """16 bytes as text of 36; the first row of another size, or -1."""
    place = 0
    for i in range(len(at)):
        if length[i] < 0:
            continue
        if length[i] != 16:
            return i
        for k in range(16):
            if k == 4 or k == 6 or k == 8 or k == 10:
                out[place] = 45
                place += 1
            byte = np.int64(data[at[i] + k])
            for half in (byte >> 4, byte & 15):
                out[place] = half + 48 if half < 10 else half + 87
                place += 1
    return -1


@kernel
def array_sizes(data: Any, at: Any, length: Any, out: Any) -> Any:
    """Where the elements of each array end; the first row with more than one dimension (-1: none has)."""
    total = np.int64(0)
    for i in range(len(at)):
        if length[i] >= 0:
            dimensions = _i32(data, at[i])
            if dimensions > 1:
                return i
            if dimensions == 1:
                total += _i32(data, at[i] + 12)
        out[i] = total
    return -1


@kernel
def array_elements(data: Any, at: Any, length: Any, out_at: Any, out_length: Any) -> None:
    """Where the elements of arrays lie."""
    n = 0
    for i in range(len(at)):
        if length[i] < 0 or _i32(data, at[i]) == 0:
            continue
        place = at[i] + 20
        for _ in range(_i32(data, at[i] + 12)):
            size = _i32(data, place)
            out_at[n], out_length[n] = place + 4, size
            place += 4 + max(size, 0)
            n += 1


@kernel
def _times(low: Any, high: Any, by: Any) -> Any:
    """A number of 128 bits times a small one."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    first = (low & mask) * by
    second = (low >> half) * by + (first >> half)
    return second << half | first & mask, high * by + (second >> half)


@kernel
def decimals(data: Any, at: Any, length: Any, scale: Any, out: Any) -> Any:
    """Numerics as numbers of 128 bits, two words each; the first row that is none of this scale, or -1.

    A numeric is digits to the base 10,000: their number, the weight of the first one, the sign, the scale (each of two
    bytes), then they.
    """
    for i in range(len(at)):
        out[2 * i] = out[2 * i + 1] = 0
        if length[i] < 0:
            continue
        place = at[i]
        digits, sign = _u16(data, place), _u16(data, place + 4)
        weight = _u16(data, place + 2)
        weight -= (weight & 0x8000) << 1
        if (sign != 0 and sign != 0x4000) or 4 * (weight + 1) + scale > 41:
            return i
        low = high = np.uint64(0)
        left = 4 * (weight + 1) + scale
        for k in range(digits):
            digit = _u16(data, place + 8 + 2 * k)
            power = 10000
            for _ in range(max(0, 4 - left)):
                if digit % 10 != 0:
                    return i
                digit //= 10
                power = max(power // 10, 1)
            low, high = _times(low, high, np.uint64(power))
            before = low
            low += np.uint64(digit)
            if low < before:
                high += np.uint64(1)
            left = max(left - 4, 0)
        if digits > 0:
            for _ in range(left):
                low, high = _times(low, high, np.uint64(10))
        if sign == 0x4000:
            low, high = ~low + np.uint64(1), ~high
            if low == np.uint64(0):
                high += np.uint64(1)
        out[2 * i], out[2 * i + 1] = low, high
    return -1


@kernel
def numeric_sizes(data: Any, at: Any, length: Any, out: Any) -> None:
    """Where the text of each numeric ends in a column of them."""
    total = np.int64(0)
    for i in range(len(at)):
        if length[i] >= 0:
            place = at[i]
            sign, scale = _u16(data, place + 4), _u16(data, place + 6)
            weight = _u16(data, place + 2)
            weight -= (weight & 0x8000) << 1
            if sign == 0xC000:
                total += 3
            elif sign == 0xD000:
                total += 8
            elif sign == 0xF000:
                total += 9
            else:
                whole = 1
                if _u16(data, place) > 0 and weight >= 0:
                    first = _u16(data, place + 8)
                    whole = 4 * weight + (4 if first >= 1000 else 3 if first >= 100 else 2 if first >= 10 else 1)
                total += whole + (sign == 0x4000) + (scale + 1 if scale > 0 else 0)
        out[i] = total


@kernel
def numeric_texts(data: Any, at: Any, length: Any, words: Any, out: Any) -> None:
    """Numerics as texts, as Postgres writes them; ``words``: "NaN-Infinity"."""
    n = 0
    for i in range(len(at)):
        if length[i] < 0:
            continue
        place = at[i]
        digits, sign, scale = _u16(data, place), _u16(data, place + 4), _u16(data, place + 6)
        weight = _u16(data, place + 2)
        weight -= (weight & 0x8000) << 1
        if sign >= 0xC000:
            begin = 0 if sign == 0xC000 else 4 if sign == 0xD000 else 3
            for k in range(begin, 3 if sign == 0xC000 else 12):
                out[n] = words[k]
                n += 1
            continue
        if sign == 0x4000:
            out[n] = 45
            n += 1
        begun = False
        for k in range(weight + 1):
            digit = _u16(data, place + 8 + 2 * k) if k < digits else 0
            for power in (1000, 100, 10, 1):
                figure = digit // power % 10
                begun = begun or figure > 0
                if begun:
                    out[n] = 48 + figure
                    n += 1
        if not begun:
            out[n] = 48
            n += 1
        if scale > 0:
            out[n] = 46
            n += 1
        for k in range(scale):
            group = weight + 1 + k // 4
            digit = _u16(data, place + 8 + 2 * group) if 0 <= group < digits else 0
            for _ in range(3 - k % 4):
                digit //= 10
            out[n] = 48 + digit % 10
            n += 1
