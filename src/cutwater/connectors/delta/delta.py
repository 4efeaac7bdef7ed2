"""``cw.delta``: one name for Delta tables as a source and as a sink."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Never

from cutwater.connectors.delta.table import table_path
from cutwater.connectors.delta.target import DeltaTarget, as_names
from cutwater.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from datetime import timedelta

    from cutwater.connectors.delta.sink import DeltaSink
    from cutwater.connectors.delta.source import DeltaSource, Start
    from cutwater.connectors.delta.upserts import DeltaUpsertSink

_READING = ("start", "until", "changes", "ignore_deletes", "rate", "discover_interval_ms")
_OF_TARGET = ("partition_by", "evolve", "log_checkpoint_commits")
_OF_PARTS = ("compression", "compression_level", "row_group_rows")
_OF_FILES = ("roll_rows", "roll_bytes", "roll_interval_ms", *_OF_PARTS)


@dataclass(frozen=True)
class Delta:
    """A table; what it is used for decides what it becomes."""

    path: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those that are not what they are by default."""

    def as_source(self) -> DeltaSource:
        """The table as a replayable source.

        Raises:
            ConfigError, BuildError: an option that is for writing, or makes no sense.
        """
        from cutwater.connectors.delta.source import DeltaSource

        for name in self.options:
            if name not in _READING:
                raise ConfigError(f"delta as a source has no option {name!r}", hint="It is for writing.")
        return DeltaSource(self.path, **self.options)

    def as_sink(self) -> DeltaSink | DeltaUpsertSink:
        """The table as a sink.

        Raises:
            ConfigError: an option that is for reading, or makes no sense.
        """
        from cutwater.connectors.delta.sink import DeltaSink
        from cutwater.connectors.delta.upserts import DeltaUpsertSink
        from cutwater.connectors.files.part_formats import ParquetParts

        options = dict(self.options)
        for name in options:
            if name in _READING:
                raise ConfigError(f"delta as a sink has no option {name!r}", hint="It is for reading.")
        mode, key = options.pop("mode", "append"), as_names(options.pop("key", ()))
        if mode not in ("append", "upsert"):
            raise ConfigError(f"delta: mode {mode!r} is unknown", hint="Choose 'append' or 'upsert'.")
        if mode == "append" and key:
            raise ConfigError("delta: a key is for upserts", hint="Write mode='upsert', or leave key away.")
        of_target = {name: options.pop(name) for name in _OF_TARGET if name in options}
        of_target["partition_by"] = as_names(of_target.get("partition_by", ()))
        target = DeltaTarget(self.path, upsert=mode == "upsert", **of_target)
        if mode == "upsert":
            for name in options:
                raise ConfigError(f"delta: an upsert has no option {name!r}", hint="Rows are merged as they come.")
            return DeltaUpsertSink(target, key)
        parts = ParquetParts(**{name: options.pop(name) for name in _OF_PARTS if name in options})
        return DeltaSink(target, parts, **options)


def delta(
    path: str | os.PathLike[str],
    *,
    start: Start = "earliest",
    until: Literal["latest"] | int | None = None,
    changes: bool = False,
    ignore_deletes: bool = False,
    rate: float | None = None,
    discover_interval_ms: float | str | timedelta = 1000.0,
    mode: Literal["append", "upsert"] = "append",
    key: str | Sequence[str] = (),
    partition_by: str | Sequence[str] = (),
    evolve: bool = False,
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = "zstd",
    compression_level: int | None = None,
    row_group_rows: int = 1 << 20,
    roll_rows: int = 10_000_000,
    roll_bytes: int = 128 << 20,
    roll_interval_ms: float | str | timedelta = 10_000.0,
    log_checkpoint_commits: int = 100,
    **unknown: Never,
) -> Delta:
    """A Delta table to read from or to write to.  Needs ``pip install 'cutwater[delta]'``.

    Args:
        path: of the table: local, or mounted where the workers run.
        start: reading, without a checkpoint: ``"earliest"`` is all rows of the table as it is at the start, and what
            comes later; ``"latest"`` only what comes later; a version, or a time with a zone, all rows of the table as
            it was then, and what came later.
        until: reading: ``"latest"`` ends at the version that is the newest at the start, a number at that version: a
            bounded source.  None: never.
        changes: reading: an updating stream, with a column ``op``, of what is inserted, updated and deleted.
        ignore_deletes: reading: versions that only delete are passed over; else they fail the job.
        rate: reading: rows per second over all subtasks; None for as fast as possible.
        discover_interval_ms: reading: look for new versions so often; milliseconds or ``"10s"``.
        mode: writing: ``"upsert"`` replaces the row with the same key, and deletes those that leave an updating stream.
        key: writing: the columns that tell rows apart, for an upsert.
        partition_by: writing: columns by which a table that is made is partitioned.
        evolve: writing: columns that the table does not have are added to it.
        compression: writing: ``"zstd"``, ``"snappy"``, ``"gzip"``, ``"lz4"`` or ``"none"``.
        compression_level: writing: of zstd (1 to 22) and gzip (1 to 9); None for 1 and 6.
        row_group_rows: writing: rows of a row group.
        roll_rows: writing: a file ends at the first barrier after about this many rows.
        roll_bytes: writing: the same by size, in bytes of Arrow data.
        roll_interval_ms: writing: the same by age; milliseconds or ``"10s"``.  0: at every checkpoint.
        log_checkpoint_commits: writing: after so many versions the table's log is put together, and cleaned up.
        unknown: nothing; the message names what was meant.

    Raises:
        BuildError: the path is none of a file system.
        ConfigError: an argument that there is not.

    >>> delta("/data/clicks", partition_by="day").as_sink().target.partition_by
    ('day',)
    """
    return _delta(path, dict(locals()), unknown)


def _delta(path: str | os.PathLike[str], given: dict[str, Any], unknown: dict[str, Any]) -> Delta:
    for name in unknown:
        raise ConfigError(f"delta has no option {name!r}", hint=did_you_mean(name, _DEFAULTS))
    options = {name: given[name] for name, default in _DEFAULTS.items() if given[name] != default}
    return Delta(table_path(path), options)


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(delta).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
