"""Planted bugs of what performs the core's decisions: subtasks, restores, sinks, the log, the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from cutwater.config import RestartConfig
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Barrier, Rows, Timed, Watermark
from cutwater.protocol.subtask.core import Deferred, SubtaskCore
from cutwater.protocol.subtask.performer import Performer
from cutwater.sim.mutants.planting import of_attempts, of_cores, of_performers, of_subtasks
from cutwater.sim.schedules.schedule import Fault
from cutwater.sim.world.attempt import Attempt
from cutwater.sim.world.output import Handle, Output, Settle, retire, settle
from cutwater.sim.world.part import Part
from cutwater.sim.world.subtask import SimSubtask

if TYPE_CHECKING:
    from cutwater.sim.world.disk import Done
    from cutwater.sim.world.world import World


class _MarkerAfterAMessage(Performer):
    """A barrier leaves a little later than the freeze: rows slip in before it."""

    def _broadcast(self, effect: m.BroadcastBarrier) -> None:
        subtask = cast(SimSubtask, self._host)

        def late(_: object) -> None:
            if not (subtask.worker.dead or subtask.dropped):
                super(_MarkerAfterAMessage, self)._broadcast(effect)

        subtask.world.after(1.0, late)


class _MarkerBeforeAMessage(Performer):
    """A barrier that should go in its turn slips before the row ahead of it."""

    def _broadcast(self, effect: m.BroadcastBarrier) -> None:
        super()._broadcast(effect)
        for link in cast(SimSubtask, self._host).outputs:
            waiting = link.sending._waiting  # pyright: ignore[reportPrivateUsage]
            if len(waiting) > 1 and type(waiting[-2]) is Rows:
                barrier = waiting.pop()
                waiting.insert(len(waiting) - 1, barrier)


class _CommitsOnlyThisId(SimSubtask):
    """Older pre-commits, of checkpoints that were given up, stay behind."""

    def commit(self, checkpoint_id: int) -> None:
        if self.sink is not None:
            for id in [i for i in self.sink.handles if i < checkpoint_id]:
                del self.sink.handles[id]
        super().commit(checkpoint_id)


class _AbortsDropRows(SimSubtask):
    """What was staged for a checkpoint that is given up is thrown away with it."""

    def forget(self, checkpoint_id: int) -> None:
        super().forget(checkpoint_id)
        if self.sink is not None:
            self.sink.handles.pop(checkpoint_id, None)


class _ForgetsOvertakenOutputs(Performer):
    """The rows that a barrier overtook at the sender are not kept."""

    def _overtook(self, checkpoint_id: int, overtaken: Sequence[tuple[Any, list[Timed]]], keep: bool) -> None:
        super()._overtook(checkpoint_id, [(key, []) for key, _ in overtaken], keep)


class _ForgetsOvertakenInputs(Performer):
    """The rows that a barrier overtook at the receiver are not kept."""

    def barrier(self, index: int, barrier: Barrier) -> None:
        super().barrier(index, barrier._replace(overtaken=()))


class _FreezesWhileProcessing(SimSubtask):
    """The position of a source is written a row too far."""

    def freeze(self, effect: m.Freeze) -> None:
        before = self.positions
        rows = self.world.schedule.rows
        self.positions = {split: n + (0 < n < rows) for split, n in before.items()}
        super().freeze(effect)
        self.positions = before


def _in_the_middle_of_work(kind: type[m.Event]) -> Callable[[World], None]:
    """An event that may freeze the state is heard while a part of what was made has not left."""

    class Mutant(SubtaskCore):
        def when_idle(self, event: Deferred) -> None:
            if type(event) is kind and self._host.working:
                self.handle(event)
            else:
                super().when_idle(event)

    return of_cores(Mutant)


class _DropsChannelState(Attempt):
    @staticmethod
    def log(sender: Part, receiver: Part, channel: int, back: bool) -> list[Timed]:
        return [item for item in Attempt.log(sender, receiver, channel, back) if type(item) is Watermark]


class _SendersPartFirst(Attempt):
    @staticmethod
    def log(sender: Part, receiver: Part, channel: int, back: bool) -> list[Timed]:
        swapped = Attempt.log(sender, receiver, channel, back)
        first = len(receiver.logs.get(channel, ()))
        second = first + len(sender.overtaken.get(channel, ()))
        return [*swapped[first:second], *swapped[:first], *swapped[second:]]


def _log_without_fence(world: World) -> None:
    """The log takes any number from anybody."""
    take = world.disk._take_number  # pyright: ignore[reportPrivateUsage]
    world.disk._take_number = lambda known, entry: take(len(world.disk.log), entry)  # pyright: ignore[reportPrivateUsage]


def _no_verification(world: World) -> None:
    """A restore takes the newest checkpoint unread."""
    whole = world.disk.whole

    def restored(done: Any) -> None:
        if not whole(done):
            world.judge.broken("damaged snapshot restored", "planted")

    world.judge.restored = restored
    world.disk.whole = lambda done: True


def _settling(steps: Settle) -> Callable[[World], None]:
    """A restore that brings the sinks in line by other steps."""

    def prepare(world: World) -> None:
        world.settle = steps

    return prepare


def _without_commits(
    output: Output, restored: Done | None, retained: Iterable[Done], attempt: int, tasks: frozenset[int]
) -> Iterator[None]:
    """T2 broken: a restore aborts what the restored checkpoint had promised to commit."""
    kept = {p for done in retained for part in done.manifest.values() for p in part.pieces}
    output.sweep(attempt, kept, tasks)
    yield
    for handle in output.later_than(restored.checkpoint_id if restored else 0, attempt, tasks):
        output.take_back(handle, attempt)


def _with_all_commits(
    output: Output, restored: Done | None, retained: Iterable[Done], attempt: int, tasks: frozenset[int]
) -> Iterator[None]:
    """T2 broken: a restore commits whatever it finds staged."""
    for handle in list(output.staged):
        output.commit(handle, restored.checkpoint_id if restored else 0, attempt)
    yield from settle(output, restored, retained, attempt, tasks)


def _without_taking_back(
    output: Output, restored: Done | None, retained: Iterable[Done], attempt: int, tasks: frozenset[int]
) -> Iterator[None]:
    """What later checkpoints committed stays visible, and is written once more."""
    later_than, output.later_than = output.later_than, lambda checkpoint_id, attempt, tasks: []
    yield from settle(output, restored, retained, attempt, tasks)
    output.later_than = later_than


def _listing_too_early(
    output: Output, restored: Done | None, retained: Iterable[Done], attempt: int, tasks: frozenset[int]
) -> Iterator[None]:
    """The target is listed while an old worker can still rename a staged part into it."""
    later = output.later_than(restored.checkpoint_id if restored else 0, attempt, tasks)
    for _ in range(4):
        yield
    later_than = output.later_than
    output.later_than = lambda checkpoint_id, attempt, tasks: later
    yield from settle(output, restored, retained, attempt, tasks)
    output.later_than = later_than


def _taking_back_anybodys(
    output: Output, restored: Done | None, retained: Iterable[Done], attempt: int, tasks: frozenset[int]
) -> Iterator[None]:
    """A driver that was stopped in its restore takes back what its successor has committed."""
    yield from settle(output, restored, retained, 2**31, tasks)


def _no_word_of_going_back(world: World) -> None:
    """A restore of an older checkpoint leaves the newer ones in the log."""
    world.rolls_back = False


def _retires_early(world: World) -> None:
    """Only the newest checkpoint keeps its staged rows."""

    def retire_all(output: Output, retired: Iterable[Done], retained: Iterable[Done]) -> None:
        retire(output, [*retired, *retained], [max(retained, key=lambda done: done.checkpoint_id)])

    world.retire = retire_all


def _removes_shared_pieces(world: World) -> None:
    """A commit removes all pieces of its part, also those that older checkpoints name."""
    output, commit = world.output, world.output.commit

    def commit_and_remove(handle: Handle, checkpoint_id: int, attempt: int) -> None:
        commit(handle, checkpoint_id, attempt)
        for piece in handle.shared:
            output.pieces.pop(piece, None)

    output.commit = commit_and_remove


def _savepoints_at_once(world: World) -> None:
    """A savepoint is handed out when its parts are durable, before a checkpoint behind it is in the log."""
    world.savepoints_wait = False


def _network_without_order(world: World) -> None:
    world.reorders = True


def _sweeps_everything(
    output: Output, restored: Done | None, retained: Iterable[Done], attempt: int, tasks: frozenset[int]
) -> Iterator[None]:
    everything = frozenset(range(1_000))
    sweep, output.sweep = output.sweep, lambda attempt, kept, tasks: sweep(attempt, kept, everything)
    yield from settle(output, restored, retained, attempt, tasks)
    output.sweep = sweep


_MANY_CHECKPOINTS: Mapping[str, Any] = {
    "recovery": "job",
    "rows": 32,
    "pace_ms": 2.0,
    "interval_ms": 6.0,
    "min_pause_ms": 0.0,
    "restart": RestartConfig(strategy="fixed_delay", attempts=1_000_000, delay_ms=2.0),
}
_LATE_RENAMES = _MANY_CHECKPOINTS | {
    "roll_rows": 0,
    "requests": (),
    "faults": tuple(
        fault
        for k in range(5)
        for fault in (
            Fault(25.0 + 30 * k, "partition", 64, 8.0 + k),
            Fault(30.0 + 30 * k, "rot", 8, 0.0),
            Fault(30.1 + 30 * k, "fail_subtask", 3 + k % 3, 0.0),
        )
    ),
}
"""A worker hears late that a checkpoint completed: while the job goes back behind it."""
_STOPPED_IN_A_RESTORE = _MANY_CHECKPOINTS | {
    "roll_rows": 0,
    "requests": (),
    "faults": tuple(
        fault
        for k in range(5)
        for fault in (
            Fault(20.0 + 30 * k, "fail_subtask", k, 0.0),
            Fault(24.0 + 30.5 * k, "zombie_driver", 0, 20.0 + 5 * k),
        )
    ),
}
_STOPPED_IN_A_SAVEPOINT = _MANY_CHECKPOINTS | {
    "interval_ms": 16.0,
    "faults": tuple(Fault(23.0 + 31 * k, "zombie_driver", 0, 20.0 + 5 * k) for k in range(5)),
    "requests": tuple(Fault(20.0 + 30 * k, "savepoint", 0, 0.0) for k in range(5)),
}
_ROLLING_AND_GOING_BACK = _MANY_CHECKPOINTS | {
    "roll_rows": 12,
    "faults": (),
    "requests": tuple(Fault(50.0 + 40 * k, "go_back", k, 0.0) for k in range(3)),
}
"""Parts are of the rows of several checkpoints, and not the newest one is restored."""

PLANTED_HOSTS: tuple[tuple[str, str, str, Mapping[str, Any], Callable[[World], None]], ...] = (
    ("a marker after a message", "four", "aligned", {}, of_performers(_MarkerAfterAMessage)),
    ("a marker before a message", "four", "aligned", {}, of_performers(_MarkerBeforeAMessage)),
    ("commits only the completed id", "four", "aligned", {}, of_subtasks(_CommitsOnlyThisId)),
    ("an abort throws staged rows away", "four", "aligned", {}, of_subtasks(_AbortsDropRows)),
    ("forgets rows overtaken in the outputs", "shuffle", "unaligned", {}, of_performers(_ForgetsOvertakenOutputs)),
    ("forgets rows overtaken in the inputs", "shuffle", "unaligned", {}, of_performers(_ForgetsOvertakenInputs)),
    ("a source's position is a row ahead", "four", "aligned", {}, of_subtasks(_FreezesWhileProcessing)),
    ("a restore drops the state of channels", "four", "chandy_lamport", {}, of_attempts(_DropsChannelState)),
    ("a restore mixes up the parts of a log", "shuffle", "unaligned", {}, of_attempts(_SendersPartFirst)),
    ("ignores fencing", "four", "aligned", {}, _log_without_fence),
    ("restores without verifying", "four", "aligned", {}, _no_verification),
    ("a restore does not commit what was promised (T2)", "four", "aligned", {}, _settling(_without_commits)),
    ("a restore commits whatever is staged (T2)", "four", "aligned", {}, _settling(_with_all_commits)),
    ("does not take back what was committed later", "four", "aligned", {}, _settling(_without_taking_back)),
    ("lists the output before the staging is empty", "shuffle", "aligned", _LATE_RENAMES,
     _settling(_listing_too_early)),
    ("takes back what a successor committed", "four", "aligned", _STOPPED_IN_A_RESTORE,
     _settling(_taking_back_anybodys)),
    ("the log does not say that it went back", "four", "aligned", _ROLLING_AND_GOING_BACK, _no_word_of_going_back),
    ("staged rows of older checkpoints are removed", "four", "aligned", _ROLLING_AND_GOING_BACK,
     _retires_early),
    ("a commit removes what older checkpoints name", "four", "aligned", {}, _removes_shared_pieces),
    ("hands a savepoint out before a checkpoint follows", "diamond", "aligned", _STOPPED_IN_A_SAVEPOINT,
     _savepoints_at_once),
    ("a region's restore sweeps what others have staged", "side_by_side", "aligned", {}, _settling(_sweeps_everything)),
    ("an alignment that takes too long does not wait for work (A1)", "sliced_join", "unaligned",
     {"aligned_timeout_ms": 2.0}, _in_the_middle_of_work(m.AlignmentTimeout)),
    ("a barrier that is seen to wait does not wait for work (A1)", "sliced_join", "unaligned",
     {"aligned_timeout_ms": 0.0}, _in_the_middle_of_work(m.AlignmentTimeout)),
    ("a trigger does not wait for work (A1)", "sliced_loop", "aligned", {}, _in_the_middle_of_work(m.Trigger)),
    ("a network without order, aligned (CL9)", "four", "aligned", {}, _network_without_order),
    ("a network without order, chandy_lamport (CL9)", "four", "chandy_lamport", {}, _network_without_order),
)  # fmt: skip
"""Name, world, protocol, settings, and how the world is prepared."""
