"""Windows over windows: every column comes out, under a name of its own, and existing names stay."""

from __future__ import annotations

import pytest

import cutwater as cw
from cutwater.errors import BuildError

MINUTE, HOUR = cw.tumbling("1m"), cw.tumbling("1h")


@pytest.fixture
def flow():
    return cw.Dataflow("windows")


def counts(flow, id="counts", window=MINUTE):
    rows = flow.read(f"{id}-in", cw.rate(10, rows=10), event_time="timestamp")
    return rows.key_by("value").window(f"{id}-w", window).aggregate(id, n=cw.count())


def test_the_best_of_each_window_over_its_results(flow):
    best = counts(flow).key_by("window_start").window("again", MINUTE).top("best", 3, by=["n", "window_end"])
    assert best.schema.names == [
        *("window_start", "window_end", "value", "window_start_inner", "window_end_inner", "n", "rank")
    ]
    assert best.type.keys == ("window_start_inner",)
    assert best.type.event_time == "window_start"
    assert flow.graph.steps["best"].spec.aggregates[0].by == ("n", "window_end_inner")


def test_a_window_keyed_by_the_window(flow):
    keyed = counts(flow).key_by("window_start", nulls="key")
    made = keyed.window("again", HOUR).aggregate("a", first=cw.min("window_start"), end=cw.max("window_end"))
    assert made.schema.names == ["window_start_inner", "window_start", "window_end", "first", "end"]
    spec = flow.graph.steps["a"].spec
    assert [a.column for a in spec.aggregates] == ["window_start_inner", "window_end"]
    assert type(spec.keys) is type(keyed.keys)


def test_a_third_window_goes_on(flow):
    second = counts(flow).key_by("window_start").window("again", MINUTE).top("second", 3, by="n")
    third = second.key_by("window_start").window("hour", HOUR).top("third", 3, by="n", rank="place")
    assert {"window_start", "window_start_inner", "window_start_inner_inner"} <= set(third.schema.names)
    assert len(set(third.schema.names)) == len(third.schema.names)


def test_a_join_of_two_windowed_streams(flow):
    left, right = counts(flow, "left"), counts(flow, "right")
    joined = left.key_by("value").join("j", right.key_by("value"), window=MINUTE, how="full")
    borders = [f"window_{b}{side}" for side in ("", "_left", "_right") for b in ("start", "end")]
    assert [name for name in joined.schema.names if name.startswith("window")] == borders
    assert joined.type.event_time == "window_start"


def test_names_that_were_there_before_stay(flow):
    rows = flow.read("rows", cw.rate(10, rows=10), event_time="timestamp")
    right = counts(flow, "right")
    joined = rows.key_by("value").join("j", right.key_by("value"), window=MINUTE)
    assert joined.schema.names == [
        *("window_start", "window_end", "value", "timestamp", "window_start_right", "window_end_right", "n")
    ]
    inner = right.key_by("value").window("w", HOUR).aggregate("a", n=cw.sum("n"))
    assert inner.schema.names == ["value", "window_start", "window_end", "n"]
    assert not any(id.endswith((".inner", ".left")) for id in flow.graph.steps)


def test_the_global_window_has_no_borders_and_renames_nothing(flow):
    top = counts(flow).key_by("window_start").window("all", cw.global_window()).top("t", 3, by="n")
    assert top.schema.names == ["value", "window_start", "window_end", "n", "rank"]


def test_what_is_refused_leaves_no_step_behind(flow):
    keyed = counts(flow).key_by("window_start").window("again", MINUTE)
    known = set(flow.graph.steps)
    with pytest.raises(BuildError, match="no such column 'm'"):
        keyed.aggregate("a", n=cw.max("m"))
    with pytest.raises(BuildError, match="no such column 'm'"):
        keyed.top("t", 3, by="m")
    with pytest.raises(BuildError, match=r"named 'n'.*rank='...'"):
        keyed.top("t", 3, by="n", rank="n")
    other = counts(flow, "other")
    known |= set(flow.graph.steps)
    with pytest.raises(BuildError, match="different types"):
        other.key_by("value").join("j", counts(flow, "third").key_by("window_end"), window=MINUTE)
    assert set(flow.graph.steps) - known <= {"third", "third-in", "third-w"}
