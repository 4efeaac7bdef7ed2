"""What explain() shows, and what guarantees are refused."""

from __future__ import annotations

import dataclasses

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cutwater as cw
from cutwater.connectors.memory import MemorySource
from cutwater.errors import BuildError, ConfigError
from cutwater.plan.checks import check_guarantees

EXPECTED = """\
dataflow delays

Logical graph
  flights  read: MemorySource, bounded; out of order by 1h
           -> (scheduled timestamp[us], origin string, carrier string, delay int64, distance double); \
event time scheduled
  late     filter
           <- flights by forward
           -> (scheduled timestamp[us], origin string, carrier string, delay int64, distance double); \
event time scheduled
  few      select
           <- late by forward
           -> (scheduled timestamp[us], origin string, delay int64); event time scheduled
  worst    window: window hourly: tumbling 1h, offset 0s; n = count(), worst = max(delay); state ({state})
           <- few by hash(origin)
           -> (origin string, window_start timestamp[us], window_end timestamp[us], n int64, worst int64); \
event time window_start
           -> output 1 (scheduled timestamp[us], origin string, delay int64)
  out      write: DiscardSink, exactly-once; parallelism 1
           <- worst by forward
  lost     collect: CollectSink, exactly-once
           <- worst output 1 by forward

Physical plan: 2 workers, 128 key groups
  [0] x2  flights -> late+few
        edge 0: few -- hash(origin) --> [1] worst input 0 (4 channels)
  [1] x2  worst | worst.1 -> lost
        edge 1: worst -- rebalance --> [2] out input 0 (2 channels)
  [2] x1  out

Guarantees
  state   exactly-once (protocol aligned)
  output  out: exactly-once
  output  lost: exactly-once"""


def test_explain_shows_both_graphs(flow, flights):
    few = flights.filter("late", pl.col("delay") > 15).select("few", "scheduled", "origin", "delay")
    worst = few.key_by("origin").window("hourly", cw.tumbling("1h"))
    result = worst.aggregate("worst", n=cw.count(), worst=cw.max("delay"))
    result.write("out", cw.discard(), parallelism=1)
    result.late.collect("lost")
    state = ", ".join(flow.graph.steps["worst"].spec.state_schema.names)
    assert flow.explain() == EXPECTED.format(state=state)


def test_explain_shows_an_unfinished_dataflow(flow, flights):
    text = flow.explain()
    assert "flights  read: MemorySource" in text
    assert "none yet: dataflow 'delays' writes nothing" in text


@dataclasses.dataclass(frozen=True)
class Unreplayable(MemorySource):
    @property
    def replayable(self) -> bool:
        return False


def write_once(rows, checkpoint_id):
    pass


class TestGuarantees:
    def test_a_source_that_cannot_be_rewound_is_refused_unless_rows_may_be_lost(self, flow):
        source = cw.memory([], schema="x long")
        flow.read("push", Unreplayable(source.schema, source.partitions)).write("out", cw.discard())
        for protocol in ("aligned", "unaligned", "chandy_lamport", "synchronous", "at_least_once"):
            with pytest.raises(BuildError, match="cannot be rewound") as caught:
                check_guarantees(flow.graph, protocol)
            assert caught.value.step == "push"
        check_guarantees(flow.graph, "none")

    def test_a_sink_that_may_write_twice_is_refused_for_exactly_once(self, flow, flights):
        flights.foreach_batch("out", write_once, idempotent=False)
        with pytest.raises(BuildError, match="gives at-least-once only, the job wants exactly-once") as caught:
            check_guarantees(flow.graph, "aligned")
        assert caught.value.step == "out"
        check_guarantees(flow.graph, "at_least_once")
        assert "protocol aligned is refused: step 'out'" in flow.explain()
        assert "out: at-least-once" in flow.explain(protocol="at_least_once")

    @pytest.mark.parametrize(
        ("protocol", "promise"),
        [
            ("none", "at-most-once"),
            ("at_least_once", "at-least-once"),
            ("synchronous", "exactly-once"),
            ("chandy_lamport", "exactly-once"),
            ("aligned", "exactly-once"),
            ("unaligned", "exactly-once"),
        ],
    )
    def test_every_protocol_has_a_promise_on_loops_too(self, flow, flights, protocol, promise):
        loop = flow.loop("loop", flights)
        loop.feed_back(loop.filter("f", pl.col("delay") > 1))
        loop.write("out", cw.discard())
        assert f"state   {promise} (protocol {protocol})" in flow.explain(protocol=protocol)

    def test_an_unknown_protocol_promises_nothing(self, flow, flights):
        flights.write("out", cw.discard())
        with pytest.raises(ConfigError, match=r"protocol 'exactly_once' is unknown.*unaligned"):
            flow.explain(protocol="exactly_once")

    def test_an_idempotent_function_is_exactly_once(self, flow, flights):
        flights.foreach_batch("out", write_once)
        check_guarantees(flow.graph, "aligned")
        assert "out: at-most-once" in flow.explain(protocol="none")


def test_explain_tells_filters_by_which_row_groups_are_left_out(tmp_path):
    pq.write_table(pa.table({"n": [1], "k": ["x"]}), tmp_path / "rows.parquet")

    def told(**options):
        flow = cw.Dataflow("skips")
        rows = flow.read("rows", cw.files(str(tmp_path / "rows.parquet"), **options))
        rows.filter("some", (pl.col("n") > 5) & (pl.col("k").str.len_chars() > 2)).write("out", cw.console())
        return [line for line in flow.explain().splitlines() if "row groups" in line]

    (line,) = told()
    assert line.strip().startswith('reads only row groups that may have rows with [([(col("n")) > (dyn int: 5)])')
    assert told(rate=5) == told(bad_rows="dead_letter") == []
