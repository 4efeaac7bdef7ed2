"""An Iceberg table as a sink: rows appear exactly once, by one snapshot for all subtasks and checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import pyarrow as pa

from cutwater.connectors.base import Guarantee, Json, SinkContext
from cutwater.connectors.files.schemas import widens
from cutwater.connectors.iceberg.catalog import IcebergTable, iceberg_library
from cutwater.connectors.iceberg.columns import check_fits, stream_schema, table_schema
from cutwater.connectors.iceberg.committer import IcebergCommitter
from cutwater.connectors.iceberg.data_files import TableFiles
from cutwater.connectors.iceberg.partitions import Partitioning
from cutwater.connectors.iceberg.writer import IcebergWriter
from cutwater.errors import BuildError, ConfigError, StorageError, did_you_mean

_FIELD = re.compile(r"(?:(year|month|day|hour)\()?([^()]+?)(\))?")
_WRITTEN_VERSIONS = (1, 2)
_TRIES = 8


@dataclass(frozen=True)
class IcebergSink:
    """Appends rows to a table.

    Args:
        table: which; made with the stream's columns if it is missing.
        partition_by: of a table that is made: columns, or ``"day(at)"`` for times.
        table_properties: of a table that is made, as Iceberg names them.
        evolve: columns that the table does not have are added to it, and narrower types widened.
        expire_after: this step's snapshots that are older are forgotten now and then; ``None``: never.
        parallelism: number of subtasks; ``None``: the job's.

    Raises:
        ConfigError: a setting that makes no sense.
    """

    table: IcebergTable
    partition_by: tuple[str, ...] = ()
    table_properties: Mapping[str, str] = field(default_factory=dict[str, str])
    evolve: bool = False
    expire_after: timedelta | None = None
    parallelism: int | None = None

    guarantee: ClassVar[Guarantee] = "exactly-once"
    commits_globally: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for text in self.partition_by:
            transform_of(text)
        if self.parallelism is not None and self.parallelism < 1:
            raise ConfigError(f"parallelism must be at least 1, got {self.parallelism}")
        if self.expire_after is not None and self.expire_after <= timedelta(0):
            raise ConfigError("iceberg: expire_after must be longer than nothing", hint="Write for example '1d'.")

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink.check``.  Looks at the table, and changes nothing there.

        Raises:
            BuildError: such rows cannot be written, or not into this table.
            StorageError: the catalog does not answer.
        """
        wanted = stream_schema(schema)
        for text in self.partition_by:
            column = transform_of(text)[1]
            if column not in wanted.names:
                raise BuildError(f"no such column {column!r} to partition by", hint=did_you_mean(column, wanted.names))
        table = self.table.found()
        if table is not None:
            self._check_table(table)
            if self.evolve:
                self._additions(table, wanted)
            else:
                check_fits(wanted, table_schema(table.metadata.schema()), self.table.name)

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> IcebergWriter:
        """See ``Sink.writer``; nothing is restored, since every checkpoint ends all files."""
        return IcebergWriter(TableFiles(self.table, self.prepared(schema)), self.table.name, ctx)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> IcebergCommitter:
        return IcebergCommitter(self.table, lambda: self.prepared(schema), job_uid, step, self.expire_after)

    def prepared(self, schema: pa.Schema) -> Any:
        """The table, made if it is missing, with all columns of the stream.

        Raises:
            BuildError: the rows do not fit.
            StorageError: the catalog does not answer.
        """
        wanted = stream_schema(schema)
        exceptions = iceberg_library("exceptions")
        for _ in range(_TRIES):
            table = self.table.found()
            try:
                if table is None:
                    self._make(wanted)
                    continue
                self._check_table(table)
                additions = self._additions(table, wanted) if self.evolve else None
                if not additions:
                    check_fits(wanted, table_schema(table.metadata.schema()), self.table.name)
                    return table
                with self.table.errors("cannot change its columns"), table.update_schema() as update:
                    update.union_by_name(pa.schema(additions))
            except (exceptions.CommitFailedException, exceptions.TableAlreadyExistsError):
                continue  # somebody was quicker
        raise StorageError(f"iceberg table {self.table.name!r} can neither be made nor changed: others are quicker")

    def _make(self, wanted: pa.Schema) -> None:
        """Make the table; another may be quicker."""
        catalog, name = self.table.opened_catalog, self.table.name
        exists = iceberg_library("exceptions").TableAlreadyExistsError
        transforms = iceberg_library("transforms")
        with self.table.errors("cannot make it"):
            try:
                catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
                new = catalog.create_table_transaction(name, wanted, properties=dict(self.table_properties))
                if self.partition_by:
                    with new.update_spec() as spec:
                        for text in self.partition_by:
                            transform, column = transform_of(text)
                            ending = "" if transform == "identity" else f"_{transform}"
                            spec.add_field(column, transforms.parse_transform(transform), column + ending)
                new.commit_transaction()
            except exists:
                return

    def _check_table(self, table: Any) -> None:
        """Refuse what is not written.

        Raises:
            BuildError: names it.
        """
        version = table.metadata.format_version
        if version not in _WRITTEN_VERSIONS:
            raise BuildError(
                f"iceberg table {self.table.name!r} has format version {version}, whose row ids are not written",
                hint="Write to a table of format version 2.",
            )
        Partitioning(table.metadata, self.table.name)

    def _additions(self, table: Any, wanted: pa.Schema) -> list[pa.Field]:
        """The stream's columns that the table has not, or has with a narrower type.

        Raises:
            BuildError: one has another type in the table.
        """
        present = table_schema(table.metadata.schema())
        additions: list[pa.Field] = []
        for column in wanted:
            index = present.get_field_index(column.name)
            if index >= 0 and widens(column.type, present.field(index).type, given=False):
                continue
            if index >= 0 and not widens(present.field(index).type, column.type, given=False):
                check_fits(pa.schema([column]), pa.schema([present.field(index)]), self.table.name)
            additions.append(column)
        return additions


def transform_of(text: str) -> tuple[str, str]:
    """Transform and column of a partition field.

    Raises:
        ConfigError: it is none.

    >>> transform_of("day(at)"), transform_of("page")
    (('day', 'at'), ('identity', 'page'))
    """
    match = _FIELD.fullmatch(text)
    if match is None or (match[1] is None) != (match[3] is None):
        raise ConfigError(
            f"iceberg: cannot partition by {text!r}",
            hint="Name a column, or year, month, day or hour of one: partition_by=['day(at)', 'page'].",
        )
    return match[1] or "identity", match[2]
