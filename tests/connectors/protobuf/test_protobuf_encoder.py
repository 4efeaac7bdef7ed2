"""Rows to Protobuf messages: the official library reads in them what the rows hold."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import protobuf_world as world
from cutwater.connectors.protobuf.descriptors import described
from cutwater.connectors.protobuf.encoder import ProtobufEncoder
from cutwater.errors import BuildError, DataError


def written(cls: Any, rows: pa.Table) -> list[bytes]:
    made = ProtobufEncoder(described(cls, None)).encode(rows)
    return [made.value(n) for n in range(rows.num_rows)]


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_the_library_reads_what_the_rows_hold(data: st.DataObject) -> None:
    cls, messages = data.draw(world.messages())
    values = [one.SerializeToString() for one in data.draw(st.lists(messages, min_size=1, max_size=6))]
    batch = world.decode(cls, values, enums=data.draw(st.sampled_from(["text", "number"]))).rows
    whole = [world.row_of(world.whole_micros(cls.FromString(value))) for value in values]
    first = data.draw(st.integers(0, len(values) - 1))
    for places in ([(0, len(values))], [(first, 2)], [(first, 2), (0, first)]):
        made = written(cls, pa.Table.from_batches([batch.slice(*place) for place in places]))
        expected = [row for begin, count in places for row in whole[begin : begin + count]]
        assert [world.row_of(cls.FromString(value)) for value in made] == expected


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_what_the_library_writes_is_written_the_same(data: st.DataObject) -> None:
    """Where nothing has two ways: fields by their numbers, no maps, and whole microseconds."""
    cls, messages = data.draw(world.messages(maps=False))
    one = data.draw(messages)
    value = one.SerializeToString(deterministic=True)
    rows = world.decode(cls, [value]).rows
    (made,) = written(cls, pa.Table.from_batches([rows]))
    again = cls.FromString(made)
    assert again == world.whole_micros(one)
    assert made == again.SerializeToString(deterministic=True)


def test_memory_grows_with_the_rows() -> None:
    cls = world.simple(t="string", n="repeated int64")
    texts = ["x" * (n % 3) for n in range(5000)] + ["y" * 100_000]
    rows = pa.table({"t": texts, "n": [[n] * (n % 4) for n in range(len(texts))]})
    made = written(cls, rows)
    assert [world.row_of(cls.FromString(value)) for value in made] == rows.to_pylist()
    encoded = ProtobufEncoder(described(cls, None)).encode(rows)
    assert encoded.column(None).to_pylist() == made


def test_numbers_of_other_widths_and_units_are_written_exactly() -> None:
    cls = world.simple(n="int64", u="uint64", x="double", b="bytes")
    rows = pa.table(
        {"x": pa.array([1.5], pa.float32()), "n": pa.array([2**32 - 1], pa.uint32()), "u": pa.array([7], pa.uint8())}
    )
    (value,) = written(cls, rows.append_column("b", pa.array(["text"])))
    assert world.row_of(cls.FromString(value)) == {"n": 2**32 - 1, "u": 7, "x": 1.5, "b": b"text"}


REFUSED = {
    "a column without field": ({"n": "int64"}, {"n": [1], "m": [2]}, "column 'm' is no field of"),
    "a narrower number": ({"n": "int32"}, {"n": [1]}, "column 'n' is of type int64, and cannot be written"),
    "a signed number": ({"n": "uint64"}, {"n": [1]}, "column 'n' is of type int64, and cannot be written"),
    "a number as text": ({"n": "string"}, {"n": [1]}, "column 'n' is of type int64"),
    "one as many": ({"n": "repeated int64"}, {"n": [1]}, "column 'n' is of type int64, and cannot .* repeated"),
    "many as one": ({"n": "int64"}, {"n": [[1]]}, "column 'n' is of type list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_columns_that_do_not_fit_are_refused_before_anything_runs(name: str) -> None:
    fields, columns, message = REFUSED[name]
    with pytest.raises(BuildError, match=message):
        ProtobufEncoder(described(world.simple(**fields), None)).check(pa.table(columns).schema)


BAD: dict[str, tuple[dict[str, str], dict[str, Any], str, int | None]] = {
    "null": ({"n": "int64"}, {"n": [1, None]}, "column 'n' .* it is null.*optional", 1),
    "a null item": ({"n": "repeated int64"}, {"n": [[1], [2, None]]}, "column 'n' .* it is null", 1),
    "a null list": ({"n": "repeated int64"}, {"n": [[1], None]}, "column 'n' .* it is null", 1),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_cannot_be_written_names_its_column(name: str) -> None:
    fields, columns, message, row = BAD[name]
    with pytest.raises(DataError, match=message) as raised:
        written(world.simple(**fields), pa.table(columns))
    assert raised.value.row == row


def test_a_time_beyond_what_a_timestamp_holds_is_refused() -> None:
    cls = world.timed()
    good = pa.table({"at": pa.array([dt.datetime(1, 1, 1, tzinfo=dt.UTC)], pa.timestamp("us", "UTC"))})
    assert world.row_of(cls.FromString(written(cls, good)[0]))["at"] == dt.datetime(1, 1, 1, tzinfo=dt.UTC)
    for micros in (-62135596800 * 10**6 - 1, 253402300800 * 10**6):
        with pytest.raises(DataError, match=r"column 'at' .* between the years 1 and 9999"):
            written(cls, pa.table({"at": pa.array([micros], pa.timestamp("us", "UTC"))}))


def test_two_fields_of_a_oneof_are_refused() -> None:
    cls = world.choice()
    assert cls.FromString(written(cls, pa.table({"a": [1, None], "b": [None, "x"]}))[1]).WhichOneof("c") == "b"
    with pytest.raises(DataError, match=r"columns a, b cannot be written .* oneof 'c'") as raised:
        written(cls, pa.table({"a": [1, 2], "b": [None, "x"]}))
    assert raised.value.row == 1


def test_enums_are_written_by_name_number_and_digits() -> None:
    cls = world.with_enum()
    made = written(cls, pa.table({"e": ["B", "A", "17"]}))
    assert [cls.FromString(value).e for value in made] == [1, 0, 17]
    assert written(cls, pa.table({"e": pa.array([1, 0, 17], pa.int32())})) == made
    with pytest.raises(DataError, match=r"column 'e' .* 'C' is no name of .*There are: A, B"):
        written(cls, pa.table({"e": ["A", "C"]}))
