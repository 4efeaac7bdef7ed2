"""Data files of a table: made in a worker, named by who made them, and told of in handles."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cutwater.connectors.base import Json
from cutwater.connectors.files.parquet_row_groups import MAGIC
from cutwater.connectors.files.part_commit import part_stem, part_suffix
from cutwater.connectors.files.part_draft import WaitingRows
from cutwater.connectors.files.part_formats import Bytes, ParquetEncoder, ParquetParts
from cutwater.connectors.iceberg.catalog import IcebergTable, iceberg_library
from cutwater.connectors.iceberg.columns import table_schema
from cutwater.connectors.iceberg.partitions import Key, Partitioning
from cutwater.connectors.staging import converted
from cutwater.connectors.staging_folders import fsync_path
from cutwater.data.decoding import prepare
from cutwater.errors import CorruptSnapshotError

_SPOOLED_BYTES = 32 << 20
"""Of a file in the making that stay in memory; more of it goes to the disk of the worker."""
_COPY_BYTES = 4 << 20


class ColumnStatistics(msgspec.Struct, frozen=True, array_like=True):
    """What a manifest says of a column of a file."""

    id: int
    size: int
    values: int | None = None
    nulls: int | None = None
    nans: int | None = None
    lower: bytes | None = None
    upper: bytes | None = None


class DataFileHandle(msgspec.Struct, frozen=True, tag="data_file"):
    """A file in the table's folder that is to become a part of it."""

    uid: str
    checkpoint_id: int
    """At which it was cut."""
    incarnation: int
    table: str
    """The table's uuid: another one of the same name does not get the file."""
    path: str
    rows: int
    size: int
    spec: int
    partition: list[bytes | None]
    columns: list[ColumnStatistics]
    splits: list[int]
    """Where its row groups begin."""


prepare(DataFileHandle)

_SUFFIX = re.compile(r"\d{5,19}-(\d{10,19})-(\d{10,19})-\d{4,19}\.parquet", re.ASCII)


class FileOrigin(NamedTuple):
    """Whose file it is, by its name."""

    checkpoint_id: int
    incarnation: int


def origin_of(path: str, stem: str) -> FileOrigin | None:
    """Who has written a file of the step whose files' names begin with ``stem``; ``None``: others.

    >>> stem = part_stem("c0ffee", "out")
    >>> origin_of("s3://b/t/data/" + stem + part_suffix(0, 7, 3, 0, ".parquet"), stem)
    FileOrigin(checkpoint_id=7, incarnation=3)
    """
    name = path.rsplit("/", 1)[-1]
    match = _SUFFIX.fullmatch(name, len(stem)) if name.startswith(stem) else None
    return None if match is None else FileOrigin(int(match[1]), int(match[2]))


class OwnFiles(NamedTuple):
    """The files of a write step.

    Args:
        job_uid: of the job.
        step: its id.
    """

    job_uid: str
    step: str

    @property
    def stem(self) -> str:
        """Begin of their names."""
        return part_stem(self.job_uid, self.step)

    def handles(self, handles: Sequence[Json]) -> list[DataFileHandle]:
        """Handles as they lie in a manifest, each once, those of this job (T3); what they name is checked here.

        Raises:
            CorruptSnapshotError: one names something that this step has not written.
        """
        found: dict[str, DataFileHandle] = {}
        for handle in handles:
            decoded: DataFileHandle = converted(handle, DataFileHandle)
            if decoded.uid != self.job_uid:
                continue
            if origin_of(decoded.path, self.stem) != (decoded.checkpoint_id, decoded.incarnation):
                raise CorruptSnapshotError(f"{decoded.path[:256]!r} is no file that this step has written at that time")
            found[decoded.path] = decoded
        return sorted(found.values(), key=lambda handle: (handle.checkpoint_id, handle.path))


class TableFiles:
    """How files of a table are made.

    Args:
        table: of the catalog.
        loaded: the table as it was when the writer began.

    Raises:
        BuildError: a partitioning that is not written.
        ConfigError: a compression that is not.
    """

    def __init__(self, table: IcebergTable, loaded: Any) -> None:
        metadata = loaded.metadata
        self._table, self._io, self.uuid = table, loaded.io, str(metadata.table_uuid)
        self.partitioning = Partitioning(metadata, table.name)
        self.schema = table_schema(metadata.schema())
        codec = metadata.properties.get("write.parquet.compression-codec", "zstd").lower()
        level = metadata.properties.get("write.parquet.compression-level")
        self._parts = ParquetParts("none" if codec == "uncompressed" else codec, None if level is None else int(level))
        self.blocks = self._parts.blocks
        self.target_bytes = int(metadata.properties.get("write.target-file-size-bytes", 512 << 20))
        self._folder = loaded.location_provider()
        statistics = iceberg_library("io.pyarrow")
        self._statistics = statistics.data_file_statistics_from_parquet_metadata
        self._plan = statistics.compute_statistics_plan(metadata.schema(), metadata.properties)
        self._ids = statistics.parquet_path_to_id_mapping(metadata.schema())

    def encoder(self) -> ParquetEncoder:
        """Makes the bytes of one file."""
        return cast(ParquetEncoder, self._parts.encoder(self.schema))

    def location(self, key: Key, name: str) -> str:
        """Where a file of a partition lies."""
        return self._folder.new_data_location(self.partitioning.folder(key) + name)

    def upload(self, file: tempfile.SpooledTemporaryFile[bytes], path: str) -> None:
        """Copy a whole file to its place, durably.

        Raises:
            StorageError: it cannot be written there.
        """
        with self._table.errors(f"cannot write {path!r}"):
            with self._io.new_output(path).create(overwrite=True) as target:
                file.seek(0)
                while body := file.read(_COPY_BYTES):
                    target.write(body)
            parts = urlsplit(path)
            if parts.scheme in ("", "file"):
                local = parts.path  # as the library takes it: escapes of partitions stay
                fsync_path(local)
                fsync_path(os.path.dirname(local))

    def statistics(self, footer: bytes) -> Any:
        """What a manifest says of a file with this footer."""
        metadata = pq.read_metadata(pa.BufferReader(MAGIC + footer))
        return self._statistics(
            parquet_metadata=metadata, stats_columns=self._plan, parquet_column_mapping=self._ids
        ).to_serialized_dict()


class DataFileDraft:
    """A file in the making.  It is no file of the table's folder before its checkpoint's barrier.

    One thread at a time uses it.

    Args:
        files: how it is made.
        key: of its partition.
    """

    def __init__(self, files: TableFiles, key: Key) -> None:
        self.key = key
        self.waiting = WaitingRows()
        self.bytes = self.rows = 0
        self._files, self._encoder = files, files.encoder()
        self._spool: tempfile.SpooledTemporaryFile[bytes] = tempfile.SpooledTemporaryFile(_SPOOLED_BYTES)  # noqa: SIM115
        self._append(self._encoder.begin())

    def add(self, rows: pa.RecordBatch) -> None:
        """Take rows, and encode those that make a block.

        Raises:
            DataError: a value that Parquet cannot hold.
        """
        self.waiting.add(rows)
        self._encode(self.waiting.block(self._files.blocks))

    def encode_all(self) -> None:
        """Encode the rows that wait.

        Raises:
            DataError: a value that Parquet cannot hold.
        """
        self._encode(self.waiting.all())

    def _encode(self, batches: list[pa.RecordBatch]) -> None:
        if batches:
            self.rows += sum(batch.num_rows for batch in batches)
            for body in self._encoder.rows(batches):
                self._append(body)

    def _append(self, body: Bytes) -> None:
        self._spool.write(body)
        self.bytes += memoryview(body).nbytes

    def finish(self, uid: str, checkpoint_id: int, incarnation: int, name: str) -> DataFileHandle:
        """Put the file in its place, durably.

        Raises:
            DataError: a value that Parquet cannot hold.
            StorageError: it cannot be written.
        """
        self.encode_all()
        footer = bytes(memoryview(self._encoder.end()))
        self._append(footer)
        path = self._files.location(self.key, name)
        self._files.upload(self._spool, path)
        self._spool.close()
        said = self._files.statistics(footer)
        names = ("value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds")
        columns = [
            ColumnStatistics(id, size, *(said[name].get(id) for name in names))
            for id, size in said["column_sizes"].items()
        ]
        spec = self._files.partitioning.spec.spec_id
        return DataFileHandle(
            uid, checkpoint_id, incarnation, self._files.uuid, path, self.rows, self.bytes, spec, list(self.key),
            columns, list(said["split_offsets"]),
        )  # fmt: skip

    def close(self) -> None:
        """Drop it."""
        self._spool.close()


def part_name(own: OwnFiles, subtask: int, checkpoint_id: int, incarnation: int, number: int) -> str:
    """Name of a file (T1)."""
    return own.stem + part_suffix(subtask, checkpoint_id, incarnation, number, ".parquet")


def data_file(handle: DataFileHandle, partitioning: Partitioning) -> Any:
    """A handle as the entry of a manifest."""
    manifest = iceberg_library("manifest")
    columns = handle.columns
    made = manifest.DataFile.from_args(
        content=manifest.DataFileContent.DATA,
        file_path=handle.path,
        file_format=manifest.FileFormat.PARQUET,
        partition=partitioning.record(tuple(handle.partition)),
        record_count=handle.rows,
        file_size_in_bytes=handle.size,
        column_sizes={column.id: column.size for column in columns},
        value_counts={column.id: column.values for column in columns if column.values is not None},
        null_value_counts={column.id: column.nulls for column in columns if column.nulls is not None},
        nan_value_counts={column.id: column.nans for column in columns if column.nans is not None},
        lower_bounds={column.id: column.lower for column in columns if column.lower is not None},
        upper_bounds={column.id: column.upper for column in columns if column.upper is not None},
        split_offsets=handle.splits,
        equality_ids=None,
        key_metadata=None,
        sort_order_id=None,
    )
    made.spec_id = handle.spec
    return made
