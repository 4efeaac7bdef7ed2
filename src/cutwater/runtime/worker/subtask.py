"""One subtask in a worker: rows through operators, and what the core wants done with their state.

``SubtaskCore`` says what to do next, in which order; here operators are called, state is captured and handed to the
thread that writes it.  Everything runs in the worker's one loop thread.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import CutwaterError
from cutwater.plan.graph import Channel, Edge
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Barrier, Item, Rows
from cutwater.protocol.channel.receiving import ReceivingEnd
from cutwater.protocol.subtask.core import SubtaskCore
from cutwater.protocol.subtask.host import ChannelLog, LoopReport, SubtaskChannels
from cutwater.protocol.subtask.loop import IdleReason, SubtaskLoop
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.watermarks import WatermarkMerger
from cutwater.runtime.chains.assigned_splits import SplitRecords
from cutwater.runtime.chains.chain import Chain, ProcessingClock, SinkOperator, StepCosts
from cutwater.runtime.chains.source_runner import Read, SourceRunner
from cutwater.runtime.channels.output import OutputChannel
from cutwater.runtime.worker.snapshots import FrozenSubtask, LoggedChannel, SubtaskLogs
from cutwater.storage.snapshot.manifest import ChannelRecord, SubtaskRecord

_ACTIONS_PER_ROUND = 8
"""A subtask does at most this much before its neighbours in the worker have their turn."""


class SubtaskPort(Protocol):
    """What a subtask asks of its worker."""

    @property
    def called(self) -> bool:
        """The coordinator, or the snapshot thread, waits for the worker's attention."""
        ...

    def submit_snapshot(self, part: FrozenSubtask | SubtaskLogs) -> None: ...

    def forget_snapshot(self, checkpoint_id: int) -> None: ...

    def commit(self, subtask: tuple[int, int], checkpoint_id: int, sinks: Sequence[SinkOperator]) -> None:
        """Commit beside the loop; ``Subtask.committed`` is called when that is done."""

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


class Subtask:
    """A running subtask: the host of a ``SubtaskCore`` (its port is ``SubtaskHost``).

    Args:
        parts: channels and operators.
        machine, loop, merger: the core objects that decide.
        port: the worker.
        slice_budget_ms: a round ends when the operators have worked for so long.
    """

    def __init__(
        self,
        parts: SubtaskParts,
        machine: SubtaskMachine,
        loop: SubtaskLoop,
        merger: WatermarkMerger,
        port: SubtaskPort,
        slice_budget_ms: float,
    ) -> None:
        self.key, self.name = parts.key, parts.name
        self.inputs = list(parts.inputs)
        self.chain, self.source, self.sinks = parts.chain, parts.source, list(parts.sinks)
        self.reads = self.source is not None
        self.outputs = [c for out in parts.chain.outs for c in out.channels]
        self._parts, self._port, self._clock = parts, port, parts.clock
        self._input_numbers = list(parts.input_numbers)
        self.core = SubtaskCore(
            self,
            SubtaskChannels(self.inputs, self.outputs, parts.back_edges, parts.loop_inputs, parts.loop_outputs),
            machine,
            loop,
            merger,
            aligned_timeout_ms=parts.aligned_timeout_ms,
            relieves=parts.spill,
            idle=any(channel.idle for channel in self.outputs),  # as it was at the cut
        )
        self._frozen: dict[int, FrozenSubtask] = {}
        """State between its freeze and the end of that event."""
        self._round_s = slice_budget_ms / 1000
        self._actions_left, self._enough_s = 0, 0.0
        self.interrupted = False
        """The worker was called before the end of the turn, which goes on afterwards."""
        self.at_rest = False
        """The last turn ended because there was nothing to do, for want of rows alone."""
        self.costs = StepCosts(self.chain.nodes, loop.calls)
        self.busy_s = 0.0
        self._now_s = 0.0
        self._full_s = 0.0
        self._full_since_s: float | None = None

    following = False
    """It makes choices once more that others know (R0)."""

    # ---------------------------------------------------------------------------------------------------- the loop

    def round(self, now_s: float) -> bool:
        """Some actions, or the rest of those that were interrupted; False if there was nothing to do."""
        self._now_s = now_s
        self.core.tick(now_s * 1000)
        worked = False
        if not self.interrupted:
            self._actions_left, self._enough_s = _ACTIONS_PER_ROUND, self.busy_s + self._round_s
        self.interrupted = self.at_rest = False
        while self.act(now_s):
            worked = True
            self._actions_left -= 1
            if not self._actions_left or self.busy_s > self._enough_s:
                break
            if self._port.called:
                self.interrupted = True
                break
        else:
            self.at_rest = self.core.why_idle is IdleReason.NOTHING_TO_DO
        return worked

    def attend(self, now_s: float) -> bool:
        """Take what the coordinator wants, as soon as no work is pending; rows wait for the turn.  False: nothing."""
        worked = False
        for _ in range(_ACTIONS_PER_ROUND):
            if not self.core.waits or not self.act(now_s):
                break
            worked = True
        return worked

    def act(self, now_s: float) -> bool:
        """One action of the core; False if there was nothing to do."""
        self._now_s = now_s
        worked = self.core.act(self.following)
        if worked:
            if self._full_since_s is not None:
                self._full_s += now_s - self._full_since_s
                self._full_since_s = None
        elif self.core.why_idle is IdleReason.OUTPUTS_FULL and self._full_since_s is None:
            self._full_since_s = now_s
        return worked

    def full_s(self, now_s: float) -> float:
        """How long, up to now, rows were not made for want of room in an output; it may be so for minutes on end."""
        return self._full_s if self._full_since_s is None else self._full_s + max(0.0, now_s - self._full_since_s)

    def flush_if_due(self, now_s: float) -> float:
        """Send what waited long enough in the builders; returns when the next is due (seconds, monotonic)."""
        due_s = math.inf
        for channel in self.outputs:
            due_s = min(due_s, channel.flush_if_due(now_s))
        return due_s

    def flush_idle(self) -> bool:
        """Send what waits in the builders; says whether anything did."""
        sent = False
        for channel in self.outputs:
            sent |= channel.flush_idle()
        return sent

    def wait_s(self, now_s: float) -> float:
        """How long the loop may sleep for this subtask if nothing wakes it."""
        core = self.core
        due = core.performer.due_ms / 1000 - now_s
        timer_ms = self._next_timer_ms
        if timer_ms is not None and not self.chain.full and core.machine.may_read:
            due = min(due, (timer_ms - self._clock.now_ms()) / 1000)
        if self.source is not None:
            due = min(due, self.source.report_in_s(now_s))
        if self.source is None or core.ending or self.chain.full or core.machine.halted:
            return due
        if self.chain.room == 0 and not self.following:
            return due
        wait = self.source.wait_s(now_s)
        return due if wait is None else min(wait, due)

    def close(self) -> None:
        """Release operators, writers and readers; commits nothing."""
        self.chain.close()
        if self.source is not None:
            with contextlib.suppress(Exception):
                self.source.close()

    # ------------------------------------------------------------------------------------- operators (SubtaskHost)

    @property
    def working(self) -> bool:
        return self.chain.pending

    @property
    def answered(self) -> bool:
        return self.chain.answered

    @property
    def keeps_rows(self) -> bool:
        return self.chain.keeps_rows

    @property
    def timers_pending(self) -> bool:
        return self.chain.timers_pending

    @property
    def timers_due(self) -> bool:
        timer_ms = self._next_timer_ms
        return timer_ms is not None and timer_ms <= self._clock.now_ms()

    @property
    def watermark(self) -> int:
        return self.chain.watermark

    @property
    def full(self) -> bool:
        return self.chain.full

    @property
    def room(self) -> int | None:
        return self.chain.room

    @property
    def _next_timer_ms(self) -> int | None:
        """When an operator wants to be called by the clock.

        After the last watermark nothing is made any more, except in a loop, which it may start again.
        """
        over = self.core.ending or (self.chain.watermark == MAX_WATERMARK and not self._parts.loop_inputs)
        return None if over else self.chain.next_processing_time_ms

    def process(self, index: int, rows: Rows) -> None:
        self.costs.begin()
        started = time.perf_counter()
        try:
            self.chain.process(self._input_numbers[index], rows.batch, rows.late_before)
        except CutwaterError as e:
            raise self._positioned(e, f"channel {tuple(self.inputs[index].key)}", rows.first_row) from e
        self._observe(rows.batch.num_rows, time.perf_counter() - started)

    def start_watermark(self, watermark: int) -> None:
        self.chain.start_watermark(watermark)

    def resume(self) -> None:
        started = time.perf_counter()
        if self.chain.pending:
            self.chain.resume()
        else:
            self.chain.take_results(self.took_results)
        self.busy_s += time.perf_counter() - started

    def took_results(self, place: int, taken: bytes) -> None:
        """An operator took what came from outside; nothing has come of it yet."""

    def fire_timers(self) -> None:
        self.fire_at(self._clock.now_ms())

    def fire_at(self, now_ms: int) -> None:
        """A slice of what is due at this moment of the clock."""
        started = time.perf_counter()
        self.chain.on_processing_time(now_ms)
        self.busy_s += time.perf_counter() - started

    def offer_idle(self, idle: bool) -> None:
        self.chain.offer_idle(idle)

    def _observe(self, rows: int, elapsed_s: float) -> None:
        """A call of the operators, from the first to the last."""
        self.busy_s += elapsed_s
        if rows:
            self.core.loop.observe(rows, elapsed_s * 1000)
            self.costs.observe(rows)

    # --------------------------------------------------------------------------------------------------- the source

    @property
    def source_ready(self) -> bool:
        wait = self.source.wait_s(self._now_s) if self.source is not None else None
        return wait is not None and wait <= 0

    @property
    def source_idle(self) -> bool:
        return self.source is not None and self.source.idle

    @property
    def source_queued(self) -> bool:
        return self.source is not None and bool(self.source.queued)

    @property
    def exhausted(self) -> bool:
        return self.source is not None and self.source.exhausted

    def read(self, max_rows: int) -> bool:
        source = self.source
        assert source is not None
        started = time.perf_counter()
        got = source.read(max_rows, self._now_s)
        if got is None:
            return False
        self.hand_on(got, source, started)
        return True

    def hand_on(self, got: Read, source: SourceRunner, started: float) -> None:
        """Let what was read go through the operators."""
        self.costs.begin()
        self.chain.nodes[0].busy_s += time.perf_counter() - started
        rows = sum(b.num_rows for o, b in got.outputs if o == 0)
        try:
            self.chain.read(got.outputs, got.late_before)
            if got.watermark > self.chain.watermark:
                self.chain.start_watermark(got.watermark)
        except CutwaterError as e:
            raise self._positioned(e, source.origin, None) from e
        self._observe(rows, time.perf_counter() - started)

    # ---------------------------------------------------------------------------------------------------- snapshots

    def now_ms(self) -> float:
        return time.monotonic() * 1000

    def freeze(self, effect: m.Freeze) -> None:
        checkpoint_id = effect.checkpoint_id
        started = time.perf_counter()
        record = self._record("aligned" if effect.savepoint else self.core.machine.protocol.name)
        states = self.chain.freeze(checkpoint_id)
        ends = effect.final and self.core.finished  # a job that was stopped in the middle goes on some day
        sinks = [(sink, sink.pre_commit(checkpoint_id, ends, effect.savepoint)) for sink in self.sinks]
        freeze_ms = (time.perf_counter() - started) * 1000
        frozen = FrozenSubtask(checkpoint_id, record, states, sinks, freeze_ms, self._parts.key_groups)
        frozen.savepoint, frozen.checkpoint = effect.savepoint, effect.final or not effect.savepoint
        self._frozen[checkpoint_id] = frozen

    def _record(self, protocol: str) -> SubtaskRecord:
        source = self.source
        records = source.records() if source else SplitRecords([], [])
        return SubtaskRecord(
            vertex=self.key[0],
            subtask=self.key[1],
            incarnation=self._parts.incarnation,
            protocol=protocol,
            inputs=[_channel_record(c) for c in self.inputs],
            output_rows=[_channel_record(c) for c in self.outputs],
            splits={source.step: records.splits} if source else {},
            packed={source.step: records.packed} if source and records.packed else {},
            processing_time_ms=self._clock.now_ms(),
            watermark=self.chain.watermark,
            finished=self.core.finished,
        )

    def hand_over(self, checkpoint_id: int, logs_follow: bool) -> None:
        frozen = self._frozen.pop(checkpoint_id)
        frozen.logs_follow = logs_follow
        self._port.submit_snapshot(frozen)

    def write_logs(self, checkpoint_id: int, logs: list[ChannelLog]) -> None:
        edges = self._parts.edges
        logged = [LoggedChannel(edges[log.channel], log.channel, log.side, log.items) for log in logs]
        self._port.submit_snapshot(SubtaskLogs(checkpoint_id, self.key, logged))

    def commit(self, checkpoint_id: int) -> None:
        slow = [sink for sink in self.sinks if sink.commits_in_background]
        for sink in self.sinks:
            if not sink.commits_in_background:
                sink.commit(checkpoint_id)
        if slow:
            self._port.commit(self.key, checkpoint_id, slow)
        else:
            self.committed(checkpoint_id)

    def committed(self, checkpoint_id: int) -> None:
        """All sinks have committed; no trace is written."""

    def committed_globally(self, checkpoint_id: int) -> None:
        """The driver has committed this checkpoint for the sinks that commit globally."""
        for sink in self.sinks:
            sink.committed_globally(checkpoint_id)

    def forget(self, checkpoint_id: int) -> None:
        self._port.forget_snapshot(checkpoint_id)

    # ------------------------------------------------------------------------------------------------- coordination

    def acknowledge(self, checkpoint_id: int, report: LoopReport | None) -> None:
        self._port.acknowledge(self.key, checkpoint_id, report)

    def decline(self, effect: m.Decline) -> None:
        self._port.decline(self.key, effect)

    def finished(self) -> None:
        self._port.finished(self.key)

    def probe_wanted(self) -> None:
        self._port.probe_wanted(self.key)

    # ------------------------------------------------------------------- choices and traces: nobody asks for them here

    def took(self, index: int, item: Item) -> Item | None:
        return item

    def heard(self, verdict: m.LoopVerdict) -> None:
        """No log keeps it."""

    def follow(self) -> bool:
        return True

    def barrier_taken(self, index: int, barrier: Barrier) -> None:
        """No trace is written."""

    def barrier_leaves(self, effect: m.BroadcastBarrier) -> None:
        """No trace is written."""

    # -------------------------------------------------------------------------------------------------------- errors

    def _positioned(self, error: CutwaterError, origin: str, first_row: int | None) -> CutwaterError:
        """The same error, saying also where the row came from."""
        where = f"subtask {self.key[1]} of {self.name!r}"
        row = getattr(error, "row", None)
        if first_row is not None:
            where += f", {origin}, row {first_row + row if row is not None else first_row}"
        elif origin:
            where += f", reading {origin}"
        if where not in error.message:
            headline, newline, story = error.message.partition("\n")  # a user's traceback stays below
            error.message = f"{headline} (in {where}){newline}{story}"
        return error


def _channel_record(end: ReceivingEnd | OutputChannel) -> ChannelRecord:
    key: Channel = end.key
    return ChannelRecord(*key, end.next_row, end.watermark, end.idle, end.ended)
