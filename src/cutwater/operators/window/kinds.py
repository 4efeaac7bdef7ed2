"""How time is cut into windows, and when a window comes out before its end.

All are frozen values in microseconds; rows of one key and one window are aggregated together.  The time is that of the
rows, or with ``processing_time`` that of the clock when they are processed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cutwater.config import format_us
from cutwater.data.time import MAX_SPAN_US
from cutwater.errors import BuildError

_NEVER = 2**63 - 1


@dataclass(frozen=True)
class TumblingWindow:
    """Windows of one size, side by side: [offset + k * size, offset + (k + 1) * size).

    >>> TumblingWindow(3_600_000_000).size_us
    3600000000
    >>> str(TumblingWindow(3_600_000_000, 60_000_000))
    'tumbling 1h, offset 1m'
    """

    size_us: int
    offset_us: int = 0
    processing_time: bool = False

    def __post_init__(self) -> None:
        _check_span("window size", self.size_us)
        _check_offset(self.offset_us, self.size_us, "size")

    @property
    def every_us(self) -> int:
        """From the start of a window to the start of the next."""
        return self.size_us

    def __str__(self) -> str:
        return f"tumbling {format_us(self.size_us)}, offset {format_us(self.offset_us)}{_clock(self.processing_time)}"


@dataclass(frozen=True)
class SlidingWindow:
    """Windows [offset + k * every, offset + k * every + size): they overlap if ``every`` is below ``size``.

    With ``every`` above ``size`` the windows are samples: rows between two of them belong to none (and are counted).

    >>> str(SlidingWindow(3_600_000_000, 300_000_000))
    'sliding 1h, every 5m, offset 0s'
    """

    size_us: int
    every_us: int
    offset_us: int = 0
    processing_time: bool = False

    def __post_init__(self) -> None:
        _check_span("window size", self.size_us)
        _check_span("distance of windows", self.every_us)
        _check_offset(self.offset_us, self.every_us, "distance of windows")

    @property
    def cut_us(self) -> int:
        """Where, from the start of a window on, others end: each stretch of ``every`` is cut there, 0 for nowhere.

        So a window is a number of whole *slices*, at most two for each ``every``, whatever the size.

        >>> SlidingWindow(10, 4).cut_us, SlidingWindow(12, 4).cut_us, SlidingWindow(3, 10).cut_us
        (2, 0, 3)
        """
        return self.size_us % self.every_us

    def __str__(self) -> str:
        slide = f"every {format_us(self.every_us)}, offset {format_us(self.offset_us)}"
        return f"sliding {format_us(self.size_us)}, {slide}{_clock(self.processing_time)}"


@dataclass(frozen=True)
class SessionWindow:
    """Rows of a key that follow each other within ``gap``: [first, last + gap).

    Two rows that are exactly ``gap`` apart are in one session, as in Flink and Spark.

    >>> str(SessionWindow(1_800_000_000)), str(SessionWindow(1_800_000_000, processing_time=True))
    ('session, gap 30m', 'session, gap 30m, by processing time')
    """

    gap_us: int
    processing_time: bool = False

    def __post_init__(self) -> None:
        _check_span("session gap", self.gap_us)

    def __str__(self) -> str:
        return f"session, gap {format_us(self.gap_us)}{_clock(self.processing_time)}"


@dataclass(frozen=True)
class GlobalWindow:
    """One window for all of time: it ends with the input.

    >>> str(GlobalWindow())
    'global'
    """

    @property
    def processing_time(self) -> bool:
        """It goes by no time at all."""
        return False

    def __str__(self) -> str:
        return "global"


Window: TypeAlias = TumblingWindow | SlidingWindow | SessionWindow | GlobalWindow


def first_close(window: Window, times_us: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The last instant of the earliest window that a row of each time lies in, by itself; the largest value if none.

    >>> first_close(SlidingWindow(10, 4), np.array([3, 12])), first_close(SessionWindow(5), np.array([3]))
    (array([ 5, 13]), array([7]))
    """
    if isinstance(window, SessionWindow):
        return times_us + (window.gap_us - 1)
    if isinstance(window, GlobalWindow):
        return np.full(len(times_us), _NEVER, np.int64)
    earliest = times_us - window.size_us + 1
    begins = earliest + (window.offset_us - earliest) % window.every_us
    return np.where(begins <= times_us, begins + window.size_us - 1, _NEVER)


def is_window(value: object) -> bool:
    """Whether a value says how time is cut."""
    return isinstance(value, TumblingWindow | SlidingWindow | SessionWindow | GlobalWindow)


@dataclass(frozen=True)
class Early:
    """When a window comes out before its end: exactly one of these.

    Args:
        rows: whenever this many rows of the key have come since it last came out.
        event_time_us: whenever the watermark passes a multiple of this, if rows have come since it last came out.
        processing_time_us: the same of the clock.

    >>> str(Early(rows=100)), str(Early(event_time_us=60_000_000))
    ('every 100 rows', 'every 1m of event time')
    """

    rows: int | None = None
    event_time_us: int | None = None
    processing_time_us: int | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.rows, self.event_time_us, self.processing_time_us) if v is not None]
        if len(given) != 1:
            raise BuildError(
                f"early results need one of rows, event_time and processing_time, not {len(given)} of them",
                hint="Write for example cw.every(rows=100) or cw.every(event_time='1m').",
            )
        if self.rows is not None and not 0 < self.rows < 2**62:
            raise BuildError(f"every {self.rows} rows is not possible: at least 1")
        if self.rows is None:
            _check_span("distance of early results", given[0])

    def __str__(self) -> str:
        if self.rows is not None:
            return f"every {self.rows} rows"
        if self.event_time_us is not None:
            return f"every {format_us(self.event_time_us)} of event time"
        return f"every {format_us(self.processing_time_us or 0)} of processing time"


def _clock(processing_time: bool) -> str:
    return ", by processing time" if processing_time else ""


def _check_span(what: str, span_us: int) -> None:
    if not 0 < span_us <= MAX_SPAN_US:
        raise BuildError(f"{what} {span_us} us is not between 1 and {MAX_SPAN_US}")


def _check_offset(offset_us: int, period_us: int, what: str) -> None:
    if abs(offset_us) >= period_us:
        raise BuildError(f"window offset {offset_us} us is not below the {what}, {period_us} us")
