"""Kernels that parse lines of JSON objects and of CSV into columns, in one pass over the bytes.

They know the plain cases only: numbers of at most 18 digits, ISO times, texts.  At anything else, be it wrong or merely
rare, they give up, and whoever called them parses these lines by other means (``text_columns``).  So a kernel never has
to say what is wrong with a row, and what it accepts it must read as the other means do.

Columns: ``numbers[c, row]`` has integers, flags, microseconds and days; ``reals`` is the same memory as doubles.  The
texts of column c lie in part t = ``text_of[c]`` of ``texts``, whose parts are equally long, one behind the other: row i
from ``ends[t, i]`` to ``ends[t, i + 1]``.  ``valid[c, row]`` is 0 for null.  Doubles that need more than exact
arithmetic are listed in ``hard``: column, row, first byte, length.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import kernel, load_u64, store_u64, trailing_zeros

INTEGER, NATURAL, REAL, FLAG, TEXT, INSTANT, WALL_TIME, DATE, NOTHING = range(9)
"""Kinds of columns.  NATURAL has no minus; a time with zone is an INSTANT, one without a WALL_TIME; NOTHING is kept of
what nobody reads."""

GAVE_UP = -1

_MOST_DIGITS = 18
_EXACT = 1 << 53
_POWERS = 10.0 ** np.arange(23)
"""Powers of ten that are doubles: with an integer below 2**53 one multiplication or division rounds correctly."""

_ONES, _HIGH = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_QUOTES, _SLASHES = np.uint64(0x2222222222222222), np.uint64(0x5C5C5C5C5C5C5C5C)
_SPACES = np.uint64(0x2020202020202020)

_QUOTE, _SLASH, _NEWLINE, _RETURN = 34, 92, 10, 13
_TAB, _SPACE, _COMMA, _COLON, _OPEN, _CLOSE = 9, 32, 44, 58, 123, 125
_LIST, _LIST_END = 91, 93
_MINUS, _PLUS, _DOT, _ZERO, _NINE = 45, 43, 46, 48, 57
_DAYS_TO_1970 = 719468


@kernel
def skip_spaces(data: Any, at: Any, end: Any) -> Any:
    """The next byte that is neither space nor tab."""
    while at < end and (data[at] == _SPACE or data[at] == _TAB):
        at += 1
    return at


@kernel
def read_integer(data: Any, at: Any, end: Any) -> Any:
    """Digits with perhaps a minus: (value, byte behind them, digits); 0 digits if there are none or too many."""
    negative = at < end and data[at] == _MINUS
    if negative:
        at += 1
    first, value = at, np.int64(0)
    while at < end:
        digit = np.int64(data[at]) - _ZERO
        if digit < 0 or digit > 9:
            break
        value = value * 10 + digit
        at += 1
        if at - first > _MOST_DIGITS:
            return value, at, 0
    return -value if negative else value, at, at - first


@kernel
def read_real(data: Any, at: Any, end: Any) -> Any:
    """A decimal number: (value, byte behind it, 1); 0: it is none, -1: it is one for exact means."""
    negative = at < end and data[at] == _MINUS
    if negative:
        at += 1
    digits, places, value, first = 0, 0, np.int64(0), at
    while at < end and _ZERO <= data[at] <= _NINE:
        value = value * 10 + (np.int64(data[at]) - _ZERO) if digits < _MOST_DIGITS else value
        digits += 1
        at += 1
    if at == first:
        return 0.0, at, 0
    if at < end and data[at] == _DOT:
        at += 1
        begin = at
        while at < end and _ZERO <= data[at] <= _NINE:
            value = value * 10 + (np.int64(data[at]) - _ZERO) if digits < _MOST_DIGITS else value
            digits += 1
            at += 1
        places = at - begin
        if places == 0:
            return 0.0, at, 0
    exponent = np.int64(0)
    if at < end and (data[at] | 32) == 101:
        at += 1
        if at < end and data[at] == _PLUS:
            at += 1
        exponent, at, found = read_integer(data, at, end)
        if found == 0 or found > 4:
            return 0.0, at, 0
    power = exponent - places
    if digits > _MOST_DIGITS or value > _EXACT or power > 22 or power < -22:
        return 0.0, at, -1
    real = value / _POWERS[-power] if power < 0 else value * _POWERS[power]
    return -real if negative else real, at, 1


@kernel
def two_digits(data: Any, at: Any) -> Any:
    """The number that two bytes are; -1 if one is no digit."""
    tens, ones = np.int64(data[at]) - _ZERO, np.int64(data[at + 1]) - _ZERO
    return tens * 10 + ones if 0 <= tens <= 9 and 0 <= ones <= 9 else -1


@kernel
def read_date(data: Any, at: Any) -> Any:
    """Days since 1970 of ten bytes ``2026-01-31``; (days, 0) if they are no date.

    Source: H. Hinnant, "chrono-Compatible Low-Level Date Algorithms", days_from_civil.
    """
    century, year = two_digits(data, at), two_digits(data, at + 2)
    month, day = two_digits(data, at + 5), two_digits(data, at + 8)
    if century < 0 or year < 0 or data[at + 4] != _MINUS or data[at + 7] != _MINUS:
        return 0, 0
    if month < 1 or month > 12 or day < 1 or day > 31:
        return 0, 0
    year += century * 100
    if day > 28:
        leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        most = 31 - (month in (4, 6, 9, 11)) if month != 2 else 28 + leap
        if day > most:
            return 0, 0
    year -= month <= 2
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - _DAYS_TO_1970, 1


@kernel
def read_time(data: Any, at: Any, end: Any, zoned: Any, memory: Any) -> Any:
    """Microseconds since 1970 of a whole text ``2026-01-31T12:00:00.5+01:00``: (value, 1), or (0, 0).

    Args:
        zoned: a zone may be there, and a time without one is UTC; else none may.
        memory: the last date as two words of its bytes, and its microseconds; most times have that of the one before.
    """
    if end - at < 16:
        return np.int64(0), 0
    head, tail = load_u64(data, at), (np.uint64(data[at + 8]) << np.uint64(8)) | np.uint64(data[at + 9])
    if head != memory[0] or tail != memory[1]:
        days, right = read_date(data, at)
        if not right:
            return np.int64(0), 0
        memory[0], memory[1] = head, tail
        memory[2] = np.uint64(days * 86_400_000_000)
    if data[at + 10] != 84 and data[at + 10] != _SPACE:
        return np.int64(0), 0
    hour, minute, second = two_digits(data, at + 11), two_digits(data, at + 14), np.int64(0)
    if data[at + 13] != _COLON:
        return np.int64(0), 0
    at += 16
    fraction = np.int64(0)
    if at < end and data[at] == _COLON:
        if end - at < 3:
            return np.int64(0), 0
        second = two_digits(data, at + 1)
        at += 3
        if at < end and data[at] == _DOT:
            at += 1
            begin = at
            while at < end and _ZERO <= data[at] <= _NINE:
                fraction = fraction * 10 + (np.int64(data[at]) - _ZERO)
                at += 1
                if at - begin > 6:
                    return np.int64(0), 0
            if at == begin:
                return np.int64(0), 0
            for _ in range(6 - (at - begin)):
                fraction *= 10
    if hour < 0 or hour > 23 or minute < 0 or minute > 59 or second < 0 or second > 59:
        return np.int64(0), 0
    offset = np.int64(0)
    if at < end:
        if not zoned:
            return np.int64(0), 0
        if data[at] == 90:
            at += 1
        elif (data[at] == _PLUS or data[at] == _MINUS) and end - at == 6 and data[at + 3] == _COLON:
            hours, minutes = two_digits(data, at + 1), two_digits(data, at + 4)
            if hours < 0 or hours > 23 or minutes < 0 or minutes > 59:
                return np.int64(0), 0
            offset = (hours * 60 + minutes) * (-1 if data[at] == _MINUS else 1)
            at += 6
        if at != end:
            return np.int64(0), 0
    return np.int64(memory[2]) + ((hour * 60 + minute - offset) * 60 + second) * 1_000_000 + fraction, 1


@kernel
def unescape(data: Any, at: Any, to: Any, out: Any) -> Any:
    """An escape of a JSON string, from its backslash: (byte behind it, place behind what it means), or (-1, 0)."""
    if at + 1 >= data.shape[0]:
        return -1, 0
    kind = data[at + 1]
    if kind == 117:
        code, next_at = hex_code(data, at + 2)
        if code < 0 or 0xDC00 <= code <= 0xDFFF:
            return -1, 0
        if code >= 0xD800:
            if next_at + 1 >= data.shape[0] or data[next_at] != _SLASH or data[next_at + 1] != 117:
                return -1, 0
            low, next_at = hex_code(data, next_at + 2)
            if low < 0xDC00 or low > 0xDFFF:
                return -1, 0
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        if code < 0x80:
            out[to] = code
            return next_at, to + 1
        if code < 0x800:
            out[to], out[to + 1] = 0xC0 | code >> 6, 0x80 | code & 63
            return next_at, to + 2
        if code < 0x10000:
            out[to], out[to + 1], out[to + 2] = 0xE0 | code >> 12, 0x80 | code >> 6 & 63, 0x80 | code & 63
            return next_at, to + 3
        out[to], out[to + 1] = 0xF0 | code >> 18, 0x80 | code >> 12 & 63
        out[to + 2], out[to + 3] = 0x80 | code >> 6 & 63, 0x80 | code & 63
        return next_at, to + 4
    meant = 0
    if kind in (_QUOTE, _SLASH, 47):
        meant = np.int64(kind)
    elif kind == 110:
        meant = 10
    elif kind == 116:
        meant = 9
    elif kind == 114:
        meant = 13
    elif kind == 98:
        meant = 8
    elif kind == 102:
        meant = 12
    else:
        return -1, 0
    out[to] = meant
    return at + 2, to + 1


@kernel
def hex_code(data: Any, at: Any) -> Any:
    """The number that four hexadecimal digits are, and the byte behind; -1 if they are none."""
    code = np.int64(0)
    if at + 4 > data.shape[0]:
        return np.int64(-1), at
    for i in range(at, at + 4):
        digit = np.int64(data[i])
        if _ZERO <= digit <= _NINE:
            digit -= _ZERO
        elif 97 <= digit | 32 <= 102:
            digit = (digit | 32) - 87
        else:
            return np.int64(-1), at
        code = code << 4 | digit
    return code, at + 4


@kernel
def copy_string(data: Any, at: Any, to: Any, out: Any) -> Any:
    """A JSON string, from behind its quote, without escapes: (byte behind the closing quote, place behind the text).

    (-1, 0): it does not end, or holds what no string may.  ``out`` has room for eight bytes more than ``data`` has.
    """
    size = data.shape[0]
    while True:
        while at + 8 <= size:
            word = load_u64(data, at)
            quotes, slashes = word ^ _QUOTES, word ^ _SLASHES
            found = ((quotes - _ONES) & ~quotes) | ((slashes - _ONES) & ~slashes) | ((word - _SPACES) & ~word)
            found &= _HIGH
            store_u64(out, to, word)
            if found:
                passed = np.int64(trailing_zeros(found)) >> 3
                at += passed
                to += passed
                break
            at += 8
            to += 8
        else:
            while at < size and data[at] != _QUOTE and data[at] != _SLASH and data[at] >= _SPACE:
                out[to] = data[at]
                at += 1
                to += 1
            if at == size:
                return -1, 0
        if data[at] == _QUOTE:
            return at + 1, to
        if data[at] != _SLASH:
            return -1, 0
        at, to = unescape(data, at, to, out)
        if at < 0:
            return -1, 0


@kernel
def string_end(data: Any, at: Any) -> Any:
    """The closing quote of a JSON string without escapes, from behind its opening one; -1: it has some, or no end."""
    size = data.shape[0]
    while at + 8 <= size:
        word = load_u64(data, at)
        quotes, slashes = word ^ _QUOTES, word ^ _SLASHES
        found = ((quotes - _ONES) & ~quotes) | ((slashes - _ONES) & ~slashes) | ((word - _SPACES) & ~word)
        found &= _HIGH
        if found:
            at += np.int64(trailing_zeros(found)) >> 3
            return at if data[at] == _QUOTE else -1
        at += 8
    while at < size and data[at] != _QUOTE:
        if data[at] == _SLASH or data[at] < _SPACE:
            return -1
        at += 1
    return at if at < size else -1


@kernel
def is_name(data: Any, at: Any, length: Any, names: Any, begin: Any, end: Any) -> Any:
    """True if the bytes are the name of a column."""
    if end - begin != length:
        return False
    if 0 < length <= 8 and at + 8 <= data.shape[0] and begin + 8 <= names.shape[0]:
        return (load_u64(data, at) ^ load_u64(names, begin)) << np.uint64(64 - 8 * length) == 0
    same = True
    for i in range(length):
        same = same and data[at + i] == names[begin + i]
    return same


@kernel
def is_null(data: Any, at: Any, end: Any) -> Any:
    """True for ``null``."""
    return at + 4 <= end and data[at] == 110 and data[at + 1] == 117 and data[at + 2] == 108 and data[at + 3] == 108


@kernel
def read_flag(data: Any, at: Any, end: Any) -> Any:
    """``true`` or ``false``: (value, byte behind it); (-1, at) if it is neither."""
    if at + 4 <= end and data[at] == 116 and data[at + 1] == 114 and data[at + 2] == 117 and data[at + 3] == 101:
        return 1, at + 4
    if at + 5 <= end and data[at] == 102 and data[at + 1] == 97 and data[at + 2] == 108 and data[at + 3] == 115:
        return (0, at + 5) if data[at + 4] == 101 else (-1, at)
    return -1, at


@kernel
def skip_string(data: Any, at: Any, end: Any) -> Any:
    """The byte behind a JSON string, from behind its opening quote; -1 if it does not end on the line."""
    while at < end and data[at] >= _SPACE:
        if data[at] == _QUOTE:
            return at + 1
        at += 1 + (data[at] == _SLASH)
    return -1


@kernel
def skip_value(data: Any, at: Any, end: Any) -> Any:
    """The byte behind a value that nobody reads; -1 for what cannot be one.  Objects and lists are only counted."""
    if data[at] == _QUOTE:
        return skip_string(data, at + 1, end)
    if data[at] == _OPEN or data[at] == _LIST:
        depth = 0
        while at < end and data[at] >= _SPACE:
            byte = data[at]
            at += 1
            if byte == _QUOTE:
                at = skip_string(data, at, end)
                if at < 0:
                    return -1
            elif byte in (_OPEN, _LIST):
                depth += 1
            elif byte in (_CLOSE, _LIST_END):
                depth -= 1
                if depth == 0:
                    return at
        return -1
    first = at
    while at < end and data[at] != _COMMA and data[at] != _CLOSE and data[at] > _SPACE:
        at += 1
    if (at - first == 4 and is_null(data, first, at)) or read_flag(data, first, at)[1] == at > first:
        return at
    _, behind, right = read_real(data, first, at)
    return at if right and behind == at else -1


@kernel
def read_scalar(data: Any, at: Any, end: Any, kind: Any, column: Any, row: Any, numbers: Any, reals: Any, hard: Any,
                memory: Any) -> Any:  # fmt: skip
    """A number or a flag into its column: the byte behind it, -1 to give up."""
    if kind <= NATURAL:
        value, behind, digits = read_integer(data, at, end)
        first = behind - digits
        if digits == 0 or (kind == NATURAL and first > at) or (digits > 1 and data[first] == _ZERO):
            return -1
        numbers[column, row] = value
        return behind
    if kind == REAL:
        real, behind, right = read_real(data, at, end)
        first = at + (data[at] == _MINUS)
        if right == 0 or (data[first] == _ZERO and first + 1 < end and _ZERO <= data[first + 1] <= _NINE):
            return -1
        reals[column, row] = real
        if right < 0:
            count = np.int64(memory[3])
            if count == hard.shape[0]:
                return -1
            hard[count, 0], hard[count, 1], hard[count, 2], hard[count, 3] = column, row, at, behind - at
            memory[3] = count + 1
        return behind
    if kind == FLAG:
        flag, behind = read_flag(data, at, end)
        if flag < 0:
            return -1
        numbers[column, row] = flag
        return behind
    return -1


@kernel
def parse_json(data: Any, names: Any, name_ends: Any, kinds: Any, text_of: Any, ignore: Any, numbers: Any, reals: Any,
               valid: Any, texts: Any, ends: Any, hard: Any, memory: Any, scratch: Any) -> Any:  # fmt: skip
    """Lines of one JSON object each into columns; blank lines are none.

    Args:
        data: whole lines.
        names, name_ends: the columns' names side by side.
        kinds: of the columns.
        text_of: of each column, its place among those of texts and of times; -1: it is none.
        ignore: fields that are no column are passed over; else they are a reason to give up.
        memory: the last date (``read_time``), and how many doubles are ``hard``.
        scratch: by column, twice: the row in which it was last seen, which column came at each place in the row before.

    Returns:
        the rows, or ``GAVE_UP``.
    """
    size, columns, at, row = data.shape[0], kinds.shape[0], 0, 0
    seen, order = scratch[0], scratch[1]
    while at < size:
        at = skip_spaces(data, at, size)
        if at < size and data[at] == _RETURN:
            at += 1
        if at == size:
            break
        if data[at] == _NEWLINE:
            at += 1
            continue
        if data[at] != _OPEN or row == valid.shape[1]:
            return GAVE_UP
        at = skip_spaces(data, at + 1, size)
        place, found = 0, 0
        if at < size and data[at] == _CLOSE:
            at += 1
        else:
            while True:
                if at >= size or data[at] != _QUOTE:
                    return GAVE_UP
                first = at + 1
                column = order[place] if place < columns else -1
                begin = name_ends[column] if column >= 0 else 0
                length = name_ends[column + 1] - begin if column >= 0 else 0
                at = first + length
                if (
                    column < 0
                    or at >= size
                    or data[at] != _QUOTE
                    or not is_name(data, first, length, names, begin, begin + length)
                ):  # another order than in the row before
                    at = string_end(data, first)
                    if at < 0:
                        return GAVE_UP
                    column = -1
                    for c in range(columns):
                        if is_name(data, first, at - first, names, name_ends[c], name_ends[c + 1]):
                            column = c
                    if column < 0 and not ignore:
                        return GAVE_UP
                    if place < columns:
                        order[place] = column
                at = skip_spaces(data, at + 1, size)
                if at >= size or data[at] != _COLON:
                    return GAVE_UP
                at = skip_spaces(data, at + 1, size)
                if at >= size:
                    return GAVE_UP
                if column < 0 or kinds[column] == NOTHING:
                    at = skip_value(data, at, size)
                else:
                    if seen[column] == row:
                        return GAVE_UP
                    seen[column] = row
                    found += 1
                    at = read_value(data, at, size, kinds[column], column, text_of[column], row, numbers, reals, valid,
                                    texts, ends, hard, memory)  # fmt: skip
                if at < 0:
                    return GAVE_UP
                place += 1
                at = skip_spaces(data, at, size)
                if at >= size:
                    return GAVE_UP
                if data[at] == _CLOSE:
                    at += 1
                    break
                if data[at] != _COMMA:
                    return GAVE_UP
                at = skip_spaces(data, at + 1, size)
        if found < columns:
            for c in range(columns):
                if seen[c] != row:
                    valid[c, row] = 0
                    numbers[c, row] = 0
                    if kinds[c] == TEXT:
                        ends[text_of[c], row + 1] = ends[text_of[c], row]
        row += 1
        at = skip_spaces(data, at, size)
        if at < size and data[at] == _RETURN:
            at += 1
        if at < size:
            if data[at] != _NEWLINE:
                return GAVE_UP
            at += 1
    return row


@kernel
def read_value(data: Any, at: Any, end: Any, kind: Any, column: Any, text: Any, row: Any, numbers: Any, reals: Any,
               valid: Any, texts: Any, ends: Any, hard: Any, memory: Any) -> Any:  # fmt: skip
    """A JSON value into its column: the byte behind it, -1 to give up."""
    valid[column, row] = 1
    if kind == TEXT:
        begin = text * (texts.shape[0] // ends.shape[0])
        to = ends[text, row]
        if data[at] == _QUOTE:
            at, to = copy_string(data, at + 1, begin + to, texts)
            to -= begin
        elif is_null(data, at, end):
            valid[column, row] = 0
            at += 4
        else:
            return -1
        ends[text, row + 1] = to
        return at
    if data[at] == 110:
        if not is_null(data, at, end):
            return -1
        valid[column, row] = 0
        numbers[column, row] = 0
        return at + 4
    if kind <= FLAG:
        return read_scalar(data, at, end, kind, column, row, numbers, reals, hard, memory)
    if data[at] != _QUOTE:
        return -1
    closing = string_end(data, at + 1)
    if closing < 0:
        return -1
    if kind == DATE:
        value, right = read_date(data, at + 1) if closing - at == 11 else (0, 0)
    else:
        value, right = read_time(data, at + 1, closing, kind == INSTANT, memory)
    if not right:
        return -1
    numbers[column, row] = value
    return closing + 1


@kernel
def copy_field(data: Any, at: Any, end: Any, to: Any, out: Any, delimiter: Any, quote: Any) -> Any:
    """An unquoted CSV field: (byte behind it, place behind the text); (-1, 0): it holds a quote."""
    delimiters, quotes = _ONES * np.uint64(delimiter), _ONES * np.uint64(quote)
    while True:
        while at + 8 <= end:
            word = load_u64(data, at)
            fields, others = word ^ delimiters, word ^ quotes
            found = ((fields - _ONES) & ~fields) | ((others - _ONES) & ~others) | ((word - _SPACES) & ~word)
            found &= _HIGH
            store_u64(out, to, word)
            if found:
                passed = np.int64(trailing_zeros(found)) >> 3
                at += passed
                to += passed
                break
            at += 8
            to += 8
        else:
            while at < end and data[at] != delimiter and data[at] != quote and data[at] >= _SPACE:
                out[to] = data[at]
                at += 1
                to += 1
        if at == end or data[at] == delimiter or data[at] == _NEWLINE or data[at] == _RETURN:
            return at, to
        if data[at] == quote:
            return -1, 0
        out[to] = data[at]  # a control character like any other
        at += 1
        to += 1


@kernel
def copy_quoted(data: Any, at: Any, end: Any, to: Any, out: Any, quote: Any) -> Any:
    """A quoted CSV field, from behind its quote: (byte behind the closing one, place behind the text), or (-1, 0)."""
    while at < end:
        byte = data[at]
        if byte == quote:
            if at + 1 == end or data[at + 1] != quote:
                return at + 1, to
            at += 1
        elif byte == _RETURN:
            return -1, 0
        out[to] = byte
        at += 1
        to += 1
    return -1, 0


@kernel
def field_end(data: Any, at: Any, end: Any, delimiter: Any, quote: Any) -> Any:
    """The byte behind an unquoted CSV field; -1: it holds a quote."""
    while at < end and data[at] != delimiter and data[at] != _NEWLINE and data[at] != _RETURN:
        if data[at] == quote:
            return -1
        at += 1
    return at


@kernel
def read_field(data: Any, at: Any, end: Any, kind: Any, column: Any, text: Any, row: Any, delimiter: Any, quote: Any,
               numbers: Any, reals: Any, valid: Any, texts: Any, ends: Any, hard: Any, memory: Any) -> Any:  # fmt: skip
    """A CSV field into its column: the byte behind it, -1 to give up."""
    quoted = data[at] == quote if at < end else False
    empty = at == end or data[at] == delimiter or data[at] == _NEWLINE or data[at] == _RETURN
    valid[column, row] = not empty
    if kind == TEXT:
        begin = text * (texts.shape[0] // ends.shape[0])
        to = begin + ends[text, row]
        if quoted:
            at, to = copy_quoted(data, at + 1, end, to, texts, quote)
        elif not empty:
            at, to = copy_field(data, at, end, to, texts, delimiter, quote)
        ends[text, row + 1] = to - begin
        return at
    if empty:
        numbers[column, row] = 0
        return at
    if kind <= FLAG:
        if quoted:
            return -1
        if kind <= NATURAL:  # zeros may lead
            value, behind, digits = read_integer(data, at, end)
            numbers[column, row] = value
            return behind if digits and (kind == INTEGER or behind - digits == at) else -1
        return read_scalar(data, at, end, kind, column, row, numbers, reals, hard, memory)
    first = at + quoted
    if quoted:
        closing = first
        while closing < end and data[closing] != quote:
            closing += 1
        if closing == end:
            return -1
        at = closing + 1
    else:
        closing = at = field_end(data, first, end, delimiter, quote)
        if closing < 0:
            return -1
    if kind == DATE:
        value, right = read_date(data, first) if closing - first == 10 and not quoted else (0, 0)
    else:
        value, right = read_time(data, first, closing, kind == INSTANT, memory)
    numbers[column, row] = value
    return at if right else -1


@kernel
def parse_csv(data: Any, delimiter: Any, quote: Any, kinds: Any, columns: Any, text_of: Any, numbers: Any, reals: Any,
              valid: Any, texts: Any, ends: Any, hard: Any, memory: Any) -> Any:  # fmt: skip
    """Lines of CSV into columns; blank lines are none.

    Args:
        data: whole rows.
        delimiter, quote: bytes; 0 for no quote.
        kinds: of the fields of a row, ``NOTHING`` for those that nobody wants.
        columns: of each field, the column that it goes to.
        text_of: of each column, its place among the texts.
        memory: the last date (``read_time``), and how many doubles are ``hard``.

    Returns:
        the rows, or ``GAVE_UP``.
    """
    size, fields, at, row = data.shape[0], kinds.shape[0], 0, 0
    while at < size:
        if data[at] == _RETURN and at + 1 < size and data[at + 1] == _NEWLINE:
            at += 2
            continue
        if data[at] == _NEWLINE:
            at += 1
            continue
        if row == valid.shape[1]:
            return GAVE_UP
        for field in range(fields):
            kind, column = kinds[field], columns[field]
            if kind != NOTHING:
                at = read_field(data, at, size, kind, column, text_of[column], row, delimiter, quote, numbers, reals,
                                valid, texts, ends, hard, memory)  # fmt: skip
            elif at < size and data[at] == quote:
                at += 1
                while at < size and not (data[at] == quote and (at + 1 == size or data[at + 1] != quote)):
                    if data[at] == _RETURN:
                        return GAVE_UP
                    at += 1 + (data[at] == quote)
                at = at + 1 if at < size else -1
            else:
                at = field_end(data, at, size, delimiter, quote)
            if at < 0:
                return GAVE_UP
            if field + 1 < fields:
                if at >= size or data[at] != delimiter:
                    return GAVE_UP
                at += 1
        if at < size and data[at] == _RETURN:
            at += 1
            if at < size and data[at] != _NEWLINE:
                return GAVE_UP
        if at < size:
            if data[at] != _NEWLINE:
                return GAVE_UP
            at += 1
        row += 1
    return row
