"""The collecting sink: a bounded job's result, as a Spark DataFrame or an Arrow table."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq

from cutwater.connectors.base import Json, SinkContext, SinkWriter, SubtaskCommitter
from cutwater.connectors.files.parquet_types import cast_batch, parquet_schema
from cutwater.connectors.files.part_commit import is_visible
from cutwater.connectors.files.sink import FileSink
from cutwater.connectors.staging.area import UNGUARDED, Guard
from cutwater.errors import InvariantError, StorageError
from cutwater.storage.store.opening import store_at
from cutwater.storage.store.seal import PLAIN


@dataclass(frozen=True)
class CollectSink:
    """Keeps the rows, exactly once, in a folder of the job, for the driver to read when the job has ended.

    The runtime gives it that folder by ``bind``; ``spark.read.parquet(directory)`` or ``read_result`` reads it.

    Args:
        directory: that folder.
        roll_interval_ms: see ``FileSink``.
        guard: of staged files; given through ``guarded``.
    """

    directory: str | None = None
    roll_interval_ms: float | str | timedelta = FileSink.roll_interval_ms
    guard: Guard = field(default=UNGUARDED, repr=False, compare=False, kw_only=True)

    @property
    def guarantee(self) -> Literal["exactly-once", "at-least-once"]:
        return "exactly-once"

    @property
    def parallelism(self) -> int | None:
        return None

    def bind(self, directory: str) -> Self:
        """The same sink, writing to ``directory``.

        Raises:
            ConfigError: it is none of the file system, where whoever reads the rows would find them.
        """
        return replace(self, directory=store_at(directory, PLAIN).local_folder())

    def guarded(self, guard: Guard) -> Self:
        """The same sink, whose staged files are guarded."""
        return replace(self, guard=guard)

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink.check``."""
        parquet_schema(schema)

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> SinkWriter:
        return self._parquet().writer(schema, ctx, restored)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> SubtaskCommitter:
        return self._parquet().committer(schema, job_uid, step)

    def _parquet(self) -> FileSink:
        if self.directory is None:
            raise InvariantError("a collecting sink was started before it was bound to a directory")
        return FileSink(self.directory, roll_interval_ms=self.roll_interval_ms, guard=self.guard)


def read_result(directory: str, schema: pa.Schema) -> pa.Table:
    """All committed rows of a collected step, in each subtask's order, with the types of ``schema``.

    Raises:
        StorageError: the directory or one of its files cannot be read.
    """
    try:
        names = sorted(name for name in os.listdir(directory) if is_visible(name, ".parquet"))
        tables = [pq.ParquetFile(os.path.join(directory, name)).read() for name in names]
    except (OSError, pa.ArrowInvalid) as error:
        raise StorageError(
            f"cannot read the result in {directory!r}: {error}", hint="Is the job finished, and was it this directory?"
        ) from error
    batches = [cast_batch(batch, schema) for table in tables for batch in table.to_batches()]
    return pa.Table.from_batches(batches, schema)
