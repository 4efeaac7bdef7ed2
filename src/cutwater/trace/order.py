"""One causal order of the events of several machines, whose clocks need not agree."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from cutwater.errors import DataError
from cutwater.trace.events import (
    Committed,
    Completed,
    Cut,
    Event,
    Header,
    MarkerSent,
    MarkerTaken,
    Recorded,
    Restored,
    Step,
    Survived,
)


def causal_order(header: Header, events: Iterable[Event]) -> list[Event]:
    """An order in which no row and no marker is taken before it was sent.

    ``events`` need only be in order per process.  Among those that may come next the one with the smallest ``time_ms``
    does, so that a trace whose clocks agree keeps its order.

    Raises:
        DataError: no such order exists; the message names an event that waits for something nobody did.

    >>> from cutwater.trace.events import Link, Span
    >>> header = Header(("p", "q"), (Link("c", "p", "q"),))
    >>> taken = Step(1.0, "q", 1, takes=(Span("c", 0),))  # the clock of q is slow
    >>> sent = Step(5.0, "p", 1, sends=(Span("c", 0),))
    >>> causal_order(header, [taken, sent]) == [sent, taken]
    True
    """
    queues: defaultdict[str, deque[Event]] = defaultdict(deque)
    known = _Known(header)
    for event in events:
        queues[event.process].append(event)
        if isinstance(event, Cut | Recorded):
            known.parts[event.snapshot] += 1
        elif isinstance(event, MarkerTaken):
            known.markers[event.snapshot, event.attempt] += 1
        elif isinstance(event, Completed):
            known.completed_in[event.snapshot] = min(
                event.attempt, known.completed_in.get(event.snapshot, event.attempt)
            )
    ordered: list[Event] = []
    while True:
        waiting = [queue for queue in queues.values() if queue]
        if not waiting:
            return ordered
        ready = [queue for queue in waiting if known.may_come(queue[0])]
        if not ready:
            first = min(waiting, key=lambda queue: (not isinstance(queue[0], Step | MarkerTaken), queue[0].time_ms))[0]
            raise DataError(f"the trace has no causal order: nobody did what {first} waits for")
        event = min(ready, key=lambda queue: queue[0].time_ms).popleft()
        known.add(event)
        ordered.append(event)


class _Known:
    """What has been done in the order so far."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self.parts: Counter[int] = Counter()
        """Snapshot -> how many of its parts are still to come."""
        self.markers: Counter[tuple[int, int]] = Counter()
        """Snapshot, attempt -> how many of its markers are still to be taken."""
        self.completed_in: dict[int, int] = {}
        """Snapshot -> the attempt in which it became, or will become, complete."""
        self._sent: dict[tuple[str, int], int] = {}
        self._cuts: dict[int, dict[str, int]] = {}
        self._markers: set[tuple[str, int, int]] = set()
        self._complete: set[int] = set()

    def may_come(self, event: Event) -> bool:
        match event:
            case Step(takes=takes, attempt=attempt):
                return all(self._sent.get((span.channel, attempt), 0) >= span.end for span in takes)
            case MarkerTaken(channel=channel, snapshot=snapshot, attempt=attempt):
                return (channel, snapshot, attempt) in self._markers
            case Completed(snapshot=snapshot, attempt=attempt):
                return not self.parts[snapshot] and not self.markers[snapshot, attempt]
            case Restored(snapshot=snapshot, attempt=attempt):
                return snapshot is None or not self._will_complete(snapshot, attempt)
            case Committed(snapshot=snapshot, attempt=attempt):
                return not self._will_complete(snapshot, attempt)
            case _:
                return True

    def _will_complete(self, snapshot: int, attempt: int) -> bool:
        """It is still to become complete, in this attempt or before; what never does is for the checker to judge."""
        return snapshot not in self._complete and self.completed_in.get(snapshot, attempt + 1) <= attempt

    def add(self, event: Event) -> None:
        match event:
            case Step(sends=sends, attempt=attempt):
                self._sent |= {(span.channel, attempt): span.end for span in sends}
            case MarkerSent(channel=channel, snapshot=snapshot, attempt=attempt):
                self._markers.add((channel, snapshot, attempt))
            case Cut(snapshot=snapshot, process=process, attempt=attempt):
                self.parts[snapshot] -= 1
                outputs = [link.name for link in self._header.channels if link.source == process]
                positions = {name: self._sent.get((name, attempt), 0) for name in outputs}
                self._cuts.setdefault(snapshot, {}).update(positions)
            case Recorded(snapshot=snapshot):
                self.parts[snapshot] -= 1
            case MarkerTaken(snapshot=snapshot, attempt=attempt):
                self.markers[snapshot, attempt] -= 1
            case Completed(snapshot=snapshot):
                self._complete.add(snapshot)
            case Restored(snapshot=snapshot, attempt=attempt, sent=sent):
                cuts = self._cuts.get(snapshot, {}) if snapshot in self._complete else {}
                for name, position in (cuts | sent).items():
                    self._sent.setdefault((name, attempt), position)
            case Survived(process=process, attempt=attempt):
                for link in self._header.channels:
                    known = [p for (name, a), p in self._sent.items() if name == link.name and a < attempt]
                    if link.source == process and known:
                        self._sent.setdefault((link.name, attempt), max(known))
            case _:
                return
