"""What flows out of each step: schema, event time, partitioning."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pytest

import cutwater as cw
from cutwater.connectors.base import dead_letter_schema
from cutwater.plan.graph import EdgeType, Input

HOUR_US = 3_600_000_000


def columns(stream):
    return dict(zip(stream.schema.names, stream.schema.types, strict=True))


class TestRead:
    @pytest.mark.parametrize(
        ("given", "normal"),
        [
            (pa.timestamp("ns"), pa.timestamp("us")),
            (pa.timestamp("s", "Europe/Berlin"), pa.timestamp("us", "Europe/Berlin")),
            (pa.timestamp("ms", "UTC"), pa.timestamp("us", "UTC")),
            (pa.date32(), pa.timestamp("us")),
            (pa.date64(), pa.timestamp("us")),
        ],
    )
    def test_event_time_becomes_microseconds_and_keeps_its_zone(self, flow, given, normal):
        stream = flow.read("r", cw.memory([], schema=pa.schema({"t": given, "x": pa.int8()})), event_time="t")
        assert columns(stream) == {"t": normal, "x": pa.int8()}
        assert stream.type.event_time == "t"

    def test_without_event_time_every_column_stays_as_it_is(self, flow):
        stream = flow.read("r", cw.memory([], schema=pa.schema({"t": pa.timestamp("ns")})))
        assert columns(stream) == {"t": pa.timestamp("ns")}
        assert stream.type.event_time is None

    def test_options_tell_the_reader_what_to_do(self, flow):
        source = cw.memory([], schema="t timestamp")
        flow.read("r", source, event_time="t", out_of_order="1m 30s", bad_rows="dead_letter", parallelism=3)
        step = flow.graph.steps["r"]
        assert step.options == {"event_time": "t", "out_of_order_us": 90_000_000, "bad_rows": "dead_letter"}
        assert (step.parallelism, step.role, step.kind) == (3, "source", "read")
        assert step.spec.bad_rows == "dead_letter"
        assert source.bad_rows == "fail"

    def test_a_source_made_to_divert_bad_rows_diverts_them(self, flow):
        source = cw.memory([], schema="x long").with_bad_rows("dead_letter")
        assert flow.read("r", source).dead_letters.schema == dead_letter_schema

    def test_metadata_of_a_schema_is_dropped(self, flow):
        field = pa.field("x", pa.int64(), metadata={"PARQUET:field_id": "1"})
        stream = flow.read("r", cw.memory([], schema=pa.schema([field], metadata={"pandas": "{}"})))
        assert stream.schema.metadata is None
        assert stream.schema.field("x").metadata is None


class TestRowWiseSteps:
    def test_filter_keeps_the_type(self, flights):
        assert flights.filter("f", pl.col("delay") > 15, pl.col("origin") == "JFK").type == flights.type

    def test_select_takes_names_and_expressions(self, flights):
        out = flights.select("s", "origin", (pl.col("delay") * 2).alias("twice"), half=pl.col("delay") / 2)
        assert columns(out) == {"origin": pa.string(), "twice": pa.int64(), "half": pa.float64()}

    def test_event_time_follows_its_column_through_select_and_rename(self, flights):
        assert flights.select("a", "scheduled").type.event_time == "scheduled"
        assert flights.select("b", pl.col("scheduled").alias("at")).type.event_time == "at"
        assert flights.select("c", pl.all()).type.event_time == "scheduled"
        assert flights.select("d", pl.col("scheduled", "origin").name.suffix("_x")).type.event_time == "scheduled_x"
        assert flights.rename("e", {"scheduled": "when"}).type.event_time == "when"
        assert flights.rename("g", origin="from_").type.event_time == "scheduled"

    def test_event_time_is_gone_when_its_values_change(self, flights):
        shifted = pl.col("scheduled") + pl.duration(hours=1)
        assert flights.with_columns("a", scheduled=shifted).type.event_time is None
        assert flights.select("b", shifted).type.event_time is None
        assert flights.drop("c", "scheduled").type.event_time is None

    def test_with_columns_adds_and_replaces(self, flights):
        out = flights.with_columns("w", delay=pl.col("delay").cast(pl.Float64), km=pl.col("distance") * 1.6)
        assert columns(out)["delay"] == pa.float64()
        assert list(columns(out)) == [*flights.schema.names, "km"]
        assert out.type.event_time == "scheduled"

    def test_functions_declare_their_schema_and_keep_event_time_by_name(self, flights):
        same = flights.map("a", lambda row: row, "scheduled timestamp_ntz, n long")
        assert columns(same) == {"scheduled": pa.timestamp("us"), "n": pa.int64()}
        assert same.type.event_time == "scheduled"
        assert flights.flat_map("b", lambda row: [row], "n long").type.event_time is None
        assert flights.map_batches("c", lambda b: b, pa.schema({"scheduled": pa.int64()})).type.event_time is None

    def test_union_keeps_what_all_streams_share(self, flow, flights):
        other = flow.read("more", cw.memory([], schema=flights.schema), event_time="scheduled")
        plain = flow.read("plain", cw.memory([], schema=flights.schema))
        assert flights.union("u", other).type == flights.type
        assert flights.union("v", plain).type.event_time is None
        assert [i.step for i in flow.graph.steps["u"].inputs] == ["flights", "more"]


class TestKeyedSteps:
    def test_key_by_is_no_step_but_a_hash_edge(self, flow, flights):
        before = set(flow.graph.steps)
        keyed = flights.key_by("origin", "carrier")
        assert keyed.keys == ("origin", "carrier")
        assert set(flow.graph.steps) == before
        keyed.aggregate("agg", n=cw.count())
        assert flow.graph.steps["agg"].inputs == (Input("flights", 0, EdgeType.HASH, ("origin", "carrier")),)

    def test_key_by_with_dead_letters_is_a_step_that_diverts(self, flow, flights):
        keyed = flights.key_by("origin", dead_letters="bad-keys")
        assert flow.graph.steps["bad-keys"].kind == "key_check"
        assert keyed.type == flights.type
        assert keyed.dead_letters.schema == flights.schema
        keyed.dead_letters.write("bad", cw.discard())
        assert flow.graph.steps["bad"].inputs == (Input("bad-keys", 1, EdgeType.FORWARD),)

    def test_running_aggregate_gives_keys_event_time_and_aggregates(self, flights):
        out = flights.key_by("origin").aggregate("a", n=cw.count(), worst=cw.max("delay"), avg=cw.mean("delay"))
        assert columns(out) == {
            "origin": pa.string(),
            "scheduled": pa.timestamp("us"),
            "n": pa.int64(),
            "worst": pa.int64(),
            "avg": pa.float64(),
        }
        assert (out.type.event_time, out.type.keys) == ("scheduled", ("origin",))

    def test_window_result_has_its_start_as_event_time_and_a_late_stream(self, flow, flights):
        out = flights.key_by("origin").window("hourly", cw.tumbling("1h")).aggregate("worst", worst=cw.max("delay"))
        assert out.schema.names == ["origin", "window_start", "window_end", "worst"]
        assert (out.type.event_time, out.type.span) == ("window_start", (HOUR_US, 0))
        assert out.late.schema == flights.schema
        assert out.late.type.event_time is None
        assert flow.graph.steps["worst"].spec.label == "hourly"
        assert "hourly" not in flow.graph.steps

    def test_windows_nest(self, flights):
        hourly = flights.key_by("origin").window("h", cw.tumbling("1h")).aggregate("by-hour", n=cw.count())
        daily = hourly.key_by("origin").window("d", cw.tumbling("24h")).aggregate("by-day", n=cw.sum("n"))
        assert daily.type.span == (24 * HOUR_US, 0)

    def test_partitioning_survives_only_what_leaves_the_keys_alone(self, flights):
        counts = flights.key_by("origin").aggregate("a", n=cw.count())
        assert counts.filter("b", pl.col("n") > 1).type.keys == ("origin",)
        assert counts.rename("c", origin="airport").type.keys == ("airport",)
        assert counts.with_columns("d", origin=pl.col("origin").str.to_lowercase()).type.keys == ()
        assert counts.drop("e", "origin").type.keys == ()
        assert counts.rebalance().filter("f", pl.col("n") > 1).type.keys == ()
        assert counts.broadcast().filter("g", pl.col("n") > 1).type.keys == ()
        assert counts.map("h", lambda row: row, "origin string").type.keys == ()

    def test_with_event_time_chooses_another_column(self, flow):
        source = cw.memory([], schema="t timestamp, u timestamp, x long")
        stream = flow.read("r", source, event_time="t")
        assert stream.with_event_time("u").type.event_time == "u"
        keyed = stream.key_by("x").with_event_time("u")
        assert keyed.keys == ("x",)
        assert keyed.window("w", cw.tumbling("1s")).aggregate("a", n=cw.count()).type.event_time == "window_start"


def test_a_stream_used_twice_branches(flow, flights):
    flights.filter("a", pl.col("delay") > 1).write("x", cw.discard())
    flights.filter("b", pl.col("delay") > 2).write("y", cw.discard())
    assert [s.id for s, _ in flow.graph.consumers("flights")] == ["a", "b"]


def test_two_reads_of_one_source_are_two_steps(flow):
    source = cw.memory([], schema="x long")
    flow.read("a", source)
    flow.read("b", source)
    assert list(flow.graph.steps) == ["a", "b"]
