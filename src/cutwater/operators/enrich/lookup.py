"""Enrichment: the columns of a table that fits in memory, looked up by key for every row of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.rows import describe_row, rows_per_batch, widest_row_bytes
from cutwater.errors import BuildError, CutwaterError, DataError
from cutwater.operators.base import Context, OneInputSpec, Operator, Outputs
from cutwater.operators.deterministic_batches import DeterministicBatches
from cutwater.operators.enrich.table import EnrichmentTable, table_digest
from cutwater.operators.join.columns import common_key_type, joined_fields
from cutwater.operators.stateless.expression_checks import unknown_column
from cutwater.state.keys import check_key_types, valid_key_mask
from cutwater.state.table.row_store import ValueStore


@dataclass(frozen=True, eq=False)
class EnrichSpec(OneInputSpec):
    """Look each row's key up in ``table`` and add the table's other columns.

    The order of the rows is kept.  A null (or NaN) key matches nothing.  Key columns of the table do not come out; its
    other columns get ``suffix`` where the stream has a column of that name.

    Args:
        table: what to look up in.
        on: pairs of key columns (stream, table).
        how: "left" keeps rows without a match, with nulls; "inner" drops them.
        suffix: appended to a table column's name that the stream has too.

    Raises:
        BuildError: unknown column, keys of different types, colliding names, or a table in memory with a key twice.
            (Files are checked for that by each worker when it loads them: ``DataError``.)
    """

    repeatable = True

    table: EnrichmentTable
    on: tuple[tuple[str, str], ...]
    how: Literal["left", "inner"] = "left"
    suffix: str = "_right"
    _output: pa.Schema = field(init=False, repr=False)
    table_schema: pa.Schema = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.how not in ("left", "inner"):
            raise BuildError(f"how={self.how!r} is unknown", hint="Choose 'left' or 'inner'.")
        object.__setattr__(self, "on", tuple((left, right) for left, right in self.on))
        object.__setattr__(self, "table_schema", self.table.schema)
        for names, schema in ((self.left_keys, self.input_schema), (self.right_keys, self.table_schema)):
            for name in names:
                if schema.get_field_index(name) < 0:
                    raise unknown_column(name, schema.names)
            check_key_types(schema, names)
        kinds = self.key_types()
        fields = joined_fields(
            self.input_schema, self.table_schema, self.right_keys, self.suffix, nullable=self.how == "left"
        )
        object.__setattr__(self, "_output", pa.schema([*self.input_schema, *fields]))
        if self.table.in_memory and self.table.duplicates == "refuse":
            _refuse_duplicates(self.table.load(), self.right_keys, kinds)

    @property
    def left_keys(self) -> list[str]:
        return [left for left, _ in self.on]

    @property
    def right_keys(self) -> list[str]:
        return [right for _, right in self.on]

    def key_types(self) -> list[pa.DataType]:
        """The types in which keys are compared."""
        pairs = ((self.input_schema.field(left), self.table_schema.field(right)) for left, right in self.on)
        return [common_key_type(left, right) for left, right in pairs]

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        return (self._output,)

    @property
    def keeps_every_row(self) -> bool:
        return self.how == "left"

    def pinned(self) -> EnrichSpec:
        return self if self.table.in_memory else replace(self, table=self.table.pinned())

    def build(self) -> Operator:
        return EnrichOperator(self)


def _refuse_duplicates(table: pa.Table, keys: Sequence[str], types: Sequence[pa.DataType]) -> None:
    """Group by key with Arrow: the driver need not load Numba for this."""
    keyed = pa.table([table.column(k).cast(t) for k, t in zip(keys, types, strict=True)], names=list(keys))
    counted = keyed.group_by(list(keys)).aggregate([([], "count_all")])
    for row in counted.filter(np.asarray(counted.column("count_all")) > 1).to_pylist():
        count = row.pop("count_all")
        if all(value is not None and value == value for value in row.values()):
            raise _duplicate(BuildError, row, count)


def _duplicate(cls: type[CutwaterError], key: dict[str, object], count: int) -> CutwaterError:
    return cls(
        f"the enrichment table has {count} rows for the key {describe_row(key)}",
        hint="Remove the duplicates, or allow them (one output row per match) with duplicates='all'.",
    )


class EnrichOperator(Operator):
    """Builds an index over the table once; then one lookup and one gather per slice."""

    def __init__(self, spec: EnrichSpec) -> None:
        self._spec = spec
        self._types = spec.key_types()
        self._values = [f.name for f in spec.table_schema if f.name not in spec.right_keys]
        self._waiting: _Matches | None = None
        self.digest = ""
        """Of the table as loaded by ``open``; for the manifest."""

    def open(self, ctx: Context) -> None:
        from cutwater.state.key_index import make_index

        super().open(ctx)
        self._batches = DeterministicBatches() if ctx.repeatable else None
        table = self._spec.table.load()
        if table.schema != self._spec.table_schema:
            raise DataError(
                f"the enrichment table has other columns than when the job was built: {table.schema.names}",
                hint="Start the job anew.",
            )
        self.digest = table_digest(table)
        self._index = make_index(self._types)
        kind = pa.struct([self._spec.table_schema.field(name) for name in self._values])
        self._store = ValueStore(kind)
        gids = [self._add(batch) for batch in table.to_batches()]
        self._gids_of_rows = np.concatenate(gids) if gids else np.empty(0, np.int32)
        self._group_rows()
        self._widest = max((widest_row_bytes(batch) for batch in table.to_batches()), default=0)

    def _keys(self, batch: pa.RecordBatch, names: Sequence[str]) -> list[pa.Array]:
        return [batch.column(name).cast(kind) for name, kind in zip(names, self._types, strict=True)]

    def _add(self, batch: pa.RecordBatch) -> npt.NDArray[np.int32]:
        valid = valid_key_mask(batch, self._spec.right_keys)
        if valid is not None:
            batch = batch.filter(pa.array(valid))
        self._store.append(
            batch.select(self._values).to_struct_array() if self._values else pa.nulls(0, self._store.type)
        )
        return self._index.upsert(self._keys(batch, self._spec.right_keys))

    def _group_rows(self) -> None:
        """Rows of the table by group id: ``_rows[_starts[gid] : _starts[gid + 1]]``, in the order of the table."""
        counts = np.bincount(self._gids_of_rows, minlength=len(self._index))
        if self._spec.table.duplicates == "refuse" and counts.max(initial=0) > 1:
            gid = np.array([int(counts.argmax())])
            key = {n: c[0].as_py() for n, c in zip(self._spec.right_keys, self._index.columns(gid), strict=True)}
            raise _duplicate(DataError, key, int(counts.max()))
        self._rows = np.argsort(self._gids_of_rows, kind="stable")
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        del self._gids_of_rows

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        gids = self._index.find(self._keys(batch, self._spec.left_keys))
        valid = valid_key_mask(batch, self._spec.left_keys)
        if valid is not None:
            gids = np.where(valid, gids, np.int32(-1))
        counts = np.where(gids >= 0, self._starts[gids + 1] - self._starts[gids], 0)
        if self._spec.how == "left":
            counts = np.maximum(counts, 1)
        limit = rows_per_batch(self._widest + widest_row_bytes(batch))
        self._waiting = _Matches(batch, gids, counts, limit)
        return self.resume()

    @property
    def pending(self) -> bool:
        return self._waiting is not None

    def resume(self) -> Outputs:
        outputs = self._next_rows()
        return outputs if self._batches is None else self._batches.cut(outputs, last=not self.pending)

    def _next_rows(self) -> Outputs:
        work = self._waiting
        if work is None:
            return []
        rows, nth = work.next()
        if work.done:
            self._waiting = None
        if len(rows) == 0:
            return []
        gids = work.gids[rows]
        known = gids >= 0
        found = np.where(known, self._starts[gids] + nth, 0)
        references = np.where(known, self._rows[found] if len(self._rows) else -1, -1)
        whole = len(rows) == work.batch.num_rows and work.single
        left = work.batch if whole else work.batch.take(pa.array(rows))
        right = self._store.take(references.astype(np.int64)).flatten() if self._values else []
        return [(0, pa.RecordBatch.from_arrays([*left.columns, *right], schema=self._spec.outputs[0]))]


class _Matches:
    """The pairs that a slice makes, handed out in bounded parts: (row of the slice, number of its match)."""

    def __init__(
        self, batch: pa.RecordBatch, gids: npt.NDArray[np.int32], counts: npt.NDArray[np.int64], limit: int
    ) -> None:
        self.batch, self.gids, self._counts, self._limit = batch, gids, counts, limit
        self.single = bool((counts == 1).all())
        """Every row comes out exactly once."""
        self._once = np.flatnonzero(counts) if counts.max() <= 1 else None
        self._ends = np.cumsum(counts)
        self._at = 0

    @property
    def done(self) -> bool:
        return self._at == self._ends[-1]

    def next(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        begin, end = self._at, min(self._at + self._limit, int(self._ends[-1]))
        self._at = end
        if self._once is not None:
            return self._once[begin:end], np.zeros(end - begin, np.int64)
        pairs = np.arange(begin, end)
        rows = np.searchsorted(self._ends, pairs, side="right")
        return rows, pairs - (self._ends[rows] - self._counts[rows])
