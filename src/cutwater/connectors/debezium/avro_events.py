"""Change events in Avro, whose schemas a registry has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.connectors.avro.decoder import AvroDecoder
from cutwater.connectors.avro.registry import writers_schemas
from cutwater.connectors.avro.schemas import SchemaText, arrow_schema, record_of
from cutwater.connectors.debezium.encodings import DECIMAL, Encoding, Misfit, conversion, declared_type
from cutwater.connectors.debezium.events import NOWHERE, Events, Images, Numbers, Table
from cutwater.connectors.messages.base import Values
from cutwater.connectors.messages.registry import Registry
from cutwater.errors import BuildError

_MOST_DIGITS = 38
_PARTS = ("before", "after", "op", "source")


@dataclass(frozen=True)
class Envelope:
    """The schema of events: what we read of it, and how the columns of the table are encoded."""

    text: SchemaText
    encodings: Mapping[str, Encoding]
    types: pa.Schema
    """Of the columns, as Avro has them."""
    precisions: Mapping[str, int]


def envelope_of(text: SchemaText) -> Envelope:
    """The envelope that a schema describes.

    Raises:
        BuildError: it is none.
    """
    schema = json.loads(text.json)
    fields = {one["name"]: one for one in schema.get("fields", ())} if isinstance(schema, dict) else {}
    if not {"before", "after", "op"} <= fields.keys():
        raise BuildError(
            "the schema is of no change event of Debezium: such a record has before, after and op",
            hint="Messages that a transformation has unwrapped are ordinary records: read them with cw.avro(...).",
        )
    row = _row_of(fields)
    columns: list[Any] = row["fields"]
    encodings = {one["name"]: _encoding(_held(one["type"])) for one in columns}
    precisions = {one["name"]: _precision(_held(one["type"])) for one in columns}
    for one in columns:
        held = _held(one["type"])
        if isinstance(held, dict) and held.get("connect.name") == DECIMAL:
            held.pop("logicalType", None)  # bytes, whatever the digits that it says it may have
    kept = {**schema, "fields": [fields[name] for name in _PARTS if name in fields]}
    made = SchemaText(json.dumps(kept), text.references)
    types = arrow_schema(record_of(made)).field("after").type
    return Envelope(made, encodings, pa.schema(list(types)), precisions)


def _row_of(fields: Mapping[str, Any]) -> Any:
    for name in ("before", "after"):
        held = _held(fields[name]["type"])
        if isinstance(held, dict) and held.get("type") == "record":
            return held
    raise BuildError("the schema is of no change event of Debezium: before and after are no records")


def _held(type: Any) -> Any:
    """What a union with null holds."""
    if isinstance(type, list):
        return next((one for one in type if one != "null"), None)
    return type


def _encoding(held: Any) -> Encoding:
    if not isinstance(held, dict):
        return Encoding("bytes" if held == "bytes" else "avro")
    name = str(held.get("connect.name") or "")
    scale = held.get("scale", (held.get("connect.parameters") or {}).get("scale"))
    return Encoding("avro", name, int(scale) if name == DECIMAL and scale is not None else None)


def _precision(held: Any) -> int:
    if not isinstance(held, dict):
        return _MOST_DIGITS
    given = (held.get("connect.parameters") or {}).get("connect.decimal.precision", held.get("precision"))
    return int(given) if given is not None else _MOST_DIGITS


def declared_columns(envelope: Envelope) -> pa.Schema:
    """The columns of the table where nobody declares them.

    Raises:
        BuildError: one of which the type does not follow.
    """
    made: list[pa.Field] = []
    for one in envelope.types:
        kind = declared_type(envelope.encodings[one.name], one.type, envelope.precisions[one.name])
        if kind is None:
            raise BuildError(
                f"column {one.name!r} holds decimals that each have a scale of their own",
                hint="Declare its type: cw.debezium('..., price decimal(20, 4)', registry=...).",
            )
        made.append(pa.field(one.name, kind))
    return pa.schema(made)


class AvroEvents:
    """Reads events in Avro.

    Args:
        table: what is read of them.
        envelope: the reader's schema.
        registry: that knows the writers'.

    Raises:
        BuildError: a column cannot be what it is declared to be.
    """

    gap = 0

    def __init__(self, table: Table, envelope: Envelope, registry: Registry) -> None:
        self._table = table
        wanted = frozenset({"before", "after", "op"} | ({"source"} if len(table.source) else set()))
        schema_of = writers_schemas(registry)
        self._decoder = AvroDecoder(envelope.text, wanted, dictionaries=False, schema_of=schema_of)
        self._envelope = envelope
        for one in table.columns:
            self._conversion(one)

    def _conversion(self, one: pa.Field) -> Any:
        if one.name not in self._envelope.types.names:
            return None
        try:
            plain = self._envelope.types.field(one.name).type
            return conversion(one.type, self._envelope.encodings[one.name], plain)
        except Misfit as error:
            raise BuildError(f"column {one.name!r}: {error}", hint="Declare another type.") from None

    def read(self, values: Values) -> Events:
        """See ``EventReader``.

        Raises:
            StorageError: the registry does not answer.
        """
        decoded = self._decoder.decode(values, first_only=False)
        bad = {number: reason for number, reason in decoded.bad if values.valid[number]}  # nulls are tombstones
        numbers = np.arange(len(values)) if decoded.good is None else decoded.good
        rows = decoded.rows
        before = self._images(rows.column("before"), self._table.before, numbers, bad)
        after = self._images(rows.column("after"), self._table.columns, numbers, bad)
        source = self._source(rows.column("source")) if len(self._table.source) else Images([], numbers * 0 - 1)
        return Events(numbers, _letters(rows.column("op")), before, after, source, bad)

    def _images(self, column: Any, schema: pa.Schema, numbers: Numbers, bad: dict[int, str]) -> Images:
        valid = np.asarray(column.is_valid())
        found = column.filter(pa.array(valid)) if column.null_count else column
        places = numbers[valid]
        parts = dict(zip(found.type.names, found.flatten(), strict=True))
        columns: list[pa.Array] = []
        for one in schema:
            how = self._conversion(one)
            if how is None:
                columns.append(pa.nulls(len(found), one.type))
                continue
            made = how.convert(parts[one.name])
            columns.append(made.column)
            if made.bad is not None:
                for row in np.flatnonzero(made.bad).tolist():
                    bad.setdefault(int(places[row]), f'column "{one.name}": out of the range of its type')
        at = np.where(valid, np.cumsum(valid) - 1, NOWHERE)
        return Images(columns, at)

    def _source(self, column: Any) -> Images:
        parts = dict(zip(column.type.names, column.flatten(), strict=True))
        columns: list[pa.Array] = []
        for one in self._table.source:
            part = parts.get(one.name)
            if part is None:
                columns.append(pa.nulls(len(column), one.type))
            elif pa.types.is_timestamp(one.type):
                columns.append(part.cast(pa.timestamp("ms")).cast(pa.timestamp("us")).cast(one.type))
            else:
                columns.append(part.cast(one.type))
        return Images(columns, np.arange(len(column)))


def _letters(column: pa.Array) -> Any:
    """The operation of each event: a letter, or 0."""
    import pyarrow.compute as pc

    known = pa.array(["c", "r", "u", "d", "t", "m"])
    found = pc.call_function("index_in", [column], pc.SetLookupOptions(known))
    letters = np.array([ord(one) for one in "crudtm"] + [ord("?")], np.uint8)
    return letters[np.asarray(found.fill_null(len(known)))]
