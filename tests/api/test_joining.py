"""Joins, enrichment and Spark DataFrames as the user writes them."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pytest

import cutwater as cw
from cutwater.errors import BuildError, CutwaterError
from cutwater.operators.enrich.table import EnrichmentTable
from cutwater.plan.graph import EdgeType, Input
from cutwater.plan.planner import make_plan
from subtask_context import Subtask

CARRIERS = pa.table({"carrier": ["AA", "UA"], "name": ["American", "United"], "delay": [1, 2]})
HOUR_US = 3_600_000_000


@pytest.fixture
def weather(flow):
    source = cw.memory([], schema="hour timestamp_ntz, origin string, wind double")
    return flow.read("weather", source, event_time="hour")


class TestJoin:
    def test_both_sides_are_exchanged_by_key(self, flow, flights, weather):
        joined = flights.key_by("origin").join("j", weather.key_by("origin"), within=("-1h", "30m"))
        assert joined.schema.names == [*flights.schema.names, "hour", "wind"]
        step = flow.graph.steps["j"]
        assert (step.spec.lower_us, step.spec.upper_us) == (-HOUR_US, HOUR_US // 2)
        assert (step.spec.left_time, step.spec.right_time) == ("scheduled", "hour")
        assert step.inputs == (
            Input("flights", 0, EdgeType.HASH, ("origin",)),
            Input("weather", 0, EdgeType.HASH, ("origin",)),
        )
        assert joined.late_left.schema == flights.schema
        assert joined.late_right.schema == weather.schema
        joined.write("out", cw.discard())
        plan = make_plan(flow, 2)
        assert [(e.type.value, e.target_step, e.target_input) for e in plan.edges] == [
            ("hash", "j", 0),
            ("hash", "j", 1),
        ]
        assert "within -1h to 30m" in flow.explain()

    def test_the_result_lies_where_the_left_key_says(self, flow, flights, weather):
        joined = flights.key_by("origin").join("j", weather.key_by("origin"), within=("-1h", "30m"))
        joined.key_by("origin").aggregate("a", n=cw.count()).write("out", cw.discard())
        assert [v.steps for v in make_plan(flow, 2).vertices] == [("flights",), ("weather",), ("j", "a", "out")]

    @pytest.mark.parametrize(
        ("within", "event_time"),
        [
            (("0s", "30m"), "hour"),
            (("10m", "30m"), "hour"),
            (("-30m", "0s"), "scheduled"),
            (("-30m", "-10m"), "scheduled"),
            (("-1us", "1us"), None),
        ],
    )
    def test_event_time_is_that_of_the_row_that_is_never_the_older(self, flights, weather, within, event_time):
        """A pair comes out with its later row; the earlier one may lie behind the watermark by then."""
        assert flights.key_by("origin").join("j", weather.key_by("origin"), within=within).type.event_time == event_time

    def test_the_event_time_of_the_right_side_may_be_renamed_or_be_a_key(self, flow):
        streams = [flow.read(i, cw.memory([], schema="t timestamp, k long"), event_time="t") for i in "ab"]
        renamed = streams[0].key_by("k").join("j", streams[1].key_by("k"), within=(0, "5ms"), suffix="_b")
        assert renamed.type.event_time == "t_b"
        dropped = streams[0].key_by("t").join("i", streams[1].key_by("t"), within=(0, "5ms"))
        assert dropped.type.event_time == "t"

    def test_the_user_may_say_which_time_to_go_by(self, flights, weather):
        joined = flights.key_by("origin").join("j", weather.key_by("origin"), within=("-1h", "30m"))
        with pytest.raises(BuildError, match="lost at step 'j': either row"):
            joined.key_by("carrier").window("w", cw.tumbling("1h"))
        later = joined.with_columns("later", at=pl.max_horizontal("scheduled", "hour")).with_event_time("at")
        assert (
            later.key_by("carrier").window("w", cw.tumbling("1h")).aggregate("a", n=cw.count()).schema.names[0]
            == "carrier"
        )

    def test_keys_may_have_other_names_and_wider_types(self, flow):
        left = flow.read("a", cw.memory([], schema="t timestamp, k int"), event_time="t")
        right = flow.read("b", cw.memory([], schema="t timestamp, key long"), event_time="t")
        joined = left.key_by("k").join("j", right.key_by("key"), within=(0, 0))
        joined.write("out", cw.discard())
        assert [e.keys for e in make_plan(flow, 2).edges] == [("k",), ("key",)]

    @pytest.mark.parametrize(
        ("join", "message"),
        [
            (lambda f, w: f.key_by("origin").join("j", w, within=(0, 0)), "right side of the join has no key"),
            (lambda f, w: f.key_by("origin").join("j", 5, within=(0, 0)), "stream is needed"),
            (lambda f, w: f.key_by("origin").join("j", w.key_by("wind"), within=(0, 0)), "'wind'"),
            (lambda f, w: f.key_by("origin", "delay").join("j", w.key_by("origin"), within=(0, 0)), "2 key columns"),
            (lambda f, w: f.key_by("origin").join("j", w.key_by("origin"), within=("1h", "-1h")), "lower bound"),
            (lambda f, w: f.key_by("origin").join("j", w.key_by("origin"), within=("1h",)), "pair of durations"),
            (lambda f, w: f.key_by("origin").join("j", w.key_by("origin"), within="1h"), "pair of durations"),
            (lambda f, w: f.key_by("origin").join("j", w.key_by("origin")), "either within= or window="),
            (
                lambda f, w: f.key_by("origin").join("j", w.key_by("origin"), within=(0, 0), how="left"),
                "how='left' is for joins of windows",
            ),
            (
                lambda f, w: f.key_by("origin").join("j", w.key_by("origin"), window=cw.tumbling("1h"), how="outer"),
                "how is one of 'inner', .* not 'outer'",
            ),
            (
                lambda f, w: f.key_by("origin").join("j", w.key_by("origin"), window=cw.session("1h")),
                "session, gap 1h is no window of a join",
            ),
            (
                lambda f, w: f.key_by("origin").join(
                    "j", w.key_by("origin"), window=cw.tumbling("1h", time="processing")
                ),
                "goes by event time",
            ),
            (
                lambda f, w: (
                    f.drop("d", "scheduled").key_by("origin").join("j", w.key_by("origin"), window=cw.tumbling("1h"))
                ),
                "on its left side .* lost at step 'd'",
            ),
            (
                lambda f, w: f.key_by("origin").join(
                    "j",
                    w.key_by("origin").window("h", cw.tumbling("1h")).aggregate("a", n=cw.count()).key_by("origin"),
                    window=cw.tumbling("90m"),
                ),
                "windows of 1h 30m cut the results of windows of 1h in two",
            ),
            (lambda f, w: f.key_by("origin").join("j", w.key_by("origin"), within=("x", "y")), "not a duration"),
            (
                lambda f, w: f.key_by("origin").join("j", w.drop("d", "hour").key_by("origin"), within=(0, 0)),
                "on its right side .* lost at step 'd'",
            ),
            (
                lambda f, w: f.key_by("origin").join(
                    "j",
                    w.key_by("origin").window("h", cw.tumbling("1h")).aggregate("a", n=cw.count()).key_by("origin"),
                    within=(0, 0),
                ),
                "right side of the join holds results of windows.*window_end",
            ),
        ],
    )
    def test_a_mistake_is_refused(self, flow, flights, weather, join, message):
        with pytest.raises(BuildError, match=message) as caught:
            join(flights, weather)
        assert caught.value.step == "j"
        assert "j" not in flow.graph.steps

    def test_results_of_windows_are_joined_by_their_end(self, flow, flights, weather):
        counts = flights.key_by("origin").window("h", cw.tumbling("1h")).aggregate("a", n=cw.count())
        ends = counts.with_event_time("window_end").key_by("origin")
        ends.join("j", weather.key_by("origin"), within=(0, 0))
        assert flow.graph.steps["j"].spec.left_time == "window_end"


class TestWindowJoin:
    def test_results_have_the_event_time_of_their_window(self, flow, flights, weather):
        joined = flights.key_by("origin").join("j", weather.key_by("origin"), window=cw.tumbling("1h"), how="full")
        assert joined.schema.names == ["window_start", "window_end", *flights.schema.names, "hour", "wind"]
        assert (joined.type.event_time, joined.type.keys) == ("window_start", ("origin",))
        daily = joined.key_by("origin").window("w", cw.tumbling("1d")).aggregate("a", n=cw.count())
        assert daily.type.event_time == "window_start"
        assert (joined.late_left.schema, joined.late_right.schema) == (flights.schema, weather.schema)
        assert "windows tumbling 1h, offset 0s, event time scheduled, hour, right keys origin" in flow.explain()

    def test_overlapping_windows_have_none(self, flights, weather):
        slid = cw.sliding("1h", "5m")
        joined = flights.key_by("origin").join("j", weather.key_by("origin"), window=slid, how="anti")
        assert joined.schema.names == ["window_start", "window_end", *flights.schema.names]
        with pytest.raises(BuildError, match="lost at step 'j': its windows overlap"):
            joined.key_by("origin").window("w", cw.tumbling("1d"))

    def test_a_side_may_be_the_results_of_smaller_windows(self, flow, flights, weather):
        counts = flights.key_by("origin").window("h", cw.tumbling("30m")).aggregate("a", n=cw.count())
        renamed = counts.rename("half", window_start="start", window_end="end").key_by("origin")
        joined = renamed.join("j", weather.key_by("origin"), window=cw.tumbling("1h"))
        assert flow.graph.steps["j"].spec.left_time == "start"
        assert joined.schema.names == ["window_start", "window_end", "origin", "start", "end", "n", "hour", "wind"]

    def test_rows_without_a_left_side_have_no_key_if_it_has_another_name(self, flow, flights):
        other = flow.read("b", cw.memory([], schema="t timestamp_ntz, code string"), event_time="t").key_by("code")
        keys = {
            how: flights.key_by("origin").join(f"j-{how}", other, window=cw.tumbling("1h"), how=how).type.keys
            for how in ("inner", "left", "right", "full")
        }
        assert keys == {"inner": ("origin",), "left": ("origin",), "right": (), "full": ()}


class TestEnrich:
    def test_columns_of_a_table_are_added(self, flow, flights):
        out = flights.enrich("names", CARRIERS, on="carrier")
        assert out.schema.names == [*flights.schema.names, "name", "delay_right"]
        assert out.type.event_time == "scheduled"
        assert flow.graph.steps["names"].spec.how == "left"

    @pytest.mark.parametrize(
        "table",
        [
            CARRIERS,
            CARRIERS.to_batches()[0],
            pl.DataFrame({"carrier": ["AA", "UA"], "name": ["American", "United"], "delay": [1, 2]}),
            EnrichmentTable(CARRIERS),
        ],
    )
    def test_tables_of_all_kinds_give_the_same(self, flow, flights, table):
        flights.enrich("names", table, on=["carrier"], how="inner", suffix="_c")
        operator = flow.graph.steps["names"].spec.build()
        operator.open(Subtask())
        rows = [{"carrier": c, "delay": 9} for c in ("UA", "ZZ", "AA")]
        batch = pa.RecordBatch.from_pylist(rows, schema=flights.schema)
        (result,) = [b for _, b in operator.process(0, batch)]
        assert result.select(["carrier", "name", "delay_c"]).to_pylist() == [
            {"carrier": "UA", "name": "United", "delay_c": 2},
            {"carrier": "AA", "name": "American", "delay_c": 1},
        ]

    def test_files_may_be_given_as_path_or_as_files(self, tmp_path, flow, flights):
        path = tmp_path / "carriers.parquet"
        pl.DataFrame({"code": ["AA"], "name": ["American"]}).write_parquet(path)
        for id, table in (("a", str(path)), ("b", path), ("c", [path]), ("d", cw.files(str(path)))):
            assert flights.enrich(id, table, on={"carrier": "code"}).schema.names == [*flights.schema.names, "name"]
        with pytest.raises(BuildError, match="takes no option 'rate'"):
            flights.enrich("e", cw.files(str(path), rate=5), on={"carrier": "code"})

    def test_a_table_in_place_keeps_the_partitioning(self, flow, flights):
        counts = flights.key_by("carrier").aggregate("n", n=cw.count()).enrich("names", CARRIERS, on="carrier")
        counts.key_by("carrier").aggregate("m", m=cw.count()).write("out", cw.discard())
        assert [v.steps for v in make_plan(flow, 2).vertices] == [("flights",), ("n", "names", "m", "out")]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"table": CARRIERS, "on": "carier"}, "Did you mean 'carrier'"),
            ({"table": CARRIERS, "on": {"carrier": "code"}}, "'code'"),
            ({"table": CARRIERS, "on": {"delay": "name"}}, "different types"),
            ({"table": CARRIERS, "on": ()}, "needs a key column"),
            ({"table": CARRIERS, "on": "carrier", "how": "outer"}, "'outer' is unknown"),
            ({"table": {"carrier": ["AA"]}, "on": "carrier"}, "cannot be a dict"),
            ({"table": "nowhere.parquet", "on": "carrier"}, "nowhere"),
            ({"table": pa.concat_tables([CARRIERS, CARRIERS]), "on": "carrier"}, "AA"),
            ({"table": CARRIERS, "on": "carrier", "suffix": ""}, "delay"),
        ],
    )
    def test_a_mistake_is_refused(self, flow, flights, arguments, message):
        with pytest.raises(CutwaterError, match=message) as caught:
            flights.enrich("e", **arguments)
        assert isinstance(caught.value, BuildError)
        assert caught.value.step == "e"
        assert "e" not in flow.graph.steps


class FakeFrame:
    """As much of a Spark DataFrame as building looks at."""

    def __init__(self, streaming: bool) -> None:
        from pyspark.sql.types import DateType, LongType, StructType

        self.isStreaming = streaming
        self.schema = StructType().add("t", DateType()).add("v", LongType())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_spark_dataframe_is_read_as_it_is(flow, monkeypatch, streaming):
    from cutwater.connectors import spark_source

    monkeypatch.setattr(FakeFrame, "__module__", "pyspark.sql.classic.dataframe")
    stream = flow.read("frame", FakeFrame(streaming), event_time="t")
    assert dict(zip(stream.schema.names, stream.schema.types, strict=True)) == {
        "t": pa.timestamp("us"),
        "v": pa.int64(),
    }
    kind = spark_source.StreamingDataFrameSource if streaming else spark_source.DataFrameSource
    spec = flow.graph.steps["frame"].spec
    assert type(spec) is kind
    assert spec.bounded is (not streaming)
    assert spec.replayable
