"""A table as a sink: rows appended, exactly once, one version for all subtasks of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import ClassVar

import pyarrow as pa

from cutwater.config import parse_duration_ms
from cutwater.connectors.base import Guarantee, Json, SinkContext
from cutwater.connectors.delta.columns import delta_schema
from cutwater.connectors.delta.committer import Commits, DeltaCommitter
from cutwater.connectors.delta.target import DeltaTarget
from cutwater.connectors.delta.writer import DeltaWriter
from cutwater.connectors.files.part_formats import ParquetParts
from cutwater.connectors.files.sink import FileSink
from cutwater.connectors.staging import UNGUARDED, Guard, staging_beside
from cutwater.errors import ConfigError


@dataclass(frozen=True)
class DeltaSink:
    """Appends rows to a table, each row exactly once.

    Rows wait in ``<path>/_cutwater`` until their file is full or old enough; with the checkpoint at which it is, it
    comes into the table.

    Args:
        target: the table.
        parts: format of the files.
        roll_rows, roll_bytes, roll_interval_ms: see ``FileSink``.

    Raises:
        ConfigError: a setting is out of range.
    """

    target: DeltaTarget
    parts: ParquetParts = field(default_factory=ParquetParts)
    roll_rows: int = FileSink.roll_rows
    roll_bytes: int = FileSink.roll_bytes
    roll_interval_ms: float | str | timedelta = FileSink.roll_interval_ms
    guard: Guard = field(default=UNGUARDED, repr=False, compare=False, kw_only=True)
    """Given by the runtime through ``guarded``."""

    guarantee: ClassVar[Guarantee] = "exactly-once"
    parallelism: ClassVar[int | None] = None
    commits_globally: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "roll_interval_ms", parse_duration_ms(self.roll_interval_ms, name="roll_interval_ms"))
        for name in ("roll_rows", "roll_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    def guarded(self, guard: Guard) -> DeltaSink:
        """The same sink, whose staged files are guarded."""
        return replace(self, guard=guard)

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink.check``.

        Raises:
            BuildError: the table cannot take such rows.
            StorageError: it cannot be read.
        """
        self.target.check(delta_schema(schema))

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> DeltaWriter:
        """See ``Sink.writer``.

        Raises:
            StorageError: the table cannot be read.
        """
        found = self.target.describe()
        partition_by = self.target.partition_by if found is None else found.partition_by
        required = [] if found is None else found.asked.required
        area = staging_beside(self.target.path, ctx.job_uid, ctx.step, self.guard)
        return DeltaWriter(area, self.parts, self, delta_schema(schema), ctx, restored, partition_by, required)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> DeltaCommitter:
        area = staging_beside(self.target.path, job_uid, step, self.guard)
        return DeltaCommitter(Commits(self.target, delta_schema(schema), job_uid, step), area)
