"""One subtask: performs what the core decides.

``SubtaskLoop`` says what to do next, ``SubtaskMachine`` what the protocol demands; here rows are moved, operators are
called and state is frozen.  Everything runs in the worker's one loop thread.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from cutwater.errors import CutwaterError, InvariantError
from cutwater.operators.base import MAX_WATERMARK
from cutwater.protocol import messages as m
from cutwater.protocol.loop import Idle, IdleReason, ReadSource, Resume, SubtaskLoop, TakeControl, TakeRows
from cutwater.protocol.subtask import SubtaskMachine
from cutwater.protocol.watermarks import WatermarkMerger
from cutwater.runtime.chain import Chain
from cutwater.runtime.channels import Barrier, Channel, End, InputChannel, Rows, Watermark
from cutwater.runtime.sink_operator import SinkOperator
from cutwater.runtime.snapshots import FrozenSubtask
from cutwater.runtime.source_runner import SourceRunner
from cutwater.storage.manifest import ChannelRecord, SubtaskRecord

__all__ = ["Subtask", "SubtaskPort"]

_ACTIONS_PER_ROUND = 8
"""A subtask does at most this much before its neighbours in the worker have their turn."""


class SubtaskPort(Protocol):
    """What a subtask asks of its worker."""

    def submit_snapshot(self, frozen: FrozenSubtask) -> None: ...

    def forget_snapshot(self, checkpoint_id: int) -> None: ...

    def acknowledge(self, subtask: tuple[int, int], checkpoint_id: int) -> None: ...

    def decline(self, subtask: tuple[int, int], effect: m.Decline) -> None: ...

    def finished(self, subtask: tuple[int, int]) -> None: ...


@dataclass(slots=True)
class SubtaskParts:
    """What the worker builds a subtask from."""

    key: tuple[int, int]
    name: str
    incarnation: int
    inputs: Sequence[InputChannel]
    input_numbers: Sequence[int]
    """Per channel: which input of the head operator it feeds."""
    chain: Chain
    source: SourceRunner | None
    sinks: Sequence[SinkOperator]


class Subtask:
    """A running subtask.

    Args:
        parts: channels and operators.
        machine, loop, merger: the core objects that decide.
        port: the worker.
    """

    def __init__(
        self,
        parts: SubtaskParts,
        machine: SubtaskMachine,
        loop: SubtaskLoop,
        merger: WatermarkMerger,
        port: SubtaskPort,
    ) -> None:
        self.key, self.name, self._incarnation = parts.key, parts.name, parts.incarnation
        self.inputs = list(parts.inputs)
        self.chain, self.source, self.sinks = parts.chain, parts.source, list(parts.sinks)
        self._input_numbers = list(parts.input_numbers)
        self._machine, self._loop, self._merger, self._port = machine, loop, merger, port
        self._index = {channel.key: i for i, channel in enumerate(self.inputs)}
        self._outputs = [c for out in self.chain.outs for c in out.channels]
        self._triggers: deque[m.Trigger] = deque()
        self._ending = False
        self.finished = False
        self._commit: Callable[[int], None] | None = None
        self.busy_s = self.full_s = 0.0
        self._full_since_s: float | None = None

    # ---------------------------------------------------------------------------------------------------- the loop

    def round(self, now_s: float) -> bool:
        """Some actions; False if there was nothing to do."""
        worked = False
        for _ in range(_ACTIONS_PER_ROUND):
            if not self._act(now_s):
                break
            worked = True
        return worked

    def flush_if_due(self, now_s: float) -> float:
        """Send what waited long enough in the builders; returns when the next is due (seconds, monotonic)."""
        return min((c.flush_if_due(now_s) for c in self._outputs), default=float("inf"))

    def wait_s(self, now_s: float) -> float:
        """How long the loop may sleep for this subtask if nothing wakes it."""
        if self.source is None or self._ending or self.chain.full:
            return float("inf")
        wait = self.source.wait_s(now_s)
        return float("inf") if wait is None else wait

    def _act(self, now_s: float) -> bool:
        chain, source = self.chain, self.source
        pending = chain.pending
        if not pending:
            if self._triggers:
                return self._inject(now_s)
            if self._ending and not self.finished:
                return self._end()
        ready = False
        if source is not None and not self._ending:
            wait = source.wait_s(now_s)
            ready = wait is not None and wait <= 0
            if not pending and source.exhausted:
                self._perform(self._machine.handle(m.SourceExhausted()))
                return True
        action = self._loop.decide(
            [channel.head() for channel in self.inputs],
            outputs_full=chain.full,
            operator_pending=pending,
            source_ready=ready,
        )
        return self._do(action, now_s)

    def _do(self, action: Resume | TakeControl | TakeRows | ReadSource | Idle, now_s: float) -> bool:
        match action:
            case TakeRows(input=index, max_rows=max_rows):
                self._take_rows(index, max_rows)
            case ReadSource(max_rows=max_rows):
                return self._read(max_rows, now_s)
            case TakeControl(input=index):
                self._take_control(index)
            case Resume():
                self.chain.resume()
            case Idle(reason=reason):
                if reason is IdleReason.OUTPUTS_FULL and self._full_since_s is None:
                    self._full_since_s = now_s
                return False
        if self._full_since_s is not None:
            self.full_s += now_s - self._full_since_s
            self._full_since_s = None
        return True

    def _take_rows(self, index: int, max_rows: int) -> None:
        channel = self.inputs[index]
        item = channel.take(max_rows)
        assert isinstance(item, Rows)
        started = time.perf_counter()
        try:
            self.chain.process(self._input_numbers[index], item.batch)
        except CutwaterError as e:
            raise self._positioned(e, f"channel {tuple(channel.key)}", item.first_row) from e
        rows = item.batch.num_rows
        elapsed = time.perf_counter() - started
        self.busy_s += elapsed
        self._loop.observe(rows, elapsed * 1000)
        if self._machine.recording(channel.key):
            self._perform(self._machine.handle(m.RowsTaken(channel.key, rows)))
        self._advance(index, item.watermark, False, item.sharp)

    def _take_control(self, index: int) -> None:
        channel = self.inputs[index]
        item = channel.take(1)
        match item:
            case Barrier(checkpoint_id=checkpoint_id, final=final):
                self._perform(self._machine.handle(m.BarrierTaken(channel.key, checkpoint_id, final)))
            case Watermark(watermark=watermark, idle=idle):
                self._advance(index, watermark, idle, True)
            case End():
                self._advance(index, MAX_WATERMARK, False, True)
                self._perform(self._machine.handle(m.EndTaken(channel.key)))
            case Rows():
                raise InvariantError(f"{self.name}: rows where a control item was announced")

    def _advance(self, index: int, watermark: int, idle: bool, sharp: bool) -> None:
        risen = self._merger.update(self.inputs[index].key, watermark, idle)
        if risen is not None:
            self.chain.start_watermark(risen, sharp)

    def _read(self, max_rows: int, now_s: float) -> bool:
        source = self.source
        assert source is not None
        started = time.perf_counter()
        got = source.read(max_rows, now_s)
        if got is None:
            return False
        rows = sum(b.num_rows for o, b in got.outputs if o == 0)
        try:
            self.chain.emit(0, got.outputs)
            if got.watermark > self.chain.watermark:
                self.chain.start_watermark(got.watermark, got.force)
        except CutwaterError as e:
            raise self._positioned(e, source.origin, None) from e
        elapsed = time.perf_counter() - started
        self.busy_s += elapsed
        if rows:
            self._loop.observe(rows, elapsed * 1000)
        return True

    # ------------------------------------------------------------------------------------------------ the protocol

    def trigger(self, event: m.Trigger) -> None:
        """The coordinator asks this source for a barrier (A1)."""
        self._triggers.append(event)

    def handle(self, event: m.Event) -> None:
        """An event for the machine that does not come through a channel."""
        self._perform(self._machine.handle(event))

    def _inject(self, now_s: float) -> bool:
        """Rows that the reader gave already lie before the barrier; they must leave first."""
        if self.source is not None and self.source.queued:
            return self._read(1, now_s)
        self._perform(self._machine.handle(self._triggers.popleft()))
        return True

    def _perform(self, effects: Sequence[m.Effect]) -> None:
        for effect in effects:
            match effect:
                case m.Block(input=key):
                    self.inputs[self._index[cast(Channel, key)]].block()
                case m.Unblock(input=key):
                    self.inputs[self._index[cast(Channel, key)]].unblock()
                case m.Freeze(checkpoint_id=checkpoint_id, final=final):
                    self._freeze(checkpoint_id, final)
                case m.BroadcastBarrier(checkpoint_id=checkpoint_id, final=final):
                    for channel in self._outputs:
                        channel.offer_barrier(checkpoint_id, final)
                case m.Acknowledge(checkpoint_id=checkpoint_id):
                    self._port.acknowledge(self.key, checkpoint_id)
                case m.Decline():
                    self._port.decline(self.key, effect)
                case m.Forget(checkpoint_id=checkpoint_id):
                    self._port.forget_snapshot(checkpoint_id)
                case m.Commit(checkpoint_id=checkpoint_id):
                    for sink in self.sinks:
                        sink.commit(checkpoint_id)
                case m.EndOfInput():
                    self._ending = True
                    if self.chain.watermark < MAX_WATERMARK:
                        self.chain.start_watermark(MAX_WATERMARK)
                case _:
                    raise InvariantError(f"{self.name}: the protocol asks for {effect}, which no plan needs")

    def _freeze(self, checkpoint_id: int, final: bool) -> None:
        started = time.perf_counter()
        record = self._record()
        states = self.chain.freeze(checkpoint_id)
        sinks = [(sink, sink.pre_commit(checkpoint_id, final)) for sink in self.sinks]
        freeze_ms = (time.perf_counter() - started) * 1000
        self._port.submit_snapshot(FrozenSubtask(checkpoint_id, record, states, sinks, freeze_ms))

    def _record(self) -> SubtaskRecord:
        source = self.source
        return SubtaskRecord(
            vertex=self.key[0],
            subtask=self.key[1],
            incarnation=self._incarnation,
            protocol=self._machine.protocol.name,
            inputs=[ChannelRecord(*c.key, c.next_row, c.watermark, c.idle, c.ended) for c in self.inputs],
            output_rows=[ChannelRecord(*c.key, c.next_row, c.watermark, c.idle, c.ended) for c in self._outputs],
            splits={source.step: source.records()} if source else {},
            processing_time_ms=int(time.time() * 1000),
            watermark=self.chain.watermark,
            finished=self.finished,
        )

    def _end(self) -> bool:
        """Everything is worked off: say so downstream and to the coordinator (A7)."""
        for channel in self._outputs:
            channel.offer_end()
        self.finished = True
        self._port.finished(self.key)
        return True

    def close(self) -> None:
        """Release operators, writers and readers; commits nothing."""
        self.chain.close()
        if self.source is not None:
            with contextlib.suppress(Exception):
                self.source.close()

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
