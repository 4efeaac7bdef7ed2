"""What happened in a simulated run, as a trace for the independent checker and for pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cutwater.trace import events as e
from cutwater.trace.checker import CheckResult, check

if TYPE_CHECKING:
    from cutwater.sim.world import World

__all__ = ["check_run", "to_trace"]

_OF_THE_COORDINATOR = ("completed", "aborted", "recorded")
"""It tells what it has, even of a subtask that died meanwhile."""


def to_trace(world: World) -> e.Trace:
    """The history of a run, without what zombies of older attempts did after a newer attempt began.

    A checkpoint is numbered ``1000 * attempt + id``: a paused driver may use an id that its successor uses, too.
    """
    return e.Trace(_header(world), tuple(_Recorder(world).events()))


def check_run(world: World, *, quick: bool = True) -> CheckResult:
    """The verdict of the independent checker over a finished run, with the expected output as its oracle."""
    expected = world.graph.expected(world.schedule.rows) if world.driver.outcome == "finished" else None
    oracle = [str(row) for row in expected.elements()] if expected is not None else None
    return check(to_trace(world), quick=quick, at_least_once=not world.judge.exactly, oracle=oracle)


def _header(world: World) -> e.Header:
    graph = world.graph
    links = [
        e.Link(name, graph.names[c.source], graph.names[c.target])
        for name, c in zip(graph.channel_names, graph.channels, strict=True)
    ]
    title = f"{world.schedule.world}, {world.schedule.protocol}"
    return e.Header(tuple(graph.names), tuple(links), fifo=not world.reorders, title=title)


class _Recorder:
    def __init__(self, world: World) -> None:
        self._world = world
        self._names, self._channels = world.graph.names, world.graph.channel_names
        self._attempt = 1
        self._completed: dict[int, int] = {}
        self._down: set[int] = set()
        self._rows: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        output = world.output
        for handle, rows in output.committed.items():
            if not world.judge.is_passed_over(output.committed_by[handle]):
                self._rows[handle[0], output.committed_by[handle]] += map(str, rows)

    def events(self) -> Iterator[e.Event]:
        for at, kind, who, attempt, *rest in self._world.history:
            if kind == "restored":
                yield from self._restored(at, attempt, rest[0])
            elif kind == "crashed":
                if attempt == self._attempt:
                    yield from self._crashed(at, who)
            elif kind == "committed":
                yield from self._committed(at, who, rest[0])
            elif attempt == self._attempt and (kind in _OF_THE_COORDINATOR or who not in self._down):
                yield from self._other(at, kind, who, attempt, rest)
        at = self._world.now
        for task, id in sorted(self._rows):
            yield from self._committed(at, task, id)

    def _restored(self, at: float, attempt: int, id: int | None) -> Iterator[e.Event]:
        """Nothing of the new attempt happens before all its workers are ready: all at once."""
        if (attempt == self._attempt and attempt > 1) or attempt < self._attempt:
            return
        self._attempt = attempt
        self._down.clear()
        snapshot = None if id is None else self._number(id)
        for name in self._names:
            yield e.Restored(at, name, attempt, snapshot)

    def _crashed(self, at: float, slot: int) -> Iterator[e.Event]:
        for task, (_, index) in enumerate(self._world.graph.tasks):
            if index == slot and task not in self._down:
                self._down.add(task)
                yield e.Crashed(at, self._names[task], self._attempt)

    def _committed(self, at: float, task: int, id: int) -> Iterator[e.Event]:
        rows = self._rows.pop((task, id), None)
        if rows is not None:
            yield e.Committed(at, f"output of {self._names[task]}", self._attempt, self._number(id), (*rows,))

    def _number(self, id: int) -> int:
        return 1000 * self._completed.get(id, 0) + id

    def _other(self, at: float, kind: str, who: int, attempt: int, rest: list[Any]) -> Iterator[e.Event]:
        names, channels = self._names, self._channels
        if kind == "step":
            took, sends, before, after = rest
            takes = (e.Span(channels[took[0]], took[1], took[2]),) if took else ()
            sent = tuple(e.Span(channels[c], first, count) for c, first, count in sends)
            yield e.Step(at, names[who], attempt, takes, sent, str(before), str(after))
        elif kind == "cut":
            yield e.Cut(at, names[who], attempt, 1000 * attempt + rest[0], str(rest[1]))
        elif kind == "marker sent":
            yield e.MarkerSent(at, names[who], attempt, 1000 * attempt + rest[0], channels[rest[1]], rest[2])
        elif kind == "marker taken":
            yield e.MarkerTaken(at, names[who], attempt, 1000 * attempt + rest[0], channels[rest[1]], rest[2])
        elif kind == "recorded":
            id, channel, first, count = rest
            span = e.Span(channels[channel], first, count)
            yield e.Recorded(at, "coordinator", attempt, 1000 * attempt + id, channels[channel], (span,))
        elif kind == "completed":
            self._completed[rest[0]] = attempt
            yield e.Completed(at, "coordinator", attempt, 1000 * attempt + rest[0])
        elif kind == "aborted" and rest[0] not in self._completed:
            yield e.Aborted(at, "coordinator", attempt, 1000 * attempt + rest[0])
