"""``cw.debezium``: change events of tables as the format of messages, to be read as an updating stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Never

import pyarrow as pa

from cutwater.connectors.debezium.encodings import NAMES, full_name
from cutwater.connectors.debezium.events import EventDecoder, EventReader, Table
from cutwater.connectors.messages.registry import Registry
from cutwater.data.changes import OP, marked_schema
from cutwater.data.schema_text import as_schema
from cutwater.errors import BuildError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from cutwater.connectors.debezium.avro_events import Envelope
    from cutwater.connectors.messages.base import ValueDecoder

SOURCE: dict[str, pa.DataType] = {
    "lsn": pa.int64(),
    "ts_ms": pa.timestamp("us", "UTC"),
    "db": pa.string(),
    "schema": pa.string(),
    "table": pa.string(),
    "txId": pa.int64(),
    "file": pa.string(),
    "pos": pa.int64(),
    "gtid": pa.string(),
}
"""What may be asked for of where a change comes from."""


@dataclass(frozen=True)
class DebeziumMessages:
    """One change event in each value."""

    columns: pa.Schema
    """Of the table."""
    key: tuple[str, ...]
    metadata: tuple[tuple[str, str], ...] = ()
    """What is wanted of where the change comes from, and the names of the columns."""
    encodings: tuple[tuple[str, str], ...] = ()
    registry: Registry | None = None
    envelope: Envelope | None = None

    @property
    def name(self) -> str:
        return "debezium"

    @property
    def schema(self) -> pa.Schema:
        """Of the rows: ``op`` and the columns."""
        fields = [*self.columns, *(pa.field(name, SOURCE[what]) for what, name in self.metadata)]
        return marked_schema(pa.schema(fields))

    @property
    def changes(self) -> tuple[str, ...]:
        """See ``SourceHooks.changes``."""
        return self.key

    @property
    def partial_changes(self) -> bool:
        """See ``SourceHooks.partial_changes``: a deletion of a keyed table may hold its key only."""
        return bool(self.changes)

    def decoder(self, columns: frozenset[str] | None, *, dictionaries: bool) -> ValueDecoder:
        wanted = [one for one in self.columns if columns is None or one.name in columns or one.name in self.key]
        source = [(what, name) for what, name in self.metadata if columns is None or name in columns]
        table = Table(pa.schema(wanted), self.key, pa.schema([pa.field(what, SOURCE[what]) for what, _ in source]))
        return EventDecoder(self._reader(table), table, self.schema, [name for _, name in source])

    def _reader(self, table: Table) -> EventReader:
        if self.registry is None or self.envelope is None:
            from cutwater.connectors.debezium.json_events import JsonEvents

            return JsonEvents(table, dict(self.encodings))
        from cutwater.connectors.debezium.avro_events import AvroEvents

        return AvroEvents(table, self.envelope, self.registry)


@dataclass(frozen=True)
class Debezium:
    """Change events in JSON or, with a registry, Avro."""

    columns: pa.Schema | None
    key: tuple[str, ...]
    metadata: tuple[tuple[str, str], ...]
    encodings: tuple[tuple[str, str], ...]
    registry: Registry | None
    subject: str | None

    def messages(self, topic: str | None) -> DebeziumMessages:
        """The format to read with; with a registry by the newest schema of the subject now.

        Args:
            topic: if it is only one.

        Raises:
            BuildError: there is no schema, or it is of no change event.
            StorageError: the registry does not answer.
        """
        if self.registry is None:
            assert self.columns is not None
            return DebeziumMessages(self.columns, self.key, self.metadata, self.encodings)
        from cutwater.connectors.avro.registry import newest_schema
        from cutwater.connectors.debezium.avro_events import AvroEvents, declared_columns, envelope_of

        if self.subject is None and topic is None:
            raise BuildError(
                "which schema of the registry do events of several topics have?",
                hint="Name its subject: cw.debezium(registry=..., subject=...).",
            )
        subject = self.subject or f"{topic}-value"
        newest = newest_schema(self.registry, subject)
        if newest is None:
            raise BuildError(f"the schema registry at {self.registry.url} has no schema for subject {subject!r}")
        envelope = envelope_of(newest.text)
        columns = self.columns or declared_columns(envelope)
        _check_key(self.key, columns)
        made = DebeziumMessages(columns, self.key, self.metadata, (), self.registry, envelope)
        AvroEvents(Table(columns, self.key, pa.schema([])), envelope, self.registry)
        return made

    def encoder(self, topic: str) -> Never:
        """Refuse to write.

        Raises:
            BuildError: always.
        """
        raise BuildError(
            "change events of Debezium are read, not written",
            hint="Write the table of an updating stream: mode='upsert' with another format.",
        )


def debezium(
    schema: pa.Schema | str | None = None,
    *,
    key: str | Sequence[str] = (),
    metadata: Sequence[str] | Mapping[str, str] = (),
    encodings: Mapping[str, str] | None = None,
    registry: str | None = None,
    subject: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Debezium:
    """Change events of a table, as Debezium writes them, as the format of messages: what reads them gets an updating
    stream, ``flow.read("users", cw.kafka(servers, topic, format=cw.debezium("id long, name string", key="id")))``.

    Args:
        schema: columns of the table that are read, as Arrow schema or text; JSON needs it.  How values are encoded is
            said by the schema that comes with a message.
        key: columns that tell rows of the table apart.  The latest row of each key is then kept in the job's state, so
            that events need not hold rows as they were before (``REPLICA IDENTITY DEFAULT``) and may come twice.
            Without it each event must hold them (``FULL``), and come once.
        metadata: further columns, of ``"lsn"``, ``"ts_ms"``, ``"db"``, ``"schema"``, ``"table"``, ``"txId"``,
            ``"file"``, ``"pos"`` and ``"gtid"``; a mapping gives them other names.  They need ``key``.
        encodings: of columns of JSON without schema: ``{"at": "MicroTimestamp"}``, Debezium's name of what values are.
        registry: address of a schema registry: events are in Avro.
        subject: of the registry, ``"<topic>-value"`` unless it is given.
        options: of the registry, as of ``cw.avro``.

    Raises:
        ConfigError: an option that makes no sense.
        BuildError: a column that there is not, or comes twice.

    >>> debezium("id long, name string", key="id").messages("users").schema.names
    ['op', 'id', 'name']
    """
    if schema is None and registry is None:
        raise ConfigError(
            "debezium needs a schema or a registry",
            hint="Name the columns, cw.debezium('id long, name string'), or write cw.debezium(registry='http://...').",
        )
    if registry is None and (subject is not None or options):
        raise ConfigError("debezium: subject and options are of a registry", hint="Write registry='http://...' too.")
    if registry is not None and encodings:
        raise ConfigError("debezium: encodings are for JSON, Avro's schemas have them")
    keys = (key,) if isinstance(key, str) else tuple(key)
    columns = None if schema is None else as_schema(schema)
    if columns is not None:
        columns = pa.schema([pa.field(one.name, one.type) for one in columns])
        _check_key(keys, columns)
    named = _metadata(metadata, keys)
    made = Debezium(
        columns,
        keys,
        tuple(named.items()),
        _named(encodings or {}, columns),
        None if registry is None else Registry.of(registry, options),
        subject,
    )
    if columns is not None:
        _ = DebeziumMessages(columns, keys, made.metadata).schema
        _check_names([OP, *columns.names, *named.values()])
    return made


def _metadata(given: Sequence[str] | Mapping[str, str], key: Sequence[str]) -> dict[str, str]:
    """What is wanted, and the names of the columns."""
    named = dict(given) if isinstance(given, Mapping) else {name: name for name in given}
    for what in named:
        if what not in SOURCE:
            raise ConfigError(f"debezium: changes have no {what!r}", hint=did_you_mean(what, SOURCE))
    if named and not key:
        raise ConfigError(
            "debezium: metadata needs key=...",
            hint="A row that leaves comes as it was added, with the metadata of that: the job must keep it.",
        )
    return named


def _check_key(key: Sequence[str], columns: pa.Schema) -> None:
    for name in key:
        if name not in columns.names:
            raise BuildError(f"debezium: key column {name!r} is none of the table", hint=f"{columns.names}")


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise BuildError(
                f"debezium: two columns are named {name!r}", hint="Give metadata another name: metadata={'table': 't'}."
            )


def _named(encodings: Mapping[str, str], columns: pa.Schema | None) -> tuple[tuple[str, str], ...]:
    made: list[tuple[str, str]] = []
    for column, name in encodings.items():
        full = full_name(name)
        if full is None:
            raise ConfigError(f"debezium: there is no encoding {name!r}", hint=did_you_mean(name, NAMES))
        if columns is None or column not in columns.names:
            raise BuildError(f"debezium: encodings names column {column!r}, which is none of the schema")
        made.append((column, full))
    return tuple(made)


def warm_up() -> None:
    """Compile the kernels, by an event."""
    from cutwater.connectors.messages.base import Values

    columns = pa.schema([("id", pa.int64()), ("price", pa.decimal128(4, 2))])
    decoder = DebeziumMessages(columns, ("id",)).decoder(None, dictionaries=False)
    decoder.decode(Values.of([b'{"op":"c","after":{"id":1,"price":"AQ=="}}'], gap=1), first_only=False)
