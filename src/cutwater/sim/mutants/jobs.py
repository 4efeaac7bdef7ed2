"""Planted bugs of ``JobCore``: what a decision of one machine means for the others, and what is told in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.loops import LoopEvent, WaveFailed
from cutwater.protocol.job.core import JobCore
from cutwater.protocol.job.regions import Place, Subtask
from cutwater.sim.mutants.planting import of_job_cores
from cutwater.sim.schedules.schedule import Fault

if TYPE_CHECKING:
    from cutwater.sim.world.world import World


class HearsAnyone(JobCore):
    """What is said by a worker that was replaced, or in the name of an older attempt, counts."""

    def hears(self, slot: int, incarnation: int, attempt: int | None = None, region: int | None = None) -> bool:
        return True


class _ForgetsSurvivors(JobCore):
    """When regions go back, those that run on do not hear which checkpoints are given up."""

    def _perform_checkpoint(self, effect: cm.CoordinatorEffect) -> None:
        if not (isinstance(effect, cm.NotifyAborted) and self.machine.down):
            super()._perform_checkpoint(effect)


class _WaitsForNobody(JobCore):
    """Checkpoints go on although a replacement still sends what its receivers have."""

    def _wait_for(self, subtasks: Iterable[Subtask], due_ms: float) -> None:
        """Nobody is behind."""


class _TellsBeforePublishing(JobCore):
    """The workers hear that a checkpoint is complete when it is about to be published."""

    def _perform_checkpoint(self, effect: cm.CoordinatorEffect) -> None:
        if isinstance(effect, cm.Publish):
            self._checkpoint_host.complete(cm.NotifyComplete(effect.checkpoint_id, effect.kind, effect.kind.commits))
        super()._perform_checkpoint(effect)


class _NeverWidens(JobCore):
    """Regions go back alone although others may have passed a wave behind which they read nothing."""

    def _final_under_way(self) -> bool:
        return False


class _ResumesWithoutWord(JobCore):
    """The monitor goes on waiting for a wave that was asked for while a part of the job was away."""

    def _resume(self) -> None:
        if not self.behind and not self.machine.down:
            self._goes_on()


class _FailsWithoutWord(JobCore):
    """The monitor goes on waiting for a wave that was given up."""

    def _watch(self, event: LoopEvent) -> None:
        if not isinstance(event, WaveFailed):
            super()._watch(event)


class _KeepsTheMonitor(JobCore):
    """A new attempt goes on with what the monitor knew of the old one."""

    def _start(self, attempt: int) -> None:
        self._host.start_rows(attempt, None)
        self._goes_on()


class _CommittedByOne(JobCore):
    """The first worker that has committed the last checkpoint stands for all."""

    def committed(self, places: Iterable[Place], checkpoint_id: int, now_ms: float) -> None:
        super().committed(self.machine.parts, checkpoint_id, now_ms)


class _ResumesAtOnce(JobCore):
    """Checkpoints go on when the first of several that went back has caught up."""

    def caught_up(self, subtasks: Iterable[Subtask], now_ms: float) -> None:
        super().caught_up(list(self.behind), now_ms)


class _HearsAnyAttempt(JobCore):
    """What a worker said in the name of an older attempt, or of another parallelism, counts."""

    def hears(self, slot: int, incarnation: int, attempt: int | None = None, region: int | None = None) -> bool:
        return self.machine.workers.get(slot) == incarnation


_TASK: Mapping[str, Any] = {"recovery": "task"}
_PROBES_ONLY: Mapping[str, Any] = {"rows": 32, "pace_ms": 2.0, "interval_ms": 100_000.0, "requests": ()}
"""No checkpoint completes that would tell about the loops what a probe was to tell."""
_KILLED_AMID_PROBES = _TASK | _PROBES_ONLY | {
    "faults": tuple(Fault(40.0 + 23 * k, "kill_worker", 0, 0.0) for k in range(4)),
}  # fmt: skip
_PROBES_EXPIRE = _PROBES_ONLY | {
    "recovery": "job",
    "timeout_ms": 20.0,
    "faults": tuple(Fault(20.0 + 30 * k, "pause", k, 35.0) for k in range(8)),
}
_RESCALED: Mapping[str, Any] = {
    "recovery": "upstream",
    "requests": (Fault(20.0, "rescale", 2, 0.0), Fault(45.0, "rescale", 0, 0.0)),
}

PLANTED_JOBS: tuple[tuple[str, str, str, Mapping[str, Any], Callable[[World], None]], ...] = (
    ("survivors never hear that a checkpoint was given up", "side_by_side", "synchronous", {},
     of_job_cores(_ForgetsSurvivors)),
    ("a checkpoint does not wait for a replacement (R4)", "shuffle", "aligned", _TASK, of_job_cores(_WaitsForNobody)),
    ("the first that has caught up stands for all (R4)", "shuffle", "aligned", _TASK, of_job_cores(_ResumesAtOnce)),
    ("workers hear of a checkpoint before it is published", "four", "aligned", {},
     of_job_cores(_TellsBeforePublishing)),
    ("regions go back alone behind the last wave", "shuffle", "aligned", _TASK, of_job_cores(_NeverWidens)),
    ("a wave that never began is waited for (C6)", "moody_loop", "aligned", _KILLED_AMID_PROBES,
     of_job_cores(_ResumesWithoutWord)),
    ("a wave that was given up is waited for (C6)", "self_loop", "aligned", _PROBES_EXPIRE,
     of_job_cores(_FailsWithoutWord)),
    ("a new attempt keeps the old one's loop monitor (C6)", "self_loop", "aligned", {}, of_job_cores(_KeepsTheMonitor)),
    ("one worker's commit stands for all (A7)", "four", "aligned", {}, of_job_cores(_CommittedByOne)),
    ("a message of an older attempt is heard", "moody_stairs", "aligned", _RESCALED, of_job_cores(_HearsAnyAttempt)),
)  # fmt: skip
"""Name, world, protocol, settings, and how the world is prepared."""
