"""Kinds of windows: how time is cut, and early results.

All are frozen values in microseconds; rows of one key and one window are aggregated together.  A kind is a subclass of
``Window`` that says what is special about it; nobody else asks which kind a window is.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from cutwater.config import format_us, parse_duration_ms
from cutwater.data.time import MAX_SPAN_US
from cutwater.errors import BuildError, ConfigError

if TYPE_CHECKING:
    from cutwater.operators.base import Operator
    from cutwater.operators.window.spec import WindowAggregateSpec

_NEVER = 2**63 - 1
_TUMBLING = re.compile(r"tumbling (?P<size>[^,]+), offset (?P<offset>[^,]+)")
_SLIDING = re.compile(r"sliding (?P<size>[^,]+), every (?P<every>[^,]+), offset (?P<offset>[^,]+)")


class Period(NamedTuple):
    """Windows at places of their own accord: [offset + k * every, offset + k * every + size) for each whole k."""

    size_us: int
    every_us: int
    offset_us: int = 0

    @property
    def overlaps(self) -> bool:
        """True if an instant may lie in several windows."""
        return self.size_us > self.every_us

    @property
    def cut_us(self) -> int:
        """Place, from the start of a window on, where others end: each stretch of ``every`` is cut there, 0: nowhere.

        So a window is a number of whole *slices*, at most two for each ``every``, whatever the size.

        >>> Period(10, 4).cut_us, Period(12, 4).cut_us, Period(3, 10).cut_us
        (2, 0, 3)
        """
        return self.size_us % self.every_us

    @classmethod
    def parse(cls, text: str) -> Period | None:
        """The period of windows that a manifest describes by the text that ``str`` made of them; ``None``: no period.

        Manifests of today have the numbers, too; older ones knew tumbling and sliding windows.

        >>> Period.parse(str(TumblingWindow(3_600_000_000))), Period.parse(str(SessionWindow(5)))
        (Period(size_us=3600000000, every_us=3600000000, offset_us=0), None)
        """
        found = _TUMBLING.match(text) or _SLIDING.match(text)
        if found is None:
            return None
        try:
            us = {name: round(1000 * parse_duration_ms(text.lstrip("-"))) for name, text in found.groupdict().items()}
        except ConfigError:
            return None
        sign = -1 if found["offset"].startswith("-") else 1
        return cls(us["size"], us.get("every", us["size"]), sign * us["offset"])


@dataclass(frozen=True)
class Window(ABC):
    """A kind of window.  The time is that of the rows, or with ``processing_time`` that of the clock."""

    processing_time: bool = field(default=False, kw_only=True)

    @abstractmethod
    def __str__(self) -> str:
        """A text for people and for manifests: a snapshot fits a program only if it is the same."""

    @abstractmethod
    def first_close(self, times_us: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Last instant of the earliest window that a row of each time, by itself, lies in; the largest value: none."""

    @abstractmethod
    def operator(self, spec: WindowAggregateSpec) -> Operator:
        """The operator of aggregates by such windows."""

    @property
    def period(self) -> Period | None:
        """Places of the windows, if they are the same for every key."""
        return None

    @property
    def span(self) -> tuple[int, int] | None:
        """(size, offset) where each instant lies in exactly one window: then a result stands for a span of time."""
        return None

    @property
    def endless(self) -> bool:
        """True for a window of all time: it has no borders, needs no event time, knows no late rows."""
        return False

    @property
    def merges(self) -> bool:
        """True if windows of a key grow together: the state holds their end, and parts that can be put together."""
        return False

    @property
    def _clock(self) -> str:
        return ", by processing time" if self.processing_time else ""


@dataclass(frozen=True)
class PeriodicWindow(Window):
    """Windows with a period.  A kind says which one, by ``period``."""

    @property
    @abstractmethod
    def period(self) -> Period: ...

    def first_close(self, times_us: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """
        >>> SlidingWindow(10, 4).first_close(np.array([3, 12]))
        array([ 5, 13])
        """
        size_us, every_us, offset_us = self.period
        earliest = times_us - size_us + 1
        begins = earliest + (offset_us - earliest) % every_us
        return np.where(begins <= times_us, begins + size_us - 1, _NEVER)

    def operator(self, spec: WindowAggregateSpec) -> Operator:
        from cutwater.operators.window.operator import WindowAggregate  # Numba: only where rows flow
        from cutwater.operators.window.sliced_operator import SlicedWindowAggregate

        return SlicedWindowAggregate(spec) if spec.sliced else WindowAggregate(spec)


@dataclass(frozen=True)
class TumblingWindow(PeriodicWindow):
    """Windows of one size, side by side: [offset + k * size, offset + (k + 1) * size).

    >>> TumblingWindow(3_600_000_000).size_us
    3600000000
    >>> str(TumblingWindow(3_600_000_000, 60_000_000))
    'tumbling 1h, offset 1m'
    """

    size_us: int
    offset_us: int = 0

    def __post_init__(self) -> None:
        check_span("window size", self.size_us)
        _check_offset(self.offset_us, self.size_us, "size")

    @property
    def period(self) -> Period:
        return Period(self.size_us, self.size_us, self.offset_us)

    @property
    def span(self) -> tuple[int, int]:
        return self.size_us, self.offset_us

    def __str__(self) -> str:
        return f"tumbling {format_us(self.size_us)}, offset {format_us(self.offset_us)}{self._clock}"


@dataclass(frozen=True)
class SlidingWindow(PeriodicWindow):
    """Windows [offset + k * every, offset + k * every + size): they overlap if ``every`` is below ``size``.

    With ``every`` above ``size`` the windows are samples: rows between two of them belong to none (and are counted).

    >>> str(SlidingWindow(3_600_000_000, 300_000_000))
    'sliding 1h, every 5m, offset 0s'
    """

    size_us: int
    every_us: int
    offset_us: int = 0

    def __post_init__(self) -> None:
        check_span("window size", self.size_us)
        check_span("distance of windows", self.every_us)
        _check_offset(self.offset_us, self.every_us, "distance of windows")

    @property
    def period(self) -> Period:
        return Period(self.size_us, self.every_us, self.offset_us)

    def __str__(self) -> str:
        slide = f"every {format_us(self.every_us)}, offset {format_us(self.offset_us)}"
        return f"sliding {format_us(self.size_us)}, {slide}{self._clock}"


@dataclass(frozen=True)
class SessionWindow(Window):
    """Rows of a key that follow each other within ``gap``: [first, last + gap).

    Two rows that are exactly ``gap`` apart are in one session, as in Flink and Spark.

    >>> str(SessionWindow(1_800_000_000)), str(SessionWindow(1_800_000_000, processing_time=True))
    ('session, gap 30m', 'session, gap 30m, by processing time')
    """

    gap_us: int

    def __post_init__(self) -> None:
        check_span("session gap", self.gap_us)

    def first_close(self, times_us: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return times_us + (self.gap_us - 1)

    def operator(self, spec: WindowAggregateSpec) -> Operator:
        from cutwater.operators.window.session_operator import SessionAggregate  # Numba: only where rows flow

        return SessionAggregate(spec)

    @property
    def merges(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"session, gap {format_us(self.gap_us)}{self._clock}"


@dataclass(frozen=True)
class GlobalWindow(Window):
    """One window for all of time, by no time at all: it ends with the input.

    >>> str(GlobalWindow())
    'global'
    """

    def first_close(self, times_us: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.full(len(times_us), _NEVER, np.int64)

    def operator(self, spec: WindowAggregateSpec) -> Operator:
        from cutwater.operators.window.operator import WindowAggregate  # Numba: only where rows flow

        return WindowAggregate(spec)

    @property
    def endless(self) -> bool:
        return True

    def __str__(self) -> str:
        return "global"


@dataclass(frozen=True)
class Early:
    """Results of a window before its end: exactly one of these.

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
            check_span("distance of early results", given[0])

    def __str__(self) -> str:
        if self.rows is not None:
            return f"every {self.rows} rows"
        if self.event_time_us is not None:
            return f"every {format_us(self.event_time_us)} of event time"
        return f"every {format_us(self.processing_time_us or 0)} of processing time"


def check_span(what: str, span_us: int) -> None:
    """Refuse a length that is not above 0, or that leaves 64 bits when it is added to a time."""
    if not 0 < span_us <= MAX_SPAN_US:
        raise BuildError(f"{what} {span_us} us is not between 1 and {MAX_SPAN_US}")


def _check_offset(offset_us: int, every_us: int, what: str) -> None:
    if abs(offset_us) >= every_us:
        raise BuildError(f"window offset {offset_us} us is not below the {what}, {every_us} us")
