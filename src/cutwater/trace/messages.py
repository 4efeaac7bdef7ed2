"""Arrows of a trace: which event took what which event sent."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cutwater.trace.events import Completed, Cut, MarkerSent, MarkerTaken, Recorded, Restored, Step, Trace


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
            for channel, row, value in _taken_rows(event):
                taken[channel] = row + 1
                sent, attempt, content = waiting.pop((channel, row), (None, event.attempt, value))
                if attempt != event.attempt:  # from a snapshot; the first sending was never taken
                    found.append(Message(channel, row, 1, sent, None, (content,), attempt=attempt))
                    sent = None
                found.append(Message(channel, row, 1, sent, number, (content or value,), attempt=event.attempt))
            for span in event.sends:
                values = span.values or ("",) * span.count
                for row, value in zip(range(span.first, span.end), values, strict=False):
                    old = waiting.pop((span.channel, row), None)
                    if old is not None:
                        found.append(Message(span.channel, row, 1, old[0], None, (old[2],), attempt=old[1]))
                    waiting[span.channel, row] = number, event.attempt, value
                    if row < taken.get(span.channel, 0):
                        again.add((span.channel, row))
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


def _taken_rows(step: Step) -> Iterator[tuple[str, int, str]]:
    for span in step.takes:
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
