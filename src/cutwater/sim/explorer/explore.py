"""All interleavings of small worlds: every state that can be reached, each of them checked.

The search is breadth first, so that the way to a broken promise is a shortest one.  Nothing is left out: every step
that may come next in a state is taken, no two of them are held to be independent, and two states are the same only if
everything in them is, what was sent and what the coordinator counts included.  What makes it quick is ``world.Memo``.

In every state the invariants of the core hold.  Every checkpoint that completes is compared with what was sent, in
every state in which that happens; once for every different checkpoint the way to it is told to the independent
checker, and so is once for every different outcome the way to an end.  In the end all output is there, and (but for
``at_least_once``) once.  When a space is known completely, an end must be reachable from every state without help from
outside: nothing hangs, and nothing goes round for ever without a way out.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Hashable
from typing import Any, TypeAlias

from cutwater.errors import ConfigError, InvariantError
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.checkpoint.loops import LoopMonitor
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.sim.explorer.job import JobState
from cutwater.sim.explorer.network import NetworkSpec, NetworkState, NetworkWorld
from cutwater.sim.explorer.world import Action, Budget, JobWorld
from cutwater.sim.mutants.core import Mutant
from cutwater.sim.schedules.graphs import Graph, graph_of
from cutwater.sim.schedules.schedule import Recovery
from cutwater.sim.world.oracle import Violation
from cutwater.trace import events as e
from cutwater.trace.checker import check

STATES_MAX = 1_000_000

SmallState: TypeAlias = JobState | NetworkState


class Explored:
    """Findings of a search.

    Attributes:
        states: distinct states.
        transitions: steps between them.
        ends: states in which nothing more comes by itself.
        depth: steps of the longest of the shortest ways to a state.
        checked: different checkpoints and outcomes that the independent checker has seen.
        complete: every state there is was visited.
        violation: the broken promise; empty if there is none.
        script: the shortest way to it, a line a step.
    """

    def __init__(self, world: str, protocol: str) -> None:
        self.world, self.protocol = world, protocol
        self.states = self.transitions = self.ends = self.depth = self.checked = 0
        self.seconds = 0.0
        self.complete = False
        self.violation = ""
        self.script: list[str] = []

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(self.__dict__)

    def __str__(self) -> str:
        reach = "all of them" if self.complete else "the search ended early"
        head = (
            f"{self.world}, {self.protocol}: {self.states} states ({reach}), {self.transitions} transitions, "
            f"{self.ends} ends, depth {self.depth}, {self.checked} cuts and ends checked, {self.seconds:.1f} s: "
            f"{self.violation or 'no violation'}"
        )
        return "\n".join([head, *(f"{n:3}. {line}" for n, line in enumerate(self.script, start=1))])


def explore_world(
    world: str,
    protocol: str,
    *,
    large: bool = False,
    budget: Budget | None = None,
    states_max: int = STATES_MAX,
    mutant: Mutant | None = None,
) -> Explored:
    """Visit every state of a small world.

    Args:
        large: more happens, for a long run.
        budget: what may happen, instead of the world's own.
        states_max: stop after so many distinct states.
        mutant: one whose machines run instead of the right ones.

    Raises:
        ConfigError: there is no such world, or no such protocol in it.

    >>> print(explore_world("line", "none", budget=Budget()))  # doctest: +ELLIPSIS
    line, none: ... states (all of them), ... ends, depth ..., ... cuts and ends checked, ... s: no violation
    """
    found = Explored(world, protocol)
    first = first_state(world, protocol, budget or budgets(world, protocol, large=large), mutant)
    began = time.perf_counter()
    search = _Search(found, first, states_max)
    try:
        search.run()
    except (Violation, InvariantError) as error:
        found.violation = str(error).splitlines()[0]
        found.script = search.script()
    found.states = len(search.numbers)
    found.seconds = time.perf_counter() - began
    return found


class _Search:
    """A breadth-first search through one world; states are numbered in the order in which they were found."""

    def __init__(self, found: Explored, first: SmallState, states_max: int) -> None:
        self.found, self.first, self.states_max = found, first, states_max
        self.numbers: dict[Hashable, int] = {first.key(): 0}
        self.parents = array("q", [-1])
        self.actions: list[Action] = [()]
        self.inner_from, self.inner_to = array("q"), array("q")
        self.ends: list[int] = []
        self.seen: set[Hashable] = set()
        self.at, self.action = 0, ()
        """State that it is at, and the step that it takes."""

    def run(self) -> None:
        """Raises Violation and InvariantError; ``script`` then tells the way."""
        found, numbers = self.found, self.numbers
        todo, layer_end = deque([self.first]), 0
        at = -1
        while todo:
            state = todo.popleft()
            at += 1
            self.at, self.action = at, ()
            if at > layer_end:
                found.depth += 1
                layer_end = len(numbers) - 1
            inner, outer = state.actions()
            if not inner:
                self._end(state)
            for number, action in enumerate((*inner, *outer)):
                self.action = action
                after = state.copy()
                after.act(action)
                found.transitions += 1
                key = after.key()
                to = numbers.get(key)
                if to is None:
                    to = numbers[key] = len(numbers)
                    self.parents.append(at)
                    self.actions.append(action)
                    todo.append(after)
                if number < len(inner):
                    self.inner_from.append(at)
                    self.inner_to.append(to)
                if after.completed is not None and after.completed not in self.seen:
                    self.seen.add(after.completed)
                    self._check_way(None)
            if len(numbers) >= self.states_max:
                return
        found.complete = True
        self._check_that_all_can_end()

    def _end(self, state: SmallState) -> None:
        self.found.ends += 1
        self.ends.append(self.at)
        state.check_end()
        outcome = state.outcome()
        if outcome not in self.seen:
            self.seen.add(outcome)
            self._check_way(state.oracle())

    # ----------------------------------------------------------------------------------------------------- the way

    def _way(self) -> list[Action]:
        way = [self.action] if self.action else []
        at = self.at
        while at > 0:
            way.append(self.actions[at])
            at = self.parents[at]
        return way[::-1]

    def _check_way(self, oracle: list[str] | None) -> None:
        """Let the independent checker judge the history that leads here."""
        self.found.checked += 1
        state = self.first.copy()
        story: list[e.Event] = []
        for action in self._way():
            state = state.copy()
            state.story = story
            state.act(action)
        trace = e.Trace(state.header(), tuple(story))
        result = check(trace, at_least_once=not state.exactly, oracle=oracle, drained=oracle is not None)
        if not result.ok:
            raise Violation("independent checker", str(result.violations[0]))

    def script(self) -> list[str]:
        """The way here, for people."""
        lines: list[str] = []
        state = self.first.copy()
        for action in self._way():
            lines.append(state.describe(action))
            try:
                state.act(action)
            except (Violation, InvariantError):
                break
        return lines

    def _check_that_all_can_end(self) -> None:
        """From every state a way leads to an end by itself: backwards from the ends everything is reached."""
        before: list[list[int]] = [[] for _ in self.numbers]
        for a, b in zip(self.inner_from, self.inner_to, strict=True):
            before[b].append(a)
        reached = bytearray(len(self.numbers))
        todo = self.ends[:]
        for end in todo:
            reached[end] = 1
        while todo:
            for state in before[todo.pop()]:
                if not reached[state]:
                    reached[state] = 1
                    todo.append(state)
        stuck = reached.find(0)
        if stuck >= 0:
            self.at, self.action = stuck, ()
            raise Violation("no way to an end", "from here the job goes on for ever")


# ----------------------------------------------------------------------------------------------------- small worlds

_JOBS = (
    "line: read map sink | read-map map-sink",
    "join: read*2 sink | read=sink",
    "loop: read loop*2 | read=loop loop=loop",
    "slices: read*2 sink+slices=2 | read=sink",
)
JOBS = {graph.name: graph for graph in map(graph_of, _JOBS)}
"""Dataflows of three subtasks; in ``loop`` a source feeds a step of parallelism 2 that feeds itself, in ``slices`` the
sink can be in the middle of work."""

CROSSING = {
    "crossing": graph_of("crossing: read*2 sink | read=sink"),
    "crossing_loop": graph_of("crossing_loop: read*2 loop | read=loop loop=loop"),
}
"""Dataflows in which two waves begin at the sources in any order, so that their barriers cross."""

_MERGE = graph_of("merge: read*2 merge sink | read=merge merge-sink")
SCOPES: dict[str, tuple[Recovery, Graph]] = {
    "two_lines": ("region", graph_of("two_lines: read*2 sink*2 | read-sink")),
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
