"""Values of one schema read as rows of another: as fastavro resolves them, and as Avro says where it does not."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import avro_world as world
from cutwater.connectors.avro.schemas import SchemaText, parsed
from cutwater.connectors.messages.base import Decoded

record = world.record


def headed(id: int, value: bytes) -> bytes:
    return b"\0" + id.to_bytes(4, "big") + value


def resolve(writers: dict[int, Any], reader: Any, values: list[bytes | None], **more: Any) -> Decoded:
    """Values in the wire format, by our decoder."""

    def schema_of(id: int) -> Any:
        return parsed(SchemaText(json.dumps(writers[id]))) if id in writers else f"no schema {id}"

    return world.decode(reader, values, schema_of=schema_of, **more)


PROMOTED: dict[str, list[Any]] = {
    "int": ["int", "long", "float", "double"],
    "long": ["long", "float", "double"],
    "float": ["float", "double"],
    "string": ["string", "bytes"],
    "bytes": ["bytes", "string"],
}
ADDED: list[tuple[Any, Any]] = [
    ("int", -3),
    ("string", "dflt"),
    (["null", "long"], None),
    (["long", "null"], 12),
    ({"type": "array", "items": "string"}, ["a", "b"]),
    ({"type": "map", "values": ["null", "int"]}, {"k": 1, "n": None}),
    (record(("p", "double"), ("q", "string", "inner"), name="Added"), {"p": 0.5}),
    ({"type": "enum", "name": "AddedE", "symbols": ["x", "y"]}, "y"),
    ({"type": "fixed", "name": "AddedF", "size": 2}, "\u00ff\u0001"),
]


@st.composite
def evolved(draw: st.DrawFn, schema: dict[str, Any]) -> dict[str, Any]:
    """A reader's schema for a writer's record: fields less, fields more, wider types, another order."""
    fields: list[dict[str, Any]] = []
    for field in schema["fields"]:
        what = draw(st.sampled_from(["keep", "keep", "drop", "nullable"]))
        kind = field["type"]
        if what == "drop":
            continue
        if isinstance(kind, str):
            kind = draw(st.sampled_from(PROMOTED.get(kind, [kind])))
        elif isinstance(kind, dict) and kind["type"] == "record":
            kind = draw(evolved(kind))
        if what == "nullable" and not isinstance(kind, list) and kind != "null":
            kind = draw(st.permutations(["null", kind]))
        fields.append({"name": field["name"], "type": kind})
    if schema["name"] == "Type1" or not fields:
        type, default = draw(st.sampled_from(ADDED)) if schema["name"] == "Type1" else ("int", 1)
        fields.append({"name": f"added_to_{schema['name']}", "type": type, "default": default})
    return {**schema, "fields": draw(st.permutations(fields))}


def finished(schema: Any, value: Any) -> Any:
    """What fastavro leaves as the writer or the schema has it: bytes, numbers, and defaults within defaults."""
    if isinstance(schema, list):
        (schema,) = (branch for branch in schema if branch != "null")
        return None if value is None else finished(schema, value)
    kind = schema["type"] if isinstance(schema, dict) else schema
    if kind == "record":
        return {f["name"]: finished(f["type"], value.get(f["name"], f.get("default"))) for f in schema["fields"]}
    if kind in ("array", "map"):
        if kind == "array":
            return [finished(schema["items"], one) for one in value]
        return {key: finished(schema["values"], one) for key, one in value.items()}
    if isinstance(value, str) and kind in ("bytes", "fixed"):
        return value.encode("latin-1" if kind == "fixed" else "utf-8")
    if isinstance(value, bytes) and kind == "string":
        return value.decode()
    return float(np.array([value]).astype(np.float32)[0]) if kind == "float" else value


def ascii_only(value: Any) -> bool:
    """False if bytes are in it that are no text: a reader may want them as one."""
    if isinstance(value, bytes):
        return value.isascii()
    if isinstance(value, dict):
        return all(map(ascii_only, value.values()))
    return all(map(ascii_only, value)) if isinstance(value, list) else True


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_any_evolution_is_read_as_fastavro_reads_it(data: st.DataObject) -> None:
    writer, rows = data.draw(world.records())
    reader = data.draw(evolved(writer))
    given = data.draw(st.lists(rows.filter(ascii_only), min_size=1, max_size=4))
    written = [world.encoded(writer, row) for row in given]
    found = resolve({7: writer}, reader, [headed(7, value) for value in written])
    assert found.bad == []
    assert world.rows_of(found.rows) == [finished(reader, world.decoded(writer, value, reader)) for value in written]


def test_each_value_is_read_with_the_schema_that_it_names() -> None:
    old, new = record(("n", "int")), record(("t", "string"), ("n", "long"))
    reader = record(("n", "double"), ("t", ["null", "string"], None))
    values: list[bytes | None] = []
    for n in range(50):
        new_one = n % 3 == 0
        row = {"n": n, "t": str(n)} if new_one else {"n": n}
        values.append(headed(300 if new_one else 2, world.encoded(new if new_one else old, row)))
    bad = {5: None, 11: b"\0\0\0", 17: b"\1" + b"\0" * 9, 23: headed(9, b"\2"), 29: headed(2, b"")}
    for number, value in bad.items():
        values[number] = value
    found = resolve({2: old, 300: new}, reader, values)
    assert world.rows_of(found.rows) == [
        {"n": float(n), "t": None if n % 3 else str(n)} for n in range(50) if n not in bad
    ]
    assert [(one.number, one.reason) for one in found.bad] == [
        (5, "the value is null"),
        (11, "the value has fewer than 5 bytes: no id of a schema is in front"),
        (17, "the value does not begin with a zero byte and the id of a schema"),
        (23, "no schema 9"),
        (29, 'field "n": the value ends in it'),
    ]
    assert found.good is not None
    assert found.good.tolist() == [n for n in range(50) if n not in bad]


def read(writer: Any, row: Any, reader: Any) -> Any:
    """One row, or why it is none."""
    found = resolve({1: writer}, reader, [headed(1, world.encoded(writer, row))])
    return found.bad[0].reason if found.bad else world.rows_of(found.rows)[0]


def enum(*symbols: str, **more: Any) -> dict[str, Any]:
    return {"type": "enum", "name": "E", "symbols": list(symbols), **more}


def renamed(name: str, type: Any, *aliases: str) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": name, "type": type, "aliases": list(aliases)}]}


def long(logical: str) -> dict[str, str]:
    return {"type": "long", "logicalType": logical}


AT = dt.datetime(2026, 1, 2, 3, 4, 5, 678000, dt.UTC)
A, B = record(("n", "int"), name="A"), record(("m", "int"), name="B")
CASES = {
    "an alias": (record(("old", "int")), {"old": 1}, renamed("new", "long", "older", "old"), {"new": 1}),
    "a symbol elsewhere": (record(("e", enum("a", "b"))), {"e": "a"}, record(("e", enum("b", "a"))), {"e": "a"}),
    "a symbol's default": (
        record(("e", enum("a", "b"))),
        {"e": "a"},
        record(("e", enum("b", "c", default="c"))),
        {"e": "c"},
    ),
    "a symbol less": (
        record(("e", enum("a", "b"))),
        {"e": "a"},
        record(("e", enum("b"))),
        'field "e": a symbol that the reader\'s enum does not have',
    ),
    "a null too much": (
        record(("n", ["null", "int"])),
        {"n": None},
        record(("n", "int")),
        'field "n": it is null, and must not be',
    ),
    "no null at all": (record(("n", ["null", "int"])), {"n": 4}, record(("n", "long")), {"n": 4}),
    "a type less": (record(("n", ["int", "string"])), {"n": 4}, record(("n", "long")), {"n": 4}),
    "another type": (
        record(("n", ["int", "string"])),
        {"n": "x"},
        record(("n", "long")),
        'field "n": a string is no long',
    ),
    "a record of two": (record(("r", [A, B])), {"r": ("B", {"m": 3})}, record(("r", B)), {"r": {"m": 3}}),
    "the other record": (
        record(("r", [A, B])),
        {"r": ("A", {"n": 3})},
        record(("r", B)),
        'field "r": a record A is no record B',
    ),
    "no default": (
        record(("n", "int")),
        {"n": 1},
        record(("n", "int"), ("m", "int")),
        'field "m": it is missing, and has no default',
    ),
    "finer times": (
        record(("at", long("timestamp-millis"))),
        {"at": AT},
        record(("at", long("timestamp-micros"))),
        {"at": AT},
    ),
    "coarser times": (
        record(("at", long("timestamp-micros"))),
        {"at": AT},
        record(("at", long("timestamp-millis"))),
        {"at": AT},
    ),
    "a narrower number": (record(("n", "long")), {"n": 1}, record(("n", "int")), 'field "n": a long is no int'),
    "no text": (record(("n", "bytes")), {"n": b"\xff"}, record(("n", "string")), 'field "n": not UTF-8'),
    "a union that nobody reads": (
        record(("n", "int"), ("u", ["null", "int", "string", {"type": "array", "items": ["int", A]}])),
        {"n": 5, "u": [1, {"n": 2}]},
        record(("n", "int")),
        {"n": 5},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_avro_says_of_two_schemas(name: str) -> None:
    writer, row, reader, expected = CASES[name]
    assert read(writer, row, reader) == expected
