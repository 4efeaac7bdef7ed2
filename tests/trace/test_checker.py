"""The checker says yes to every right run and no, with the right words, to every wrong one."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from trace_world import run

from cutwater.trace.checker import check
from cutwater.trace.events import (
    Aborted,
    Committed,
    Completed,
    Crashed,
    Cut,
    Header,
    Link,
    MarkerSent,
    MarkerTaken,
    Recorded,
    Restored,
    Span,
    Step,
    Survived,
    Trace,
)
from cutwater.trace.result import Kind

PAIR = Header(("p", "q"), (Link("c", "p", "q"), Link("d", "q", "p")))
SEEDS = range(60)


def send(row, process="p", channel="c", **more):
    return Step(0.0, process, more.pop("attempt", 1), sends=(Span(channel, row),), **more)


def take(row, process="q", channel="c", **more):
    return Step(0.0, process, more.pop("attempt", 1), takes=(Span(channel, row),), **more)


def cut(process, snapshot=1, attempt=1, state=""):
    return Cut(0.0, process, attempt, snapshot, state)


def recorded(*spans, channel="c"):
    return Recorded(0.0, "q", 1, 1, channel, spans)


DONE = Completed(0.0, "p", 1, 1)


def kinds(*events, header=PAIR, **options):
    return check(Trace(header, events), **options).kinds()


# ------------------------------------------------------------------------------------------------------- right runs


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_right_runs_pass(count, quick):
    results = [check(run(seed, count=count), quick=quick) for seed in SEEDS]
    assert [str(r) for r in results if not r.ok] == []
    assert all(r.snapshots == 1 for r in results)


@pytest.mark.parametrize("quick", [True, False])
def test_right_runs_with_a_recovery_pass(quick):
    results = [check(run(seed, crash=True), quick=quick) for seed in SEEDS]
    assert [str(r) for r in results if not r.ok] == []
    assert all(r.snapshots == 2 and r.restores == 1 for r in results)


def test_cl6_the_four_counts_hold_in_every_right_run():
    counts = [c for seed in SEEDS for c in check(run(seed)).counts]
    assert len(counts) == 6 * len(SEEDS)
    assert all(c.holds for c in counts)
    assert any(c.sent_recorded > c.taken_recorded for c in counts), "no run had a row on its way"


def test_cl7_an_equivalent_history_leads_through_the_recorded_state():
    found = [r for seed in SEEDS for r in check(run(seed)).reorderings]
    assert len(found) == len(SEEDS)
    assert sum(r.swaps > 0 for r in found) > 30
    assert 0 < sum(r.occurred for r in found) < len(found), "S* should occur in some runs and not in others"


# ------------------------------------------------------------------------------------------------- planted in runs


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("late cut", Kind.CUT),
        ("marker late", Kind.MARKER),
        ("log short", Kind.LOST),
        ("log empty", Kind.LOST),
        ("log long", Kind.DOUBLED),
    ],
)
def test_a_planted_fault_is_found(fault, kind, quick):
    results = [check(run(seed, fault=fault), quick=quick) for seed in SEEDS]
    assert sum(kind in r.kinds() for r in results) > 5


@pytest.mark.parametrize("fault", ["late cut", "log short"])
def test_cl7_fails_where_the_cut_is_wrong(fault):
    for seed in SEEDS:
        result = check(run(seed, fault=fault))
        assert (Kind.REORDERING in result.kinds()) == bool({Kind.CUT, Kind.LOST} & result.kinds()), str(result)


def test_counts_and_vector_clocks_agree_on_every_cut_of_small_runs():
    """All pairs of places where p and q might have been cut: the two ways to judge them share no line of code."""
    steps = [send(0), send(1), take(0), send(0, "q", "d"), take(0, "p", "d"), take(1), send(2), take(2)]
    inconsistent = 0
    for at_p, at_q in product(range(len(steps) + 1), repeat=2):
        cuts = sorted([(at_p, cut("p")), (at_q, cut("q"))], key=lambda x: x[0], reverse=True)
        events = list(steps)
        for at, event in cuts:
            events.insert(at, event)
        found = check(Trace(PAIR, (*events, DONE))).violations
        by_clock = any(v.kind is Kind.CUT and v.process for v in found)
        assert by_clock == any(v.kind is Kind.CUT and v.channel for v in found)
        inconsistent += by_clock
    assert inconsistent > 10


# ----------------------------------------------------------------------------------------------------- hand-made


def test_a_row_from_after_the_cut_is_named_with_its_channel_and_events():
    result = check(Trace(PAIR, (cut("p"), send(0), take(0), cut("q"), DONE)), quick=True)
    assert [str(v) for v in result.violations] == [
        "inconsistent cut: snapshot 1, channel c: "
        "q took row 0 before its cut, and p sent it after its own (events 1, 4)"
    ]


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ((send(0), cut("p"), cut("q"), take(0), DONE), Kind.LOST),
        ((send(0), take(0), cut("p"), cut("q"), recorded(Span("c", 0)), DONE), Kind.DOUBLED),
        ((cut("p"), cut("q"), send(0), take(0), recorded(Span("c", 0)), DONE), Kind.FUTURE),
        ((send(0), cut("p"), cut("q"), recorded(Span("c", 0), Span("c", 0)), DONE), Kind.DOUBLED),
        ((send(0), send(1), cut("p"), cut("q"), recorded(Span("c", 1), Span("c", 0)), DONE), Kind.FIFO),
        ((cut("p"), DONE), Kind.INCOMPLETE),
        ((cut("p"), cut("q"), cut("q"), DONE), Kind.INCOMPLETE),
        ((cut("p"), cut("q"), DONE, Aborted(0.0, "p", 1, 1)), Kind.INCOMPLETE),
        ((send(0), send(1), take(1)), Kind.FIFO),
        ((send(0), take(0), take(0)), Kind.FIFO),
        ((take(0),), Kind.FIFO),
        ((send(0), send(2)), Kind.FIFO),
        ((send(0, "q"),), Kind.TRACE),
        ((send(0), take(0, "p")), Kind.TRACE),
        ((send(0, channel="nosuch"),), Kind.TRACE),
        ((cut("stranger"),), Kind.TRACE),
        ((recorded(channel="nosuch"),), Kind.TRACE),
        ((send(0), MarkerSent(0.0, "p", 1, 1, "c", 0)), Kind.MARKER),
        ((send(0), MarkerSent(0.0, "p", 1, 1, "c", 1), MarkerTaken(0.0, "q", 1, 1, "c", 0)), Kind.MARKER),
        ((MarkerTaken(0.0, "q", 1, 1, "c", 0),), Kind.MARKER),
        ((MarkerSent(0.0, "p", 1, 1, "c", 0), send(0), take(0), MarkerTaken(0.0, "q", 1, 1, "c", 0)), Kind.MARKER),
        ((MarkerSent(0.0, "p", 1, 1, "c", 0), send(0), cut("p"), cut("q"), recorded(Span("c", 0)), DONE), Kind.MARKER),
        ((Crashed(0.0, "p", 1), send(0)), Kind.STATE),
        ((send(0), send(1, attempt=2)), Kind.STATE),
        ((Restored(0.0, "p", 2, 9),), Kind.RESTORE),
        ((cut("p"), cut("q"), Aborted(0.0, "p", 1, 1), Restored(0.0, "p", 2, 1)), Kind.RESTORE),
        ((Committed(0.0, "q", 1, 1),), Kind.OUTPUT),
        ((cut("p"), Restored(0.0, "q", 2, None), Cut(0.0, "q", 2, 1), DONE), Kind.INCOMPLETE),
    ],
)  # fmt: skip
def test_each_kind_of_mistake_has_its_name_quick_and_full(events, kind):
    assert kind in kinds(*events, quick=True)
    assert kind in kinds(*events)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ((send(0, before="a", after="b"), send(1, before="a", after="c")), Kind.STATE),
        ((send(0, after="b"), cut("p", state="a")), Kind.STATE),
        ((cut("p", state="a"), send(0, before="b")), Kind.STATE),
        ((Step(0.0, "p", 1, sends=(Span("c", 0, 1, ("x",)),)), Step(0.0, "q", 1, takes=(Span("c", 0, 1, ("y",)),))),
         Kind.CONTENT),
        ((Step(0.0, "p", 1, sends=(Span("c", 0, 1, ("x",)),)), cut("p"), cut("q"), recorded(Span("c", 0, 1, ("y",))),
          DONE), Kind.CONTENT),
    ],
)  # fmt: skip
def test_mistakes_that_only_a_full_check_can_see(events, kind):
    assert kind in kinds(*events)
    assert kinds(*events, quick=True) == set()


def test_a_process_goes_on_from_its_restored_state():
    begin = (send(0, after="s"), cut("p"), cut("q"), recorded(Span("c", 0)), DONE, send(1, before="s", after="t"))
    again = [Restored(0.0, p, 2, 1) for p in "pq"]
    assert kinds(*begin, *again, send(1, attempt=2, before="s", after="u")) == set()
    assert kinds(*begin, *again, send(1, attempt=2, before="t", after="u")) == {Kind.STATE}


def test_after_a_restore_the_recorded_rows_come_first_and_none_is_skipped():
    begin = (send(0), cut("p"), cut("q"), recorded(Span("c", 0)), DONE, take(0), send(1), take(1))
    again = [Restored(0.0, p, 2, 1) for p in "pq"]
    assert kinds(*begin, *again, take(0, attempt=2), send(1, attempt=2), take(1, attempt=2)) == set()
    assert kinds(*begin, *again, send(1, attempt=2), take(1, attempt=2)) == {Kind.FIFO}  # the recorded row is skipped
    assert kinds(*begin, *again, take(0, attempt=2), take(1, attempt=2)) == {Kind.FIFO}  # a row of the old attempt
    assert kinds(*begin, *again, send(2, attempt=2)) == {Kind.FIFO}  # the sender did not go back


def test_while_a_recovery_is_on_its_way_rows_of_the_old_attempt_may_still_be_taken():
    begin = (cut("p"), cut("q"), DONE, send(0), send(1))
    first = Restored(0.0, "p", 2, 1)
    assert kinds(*begin, first, take(0), Restored(0.0, "q", 2, 1), send(0, attempt=2), take(0, attempt=2)) == set()
    assert kinds(*begin, first, take(0), take(1), take(2)) == {Kind.FIFO}


def test_a_restart_from_the_beginning_numbers_from_zero():
    again = [Restored(0.0, p, 2, None) for p in "pq"]
    assert kinds(send(0), take(0), *again, send(0, attempt=2), take(0, attempt=2)) == set()
    assert kinds(send(0), take(0), *again, send(1, attempt=2)) == {Kind.FIFO}


def test_committed_output_is_compared_with_an_oracle_as_a_bag():
    events = (cut("p"), cut("q"), DONE, Committed(0.0, "q", 1, 1, ("a", "b", "b")))
    assert kinds(*events, oracle=["b", "a", "b"]) == set()
    result = check(Trace(PAIR, events), oracle=["a", "a", "b"])
    assert [v.text for v in result.violations] == ["missing: 'a'", "too many: 'b'"]


def test_a_commit_that_is_told_twice_counts_once_and_must_not_change():
    once = Committed(0.0, "q", 1, 1, ("a",))
    other = msgspec.structs.replace(once, values=("b",))
    assert kinds(cut("p"), cut("q"), DONE, once, once, oracle=["a"]) == set()
    assert kinds(cut("p"), cut("q"), DONE, once, other) == {Kind.OUTPUT}


def test_at_least_once_tolerates_doubled_rows_and_no_lost_ones():
    doubled = (cut("p"), send(0), take(0), cut("q"), DONE)
    again = [Restored(0.0, p, 2, 1) for p in "pq"]
    assert kinds(*doubled, *again, send(0, attempt=2), take(0, attempt=2), at_least_once=True) == set()
    assert kinds(send(0), cut("p"), cut("q"), DONE, at_least_once=True) == {Kind.LOST}
    assert kinds(*doubled, Committed(0.0, "q", 1, 1, ("a", "a")), at_least_once=True, oracle=["a"]) == set()
    assert kinds(*doubled, Committed(0.0, "q", 1, 1, ("a",)), at_least_once=True, oracle=["a", "b"]) == {Kind.OUTPUT}


def test_an_overtaking_marker_leaves_the_rows_it_passed_to_the_channel():
    """Unaligned: the marker is taken while rows of smaller numbers still wait."""
    events = (
        send(0), send(1), cut("p"), MarkerSent(0.0, "p", 1, 1, "c", 2), MarkerTaken(0.0, "q", 1, 1, "c", 2), cut("q"),
        Recorded(0.0, "p", 1, 1, "c", (Span("c", 1),)), recorded(Span("c", 0)), take(0), take(1), DONE,
    )  # fmt: skip
    assert kinds(*events) == set()  # whoever tells first: the receiver's part comes before the sender's
    events = (*events[:6], events[7], events[6], *events[8:])
    assert kinds(*events) == set()
    wrong = (recorded(Span("c", 1)), recorded(Span("c", 0)))
    assert kinds(*events[:6], *wrong, *events[8:]) == {Kind.FIFO}


def test_in_a_marked_run_a_complete_snapshot_has_one_marker_per_channel_sent_and_taken():
    ring = msgspec.structs.replace(PAIR, marked=True)
    sent = [MarkerSent(0.0, p, 1, 1, c, 0) for p, c in (("p", "c"), ("q", "d"))]
    taken = [MarkerTaken(0.0, p, 1, 1, c, 0) for p, c in (("q", "c"), ("p", "d"))]
    right = (cut("p"), cut("q"), *sent, *taken, DONE)
    assert kinds(*right, header=ring) == set()
    for marker in (*sent, *taken):
        gone = [e for e in right if e is not marker]
        assert kinds(*gone, header=ring) == {Kind.MARKER}, marker
        assert kinds(*right[:-1], marker, DONE, header=ring) == {Kind.MARKER}, marker
    assert kinds(sent[0], cut("p"), cut("q"), sent[1], *taken, DONE, header=ring) == {Kind.MARKER}, "before its cut"
    assert kinds(cut("p"), cut("q"), *sent, *taken) == set(), "it never became complete"
    assert kinds(*right, DONE, header=ring) == {Kind.INCOMPLETE}


def test_a_process_joins_an_attempt_once():
    assert kinds(send(0), Restored(0.0, "p", 1, None)) == {Kind.STATE}
    assert kinds(send(0), Restored(0.0, "p", 2, None), Survived(0.0, "p", 2)) == {Kind.STATE}


def test_cl7_a_snapshot_of_an_attempt_with_survivors_is_judged():
    begin = (cut("p"), cut("q"), DONE, send(0), take(0), send(1), Crashed(0.0, "p", 1))
    again = (Restored(0.0, "p", 2, 1), Survived(0.0, "q", 2), send(0, attempt=2), send(1, attempt=2))
    cuts = (cut("p", 2, 2), cut("q", 2, 2))
    log, done = Recorded(0.0, "q", 2, 2, "c", (Span("c", 1),)), Completed(0.0, "p", 2, 2)
    result = check(Trace(PAIR, (*begin, *again, *cuts, log, done)))
    assert result.ok, str(result)
    assert [r.snapshot for r in result.reorderings] == [1, 2]
    early = (*again[:3], cuts[0], again[3], take(1, attempt=2), cuts[1], done)
    assert kinds(*begin, *early) == {Kind.CUT, Kind.REORDERING}


def test_channels_that_reorder_are_judged_by_sets():
    loose = msgspec.structs.replace(PAIR, fifo=False)
    begin = (send(0), send(1), send(2), cut("p"), take(1), cut("q"))
    right = recorded(Span("c", 2), Span("c", 0))
    assert kinds(*begin, right, DONE, take(0), take(2), header=loose) == set()
    assert kinds(*begin, recorded(Span("c", 0, 3)), DONE, header=loose) >= {Kind.DOUBLED}
    assert kinds(*begin, recorded(Span("c", 0)), DONE, header=loose) >= {Kind.LOST}
    assert kinds(*begin, right, take(1), header=loose) == {Kind.FIFO}
    assert kinds(cut("p"), send(0), send(1), take(1), cut("q"), DONE, header=loose) >= {Kind.CUT}


def test_a_row_that_comes_after_later_ones_closes_the_gap():
    loose = msgspec.structs.replace(PAIR, fifo=False)
    result = check(Trace(loose, (send(0), send(1), take(1), take(0))), drained=True)
    assert result.ok, str(result)
    assert result.in_flight == 0


def test_rows_left_in_a_channel_are_a_loss_only_if_the_run_has_ended():
    assert kinds(send(0)) == set()
    assert check(Trace(PAIR, (send(0),))).in_flight == 1
    assert kinds(send(0), drained=True) == {Kind.FIFO}


def test_a_snapshot_that_never_completes_is_not_judged():
    assert kinds(cut("p"), send(0), take(0), cut("q")) == set()


def test_a_survivor_goes_on_where_it_is_and_what_comes_again_must_be_the_same():
    def sent(row, value, attempt):
        return Step(0.0, "p", attempt, sends=(Span("c", row, 1, (value,)),))

    begin = (cut("p"), cut("q"), DONE, sent(0, "x", 1), take(0), Crashed(0.0, "p", 1))
    again = (Restored(0.0, "p", 2, 1), Survived(0.0, "q", 2))
    assert kinds(*begin, *again, sent(0, "x", 2), sent(1, "y", 2), take(1, attempt=2)) == set()
    assert kinds(*begin, *again, sent(0, "z", 2)) == {Kind.CONTENT}
    assert kinds(*begin, *again, sent(0, "x", 2), take(0, attempt=2)) == {Kind.FIFO}
    assert kinds(*begin, Survived(0.0, "p", 2)) == {Kind.STATE}
