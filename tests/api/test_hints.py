"""Programs that people write on their first day: they work, or the message says what to write instead."""

from __future__ import annotations

import datetime as dt

import polars as pl
import pytest

import cutwater as cw
from cutwater.errors import BuildError

HOURLY = cw.tumbling("1h")


def rows(*given, **options):
    return cw.Dataflow("m").read("m", cw.memory(list(given), **options))


class TestColumnsNamedLikeParameters:
    """An id is given by its place, so that a column may have any name."""

    def test_a_column_may_be_named_id_self_or_mapping(self):
        stream = rows({"id": 1, "mapping": 2})
        assert stream.with_columns("a", id=pl.col("id") + 1, self=pl.col("id")).schema.names == [
            "id",
            "mapping",
            "self",
        ]
        assert stream.select("b", id=pl.col("mapping")).schema.names == ["id"]
        assert stream.rename("c", id="key", mapping="value").schema.names == ["key", "value"]
        assert stream.rename("d", {"id": "self"}).schema.names == ["self", "mapping"]
        keyed = stream.key_by("mapping")
        assert keyed.aggregate("e", id=cw.max("id"), self=cw.count()).schema.names == ["mapping", "id", "self"]
        whole = keyed.window("w", cw.global_window())
        assert whole.aggregate("f", id=cw.max("id"), unnamed=cw.count()).schema.names == ["mapping", "id", "unnamed"]

    @pytest.mark.parametrize(
        "make",
        [
            lambda s: s.with_columns("s", parallelism=pl.col("v")),
            lambda s: s.select("s", parallelism=pl.col("v")),
            lambda s: s.rename("s", parallelism="v"),
            lambda s: s.key_by("v").aggregate("s", parallelism=cw.max("v")),
            lambda s: s.key_by("v").window("w", cw.global_window()).aggregate("s", parallelism=cw.max("v")),
        ],
    )
    def test_one_named_parallelism_is_refused_with_another_way(self, make):
        with pytest.raises(BuildError, match=r"parallelism must be .*alias\('parallelism'\).*rename\('id', ") as caught:
            make(rows({"parallelism": 1, "v": 2}))
        assert caught.value.step == "s"

    def test_the_other_ways_work(self):
        stream = rows({"parallelism": 1, "v": 2})
        assert stream.rename("r", {"parallelism": "p"}).schema.names == ["p", "v"]
        assert stream.select("s", pl.col("v").alias("parallelism")).schema.names == ["parallelism"]
        made = stream.key_by("v").aggregate("a", p=cw.max("parallelism")).rename("b", {"p": "parallelism"})
        assert made.schema.names == ["v", "parallelism"]


def test_columns_are_taken_one_by_one_or_as_a_list():
    stream = rows({"k": 1, "v": 2, "w": 3})
    assert stream.key_by(["k", "v"]).keys == stream.key_by("k", "v").keys == ("k", "v")
    assert stream.key_by(("k", "v"), nulls="key").keys == ("k", "v")
    assert stream.drop("d", ["k", "v"]).schema.names == ["w"]
    assert stream.select("s", ["k", pl.col("v") * 2]).schema.names == ["k", "v"]
    assert stream.with_columns("c", [pl.col("k").alias("x"), pl.col("v").alias("y")]).schema.names[-2:] == ["x", "y"]
    with pytest.raises(BuildError, match="no such key column 'x'"):
        stream.key_by(["k", "x"])


class TestTimesOfTexts:
    @pytest.mark.parametrize(
        "guess",
        [
            pl.col("s").str.to_datetime(),
            pl.col("s").str.to_date(),
            pl.col("s").str.to_time(),
            pl.col("s").str.strptime(pl.Datetime),
            pl.col("s").str.to_datetime(strict=False).dt.hour() + 1,
        ],
    )
    def test_a_format_that_is_guessed_is_refused_as_such(self, guess):
        with pytest.raises(BuildError, match=r"guesses the format .*Say the format: .*%Y-%m-%d %H:%M:%S") as caught:
            rows({"s": "2026-01-01"}).with_columns("t", t=guess)
        assert "aggregate" not in str(caught.value)

    def test_a_format_that_is_said_is_taken(self):
        made = rows({"s": "2026-01-01"}).with_columns("t", t=pl.col("s").str.to_date("%Y-%m-%d"))
        assert str(made.schema.field("t").type) == "date32[day]"

    def test_others_still_look_across_rows(self):
        shifted = pl.col("s").str.to_date("%Y-%m-%d").shift(1)
        with pytest.raises(BuildError, match=r"looks across the rows.*aggregate"):
            rows({"s": "2026-01-01"}).with_columns("t", t=shifted)


NAIVE, ZONED = dt.datetime(2026, 1, 1), dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class TestTypesThatDoNotMeet:
    @pytest.mark.parametrize(
        ("row", "expression", "words"),
        [
            ({"s": "a", "n": 1}, pl.col("s") + pl.col("n"), ["s string, n int64", "pl.col('s').cast(pl.Int64)"]),
            ({"s": "a", "n": 1}, pl.col("s") > 3, ["on s string:", "cannot compare", "pl.col('s').cast"]),
            ({"s": "a", "n": 1}, pl.col("n").str.len_chars(), ["on n int64:"]),
            ({"t": {"a": 1}}, pl.col("t").struct.field("b"), ["struct<a: int64>", "has no field 'b'"]),
            ({"t": ZONED}, pl.col("t") > NAIVE, ["tz=UTC", "tzinfo=timezone.utc", "replace_time_zone"]),
            ({"t": NAIVE}, pl.col("t") > ZONED, ["timestamp[us]:", "replace_time_zone('UTC')"]),
            ({"t": NAIVE}, pl.col("t") > "2026-01-01", ["Write a time as a time: datetime(2026, 1, 1)"]),
        ],
    )
    def test_the_message_names_columns_and_types_and_shows_no_plan(self, row, expression, words):
        with pytest.raises(BuildError) as caught:
            rows(row).with_columns("c", x=expression)
        text = str(caught.value)
        assert text.startswith("step 'c': expression ")
        for word in words:
            assert word in text
        for dump in ("plan", "PROJECT", "context stack", "occurred in", "\n"):
            assert dump not in text

    def test_only_the_columns_that_it_reads_are_listed(self):
        wide = {f"c{i}": i for i in range(50)}
        with pytest.raises(BuildError) as caught:
            rows({**wide, "s": "a"}).filter("f", pl.col("s") > 3)
        assert "c1 " not in str(caught.value)

    def test_sql_text_is_told_from_a_constant(self):
        stream = rows({"n": 1})
        with pytest.raises(BuildError, match=r"pl.sql_expr\('n > 1'\)"):
            stream.filter("f", "n > 1")  # pyright: ignore[reportArgumentType]
        assert stream.filter("f", pl.sql_expr("n > 1")).schema == stream.schema


class TestMethodsOfOtherStreams:
    @pytest.mark.parametrize("name", ["aggregate", "window", "top"])
    def test_without_key_the_error_is_ours_and_says_how_to_have_one(self, name):
        stream = rows({"k": 1})
        assert not hasattr(stream, name)
        with pytest.raises(
            cw.CutwaterError, match=rf"step 'm': {name} needs a key.*one key: .with_columns\('id', ever"
        ):
            getattr(stream, name)("a")

    def test_what_it_says_about_one_result_over_all_works(self):
        stream = rows({"k": 1}).with_columns("id", everything=pl.lit(0))
        assert stream.key_by("everything").aggregate("n", n=cw.count()).schema.names == ["everything", "n"]

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("dropDuplicates", "deduplicate"),
            ("agg", "aggregate"),
            ("withColumnRenamed", "rename"),
            ("foreachBatch", "foreach_batch"),
            ("show", r"cw.console\(\)"),
        ],
    )
    def test_names_of_spark_lead_to_ours(self, name, words):
        with pytest.raises(cw.BuildError, match=rf"no {name!r}. Write .*{words}"):
            getattr(rows({"k": 1}), name)

    def test_windows_alone_are_no_stream(self):
        windows = rows({"k": 1}).key_by("k").window("w", cw.global_window())
        with pytest.raises(BuildError, match=r"no 'write': they are no stream yet.*\.aggregate\('id'"):
            windows.write("out", cw.discard())  # pyright: ignore[reportAttributeAccessIssue]
        assert not hasattr(windows, "write")


@pytest.mark.parametrize(
    "use",
    [
        lambda a, b: a.union("u", b),
        lambda a, b: a.key_by("at").join("j", b.key_by("at"), within=(0, 0)),
        lambda a, b: a.key_by("k").join("j", b.key_by("k"), within=(0, 0)),
    ],
)
def test_times_with_and_without_zone_are_told_apart_with_what_to_do(use):
    flow = cw.Dataflow("zones")
    naive = flow.read("naive", cw.memory([], schema="k long, at timestamp_ntz"), event_time="at")
    zoned = flow.read("zoned", cw.memory([], schema="k long, at timestamp"), event_time="at")
    with pytest.raises(BuildError, match=r"One is an instant, .*schema='..., at timestamp'.*replace_time_zone"):
        use(naive, zoned)
    made = naive.with_columns("z", at=pl.col("at").dt.replace_time_zone("UTC")).with_event_time("at")
    use(made, zoned)
