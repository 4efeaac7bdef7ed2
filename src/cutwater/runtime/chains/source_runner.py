"""Reads the splits of one source subtask: order, rate, event time, watermarks, positions.

The watermark is the smallest over all splits that were given to the subtask and that it has yet to read to their ends,
those not begun included (W4).  Which rows are late does not follow from it: a row that comes later than the bound of
its own split allows carries along how far that split had come (``late_before``), and a row that keeps the bound is
never late.  So lateness is a function of the position in the split (W1), whatever else is read meanwhile, and by whom.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.base import (
    Source,
    SourceHooks,
    SplitReader,
    dead_letter_schema,
    earliest_time,
    lag_of,
    take_passed_over,
)
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import CutwaterError, DataError
from cutwater.operators.base import Outputs
from cutwater.operators.row_filters import RowFilter
from cutwater.plan.graph import Step
from cutwater.protocol.subtask.source_times import SplitTimes, SubtaskTime, watermark_after
from cutwater.runtime.chains.assigned_splits import AssignedSplit, AssignedSplits, SplitRecords
from cutwater.runtime.chains.kernels import highest_in_bound
from cutwater.runtime.control.messages import SplitAssignment
from cutwater.runtime.control.read_limit import ReadLimit, StepLimit, is_before, read_up_to


def watermark_cuts(times_us: npt.NDArray[np.int64], previous_max: int, bound_us: int) -> tuple[list[int], list[int]]:
    """Cut positions of a batch, so that lateness depends on the position in the split only (W1, W4); and watermarks.

    The watermark of a split after row i is ``max(event time of rows 0..i) - bound - 1``: no later row may have an event
    time at or below it.  A row that breaks this promise is judged by the watermark of its own split before it, which
    goes with it to every step behind (``Rows.late_before``).  So a batch is cut before each such row, if the watermark
    rose since the last cut.  Rows that keep the promise can never be late, wherever the cuts are: data within its bound
    is never cut.

    Args:
        times_us: event times of the batch's rows, microseconds, without nulls.
        previous_max: largest event time of the split's rows before the batch; ``MIN_WATERMARK`` if there are none.
        bound_us: how far a row may come after a younger one.

    Returns:
        ``cuts``: rising row numbers; the batch splits into ``[0, cuts[0]), [cuts[0], cuts[1]), ... [cuts[-1], n)``.
        ``watermarks``: one more than cuts; ``watermarks[k]`` is what row ``cuts[k]`` and those behind it are judged by,
        and the last one holds after the whole batch.  A cut at row 0 (an empty first part) says that the batch begins
        with such a row.

    With a bound far too small for the data there is a cut for every second row: correct, but slow.

    >>> watermark_cuts(np.array([10, 20, 17, 12, 30, 25]), MIN_WATERMARK, 5)
    ([3], [14, 24])
    """
    rows = len(times_us)
    if rows == 0:
        return [], [watermark_after(previous_max, bound_us)]
    # Below this nothing can be violated; it also keeps the subtraction from wrapping round at the end of the range.
    floor = MIN_WATERMARK + bound_us
    highest, kept = highest_in_bound(times_us, previous_max, bound_us, floor)
    if kept == rows:
        return [], [watermark_after(int(highest), bound_us)]
    running = np.maximum.accumulate(times_us)
    before = np.empty(rows, dtype=np.int64)
    before[0] = previous_max
    np.maximum(running[:-1], previous_max, out=before[1:])
    violating = np.flatnonzero((before > floor) & (times_us < np.maximum(before, floor) - bound_us))
    if len(violating):
        seen = before[violating]
        rose = np.ones(len(violating), dtype=bool)
        rose[1:] = seen[1:] > seen[:-1]
        violating = violating[rose]
    cuts: list[int] = violating.tolist()
    maxima: list[int] = [*before[violating].tolist(), max(previous_max, int(running[-1]))]
    return cuts, [watermark_after(m, bound_us) for m in maxima]


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
"""How long a split that had nothing to give is left alone, the first time and after many times."""
_PAUSE_PER_SPLIT_S = 0.0002
"""The longest pause is this much for each split that there is, so that many of them cost no more to ask than few."""
_BURST_S = 0.1
"""A rate-limited source catches up at most this much time after a stall."""
_LOOKS_PER_READ = 16
"""With each batch it is looked up when the rows of so many further splits begin."""
_JOIN_ROWS, _JOIN_S = 1 << 14, 0.004
"""Small splits are read together until they have so many rows, or for so long."""
_REPORT_S = 0.01
"""At most so often is the coordinator told how far the subtask has come, if others of the step go by it."""


@dataclass(slots=True)
class Read:
    """What one read gave: batches for the chain, and the watermark after them."""

    outputs: Outputs
    watermark: int
    late_before: int = MIN_WATERMARK
    """See ``Rows``."""


def _rows_of(read: Read) -> int:
    return sum(batch.num_rows for output, batch in read.outputs if output == 0)


def _schema_of(read: Read) -> pa.Schema | None:
    """Of its rows, in which texts may come as dictionaries or not; ``None``: it has none."""
    return next((batch.schema for output, batch in read.outputs if output == 0), None)


def _joined(parts: list[Read]) -> Read:
    """Reads that follow each other, as one."""
    rows = [batch for part in parts for output, batch in part.outputs if output == 0]
    others = [output for part in parts for output in part.outputs if output[0] != 0]
    return Read([*([(0, pa.concat_batches(rows))] if rows else []), *others], parts[-1].watermark)


@dataclass
class SourceRunner:
    """One subtask's share of a read step.

    Args:
        plan_step: the read step (its spec is the source).
        subtask: number of this subtask.
        rate: rows per second for this subtask, or None.
        columns: those that somebody reads; ``None``: all.
        filters: rows that do not fulfil each of them may be left out.
        dictionaries: texts may come as such.
    """

    joins: ClassVar[bool] = True
    """Small splits may be read together."""
    plan_step: Step
    subtask: int
    rate: float | None = None
    columns: frozenset[str] | None = None
    filters: tuple[RowFilter, ...] = ()
    dictionaries: bool = False
    no_more: bool = False
    limit: StepLimit | None = None
    """Of a fork that follows its leader."""
    job_uid: str = ""
    incarnation: int = 0
    rows: int = 0
    rows_passed_over: int = 0
    """That were not read, since they fulfil no filter."""
    _splits: AssignedSplits = field(default_factory=AssignedSplits)
    _order: list[str] = field(default_factory=list[str])
    _dead: list[tuple[str, int, str, str]] = field(default_factory=list[tuple[str, int, str, str]])
    _tokens: float = 0.0
    _token_s: float | None = None
    _watermark: int = MIN_WATERMARK
    _told: int = MIN_WATERMARK
    """With a limit, which may hold the watermark back."""
    _turn: int = 0
    _queued: list[Read] = field(default_factory=list[Read])
    _read_from: list[SplitReader] = field(default_factory=list[SplitReader])
    """Those of the last read, of which some may be closed."""
    _step_time: int = MIN_WATERMARK
    """Of the whole step, as the coordinator said last."""
    _step_idle: bool = False
    _reports: bool = False
    """Others of the step go by this subtask."""
    _reported: SubtaskTime | None = None
    _reported_s: float = 0.0
    _report_waits: bool = False
    _quiet_since_s: float | None = None

    def __post_init__(self) -> None:
        self.step = self.plan_step.id
        options = self.plan_step.options
        self._event_time = cast("str | None", options.get("event_time"))
        times = frozenset() if self._event_time is None else {self._event_time}
        source = SourceHooks(cast(Source, self.plan_step.spec))
        columns = None if self.columns is None else self.columns | times
        self.source = source.reading(columns, dictionaries=self.dictionaries)
        if self.rate is None:  # a pace is one of all rows
            self.source = SourceHooks(self.source).passing_over(self.filters, self._event_time)
        self._bound_us = cast(int, options.get("out_of_order_us", 0))
        self._bad_rows = options.get("bad_rows", "fail")
        self._schema = self.plan_step.outputs[0].schema
        self._interleave = SourceHooks(self.source).interleave
        self._ordered = SourceHooks(self.source).time_ordered
        idle_timeout_ms = cast("float | None", options.get("idle_timeout_ms"))
        self._idle_timeout_s = None if idle_timeout_ms is None else idle_timeout_ms / 1000
        self._times = SplitTimes(self._bound_us, self._ordered)
        self._begins: tuple[int, str] | None = None

    # ---------------------------------------------------------------------------------------------------- splits

    def assign(self, splits: list[SplitAssignment], no_more: bool) -> None:
        """More splits, with the position to read each from."""
        for s in splits:
            if s.id not in self._splits:
                self._admit(self._splits.add(s))
                if not s.done:
                    self._order.append(s.id)
        if splits:
            self._step_idle, self._quiet_since_s = False, None
        self.no_more = self.no_more or no_more

    def _admit(self, split: AssignedSplit) -> None:
        """From now on the split has a say in the subtask's time.

        One that comes when time has passed already begins there: what is older is late, whoever reads it, and a
        snapshot says so (``max_time``).
        """
        if split.done:
            self._times.finished_before(split.max_time)
            return
        begun = split.position is not None
        if not begun and self._watermark > MIN_WATERMARK:
            split.max_time = max(split.max_time, self._watermark + self._bound_us + 1)
        self._times.add(split.record.id, split.max_time, begun=begun, idle=split.idle)

    def drain(self) -> None:
        """Read nothing more, as if that were all; the positions stay where they are."""
        self.no_more = True
        self._order.clear()

    def records(self) -> SplitRecords:
        """Positions for the snapshot."""
        return self._splits.records()

    @property
    def exhausted(self) -> bool:
        return self.no_more and not self._order and not self._queued

    @property
    def idle(self) -> bool:
        """Nobody in the step has had anything to give for the idle timeout: its time must not hold others back."""
        return self._step_idle and not self.no_more

    @property
    def _holding(self) -> bool:
        """There is something to read, so that the subtask's own time holds."""
        return bool(self._queued) or self._times.held is not None

    @property
    def queued(self) -> bool:
        """Rows were read from the split but not handed on: a barrier must not come before them."""
        return bool(self._queued)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until a read may give something: 0 now, None not before more splits come."""
        if self._queued or self._announces or self._hears:
            return 0.0
        if not self._order:
            return None
        wait = 0.0
        if self.rate is not None:
            need = min(max(self.rate * 0.001, 1.0), 1000.0)
            wait = max(0.0, (need - self._refill(now_s)) / self.rate)
        return max(wait, self._retry_in_s(now_s))

    def _retry_in_s(self, now_s: float) -> float:
        """Seconds until one of the splits is to be asked; mostly it is the first."""
        first = math.inf
        for split in self._order:
            retry_s = self._splits[split].retry_s
            if retry_s <= now_s:
                return 0.0
            first = min(first, retry_s)
        return first - now_s

    # ------------------------------------------------------------------------------------------------------ read

    def read(self, max_rows: int, now_s: float) -> Read | None:
        """The next rows, at most ``max_rows``; None when there is nothing to read now."""
        if self._announces:
            assert self.limit is not None
            self._told = self.limit.watermark
            return Read([], self._told)
        found = self._take_step_time(self._step_time) if self._hears else self._rows(max_rows, now_s)
        if found is not None:
            limit = self.limit.watermark if self.limit is not None else found.watermark
            self._told = found.watermark = max(self._told, min(found.watermark, limit))
        return found

    def _rows(self, max_rows: int, now_s: float) -> Read | None:
        """The rows of a split, and those of the splits behind it if all of them are small.

        What comes behind a source costs as much for few rows as for many.  Rows that must be judged by the time of
        their own split alone are not joined with others.
        """
        if not self._queued:
            self._read_from.clear()
        left, ends_s = len(self._order), time.perf_counter() + _JOIN_S
        found = self._next(max_rows, now_s)
        if found is None or not self._may_join(found, left):
            return found
        parts, most = [found], min(max_rows, _JOIN_ROWS)
        rows, schema = _rows_of(found), _schema_of(found)
        while rows < most and self._order and time.perf_counter() < ends_s:
            left = len(self._order)
            more = self._next(most - rows, now_s)
            if more is None:
                break
            theirs = _schema_of(more)
            schema = theirs if schema is None else schema
            if more.late_before != MIN_WATERMARK or (theirs is not None and theirs != schema):
                self._queued.insert(0, more)
                break
            parts.append(more)
            rows += _rows_of(more)
            if not self._may_join(more, left):
                break
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _may_join(self, found: Read, left: int) -> bool:
        """Whether other splits may follow in the same read: this one ended with it, and nothing of it waits."""
        if not self.joins or self._interleave or self.rate is not None or self.limit is not None:
            return False
        return len(self._order) < left and not self._queued and found.late_before == MIN_WATERMARK

    def _next(self, max_rows: int, now_s: float) -> Read | None:
        if self._queued:
            return self._queued.pop(0)
        if self.rate is not None:
            max_rows = max(1, min(max_rows, int(self._refill(now_s))))
        split = self._pick(now_s)
        if split is None:
            return None
        try:
            batch = self._read(split, max_rows)
        except CutwaterError as e:
            e.step = e.step or self.step
            raise
        if split.reader is not None and split.reader.exhausted and self._may_end(split):
            self._finish(split)
        elif batch is not None:
            split.pause_s = 0.0
        else:
            longest_s = max(_LONGEST_PAUSE_S, _PAUSE_PER_SPLIT_S * len(self._order))
            split.pause_s = min(longest_s, 2 * split.pause_s or _FIRST_PAUSE_S)
            split.retry_s = now_s + split.pause_s
            if self._falls_idle(split, now_s):
                return self._idles(split)
        return self._package(batch, split)

    def _falls_idle(self, split: AssignedSplit, now_s: float) -> bool:
        if self._idle_timeout_s is None or split.idle:
            return False
        if split.quiet_since_s is None:
            split.quiet_since_s = now_s
        return now_s - split.quiet_since_s >= self._idle_timeout_s

    def _idles(self, split: AssignedSplit) -> Read:
        """The split had nothing to give for so long that it holds nobody back until it has."""
        split.idle = True
        self._splits.changed(split)
        self._times.idles(split.record.id)
        return Read(self._take_dead(), self._risen())

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        """A row that the reader could not give (SourceContext)."""
        self._dead.append((origin, position, reason, raw))

    @property
    def origin(self) -> str:
        """For messages: what was read last."""
        read = self._read_from
        ends = read if len(read) < 2 else [read[0], read[-1]]
        return " to ".join(reader.origin for reader in ends)

    @property
    def counters(self) -> dict[str, int]:
        """What is told of the step besides its rows; nothing that is not known."""
        told = {"rows_passed_over": self.rows_passed_over} if self.rows_passed_over else {}
        if not SourceHooks(self.source).knows_lag:
            return told
        readers = (self._splits[split].reader for split in self._order)
        return {**told, "lag_rows": sum(lag_of(reader) or 0 for reader in readers if reader is not None)}

    def restore_watermark(self, watermark: int) -> None:
        """Go on from a snapshot: the watermark never falls.  Called once, after the splits of then were assigned."""
        self._watermark = self._told = watermark
        self._times = SplitTimes(self._bound_us, self._ordered)
        for split in self._splits:
            self._admit(split)

    # ---------------------------------------------------------------------------------------- time of the whole step

    def hear_step_time(self, watermark: int, idle: bool, report: bool) -> None:
        """How far the step has come; whoever has nothing to read goes by it."""
        self._step_time = max(self._step_time, watermark)
        self._reports = report
        self._step_idle = idle and not self._holding

    @property
    def _hears(self) -> bool:
        """The time of the step is news, and nothing of this subtask's own stands before it."""
        return self._step_time > self._watermark and not self._holding and not self.exhausted

    def _take_step_time(self, watermark: int) -> Read:
        self._watermark = max(self._watermark, watermark)
        return Read([], self._watermark)

    def report(self, now_s: float) -> SubtaskTime | None:
        """What the coordinator is to be told of this subtask's time, if there is news.

        Where all splits are dealt nobody waits for one who has read all of theirs: their streams end.
        """
        if self._event_time is None or self.no_more:
            return None
        quiet = self._quiet_in_s(now_s) == 0.0
        now = SubtaskTime(len(self._splits), self._holding, self._told, self._times.highest_finished, quiet)
        before = self._reported
        if now == before:
            return None
        rises = before is not None and now._replace(watermark=before.watermark) == before
        if rises and (not self._reports or now_s - self._reported_s < _REPORT_S):
            self._report_waits = self._reports
            return None
        self._reported, self._reported_s, self._report_waits = now, now_s, False
        return now

    def report_in_s(self, now_s: float) -> float:
        """Seconds until there may be something to report although nothing happens."""
        waits = self._reported_s + _REPORT_S - now_s if self._report_waits else math.inf
        quiet = self._quiet_in_s(now_s)
        return max(0.0, min(waits, quiet or math.inf))

    def _quiet_in_s(self, now_s: float) -> float | None:
        """Seconds until the subtask counts as quiet; ``None``: it does not, or never will."""
        if self._idle_timeout_s is None or self.no_more or self._holding:
            return None
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        return max(0.0, self._quiet_since_s + self._idle_timeout_s - now_s)

    def close(self) -> None:
        for split in self._splits:
            if split.reader is not None:
                split.reader.close()

    # -------------------------------------------------------------------------------------------------- internals

    def _pick(self, now_s: float) -> AssignedSplit | None:
        order = self._order
        if not order:
            return None
        if self._interleave:
            self._turn = (self._turn + 1) % len(order)
            order = order[self._turn :] + order[: self._turn]
        for split_id in order:
            if self._splits[split_id].retry_s <= now_s:
                return self._splits[split_id]
        return None

    def _read(self, split: AssignedSplit, max_rows: int) -> pa.RecordBatch | None:
        if self.limit is not None and self._is_held(split):
            return None
        if split.reader is None:
            split.reader = self.source.open(split.record, split.position, self)
        if self._may_end(split):
            self._read_from.append(split.reader)
            return split.reader.read(max_rows)

        def reopen(position: Any) -> SplitReader:
            self._dead.clear()
            return self.source.open(split.record, position, self)

        limit = self._limit_of(split)
        assert limit is not None  # or the split would be held
        split.reader, batch = read_up_to(split.reader, limit.position, max_rows, reopen)
        self._read_from.append(split.reader)
        return batch

    def _limit_of(self, split: AssignedSplit) -> ReadLimit | None:
        """How far a leader lets a split be read; ``None``: nothing of it, if there is a leader."""
        return self.limit.splits.get(split.record.id) if self.limit is not None else None

    def _may_end(self, split: AssignedSplit) -> bool:
        limit = self._limit_of(split)
        return self.limit is None or (limit is not None and limit.done)

    def _is_held(self, split: AssignedSplit) -> bool:
        """The leader has not read on."""
        limit = self._limit_of(split)
        if limit is None or limit.done:
            return limit is None
        return not is_before(split.reader.position if split.reader else split.position, limit.position)

    @property
    def _announces(self) -> bool:
        """The leader's event time is due: everything that it has read was read."""
        limit = self.limit
        if limit is None or not limit.announce or limit.watermark <= self._told or self._queued:
            return False
        return not self.exhausted and all(self._is_held(self._splits[id]) for id in self._order)

    def _count_passed_over(self, split: AssignedSplit) -> None:
        """Rows that were left out count for the time of the split like those that were read before its next ones."""
        passed = take_passed_over(split.reader) if split.reader is not None else None
        if passed is not None:
            self.rows_passed_over += passed.rows
            if self._event_time is not None and passed.latest_us > split.max_time:
                split.max_time = passed.latest_us
                self._times.reached(split.record.id, split.max_time)

    def _finish(self, split: AssignedSplit) -> None:
        assert split.reader is not None
        self._count_passed_over(split)
        split.position, split.done = split.reader.position, True
        split.reader.close()
        split.reader = None
        self._order.remove(split.record.id)
        self._times.finished(split.record.id)

    def _refill(self, now_s: float) -> float:
        assert self.rate is not None
        if self._token_s is None:
            self._token_s = now_s
        self._tokens = min(self._tokens + (now_s - self._token_s) * self.rate, max(1.0, self.rate * _BURST_S))
        self._token_s = now_s
        return self._tokens

    def _package(self, batch: pa.RecordBatch | None, split: AssignedSplit) -> Read | None:
        self._splits.changed(split)
        self._count_passed_over(split)
        dead = self._take_dead()
        if batch is not None and batch.num_rows:
            self.rows += batch.num_rows
            self._tokens -= batch.num_rows
            if self._event_time is None:
                return Read([(0, batch), *dead], self._watermark)
            batch, bad = self._with_time(batch)
            dead += bad
        elif not split.done:
            return Read(dead, self._watermark) if dead else None
        reads = self._cut(batch, split)
        if self._event_time is not None:
            self._look_ahead()
        reads[-1].outputs += dead
        reads[-1].watermark = self._risen()
        self._queued = reads[1:]
        return reads[0]

    def _risen(self) -> int:
        """The watermark now, which never falls."""
        held = self._times.held
        if held is not None:
            self._watermark = max(self._watermark, held)
        return self._watermark

    def _look_ahead(self) -> None:
        """When the rows of some splits begin that nobody has read yet.  Called once a batch: a replay does the same."""
        assert self._event_time is not None
        for _ in range(0 if self._interleave else _LOOKS_PER_READ):
            name = self._times.unknown
            if name is None:
                return
            begins = earliest_time(self.source, self._splits[name].record, self._event_time, self._bound_us)
            if begins is None:
                continue
            self._times.begins(name, begins)
            if self._ordered and begins < MAX_WATERMARK:  # an empty one stands nowhere in time
                self._check_order(name, begins)

    def _check_order(self, name: str, begins: int) -> None:
        """Splits that are said to follow each other in time do so, as far as one subtask sees.

        Raises:
            DataError: one begins before one that stands before it.
        """
        before, self._begins = self._begins, (begins, name)
        if before is not None and begins < before[0] and not self._of_one_file(before[1], name):
            raise DataError(
                f"{name} begins before {before[1]} does, though time_ordered=True says that each file begins no "
                f"earlier than the one before it",
                step=self.step,
                hint="Name the files in the order of their times, or leave time_ordered out.",
            )

    def _of_one_file(self, one: str, other: str) -> bool:
        """Whether two splits are parts of one file, in which rows come in any order within the bound."""
        files = {(self._splits[name].record.data or {}).get("file") for name in (one, other)}
        return len(files) == 1 and None not in files

    def _with_time(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Outputs]:
        """The event-time column as timestamp[us]; rows without a time fail or are diverted."""
        assert self._event_time is not None
        index = batch.schema.get_field_index(self._event_time)
        target = self._schema.field(index)
        column = batch.column(index)
        if column.type != target.type:
            column = column.cast(target.type)
            batch = batch.set_column(index, target, column)
        if column.null_count == 0:
            return batch, []
        missing = np.flatnonzero(np.asarray(column.is_null()))
        origin = self._read_from[-1].origin
        if self._bad_rows != "dead_letter":
            row = json.dumps(batch.slice(int(missing[0]), 1).to_pylist()[0], default=str)[:300]
            raise DataError(
                f"event time {self._event_time!r} is null in {origin}, row {int(missing[0])} of the batch: {row}",
                step=self.step,
                hint="Filter such rows in the source, or read with bad_rows='dead_letter'.",
            )
        reason = f"event time {self._event_time!r} is null"
        for row in batch.take(pa.array(missing)).to_pylist():
            self._dead.append((origin, -1, reason, json.dumps(row, default=str)))
        return batch.filter(column.is_valid()), self._take_dead()

    def _cut(self, batch: pa.RecordBatch | None, split: AssignedSplit) -> list[Read]:
        """The batch in parts: one for each time that its late rows are judged by, and the rows that need none."""
        if batch is None or batch.num_rows == 0:
            return [Read([], self._watermark)]
        assert self._event_time is not None
        split.quiet_since_s = self._quiet_since_s = None
        if split.idle:  # what it gives now is as late as anything that comes behind the time told
            split.idle = False
            split.max_time = max(split.max_time, self._watermark + self._bound_us + 1)
        times = batch.column(self._event_time).view(pa.int64()).to_numpy(zero_copy_only=False)
        cuts, watermarks = watermark_cuts(times, split.max_time, self._bound_us)
        split.max_time = max(split.max_time, int(times.max()))
        if split.done:
            self._times.finished_before(split.max_time)
        else:
            self._times.reached(split.record.id, split.max_time)
        reads: list[Read] = []
        late_before, start = MIN_WATERMARK, 0
        for cut, watermark in zip([*cuts, batch.num_rows], watermarks, strict=True):
            if cut > start:
                reads.append(Read([(0, batch.slice(start, cut - start))], self._watermark, late_before))
            start, late_before = cut, watermark
        return reads

    def _take_dead(self) -> Outputs:
        if not self._dead:
            return []
        origins, positions, reasons, raws = zip(*self._dead, strict=True)
        self._dead.clear()
        columns = [[self.step] * len(origins), origins, positions, reasons, raws]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, dead_letter_schema, strict=True)]
        return [(1, pa.record_batch(arrays, schema=dead_letter_schema))]
