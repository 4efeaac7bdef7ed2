"""Random Avro schemas and rows of them, and what fastavro makes of both."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
import uuid
from collections.abc import Sequence
from typing import Any

import fastavro
import pyarrow as pa
from fastavro.schema import parse_schema
from hypothesis import strategies as st

from cutwater.connectors.avro.decoder import AvroDecoder
from cutwater.connectors.avro.schemas import SchemaText
from cutwater.connectors.messages.base import Decoded, Values

UTC = dt.UTC


def record(*fields: tuple[Any, ...], name: str = "R") -> dict[str, Any]:
    """A schema of fields: name, type, and perhaps a default."""
    made = [{"name": f[0], "type": f[1], **({"default": f[2]} if len(f) > 2 else {})} for f in fields]
    return {"type": "record", "name": name, "fields": made}


def encoded(schema: Any, row: Any) -> bytes:
    """A row in Avro's bytes, by fastavro."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, parse_schema(json.loads(json.dumps(schema))), row)
    return out.getvalue()


def decoded(writer: Any, value: bytes, reader: Any = None) -> Any:
    """A row of Avro's bytes, by fastavro, as Arrow's rows would be."""
    theirs, ours = (None if one is None else parse_schema(json.loads(json.dumps(one))) for one in (writer, reader))
    return plain(fastavro.schemaless_reader(io.BytesIO(value), theirs, ours))


def plain(value: Any) -> Any:
    """A value as Arrow gives it: maps as pairs, UUIDs as texts."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, uuid.UUID) else value


def rows_of(batch: pa.RecordBatch) -> list[Any]:
    """Rows as fastavro would give them: maps as dicts."""
    columns = [(f.name, [_unpaired(f.type, one) for one in batch.column(f.name).to_pylist()]) for f in batch.schema]
    return [{name: values[n] for name, values in columns} for n in range(batch.num_rows)]


def _unpaired(type: pa.DataType, value: Any) -> Any:
    if value is None:
        return None
    if pa.types.is_map(type):
        return {key: _unpaired(type.item_type, one) for key, one in value}
    if pa.types.is_list(type):
        return [_unpaired(type.value_type, one) for one in value]
    if pa.types.is_struct(type):
        return {f.name: _unpaired(f.type, value[f.name]) for f in type}
    return value


def decode(schema: Any, values: Sequence[bytes | None], columns: frozenset[str] | None = None, **more: Any) -> Decoded:
    """By our decoder."""
    decoder = AvroDecoder(SchemaText(json.dumps(schema)), columns, dictionaries=False, **more)
    found = decoder.decode(Values.of(values), first_only=False)
    found.rows.validate(full=True)
    return found


# ------------------------------------------------------------------------------------------------- random schemas


def _with_values(schema: Any, values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, Any]]:
    return st.just((schema, values))


_LONGS = st.integers(-(2**63), 2**63 - 1)
_TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
_TIMES = st.datetimes(dt.datetime(1902, 1, 1), dt.datetime(2200, 1, 1))


def _logical(kind: Any, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


def _millis(value: dt.datetime) -> dt.datetime:
    return value.replace(microsecond=value.microsecond // 1000 * 1000)


def _zoned(value: dt.datetime) -> dt.datetime:
    return value.replace(tzinfo=UTC)


LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ("null", st.none()),
    ("boolean", st.booleans()),
    ("int", st.integers(-(2**31), 2**31 - 1)),
    ("long", _LONGS),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("bytes", st.binary(max_size=12)),
    ("string", _TEXTS),
    (_logical("int", "date"), st.dates(dt.date(1, 1, 1), dt.date(9999, 12, 31))),
    (
        _logical("int", "time-millis"),
        st.times().map(lambda time: time.replace(microsecond=time.microsecond // 1000 * 1000)),
    ),
    (_logical("long", "time-micros"), st.times()),
    (_logical("long", "timestamp-millis"), _TIMES.map(_millis).map(_zoned)),
    (_logical("long", "timestamp-micros"), _TIMES.map(_zoned)),
    (_logical("long", "local-timestamp-millis"), _TIMES.map(_millis)),
    (_logical("long", "local-timestamp-micros"), _TIMES),
    (
        _logical("bytes", "decimal", precision=12, scale=3),
        st.integers(-(10**12) + 1, 10**12 - 1).map(lambda n: decimal.Decimal(n).scaleb(-3)),
    ),
    (
        _logical("bytes", "decimal", precision=38, scale=0),
        st.integers(-(10**38) + 1, 10**38 - 1).map(decimal.Decimal),
    ),
    (_logical("string", "uuid"), st.uuids()),
]
"""Types without others in them, and their values."""


class _Names:
    """Each named type has a name of its own."""

    def __init__(self) -> None:
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"Type{self.count}"


@st.composite
def types(draw: st.DrawFn, names: _Names, depth: int) -> tuple[Any, st.SearchStrategy[Any]]:
    """A type and a strategy of its values."""
    kinds = ["leaf"] * 4 + ["enum", "fixed", "decimal", "nullable"]
    kind = draw(st.sampled_from(kinds + (["array", "map", "record"] if depth else [])))
    if kind == "enum":
        symbols = draw(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True))
        return {"type": "enum", "name": names.fresh(), "symbols": symbols}, st.sampled_from(symbols)
    if kind == "fixed":
        size = draw(st.integers(0, 9))
        return {"type": "fixed", "name": names.fresh(), "size": size}, st.binary(min_size=size, max_size=size)
    if kind == "decimal":
        base = {"type": "fixed", "name": names.fresh(), "size": 16}
        return {**base, "logicalType": "decimal", "precision": 30, "scale": 7}, st.integers(
            -(10**30) + 1, 10**30 - 1
        ).map(lambda n: decimal.Decimal(n).scaleb(-7, decimal.Context(40)))
    if kind == "nullable":
        inner, values = draw(
            types(names, depth).filter(lambda found: found[0] != "null" and not isinstance(found[0], list))
        )
        return draw(st.permutations(["null", inner])), st.none() | values
    if kind == "array":
        inner, values = draw(types(names, depth - 1))
        return {"type": "array", "items": inner}, st.lists(values, max_size=4)
    if kind == "map":
        inner, values = draw(types(names, depth - 1))
        return {"type": "map", "values": inner}, st.dictionaries(_TEXTS, values, max_size=3)
    if kind == "record":
        return draw(records(names, depth - 1))
    return draw(st.sampled_from(LEAVES))


@st.composite
def records(draw: st.DrawFn, names: _Names | None = None, depth: int = 2) -> tuple[Any, st.SearchStrategy[Any]]:
    """The schema of a record and a strategy of its rows."""
    names = names or _Names()
    fields = [(f"f{n}", *draw(types(names, depth))) for n in range(draw(st.integers(1, 4)))]
    schema = record(*((name, type) for name, type, _ in fields), name=names.fresh())
    return schema, st.fixed_dictionaries({name: values for name, _, values in fields})
