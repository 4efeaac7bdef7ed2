"""Mutants of the core: its machines with one mistake each.  The simulator must find every one, the explorer many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cutwater.data.time import MAX_WATERMARK
from cutwater.protocol import messages as m
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.checkpoint.loops import (
    LoopEffect,
    LoopEvent,
    LoopMonitor,
    SendVerdict,
    WaveCompleted,
    WaveFailed,
)
from cutwater.protocol.job.core import JobCore
from cutwater.protocol.job.recovery_scope import Place, Subtask
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.watermarks import WatermarkMerger
from cutwater.sim.schedules.schedule import Fault

if TYPE_CHECKING:
    from cutwater.sim.world.world import World


class Mutant:
    """A mistake, and where it can show.

    Args:
        world, protocol: of schedules in which it can show.
        settings: theirs, beside what the seed says.
        machine, coordinator, monitor: what runs instead of the right ones.
        prepare: makes the mistake in a simulated world.
        parts: by the name of the simulated world's attribute, what stands there instead.
    """

    def __init__(
        self,
        name: str,
        world: str = "four",
        protocol: str = "aligned",
        settings: Mapping[str, Any] | None = None,
        *,
        machine: type[SubtaskMachine] = SubtaskMachine,
        coordinator: type[CheckpointCoordinator] = CheckpointCoordinator,
        monitor: type[LoopMonitor] = LoopMonitor,
        prepare: Callable[[World], None] | None = None,
        **parts: Any,
    ) -> None:
        self.name, self.world, self.protocol, self.settings = name, world, protocol, settings or {}
        self.machine, self.coordinator, self.monitor = machine, coordinator, monitor
        self._prepare, self._parts = prepare, parts

    def plant(self, world: World) -> None:
        """Make the mistake in a world in which nothing has happened yet."""
        for name, part in self._parts.items():
            setattr(world, name, part)
        if "job_core_class" in self._parts:
            world.driver.core = world.driver.make_core()
        if self._prepare is not None:
            self._prepare(world)


def idle(kind: type[Any], *methods: str) -> type[Any]:
    """A class whose methods of these names do nothing."""
    return type(f"Idle{kind.__name__}", (kind,), dict.fromkeys(methods, lambda self, *args: []))


# ------------------------------------------------------------------------------------------------ the subtask machine


def _rewriting(change: Callable[[list[m.Effect]], Iterable[m.Effect]]) -> type[SubtaskMachine]:
    class Changed(SubtaskMachine):
        def handle(self, event: m.Event) -> list[m.Effect]:
            return list(change(super().handle(event)))

    return Changed


def _acknowledge_at_freeze(effects: list[m.Effect]) -> Iterable[m.Effect]:
    for effect in effects:
        if not isinstance(effect, m.Acknowledge):
            yield effect
        if isinstance(effect, m.Freeze):
            yield m.Acknowledge(effect.checkpoint_id)


def _commit_at_acknowledgement(effects: list[m.Effect]) -> Iterable[m.Effect]:
    for effect in effects:
        yield effect
        if isinstance(effect, m.Acknowledge):
            yield m.Commit(effect.checkpoint_id)


def _unblock_backwards(effects: list[m.Effect]) -> Iterable[m.Effect]:
    freed = [e for e in effects if isinstance(e, m.Unblock)]
    return [*(e for e in effects if not isinstance(e, m.Unblock)), *reversed(freed)]


def _broadcast_first(effects: list[m.Effect]) -> Iterable[m.Effect]:
    return sorted(effects, key=lambda effect: not isinstance(effect, m.BroadcastBarrier))


class _SkipsAlignment(SubtaskMachine):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"protocol": PROTOCOLS["at_least_once"]})


class _FreezesOnFirstBarrier(SubtaskMachine):
    def _freeze_is_due(self, snapshot: Any) -> bool:
        return True

    def _close_log(self, snapshot: Any, event: Any) -> list[m.Effect]:
        return []


class _LeavesEarlyBackEdgesOpen(SubtaskMachine):
    def _arrive(self, snapshot: Any, event: m.BarrierTaken) -> list[m.Effect]:
        effects = super()._arrive(snapshot, event)
        if event.input in self._back_edges and event.input in self._blocked:
            del self._blocked[event.input]
            return [e for e in effects if not isinstance(e, m.Block)]
        return effects

    def validate(self) -> None:
        """The invariant would tell; here the cut has to."""


class _RecordsLess(SubtaskMachine):
    """A barrier on an input that is not recorded closes no log."""

    def _close_log(self, snapshot: Any, event: Any) -> list[m.Effect]:
        return super()._close_log(snapshot, event) if event.input in snapshot.logs else []


class _RecordsBeforeTheFreeze(_RecordsLess):
    """The log of a back-edge begins with the first barrier of any input, not with the freeze."""

    def _to_record(self, snapshot: Any) -> list[Any]:
        return [i for i in self._inputs if i in self._back_edges]


class _ForgetsOneChannel(_RecordsLess):
    def _to_record(self, snapshot: Any) -> list[Any]:
        return super()._to_record(snapshot)[:-1]


class _DropsTheId(SubtaskMachine):
    """Any barrier counts for the newest snapshot that waits for one."""

    def _on_barrier(self, event: m.BarrierTaken) -> list[m.Effect]:
        for id, snapshot in reversed(self._snapshots.items()):
            if id > event.checkpoint_id and snapshot.awaits(event.input):
                event = m.BarrierTaken(event.input, id, event.final, event.probe)
                break
        return super()._on_barrier(event)


class _SavepointsOfItsOwnRow(SubtaskMachine):
    """A savepoint is no wave of its own kind."""

    def _begin(self, id: int, final: bool, probe: bool, savepoint: bool) -> Any:
        snapshot = super()._begin(id, final, probe, savepoint)
        snapshot.row = self.protocol
        return snapshot


class _AcknowledgesWithoutLogs(SubtaskMachine):
    def _freeze(self, snapshot: Any, first: Any = None) -> list[m.Effect]:
        effects = super()._freeze(snapshot, first)
        if snapshot.logs:
            effects.append(m.Acknowledge(snapshot.checkpoint_id))
        return effects


class _EndsWithItsInput(SubtaskMachine):
    def _on_barrier(self, event: m.BarrierTaken) -> list[m.Effect]:
        return [] if event.input in self._ended else super()._on_barrier(event)


class _NeverHalts(SubtaskMachine):
    @property
    def halted(self) -> bool:
        return False

    def can_take(self, input: Any) -> bool:
        return True

    def _check_taken(self, input: Any, overtaking: bool = False) -> None:
        """Lets everything pass."""


class _IgnoresOvertakenOutputs(SubtaskMachine):
    """Acknowledges although the barriers, going in their turn, have not left the output queues."""

    def _freeze(self, snapshot: Any, first: Any = None) -> list[m.Effect]:
        effects = super()._freeze(snapshot, first)
        return [m.BroadcastBarrier(e.checkpoint_id, e.final, e.probe) if isinstance(e, m.BroadcastBarrier) else e
                for e in effects]  # fmt: skip


class _LosesTheReceiversQueue(SubtaskMachine):
    """What the first barrier overtook at the receiver is in no log."""

    def _freeze(self, snapshot: Any, first: Any = None) -> list[m.Effect]:
        return super()._freeze(snapshot)


class _RecordsOnlyBackEdges(_RecordsLess):
    """Frozen early, but the other inputs are not recorded."""

    def _to_record(self, snapshot: Any) -> list[Any]:
        return [input for input in self._back_edges if input not in snapshot.arrived]


class _StopsRecordingAtTheSwitch(SubtaskMachine):
    """Blocked inputs are let go, the others are taken for empty."""

    def _switch(self, snapshot: Any, barrier: Any = None) -> list[m.Effect]:
        if not snapshot.frozen:
            snapshot.arrived |= set(self._inputs) - snapshot.waiting
        return super()._switch(snapshot, barrier)

    def _arrive(self, snapshot: Any, event: m.BarrierTaken) -> list[m.Effect]:
        return [] if event.input in snapshot.arrived else super()._arrive(snapshot, event)

    def validate(self) -> None:
        """The invariant would tell; here the cut has to."""


# --------------------------------------------------------------------------------- the coordinator and the loop monitor


def _verdicts(**change: Any) -> type[LoopMonitor]:
    """A monitor whose verdicts say something else."""

    class Changed(LoopMonitor):
        def handle(self, event: LoopEvent) -> list[LoopEffect]:
            return [replace(e, **change) if isinstance(e, SendVerdict) else e for e in super().handle(event)]

    return Changed


class _PublishesEarly(CheckpointCoordinator):
    def _on_ack(self, event: cm.AckReceived) -> None:
        pending = self._pending.get(event.checkpoint_id)
        if pending is None:
            super()._on_ack(event)
            return
        everybody = pending.subtasks
        pending.subtasks = everybody - {max(everybody, key=str)}
        super()._on_ack(event)
        pending.subtasks = everybody

    def validate(self) -> None:
        """The invariant would tell."""


class _TellsBeforePublishing(CheckpointCoordinator):
    def _publish_next(self) -> None:
        before = len(self._effects)
        super()._publish_next()
        for effect in self._effects[before:]:
            if isinstance(effect, cm.Publish):
                self._effects.append(cm.NotifyComplete(effect.checkpoint_id, effect.kind, True))


class _ReusesIds(CheckpointCoordinator):
    def _give_up(self, pending: Any, *args: Any, **kwargs: Any) -> None:
        super()._give_up(pending, *args, **kwargs)
        if pending.checkpoint_id == self._last_id:
            self._last_id -= 1

    def validate(self) -> None:
        """The invariant would tell."""


class _StartsIdsAnew(CheckpointCoordinator):
    def __init__(self, settings: Any, subtasks: Any, sources: Any, first_id: int, **kwargs: Any) -> None:
        super().__init__(settings, subtasks, sources, 0, **kwargs)


class _CountsAnyAttempt(CheckpointCoordinator):
    """What is pending survives its attempt: an acknowledgement of another one completes it."""

    def _on_stopped(self, event: cm.JobStopped) -> None:
        self._running = self._final_wanted = False

    def _on_running(self, event: cm.JobRunning) -> None:
        kept, self._pending = self._pending, {}
        super()._on_running(event)
        self._pending = kept
        for pending in kept.values():
            pending.attempt = event.attempt


class _HoldsNothing(WatermarkMerger):
    """What comes into a loop passes at once (W3)."""

    def update(self, input: Any, watermark: int, idle: bool) -> int | None:
        risen = super().update(input, watermark, idle)
        return self.let_pass(self._candidate) if self._back_edges else risen


class _ReleasesTheNewest(WatermarkMerger):
    """What is held now passes, not what was held at the wave."""

    def passing(self, checkpoint_id: int, limit: int = MAX_WATERMARK) -> int:
        return self._candidate


class _KnowsOneWayIn(WatermarkMerger):
    """Rows come into the loop elsewhere, too, and that is forgotten."""

    def passing(self, checkpoint_id: int, limit: int = MAX_WATERMARK) -> int:
        return super().passing(checkpoint_id)


class _AsksOneSubtask(LoopMonitor):
    """The first subtask of a loop stands for all of them."""

    def handle(self, event: LoopEvent) -> list[LoopEffect]:
        if not isinstance(event, WaveCompleted):
            return super().handle(event)
        whole = self._loops
        self._loops = {loop: frozenset([min(subtasks, key=str)]) for loop, subtasks in whole.items()}
        effects = super().handle(event)
        self._loops = whole
        return effects


# ----------------------------------------------------------------------------------------------------- the job's core


class _HearsAnyone(JobCore):
    """What is said by a worker that was replaced, or in the name of an older attempt, counts."""

    def hears(self, slot: int, incarnation: int, attempt: int | None = None, region: int | None = None) -> bool:
        return True


class _ForgetsSurvivors(JobCore):
    """When regions go back, those that run on do not hear which checkpoints are given up."""

    def _perform_checkpoint(self, effect: cm.CoordinatorEffect) -> None:
        if not (isinstance(effect, cm.NotifyAborted) and self.machine.down):
            super()._perform_checkpoint(effect)


class _CompletesBeforePublishing(JobCore):
    """The workers hear that a checkpoint is complete when it is about to be published."""

    def _perform_checkpoint(self, effect: cm.CoordinatorEffect) -> None:
        if isinstance(effect, cm.Publish):
            self._checkpoint_host.complete(cm.NotifyComplete(effect.checkpoint_id, effect.kind, effect.kind.commits))
        super()._perform_checkpoint(effect)


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


_CLOGGED: Mapping[str, Any] = {
    "recovery": "job",
    "rows": 32,
    "pace_ms": 2.0,
    "timeout_ms": 60.0,
    "tolerable_failed": 0,
    "aligned_timeout_ms": 0.0,
    "requests": (),
    "faults": tuple(Fault(10.0 + 9 * k, "clog", k + 2, 20.0) for k in range(10)),
}
"""A barrier that waits for what lies before it comes too late, time and again."""


_BURSTS: Mapping[str, Any] = {
    "rows": 32,
    "faults": (Fault(1.0, "cross", 0, 200.0),),
    "requests": tuple(Fault(8.0 + 9 * k, "burst", k, 0.0) for k in range(6)),
}
"""Several savepoints at once, time and again, from several initiators."""

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

MUTANTS_OF_THE_CORE = (
    Mutant("skips alignment", machine=_SkipsAlignment),
    Mutant("freezes on the first barrier", machine=_FreezesOnFirstBarrier),
    Mutant("unblocks in the wrong order", "sources", machine=_rewriting(_unblock_backwards)),
    Mutant("acknowledges what is not durable", machine=_rewriting(_acknowledge_at_freeze)),
    Mutant("commits before the complete notice", machine=_rewriting(_commit_at_acknowledgement)),
    Mutant("leaves early back-edges open (C2)", "self_loop", machine=_LeavesEarlyBackEdgesOpen),
    Mutant("records no back-edge", "self_loop", machine=idle(SubtaskMachine, "_on_rows")),
    Mutant("records back-edges whose barrier came before the freeze", "self_loop", machine=_RecordsBeforeTheFreeze),
    Mutant("forgets one channel", "sources", "chandy_lamport", machine=_ForgetsOneChannel),
    Mutant("drops the snapshot id", "sources", "chandy_lamport", machine=_DropsTheId),
    Mutant("waits for barriers that were skipped (A8)", "sources", "chandy_lamport", _BURSTS,
           machine=idle(SubtaskMachine, "_give_up_skipped")),
    Mutant("takes savepoints like checkpoints", "sources", "chandy_lamport", machine=_SavepointsOfItsOwnRow),
    Mutant("acknowledges before the logs are complete", "self_loop", machine=_AcknowledgesWithoutLogs),
    Mutant("ignores aborts", protocol="synchronous", machine=idle(SubtaskMachine, "_on_abort")),
    Mutant("forgets which ids were aborted", machine=idle(SubtaskMachine, "_remember_aborted")),
    Mutant("drops barriers of ended inputs (A7)", machine=_EndsWithItsInput),
    Mutant("does not halt", protocol="synchronous", machine=_NeverHalts),
    Mutant("barriers do not overtake after the switch", "shuffle", "unaligned", _CLOGGED,
           machine=_IgnoresOvertakenOutputs),
    Mutant("calls every loop quiet (C6)", "irreducible", "synchronous", machine=idle(SubtaskMachine, "_not_quiet")),
    Mutant("publishes without the last acknowledgement", coordinator=_PublishesEarly),
    Mutant("notifies before it publishes", coordinator=_TellsBeforePublishing),
    Mutant("uses ids again", coordinator=_ReusesIds),
    Mutant("starts ids anew in a new driver (A1)", coordinator=_StartsIdsAnew),
    Mutant("subsumes nothing", coordinator=idle(CheckpointCoordinator, "_subsume")),
    Mutant("takes acknowledgements of an older attempt", coordinator=_CountsAnyAttempt, job_core_class=_HearsAnyone),
    Mutant("never gives a checkpoint up", coordinator=idle(CheckpointCoordinator, "_expire", "_on_decline")),
    Mutant("ends every quiet loop (C6)", "self_loop", monitor=_verdicts(ended=True)),
    Mutant("one head does not wait for the others (W3)", "two_heads", monitor=_verdicts(watermark=MAX_WATERMARK)),
    Mutant("broadcasts before it freezes", "four", "unaligned", machine=_rewriting(_broadcast_first)),
    Mutant("loses what was overtaken at the receiver, unaligned", "shuffle", "unaligned",
           machine=_LosesTheReceiversQueue),
    Mutant("loses what was overtaken at the receiver, synchronous", "shuffle", "synchronous",
           machine=_LosesTheReceiversQueue),
    Mutant("records only back-edges, chandy_lamport", "shuffle", "chandy_lamport", machine=_RecordsOnlyBackEdges),
    Mutant("records only back-edges, unaligned", "shuffle", "unaligned", machine=_RecordsOnlyBackEdges),
    Mutant("stops recording at the switch", "shuffle", "unaligned", machine=_StopsRecordingAtTheSwitch),
    Mutant("holds no watermark (W3)", "self_loop", merger_class=_HoldsNothing),
    Mutant("releases the newest watermark (W3)", "two_heads", merger_class=_ReleasesTheNewest),
    Mutant("knows one way into a loop (W3)", "irreducible", "synchronous", merger_class=_KnowsOneWayIn),
    Mutant("asks one subtask of a loop (C6)", "two_heads", "none", monitor=_AsksOneSubtask),
    Mutant("survivors never hear that a checkpoint was given up", "side_by_side", "synchronous",
           job_core_class=_ForgetsSurvivors),
    Mutant("a checkpoint does not wait for a replacement (R4)", "shuffle", "aligned", _TASK,
           job_core_class=idle(JobCore, "_wait_for")),
    Mutant("the first that has caught up stands for all (R4)", "shuffle", "aligned", _TASK,
           job_core_class=_ResumesAtOnce),
    Mutant("workers hear of a checkpoint before it is published", job_core_class=_CompletesBeforePublishing),
    Mutant("regions go back alone behind the last wave", "shuffle", "aligned", _TASK,
           job_core_class=idle(JobCore, "_final_under_way")),
    Mutant("a wave that never began is waited for (C6)", "moody_loop", "aligned", _KILLED_AMID_PROBES,
           job_core_class=_ResumesWithoutWord),
    Mutant("a wave that was given up is waited for (C6)", "self_loop", "aligned", _PROBES_EXPIRE,
           job_core_class=_FailsWithoutWord),
    Mutant("a new attempt keeps the old one's loop monitor (C6)", "self_loop", job_core_class=_KeepsTheMonitor),
    Mutant("one worker's commit stands for all (A7)", job_core_class=_CommittedByOne),
    Mutant("a message of an older attempt is heard", "moody_stairs", "aligned", _RESCALED,
           job_core_class=_HearsAnyAttempt),
)  # fmt: skip
