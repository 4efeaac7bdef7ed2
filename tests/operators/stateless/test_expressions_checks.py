"""What is refused when an expression step is built, and what must not be refused."""

from __future__ import annotations

import random

import polars as pl
import pyarrow as pa
import pytest

from cutwater.errors import BuildError
from cutwater.operators.stateless.expression_checks import PROBE_ROWS, check_row_local, probe_rows
from cutwater.operators.stateless.expressions import Drop, ExpressionSpec, Filter, Rename, Select, WithColumns

SCHEMA = pa.schema(
    {
        "i": pa.int64(),
        "small": pa.int8(),
        "u": pa.uint32(),
        "d": pa.float64(),
        "flag": pa.bool_(),
        "s": pa.string(),
        "bin": pa.binary(),
        "day": pa.date32(),
        "ts": pa.timestamp("us"),
        "tz": pa.timestamp("us", "Europe/Berlin"),
        "dec": pa.decimal128(12, 2),
        "tags": pa.list_(pa.string()),
        "nums": pa.list_(pa.int64()),
        "point": pa.struct({"x": pa.float64(), "y": pa.float64()}),
        "lasts": pa.duration("ms"),
        "at": pa.time64("us"),
    }
)
c = pl.col

ACROSS_ROWS = {
    "mean": c("d") - c("d").mean(),
    "sum": c("i") / c("i").sum(),
    "max": c("i") == c("i").max(),
    "string max": c("s") == c("s").max(),
    "shift": c("i").shift(1),
    "shift inside": c("i") - c("i").shift(1).fill_null(0),
    "diff": c("d").diff(),
    "cumulative sum": c("i").cum_sum(),
    "cumulative count hidden by a far threshold": c("i").cum_count() > 1_000_000,
    "sum hidden by a far threshold": c("u").sum() > 10**15,
    "sort": c("s").sort(),
    "reverse": c("s").reverse(),
    "unique": c("s").unique(),
    "unique count": c("s").n_unique(),
    "over": c("d").sum().over("s"),
    "rank": c("d").rank(),
    "duplicates": c("s").is_duplicated(),
    "first of its kind": c("s").is_first_distinct(),
    "row number": pl.int_range(pl.len()),
    "length": pl.len(),
    "forward fill": c("i").forward_fill(),
    "interpolate": c("d").interpolate(),
    "fill with mean": c("d").fill_null(strategy="mean"),
    "any": c("flag").any(),
    "quantile": c("d") > c("d").quantile(0.9),
    "rolling": c("d").rolling_mean(3),
    "ewm": c("d").ewm_mean(com=1),
    "drop nulls": c("s").drop_nulls(),
    "explode": c("tags").explode(),
    "head": c("i").head(3),
    "implode": c("i").implode(),
    "mode": c("i").mode(),
    "gather": c("i").gather([0]),
    "filter inside": c("i").filter(c("flag")),
    "series literal": pl.lit(pl.Series([1, 2])),
    "series literal of the probes' length": c("i") + pl.lit(pl.Series(range(PROBE_ROWS))),
    "value counts": c("s").value_counts(),
    "python over a batch": c("i").map_batches(lambda s: s - s.min(), return_dtype=pl.Int64),
    "a part of when/then": pl.when(c("d") > c("d").median()).then(1).otherwise(0),
    "inside a struct": pl.struct(c("i"), c("i").cum_sum().alias("n")),
    "wildcard": pl.all().shift(1),
}
NOT_DETERMINISTIC = {
    "sample": c("i").sample(fraction=1.0, shuffle=True),
    "shuffle": c("i").shuffle(),
    "random rank": c("flag").rank("random"),
    "python random": c("i").map_elements(lambda _: random.random(), return_dtype=pl.Float64),
}
LOCAL = {
    "division by a constant, whose last bit depends on the batch": c("i") / 10,
    "arithmetic": c("i") * 2 + c("small") - c("u"),
    "overflow": c("i") * c("i"),
    "float functions": (c("d").abs() + 1).log().exp().sqrt().round(3).clip(-5, 5),
    "trigonometry": c("d").sin() + c("d").tanh() + c("d").cbrt(),
    "power": c("d") ** 2.5 + c("i").pow(2),
    "division and modulo": c("i") // 3 + c("i") % 7 + c("i") / c("d"),
    "comparison": (c("d") > 15) & c("flag") | c("s").is_null(),
    "constant": pl.lit(1),
    "constant text": pl.lit("x").alias("k"),
    "when": pl.when(c("d").is_nan()).then(None).when(c("i") > 0).then(c("d")).otherwise(0.0),
    "coalesce": pl.coalesce(c("d"), c("i"), 0),
    "fill": c("d").fill_nan(0).fill_null(1),
    "is_in list": c("s").is_in(["a", "b"]),
    "is_in series": c("i").is_in(pl.Series([3, 7])),
    "replace": c("s").replace({"a": "A"}),
    "replace strict": c("s").replace_strict({"a": 1, "b": 2}, default=None, return_dtype=pl.Int64),
    "text": c("s").str.to_uppercase().str.strip_chars().str.slice(1, 3),
    "split": c("s").str.split(",").list.len(),
    "regex": c("s").str.extract(r"(\d+)", 1).cast(pl.Int64, strict=False),
    "strict cast": c("s").cast(pl.Int64),
    "strict date": c("s").str.to_date("%Y-%m-%d"),
    "strict datetime": c("s").str.to_datetime("%Y-%m-%dT%H:%M:%S"),
    "json": c("s").str.json_path_match("$.a"),
    "concat": pl.concat_str(c("s"), pl.lit("-"), c("i")),
    "format": pl.format("{}:{}", c("s"), c("i")),
    "hash": c("s").hash(seed=1),
    "dates": c("day").dt.offset_by("1mo").dt.truncate("1w"),
    "zones": c("tz").dt.convert_time_zone("UTC").dt.hour(),
    "naive": c("tz").dt.replace_time_zone(None),
    "epoch": c("ts").dt.epoch("ms"),
    "durations": c("ts") - pl.duration(minutes=5) + c("lasts"),
    "weekday": c("ts").dt.weekday(),
    "time": c("at").dt.hour(),
    "decimal": c("dec") * 2,
    "list sum": c("nums").list.sum(),
    "list eval": c("nums").list.eval(pl.element().sum()),
    "list eval rank": c("nums").list.eval(pl.element().rank()),
    "list sort": c("nums").list.sort().list.first(),
    "list unique": c("tags").list.unique(maintain_order=True).list.join("|"),
    "struct field": c("point").struct.field("x") * 2,
    "make a struct": pl.struct("i", "s"),
    "struct of all": pl.struct(pl.all()),
    "horizontal": pl.sum_horizontal("i", "d") + pl.max_horizontal("i", "u"),
    "wildcard": pl.col("i", "u") * 2,
    "selector": pl.selectors.numeric() + 1,
    "regex names": pl.col("^(i|u)$").cast(pl.Float64),
    "python row": c("i").map_elements(lambda v: (v, v)[0], return_dtype=pl.Int64),
    "python row that fails on probes": c("s").map_elements(lambda v: (int(v),)[0], return_dtype=pl.Int64),
    "python batch, row local": c("i").map_batches(lambda s: s * 2, return_dtype=pl.Int64),
    "python that knows no probe row": c("i").map_elements({123456: 1}.__getitem__, return_dtype=pl.Int64),
    "binary": c("bin").bin.size(),
    "bits": c("i").bitwise_count_ones(),
}


@pytest.mark.parametrize("name", ACROSS_ROWS)
@pytest.mark.filterwarnings("ignore")
def test_expression_that_looks_across_rows_is_refused(name: str) -> None:
    with pytest.raises(BuildError, match=r"looks across|one value per row"):
        ExpressionSpec(SCHEMA, (WithColumns([ACROSS_ROWS[name]]),))


@pytest.mark.parametrize("name", NOT_DETERMINISTIC)
@pytest.mark.filterwarnings("ignore")
def test_expression_that_is_not_deterministic_is_refused(name: str) -> None:
    with pytest.raises(BuildError):
        ExpressionSpec(SCHEMA, (Select([NOT_DETERMINISTIC[name]]),))


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.filterwarnings("ignore")
def test_row_local_expression_is_accepted(name: str) -> None:
    spec = ExpressionSpec(SCHEMA, (Select([LOCAL[name]]),))
    assert len(spec.outputs[0]) >= 1


def test_the_trial_alone_finds_what_the_parts_do_not_tell() -> None:
    """A Python function over a batch tells nothing of itself: only the probe rows can unmask it."""
    expr = c("d").map_batches(lambda s: s - s.max(), return_dtype=pl.Float64)
    with pytest.raises(BuildError, match="alone"):
        check_row_local(expr, probe_rows(pa.schema({"d": pa.float64()})))


def test_probe_rows_hold_nulls_and_repeats_in_every_column() -> None:
    probes = probe_rows(SCHEMA)
    assert probes.columns == SCHEMA.names
    for series in probes:
        assert 0 < series.null_count() < PROBE_ROWS, series.name
        assert series.drop_nulls().n_unique() < len(series.drop_nulls()), series.name
        assert series.drop_nulls().n_unique() > 1, series.name


@pytest.mark.parametrize(
    "stage",
    [
        Filter(c("dealy") > 15),
        Filter("dealy"),
        Select(["dealy"]),
        Select([c("dealy") * 2]),
        WithColumns([(c("dealy") + 1).alias("x")]),
        Drop(["dealy"]),
        Rename({"dealy": "x"}),
    ],
)
def test_unknown_column_names_the_nearest(stage: object) -> None:
    with pytest.raises(BuildError, match="no such column 'dealy'") as caught:
        ExpressionSpec(pa.schema({"origin": pa.string(), "delay": pa.int64()}), (stage,))
    assert "Did you mean 'delay'" in str(caught.value)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (Filter(c("i")), "boolean expression"),
        (Filter(pl.col("flag", "flag2")), "boolean expression"),
        (Select([]), "at least one"),
        (Select(["i", "i"]), "two columns would be named 'i'"),
        (Select(["i", c("u").alias("i")]), "two columns would be named 'i'"),
        (WithColumns([c("u").alias("x"), (c("i") + 1).alias("x")]), "two columns would be named 'x'"),
        (Rename({"i": "u"}), "two columns would be named 'u'"),
        (Drop(["i", "u", "flag", "flag2"]), "no column is left"),
        (Select([pl.lit(None).alias("x")]), "null in every row"),
        (Select([c("i") + c("nope.x")]), "no such column"),
        (Select([c("i").str.to_uppercase()]), "does not work on i int64: .*`i64` for series with name `i`.*pl.col"),
        (Select([c("flag").dt.hour()]), "does not work on flag bool: .*for dtype `bool`"),
        (Select([42]), "Polars expression or a column name"),
        (Select([c("i").map_elements(lambda v: object(), return_dtype=pl.Object)]), "cannot travel"),
        (Select([pl.selectors.string()]), "selects no column"),
    ],
)
def test_wrong_stage_is_refused_when_built(stage: object, message: str) -> None:
    schema = pa.schema({"i": pa.int64(), "u": pa.int64(), "flag": pa.bool_(), "flag2": pa.bool_()})
    with pytest.raises(BuildError, match=message) as caught:
        ExpressionSpec(schema, (stage,))
    assert caught.value.hint or "at least one" in message


def test_stage_sees_the_columns_of_the_stage_before() -> None:
    schema = pa.schema({"a": pa.int64()})
    with pytest.raises(BuildError, match="no such column 'a'"):
        ExpressionSpec(schema, (Rename({"a": "b"}), Filter(c("a") > 1)))


def test_repeated_input_column_is_refused() -> None:
    with pytest.raises(BuildError, match="appears twice"):
        ExpressionSpec(pa.schema([("a", pa.int64()), ("a", pa.int64())]), (Filter(c("a") > 1),))


@pytest.mark.parametrize(
    "kind",
    [pa.string_view(), pa.month_day_nano_interval(), pa.run_end_encoded(pa.int32(), pa.int64()), pa.decimal256(50, 2)],
)
def test_column_that_polars_cannot_read_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(BuildError, match=r"'x' of type .* cannot pass through"):
        ExpressionSpec(pa.schema({"n": pa.int64(), "x": kind}), (Filter(c("n") > 1),))
