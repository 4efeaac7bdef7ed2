"""Constants of a small job, the values that its states are made of, and the core without time.

The machines of the core are deterministic and hold all their state, so that what one does on an event depends on
nothing but that state.  The explorer meets the same state of a machine in thousands of global states: ``Memo`` numbers
the states of machines and works every pair of state and event out once.  A global state then holds numbers instead of
machines; it is copied and compared quickly, and two global states are equal exactly when everything in them is.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from cutwater.config import JobConfig
from cutwater.protocol import messages as m
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.protocols import PROTOCOLS, FreezeOn, ProtocolSpec
from cutwater.protocol.snapshot_algorithms import ChandyLamport, LaiYang
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.stages import Phase
from cutwater.sim.mutants.core import Mutant
from cutwater.sim.schedules.graphs import Graph
from cutwater.sim.schedules.schedule import Recovery
from cutwater.trace import events as e

Action: TypeAlias = tuple[Any, ...]
"""The name of a step, and what it is about."""


class Budget(NamedTuple):
    """Amount of what may happen in a small world, and of the time that it may take.

    ``rows``: the positions that each source has rows at.  And, at any moment: requests for a checkpoint or a savepoint,
    crashes, expiries of what is pending, probes before everything else is at rest.

    Every message and every write takes as long as it likes, so that any other step may come before it is over.  Four
    settings make a world smaller.  ``eager``: what is written is durable at once, acknowledgements arrive at once, and
    a subtask hears at once what its own queues tell it.  ``prompt``: outcomes of checkpoints, once sent, are heard at
    once, unless a trigger is still on its way before them.  ``direct``: nothing waits in a sender's queue, so that
    barriers overtake in the receiver's only.  ``hasty``: alignments time out at once.

    ``crossing`` makes it larger: what begins two waves reaches a source in any order, as of two initiators.
    """

    rows: tuple[int, ...] = (0,)
    requests: int = 2
    savepoints: int = 0
    crashes: int = 1
    expiries: int = 0
    probes: int = 0
    eager: bool = False
    prompt: bool = False
    direct: bool = False
    hasty: bool = False
    crossing: bool = False


END = "end"
HERE = -1
"""In the place of a channel."""


class Barrier(NamedTuple):
    """A barrier in a channel."""

    id: int
    final: bool
    probe: bool
    position: int
    """It stands before the row of this number."""
    reach: int
    """Rows before this number have left the sender's queue; the barrier overtook those up to its position there."""
    savepoint: bool


Item: TypeAlias = "int | Barrier | str"
"""A row's number, a barrier, or ``END``."""


def rows_of(items: tuple[Item, ...]) -> tuple[int, ...]:
    """The rows among the items of a queue."""
    return tuple(i for i in items if type(i) is int)


class Cut(NamedTuple):
    """A subtask's part of a checkpoint."""

    position: int
    ins: tuple[tuple[int, int], ...]
    """Channel, rows taken."""
    outs: tuple[tuple[int, int], ...]
    """Channel, rows sent."""
    staged: tuple[tuple[int, tuple[int, ...]], ...]
    """Pre-commits: the checkpoint they were made for, identities of rows."""
    choices: int
    """Made so far, where they are logged (R0)."""
    halts: bool
    """Nothing may move from here on until the outcome is known."""


class Done(NamedTuple):
    """A completed checkpoint."""

    id: int
    cuts: tuple[tuple[int, Cut], ...]
    logs: tuple[tuple[int, tuple[int, ...]], ...]
    final: bool


class JobWorld:
    """The dataflow, the protocol, how much may happen, and the machines by number: no step changes them.

    Args:
        recovery: what goes back after a failure, everything or a part.
    """

    def __init__(self, graph: Graph, protocol: str, budget: Budget, mutant: Mutant, recovery: Recovery = "job") -> None:
        self.graph, self.budget, self.mutant = graph, budget, mutant
        self.recovery: Recovery = recovery
        self.row = PROTOCOLS[protocol]
        self.exactly = self.row.guarantee != "at-least-once"
        self.queued = (self.row.switches or self.row.halts) and not budget.direct
        takes = self.row.freeze_on is not FreezeOn.NEVER
        self.requests, self.savepoints = (budget.requests, budget.savepoints) if takes else (0, 0)
        self.probes = budget.probes if graph.cyclic else 0
        self.tasks = range(len(graph.tasks))
        self.sources = sorted(graph.sources)
        self.heads = [t for t in self.tasks if graph.back.intersection(graph.inputs[t])]
        self.outside = [frozenset(graph.inputs[t]) - graph.loop_inputs[t] for t in self.tasks]
        self.memo = Memo()
        event = self.memo.event
        self.row_taken = [event(m.RowsTaken(c.index, 1)) for c in graph.channels]
        self.end_taken = [event(m.EndTaken(c.index)) for c in graph.channels]
        self.expected = Counter[int]()
        """Identities of the rows that must be committed in the end."""
        for position in budget.rows:
            self.expected += graph.expected_anywhere(position + 1) - graph.expected_anywhere(position)
        self.exhausted = event(m.SourceExhausted())
        self.at_once: tuple[type, ...] = (m.BarrierWaits, m.BarriersSent) if budget.eager else ()
        """Events that are heard as soon as nothing is before them."""
        if budget.prompt:
            self.at_once += (m.CompleteNotice, m.AbortNotice, m.LoopVerdict)
        self._known: list[tuple[bool, frozenset[int], bool]] = []

    def known(self, machine: int) -> tuple[bool, frozenset[int], bool]:
        """Of a machine's state: a source may read, inputs that may be taken from, it has ended."""
        known, cores = self._known, self.memo.cores
        while machine >= len(known):
            core = cores[len(known)]
            if hasattr(core, "may_read"):
                inputs = frozenset(c for c in range(len(self.graph.channels)) if core.can_take(c))
                known.append((core.may_read, inputs, core.phase in (Phase.ENDED, Phase.FINISHED)))
            else:
                known.append((False, frozenset(), False))
        return known[machine]


def tell_completed(
    story: list[e.Event], by: str, attempt: int, id: int, recorded: Iterable[tuple[str, tuple[int, ...]]]
) -> None:
    """Add to a history that a snapshot is complete, and the rows that it holds of each channel."""
    for channel, rows in recorded:
        if rows:
            story.append(e.Recorded(0.0, by, attempt, id, channel, tuple(e.Span(channel, row) for row in rows)))
    story.append(e.Completed(0.0, by, attempt, id))


# ------------------------------------------------------------------------------------------------ the core without time

_NOT_STATE = frozenset(
    {"_events", "block_version", "unblocked", "name", "protocol", "_settings", "_now_ms"}  # stories, names, constants
    | {"_pause_ms", "_not_before_ms"}  # how long a probe waits: in a world without time it may come whenever it is due
)
_ORDERED = frozenset({"_blocked", "_snapshots", "_pending"})
_INNER = (SubtaskMachine, ChandyLamport, LaiYang)
"""Classes that a machine may be made of."""


def new_coordinator(
    kind: type[CheckpointCoordinator], row: ProtocolSpec, tasks: int, sources: frozenset[int]
) -> CheckpointCoordinator:
    """A coordinator that acts on requests only; two checkpoints at once where the protocol allows it."""
    alone = row.switches or row.halts
    settings = JobConfig(
        protocol=row.name,  # type: ignore[arg-type]
        interval_ms=1e12,
        timeout_ms=1000.0,
        tolerable_failed=1000,
        max_concurrent=1 if alone else 2,
        aligned_timeout_ms=1.0,
    )
    return kind(settings, frozenset(range(tasks)), sources, 0)


class Memo:
    """The states of machines by number, and what each does on each event.

    Every state is validated once, when it gets its number.

    >>> from cutwater.protocol import messages as m
    >>> from cutwater.protocol.protocols import PROTOCOLS
    >>> memo = Memo()
    >>> first = memo.number("sum 0", SubtaskMachine("sum 0", ["a", "b"], protocol=PROTOCOLS["aligned"]))
    >>> barrier = memo.event(m.BarrierTaken("a", 1))
    >>> after, effects = memo.handle(first, barrier)
    >>> effects, memo.handle(first, barrier) == (after, effects), first == after
    ((Block(input='a'),), True, False)
    """

    def __init__(self) -> None:
        self.cores: list[Any] = []
        """Machines by number: to look at only."""
        self.events: list[Any] = []
        self._owners: list[Hashable] = []
        self._numbers: dict[Hashable, int] = {}
        self._event_numbers: dict[Hashable, int] = {}
        self._after: dict[tuple[int, int], tuple[int, tuple[Any, ...]]] = {}

    def number(self, owner: Hashable, core: Any) -> int:
        """The number of a machine in its present state.  Equal states of two owners have two numbers.

        Raises:
            InvariantError: the state is new and breaks an invariant.
        """
        key = owner, canonical(core)
        number = self._numbers.get(key)
        if number is None:
            if hasattr(core, "validate"):
                core.validate()
            number = self._numbers[key] = len(self.cores)
            self.cores.append(core)
            self._owners.append(owner)
        return number

    def event(self, event: Hashable) -> int:
        """The number of an event."""
        number = self._event_numbers.get(event)
        if number is None:
            number = self._event_numbers[event] = len(self.events)
            self.events.append(event)
        return number

    def handle(self, number: int, event: int) -> tuple[int, tuple[Any, ...]]:
        """The number of the state after an event, and the effects.

        Raises:
            InvariantError: the event is illegal in that state, or leads to one that breaks an invariant.
        """
        found = self._after.get((number, event))
        if found is None:
            core = clone(self.cores[number])
            effects = tuple(core.handle(self.events[event]))
            found = self._after[number, event] = self.number(self._owners[number], core), effects
        return found


def clone(core: Any) -> Any:
    """A copy that can go another way.

    >>> from cutwater.protocol import messages as m
    >>> from cutwater.protocol.protocols import PROTOCOLS
    >>> first = SubtaskMachine("sum 0", ["a", "b"], protocol=PROTOCOLS["aligned"])
    >>> second = clone(first)
    >>> second.handle(m.BarrierTaken("a", 1)), canonical(first) == canonical(second), first.blocked
    ([Block(input='a')], False, ())
    """
    memo: dict[int, Any] = {}
    new = object.__new__(type(core))
    for name, value in core.__dict__.items():
        new.__dict__[name] = deque(maxlen=16) if name == "_events" else _copy(value, memo)
    return new


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Of a dataclass that changes; nothing of anything else."""
    parameters: Any = getattr(kind, "__dataclass_params__", None)
    return () if parameters is None or parameters.frozen else tuple(f.name for f in dataclasses.fields(kind))


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind is dict:
        return {k: _copy(v, memo) for k, v in value.items()} if value else {}
    if kind is set:
        return set(value)
    if kind is list:
        return [_copy(v, memo) for v in value]
    if kind is deque:
        return deque(value, value.maxlen)
    if kind in _INNER:
        return clone(value)
    fields = _fields(kind)
    if not fields:
        return value
    known = memo.get(id(value))
    if known is None:
        known = memo[id(value)] = object.__new__(kind)
        for name in fields:
            setattr(known, name, _copy(getattr(value, name), memo))
    return known


def canonical(core: Any) -> Hashable:
    """Everything that decides what it does next; the same for equal states however they were reached."""
    return tuple(_plain(name, v) for name, v in core.__dict__.items() if name not in _NOT_STATE)


def _plain(name: str, value: Any) -> Hashable:
    kind = type(value)
    if kind is dict:
        items = [(k, _plain("", v)) for k, v in value.items()]
        return tuple(items) if name in _ORDERED or len(items) < 2 else tuple(sorted(items, key=_by_name))
    if kind is set:
        return frozenset(value)
    if kind is list or kind is deque:
        return tuple(_plain("", v) for v in value)
    if kind in _INNER:
        return canonical(value)
    fields = _fields(kind)
    if fields:
        return tuple(_plain("", getattr(value, field)) for field in fields)
    return value.name if isinstance(value, Enum) else value


def _by_name(item: tuple[Any, Any]) -> str:
    return str(item[0])
