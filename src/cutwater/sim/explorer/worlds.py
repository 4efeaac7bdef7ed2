"""The small worlds by name, and how much happens in each."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, Self

from cutwater.errors import ConfigError
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.checkpoint.loops import LoopMonitor
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.sim.explorer.job import JobState
from cutwater.sim.explorer.network import NetworkSpec, NetworkState, NetworkWorld
from cutwater.sim.explorer.world import Action, Budget, JobWorld
from cutwater.sim.mutants.core import Mutant
from cutwater.sim.schedules.graphs import Graph, Step
from cutwater.sim.schedules.schedule import Recovery
from cutwater.trace import events as e


class SmallState(Protocol):
    """Interface of a state for the search."""

    completed: Hashable
    """Set by a step that completes a checkpoint: what there is to check."""
    story: list[e.Event] | None
    """List to which the state tells its history, if anybody wants to know."""

    @property
    def exactly(self) -> bool:
        """Nothing may be lost or doubled."""
        ...

    def actions(self) -> tuple[list[Action], list[Action]]:
        """Steps that may come next: by themselves, and from outside."""
        ...

    def act(self, action: Action) -> None:
        """Take a step."""
        ...

    def describe(self, action: Action) -> str:
        """A step, for people."""
        ...

    def copy(self) -> Self:
        """A state that can be changed without changing this one."""
        ...

    def key(self) -> Hashable:
        """Equal states have equal keys."""
        ...

    def check_end(self) -> None:
        """Nothing more comes by itself: is that right?"""
        ...

    def outcome(self) -> Hashable:
        """Values to check at an end."""
        ...

    def oracle(self) -> list[str]:
        """The rows that must be committed at an end."""
        ...

    def header(self) -> e.Header:
        """The first line of a trace."""
        ...


_MERGE = Graph("merge", [Step("read", 2), Step("merge"), Step("sink")],
               [("read", "merge", "hash"), ("merge", "sink", "forward")])  # fmt: skip
JOBS = {
    "line": Graph("line", [Step("read"), Step("map"), Step("sink")],
                  [("read", "map", "forward"), ("map", "sink", "forward")]),
    "join": Graph("join", [Step("read", 2), Step("sink")], [("read", "sink", "hash")]),
    "loop": Graph("loop", [Step("read"), Step("loop", 2)],
                  [("read", "loop", "hash"), ("loop", "loop", "hash")]),
    "slices": Graph("slices", [Step("read", 2), Step("sink", slices=2)], [("read", "sink", "hash")]),
}  # fmt: skip
"""Dataflows of three subtasks; in ``loop`` a source feeds a step of parallelism 2 that feeds itself, in ``slices`` the
sink can be in the middle of work."""

CROSSING = {
    "crossing": Graph("crossing", [Step("read", 2), Step("sink")], [("read", "sink", "hash")]),
    "crossing_loop": Graph("crossing_loop", [Step("read", 2), Step("loop")],
                           [("read", "loop", "hash"), ("loop", "loop", "hash")]),
}  # fmt: skip
"""Dataflows in which two waves begin at the sources in any order, so that their barriers cross."""

SCOPES: dict[str, tuple[Recovery, Graph]] = {
    "two_lines": ("region", Graph("two_lines", [Step("read", 2), Step("sink", 2)], [("read", "sink", "forward")])),
    "merge_upstream": ("upstream", _MERGE),
    "merge_task": ("task", _MERGE),
}
"""Dataflows of which a part goes back, and how much of it: two that have nothing to do with each other; two sources
that meet in a step, so that what it sends depends on which it hears first, and a sink."""

NETWORKS = {
    "ring": NetworkSpec("ring", ("p", "q", "r"), ((0, 1), (1, 2), (2, 0)), ((0, 1), (2,))),
    "pair": NetworkSpec("pair", ("p", "q"), ((0, 1), (1, 0)), ((0, 1), (1,)), fifo=False),
}
"""Process networks; the channels of ``pair`` reorder."""

ALGORITHMS = {"ring": ("chandy_lamport", "lai_yang"), "pair": ("lai_yang",)}

ONCE, FIVE, ROUND = (0,), (0, 1, 2, 3, 4), (3,)
"""Rows: the first one of each source; some; one that goes around the loop, through both subtasks."""
_QUICK = Budget(ONCE, eager=True, prompt=True)

_CROSS = _QUICK._replace(requests=0, savepoints=2, crashes=0, direct=True, hasty=True, crossing=True)

_SMALL = {
    ("line", "none"): Budget(FIVE),
    ("join", "none"): Budget(FIVE),
    ("loop", "none"): Budget(ROUND, crashes=0),
    ("line", "aligned"): Budget(ONCE, eager=True),
    ("join", "aligned"): _QUICK._replace(requests=1, expiries=1),
    ("loop", "aligned"): _QUICK._replace(rows=ROUND, requests=1),
    ("line", "at_least_once"): Budget(ONCE, requests=1),
    ("join", "at_least_once"): _QUICK._replace(requests=1),
    ("loop", "at_least_once"): _QUICK._replace(rows=ROUND, requests=1, crashes=0),
    ("line", "chandy_lamport"): Budget(ONCE, eager=True),
    ("join", "chandy_lamport"): _QUICK._replace(requests=1),
    ("loop", "chandy_lamport"): _QUICK._replace(rows=ROUND, requests=1, crashes=0),
    ("line", "unaligned"): _QUICK._replace(requests=1),
    ("join", "unaligned"): _QUICK._replace(requests=1, direct=True, hasty=True),
    ("loop", "unaligned"): _QUICK._replace(rows=ROUND, requests=1, crashes=0, direct=True, hasty=True),
    ("line", "synchronous"): _QUICK._replace(requests=1),
    ("join", "synchronous"): Budget(ONCE, requests=1, crashes=0, eager=True),
    ("loop", "synchronous"): _QUICK._replace(rows=ROUND, requests=0, crashes=0, direct=True),
    ("slices", "none"): Budget(ONCE),
    ("slices", "aligned"): _QUICK._replace(requests=1),
    ("slices", "at_least_once"): _QUICK._replace(requests=1, crashes=0),
    ("slices", "chandy_lamport"): _QUICK._replace(requests=1, crashes=0),
    ("slices", "unaligned"): _QUICK._replace(requests=1, direct=True, hasty=True),
    ("slices", "synchronous"): _QUICK._replace(requests=1, crashes=0),
    ("two_lines", "aligned"): _QUICK._replace(requests=1),
    ("two_lines", "unaligned"): _QUICK._replace(requests=0, direct=True, hasty=True),
    ("merge_upstream", "aligned"): _QUICK._replace(requests=0),
    ("merge_task", "aligned"): _QUICK._replace(requests=0),
    **{("crossing", p): _CROSS for p in PROTOCOLS if p != "none"},
    **{("crossing_loop", p): _CROSS._replace(rows=()) for p in ("aligned", "chandy_lamport")},
    ("ring", "chandy_lamport"): Budget(ONCE, requests=1),
    ("ring", "lai_yang"): Budget(ONCE, requests=1, crashes=0),
    ("pair", "lai_yang"): Budget(ONCE, crashes=0),
}
_LARGE = _SMALL | {
    ("join", "none"): Budget(tuple(range(21))),
    ("loop", "none"): Budget(ROUND),
    ("join", "aligned"): Budget(ONCE, requests=1, crashes=0),
    ("loop", "aligned"): _QUICK._replace(rows=ROUND),
    ("loop", "at_least_once"): _QUICK._replace(rows=ROUND),
    ("loop", "chandy_lamport"): _QUICK._replace(rows=ROUND, requests=1),
    ("ring", "chandy_lamport"): Budget(ONCE, crashes=0),
    ("join", "unaligned"): _QUICK._replace(requests=1, direct=True),
    ("loop", "unaligned"): _QUICK._replace(rows=ROUND, requests=1, crashes=0, direct=True),
    ("loop", "synchronous"): _QUICK._replace(rows=ROUND, requests=1, crashes=0, direct=True),
    ("crossing", "chandy_lamport"): _CROSS._replace(requests=1, savepoints=1),
    ("crossing_loop", "chandy_lamport"): _CROSS._replace(rows=ROUND),
    ("ring", "lai_yang"): Budget(ONCE),
    ("slices", "at_least_once"): _QUICK._replace(requests=1),
    ("slices", "chandy_lamport"): _QUICK._replace(requests=1),
    ("slices", "unaligned"): _QUICK._replace(requests=1, direct=True),
    ("slices", "synchronous"): _QUICK._replace(requests=1),
    ("two_lines", "unaligned"): _QUICK._replace(requests=1, direct=True),
    ("merge_upstream", "aligned"): _QUICK._replace(requests=1),
    ("merge_task", "aligned"): _QUICK._replace(requests=1),
}

_RIGHT = (SubtaskMachine, CheckpointCoordinator, LoopMonitor)
"""The machines without a mistake."""


def combinations() -> list[tuple[str, str]]:
    """Every world with every protocol that it runs under."""
    jobs = [(world, protocol) for protocol in PROTOCOLS for world in JOBS]
    jobs += [(world, protocol) for world in CROSSING for protocol in PROTOCOLS if (world, protocol) in _SMALL]
    jobs += [("two_lines", "unaligned"), *((world, "aligned") for world in SCOPES)]
    return jobs + [(world, protocol) for world, protocols in ALGORITHMS.items() for protocol in protocols]


def budgets(world: str, protocol: str, *, large: bool) -> Budget:
    """Budget of a world under a protocol.

    Raises:
        ConfigError: there is no such world, or not under this protocol.
    """
    found = (_LARGE if large else _SMALL).get((world, protocol))
    if found is None:
        raise no_such_world(world, protocol)
    return found


def first_state(world: str, protocol: str, budget: Budget, mutant: Mutant | None = None) -> SmallState:
    """First state of a search.

    Raises:
        ConfigError: there is no such world, or not under this protocol; or the bug is not one of the core's machines.
    """
    if mutant is not None and (mutant.machine, mutant.coordinator, mutant.monitor) == _RIGHT:
        raise ConfigError(f"planted bug {mutant.name!r} is none of the core's", hint="Find it with: cutwater simulate.")
    if world in JOBS | CROSSING and protocol in PROTOCOLS:
        return JobState(JobWorld((JOBS | CROSSING)[world], protocol, budget, mutant or Mutant("")))
    if world in SCOPES and protocol in PROTOCOLS:
        recovery, graph = SCOPES[world]
        return JobState(JobWorld(graph, protocol, budget, mutant or Mutant(""), recovery))
    if world in NETWORKS and protocol in ("chandy_lamport", "lai_yang") and mutant is None:
        return NetworkState(NetworkWorld(NETWORKS[world], protocol, budget))
    raise no_such_world(world, protocol)


def no_such_world(world: str, protocol: str) -> ConfigError:
    """Error for a combination that is not there."""
    known = "; ".join(f"{w} under {p}" for w, p in combinations())
    return ConfigError(f"no small world {world!r} under {protocol!r}", hint=f"There are: {known}.")
