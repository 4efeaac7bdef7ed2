"""Windows of a stream: arguments of ``keyed.window("id", ...)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from cutwater.api.steps.build import Duration, duration_us
from cutwater.errors import BuildError

if TYPE_CHECKING:
    from cutwater.operators.window.kinds import Early, GlobalWindow, SessionWindow, SlidingWindow, TumblingWindow

TimeDomain: TypeAlias = Literal["event", "processing"]
"""Time that a window goes by: that of the rows, or that of the clock at which they are processed."""


def tumbling(size: Duration, *, offset: Duration = 0, time: TimeDomain = "event") -> TumblingWindow:
    """Windows of one size, side by side: ``cw.tumbling("1h")`` holds [00:00, 01:00), [01:00, 02:00) ... in UTC.

    Args:
        size: length of a window.
        offset: shift of the borders; may be negative.
        time: "processing" for windows by the clock: a row lies in the window during which it is processed.

    Raises:
        BuildError: not a duration, a size of 0, or no such time.

    >>> tumbling("1h").size_us
    3600000000
    """
    from cutwater.operators.window.kinds import TumblingWindow

    size_us = _positive_us(size, "window size", "cw.tumbling('1h')")
    offset_us = duration_us(offset, "window offset", signed=True)
    return TumblingWindow(size_us, offset_us, processing_time=_by_clock(time))


def sliding(size: Duration, every: Duration, *, offset: Duration = 0, time: TimeDomain = "event") -> SlidingWindow:
    """Windows of one size, of which one begins every so often: ``cw.sliding("1h", "5m")`` holds [00:00, 01:00),
    [00:05, 01:05) ... in UTC, and a row lies in twelve of them.

    With ``every`` above ``size`` the windows are samples, and rows between them belong to none (as in Flink): they
    count in ``rows_outside_windows``.

    Args:
        size: length of a window.
        every: from the start of a window to the start of the next; what Spark and Flink call the slide.
        offset: shift of the borders; may be negative.
        time: "processing" for windows by the clock.

    Raises:
        BuildError: not a duration, a length of 0, or no such time.

    >>> str(sliding("1h", "5m"))
    'sliding 1h, every 5m, offset 0s'
    """
    from cutwater.operators.window.kinds import SlidingWindow

    size_us = _positive_us(size, "window size", "cw.sliding('1h', '5m')")
    every_us = _positive_us(every, "every", "cw.sliding('1h', '5m')")
    offset_us = duration_us(offset, "window offset", signed=True)
    return SlidingWindow(size_us, every_us, offset_us, processing_time=_by_clock(time))


def session(gap: Duration, *, time: TimeDomain = "event") -> SessionWindow:
    """Rows of a key that follow each other within ``gap``: a session ends when nothing has come for that long.

    Rows exactly ``gap`` apart are in one session.  A late row can join two sessions; a session that has come out and
    goes on comes out again, under its new borders.

    Args:
        gap: time without rows that ends a session.
        time: "processing" for sessions by the clock.

    Raises:
        BuildError: not a duration, a gap of 0, or no such time.

    >>> session("30m").gap_us
    1800000000
    """
    from cutwater.operators.window.kinds import SessionWindow

    return SessionWindow(_positive_us(gap, "session gap", "cw.session('30m')"), processing_time=_by_clock(time))


def global_window() -> GlobalWindow:
    """One window for all of a key's rows, which ends with the input.

    Without an end, results come early or never: ``window("all", cw.global_window(), early=cw.every(rows=100))``.  It
    needs no event time.

    >>> str(global_window())
    'global'
    """
    from cutwater.operators.window.kinds import GlobalWindow

    return GlobalWindow()


def every(
    *, rows: int | None = None, event_time: Duration | None = None, processing_time: Duration | None = None
) -> Early:
    """Results of a window before its end: after one of these, counted for each key and window.

    Args:
        rows: with every so many rows since it last came out.
        event_time: when the watermark passes a multiple of this, if rows have come since.
        processing_time: when the clock passes a multiple of this, if rows have come since.  Not the same in every run.

    Raises:
        BuildError: none or several of them, or nothing above 0.

    >>> str(every(event_time="1m"))
    'every 1m of event time'
    """
    from cutwater.operators.window.kinds import Early

    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BuildError(f"every {rows!r} rows is not possible: a whole number", hint="Write cw.every(rows=100).")
    times = (
        None if time is None else _positive_us(time, name, f"cw.every({name}='1m')")
        for name, time in (("event_time", event_time), ("processing_time", processing_time))
    )
    return Early(rows, *times)


def _by_clock(time: TimeDomain) -> bool:
    if time not in get_args(TimeDomain):
        raise BuildError(f"time is 'event' or 'processing', not {time!r}")
    return time == "processing"


def _positive_us(value: Duration, name: str, example: str) -> int:
    us = duration_us(value, name)
    if us == 0:
        raise BuildError(f"{name} is 0", hint=f"Write for example {example}.")
    return us
