"""Which columns of a source somebody reads, here or behind an edge, and which of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

import cutwater as cw
from cutwater.api.streams.stream import Stream
from cutwater.operators.stateless.expressions import ExpressionSpec
from cutwater.plan.graph import PhysicalPlan, Vertex
from cutwater.plan.planner import columns_of_source, filters_of_source, fuse_links, make_plan, may_read_dictionaries

SCHEMA = "at timestamp, k string, kind string, n long, more string"


def planned(make: Callable[[Stream], Any]) -> tuple[PhysicalPlan, Vertex]:
    flow = cw.Dataflow("columns")
    make(flow.read("rows", cw.memory([], schema=SCHEMA), event_time="at", out_of_order="1s"))
    plan = make_plan(flow.graph, 2)
    return plan, next(v for v in plan.vertices if v.steps[0] == "rows")


def columns(make: Callable[[Stream], Any]) -> set[str] | None:
    found = columns_of_source(*planned(make))
    return None if found is None else set(found)


def windows(stream: Stream) -> Any:
    keyed = stream.filter("paid", pl.col("kind") != "view").key_by("k")
    return keyed.window("w", cw.tumbling("1m")).aggregate("sums", n=cw.sum("n")).write("out", cw.console())


def both(stream: Stream) -> Any:
    windows(stream)
    return stream.select("few", "more").write("more", cw.console())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (windows, {"at", "k", "kind", "n"}),
        (both, None),
        (lambda s: s.write("out", cw.console()), None),
        (lambda s: s.select("few", "k").write("out", cw.console()), {"k"}),
        (lambda s: s.with_columns("twice", m=pl.col("n") * 2).select("few", "m").write("out", cw.console()), {"n"}),
        (lambda s: s.map_batches("same", lambda batches: batches, schema=SCHEMA).write("out", cw.console()), None),
        (lambda s: s.key_by("k").aggregate("total", n=cw.count()).write("out", cw.console()), {"at", "k"}),
    ],
)
def test_columns_that_are_read(make: Callable[[Stream], Any], expected: set[str] | None):
    assert columns(make) == expected


def aside(stream: Stream) -> Any:
    windows(stream)
    return stream.key_by("k").aggregate("total", n=cw.count()).write("more", cw.console())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (windows, True),
        (lambda s: s.select("few", "k").write("out", cw.console()), True),
        (aside, True),
        (lambda s: s.write("out", cw.console()), False),
        (lambda s: s.map_batches("same", lambda batches: batches, schema=SCHEMA).write("out", cw.console()), False),
        (lambda s: s.key_by("k").aggregate("total", n=cw.count()).write("out", cw.console()), True),
        (lambda s: [aside(s), s.map_batches("same", lambda b: b, schema=SCHEMA).write("x", cw.console())], False),
    ],
)
def test_texts_may_come_as_dictionaries_where_expressions_and_edges_take_them(
    make: Callable[[Stream], Any], expected: bool
):
    plan, vertex = planned(make)
    assert may_read_dictionaries(plan, vertex) is expected


def made(make: Callable[[Stream], Any]) -> list[list[str]]:
    """Columns that the operators of the source's chain make."""
    plan, vertex = planned(make)
    specs = [node.spec for node in fuse_links(plan, vertex).nodes if isinstance(node.spec, ExpressionSpec)]
    return [spec.outputs[0].names for spec in specs]


def filtered_twice(stream: Stream) -> Any:
    paid = stream.filter("paid", pl.col("kind") != "view")
    paid.key_by("k").aggregate("total", n=cw.count()).write("sums", cw.console())
    return paid.filter("few", pl.col("n") > 3).key_by("k").aggregate("more", n=cw.count()).write("out", cw.console())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (windows, [["at", "k", "n"]]),
        (lambda s: s.filter("all", pl.col("n") > 0).write("out", cw.console()), [["at", "k", "kind", "n", "more"]]),
        (filtered_twice, [["at", "k", "kind", "n", "more"], ["at", "k"]]),
    ],
)
def test_expressions_leave_out_what_goes_over_no_edge(make: Callable[[Stream], Any], expected: list[list[str]]):
    assert made(make) == expected


N, K = pl.col("n"), pl.col("k")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (windows, [{"kind"}]),
        (lambda s: s.filter("a", N > 1).filter("b", K == "x").write("out", cw.console()), [{"n"}, {"k"}]),
        (lambda s: s.select("few", m="n").filter("a", pl.col("m") > 1).write("out", cw.console()), [{"n"}]),
        (lambda s: s.with_columns("b", n=N * 2).filter("a", N > 1).write("out", cw.console()), []),
        (aside, []),
        (lambda s: s.write("out", cw.console()), []),
        (
            lambda s: [s.filter("a", N > 1).write("one", cw.console()), s.filter("b", N < 1).write("o", cw.console())],
            [],
        ),
        (lambda s: s.rebalance().filter("a", N > 1).write("out", cw.console()), []),
        (lambda s: s.map_batches("m", lambda b: b, schema=SCHEMA).filter("a", N > 1).write("out", cw.console()), []),
    ],
)
def test_filters_by_which_rows_need_not_come(make: Callable[[Stream], Any], expected: list[set[str]]):
    assert [set(one.columns.values()) for one in filters_of_source(*planned(make))] == expected
