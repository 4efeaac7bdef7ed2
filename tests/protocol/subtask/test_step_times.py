"""W4: those with nothing to read go by the time of their step, which no split that was found can be ahead of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cutwater.protocol.subtask.source_times import SplitTimes, StepTimes, SubtaskTime, TellTime, watermark_after

MIN = -(2**63)


def told(news: list[TellTime], subtask: int) -> int | None:
    return next((tell.watermark for tell in news if tell.subtask == subtask), None)


def test_w4_nobody_is_told_a_time_before_all_were_heard() -> None:
    step = StepTimes(3)
    assert step.reported(0, SubtaskTime(1, False, 5, 5)) == []
    assert step.reported(1, SubtaskTime(1, True, 9, 0)) == []
    news = step.reported(2, SubtaskTime(1, True, 7, 0))
    assert (told(news, 0), {tell.subtask: tell.report for tell in news}) == (7, {0: False, 1: True, 2: True})


def test_w4_a_split_that_its_reader_has_not_heard_of_holds_time_back() -> None:
    step = StepTimes(2)
    for subtask in (0, 1):
        step.dealt(subtask, 1)
    step.reported(0, SubtaskTime(1, False, 5, 5))
    step.reported(1, SubtaskTime(1, True, 8, 0))
    step.dealt(0, 2)
    assert told(step.reported(1, SubtaskTime(1, True, 90, 0)), 0) is None
    assert told(step.reported(1, SubtaskTime(1, False, 90, 95)), 1) == 8, "not 90, and not 95"
    step.reported(0, SubtaskTime(2, True, 5, 5))
    assert told(step.reported(0, SubtaskTime(2, False, 50, 60)), 0) == 95


def test_w4_one_that_goes_back_is_waited_for_and_told_again() -> None:
    step = StepTimes(2)
    step.reported(0, SubtaskTime(1, False, 5, 5))
    assert told(step.reported(1, SubtaskTime(1, True, 8, 0)), 0) == 8
    step.lost(1)
    assert step.reported(0, SubtaskTime(1, False, 8, 5)) == []
    step.lost(0)
    step.reported(1, SubtaskTime(1, True, 3, 0))
    assert told(step.reported(0, SubtaskTime(1, False, 5, 5)), 0) == 8, "time never falls"


def test_all_are_idle_once_all_are_quiet_and_none_when_one_has_something() -> None:
    step = StepTimes(2)
    step.reported(0, SubtaskTime(1, False, 5, 5, True))
    assert step.reported(1, SubtaskTime(1, False, 6, 6, True)) == [
        TellTime(0, 6, True, False),
        TellTime(1, 6, True, False),
    ]
    news = step.reported(1, SubtaskTime(2, True, 6, 6))
    assert news == [TellTime(0, 6, False, False), TellTime(1, 6, False, True)]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, str, int]]:
    """What happens to some splits, in an order that may happen."""
    state = dict.fromkeys("abcd", "")
    steps: list[tuple[str, str, int]] = []
    for _ in range(draw(st.integers(0, 30))):
        name = draw(st.sampled_from("abcd"))
        what = {"": ["add"], "added": ["begins", "reached", "idles", "finished"]}.get(state[name], [])
        if what:
            steps.append((name, draw(st.sampled_from(what)), draw(st.integers(0, 40))))
            state[name] = {"add": "added", "finished": "over"}.get(steps[-1][1], state[name])
    return steps


@given(histories(), st.integers(0, 5))
def test_w4_the_time_of_a_subtask_is_the_least_of_its_unfinished_splits(
    history: list[tuple[str, str, int]], bound: int
) -> None:
    times = SplitTimes(bound)
    marks: dict[str, int] = {}
    idle: set[str] = set()
    highest = MIN
    for name, what, value in history:
        if what == "add":
            times.add(name, value if value % 2 else MIN)
            marks[name] = watermark_after(value if value % 2 else MIN, bound)
        elif what == "begins":
            times.begins(name, value)
            marks[name] = max(marks[name], value - 1)
        elif what == "reached":
            times.reached(name, value)
            marks[name] = max(marks[name], watermark_after(value, bound))
            idle.discard(name)
        elif what == "idles":
            times.idles(name)
            idle.add(name)
        else:
            times.finished(name)
            mark = marks.pop(name)
            if name not in idle and any(w == "reached" and n == name for n, w, _ in history):
                highest = max(highest, mark)
            idle.discard(name)
        assert times.held == min((mark for name, mark in marks.items() if name not in idle), default=None)
        assert times.highest_finished == highest
