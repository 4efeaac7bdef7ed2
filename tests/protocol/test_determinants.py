"""The determinant log (R0): what was chosen is chosen again, as far as anybody knows of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutwater.errors import InvariantError
from cutwater.protocol.channel.items import Head
from cutwater.protocol.determinants import CONTROL, DeterminantLog, Run, Verdict
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.loop import Follow, Idle, SubtaskLoop, TakeControl, TakeRows
from cutwater.protocol.subtask.machine import SubtaskMachine

runs = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), max_size=12)


def flat(found: list[Run]) -> list[Run]:
    return [choice for input, rows in found for choice in [(input, min(rows, 1))] * max(rows, 1)]


@given(runs, runs, st.data())
def test_r0_what_is_followed_is_what_was_chosen(before: list[Run], after: list[Run], data: st.DataObject) -> None:
    log = DeterminantLog()
    for run in before:
        log.took(*run)
    checkpoint = log.position
    for run in after:
        log.took(*run)
    known = data.draw(st.integers(0, log.length))
    wanted = flat([*before, *after])[checkpoint : max(checkpoint, known)]
    log.go_back(checkpoint, known)
    followed: list[Run] = []
    while (run := log.next_run()) is not None:
        followed.append(run)
        log.took(*run)
    assert flat(followed) == wanted
    log.took("z", 1)
    assert log.position == checkpoint + len(wanted) + 1


def test_r0_another_choice_than_the_log_says_is_an_error() -> None:
    log = DeterminantLog()
    log.took("a", 2)
    log.go_back(0, known=2)
    with pytest.raises(InvariantError, match="choice 0 was"):
        log.took("b", 1)


@pytest.mark.parametrize(("position", "known"), [(0, 4), (4, 0)])
def test_r0_a_log_that_lacks_what_somebody_knows_is_not_followed(position: int, known: int) -> None:
    log = DeterminantLog()
    log.took("a", 3)
    with pytest.raises(InvariantError, match="holds 3 choices"):
        log.go_back(position, known)
    log.go_back(0, known=3)
    assert log.next_run() == ("a", 3)


def test_r0_a_loop_that_follows_takes_nothing_else() -> None:
    log = DeterminantLog()
    for run in [("b", 3), ("a", CONTROL), ("a", 1)]:
        log.took(*run)
    log.go_back(0, known=5)
    loop = SubtaskLoop(SubtaskMachine("sum 0", ["a", "b"], protocol=PROTOCOLS["aligned"]), ["a", "b"], 5.0, 1000)
    loop.follow(log)

    def decide(a: Head, b: Head, *, full: bool = False) -> object:
        return loop.decide([a, b], outputs_full=full, operator_pending=False, source_ready=False)

    assert isinstance(decide(Head.ROWS, Head.EMPTY), Idle)  # the rows of b come again, sooner or later
    assert isinstance(decide(Head.EMPTY, Head.ROWS, full=True), Idle)
    assert decide(Head.ROWS, Head.ROWS) == TakeRows(1, 3)
    log.took("b", 2)
    assert decide(Head.CONTROL, Head.CONTROL) == TakeControl(1)  # a watermark that says nothing new
    assert decide(Head.CONTROL, Head.ROWS) == TakeRows(1, 1)
    log.took("b", 1)
    assert isinstance(decide(Head.ROWS, Head.ROWS), Idle)
    assert decide(Head.CONTROL, Head.ROWS) == TakeControl(0)
    log.took("a", CONTROL)
    assert decide(Head.ROWS, Head.CONTROL) == TakeRows(0, 1)
    log.took("a", 1)
    assert decide(Head.EMPTY, Head.ROWS) == TakeRows(1, loop.calls.rows)  # free again


def test_r0_what_a_verdict_on_the_loop_changed_is_a_choice() -> None:
    log, verdict = DeterminantLog(), Verdict(watermark=8, ended=False)
    log.took("in", 1)
    log.chose(verdict)
    log.took("back", 1)
    log.go_back(0, known=3)
    machine = SubtaskMachine("loop 0", ["in", "back"], protocol=PROTOCOLS["aligned"], back_edges=frozenset({"back"}))
    loop = SubtaskLoop(machine, ["in", "back"], 5.0, 1000)
    loop.follow(log)

    def decide() -> object:
        return loop.decide([Head.ROWS, Head.ROWS], outputs_full=False, operator_pending=False, source_ready=False)

    assert decide() == TakeRows(0, 1)
    log.took("in", 1)
    assert decide() == Follow()
    assert log.next_own() == verdict
    with pytest.raises(InvariantError, match="choice 1 was"):
        log.chose(Verdict(watermark=9, ended=False))
    log.chose(verdict)
    assert decide() == TakeRows(1, 1)
