"""The files of one run, put together: of several workers and of several attempts.

Each process writes for itself, so that a file knows only what happened in one place; and whoever wrote it may have been
killed meanwhile, so that its last line may be torn.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from cutwater.errors import ConfigError, DataError
from cutwater.trace.events import (
    Committed,
    Completed,
    Crashed,
    Cut,
    Event,
    Header,
    MarkerSent,
    MarkerTaken,
    Recorded,
    Restored,
    Step,
    Survived,
    Trace,
    read_trace,
)

SUFFIX = ".jsonl"
"""Of the files that are read from a directory."""


def read_run(paths: Iterable[str | os.PathLike[str]]) -> Trace:
    """One trace from files, or from directories of them.

    The events come in a causal order (``causal_order``); times only decide where nothing else does.  A process
    that goes on in a new attempt lost what it had: where that begins, a ``Crashed`` is put in unless there is one.

    Raises:
        ConfigError: the files are of different runs, or of one run before and after its graph changed.
        DataError: a file is no trace, or no order exists.
        FormatVersionError: a file is of another format version.
    """
    files = [file for path in paths for file in _files(Path(path))]
    whole = len(files) == 1
    parts = [(file, read_trace(file, unfinished=True)) for file in files if whole or _begun(file)]
    if not parts:
        raise DataError("nothing was traced", hint=f"The directory should hold files NAME{SUFFIX}.")
    first, header = parts[0][0], parts[0][1].header
    for file, part in parts:
        if part.header != header:
            raise ConfigError(f"{file} and {first} are of different runs", hint="Name the files of one run.")
    if whole:
        return parts[0][1]
    attempts = sorted(
        (part.events for _, part in parts), key=lambda events: max((e.attempt for e in events), default=0)
    )
    return Trace(header, tuple(causal_order(header, _with_crashes(header, attempts))))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob(f"*{SUFFIX}"))
    if not found:
        raise DataError(f"{path} holds no trace", hint=f"Their names end in {SUFFIX}.")
    return found


def _begun(file: Path) -> bool:
    """It has its first line; whoever was to write it was not killed before."""
    try:
        with file.open("rb") as stream:
            return stream.readline().endswith(b"\n")
    except OSError:
        return True  # reading it says what is wrong


def _with_crashes(header: Header, attempts: Sequence[Sequence[Event]]) -> list[Event]:
    last: dict[str, Event] = {}
    found: list[Event] = []
    for event in (event for events in attempts for event in events):
        before = last.get(event.process)
        if isinstance(event, Restored) and before is not None and not isinstance(before, Crashed):
            found.append(Crashed(max(before.time_ms, event.time_ms), event.process, before.attempt))
        found.append(event)
        if event.process in header.processes:
            last[event.process] = event
    return found


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
    """Progress of the ordering so far."""

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
