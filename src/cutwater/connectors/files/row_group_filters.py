"""Row groups of Parquet files that need not be read: by their statistics no row of them fulfils the filters behind.

What must not be missed of the rows that are left out is their event time, since it tells which later rows are late: a
row group without statistics of it is read.  Parquet says nothing of NaN, and may cut texts short so that bounds are
wider than the values; ``BoundsTest`` counts with both.  Page indexes and bloom filters are not looked into: pyarrow
has no door to them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from cutwater.connectors.files.schemas import plain_schema
from cutwater.data.time import MIN_WATERMARK
from cutwater.operators.row_filters import Bounds, BoundsTest, Pieces, RowFilter

_LEAST_ROWS = 4096
"""Splits of fewer rows are read: looking takes longer."""
_PER_US = {"milliseconds": 1000, "microseconds": 1, "nanoseconds": Fraction(1, 1000)}


class GroupRun(NamedTuple):
    """Neighbouring row groups that are all read, or all left out."""

    groups: range
    rows: int
    is_read: bool
    latest_us: int
    """Of those left out: no row has a later event time, microseconds."""


class RowGroupFilters:
    """Filters on the rows of a source, and the column of their event time, if they have one."""

    def __init__(self, filters: Sequence[RowFilter], event_time: str | None) -> None:
        self._tests = [test for test in map(BoundsTest, filters) if test.tells]
        self._event_time = event_time

    @property
    def told(self) -> list[str]:
        """The filters by which row groups may be left out, for people."""
        return [str(test.filter.expr) for test in self._tests]

    def runs(self, parquet: pq.ParquetFile, schema: pa.Schema, groups: range) -> list[GroupRun]:
        """The row groups of a file in order.

        Args:
            parquet: the file.
            schema: of the source's rows; a file's types may be narrower.
            groups: those to look at.
        """
        chunks = [parquet.metadata.row_group(group) for group in groups]
        rows = [chunk.num_rows for chunk in chunks]
        needless = np.zeros(len(chunks), dtype=np.bool_)
        latest: Sequence[int] = [MIN_WATERMARK] * len(chunks)
        if self._tests and sum(rows) >= _LEAST_ROWS:
            statistics = _Statistics(parquet, schema, chunks)
            known = {c: found for t in self._tests for c in t.columns if (found := statistics.bounds(c)) is not None}
            for test in self._tests:
                needless |= ~test.may_hold(Pieces(rows, known))
            if self._event_time is not None and needless.any():
                times = statistics.latest_us(self._event_time)
                needless &= np.array([time is not None for time in times])
                latest = [MIN_WATERMARK if time is None else time for time in times]
        return _runs(groups, rows, needless, latest)


def _runs(groups: range, rows: Sequence[int], needless: npt.NDArray[np.bool_], latest: Sequence[int]) -> list[GroupRun]:
    found: list[GroupRun] = []
    for left_out, places in itertools.groupby(range(len(groups)), key=lambda place: bool(needless[place])):
        run = list(places)
        first, last = run[0], run[-1]
        total = sum(rows[first : last + 1])
        found.append(
            GroupRun(range(groups[first], groups[last] + 1), total, not left_out, max(latest[first : last + 1]))
        )
    return found


def unit_us(leaf: pq.ColumnSchema) -> int | Fraction | None:
    """Microseconds of one count of a timestamp column; ``None`` if it is none."""
    return _PER_US.get(json.loads(leaf.logical_type.to_json()).get("timeUnit", ""))


class _Statistics:
    """What the footer of a file says of columns in some row groups."""

    def __init__(self, parquet: pq.ParquetFile, schema: pa.Schema, chunks: Sequence[pq.RowGroupMetaData]) -> None:
        self._schema, self._chunks = schema, chunks
        self._found = plain_schema(parquet.schema_arrow)
        leaves = [parquet.schema.column(place) for place in range(len(parquet.schema))]
        self._leaves = leaves
        self._places = {leaf.path: place for place, leaf in enumerate(leaves) if "." not in leaf.path}

    def bounds(self, column: str) -> Bounds | None:
        """Bounds of a column in the types of the source; ``None``: nothing is known."""
        place = self._places.get(column)
        if place is None or self._leaves[place].physical_type == "INT96" or not _is_told(self._found, column):
            return None
        kind, wanted = self._found.field(column).type, self._schema.field(column).type
        found = [chunk.column(place).statistics for chunk in self._chunks]
        ends = self._times if pt.is_timestamp(kind) else self._values
        try:
            low, high = (ends(found, place, kind, end).cast(wanted) for end in ("min", "max"))
        except (pa.ArrowException, ValueError, TypeError):  # text cut within a character, a time too fine
            return None
        nulls = [s.null_count if s is not None and s.has_null_count else None for s in found]
        return Bounds(low, high, nulls)

    def latest_us(self, column: str) -> list[int | None]:
        """The largest time in each row group, microseconds; ``None``: not known, or some rows have none."""
        bounds, kind = self.bounds(column), self._schema.field(column).type
        if bounds is None or not pt.is_timestamp(kind):
            return [None] * len(self._chunks)
        times = bounds.high.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()).to_pylist()
        return [time if nulls == 0 else None for time, nulls in zip(times, bounds.nulls, strict=True)]

    def _times(self, found: Sequence[Any], place: int, kind: pa.DataType, end: str) -> pa.Array:
        """The least or largest values in microseconds, outwards."""
        unit, rounded = unit_us(self._leaves[place]), math.floor if end == "min" else math.ceil
        raw = [getattr(s, f"{end}_raw") if s is not None and s.has_min_max else None for s in found]
        counts = [None if value is None or unit is None else rounded(value * unit) for value in raw]
        return pa.array(counts, pa.int64()).cast(pa.timestamp("us", kind.tz))

    @staticmethod
    def _values(found: Sequence[Any], place: int, kind: pa.DataType, end: str) -> pa.Array:
        """The least or largest values."""
        values = [getattr(s, end) if s is not None and s.has_min_max else None for s in found]
        if pt.is_floating(kind):
            values = [None if value is None or math.isnan(value) else value for value in values]
        return pa.array(values, kind)


def _is_told(schema: pa.Schema, column: str) -> bool:
    """Whether bounds of such values are understood."""
    kind = schema.field(column).type
    numbers = pt.is_integer(kind) or pt.is_float32(kind) or pt.is_float64(kind) or pt.is_decimal128(kind)
    return numbers or pt.is_string(kind) or pt.is_boolean(kind) or pt.is_date32(kind) or pt.is_timestamp(kind)
