"""Planted bugs of recoveries in which not everything goes back (R0, R3, R4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cutwater.protocol import messages as m
from cutwater.protocol.job.regions import Division, Region, lost_together, units_of
from cutwater.protocol.replay.determinants import DeterminantLog
from cutwater.sim.mutants.planting import of_attempts, of_choices, of_subtasks
from cutwater.sim.schedules.schedule import Fault
from cutwater.sim.world.attempt import Attempt
from cutwater.sim.world.choices import Choices
from cutwater.sim.world.subtask import SimSubtask

if TYPE_CHECKING:
    from cutwater.sim.world.worker import SimWorker
    from cutwater.sim.world.world import World


class _ChoosesAnew(Choices):
    """A replacement takes its inputs in another order than survivors know of: dropping by number alone."""

    def follow(self) -> None:
        super().follow()
        self.log, self.behind = DeterminantLog(), False
        self._subtask.core.loop.follow(self.log)


class _ForgetsVerdicts(Choices):
    """What a verdict on the loop changed is in no determinant log."""

    def heard(self, verdict: m.LoopVerdict) -> None:
        """Nothing is logged."""


class _ForgetsOvertaken(Attempt):
    """A replacement does not send what a barrier had overtaken in its outputs, as if receivers had it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for link in self.links:
            if link.owed is None:
                link.sending._waiting.clear()  # pyright: ignore[reportPrivateUsage]


class _TakesAgain(SimSubtask):
    """A survivor takes the rows that come again as if they were new."""

    def survive(self, attempt: Attempt) -> None:
        before = self.inputs.copy()
        super().survive(attempt)
        for old, link in zip(before, self.inputs, strict=True):
            if link is not old:
                link.receiving._next_arrival = link.sending.next_row  # pyright: ignore[reportPrivateUsage]
                link.sending.arrived(0)


class _AsksEarly(Attempt):
    """A replacement asks as soon as it is deployed, while survivors still hear what the one before it chooses."""

    def turned(self, workers: Iterable[SimWorker]) -> bool:
        return True


def _knows_only_its_own(world: World) -> None:
    """What a worker has heard of others' choices it does not pass on."""
    world.passes_on = False


def _asks_for_its_own(world: World) -> None:
    """A replacement asks for its own choices only, and is the only one left who follows what others chose."""
    world.asks_for_all = False


def _divide(world: World, regions: tuple[Region, ...], upstream: tuple[frozenset[int], ...]) -> None:
    world.driver.plan.divide(Division(regions, upstream, world.graph.workers))
    world.driver.core = world.driver.make_core()


def _goes_back_alone(world: World) -> None:
    """What the failed subtasks depend on stays, although nobody keeps what was sent."""
    _divide(world, world.driver.plan.division.regions, ())


def _keeps_what_it_knew(world: World) -> None:
    """A worker that goes back in part still tells others what that part knew."""
    world.forgets = False


def _cuts_loops(world: World) -> None:
    """What they depend on is looked for against the edges of the dataflow only, not against those that close loops."""
    graph = world.graph
    ends = [(graph.tasks[c.source], graph.tasks[c.target]) for c in graph.channels if not c.back]
    _divide(world, *lost_together(*units_of(graph.tasks, ends)))


_TASK: Mapping[str, Any] = {"recovery": "task"}
_UPSTREAM: Mapping[str, Any] = {"recovery": "upstream"}
_SLOW_RECEIVER = _TASK | {
    "rows": 24,
    "pace_ms": 0.3,
    "interval_ms": 6.0,
    "aligned_timeout_ms": 0.0,
    "faults": (Fault(3.0, "slow", 0, 200.0), *(Fault(at_ms, "kill_worker", 1, 0.0) for at_ms in (30.0, 55.0, 80.0))),
}
"""What overtook is complete long before what was overtaken has come."""
_RARE_CHECKPOINTS = _TASK | {
    "rows": 32,
    "pace_ms": 2.0,
    "interval_ms": 500.0,
    "faults": tuple(Fault(at_ms, "kill_worker", 0, 0.0) for at_ms in (40.0, 63.0, 86.0, 109.0)),
}
"""Verdicts on loops come from probes, and much is chosen between two checkpoints."""
_TWO_AT_ONCE = _RARE_CHECKPOINTS | {
    "pace_ms": 0.5,
    "faults": tuple(Fault(at_ms, "kill_worker", 0, 0.0) for at_ms in (35.0, 35.1, 70.0, 70.1)),
}
_FAILS_OFTEN = _UPSTREAM | {
    "rows": 32,
    "pace_ms": 0.5,
    "interval_ms": 500.0,
    "requests": (),
    "faults": tuple(Fault(30.0 + 8 * k, "fail_subtask", 3 + 7 * k, 0.0) for k in range(10)),
}
"""Regions go back and all workers live; much is chosen between two checkpoints."""
_LATE_AND_HEARD = _UPSTREAM | {
    "rows": 32,
    "pace_ms": 2.0,
    "faults": (Fault(40.0, "partition", 1, 100.0), Fault(50.0, "partition", 64, 60.0)),
}
"""The driver gives a worker up that lives, and goes on telling another one, which hears from the driver late."""

PLANTED_SCOPES: tuple[tuple[str, str, str, Mapping[str, Any], Callable[[World], None]], ...] = (
    ("a replacement chooses its own order (R0)", "sources", "aligned", _TASK, of_choices(_ChoosesAnew)),
    ("choices are told to neighbours only (R0)", "wide", "aligned", _TWO_AT_ONCE, _knows_only_its_own),
    ("a verdict is no choice (R0)", "moody_loop", "aligned", _UPSTREAM, of_choices(_ForgetsVerdicts)),
    ("a replacement asks for its own choices only (R0)", "moody_crossing", "aligned", _RARE_CHECKPOINTS,
     _asks_for_its_own),
    ("what was overtaken is not sent again (R4)", "shuffle", "unaligned", _SLOW_RECEIVER,
     of_attempts(_ForgetsOvertaken)),
    ("a replacement asks before all have turned (R0)", "sources", "aligned", _LATE_AND_HEARD, of_attempts(_AsksEarly)),
    ("only what failed goes back (R3)", "moody_stairs", "aligned", _UPSTREAM, _goes_back_alone),
    ("a survivor takes again what it has (R3)", "moody_stairs", "aligned", _UPSTREAM, of_subtasks(_TakesAgain)),
    ("a part that went back keeps what it knew (R3)", "moody_stairs", "aligned", _FAILS_OFTEN, _keeps_what_it_knew),
    ("a loop goes back in parts (R3)", "moody_loop", "aligned", _UPSTREAM, _cuts_loops),
)  # fmt: skip
"""Name, world, protocol, settings, and how the world is prepared."""
