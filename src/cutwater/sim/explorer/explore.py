"""All interleavings of small worlds: every state that can be reached, each of them checked.

The search is breadth first, so that the way to a broken promise is a shortest one.  Nothing is left out: every step
that may come next in a state is taken, no two of them are held to be independent, and two states are the same only if
everything in them is, what was sent and what the coordinator counts included.  What makes it quick is ``memo.Memo``.

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
from typing import Any

from cutwater.errors import InvariantError
from cutwater.sim.explorer.world import Action, Budget
from cutwater.sim.explorer.worlds import SmallState, budgets, first_state
from cutwater.sim.mutants.core import Mutant
from cutwater.sim.world.oracle import Violation
from cutwater.trace import events as e
from cutwater.trace.checker import check

STATES_MAX = 1_000_000


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
