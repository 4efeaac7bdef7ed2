"""All interleavings of small worlds: depth-first over states, every one of them checked."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from cutwater.errors import InvariantError
from cutwater.protocol.subtask import SubtaskMachine
from cutwater.sim.explore_actions import ActingState
from cutwater.sim.graphs import Graph, Step
from cutwater.sim.judge import Violation

__all__ = ["SMALL_WORLDS", "Explored", "explore_world"]

SMALL_WORLDS = {
    "line": (Graph("line", [Step("read"), Step("map"), Step("sink")],
                   [("read", "map", "forward"), ("map", "sink", "forward")]), 2),
    "join": (Graph("join", [Step("read", 2), Step("sink")], [("read", "sink", "hash")]), 2),
    "loop": (Graph("loop", [Step("read"), Step("loop", 2)],
                   [("read", "loop", "hash"), ("loop", "loop", "hash")]), 2),
}  # fmt: skip
"""Name -> graph, rows of each source."""


class Explored:
    """What was found.

    Attributes:
        states: distinct states.
        steps: transitions between them.
        complete: every state there is was visited.
        violation: the broken promise, with the way to it; empty if there is none.
    """

    def __init__(self, world: str, protocol: str) -> None:
        self.world, self.protocol = world, protocol
        self.states = self.steps = self.ends = self.completed = 0
        self.complete = False
        self.violation = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(self.__dict__)

    def __str__(self) -> str:
        reach = "all of them" if self.complete else "the search was bounded"
        verdict = self.violation or "no violation"
        return (
            f"{self.world}, {self.protocol}: {self.states} states ({reach}), {self.steps} steps, {self.ends} ends, "
            f"{self.completed} with a completed checkpoint: {verdict}"
        )


def explore_world(
    world: str,
    protocol: str,
    *,
    states_max: int = 20_000,
    machine: type[SubtaskMachine] = SubtaskMachine,
    rows: int = 0,
    eager: bool = True,
    outside: tuple[int, int, int] = (2, 1, 1),
) -> Explored:
    """Visit every state of a small world: two requested checkpoints, one crash, one expiry, at any moment.

    Args:
        states_max: stop after so many distinct states.
        machine: the machine under test, or one with a planted bug.

    >>> print(explore_world("line", "none"))  # doctest: +ELLIPSIS
    line, none: ... states (all of them), ... steps, ... ends, ... with a completed checkpoint: no violation
    """
    graph, rows_default = SMALL_WORLDS[world]
    found = Explored(world, protocol)
    first = ActingState(graph, protocol, rows or rows_default, machine, eager=eager, outside=outside)
    seen: dict[Hashable, tuple[Hashable, str]] = {first.key(): ("", "")}
    valid: set[Hashable] = set()
    todo = [(first, first.key())]
    while todo:
        state, key = todo.pop()
        found.states += 1
        found.completed += state.done is not None
        inner, outer = state.actions()
        if not inner:
            found.ends += 1
        try:
            if not inner:
                state.check_end()
            for name, act in (*inner, *outer):
                after = state.copy()
                act(after)
                found.steps += 1
                after_key = after.key()
                if after_key not in seen and len(seen) < states_max:
                    seen[after_key] = key, name
                    _validate(after, valid)
                    todo.append((after, after_key))
        except (Violation, InvariantError) as error:
            found.violation = f"{str(error).splitlines()[0]}\nafter: {', '.join(_way(seen, key))}"
            return found
    found.complete = len(seen) < states_max
    return found


def _validate(state: ActingState, valid: set[Hashable]) -> None:
    """Every invariant of the core; a machine's state is checked once."""
    for machine, key in zip(state.machines, state.keys, strict=True):
        if key not in valid:
            valid.add(key)
            machine.validate()
    state.coordinator.validate()


def _way(seen: dict[Hashable, tuple[Hashable, str]], key: Hashable) -> list[str]:
    way: list[str] = []
    while seen[key][1]:
        key, name = seen[key]
        way.append(name)
    return way[::-1]
