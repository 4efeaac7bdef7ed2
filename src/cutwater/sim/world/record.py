"""What happened in a simulated run, as a trace for the independent checker and for pictures."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cutwater.sim.schedules.graphs import Graph
from cutwater.trace import events as e
from cutwater.trace.checker import Checker, CheckResult

if TYPE_CHECKING:
    from cutwater.sim.world.attempt import Attempt
    from cutwater.sim.world.world import World

BEFORE = 0
"""The snapshot that a trace begins with, where the job was rescaled."""


def to_trace(world: World) -> e.Trace:
    """The history of a run, without what zombies of older attempts did after a newer attempt began.

    A checkpoint is numbered ``1000 * attempt + id``: a paused driver may use an id that its successor uses, too.  Of a
    run that was rescaled it is the history since then: a trace tells of one parallelism.
    """
    return _traces(world)[-1]


def digest(world: World) -> str:
    """Of the trace of a run: the same for the same schedule, in every process, on every machine."""
    events = (event for trace in _traces(world) for event in (trace.header, *trace.events))
    return hashlib.sha256(b"".join(map(e.encode, events))).hexdigest()[:16]


def check_run(world: World, *, quick: bool = True) -> CheckResult:
    """The verdict of the independent checker over a finished run, with the expected output as its oracle."""
    expected = world.graph.expected(world.schedule.rows) if world.driver.outcome == "finished" else None
    oracle = [str(row) for row in expected.elements()] if expected is not None else None
    checkers: list[Checker] = []
    for event in _Recorder(world, states=not quick).events():
        if isinstance(event, Graph):
            header = _header_of(event, world)
            checkers.append(Checker(header, quick=quick, at_least_once=not world.oracle.exactly))
        else:
            checkers[-1].add(event)
    if len(checkers) > 1:  # each has heard of a part of the output; the oracle has added it up
        found = [checker.finish() for checker in checkers]
        return next((result for result in found if not result.ok), found[-1])
    return checkers[0].finish(oracle=oracle)


def _traces(world: World) -> list[e.Trace]:
    """One for every time that the job was given another parallelism, and for the beginning."""
    found: list[tuple[e.Header, list[e.Event]]] = []
    for event in _Recorder(world, states=True).events():
        if isinstance(event, Graph):
            found.append((_header_of(event, world), []))
        else:
            found[-1][1].append(event)
    return [e.Trace(header, tuple(events)) for header, events in found]


def _header_of(graph: Graph, world: World) -> e.Header:
    return _header(graph, world.schedule.world, world.schedule.protocol, not world.reorders)


@lru_cache(maxsize=64)
def _header(graph: Graph, world: str, protocol: str, fifo: bool) -> e.Header:
    links = [
        e.Link(name, graph.names[c.source], graph.names[c.target])
        for name, c in zip(graph.channel_names, graph.channels, strict=True)
    ]
    return e.Header(tuple(graph.names), tuple(links), fifo=fifo, title=f"{world}, {protocol}", marked=True)


class _Recorder:
    def __init__(self, world: World, *, states: bool) -> None:
        self._world, self._states = world, states
        self._graph = world.graph
        self._names, self._channels = self._graph.names, self._graph.channel_names
        self._attempt = 0
        self._first = 1
        """Attempt that the trace begins with."""
        self._began = [1] * len(self._names)
        """Of each subtask, the attempt that it began with."""
        self._completed: dict[int, int] = {}
        self._waves: dict[int, int] = {}
        """Checkpoints since all subtasks began anew, and the attempt that each began in."""
        self._down: set[int] = set()
        self._rows: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        output = world.output
        for handle, rows in output.visible.items():  # what was taken back is as if it had never been committed
            self._rows[handle.task, output.committed_by[handle]] += map(str, rows)

    def events(self) -> Iterator[e.Event | Graph]:
        """What happened; a dataflow says that from here on it is of this parallelism, and another trace."""
        yield self._graph
        for at, kind, who, attempt, *rest in self._world.history:
            if kind == "restored":
                yield from self._restored(at, attempt, rest[0])
            elif kind == "crashed":
                yield from self._crashed(at, rest[0])
            elif kind == "committed":
                yield from self._committed(at, who, rest[0])
            elif self._counts(kind, who, attempt):
                event = self._step(at, who, rest) if kind == "step" else self._other(at, kind, who, rest)
                if event is not None:
                    yield event
        at = self._world.now
        for task, id in sorted(self._rows):
            yield from self._committed(at, task, id)

    def _restored(self, at: float, attempt: int, id: int | None) -> Iterator[e.Event | Graph]:
        """Nothing of the new attempt happens before all its workers are ready: all at once."""
        if attempt <= self._attempt:
            return
        self._attempt = attempt
        deployed = self._world.attempts[attempt]
        restored = deployed.restored
        before = deployed.rescales or (restored is not None and restored.attempt < self._first)
        if (before or deployed.plan.graph is not self._graph) and not deployed.others_live:
            yield self._begin_anew(deployed)
        self._down.difference_update(deployed.tasks)
        if len(deployed.tasks) == len(self._names):
            self._waves.clear()
        snapshot = None if id is None else self._number(id)
        for task, name in enumerate(self._names):
            if deployed.attempt_of[task] == attempt:
                self._began[task] = attempt
                yield self._from_before(at, task, deployed) if before else e.Restored(at, name, attempt, snapshot)
            elif task not in self._down:
                yield e.Survived(at, name, attempt)

    def _begin_anew(self, deployed: Attempt) -> Graph:
        """A trace begins with what was restored."""
        self._graph = graph = deployed.plan.graph
        self._names, self._channels = graph.names, graph.channel_names
        self._began = [deployed.number] * len(self._names)
        self._first = deployed.number
        self._down.clear()
        return graph

    def _from_before(self, at: float, task: int, deployed: Attempt) -> e.Restored:
        """The trace does not tell of the snapshot."""
        parts, graph = deployed.parts, self._graph
        sent = {self._channels[c]: parts[task].outs[c] for c in graph.outputs[task]}
        sources = {c: parts[graph.channels[c].source].outs[c] for c in graph.inputs[task]}
        taken = {self._channels[c]: min(parts[task].ins[c], there) for c, there in sources.items()}
        return e.Restored(at, self._names[task], deployed.number, BEFORE, sent, taken)

    def _counts(self, kind: str, who: int, attempt: int) -> bool:
        """It is no zombie's."""
        if kind in ("completed", "aborted"):
            return attempt == self._attempt
        if not self._first <= attempt <= self._attempt or attempt != self._began[who]:
            return False
        return kind == "recorded" or who not in self._down

    def _crashed(self, at: float, lost: list[tuple[int, int]]) -> Iterator[e.Event]:
        for task, attempt in lost:
            begun = self._first <= attempt <= self._attempt and attempt == self._began[task]
            if begun and task not in self._down:
                self._down.add(task)
                yield e.Crashed(at, self._names[task], self._attempt)

    def _committed(self, at: float, task: int, id: int) -> Iterator[e.Event]:
        rows = self._rows.pop((task, id), None)
        if rows is not None:
            yield e.Committed(at, f"output of {self._names[task]}", self._attempt, self._number(id), (*rows,))

    def _wave(self, id: int) -> int:
        """The number of a checkpoint under way: it keeps that of the attempt it began in, while others go back."""
        return 1000 * self._waves.setdefault(id, self._attempt) + id

    def _number(self, id: int) -> int:
        return 1000 * self._completed.get(id, 0) + id

    def _step(self, at: float, who: int, rest: list[Any]) -> e.Event:
        channels = self._channels
        took, sends, before, after = rest
        takes = (e.Span(channels[took[0]], took[1], took[2]),) if took else ()
        sent = (*[e.Span(channels[c], first, count) for c, first, count in sends],) if sends else ()
        if self._states:
            return e.Step(at, self._names[who], self._attempt, takes, sent, str(before), str(after))
        return e.Step(at, self._names[who], self._attempt, takes, sent)

    def _other(self, at: float, kind: str, who: int, rest: list[Any]) -> e.Event | None:
        names, channels = self._names, self._channels
        if kind in ("marker sent", "marker taken", "cut") and self._waves.get(rest[0], self._attempt) < self._attempt:
            return None  # it was given up when a part of the job went back
        if kind == "marker sent":
            return e.MarkerSent(at, names[who], self._attempt, self._wave(rest[0]), channels[rest[1]], rest[2])
        if kind == "marker taken":
            return e.MarkerTaken(at, names[who], self._attempt, self._wave(rest[0]), channels[rest[1]], rest[2])
        if kind == "cut":
            state = str(rest[1]) if self._states else ""
            return e.Cut(at, names[who], self._attempt, self._wave(rest[0]), state)
        if kind == "recorded":
            id, channel, first, count = rest
            span = e.Span(channels[channel], first, count)
            return e.Recorded(at, "coordinator", self._attempt, self._wave(id), channels[channel], (span,))
        if kind == "completed":
            self._completed[rest[0]] = self._waves.get(rest[0], self._attempt)
            return e.Completed(at, "coordinator", self._attempt, self._wave(rest[0]))
        if kind == "aborted" and rest[0] not in self._completed:
            return e.Aborted(at, "coordinator", self._attempt, self._wave(rest[0]))
        return None
