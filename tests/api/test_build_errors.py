"""Mistakes of a program: found while it is written, with the step's id and what to do."""

from __future__ import annotations

import inspect
from datetime import timedelta

import polars as pl
import pyarrow as pa
import pytest

import cutwater as cw
from cutwater.api.steps.build import duration_us
from cutwater.config import format_us
from cutwater.errors import BuildError, CutwaterError

MEMORY = cw.memory([], schema="t timestamp, s string, x long, d date")
HOURLY = cw.tumbling("1h")


def read(flow, **options):
    return flow.read("r", MEMORY, **options)


MISTAKES = {
    "unknown column in filter": (lambda f: f.filter("f", pl.col("dealy") > 1), "f", ["dealy", "Did you mean 'delay'"]),
    "filter is not boolean": (lambda f: f.filter("f", pl.col("delay")), "f", ["bool"]),
    "filter by a function": (lambda f: f.filter("f", lambda row: True), "f", ["Polars expression", "map"]),
    "filter without predicate": (lambda f: f.filter("f"), "f", ["at least one"]),
    "expression across rows": (lambda f: f.filter("f", pl.col("delay") > pl.col("delay").mean()), "f", ["rows"]),
    "map_async without function": (lambda f: f.map_async("a", 5, "x long"), "a", ["function is needed"]),
    "map_async without time": (lambda f: f.map_async("a", print, "x long", timeout="0s"), "a", ["timeout", "above 0"]),
    "map_async of changes without order": (
        lambda f: f.key_by("origin").deduplicate("d", keep="last").map_async("a", print, "op string", ordered=False),
        "a",
        ["in order", "ordered=True"],
    ),
    "map_async on a broadcast": (lambda f: f.broadcast().map_async("a", print, "x long"), "a", ["every subtask"]),
    "unknown column in select": (lambda f: f.select("s", "orign"), "s", ["orign", "Did you mean 'origin'"]),
    "select across rows": (lambda f: f.select("s", pl.col("delay").sum()), "s", ["rows"]),
    "name as new column": (lambda f: f.with_columns("w", a="delay"), "w", ["Polars expression", "str"]),
    "constant as new column": (lambda f: f.with_columns("w", a=1), "w", ["not int", "pl.lit(1)"]),
    "drop of an unknown column": (lambda f: f.drop("d", "dist"), "d", ["dist", "distance"]),
    "drop of everything": (lambda f: f.drop("d", *f.schema.names), "d", ["no column"]),
    "drop of nothing": (lambda f: f.drop("d"), "d", ["name of a column"]),
    "rename of an unknown column": (lambda f: f.rename("n", a="b"), "n", ["'a'"]),
    "rename to a name that is there": (lambda f: f.rename("n", origin="carrier"), "n", ["two columns", "carrier"]),
    "rename of nothing": (lambda f: f.rename("n"), "n", ["at least one column"]),
    "map without function": (lambda f: f.map("m", 7, "x long"), "m", ["function"]),
    "map with a bad schema": (lambda f: f.map("m", lambda r: r, "x lung"), "m", ["lung"]),
    "unknown key": (lambda f: f.key_by("orign"), "flights", ["orign", "Did you mean 'origin'"]),
    "no key": (lambda f: f.key_by(), "flights", ["no key"]),
    "key named twice": (lambda f: f.key_by("origin", "origin"), "flights", ["twice"]),
    "key as expression": (lambda f: f.key_by(pl.col("delay") % 2), "flights", ["by its name", "with_columns"]),
    "key as column": (lambda f: f.key_by(pl.col("origin")), "flights", ["by its name", "Write 'origin'."]),
    "key as list of lists": (
        lambda f: f.key_by(["origin"], ["carrier"]),
        "flights",
        ["one by one, or all in one list"],
    ),
    "aggregate without aggregates": (lambda f: f.key_by("origin").aggregate("a"), "a", ["at least one", "cw.count()"]),
    "aggregate of an unknown column": (
        lambda f: f.key_by("origin").aggregate("a", m=cw.max("dealy")),
        "a",
        ["dealy", "Did you mean 'delay'"],
    ),
    "aggregate that does not fit": (lambda f: f.key_by("origin").aggregate("a", m=cw.sum("carrier")), "a", ["sum"]),
    "aggregate that is none": (lambda f: f.key_by("origin").aggregate("a", m="max"), "a", ["not an aggregate"]),
    "aggregate without a name": (
        lambda f: f.key_by("origin").aggregate("a", cw.count()),
        "a",
        ["without a name", "n=cw.count()"],
    ),
    "aggregate of a window without a name": (
        lambda f: f.key_by("origin").window("w", HOURLY).aggregate("a", cw.max("delay"), n=cw.count()),
        "a",
        ["without a name", "n=cw.max('delay')"],
    ),
    "aggregate by its place that is none": (
        lambda f: f.key_by("origin").aggregate("a", "max"),
        "a",
        ["'max' is not an aggregate", "n=cw.count()"],
    ),
    "aggregate named like the key": (
        lambda f: f.key_by("origin").aggregate("a", origin=cw.count()),
        "a",
        ["origin"],
    ),
    "union with one stream": (lambda f: f.union("u"), "u", ["at least one other"]),
    "union with no stream": (lambda f: f.union("u", [1]), "u", ["stream is needed"]),
    "union of different schemas": (
        lambda f: f.union("u", f.select("s", "origin", "delay")),
        "u",
        ["'scheduled' is missing", "'carrier' is missing"],
    ),
    "sink that is none": (lambda f: f.write("o", "out/"), "o", ["not a sink", "cw.files"]),
    "foreach_batch without function": (lambda f: f.foreach_batch("o", None), "o", ["function"]),
    "sink of a broadcast stream": (lambda f: f.broadcast().write("o", cw.discard()), "o", ["once per subtask"]),
    "sink with another parallelism": (
        lambda f: f.foreach_batch("o", lambda rows, id: None, parallelism=0),
        "o",
        ["parallelism", "0"],
    ),
    "parallelism below one": (lambda f: f.drop("d", "delay", parallelism=0), "d", ["parallelism", "0"]),
    "parallelism not a number": (lambda f: f.drop("d", "delay", parallelism=True), "d", ["parallelism", "True"]),
    "dead letters not asked for": (lambda f: f.dead_letters, "flights", ["bad_rows='dead_letter'"]),
    "event time of another type": (lambda f: f.with_event_time("delay"), "flights", ["int64"]),
    "window that is none": (lambda f: f.key_by("origin").window("w", "1h"), "w", ["not a window", "cw.tumbling"]),
    "negative lateness": (
        lambda f: f.key_by("origin").window("w", HOURLY, allowed_lateness="-1m"),
        "w",
        ["allowed_lateness", "negative"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_its_step_and_leaves_no_trace(flow, flights, name):
    make, step, words = MISTAKES[name]
    known = set(flow.graph.steps)
    with pytest.raises(CutwaterError) as caught:
        make(flights)
    assert isinstance(caught.value, BuildError)
    assert caught.value.step == step
    for word in words:
        assert word in str(caught.value)
    assert step not in set(flow.graph.steps) - known


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"event_time": "tt"}, ["event-time column 'tt'", "Did you mean 't'"]),
        ({"event_time": "s"}, ["string", "neither a timestamp nor a date"]),
        ({"event_time": "x"}, ["int64", "neither a timestamp nor a date"]),
        ({"event_time": "t", "out_of_order": "-1h"}, ["out_of_order", "negative"]),
        ({"event_time": "t", "out_of_order": -5}, ["out_of_order", "negative"]),
        ({"event_time": "t", "out_of_order": timedelta(seconds=-1)}, ["out_of_order", "negative"]),
        ({"event_time": "t", "out_of_order": "soon"}, ["out_of_order", "not a duration"]),
        ({"event_time": "t", "out_of_order": None}, ["out_of_order", "not a duration"]),
        ({"out_of_order": "1h"}, ["without event_time"]),
        ({"bad_rows": "ignore"}, ["bad_rows", "dead_letter"]),
        ({"parallelism": -1}, ["parallelism", "-1"]),
    ],
)
def test_a_wrong_option_of_read_is_refused(flow, options, words):
    with pytest.raises(BuildError) as caught:
        read(flow, **options)
    assert caught.value.step == "r"
    for word in words:
        assert word in str(caught.value)
    assert not flow.graph.steps


@pytest.mark.parametrize("source", ["flights/*.parquet", None, 7, pa.table({"x": [1]}), cw.discard(), MEMORY.__class__])
def test_what_is_no_source_is_refused(flow, source):
    with pytest.raises(BuildError, match="is not a source"):
        flow.read("r", source)


@pytest.mark.parametrize(
    "id", ["", " ", "a b", "a/b", "..", ".", ".hidden", "ä", "x" * 129, "a\n", None, 5, pl.col("x")]
)
def test_an_id_that_cannot_stand_in_a_path_is_refused(flow, flights, id):
    with pytest.raises(BuildError, match="step id"):
        flights.filter(id, pl.col("delay") > 1)
    assert list(flow.graph.steps) == ["flights"]


@pytest.mark.parametrize("id", ["a", "A-1", "late.flights", "_x", "9", "x" * 128])
def test_other_ids_are_taken(flow, flights, id):
    flights.filter(id, pl.col("delay") > 1)
    assert list(flow.graph.steps) == ["flights", id]


@pytest.mark.parametrize("name", ["", "a b", "../x", ".x", None, 3])
def test_a_dataflow_name_that_cannot_name_a_folder_is_refused(name):
    with pytest.raises(BuildError, match="name of a dataflow"):
        cw.Dataflow(name)


STEP_METHODS = {
    "filter": lambda f: f.filter("flights", pl.col("delay") > 1),
    "select": lambda f: f.select("flights", "delay"),
    "with_columns": lambda f: f.with_columns("flights", a=pl.col("delay")),
    "drop": lambda f: f.drop("flights", "delay"),
    "rename": lambda f: f.rename("flights", delay="x"),
    "map_batches": lambda f: f.map_batches("flights", lambda b: b, "x long"),
    "map": lambda f: f.map("flights", lambda r: r, "x long"),
    "flat_map": lambda f: f.flat_map("flights", lambda r: [r], "x long"),
    "map_async": lambda f: f.map_async("flights", lambda r: r, "x long"),
    "union": lambda f: f.union("flights", f),
    "enrich": lambda f: f.enrich("flights", pa.table({"carrier": ["AA"]}), on="carrier"),
    "write": lambda f: f.write("flights", cw.discard()),
    "foreach_batch": lambda f: f.foreach_batch("flights", lambda rows, id: None),
    "collect": lambda f: f.collect("flights"),
    "key_by": lambda f: f.key_by("origin", dead_letters="flights"),
    "aggregate": lambda f: f.key_by("origin").aggregate("flights", n=cw.count()),
    "transform_with_state": lambda f: f.key_by("origin").transform_with_state("flights", 3, ""),
    "transform_with_state_in_pandas": lambda f: f.key_by("origin").transform_with_state_in_pandas("flights", 3, ""),
    "process": lambda f: f.key_by("origin").process("flights", object(), "x long"),
    "window": lambda f: f.key_by("origin").window("flights", HOURLY),
    "join": lambda f: f.key_by("origin").join("flights", f.key_by("origin"), within=(0, 0)),
    "join_tables": lambda f: f.key_by("origin").join_tables("flights", f.key_by("origin")),
    "join_as_of": lambda f: f.key_by("origin").join_as_of("flights", f.key_by("origin")),
    "deduplicate": lambda f: f.key_by("origin").deduplicate("flights"),
    "top": lambda f: f.key_by("origin").top("flights", 1, by="delay"),
}


@pytest.mark.parametrize("method", STEP_METHODS)
def test_an_id_is_given_once(flights, method):
    with pytest.raises(BuildError, match="the id is taken by the read step") as caught:
        STEP_METHODS[method](flights)
    assert caught.value.step == "flights"


def test_every_step_method_is_tried_above():
    from cutwater.api.streams.keyed import KeyedStream

    taking_ids = {
        name
        for name, method in inspect.getmembers(KeyedStream, inspect.isfunction)
        if not name.startswith("_") and "id" in inspect.signature(method).parameters
    }
    assert taking_ids == set(STEP_METHODS) - {"key_by"}


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda f: f.aggregate("a", n=cw.count()), r"aggregate needs a key, .* Write .key_by\('column'\).aggregate"),
        (lambda f: f.filter("f", pl.col("delay") > 1).window("w", HOURLY), "window needs a key"),
        (lambda f: f.groupBy("origin"), r"no 'groupBy'. Write key_by\('column'\)"),
        (lambda f: f.colect("c"), "no 'colect'. Did you mean 'collect'"),
        (lambda f: f.key_by("origin").sink_to("s"), "no 'sink_to'. Write write"),
    ],
)
def test_a_method_that_a_stream_does_not_have_is_explained(flights, use, message):
    with pytest.raises(AttributeError, match=message):
        use(flights)


def test_a_stream_still_says_truly_what_it_has(flights):
    assert not hasattr(flights, "aggregate")
    assert hasattr(flights.key_by("origin"), "aggregate")
    assert not hasattr(flights.__class__.__new__(flights.__class__), "_upstream")


class TestEventTime:
    """A window says at which step the event time was lost."""

    @pytest.mark.parametrize(
        ("lose", "story"),
        [
            (lambda f: f.select("cut", "origin", "delay"), "lost at step 'cut': column 'scheduled' is not among"),
            (lambda f: f.drop("cut", "scheduled"), "lost at step 'cut'"),
            (
                lambda f: f.with_columns("cut", scheduled=pl.col("scheduled").dt.truncate("1d")),
                "lost at step 'cut': column 'scheduled' is overwritten",
            ),
            (lambda f: f.map("cut", lambda r: r, "origin string"), "lost at step 'cut': .* function's schema"),
            (lambda f: f.map("cut", lambda r: r, "origin string, scheduled string"), "comes out .* as string"),
        ],
    )
    def test_it_was_lost(self, flights, lose, story):
        stream = lose(flights).filter("later", pl.col("origin") != "")
        with pytest.raises(BuildError, match=story) as caught:
            stream.key_by("origin").window("w", HOURLY)
        assert caught.value.step == "w"

    def test_there_never_was_one(self, flow):
        stream = read(flow).filter("f", pl.col("x") > 1)
        with pytest.raises(BuildError, match=r"step 'r' reads without one.*flow\.read\('r'"):
            stream.key_by("s").window("w", HOURLY)
        with pytest.raises(BuildError, match="reads without one"):
            stream.with_event_time("t")

    def test_late_rows_have_none(self, flights):
        result = flights.key_by("origin").window("w", HOURLY).aggregate("a", n=cw.count())
        with pytest.raises(BuildError, match="side output of step 'a'"):
            result.late.key_by("origin").window("again", HOURLY)

    def test_results_that_may_be_updated_are_not_counted_twice(self, flights):
        result = flights.key_by("origin").window("w", HOURLY, allowed_lateness="5m").aggregate("a", n=cw.count())
        with pytest.raises(BuildError, match=r"lost at step 'a': .*count twice"):
            result.key_by("origin").window("daily", cw.tumbling("1d"))

    def test_a_window_must_not_cut_the_windows_below(self, flights):
        hourly = flights.key_by("origin").window("w", HOURLY).aggregate("a", n=cw.count()).key_by("origin")
        for bad in (cw.tumbling("90m"), cw.tumbling("30m"), cw.tumbling("2h", offset="15m")):
            with pytest.raises(BuildError, match="in two"):
                hourly.window("x", bad).aggregate("b", n=cw.count())
        hourly.window("x", cw.tumbling("2h", offset="-1h")).aggregate("b", n=cw.count())

    def test_different_event_times_of_a_union(self, flow):
        streams = [flow.read(f"r{i}", MEMORY, event_time=t) for i, t in enumerate(["t", "d"])]
        streams = [s.with_columns(f"w{i}", d=pl.lit(None, pl.Date)) for i, s in enumerate(streams)]
        both = streams[0].union("u", streams[1])
        with pytest.raises(BuildError, match="lost at step 'u'"):
            both.key_by("s").window("w", HOURLY)


class TestWholeDataflow:
    def test_an_empty_one_is_refused(self, flow):
        with pytest.raises(BuildError, match="is empty"):
            flow.validate()

    def test_one_without_sink_is_refused(self, flow, flights):
        flights.filter("f", pl.col("delay") > 1)
        with pytest.raises(BuildError, match="writes nothing"):
            flow.validate()

    def test_rows_that_nobody_uses_are_named(self, flow, flights):
        flights.write("out", cw.discard())
        flights.filter("dangling", pl.col("delay") > 1)
        with pytest.raises(BuildError, match="nobody uses its rows") as caught:
            flow.validate()
        assert caught.value.step == "dangling"

    @pytest.mark.parametrize("step", ["bad-keys", "r"])
    def test_dead_letters_that_nobody_uses_are_refused(self, flow, step):
        stream = read(flow, bad_rows="dead_letter" if step == "r" else None)
        keyed = stream.key_by("s", dead_letters="bad-keys") if step == "bad-keys" else stream
        keyed.write("out", cw.discard())
        with pytest.raises(BuildError, match="dead letters, so they would be lost") as caught:
            flow.validate()
        assert caught.value.step == step
        keyed.dead_letters.write("bad", cw.discard())
        flow.validate()

    def test_late_rows_may_be_left(self, flow, flights):
        flights.key_by("origin").window("w", HOURLY).aggregate("a", n=cw.count()).write("out", cw.discard())
        flow.validate()

    def test_streams_of_two_dataflows_do_not_mix(self, flights):
        other = cw.Dataflow("other").read("r", cw.memory([], schema=flights.schema))
        with pytest.raises(BuildError, match="belongs to dataflow 'other'"):
            flights.union("u", other)


class TestDurations:
    @pytest.mark.parametrize("us", [0, 1, 999, 1000, 1_500_000, 3_600_000_000, 90_061_001_001, -5_400_000_000])
    def test_what_is_printed_is_read_again(self, us):
        assert duration_us(format_us(us), "d", signed=True) == us

    def test_timedeltas_are_taken(self):
        assert duration_us(timedelta(minutes=2, microseconds=3), "d") == 120_000_003

    @pytest.mark.parametrize("number", [5, -5, 0.5])
    def test_a_number_is_refused_because_it_could_mean_seconds_or_milliseconds(self, number):
        assert duration_us(0, "d") == 0
        with pytest.raises(BuildError, match=rf"d {number} (has no unit. Write for example '{number}s'|is negative)"):
            duration_us(number, "d", signed=True)

    @pytest.mark.parametrize("text", ["--1h", "1h -30m", "", "-", "1", "1 fortnight", True, [1]])
    def test_anything_else_is_refused(self, text):
        with pytest.raises(BuildError, match="d "):
            duration_us(text, "d", signed=True)

    def test_a_window_of_no_size_is_refused(self):
        with pytest.raises(BuildError, match="window size is 0"):
            cw.tumbling("0s")


@pytest.mark.parametrize("make", [cw.sum, cw.min, cw.max, cw.mean, cw.first, cw.last, cw.count])
@pytest.mark.parametrize("column", [pl.col("x"), "", 5])
def test_an_aggregate_takes_the_name_of_a_column(make, column):
    with pytest.raises(BuildError, match="name of a column"):
        make(column)
