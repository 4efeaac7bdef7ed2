"""What expression steps make of rows, against Polars itself."""

from __future__ import annotations

import datetime as dt
import pickle
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from cutwater.errors import BuildError, DataError, UserCodeError
from cutwater.operators.stateless.expressions import Drop, ExpressionSpec, Filter, Rename, Select, Stage, WithColumns

c = pl.col


def flights(rows: int, seed: int = 0) -> pa.RecordBatch:
    rng = np.random.default_rng(seed)
    micros = rng.integers(-(10**15), 10**15, rows)
    return pa.record_batch(
        {
            "id": pa.array(np.arange(rows)),
            "delay": pa.array(rng.normal(0, 30, rows), mask=rng.random(rows) < 0.1),
            "origin": pa.array(rng.choice(["JFK", "LGA", "EWR", ""], rows), pa.string(), mask=rng.random(rows) < 0.1),
            "at": pa.array(micros, pa.int64()).cast(pa.timestamp("us", "America/New_York")),
            "second": pa.array(micros // 10**6, pa.int64()).cast(pa.timestamp("s")),
            "tags": pa.array([None if i % 7 == 0 else ["x"] * (i % 3) for i in range(rows)], pa.list_(pa.string())),
            "counts": pa.array([[("a", i)] for i in range(rows)], pa.map_(pa.string(), pa.int64())),
            "big": pa.array([f"n{i}" for i in range(rows)], pa.large_string()),
        }
    )


PIPELINES: dict[str, tuple[Stage, ...]] = {
    "filter": (Filter(c("delay") > 15),),
    "filter nothing through": (Filter(c("delay") > 1e9),),
    "filter all through": (Filter(c("id") >= 0),),
    "filters on columns that go away": (Filter(c("delay") > 0), Filter(c("id") % 2 == 0), Select(["origin"])),
    "constant filter": (Filter(pl.lit(True)),),
    "select names": (Select(["id", "at"]),),
    "select computed": (Select(["origin", (c("delay") * 2).alias("twice"), c("id").alias("key")]),),
    "only a constant": (Select([pl.lit(7).alias("seven")]),),
    "constants beside": (WithColumns([pl.lit("x").alias("x"), pl.lit(1.5).alias("f")]),),
    "replace in place": (WithColumns([c("delay").fill_null(0.0), c("origin").str.to_lowercase()]),),
    "swap": (WithColumns([c("id").cast(pl.Float64).alias("delay"), c("delay").cast(pl.Int64).alias("id")]),),
    "swap names": (Rename({"id": "delay", "delay": "id"}),),
    "swap by with_columns": (WithColumns([c("id").alias("second"), c("second").alias("id")]),),
    "drop": (Drop(["tags", "origin"]),),
    "many": (Select([(c("id") + i).alias(f"c{i}") for i in range(12)]),),
    "many with wildcard": (
        Select(
            [c("delay") * i for i in ()]
            + [(c("at").dt.year() + i).alias(f"y{i}") for i in range(7)]
            + [pl.selectors.float() * 3]
        ),
    ),
    "wildcard": (Select([pl.selectors.numeric() * 2]),),
    "long": (
        Filter(c("delay").is_not_null()),
        WithColumns([(c("delay") / 60).alias("hours"), c("at").dt.hour().alias("hour")]),
        Rename({"origin": "from"}),
        Filter((c("hours") > 0.1) | (c("from") == "JFK")),
        Drop(["delay"]),
        Select([c("hours").round(2), "from", "hour", c("counts"), c("second").alias("s2"), "big"]),
        Filter(c("hour") % 2 == 0),
    ),
    "nested results": (Select([pl.struct("id", "origin").alias("p"), c("tags").list.concat(c("origin")).alias("t")]),),
    "category decoded": (Select([c("origin").cast(pl.Categorical).alias("cat"), c("id")]),),
    "durations": (Select([(c("at") - c("at").dt.truncate("1d")).alias("since"), c("at").dt.date().alias("day")]),),
    "python": (WithColumns([c("id").map_elements(lambda v: (v * 3,)[0], return_dtype=pl.Int64).alias("t")]),),
}


def oracle(batch: pa.RecordBatch, stages: tuple[Stage, ...]) -> pl.DataFrame:
    """The stages by plain Polars, on the whole."""
    frame = pl.DataFrame(batch)
    for stage in stages:
        if isinstance(stage, Filter):
            frame = frame.filter(stage.expr)
        elif isinstance(stage, Select):
            frame = (
                frame.with_columns(pl.lit(0).alias("__n"))
                .select(*[(e if isinstance(e, pl.Expr) else c(e)) for e in stage.exprs], c("__n"))
                .drop("__n")
                if not any(e.meta.has_multiple_outputs() for e in stage.exprs if isinstance(e, pl.Expr))
                else frame.select(stage.exprs)
            )
        elif isinstance(stage, WithColumns):
            frame = frame.with_columns(stage.exprs)
        elif isinstance(stage, Drop):
            frame = frame.drop(stage.names)
        else:
            frame = frame.rename(dict(stage.mapping))
    return frame


def run(spec: ExpressionSpec, batch: pa.RecordBatch, cut: int | None = None) -> pa.Table:
    operator = spec.build()
    cut = cut or max(batch.num_rows, 1)
    outputs: list[pa.RecordBatch] = []
    for at in range(0, batch.num_rows, cut):
        outputs += [out for _, out in operator.process(0, batch.slice(at, cut))]
    return pa.Table.from_batches(outputs, spec.outputs[0])  # refuses a batch of another schema


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("cut", [None, 1, 7])
def test_stages_give_what_polars_gives_however_rows_are_cut(name: str, cut: int | None) -> None:
    batch, stages = flights(100), PIPELINES[name]
    got = run(ExpressionSpec(batch.schema, stages), batch, cut)
    expected = oracle(batch, stages)
    assert got.column_names == expected.columns
    assert pl.DataFrame(got).equals(
        expected.with_columns(pl.selectors.categorical().cast(pl.String)), null_equal=True
    ), (got, expected)


def test_untouched_columns_keep_their_exact_type_and_field() -> None:
    fields = [f.with_metadata({"note": "n"}).with_nullable(f.name != "id") for f in flights(1).schema]
    schema = pa.schema(fields)
    batch = pa.RecordBatch.from_arrays(flights(50).columns, schema=schema)
    spec = ExpressionSpec(
        schema, (Filter(c("id") % 2 == 0), WithColumns([(c("id") * 2).alias("x")]), Rename({"big": "b"}))
    )
    out = spec.outputs[0]
    assert out.field("b") == schema.field("big").with_name("b")
    for name in ("id", "at", "second", "counts", "tags"):
        assert out.field(name).equals(schema.field(name), check_metadata=True)
    assert run(spec, batch).column("counts").to_pylist() == [[("a", i)] for i in range(0, 50, 2)]


@pytest.mark.parametrize(
    ("expr", "type"),
    [
        (c("origin").str.to_uppercase(), pa.string()),
        (c("big").str.to_uppercase(), pa.string()),
        (c("origin").cast(pl.Categorical), pa.string()),
        (c("origin").cast(pl.Enum(["JFK", "LGA", "EWR", ""])), pa.string()),
        (c("tags").list.head(1), pa.list_(pa.string())),
        (c("origin").str.encode("hex").cast(pl.Binary), pa.binary()),
        (c("at").dt.offset_by("1d"), pa.timestamp("us", "America/New_York")),
        (c("at").dt.convert_time_zone("UTC"), pa.timestamp("us", "UTC")),
        (c("at").dt.cast_time_unit("ns"), pa.timestamp("ns", "America/New_York")),
        (c("second") + pl.duration(milliseconds=5), pa.timestamp("ms")),
        (c("id").cast(pl.Decimal(20, 2)), pa.decimal128(20, 2)),
        (pl.struct(c("origin").alias("o")), pa.struct({"o": pa.string()})),
        (pl.lit(1), pa.int32()),
    ],
)
def test_computed_columns_have_plain_arrow_types(expr: pl.Expr, type: pa.DataType) -> None:
    batch = flights(20)
    spec = ExpressionSpec(batch.schema, (Select([expr.alias("x")]),))
    assert spec.outputs[0].field("x").type == type
    run(spec, batch)


def test_then_fuses_neighbours_into_the_same_result() -> None:
    batch = flights(100)
    first = ExpressionSpec(batch.schema, (Filter(c("delay") > 0), WithColumns([(c("delay") * 2).alias("twice")])))
    second = ExpressionSpec(first.outputs[0], (Select(["twice", "origin"]), Filter(c("origin") == "JFK")))
    fused = first.fused(second)
    assert fused.outputs == second.outputs
    assert run(fused, batch) == run(second, pa.concat_batches(run(first, batch).to_batches()))
    with pytest.raises(BuildError, match="different schemas"):
        second.fused(first)


def test_spec_survives_pickling() -> None:
    """Spark ships the spec with the worker's code."""
    batch = flights(20)
    spec = ExpressionSpec(batch.schema, PIPELINES["long"])
    assert run(pickle.loads(pickle.dumps(spec)), batch) == run(spec, batch)


def test_empty_batches_make_nothing() -> None:
    batch = flights(0)
    assert ExpressionSpec(batch.schema, PIPELINES["long"]).build().process(0, batch) == []


def test_ten_megabyte_text_passes() -> None:
    batch = pa.record_batch({"s": ["x" * 10_000_000, "y"]})
    spec = ExpressionSpec(batch.schema, (WithColumns([c("s").str.len_bytes().alias("n")]), Filter(c("n") > 1)))
    got = run(spec, batch)
    assert got.column("n").to_pylist() == [10_000_000]
    assert got.column("s")[0].as_py() == "x" * 10_000_000


def test_failing_row_is_named_with_polars_message_and_contents() -> None:
    batch = pa.record_batch({"k": list(range(1000)), "s": ["1"] * 700 + ["seven"] + ["1"] * 299})
    operator = ExpressionSpec(batch.schema, (Filter(c("k") >= 0), Select([c("s").cast(pl.Int64)]))).build()
    with pytest.raises(DataError, match="row 700 of the batch") as caught:
        operator.process(0, batch)
    assert caught.value.row == 700
    assert "k: 700, s: 'seven'" in str(caught.value)
    assert "conversion from `str` to `i64` failed" in str(caught.value)


def test_failing_python_function_is_the_users_error() -> None:
    batch = pa.record_batch({"k": [5, 3, 0, 1]})
    expr = c("k").map_elements({3: 1, 5: 2}.__getitem__, return_dtype=pl.Int64)
    operator = ExpressionSpec(batch.schema, (Select([expr]),)).build()
    with pytest.raises(UserCodeError, match="KeyError") as caught:
        operator.process(0, batch)
    assert caught.value.row == 2


def test_dates_before_1970_keep_their_value() -> None:
    moment = dt.datetime(1931, 5, 1, 12, 0, 0, 123)
    batch = pa.record_batch({"t": pa.array([moment], pa.timestamp("us"))})
    got: list[Any] = (
        run(ExpressionSpec(batch.schema, (Select([c("t").dt.offset_by("1us")]),)), batch).column("t").to_pylist()
    )
    assert got == [moment + dt.timedelta(microseconds=1)]
