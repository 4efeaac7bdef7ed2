"""Where the events of a trace stand in a picture: which of them, and from left to right how far."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cutwater.errors import ConfigError
from cutwater.trace.events import Completed, Cut, Event, MarkerSent, MarkerTaken, Recorded, Restored, Survived, Trace
from cutwater.trace.messages import Message

AROUND = 12
"""Events shown before and after the snapshot that a window is put around."""


class Window(msgspec.Struct, frozen=True):
    """Numbers of the first and the last event shown."""

    first: int
    last: int

    def has(self, number: int | None) -> bool:
        """True if the event is shown."""
        return number is not None and self.first <= number <= self.last


def window_of(trace: Trace, snapshot: int | None = None, first: int | None = None, last: int | None = None) -> Window:
    """The part of a trace to show: all of it, what is around a snapshot, or from an event to an event.

    Raises:
        ConfigError: the trace has no such snapshot, or nothing lies in the window.
    """
    count = len(trace.events)
    begin, end = 1, count
    if snapshot is not None:
        numbers = [i for i, event in enumerate(trace.events, start=1) if getattr(event, "snapshot", None) == snapshot]
        if not numbers:
            known = sorted({event.snapshot for event in trace.events if isinstance(event, Cut)})
            raise ConfigError(
                f"the trace has no snapshot {snapshot}",
                hint=f"It has: {', '.join(map(str, known)) or 'none'}.",
            )
        shown = [i for i in numbers if not isinstance(trace.events[i - 1], Restored)]
        begin, end = max(1, min(shown) - AROUND), min(count, max(shown) + AROUND)
    begin, end = first or begin, last or end
    if begin > end or begin > count:
        raise ConfigError(f"no event lies between {begin} and {end}", hint=f"The trace has {count} events.")
    return Window(max(1, begin), min(end, count))


def columns(trace: Trace, window: Window, messages: Sequence[Message], *, by_time: bool = False) -> dict[int, float]:
    """Event number -> column, counted from 0.

    Neighbours in the trace share a column unless they are of one process or joined by a message, so that the picture
    is narrow, and what is further right was never earlier.  ``by_time`` puts them where their times say instead.

    >>> from cutwater.trace.events import Header, Link, Span, Step
    >>> from cutwater.trace.messages import messages
    >>> events = (Step(0.0, "p", 1, sends=(Span("c", 0),)), Step(1.0, "q", 1), Step(2.0, "q", 1, takes=(Span("c", 0),)))
    >>> trace = Trace(Header(("p", "q"), (Link("c", "p", "q"),)), events)
    >>> columns(trace, Window(1, 3), messages(trace))
    {1: 0.0, 2: 0.0, 3: 1.0}
    """
    senders: dict[int, list[int]] = {}
    for message in messages:
        if message.sent is not None and message.taken is not None:
            senders.setdefault(message.taken, []).append(message.sent)
    found: dict[int, float] = {}
    last: dict[str, tuple[float, Event]] = {}
    now = 0.0
    for number in range(window.first, window.last + 1):
        event = trace.events[number - 1]
        if isinstance(event, Recorded | Completed):
            found[number] = now
            continue
        own = last.get(event.process)
        if own is not None and _together(own[1], event):
            found[number] = own[0]
        elif isinstance(event, Restored | Survived):
            before = trace.events[number - 2] if number > window.first else None
            shared = isinstance(before, Restored | Survived) and before.attempt == event.attempt
            found[number] = found[number - 1] if shared else now + 1
        else:
            earliest = [found[s] + 1 for s in senders.get(number, ()) if s in found]
            found[number] = max([now, *earliest, own[0] + 1 if own else 0.0])
        now = max(now, found[number])
        last[event.process] = found[number], event
    return _timed(trace, window, now) if by_time else found


def _together(before: Event, event: Event) -> bool:
    """A cut with the marker that caused it, and with the markers it sends, is one moment."""
    if isinstance(event, MarkerSent):
        return isinstance(before, Cut | MarkerSent) and before.snapshot == event.snapshot
    return isinstance(event, Cut) and isinstance(before, MarkerTaken | MarkerSent) and before.snapshot == event.snapshot


def _timed(trace: Trace, window: Window, width: float) -> dict[int, float]:
    numbers = range(window.first, window.last + 1)
    times = [trace.events[number - 1].time_ms for number in numbers]
    first, length = min(times), (max(times) - min(times)) or 1.0
    width = max(width, len(set(times)) - 1.0)
    return {number: (time - first) / length * width for number, time in zip(numbers, times, strict=True)}
