"""Constants of a small job, and the values that its states are made of."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple, TypeAlias

from cutwater.protocol import messages as m
from cutwater.protocol.protocols import PROTOCOLS, FreezeOn
from cutwater.protocol.subtask.stages import Phase
from cutwater.sim.explorer.memo import Memo
from cutwater.sim.mutants.core import Mutant
from cutwater.sim.schedules.graphs import Graph
from cutwater.sim.schedules.schedule import Recovery

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
