"""Is a trace the history of a correct run?  An answer that shares no code with what made the trace.

The checker reads events one after the other (``Checker.add``) and keeps its own notes: how many rows each process sent
and took on each channel, and where its cut lies.  From these alone it decides.

A *quick* check: every complete snapshot is a consistent cut, by the four counts of CL6 for each channel; every channel
is FIFO, loses and doubles nothing; after a recovery every channel goes on from the restored cut, its recorded rows
first; nothing is done by a process that is down or by an attempt that is over; what sinks commit is what an oracle
says.  A *full* check says the same of every cut a second time, by vector clocks, compares states and contents where
they are traced, and rebuilds for every snapshot the reordered history of CL7 and replays it.

>>> from cutwater.trace.events import *
>>> header = Header(("p", "q"), (Link("c", "p", "q"),))
>>> sent = Step(1.0, "p", 1, sends=(Span("c", 0),))
>>> taken = Step(2.0, "q", 1, takes=(Span("c", 0),))
>>> early, late = Cut(0.0, "p", 1, 7), Cut(3.0, "q", 1, 7)
>>> print(check(Trace(header, (early, sent, taken, late, Completed(4.0, "q", 1, 7))), quick=True))
5 events, 1 complete snapshot: 1 violation
inconsistent cut: snapshot 7, channel c: q took row 0 before its cut, and p sent it after its own (events 1, 4)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

from cutwater.trace import events as e
from cutwater.trace.events import Committed, Link, MarkerSent, MarkerTaken, Span
from cutwater.trace.full import FullNotes
from cutwater.trace.result import ChannelCounts, CheckResult, Kind, Violation


def check(
    trace: e.Trace,
    *,
    quick: bool = False,
    at_least_once: bool = False,
    oracle: Iterable[str] | None = None,
    drained: bool = False,
) -> CheckResult:
    """Check a whole trace.

    Args:
        quick: leave out vector clocks, states, contents and CL7.
        at_least_once: rows from behind a marker may be in the receiver's cut, and committed more than once.
        oracle: the rows that all sinks together should have committed, in any order.
        drained: the run ended by itself, so that no row may be left in a channel.
    """
    checker = Checker(trace.header, quick=quick, at_least_once=at_least_once)
    for event in trace.events:
        checker.add(event)
    return checker.finish(oracle=oracle, drained=drained)


class Checker:
    """Reads the events of a run in their order; ``finish`` gives the verdict.  Arguments as of ``check``."""

    def __init__(self, header: e.Header, *, quick: bool = False, at_least_once: bool = False) -> None:
        self.header = header
        self.number = 0
        """Number of the event being read."""
        self._fifo, self._at_least_once = header.fifo, at_least_once
        self._channels = {link.name: ChannelNotes(link) for link in header.channels}
        self._inputs = {p: [c for c in self._channels.values() if c.target == p] for p in header.processes}
        self._outputs = {p: [c for c in self._channels.values() if c.source == p] for p in header.processes}
        self._attempts: dict[str, int] = {}
        self._down: set[str] = set()
        self._snapshots: dict[int, SnapshotNotes] = {}
        self._violations: list[Violation] = []
        self._counts: list[ChannelCounts] = []
        self._output = OutputNotes(at_least_once)
        self._restored: set[int] = set()
        self._full = None if quick else FullNotes(header, self._channels)

    def add(self, event: e.Event) -> None:
        """The next event."""
        self.number += 1
        process, attempt = event.process, event.attempt
        if (self._attempts.get(process) != attempt or process in self._down) and not self._check_alive(event):
            return
        self._HANDLERS[type(event)](self, event)

    def finish(self, *, oracle: Iterable[str] | None = None, drained: bool = False) -> CheckResult:
        """The verdict over everything read."""
        in_flight = sum(c.sent - c.taken - len(c.ahead) for c in self._channels.values())
        if drained:
            for channel in self._channels.values():
                if channel.sent > channel.taken:
                    text = f"rows {channel.taken}-{channel.sent - 1} were sent and never taken"
                    self._wrong(Kind.FIFO, text, channel=channel.name)
        if oracle is not None:
            self._violations += self._output.compare(oracle)
        return CheckResult(
            self.number,
            sum(s.complete for s in self._snapshots.values()),
            tuple(self._violations),
            tuple(self._counts),
            tuple(self._full.reorderings) if self._full else (),
            in_flight,
            len(self._restored),
        )

    # ------------------------------------------------------------------------------------------------------- events

    def _on_step(self, step: e.Step) -> None:
        channels, attempt = self._channels, step.attempt
        try:
            for span in step.takes:
                channel = channels[span.channel]
                end = span.first + span.count
                in_turn = span.first == channel.taken and not channel.ahead
                if in_turn and channel.attempt == attempt and end <= channel.sent:
                    channel.taken = end
                else:
                    self._take_slowly(step, channel, span)
                if channel.target != step.process:
                    self._wrong(Kind.TRACE, f"{step.process} takes from a channel of {channel.target}", span.channel)
            for span in step.sends:
                channel = channels[span.channel]
                if span.first != channel.sent or channel.attempt != attempt or channel.source != step.process:
                    self._send_slowly(step, channel, span)
                channel.sent = span.first + span.count
        except KeyError as error:
            self._wrong(Kind.TRACE, f"{step.process} uses channel {error}, which the header does not name")
            return
        if self._full:
            self._violations += self._full.step(self.number, step)

    def _take_slowly(self, step: e.Step, channel: ChannelNotes, span: e.Span) -> None:
        limit = channel.available(step.attempt)
        if span.end > limit:
            self._wrong(Kind.FIFO, f"{step.process} took row {limit}, which nobody had sent", channel.name)
        if not self._fifo:
            problem = channel.take_out_of_order(span)
            if problem is not None:
                self._wrong(Kind.FIFO, problem, channel.name)
            return
        if span.first > channel.taken:
            text = f"{step.process} took row {span.first} when row {channel.taken} was next: rows between are lost"
            self._wrong(Kind.FIFO, text, channel.name)
        elif span.first < channel.taken:
            text = f"{step.process} took row {span.first} when row {channel.taken} was next: it had been taken before"
            self._wrong(Kind.FIFO, text, channel.name)
        channel.taken = span.end

    def _send_slowly(self, step: e.Step, channel: ChannelNotes, span: e.Span) -> None:
        if channel.source != step.process:
            self._wrong(Kind.TRACE, f"{step.process} sends on a channel of {channel.source}", channel.name)
        if channel.attempt != step.attempt:  # the first row in this attempt
            channel.attempt = step.attempt
        if span.first != channel.sent:
            text = f"{step.process} sent row {span.first} when row {channel.sent} was next"
            self._wrong(Kind.FIFO, text, channel.name)

    def _on_cut(self, cut: e.Cut) -> None:
        snapshot, process = self._part_of(cut), cut.process
        if process in snapshot.cuts:
            text = f"{process} recorded its own state a second time"
            self._wrong(Kind.INCOMPLETE, text, snapshot=cut.snapshot, process=process)
        snapshot.cuts[process] = self.number
        snapshot.attempts.add(cut.attempt)
        for channel in self._outputs[process]:
            snapshot.sent[channel.name] = channel.sent
        for channel in self._inputs[process]:
            snapshot.taken[channel.name] = channel.taken
            if channel.ahead:
                snapshot.ahead[channel.name] = frozenset(channel.ahead)
        if self._full:
            self._violations += self._full.cut(self.number, cut)
            snapshot.states[process] = cut.state or self._full.states.get(process, "")

    def _on_marker_sent(self, event: e.MarkerSent) -> None:
        snapshot, channel = self._part_of(event), self._channels.get(event.channel)
        for text in snapshot.send_marker(event, channel):
            self._wrong(Kind.MARKER, text, event.channel, snapshot=event.snapshot)

    def _on_marker_taken(self, event: e.MarkerTaken) -> None:
        snapshot, channel = self._part_of(event), self._channels.get(event.channel)
        for text in snapshot.take_marker(event, channel, fifo=self._fifo):
            self._wrong(Kind.MARKER, text, event.channel, snapshot=event.snapshot)

    def _on_recorded(self, event: e.Recorded) -> None:
        channel, snapshot = self._channels.get(event.channel), self._part_of(event)
        if channel is None:
            self._wrong(Kind.TRACE, "a channel was recorded that the header does not name", event.channel)
        elif event.process in self._inputs and event.process not in (channel.source, channel.target):
            self._wrong(Kind.TRACE, f"{event.process} recorded a channel of others", event.channel)
        if any(span.channel != event.channel for span in event.spans):
            self._wrong(Kind.TRACE, "rows of another channel were recorded for it", event.channel)
        if snapshot.complete:
            self._wrong(Kind.INCOMPLETE, "it was recorded after the end", event.channel, snapshot=snapshot.id)
        by_receiver = channel is not None and event.process == channel.target
        snapshot.add_recorded(event.channel, event.spans, by_receiver=by_receiver)

    def _on_completed(self, event: e.Completed) -> None:
        """The whole snapshot is known now: compare."""
        snapshot = self._snapshot(event.snapshot)
        if snapshot.complete:
            self._wrong(Kind.INCOMPLETE, "it was complete already", snapshot=snapshot.id)
            return
        missing = [p for p in self.header.processes if p not in snapshot.cuts]
        if missing or len(snapshot.attempts) > 1:
            text = f"{', '.join(missing)} recorded nothing" if missing else "its parts come from several attempts"
            self._wrong(Kind.INCOMPLETE, text, snapshot=snapshot.id)
            return
        snapshot.complete = True
        before = len(self._violations)
        if self.header.marked:
            self._check_markers(snapshot)
        for channel, position in snapshot.markers.items():
            if position != snapshot.sent.get(channel, position):
                text = f"its marker lies at position {position}, and the sender's cut at {snapshot.sent[channel]} (CL1)"
                self._wrong(Kind.MARKER, text, channel, snapshot=snapshot.id)
        for channel in self._channels.values():
            for found in counts_of(snapshot, channel, tolerate_doubled=self._at_least_once):
                if isinstance(found, Violation):
                    self._violations.append(found)
                elif self._full:
                    self._counts.append(found)
        if self._full and not self._at_least_once:
            consistent = len(self._violations) == before
            self._violations += self._full.complete(snapshot, consistent=consistent)

    def _check_markers(self, snapshot: SnapshotNotes) -> None:
        for name in self._channels:
            if name not in snapshot.markers:
                self._wrong(Kind.MARKER, "it is complete without a marker on it", name, snapshot=snapshot.id)
            elif name not in snapshot.markers_taken:
                self._wrong(Kind.MARKER, "it is complete, and nobody took its marker", name, snapshot=snapshot.id)

    def _on_aborted(self, event: e.Aborted) -> None:
        if self._snapshot(event.snapshot).complete:
            self._wrong(Kind.INCOMPLETE, "it was given up after it was complete", snapshot=event.snapshot)

    def _on_crashed(self, event: e.Crashed) -> None:
        self._down.add(event.process)

    def _on_restored(self, event: e.Restored) -> None:
        process, attempt = event.process, event.attempt
        self._check_attempt(event)
        self._down.discard(process)
        self._attempts[process] = attempt
        self._restored.add(attempt)
        snapshot, earlier = self._restored_from(event)
        for channel in self._outputs.get(process, ()):
            position = snapshot.sent.get(channel.name, 0)
            self._compare_position(event, channel.name, event.sent, position)
            channel.sender_restored(attempt, position)
        for channel in self._inputs.get(process, ()):
            name = channel.name
            ahead, taken = snapshot.ahead.get(name, frozenset[int]()), snapshot.taken.get(name, 0)
            sent = taken if earlier else snapshot.sent.get(name, 0)
            if self._fifo:
                self._compare_position(event, name, event.taken, min(taken, sent))
            channel.receiver_restored(attempt, min(taken, sent), ahead, sent)
        if self._full:
            self._full.restored(event, snapshot)

    def _restored_from(self, event: e.Restored) -> tuple[SnapshotNotes, bool]:
        """State that a process goes on from, and whether that is from before the trace began."""
        if event.snapshot is None:
            return SnapshotNotes(0), False
        known = self._snapshots.get(event.snapshot)
        if (known is None or not known.cuts) and (event.sent or event.taken):
            earlier = SnapshotNotes(event.snapshot)
            earlier.sent, earlier.taken = dict(event.sent), dict(event.taken)
            return earlier, True
        if known is None or not known.complete:
            self._wrong(Kind.RESTORE, "it never became complete", snapshot=event.snapshot, process=event.process)
        return known or SnapshotNotes(0), False

    def _compare_position(self, event: e.Restored, channel: str, told: dict[str, int], position: int) -> None:
        if told.get(channel, position) != position:
            text = f"{event.process} goes on with row {told[channel]}, and the snapshot has the channel at {position}"
            self._wrong(Kind.RESTORE, text, channel, snapshot=event.snapshot)

    def _on_survived(self, event: e.Survived) -> None:
        process, attempt = event.process, event.attempt
        if process in self._down:
            self._wrong(Kind.STATE, "it is down, and is said to have survived", process=process)
        self._check_attempt(event)
        for channel in self._inputs.get(process, ()):
            channel.receiver_survived(self._attempts.get(process, attempt))
        self._attempts[process] = attempt
        self._restored.add(attempt)
        for channel in self._outputs.get(process, ()):
            channel.sender_restored(attempt, channel.sent)
        if self._full:
            self._full.survived(event)

    def _on_committed(self, event: e.Committed) -> None:
        snapshot = self._snapshots.get(event.snapshot)
        if snapshot is None or not snapshot.complete:
            self._wrong(Kind.OUTPUT, "output was committed before the snapshot was complete", snapshot=event.snapshot)
        problem = self._output.commit(event)
        if problem is not None:
            self._wrong(Kind.OUTPUT, problem, snapshot=event.snapshot, process=event.process)

    _HANDLERS: ClassVar[dict[type[e.Event], Callable[..., None]]] = {
        e.Step: _on_step,
        e.Cut: _on_cut,
        e.MarkerSent: _on_marker_sent,
        e.MarkerTaken: _on_marker_taken,
        e.Recorded: _on_recorded,
        e.Completed: _on_completed,
        e.Aborted: _on_aborted,
        e.Crashed: _on_crashed,
        e.Restored: _on_restored,
        e.Survived: _on_survived,
        e.Committed: _on_committed,
    }

    # ------------------------------------------------------------------------------------------------------ helpers

    def _check_alive(self, event: e.Event) -> bool:
        """The slow part of ``add``: a first event, a recovery, or what should not be; false: no more of it."""
        process, attempt = event.process, event.attempt
        if process not in self._inputs:
            if isinstance(event, e.Recorded | e.Completed | e.Aborted | e.Committed):
                return True  # a coordinator's
            self._wrong(Kind.TRACE, f"the header does not name it: {type(event).__name__}", process=process)
            return False
        if isinstance(event, e.Restored | e.Survived):
            return True  # checked where it is handled
        known = self._attempts.get(process)
        if known is None:
            self._attempts[process] = attempt
            for channel in self._outputs[process]:
                channel.attempt = attempt
        elif process in self._down:
            self._wrong(Kind.STATE, f"it is down, and there is a {type(event).__name__} of it", process=process)
        elif attempt != known:
            text = f"it is in attempt {known}, and there is a {type(event).__name__} of attempt {attempt}"
            self._wrong(Kind.STATE, text, process=process)
        return True

    def _check_attempt(self, event: e.Restored | e.Survived) -> None:
        """A process joins later attempts only, and each of them once."""
        known = self._attempts.get(event.process, event.attempt - 1)
        if event.attempt <= known:
            text = f"it is in attempt {known}, and joins attempt {event.attempt}"
            self._wrong(Kind.STATE, text, process=event.process)

    def _part_of(self, event: e.Cut | e.MarkerSent | e.MarkerTaken | e.Recorded) -> SnapshotNotes:
        """The snapshot that an event belongs to; one of this id that an older attempt left unfinished is another."""
        notes = self._snapshot(event.snapshot)
        if notes.attempt < event.attempt and not notes.complete:
            notes = self._snapshots[event.snapshot] = SnapshotNotes(event.snapshot)
            notes.attempt = event.attempt
        return notes

    def _snapshot(self, id: int) -> SnapshotNotes:
        notes = self._snapshots.get(id)
        if notes is None:
            notes = self._snapshots[id] = SnapshotNotes(id)
        return notes

    def _wrong(
        self,
        kind: Kind,
        text: str,
        channel: str | None = None,
        *,
        snapshot: int | None = None,
        process: str | None = None,
    ) -> None:
        self._violations.append(Violation(kind, text, snapshot, channel, process, (self.number,)))


# ------------------------------------------------------------------------------------------------------ its notes


class ChannelNotes:
    """Positions of the two ends of a channel.  Each end is in an attempt of its own while a recovery is on its way."""

    __slots__ = ("ahead", "attempt", "here", "limits", "name", "sent", "source", "taken", "target")

    def __init__(self, link: Link) -> None:
        self.name, self.source, self.target = link.name, link.source, link.target
        self.sent = self.taken = 0
        """Number of the next row to be sent, and to be taken."""
        self.ahead: set[int] = set()
        """Rows above ``taken`` that were taken already; only without FIFO order."""
        self.attempt = -1
        """Attempt of the sender."""
        self.limits: dict[int, int] = {}
        """Rows that a receiver in another attempt than the sender's may take: up to this number."""
        self.here = 0
        """Rows that a receiver may have had already when others went back: up to this number."""

    def available(self, attempt: int) -> int:
        """Up to which row number a receiver of this attempt can find rows."""
        return max(self.here, self.sent if self.attempt == attempt else self.limits.get(attempt, self.sent))

    def sender_restored(self, attempt: int, position: int) -> None:
        """The sender goes on from ``position``."""
        self.limits[self.attempt] = self.sent
        self.limits[attempt] = position
        self.sent, self.attempt = position, attempt

    def receiver_survived(self, attempt: int) -> None:
        """Rows sent in its attempt so far may be there, whatever becomes of the sender."""
        self.here = self.available(attempt)

    def receiver_restored(self, attempt: int, taken: int, ahead: frozenset[int], sent: int) -> None:
        """The receiver goes on from ``taken``; ``sent`` is the sender's position at the same cut."""
        self.limits.setdefault(attempt, sent)
        self.taken, self.ahead, self.here = taken, set(ahead), 0

    def take_out_of_order(self, span: Span) -> str | None:
        """Note rows of a channel without FIFO order; what is wrong, if something is."""
        for row in range(span.first, span.end):
            if row < self.taken or row in self.ahead:
                return f"row {row} was taken twice"
            self.ahead.add(row)
        while self.taken in self.ahead:
            self.ahead.discard(self.taken)
            self.taken += 1
        return None


class SnapshotNotes:
    """The parts of one snapshot."""

    __slots__ = (
        "_received", "ahead", "attempt", "attempts", "complete", "cuts", "id", "markers", "markers_taken", "recorded",
        "sent", "states", "taken",
    )  # fmt: skip

    def __init__(self, id: int) -> None:
        self.id = id
        self.cuts: dict[str, int] = {}
        """Process -> number of its cut's event."""
        self.attempt = 0
        """The one whose snapshot it is."""
        self.attempts: set[int] = set()
        """Those that its cuts are of: one, if nothing went wrong."""
        self.sent: dict[str, int] = {}
        """Channel -> n: rows sent before the sender's cut."""
        self.taken: dict[str, int] = {}
        """Channel -> m: rows taken before the receiver's cut."""
        self.ahead: dict[str, frozenset[int]] = {}
        self.recorded: dict[str, list[Span]] = {}
        self.markers: dict[str, int] = {}
        """Channel -> where its marker was sent."""
        self.markers_taken: set[str] = set()
        self.states: dict[str, str] = {}
        self.complete = False
        self._received: dict[str, int] = {}

    def send_marker(self, event: MarkerSent, channel: ChannelNotes | None) -> Iterator[str]:
        """Note a marker; what is wrong with it."""
        if event.channel in self.markers:
            yield "a second marker was sent on it"
        if channel is not None and event.process != channel.source:
            yield f"{event.process} sent a marker on a channel of {channel.source}"
        elif event.process not in self.cuts:
            yield f"{event.process} sent a marker before it recorded itself (CL1)"
        if channel is None or event.position != channel.sent:
            sent = channel.sent if channel else "no rows"
            yield f"a marker was sent at position {event.position}, and the channel had {sent}"
        self.markers[event.channel] = event.position

    def take_marker(self, event: MarkerTaken, channel: ChannelNotes | None, *, fifo: bool) -> Iterator[str]:
        """Note a marker that was taken; what is wrong with it."""
        if event.channel in self.markers_taken:
            yield "its marker was taken a second time"
        if channel is not None and event.process != channel.target:
            yield f"{event.process} took a marker from a channel of {channel.target}"
        sent = self.markers.get(event.channel)
        if sent != event.position:
            yield f"a marker was taken at position {event.position}, and was sent at {sent}"
        elif fifo and channel is not None and event.position < channel.taken:
            yield f"{event.process} took the marker of position {event.position} after row {channel.taken - 1}"
        self.markers_taken.add(event.channel)

    def add_recorded(self, channel: str, spans: Sequence[Span], *, by_receiver: bool) -> None:
        """A part of a channel's state; what the receiver has goes before what a marker overtook at the sender."""
        parts = self.recorded.setdefault(channel, [])
        where = len(parts)
        if by_receiver:
            where = self._received.get(channel, 0)
            self._received[channel] = where + len(spans)
        parts[where:where] = spans


def ranges(rows: set[int]) -> str:
    """Row numbers for people.

    >>> ranges({1, 2, 3, 7})
    'rows 1-3, 7'
    >>> ranges({4})
    'row 4'
    """
    parts: list[tuple[int, int]] = []
    for row in sorted(rows):
        if parts and parts[-1][1] == row - 1:
            parts[-1] = parts[-1][0], row
        else:
            parts.append((row, row))
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
    return f"{'row' if len(rows) == 1 else 'rows'} {text}"


def _them(rows: set[int]) -> str:
    return "it" if len(rows) == 1 else "them"


def counts_of(
    snapshot: SnapshotNotes, channel: ChannelNotes, *, tolerate_doubled: bool
) -> Iterator[ChannelCounts | Violation]:
    """The counts of CL6 for one channel, and what is wrong with them.

    Args:
        tolerate_doubled: the receiver may have taken rows from behind the marker before its cut (at least once).
    """
    name = channel.name
    n, m, ahead = snapshot.sent[name], snapshot.taken[name], snapshot.ahead.get(name, frozenset[int]())
    spans = snapshot.recorded.get(name, ())
    listed = [row for span in spans for row in range(span.first, span.end)]
    recorded = set(listed)
    events = snapshot.cuts[channel.source], snapshot.cuts[channel.target]
    yield _counts(snapshot, name, recorded, n, m + len(ahead))

    def wrong(kind: Kind, text: str) -> Violation:
        return Violation(kind, text, snapshot.id, name, events=events)

    future = {row for row in (*range(n, m), *ahead) if row >= n}
    if future and not tolerate_doubled:
        yield wrong(
            Kind.CUT,
            f"{channel.target} took {ranges(future)} before its cut, and {channel.source} sent "
            f"{_them(future)} after its own",
        )
    lost = set(range(m, n)) - ahead - recorded
    if lost:
        yield wrong(
            Kind.LOST,
            f"{ranges(lost)} had been sent and not taken at the cut, and the channel's state lacks {_them(lost)}",
        )
    doubled = {row for row in recorded if row < min(m, n) or row in ahead}
    if doubled:
        text = f"{ranges(doubled)} had been taken before the cut, and the channel's state has {_them(doubled)}"
        yield wrong(Kind.DOUBLED, text)
    later = {row for row in recorded if row >= n}
    if later:
        text = f"{channel.source} sent {ranges(later)} after its cut, and the channel's state has {_them(later)}"
        yield wrong(Kind.FUTURE, text)
    if len(listed) != len(recorded):
        yield wrong(Kind.DOUBLED, "the channel's state has rows twice")
    elif not ahead and listed != sorted(listed):
        yield wrong(Kind.FIFO, "the channel's state has its rows in another order than the channel had")


def _counts(snapshot: SnapshotNotes, name: str, recorded: set[int], n: int, m: int) -> ChannelCounts:
    """An empty state was read where the marker lay, or nothing is known of it: then where sender and receiver agree."""
    if recorded:
        sent_recorded, taken_recorded = max(recorded) + 1, min(recorded)
    else:
        sent_recorded = taken_recorded = snapshot.markers.get(name, m)
    return ChannelCounts(snapshot.id, name, n, sent_recorded, m, taken_recorded)


SHOWN = 5
"""Rows named in one sentence."""


class OutputNotes:
    """Committed rows.  A commit that is told again (after a restore, to make sure) counts once."""

    def __init__(self, at_least_once: bool) -> None:
        self._at_least_once = at_least_once
        self._rows: Counter[str] = Counter()
        self._told: dict[tuple[str, int], tuple[str, ...]] = {}

    def commit(self, event: Committed) -> str | None:
        """Note a commit; what is wrong, if something is."""
        key = event.process, event.snapshot
        before = self._told.get(key)
        if before is None:
            self._told[key] = event.values
            self._rows.update(event.values)
        elif event.values and event.values != before:
            return "committed a second time, with other rows"
        return None

    def compare(self, oracle: Iterable[str]) -> list[Violation]:
        """Rows that are missing, and rows that should not be there."""
        wanted = Counter(oracle)
        missing, extra = wanted - self._rows, self._rows - wanted
        if self._at_least_once:
            extra = Counter({row: n for row, n in extra.items() if row not in wanted})
        found: list[Violation] = []
        for rows, what in ((missing, "missing"), (extra, "too many")):
            if rows:
                named = ", ".join(map(repr, list(rows.elements())[:SHOWN]))
                more = f" and {rows.total() - SHOWN} others" if rows.total() > SHOWN else ""
                found.append(Violation(Kind.OUTPUT, f"{what}: {named}{more}"))
        return found
