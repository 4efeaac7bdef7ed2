"""Whether a changed program can go on from a checkpoint of the old one."""

from __future__ import annotations

import polars as pl
import pytest

import cutwater as cw
from cutwater.errors import BuildError
from cutwater.plan.compatibility import check_compatible, step_records
from cutwater.plan.planner import make_plan
from cutwater.storage.snapshot.manifest import Manifest, SplitRecord, SubtaskRecord


def program(
    *,
    source="r",
    agg="agg",
    key="k",
    kind="aggregate",
    aggregates=None,
    schema="t timestamp, k long, v long",
    window="1h",
    lateness="0s",
    sink="out",
    extra=False,
    filtered=True,
    max_parallelism=128,
):
    flow = cw.Dataflow("job")
    stream = flow.read(source, cw.memory([], schema=schema), event_time="t")
    if filtered:
        stream = stream.filter("f", pl.col("v") > 0)
    aggregates = aggregates or {"n": cw.count(), "total": cw.sum("v")}
    keyed = stream.key_by(key)
    if kind == "aggregate":
        result = keyed.aggregate(agg, **aggregates)
    else:
        result = keyed.window("w", cw.tumbling(window), allowed_lateness=lateness).aggregate(agg, **aggregates)
    if extra:
        result.key_by(key).aggregate("more", n=cw.count()).write("more-out", cw.discard())
    result.write(sink, cw.discard())
    return make_plan(flow, 2, max_parallelism)


def manifest_of(plan) -> Manifest:
    """A checkpoint of the program, with one split and one sink state."""
    source = next(s.id for s in plan.steps.values() if s.role == "source")
    sink = next(s.id for s in plan.steps.values() if s.role == "sink")
    subtask = SubtaskRecord(0, 0, 1, "aligned", splits={source: [SplitRecord("a", position=5)]}, sinks={sink: {"n": 1}})
    return Manifest(
        job=plan.name,
        uid="u",
        checkpoint_id=7,
        attempt=1,
        protocol="aligned",
        max_parallelism=plan.max_parallelism,
        parallelism=plan.parallelism,
        triggered_ms=0,
        completed_ms=0,
        steps=step_records(plan),
        subtasks=[subtask],
        entries=[],
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({}, {"filtered": False}),
        ({"filtered": False}, {}),
        ({}, {"extra": True}),
        ({"kind": "window"}, {"kind": "window"}),
        ({"kind": "window"}, {"kind": "window", "lateness": "5m"}),
        ({}, {"schema": "extra string, t timestamp, k long, v long"}),
        ({}, {"aggregates": {"n": cw.count()}}),
    ],
)
def test_what_the_state_does_not_depend_on_may_change(before, after):
    check_compatible(program(**after), manifest_of(program(**before)))


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        ({}, {"max_parallelism": 64}, ["max_parallelism was 128 and is 64"]),
        ({}, {"agg": "counts"}, ["step 'agg' (aggregate) is gone, its state would be lost"]),
        ({}, {"source": "other"}, ["step 'r' (read) is gone, its read positions would be lost"]),
        ({}, {"sink": "other"}, ["step 'out' (write) is gone, its uncommitted rows would be lost"]),
        ({"extra": True}, {}, ["step 'more' (aggregate) is gone"]),
        ({}, {"kind": "window"}, ["step 'agg' was of kind aggregate and is of kind window"]),
        ({}, {"key": "v"}, ["step 'agg' was keyed by (k) and is keyed by (v)"]),
        ({}, {"schema": "t timestamp, k string, v long"}, ["column 'k' was int64 and is string"]),
        (
            {"aggregates": {"x": cw.min("v")}},
            {"aggregates": {"x": cw.max("v")}},
            ["step 'agg', aggregates: was x=min(v), is x=max(v)"],
        ),
        (
            {"kind": "window"},
            {"kind": "window", "window": "2h"},
            ["windows of step 'agg': was tumbling 1h, offset 0s, is tumbling 2h, offset 0s"],
        ),
        (
            {},
            {"source": "other", "agg": "counts", "max_parallelism": 64},
            ["max_parallelism", "step 'r'", "step 'agg'"],
        ),
    ],
)
def test_what_the_state_depends_on_may_not(before, after, reasons):
    with pytest.raises(BuildError, match="cannot go on from checkpoint 7") as caught:
        check_compatible(program(**after), manifest_of(program(**before)))
    for reason in reasons:
        assert reason in str(caught.value)


def test_records_say_what_a_step_is():
    records = {r.id: r for r in step_records(program(kind="window"))}
    assert [records[i].kind for i in ("r", "f", "agg", "out")] == ["read", "filter", "window", "write"]
    assert records["agg"].keys == ["k"]
    assert ("k", "int64") in (records["agg"].state or [])
    assert records["r"].outputs == [[("t", "timestamp[us, tz=UTC]"), ("k", "int64"), ("v", "int64")]]
    assert [records[i].state for i in ("r", "f", "out")] == [None, None, None]
    assert records["agg"].settings == {
        "aggregates": "n=count(), total=sum(v)",
        "windows": "tumbling 1h, offset 0s",
        "event time": "t",
    }
