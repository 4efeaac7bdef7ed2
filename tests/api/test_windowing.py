"""Windows as the user writes them: types of the results, what explain and a snapshot say, and what is refused."""

from __future__ import annotations

import pytest

import cutwater as cw
from cutwater.errors import BuildError


@pytest.fixture
def keyed(flights):
    return flights.key_by("origin")


OTHERS = {
    "sliding": (lambda: cw.sliding("1h", "5m"), "overlap or have no common size"),
    "session": (lambda: cw.session("30m"), "overlap or have no common size"),
    "global": (cw.global_window, "the global window has no borders"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_results_without_an_event_time_say_why(keyed, kind):
    make, reason = OTHERS[kind]
    made = keyed.window("w", make()).aggregate("a", n=cw.count())
    assert made.schema.names == ["origin", *(["window_start", "window_end"] if kind != "global" else []), "n"]
    assert made.type.keys == ("origin",)
    assert made.late.schema == keyed.schema
    with pytest.raises(BuildError, match=rf"event time was lost at step 'a': .*{reason}"):
        made.key_by("origin").window("again", cw.tumbling("1d"))
    if kind != "global":
        ends = made.with_event_time("window_end").key_by("origin")
        assert ends.window("again", cw.tumbling("1d")).aggregate("b", n=cw.count()).type.event_time == "window_start"


def test_early_results_have_no_event_time(keyed):
    made = keyed.window("w", cw.tumbling("1h"), early=cw.every(rows=10)).aggregate("a", n=cw.count())
    with pytest.raises(BuildError, match="with early results a window comes out several times"):
        made.key_by("origin").window("again", cw.tumbling("1d"))


def test_a_global_window_needs_no_event_time(flow):
    rows = flow.read("rows", cw.memory([], schema="k long, v long")).key_by("k")
    assert rows.window("w", cw.global_window()).aggregate("a", s=cw.sum("v")).schema.names == ["k", "s"]
    with pytest.raises(BuildError, match="a window needs event time, but"):
        rows.window("x", cw.session("1m"))


def test_windows_by_processing_time_need_no_event_time_and_have_none(flow):
    rows = flow.read("rows", cw.memory([], schema="k long, v long")).key_by("k")
    window = cw.tumbling("10s", offset="1s", time="processing")
    made = rows.window("w", window).aggregate("a", n=cw.count())
    assert [str(kind) for kind in made.schema.types] == ["int64", *["timestamp[us, tz=UTC]"] * 2, "int64"]
    said = "tumbling 10s, offset 1s, by processing time"
    assert f"window w: {said}" in flow.explain()
    assert flow.graph.steps["a"].spec.settings["windows"] == said, "it differs from windows by event time"
    with pytest.raises(BuildError, match="event time was lost at step 'a': its windows go by processing time"):
        made.key_by("k").window("x", cw.tumbling("1m"))
    made.key_by("k").window("y", cw.sliding("1m", "10s", time="processing")).aggregate("b", n=cw.sum("n"))
    ranked = rows.window("z", cw.session("5s", time="processing")).top("t", 1, by="v")
    for stream in (made, ranked):
        with pytest.raises(BuildError, match="by processing time no row is late"):
            _ = stream.late


def test_windows_by_processing_time_may_cut_results_of_windows_in_two(keyed):
    """They are rows like others to the clock."""
    hourly = keyed.window("w", cw.tumbling("1h")).aggregate("a", n=cw.count()).key_by("origin")
    hourly.window("x", cw.tumbling("7m", time="processing")).aggregate("b", n=cw.sum("n"))


def test_windows_over_windows_must_not_cut_them(keyed):
    hourly = keyed.window("w", cw.tumbling("1h")).aggregate("a", n=cw.count()).key_by("origin")
    for bad in (cw.sliding("3h", "30m"), cw.sliding("90m", "1h"), cw.sliding("2h", "1h", offset="5m")):
        with pytest.raises(BuildError, match="cut the results of windows of 1h in two"):
            hourly.window("x", bad).aggregate("b", n=cw.count())
    with pytest.raises(BuildError, match="sessions of the results of windows"):
        hourly.window("x", cw.session("2h")).aggregate("b", n=cw.count())
    hourly.window("x", cw.sliding("24h", "2h", offset="1h")).aggregate("b", n=cw.sum("n"))
    hourly.window("y", cw.global_window()).aggregate("c", n=cw.sum("n"))


def test_explain_and_the_snapshot_say_which_windows(flow, keyed):
    window = cw.sliding("1h", "5m", offset="-1m")
    keyed.window("w", window, allowed_lateness="2m", early=cw.every(event_time="1m"), discarding=True).aggregate(
        "a", n=cw.count()
    ).write("out", cw.discard())
    said = "sliding 1h, every 5m, offset -1m"
    assert f"window w: {said}, lateness 2m, early every 1m of event time, discarding" in flow.explain()
    settings = flow.graph.steps["a"].spec.settings
    assert settings["windows"] == said
    assert (settings["early results"], settings["results"]) == ("every 1m of event time", "discarding")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda k: cw.sliding("1h", 0), "every is 0"),
        (lambda k: cw.sliding("0s", "1m"), "window size is 0"),
        (lambda k: cw.sliding("1h", "5m", offset="5m"), "window offset"),
        (lambda k: cw.tumbling("1h", time="wall"), "time is 'event' or 'processing', not 'wall'"),
        (
            lambda k: k.window("w", cw.tumbling("1h", time="processing"), allowed_lateness="1m").aggregate(
                "a", n=cw.count()
            ),
            "by processing time no row is late",
        ),
        (lambda k: cw.session("-1m"), "session gap '-1m' is negative"),
        (lambda k: cw.session("soon"), "is not a duration"),
        (lambda k: cw.every(), "one of rows, event_time and processing_time, not 0 of them"),
        (lambda k: cw.every(rows=2, event_time="1s"), "not 2 of them"),
        (lambda k: cw.every(rows="2"), "every '2' rows is not possible"),
        (lambda k: cw.every(rows=0), "every 0 rows is not possible"),
        (lambda k: k.window("w", cw.tumbling("1h"), early="1m"), r"early='1m' says not when"),
        (
            lambda k: k.window("w", cw.global_window(), allowed_lateness="1m").aggregate("a", n=cw.count()),
            "no late rows",
        ),
        (lambda k: k.window("w", cw.session("1m")).aggregate("a", window_end=cw.count()), "named 'window_end'"),
    ],
)
def test_mistakes_are_told_when_the_flow_is_built(keyed, make, message):
    with pytest.raises(BuildError, match=message):
        make(keyed)
