"""Windows by processing time against the model of windows by event time, whose rows have the time of the clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from windows_world import KINDS, Model, Result, advance, assert_same, batch_of, hardly_any_memory, in_order, plain

from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import BuildError
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.base import Operator, Outputs
from cutwater.operators.window.kinds import Early, SessionWindow, SlidingWindow, TumblingWindow, Window
from cutwater.operators.window.spec import WindowAggregateSpec
from keyed_world import owner, rows_of, snapshot
from subtask_context import Subtask

MS = 1000
WINDOWS = (
    TumblingWindow(10 * MS, processing_time=True),
    TumblingWindow(7 * MS, 3 * MS + 1, processing_time=True),
    SlidingWindow(10 * MS, 4 * MS, MS, processing_time=True),
    SlidingWindow(3 * MS, 5 * MS, processing_time=True),
    SessionWindow(4 * MS, processing_time=True),
    SessionWindow(2500, processing_time=True),
)
AGGREGATES = tuple(Aggregate(f"{kind}_v", kind, "v") for kind in KINDS)


def spec_of(window: Window, early: Early | None = None, *, discarding: bool = False) -> WindowAggregateSpec:
    return WindowAggregateSpec(batch_of([]).schema, ("k",), None, window, AGGREGATES, 0, early, discarding)


@dataclass
class Clock:
    now_ms: int = 1_000


@dataclass
class Clocked(Subtask):
    clock: Clock = field(default_factory=Clock)

    def processing_time_ms(self) -> int:
        return self.clock.now_ms


class Steps:
    """The subtasks of a step, under one clock that is set by hand."""

    def __init__(self, spec: WindowAggregateSpec, parallelism: int = 1, clock: Clock | None = None) -> None:
        self.spec = spec
        self.clock = clock or Clock()
        self.operators = [self._opened(i, parallelism) for i in range(parallelism)]
        self.counters: Counter[str] = Counter()

    def _opened(self, subtask: int, parallelism: int) -> Operator:
        operator = self.spec.build()
        operator.open(Clocked(subtask, parallelism, clock=self.clock))
        return operator

    def rows(self, values: list[tuple[str, int | None]]) -> Outputs:
        batch = batch_of((-5, key, value) for key, value in values)  # whatever their own time is
        owners = owner(batch, ["k"], len(self.operators))
        outputs: Outputs = []
        for number, operator in enumerate(self.operators):
            outputs += operator.process(0, batch.filter(pa.array([o == number for o in owners], pa.bool_())))
            while operator.pending:
                outputs += operator.resume()
        return outputs

    def tick(self) -> Outputs:
        """What the runtime does: who is due is called until nobody is."""
        outputs: Outputs = []
        for operator in self.operators:
            calls = 0
            while (due := operator.next_processing_time_ms) is not None and due <= self.clock.now_ms:
                assert operator.timers_pending
                outputs += operator.on_processing_time(self.clock.now_ms)
                while operator.pending:
                    outputs += operator.resume()
                assert (calls := calls + 1) < 100, "it is due for ever"
        return outputs

    def watermark(self, watermark: int) -> Outputs:
        return [output for operator in self.operators for output in advance(operator, watermark)]

    def restored(self, parallelism: int, shuffle: Any = list) -> Steps:
        segments = shuffle([s for operator in self.operators for s in snapshot(operator)])
        after = Steps(self.spec, parallelism, self.clock)
        for operator in after.operators:
            operator.restore(segments)
        return after

    def counted(self) -> Counter[str]:
        return sum((o.ctx.counters for o in self.operators), Counter())  # type: ignore[attr-defined]


@pytest.fixture(params=["", pytest.param("disk", marks=pytest.mark.full)], autouse=True)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Result]], list[Result]]:
    """In which results of one instant are compared: windows on disk come out after those in memory."""
    if not request.param:
        return list
    hardly_any_memory(request, monkeypatch)
    return in_order


ROWS = st.lists(st.tuples(st.sampled_from("abcd"), st.none() | st.integers(-9, 9)), max_size=8)
EVENTS = st.lists(
    st.one_of(
        ROWS.map(lambda rows: ("rows", rows)),
        st.integers(0, 12).map(lambda ms: ("later", ms)),
        st.just(("tick", 0)),
        st.integers(1, 3).map(lambda parallelism: ("restore", parallelism)),
    ),
    max_size=30,
)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@given(events=EVENTS, rows_early=st.none() | st.integers(1, 3), discarding=st.booleans(), data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_restored_anywhere_equals_the_model(
    window: Window,
    events: list[Any],
    rows_early: int | None,
    discarding: bool,
    data: st.DataObject,
    order: Callable[[list[Result]], list[Result]],
) -> None:
    """The clock may run on for long before anybody is called: then what is overdue comes out in order."""
    spec = spec_of(window, None if rows_early is None else Early(rows=rows_early), discarding=discarding)
    steps = Steps(spec)
    models = {key: Model(spec, key) for key in "abcd"}
    for kind, what in [*events, ("end", 0)]:
        got: Outputs = []
        expected: list[Result] = []
        if kind == "rows":
            got = steps.rows(what)
            for key, value in what:
                expected += models[key].row((1000 * steps.clock.now_ms, key, value))
        elif kind == "later":
            steps.clock.now_ms += what
        elif kind == "tick":
            got = steps.tick()
            for model in models.values():
                expected += model.advance(1000 * steps.clock.now_ms - 1)
        elif kind == "restore":
            steps = steps.restored(what, lambda s: data.draw(st.permutations(s)))
        else:
            got = steps.watermark(MAX_WATERMARK)
            for model in models.values():
                expected += model.advance(MAX_WATERMARK)
        assert_same(order(plain(got)), order(expected))
        assert not rows_of(got, 1)
    assert not any(model.late for model in models.values())
    assert "rows_late" not in steps.counted()


@pytest.mark.parametrize("window", WINDOWS[:3], ids=str)
def test_it_wants_to_be_called_at_the_very_end_of_its_first_window(window: TumblingWindow | SlidingWindow) -> None:
    steps = Steps(spec_of(window))
    (operator,) = steps.operators
    assert (operator.next_processing_time_ms, operator.timers_pending) == (None, False)
    steps.rows([("a", 1)])
    due = operator.next_processing_time_ms
    assert due is not None
    assert steps.restored(2).operators[1].next_processing_time_ms in (due, None), "a restored one waits for the same"
    steps.clock.now_ms = due - 1
    assert steps.tick() == []
    steps.clock.now_ms = due
    (first, *_) = plain(steps.tick())
    assert 1000 * due - first["window_end"] in range(1000)  # type: ignore[operator]
    assert first["sum_v"] == 1


def test_a_session_that_goes_on_is_called_when_it_ends_and_not_in_between() -> None:
    steps = Steps(spec_of(SessionWindow(5 * MS, processing_time=True)))
    (operator,) = steps.operators
    steps.rows([("a", 1)])
    assert operator.next_processing_time_ms == 1005
    steps.clock.now_ms = 1003
    steps.rows([("a", 2)])
    steps.clock.now_ms = 1005
    assert steps.tick() == []
    assert operator.next_processing_time_ms == 1008
    steps.clock.now_ms = 1008
    assert [(r["window_start"], r["window_end"], r["sum_v"]) for r in plain(steps.tick())] == [(1000_000, 1008_000, 3)]
    assert operator.next_processing_time_ms is None


def test_the_watermark_of_the_rows_means_nothing_until_it_is_the_last() -> None:
    steps = Steps(spec_of(WINDOWS[0]))
    steps.rows([("a", 1)])
    assert steps.watermark(10**15) == []
    assert [r["sum_v"] for r in plain(steps.watermark(MAX_WATERMARK))] == [1], "nothing is lost with the end"
    assert steps.operators[0].next_processing_time_ms is None


def test_after_the_last_watermark_a_loop_may_bring_rows_again() -> None:
    steps = Steps(spec_of(WINDOWS[0]))
    steps.watermark(MAX_WATERMARK)
    steps.rows([("a", 1)])
    steps.clock.now_ms += 10
    assert [r["sum_v"] for r in plain(steps.tick())] == [1]
    steps.rows([("a", 2)])
    assert [r["sum_v"] for r in plain(steps.restored(2).watermark(MAX_WATERMARK))] == [2]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_rows_that_a_loop_brings_into_a_window_that_came_out_with_the_last_watermark_come_out_too(
    window: Window,
) -> None:
    """They had been added to the dead group id of their window and key, which nobody looked at any more."""
    steps = Steps(spec_of(window))
    came_out: list[Outputs] = []
    for turn in range(3):
        steps.clock.now_ms = 1_002
        outputs = steps.rows([("a", turn), ("b", None)])
        outputs += steps.watermark(MAX_WATERMARK)
        assert not any(operator.timers_pending for operator in steps.operators)
        came_out.append(outputs)
    counts = [sum(row["count_v"] for _, batch in outputs for row in batch.to_pylist()) for outputs in came_out]
    assert counts[0] > 0
    assert counts == [counts[0]] * 3


@pytest.mark.parametrize("window", [WINDOWS[0], SessionWindow(4 * MS + 1, processing_time=True)], ids=str)
def test_early_results_by_the_clock_of_every_key(window: Window) -> None:
    steps = Steps(spec_of(window, Early(processing_time_us=3 * MS)))
    keys = [f"key {number}" for number in range(9)]
    sums: list[Counter[object]] = []
    for now_ms in range(1_000, 1_011):
        steps.clock.now_ms = now_ms
        sums.append(Counter(r["sum_v"] for r in plain(steps.tick())))
        if now_ms in (1_000, 1_003):
            for key in keys:
                steps.rows([(key, 1)])
    multiples, end = {1_002: 1, 1_005: 2}, 1_010 if isinstance(window, TumblingWindow) else 1_008
    assert sums == [Counter({multiples.get(ms, 2): 9} if ms in {*multiples, end} else {}) for ms in range(1_000, 1_011)]


def test_each_session_comes_out_in_its_millisecond_wherever_it_lies() -> None:
    steps = Steps(spec_of(SessionWindow(40 * MS, processing_time=True)))
    for number in range(20):
        steps.clock.now_ms = 1_000 + number
        steps.rows([(f"key {number}", number)])
    for number in range(20):
        steps.clock.now_ms = 1_040 + number
        assert [r["sum_v"] for r in plain(steps.tick())] == [number]
    assert not any(operator.timers_pending for operator in steps.operators)


def test_early_results_by_the_clock_besides() -> None:
    steps = Steps(spec_of(WINDOWS[0], Early(processing_time_us=4 * MS)))
    steps.rows([("a", 1)])
    sums = []
    for now_ms in (1_003, 1_004, 1_005, 1_010):
        steps.clock.now_ms = now_ms
        sums.append([r["sum_v"] for r in plain(steps.tick())])
        if now_ms == 1_004:
            steps.rows([("a", 2)])
    assert sums == [[], [1], [], [3]], "at 1,008 it would have come early again, had anybody called"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda w: WindowAggregateSpec(batch_of([]).schema, ("k",), None, w, AGGREGATES, 5), "no row is late"),
        (lambda w: spec_of(w, Early(event_time_us=5)), "early results by event time of windows by processing time"),
    ],
)
def test_what_makes_no_sense_by_the_clock_is_refused(make: Any, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        make(WINDOWS[0])


def test_results_say_when_in_utc() -> None:
    fields = spec_of(WINDOWS[0]).outputs[0]
    assert fields.field("window_start").type == fields.field("window_end").type == pa.timestamp("us", "UTC")
