"""Notes of a checker while it reads a trace: channels, snapshots, and the position of each end of a channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cutwater.trace.events import Link, MarkerSent, MarkerTaken, Span
from cutwater.trace.result import ChannelCounts, Kind, Violation


class ChannelBook:
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
        """Book rows of a channel without FIFO order; what is wrong, if something is."""
        for row in range(span.first, span.end):
            if row < self.taken or row in self.ahead:
                return f"row {row} was taken twice"
            self.ahead.add(row)
        while self.taken in self.ahead:
            self.ahead.discard(self.taken)
            self.taken += 1
        return None


class SnapshotBook:
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

    def send_marker(self, event: MarkerSent, channel: ChannelBook | None) -> Iterator[str]:
        """Book a marker; what is wrong with it."""
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

    def take_marker(self, event: MarkerTaken, channel: ChannelBook | None, *, fifo: bool) -> Iterator[str]:
        """Book a marker that was taken; what is wrong with it."""
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


def compare(
    snapshot: SnapshotBook, channel: ChannelBook, *, tolerate_doubled: bool
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


def _counts(snapshot: SnapshotBook, name: str, recorded: set[int], n: int, m: int) -> ChannelCounts:
    """An empty state was read where the marker lay, or nothing is known of it: then where sender and receiver agree."""
    if recorded:
        sent_recorded, taken_recorded = max(recorded) + 1, min(recorded)
    else:
        sent_recorded = taken_recorded = snapshot.markers.get(name, m)
    return ChannelCounts(snapshot.id, name, n, sent_recorded, m, taken_recorded)
