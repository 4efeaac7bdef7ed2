"""Reads the splits of one source subtask: order, rate, event time, watermarks, positions.

The watermark is a function of the split's position (W1): a batch is cut before a row that comes later than the bound
allows, so that the row meets the same watermark however the input is sliced.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pyarrow as pa

from cutwater.connectors.base import Source, Split, SplitReader, dead_letter_schema
from cutwater.connectors.watermark_cut import watermark_cuts
from cutwater.dataflow.graph import Step
from cutwater.errors import CutwaterError, DataError
from cutwater.operators.base import MIN_WATERMARK, Outputs
from cutwater.runtime.control import SplitAssignment
from cutwater.runtime.read_limit import ReadLimit, StepLimit, is_before, read_up_to
from cutwater.storage.manifest import SplitRecord

__all__ = ["Read", "SourceRunner"]

_POLL_S = 0.01
"""How long a split that had nothing to give is left alone."""
_BURST_S = 0.1
"""A rate-limited source catches up at most this much time after a stall."""


@dataclass(slots=True)
class Read:
    """What one read gave: batches for the chain, and the watermark after them."""

    outputs: Outputs
    watermark: int
    force: bool
    """The watermark must reach every channel before the next rows."""


@dataclass(slots=True)
class _Split:
    record: Split
    position: Any
    max_time: int
    done: bool
    reader: SplitReader | None = None
    retry_s: float = 0.0


@dataclass
class SourceRunner:
    """One subtask's share of a read step.

    Args:
        plan_step: the read step (its spec is the source).
        subtask: number of this subtask.
        rate: rows per second for this subtask, or None.
    """

    plan_step: Step
    subtask: int
    rate: float | None = None
    no_more: bool = False
    limit: StepLimit | None = None
    """Of a fork that follows its leader."""
    rows: int = 0
    _splits: dict[str, _Split] = field(default_factory=dict[str, _Split])
    _order: list[str] = field(default_factory=list[str])
    _dead: list[tuple[str, int, str, str]] = field(default_factory=list[tuple[str, int, str, str]])
    _tokens: float = 0.0
    _token_s: float | None = None
    _watermark: int = MIN_WATERMARK
    _told: int = MIN_WATERMARK
    """With a limit, which may hold the watermark back."""
    _turn: int = 0
    _began: bool = False
    _moved: bool = False
    _queued: list[Read] = field(default_factory=list[Read])

    def __post_init__(self) -> None:
        self.step = self.plan_step.id
        self.source = cast(Source, self.plan_step.spec)
        options = self.plan_step.options
        self._event_time = cast("str | None", options.get("event_time"))
        self._bound_us = cast(int, options.get("out_of_order_us", 0))
        self._bad_rows = options.get("bad_rows", "fail")
        self._schema = self.plan_step.outputs[0].schema
        self._interleave = bool(getattr(self.source, "interleave", False))

    # ---------------------------------------------------------------------------------------------------- splits

    def assign(self, splits: list[SplitAssignment], no_more: bool) -> None:
        """More splits, with the position to read each from."""
        for s in splits:
            if s.id not in self._splits:
                self._splits[s.id] = _Split(Split(s.id, s.data), s.position, s.max_time, s.done)
                if not s.done:
                    self._order.append(s.id)
        self._began = self._began or bool(self._order)
        self.no_more = self.no_more or no_more

    def drain(self) -> None:
        """Read nothing more, as if that were all; the positions stay where they are."""
        self.no_more = True
        self._order.clear()

    def records(self) -> list[SplitRecord]:
        """Positions for the snapshot: the next unread row of each split."""
        return [
            SplitRecord(s.record.id, s.record.data, s.reader.position if s.reader else s.position, s.max_time, s.done)
            for s in self._splits.values()
        ]

    @property
    def exhausted(self) -> bool:
        return self.no_more and not self._order and not self._queued

    @property
    def idle(self) -> bool:
        """It was never given anything to read: its event time must not hold others back.

        One that has read all it was given is not idle: what it gets next may be as old as what others read now.
        """
        return not self._began and not self.no_more and (self._moved or not self._splits)

    @property
    def queued(self) -> bool:
        """Rows were read from the split but not handed on: a barrier must not come before them."""
        return bool(self._queued)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until a read may give something: 0 now, None not before more splits come."""
        if self._queued or self._announces:
            return 0.0
        if not self._order:
            return None
        wait = 0.0
        if self.rate is not None:
            need = min(max(self.rate * 0.001, 1.0), 1000.0)
            wait = max(0.0, (need - self._refill(now_s)) / self.rate)
        retry = min(self._splits[i].retry_s for i in self._order)
        return max(wait, retry - now_s)

    # ------------------------------------------------------------------------------------------------------ read

    def read(self, max_rows: int, now_s: float) -> Read | None:
        """The next rows, at most ``max_rows``; None when there is nothing to read now."""
        if self._announces:
            assert self.limit is not None
            self._told = self.limit.watermark
            return Read([], self._told, True)
        found = self._next(max_rows, now_s)
        if found is not None and self.limit is not None:
            self._told = found.watermark = max(self._told, min(found.watermark, self.limit.watermark))
        return found

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
        elif batch is None:
            split.retry_s = now_s + _POLL_S
        return self._package(batch, split)

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        """A row that the reader could not give (SourceContext)."""
        self._dead.append((origin, position, reason, raw))

    @property
    def origin(self) -> str:
        """For messages: what was read last."""
        for split in self._splits.values():
            if split.reader is not None:
                return split.reader.origin
        return ""

    def restore_watermark(self, watermark: int, moved: bool) -> None:
        """Go on from a snapshot: the watermark never falls.  ``moved``: the splits were dealt anew."""
        self._watermark, self._moved, self._told = watermark, moved, watermark

    def close(self) -> None:
        for split in self._splits.values():
            if split.reader is not None:
                split.reader.close()

    # -------------------------------------------------------------------------------------------------- internals

    def _pick(self, now_s: float) -> _Split | None:
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

    def _read(self, split: _Split, max_rows: int) -> pa.RecordBatch | None:
        if self.limit is not None and self._is_held(split):
            return None
        if split.reader is None:
            split.reader = self.source.open(split.record, split.position, self)
        if self._may_end(split):
            return split.reader.read(max_rows)

        def reopen(position: Any) -> SplitReader:
            self._dead.clear()
            return self.source.open(split.record, position, self)

        limit = self._limit_of(split)
        assert limit is not None  # or the split would be held
        split.reader, batch = read_up_to(split.reader, limit.position, max_rows, reopen)
        return batch

    def _limit_of(self, split: _Split) -> ReadLimit | None:
        """How far a leader lets a split be read; ``None``: nothing of it, if there is a leader."""
        return self.limit.splits.get(split.record.id) if self.limit is not None else None

    def _may_end(self, split: _Split) -> bool:
        limit = self._limit_of(split)
        return self.limit is None or (limit is not None and limit.done)

    def _is_held(self, split: _Split) -> bool:
        """The leader has not read on."""
        limit = self._limit_of(split)
        if limit is None or limit.done:
            return limit is None
        return not is_before(split.reader.position if split.reader else split.position, limit.position)

    @property
    def _announces(self) -> bool:
        """The leader's event time is due: everything that it has read was read."""
        limit = self.limit
        if limit is None or not limit.announce or limit.watermark <= self._told or self._queued or self.idle:
            return False
        return not self.exhausted and all(self._is_held(self._splits[id]) for id in self._order)

    def _finish(self, split: _Split) -> None:
        assert split.reader is not None
        split.position, split.done = split.reader.position, True
        split.reader.close()
        split.reader = None
        self._order.remove(split.record.id)

    def _refill(self, now_s: float) -> float:
        assert self.rate is not None
        if self._token_s is None:
            self._token_s = now_s
        self._tokens = min(self._tokens + (now_s - self._token_s) * self.rate, max(1.0, self.rate * _BURST_S))
        self._token_s = now_s
        return self._tokens

    def _package(self, batch: pa.RecordBatch | None, split: _Split) -> Read | None:
        dead = self._take_dead()
        if batch is None or batch.num_rows == 0:
            return Read(dead, self._watermark, False) if dead else None
        self.rows += batch.num_rows
        self._tokens -= batch.num_rows
        if self._event_time is None:
            return Read([(0, batch), *dead], self._watermark, False)
        batch, bad = self._with_time(batch)
        reads = self._cut(batch, split)
        reads[-1].outputs += dead + bad
        self._queued = reads[1:]
        return reads[0]

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
        origin = self.origin
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

    def _cut(self, batch: pa.RecordBatch, split: _Split) -> list[Read]:
        if batch.num_rows == 0:
            return [Read([], self._watermark, False)]
        assert self._event_time is not None
        times = batch.column(self._event_time).cast(pa.int64()).to_numpy(zero_copy_only=False)
        cuts, watermarks = watermark_cuts(times, split.max_time, self._bound_us)
        split.max_time = max(split.max_time, int(times.max()))
        reads: list[Read] = []
        start = 0
        for cut, watermark in zip([*cuts, batch.num_rows], watermarks, strict=True):
            self._watermark = max(self._watermark, self._combined(watermark, split))
            part = batch.slice(start, cut - start)
            reads.append(Read([(0, part)] if part.num_rows else [], self._watermark, cut < batch.num_rows))
            start = cut
        return reads

    def _combined(self, watermark: int, split: _Split) -> int:
        """With interleaved splits the slowest one holds the watermark."""
        if not self._interleave:
            return watermark
        others = [self._splits[i] for i in self._order if i != split.record.id]
        held = [MIN_WATERMARK if s.max_time == MIN_WATERMARK else s.max_time - self._bound_us - 1 for s in others]
        return min([watermark, *held])

    def _take_dead(self) -> Outputs:
        if not self._dead:
            return []
        origins, positions, reasons, raws = zip(*self._dead, strict=True)
        self._dead.clear()
        columns = [[self.step] * len(origins), origins, positions, reasons, raws]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, dead_letter_schema, strict=True)]
        return [(1, pa.record_batch(arrays, schema=dead_letter_schema))]
