"""Hosted processors give what Spark's own ``TwsTester`` gives, over snapshots and changes of parallelism."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_world import Clock, Group
from processor_world import Beside, Interpreter, NoTimers, PandasInterpreter, batch, beside, spec
from pyspark.sql import Row
from pyspark.sql.streaming.tws_tester import TwsTester

from cutwater.operators.enrich.table import EnrichmentTable
from cutwater.operators.stateful_processor.spark_types import TimeMode

STATE_OPS = ["update", "clear", "append", "extend", "put", "forget", "set", "remove", "drop", "tell", "tell"]
TIMER_OPS = [*STATE_OPS, "timer", "timer", "untimer"]


def rows(ops: list[str]) -> st.SearchStrategy[list[tuple[str, str, int, int]]]:
    row = st.tuples(st.sampled_from("abc"), st.sampled_from(ops), st.integers(0, 12), st.integers(-9, 9))
    return st.lists(row, max_size=12)


def steps(ops: list[str]) -> st.SearchStrategy[list[Any]]:
    """Batches, and now and then a restore at some parallelism or a jump of the clock."""
    batches = st.tuples(st.just("rows"), rows(ops))
    restores = st.tuples(st.just("restore"), st.integers(1, 3))
    jumps = st.tuples(st.just("time"), st.integers(1, 9))
    return st.lists(st.one_of(batches, batches, restores, jumps), min_size=1, max_size=8)


@pytest.mark.parametrize("form", ["rows", "pandas"])
@given(program=steps(STATE_OPS))
@settings(max_examples=40, deadline=None)
def test_states_without_time(form: Any, program: list[Any]) -> None:
    class Timeless(NoTimers, PandasInterpreter if form == "pandas" else Interpreter):  # type: ignore[misc]
        pass

    both = beside(Timeless, form=form)
    for what, argument in program:
        if what == "rows":
            both.rows(batch(argument))
        elif what == "restore":
            both.restored(argument)


def test_states_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rocksdict")
    monkeypatch.setattr(Group, "memory_bytes", 1 << 20)

    class Timeless(NoTimers, Interpreter):  # type: ignore[misc]
        pass

    both = beside(Timeless)
    dice = random.Random(1)
    for parallelism in (2, 1, 3):
        both.rows(
            batch(
                [
                    (dice.choice("abc"), dice.choice(STATE_OPS), dice.randint(0, 12), dice.randint(-9, 9))
                    for _ in range(60)
                ]
            )
        )
        both.restored(parallelism)
    both.rows(batch([(key, "tell", 0, 0) for key in "abc"]))


@pytest.mark.parametrize("form", ["rows", "pandas"])
@given(program=steps(TIMER_OPS))
@settings(max_examples=40, deadline=None)
def test_processing_time(form: Any, program: list[Any]) -> None:
    both = beside(PandasInterpreter if form == "pandas" else Interpreter, TimeMode.PROCESSING, form)
    now_ms = 0
    for what, argument in program:
        if what == "rows":
            both.rows(batch(argument))
        elif what == "restore":
            both.restored(argument)
        else:
            now_ms += argument
            expected = both.tester.setProcessingTime(now_ms)
            both.group.time(now_ms)
            both.compare(expected)


@given(program=steps(TIMER_OPS), data=st.data())
@settings(max_examples=60, deadline=None)
def test_event_time(program: list[Any], data: st.DataObject) -> None:
    """Also: rows at or behind the watermark never reach the processor, and are not lost either."""
    both = beside(Interpreter, TimeMode.EVENT)
    watermark_ms = late = 0
    for what, argument in program:
        if what == "rows":
            near = st.integers(max(watermark_ms - 1, 0), watermark_ms + 1)
            times = data.draw(st.lists(st.integers(0, 30) | near, min_size=len(argument), max_size=len(argument)))
            event_batch(both, argument, times, watermark_ms)
            late += sum(t <= watermark_ms for t in times) if watermark_ms else 0
        elif what == "restore":
            assert sum(map(len, both.group.side)) == late
            both.restored(argument)
            late = 0
        else:
            watermark_ms += argument
            expected = both.tester.setWatermark(watermark_ms)
            both.group.watermark(watermark_ms * 1000)
            both.compare(expected)
    assert sum(map(len, both.group.side)) == late


def event_batch(both: Beside, rows: list[Any], times: list[int], watermark_ms: int) -> None:
    """The tester calls a processor also for a key whose rows were all late; its watermark begins with 0."""
    kept = [i for i, t in enumerate(times) if t > watermark_ms]
    early = [i for i, t in enumerate(times) if not watermark_ms and t == 0]
    times = [t + (i in early) for i, t in enumerate(times)]
    kept = sorted({*kept, *early})
    expected: list[Any] = []
    keys: dict[str, list[Row]] = {}
    for i in kept:
        row = batch([rows[i]], [times[i]]).to_pylist()[0]
        keys.setdefault(row["k"], []).append(Row(**{**row, "t": row["t"].replace(tzinfo=dt.UTC)}))
    for key, found in keys.items():
        expected += both.tester.test(key, found)
    both.group.rows(batch(rows, times))
    both.compare(expected)


@pytest.mark.parametrize("parallelism", [1, 3])
@given(initial=rows(STATE_OPS), later=rows(STATE_OPS))
@settings(max_examples=25, deadline=None)
def test_initial_state(parallelism: int, initial: list[Any], later: list[Any]) -> None:
    """It is there before the first row, and is not taken again after a restore."""
    table = batch(initial)
    rows = [(row["k"], Row(**row)) for row in table.to_pylist()]
    tester = TwsTester(NoTimers(), initialStateRow=rows or None)
    made = spec(NoTimers(), initial=EnrichmentTable(pa.Table.from_batches([table])))
    group = Group(made, Clock(), ["k"], parallelism).restored([], parallelism)
    both = Beside(group, tester)
    both.rows(batch([(k, "tell", 0, 0) for k in "abc"]))
    both.restored(4 - parallelism)
    both.rows(batch(later))
