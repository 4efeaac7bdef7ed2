"""Expressions over texts that come as dictionaries: each value is looked at once, and the rows are the same."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.errors import CutwaterError
from cutwater.operators.stateless.expressions import ExpressionSpec, Filter, Select, Stage, WithColumns
from cutwater.runtime.channels.texts import plain_rows

SCHEMA = pa.schema({"kind": pa.string(), "number": pa.string(), "n": pa.int64()})
KINDS = ["view", "click", "buy", "", None]
NUMBERS = ["1", "22", "333", None]

STAGES: list[tuple[Stage, ...]] = [
    (Filter(pl.col("kind") != "view"),),
    (Filter(pl.col("kind").is_null()),),
    (Filter(pl.col("kind").is_in(["buy", "click"])),),
    (Filter(~pl.col("kind").is_in(["buy"])), Filter(pl.col("number") == "22")),
    (Filter((pl.col("kind") == "view") & (pl.col("n") > 3)),),
    (Filter(pl.lit(True)),),
    (WithColumns([pl.col("number").cast(pl.Int64).alias("value")]), Filter(pl.col("value") > 1)),
    (Select(["kind", pl.col("kind").str.len_chars().alias("length"), pl.col("number").fill_null("0")]),),
    (Filter(pl.col("n") % 2 == 0), WithColumns([(pl.col("kind") + "/" + pl.col("number")).alias("both")])),
    (Select([pl.col("kind").alias("other"), "n"]), Filter(pl.col("other").str.starts_with("v"))),
]


def as_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [c.dictionary_encode() if c.type == pa.string() else c for c in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


rows = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(NUMBERS), st.integers(0, 9)), max_size=40)


@settings(deadline=None, max_examples=300)
@given(stages=st.sampled_from(STAGES), rows=rows)
def test_the_rows_are_those_of_plain_texts(
    stages: tuple[Stage, ...], rows: list[tuple[str | None, str | None, int]]
) -> None:
    columns: list[list[object]] = [list(c) for c in zip(*rows, strict=True)] if rows else [[], [], []]
    batch = pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
    operator = ExpressionSpec(SCHEMA, stages).build()
    expected, found = operator.process(0, batch), operator.process(0, as_dictionaries(batch))
    assert len(found) == len(expected)
    for (_, one), (_, other) in zip(expected, found, strict=True):
        assert one.schema == other.schema
        assert one.equals(other)


@settings(deadline=None, max_examples=100)
@given(stages=st.sampled_from(STAGES), rows=rows)
def test_what_passes_on_dictionaries_gives_the_same_rows(
    stages: tuple[Stage, ...], rows: list[tuple[str | None, str | None, int]]
) -> None:
    columns: list[list[object]] = [list(c) for c in zip(*rows, strict=True)] if rows else [[], [], []]
    batch = pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
    spec = ExpressionSpec(SCHEMA, stages)
    expected = spec.build().process(0, batch)
    found = spec.passing_dictionaries().build().process(0, as_dictionaries(batch))
    assert [plain_rows(rows, spec.outputs[0]) for _, rows in found] == [rows for _, rows in expected]


def test_a_text_that_stays_as_it_came_leaves_as_a_dictionary() -> None:
    stages = (Filter(pl.col("kind") != "view"), WithColumns([(pl.col("number") + "0").alias("number")]))
    operator = ExpressionSpec(SCHEMA, stages).passing_dictionaries().build()
    ((_, rows),) = operator.process(0, as_dictionaries(repeated(["view", "buy", "click"])))
    assert [str(kind) for kind in rows.schema.types] == [
        "dictionary<values=string, indices=int32, ordered=0>",
        "string",
        "int64",
    ]


def repeated(values: list[str | None]) -> pa.RecordBatch:
    texts = values * 20
    return pa.record_batch([texts, texts, range(len(texts))], schema=SCHEMA)


def test_each_value_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    real = pl.DataFrame.select

    def select(frame: pl.DataFrame, *exprs: pl.Expr) -> pl.DataFrame:
        looked.append(frame.height)
        return real(frame, *exprs)

    operator = ExpressionSpec(SCHEMA, (Filter(pl.col("kind") != "view"),)).build()
    monkeypatch.setattr(pl.DataFrame, "select", select)
    ((_, kept),) = operator.process(0, as_dictionaries(repeated(["view", "buy", None])))
    assert looked == [3]  # two values and null, not sixty rows
    assert kept.num_rows == 20


def test_a_value_that_no_row_has_fails_nobody() -> None:
    batch = as_dictionaries(repeated(["1", "2", "x"]))
    good = batch.filter(pc.not_equal(batch.column("number"), "x"))
    operator = ExpressionSpec(SCHEMA, (WithColumns([pl.col("number").cast(pl.Int64).alias("n")]),)).build()
    ((_, made),) = operator.process(0, good)
    assert made.column("n").to_pylist() == [1, 2] * 20
    with pytest.raises(CutwaterError, match=r"failed on row 2 .*'x'"):
        operator.process(0, batch)


def test_places_outside_of_the_dictionary_are_looked_at_row_by_row():
    """A damaged file: nothing outside of the dictionary is read."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 20, pa.int32()), ["view", "buy"])
    broken = pa.DictionaryArray.from_buffers(
        texts.type, 40, [None, pa.py_buffer(b"\\xff\\xff\\xff\\x7f" * 40)], texts.dictionary
    )
    batch = pa.RecordBatch.from_arrays([broken, broken, pa.array(range(40))], names=SCHEMA.names)
    with pytest.raises((CutwaterError, pa.ArrowException)):
        ExpressionSpec(SCHEMA, (Filter(pl.col("kind") != "view"),)).build().process(0, batch)


def test_results_for_one_dictionary_are_not_taken_for_another():
    operator = ExpressionSpec(SCHEMA, (Filter(pl.col("kind") != "view"),)).build()
    for values in (["view", "buy"], ["buy", "view"], ["view", "buy", None], ["buy"]):
        batch = repeated(list(values))
        (found,) = operator.process(0, as_dictionaries(batch))
        assert found[1].equals(batch.filter(pc.not_equal(batch["kind"], "view").fill_null(False)))


@pytest.mark.parametrize("share", [1, 3, 10])
def test_every_type_is_moved_as_arrow_moves_it(share: int):
    rows = 60
    columns = {
        "bits": pa.array([n % 3 == 0 for n in range(rows)]),
        "bytes": pa.array([n % 100 for n in range(rows)], pa.int8()),
        "halves": pa.array([n / 7 for n in range(rows)], pa.float32()),
        "times": pa.array(range(rows), pa.timestamp("ns", "UTC")),
        "dates": pa.array(range(rows), pa.date32()),
        "texts": pa.array([f"text {n}" for n in range(rows)]),
        "lists": pa.array([[n] * (n % 3) for n in range(rows)]),
        "holes": pa.array([None if n % 4 else n for n in range(rows)], pa.int64()),
        "decimals": pa.array(range(rows), pa.decimal128(20, 2)),
        "n": pa.array(range(rows)),
    }
    batch = pa.record_batch(columns).slice(5)
    (found,) = ExpressionSpec(batch.schema, (Filter(pl.col("n") % share == 0),)).build().process(0, batch)
    kept = [n for n in range(5, rows) if n % share == 0]
    assert found[1].equals(pa.record_batch(columns).take(pa.array(kept)))
