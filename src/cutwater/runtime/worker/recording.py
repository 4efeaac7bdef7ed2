"""Subtasks that log what they choose, and follow a log where others know of one (R0).

An entry is known to the worker's ``DeterminantLogs`` before anything comes of the choice, and so before anything of it
can leave the worker.  A replacement begins at the checkpoint and makes the same calls once more: as many rows at a
time, whatever batches they come in now, and the watermarks of then, whatever comes of them meanwhile.  Where the log
ends it takes what has come since, and is free.

Only where a recovery wants it are the classes here in use, and this module is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import NondeterminismError
from cutwater.operators.row_filters import RowFilter
from cutwater.plan.graph import Channel, Step
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import End, Item, Rows, Watermark
from cutwater.protocol.determinants import CONTROL, OWN, Choice, ChoiceKind, ChoiceReader, ChoiceWriter, Run
from cutwater.protocol.job.recovery_scope import Subtask as SubtaskKey
from cutwater.protocol.subtask.source_times import SubtaskTime
from cutwater.protocol.subtask.watermarks import InputTime
from cutwater.runtime.chains.assigned_splits import AssignedSplit
from cutwater.runtime.chains.chain import ProcessingClock
from cutwater.runtime.chains.source_runner import Read, SourceRunner
from cutwater.runtime.control.determinant_logs import DeterminantLogs
from cutwater.runtime.control.messages import SplitAssignment
from cutwater.runtime.transport.sockets import nothing
from cutwater.runtime.worker.subtask import Subtask

_OF_INPUTS = {ChoiceKind.ROWS, ChoiceKind.TIMED_ROWS}
_DEEDS = {
    **dict.fromkeys(_OF_INPUTS, "took rows of an input"),
    **dict.fromkeys((ChoiceKind.WATERMARK, ChoiceKind.IDLE), "went on to other choices"),
    ChoiceKind.END: "came to the end of an input",
    ChoiceKind.MARK: "froze its state",
    ChoiceKind.TIMERS: "fired timers",
    ChoiceKind.CLOCK: "looked at the clock",
    **dict.fromkeys((ChoiceKind.READ, ChoiceKind.READ_ON), "read from its source"),
    ChoiceKind.SPLITS: "got splits to read",
    ChoiceKind.STEP_TIME: "heard how far its source had come",
    ChoiceKind.IDLE_SPLIT: "found that a split had nothing to give",
    ChoiceKind.VERDICT: "heard of its loop",
    ChoiceKind.ASYNC_RESULTS: "took async results",
}
"""In a user's words, what each choice is."""


class ChosenClock(ProcessingClock):
    """The clock as the operators of one subtask see it: it stands still during a call; what it shows is a choice."""

    __slots__ = ("_base", "_determinants", "shows_ms")

    def __init__(self, determinants: SubtaskDeterminants, base: ProcessingClock) -> None:
        super().__init__()
        self._determinants, self._base = determinants, base
        self.shows_ms: int | None = None
        """During the call under way; ``None``: nobody has looked."""

    def now_ms(self) -> int:
        if self.shows_ms is None:
            self.shows_ms = self._determinants.clock_ms(self._base)
        return self.shows_ms


class SubtaskDeterminants:
    """The determinant log of one subtask: written, or followed as far as somebody knows it.

    Args:
        news: of the worker.
        key: of the subtask.
        steps: what runs in it.
        inputs: its inputs.
        clock: the worker's.
    """

    def __init__(
        self,
        news: DeterminantLogs,
        key: SubtaskKey,
        steps: tuple[str, ...],
        inputs: list[Channel],
        clock: ProcessingClock,
    ) -> None:
        self._news, self._key, self._steps, self._inputs = news, key, steps, inputs
        self.clock = ChosenClock(self, clock)
        self._writer: ChoiceWriter | None = None
        self._reader: ChoiceReader | None = None
        self._next: Choice | None = None
        self.gathered = 0
        """Rows of the next choice that have been taken already."""
        self.on_mark: Callable[[], None] = nothing
        """Called where a freeze of then is passed that nobody goes back to."""

    @property
    def following(self) -> bool:
        return self._reader is not None

    @property
    def repeating(self) -> bool:
        """It follows, or may have to once everything is restored."""
        return self._writer is None

    @property
    def begun(self) -> bool:
        return self._writer is not None or self._reader is not None

    def begin(self, entries: bytes) -> None:
        """Follow these entries; write what comes after them."""
        self.clock.shows_ms = None
        if entries:
            self._reader = ChoiceReader(entries, len(self._inputs))
        else:
            self._writer = ChoiceWriter(len(self._inputs))

    def chose(self, kind: ChoiceKind, place: int = 0, rows: int = 0, value: int = 0, body: bytes = b"") -> None:
        """A choice is made, and nothing has come of it yet."""
        assert self._writer is not None
        self._news.append(self._key, self._writer.entry(Choice(kind, place, rows, value, body)))

    def mark(self, checkpoint_id: int) -> None:
        """The state was frozen."""
        assert self._writer is not None
        self._news.mark(self._key, checkpoint_id, self._writer.entry(Choice(ChoiceKind.MARK)))

    def clock_ms(self, base: ProcessingClock) -> int:
        """What the operators see of the clock."""
        if self._reader is not None:
            choice = self.peek()
            if choice is not None:
                return self.made(ChoiceKind.CLOCK).value
        now_ms = base.now_ms()
        if self._writer is not None:  # not while the state is being restored
            self.chose(ChoiceKind.CLOCK, value=now_ms)
        return now_ms

    # ---------------------------------------------------------------------------------------------------- following

    def peek(self) -> Choice | None:
        """The next choice of the log; ``None`` at its end, from where on choices are written."""
        if self._next is None and self._reader is not None:
            self._next = self._reader.next()
            if self._next is None:
                self._writer, self._reader = ChoiceWriter.after(self._reader), None
        return self._next

    def made(self, *kinds: ChoiceKind) -> Choice:
        """The next choice is made again.

        Raises:
            NondeterminismError: the log has another kind of choice.
        """
        choice = self.peek()
        if choice is None or choice.kind not in kinds:
            before = _DEEDS[choice.kind] if choice is not None else "did nothing more"
            chained = f" ({' -> '.join(self._steps)})" if self._steps[1:] else ""
            raise NondeterminismError(
                f"subtask {self._key[1]}{chained} {_DEEDS[kinds[0]]}, where with the same input it {before}",
                step=self._steps[0],
            )
        self._next = None
        return choice

    def next_run(self) -> Run | None:
        """What comes next, for the subtask loop."""
        choice = self.peek()
        while choice is not None and choice.kind is ChoiceKind.MARK:
            self.made(ChoiceKind.MARK)
            self.on_mark()
            choice = self.peek()
        if choice is None:
            return None
        if choice.kind in _OF_INPUTS:
            return self._inputs[choice.place], choice.rows - self.gathered
        return (self._inputs[choice.place], CONTROL) if choice.kind is ChoiceKind.END else (OWN, CONTROL)


_POLL_S = 0.01
"""How long a split is left alone that does not give again what it gave before."""


class RecordingSource(SourceRunner):
    """Logs what is read from which split, and reads it again, a split at a time."""

    joins = False

    def __init__(
        self,
        plan_step: Step,
        subtask: int,
        rate: float | None,
        columns: frozenset[str] | None,
        filters: tuple[RowFilter, ...],
        determinants: SubtaskDeterminants,
    ) -> None:
        super().__init__(plan_step, subtask, rate, columns, filters)
        self._log = determinants
        self._hidden: list[SplitAssignment] = []
        self._all_known = self._drained = False
        self._gathered: list[pa.RecordBatch] = []
        self._retry_s = 0.0

    def assign(self, splits: list[SplitAssignment], no_more: bool) -> None:
        self._hidden += splits
        self._all_known = self._all_known or no_more
        if self._log.begun and not self._log.following:
            self.reveal()

    def reveal(self, known: int | None = None) -> None:
        """Splits have come: so many are known now, or all that have been assigned."""
        count = len(self._hidden) if known is None else known - len(self._splits)
        fresh, self._hidden = self._hidden[:count], self._hidden[count:]
        super().assign(fresh, self._all_known and known is None)
        if known is None:
            self._log.chose(ChoiceKind.SPLITS, len(self._splits))

    def _take_step_time(self, watermark: int) -> Read:
        self._log.chose(ChoiceKind.STEP_TIME, value=watermark)
        return super()._take_step_time(watermark)

    def _idles(self, split: AssignedSplit) -> Read:
        self._log.chose(ChoiceKind.IDLE_SPLIT, split.place)
        return super()._idles(split)

    def report(self, now_s: float) -> SubtaskTime | None:
        """Nobody goes by what is only done once more."""
        return None if self._log.following else super().report(now_s)

    def set_free(self) -> None:
        """What was to be read again has been read: no row of it counts for the rate now."""
        self.reveal()
        self._tokens, self._token_s = 0.0, None
        if self._drained:
            super().drain()

    def drain(self) -> None:
        self._drained = True
        if not self._log.following:
            super().drain()

    def told_again(self) -> None:
        """Behind a mark stands how many splits there are."""
        self._log.chose(ChoiceKind.SPLITS, len(self._splits))

    @property
    def exhausted(self) -> bool:
        return super().exhausted and not self._log.following

    def wait_s(self, now_s: float) -> float | None:
        return max(0.0, self._retry_s - now_s) if self._log.following else super().wait_s(now_s)

    def read(self, max_rows: int, now_s: float) -> Read | None:
        if self._queued:
            self._log.chose(ChoiceKind.READ_ON)
        return super().read(max_rows, now_s)

    def _package(self, batch: pa.RecordBatch | None, split: AssignedSplit) -> Read | None:
        rows = batch.num_rows if batch is not None else 0
        if rows or split.done:
            self._log.chose(ChoiceKind.READ, split.place, rows, int(split.done))
        return super()._package(batch, split)

    def read_again(self, now_s: float) -> tuple[bool, Read | None]:
        """What the next choice of the log read; false: not all of it is there yet."""
        choice = self._log.peek()
        assert choice is not None
        if choice.kind is ChoiceKind.READ_ON:
            self._log.made(ChoiceKind.READ_ON)
            return True, self._queued.pop(0)
        if choice.kind is ChoiceKind.STEP_TIME:
            self._log.made(ChoiceKind.STEP_TIME)
            return True, super()._take_step_time(choice.value)
        split = self._splits.at(choice.place)
        if choice.kind is ChoiceKind.IDLE_SPLIT:
            self._log.made(ChoiceKind.IDLE_SPLIT)
            return True, super()._idles(split)
        if split.reader is None:
            split.reader = self.source.open(split.record, split.position, self)
        self._read_from[:] = [split.reader]
        missing = choice.rows - sum(batch.num_rows for batch in self._gathered)
        while missing or (choice.value and not split.reader.exhausted):
            batch = split.reader.read(max(missing, 1))
            if batch is None or not batch.num_rows:
                if missing and split.reader.exhausted:
                    raise self._lost(split.reader.origin, missing)
                if not split.reader.exhausted:
                    self._retry_s = now_s + _POLL_S
                    return False, None
                continue
            missing -= batch.num_rows
            if missing < 0:
                raise self._lost(split.reader.origin, missing)
            self._gathered.append(batch)
        self._log.made(ChoiceKind.READ)
        parts, self._gathered = self._gathered, []
        if choice.value:
            self._finish(split)
        whole = (parts[0] if len(parts) == 1 else pa.concat_batches(parts)) if parts else None
        return True, super()._package(whole, split)

    def _lost(self, origin: str, missing: int) -> NondeterminismError:
        what = f"{missing} rows are missing" if missing > 0 else f"there are {-missing} rows too many"
        return NondeterminismError(
            f"{origin} does not give again what it gave before: {what}",
            step=self.step,
            hint="A source must give the same rows at the same position, as long as a checkpoint refers to them.",
        )


class RecordingSubtask(Subtask):
    """A subtask that logs its choices, or follows its log."""

    def __init__(self, *arguments: Any, determinants: SubtaskDeterminants) -> None:
        super().__init__(*arguments)
        self.determinants = determinants
        determinants.on_mark = self._begin_turns
        self._times = self._seen()
        self._gathered: list[Rows] = []
        self._behind = False

    @property
    def following(self) -> bool:
        """It goes on making choices that somebody knows."""
        return self.determinants.following

    def begin(self, entries: bytes) -> None:
        """Everything is restored: follow this log, then be free."""
        self.determinants.begin(entries)
        self._behind = True
        if entries:
            self.core.loop.follow(self.determinants)

    def _begin_turns(self) -> None:
        for out in self.chain.outs:
            out.begin_turns()

    def _seen(self) -> list[InputTime]:
        times = self.core.merger.snapshot()
        return [times[channel.key] for channel in self.inputs]

    def act(self, now_s: float) -> bool:
        self.determinants.clock.shows_ms = None
        if self.determinants.following and not self.chain.pending:
            self.determinants.next_run()  # there may be none
        if self._behind and not self.determinants.following and not self.chain.pending:
            self._catch_up()
            return True
        worked = super().act(now_s)
        if not worked and self.determinants.following:
            # Somebody cannot send what is wanted for want of room in another input: the order of then need not fit into
            # the frames of now.
            for channel in self.inputs:
                channel.relieve()
        return worked

    def _catch_up(self) -> None:
        """It is free: take what the log passed over, one watermark after the other."""
        times = self._seen()
        for index, channel in enumerate(self.inputs):
            seen = times[index]
            if seen.watermark != MAX_WATERMARK and (channel.watermark > seen.watermark or channel.idle != seen.idle):
                now = Watermark(max(channel.watermark, seen.watermark), channel.idle)
                self._times = times
                self._chose(index, now)
                self.core.advance(index, now.watermark, now.idle)
                return
        self._behind, self._times = False, times
        if isinstance(self.source, RecordingSource):
            self.source.set_free()

    # ---------------------------------------------------------------------------------------------------- recording

    def took(self, index: int, item: Item) -> Item | None:
        if self.determinants.following:
            return self._took_again(index, item)
        self._chose(index, item)
        return item

    def _chose(self, index: int, item: Item) -> None:
        if type(item) is End:
            self._times[index] = InputTime(MAX_WATERMARK)
            self.determinants.chose(ChoiceKind.END, index)
            return
        before, idle = self._times[index], type(item) is Watermark and item.idle
        watermark = max(item.watermark, before.watermark)  # type: ignore[union-attr]
        news = watermark > before.watermark or idle != before.idle
        if news:
            self._times[index] = InputTime(watermark, idle)
        if type(item) is Rows:
            if news:
                self.determinants.chose(ChoiceKind.TIMED_ROWS, index, item.batch.num_rows, watermark)
            else:
                self.determinants.chose(ChoiceKind.ROWS, index, item.batch.num_rows)
        elif news:
            self.determinants.chose(ChoiceKind.IDLE if idle else ChoiceKind.WATERMARK, index, value=watermark)

    @property
    def answered(self) -> bool:
        return not self.determinants.following and self.chain.answered

    def took_results(self, place: int, taken: bytes) -> None:
        self.determinants.chose(ChoiceKind.ASYNC_RESULTS, place, body=taken)

    def fire_timers(self) -> None:
        now_ms = self._clock.now_ms()
        self.determinants.chose(ChoiceKind.TIMERS, value=now_ms)
        self.fire_at(now_ms)

    def fire_at(self, now_ms: int) -> None:
        self.determinants.clock.shows_ms = now_ms
        super().fire_at(now_ms)

    def heard(self, verdict: m.LoopVerdict) -> None:
        """What a verdict on the loop changes is a choice."""
        merger = self.core.merger
        passes = max(merger.combined, merger.passing(verdict.checkpoint_id, verdict.watermark))
        ends = verdict.ended and self.core.machine.loop_open
        if ends or passes > merger.combined:
            self.determinants.chose(ChoiceKind.VERDICT, int(ends), value=passes)

    def freeze(self, effect: m.Freeze) -> None:
        super().freeze(effect)
        self.determinants.mark(effect.checkpoint_id)
        self.determinants.on_mark()
        if isinstance(self.source, RecordingSource):
            self.source.told_again()

    # ---------------------------------------------------------------------------------------------------- following

    def follow(self) -> bool:
        """The next choice of the log, which needs no input; false if what it needs is not there yet."""
        choice = self.determinants.peek()
        assert choice is not None
        kind, place, _, value, body = choice
        source = self.source
        if kind in (ChoiceKind.WATERMARK, ChoiceKind.IDLE):
            self.determinants.made(kind)
            self.core.advance(place, value, kind is ChoiceKind.IDLE)
        elif kind is ChoiceKind.TIMERS:
            self.determinants.made(kind)
            self.fire_at(value)
        elif kind is ChoiceKind.VERDICT:
            self.determinants.made(kind)
            self._hear_again(value, bool(place))
        elif kind is ChoiceKind.ASYNC_RESULTS:
            self.determinants.made(kind)
            self.chain.repeat_results(place, body)
        elif kind is ChoiceKind.SPLITS and isinstance(source, RecordingSource):
            self.determinants.made(kind)
            source.reveal(place)
        elif isinstance(source, RecordingSource):
            started = time.perf_counter()
            there, got = source.read_again(self._now_s)
            if got is not None:
                self.hand_on(got, source, started)
            return there
        else:
            self.determinants.made(ChoiceKind.WATERMARK)
        return True

    def _hear_again(self, watermark: int, ends: bool) -> None:
        """What a verdict changed before, it changes once more."""
        risen = self.core.merger.let_pass(watermark)
        if risen is not None:
            self.chain.start_watermark(risen)
        if ends:
            self.core.handle(m.LoopVerdict(self.core.machine.newest_id, True))

    def _took_again(self, index: int, item: Item) -> Item | None:
        """The item as it was taken before: rows in as many calls as then, and time only where the log tells of it."""
        if type(item) is Watermark:
            return None  # what the log says of time holds
        if type(item) is not Rows:
            self.determinants.made(ChoiceKind.END)
            return item
        self._gathered.append(item)
        self.determinants.gathered += item.batch.num_rows
        choice = self.determinants.peek()
        assert choice is not None
        if self.determinants.gathered < choice.rows:
            return None
        self.determinants.made(choice.kind)
        self.determinants.gathered = 0
        parts, self._gathered = self._gathered, []
        batch = parts[0].batch if len(parts) == 1 else pa.concat_batches([part.batch for part in parts])
        watermark = MIN_WATERMARK if choice.kind is ChoiceKind.ROWS else choice.value
        return Rows(batch, parts[0].first_row, watermark, parts[0].late_before)
