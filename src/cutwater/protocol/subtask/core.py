"""Everything that is decided about one subtask, for whatever host has its operators.

    events of the worker ──> SubtaskCore ──> Performer ──> SubtaskMachine
         act, attend             │               └── effects, in their order ──> host, channels
                                 └── SubtaskLoop: which input, how many rows ──> host

A host calls ``tick`` and ``act`` in turns, ``when_idle`` with what must not come in the middle of work, ``handle`` with
what became durable, and ``outcome`` with what became of a checkpoint.  One thread does all of that.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from cutwater.data.time import MAX_WATERMARK
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Barrier, End, Item, Rows, Watermark
from cutwater.protocol.subtask.host import SubtaskChannels, SubtaskHost
from cutwater.protocol.subtask.loop import (
    Action,
    FireTimers,
    Idle,
    IdleReason,
    ReadSource,
    Resume,
    SubtaskLoop,
    TakeControl,
    TakeRows,
)
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.performer import Performer
from cutwater.protocol.subtask.watermarks import WatermarkMerger

Deferred: TypeAlias = m.Trigger | m.LoopVerdict | m.AlignmentTimeout
"""An event that may freeze the state or change the time, and so must not come in the middle of work (A1)."""


class SubtaskCore:
    """Decides what a subtask does next, and performs its protocol.

    Args:
        host: what has operators and files.
        channels: both kinds.
        machine, loop, merger: the objects that decide.
        aligned_timeout_ms: an unaligned checkpoint overtakes after so long; 0: at once.
        relieves: blocked inputs give their places back, so that their senders go on.
        idle: it had said so before the snapshot that it goes on from.
        performer: what performs the effects of the machine.
    """

    def __init__(
        self,
        host: SubtaskHost,
        channels: SubtaskChannels,
        machine: SubtaskMachine,
        loop: SubtaskLoop,
        merger: WatermarkMerger,
        *,
        aligned_timeout_ms: float = 0.0,
        relieves: bool = False,
        idle: bool = False,
        performer: type[Performer] = Performer,
    ) -> None:
        self._host, self.channels, self.machine, self.loop, self.merger = host, channels, machine, loop, merger
        self.performer = performer(
            host,
            channels,
            machine,
            merger,
            on_end=self._no_more_rows,
            when_idle=self.when_idle,
            aligned_timeout_ms=aligned_timeout_ms,
            relieves=relieves,
        )
        self.handle, self.outcome, self.tick = self.performer.handle, self.performer.outcome, self.performer.tick
        self.ending = False
        """No more rows will come: what is left is worked off, then the end of data is said."""
        self.finished = False
        """The end of data was said on all outputs."""
        self.why_idle: IdleReason | None = None
        """Of the last action: why nothing was done."""
        self._inputs = channels.inputs
        self._loop_first = [self._inputs[i] for i in loop.loop_first]
        self._in_loop = bool(channels.loop_inputs)
        self._once = (
            machine.protocol.guarantee == "exactly-once"
        )  # else rows may come again behind the end of their time
        self._waiting: deque[Deferred] = deque()
        self._idle = idle

    # ------------------------------------------------------------------------------------------------ what to do next

    def when_idle(self, event: Deferred) -> None:
        """Take an event as soon as no work is left from a call."""
        self._waiting.append(event)

    @property
    def waits(self) -> bool:
        """An event of ``when_idle`` has not been taken yet."""
        return bool(self._waiting)

    def act(self, following: bool = False) -> bool:
        """Do one thing; false if there is nothing to do.

        Args:
            following: choices are made once more that are known (R0): what comes from outside the log has to wait.
        """
        host = self._host
        self.why_idle = None
        pending = host.working or host.answered
        if self._waiting:
            if not pending:
                return self._take_waiting()
            host.resume()  # over full outputs too: it is bounded, and a barrier must not wait for the slowest consumer
            return True
        if self.ending and not self.finished and not (pending or host.keeps_rows or self.machine.halted):
            return self._end()
        ready, timers_due = False, host.timers_due
        if host.reads and not self.ending:
            ready = host.source_ready
            self._tell_idle(host.source_idle)
            if not pending and host.exhausted and not self.machine.halted:
                self.handle(m.SourceExhausted())
                return True
        heads = [end.head() for end in self._inputs]
        if heads and not (pending or timers_due or any(heads)) and self.loop.free:
            self.why_idle = IdleReason.HALTED if self.machine.halted else IdleReason.NOTHING_TO_DO
            return False
        action = self.loop.decide(
            heads,
            outputs_full=host.full or (not pending and not following and host.room == 0),
            operator_pending=pending,
            source_ready=ready,
            timers_due=timers_due,
            loop_rows=sum([end.queued_rows for end in self._loop_first]) if self._loop_first else 0,
        )
        return self._do(action)

    def _do(self, action: Action) -> bool:
        if type(action) is TakeRows:
            self._take(action.input, self._fitting(action.max_rows))
        elif type(action) is TakeControl:
            self._take(action.input, 1)
        elif type(action) is ReadSource:
            return self._host.read(self._fitting(action.max_rows))
        elif type(action) is Idle:
            self.why_idle = action.reason
            return False
        elif type(action) is Resume:
            self._host.resume()
        elif type(action) is FireTimers:
            self._host.fire_timers()
        else:
            return self._host.follow()
        return True

    def _fitting(self, max_rows: int) -> int:
        """No more rows than the operators have room for."""
        room = self._host.room
        return max_rows if room is None else max(1, min(max_rows, room))

    def _take_waiting(self) -> bool:
        """Rows that the reader gave already lie before the barrier; they must leave first."""
        if self._host.reads and self._host.source_queued:
            return self._host.read(1)
        event = self._waiting.popleft()
        if type(event) is m.LoopVerdict:
            self._host.heard(event)
        self.handle(event)
        return True

    # ------------------------------------------------------------------------------------------------------- inputs

    def _take(self, index: int, max_rows: int) -> None:
        """The next item of an input: a barrier that overtakes may have arrived since it was looked at."""
        end = self._inputs[index]
        item: Item | None = end.take(max_rows)
        if type(item) is Barrier:
            self.performer.barrier(index, item)
            return
        item = self._host.took(index, item)  # None: the host keeps it until the rest of a choice is there
        if type(item) is Rows:
            if self._once:
                self.merger.rows(end.key)
            self.rows(index, item)
        elif type(item) is Watermark:
            self.watermark(index, item)
        elif type(item) is End:
            self.advance(index, MAX_WATERMARK, False)
            self.handle(m.EndTaken(end.key))

    def rows(self, index: int, item: Rows) -> None:
        """Rows of an input go through the operators."""
        key = self._inputs[index].key
        self._host.process(index, item)
        if self.machine.recording(key):
            self.handle(m.RowsTaken(key, item.batch.num_rows))
        self.advance(index, item.watermark, False)

    def watermark(self, index: int, item: Watermark) -> None:
        """A watermark of an input."""
        key = self._inputs[index].key
        if self.machine.recording(key):
            self.handle(m.WatermarkTaken(key))
        self.advance(index, item.watermark, item.idle)

    def advance(self, index: int, watermark: int, idle: bool) -> None:
        """The time of an input is so far."""
        risen = self.merger.update(self._inputs[index].key, watermark, idle)
        if risen is not None:
            self._host.start_watermark(risen)
        if (idle or self._idle) and not self._in_loop:  # what circulates in a loop is still to come
            self._tell_idle(self.merger.idle)

    def _tell_idle(self, idle: bool) -> None:
        if idle != self._idle and not (idle and (self._host.working or self._host.keeps_rows)):
            self._idle = idle
            self._host.offer_idle(idle)

    # ------------------------------------------------------------------------------------------------------ the end

    def _no_more_rows(self) -> None:
        self.ending = True

    def _end(self) -> bool:
        """Everything is worked off: say so downstream and to the coordinator (A7)."""
        for output in self.channels.outputs:
            output.offer_end()
        self.finished = True
        self._host.finished()
        return True
