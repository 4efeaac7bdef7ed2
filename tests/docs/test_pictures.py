"""The worked examples come out as the texts say; what does not work is found out by the checker, every time."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cutwater.protocol.protocols import PROTOCOLS
from cutwater.trace.checker import check
from cutwater.trace.diagram import cut_lines
from cutwater.trace.events import Cut, MarkerTaken, Step
from cutwater.trace.result import Kind
from docs.pictures import __main__ as pictures
from docs.pictures import examples, wrong_runs
from docs.pictures.stage import Stage

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def tallies():
    """Every model, run with every seed, once."""
    return {name: model.tally() for name, model in pictures.MODELS.items()}


def recorded(trace, snapshot=1):
    line = cut_lines(trace)[snapshot]
    return line.states, {channel: rows for channel, rows in line.recorded.items() if rows}


# ------------------------------------------------------------------------------------------------- worked examples


def test_three_processes_the_message_from_h_to_d_is_the_state_of_c21():
    trace = examples.three_processes()
    assert recorded(trace) == ({"P1": "ab", "P2": "fgh", "P3": "i"}, {"C21": ("h→d",)})
    assert str(check(trace, drained=True)) == "30 events, 1 complete snapshot: no violation"
    assert len(check(trace).counts) == 6


def test_three_processes_every_process_records_itself_once_and_gets_a_marker_on_every_channel():
    events = examples.three_processes().events
    assert sorted(e.process for e in events if isinstance(e, Cut)) == ["P1", "P2", "P3"]
    assert sorted(e.channel for e in events if isinstance(e, MarkerTaken)) == ["C12", "C13", "C21", "C23", "C31", "C32"]


def test_the_token_is_in_exactly_one_place_of_the_snapshot():
    trace = examples.token()
    assert recorded(trace) == ({"p": "has it not", "q": "has it not"}, {"c'": ("token",)})
    result = check(trace, drained=True)
    assert result.ok
    assert result.reorderings[0].occurred, "here the recorded state is one that the run really was in"


def test_count_and_print_the_acyclic_snapshot_holds_states_only():
    trace = examples.count_and_print()
    states, channels = recorded(trace)
    assert channels == {}
    assert (states["count-1"], states["count-2"], states["print-2"]) == ("1", "2", "1 2")
    assert check(trace, drained=True).ok


def test_count_and_print_a_row_behind_the_barrier_waits_while_the_other_source_goes_on():
    events = examples.count_and_print().events
    cut = next(i for i, e in enumerate(events) if isinstance(e, Cut) and e.process == "count-2")
    taken = {v: i for i, e in enumerate(events) if isinstance(e, Step) for s in e.takes for v in s.values}
    marker = next(i for i, e in enumerate(events) if isinstance(e, MarkerTaken) and e.channel == "s1c2")
    assert marker < taken["be"] < cut < taken["not"]


def test_cyclic_the_log_of_the_back_edge_is_the_only_channel_state():
    trace = examples.cyclic()
    assert recorded(trace)[1] == {"back": ("x'", "y'")}
    assert check(trace).ok


def test_two_snapshots_at_once_have_their_own_recordings():
    trace = examples.two_snapshots()
    assert recorded(trace, 1)[1] == {"C21": ("u",)}
    assert recorded(trace, 2)[1] == {"C13": ("v",), "C23": ("x",)}
    assert check(trace, drained=True).ok


def test_waiting_for_all_inputs_of_a_loop_never_ends():
    """The same loop with its back-edge not known as one: the head waits for a barrier that it has to send itself."""
    links = [("in", "source", "head"), ("on", "head", "tail"), ("back", "tail", "head")]
    for known in (False, True):
        back = frozenset({"back"} if known else ())
        stage = Stage("", ("source", "head", "tail"), links, row=PROTOCOLS["aligned"], back_edges=back)
        stage.begin("source", 1)
        stage.drain()
        assert stage.complete == ({1} if known else set())
        assert stage.cuts[1] == ({"source", "head", "tail"} if known else {"source"})


# -------------------------------------------------------------------------------------- S* that never occurred (CL7)


def test_cl7_a_recorded_state_that_never_occurred_is_right_all_the_same():
    trace = examples.never_occurred()
    result = check(trace, drained=True)
    assert result.ok
    [found] = result.reorderings
    assert not found.occurred
    assert (found.states, found.channels, found.swaps) == ({"p": "A", "q": "D"}, {"c'": ("M'",)}, 1)


def test_cl7_the_same_events_in_another_order_lead_through_it():
    trace = examples.never_occurred()
    other = examples.reordered(trace, examples.reordering_of(trace))
    result = check(other)
    assert result.ok
    assert result.reorderings[0].occurred
    assert result.reorderings[0].swaps == 0
    assert result.reorderings[0].states == examples.reordering_of(trace).states


# -------------------------------------------------------------------------------------------- what does not work


def test_an_agreed_clock_time_gives_wrong_cuts_and_more_of_them_with_more_skew(tallies):
    small, large = tallies["agreed_time_1"], tallies["agreed_time_20"]
    assert small.kinds[Kind.CUT] < large.kinds[Kind.CUT] > 50
    assert small.kinds[Kind.LOST] == small.runs, "what is on its way is lost however good the clocks are"


def test_a_central_command_without_markers_gives_wrong_cuts(tallies):
    assert tallies["central_command"].kinds[Kind.CUT] > 20
    (wrong,) = check(wrong_runs.command_overtaken(), quick=True).violations
    assert (wrong.kind, wrong.channel) == (Kind.CUT, "C12")


def test_standing_still_without_recording_channels_loses_what_is_on_its_way(tallies):
    still = tallies["all_stand_still"]
    assert (still.kinds[Kind.CUT], still.kinds[Kind.LOST]) == (0, still.runs)


def test_markers_give_no_wrong_cut_on_the_same_work(tallies):
    assert tallies["markers"].wrong == tallies["markers"].stuck == 0


def test_n_recorded_larger_than_n_doubles_the_token():
    result = check(wrong_runs.token_twice())
    assert Kind.FUTURE in result.kinds()
    counts = next(c for c in result.counts if c.channel == "c")
    assert (counts.sent, counts.sent_recorded) == (0, 1)


def test_n_recorded_smaller_than_n_loses_the_token():
    result = check(wrong_runs.token_lost())
    assert Kind.LOST in result.kinds()
    counts = next(c for c in result.counts if c.channel == "c")
    assert (counts.sent, counts.sent_recorded) == (1, 0)


def test_the_first_idea_fails_on_a_ring_and_not_on_a_line(tallies):
    assert tallies["first_idea_ring"].kinds[Kind.LOST] > 100
    assert tallies["first_idea_line"].wrong == 0
    assert tallies["ring_markers"].wrong == 0


def test_breadth_first_back_edges_are_right_only_with_the_blocking_rule_of_c2_and_log_more(tallies):
    assert tallies["breadth_open"].kinds[Kind.CUT] > 20
    assert tallies["breadth_blocking"].wrong == 0
    assert tallies["breadth_blocking"].logged > 1.05 * tallies["depth_blocking"].logged


def test_breadth_first_search_logs_where_there_is_no_loop():
    stage = wrong_runs.diamond()
    assert stage.rows_logged == 1
    assert check(stage.trace()).ok


def test_c2_without_its_blocking_rule_gives_wrong_cuts_even_with_depth_first_back_edges(tallies):
    assert tallies["depth_open"].kinds[Kind.CUT] > 10
    assert tallies["depth_blocking"].wrong == tallies["depth_blocking"].stuck == 0


def test_waiting_for_the_loops_barrier_without_a_log_loses_rows(tallies):
    assert tallies["waits_for_the_loop"].kinds[Kind.LOST] > 50
    assert tallies["aligned_loop"].wrong == 0


def test_at_least_once_on_a_loop_without_logs_loses_rows_so_it_is_not_at_least_once(tallies):
    assert tallies["at_least_once_no_logs"].kinds[Kind.LOST] > 50
    assert tallies["at_least_once"].wrong == 0


def test_dropping_by_row_number_needs_the_order_log(tallies):
    assert tallies["replay_unlogged"].kinds[Kind.OUTPUT] > 100
    assert tallies["replay_unlogged"].kinds[Kind.CONTENT] > 100
    assert tallies["replay_logged"].wrong == 0


def test_dropping_by_frame_number_loses_and_doubles_rows(tallies):
    assert tallies["by_frame_number"].kinds[Kind.OUTPUT] > 100
    assert tallies["by_row_number"].wrong == 0


@pytest.mark.parametrize("name", [name for name, model in pictures.MODELS.items() if model.right])
def test_what_is_right_is_never_wrong_and_always_ends(name, tallies):
    assert (tallies[name].wrong, tallies[name].stuck) == (0, 0)


@pytest.mark.parametrize("name", [name for name, model in pictures.MODELS.items() if not model.right])
def test_what_is_wrong_is_found_and_void_of_no_run(name, tallies):
    assert tallies[name].wrong > 0
    assert tallies[name].stuck == 0


# ------------------------------------------------------------------------------------------------- documentation


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_of_the_documentation_is_current(name):
    """Otherwise run ``python -m docs.pictures``."""
    assert (DOCS / "pictures" / f"{name}.svg").read_text() == pictures.PICTURES[name]()


def test_there_is_no_picture_of_nothing():
    assert {p.stem for p in (DOCS / "pictures").glob("*.svg")} >= set(pictures.PICTURES)
    texts = "".join(page.read_text() for page in DOCS.glob("*.md"))
    assert [name for name in pictures.PICTURES if f"pictures/{name}.svg" not in texts] == []


def test_the_measured_table_is_current(tallies):
    """Otherwise run ``python -m docs.pictures``."""
    page = pictures.PAGE.read_text()
    assert page == pictures.filled(page, pictures.measured(tallies))
    assert "<!-- measured -->" in page


@pytest.mark.parametrize("page", ["claims", "what-does-not-work", "worked-examples"])
def test_every_test_that_a_page_names_exists(page):
    named = set(re.findall(r"`(test_\w+)`", (DOCS / f"{page}.md").read_text()))
    home = DOCS.parent
    files = [*(home / "tests").rglob("test_*.py"), *(home / "src" / "cutwater" / "testing").glob("*.py")]
    defined = {n for p in files for n in re.findall(r"def (test_\w+)", p.read_text())}
    assert sorted(named - defined) == []


@pytest.mark.parametrize("name", ["examples", "stage", "wrong_runs"])
def test_examples_in_docstrings_of_the_pictures(name):
    assert doctest.testmod(importlib.import_module(f"docs.pictures.{name}")).failed == 0
