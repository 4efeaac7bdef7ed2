"""Kernels that parse lines of JSON objects and of CSV into columns, in one pass over the bytes.

They give up where a line is not plain (``text_kernels``), and then the caller has other means (``text_columns``).

What they write they are given as addresses in ``out``; the caller keeps all of it alive:

    0  numbers: of each column in turn as many int64 as there are rows: integers, flags, microseconds, days, and doubles
    1  valid: likewise a byte each, 0 for null
    2  texts: of each column of texts a part, its texts one behind the other
    3  the bytes of such a part
    4  ends: of each column of texts as many int32 as there are rows, and one more: where the texts end, from 0 on
    5  hard: doubles that need more than exact arithmetic, by four int64: column, row, first byte, length
    6  memory: the last date, three words (``read_time``), and how many doubles are hard
    7  the rows that there is room for
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.connectors.text.text_kernels import (
    CLOSE,
    COLON,
    COMMA,
    HIGH,
    MINUS,
    NEWLINE,
    NINE,
    ONES,
    OPEN,
    QUOTE,
    RETURN,
    ZERO,
    copy_field,
    copy_quoted,
    copy_string,
    field_end,
    is_null,
    quoted_end,
    read_date,
    read_flag,
    read_integer,
    read_real,
    read_time,
    skip_fields,
    skip_spaces,
    skip_value,
    string_end,
)
from cutwater.state.kernels import (
    byte_at,
    kernel,
    set_byte,
    set_int32,
    set_int64,
    set_real,
    set_word,
    trailing_zeros,
    word_at,
)

INTEGER, NATURAL, REAL, FLAG, TEXT, INSTANT, WALL_TIME, DATE, NOTHING = range(9)
"""Kinds of columns.  NATURAL has no minus; a time with zone is an INSTANT, one without a WALL_TIME; NOTHING is kept of
what nobody reads."""

GAVE_UP = -1

_NEWLINES = np.uint64(0x0A0A0A0A0A0A0A0A)


@kernel
def int64_at(address: Any) -> Any:
    """The integer at an address."""
    return np.int64(word_at(address))


@kernel
def find_newlines(at: Any, end: Any, places: Any) -> Any:
    """The places of the newlines, from ``at`` on, as far as there is room; returns how many there are."""
    first, found, room = at, 0, places.shape[0]
    while at + 8 <= end:
        others = word_at(at) ^ _NEWLINES
        marks = (others - ONES) & ~others & HIGH
        while marks:
            place = at + (np.int64(trailing_zeros(marks)) >> 3)
            if byte_at(place) == NEWLINE:  # above the lowest mark a borrow may have made one
                if found < room:
                    places[found] = place - first
                found += 1
            marks &= marks - np.uint64(1)
        at += 8
    while at < end:
        if byte_at(at) == NEWLINE:
            if found < room:
                places[found] = at - first
            found += 1
        at += 1
    return found


@kernel
def is_name(at: Any, length: Any, name: Any, name_length: Any, end: Any) -> Any:
    """True if the bytes are a name, which has eight more bytes behind it."""
    if name_length != length:
        return False
    if 0 < length <= 8 and at + 8 <= end:
        return (word_at(at) ^ word_at(name)) << np.uint64(64 - 8 * length) == 0
    same = True
    for i in range(length):
        same = same and byte_at(at + i) == byte_at(name + i)
    return same


@kernel
def read_scalar(at: Any, end: Any, kind: Any, column: Any, row: Any, number: Any, hard: Any, memory: Any) -> Any:
    """A number or a flag to its place: the byte behind it, 0 to give up."""
    if kind <= NATURAL:
        value, behind, digits = read_integer(at, end)
        first = behind - digits
        if digits == 0 or (kind == NATURAL and first > at) or (digits > 1 and byte_at(first) == ZERO):
            return 0
        set_int64(number, value)
        return behind
    if kind == REAL:
        real, behind, right = read_real(at, end)
        first = at + (byte_at(at) == MINUS)
        if right == 0 or (byte_at(first) == ZERO and first + 1 < end and ZERO <= byte_at(first + 1) <= NINE):
            return 0
        set_real(number, real)
        if right < 0:
            count = int64_at(memory + 24)
            place = hard + 32 * count
            set_int64(place, column)
            set_int64(place + 8, row)
            set_int64(place + 16, at)
            set_int64(place + 24, behind - at)
            set_word(memory + 24, np.uint64(count + 1))
        return behind
    flag, behind = read_flag(at, end)
    if flag < 0:
        return 0
    set_int64(number, flag)
    return behind


@kernel
def read_value(at: Any, end: Any, kind: Any, column: Any, row: Any, number: Any, valid: Any, text: Any, ends: Any,
               last: Any, hard: Any, memory: Any) -> Any:  # fmt: skip
    """A JSON value to its place: (byte behind it, where its text ends); byte 0 to give up.

    Args:
        number, valid, ends: the places of the value.
        text: of a text, where those of the column begin; ``last`` is where the one before ended.
    """
    if kind == TEXT:
        to = text + last
        if byte_at(at) == QUOTE:
            at, to = copy_string(at + 1, end, to)
        elif is_null(at, end):
            set_byte(valid, 0)
            at += 4
        else:
            return 0, 0
        set_int32(ends, to - text)
        return at, to - text
    if byte_at(at) == 110:
        if not is_null(at, end):
            return 0, 0
        set_byte(valid, 0)
        set_int64(number, 0)
        return at + 4, 0
    if kind <= FLAG:
        return read_scalar(at, end, kind, column, row, number, hard, memory), 0
    if byte_at(at) != QUOTE:
        return 0, 0
    closing = string_end(at + 1, end)
    if closing == 0:
        return 0, 0
    if kind == DATE:
        value, right = read_date(at + 1) if closing - at == 11 else (0, 0)
    else:
        value, right = read_time(at + 1, closing, kind == INSTANT, memory)
    set_int64(number, value)
    return closing + 1 if right else 0, 0


@kernel
def line_end(at: Any, end: Any) -> Any:
    """Behind spaces and a carriage return: the newline, or what else is there; 0 at the end of all lines."""
    at = skip_spaces(at, end)
    if at < end and byte_at(at) == RETURN:
        at += 1
    return at if at < end else 0


@kernel
def find_column(at: Any, length: Any, columns: Any, names: Any, name_ends: Any, end: Any) -> Any:
    """The column of this name; -1 if there is none."""
    for column in range(columns):
        begin = int64_at(name_ends + 8 * column)
        if is_name(at, length, names + begin, int64_at(name_ends + 8 * column + 8) - begin, end):
            return column
    return -1


@kernel
def read_name(at: Any, end: Any, columns: Any, names: Any, name_ends: Any, expected: Any, passed: Any) -> Any:
    """The name of a field and its colon: (first byte of the value, its column); byte 0 to give up.

    Args:
        expected: where the column is that came at this place in the row before; 0: nobody remembers it.  Column -1 has
            no name that is known.
        passed: where the name lies that came at this place and is of no column, and its length (0: none did).
    """
    if at >= end or byte_at(at) != QUOTE:
        return 0, -1
    first, column, name, length = at + 1, -1, 0, 0
    if expected:
        column = int64_at(expected)
        name, length = int64_at(passed), int64_at(passed + 8)
        if column >= 0:
            begin = int64_at(name_ends + 8 * column)
            name, length = names + begin, int64_at(name_ends + 8 * column + 8) - begin
        at = first + length
    if length == 0 or at >= end or byte_at(at) != QUOTE or not is_name(first, length, name, length, end):
        at = string_end(first, end)
        if at == 0:
            return 0, -1
        column = find_column(first, at - first, columns, names, name_ends, end)
        if expected:
            set_int64(expected, column)
            set_int64(passed, first)
            set_int64(passed + 8, at - first)
    at = skip_spaces(at + 1, end)
    if at >= end or byte_at(at) != COLON:
        return 0, -1
    at = skip_spaces(at + 1, end)
    return (at, column) if at < end else (0, -1)


@kernel
def fill_missing(
    row: Any, kinds: Any, text_of: Any, scratch: Any, numbers: Any, valid: Any, ends: Any, room: Any
) -> Any:
    """Null for the columns that a row did not have."""
    for c in range(kinds.shape[0]):
        if scratch[0, c] != row:
            set_byte(valid + c * room + row, 0)
            set_int64(numbers + 8 * (c * room + row), 0)
            if kinds[c] == TEXT:
                set_int32(ends + 4 * (text_of[c] * (room + 1) + row + 1), scratch[1, c])


@kernel
def parse_json(at: Any, end: Any, names: Any, name_ends: Any, kinds: Any, text_of: Any, ignore: Any, out: Any,
               order: Any, places: Any, scratch: Any) -> Any:  # fmt: skip
    """Lines of one JSON object each into columns: how many, or ``GAVE_UP``; blank lines are none.

    Args:
        at, end: of whole lines.
        names, name_ends: addresses of the columns' names side by side, and of where they begin and end (int64).
        kinds, text_of: kinds of the columns, and the place of each among those of texts.
        ignore: fields that are no column are passed over; else they are a reason to give up.
        order: address of the column (int64) that came at each of so many ``places`` in the row before; behind them, of
            the names of no column: address and length (0: none).
        scratch: by column: the row in which it was last seen (-1), and where its last text ends (0).
    """
    numbers, valid, texts, part, ends, hard, memory, room = out
    columns, row = kinds.shape[0], 0
    while at < end:
        at = line_end(at, end)
        if at == 0:
            break
        if byte_at(at) == NEWLINE:
            at += 1
            continue
        if byte_at(at) != OPEN or row == room:
            return GAVE_UP
        at = skip_spaces(at + 1, end)
        place, found = 0, 0
        going = at < end and byte_at(at) != CLOSE
        while going:
            known = order + 8 * place if place < places else 0
            at, column = read_name(at, end, columns, names, name_ends, known, known + 8 * places + 8 * place)
            if at == 0 or (column < 0 and not ignore):
                return GAVE_UP
            if column < 0:
                at = skip_value(at, end)
            else:
                if scratch[0, column] == row:
                    return GAVE_UP
                scratch[0, column] = row
                found += 1
                cell, text = column * room + row, text_of[column]
                set_byte(valid + cell, 1)
                at, last = read_value(
                    at, end, kinds[column], column, row, numbers + 8 * cell, valid + cell, texts + text * part,
                    ends + 4 * (text * (room + 1) + row + 1), scratch[1, column], hard, memory,
                )  # fmt: skip
                scratch[1, column] = last
            place += 1
            at = skip_spaces(at, end) if at else end
            going = at < end and byte_at(at) == COMMA
            at = skip_spaces(at + going, end)
        if at >= end or byte_at(at) != CLOSE:
            return GAVE_UP
        if found < columns:
            fill_missing(row, kinds, text_of, scratch, numbers, valid, ends, room)
        row += 1
        at = line_end(at + 1, end)
        if at and byte_at(at) != NEWLINE:
            return GAVE_UP
        at = at + 1 if at else end
    return row


@kernel
def read_field(at: Any, end: Any, kind: Any, column: Any, row: Any, delimiter: Any, quote: Any, number: Any, valid: Any,
               text: Any, ends: Any, last: Any, hard: Any, memory: Any) -> Any:  # fmt: skip
    """A CSV field to its place: (byte behind it, where its text ends); byte 0 to give up."""
    quoted = at < end and byte_at(at) == quote
    empty = at == end or byte_at(at) == delimiter or byte_at(at) == NEWLINE or byte_at(at) == RETURN
    set_byte(valid, not empty)
    if kind == TEXT:
        to = text + last
        if quoted:
            at, to = copy_quoted(at + 1, end, to, quote)
        elif not empty:
            at, to = copy_field(at, end, to, delimiter, quote)
        set_int32(ends, to - text)
        return at, to - text
    if empty:
        set_int64(number, 0)
        return at, 0
    if kind <= NATURAL:  # zeros may lead
        value, behind, digits = read_integer(at, end)
        set_int64(number, value)
        return behind if digits and (kind == INTEGER or behind - digits == at) else 0, 0
    if kind <= FLAG:
        return read_scalar(at, end, kind, column, row, number, hard, memory), 0
    first = at + quoted
    if quoted:
        at = quoted_end(first, end, quote)
        closing = at - 1
    else:
        at = closing = field_end(first, end, delimiter, quote)
    if at == 0:
        return 0, 0
    if kind == DATE:
        value, right = read_date(first) if closing - first == 10 and not quoted else (0, 0)
    else:
        value, right = read_time(first, closing, kind == INSTANT, memory)
    set_int64(number, value)
    return at if right else 0, 0


@kernel
def parse_csv(at: Any, end: Any, delimiter: Any, quote: Any, kinds: Any, runs: Any, columns: Any, text_of: Any,
              out: Any, lasts: Any) -> Any:  # fmt: skip
    """Lines of CSV into columns; blank lines are none.

    Args:
        at, end: of whole rows.
        delimiter, quote: bytes; -1 for no quote.
        kinds: of the fields of a row, ``NOTHING`` for those that nobody wants.
        runs: of each of those, how many of them there are from it on.
        columns: of each field, the column that it goes to.
        text_of: of each column, its place among the texts.
        out: where to write.
        lasts: by column, where its last text ends (0).

    Returns:
        the rows, or ``GAVE_UP``.
    """
    numbers, valid, texts, part, ends, hard, memory, room = out
    fields, row = kinds.shape[0], 0
    while at < end:
        if byte_at(at) == RETURN and at + 1 < end and byte_at(at + 1) == NEWLINE:
            at += 2
            continue
        if byte_at(at) == NEWLINE:
            at += 1
            continue
        if row == room:
            return GAVE_UP
        field = 0
        while field < fields:
            kind, column = kinds[field], columns[field]
            if kind != NOTHING:
                cell, text = column * room + row, text_of[column]
                at, last = read_field(
                    at, end, kind, column, row, delimiter, quote, numbers + 8 * cell, valid + cell, texts + text * part,
                    ends + 4 * (text * (room + 1) + row + 1), lasts[column], hard, memory,
                )  # fmt: skip
                lasts[column] = last
                field += 1
            else:
                at = skip_fields(at, end, runs[field], delimiter, quote)
                field += runs[field]
            if at == 0:
                return GAVE_UP
            if field < fields:
                if at >= end or byte_at(at) != delimiter:
                    return GAVE_UP
                at += 1
        if at < end and byte_at(at) == RETURN:
            at += 1
            if at < end and byte_at(at) != NEWLINE:
                return GAVE_UP
        if at < end:
            if byte_at(at) != NEWLINE:
                return GAVE_UP
            at += 1
        row += 1
    return row
