"""A table as the target of a sink: what it must be for our rows, made and widened where that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cutwater.connectors.delta.columns import check_partition_columns
from cutwater.connectors.delta.table import Description, delta_errors, delta_library, described, opened
from cutwater.errors import BuildError, ConfigError


@dataclass(frozen=True)
class DeltaTarget:
    """Where rows go.

    Args:
        path: of the table, absolute.
        partition_by: of a table that is made; of one that is there, it must agree.
        evolve: columns that a table does not have are added to it.
        log_checkpoint_commits: the log is put together when it has grown by so many versions.
        upsert: rows replace others.

    Raises:
        ConfigError: a setting that makes no sense.
    """

    path: str
    partition_by: tuple[str, ...] = ()
    evolve: bool = False
    log_checkpoint_commits: int = 100
    upsert: bool = False

    def __post_init__(self) -> None:
        if self.log_checkpoint_commits < 1:
            raise ConfigError(f"log_checkpoint_commits must be at least 1, got {self.log_checkpoint_commits}")

    def check(self, schema: pa.Schema) -> None:
        """Refuse, before anything runs, a table that cannot take such rows; nothing is changed.

        Args:
            schema: of the rows, with Delta's types.

        Raises:
            BuildError: what does not fit, and what to do.
            StorageError: the table cannot be read.
        """
        found = self.describe()
        if found is None:
            check_partition_columns(schema, self.partition_by)
            return
        self.missing(found, schema)

    def describe(self) -> Description | None:
        """What the table says now; ``None``: there is none.

        Raises:
            StorageError: it cannot be read.
        """
        handle = opened(self.path)
        return None if handle is None else described(handle)

    def missing(self, found: Description, schema: pa.Schema) -> list[pa.Field]:
        """Columns that the table has yet to get; none without ``evolve``.

        Raises:
            BuildError: it does not take our rows (any more).
        """
        self._refuse(found, schema)
        return self._new_columns(found, schema)

    def add_columns(self, handle: Any, columns: Sequence[pa.Field]) -> None:
        """Add columns to the table.

        Raises:
            Conflict: somebody else changed it at the same time.
            StorageError: it cannot be changed.
        """
        with delta_errors("cannot add columns to the Delta table", self.path):
            handle.alter.add_columns(delta_library().Schema.from_arrow(pa.schema(columns)).fields)

    def _refuse(self, found: Description, schema: pa.Schema) -> None:
        found.asked.refuse_to_write(self.path, upsert=self.upsert)
        if self.partition_by and self.partition_by != found.partition_by:
            how = f"by {', '.join(found.partition_by)}" if found.partition_by else "not at all"
            raise BuildError(
                f"the Delta table {self.path!r} is partitioned {how}, not by {', '.join(self.partition_by)}",
                hint="Leave partition_by out, or write to another table.",
            )
        check_partition_columns(schema, found.partition_by)
        for name in found.asked.required:
            if name not in schema.names:
                raise BuildError(
                    f"the Delta table {self.path!r} has a column {name!r} that must not be null, and the stream has "
                    "none",
                    hint=f"Add it before the sink: with_columns('id', {name}=...).",
                )

    def _new_columns(self, found: Description, schema: pa.Schema) -> list[pa.Field]:
        """Columns that the table has yet to get.

        Raises:
            BuildError: some, and they are not to be added; or one has another type there.
        """
        by_name = {name.casefold(): name for name in found.schema.names}
        missing: list[pa.Field] = []
        for field in schema:
            name = by_name.get(field.name.casefold())
            if name is None:
                missing.append(field)
            elif name != field.name or not same_type(found.schema.field(name).type, field.type):
                raise BuildError(
                    f"column {field.name!r} is {field.type}, and {name!r} of the Delta table {self.path!r} is "
                    f"{found.schema.field(name).type}",
                    hint=_cast_hint(field.name, found.schema.field(name).type, field.type),
                )
        if missing and not self.evolve:
            names = ", ".join(repr(field.name) for field in missing)
            raise BuildError(
                f"the Delta table {self.path!r} has no column {names}; it has {', '.join(found.schema.names)}",
                hint="Write with evolve=True to add it, or drop it before the sink.",
            )
        return missing


def same_type(one: pa.DataType, other: pa.DataType) -> bool:
    """True if two Arrow types are one to Delta, whatever names and nulls their parts have."""
    return _shape(one) == _shape(other)


def _shape(kind: pa.DataType) -> object:
    types = pa.types
    if types.is_struct(kind):
        return [(kind.field(i).name, _shape(kind.field(i).type)) for i in range(kind.num_fields)]
    if types.is_map(kind):
        return ["map", _shape(kind.key_type), _shape(kind.item_type)]
    if types.is_list(kind) or types.is_large_list(kind):
        return ["list", _shape(kind.value_type)]
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    return kind


def _cast_hint(name: str, theirs: pa.DataType, ours: pa.DataType) -> str:
    if pa.types.is_timestamp(theirs) and pa.types.is_timestamp(ours):
        if theirs.tz is not None:
            return f"Say what zone it is in: with_columns('id', pl.col({name!r}).dt.replace_time_zone('UTC'))."
        return f"Drop its zone: with_columns('id', pl.col({name!r}).dt.replace_time_zone(None))."
    return "Cast or rename the column before the sink, or write to another table."


def as_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """One name or several.

    >>> as_names("day"), as_names(["a", "b"])
    (('day',), ('a', 'b'))
    """
    return (names,) if isinstance(names, str) else tuple(names)
