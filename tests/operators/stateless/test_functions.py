"""User functions: results, checks of what they return, and errors that tell the row."""

from __future__ import annotations

import datetime as dt
import pickle
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cutwater.data.rows import describe_row, loses_value
from cutwater.errors import BuildError, DataError, UserCodeError
from cutwater.operators.row_output import ROWS_AT_ONCE
from cutwater.operators.stateless.functions import FlatMapSpec, MapBatchesSpec, MapRowSpec

INPUT = pa.schema({"id": pa.int64(), "text": pa.string()})
ROWS = pa.record_batch({"id": [1, 2, 3], "text": ["a b", None, "c"]}, schema=INPUT)


def run(spec: Any, batch: pa.RecordBatch = ROWS) -> pa.Table:
    return pa.Table.from_batches([out for _, out in spec.build().process(0, batch)], spec.outputs[0])


def double(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.record_batch({"twice": [2 * i for i in batch.column("id").to_pylist()]})


def words(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"word": word, "n": row["id"]} for word in (row["text"] or "").split()]


def fail_on_two(row: dict[str, Any]) -> dict[str, Any]:
    return {"inverse": 1 / (2 - row["id"])}


def test_batch_function_follows_map_in_arrow() -> None:
    spec = MapBatchesSpec(INPUT, double, pa.schema({"twice": pa.int64()}))
    assert run(spec).to_pydict() == {"twice": [2, 4, 6]}


def test_batch_function_may_make_any_number_of_batches() -> None:
    def split(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from (batch.slice(i, 1) for i in range(batch.num_rows))
            yield batch.slice(0, 0)

    outputs = MapBatchesSpec(INPUT, split, INPUT).build().process(0, ROWS)
    assert [batch.num_rows for _, batch in outputs] == [1, 1, 1]


def test_columns_are_matched_by_name_and_cast_where_no_value_is_lost() -> None:
    def turned(batches: Iterator[pa.RecordBatch]) -> list[pa.RecordBatch]:
        return [pa.record_batch({"b": ["x"], "a": pa.array([7], pa.int64())}) for _ in batches]

    schema = pa.schema({"a": pa.int16(), "b": pa.large_string()})
    assert run(MapBatchesSpec(INPUT, turned, schema)).to_pydict() == {"a": [7], "b": ["x"]}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (pa.record_batch({"a": [2**40], "b": ["x"]}), "column 'a' as int64, which does not fit the declared int16"),
        (pa.record_batch({"a": ["seven"], "b": ["x"]}), "column 'a' as string"),
        (pa.record_batch({"a": [1]}), "column 'b' is missing"),
        (pa.record_batch({"a": [1], "b": ["x"], "c": [1]}), "column 'c' is extra"),
        (pa.record_batch({"a": [1], "b": pa.array([None], pa.string())}), "null into column 'b'"),
        (pa.record_batch({"a": pa.array([1], pa.int16()), "b": pa.array([None], pa.string())}), "null into column 'b'"),
        (pa.table({"a": [1], "b": ["x"]}), "yielded Table"),
        ({"a": [1]}, "yielded dict"),
    ],
)
def test_batch_of_another_schema_is_the_users_error(made: Any, message: str) -> None:
    schema = pa.schema([pa.field("a", pa.int16()), pa.field("b", pa.string(), nullable=False)])
    with pytest.raises(UserCodeError, match=message) as caught:
        run(MapBatchesSpec(INPUT, lambda _: [made], schema))
    assert caught.value.hint


def test_batch_function_that_returns_nothing_is_the_users_error() -> None:
    with pytest.raises(UserCodeError, match="returned NoneType"):
        run(MapBatchesSpec(INPUT, lambda _: None, INPUT))  # type: ignore[arg-type]


def test_row_function_maps_and_drops() -> None:
    def keep_texts(row: dict[str, Any]) -> dict[str, Any] | None:
        return {"id": row["id"] * 10, "text": row["text"]} if row["text"] else None

    assert run(MapRowSpec(INPUT, keep_texts, INPUT)).to_pydict() == {"id": [10, 30], "text": ["a b", "c"]}


def test_flat_map_makes_rows_in_order_with_a_schema_given_as_text() -> None:
    spec = FlatMapSpec(INPUT, words, "word string, n long")  # type: ignore[arg-type]
    assert spec.outputs == (pa.schema({"word": pa.string(), "n": pa.int64()}),)
    assert run(spec).to_pydict() == {"word": ["a", "b", "c"], "n": [1, 1, 3]}


def test_flat_map_takes_generators_and_cuts_what_is_too_much() -> None:
    def count(row: dict[str, Any]) -> Iterator[dict[str, int]]:
        yield from ({"n": n} for n in range(70_000 if row["id"] == 1 else 0))

    outputs = FlatMapSpec(INPUT, count, pa.schema({"n": pa.int64()})).build().process(0, ROWS)
    assert [batch.num_rows for _, batch in outputs] == [65_536, 4_464]
    assert outputs[1][1].column("n")[-1].as_py() == 69_999


def test_missing_key_is_null() -> None:
    spec = MapRowSpec(INPUT, lambda row: {"id": row["id"]}, INPUT)
    assert run(spec).to_pydict() == {"id": [1, 2, 3], "text": [None] * 3}


def test_values_of_every_type_come_back_as_they_went() -> None:
    batch = pa.record_batch(
        {
            "ts": pa.array([dt.datetime(1931, 1, 1, 0, 0, 0, 1)], pa.timestamp("us")),
            "tz": pa.array([-1], pa.timestamp("us", "Europe/Berlin")),
            "day": pa.array([dt.date(1900, 2, 28)]),
            "l": [[1, None]],
            "st": [{"x": 1.5}],
            "m": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "dec": pa.array([1], pa.decimal128(9, 2)),
            "bin": [b"\x00\xff"],
            "nan": [float("inf")],
        }
    )
    assert run(MapRowSpec(batch.schema, lambda row: row, batch.schema), batch).to_batches()[0] == batch


def test_failing_row_function_tells_row_and_shows_only_the_users_frames() -> None:
    with pytest.raises(UserCodeError, match="row 1 of the batch") as caught:
        run(MapRowSpec(INPUT, fail_on_two, pa.schema({"inverse": pa.float64()})))
    text = str(caught.value)
    assert caught.value.row == 1
    assert "'fail_on_two' raised ZeroDivisionError" in text
    assert "{id: 2, text: None}" in text
    assert "in fail_on_two" in text
    assert 'return {"inverse": 1 / (2 - row["id"])}' in text
    assert "cutwater/operators/stateless/functions.py" not in text
    assert text.endswith("ZeroDivisionError: division by zero")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_failing_generator_tells_its_row() -> None:
    def late_failure(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"n": 1}
        raise KeyError(row["id"])

    with pytest.raises(UserCodeError, match="row 0 of the batch") as caught:
        run(FlatMapSpec(INPUT, late_failure, pa.schema({"n": pa.int64()})))
    assert caught.value.row == 0


def test_failing_batch_function_shows_its_traceback() -> None:
    def broken(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.select(["nope"])

    with pytest.raises(UserCodeError, match="in broken"):
        run(MapBatchesSpec(INPUT, broken, INPUT))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda batch: batch.select(["id"]), "has no attribute 'select'"),
        (next, "returned RecordBatch instead of an iterable of batches"),
        (lambda batches: 5, "returned int instead of an iterable of batches"),
    ],
)
def test_a_function_of_one_batch_is_told_of_the_iterator(function: Any, message: str) -> None:
    with pytest.raises(UserCodeError, match=message) as caught:
        run(MapBatchesSpec(INPUT, function, INPUT))
    assert caught.value.hint.startswith("It gets an iterator of batches")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"id": 1, "txet": "a"}, "undeclared columns 'txet'"),
        ({"id": "one"}, "made 'one' for column 'id' of type int64"),
        ({"id": 2**70}, "for column 'id' of type int64"),
        ({"id": 1.5}, "made 1.5 for column 'id'"),
        ({"id": 1, "text": object()}, "for column 'text' of type string"),
        ({"id": None}, "made null for column 'id'"),
        ({}, "made null for column 'id'"),
        ([("id", 1)], "made list instead of a dict"),
    ],
)
def test_row_that_does_not_fit_is_named(result: Any, message: str) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])
    spec = MapRowSpec(INPUT, lambda row: result if row["id"] == 3 else {"id": 5}, schema)
    with pytest.raises(UserCodeError, match=message) as caught:
        run(spec)
    assert caught.value.row == 2
    assert "id: 3" in str(caught.value)


@pytest.mark.parametrize("result", [{"id": 1}, "text", None, 7])
def test_flat_map_that_returns_no_rows_of_dicts_is_the_users_error(result: Any) -> None:
    with pytest.raises(UserCodeError) as caught:
        run(FlatMapSpec(INPUT, lambda _: result, INPUT))
    assert caught.value.row == 0


def test_row_without_a_python_value_is_a_data_error() -> None:
    batch = pa.record_batch({"t": pa.array([0, 2**62], pa.timestamp("us"))})
    with pytest.raises(DataError, match="row 1 of the batch") as caught:
        run(MapRowSpec(batch.schema, lambda row: row, batch.schema), batch)
    assert caught.value.row == 1


def test_error_keeps_its_row_over_pickling() -> None:
    with pytest.raises(UserCodeError) as caught:
        run(MapRowSpec(INPUT, fail_on_two, pa.schema({"inverse": pa.float64()})))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.row, str(again)) == (1, str(caught.value))


def test_ten_megabyte_text_passes_and_is_shortened_in_messages() -> None:
    batch = pa.record_batch({"id": [1, 2], "text": ["x" * 10_000_000, "y" * 10_000_000]}, schema=INPUT)
    assert run(MapRowSpec(INPUT, lambda row: row, INPUT), batch).to_batches()[0] == batch
    with pytest.raises(UserCodeError) as caught:
        run(MapRowSpec(INPUT, fail_on_two, pa.schema({"inverse": pa.float64()})), batch)
    assert len(str(caught.value)) < 2000


def test_empty_batches_make_nothing() -> None:
    empty = ROWS.slice(0, 0)
    for spec in (
        MapBatchesSpec(INPUT, double, INPUT),
        FlatMapSpec(INPUT, words, INPUT),
        MapRowSpec(INPUT, dict, INPUT),
    ):
        assert spec.build().process(0, empty) == []


@pytest.mark.parametrize("spec", [MapBatchesSpec, FlatMapSpec, MapRowSpec])
@pytest.mark.parametrize(
    ("fn", "schema", "message"),
    [
        (None, INPUT, "function is needed"),
        (print, pa.schema([]), "no columns"),
        (print, pa.schema([("a", pa.int8()), ("a", pa.int8())]), "twice"),
        (print, "a wrong", "unknown type 'wrong'"),
        (print, {"a": "int"}, "a schema is needed, got dict"),
    ],
)
def test_unsuitable_function_or_schema_is_refused_when_built(spec: Any, fn: Any, schema: Any, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        spec(INPUT, fn, schema)


def test_long_row_is_cut_in_messages() -> None:
    assert len(describe_row({f"column{i}": i for i in range(1000)})) < 420


@pytest.mark.parametrize(
    ("value", "kind", "loses"),
    [
        (1.5, pa.int64(), True),
        (2.0, pa.int64(), False),
        (float("nan"), pa.int64(), True),
        (Decimal("1.5"), pa.int8(), True),
        (np.float32(1.5), pa.int64(), True),
        (np.int32(3), pa.int64(), False),
        (1.5, pa.timestamp("us"), True),
        (dt.datetime(2020, 1, 1, 13), pa.date32(), True),
        (dt.datetime(2020, 1, 1), pa.date32(), False),
        (dt.datetime(2020, 1, 1, 0, 0, 0, 1), pa.timestamp("ms"), True),
        (dt.datetime(2020, 1, 1, 0, 0, 0, 1), pa.timestamp("us", "UTC"), False),
        (dt.time(0, 0, 0, 1), pa.time32("ms"), True),
        (dt.timedelta(microseconds=1), pa.duration("s"), True),
        ([1, 1.5], pa.list_(pa.int64()), True),
        ({"x": 1, "y": 2}, pa.struct({"x": pa.int64()}), True),
        ({"x": 1.0}, pa.struct({"x": pa.int64()}), False),
        ((0.5,), pa.struct({"x": pa.int64()}), True),
        ([("k", 0.5)], pa.map_(pa.string(), pa.int64()), True),
        ([("k", 1)], pa.map_(pa.string(), pa.int64()), False),
        (1.5, pa.float32(), False),
        (None, pa.int64(), False),
    ],
)
def test_value_that_would_be_shortened_silently_is_found(value: Any, kind: pa.DataType, loses: bool) -> None:
    assert loses_value([None, value], kind) == (1 if loses else None)


@pytest.mark.parametrize("at", [None, 3, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 1])
@pytest.mark.parametrize("what", ["raises", "undeclared"])
@pytest.mark.parametrize("spec", [MapRowSpec, FlatMapSpec])
def test_rows_of_a_large_batch_are_named_by_their_place(spec: Any, what: str, at: int | None) -> None:
    def function(row: dict[str, Any]) -> Any:
        made: Any = {"id": row["id"]}
        if row["id"] == at:
            made = {"id": 1 // 0} if what == "raises" else {"more": 1}
        return made if spec is MapRowSpec else [made] * (row["id"] % 3 or 1)

    count = 2 * ROWS_AT_ONCE + 5
    rows = pa.record_batch({"id": range(count)})
    step = spec(rows.schema, function, "id long").build()
    if at is None:
        ((_, made),) = step.process(0, rows)
        assert made.column("id").to_pylist() == [
            n for n in range(count) for _ in range(1 if spec is MapRowSpec else n % 3 or 1)
        ]
        return
    with pytest.raises(UserCodeError, match=f"{{id: {at}}}") as caught:
        step.process(0, rows)
    assert caught.value.row == at


@pytest.mark.parametrize("spec", [MapRowSpec, FlatMapSpec])
def test_the_first_wrong_row_is_told_also_if_a_later_call_fails(spec: Any) -> None:
    def wrong_then_failing(row: dict[str, Any]) -> Any:
        made = {"id": 10 // (3 - row["id"]), **({"more": 1} if row["id"] == 2 else {})}
        return made if spec is MapRowSpec else [made]

    step = spec(INPUT, wrong_then_failing, "id long").build()
    with pytest.raises(UserCodeError, match="undeclared columns 'more' from row 1 of the batch") as caught:
        step.process(0, ROWS)
    assert caught.value.row == 1
    assert [out.to_pylist() for _, out in step.process(0, ROWS.slice(0, 1))] == [[{"id": 5}]]  # nothing is left of it
