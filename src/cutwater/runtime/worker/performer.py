"""What the protocol machine of a subtask asks for, done: channels, state, snapshots, watermarks of loops.

An effect may be answered at once (a probe is durable, so many rows were overtaken): such events are taken after the
effects of the current one.  Whatever froze is handed to the snapshot thread when nothing is left to do, because only
then it is known whether logs will follow.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import InvariantError
from cutwater.plan.graph import Channel, Edge
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Barrier, Rows, Timed, Watermark
from cutwater.protocol.channel.receiving import ReceivingEnd
from cutwater.protocol.checkpoint.loops import LoopReport
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.watermarks import WatermarkMerger
from cutwater.runtime.chains.chain import Chain
from cutwater.runtime.chains.clock import ProcessingClock
from cutwater.runtime.chains.sink_operator import SinkOperator
from cutwater.runtime.chains.source_runner import SourceRunner
from cutwater.runtime.channels.log import LoggedChannel
from cutwater.runtime.worker.checkpoint import (
    FrozenSubtask,
    SubtaskCheckpoint,
    SubtaskLogs,
    TimesAtFreeze,
    WorkerCheckpoints,
)
from cutwater.storage.snapshot.manifest import ChannelRecord, SubtaskRecord


class SubtaskPort(Protocol):
    """What a subtask asks of its worker."""

    @property
    def called(self) -> bool:
        """The coordinator, or the snapshot thread, waits for the worker's attention."""
        ...

    @property
    def checkpoints(self) -> WorkerCheckpoints:
        """Those under way in the attempt, which owns them."""
        ...

    def submit_snapshot(self, part: FrozenSubtask | SubtaskLogs) -> None: ...

    def forget_snapshot(self, checkpoint_id: int) -> None: ...

    def acknowledge(self, subtask: tuple[int, int], checkpoint_id: int, report: LoopReport | None) -> None: ...

    def decline(self, subtask: tuple[int, int], effect: m.Decline) -> None: ...

    def finished(self, subtask: tuple[int, int]) -> None: ...

    def probe_wanted(self, subtask: tuple[int, int]) -> None: ...


@dataclass(slots=True)
class SubtaskParts:
    """What the worker builds a subtask from."""

    key: tuple[int, int]
    name: str
    incarnation: int
    inputs: Sequence[ReceivingEnd]
    input_numbers: Sequence[int]
    """Per channel: which input of the head operator it feeds."""
    chain: Chain
    clock: ProcessingClock
    source: SourceRunner | None
    sinks: Sequence[SinkOperator]
    edges: dict[Channel, Edge]
    """Of all its channels."""
    back_edges: frozenset[Channel]
    """Inputs that close a loop."""
    loop_inputs: frozenset[Channel]
    """Inputs from the same loop, back-edges among them."""
    loop_outputs: frozenset[Channel]
    """Outputs to the same loop."""
    key_groups: range
    """Those that the subtask owns."""
    aligned_timeout_ms: float
    spill: bool
    """Blocked inputs do not hold their senders up."""


class Performer:
    """The performing half of one subtask; belongs to the worker's loop thread.

    Args:
        parts: channels and operators.
        machine, merger: the core objects that decide.
        port: the worker.
        on_end: called when no more rows will come.
        when_idle: called with an event that may freeze the state: it has to wait until no work is pending.
    """

    def __init__(
        self,
        parts: SubtaskParts,
        machine: SubtaskMachine,
        merger: WatermarkMerger,
        port: SubtaskPort,
        on_end: Callable[[], None],
        when_idle: Callable[[m.AlignmentTimeout], None],
    ) -> None:
        self._parts, self._machine, self._merger, self._port, self._on_end = parts, machine, merger, port, on_end
        self._when_idle = when_idle
        self.finished = False
        self._inputs: dict[Channel, ReceivingEnd] = {channel.key: channel for channel in parts.inputs}
        self.outputs = [c for out in parts.chain.outs for c in out.channels]
        self._checkpoints = port.checkpoints
        self._overtaken: tuple[Channel, tuple[Timed, ...]] | None = None
        """What the barrier just taken has overtaken at this end of its channel."""
        self._events: deque[m.Event] = deque()
        self._performing = False
        self._outside = self._inputs.keys() - parts.loop_inputs
        self._asked = False
        self._watches = bool(machine.protocol.switches and parts.inputs)
        self._ticks = bool(machine.protocol.switches or parts.spill or parts.back_edges)

    # ---------------------------------------------------------------------------------------------------- events

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
        self._hand_over()

    def barrier(self, channel: ReceivingEnd, barrier: Barrier) -> None:
        """A barrier was taken from an input."""
        checkpoint_id, final, overtake, overtaken, probe, _, savepoint = barrier
        overtook: int | None = None
        time_too = False
        if overtake:
            overtook = sum(i.batch.num_rows for i in overtaken if type(i) is Rows)
            time_too = any(type(i) is Watermark for i in overtaken)
            self._overtaken = channel.key, overtaken
        self.handle(m.BarrierTaken(channel.key, checkpoint_id, final, probe, overtook, time_too, savepoint))
        self._overtaken = None

    def outcome(self, event: m.CompleteNotice | m.AbortNotice) -> None:
        """What became of a wave."""
        self.handle(event)
        completed = isinstance(event, m.CompleteNotice) and event.commit
        for channel in self.outputs:
            channel.settled(event.checkpoint_id, completed)
        self._asked = False

    def tick(self, now_s: float) -> None:
        """What has to be looked after now and then: timeouts, barriers on their way, blocked senders, loops."""
        if not self._ticks:
            return
        for checkpoint_id, mine in self._under_way():
            if mine.timeout_s is not None and mine.timeout_s <= now_s:
                mine.timeout_s = None
                self._when_idle(m.AlignmentTimeout(checkpoint_id))
            if mine.unsent and not any(c.holds(checkpoint_id) for c in self.outputs):
                mine.unsent = False
                self.handle(m.BarriersSent(checkpoint_id))
        if self._watches:
            for channel in self._parts.inputs:
                while channel.announced:
                    barrier = channel.announced.popleft()
                    if channel.waits(barrier.checkpoint_id):
                        id, final, probe = barrier.checkpoint_id, barrier.final, barrier.probe
                        self.handle(m.BarrierWaits(channel.key, id, final, probe, barrier.savepoint))
        if self._parts.spill:
            for key in self._machine.blocked:
                self._inputs[cast(Channel, key)].relieve()
        if self._parts.back_edges and not self._asked and self._wants_probe:
            self._asked = True
            self._port.probe_wanted(self._parts.key)

    @property
    def due_s(self) -> float:
        """When ``tick`` is wanted at the latest."""
        return min((w.timeout_s for _, w in self._under_way() if w.timeout_s is not None), default=math.inf)

    def _mine(self, checkpoint_id: int) -> SubtaskCheckpoint:
        return self._checkpoints[checkpoint_id].subtasks[self._parts.key]

    def _under_way(self) -> list[tuple[int, SubtaskCheckpoint]]:
        """The checkpoints that this subtask keeps something of."""
        key = self._parts.key
        return [(n, c.subtasks[key]) for n, c in self._checkpoints.items() if key in c.subtasks]

    @property
    def _wants_probe(self) -> bool:
        """A head holds a watermark, or waits for the end of its loop (W3, C6)."""
        ended = self._machine.ended
        outside_ended = bool(self._outside) and self._outside <= ended
        return self._merger.held or (outside_ended and len(ended) < len(self._inputs))

    # ---------------------------------------------------------------------------------------------------- effects

    def _perform(self, effect: m.Effect) -> None:
        match effect:
            case m.Block(input=key):
                self._inputs[cast(Channel, key)].block()
            case m.Unblock(input=key):
                self._inputs[cast(Channel, key)].unblock()
            case m.Freeze():
                self._freeze(effect)
            case m.BroadcastBarrier():
                self._broadcast(effect)
            case m.StartRecording(checkpoint_id=checkpoint_id, input=key):
                self._mine(checkpoint_id).announced = True
                self._inputs[cast(Channel, key)].record(checkpoint_id)
            case m.Record():
                pass  # the channel did when the rows were taken
            case m.StopRecording(checkpoint_id=checkpoint_id, input=key):
                self._stop_recording(checkpoint_id, cast(Channel, key))
            case m.WriteLogs(checkpoint_id=checkpoint_id):
                mine = self._mine(checkpoint_id)
                logs, mine.logs = mine.logs, []
                self._write_logs(checkpoint_id, logs)
            case m.Acknowledge():
                self._acknowledge(effect)
            case m.Commit(checkpoint_id=checkpoint_id):
                self._commit(checkpoint_id)
            case _:
                self._perform_rarely(effect)

    def _perform_rarely(self, effect: m.Effect) -> None:
        match effect:
            case m.WatchAlignment(checkpoint_id=checkpoint_id):
                self._watch(checkpoint_id)
            case m.Overtake(checkpoint_id=checkpoint_id):
                overtaken = [(c.key, c.overtake(checkpoint_id)) for c in self.outputs]
                self._overtook(checkpoint_id, overtaken, keep=True)
            case m.Expedite(input=key, checkpoint_id=checkpoint_id):
                self._inputs[cast(Channel, key)].overtake(checkpoint_id)
            case m.ReleaseWatermark(checkpoint_id=checkpoint_id, watermark=watermark):
                risen = self._merger.release(checkpoint_id, watermark)
                if risen is not None:
                    self._parts.chain.start_watermark(risen)
            case m.Decline():
                self._port.decline(self._parts.key, effect)
            case m.Forget(checkpoint_id=checkpoint_id):
                self._forget(checkpoint_id)
            case m.EndOfInput():
                self._on_end()
                if self._parts.chain.watermark < MAX_WATERMARK:
                    self._parts.chain.start_watermark(MAX_WATERMARK)
            case _:
                raise InvariantError(f"{self._parts.name}: the protocol asks for {effect}, which nobody performs")

    def _freeze(self, effect: m.Freeze) -> None:
        checkpoint_id = effect.checkpoint_id
        if self._parts.loop_inputs:
            self._merger.mark(checkpoint_id)
            chain = self._parts.chain
            times = TimesAtFreeze(self._merger.drained, self._merger.outside, chain.timers_pending, chain.keeps_rows)
            self._mine(checkpoint_id).times = times
        if effect.probe:
            self._events.append(m.Durable(checkpoint_id))
            return
        if self._parts.chain.pending:
            raise InvariantError(f"{self._parts.name}: to be frozen in the middle of work: rows of it would be lost")
        started = time.perf_counter()
        record = self._record("aligned" if effect.savepoint else self._machine.protocol.name)
        for channel in self.outputs:
            channel.mark(checkpoint_id)
        states = self._parts.chain.freeze(checkpoint_id)
        ends = effect.final and self.finished  # a job that was stopped in the middle goes on some day
        sinks = [(sink, sink.pre_commit(checkpoint_id, ends, effect.savepoint)) for sink in self._parts.sinks]
        freeze_ms = (time.perf_counter() - started) * 1000
        frozen = FrozenSubtask(checkpoint_id, record, states, sinks, freeze_ms, self._parts.key_groups)
        frozen.savepoint, frozen.checkpoint = effect.savepoint, effect.final or not effect.savepoint
        self._mine(checkpoint_id).frozen = frozen

    def _record(self, protocol: str) -> SubtaskRecord:
        parts, source = self._parts, self._parts.source
        return SubtaskRecord(
            vertex=parts.key[0],
            subtask=parts.key[1],
            incarnation=parts.incarnation,
            protocol=protocol,
            inputs=[ChannelRecord(*key, c.next_row, c.watermark, c.idle, c.ended) for key, c in self._inputs.items()],
            output_rows=[ChannelRecord(*c.key, c.next_row, c.watermark, c.idle, c.ended) for c in self.outputs],
            splits={source.step: source.records()} if source else {},
            processing_time_ms=parts.clock.now_ms(),
            watermark=parts.chain.watermark,
            finished=self.finished,
        )

    def _broadcast(self, effect: m.BroadcastBarrier) -> None:
        checkpoint_id, overtake = effect.checkpoint_id, effect.overtake
        overtaken = [
            (c.key, c.offer_barrier(checkpoint_id, effect.final, overtake, effect.probe, effect.savepoint))
            for c in self.outputs
        ]
        if overtake:
            if not effect.probe:
                self._mine(checkpoint_id).announced = True
            self._overtook(checkpoint_id, overtaken, keep=not effect.probe)
        elif self._machine.protocol.switches:
            if any(c.holds(checkpoint_id) for c in self.outputs):
                self._mine(checkpoint_id).unsent = True
            else:
                self._events.append(m.BarriersSent(checkpoint_id))

    def _overtook(
        self, checkpoint_id: int, overtaken: Sequence[tuple[Channel, list[Rows | Watermark]]], keep: bool
    ) -> None:
        mine = self._mine(checkpoint_id)
        mine.unsent = False
        rows, in_loop = 0, False
        for key, items in overtaken:
            rows += sum(i.batch.num_rows for i in items if type(i) is Rows)
            in_loop = in_loop or bool(items and key in self._parts.loop_outputs)
            if keep and items:
                mine.logs.append(LoggedChannel(self._parts.edges[key], key, "sender", items))
        in_loop = in_loop if self._parts.loop_inputs else rows > 0
        self._events.append(m.RowsOvertaken(checkpoint_id, rows, in_loop))

    def _stop_recording(self, checkpoint_id: int, key: Channel) -> None:
        """End the log of an input: what was recorded, then what its barrier overtook."""
        items = self._inputs[key].stop_recording(checkpoint_id)
        if self._overtaken is not None and self._overtaken[0] == key:
            items = [*items, *self._overtaken[1]]
        if items:
            self._mine(checkpoint_id).logs.append(LoggedChannel(self._parts.edges[key], key, "receiver", items))

    def _write_logs(self, checkpoint_id: int, logs: list[LoggedChannel]) -> None:
        self._hand_over()  # the state first
        self._mine(checkpoint_id).announced = False
        self._port.submit_snapshot(SubtaskLogs(checkpoint_id, self._parts.key, logs))

    def _commit(self, checkpoint_id: int) -> None:
        for sink in self._parts.sinks:
            sink.commit(checkpoint_id)

    @property
    def commits(self) -> bool:
        """There are sinks in the chain."""
        return bool(self._parts.sinks)

    def _watch(self, checkpoint_id: int) -> None:
        timeout_ms = self._parts.aligned_timeout_ms
        if timeout_ms <= 0 and not self._parts.chain.pending:
            self._events.append(m.AlignmentTimeout(checkpoint_id))
        else:
            self._mine(checkpoint_id).timeout_s = time.monotonic() + timeout_ms / 1000

    def _hand_over(self) -> None:
        for _, mine in self._under_way():
            frozen, mine.frozen = mine.frozen, None
            if frozen is not None:
                frozen.logs_follow = mine.announced
                self._port.submit_snapshot(frozen)

    def _acknowledge(self, effect: m.Acknowledge) -> None:
        report: LoopReport | None = None
        if self._parts.loop_inputs:
            times = self._mine(effect.checkpoint_id).times
            assert times is not None  # it was frozen
            # With a timer pending the loop may still make rows of its own accord: it has not ended (C6).  Rows that an
            # operator keeps are rows in the loop (W3).
            quiet, outside_ended = (
                effect.quiet and not times.keeps_rows,
                effect.outside_ended and not times.timers_pending,
            )
            report = LoopReport(quiet, outside_ended, times.drained, times.outside)
        self._port.acknowledge(self._parts.key, effect.checkpoint_id, report)

    def _forget(self, checkpoint_id: int) -> None:
        for channel in self._parts.inputs:
            channel.stop_recording(checkpoint_id)
        self._hand_over()  # sinks make their rows durable all the same
        self._port.forget_snapshot(checkpoint_id)
        self._checkpoints[checkpoint_id].subtasks.pop(self._parts.key, None)
