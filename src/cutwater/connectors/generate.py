"""A source that computes its rows from their numbers: load tests, examples, benchmarks.

Row *n* is the same in every run, so the position of a split is just the next row number.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.base import BadRows, Json, SourceContext, Split, check_rate
from cutwater.data.schema_text import as_schema
from cutwater.data.words import new_buffer
from cutwater.errors import BuildError, UserCodeError

GenerateFn: TypeAlias = Callable[[int, int], pa.RecordBatch]
"""``fn(start, count)``: the rows numbered ``start`` to ``start + count - 1``, always the same ones."""

_JOINED_BYTES = 2 << 20
"""A part of a stripe that is larger goes alone: to join it with others would copy it."""
_PIECE_ROWS = 8192
"""Times are computed of so many rows at a time: arrays of NumPy that are larger come as fresh pages, each time."""
_FIRST_US = 1_577_836_800_000_000  # 2020-01-01T00:00:00Z
_DEFAULT_SCHEMA = pa.schema([("value", pa.int64()), ("timestamp", pa.timestamp("us", tz="UTC"))])


@dataclass(frozen=True)
class RateSource:
    """Rows computed from their numbers.

    The numbers are dealt out to the splits in stripes (stripe 0 to split 0, stripe 1 to split 1, ...), so that all
    splits advance through the sequence together; their event times stay close.

    Args:
        fn: computes rows; None gives ``value`` (the row number) and ``timestamp`` (2020-01-01 plus ``1/rate`` seconds
            per row, 1 ms if there is no rate): never the clock.
        schema, rows, partitions, start, rate, stripe_rows: as of ``generate``.
    """

    fn: GenerateFn | None = None
    schema: pa.Schema = _DEFAULT_SCHEMA
    rows: int | None = None
    partitions: int = 4
    start: int = 0
    rate: float | None = None
    stripe_rows: int = 65_536
    bad_rows: BadRows = "fail"

    replayable: ClassVar[bool] = True
    discover_interval_ms: ClassVar[float] = 3_600_000.0
    interleave: ClassVar[bool] = True
    """Splits are read in turns: their event times advance together."""

    def __post_init__(self) -> None:
        for name, low in (("partitions", 1), ("stripe_rows", 1), ("rows", 0), ("start", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < low):
                raise BuildError(f"generate: {name} must be a whole number of at least {low}, got {value!r}")
        check_rate(self.rate)

    @property
    def bounded(self) -> bool:
        return self.rows is not None

    def with_bad_rows(self, bad_rows: BadRows) -> RateSource:
        """A copy for a read step that diverts bad rows (generated rows are never bad)."""
        return replace(self, bad_rows=bad_rows)

    def discover(self) -> list[Split]:
        """One split per partition.  Its id names all numbers that say which rows it holds."""
        total = "all" if self.rows is None else str(self.rows)
        name = f"{self.start}+{total}/{self.stripe_rows}"
        return [Split(f"rows-{name}-{p}of{self.partitions}", p) for p in range(self.partitions)]

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> _RateReader:
        first = self.start + split.data * self.stripe_rows
        return _RateReader(self, split, first if position is None else position)

    def numbered(self, value: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """The rows with these numbers, where there is no ``fn``."""
        step_us, rows = 1_000.0 if self.rate is None else 1e6 / self.rate, len(value)
        buffer, stamp = new_buffer(rows, np.int64)
        for begin in range(0, rows, _PIECE_ROWS):
            piece = slice(begin, begin + _PIECE_ROWS)
            np.add((value[piece] * step_us).astype(np.int64), _FIRST_US, out=stamp[piece])
        stamps = pa.Array.from_buffers(_DEFAULT_SCHEMA.field(1).type, rows, [None, buffer])
        return pa.record_batch([pa.array(value), stamps], _DEFAULT_SCHEMA)

    def compute(self, start: int, count: int) -> pa.RecordBatch:
        """The rows with these numbers, checked.

        Raises:
            UserCodeError: ``fn`` failed, or gave other rows than it should.
        """
        if self.fn is None:
            return self.numbered(np.arange(start, start + count, dtype=np.int64))
        batch = _call(self.fn, start, count)
        if batch.num_rows != count:
            raise UserCodeError(
                f"generate: fn({start}, {count}) gave {batch.num_rows} rows instead of {count}",
                hint="fn(start, count) must return exactly the rows numbered start to start + count - 1.",
            )
        if batch.schema.equals(self.schema, check_metadata=True):
            return batch
        try:
            if batch.schema.names != self.schema.names:
                raise ValueError("other columns")
            columns = [c.cast(f.type) for c, f in zip(batch.columns, self.schema, strict=True)]
            return pa.record_batch(columns, schema=self.schema)
        except (pa.ArrowException, ValueError) as e:
            found, wanted = (", ".join(f"{f.name} {f.type}" for f in x) for x in (batch.schema, self.schema))
            raise UserCodeError(f"generate: fn({start}, {count}) gave {found} instead of {wanted}: {e}") from e


def _call(fn: GenerateFn, start: int, count: int) -> pa.RecordBatch:
    try:
        batch = fn(start, count)
    except Exception as e:
        own = "".join(traceback.format_exception(type(e), e, e.__traceback__ and e.__traceback__.tb_next))
        raise UserCodeError(f"generate: fn({start}, {count}) failed:\n{own}") from e
    if not isinstance(batch, pa.RecordBatch):
        raise UserCodeError(f"generate: fn must return a pyarrow.RecordBatch, got {type(batch).__name__}")
    return batch


class _RateReader:
    """Position: the number of the next row."""

    def __init__(self, source: RateSource, split: Split, position: int) -> None:
        self._source = source
        self._next = position
        self._end = None if source.rows is None else source.start + source.rows
        self._skip = (source.partitions - 1) * source.stripe_rows
        self._split = split.id
        self._last = (position, position)

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        if self._source.fn is None:
            return self._numbered(max_rows)
        parts: list[pa.RecordBatch] = []
        first = self._next
        while max_rows > 0 and not self.exhausted:
            count = min(max_rows, self._stripe_left())
            parts.append(self._source.compute(self._next, count))
            self._advance(count)
            max_rows -= count
            if parts[-1].nbytes > _JOINED_BYTES:
                break
        if not parts:
            return None
        self._last = (first, self._next)
        return parts[0] if len(parts) == 1 else pa.concat_batches(parts)

    def _numbered(self, max_rows: int) -> pa.RecordBatch | None:
        """The next rows of all stripes that they lie in, at once: a stripe of ``rate`` has few."""
        first, parts = self._next, list[npt.NDArray[np.int64]]()
        stripes = self._whole_stripes(max_rows)
        if not stripes and max_rows > 0 and not self.exhausted:
            count = min(max_rows, self._stripe_left())
            parts.append(np.arange(first, first + count, dtype=np.int64))
            self._advance(count)
            max_rows -= count
            stripes = self._whole_stripes(max_rows)
        if stripes:
            stripe_rows = self._source.stripe_rows
            begins = self._next + np.arange(stripes, dtype=np.int64) * (stripe_rows + self._skip)
            parts.append(np.add.outer(begins, np.arange(stripe_rows, dtype=np.int64)).ravel())
            self._next += stripes * (stripe_rows + self._skip)
            max_rows -= stripes * stripe_rows
        if max_rows > 0 and not self.exhausted:
            count = min(max_rows, self._stripe_left())
            parts.append(np.arange(self._next, self._next + count, dtype=np.int64))
            self._advance(count)
        if not parts:
            return None
        self._last = (first, self._next)
        return self._source.numbered(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def _whole_stripes(self, max_rows: int) -> int:
        """How many stripes can be read whole from here, if a stripe begins here."""
        source = self._source
        if source.partitions == 1 or (self._next - source.start) % source.stripe_rows:
            return 0
        stripes = max_rows // source.stripe_rows
        if self._end is None:
            return stripes
        return max(0, min(stripes, (self._end - self._next + self._skip) // (source.stripe_rows + self._skip)))

    @property
    def position(self) -> Json:
        return self._next

    @property
    def exhausted(self) -> bool:
        return self._end is not None and self._next >= self._end

    @property
    def origin(self) -> str:
        return f"generated rows {self._last[0]} to {self._last[1] - 1} ({self._split})"

    def close(self) -> None:
        self._end = self._next

    def _stripe_left(self) -> int:
        source = self._source
        if source.partitions == 1:
            return (self._end or 2**63 - 1) - self._next
        left = source.stripe_rows - (self._next - source.start) % source.stripe_rows
        return left if self._end is None else min(left, self._end - self._next)

    def _advance(self, count: int) -> None:
        """Past the rows read; at the end of a stripe on to the split's next one."""
        self._next += count
        if self._source.partitions > 1 and (self._next - self._source.start) % self._source.stripe_rows == 0:
            self._next += self._skip


def generate(
    fn: GenerateFn,
    *,
    schema: pa.Schema | str | None = None,
    rows: int | None = None,
    partitions: int = 4,
    start: int = 0,
    rate: float | None = None,
    stripe_rows: int = 65_536,
) -> RateSource:
    """A source of computed rows: ``fn(start, count)`` returns the rows numbered ``start`` to ``start + count - 1``.

    ``fn`` must depend on the row numbers alone: after a failure rows are computed again.

    Args:
        fn: returns a ``pyarrow.RecordBatch`` of exactly ``count`` rows.
        schema: ``pyarrow.Schema`` or text such as ``"k long, v double"``; None asks ``fn`` for one row now.
        rows: how many rows in all; None for ever.
        partitions: number of splits, at least the parallelism of the step.
        start: number of the first row.
        rate: rows per second over all subtasks; None for as fast as possible.
        stripe_rows: how many consecutive rows a split holds before the next split's turn.

    Raises:
        UserCodeError: ``fn`` failed when asked for its schema.

    >>> source = generate(lambda start, n: pa.record_batch({"n": range(start, start + n)}), rows=10)
    >>> source.schema.names, len(source.discover()), source.bounded
    (['n'], 4, True)
    """
    known = _call(fn, start, 1).schema.remove_metadata() if schema is None else as_schema(schema)
    return RateSource(fn, known, rows, partitions, start, rate, stripe_rows)


def rate(rows_per_second: float | None, *, rows: int | None = None, partitions: int = 4, start: int = 0) -> RateSource:
    """``value`` (int64, the row number) and ``timestamp`` (from the number, not from the clock) at a steady rate.

    >>> rate(1000.0, rows=3, partitions=1).compute(0, 3).column("timestamp")[2].as_py().isoformat()
    '2020-01-01T00:00:00.002000+00:00'
    """
    return RateSource(None, _DEFAULT_SCHEMA, rows, partitions, start, rows_per_second, stripe_rows=256)
