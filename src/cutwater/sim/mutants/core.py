"""Planted bugs: the core, or what performs its decisions, with one mistake each.  The simulator must find every one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cutwater.protocol import messages as m
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.checkpoint.loops import LoopEffect, LoopEvent, LoopMonitor, SendVerdict
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.sim.mutants.ends import PLANTED_ENDS
from cutwater.sim.mutants.hosts import PLANTED_HOSTS
from cutwater.sim.mutants.jobs import PLANTED_JOBS, HearsAnyone
from cutwater.sim.mutants.planting import of_job_cores
from cutwater.sim.mutants.scopes import PLANTED_SCOPES
from cutwater.sim.mutants.shared import MUTANTS_OF_SHARED_CODE
from cutwater.sim.mutants.waves import MUTANTS_OF_WAVES
from cutwater.sim.schedules.schedule import Fault

if TYPE_CHECKING:
    from cutwater.sim.world.world import World


@dataclass(frozen=True)
class Plant:
    """A bug, and where it can show."""

    name: str
    world: str = "four"
    protocol: str = "aligned"
    machine: type[SubtaskMachine] = SubtaskMachine
    coordinator: type[CheckpointCoordinator] = CheckpointCoordinator
    monitor: type[LoopMonitor] = LoopMonitor
    prepare: Callable[[World], None] = lambda world: None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of schedules in which it can show, beside what the seed says."""


# ------------------------------------------------------------------------------------------------ the subtask machine


def _rewriting(change: Callable[[list[m.Effect]], Iterable[m.Effect]]) -> type[SubtaskMachine]:
    class Mutant(SubtaskMachine):
        def handle(self, event: m.Event) -> list[m.Effect]:
            return list(change(super().handle(event)))

    return Mutant


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


class _RecordsNothing(SubtaskMachine):
    def _on_rows(self, event: m.RowsTaken) -> list[m.Effect]:
        return []


class _RecordsBeforeTheFreeze(SubtaskMachine):
    """The log of a back-edge begins with the first barrier of any input, not with the freeze."""

    def _to_record(self, snapshot: Any) -> list[Any]:
        return [i for i in self._inputs if i in self._back_edges]

    def _close_log(self, snapshot: Any, event: Any) -> list[m.Effect]:
        return super()._close_log(snapshot, event) if event.input in snapshot.logs else []


class _ForgetsOneChannel(SubtaskMachine):
    def _to_record(self, snapshot: Any) -> list[Any]:
        return super()._to_record(snapshot)[:-1]

    def _close_log(self, snapshot: Any, event: Any) -> list[m.Effect]:
        return super()._close_log(snapshot, event) if event.input in snapshot.logs else []


class _DropsTheId(SubtaskMachine):
    """Any barrier counts for the newest snapshot that waits for one."""

    def _on_barrier(self, event: m.BarrierTaken) -> list[m.Effect]:
        for id, snapshot in reversed(self._snapshots.items()):
            if id > event.checkpoint_id and snapshot.awaits(event.input):
                event = m.BarrierTaken(event.input, id, event.final, event.probe)
                break
        return super()._on_barrier(event)


class _WaitsForSkippedBarriers(SubtaskMachine):
    """Each holds the input that the other waits for, until somebody gives one of them up."""

    def _give_up_skipped(self, input: Any, id: int) -> list[m.Effect]:
        return []


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


class _IgnoresAborts(SubtaskMachine):
    def _on_abort(self, event: m.AbortNotice) -> list[m.Effect]:
        return []


class _ForgetsWhatWasAborted(SubtaskMachine):
    def _remember_aborted(self, id: int) -> None:
        """The id may come again."""


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


class _AlwaysQuiet(SubtaskMachine):
    def _not_quiet(self, snapshot: Any, input: Any) -> None:
        """Rows in the loop are kept from the coordinator."""


# --------------------------------------------------------------------------------- the coordinator and the loop monitor


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


class _SubsumesNothing(CheckpointCoordinator):
    def _subsume(self, pending: Any, by: int) -> None:
        """The older checkpoint may complete after the newer one."""


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


class _NeverExpires(CheckpointCoordinator):
    def _expire(self) -> None:
        """Waits for ever."""

    def _on_decline(self, event: cm.DeclineReceived) -> None:
        """Nobody declines."""


class _EndsEveryLoop(LoopMonitor):
    """A quiet loop counts as one that has ended."""

    def handle(self, event: LoopEvent) -> list[LoopEffect]:
        effects = super().handle(event)
        return [
            SendVerdict(e.checkpoint_id, e.loop, True, e.watermark) if isinstance(e, SendVerdict) else e
            for e in effects
        ]


class _ReleasesAtOnce(LoopMonitor):
    """Each head lets pass what it marked, whatever the other heads have."""

    def handle(self, event: LoopEvent) -> list[LoopEffect]:
        effects = super().handle(event)
        return [
            SendVerdict(e.checkpoint_id, e.loop, e.ended, 2**63 - 1) if isinstance(e, SendVerdict) else e
            for e in effects
        ]


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

PLANTED = {
    plant.name: plant
    for plant in (
        Plant("skips alignment", machine=_SkipsAlignment),
        Plant("freezes on the first barrier", machine=_FreezesOnFirstBarrier),
        Plant("unblocks in the wrong order", "sources", machine=_rewriting(_unblock_backwards)),
        Plant("acknowledges what is not durable", machine=_rewriting(_acknowledge_at_freeze)),
        Plant("commits before the complete notice", machine=_rewriting(_commit_at_acknowledgement)),
        Plant("leaves early back-edges open (C2)", "self_loop", machine=_LeavesEarlyBackEdgesOpen),
        Plant("records no back-edge", "self_loop", machine=_RecordsNothing),
        Plant("records back-edges whose barrier came before the freeze", "self_loop", machine=_RecordsBeforeTheFreeze),
        Plant("forgets one channel", "sources", "chandy_lamport", machine=_ForgetsOneChannel),
        Plant("drops the snapshot id", "sources", "chandy_lamport", machine=_DropsTheId),
        Plant(
            "waits for barriers that were skipped (A8)",
            "sources",
            "chandy_lamport",
            machine=_WaitsForSkippedBarriers,
            settings=_BURSTS,
        ),
        Plant("takes savepoints like checkpoints", "sources", "chandy_lamport", machine=_SavepointsOfItsOwnRow),
        Plant("acknowledges before the logs are complete", "self_loop", machine=_AcknowledgesWithoutLogs),
        Plant("ignores aborts", protocol="synchronous", machine=_IgnoresAborts),
        Plant("forgets which ids were aborted", machine=_ForgetsWhatWasAborted),
        Plant("drops barriers of ended inputs (A7)", machine=_EndsWithItsInput),
        Plant("does not halt", protocol="synchronous", machine=_NeverHalts),
        Plant(
            "barriers do not overtake after the switch",
            "shuffle",
            "unaligned",
            machine=_IgnoresOvertakenOutputs,
            settings=_CLOGGED,
        ),
        Plant("calls every loop quiet (C6)", "irreducible", "synchronous", machine=_AlwaysQuiet),
        Plant("publishes without the last acknowledgement", coordinator=_PublishesEarly),
        Plant("notifies before it publishes", coordinator=_TellsBeforePublishing),
        Plant("uses ids again", coordinator=_ReusesIds),
        Plant("starts ids anew in a new driver (A1)", coordinator=_StartsIdsAnew),
        Plant("subsumes nothing", coordinator=_SubsumesNothing),
        Plant(
            "takes acknowledgements of an older attempt",
            coordinator=_CountsAnyAttempt,
            prepare=of_job_cores(HearsAnyone),
        ),
        Plant("never gives a checkpoint up", coordinator=_NeverExpires),
        Plant("ends every quiet loop (C6)", "self_loop", monitor=_EndsEveryLoop),
        Plant("one head does not wait for the others (W3)", "two_heads", monitor=_ReleasesAtOnce),
        *(
            Plant(name, world, protocol, prepare=prepare, settings=settings)
            for name, world, protocol, settings, prepare in (
                *PLANTED_HOSTS,
                *PLANTED_JOBS,
                *PLANTED_SCOPES,
                *PLANTED_ENDS,
                *MUTANTS_OF_SHARED_CODE,
                *MUTANTS_OF_WAVES,
            )
        ),
    )
}
"""Every planted bug by its name."""
