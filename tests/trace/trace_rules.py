"""What a right trace of one attempt is, once more and as plainly as can be: it shares no code with the checker.

Every rule looks at the whole trace; nothing is kept from one event to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from cutwater.trace.events import Completed, Cut, Event, Link, MarkerSent, MarkerTaken, Recorded, Span, Step, Trace

__all__ = ["what_is_wrong"]


def what_is_wrong(trace: Trace) -> str:
    """The first rule that is broken; empty if none is."""
    return next((rule.__name__ for rule in _RULES if not all(rule(trace))), "")


def _of(trace: Trace, kind: type[Event]) -> list[tuple[int, Any]]:
    return [(n, event) for n, event in enumerate(trace.events) if type(event) is kind]


def _spans(trace: Trace, side: str, channel: str) -> list[tuple[int, Span]]:
    """Where rows of a channel are sent, or taken."""
    return [(n, s) for n, step in _of(trace, Step) for s in getattr(step, side) if s.channel == channel]


def _rows(trace: Trace, side: str, channel: str, before: int | None = None) -> list[tuple[int, int, str]]:
    """Event, number and content of each row."""
    return [
        (n, s.first + i, s.values[i] if s.values else "")
        for n, s in _spans(trace, side, channel)
        for i in range(s.count)
        if before is None or n < before
    ]


def names_are_known_and_ends_of_channels_their_owners(trace: Trace) -> Iterator[bool]:
    ends: dict[str, Link] = {link.name: link for link in trace.header.channels}
    known = set(trace.header.processes)
    for event in trace.events:
        yield event.attempt == 1 or event.process not in known
        if isinstance(event, Cut | Step):
            yield event.process in known
        if isinstance(event, Step):
            yield all(s.channel in ends and ends[s.channel].source == event.process for s in event.sends)
            yield all(s.channel in ends and ends[s.channel].target == event.process for s in event.takes)
        if isinstance(event, MarkerSent):
            yield event.channel in ends and ends[event.channel].source == event.process
        if isinstance(event, MarkerTaken):
            yield event.channel in ends and ends[event.channel].target == event.process
        if isinstance(event, Recorded):
            yield event.channel in ends and all(s.channel == event.channel for s in event.spans)
            link = ends.get(event.channel)
            yield event.process not in known or (link is not None and event.process in (link.source, link.target))


def states_follow_each_other(trace: Trace) -> Iterator[bool]:
    for process in trace.header.processes:
        state = None
        for event in trace.events:
            if event.process != process:
                continue
            if isinstance(event, Step):
                yield state in (None, event.before)
                state = event.after
            elif isinstance(event, Cut):
                yield state in (None, event.state)
                state = event.state


def channels_are_first_in_first_out(trace: Trace) -> Iterator[bool]:
    for link in trace.header.channels:
        sent, taken = _rows(trace, "sends", link.name), _rows(trace, "takes", link.name)
        yield [row for _, row, _ in sent] == list(range(len(sent)))
        yield len(taken) <= len(sent)
        for (at, row, value), (was_sent, number, content) in zip(taken, sent, strict=False):
            yield (row, value) == (number, content)
            yield was_sent < at


def a_process_records_itself_once(trace: Trace) -> Iterator[bool]:
    yield max(Counter((cut.process, cut.snapshot) for _, cut in _of(trace, Cut)).values(), default=0) <= 1


def a_marker_is_sent_once_behind_the_cut_and_taken_once_in_its_place(trace: Trace) -> Iterator[bool]:
    sent, taken = _of(trace, MarkerSent), _of(trace, MarkerTaken)
    for markers in (sent, taken):
        yield max(Counter((m.channel, m.snapshot) for _, m in markers).values(), default=0) <= 1
    cuts = {(cut.process, cut.snapshot): n for n, cut in _of(trace, Cut)}
    for n, marker in sent:
        yield cuts.get((marker.process, marker.snapshot), n) < n
        yield marker.position == len(_rows(trace, "sends", marker.channel, n))
    for n, marker in taken:
        mine = [(m, s) for m, s in sent if (s.channel, s.snapshot) == (marker.channel, marker.snapshot) and m < n]
        yield bool(mine) and mine[0][1].position == marker.position
        yield len(_rows(trace, "takes", marker.channel, n)) <= marker.position


def a_complete_snapshot_is_a_consistent_cut(trace: Trace) -> Iterator[bool]:
    done = _of(trace, Completed)
    yield max(Counter(event.snapshot for _, event in done).values(), default=0) <= 1
    for end, event in done:
        cuts = {cut.process: n for n, cut in _of(trace, Cut) if cut.snapshot == event.snapshot and n < end}
        yield cuts.keys() == set(trace.header.processes)
        if cuts.keys() != set(trace.header.processes):
            continue
        yield not any(part.snapshot == event.snapshot for n, part in _of(trace, Recorded) if n > end)
        for link in trace.header.channels:
            yield from _channel(trace, event.snapshot, end, link, cuts)


def _channel(trace: Trace, snapshot: int, end: int, link: Link, cuts: dict[str, int]) -> Iterator[bool]:
    before = trace.events[:end]
    markers = [m for m in before if isinstance(m, MarkerSent | MarkerTaken)]
    mine = [m for m in markers if (m.snapshot, m.channel) == (snapshot, link.name)]
    yield [type(m) for m in mine] == [MarkerSent, MarkerTaken]
    sent = [(row, value) for _, row, value in _rows(trace, "sends", link.name, cuts[link.source])]
    taken = [(row, value) for _, row, value in _rows(trace, "takes", link.name, cuts[link.target])]
    yield all(m.position == len(sent) for m in mine)
    parts = [p for p in before if isinstance(p, Recorded) and (p.snapshot, p.channel) == (snapshot, link.name)]
    recorded = [(s.first + i, s.values[i] if s.values else "") for p in parts for s in p.spans for i in range(s.count)]
    yield [row for row, _ in taken + recorded] == [row for row, _ in sent]
    yield all(value in ("", known) for (_, value), (_, known) in zip(taken + recorded, sent, strict=False))


_RULES = (
    names_are_known_and_ends_of_channels_their_owners,
    states_follow_each_other,
    channels_are_first_in_first_out,
    a_process_records_itself_once,
    a_marker_is_sent_once_behind_the_cut_and_taken_once_in_its_place,
    a_complete_snapshot_is_a_consistent_cut,
)
