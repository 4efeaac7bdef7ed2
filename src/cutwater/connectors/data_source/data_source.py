"""``cw.data_source``: one name for Python data sources as sources and as sinks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Never

from cutwater.config import parse_duration_ms
from cutwater.errors import BuildError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from datetime import timedelta

    import pyarrow as pa
    from pyspark.sql.datasource import DataSource as SparkDataSource
    from pyspark.sql.types import StructType

    from cutwater.connectors.data_source.batch_source import BatchDataSource
    from cutwater.connectors.data_source.hosted import Hosted
    from cutwater.connectors.data_source.simple_source import SimpleDataSource
    from cutwater.connectors.data_source.sink import DataSourceSink
    from cutwater.connectors.data_source.stream_source import StreamDataSource

_READING = frozenset({"schema", "stream", "replayable", "until", "rate", "discover_interval_ms", "splits"})
_WRITING = frozenset({"idempotent", "parallelism"})
_STREAMING = frozenset({"until", "splits"})


@dataclass(frozen=True)
class DataSource:
    """A Python data source; what it is used for decides what it becomes."""

    hosted: Hosted
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those that are not what they are by default."""

    def as_source(self) -> BatchDataSource | StreamDataSource | SimpleDataSource:
        """The source: its batch reader, or its stream reader.

        Raises:
            ConfigError: an option that is for writing, or makes no sense.
            BuildError: the data source has no such reader, or no schema.
        """
        self._refuse(_WRITING, "source", "writing")
        given = {**_DEFAULTS, **self.options}
        until, splits = given["until"], given["splits"]
        if until not in ("latest", None):
            raise ConfigError(f"data_source: until is 'latest' or None, got {until!r}")
        if isinstance(splits, bool) or not isinstance(splits, int) or splits < 1:
            raise ConfigError(f"data_source: splits must be at least 1, got {splits!r}")
        streams = self._streams(given["stream"])
        if not streams and (wrong := self.options.keys() & _STREAMING):
            raise ConfigError(f"data_source: {min(wrong)} is for streams, and {self.hosted.name} is read as a batch")
        replayable = given["replayable"]
        common: dict[str, Any] = {
            "repeats": bool(replayable) or (replayable is None and not streams),
            "rate": given["rate"],
            "discover_interval_ms": parse_duration_ms(given["discover_interval_ms"], name="discover_interval_ms"),
        }
        return self._made(streams, given["schema"], common, until, splits)

    def _made(self, streams: bool, schema: object, common: dict[str, Any], until: Any, splits: int) -> Any:
        from cutwater.connectors.data_source import spark_api
        from cutwater.connectors.data_source.batch_source import BatchDataSource
        from cutwater.connectors.data_source.simple_source import SimpleDataSource
        from cutwater.connectors.data_source.stream_source import StreamDataSource

        if not streams:
            return BatchDataSource(self.hosted, schema, **common)
        if spark_api.overridden(self.hosted.cls, "streamReader"):
            return StreamDataSource(self.hosted, schema, until=until, splits=splits, **common)
        return SimpleDataSource(self.hosted, schema, until=until, **common)

    def _streams(self, asked: bool | None) -> bool:
        from cutwater.connectors.data_source import spark_api

        cls, name = self.hosted.cls, self.hosted.name
        streams = spark_api.overridden(cls, "streamReader", "simpleStreamReader")
        batches = spark_api.overridden(cls, "reader")
        if asked is None and streams and batches:
            raise BuildError(
                f"{name} can be read as a batch and as a stream",
                hint="Say which: cw.data_source(..., stream=True), or False.",
            )
        if not (streams if asked else batches) and (asked is not None or not streams):
            missing = {True: "streamReader() or simpleStreamReader()", False: "reader()"}.get(asked is True)
            raise BuildError(f"{name} has no {missing}")
        return streams if asked is None else asked

    def as_sink(self) -> DataSourceSink:
        """The sink: its stream writer.

        Raises:
            ConfigError: an option that is for reading, or makes no sense.
        """
        from cutwater.connectors.data_source.sink import DataSourceSink

        self._refuse(_READING, "sink", "reading")
        return DataSourceSink(self.hosted, **self.options)

    def _refuse(self, others: frozenset[str], use: str, other: str) -> None:
        for name in self.options:
            if name in others:
                raise ConfigError(f"data_source as a {use} has no option {name!r}", hint=f"It is for {other}.")


def data_source(
    source: type[SparkDataSource] | SparkDataSource,
    *,
    options: Mapping[str, object] | None = None,
    secrets: Mapping[str, str] | None = None,
    schema: StructType | pa.Schema | str | None = None,
    stream: bool | None = None,
    replayable: bool | None = None,
    until: Literal["latest"] | None = None,
    splits: int = 16,
    rate: float | None = None,
    discover_interval_ms: float | str | timedelta = 100.0,
    idempotent: bool = True,
    parallelism: int | None = None,
    **unknown: Never,
) -> DataSource:
    """A data source of PySpark's Python Data Source API, to read from or to write to, without Spark's micro-batches.

    Args:
        source: the class that Spark knows by ``spark.dataSource.register``, or an instance of it.
        options: what ``.option(name, value)`` would be.
        secrets: further options: where each lies, ``"env:NAME"`` or ``"file:/path"``, looked up where it is needed.
        schema: reading: of the rows, for a source that has no ``schema()`` or can give several.
        stream: reading: by ``streamReader`` or ``simpleStreamReader``, and not by ``reader``; needed where it has both.
        replayable: reading: ``True`` promises that the same partition, or range of offsets, gives the same rows once
            more: rows are used as they are read, and compared after a failure.  ``False``: they are made durable
            first.  By default batches are compared, and streams made durable.
        until: reading a stream: ``"latest"`` ends at the newest offset of the first start.
        splits: reading a stream: at most so many partitions are read at once.
        rate: reading: rows per second over all subtasks; None for as fast as possible.
        discover_interval_ms: reading a stream: ask for the newest offset so often; milliseconds or ``"1s"``.
        idempotent: writing: ``commit`` bears being called again with the same batch id, which makes the output
            exactly-once; else it is at-least-once.
        parallelism: writing: number of subtasks.
        unknown: nothing; the message names what was meant.

    Raises:
        ConfigError: an argument that there is not; no data source; a secret in plain.
        BuildError: PySpark is missing.
    """
    return _data_source(source, dict(locals()), unknown)


def _data_source(source: Any, given: dict[str, Any], unknown: dict[str, Any]) -> DataSource:
    from cutwater.connectors.data_source.hosted import Hosted

    for name in unknown:
        raise ConfigError(f"data_source has no option {name!r}", hint=did_you_mean(name, _DEFAULTS))
    told = {name: given[name] for name, default in _DEFAULTS.items() if given[name] != default}
    texts = {name: _text(value) for name, value in (told.pop("options", None) or {}).items()}
    return DataSource(Hosted(source, texts, dict(told.pop("secrets", None) or {})), told)


def _text(value: object) -> str:
    """An option as Spark passes it on: booleans in small letters."""
    return str(value).lower() if isinstance(value, bool) else str(value)


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(data_source).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
