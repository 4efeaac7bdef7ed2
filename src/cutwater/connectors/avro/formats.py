"""``cw.avro``: Avro as the format of messages, to read and to write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from cutwater.connectors.avro.registry import newest_schema, writers_schemas
from cutwater.connectors.avro.schemas import GivenSchema, SchemaText, arrow_schema, record_of, schema_text
from cutwater.connectors.messages.registry import Registry
from cutwater.errors import BuildError, ConfigError

if TYPE_CHECKING:
    from cutwater.connectors.messages.base import ValueDecoder
    from cutwater.connectors.messages.encoders import ValueEncoder


@dataclass(frozen=True)
class AvroMessages:
    """One record a message.

    Raises:
        BuildError: a schema that is none, or whose records cannot be rows.
    """

    text: SchemaText
    """The reader's schema."""
    registry: Registry | None = None
    """It knows the schemas of the writers, whose ids are in front of the records."""

    def __post_init__(self) -> None:
        arrow_schema(record_of(self.text))

    @property
    def name(self) -> str:
        return "avro"

    @property
    def schema(self) -> pa.Schema:
        return arrow_schema(record_of(self.text))

    def decoder(self, columns: frozenset[str] | None, *, dictionaries: bool) -> ValueDecoder:
        from cutwater.connectors.avro.decoder import AvroDecoder

        schema_of = None if self.registry is None else writers_schemas(self.registry)
        return AvroDecoder(self.text, columns, dictionaries=dictionaries, schema_of=schema_of)


@dataclass(frozen=True)
class Avro:
    """Avro with a schema, a registry, or both."""

    text: SchemaText | None
    registry: Registry | None
    subject: str | None

    def messages(self, topic: str | None) -> AvroMessages:
        """The format to read with.  The reader's schema is the one given, or the newest of the subject now.

        Args:
            topic: if it is only one.

        Raises:
            BuildError: there is no schema, or its records cannot be rows.
            StorageError: the registry does not answer.
        """
        if self.text is not None:
            return AvroMessages(self.text, self.registry)
        assert self.registry is not None
        subject = self._subject(topic)
        newest = newest_schema(self.registry, subject)
        if newest is None:
            raise _no_subject(self.registry, subject)
        return AvroMessages(newest.text, self.registry)

    def encoder(self, topic: str) -> ValueEncoder:
        """What writes to a topic.

        Raises:
            BuildError: there is no schema, or its records cannot be rows.
            StorageError: the registry does not answer.
        """
        from cutwater.connectors.avro.encoder import AvroEncoder

        if self.registry is None:
            assert self.text is not None
            return AvroEncoder(self.text)
        subject = self._subject(topic)
        if self.text is not None:
            return AvroEncoder(self.text, self.registry, subject)
        newest = newest_schema(self.registry, subject)
        if newest is None:
            raise _no_subject(self.registry, subject)
        return AvroEncoder(newest.text, self.registry, subject, newest.id)

    def _subject(self, topic: str | None) -> str:
        if self.subject is not None:
            return self.subject
        if topic is None:
            raise BuildError(
                "which schema of the registry do rows of several topics have?",
                hint="Name its subject, cw.avro(registry=..., subject=...), or give a schema.",
            )
        return f"{topic}-value"


def avro(
    schema: GivenSchema | None = None,
    *,
    registry: str | None = None,
    subject: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Avro:
    """Avro as the format of messages: ``cw.kafka(servers, topic, format=cw.avro(...))``.

    Args:
        schema: of a record, whose fields are the columns: JSON text, a dict, or the path of an ``.avsc`` file.  Reading
            with a registry, the reader's schema.
        registry: address of a schema registry.  Messages begin with a zero byte and the id of the schema that they were
            written with (Confluent's wire format), and are resolved against the reader's schema as Avro says.
        subject: of the registry, ``"<topic>-value"`` unless it is given.  Without a schema, its newest one when the
            flow is built is the reader's, or that of what is written.
        options: of the registry: ``basic.auth.user.info`` names where ``user:password`` is, ``"env:NAME"`` or
            ``"file:/path"``; ``ssl.ca.location``.

    Raises:
        BuildError: the schema is wrong.
        ConfigError: neither schema nor registry, an option that there is not, or a password in plain.

    >>> fields = [{"name": "user", "type": "long"}, {"name": "page", "type": ["null", "string"]}]
    >>> avro({"type": "record", "name": "Click", "fields": fields}).messages("clicks").schema.names
    ['user', 'page']
    """
    if schema is None and registry is None:
        raise ConfigError(
            "avro needs a schema or a registry",
            hint="Write cw.avro('click.avsc') or cw.avro(registry='http://localhost:8081').",
        )
    if registry is None and (subject is not None or options):
        raise ConfigError("avro: subject and options are of a registry", hint="Write registry='http://...' as well.")
    text = None if schema is None else schema_text(schema)
    if text is not None:
        arrow_schema(record_of(text))
    return Avro(text, None if registry is None else Registry.of(registry, options), subject)


def warm_up() -> None:
    """Compile the kernels, by a row written and read."""
    from cutwater.connectors.avro.decoder import AvroDecoder
    from cutwater.connectors.avro.encoder import AvroEncoder
    from cutwater.connectors.messages.base import Values

    text = schema_text({"type": "record", "name": "R", "fields": [{"name": "n", "type": "long"}]})
    value = b"\0\0\0\0\1" + AvroEncoder(text).encode(pa.table({"n": [1]})).value(0)
    decoder = AvroDecoder(text, None, dictionaries=False, schema_of=lambda id: record_of(text))
    decoder.decode(Values.of([value]), first_only=False)


def _no_subject(registry: Registry, subject: str) -> BuildError:
    return BuildError(
        f"the schema registry at {registry.url} has no schema for subject {subject!r}",
        hint="Name another subject, cw.avro(registry=..., subject=...), or give a schema.",
    )
