"""Kernels that write times and dates as texts, ``2026-01-31 12:00:00.5`` and ``2026-01-31``, of years with four digits.

Places are addresses, as in ``text_kernels``, and characters are put together as words, the first in the lowest byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.connectors.text.text_kernels import COLON, DOT, MINUS, ZERO
from cutwater.state.kernels import kernel, set_word

_TWO_ZEROS = ZERO + (ZERO << 8)
_DAYS_FROM_MARCH = 719_468 + 146_097
"""From the first of March of the year -400, from which on days are not negative, to 1970."""
FIRST_DAY, LAST_DAY = -719_528, 2_932_896
"""First of January of year 0, last of December of year 9999."""


@kernel
def quotient(number: Any, by: Any) -> Any:
    """Of numbers that are not negative: ``//`` takes care of signs, which costs more than the division."""
    return np.int64(np.uint64(number) // np.uint64(by))


@kernel
def two_characters(number: Any) -> Any:
    """A number below 100 as two digits."""
    tens = quotient(number, 10)
    return tens + (number - tens * 10 << 8) + _TWO_ZEROS


@kernel
def date_words(days: Any) -> Any:
    """The first eight characters of ``2026-01-31``, and the last two.

    Source: H. Hinnant, "chrono-Compatible Low-Level Date Algorithms", civil_from_days.
    """
    days += _DAYS_FROM_MARCH
    era = quotient(days, 146_097)
    of_era = days - era * 146_097
    leap_days = quotient(of_era, 1_460) - quotient(of_era, 36_524) + quotient(of_era, 146_096)
    year = quotient(of_era - leap_days, 365)
    of_year = of_era - (365 * year + quotient(year, 4) - quotient(year, 100))
    month = quotient(5 * of_year + 2, 153)
    day = of_year - quotient(153 * month + 2, 5) + 1
    month += 3 if month < 10 else -9
    year += (era - 1) * 400 + (month <= 2)
    century = quotient(year, 100)
    digits = two_characters(century) + (two_characters(year - century * 100) << 16) + (two_characters(month) << 40)
    return digits + (MINUS << 32) + (MINUS << 56), two_characters(day)


@kernel
def clock_word(second: Any) -> Any:
    """A second of a day as ``12:00:00``."""
    minute = quotient(second, 60)
    hour = quotient(second, 3_600)
    digits = two_characters(hour) + (two_characters(minute - hour * 60) << 24)
    return digits + (two_characters(second - minute * 60) << 48) + (COLON << 16) + (COLON << 40)


@kernel
def put_fraction(nanoseconds: Any, to: Any) -> None:
    """A dot and nine digits; 15 bytes are written."""
    two, four = quotient(nanoseconds, 10_000_000), quotient(nanoseconds, 100_000)
    six = quotient(nanoseconds, 1_000)
    word = two_characters(two) + (two_characters(four - two * 100) << 16) + (two_characters(six - four * 100) << 32)
    set_word(to, np.uint64(DOT + (word << 8)))
    last = nanoseconds - six * 1_000
    tens = quotient(last, 10)
    set_word(to + 7, np.uint64(two_characters(tens) + (ZERO + last - tens * 10 << 16)))


@kernel
def fraction_digits(nanoseconds: Any) -> Any:
    """Digits that a fraction needs: 3, 6 or 9."""
    thousands = quotient(nanoseconds, 1_000)
    if thousands * 1_000 != nanoseconds:
        return 9
    return 3 if quotient(thousands, 1_000) * 1_000 == thousands else 6


@kernel
def write_dates(days: Any, valid: Any, to: Any, ends: Any) -> bool:
    """Days since 1970 as texts.

    Args:
        valid: a byte for each row, 0 for null; empty if none is null.
        to: room for ten bytes for each row, and eight more.
        ends: receives where each text ends; one more than rows, the first is 0.

    Returns:
        False if a year does not have four digits.
    """
    at, last_day, date, of_month = to, np.int64(FIRST_DAY - 1), np.int64(0), np.int64(0)
    ends[0] = 0
    for row in range(np.uint64(days.shape[0])):
        if valid.shape[0] == 0 or valid[row]:
            day = np.int64(days[row])
            if day != last_day:
                if day < FIRST_DAY or day > LAST_DAY:
                    return False
                date, of_month = date_words(day)
                last_day = day
            set_word(at, np.uint64(date))
            set_word(at + 8, np.uint64(of_month))
            at += 10
        ends[row + np.uint64(1)] = at - to
    return True


@kernel
def write_times(
    ticks: Any, valid: Any, ticks_a_second: Any, digits: Any, shorter: Any, mark: Any, suffix: Any, to: Any, ends: Any
) -> bool:
    """Ticks since 1970 as texts.

    Args:
        ticks_a_second: a power of ten, up to 10**9.
        valid, ends: as of ``write_dates``.
        digits: of the fraction.
        shorter: a fraction gets 0, 3, 6 or 9 digits, as many as it needs.
        mark: the byte between date and time.
        suffix: up to eight characters behind each time.
        to: room for 37 bytes for each row, and 16 more.

    Returns:
        False if a year does not have four digits.
    """
    nanoseconds = 1_000_000_000 // ticks_a_second
    suffix_length = 0
    while suffix_length < 8 and (suffix >> np.uint64(8 * suffix_length)) & np.uint64(255):
        suffix_length += 1
    at, last_day, date, of_month = to, np.int64(FIRST_DAY - 1), np.int64(0), np.int64(0)
    ends[0] = 0
    for row in range(np.uint64(ticks.shape[0])):
        if valid.shape[0] == 0 or valid[row]:
            seconds = np.int64(ticks[row]) // ticks_a_second
            fraction = (np.int64(ticks[row]) - seconds * ticks_a_second) * nanoseconds
            if seconds < FIRST_DAY * 86_400 or seconds >= (LAST_DAY + 1) * 86_400:
                return False
            day = quotient(seconds - FIRST_DAY * 86_400, 86_400) + FIRST_DAY
            if day != last_day:
                date, of_month = date_words(day)
                last_day = day
            set_word(at, np.uint64(date))
            set_word(at + 8, np.uint64(of_month + (mark << 16)))
            set_word(at + 11, np.uint64(clock_word(seconds - day * 86_400)))
            at += 19
            if not shorter or fraction:
                places = digits
                if shorter:
                    places = fraction_digits(fraction)
                put_fraction(fraction, at)
                at += 1 + places
            set_word(at, suffix)
            at += suffix_length
        ends[row + np.uint64(1)] = at - to
    return True
