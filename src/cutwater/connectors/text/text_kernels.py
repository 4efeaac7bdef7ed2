"""Kernels that read a value in the bytes of a text: numbers, times, strings.

They know the plain cases only: numbers of at most 18 digits, ISO times, strings with the usual escapes.  At anything
else, be it wrong or merely rare, they give up, and whoever called them parses the text by other means
(``text_columns``).  So a kernel never has to say what is wrong, and what it accepts it must read as the other means do.

Texts and places are addresses: an array that is handed from function to function costs more than most values, since its
references are counted.  ``end`` is behind the last byte of all texts, so that words may be read up to there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import byte_at, kernel, set_byte, set_word, trailing_zeros, word_at

_MOST_DIGITS = 18
_SURELY_DOUBLE = 200
"""Numbers of so many digits are not too large for a double, be it with an exponent of two digits behind them."""
_EXACT = 1 << 53
_POWERS = 10.0 ** np.arange(23)
"""Powers of ten that are doubles: with an integer below 2**53 one multiplication or division rounds correctly."""

ONES, HIGH = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_SPACES = np.uint64(0x2020202020202020)

QUOTE, SLASH, NEWLINE, RETURN = 34, 92, 10, 13
TAB, SPACE, COMMA, COLON, OPEN, CLOSE = 9, 32, 44, 58, 123, 125
_LIST, _LIST_END = 91, 93
MINUS, _PLUS, DOT, ZERO, NINE = 45, 43, 46, 48, 57
_DAYS_TO_1970 = 719468
_DEEPEST = 60
"""Brackets within each other, of a value that nobody reads: they are remembered as bits of an integer."""


@kernel
def skip_spaces(at: Any, end: Any) -> Any:
    """The next byte that is neither space nor tab."""
    while at < end and (byte_at(at) == SPACE or byte_at(at) == TAB):
        at += 1
    return at


@kernel
def read_integer(at: Any, end: Any) -> Any:
    """Digits with perhaps a minus: (value, byte behind them, digits); 0 digits if there are none or too many."""
    negative = at < end and byte_at(at) == MINUS
    if negative:
        at += 1
    first, value = at, 0
    while at < end:
        digit = byte_at(at) - ZERO
        if digit < 0 or digit > 9:
            break
        value = value * 10 + digit
        at += 1
        if at - first > _MOST_DIGITS:
            return value, at, 0
    return -value if negative else value, at, at - first


@kernel
def read_real(at: Any, end: Any) -> Any:
    """A decimal number: (value, byte behind it, 1); 0: it is none, -1: it is one for exact means."""
    negative = at < end and byte_at(at) == MINUS
    if negative:
        at += 1
    digits, places, value, first = 0, 0, 0, at
    while at < end and ZERO <= byte_at(at) <= NINE:
        if digits < _MOST_DIGITS:
            value = value * 10 + byte_at(at) - ZERO
        digits += 1
        at += 1
    if at == first:
        return 0.0, at, 0
    if at < end and byte_at(at) == DOT:
        at += 1
        begin = at
        while at < end and ZERO <= byte_at(at) <= NINE:
            if digits < _MOST_DIGITS:
                value = value * 10 + byte_at(at) - ZERO
            digits += 1
            at += 1
        places = at - begin
        if places == 0:
            return 0.0, at, 0
    exponent = 0
    if at < end and (byte_at(at) | 32) == 101:
        at += 1
        if at < end and byte_at(at) == _PLUS:
            at += 1
        exponent, at, found = read_integer(at, end)
        if found == 0 or found > 4:
            return 0.0, at, 0
    power = exponent - places
    if digits > _MOST_DIGITS or value > _EXACT or power > 22 or power < -22:
        return 0.0, at, -1
    real = value / _POWERS[-power] if power < 0 else value * _POWERS[power]
    return -real if negative else real, at, 1


@kernel
def two_digits(at: Any) -> Any:
    """The number that two bytes are; -1 if one is no digit."""
    tens, ones = byte_at(at) - ZERO, byte_at(at + 1) - ZERO
    return tens * 10 + ones if 0 <= tens <= 9 and 0 <= ones <= 9 else -1


@kernel
def read_date(at: Any) -> Any:
    """Days since 1970 of ten bytes ``2026-01-31``; (0, 0) if they are no date.

    Source: H. Hinnant, "chrono-Compatible Low-Level Date Algorithms", days_from_civil.
    """
    century, year = two_digits(at), two_digits(at + 2)
    month, day = two_digits(at + 5), two_digits(at + 8)
    if century < 0 or year < 0 or byte_at(at + 4) != MINUS or byte_at(at + 7) != MINUS:
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
def read_time(at: Any, end: Any, zoned: Any, memory: Any) -> Any:
    """Microseconds since 1970 of a whole text ``2026-01-31T12:00:00.5+01:00``: (value, 1), or (0, 0).

    Args:
        zoned: a zone may be there, and a time without one is UTC; else none may.
        memory: two words with the bytes of the last date and one with its microseconds; most times have that date.
    """
    if end - at < 16:
        return 0, 0
    head, tail = word_at(at), word_at(at + 2)
    if head != word_at(memory) or tail != word_at(memory + 8):
        days, right = read_date(at)
        if not right:
            return 0, 0
        set_word(memory, head)
        set_word(memory + 8, tail)
        set_word(memory + 16, np.uint64(days * 86_400_000_000))
    if byte_at(at + 10) != 84 and byte_at(at + 10) != SPACE:
        return 0, 0
    hour, minute, second, fraction, offset = two_digits(at + 11), two_digits(at + 14), 0, 0, 0
    if byte_at(at + 13) != COLON:
        return 0, 0
    at += 16
    if at < end and byte_at(at) == COLON:
        if end - at < 3:
            return 0, 0
        second = two_digits(at + 1)
        at += 3
        if at < end and byte_at(at) == DOT:
            at += 1
            begin = at
            while at < end and ZERO <= byte_at(at) <= NINE:
                fraction = fraction * 10 + byte_at(at) - ZERO
                at += 1
                if at - begin > 6:
                    return 0, 0
            if at == begin:
                return 0, 0
            for _ in range(6 - (at - begin)):
                fraction *= 10
    if hour < 0 or hour > 23 or minute < 0 or minute > 59 or second < 0 or second > 59:
        return 0, 0
    if at < end:
        if not zoned:
            return 0, 0
        if byte_at(at) == 90:
            at += 1
        elif end - at == 6 and (byte_at(at) == _PLUS or byte_at(at) == MINUS) and byte_at(at + 3) == COLON:
            hours, minutes = two_digits(at + 1), two_digits(at + 4)
            if hours < 0 or hours > 23 or minutes < 0 or minutes > 59:
                return 0, 0
            offset = (hours * 60 + minutes) * (-1 if byte_at(at) == MINUS else 1)
            at += 6
        if at != end:
            return 0, 0
    midnight = np.int64(word_at(memory + 16))
    return midnight + ((hour * 60 + minute - offset) * 60 + second) * 1_000_000 + fraction, 1


@kernel
def hex_code(at: Any, end: Any) -> Any:
    """The number that four hexadecimal digits are, and the byte behind; -1 if they are none."""
    code = 0
    if at + 4 > end:
        return -1, at
    for i in range(4):
        digit = byte_at(at + i)
        if ZERO <= digit <= NINE:
            digit -= ZERO
        elif 97 <= digit | 32 <= 102:
            digit = (digit | 32) - 87
        else:
            return -1, at
        code = code << 4 | digit
    return code, at + 4


@kernel
def put_character(code: Any, to: Any) -> Any:
    """Write a code point as UTF-8; the place behind it."""
    if code < 0x80:
        set_byte(to, code)
        return to + 1
    if code < 0x800:
        set_byte(to, 0xC0 | code >> 6)
        set_byte(to + 1, 0x80 | code & 63)
        return to + 2
    if code < 0x10000:
        set_byte(to, 0xE0 | code >> 12)
        set_byte(to + 1, 0x80 | code >> 6 & 63)
        set_byte(to + 2, 0x80 | code & 63)
        return to + 3
    set_byte(to, 0xF0 | code >> 18)
    set_byte(to + 1, 0x80 | code >> 12 & 63)
    set_byte(to + 2, 0x80 | code >> 6 & 63)
    set_byte(to + 3, 0x80 | code & 63)
    return to + 4


@kernel
def unescape(at: Any, end: Any, to: Any) -> Any:
    """An escape of a JSON string, from its backslash: (byte behind it, place behind what it means), or (0, 0)."""
    if at + 1 >= end:
        return 0, 0
    kind = byte_at(at + 1)
    if kind == 117:
        code, behind = hex_code(at + 2, end)
        if code < 0 or 0xDC00 <= code <= 0xDFFF:
            return 0, 0
        if code >= 0xD800 and code < 0xE000:
            if behind + 1 >= end or byte_at(behind) != SLASH or byte_at(behind + 1) != 117:
                return 0, 0
            low, behind = hex_code(behind + 2, end)
            if low < 0xDC00 or low > 0xDFFF:
                return 0, 0
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        return behind, put_character(code, to)
    if kind in (QUOTE, SLASH, 47):
        set_byte(to, kind)
    elif kind == 110:
        set_byte(to, 10)
    elif kind == 116:
        set_byte(to, 9)
    elif kind == 114:
        set_byte(to, 13)
    elif kind == 98:
        set_byte(to, 8)
    elif kind == 102:
        set_byte(to, 12)
    else:
        return 0, 0
    return at + 2, to + 1


@kernel
def marks_in(word: Any, one: Any, other: Any) -> Any:
    """A bit for each byte of a word that is ``one``, ``other`` or below a space; only of the lowest it is certain."""
    ones, others = word ^ ONES * np.uint64(one), word ^ ONES * np.uint64(other)
    found = ((ones - ONES) & ~ones) | ((others - ONES) & ~others) | ((word - _SPACES) & ~word)
    return found & HIGH


@kernel
def copy_until(at: Any, end: Any, to: Any, one: Any, other: Any) -> Any:
    """Copy a text up to a byte that is ``one``, ``other`` or below a space: (that byte or ``end``, place behind it).

    A byte that is -1 is none; then it may stop at others, too.  Up to seven bytes behind the copy are written.
    """
    while at + 8 <= end:
        word = word_at(at)
        found = marks_in(word, one, other)
        set_word(to, word)
        if found:
            passed = np.int64(trailing_zeros(found)) >> 3
            return at + passed, to + passed
        at += 8
        to += 8
    while at < end and byte_at(at) != one and byte_at(at) != other and byte_at(at) >= SPACE:
        set_byte(to, byte_at(at))
        at += 1
        to += 1
    return at, to


@kernel
def copy_string(at: Any, end: Any, to: Any) -> Any:
    """A JSON string, from behind its quote, without escapes: (byte behind the closing quote, place behind the text).

    (0, 0): it does not end, or holds what no string may.  Up to seven bytes behind the text are written, too.
    """
    while True:
        at, to = copy_until(at, end, to, QUOTE, SLASH)
        if at < end and byte_at(at) == QUOTE:
            return at + 1, to
        if at == end or byte_at(at) != SLASH:
            return 0, 0
        at, to = unescape(at, end, to)
        if at == 0:
            return 0, 0


@kernel
def string_end(at: Any, end: Any) -> Any:
    """The closing quote of a JSON string without escapes, from behind its opening one; 0: it has some, or no end."""
    while at + 8 <= end:
        found = marks_in(word_at(at), QUOTE, SLASH)
        if found:
            at += np.int64(trailing_zeros(found)) >> 3
            return at if byte_at(at) == QUOTE else 0
        at += 8
    while at < end and byte_at(at) != QUOTE:
        if byte_at(at) == SLASH or byte_at(at) < SPACE:
            return 0
        at += 1
    return at if at < end else 0


@kernel
def is_null(at: Any, end: Any) -> Any:
    """True for ``null``."""
    return (
        at + 4 <= end
        and byte_at(at) == 110
        and byte_at(at + 1) == 117
        and byte_at(at + 2) == 108
        and byte_at(at + 3) == 108
    )


@kernel
def read_flag(at: Any, end: Any) -> Any:
    """``true`` or ``false``: (value, byte behind it); (-1, at) if it is neither."""
    if at + 4 <= end and byte_at(at) == 116:
        right = byte_at(at + 1) == 114 and byte_at(at + 2) == 117 and byte_at(at + 3) == 101
        return (1, at + 4) if right else (-1, at)
    if at + 5 <= end and byte_at(at) == 102 and byte_at(at + 1) == 97 and byte_at(at + 2) == 108:
        return (0, at + 5) if byte_at(at + 3) == 115 and byte_at(at + 4) == 101 else (-1, at)
    return -1, at


@kernel
def skip_escape(at: Any, end: Any) -> Any:
    """The byte behind an escape of a JSON string, from its backslash; 0 to give up."""
    if at + 1 >= end:
        return 0
    kind = byte_at(at + 1)
    if kind != 117:
        return at + 2 if kind in (QUOTE, SLASH, 47, 98, 102, 110, 114, 116) else 0
    code, at = hex_code(at + 2, end)
    if 0xD800 <= code < 0xDC00:
        if at + 1 >= end or byte_at(at) != SLASH or byte_at(at + 1) != 117:
            return 0
        low, at = hex_code(at + 2, end)
        return at if 0xDC00 <= low < 0xE000 else 0
    return at if code >= 0 and not 0xDC00 <= code < 0xE000 else 0


@kernel
def skip_string(at: Any, end: Any) -> Any:
    """The byte behind a JSON string, from behind its opening quote; 0 to give up."""
    while at < end:
        if at + 8 <= end:
            found = marks_in(word_at(at), QUOTE, SLASH)
            if not found:
                at += 8
                continue
            at += np.int64(trailing_zeros(found)) >> 3
        byte = byte_at(at)
        if byte == QUOTE:
            return at + 1
        if byte < SPACE:
            return 0
        at = skip_escape(at, end) if byte == SLASH else at + 1
        if at == 0:
            return 0
    return 0


@kernel
def skip_digits(at: Any, end: Any) -> Any:
    """The first byte that is no digit."""
    while at < end and ZERO <= byte_at(at) <= NINE:
        at += 1
    return at


@kernel
def skip_number(at: Any, end: Any) -> Any:
    """The byte behind a JSON number of any number of digits; 0: it is none, or perhaps too large for a double."""
    first = at + (at < end and byte_at(at) == MINUS)
    at = skip_digits(first, end)
    if at == first or at - first > _SURELY_DOUBLE or (byte_at(first) == ZERO and at > first + 1):
        return 0
    if at < end and byte_at(at) == DOT:
        first = at + 1
        at = skip_digits(first, end)
        if at == first:
            return 0
    if at < end and (byte_at(at) | 32) == 101:
        first = at + 1
        first += first < end and (byte_at(first) == _PLUS or byte_at(first) == MINUS)
        at = skip_digits(first, end)
        if at == first or at - first > 2:
            return 0
    return at


@kernel
def skip_scalar(at: Any, end: Any) -> Any:
    """The byte behind a JSON string, number or word; 0 to give up."""
    if byte_at(at) == QUOTE:
        return skip_string(at + 1, end)
    if is_null(at, end):
        return at + 4
    flag, behind = read_flag(at, end)
    return behind if flag >= 0 else skip_number(at, end)


@kernel
def skip_key(at: Any, end: Any) -> Any:
    """The first byte of a value, from its key on; 0 to give up."""
    if at >= end or byte_at(at) != QUOTE:
        return 0
    at = skip_string(at + 1, end)
    if at == 0:
        return 0
    at = skip_spaces(at, end)
    return skip_spaces(at + 1, end) if at < end and byte_at(at) == COLON else 0


@kernel
def skip_value(at: Any, end: Any) -> Any:
    """The byte behind a JSON value of any kind that nobody reads; 0 to give up."""
    depth, kinds = 0, 0  # a bit for each open bracket: 1 is an object
    while at and at < end:
        if byte_at(at) == OPEN or byte_at(at) == _LIST:
            if depth == _DEEPEST:
                return 0
            inside = byte_at(at) == OPEN
            depth, kinds = depth + 1, 2 * kinds + inside
            at = skip_spaces(at + 1, end)
            if at < end and byte_at(at) != (CLOSE if inside else _LIST_END):
                if inside:
                    at = skip_key(at, end)
                continue
        else:
            at = skip_scalar(at, end)
            if at == 0:
                return 0
        while depth:
            at = skip_spaces(at, end)
            if at >= end:
                return 0
            inside = kinds & 1
            if byte_at(at) != (CLOSE if inside else _LIST_END):
                if byte_at(at) != COMMA:
                    return 0
                at = skip_spaces(at + 1, end)
                if inside:
                    at = skip_key(at, end)
                break
            depth, kinds, at = depth - 1, kinds >> 1, at + 1
        if depth == 0:
            return at
    return 0


@kernel
def copy_field(at: Any, end: Any, to: Any, delimiter: Any, quote: Any) -> Any:
    """An unquoted CSV field: (byte behind it, place behind the text); (0, 0): it holds a quote."""
    while True:
        at, to = copy_until(at, end, to, delimiter, quote)
        if at == end or byte_at(at) == delimiter or byte_at(at) == NEWLINE or byte_at(at) == RETURN:
            return at, to
        if byte_at(at) == quote:
            return 0, 0
        set_byte(to, byte_at(at))  # a control character like any other
        at += 1
        to += 1


@kernel
def copy_quoted(at: Any, end: Any, to: Any, quote: Any) -> Any:
    """A quoted CSV field, from behind its quote: (byte behind the closing one, place behind the text), or (0, 0)."""
    while at < end:
        byte = byte_at(at)
        if byte == quote:
            if at + 1 == end or byte_at(at + 1) != quote:
                return at + 1, to
            at += 1
        elif byte == RETURN:
            return 0, 0
        set_byte(to, byte)
        at += 1
        to += 1
    return 0, 0


@kernel
def quoted_end(at: Any, end: Any, quote: Any) -> Any:
    """The byte behind a quoted CSV field, from behind its opening quote; 0: give up."""
    while at < end:
        byte = byte_at(at)
        at += 1
        if byte == RETURN:
            return 0
        if byte == quote:
            if at == end or byte_at(at) != quote:
                return at
            at += 1
    return 0


@kernel
def field_end(at: Any, end: Any, delimiter: Any, quote: Any) -> Any:
    """The byte behind an unquoted CSV field; 0: it holds a quote."""
    while at < end and byte_at(at) != delimiter and byte_at(at) != NEWLINE and byte_at(at) != RETURN:
        if byte_at(at) == quote:
            return 0
        at += 1
    return at


@kernel
def has_byte(word: Any, byte: Any) -> Any:
    """True if one of a word's bytes is this one."""
    others = word ^ ONES * np.uint64(byte)
    return (others - ONES) & ~others & HIGH != 0


@kernel
def count_byte(word: Any, byte: Any) -> Any:
    """The number of a word's bytes that are this one."""
    others = word ^ ONES * np.uint64(byte)
    marks = ~(((others & ~HIGH) + ~HIGH) | others) & HIGH
    return np.int64(((marks >> np.uint64(7)) * ONES) >> np.uint64(56))


@kernel
def skip_fields(at: Any, end: Any, count: Any, delimiter: Any, quote: Any) -> Any:
    """The byte behind so many CSV fields, and the delimiters between them; 0 to give up.

    Whole words are passed over where a row goes on and nothing is quoted.
    """
    begins = True
    while True:
        if begins and at < end and byte_at(at) == quote:
            at = quoted_end(at + 1, end, quote)
        else:
            at = field_end(at, end, delimiter, quote)
        if at == 0:
            return 0
        count -= 1
        if count == 0:
            return at
        if at >= end or byte_at(at) != delimiter:
            return 0
        at, begins = at + 1, True
        while count > 1 and at + 8 <= end:
            word = word_at(at)
            if has_byte(word, NEWLINE) or has_byte(word, RETURN) or (quote >= 0 and has_byte(word, quote)):
                break
            passed = count_byte(word, delimiter)
            if passed >= count:
                break
            at, count = at + 8, count - passed
            begins = byte_at(at - 1) == delimiter
