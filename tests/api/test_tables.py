"""Steps that keep tables, as the user writes them: types, updating streams, and what is refused."""

from __future__ import annotations

import polars as pl
import pytest

import cutwater as cw
from cutwater.errors import BuildError


@pytest.fixture
def latest(flights):
    return flights.key_by("origin").deduplicate("latest", keep="last")


class TestDeduplicate:
    def test_the_first_rows_are_the_stream_with_fewer_rows(self, flights):
        first = flights.key_by("origin", "carrier").deduplicate("d")
        assert first.schema == flights.schema
        assert first.type.event_time == "scheduled"
        assert first.type.keys == ("origin", "carrier")
        assert first.type.changes is None
        with pytest.raises(BuildError, match="without within= no row is late"):
            _ = first.late

    def test_the_latest_rows_are_an_updating_stream(self, flights, latest):
        assert latest.schema.names == ["op", *flights.schema.names]
        assert latest.type.changes == ("origin",)
        with pytest.raises(BuildError, match=r"rows of updating stream 'latest' as new ones.*keep='first'") as caught:
            latest.key_by("origin").window("w", cw.tumbling("1h"))
        assert caught.value.step == "w"
        assert "Keep the column" not in str(caught.value)
        plain = latest.drop("plain", "op").key_by("origin")
        with pytest.raises(BuildError, match="event time was lost at step 'latest': rows of an updating stream"):
            plain.window("w", cw.tumbling("1h"))

    def test_within_needs_event_time_and_gives_late_rows(self, flow, flights):
        made = flights.key_by("origin").deduplicate("d", within="1h")
        assert made.late.schema == flights.schema
        assert flow.graph.steps["d"].spec.within_us == 3_600_000_000
        other = flow.read("other", cw.memory([], schema="k long"))
        with pytest.raises(BuildError, match=r"within= needs event time, but .* reads without one"):
            other.key_by("k").deduplicate("e", within="1h")

    def test_explain_says_what_is_kept(self, flow, latest):
        latest.write("out", cw.discard())
        assert "keep last" in flow.explain()


class TestUpdatingStreams:
    @pytest.mark.parametrize(
        "step",
        [
            lambda s: s.key_by("origin").aggregate("x", n=cw.count()),
            lambda s: s.key_by("origin").deduplicate("x"),
            lambda s: s.filter("f", pl.col("delay") > 0).key_by("origin").aggregate("x", n=cw.count()),
            lambda s: s.rename("r", origin="from").key_by("from").aggregate("x", n=cw.count()),
            lambda s: s.map("m", lambda row: row, s.schema).key_by("origin").aggregate("x", n=cw.count()),
            lambda s: s.union("u", s).key_by("origin").aggregate("x", n=cw.count()),
        ],
    )
    def test_steps_that_count_every_row_refuse_them(self, latest, step):
        with pytest.raises(BuildError, match=r"step 'x': .* would take the rows of updating stream"):
            step(latest)

    def test_a_stream_without_the_mark_is_an_ordinary_one(self, latest):
        rows = latest.drop("d", "op").key_by("origin").aggregate("a", n=cw.count())
        assert rows.type.changes is None

    def test_what_tells_rows_apart_follows_its_columns(self, latest):
        assert latest.rename("r", origin="from").type.changes == ("from",)
        assert latest.drop("d", "origin").type.changes == ()

    def test_one_from_outside_is_declared(self, flow):
        rows = flow.read("cdc", cw.memory([], schema="op string, id long, n long"))
        assert rows.with_changes("id").type.changes == ("id",)
        assert rows.key_by("id").with_changes("id").keys == ("id",)
        with pytest.raises(BuildError, match="step 'cdc': no such column 'key'"):
            rows.with_changes("key")
        with pytest.raises(BuildError, match="no such column 'op'"):
            flow.read("other", cw.memory([], schema="id long")).with_changes("id")
        with pytest.raises(BuildError, match="column 'op' is int64, not string"):
            flow.read("third", cw.memory([], schema="op long")).with_changes()


class TestJoinTables:
    def test_the_result_is_an_updating_stream_by_key(self, flow, flights, latest):
        joined = latest.key_by("origin").join_tables("j", flights.key_by("origin"), how="full", keep="last")
        assert joined.schema.names[:5] == latest.schema.names[:5]
        assert joined.schema.names[-1] == "distance_right"
        assert joined.type.keys == joined.type.changes == ("origin",)
        assert flow.graph.steps["j"].spec.updating == (True, False)

    def test_a_row_without_a_left_side_has_no_left_key(self, flow, flights):
        airports = flow.read("airports", cw.memory([], schema="code string, name string"))
        sides = flights.key_by("origin"), airports.key_by("code")
        assert sides[0].join_tables("full", sides[1], how="full", keep="last").type.keys == ()
        assert sides[0].join_tables("left", sides[1], how="left", keep="last").type.keys == ("origin",)

    def test_the_key_must_tell_the_rows_of_a_table_apart(self, flow, flights, latest):
        with pytest.raises(BuildError, match="told apart by origin, but the join keeps one row for each carrier"):
            latest.key_by("carrier").join_tables("j", flights.key_by("carrier"))
        with pytest.raises(BuildError, match="the right side is an updating stream whose rows have no known key"):
            flights.key_by("origin").join_tables("i", latest.drop("d", "origin").key_by("carrier"))

    def test_a_stream_whose_rows_replace_each_other_is_told_of(self, flights):
        by_origin = flights.key_by("origin")
        with pytest.warns(
            UserWarning, match=r"step 'j': .*the left side, step 'flights', and the right .*keep='last'"
        ) as told:
            by_origin.join_tables("j", by_origin)
        assert told[0].filename == __file__
        with pytest.raises(BuildError, match="keep='first' is unknown"):
            by_origin.join_tables("k", by_origin, keep="first")

    @pytest.mark.parametrize(
        "side",
        [
            lambda f: f.key_by("origin").aggregate("s", n=cw.count()).key_by("origin"),
            lambda f: f.key_by("origin").aggregate("s", n=cw.count()).rename("r", origin="o").key_by("o"),
            lambda f: f.key_by("origin").deduplicate("s").drop("r", "delay").key_by("origin"),
            lambda f: f.key_by("origin").deduplicate("s", keep="last").key_by("origin"),
            lambda f: (
                f.key_by("origin")
                .window("w", cw.tumbling("1h"))
                .aggregate("s", n=cw.count())
                .key_by("origin", "window_start")
            ),
        ],
    )
    def test_one_that_holds_the_latest_of_each_key_is_not(self, flights, side):
        # Warnings are errors in tests.
        made = side(flights)
        made.join_tables("j", made)

    @pytest.mark.parametrize(
        "side",
        [
            lambda f: f.key_by("origin", "carrier").aggregate("s", n=cw.count()).key_by("origin"),
            lambda f: f.key_by("origin").aggregate("s", n=cw.count()).drop("r", "origin").key_by("n"),
            lambda f: f.key_by("origin").deduplicate("s", within="1h").key_by("origin"),
            lambda f: f.key_by("origin").window("w", cw.tumbling("1h")).aggregate("s", n=cw.count()).key_by("origin"),
            lambda f: (
                f.key_by("origin")
                .window("w", cw.tumbling("1h"), early=cw.every(rows=2))
                .aggregate("s", n=cw.count())
                .key_by("origin", "window_start")
            ),
        ],
    )
    def test_rows_of_which_a_key_may_have_several_are(self, flights, side):
        made = side(flights)
        with pytest.warns(UserWarning, match="join_tables keeps one row of each key"):
            made.join_tables("j", made)

    def test_both_sides_have_a_key(self, flights, latest):
        with pytest.raises(BuildError, match="the right side of the join has no key"):
            latest.key_by("origin").join_tables("j", flights)


class TestTop:
    def test_ranks_tell_rows_apart(self, flow, flights):
        made = flights.key_by("origin").top("t", 3, by="delay", rank="place")
        assert made.schema.names == ["op", *flights.schema.names, "place"]
        assert made.type.changes == ("origin", "place")
        assert flow.graph.steps["t"].spec.rows.descending == (True,)
        made.write("out", cw.discard())
        assert "rows top 3 by delay descending" in flow.explain()

    def test_of_an_updating_stream_all_rows_are_kept(self, flow, latest):
        made = latest.key_by("carrier").top("t", 3, by=["delay", "distance"], descending=[False, True])
        assert made.type.changes == ("origin",)
        assert flow.graph.steps["t"].spec.rows.removing

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"by": "dely"}, "dely"),
            ({"by": "carrier"}, "cannot be ordered by 'carrier' of type string"),
            ({"by": []}, "by names at least one column"),
            ({"by": "delay", "descending": [True, False]}, "one answer for all or one for each"),
            ({"by": "delay", "rank": "op"}, "two columns would be named 'op'"),
        ],
    )
    def test_mistakes(self, flights, given, told):
        with pytest.raises(BuildError, match=rf"step 't': .*{told}"):
            flights.key_by("origin").top("t", 3, **given)


class TestTopOfWindows:
    def test_the_lists_of_a_window_are_taken_apart_by_a_step_of_their_own(self, flow, flights):
        best = flights.key_by("origin").window("w", cw.tumbling("1h")).top("best", 3, by="delay")
        assert best.schema.names == ["window_start", "window_end", *flights.schema.names, "rank"]
        assert best.type.event_time == "window_start"
        assert best.late.schema == flights.schema
        assert [s.kind for s in flow.graph.steps.values()] == ["read", "window", "unnest"]
        best.write("out", cw.discard())
        assert ".rows = top 3 by delay descending" in flow.explain()

    def test_mistakes(self, flights):
        windows = flights.key_by("origin").window("w", cw.tumbling("1h"))
        with pytest.raises(BuildError, match="step 'a': two columns would be named 'delay'"):
            windows.top("a", 3, by="delay", rank="delay")
        with pytest.raises(BuildError, match="step 'b': n is a whole number"):
            windows.top("b", 0, by="delay")


class TestJoinAsOf:
    def test_rows_keep_their_event_time(self, flow, flights):
        weather = flow.read("weather", cw.memory([], schema="hour timestamp_ntz, origin string"), event_time="hour")
        joined = flights.key_by("origin").join_as_of("j", weather.key_by("origin"), how="left")
        assert joined.schema.names == [*flights.schema.names, "hour"]
        assert joined.type.event_time == "scheduled"
        assert (joined.late_left.schema, joined.late_right.schema) == (flights.schema, weather.schema)
        joined.write("out", cw.discard())
        assert "event time scheduled, hour" in flow.explain()

    def test_both_sides_need_a_key_and_event_time_and_rows_that_stay(self, flow, flights, latest):
        plain = flow.read("plain", cw.memory([], schema="origin string"))
        with pytest.raises(BuildError, match=r"needs event time, but on its right side .* reads without one"):
            flights.key_by("origin").join_as_of("a", plain.key_by("origin"))
        with pytest.raises(BuildError, match="the right side of the join has no key"):
            flights.key_by("origin").join_as_of("b", plain)
        with pytest.raises(BuildError, match="an as-of join would take the rows of updating stream 'latest'"):
            flights.key_by("origin").join_as_of("c", latest.key_by("origin"))
