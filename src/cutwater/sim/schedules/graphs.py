"""Small dataflows as graphs of subtasks and channels, and what must come out of them.

A row is one number: an identity and, in its last four bits, how many back-edges it may still go along.  What a step
does to a row depends on nothing but the row, so that the result of a run is known without running it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from cutwater.config import RecoveryName
from cutwater.protocol.job.hosts import Topology
from cutwater.protocol.job.regions import Division, Subtask, divide

How: TypeAlias = Literal["forward", "hash", "rebalance"]

Of = TypeVar("Of")

KEYS = 16
HOPS = 4
PIECE_AT, MOOD_AT = 28, 32
"""Bits of a row: which piece of the source's row it is (0: all of it), and the mood of who takes it."""


class Step(NamedTuple):
    """A step of the dataflow."""

    name: str
    parallelism: int = 1
    copy: bool = False
    """Each row goes along all edges, not along one of them."""
    moody: bool = False
    """The edge that a row goes along depends on what was taken before it, too."""
    slices: int = 0
    """It makes so many pieces of each row that is whole; they may leave one by one, later."""


class Edge(NamedTuple):
    """An edge between two steps, by number; ``back`` closes a loop (C1)."""

    source: int
    target: int
    how: How
    back: bool


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel between two subtasks, by number."""

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    source: int
    target: int
    edge: int
    back: bool


def source_row(source: int, position: int, cyclic: bool) -> int:
    """The row at a position of a source."""
    identity = source << 12 | position
    return identity << 4 | (_mix(identity) % HOPS if cyclic else 0)


def row_time(row: int) -> int:
    """Event time of a row: its position in its source."""
    return row >> 4 & 0xFFF


def key_of(row: int) -> int:
    """The key that a row is counted and routed by."""
    return _mix(row) & (KEYS - 1)


def _mix(value: int) -> int:
    return (value * 0x9E3779B1 & 0xFFFFFFFF) >> 11


def _remembered(method: Callable[[Graph, int], Counter[Of]]) -> Callable[[Graph, int], Counter[Of]]:
    """Worked out once for a number of rows; forgotten with the graph."""

    def once(self: Graph, rows: int) -> Counter[Of]:
        known: dict[int, Counter[Of]] = vars(self).setdefault(f"remembered {method.__name__}", {})
        if rows not in known:
            known[rows] = method(self, rows)
        return known[rows]

    return update_wrapper(once, method)


class Graph:
    """A dataflow and its subtasks.

    Args:
        name: of the world.
        steps: sources are those without a regular input.
        edges: (source step, target step, "forward", "hash" or "rebalance").
        origin: the same dataflow at the parallelism that it began with.

    >>> from cutwater.sim.schedules.dataflows import WORLDS
    >>> graph = WORLDS["self_loop"]
    >>> len(graph.tasks), sum(c.back for c in graph.channels), sum(graph.expected(10).values())
    (4, 4, 10)
    """

    def __init__(
        self,
        name: str,
        steps: list[Step],
        edges: list[tuple[str, str, How]],
        origin: Graph | None = None,
    ) -> None:
        self.name, self.steps, self._named_edges = name, steps, edges
        number = {step.name: i for i, step in enumerate(steps)}
        back = _back_edges(len(steps), [(number[a], number[b]) for a, b, _ in edges])
        self.edges = [Edge(number[a], number[b], how, (number[a], number[b]) in back) for a, b, how in edges]
        self.tasks = [(s, i) for s, step in enumerate(steps) for i in range(step.parallelism)]
        self.names = [f"{steps[s].name} {i}" for s, i in self.tasks]
        task = {t: i for i, t in enumerate(self.tasks)}
        self.channels: list[Channel] = []
        for e, edge in enumerate(self.edges):
            for i in range(steps[edge.source].parallelism):
                for j in range(steps[edge.target].parallelism):
                    if edge.how != "forward" or i == j:
                        ends = task[edge.source, i], task[edge.target, j]
                        self.channels.append(Channel(len(self.channels), *ends, e, edge.back))
        self.channel_names = [f"{self.names[c.source]} > {self.names[c.target]} {c.edge}" for c in self.channels]
        self.inputs = [[c.index for c in self.channels if c.target == t] for t in range(len(self.tasks))]
        self.outputs = [[c.index for c in self.channels if c.source == t] for t in range(len(self.tasks))]
        self.out_edges = [[e for e, edge in enumerate(self.edges) if edge.source == s] for s in range(len(steps))]
        self.regular_edges = [[e for e in found if not self.edges[e].back] for found in self.out_edges]
        self.back = frozenset(c.index for c in self.channels if c.back)
        self.cyclic = bool(self.back)
        self.sources = frozenset(t for t, found in enumerate(self.inputs) if not found)
        self.splits = {t: self._splits_of(*self.tasks[t], origin or self) for t in self.sources}
        """Rows of each source: numbers of sources in the dataflow that the job began with."""
        self.sinks = frozenset(t for t, found in enumerate(self.outputs) if not found)
        self.workers = max(step.parallelism for step in steps)
        self.loop_tasks = {
            number: frozenset(t for t, (s, _) in enumerate(self.tasks) if s in loop)
            for number, loop in enumerate(self.loops)
        }
        """Subtasks of each loop."""
        loop_of = {t: number for number, found in self.loop_tasks.items() for t in found}
        inner = {c.index for c in self.channels if loop_of.get(c.source, -1) == loop_of.get(c.target, -2)}
        self.loop_inputs = [frozenset(inner.intersection(found)) for found in self.inputs]
        self.loop_outputs = [frozenset(inner.intersection(found)) for found in self.outputs]
        self._ends = [(self.tasks[c.source], self.tasks[c.target]) for c in self.channels]
        self.regions = self.divided("region").regions
        """Regions: subtasks that can be restarted by themselves (R2)."""
        self.moody, self.sliced = any(step.moody for step in steps), any(step.slices > 0 for step in steps)
        self.moves = [_Moves(self, t) for t in range(len(self.tasks))]

    def _splits_of(self, step: int, index: int, origin: Graph) -> tuple[int, ...]:
        """Splits are dealt by their number, in a rescale to others than had them; there may be none for a source."""
        had, has = origin.steps[step].parallelism, self.steps[step].parallelism
        first = index if origin is self else (index + 1) % has
        return tuple(origin.tasks.index((step, split)) for split in range(first, had, has))

    def at(self, parallelism: int) -> Graph:
        """The same dataflow with another parallelism of all steps; 0: as it is."""
        if not parallelism:
            return self
        steps = [step._replace(parallelism=parallelism) for step in self.steps]
        return Graph(self.name, steps, self._named_edges, self)

    def divided(self, recovery: RecoveryName) -> Division:
        """Parts that go back together, and which of them go back with each."""
        return divide(recovery, self.tasks, self._ends, self.workers)

    @cached_property
    def loops(self) -> list[frozenset[int]]:
        """Steps of each strongly connected component that has a back-edge."""
        reach = [self._reached(s) for s in range(len(self.steps))]
        found = {frozenset(t for t in reach[s] if s in reach[t]) for s in range(len(self.steps)) if s in reach[s]}
        return sorted(found, key=sorted)

    def _reached(self, step: int) -> set[int]:
        seen, todo = set[int](), [step]
        while todo:
            here = todo.pop()
            fresh = {e.target for e in self.edges if e.source == here} - seen
            seen |= fresh
            todo += fresh
        return seen

    def made_of(self, step: int, row: int) -> list[int]:
        """Rows that a step makes of a row: pieces, or the row itself."""
        pieces = self.steps[step].slices
        return [row] if not pieces or row >> PIECE_AT else [row | n << PIECE_AT for n in range(1, pieces + 1)]

    def next(self, step: int, row: int, mood: int = 0) -> list[tuple[int, int]]:
        """Ways of the rows that a step makes of a row: (edge, row there); none at a sink."""
        return [move for piece in self.made_of(step, row) for move in self._next(step, piece, mood)]

    def _next(self, step: int, row: int, mood: int = 0) -> list[tuple[int, int]]:
        out = self.out_edges[step]
        if len(out) == 1 and not self.edges[out[0]].back:
            return [(out[0], row)]
        hops = row & 15
        choice = out if hops else self.regular_edges[step]
        if not choice:
            return []
        if self.steps[step].copy:
            return [(e, row) for e in choice if not self.edges[e].back]
        edge = choice[(_mix(row ^ step << 20) + mood) % len(choice)]
        return [(edge, row - 1 if self.edges[edge].back else row)]

    @_remembered
    def expected(self, rows: int) -> Counter[int]:
        """Identities that the sinks must have committed after ``rows`` rows of each source, with their number."""
        return Counter(row >> 4 for step, row in self._visits(rows) if not self.out_edges[step])

    @_remembered
    def expected_anywhere(self, rows: int) -> Counter[int]:
        """Identities that end somewhere, sink or not, with their number."""
        made = ((step, piece) for step, row in self._visits(rows) for piece in self.made_of(step, row))
        return Counter(piece >> 4 for step, piece in made if not self._next(step, piece))

    @_remembered
    def expected_counts(self, rows: int) -> Counter[tuple[int, int]]:
        """Number of times that each step must have counted each key."""
        return Counter((step, key_of(row)) for step, row in self._visits(rows) if self._is_inner(step))

    def _is_inner(self, step: int) -> bool:
        return bool(self.out_edges[step]) and any(e.target == step for e in self.edges)

    def _visits(self, rows: int) -> Iterator[tuple[int, int]]:
        for source in sorted(self.sources):
            step, index = self.tasks[source]
            del index
            todo = [(step, source_row(source, k, self.cyclic)) for k in range(rows)]
            while todo:
                here, row = todo.pop()
                yield here, row
                todo += [(self.edges[e].target, after) for e, after in self.next(here, row)]


class _Moves(dict[int, tuple[tuple[int, int], ...]]):
    """Of one subtask: row -> (channel, row there) for each copy of it; worked out when first asked for.

    Of a moody step the mood is in the bits above the row's.
    """

    def __init__(self, graph: Graph, task: int) -> None:
        self._graph, self._step = graph, graph.tasks[task][0]
        self._channels = {
            e: [c for c in graph.outputs[task] if graph.channels[c].edge == e] for e in graph.out_edges[self._step]
        }

    def __missing__(self, key: int) -> tuple[tuple[int, int], ...]:
        moves: list[tuple[int, int]] = []
        for edge, after in self._graph.next(self._step, key & ~(-1 << MOOD_AT), key >> MOOD_AT):
            channels = self._channels[edge]
            turn = row_time(after) if self._graph.edges[edge].how == "rebalance" else key_of(after)
            moves.append((channels[turn % len(channels)], after))
        self[key] = tuple(moves)
        return self[key]


def _back_edges(steps: int, edges: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Edges to a step that is still on the stack of a depth-first search (C1)."""
    found, on_stack, done = set[tuple[int, int]](), set[int](), set[int]()

    def visit(step: int) -> None:
        on_stack.add(step)
        for a, b in edges:
            if a == step and b in on_stack:
                found.add((a, b))
            elif a == step and b not in done:
                visit(b)
        on_stack.discard(step)
        done.add(step)

    for step in range(steps):
        if step not in done and all(b != step for _, b in edges):
            visit(step)
    return found


class Plan:
    """A dataflow at one parallelism, and what of it goes back after a failure.

    Args:
        parallelism: of the steps that can be rescaled; 0: what each began with.

    >>> from cutwater.sim.schedules.dataflows import WORLDS
    >>> [len(Plan(WORLDS["four"].at(p), p, "job").graph.tasks) for p in (0, 1, 3)]
    [4, 3, 7]
    """

    def __init__(self, graph: Graph, parallelism: int, recovery: RecoveryName) -> None:
        self.graph, self.parallelism = graph, parallelism
        self.recovery: RecoveryName = recovery
        self.divide(graph.divided(recovery))

    def divide(self, division: Division) -> None:
        """Set the division of subtasks into parts that go back together, and what goes back with each (R1-R4)."""
        self.division = division
        graph, tasks = self.graph, self.graph.tasks
        self.region_of = [division.region_of[t] for t in tasks]
        self.topology = Topology(
            graph.workers,
            frozenset(tasks),
            frozenset(tasks[t] for t in graph.sources),
            {loop: frozenset(tasks[t] for t in found) for loop, found in graph.loop_tasks.items()},
            division.regions,
            division.upstream,
        )

    def name_of(self, task: int) -> Subtask:
        """Step and index of a subtask; of one at another parallelism, nobody's."""
        tasks = self.graph.tasks
        return tasks[task] if task < len(tasks) else (-1, task)

    def by_task(self, parts: Iterable[tuple[Any, Any]]) -> dict[int, Any]:
        """What each subtask, named by step and index, has said."""
        number = {subtask: task for task, subtask in enumerate(self.graph.tasks)}
        return {number[subtask]: part for subtask, part in parts}

    @property
    def everything(self) -> tuple[int, ...]:
        """All regions."""
        return tuple(range(len(self.division.regions)))
