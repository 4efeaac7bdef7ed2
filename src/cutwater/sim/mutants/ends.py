"""Planted bugs of what a rescale does to rows and event time, and of the end of time (W5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from cutwater.data.time import MAX_WATERMARK
from cutwater.protocol.channel.items import Rows, Watermark
from cutwater.protocol.job.redistribution import OldChannel, Passed, RedistributedEdge
from cutwater.protocol.subtask.core import SubtaskCore
from cutwater.protocol.subtask.watermarks import InputTime, merged_time
from cutwater.sim.mutants.planting import of_cores, of_subtasks
from cutwater.sim.schedules.schedule import Fault
from cutwater.sim.world.part import Part
from cutwater.sim.world.subtask import SimSubtask

if TYPE_CHECKING:
    from cutwater.sim.world.attempt import Attempt
    from cutwater.sim.world.worker import SimWorker
    from cutwater.sim.world.world import World

R = TypeVar("R")


def _lost_in_a_rescale(world: World) -> None:
    """What is on its way is forgotten when the parallelism changes."""
    world.rerouting = lambda how, row, old, target, targets: False


def _to_the_old_owner(world: World) -> None:
    """What is on its way goes to the subtask that has the number of the one it was for."""
    world.rerouting = lambda how, row, old, target, targets: old % targets == target


class _EndsWhatNothingConcerns(RedistributedEdge):
    """A new receiver to which nothing was on its way has reached the end of time, as if all of it had come (W5)."""

    def receives(self, old: Sequence[OldChannel[R]]) -> int:
        return super().receives(old) if old else MAX_WATERMARK


class _AsFarAsWhatConcerns(RedistributedEdge):
    """What was on its way takes a new channel as far as its old senders were, and not its new one (W5)."""

    def replayed(self, old: Sequence[OldChannel[R]], share: Callable[[R], R | None]) -> Iterator[Passed[R]]:
        begins, self.begins = self.begins, merged_time([o.sent for o in old] or [InputTime(self.begins)]).watermark
        yield from super().replayed(old, share)
        self.begins = begins


def _redistributes(mutant: type[RedistributedEdge]) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        world.redistributed_edge = mutant

    return prepare


class _EndsOnce(SimSubtask):
    """What had said its end before the snapshot does not say so again."""

    def __init__(self, worker: SimWorker, attempt: Attempt, task: int, part: Part | None) -> None:
        super().__init__(worker, attempt, task, part)
        if part is not None and part.has_ended:
            self.core.channels = replace(self.core.channels, outputs=[])


class _EndOfTimeFirst(SubtaskCore):
    """The end of time is told as soon as a source has read its last row, ahead of what it still has to send (W5)."""

    def _end(self) -> bool:
        for out in cast(SimSubtask, self._host).outputs:
            waiting = out.sending._waiting  # pyright: ignore[reportPrivateUsage]
            if any(type(item) is Rows for item in waiting) and not out.back:
                waiting.appendleft(Watermark(MAX_WATERMARK))
        return super()._end()


_RESCALE: Mapping[str, Any] = {"requests": (Fault(20.0, "rescale", 2, 0.0), Fault(45.0, "rescale", 0, 0.0))}
_TO_TWO: Mapping[str, Any] = {"requests": (Fault(20.0, "rescale", 1, 0.0),)}
_KILLED_AT_THE_END: Mapping[str, Any] = {
    "rows": 12,
    "pace_ms": 0.5,
    "interval_ms": 6.0,
    "faults": tuple(Fault(at_ms, "kill_worker", 0, 0.0) for at_ms in (30.0, 40.0, 50.0, 60.0)),
}

PLANTED_ENDS: tuple[tuple[str, str, str, Mapping[str, Any], Callable[[World], None]], ...] = (
    ("a rescale forgets what is on its way", "four", "chandy_lamport", _RESCALE, _lost_in_a_rescale),
    ("a rescale leaves rows with the number of their subtask", "self_loop", "aligned", _RESCALE, _to_the_old_owner),
    ("a rescale ends the time of what nothing concerns (W5)", "spread", "aligned", _RESCALE,
     _redistributes(_EndsWhatNothingConcerns)),
    ("a rescale takes channels as far as what was on its way (W5)", "side_by_side", "aligned", _TO_TWO,
     _redistributes(_AsFarAsWhatConcerns)),
    ("ends do not come again (W5)", "spread", "aligned", _KILLED_AT_THE_END, of_subtasks(_EndsOnce)),
    ("the end of time overtakes rows (W5)", "spread", "aligned", {}, of_cores(_EndOfTimeFirst)),
)  # fmt: skip
"""Name, world, protocol, settings, and how the world is prepared."""
