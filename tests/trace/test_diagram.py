"""Pictures of traces: everything is in them, in its place, and nothing is drawn that was not there."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from trace_world import run

from cutwater.errors import ConfigError
from cutwater.trace.diagram import columns, diagram, messages, window_of
from cutwater.trace.events import Committed, Cut, Header, Link, Span, Step, Trace

SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture):
    """Class -> elements, parsed; an unparsable picture raises."""
    found = {}
    for element in ET.fromstring(picture).iter():
        for name in element.get("class", "").split():
            found.setdefault(name, []).append(element)
    return found


def words(picture):
    return [t.text for t in ET.fromstring(picture).iter(f"{SVG}text")]


def signs(picture, name):
    """How many there are of a class, without the one in the legend."""
    return len(drawn(picture).get(name, [])) - (name in ("event", "committed"))


def test_every_event_and_message_of_a_run_is_drawn():
    trace = run(2)
    picture = diagram(trace)
    assert signs(picture, "event") == sum(isinstance(e, Step) for e in trace.events)
    assert signs(picture, "knot") == 3
    arrows = [a for a in drawn(picture)["message"] if a.tag == f"{SVG}path" and "head" not in a.get("class")]
    rows = [m for m in messages(trace) if m.snapshot is None]
    assert len(arrows) == len(rows) + 2  # two lines of the legend
    markers = [a for a in drawn(picture)["marker"] if "head" not in a.get("class")]
    assert len(markers) == 6 + 1


def test_the_messages_that_cross_the_cut_are_the_recorded_channel_states():
    for seed in range(15):
        trace = run(seed)
        recorded = sum(s.count for e in trace.events if type(e).__name__ == "Recorded" for s in e.spans)
        crossing = [
            a for a in drawn(diagram(trace)).get("s0", []) if a.get("class") in ("message s0", "message s0 lost")
        ]
        assert len(crossing) == recorded + (recorded > 0), seed  # and one in the legend
        assert "backwards" not in drawn(diagram(trace))


def test_a_message_against_the_cut_is_marked():
    header = Header(("p", "q"), (Link("c", "p", "q"),))
    row = (Span("c", 0),)
    events = (Cut(0.0, "p", 1, 1), Step(1.0, "p", 1, sends=row), Step(2.0, "q", 1, takes=row), Cut(3.0, "q", 1, 1))
    assert len(drawn(diagram(Trace(header, events)))["wrong"]) == 1


def test_a_crash_and_a_restore_are_drawn():
    trace = run(1, crash=True)
    picture = diagram(trace)
    assert len(drawn(picture)["crash"]) == 4  # two strokes, and two in the legend
    assert signs(picture, "restored") == 3 + 1
    assert len(drawn(picture)["down"]) == 1
    assert {"s0", "s1"} <= drawn(picture).keys()


def test_a_window_around_a_snapshot_shows_that_one_only():
    trace = run(1, crash=True, steps=120)
    picture = diagram(trace, snapshot=2)
    assert signs(picture, "event") < 100 < sum(isinstance(e, Step) for e in trace.events)
    assert not any(text.startswith("Snapshot 1") for text in words(picture))
    assert any(text.startswith("Snapshot 2") for text in words(picture))


def test_a_window_from_an_event_to_an_event():
    trace = run(1)
    kinds = [isinstance(e, Step) for e in trace.events[9:20]]
    assert signs(diagram(trace, first=10, last=20), "event") == sum(kinds)


@pytest.mark.parametrize("window", [{"snapshot": 9}, {"first": 5, "last": 4}, {"first": 10_000}])
def test_an_empty_window_is_refused(window):
    with pytest.raises(ConfigError):
        diagram(run(1), **window)


def test_no_message_goes_backwards_in_time():
    for by_time in (False, True):
        trace = run(7, count=5, crash=True)
        found = messages(trace)
        places = columns(trace, window_of(trace), found, by_time=by_time)
        assert all(places[m.sent] < places[m.taken] for m in found if m.sent and m.taken)


def test_events_of_one_process_never_share_a_place():
    trace = run(7, count=5)
    places = columns(trace, window_of(trace), messages(trace))
    steps = [(e.process, places[i]) for i, e in enumerate(trace.events, start=1) if isinstance(e, Step)]
    assert len(set(steps)) == len(steps)


def test_text_of_users_cannot_break_out_of_the_picture():
    header = Header(("<p>", "q&"), (Link('"c"', "<p>", "q&"),), title="</svg><script>")
    row = (Span('"c"', 0, 1, ("</text>",)),)
    events = (Step(0.0, "<p>", 1, sends=row, after="a<b"), Step(1.0, "q&", 1, takes=row, label="<i>"))
    picture = diagram(Trace(header, (*events, Committed(2.0, "q&", 1, 1))), notes=["<note>"])
    assert "<script>" not in picture
    assert {"<p>", "q&", "</text>", "<i>", "<note>"} <= set(words(picture))


def test_the_same_trace_is_the_same_picture():
    assert diagram(run(5)) == diagram(run(5))


def test_numbers_in_a_picture_are_short():
    assert re.search(r"\d\.\d\d", re.sub(r"<style>.*?</style>", "", diagram(run(5)), flags=re.DOTALL)) is None


def test_several_rows_between_two_events_are_one_arrow_with_their_number():
    header = Header(("p", "q"), (Link("c", "p", "q"),))
    events = (Step(0.0, "p", 1, sends=(Span("c", 0, 900),)), Step(1.0, "q", 1, takes=(Span("c", 0, 900),)))
    assert "×900" in words(diagram(Trace(header, events)))
