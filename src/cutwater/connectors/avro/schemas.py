"""Avro schemas: parsed and checked, and what they are in Arrow."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from cutwater.errors import BuildError

GivenSchema: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"

NO_DEFAULT: Any = ...
"""Of a field or an enum without default: JSON has no such value."""
PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
_LOGICAL = {
    "date": ("int",),
    "time-millis": ("int",),
    "time-micros": ("long",),
    "timestamp-millis": ("long",),
    "timestamp-micros": ("long",),
    "timestamp-nanos": ("long",),
    "local-timestamp-millis": ("long",),
    "local-timestamp-micros": ("long",),
    "local-timestamp-nanos": ("long",),
    "decimal": ("bytes", "fixed"),
    "uuid": ("string", "fixed"),
}
"""What a logical type may stand on; others are what they stand on, as Avro wants it."""
_MOST_DIGITS = 38
_DEEPEST, _MOST_TYPES = 100, 100_000
"""What anybody's schema needs less of; a registry may hold others."""
_PLAIN = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
    "fixed": pa.binary(),
}
_TIMES = {
    "date": pa.date32(),
    "time-millis": pa.time32("ms"),
    "time-micros": pa.time64("us"),
    "timestamp-millis": pa.timestamp("us", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "timestamp-nanos": pa.timestamp("ns", "UTC"),
    "local-timestamp-millis": pa.timestamp("us"),
    "local-timestamp-micros": pa.timestamp("us"),
    "local-timestamp-nanos": pa.timestamp("ns"),
}


@dataclass(frozen=True)
class AvroField:
    """Of a record."""

    name: str
    type: AvroType
    aliases: tuple[str, ...] = ()
    default: Any = field(default=NO_DEFAULT, compare=False)


@dataclass(frozen=True)
class AvroType:
    """A type with those in it; what a kind does not have is empty."""

    kind: str
    """A primitive, or ``record``, ``enum``, ``array``, ``map``, ``union``, ``fixed``."""
    name: str = ""
    """With its namespace."""
    aliases: tuple[str, ...] = ()
    logical: str = ""
    precision: int = 0
    scale: int = 0
    size: int = 0
    """Bytes of a fixed."""
    symbols: tuple[str, ...] = ()
    default: Any = field(default=NO_DEFAULT, compare=False)
    """Symbol of an enum for those that are unknown."""
    fields: tuple[AvroField, ...] = ()
    inner: tuple[AvroType, ...] = ()
    """The items of an array, the values of a map, the branches of a union."""
    count: int = field(default=0, init=False, compare=False)
    """Of the types in it, with itself."""

    def __post_init__(self) -> None:
        types = (*self.inner, *(f.type for f in self.fields))
        object.__setattr__(self, "count", 1 + sum(type.count for type in types))

    @property
    def nullable(self) -> bool:
        """A union with null."""
        return self.kind == "union" and any(branch.kind == "null" for branch in self.inner)

    @property
    def value(self) -> AvroType:
        """What a union of null and one type holds when it is not null; another type itself."""
        return next(branch for branch in self.inner if branch.kind != "null") if self.kind == "union" else self

    def called(self, other: AvroType) -> bool:
        """True if a type of somebody else's schema has this name, or the one of an alias; namespaces may differ."""
        return _short(other.name) in {_short(name) for name in (self.name, *self.aliases)}

    @property
    def least_bytes(self) -> int:
        """The size of the shortest value."""
        if self.kind == "record":
            return sum(f.type.least_bytes for f in self.fields)
        if self.kind == "union":
            return 1 + min((branch.least_bytes for branch in self.inner), default=0)
        return {"null": 0, "fixed": self.size, "float": 4, "double": 8}.get(self.kind, 1)

    def __str__(self) -> str:
        if self.kind == "union":
            return f"[{', '.join(map(str, self.inner))}]"
        return self.logical or (f"{self.kind} {_short(self.name)}" if self.name else self.kind)


@dataclass(frozen=True)
class SchemaText:
    """A schema in JSON, and those with the types that it uses but does not define."""

    json: str
    references: tuple[str, ...] = ()


def schema_text(given: GivenSchema) -> SchemaText:
    """The text of a schema that is one, an object of Python's, or the path of a file.

    Raises:
        BuildError: the file cannot be read.

    >>> schema_text({"type": "string"}).json
    '{"type": "string"}'
    """
    if isinstance(given, Mapping):
        return SchemaText(json.dumps(given))
    if isinstance(given, str) and given.lstrip()[:1] in ("{", "[", '"'):
        return SchemaText(given)
    try:
        return SchemaText(Path(given).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(
            f"cannot read the Avro schema {os.fspath(given)!r}: {error}",
            hint="Give the schema as JSON text, as a dict, or as the path of an .avsc file.",
        ) from None


@lru_cache(maxsize=64)
def parsed(text: SchemaText) -> AvroType:
    """The type that a text defines.

    Raises:
        BuildError: it is no schema, or holds itself; names the field.

    >>> str(parsed(SchemaText('["null", {"type": "long", "logicalType": "timestamp-millis"}]')))
    '[null, timestamp-millis]'
    """
    parser = _Parser()
    for one in text.references:
        parser.type(_json(one), "", "")
    return parser.type(_json(text.json), "", "")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BuildError(f"an Avro schema is no JSON: {error}") from None


def record_of(text: SchemaText) -> AvroType:
    """The record that a text defines, whose fields are columns.

    Raises:
        BuildError: it is no schema, no record, or has no fields.
    """
    found = parsed(text)
    if found.kind != "record" or not found.fields:
        raise BuildError(
            f"the Avro schema is {'a record without fields' if found.kind == 'record' else f'of type {found}'}",
            hint="Messages that become rows are records: their fields are the columns.",
        )
    return found


def arrow_schema(record: AvroType) -> pa.Schema:
    """Columns for the fields of a record.

    Raises:
        BuildError: a type that no column can hold; names the field.

    >>> fields = [{"name": "n", "type": "int"}, {"name": "t", "type": ["null", "string"]}]
    >>> arrow_schema(record_of(schema_text({"type": "record", "name": "R", "fields": fields})))
    n: int32 not null
    t: string
    """
    return pa.schema([_arrow_field(f.name, f.type, f.name) for f in record.fields])


def _arrow_field(name: str, type: AvroType, path: str) -> pa.Field:
    return pa.field(name, arrow_type(type, path), type.nullable or type.kind == "null")


def arrow_type(type: AvroType, path: str) -> pa.DataType:
    """The type of a column.

    Raises:
        BuildError: there is none; names the field, which is ``path``.
    """
    if type.kind == "union":
        if len([branch for branch in type.inner if branch.kind != "null"]) != 1:
            raise BuildError(
                f"field {path!r} of the Avro schema is a union of several types, {type}",
                hint="A column has one type. Read with a schema of your own that leaves the field out: "
                "with a registry, cw.avro(schema, registry=...).",
            )
        return arrow_type(type.value, path)
    if type.kind == "record":
        if not type.fields:
            raise BuildError(f"field {path!r} of the Avro schema is a record without fields")
        return pa.struct([_arrow_field(f.name, f.type, f"{path}.{f.name}") for f in type.fields])
    if type.kind == "array":
        return pa.list_(_arrow_field("element", type.inner[0], path))
    if type.kind == "map":
        return pa.map_(pa.string(), _arrow_field("value", type.inner[0], path))
    if type.logical == "decimal":
        if type.precision > _MOST_DIGITS:
            raise BuildError(
                f"field {path!r} of the Avro schema is a decimal of {type.precision} digits, more than {_MOST_DIGITS}"
            )
        return pa.decimal128(type.precision, type.scale)
    if type.logical == "uuid":
        return pa.string()
    return _TIMES.get(type.logical, _PLAIN[type.kind])


class _Parser:
    """One schema; names that it defines may be used further on."""

    def __init__(self) -> None:
        self._known: dict[str, AvroType | None] = {}
        """``None`` while it is being defined."""
        self._depth = 0

    def type(self, schema: Any, space: str, path: str) -> AvroType:
        """A type; one that is used again counts again, for its columns are others."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _wrong(path, f"it is nested more than {_DEEPEST} deep")
        found = self._type(schema, space, path)
        self._depth -= 1
        if found.count > _MOST_TYPES:
            raise _wrong(path, f"it holds more than {_MOST_TYPES} types")
        return found

    def _type(self, schema: Any, space: str, path: str) -> AvroType:
        if isinstance(schema, str):
            return AvroType(schema) if schema in PRIMITIVES else self._named(schema, space, path)
        if isinstance(schema, list):
            return AvroType("union", inner=self._branches(schema, space, path))
        if not isinstance(schema, dict):
            raise _wrong(path, f"{schema!r} is no type")
        kind = schema.get("type")
        if not isinstance(kind, str):
            return self.type(kind, space, path)
        made = self._complex(kind, schema, space, path)
        return _with_logical(made, schema)

    def _complex(self, kind: str, schema: Mapping[str, Any], space: str, path: str) -> AvroType:
        if kind in ("array", "map"):
            inner = "items" if kind == "array" else "values"
            if inner not in schema:
                raise _wrong(path, f"the {kind} does not say what its {inner} are")
            return AvroType(kind, inner=(self.type(schema[inner], space, path),))
        if kind in ("record", "error", "enum", "fixed"):
            return self._definition(kind, schema, space, path)
        return self.type(kind, space, path)

    def _definition(self, kind: str, schema: Mapping[str, Any], space: str, path: str) -> AvroType:
        name = schema.get("name")
        if not isinstance(name, str) or not name:
            raise _wrong(path, f"the {kind} has no name")
        full = _full(name, schema.get("namespace", space))
        space = full.rpartition(".")[0]
        if full in self._known:
            raise _wrong(path, f"{full!r} is defined twice")
        aliases = tuple(_full(alias, space) for alias in schema.get("aliases", ()))
        if kind == "fixed":
            size = schema.get("size")
            if not isinstance(size, int) or not 0 <= size < 2**31:
                raise _wrong(path, f"{full!r} has no size")
            made = AvroType(kind, full, aliases, size=size)
        elif kind == "enum":
            symbols = tuple(_list_of(schema, "symbols", path))
            if not symbols or not all(isinstance(symbol, str) for symbol in symbols):
                raise _wrong(path, f"{full!r} has no symbols")
            made = AvroType(kind, full, aliases, symbols=symbols, default=schema.get("default", NO_DEFAULT))
        else:
            self._known[full] = None
            fields = tuple(self._field(f, space, path) for f in _list_of(schema, "fields", path))
            if len({f.name for f in fields}) != len(fields):
                raise _wrong(path, f"two fields of {full!r} have the same name")
            made = AvroType("record", full, aliases, fields=fields)
        self._known[full] = made
        return made

    def _field(self, schema: Any, space: str, path: str) -> AvroField:
        if not isinstance(schema, dict) or not isinstance(schema.get("name"), str) or "type" not in schema:
            raise _wrong(path, f"{schema!r} is no field: it has a name and a type")
        name = schema["name"]
        made = self.type(schema["type"], space, f"{path}.{name}" if path else name)
        if isinstance(schema["type"], str) and "logicalType" in schema:  # not Avro's place for it, but a common one
            made = _with_logical(made, schema)
        return AvroField(name, made, tuple(schema.get("aliases", ())), schema.get("default", NO_DEFAULT))

    def _branches(self, schema: Sequence[Any], space: str, path: str) -> tuple[AvroType, ...]:
        made = tuple(self.type(branch, space, path) for branch in schema)
        names = [branch.name or branch.kind for branch in made]
        if not made or "union" in names or len(set(names)) != len(names):
            raise _wrong(path, f"{schema!r} is no union: it holds other types, each once")
        return made

    def _named(self, name: str, space: str, path: str) -> AvroType:
        for full in (_full(name, space), name):
            if full in self._known:
                known = self._known[full]
                if known is None:
                    raise BuildError(
                        f"field {path!r} of the Avro schema makes {full!r} hold itself, which no column can",
                        hint="Read with a schema of your own that leaves the field out.",
                    )
                return known
        raise _wrong(path, f"there is no type {name!r}")


def _with_logical(made: AvroType, schema: Mapping[str, Any]) -> AvroType:
    logical = schema.get("logicalType")
    if not isinstance(logical, str) or made.kind not in _LOGICAL.get(logical, ()):
        return made
    if logical == "uuid" and made.kind == "fixed" and made.size != 16:
        return made
    if logical == "decimal":
        precision, scale = schema.get("precision"), schema.get("scale", 0)
        if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision or precision < 1:
            return made
        return replace(made, logical=logical, precision=precision, scale=scale)
    return replace(made, logical=logical)


def _list_of(schema: Mapping[str, Any], name: str, path: str) -> list[Any]:
    found = schema.get(name)
    if not isinstance(found, list):
        raise _wrong(path, f"{schema.get('name')!r} has no {name}")
    return found


def _full(name: str, space: str | None) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _wrong(path: str, what: str) -> BuildError:
    where = f"field {path!r} of the Avro schema" if path else "the Avro schema"
    return BuildError(f"{where} is wrong: {what}", hint="See the specification of Avro schemas.")
