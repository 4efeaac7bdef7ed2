"""Mutants of what performs the core's decisions: subtasks, channels, restores, sinks, the log, partial recoveries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from cutwater.config import RestartConfig
from cutwater.data.time import MAX_WATERMARK
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Barrier, Item, Rows, Timed, Watermark
from cutwater.protocol.channel.receiving import ReceivingEnd
from cutwater.protocol.channel.sending import ReplayBuffer, SendingEnd
from cutwater.protocol.determinants import DeterminantLog
from cutwater.protocol.job.recovery_scope import Division, Region, lost_together, units_of
from cutwater.protocol.subtask.core import Deferred, SubtaskCore
from cutwater.protocol.subtask.performer import Performer
from cutwater.protocol.subtask.watermarks import InputTime, OldChannel, Passed, RedistributedEdge, merged_time
from cutwater.sim.mutants.core import Mutant, idle
from cutwater.sim.schedules.schedule import Fault
from cutwater.sim.world.attempt import Attempt
from cutwater.sim.world.choices import Choices
from cutwater.sim.world.disk import Part
from cutwater.sim.world.output import Handle, Output, retire, settle
from cutwater.sim.world.subtask import SimSubtask

if TYPE_CHECKING:
    from cutwater.sim.world.disk import Done
    from cutwater.sim.world.worker import SimWorker
    from cutwater.sim.world.world import World

R = TypeVar("R")

# -------------------------------------------------------------------------------------------- subtasks and performers


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


def _in_the_middle_of_work(kind: type[m.Event]) -> type[SubtaskCore]:
    """An event that may freeze the state is heard while a part of what was made has not left."""

    class Changed(SubtaskCore):
        def when_idle(self, event: Deferred) -> None:
            if type(event) is kind and self._host.working:
                self.handle(event)
            else:
                super().when_idle(event)

    return Changed


class _TimeBeforeItsRows(SubtaskCore):
    """A watermark that rides on rows is taken before them."""

    def rows(self, index: int, item: Rows) -> None:
        self.advance(index, item.watermark, False)
        super().rows(index, item)


class _EndWithoutTime(SubtaskCore):
    """The end of an input says nothing of time: what waits for the last watermark waits on (W5)."""

    def advance(self, index: int, watermark: int, idle: bool) -> None:
        if watermark < 2**63 - 1:
            super().advance(index, watermark, idle)


class _AnswersNothing(Performer):
    """What barriers overtook in the outputs is not told to the machine."""

    def handle(self, event: m.Event) -> None:
        super().handle(event)
        self._events.clear()

    def _overtook(self, checkpoint_id: int, overtaken: Any, keep: bool) -> None:
        super()._overtook(checkpoint_id, overtaken, keep)
        self._events.pop()


class _AsksOnce(Performer):
    """The head of a loop asks for one wave, and never again (C6, W3)."""

    def outcome(self, event: m.CompleteNotice | m.AbortNotice) -> None:
        asked = self._asked
        super().outcome(event)
        self._asked = asked


class _ForgetsItsLogs(Performer):
    """What was recorded is written for the first input only."""

    def _write_logs(self, checkpoint_id: int) -> None:
        del self._mine(checkpoint_id).logs[1:]
        super()._write_logs(checkpoint_id)


class _FreezesBehindItsBarriers(Performer):
    """Outputs are marked where the next checkpoint finds them: what is kept for a receiver begins too late (R4)."""

    def _broadcast(self, effect: m.BroadcastBarrier) -> None:
        super()._broadcast(effect)
        for output in self._channels.outputs:
            output.settled(effect.checkpoint_id, True)


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


# ----------------------------------------------------------------------------------- restores, sinks and the log


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
            world.oracle.broken("damaged snapshot restored", "planted")

    world.oracle.restored = restored
    world.disk.whole = lambda done: True


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


def _without_taking_back(output: Output, *what: Any) -> Iterator[None]:
    """What later checkpoints committed stays visible, and is written once more."""
    later_than, output.later_than = output.later_than, lambda checkpoint_id, attempt, tasks: []
    yield from settle(output, *what)
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


def _retires_early(output: Output, retired: Iterable[Done], retained: Iterable[Done]) -> None:
    """Only the newest checkpoint keeps its staged rows."""
    retire(output, [*retired, *retained], [max(retained, key=lambda done: done.checkpoint_id)])


def _removes_shared_pieces(world: World) -> None:
    """A commit removes all pieces of its part, also those that older checkpoints name."""
    output, commit = world.output, world.output.commit

    def commit_and_remove(handle: Handle, checkpoint_id: int, attempt: int) -> None:
        commit(handle, checkpoint_id, attempt)
        for piece in handle.shared:
            output.pieces.pop(piece, None)

    output.commit = commit_and_remove


def _sweeps_everything(output: Output, *what: Any) -> Iterator[None]:
    everything = frozenset(range(1_000))
    sweep, output.sweep = output.sweep, lambda attempt, kept, tasks: sweep(attempt, kept, everything)
    yield from settle(output, *what)
    output.sweep = sweep


# ------------------------------------------------------------------------------------------------ ends of channels


class _GivesCreditTwice(ReceivingEnd):
    """A place that became free is given back twice."""

    def _frame_left(self) -> None:
        super()._frame_left()
        if self.on_credit is not None:
            self.on_credit(1)


class _RecordsFromTheNextItem(ReceivingEnd):
    """A recording begins one item too late."""

    def stop_recording(self, checkpoint_id: int) -> list[Timed]:
        return super().stop_recording(checkpoint_id)[1:]


class _OvertakesEverything(ReceivingEnd):
    """What arrived behind a barrier that overtook is taken for overtaken, too."""

    def _rows_before(self, place: int) -> tuple[Timed, ...]:
        return super()._rows_before(1 << 62)


class _LetsWatermarksPass(SendingEnd):
    """A watermark goes before the rows that wait for credit."""

    def flush_watermark(self) -> None:
        if self.watermark_unsent and self._waiting:
            self.watermark_unsent = False
            self._send(Watermark(self.watermark, self.idle))
        else:
            super().flush_watermark()


class _LosesAPart(SendingEnd):
    """A frame of which a receiver has some rows is not sent again at all."""

    def _lacking(self, item: Rows) -> Rows | Watermark:
        lacking = super()._lacking(item)
        return lacking if lacking is item else Watermark(item.watermark)


class _KeepsFromTheNewest(ReplayBuffer):
    """What is kept begins at the newest mark, whether its checkpoint completes or not."""

    def mark(self, checkpoint_id: int) -> None:
        super().mark(checkpoint_id)
        before = self._base
        self.completed(checkpoint_id)
        self._base = before


class _KeepsTooLittle(SendingEnd):
    """The sending end of a channel with such a buffer."""

    def __init__(self, key: Any, send: Callable[[Item], None], **others: Any) -> None:
        kept: ReplayBuffer | None = others.pop("kept", None)
        if kept is not None:
            kept = _KeepsFromTheNewest(
                kept._keep,  # pyright: ignore[reportPrivateUsage]
                most_memory_bytes=kept.most_memory_bytes,
                base=kept._base,  # pyright: ignore[reportPrivateUsage]
            )
        super().__init__(key, send, kept=kept, **others)


# -------------------------------------------------------------------------------------------------------- rescaling


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


# ------------------------------------------------------------------------------------------------- partial recovery


class _ChoosesAnew(Choices):
    """A replacement takes its inputs in another order than survivors know of: dropping by number alone."""

    def follow(self) -> None:
        super().follow()
        self.log, self.behind = DeterminantLog(), False
        self._subtask.core.loop.follow(self.log)


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


def _divide(world: World, regions: tuple[Region, ...], upstream: tuple[frozenset[int], ...]) -> None:
    world.driver.plan.divide(Division(regions, upstream, world.graph.workers))
    world.driver.core = world.driver.make_core()


def _goes_back_alone(world: World) -> None:
    """What the failed subtasks depend on stays, although nobody keeps what was sent."""
    _divide(world, world.driver.plan.division.regions, ())


def _cuts_loops(world: World) -> None:
    """What they depend on is looked for against the edges of the dataflow only, not against those that close loops."""
    graph = world.graph
    ends = [(graph.tasks[c.source], graph.tasks[c.target]) for c in graph.channels if not c.back]
    _divide(world, *lost_together(*units_of(graph.tasks, ends)))


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

_LONG_TASK: Mapping[str, Any] = {"recovery": "task", "rows": 32, "pace_ms": 1.0}
_KILLED_IN_CHECKPOINTS = _LONG_TASK | {
    "interval_ms": 5.0,
    "faults": tuple(Fault(12.0 + 17 * k, "kill_worker", k, 0.0) for k in range(6)),
}

_RESCALE: Mapping[str, Any] = {"requests": (Fault(20.0, "rescale", 2, 0.0), Fault(45.0, "rescale", 0, 0.0))}
_TO_TWO: Mapping[str, Any] = {"requests": (Fault(20.0, "rescale", 1, 0.0),)}
_KILLED_AT_THE_END: Mapping[str, Any] = {
    "rows": 12,
    "pace_ms": 0.5,
    "interval_ms": 6.0,
    "faults": tuple(Fault(at_ms, "kill_worker", 0, 0.0) for at_ms in (30.0, 40.0, 50.0, 60.0)),
}

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

MUTANTS_OF_HOSTS = (
    Mutant("a marker after a message", performer_class=_MarkerAfterAMessage),
    Mutant("a marker before a message", performer_class=_MarkerBeforeAMessage),
    Mutant("commits only the completed id", subtask_class=_CommitsOnlyThisId),
    Mutant("an abort throws staged rows away", subtask_class=_AbortsDropRows),
    Mutant("forgets rows overtaken in the outputs", "shuffle", "unaligned", performer_class=_ForgetsOvertakenOutputs),
    Mutant("forgets rows overtaken in the inputs", "shuffle", "unaligned", performer_class=_ForgetsOvertakenInputs),
    Mutant("a source's position is a row ahead", subtask_class=_FreezesWhileProcessing),
    Mutant("a restore drops the state of channels", "four", "chandy_lamport", attempt_class=_DropsChannelState),
    Mutant("a restore mixes up the parts of a log", "shuffle", "unaligned", attempt_class=_SendersPartFirst),
    Mutant("ignores fencing", prepare=_log_without_fence),
    Mutant("restores without verifying", prepare=_no_verification),
    Mutant("a restore does not commit what was promised (T2)", settle=_without_commits),
    Mutant("a restore commits whatever is staged (T2)", settle=_with_all_commits),
    Mutant("does not take back what was committed later", settle=_without_taking_back),
    Mutant("lists the output before the staging is empty", "shuffle", "aligned", _LATE_RENAMES,
           settle=_listing_too_early),
    Mutant("takes back what a successor committed", "four", "aligned", _STOPPED_IN_A_RESTORE,
           settle=_taking_back_anybodys),
    Mutant("the log does not say that it went back", "four", "aligned", _ROLLING_AND_GOING_BACK, rolls_back=False),
    Mutant("staged rows of older checkpoints are removed", "four", "aligned", _ROLLING_AND_GOING_BACK,
           retire=_retires_early),
    Mutant("a commit removes what older checkpoints name", prepare=_removes_shared_pieces),
    Mutant("hands a savepoint out before a checkpoint follows", "diamond", "aligned", _STOPPED_IN_A_SAVEPOINT,
           savepoints_wait=False),
    Mutant("a region's restore sweeps what others have staged", "side_by_side", settle=_sweeps_everything),
    Mutant("an alignment that takes too long does not wait for work (A1)", "sliced_join", "unaligned",
           {"aligned_timeout_ms": 2.0}, core_class=_in_the_middle_of_work(m.AlignmentTimeout)),
    Mutant("a barrier that is seen to wait does not wait for work (A1)", "sliced_join", "unaligned",
           {"aligned_timeout_ms": 0.0}, core_class=_in_the_middle_of_work(m.AlignmentTimeout)),
    Mutant("a trigger does not wait for work (A1)", "sliced_loop", core_class=_in_the_middle_of_work(m.Trigger)),
    Mutant("a network without order, aligned (CL9)", reorders=True),
    Mutant("a network without order, chandy_lamport (CL9)", "four", "chandy_lamport", reorders=True),
    Mutant("a replacement chooses its own order (R0)", "sources", "aligned", _TASK, choices_class=_ChoosesAnew),
    Mutant("choices are told to neighbours only (R0)", "wide", "aligned", _TWO_AT_ONCE, passes_on=False),
    Mutant("a verdict is no choice (R0)", "moody_loop", "aligned", _UPSTREAM, choices_class=idle(Choices, "heard")),
    Mutant("a replacement asks for its own choices only (R0)", "moody_crossing", "aligned", _RARE_CHECKPOINTS,
           asks_for_all=False),
    Mutant("what was overtaken is not sent again (R4)", "shuffle", "unaligned", _SLOW_RECEIVER,
           attempt_class=_ForgetsOvertaken),
    Mutant("a replacement asks before all have turned (R0)", "sources", "aligned", _LATE_AND_HEARD,
           attempt_class=_AsksEarly),
    Mutant("only what failed goes back (R3)", "moody_stairs", "aligned", _UPSTREAM, prepare=_goes_back_alone),
    Mutant("a survivor takes again what it has (R3)", "moody_stairs", "aligned", _UPSTREAM, subtask_class=_TakesAgain),
    Mutant("a part that went back keeps what it knew (R3)", "moody_stairs", "aligned", _FAILS_OFTEN, forgets=False),
    Mutant("a loop goes back in parts (R3)", "moody_loop", "aligned", _UPSTREAM, prepare=_cuts_loops),
    Mutant("a rescale forgets what is on its way", "four", "chandy_lamport", _RESCALE, rerouting=lambda *_: False),
    Mutant("a rescale leaves rows with the number of their subtask", "self_loop", "aligned", _RESCALE,
           rerouting=lambda how, row, old, target, targets: old % targets == target),
    Mutant("a rescale ends the time of what nothing concerns (W5)", "spread", "aligned", _RESCALE,
           redistributed_edge=_EndsWhatNothingConcerns),
    Mutant("a rescale takes channels as far as what was on its way (W5)", "side_by_side", "aligned", _TO_TWO,
           redistributed_edge=_AsFarAsWhatConcerns),
    Mutant("ends do not come again (W5)", "spread", "aligned", _KILLED_AT_THE_END, subtask_class=_EndsOnce),
    Mutant("the end of time overtakes rows (W5)", "spread", core_class=_EndOfTimeFirst),
    Mutant("takes the time of rows before them", "shuffle", core_class=_TimeBeforeItsRows),
    Mutant("an end says nothing of time (W5)", "self_loop", core_class=_EndWithoutTime),
    Mutant("does not tell what was overtaken", "shuffle", "unaligned", performer_class=_AnswersNothing),
    Mutant("a head asks once (C6)", "two_heads", "none", performer_class=_AsksOnce),
    Mutant("writes the log of one channel", "sources", "chandy_lamport", performer_class=_ForgetsItsLogs),
    Mutant("forgets what a receiver needs when its barriers leave (R4)", "shuffle", "aligned", _KILLED_IN_CHECKPOINTS,
           performer_class=_FreezesBehindItsBarriers),
    Mutant("gives credit twice", receiving_class=_GivesCreditTwice),
    Mutant("records from the next item on (CL2)", "sources", "chandy_lamport", receiving_class=_RecordsFromTheNextItem),
    Mutant("a barrier overtakes what came behind it", "shuffle", "unaligned", receiving_class=_OvertakesEverything),
    Mutant("a watermark overtakes rows", "spread", sending_class=_LetsWatermarksPass),
    Mutant("does not send the rest of a frame again (R3)", "shuffle", "aligned", _LONG_TASK, sending_class=_LosesAPart),
    Mutant("keeps rows since the newest mark only (R4)", "shuffle", "aligned", _KILLED_IN_CHECKPOINTS,
           sending_class=_KeepsTooLittle),
)  # fmt: skip
