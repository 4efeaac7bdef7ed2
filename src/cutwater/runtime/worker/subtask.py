"""One subtask: rows through operators.

``SubtaskLoop`` says what to do next and ``Performer`` does what the protocol demands; here rows are moved and operators
are called.  Everything runs in the worker's one loop thread.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque

from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import CutwaterError, InvariantError
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Barrier, End, Item, Rows, Watermark
from cutwater.protocol.subtask.loop import (
    Action,
    FireTimers,
    Follow,
    Idle,
    IdleReason,
    ReadSource,
    Resume,
    SubtaskLoop,
    TakeControl,
    TakeRows,
)
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.watermarks import WatermarkMerger
from cutwater.runtime.chains.source_runner import Read, SourceRunner
from cutwater.runtime.chains.step_costs import StepCosts
from cutwater.runtime.worker.performer import Performer, SubtaskParts, SubtaskPort

_ACTIONS_PER_ROUND = 8
"""A subtask does at most this much before its neighbours in the worker have their turn."""


class Subtask:
    """A running subtask.

    Args:
        parts: channels and operators.
        machine, loop, merger: the core objects that decide.
        port: the worker.
        slice_budget_ms: a round ends when the operators have worked for so long.
    """

    performer_class: type[Performer] = Performer

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
        self._input_numbers = list(parts.input_numbers)
        self._clock = parts.clock
        self._in_loop = bool(parts.loop_inputs)
        self._loop_first = [self.inputs[i] for i in loop.loop_first]
        self._machine, self._loop, self._merger, self._port = machine, loop, merger, port
        self.performer = self.performer_class(parts, machine, merger, port, self._no_more_rows, self.when_idle)
        self._outputs = self.performer.outputs
        self._waiting: deque[m.Trigger | m.LoopVerdict | m.AlignmentTimeout] = deque()
        self._ending = False
        self._idle = any(channel.idle for channel in self._outputs)  # as it was at the cut
        self._round_s = slice_budget_ms / 1000
        self._actions_left, self._enough_s = 0, 0.0
        self.interrupted = False
        """The worker was called before the end of the turn, which goes on afterwards."""
        self.costs = StepCosts(self.chain.nodes, loop.calls)
        self.busy_s = 0.0
        self._full_s = 0.0
        self._full_since_s: float | None = None

    following = False
    """It makes choices once more that others know (R0)."""

    # ---------------------------------------------------------------------------------------------------- the loop

    def round(self, now_s: float) -> bool:
        """Some actions, or the rest of those that were interrupted; False if there was nothing to do."""
        self.performer.tick(now_s)
        worked = False
        if not self.interrupted:
            self._actions_left, self._enough_s = _ACTIONS_PER_ROUND, self.busy_s + self._round_s
        self.interrupted = False
        while self._act(now_s):
            worked = True
            self._actions_left -= 1
            if not self._actions_left or self.busy_s > self._enough_s:
                break
            if self._port.called:
                self.interrupted = True
                break
        return worked

    def attend(self, now_s: float) -> bool:
        """Take what the coordinator wants, as soon as no work is pending; rows wait for the turn.  False: nothing."""
        worked = False
        for _ in range(_ACTIONS_PER_ROUND):
            if not self._waiting or not self._act(now_s):
                break
            worked = True
        return worked

    def flush_if_due(self, now_s: float) -> float:
        """Send what waited long enough in the builders; returns when the next is due (seconds, monotonic)."""
        return min((c.flush_if_due(now_s) for c in self._outputs), default=float("inf"))

    def flush_idle(self) -> bool:
        """Send what waits in the builders; says whether anything did."""
        sent = False
        for channel in self._outputs:
            sent |= channel.flush_idle()
        return sent

    def wait_s(self, now_s: float) -> float:
        """How long the loop may sleep for this subtask if nothing wakes it."""
        due = self.performer.due_s - now_s
        timer_ms = self._next_timer_ms
        if timer_ms is not None and not self.chain.full and self._machine.may_read:
            due = min(due, (timer_ms - self._clock.now_ms()) / 1000)
        if self.source is not None:
            due = min(due, self.source.report_in_s(now_s))
        if self.source is None or self._ending or self.chain.full or self._machine.halted:
            return due
        if self.chain.room == 0 and not self.following:
            return due
        wait = self.source.wait_s(now_s)
        return due if wait is None else min(wait, due)

    @property
    def _next_timer_ms(self) -> int | None:
        """When an operator wants to be called by the clock.

        After the last watermark nothing is made any more, except in a loop, which it may start again.
        """
        over = self._ending or (self.chain.watermark == MAX_WATERMARK and not self._in_loop)
        return None if over else self.chain.next_processing_time_ms

    def _act(self, now_s: float) -> bool:
        chain, source = self.chain, self.source
        pending = self._pending
        if self._waiting:
            if pending:  # over full outputs too: it is bounded, and the barrier must not wait for the slowest consumer
                return self._resume()
            return self._take_waiting(now_s)
        over = self._ending and not pending and not chain.keeps_rows
        if over and not self.performer.finished and not self._machine.halted:
            return self._end()
        ready = False
        if source is not None and not self._ending:
            wait = source.wait_s(now_s)
            ready = wait is not None and wait <= 0
            self._tell_idle(source.idle)
            if not pending and source.exhausted and not self._machine.halted:
                self.performer.handle(m.SourceExhausted())
                return True
        timer_ms = self._next_timer_ms
        action = self._loop.decide(
            [channel.head() for channel in self.inputs],
            outputs_full=chain.full or (not pending and not self.following and chain.room == 0),
            operator_pending=pending,
            source_ready=ready,
            timers_due=timer_ms is not None and timer_ms <= self._clock.now_ms(),
            loop_rows=sum(channel.queued_rows for channel in self._loop_first),
        )
        return self._do(action, now_s)

    def _do(self, action: Action, now_s: float) -> bool:
        match action:
            case TakeRows(input=index, max_rows=max_rows):
                self._take_rows(index, max_rows)
            case ReadSource(max_rows=max_rows):
                return self._read(max_rows, now_s)
            case TakeControl(input=index):
                self._control(index, self.inputs[index].take(1))
            case Resume():
                self._resume()
            case FireTimers():
                self._fire_timers()
            case Follow():
                pass  # done, where a determinant log is followed
            case Idle(reason=reason):
                if reason is IdleReason.OUTPUTS_FULL and self._full_since_s is None:
                    self._full_since_s = now_s
                return False
        if self._full_since_s is not None:
            self._full_s += now_s - self._full_since_s
            self._full_since_s = None
        return True

    def full_s(self, now_s: float) -> float:
        """How long, up to now, rows were not made for want of room in an output; it may be so for minutes on end."""
        return self._full_s if self._full_since_s is None else self._full_s + max(0.0, now_s - self._full_since_s)

    @property
    def _pending(self) -> bool:
        """Whether something is to be done that needs no input."""
        return self.chain.pending or self.chain.answered

    def _resume(self) -> bool:
        started = time.perf_counter()
        if self.chain.pending:
            self.chain.resume()
        else:
            self.chain.take_answers(self._answered)
        self.busy_s += time.perf_counter() - started
        return True

    def _answered(self, place: int, taken: bytes) -> None:
        """An operator took what came from outside; nothing has come of it yet."""

    def _fire_timers(self) -> None:
        started = time.perf_counter()
        self.chain.on_processing_time(self._clock.now_ms())
        self.busy_s += time.perf_counter() - started

    def _take_rows(self, index: int, max_rows: int) -> None:
        channel = self.inputs[index]
        item = channel.take(self._fitting(max_rows))
        if not isinstance(item, Rows):  # a barrier that overtakes has arrived since the rows were looked at
            self._control(index, item)
            return
        self._merger.rows(channel.key)
        self._took(index, item)
        self._process(index, item)

    def _took(self, index: int, item: Rows | Watermark | End) -> None:
        """Something that counts was taken from an input; nothing has come of it yet."""

    def _process(self, index: int, item: Rows) -> None:
        channel = self.inputs[index]
        self.costs.begin()
        started = time.perf_counter()
        try:
            self.chain.process(self._input_numbers[index], item.batch, item.late_before)
        except CutwaterError as e:
            raise self._positioned(e, f"channel {tuple(channel.key)}", item.first_row) from e
        rows = item.batch.num_rows
        self._observe(rows, time.perf_counter() - started)
        if self._machine.recording(channel.key):
            self.performer.handle(m.RowsTaken(channel.key, rows))
        self._advance(index, item.watermark, False)

    def _fitting(self, max_rows: int) -> int:
        """No more rows than the operators have room for."""
        room = self.chain.room
        return max_rows if room is None else max(1, min(max_rows, room))

    def _control(self, index: int, item: Item) -> None:
        channel = self.inputs[index]
        match item:
            case Barrier():
                self.performer.barrier(channel, item)
            case Watermark(watermark=watermark, idle=idle):
                self._took(index, item)
                if self._machine.recording(channel.key):
                    self.performer.handle(m.WatermarkTaken(channel.key))
                self._advance(index, watermark, idle)
            case End():
                self._took(index, item)
                self._advance(index, MAX_WATERMARK, False)
                self.performer.handle(m.EndTaken(channel.key))
            case Rows():
                raise InvariantError(f"{self.name}: rows where a control item was announced")

    def _advance(self, index: int, watermark: int, idle: bool) -> None:
        risen = self._merger.update(self.inputs[index].key, watermark, idle)
        if risen is not None:
            self.chain.start_watermark(risen)
        if (idle or self._idle) and not self._in_loop:  # what circulates in a loop is still to come
            self._tell_idle(self._merger.idle)

    def _tell_idle(self, idle: bool) -> None:
        if idle != self._idle and not (idle and (self.chain.pending or self.chain.keeps_rows)):
            self._idle = idle
            self.chain.offer_idle(idle)

    def _read(self, max_rows: int, now_s: float) -> bool:
        source = self.source
        assert source is not None
        started = time.perf_counter()
        got = source.read(self._fitting(max_rows), now_s)
        if got is None:
            return False
        self._hand_on(got, source, started)
        return True

    def _hand_on(self, got: Read, source: SourceRunner, started: float) -> None:
        """What was read goes through the operators."""
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

    def _observe(self, rows: int, elapsed_s: float) -> None:
        """A call of the operators, from the first to the last."""
        self.busy_s += elapsed_s
        if rows:
            self._loop.observe(rows, elapsed_s * 1000)
            self.costs.observe(rows)

    # ------------------------------------------------------------------------------------------------ the protocol

    def when_idle(self, event: m.Trigger | m.LoopVerdict | m.AlignmentTimeout) -> None:
        """An event that must not come in the middle of a batch, or of what it makes (A1)."""
        self._waiting.append(event)

    def _take_waiting(self, now_s: float) -> bool:
        """Rows that the reader gave already lie before the barrier; they must leave first."""
        if self.source is not None and self.source.queued:
            return self._read(1, now_s)
        self.performer.handle(self._waiting.popleft())
        return True

    def _no_more_rows(self) -> None:
        self._ending = True

    def _end(self) -> bool:
        """Everything is worked off: say so downstream and to the coordinator (A7)."""
        for channel in self._outputs:
            channel.offer_end()
        self.performer.finished = True
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
