"""Space-time diagrams: processes as lines from left to right, messages as arrows, a snapshot as a line that cuts them.

What belongs to a snapshot has its colour: the cut, the markers' arrival, and every message that crosses the cut, which
is the recorded state of its channel.  A message that crosses the cut backwards, sent after it and taken before it, is
what must never be; it is drawn in another colour, with a cross.

>>> from cutwater.trace.events import *
>>> header = Header(("p", "q"), (Link("c", "p", "q"),))
>>> steps = (Step(0.0, "p", 1, sends=(Span("c", 0),)), Cut(1.0, "p", 1, 7), Cut(1.0, "q", 1, 7))
>>> picture = diagram(Trace(header, (*steps, Step(2.0, "q", 1, takes=(Span("c", 0),)))))
>>> 'class="message s0"' in picture  # it crosses the cut of the first snapshot
True
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise

import msgspec

from cutwater.errors import ConfigError
from cutwater.trace.events import (
    Committed,
    Completed,
    Crashed,
    Cut,
    Event,
    MarkerSent,
    MarkerTaken,
    Recorded,
    Restored,
    Span,
    Step,
    Survived,
    Trace,
)
from cutwater.trace.svg import COLOURS, FONT, STYLE, Canvas

TOP, LINE_HEIGHT = 34.0, 17.0
LABELLED = 40
"""Up to so many messages carry their contents."""
STATED = 16
"""Up to so many steps carry their states."""
STATE_LETTERS = 12


def diagram(
    trace: Trace,
    *,
    snapshot: int | None = None,
    first: int | None = None,
    last: int | None = None,
    by_time: bool = False,
    notes: Sequence[str] = (),
) -> str:
    """A picture of a trace as SVG, for light and dark backgrounds.

    Args:
        snapshot: show only what is around this one.
        first, last: numbers of events to begin and end with (the first of a trace is 1).
        by_time: place events by their times, not one after the other.
        notes: lines below the picture, such as the verdict of a checker.

    Raises:
        ConfigError: there is nothing to show.
    """
    window = window_of(trace, snapshot, first, last)
    shown = {id: line for id, line in cut_lines(trace).items() if snapshot is None or id == snapshot}
    return _Picture(trace, window, list(shown.values()), by_time).draw(notes)


class _Picture:
    def __init__(self, trace: Trace, window: Window, cuts: list[CutLine], by_time: bool) -> None:
        self.trace, self.window = trace, window
        self.messages = messages(trace)
        self.columns = columns(trace, window, self.messages, by_time=by_time)
        self.cuts = [c for c in cuts if any(window.has(number) for number in c.cuts.values())]
        self.colours = {c.snapshot: f"s{i % len(COLOURS)}" for i, c in enumerate(self.cuts)}
        names = trace.header.processes
        width = max(self.columns.values()) + 1
        self.gap = 58.0 if width <= 16 else 42.0 if width <= 30 else 24.0
        self.row = 84.0 if len(names) <= 4 else 62.0
        letters = max(max(len(name), 0.8 * len(self._first_state(name))) for name in names)
        self.left = 34.0 + FONT * 0.62 * letters
        self.top = TOP + (24.0 if trace.header.title else 0.0)
        self.y = {name: self.top + 14.0 + i * self.row for i, name in enumerate(names)}
        self.right = self.left + 24.0 + width * self.gap
        self.bottom = self.top + (len(names) - 1) * self.row + 48.0
        self.links = {link.name: link for link in trace.header.channels}
        self.canvas = Canvas()
        self.used: set[str] = set()
        """Signs that the legend must explain."""

    def draw(self, notes: Sequence[str]) -> str:
        title = self.trace.header.title
        if title:
            self.canvas.text(self.left - 12, 24, title, "title")
        self._past()
        self._lines()
        for cut in self.cuts:
            self._bands(cut)
        for cut in self.cuts:
            self._cut(cut)
        for message in self.messages:
            self._message(message)
        for number in range(self.window.first, self.window.last + 1):
            event = self.trace.events[number - 1]
            if event.process in self.y:
                self._event(number, event)
        width, height = self._below(notes)
        return self.canvas.svg(width, height, style=STYLE, title=title or "Space-time diagram")

    # ------------------------------------------------------------------------------------------------------- places

    def x(self, number: int) -> float:
        return self.left + 24.0 + self.columns[number] * self.gap

    def cut_x(self, cut: CutLine, process: str) -> float:
        """Place at which a cut crosses the line of a process: at its event, or outside of the window."""
        number = cut.cuts.get(process)
        if number is None or number > self.window.last:
            return self.right
        if number < self.window.first:
            return self.left
        return self.x(number)

    # ------------------------------------------------------------------------------------------------------- layers

    def _past(self) -> None:
        """The past of a single cut is tinted: what lies in it is in the snapshot."""
        if len(self.cuts) != 1 or len(self.cuts[0].cuts) < len(self.y):
            return
        points = self._cut_points(self.cuts[0])
        d = f"M{self.left:.1f} {points[0][1]:.1f}L{points[0][0]:.1f} {points[0][1]:.1f}"
        for (x1, y1), (x2, y2) in pairwise(points):
            middle = (y1 + y2) / 2
            d += f"C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}"
        self.canvas.path(f"{d}L{self.left:.1f} {points[-1][1]:.1f}Z", "past " + self.colours[self.cuts[0].snapshot])

    def _lines(self) -> None:
        for process, y in self.y.items():
            self.canvas.text(self.left - 12, y + 4, process, "process", "end")
            state = self._first_state(process)
            if state:
                self.canvas.text(self.left - 12, y + 21, state, "state", "end")
            begin, down = self.left, False
            for number in range(self.window.first, self.window.last + 1):
                event = self.trace.events[number - 1]
                if event.process == process and isinstance(event, Crashed | Restored):
                    self.canvas.line(begin, y, self.x(number), y, "life down" if down else "life")
                    begin, down = self.x(number), isinstance(event, Crashed)
            self.canvas.line(begin, y, self.right, y, "life down" if down else "life")
            self.canvas.head(self.right + 6, y, 0.0, "life")

    def _first_state(self, process: str) -> str:
        """State that the process begins with, if states are shown at all."""
        steps = [e for e in self.trace.events if isinstance(e, Step)]
        own = [e for e in steps if e.process == process]
        first = own[0].before if own and self.window.first == 1 and len(steps) <= STATED else ""
        return first if len(first) <= STATE_LETTERS else ""

    def _bands(self, cut: CutLine) -> None:
        """From the first marker to the cut a process waits; from the cut to the last marker it records."""
        colour = self.colours[cut.snapshot]
        markers: dict[str, list[int]] = {}
        recorders: set[str] = set()
        for number in range(self.window.first, self.window.last + 1):
            event = self.trace.events[number - 1]
            if isinstance(event, MarkerTaken) and event.snapshot == cut.snapshot:
                markers.setdefault(event.process, []).append(number)
            elif isinstance(event, Recorded) and event.snapshot == cut.snapshot:
                recorders.add(event.process)
        for process, numbers in markers.items():
            at, y = self.cut_x(cut, process), self.y[process]
            begin, end = self.x(numbers[0]), self.x(numbers[-1])
            if begin < at:
                self.used.add("waits")
                self.canvas.rect(begin, y - 6, at - begin, 12, f"waits {colour}", "waits for the other markers")
            if end > at and process in recorders:
                self.used.add("records")
                self.canvas.rect(at, y - 6, end - at, 12, f"records {colour}", "records its input channels")

    def _cut_points(self, cut: CutLine) -> list[tuple[float, float]]:
        inner = [(self.cut_x(cut, p), y) for p, y in self.y.items() if p in cut.cuts]
        return [(inner[0][0], inner[0][1] - 26), *inner, (inner[-1][0], inner[-1][1] + 26)]

    def _cut(self, cut: CutLine) -> None:
        colour, points = self.colours[cut.snapshot], self._cut_points(cut)
        self.canvas.polyline(points, f"cut {colour}", f"snapshot {cut.snapshot}")
        if len(self.cuts) > 1:
            self.canvas.text(points[0][0], points[0][1] - 4, f"{cut.snapshot}", f"name {colour}", "middle")
        for process in cut.cuts:
            if self.window.has(cut.cuts[process]):
                x, y = self.cut_x(cut, process), self.y[process]
                self.canvas.rect(x - 5, y - 5, 10, 10, f"knot {colour}", f"{process} records its own state")

    def _message(self, message: Message) -> None:
        link = self.links[message.channel]
        sent, taken = message.sent, message.taken
        if not (self.window.has(sent) or self.window.has(taken)):
            return
        y1, y2 = self.y[link.source], self.y[link.target]
        x1 = self.x(sent) if sent in self.columns else self._start(message)
        lost = taken is None
        x2 = self.x(taken) if taken in self.columns else self.right if taken else x1 + self.gap * 0.8
        if lost:
            y2 = y1 + (y2 - y1) * 0.4
        cls, text = self._kind(message), self._text(message)
        if message.snapshot is not None:
            cls = "marker"
        self.used.add(cls)
        bow = 26.0 if link.source == link.target else 0.0
        self.canvas.arrow(x1, y1, x2, y2, f"{cls} lost" if lost else cls, f"{link.name}: {text}", bow)
        if "backwards" in cls:
            self.canvas.text((x1 + x2) / 2, (y1 + y2) / 2 + 5, "✕", "wrong", "middle")
        if message.snapshot is None and text and len(self.messages) <= LABELLED:
            at = 0.42 if y2 >= y1 else 0.55
            x, y = x1 + (x2 - x1) * at, y1 + (y2 - y1) * at - bow
            self.canvas.text(x - 5, y + (4 if y2 != y1 else -4), text, f"label {cls}", "end")

    def _start(self, message: Message) -> float:
        """Begin of the arrow of a message that was sent outside of the window, or out of a restored snapshot."""
        taken = message.taken or self.window.first
        for number in range(min(taken, self.window.last), self.window.first - 1, -1):
            event = self.trace.events[number - 1]
            if message.sent is None and isinstance(event, Restored) and event.attempt == message.attempt:
                return self.x(number)
        return self.left

    def _kind(self, message: Message) -> str:
        """Class of the arrow: it crosses a cut, crosses one backwards, or none."""
        link = self.links[message.channel]
        for cut in self.cuts:
            if len(cut.cuts) < len(self.y):
                continue
            at_source, at_target = cut.cuts[link.source], cut.cuts[link.target]
            if message.sent is None:  # delivered again from a snapshot
                return "message again"
            before, after = message.sent < at_source, message.taken is None or message.taken > at_target
            rows = range(message.first, message.first + message.count)
            recorded = any(row in cut.rows.get(message.channel, ()) for row in rows)
            if not before and not after:
                return "message backwards"
            if before and after and not message.dropped and self._attempt_of(at_target) == message.attempt:
                return f"message {self.colours[cut.snapshot]}" if recorded or not cut.complete else "message missed"
            if not before and recorded and self._attempt_of(at_target) == message.attempt:
                return "message extra"
        return "message"

    def _attempt_of(self, number: int) -> int:
        return self.trace.events[number - 1].attempt

    def _text(self, message: Message) -> str:
        values = [value for value in message.values if value]
        if not values or sum(map(len, values)) > 18:
            return f"×{message.count}" if message.count > 1 else ""
        return ", ".join(values)

    def _event(self, number: int, event: Event) -> None:
        x, y = self.x(number), self.y[event.process]
        match event:
            case Step():
                tip = f"event {number}" + (f": {event.before} → {event.after}" if event.after else "")
                self.canvas.circle(x, y, 4.5 if self.gap > 30 else 3.0, "event", tip)
                if event.label:
                    self.canvas.text(x + 6, y - 9, event.label, "event-name")
                steps = sum(isinstance(e, Step) for e in self.trace.events)
                if event.after and steps <= STATED and len(event.after) <= STATE_LETTERS:
                    self.canvas.text(x, y + 21, event.after, "state", "middle")
            case Crashed():
                _cross(self.canvas, x, y, 7)
            case Restored():
                self.canvas.rect(x - 4, y - 8, 8, 16, "restored", "restored")
            case Survived():
                self.canvas.circle(x, y, 6, "survived", "goes on as it is")
            case Committed():
                self.canvas.path(f"M{x - 5:.1f} {y:.1f}{TICK}", "committed", f"commits snapshot {event.snapshot}")
            case Cut() if not any(c.snapshot == event.snapshot for c in self.cuts):
                self.canvas.rect(x - 3, y - 3, 6, 6, "other", f"snapshot {event.snapshot}")
            case _:
                return

    # -------------------------------------------------------------------------------------------------------- below

    def _below(self, notes: Sequence[str]) -> tuple[float, float]:
        """Legend, recorded states and notes; the size of the whole."""
        y = self.bottom + 16
        width = self.right + 30
        for event in self.trace.events[self.window.first - 1 : self.window.last]:
            if event.process in self.y:
                self.used.add(type(event).__name__)
        y = legend(self.canvas, self.used, self.left - 12, y, max(width - self.left, 420.0))
        width = max(width, self.left + FONT * 0.66 * len(self.trace.header.title))
        texts = [(line, f"note {self.colours[c.snapshot]}") for c in self.cuts for line in captions(c)]
        letters = max(72, int((width - self.left) / (FONT * 0.56)))
        texts += [(line, "note") for note in notes for line in wrapped(note, letters)]
        for text, cls in texts:
            self.canvas.text(self.left - 12, y, text, cls)
            width = max(width, self.left + FONT * (0.64 if cls != "note" else 0.56) * len(text) + 10)
            y += LINE_HEIGHT
        return max(width, 480.0), y + 2


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


ITEMS_SHOWN = 8
TICK = "l4 5l8 -11"
LETTER = 6.6
"""Width of a letter of the legend, in pixels."""


def captions(cut: CutLine) -> list[str]:
    """A snapshot in words: the states of its processes, then what its channels hold.

    >>> captions(CutLine(1, {"p": 1, "q": 2}, {"p": "idle", "q": ""}, {"c": ("token",)}))
    ['Snapshot 1: p = idle; channel c holds token']
    """
    states = [f"{process} = {state}" for process, state in cut.states.items() if _readable(state)]
    contents = [f"channel {name} holds {_short(rows)}" for name, rows in sorted(cut.recorded.items()) if rows]
    contents = contents or ["all channels are empty"]
    parts = [", ".join(states)] if states and len(states) <= ITEMS_SHOWN else []
    more = [f"and {len(contents) - ITEMS_SHOWN} other channels"] if len(contents) > ITEMS_SHOWN else []
    text = "; ".join([*parts, *contents[:ITEMS_SHOWN], *more])
    return wrapped(f"Snapshot {cut.snapshot}: {text}", 96)


def _readable(state: str) -> bool:
    """Not empty, not long, no digest."""
    return 0 < len(state) <= 24 and not (len(state) > 9 and state.isdigit())


def wrapped(text: str, letters: int) -> list[str]:
    """Lines of at most so many letters.

    >>> wrapped("one two three", 8)
    ['one two', '   three']
    """
    return textwrap.wrap(text, letters, subsequent_indent="   ", break_long_words=False)


def _short(rows: tuple[str, ...]) -> str:
    shown = ", ".join(rows[:ITEMS_SHOWN])
    return f"{shown} and {len(rows) - ITEMS_SHOWN} more" if len(rows) > ITEMS_SHOWN else shown


def legend(canvas: Canvas, used: Collection[str], x: float, y: float, width: float) -> float:
    """Draw the signs that the picture uses, with their meaning; the y of what comes below.

    Args:
        used: kinds of events, and classes of arrows and bands.
    """
    used = {*used, *("crossing" for kind in used if kind.startswith("message s"))}
    signs: dict[str, tuple[str, Callable[[float, float], None]]] = {
        "Step": ("event", lambda x, y: canvas.circle(x + 9, y - 4, 4, "event")),
        "message": ("message", lambda x, y: _arrow(canvas, x, y, "message")),
        "marker": ("marker", lambda x, y: _arrow(canvas, x, y, "marker")),
        "Cut": ("cut", lambda x, y: canvas.line(x + 9, y - 11, x + 9, y + 3, "cut s0")),
        "crossing": ("crosses the cut", lambda x, y: _arrow(canvas, x, y, "message s0")),
        "message missed": ("crosses, not recorded", lambda x, y: _arrow(canvas, x, y, "message missed")),
        "message extra": ("recorded, does not cross", lambda x, y: _arrow(canvas, x, y, "message extra")),
        "message backwards": ("against the cut", lambda x, y: _arrow(canvas, x, y, "message backwards")),
        "waits": ("waits for markers", lambda x, y: canvas.rect(x, y - 10, 26, 12, "waits s0")),
        "records": ("records its inputs", lambda x, y: canvas.rect(x, y - 10, 26, 12, "records s0")),
        "Crashed": ("crash", lambda x, y: _cross(canvas, x + 9, y - 4, 5)),
        "Restored": ("restored", lambda x, y: canvas.rect(x + 5, y - 12, 8, 16, "restored")),
        "Survived": ("goes on as it is", lambda x, y: canvas.circle(x + 9, y - 4, 6, "survived")),
        "message again": ("delivered again", lambda x, y: _arrow(canvas, x, y, "message again")),
        "Committed": ("output committed", lambda x, y: canvas.path(f"M{x + 2:.1f} {y - 4:.1f}{TICK}", "committed")),
    }
    at = x
    for text, draw in (sign for kind, sign in signs.items() if kind in used):
        needed = 32 + LETTER * len(text) + 18
        if at + needed > x + width and at > x:
            at, y = x, y + 18
        draw(at, y)
        canvas.text(at + 32, y, text, "legend")
        at += needed
    return y + 24


def _arrow(canvas: Canvas, x: float, y: float, cls: str) -> None:
    canvas.arrow(x, y - 4, x + 26, y - 4, cls)


def _cross(canvas: Canvas, x: float, y: float, arm: float) -> None:
    for sign in (1, -1):
        canvas.line(x - arm, y - arm * sign, x + arm, y + arm * sign, "crash")


# ---------------------------------------------------------------------------------- which event took what which sent


class Message(msgspec.Struct, frozen=True):
    """Rows that went from one event to another, or one marker.

    ``sent`` and ``taken`` are numbers of events (the first of a trace is 1); ``None``: never taken, or sent in an
    earlier attempt and delivered again from a snapshot.  ``snapshot`` is set for markers only.
    """

    channel: str
    first: int
    count: int
    sent: int | None
    taken: int | None
    values: tuple[str, ...] = ()
    snapshot: int | None = None
    attempt: int = 1
    dropped: bool = False
    """Its taker had taken these rows before it was sent, in an earlier attempt that the taker survived."""


class CutLine(msgspec.Struct, frozen=True):
    """Line of a snapshot through the processes, and what the snapshot holds."""

    snapshot: int
    cuts: dict[str, int]
    """Process -> number of its cut's event."""
    states: dict[str, str]
    recorded: dict[str, tuple[str, ...]]
    """Channel -> its recorded rows: printable where traced, else their numbers.  Empty ones are left out."""
    rows: dict[str, set[int]] = {}
    """Channel -> numbers of its recorded rows."""
    complete: bool = False


def messages(trace: Trace) -> list[Message]:
    """All rows and markers of a trace, rows with one sender and one taker as one message.

    >>> from cutwater.trace.events import Header, Link, Span
    >>> events = (Step(0.0, "p", 1, sends=(Span("c", 0, 3),)), Step(1.0, "q", 1, takes=(Span("c", 0, 2),)))
    >>> [(m.first, m.count, m.taken) for m in messages(Trace(Header(("p", "q"), (Link("c", "p", "q"),)), events))]
    [(0, 2, 2), (2, 1, None)]
    """
    found: list[Message] = []
    waiting: dict[tuple[str, int], tuple[int, int, str]] = {}  # (channel, row) -> sender's event, attempt, content
    markers: dict[tuple[str, int], tuple[int, int, int]] = {}
    taken: dict[str, int] = {}
    again: set[tuple[str, int]] = set()  # rows sent once more to a process that has taken them
    targets = {link.name: link.target for link in trace.header.channels}
    for number, event in enumerate(trace.events, start=1):
        if isinstance(event, Step):
            for channel, row, value in _rows(event.takes):
                taken[channel] = row + 1
                sent, attempt, content = waiting.pop((channel, row), (None, event.attempt, value))
                if attempt != event.attempt:  # from a snapshot; the first sending was never taken
                    found.append(Message(channel, row, 1, sent, None, (content,), attempt=attempt))
                    sent = None
                found.append(Message(channel, row, 1, sent, number, (content or value,), attempt=event.attempt))
            for channel, row, value in _rows(event.sends):
                old = waiting.pop((channel, row), None)
                if old is not None:
                    found.append(Message(channel, row, 1, old[0], None, (old[2],), attempt=old[1]))
                waiting[channel, row] = number, event.attempt, value
                if row < taken.get(channel, 0):
                    again.add((channel, row))
        elif isinstance(event, Restored):
            taken |= {name: 0 for name, target in targets.items() if target == event.process}
        elif isinstance(event, MarkerSent):
            markers[event.channel, event.snapshot] = number, event.position, event.attempt
        elif isinstance(event, MarkerTaken):
            sent, position, _ = markers.pop((event.channel, event.snapshot), (None, event.position, 0))
            marker = Message(event.channel, position, 0, sent, number, (), event.snapshot, event.attempt)
            found.append(marker)
    for (channel, row), (sent, attempt, value) in waiting.items():
        dropped = trace.header.fifo and (channel, row) in again
        found.append(Message(channel, row, 1, sent, None, (value,), attempt=attempt, dropped=dropped))
    for (channel, snapshot), (sent, position, attempt) in markers.items():
        found.append(Message(channel, position, 0, sent, None, (), snapshot, attempt))
    return _joined(found)


def _rows(spans: Sequence[Span]) -> Iterator[tuple[str, int, str]]:
    for span in spans:
        values = span.values or ("",) * span.count
        for row, value in zip(range(span.first, span.end), values, strict=False):
            yield span.channel, row, value


def _joined(found: list[Message]) -> list[Message]:
    """Neighbouring rows between the same two events become one message."""
    joined: list[Message] = []
    last: dict[tuple[object, ...], int] = {}
    for message in found:
        key = message.channel, message.sent, message.taken, message.attempt, message.dropped
        at = last.get(key)
        if at is None or message.snapshot is not None or joined[at].first + joined[at].count != message.first:
            last[key] = len(joined)
            joined.append(message)
        else:
            before = joined[at]
            values = before.values + message.values
            joined[at] = msgspec.structs.replace(before, count=before.count + message.count, values=values)
    return joined


def cut_lines(trace: Trace) -> dict[int, CutLine]:
    """Every snapshot of a trace in which at least one process recorded itself."""
    lines: dict[int, CutLine] = {}
    attempts: dict[int, int] = {}
    for number, event in enumerate(trace.events, start=1):
        if isinstance(event, Cut | Recorded) and attempts.setdefault(event.snapshot, event.attempt) < event.attempt:
            attempts[event.snapshot] = event.attempt  # an older attempt left one of this number unfinished
            lines.pop(event.snapshot, None)
        if isinstance(event, Cut):
            line = lines.setdefault(event.snapshot, CutLine(event.snapshot, {}, {}, {}))
            line.cuts.setdefault(event.process, number)
            line.states[event.process] = event.state
        elif isinstance(event, Recorded):
            line = lines.setdefault(event.snapshot, CutLine(event.snapshot, {}, {}, {}))
            for span in event.spans:
                line.rows.setdefault(event.channel, set()).update(range(span.first, span.end))
                values = span.values or tuple(f"#{row}" for row in range(span.first, span.end))
                line.recorded[event.channel] = line.recorded.get(event.channel, ()) + values
    for event in trace.events:
        if isinstance(event, Completed) and event.snapshot in lines:
            lines[event.snapshot] = msgspec.structs.replace(lines[event.snapshot], complete=True)
    for line in lines.values():  # in the order of the picture, not in that of the history
        for process in trace.header.processes:
            if process in line.cuts:
                line.cuts[process] = line.cuts.pop(process)
                line.states[process] = line.states.pop(process)
    return lines
