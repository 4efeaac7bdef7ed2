"""Rows to Avro values: fastavro reads in them what the rows hold."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import avro_world as world
from cutwater.connectors.avro.encoder import AvroEncoder
from cutwater.connectors.avro.schemas import SchemaText
from cutwater.errors import BuildError, DataError

record = world.record


def encoder(schema: Any) -> AvroEncoder:
    return AvroEncoder(SchemaText(json.dumps(schema)))


def written(schema: Any, rows: pa.Table) -> list[bytes]:
    made = encoder(schema).encode(rows)
    return [made.value(n) for n in range(rows.num_rows)]


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_fastavro_reads_what_the_rows_hold(data: st.DataObject) -> None:
    schema, rows = data.draw(world.records())
    values = [world.encoded(schema, row) for row in data.draw(st.lists(rows, min_size=1, max_size=6))]
    batch = world.decode(schema, values).rows
    first = data.draw(st.integers(0, len(values) - 1))
    for parts in ([batch], [batch.slice(first, 2)], [batch.slice(first, 2), batch.slice(0, first)]):
        expected = [row for part in parts for row in world.rows_of(part)]
        made = written(schema, pa.Table.from_batches(parts))
        assert [world.decoded(schema, value) for value in made] == expected


def test_memory_grows_with_the_rows() -> None:
    schema = record(
        ("t", "string"), ("d", {"type": "fixed", "name": "F", "size": 100, "logicalType": "decimal", "precision": 9})
    )
    texts = ["x" * (n % 3) for n in range(5000)] + ["y" * 100_000]
    rows = pa.table({"t": texts, "d": pa.array([decimal.Decimal(-7)] * len(texts), pa.decimal128(9, 0))})
    made = written(schema, rows)
    assert made[-1] == world.encoded(schema, {"t": texts[-1], "d": decimal.Decimal(-7)})
    assert [world.decoded(schema, value)["t"] for value in made] == texts


def test_numbers_of_other_widths_and_units_are_written_exactly() -> None:
    at = dt.datetime(2026, 1, 1, 0, 0, 0, 5000, dt.UTC)
    millis = {"type": "long", "logicalType": "timestamp-millis"}
    schema = record(("n", "long"), ("x", "double"), ("at", millis), ("missing", ["null", "int"]), ("d", "int", 7))
    rows = pa.table(
        {
            "x": pa.array([1], pa.int32()),
            "n": pa.array([2**32 - 1], pa.uint32()),
            "at": pa.array([at], pa.timestamp("us", "UTC")),
        }
    )
    (value,) = written(schema, rows)
    assert world.decoded(schema, value) == {"n": 2**32 - 1, "x": 1.0, "at": at, "missing": None, "d": 7}
    finer = rows.set_column(2, "at", pa.array([1], pa.timestamp("us", "UTC")))
    with pytest.raises(DataError, match="column 'at' cannot be written as Avro's timestamp-millis"):
        written(schema, finer)


E = {"type": "enum", "name": "E", "symbols": ["a", "b"]}
REFUSED = {
    "a column without field": (record(("n", "long")), {"n": [1], "m": [2]}, "column 'm' is no field"),
    "a field without column": (record(("n", "long"), ("m", "long")), {"n": [1]}, "no column for field 'm'"),
    "a narrower number": (record(("n", "int")), {"n": [1]}, "column 'n' is of type int64, and cannot be written"),
    "a number as text": (record(("n", "string")), {"n": [1]}, "column 'n' is of type int64"),
    "a time without zone": (
        record(("n", {"type": "long", "logicalType": "timestamp-micros"})),
        {"n": [dt.datetime(2026, 1, 1)]},
        "column 'n' is of type timestamp",
    ),
    "within": (record(("r", record(("n", "int"), name="I"))), {"r": [{"n": "x"}]}, "column 'r.n' is of type string"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_columns_that_do_not_fit_are_refused_before_anything_runs(name: str) -> None:
    schema, columns, message = REFUSED[name]
    with pytest.raises(BuildError, match=message):
        encoder(schema).check(pa.table(columns).schema)


BAD = {
    "null": (record(("n", "long")), {"n": [1, None]}, "column 'n' .* it is null", 1),
    "a null within": (
        record(("a", {"type": "array", "items": "long"})),
        {"a": [[1], [2, None]]},
        "column 'a' .* it is null",
        1,
    ),
    "no symbol": (record(("e", E)), {"e": ["a", "c"]}, "'c' is no symbol of E", None),
    "a fixed of other bytes": (
        record(("f", {"type": "fixed", "name": "F", "size": 2})),
        {"f": [b"ab", b"abc"]},
        "column 'f' .* number of bytes",
        1,
    ),
    "no uuid": (
        record(("u", {"type": "fixed", "name": "F", "size": 16, "logicalType": "uuid"})),
        {"u": ["x"]},
        "column 'u' cannot be written as a UUID",
        None,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_cannot_be_written_names_its_column(name: str) -> None:
    schema, columns, message, row = BAD[name]
    with pytest.raises(DataError, match=message) as raised:
        written(schema, pa.table(columns))
    assert raised.value.row == row


def test_a_decimal_that_is_too_large_for_its_bytes() -> None:
    schema = record(("d", {"type": "fixed", "name": "F", "size": 1, "logicalType": "decimal", "precision": 3}))
    small, large = ([decimal.Decimal(n)] for n in (-128, 128))
    assert written(schema, pa.table({"d": pa.array(small, pa.decimal128(3, 0))})) == [b"\x80"]
    with pytest.raises(DataError, match=r"column 'd' .* more digits"):
        written(schema, pa.table({"d": pa.array(large, pa.decimal128(3, 0))}))
