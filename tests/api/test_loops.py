"""Loops as a user writes them: closing, types, and every mistake named with its step and what to do."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pytest

import cutwater as cw
from cutwater.errors import BuildError

ROWS = "k long, v long"
MORE = pl.col("v") > 0


@pytest.fixture
def rows(flow):
    return flow.read("in", cw.memory([], schema=ROWS))


def step_down(stream, id="down"):
    """A way round the loop on which rows end."""
    return stream.with_columns(id, v=pl.col("v") - 1).filter(f"{id}-more", MORE)


def refused(flow, *words: str) -> BuildError:
    with pytest.raises(BuildError) as caught:
        flow.validate()
    for word in words:
        assert word in str(caught.value)
    assert caught.value.hint
    return caught.value


class TestClosing:
    def test_a_loop_is_closed_by_what_comes_of_it(self, flow, rows):
        loop = flow.loop("loop", rows)
        again = step_down(loop)
        loop.feed_back(again)
        loop.write("out", cw.discard())
        flow.validate()
        assert [i.step for i in flow.graph.steps["loop"].inputs] == ["in", "down-more"]
        assert flow.graph.cycles.back_edges == {("down-more", "loop")}

    def test_building_runs_nothing_and_a_graph_taken_before_does_not_change(self, flow, rows):
        called = []
        loop = flow.loop("loop", rows)
        body = loop.flat_map("body", lambda row: called.append(row) or [row], ROWS)
        before = flow.graph
        loop.feed_back(body)
        body.write("out", cw.discard())
        flow.explain()
        assert called == []
        assert len(before.steps["loop"].inputs) == 1

    def test_several_streams_may_be_fed_back(self, flow, rows):
        loop = flow.loop("loop", rows)
        for id in ("a", "b"):
            loop.feed_back(step_down(loop, id))
        loop.feed_back(step_down(loop, "c").rebalance())
        loop.write("out", cw.discard())
        flow.validate()
        assert {e[0] for e in flow.graph.cycles.back_edges} == {"a-more", "b-more", "c-more"}
        assert flow.graph.steps["loop"].spec.inputs == len(flow.graph.steps["loop"].inputs) == 4

    def test_a_loop_may_be_declared_and_entered_further_on(self, flow, rows):
        loop = flow.loop("loop", schema=ROWS)
        joined = rows.union("u", loop)
        loop.feed_back(step_down(joined))
        joined.write("out", cw.discard())
        flow.validate()
        assert flow.graph.cycles.back_edges == {("loop", "u")}

    def test_loops_may_cross(self, flow, rows):
        first = flow.loop("first", rows)
        second = flow.loop("second", step_down(first, "a"))
        first.feed_back(step_down(second, "b"))
        second.feed_back(step_down(first, "c"))
        second.write("out", cw.discard())
        flow.validate()
        (loop,) = flow.graph.cycles.loops
        assert loop.entries == ("first",)

    def test_loops_may_close_each_other(self, flow, rows):
        """Each is fed by the other alone: at the moment of feeding back there is no cycle yet."""
        first, second = flow.loop("first", rows), flow.loop("second", schema=ROWS)
        first.feed_back(step_down(second, "b"))
        second.feed_back(step_down(first, "a"))
        second.write("out", cw.discard())
        flow.validate()
        assert flow.graph.cycles.back_edges == {("b-more", "first")}

    def test_a_side_output_and_a_key_may_be_fed_back(self, flow):
        times = flow.read("in", cw.memory([], schema="t timestamp, k long"), event_time="t")
        loop = flow.loop("loop", times)
        result = loop.key_by("k").window("w", cw.tumbling("1h")).aggregate("n", n=cw.count())
        loop.feed_back(result.late.with_event_time("t").key_by("k"))
        result.write("out", cw.discard())
        flow.validate()
        assert flow.graph.steps["loop"].inputs[1].output == 1
        assert flow.graph.steps["loop"].inputs[1].keys == ("k",)


class TestTypes:
    def test_columns_are_nullable_from_the_loop_on(self, flow):
        strict = pa.schema([pa.field("k", pa.int64(), nullable=False)])
        loop = flow.loop("loop", flow.read("in", cw.memory([], schema=strict)))
        assert loop.schema == pa.schema({"k": pa.int64()})
        loop.feed_back(loop.flat_map("f", lambda row: [], strict))
        loop.write("out", cw.discard())
        flow.validate()

    def test_a_loop_has_the_event_time_of_what_enters_it(self, flow, flights):
        loop = flow.loop("loop", flights)
        assert loop.type.event_time == "scheduled"
        loop.feed_back(loop.filter("f", pl.col("delay") > 5))
        loop.key_by("origin").window("w", cw.tumbling("1h")).aggregate("n", n=cw.count()).write("out", cw.discard())
        flow.validate()

    def test_a_declared_loop_names_its_event_time(self, flow, flights):
        loop = flow.loop("loop", schema=flights.schema, event_time="scheduled")
        both = flights.union("u", loop)
        assert both.type.event_time == "scheduled"
        loop.feed_back(both.filter("f", pl.col("delay") > 5))
        both.write("out", cw.discard())
        flow.validate()

    def test_the_watermark_of_a_loop_is_looked_for_outside_of_it(self, flow, flights):
        """A stream that lost its event time before the loop gets another in it, whether or not the loop is closed."""
        moved = flights.select("s", "origin", t=pl.col("scheduled") + pl.duration(hours=1))
        loop = flow.loop("loop", moved)
        loop.feed_back(loop.filter("f", pl.col("origin") != "JFK"))
        assert loop.filter("g", pl.col("origin") != "LGA").with_event_time("t").type.event_time == "t"

    def test_a_loop_has_no_key_although_its_first_input_does(self, flow, rows):
        assert flow.loop("loop", rows.key_by("k")).type.keys == ()

    def test_an_interval_join_may_read_the_loop_on_both_sides(self, flow, flights):
        loop = flow.loop("loop", flights)
        pairs = loop.key_by("origin").join("j", loop.key_by("origin"), within=("-1h", "0s"))
        again = pairs.select("s", *flights.schema.names).filter("f", pl.col("delay") > 5)
        loop.feed_back(again)
        pairs.write("out", cw.discard())
        flow.validate()
        assert again.type.event_time == "scheduled"

    def test_a_window_with_event_time_lost_in_a_loop_says_so(self, flow, rows):
        """The story of a stream ends at a loop's first input, and never goes round."""
        loop = flow.loop("loop", rows)
        loop.feed_back(step_down(loop))
        declared = flow.loop("declared", schema="t timestamp, k long")
        declared.feed_back(declared.filter("f", pl.col("k") > 1))
        for stream, words in ((loop, "'in' reads without one"), (declared, "'declared' is declared without one")):
            with pytest.raises(BuildError, match=words):
                stream.key_by("k").window("w", cw.tumbling("1h"))
        with pytest.raises(BuildError, match=r"needs a watermark, but .*declared"):
            declared.with_event_time("t")


WRONG_BEGINNINGS = {
    "neither": (lambda flow, s: flow.loop("l"), ["a stream or with a schema", "flow.loop('id', stream)"]),
    "both": (lambda flow, s: flow.loop("l", s, schema=ROWS), ["a stream or with a schema"]),
    "no stream": (lambda flow, s: flow.loop("l", [1]), ["a stream is needed here, not list"]),
    "another dataflow": (
        lambda flow, s: flow.loop("l", cw.Dataflow("x").read("r", cw.memory([], schema=ROWS))),
        ["belongs to dataflow 'x'"],
    ),
    "bad schema": (lambda flow, s: flow.loop("l", schema="k lung"), ["lung"]),
    "columns of one name": (lambda flow, s: flow.loop("l", schema="k long, k long"), ["k"]),
    "event time of a stream": (lambda flow, s: flow.loop("l", s, event_time="v"), ["that of the stream"]),
    "unknown event time": (lambda flow, s: flow.loop("l", schema=ROWS, event_time="t"), ["event-time column 't'"]),
    "event time that is none": (lambda flow, s: flow.loop("l", schema=ROWS, event_time="v"), ["int64"]),
    "parallelism": (lambda flow, s: flow.loop("l", s, parallelism=0), ["parallelism"]),
}


@pytest.mark.parametrize("name", WRONG_BEGINNINGS)
def test_a_wrong_beginning_is_refused_and_leaves_no_trace(flow, rows, name):
    make, words = WRONG_BEGINNINGS[name]
    with pytest.raises(BuildError) as caught:
        make(flow, rows)
    assert caught.value.step == "l"
    for word in words:
        assert word in str(caught.value)
    assert list(flow.graph.steps) == ["in"]


def test_the_id_of_a_loop_is_given_once(flow, rows):
    with pytest.raises(BuildError, match="the id is taken by the read step"):
        flow.loop("in", rows)


WRONG_FEEDBACK = {
    "no stream": (lambda loop: None, ["a stream is needed here, not NoneType"]),
    "another dataflow": (
        lambda loop: cw.Dataflow("x").read("r", cw.memory([], schema=loop.schema)),
        ["belongs to dataflow 'x'", "one dataflow only"],
    ),
    "a column less": (lambda loop: loop.drop("d", "delay"), ["step 'd'", "'delay' is missing", "select"]),
    "a column more": (lambda loop: loop.with_columns("w", x=pl.lit(1)), ["'x' is extra"]),
    "another type": (
        lambda loop: loop.with_columns("w", delay=pl.col("delay").cast(pl.Int32)),
        ["column 'delay' is int32 instead of int64"],
    ),
    "another order": (lambda loop: loop.select("s", *reversed(loop.schema.names)), ["in the order distance, delay"]),
    "event time overwritten": (
        lambda loop: loop.with_columns("w", scheduled=pl.col("scheduled").dt.truncate("1d")),
        ["event time is 'scheduled'", "lost at step 'w'", "feed_back(stream.with_event_time('scheduled'))"],
    ),
    "times of windows": (
        lambda loop: (
            loop.key_by("origin", "carrier", "delay", "distance")
            .window("h", cw.tumbling("1h"))
            .aggregate("n", n=cw.count())
            .rename("r", window_start="scheduled")
            .select("s", *loop.schema.names)
        ),
        ["its times are those of windows of 1h, not of rows", "with_event_time('scheduled')"],
    ),
}


@pytest.mark.parametrize("name", WRONG_FEEDBACK)
def test_a_wrong_stream_is_not_fed_back(flow, flights, name):
    make, words = WRONG_FEEDBACK[name]
    loop = flow.loop("loop", flights)
    with pytest.raises(BuildError) as caught:
        loop.feed_back(make(loop))
    assert caught.value.step == "loop"
    for word in words:
        assert word in str(caught.value)
    assert len(flow.graph.steps["loop"].inputs) == 1


def test_another_event_time_is_fed_back_when_the_user_says_what_to_go_by(flow, flights):
    loop = flow.loop("loop", flights)
    moved = loop.with_columns("w", scheduled=pl.col("scheduled") + pl.duration(hours=1)).filter(
        "f", pl.col("delay") > 1
    )
    loop.feed_back(moved.with_event_time("scheduled"))
    loop.write("out", cw.discard())
    flow.validate()


def test_event_time_is_not_fed_back_to_a_loop_without(flow, flights):
    loop = flow.loop("loop", schema=flights.schema)
    with pytest.raises(BuildError, match="the loop has none") as caught:
        loop.feed_back(flights)
    assert caught.value.step == "loop"


class TestWholeDataflow:
    def test_a_loop_that_is_never_closed(self, flow, rows):
        flow.loop("loop", rows).write("out", cw.discard())
        assert refused(flow, "never closed", "loop.feed_back(stream)").step == "loop"

    def test_a_declared_loop_that_is_never_closed_is_shown_by_explain(self, flow, rows):
        loop = flow.loop("loop", schema=ROWS)
        rows.union("u", loop).write("out", cw.discard())
        assert refused(flow, "never closed").step == "loop"
        assert "none yet: step 'loop': the loop is never closed" in flow.explain()

    def test_a_loop_that_no_source_reaches(self, flow, rows):
        rows.write("other", cw.discard())
        loop = flow.loop("loop", schema=ROWS)
        loop.feed_back(step_down(loop))
        loop.write("out", cw.discard())
        assert refused(flow, "no source reaches the loop", "union").step == "loop"

    def test_rows_fed_back_that_do_not_come_from_the_loop(self, flow, rows):
        loop = flow.loop("loop", rows)
        loop.feed_back(rows.filter("f", MORE))
        loop.write("out", cw.discard())
        assert refused(flow, "stream of step 'f', does not come from the loop", "union").step == "loop"

    def test_one_stream_of_several_that_does_not_come_from_the_loop(self, flow, rows):
        loop = flow.loop("loop", schema=ROWS)
        loop.feed_back(rows)
        loop.feed_back(step_down(loop))
        loop.write("out", cw.discard())
        assert refused(flow, "step 'in', does not come from the loop").step == "loop"

    def test_rows_that_never_leave_the_loop(self, flow, rows):
        rows.write("out", cw.discard())
        loop = flow.loop("loop", rows)
        loop.feed_back(step_down(loop))
        assert refused(flow, "rows never leave the loop of the steps loop, down, down-more").step == "loop"

    @pytest.mark.parametrize(
        "body",
        [
            lambda s: s,
            lambda s: s.with_columns("w", v=pl.col("v") + 1).select("s", "k", "v"),
            lambda s: s.union("u", s.filter("f", MORE)),
            lambda s: s.key_by("k").aggregate("a", v=cw.count()),
            lambda s: s.enrich("e", pa.table({"k": [1]}), on="k"),
        ],
    )
    def test_a_loop_of_steps_that_all_give_a_row_for_each_row(self, flow, rows, body):
        loop = flow.loop("loop", rows)
        loop.feed_back(body(loop))
        loop.filter("done", pl.col("v") > 9).write("out", cw.discard())
        assert refused(flow, "would go round for ever", "filter, flat_map").step == "loop"

    @pytest.mark.parametrize(
        "body",
        [
            lambda s: s.filter("f", MORE),
            lambda s: s.map("m", lambda row: None, ROWS),
            lambda s: s.flat_map("m", lambda row: [], ROWS),
            lambda s: s.map_batches("m", lambda batches: batches, ROWS),
            lambda s: s.enrich("e", pa.table({"k": [1]}), on="k", how="inner"),
        ],
    )
    def test_a_loop_in_which_rows_may_end(self, flow, rows, body):
        loop = flow.loop("loop", rows)
        loop.feed_back(body(loop))
        loop.write("out", cw.discard())
        flow.validate()

    def test_rows_that_end_on_one_way_round_only(self, flow, rows):
        loop = flow.loop("loop", rows)
        loop.feed_back(step_down(loop))
        loop.feed_back(loop.with_columns("w", v=pl.col("v") + 1))
        loop.write("out", cw.discard())
        assert "loop, w give a row" in str(refused(flow, "for ever"))
