"""Small dataflows by name, as graphs of subtasks and channels, and what must come out of them.

A row is one number: an identity and, in its last four bits, how many back-edges it may still go along.  What a step
does to a row depends on nothing but the row, so that the result of a run is known without running it.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, update_wrapper
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from cutwater.config import RecoveryName
from cutwater.errors import DataError
from cutwater.plan.cycles import back_edges, components
from cutwater.protocol.job.hosts import Topology
from cutwater.protocol.job.recovery_scope import Division, Subtask, divide

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
        after = {s: [number[b] for a, b, _ in edges if number[a] == s] for s in range(len(steps))}
        entered = {number[b] for _, b, _ in edges}
        back = set(back_edges(after, [s for s in after if s not in entered]))
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
            for number, loop in enumerate(components(after))
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
            step, _ = self.tasks[source]
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


class Plan:
    """A dataflow at one parallelism, and what of it goes back after a failure.

    Args:
        parallelism: of the steps that can be rescaled; 0: what each began with.

    >>> [len(Plan(WORLDS["four"].at(p), p, "job").graph.tasks) for p in (0, 1, 3)]
    [4, 3, 9]
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


# ------------------------------------------------------------------------------------------------ dataflows by name

_HOW: dict[str, How] = {"-": "forward", "=": "hash", "~": "rebalance"}


def graph_of(text: str) -> Graph:
    """A dataflow from its name, its steps and its edges.

    ``count*2`` is a step of parallelism 2, ``+copy``, ``+moody`` and ``+slices=3`` say more of it; ``a-b`` is a
    forward edge, ``a=b`` one by hash, ``a~b`` a rebalance.

    >>> graph = graph_of("example: read count*2+moody | read=count")
    >>> graph.steps[1].moody, graph.names, graph.edges[0].how
    (True, ['read 0', 'count 0', 'count 1'], 'hash')
    """
    name, steps, edges = re.split(": | [|] ", text)
    found: list[tuple[str, str, How]] = [(a, b, _HOW[how]) for a, how, b in re.findall(r"(\w+)(\W)(\w+)", edges)]
    return Graph(name, [_step_of(*step.split("+")) for step in steps.split()], found)


def _step_of(step: str, *more: str) -> Step:
    name, _, parallelism = step.partition("*")
    said = {word: int(value) if value else True for word, _, value in (part.partition("=") for part in more)}
    return Step(name, int(parallelism or 1))._replace(**said)


RANDOM = "random"
"""``random-7`` is a dataflow drawn by chance."""

_WORLDS = (
    "four: read count*2 sink | read=count count=sink",
    "diamond: read left right sink | read-left read-right left-sink right-sink",
    "fan: read+copy left right*2 sink*2 | read-left read=right left=sink right=sink",
    "shuffle: read*2 count*2 sink*2 | read=count count-sink",
    "sources: first second*2 join*2 sink | first=join second=join join=sink",
    "self_loop: read loop*2 sink | read=loop loop=loop loop=sink",
    "nested: read outer*2 inner*2 sink | read=outer outer=inner inner-inner inner=outer inner=sink",
    "crossing: read a b c d sink | read-a a-b b-c c-a c-d d-b d-sink",
    "irreducible: read a b*2 sink | read-a read=b a=b b=a b=sink",
    "two_heads: first second a*2 b sink | first=a second-b a=b b=a b-sink",
    "spread: read*2 pass*2 count*2 sink | read~pass pass=count count=sink",
    # a part can go back while others run
    "two_jobs: read*2 count*2 sink other loop*2 out | read=count count=sink other=loop loop=loop loop=out",
    "wide: read*2 count*2 again*3 sink*3 | read=count count=again again=sink",
    "side_by_side: read*3 count*3 sink*3 | read-count count-sink",
    # another order makes other rows, so that it matters who is known to have chosen what
    "moody_join: read*2 join*3+moody left*2 right*3 sink*2 | read=join join=left join-right left-sink right=sink",
    "moody_loop: read loop*3+moody sink*2 | read=loop loop=loop loop=sink",
    "moody_crossing: read a*2 b c*2+moody d+moody sink | read=a a=b b=c c=a c=d d-b d=sink",
    # several subtasks go back at the loss of some workers, and others behind them do not (R3)
    "moody_stairs: read*2 first*3+moody left*3 right*2+moody low*2 high*2 sink*3 | "
    "read=first first-left first=right right-low right=high left-sink low-sink high-sink",
    "moody_aside: read*3 sort*3+moody aside*3 loop*2+moody sink*2 | read=sort sort-aside sort=loop loop=loop loop=sink",
    "moody_spin: read*2 spin*3+moody sink*2 rest*3 | read=spin spin-spin spin=sink spin-rest",
    # a step can be in the middle of work: what it makes of a row leaves in slices
    "sliced_join: read*2 join*2+slices=3 count*2+moody sink | read=join join=count count=sink",
    "sliced_loop: read+slices=3 other loop*2+slices=3 sink | read=loop other=loop loop=loop loop=sink",
)
WORLDS = {graph.name: graph for graph in map(graph_of, _WORLDS)}
"""Every world by its name, but for those drawn by chance."""


def dataflow(name: str) -> Graph:
    """The dataflow of a name: one of ``WORLDS``, or one drawn by chance.

    Raises:
        DataError: there is none of this name.

    >>> dataflow("four") is WORLDS["four"], dataflow("random-7").name
    (True, 'random-7')
    """
    if name in WORLDS:
        return WORLDS[name]
    if not re.fullmatch(f"{RANDOM}-[0-9]+", name):
        raise DataError(f"no world {name!r}", hint=f"Worlds: {', '.join(WORLDS)}, {RANDOM}-0, {RANDOM}-1 and so on.")
    return random_dataflow(name)


TASKS_MAX, CHANNELS_MAX = 14, 36
WIDTHS = (1, 1, 2, 2, 3)


@lru_cache(maxsize=8)
def random_dataflow(name: str) -> Graph:
    """A dataflow that follows from its name.

    One or two sources, one to four steps, one or two sinks.  Half of them have loops, of any shape: back-edges go from
    any step to itself or to one before it.  A third is moody, a third has a step that copies rows or makes pieces of
    them; not both, because what comes out has to be known beforehand.

    >>> one, other = random_dataflow("random-1"), random_dataflow("random-2")
    >>> len(one.tasks) <= 14, one.edges == random_dataflow("random-1").edges, one.edges == other.edges
    (True, True, False)
    """
    rng = random.Random(name)
    while True:
        graph = _draw(name, rng)
        regular = all(graph.regular_edges[s] for s, edges in enumerate(graph.out_edges) if edges)
        if regular and len(graph.tasks) <= TASKS_MAX and len(graph.channels) <= CHANNELS_MAX:
            return graph


def _draw(name: str, rng: random.Random) -> Graph:
    sources, inner, sinks = (
        [f"{kind} {i}" for i in range(rng.randint(least, most))]
        for kind, least, most in (("read", 1, 2), ("step", 1, 4), ("sink", 1, 2))
    )
    pairs = _pairs(sources, inner, sinks, rng)
    width = {step: rng.choice(WIDTHS) for step in (*sources, *inner, *sinks)}
    kind = rng.choice(("plain", "moody", "more"))
    chosen = rng.choice([step for step in (*sources, *inner) if sum(a == step for a, _ in pairs) > 1] or inner)
    copies, pieces = kind == "more" and rng.random() < 0.5, kind == "more"
    steps = [
        Step(
            step,
            width[step],
            copy=copies and step == chosen,
            moody=kind == "moody" and step not in sources and step not in sinks,
            slices=3 if pieces and not copies and step == chosen else 0,
        )
        for step in (*sources, *inner, *sinks)
    ]
    edges: list[tuple[str, str, How]] = [
        (a, b, "forward" if width[a] == width[b] and rng.random() < 0.5 else "hash") for a, b in pairs
    ]
    return Graph(name, steps, edges)


def _pairs(sources: list[str], inner: list[str], sinks: list[str], rng: random.Random) -> list[tuple[str, str]]:
    """Ends of the edges, in the order of writing, on which the search for back-edges depends (C1)."""
    found: dict[tuple[str, str], None] = {}
    senders = sources.copy()
    for step in (*inner, *sinks):
        for sender in rng.sample(senders, min(len(senders), rng.randint(1, 2))):
            found[sender, step] = None
        if step in inner:
            senders.append(step)
    for n, sender in enumerate(senders):
        if all(a != sender for a, _ in found):
            found[sender, rng.choice([*inner[max(n - len(sources) + 1, 0) :], *sinks])] = None
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 3)):
            end = rng.randrange(len(inner))
            found[inner[end], inner[rng.randint(0, end)]] = None
    pairs = list(found)
    rng.shuffle(pairs)
    return pairs
