"""The order in which the effects of a subtask's machine are performed, and what answers them.

An effect may be answered at once (a probe is durable, so many rows were overtaken): such events are taken after the
effects of the current one.  Whatever froze is handed to the writer when nothing is left to do, because only then it is
known whether logs will follow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import InvariantError
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Barrier, Timed, Watermark, rows_in
from cutwater.protocol.subtask.host import ChannelLog, LoopReport, SubtaskChannels, SubtaskHost
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.watermarks import InputTime, WatermarkMerger


class TimesAtFreeze(msgspec.Struct, frozen=True):
    """Event time and pending work of a subtask in a loop, at its freeze."""

    drained: bool
    outside: InputTime
    """Of the inputs that do not belong to the loop."""
    timers_pending: bool
    """A timer may still make rows."""
    keeps_rows: bool
    """An operator keeps rows that it has not given yet."""


@dataclass(slots=True)
class CheckpointUnderWay:
    """What is kept of one checkpoint in one subtask until its outcome is known."""

    timeout_ms: float | None = None
    """When the alignment takes too long, by the host's clock; ``None``: not watched."""
    times: TimesAtFreeze | None = None
    """Only in a loop."""
    frozen: bool = False
    """State was captured and not handed over yet: it shows by the end of the event whether logs will follow."""
    announced: bool = False
    """Logs of channels will be handed over."""
    unsent: bool = False
    """In-order barriers may still wait in the outputs."""
    logs: list[ChannelLog] = field(default_factory=list[ChannelLog])
    """Rows on their way, batches by reference, until they are handed over."""


class Performer:
    """Feeds events to the machine of one subtask, and performs what it asks for.

    Args:
        host: what has operators and files.
        channels: both kinds.
        machine, merger: the objects that decide.
        on_end: called when no more rows will come.
        when_idle: called with an event that may freeze the state: it has to wait until no work is left.
        aligned_timeout_ms: an unaligned checkpoint overtakes after so long; 0: at once.
        relieves: blocked inputs give their places back, so that their senders go on.
    """

    def __init__(
        self,
        host: SubtaskHost,
        channels: SubtaskChannels,
        machine: SubtaskMachine,
        merger: WatermarkMerger,
        *,
        on_end: Callable[[], None],
        when_idle: Callable[[m.AlignmentTimeout], None],
        aligned_timeout_ms: float,
        relieves: bool,
    ) -> None:
        self._host, self._channels, self._machine, self._merger = host, channels, machine, merger
        self._on_end, self._when_idle = on_end, when_idle
        self._aligned_timeout_ms, self._relieves = aligned_timeout_ms, relieves
        self._inputs = {end.key: end for end in channels.inputs}
        self._under_way: dict[int, CheckpointUnderWay] = {}
        self._overtaken: tuple[Any, tuple[Timed, ...]] | None = None
        """What the barrier just taken has overtaken at this end of its channel."""
        self._events: deque[m.Event] = deque()
        self._performing = self._captured = self._asked = False
        self._outside = self._inputs.keys() - channels.loop_inputs
        self._watches = bool(machine.protocol.switches and channels.inputs)
        self.ticks = bool(machine.protocol.switches or relieves or channels.back_edges)
        """``tick`` has something to look after."""

    # ------------------------------------------------------------------------------------------------------- events

    def handle(self, event: m.Event) -> None:
        """Feed the machine and perform what it asks for, with everything that follows at once."""
        self._events.append(event)
        if self._performing:
            return
        self._performing = True
        try:
            while self._events:
                for effect in self._machine.handle(self._events.popleft()):
                    self._perform(effect)
        finally:
            self._performing = False
        if self._captured:
            self._hand_over()

    def barrier(self, index: int, barrier: Barrier) -> None:
        """A barrier was taken from the input with this place."""
        self._host.barrier_taken(index, barrier)
        key = self._channels.inputs[index].key
        checkpoint_id, final, overtake, overtaken, probe, _, savepoint = barrier
        overtook: int | None = None
        time_too = False
        if overtake:
            overtook = rows_in(overtaken)
            time_too = any(type(i) is Watermark for i in overtaken)
            self._overtaken = key, overtaken
        self.handle(m.BarrierTaken(key, checkpoint_id, final, probe, overtook, time_too, savepoint))
        self._overtaken = None

    def outcome(self, event: m.CompleteNotice | m.AbortNotice) -> None:
        """What became of a wave."""
        self.handle(event)
        completed = isinstance(event, m.CompleteNotice) and event.commit
        for output in self._channels.outputs:
            output.settled(event.checkpoint_id, completed)
        self._under_way.pop(event.checkpoint_id, None)
        self._asked = False

    def tick(self, now_ms: float) -> None:
        """What has to be looked after now and then: timeouts, barriers on their way, blocked senders, loops."""
        if not self.ticks:
            return
        for checkpoint_id, mine in list(self._under_way.items()):
            if mine.timeout_ms is not None and mine.timeout_ms <= now_ms:
                mine.timeout_ms = None
                self._when_idle(m.AlignmentTimeout(checkpoint_id))
            if mine.unsent and not any(output.holds(checkpoint_id) for output in self._channels.outputs):
                mine.unsent = False
                self.handle(m.BarriersSent(checkpoint_id))
        if self._watches:
            for end in self._channels.inputs:
                while end.announced:
                    barrier = end.announced.popleft()
                    if end.waits(barrier.checkpoint_id):
                        id, final, probe = barrier.checkpoint_id, barrier.final, barrier.probe
                        self.handle(m.BarrierWaits(end.key, id, final, probe, barrier.savepoint))
        if self._relieves:
            for key in self._machine.blocked:
                self._inputs[key].relieve()
        if self._channels.back_edges and not self._asked and self._wants_probe:
            self._asked = True
            self._host.probe_wanted()

    @property
    def due_ms(self) -> float:
        """When ``tick`` is wanted at the latest."""
        if not self._under_way:
            return math.inf
        return min((w.timeout_ms for w in self._under_way.values() if w.timeout_ms is not None), default=math.inf)

    def _mine(self, checkpoint_id: int) -> CheckpointUnderWay:
        mine = self._under_way.get(checkpoint_id)
        if mine is None:
            mine = self._under_way[checkpoint_id] = CheckpointUnderWay()
        return mine

    @property
    def _wants_probe(self) -> bool:
        """A head holds a watermark, or waits for the end of its loop (W3, C6)."""
        ended = self._machine.ended
        outside_ended = bool(self._outside) and self._outside <= ended
        return self._merger.held or (outside_ended and len(ended) < len(self._inputs))

    # ------------------------------------------------------------------------------------------------------ effects

    def _perform(self, effect: m.Effect) -> None:
        match effect:
            case m.Block(input=key):
                self._inputs[key].block()
            case m.Unblock(input=key):
                self._inputs[key].unblock()
            case m.Freeze():
                self._freeze(effect)
            case m.BroadcastBarrier():
                self._broadcast(effect)
            case m.StartRecording(checkpoint_id=checkpoint_id, input=key):
                self._mine(checkpoint_id).announced = True
                self._inputs[key].record(checkpoint_id)
            case m.Record():
                pass  # the channel did when the rows were taken
            case m.StopRecording(checkpoint_id=checkpoint_id, input=key):
                self._stop_recording(effect, checkpoint_id, key)
            case m.WriteLogs(checkpoint_id=checkpoint_id):
                self._write_logs(checkpoint_id)
            case m.Acknowledge():
                self._acknowledge(effect)
            case m.Commit(checkpoint_id=checkpoint_id):
                self._host.commit(checkpoint_id)
            case _:
                self._perform_rarely(effect)

    def _perform_rarely(self, effect: m.Effect) -> None:
        match effect:
            case m.WatchAlignment(checkpoint_id=checkpoint_id):
                self._watch(checkpoint_id)
            case m.Overtake(checkpoint_id=checkpoint_id):
                overtaken = [(o.key, o.overtake(checkpoint_id)) for o in self._channels.outputs]
                self._overtook(checkpoint_id, overtaken, keep=True)
            case m.Expedite(input=key, checkpoint_id=checkpoint_id):
                self._inputs[key].overtake(checkpoint_id)
            case m.ReleaseWatermark(checkpoint_id=checkpoint_id, watermark=watermark):
                risen = self._merger.release(checkpoint_id, watermark)
                if risen is not None:
                    self._host.start_watermark(risen)
            case m.Decline():
                self._host.decline(effect)
            case m.Forget(checkpoint_id=checkpoint_id):
                self._forget(checkpoint_id)
            case m.EndOfInput():
                self._on_end()
                if self._host.watermark < MAX_WATERMARK:
                    self._host.start_watermark(MAX_WATERMARK)
            case _:
                raise InvariantError(f"{self._host.name}: the protocol asks for {effect}, which nobody performs")

    def _freeze(self, effect: m.Freeze) -> None:
        checkpoint_id, host = effect.checkpoint_id, self._host
        if self._channels.loop_inputs:
            self._merger.mark(checkpoint_id)
            times = TimesAtFreeze(self._merger.drained, self._merger.outside, host.timers_pending, host.keeps_rows)
            self._mine(checkpoint_id).times = times
        if effect.probe:
            self._events.append(m.Durable(checkpoint_id))
            return
        if host.working:
            raise InvariantError(f"{host.name}: to be frozen in the middle of work: rows of it would be lost")
        for output in self._channels.outputs:
            output.mark(checkpoint_id)
        host.freeze(effect)
        self._mine(checkpoint_id).frozen = self._captured = True

    def _broadcast(self, effect: m.BroadcastBarrier) -> None:
        checkpoint_id, overtake = effect.checkpoint_id, effect.overtake
        self._host.barrier_leaves(effect)
        overtaken = [
            (o.key, o.offer_barrier(checkpoint_id, effect.final, overtake, effect.probe, effect.savepoint))
            for o in self._channels.outputs
        ]
        if overtake:
            if not effect.probe:
                self._mine(checkpoint_id).announced = True
            self._overtook(checkpoint_id, overtaken, keep=not effect.probe)
        elif self._machine.protocol.switches:
            if any(output.holds(checkpoint_id) for output in self._channels.outputs):
                self._mine(checkpoint_id).unsent = True
            else:
                self._events.append(m.BarriersSent(checkpoint_id))

    def _overtook(self, checkpoint_id: int, overtaken: Sequence[tuple[Any, list[Timed]]], keep: bool) -> None:
        mine = self._mine(checkpoint_id)
        mine.unsent = False
        rows, in_loop = 0, False
        for key, items in overtaken:
            rows += rows_in(items)
            in_loop = in_loop or bool(items and key in self._channels.loop_outputs)
            if keep and items:
                mine.logs.append(ChannelLog(key, "sender", items))
        in_loop = in_loop if self._channels.loop_inputs else rows > 0
        self._events.append(m.RowsOvertaken(checkpoint_id, rows, in_loop))

    def _stop_recording(self, effect: m.StopRecording, checkpoint_id: int, key: Any) -> None:
        """End the log of an input: what was recorded, then what its barrier overtook."""
        items = self._inputs[key].stop_recording(checkpoint_id)
        if self._overtaken is not None and self._overtaken[0] == key:
            items = [*items, *self._overtaken[1]]
        if rows_in(items) != effect.rows:
            raise InvariantError(
                f"{self._host.name}: the log of {key} for checkpoint {checkpoint_id} has {rows_in(items)} rows, "
                f"its machine counted {effect.rows}"
            )
        if items:
            self._mine(checkpoint_id).logs.append(ChannelLog(key, "receiver", items))

    def _write_logs(self, checkpoint_id: int) -> None:
        self._hand_over()  # the state first
        mine = self._mine(checkpoint_id)
        logs, mine.logs, mine.announced = mine.logs, [], False
        self._host.write_logs(checkpoint_id, logs)

    def _watch(self, checkpoint_id: int) -> None:
        if self._aligned_timeout_ms <= 0 and not self._host.working:
            self._events.append(m.AlignmentTimeout(checkpoint_id))
        else:
            self._mine(checkpoint_id).timeout_ms = self._host.now_ms() + self._aligned_timeout_ms

    def _hand_over(self) -> None:
        self._captured = False
        for checkpoint_id, mine in list(self._under_way.items()):
            if mine.frozen:
                mine.frozen = False
                self._host.hand_over(checkpoint_id, mine.announced)

    def _acknowledge(self, effect: m.Acknowledge) -> None:
        report: LoopReport | None = None
        if self._channels.loop_inputs:
            times = self._mine(effect.checkpoint_id).times
            assert times is not None  # it was frozen
            # With a timer pending the loop may still make rows of its own accord: it has not ended (C6).  Rows that an
            # operator keeps are rows in the loop (W3).
            quiet = effect.quiet and not times.keeps_rows
            outside_ended = effect.outside_ended and not times.timers_pending
            report = LoopReport(quiet, outside_ended, times.drained, times.outside)
        self._host.acknowledge(effect.checkpoint_id, report)

    def _forget(self, checkpoint_id: int) -> None:
        for end in self._channels.inputs:
            end.stop_recording(checkpoint_id)
        self._hand_over()  # sinks make their rows durable all the same
        self._host.forget(checkpoint_id)
        self._under_way.pop(checkpoint_id, None)
