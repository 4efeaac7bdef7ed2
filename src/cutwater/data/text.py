"""Numbers and tables as people read them."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import zip_longest

_NARROWEST = 12
"""No column of texts is made narrower."""


def count(number: int) -> str:
    """All digits.

    >>> count(1234567)
    '1,234,567'
    """
    return f"{number:,}"


def plural(number: int, noun: str) -> str:
    """
    >>> plural(1, "file"), plural(1200, "file")
    ('1 file', '1,200 files')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rate(per_second: float) -> str:
    """Three digits of a number of rows in a second.

    >>> [rate(r) for r in (0, 7.4, 999.6, 1234, 41_500_000)]
    ['0/s', '7.4/s', '1.00 k/s', '1.23 k/s', '41.5 M/s']
    """
    value, units = float(per_second), ["", " k", " M", " G"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    digits = 0 if value >= 99.95 or value == 0 else 1 if value >= 9.995 or not units[0] else 2
    return f"{value:.{digits}f}{units[0]}/s"


def size(amount: int) -> str:
    """
    >>> size(27), size(1536), size(3 << 30)
    ('27 B', '1.5 KiB', '3.0 GiB')
    """
    value = float(amount)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def milliseconds(ms: float) -> str:
    """A short time.

    >>> [milliseconds(x) for x in (0.42, 38.2, 1234, 59_960, 125_000)]
    ['0.4 ms', '38 ms', '1.2 s', '1m 00s', '2m 05s']
    """
    if ms < 9.95:
        return f"{ms:.1f} ms"
    if ms < 999.5:
        return f"{ms:.0f} ms"
    if ms < 59_950:
        return f"{ms / 1000:.1f} s"
    return age(ms)


def age(ms: float) -> str:
    """A time of seconds to days, two units.

    >>> [age(s * 1000) for s in (-2, 7, 65, 3_700, 200_000)]
    ['0s', '7s', '1m 05s', '1h 01m', '2d 07h']
    """
    seconds = max(0, round(ms / 1000))
    if seconds < 60:
        return f"{seconds}s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}m {seconds:02}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02}m"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02}h"


def clock(elapsed_s: float) -> str:
    """
    >>> clock(7.9), clock(3_671)
    ('00:07', '1:01:11')
    """
    minutes, seconds = divmod(int(elapsed_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"


def event_time(ms: int) -> str:
    """A time of the data, UTC.

    >>> event_time(0)
    '1970-01-01 00:00:00'
    """
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def shown_width() -> int | None:
    """Columns of the terminal that standard output is; ``None`` where it is none: a file has no width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def lines_of_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), width: int | None = None
) -> list[str]:
    """Columns under their heads; those whose index is in ``right`` are numbers.

    With a ``width`` the widest texts go on below themselves, so that no line is longer, as far as that can be.

    >>> lines_of_table(["step", "rows"], [["count", "7"], ["out", "12"]], right=[1])
    ['step   rows', 'count     7', 'out      12']
    >>> lines_of_table(["step", "columns"], [["count", "key long, value double"]], width=20)
    ['step   columns', 'count  key long,', '       value double']
    """
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    if width is not None:
        widths = _narrowed(widths, right, width - 2 * (len(widths) - 1))

    def cells(row: Sequence[str]) -> list[str]:
        columns = [_folded(cell, w) for cell, w in zip(row, widths, strict=True)]
        return [
            "  ".join(
                part.rjust(w) if i in right else part.ljust(w)
                for i, (part, w) in enumerate(zip(parts, widths, strict=True))
            ).rstrip()
            for parts in zip_longest(*columns, fillvalue="")
        ]

    return [line for row in (head, *rows) for line in cells(row)]


def _narrowed(widths: Sequence[int], right: Sequence[int], room: int) -> list[int]:
    """Widths that fit into so many columns: the widest texts give first, numbers and short texts nothing."""
    fitting = list(widths)
    texts = [i for i in range(len(fitting)) if i not in right]
    while texts and (over := sum(fitting) - room) > 0:
        widest = max(texts, key=fitting.__getitem__)
        if fitting[widest] <= _NARROWEST:
            break
        least = max([_NARROWEST, *(fitting[i] for i in texts if fitting[i] < fitting[widest])])
        fitting[widest] = max(fitting[widest] - over, least)
    return fitting


def _folded(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(1, width), break_on_hyphens=False) or [""] if len(text) > width else [text]
