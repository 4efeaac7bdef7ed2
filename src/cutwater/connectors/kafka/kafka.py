"""``cw.kafka``: one name for topics as a source and as a sink."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Never

from cutwater.connectors.kafka.cluster import KafkaCluster
from cutwater.data.schema_text import as_schema
from cutwater.errors import BuildError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from datetime import timedelta

    import pyarrow as pa

    from cutwater.connectors.base import BadRows, Guarantee
    from cutwater.connectors.kafka.sink import KafkaSink
    from cutwater.connectors.kafka.source import KafkaSource, Start
    from cutwater.connectors.messages.base import FormatOfTopic, MessageFormat

_FORMATS = ("json", "csv", "text", "bytes")
_READING = frozenset(
    {"schema", "metadata", "key_type", "start", "until", "on_lost", "bad_rows", "rate", "discover_interval_ms"}
    | {"topic_pattern", "timestamp_formats"}
)
_WRITING = frozenset({"key", "mode", "guarantee", "parallelism"})


@dataclass(frozen=True)
class Kafka:
    """Topics of a cluster; what they are used for decides what they become."""

    cluster: KafkaCluster
    topics: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those that are not what they are by default."""

    def as_source(self) -> KafkaSource:
        """The topics as a replayable source.

        Raises:
            ConfigError, BuildError: an option that is for writing, or makes no sense.
        """
        from cutwater.connectors.kafka.source import KafkaSource

        self._refuse(_WRITING, "source", "writing")
        options = dict(self.options)
        pattern = options.pop("topic_pattern", None)
        if (pattern is None) == (not self.topics):
            raise ConfigError("kafka needs topics=... or topic_pattern=..., and not both")
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"kafka: topic_pattern {pattern!r} is no regular expression: {error}") from None
        metadata = options.pop("metadata", ())
        if not isinstance(metadata, Mapping):
            metadata = {name: name for name in metadata}
        format = _message_format(options, self.topics)
        topics = self.topics if pattern is None else (pattern,)
        return KafkaSource(self.cluster, topics, format, pattern=pattern is not None, metadata=metadata, **options)

    def as_sink(self) -> KafkaSink:
        """The topic as a sink.

        Raises:
            ConfigError, BuildError: several topics, an option that is for reading, or makes no sense.
        """
        from cutwater.connectors.kafka.sink import KafkaSink
        from cutwater.connectors.messages.encoders import encoder_of

        self._refuse(_READING, "sink", "reading")
        if len(self.topics) != 1:
            raise BuildError(f"a sink writes to one topic, got {len(self.topics)}")
        options = dict(self.options)
        key = options.pop("key", ())
        format = options.pop("format", "json")
        encoder = encoder_of(format) if isinstance(format, str) else format.encoder(self.topics[0])
        return KafkaSink(
            self.cluster, self.topics[0], encoder, (key,) if isinstance(key, str) else tuple(key), **options
        )

    def _refuse(self, others: frozenset[str], use: str, other: str) -> None:
        for name in self.options:
            if name in others:
                raise ConfigError(f"kafka as a {use} has no option {name!r}", hint=f"It is for {other}.")


def kafka(
    servers: str,
    topics: str | Sequence[str] = (),
    *,
    format: Literal["json", "csv", "text", "bytes"] | FormatOfTopic = "json",
    options: Mapping[str, object] | None = None,
    topic_pattern: str | None = None,
    schema: pa.Schema | str | None = None,
    metadata: Sequence[str] | Mapping[str, str] = (),
    key_type: Literal["string", "binary"] = "string",
    start: Start = "earliest",
    until: Literal["latest"] | None = None,
    on_lost: Literal["fail", "earliest"] = "fail",
    bad_rows: BadRows = "fail",
    rate: float | None = None,
    discover_interval_ms: float | str | timedelta = 10_000.0,
    timestamp_formats: Sequence[str] = (),
    key: str | Sequence[str] = (),
    mode: Literal["append", "upsert"] = "append",
    guarantee: Guarantee = "exactly-once",
    parallelism: int | None = None,
    **unknown: Never,
) -> Kafka:
    """Topics of Kafka to read from, or one to write to.  Needs ``pip install 'cutwater[kafka]'``.

    Args:
        servers: ``"host:port"`` of a broker, several with commas between.
        topics: names; for writing one, which must exist.
        format: of the messages' values; ``cw.avro(...)``, ``cw.protobuf(...)``, ``cw.debezium(...)``.
        options: of librdkafka, by its names.  A password is named, not given: ``{"sasl.password": "env:NAME"}``.
        topic_pattern: reading: all topics whose whole name this regular expression matches, later ones too.
        schema: reading JSON and CSV: Arrow schema or text, ``"k long, at timestamp"``; other fields are passed over.
        metadata: reading: further columns, of ``"key"``, ``"timestamp"``, ``"topic"``, ``"partition"``, ``"offset"``
            and ``"headers"``; a mapping gives them other names.
        key_type: reading: of the column for keys.  ``"string"`` must be UTF-8.
        start: reading, without a checkpoint: ``"earliest"``, ``"latest"``, a time with a zone (the first message at or
            after it), or offsets: ``{"clicks": {0: 17}}`` (other partitions from their begin).
        until: reading: ``"latest"`` ends where the partitions ended at the start.
        on_lost: reading: where the broker has removed messages that are still to be read, the job fails (``"fail"``) or
            goes on with what is left (``"earliest"``).
        bad_rows: reading: a message that is no row fails the job (``"fail"``) or goes to the dead letters
            (``"dead_letter"``), with topic, partition and offset.
        rate: reading: rows per second over all subtasks; None for as fast as possible.
        discover_interval_ms: reading: look for new partitions so often; milliseconds or ``"10s"``.
        timestamp_formats: reading JSON and CSV: ``strptime`` formats, tried in order; without them ISO 8601.
        key: writing: columns of the key.  One is written as text (bytes as they are), several as a JSON object.
        mode: writing: ``"upsert"`` writes the table of an updating stream: a key that leaves has no value.
        guarantee: writing: ``"exactly-once"`` shows rows with their checkpoint to readers with
            ``isolation.level=read_committed``; ``"at-least-once"`` shows them at once.
        parallelism: writing: number of subtasks.
        unknown: nothing; the message names what was meant.

    Raises:
        ConfigError: an argument that there is not, or a password in plain.

    >>> kafka("localhost:9092", "clicks", schema="user long, page string").as_source().schema.names
    ['user', 'page']
    """
    return _kafka(servers, topics, dict(locals()), unknown)


def _kafka(servers: str, topics: str | Sequence[str], given: dict[str, Any], unknown: dict[str, Any]) -> Kafka:
    for name in unknown:
        raise ConfigError(f"kafka has no option {name!r}", hint=did_you_mean(name, _DEFAULTS))
    options = {name: given[name] for name, default in _DEFAULTS.items() if given[name] != default}
    cluster = KafkaCluster.of(servers, options.pop("options", None))
    return Kafka(cluster, (topics,) if isinstance(topics, str) else tuple(topics), options)


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(kafka).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


def _message_format(options: dict[str, Any], topics: Sequence[str]) -> MessageFormat:
    """The format of messages to be read; its options are taken out of the others."""
    from cutwater.connectors.messages.lines import CsvMessages, JsonMessages
    from cutwater.connectors.messages.raw import RawMessages

    name, schema = options.pop("format", "json"), options.pop("schema", None)
    formats = tuple(options.pop("timestamp_formats", ()))
    if not isinstance(name, str):
        if schema is not None or formats:
            kind = type(name).__name__
            raise ConfigError(f"kafka: messages of {kind} have the schema that cw.{kind.lower()} names, and no other")
        return name.messages(topics[0] if len(topics) == 1 else None)
    if name in RawMessages.NAMES:
        if schema is not None or formats:
            raise ConfigError(f"kafka: messages of format {name!r} have one column 'value' and no schema")
        return RawMessages(name)
    if name not in _FORMATS:
        raise BuildError(
            f"kafka: unknown format {name!r}", hint=did_you_mean(name, (*_FORMATS, "cw.avro(...)", "cw.protobuf(...)"))
        )
    if schema is None:
        raise BuildError(
            f"kafka: messages of format {name!r} need a schema",
            hint="Name the fields that are to be read: schema='user long, page string, at timestamp'.",
        )
    return (JsonMessages if name == "json" else CsvMessages)(as_schema(schema), formats)
