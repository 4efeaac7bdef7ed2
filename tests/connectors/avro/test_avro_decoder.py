"""Avro values to columns: as fastavro does, whatever the schema, and never more than an error for any bytes."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import avro_world as world
from cutwater.connectors.avro.decoder import AvroDecoder
from cutwater.connectors.avro.schemas import SchemaText
from cutwater.connectors.messages.base import Values

record = world.record


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_any_row_of_any_schema_is_what_fastavro_reads(data: st.DataObject) -> None:
    schema, rows = data.draw(world.records())
    written = [world.encoded(schema, row) for row in data.draw(st.lists(rows, min_size=1, max_size=5))]
    found = world.decode(schema, written)
    assert found.bad == []
    assert world.rows_of(found.rows) == [world.decoded(schema, value) for value in written]


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_columns_that_nobody_reads_are_null_and_change_no_other(data: st.DataObject) -> None:
    schema, rows = data.draw(world.records())
    names = [f["name"] for f in schema["fields"]]
    wanted = frozenset(data.draw(st.sets(st.sampled_from(names), min_size=1)))
    written = [world.encoded(schema, row) for row in data.draw(st.lists(rows, min_size=1, max_size=5))]
    found = world.decode(schema, written, wanted).rows
    whole = world.decode(schema, written).rows
    for name in names:
        column = found.column(name)
        assert column.equals(whole.column(name)) if name in wanted else column.null_count == len(written)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_a_value_that_is_cut_short_or_has_more_is_bad_and_others_are_not(data: st.DataObject) -> None:
    schema, rows = data.draw(world.records())
    row = data.draw(rows)
    whole = world.encoded(schema, row)
    values = [whole, *(whole[:size] for size in range(len(whole))), whole + b"\0", whole]
    found = world.decode(schema, values)
    assert [bad.number for bad in found.bad] == list(range(1, len(whole) + 2))
    assert found.rows.to_pylist() == 2 * world.decode(schema, [whole]).rows.to_pylist()


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_no_bytes_do_more_than_be_bad(data: st.DataObject) -> None:
    schema, rows = data.draw(world.records())
    whole = world.encoded(schema, data.draw(rows))
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    values: list[bytes | None] = []
    for _ in range(200):
        changed = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(changed) + 1)
            changed[place : place + chance.randrange(3)] = chance.randbytes(chance.randrange(4))
        values.append(bytes(changed))
    found = world.decode(schema, values)
    assert found.rows.num_rows + len(found.bad) == len(values)
    assert all(bad.reason for bad in found.bad)


@pytest.fixture(scope="module")
def at_the_edge() -> Any:
    """``at_the_edge(values)``: they lie right before a page that must not be read: a byte too far ends the process."""
    size = 1 << 20
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0

    def place(values: list[bytes | None]) -> Values:
        made = Values.of(values)
        assert made.data.size <= size
        memory[size - made.data.size : size] = made.data.to_pybytes()
        return dataclasses.replace(
            made, data=pa.foreign_buffer(address + size - made.data.size, made.data.size, memory)
        )

    return place


@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_nothing_behind_the_values_is_read(at_the_edge: Any, data: st.DataObject) -> None:
    schema, rows = data.draw(world.records())
    whole = world.encoded(schema, data.draw(rows))
    decoder = AvroDecoder(SchemaText(json.dumps(schema)), None, dictionaries=False)
    for size in range(len(whole)):
        assert decoder.decode(at_the_edge([whole[:size]]), first_only=False).bad
    found = decoder.decode(at_the_edge([whole, whole]), first_only=False).rows
    assert found.equals(world.decode(schema, [whole, whole]).rows)


S, L = "string", "long"
BAD = {
    "cut short": (record(("n", L), ("t", S)), b"\x02\x06ab", 'field "t": the value ends in it'),
    "more": (record(("n", L)), b"\x02\x02", "bytes are left behind the last field"),
    "a long number": (record(("n", L)), b"\xff" * 10 + b"\x01", 'field "n": a number of more than 64 bits'),
    "a number of ten bytes": (record(("n", L)), b"\xff" * 9 + b"\x02", 'field "n": a number of more than 64 bits'),
    "an int that is none": (record(("n", "int")), b"\xff\xff\xff\xff\x1f", 'field "n": out of the range of its type'),
    "a time of day": (
        record(("n", {"type": "int", "logicalType": "time-millis"})),
        b"\x01",
        'field "n": out of the range of its type',
    ),
    "a timestamp": (
        record(("n", {"type": "long", "logicalType": "timestamp-millis"})),
        b"\xff" * 9 + b"\x01",
        'field "n": out of the range of its type',
    ),
    "a negative length": (record(("t", S)), b"\x01", 'field "t": a negative length'),
    "no text": (record(("t", S)), b"\x02\xff", 'field "t": not UTF-8'),
    "a surrogate": (record(("t", S)), b"\x06\xed\xa0\x80", 'field "t": not UTF-8'),
    "no branch": (record(("t", ["null", S])), b"\x04", 'field "t": a number that stands for no branch'),
    "no symbol": (
        record(("e", {"type": "enum", "name": "E", "symbols": ["a"]})),
        b"\x02",
        'field "e": a number that stands for no branch',
    ),
    "no boolean": (record(("b", "boolean")), b"\x02", 'field "b": a boolean that is neither 0 nor 1'),
    "a large decimal": (
        record(("d", {"type": "bytes", "logicalType": "decimal", "precision": 2})),
        b"\x02\x64",
        'field "d": out of the range of its type',
    ),
    "within": (record(("r", record(("n", L), name="I"))), b"", 'field "r.n": the value ends in it'),
    "items of nothing": (
        record(("a", {"type": "array", "items": "null"})),
        b"\xfe\xff\xff\xff\x0f\0",
        'field "a": too many items without content',
    ),
    "less than no items of nothing": (
        record(("a", {"type": "array", "items": "null"})),
        b"\xff" * 9 + b"\x01\0\0",
        'field "a": too many items without content',
    ),
    "items that are not there": (
        record(("a", {"type": "array", "items": "long"})),
        b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01\0",
        'field "a": the value ends in it',
    ),
    "less than no items": (
        record(("a", {"type": "array", "items": "long"})),
        b"\xff" * 9 + b"\x01\0\0\0\0",
        'field "a": the value ends in it',
    ),
    "null": (record(("n", L)), None, "the value is null"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name: str) -> None:
    schema, value, reason = BAD[name]
    (bad,) = world.decode(schema, [value]).bad
    assert bad.reason.startswith(reason)


@pytest.mark.parametrize("items", [L, S, {"type": "map", "values": "long"}])
def test_items_in_several_blocks_with_and_without_sizes(items: Any) -> None:
    schema = record(("a", {"type": "array", "items": items}), ("after", "int"))
    item = world.encoded(items, {"long": 5, "string": "five"}.get(str(items), {"five": 5}))
    sized = b"\x03" + bytes([4 * len(item)]) + 2 * item  # -2, and the bytes that follow
    value = b"\x02" + item + sized + b"\x02" + item + b"\0" + b"\x0e"
    (row,) = world.rows_of(world.decode(schema, [value]).rows)
    assert row == world.decoded(schema, value)
    assert world.decode(schema, [value], frozenset({"after"})).rows["after"].to_pylist() == [7]


def test_memory_grows_with_the_rows() -> None:
    schema = record(("a", {"type": "array", "items": ["null", S]}), ("t", S))
    rows: list[Any] = [{"a": [None, "x" * n] * (n % 50), "t": "y" * (n % 7)} for n in range(3000)]
    rows[700]["a"] = ["z" * 1_000_000]
    decoder = AvroDecoder(SchemaText(json.dumps(schema)), None, dictionaries=False)
    written = [world.encoded(schema, row) for row in rows]
    for _ in range(2):
        found = decoder.decode(Values.of(written), first_only=False)
        found.rows.validate(full=True)
        assert found.rows.to_pylist() == rows


def test_the_first_bad_value_is_enough_for_a_job_that_fails() -> None:
    decoder = AvroDecoder(SchemaText(json.dumps(record(("n", L)))), None, dictionaries=False)
    found = decoder.decode(Values.of([b"\x02", b"", b"\x80"]), first_only=True)
    assert [bad.number for bad in found.bad] == [1]


def test_an_enum_comes_as_a_dictionary_where_that_may_be() -> None:
    schema = record(("e", ["null", {"type": "enum", "name": "E", "symbols": ["a", "b"]}]))
    decoder = AvroDecoder(SchemaText(json.dumps(schema)), None, dictionaries=True)
    (column,) = decoder.decode(Values.of([b"\x02\x02", b"\0", b"\x02\0"]), first_only=False).rows.columns
    assert column.type == pa.dictionary(pa.int32(), pa.string())
    assert column.to_pylist() == ["b", None, "a"]


def test_a_fixed_uuid_is_a_text() -> None:
    schema = record(("u", {"type": "fixed", "name": "F", "size": 16, "logicalType": "uuid"}))
    found = world.decode(schema, [bytes(range(16))])
    assert found.rows.to_pylist() == [{"u": "00010203-0405-0607-0809-0a0b0c0d0e0f"}]
