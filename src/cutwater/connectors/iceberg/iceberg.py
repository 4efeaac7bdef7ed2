"""``cw.iceberg``: one name for tables as sources and as sinks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Never

from cutwater.config import parse_duration_ms
from cutwater.connectors.iceberg.catalog import IcebergTable
from cutwater.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from cutwater.connectors.iceberg.sink import IcebergSink
    from cutwater.connectors.iceberg.source import IcebergSource, Start

_READING = frozenset({"start", "until", "on_overwrite", "rate", "discover_interval_ms"})
_WRITING = frozenset({"partition_by", "table_properties", "evolve", "expire_after", "parallelism"})
_NOT_WRITTEN = {
    "mode": "Rows are appended. cw.table(..., mode='upsert') keeps one row of each key.",
    "key": "Rows are appended. cw.table(..., mode='upsert') keeps one row of each key.",
    "guarantee": "It is always exactly-once.",
}


@dataclass(frozen=True)
class Iceberg:
    """A table; what it is used for decides what it becomes."""

    table: IcebergTable
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those that are not what they are by default."""

    def as_source(self) -> IcebergSource:
        """The table as a replayable source.

        Raises:
            ConfigError: an option that is for writing, or makes no sense.
        """
        from cutwater.connectors.iceberg.source import IcebergSource

        self._refuse(_WRITING, "source", "writing")
        return IcebergSource(self.table, **self.options)

    def as_sink(self) -> IcebergSink:
        """The table as a sink.

        Raises:
            ConfigError: an option that is for reading, or makes no sense.
        """
        from cutwater.connectors.iceberg.sink import IcebergSink

        self._refuse(_READING, "sink", "reading")
        options = dict(self.options)
        partition_by = options.pop("partition_by", ())
        expire_after = options.pop("expire_after", None)
        if expire_after is not None:
            expire_after = timedelta(milliseconds=parse_duration_ms(expire_after, name="expire_after"))
        fields = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        return IcebergSink(self.table, fields, expire_after=expire_after, **options)

    def _refuse(self, others: frozenset[str], use: str, other: str) -> None:
        for name in self.options:
            if name in others:
                raise ConfigError(f"iceberg as a {use} has no option {name!r}", hint=f"It is for {other}.")


def iceberg(
    table: str,
    *,
    catalog: str | Mapping[str, object] = "default",
    start: Start = "earliest",
    until: Literal["latest"] | None = None,
    on_overwrite: Literal["fail", "ignore"] = "fail",
    rate: float | None = None,
    discover_interval_ms: float | str | timedelta = 10_000.0,
    partition_by: str | Sequence[str] = (),
    table_properties: Mapping[str, str] | None = None,
    evolve: bool = False,
    expire_after: float | str | timedelta | None = None,
    parallelism: int | None = None,
    **unknown: Never,
) -> Iceberg:
    """An Iceberg table to read from or to append to.  Needs ``pip install 'cutwater[iceberg]'``.

    Args:
        table: its name with the namespace, ``"shop.orders"``.
        catalog: properties of the catalog, as pyiceberg names them, and its ``"name"`` if that matters; or the name of
            one that pyiceberg's configuration has wherever the job runs.  A secret is named, not given:
            ``{"token": "env:NAME"}``.
        start: reading, without a checkpoint: ``"earliest"`` (all rows of the table as it is, then those appended
            later), ``"latest"`` (only those appended later), the id of a snapshot (the first one whose rows are read),
            or a time with a zone (the first snapshot at or after it).
        until: reading: ``"latest"`` ends with the snapshot that is current at the start.
        on_overwrite: reading: a later snapshot that removes or replaces rows fails the job (``"fail"``) or is passed
            over (``"ignore"``).
        rate: reading: rows per second over all subtasks; None for as fast as possible.
        discover_interval_ms: reading: look for new snapshots so often; milliseconds or ``"10s"``.
        partition_by: writing, of a table that is made: columns, or ``"day(at)"``; year, month, day and hour.
        table_properties: writing, of a table that is made: as Iceberg names them.
        evolve: writing: add columns that the table does not have.
        expire_after: writing: forget snapshots that this step made longer ago than ``"1d"``, say.
        parallelism: writing: number of subtasks.
        unknown: nothing; the message names what was meant.

    Raises:
        ConfigError: an argument that there is not, or a secret in plain.

    >>> iceberg("shop.orders", catalog={"type": "rest", "uri": "http://localhost:8181"}).as_sink().guarantee
    'exactly-once'
    """
    return _iceberg(table, catalog, dict(locals()), unknown)


def _iceberg(
    table: str, catalog: str | Mapping[str, object], given: dict[str, Any], unknown: dict[str, Any]
) -> Iceberg:
    for name in unknown:
        hint = _NOT_WRITTEN.get(name) or did_you_mean(name, ("catalog", *_DEFAULTS))
        raise ConfigError(f"iceberg has no option {name!r}", hint=hint)
    options = {name: given[name] for name, default in _DEFAULTS.items() if given[name] != default}
    return Iceberg(IcebergTable.of(table, catalog), options)


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(iceberg).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name != "catalog"
}
