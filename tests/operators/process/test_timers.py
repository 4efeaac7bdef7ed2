"""Timers: which fire, when and in which order, against a plain set; over freezes and restores at any parallelism."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_world import Clock, Group

from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import StorageError, UserCodeError
from cutwater.operators.process.functions import ProcessContext, ProcessFunction
from cutwater.operators.process.spec import ProcessSpec
from cutwater.operators.process.states import ValueState
from cutwater.state.objects.timers import Timers

SCHEMA = pa.schema([("k", pa.string()), ("do", pa.string()), ("time", pa.int64())])
OUT = pa.schema([("k", pa.string()), ("time", pa.int64()), ("domain", pa.string()), ("n", pa.int64())])


class Alarm(ProcessFunction):
    """Does what the rows say; a timer whose time is a multiple of 7 sets the next one, and deletes the one after it."""

    fired = ValueState("long")

    def process(self, row: dict[str, Any], ctx: ProcessContext) -> None:
        getattr(ctx.timers, row["do"])(row["time"])

    def on_timer(self, time: int, domain: str, ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        self.fired.value = self.fired.get(0) + 1
        if time % 7 == 0:
            getattr(ctx.timers, f"register_{domain}")(time + 3)
            getattr(ctx.timers, f"delete_{domain}")(time + 4)
        yield {"k": ctx.key, "time": time, "domain": domain, "n": self.fired.value}


def alarm() -> ProcessSpec:
    return ProcessSpec(SCHEMA, ("k",), Alarm(), OUT)


class Model:
    """The same with sets."""

    def __init__(self) -> None:
        self.timers: dict[str, set[tuple[int, str]]] = {"event": set(), "processing": set()}
        self.watermark, self.now = -(2**63), 0
        self.made: list[tuple[str, int, str]] = []

    def row(self, k: str, do: str, time: int) -> None:
        verb, domain = do.split("_")
        if verb == "register":
            self.timers[domain].add((time, k))
        else:
            self.timers[domain].discard((time, k))

    def fire(self, domain: str, until: int) -> None:
        timers = self.timers[domain]
        while due := [t for t in timers if t[0] <= until]:
            time, k = min(due)
            timers.remove((time, k))
            if time % 7 == 0:
                timers.add((time + 3, k))
                timers.discard((time + 4, k))
            self.made.append((k, time, domain))


TIMES = st.integers(0, 40)
VERBS = ("register", "register", "delete")
DOING = st.sampled_from([f"{verb}_{domain}" for verb in VERBS for domain in ("event", "processing")])
ACTIONS = st.lists(
    st.tuples(st.just("rows"), st.lists(st.tuples(st.sampled_from("abcde"), DOING, TIMES), min_size=1, max_size=8))
    | st.tuples(st.sampled_from(["watermark", "time"]), TIMES)
    | st.tuples(st.just("restore"), st.integers(1, 3)),
    max_size=14,
)


def batch_of(rows: list[tuple[str, str, int]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([r[i] for r in rows], SCHEMA[i].type) for i in range(3)], schema=SCHEMA)


@settings(max_examples=80, deadline=None)
@given(actions=ACTIONS, parallelism=st.integers(1, 3))
def test_timers_fire_as_a_plain_set_says_whatever_is_restored_on_the_way(actions: list[Any], parallelism: int) -> None:
    group, model = Group(alarm(), Clock(), ["k"], parallelism), Model()
    counts: dict[str, int] = {}
    for what, value in [*actions, ("watermark", 100), ("time", 100)]:
        made_before = len(model.made)
        if what == "rows":
            group.rows(batch_of(value))
            for row in value:
                model.row(*row)
        elif what == "watermark":
            group.watermark(value)
            if value > model.watermark:  # a timer behind the watermark waits for the next rise
                model.watermark = value
                model.fire("event", value)
        elif what == "time":
            group.time(value)
            model.now = max(model.now, value)
            model.fire("processing", model.now)
        else:
            write = group.freeze()
            group.rows(batch_of([("a", "register_event", 1), ("b", "delete_event", 5)]))  # after the cut: not seen
            group = group.restored(write(), value)
        got = [(r["k"], r["time"], r["domain"]) for r in group.made]
        assert sorted(got) == sorted(model.made[made_before:])
        for key in "abcde":
            times = [t for k, t, _ in got if k == key]
            assert times == [t for k, t, _ in model.made[made_before:] if k == key]
        for row in group.made:
            counts[row["k"]] = counts.get(row["k"], 0) + 1
            assert row["n"] == counts[row["k"]], "the state of the key goes along"
        if len(group.operators) == 1:
            assert [t for _, t, _ in got] == [t for _, t, _ in model.made[made_before:]], (
                "in order of time over all keys"
            )
        group.made.clear()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["register", "delete"]), st.integers(0, 5), st.integers(0, 30))
        | st.tuples(st.just("due"), st.integers(0, 30), st.integers(0, 4)),
        max_size=60,
    )
)
def test_a_set_of_timers_in_order_of_time(steps: list[tuple[str, int, int]]) -> None:
    timers, expected = Timers(), dict[tuple[int, tuple[int]], int]()
    for number, (what, a, b) in enumerate(steps):
        if what == "register":
            assert timers.register((a,), b) == ((b, (a,)) not in expected)
            expected.setdefault((b, (a,)), number)
        elif what == "delete":
            assert timers.delete((a,), b) == (expected.pop((b, (a,)), None) is not None)
        else:
            due = sorted((t for t in expected if t[0] <= a), key=lambda t: t[0])[:b]
            got = list(timers.due(a, b))
            assert [t for t, _ in got] == [t for t, _ in due]
            for timer in got:
                del expected[timer]
        assert len(timers) == len(expected)
        assert timers.next_time == min((t for t, _ in expected), default=None)
        for key in range(6):
            assert timers.times((key,)) == sorted(t for t, k in expected if k == (key,))


def test_deleted_timers_give_their_memory_back() -> None:
    timers = Timers()
    for i in range(50_000):
        timers.register((i % 10,), i)
        if i >= 10:
            timers.delete((i % 10,), i - 10)
    assert len(timers) == 10
    assert len(timers._queue) < 5_000
    assert [t for t, _ in timers.due(10**9, 100)] == list(range(49_990, 50_000))


def test_many_timers_fire_in_slices_and_a_processing_slice_holds_up_nothing() -> None:
    group = Group(alarm(), Clock(), ["k"])
    times = [7 * i + 1 for i in range(1000)]
    group.rows(batch_of([("a", "register_event", t) for t in times] + [("a", "register_processing", t) for t in times]))
    (operator,) = group.operators
    first = sum(b.num_rows for _, b in operator.on_watermark(10_000))
    assert 0 < first < 1000
    assert operator.pending
    group.watermark(10_001)
    assert first + len(group.made) == 1000
    group.made.clear()
    group.time(10_000, slices=1)
    fired = len(group.made)
    assert 0 < fired < 1000
    assert not operator.pending, "a barrier may come between"
    again = group.restored(group.freeze()(), 1)
    again.time(10_000)
    assert [r["time"] for r in group.made + again.made] == times, "overdue timers fire in order after the restore"


def test_a_timer_on_the_watermark_fires_and_one_behind_it_waits_for_the_next_rise() -> None:
    group = Group(alarm(), Clock(), ["k"])
    group.rows(batch_of([("a", "register_event", 10)]))
    group.watermark(9)
    assert group.made == []
    group.watermark(10)
    assert [r["time"] for r in group.made] == [10]
    group.rows(batch_of([("a", "register_event", 5)]))
    assert len(group.made) == 1
    group.watermark(11)
    assert [r["time"] for r in group.made] == [10, 5]


def test_at_the_end_every_event_timer_fires_and_no_processing_timer() -> None:
    group = Group(alarm(), Clock(), ["k"])
    group.rows(batch_of([("a", "register_event", 2**62), ("a", "register_processing", 50)]))
    group.watermark(MAX_WATERMARK)
    assert [(r["time"], r["domain"]) for r in group.made] == [(2**62, "event")]
    (operator,) = group.operators
    assert operator.next_processing_time_ms == 50


class Times(ProcessFunction):
    def process(self, row: dict[str, Any], ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        ctx.timers.register_event(dt.datetime(1970, 1, 1, 0, 0, 1))
        ctx.timers.register_event(dt.datetime(1970, 1, 1, 1, 0, 0, 5, tzinfo=dt.timezone(dt.timedelta(hours=1))))
        ctx.timers.register_event(-3)
        yield {"times": ctx.timers.registered("event"), "no": ctx.timers.registered("processing")}

    def on_timer(self, time: int, domain: str, ctx: ProcessContext) -> None:
        return


def test_event_times_are_microseconds_or_datetimes() -> None:
    out = pa.schema([("times", pa.list_(pa.int64())), ("no", pa.list_(pa.int64()))])
    group = Group(ProcessSpec(SCHEMA, ("k",), Times(), out), Clock(), ["k"])
    group.rows(batch_of([("a", "", 0)]))
    assert group.made == [{"times": [-3, 5, 1_000_000], "no": []}]


class Forever(ProcessFunction):
    step = 1

    def process(self, row: dict[str, Any], ctx: ProcessContext) -> None:
        ctx.timers.register_event(row["time"])

    def on_timer(self, time: int, domain: str, ctx: ProcessContext) -> None:
        if ctx.key == "careful" and ctx.at_end:
            return
        ctx.timers.register_event(time + self.step)


@pytest.mark.parametrize(("step", "message"), [(1, "the input has ended"), (0, "behind the watermark")])
def test_timers_without_end_are_an_error_and_not_a_hang(step: int, message: str) -> None:
    function = Forever()
    function.step = step
    group = Group(ProcessSpec(SCHEMA, ("k",), function, OUT), Clock(), ["k"])
    group.rows(batch_of([("a", "", 1)]))
    with pytest.raises(UserCodeError, match=f"without end.*{message}"):
        group.watermark(MAX_WATERMARK if step else 10)


def test_a_periodic_timer_stops_at_the_end() -> None:
    group = Group(ProcessSpec(SCHEMA, ("k",), Forever(), OUT), Clock(), ["k"])
    group.rows(batch_of([("careful", "", 1)]))
    group.watermark(150_000)
    group.watermark(MAX_WATERMARK)


class Silent(ProcessFunction):
    def process(self, row: dict[str, Any], ctx: ProcessContext) -> None:
        ctx.timers.register_event(row["time"])


def test_errors_of_timers_say_what_to_do() -> None:
    group = Group(ProcessSpec(SCHEMA, ("k",), Silent(), OUT), Clock(), ["k"])
    with pytest.raises(UserCodeError, match="Silent sets a timer and has no on_timer") as raised:
        group.rows(batch_of([("a", "", 3)]))
    assert "on_timer(self, time, domain, ctx)" in str(raised.value.hint)

    class Breaks(Alarm):
        def on_timer(self, time: int, domain: str, ctx: ProcessContext) -> Any:
            return [{"k": time}] if time == 3 else 1 // 0

    breaks = Group(ProcessSpec(SCHEMA, ("k",), Breaks(), OUT), Clock(), ["k"])
    breaks.rows(batch_of([("a", "register_event", 3), ("a", "register_event", 4)]))
    with pytest.raises(UserCodeError, match=r"made 3 for column 'k'.* from timer 0 of the batch, {k: 'a', time: 3"):
        breaks.watermark(3)
    with pytest.raises(UserCodeError, match=r"ZeroDivisionError on timer 0 of the batch, {k: 'a', time: 4"):
        breaks.watermark(4)
    for wrong in (1.5, "4", None, True, 2**63):
        with pytest.raises(UserCodeError, match="is not the time of a timer"):
            group.operators[0]._context.timers.delete_event(wrong)  # type: ignore[attr-defined]


def test_timers_of_a_function_that_has_no_on_timer_any_more_are_not_lost_silently() -> None:
    group = Group(alarm(), Clock(), ["k"])
    group.rows(batch_of([("a", "register_processing", 3)]))
    segments = group.freeze()()
    (operator,) = Group(ProcessSpec(SCHEMA, ("k",), Silent(), OUT), Clock(), ["k"]).operators
    with pytest.raises(StorageError, match="holds 1 processing-time timers"):
        operator.restore(segments)


class Late(ProcessFunction):
    def process(self, row: dict[str, Any], ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"k": ctx.key, "time": ctx.watermark, "domain": "", "n": 0}

    def on_timer(self, time: int, domain: str, ctx: ProcessContext) -> None:
        return


def test_the_watermark_of_a_key_does_not_fall_over_a_restore_at_another_parallelism() -> None:
    keys = "abcdefgh"
    group = Group(ProcessSpec(SCHEMA, ("k",), Late(), OUT), Clock(), ["k"], 2)
    for operator, watermark in zip(group.operators, (10, 20), strict=True):
        operator.on_watermark(watermark)
    group.rows(batch_of([(k, "", 0) for k in keys]))
    before = {r["k"]: r["time"] for r in group.made}
    assert set(before.values()) == {10, 20}
    again = group.restored(group.freeze()(), 3)
    again.rows(batch_of([(k, "", 0) for k in keys]))
    assert {r["k"]: r["time"] for r in again.made} == before
    again.made.clear()
    again.watermark(15)
    again.rows(batch_of([(k, "", 0) for k in keys]))
    assert {r["k"]: r["time"] for r in again.made} == {k: max(15, w) for k, w in before.items()}
