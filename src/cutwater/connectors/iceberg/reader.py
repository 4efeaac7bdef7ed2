"""Reads one file of a snapshot as a split."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from cutwater.connectors.base import Json, Split
from cutwater.connectors.files.schemas import Widened, cast_batch
from cutwater.connectors.iceberg.catalog import IcebergTable, iceberg_library
from cutwater.connectors.iceberg.columns import table_schema
from cutwater.connectors.iceberg.projection import Missing, Projection
from cutwater.connectors.iceberg.snapshots import DELETES, FILE, PARTITION, ROWS, SPEC
from cutwater.errors import DataError

_BATCH_ROWS = 1 << 16
_NO_ROWS: npt.NDArray[np.int64] = np.zeros(0, np.int64)


class NothingToRead:
    """A split that only says how far the table was looked at."""

    exhausted = True
    position: Json = None
    lag_rows = 0

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """No rows."""
        return None

    def close(self) -> None:
        """Nothing is open."""


class IcebergReader:
    """Rows of a data file, without those that a delete file of its snapshot names; a position is a row's number in it.

    The library's own reader is not used: it makes an empty list of a list of structs that is null, and begins at a
    file's first row.

    Args:
        table: of the catalog.
        loaded: the table as some process found it, not before the snapshot.
        split: of a data file.
        position: of the first row to be read.
        wanted: the table's columns that are read, by their ids, so that a renamed one is found in older files.
        read: these columns as Arrow has them.
        schema: of the rows that are given.
    """

    def __init__(
        self,
        table: IcebergTable,
        loaded: Any,
        split: Split,
        position: int,
        wanted: Any,
        read: pa.Schema,
        schema: pa.Schema,
    ) -> None:
        self._table, self._loaded, self._data = table, loaded, split.data
        self._wanted, self._read_schema, self._widened = wanted, read, Widened(schema)
        self.position: Json = position
        self.exhausted = False
        self._rest: pa.RecordBatch | None = None
        self._deleted = _NO_ROWS
        self._batches = self._opened(position)

    @property
    def origin(self) -> str:
        return f"{self._data[FILE]} to row {self.position}"

    @property
    def lag_rows(self) -> int:
        """Rows that are left, those that a delete file names among them."""
        return 0 if self.exhausted else max(0, self._data[ROWS] - self.position)

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """See ``SplitReader.read``.

        Raises:
            DataError: the file is gone, or its columns do not fit.
            StorageError: it cannot be read.
        """
        while True:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                self.exhausted = True
                return None
            self._rest = batch.slice(max_rows) if batch.num_rows > max_rows else None
            given = self._without_deleted(batch.slice(0, max_rows))
            if given.num_rows:
                return self._widened.widen(given)

    def _without_deleted(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Step over rows of the file, and give those that are left of them."""
        first = self.position
        self.position = first + rows.num_rows
        begin, end = np.searchsorted(self._deleted, (first, self.position))
        if begin == end:
            return rows
        kept = np.ones(rows.num_rows, np.bool_)
        kept[self._deleted[begin:end] - first] = False
        return rows.filter(pa.array(kept))

    def close(self) -> None:
        cast(Any, self._batches).close()

    def _opened(self, first: int) -> Iterator[pa.RecordBatch]:
        """All rows from one on, with the columns that are read."""
        path = self._data[FILE]
        with self._input(path) as stream:
            with self._table.errors(f"cannot read {path!r}"):
                self._deleted = self._deleted_rows()
                file = pq.ParquetFile(stream, pre_buffer=True)
                projection = self._projection(file.schema_arrow)
                groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
                ends = np.cumsum(groups)
                begin = int(np.searchsorted(ends, first, side="right"))
                skipped = first - (int(ends[begin - 1]) if begin else 0)
                batches = file.iter_batches(_BATCH_ROWS, list(range(begin, len(groups))), columns=projection.names)
            while True:
                with self._table.errors(f"cannot read {path!r}"):
                    batch = next(batches, None)
                if batch is None:
                    return
                if skipped >= batch.num_rows:
                    skipped -= batch.num_rows
                    continue
                rows = cast_batch(projection.rows(batch.slice(skipped)), self._read_schema)
                yield pa.RecordBatch.from_arrays(rows.columns, schema=self._read_schema)  # without the columns' ids
                skipped = 0

    @contextmanager
    def _input(self, path: str) -> Generator[Any]:
        with self._table.errors(f"cannot open {path!r}"):
            try:
                stream = self._loaded.io.new_input(path).open()
            except FileNotFoundError:
                raise DataError(
                    f"iceberg table {self._table.name!r}: file {path!r} is gone before it was read",
                    hint="Its snapshot was expired, its file removed. Keep snapshots for as long as a job reads.",
                ) from None
        with stream:
            yield stream

    def _projection(self, file: pa.Schema) -> Projection:
        mapping = self._loaded.metadata.name_mapping()
        values = {field.field_id: field.initial_default for field in self._wanted.fields}
        missing = Missing({**values, **self._partition_values()})
        names = () if mapping is None else mapping.root
        return Projection(file, table_schema(self._wanted), names, missing, self._data[FILE])

    def _partition_values(self) -> dict[int, object]:
        """Values of the columns by which the file's rows are partitioned, by their ids."""
        if PARTITION not in self._data:
            return {}
        metadata, from_bytes = self._loaded.metadata, iceberg_library("conversions").from_bytes
        spec = metadata.specs()[self._data[SPEC]]
        types = spec.partition_type(metadata.schema()).fields
        return {
            field.source_id: from_bytes(kind.field_type, bytes.fromhex(value))
            for field, kind, value in zip(spec.fields, types, self._data[PARTITION], strict=True)
            if value is not None and str(field.transform) == "identity"
        }

    def _deleted_rows(self) -> npt.NDArray[np.int64]:
        """Numbers of the file's rows that are deleted, in order."""
        found = [_NO_ROWS]
        for delete in self._data.get(DELETES, ()):
            with self._input(delete[FILE]) as stream:
                rows: Any = pq.read_table(stream, columns=["pos"], filters=[("file_path", "==", self._data[FILE])])
                found.append(np.asarray(rows["pos"].combine_chunks().cast(pa.int64())))
        return np.unique(np.concatenate(found))
