"""All windows, early results, lateness, accumulating and discarding, against the model row by row."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from windows_world import (
    AGGREGATES,
    Model,
    Result,
    Row,
    advance,
    assert_same,
    batch_of,
    hardly_any_memory,
    in_order,
    late_rows,
    plain,
    spec_of,
)

from cutwater.data.time import MAX_WATERMARK
from cutwater.operators.window import operator as window_operator
from cutwater.operators.window import session_operator
from cutwater.operators.window import sliced_operator as window_slices
from cutwater.operators.window.kinds import Early, GlobalWindow, SessionWindow, SlidingWindow, TumblingWindow
from cutwater.operators.window.spec import WindowAggregateSpec
from cutwater.state.table import timed_table
from keyed_world import feed, opened, owner, rescaled, snapshot

KEYS = ("", "a", "b")
TIMES = st.integers(-40, 60)
ROWS = st.lists(st.tuples(TIMES, st.sampled_from(KEYS), st.none() | st.integers(-9, 9)), max_size=12)
EVENTS = st.lists(ROWS | TIMES, min_size=1, max_size=14)
SLIDING = st.sampled_from([(10, 5), (10, 3), (10, 4), (7, 2), (10, 1), (3, 10), (5, 5), (12, 8), (1, 1)])
WINDOWS = {
    "tumbling": st.builds(TumblingWindow, st.just(10), st.integers(-9, 9)) | st.just(TumblingWindow(1)),
    "sliding": st.builds(lambda pair, offset: SlidingWindow(*pair, offset % pair[1]), SLIDING, st.integers(0, 9)),
    "session": st.builds(SessionWindow, st.sampled_from([1, 5, 10])),
    "global": st.just(GlobalWindow()),
}
EARLY = st.none() | st.builds(Early, rows=st.integers(1, 4)) | st.builds(Early, event_time_us=st.sampled_from([1, 7]))


@st.composite
def specs(draw: st.DrawFn, kind: str) -> WindowAggregateSpec:
    lateness = 0 if kind == "global" else draw(st.sampled_from([0, 0, 7, 25]))
    calls = draw(st.lists(st.sampled_from(AGGREGATES), min_size=1, max_size=4, unique=True))
    window, early, discarding = draw(WINDOWS[kind]), draw(EARLY), draw(st.booleans())
    return spec_of(window, lateness, early, discarding=discarding, aggregates=tuple(calls))


class Models:
    """The models of all keys."""

    def __init__(self, spec: WindowAggregateSpec) -> None:
        self.each = {key: Model(spec, key) for key in KEYS}

    def rows(self, rows: list[Row]) -> list[Result]:
        return [result for row in rows for result in self.each[row[1]].row(row)]

    def advance(self, watermark: int) -> list[Result]:
        return [result for model in self.each.values() for result in model.advance(watermark)]

    @property
    def late(self) -> list[Row]:
        return [row for model in self.each.values() for row in model.late]


@pytest.fixture(params=["", "small", pytest.param("disk", marks=pytest.mark.full)], autouse=True)
def bounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is; with slices of a few rows and sweeping at every chance; and with memory for hardly a key."""
    if request.param:
        monkeypatch.setattr(timed_table, "_DEAD_ROWS", 0)
        monkeypatch.setattr(session_operator, "_SWEEP_GROUP_IDS", 0)
        monkeypatch.setattr(window_operator, "SLICE_ROWS", 3)
        monkeypatch.setattr(window_slices, "SLICE_ROWS", 2)
    if request.param == "disk":
        hardly_any_memory(request, monkeypatch)


@pytest.mark.parametrize("kind", WINDOWS)
@given(data=st.data(), events=EVENTS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_equals_the_model_of_a_row_at_a_time(kind: str, data: st.DataObject, events: list) -> None:
    spec = data.draw(specs(kind))
    models, operator = Models(spec), opened(spec)
    late: list[Row] = []
    for event in [*events, MAX_WATERMARK]:
        if isinstance(event, int):
            assert_same(in_order(plain(advance(operator, event))), in_order(models.advance(event)))
        else:
            outputs = operator.process(0, batch_of(event))
            assert_same(plain(outputs), models.rows(event))
            late += late_rows(outputs)
    assert Counter(late) == Counter(models.late)
    assert operator.ctx.counters["rows_late"] == len(late)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", WINDOWS)
@given(data=st.data(), events=EVENTS, skew=st.booleans())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_restore_anywhere_at_any_parallelism_goes_on_as_if_never_stopped(
    kind: str, data: st.DataObject, events: list, skew: bool
) -> None:
    """With ``skew`` the subtasks' watermarks differ at the cut: each key must go on with its own."""
    spec = data.draw(specs(kind))
    before, after = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    operators, models = [opened(spec, s, before) for s in range(before)], Models(spec)
    cut = data.draw(st.integers(0, len(events)))

    def step(event: list[Row] | int) -> None:
        if isinstance(event, int):
            got = [row for operator in operators for row in plain(advance(operator, event))]
            assert_same(in_order(got), in_order(models.advance(event)))
        else:
            parts = feed(operators, batch_of(event), ("k",))
            assert_same([row for part in parts for row in plain(part)], models.rows(event))
            late.extend(row for part in parts for row in late_rows(part))

    late: list[Row] = []
    for event in events[:cut]:
        step(event)
    if skew:
        for subtask, operator in enumerate(operators):
            ahead = data.draw(TIMES)
            advance(operator, ahead)
            for key, model in models.each.items():
                if owner(batch_of([(0, key, 0)]), ("k",), before)[0] == subtask:
                    model.advance(ahead)
    segments = [segment for operator in operators for segment in snapshot(operator)]
    operators = rescaled(spec, data.draw(st.permutations(segments)), after)
    for event in [*events[cut:], MAX_WATERMARK]:
        step(event)
    assert Counter(late) == Counter(models.late)
