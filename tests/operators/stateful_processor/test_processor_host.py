"""What Spark's tester does not know: time to live, the end of the input, types, emptied states, chained processors."""

from __future__ import annotations

import datetime as dt
import decimal
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from process_world import Clock, Group
from processor_world import OUT, Interpreter, batch, spec, told
from pyspark.sql import Row
from pyspark.sql import types as T
from pyspark.sql.streaming import StatefulProcessor

import cutwater as cw
from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import BuildError
from cutwater.operators.stateful_processor.spark_types import TimeMode
from cutwater.operators.stateful_processor.spec import ProcessorSpec
from cutwater.plan.compatibility import check_compatible, step_records
from cutwater.plan.planner import make_plan
from cutwater.storage.snapshot.manifest import Manifest


class Fleeting(Interpreter):
    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n long, s string", 100)
        self.list = handle.getListState("list", "n long", 100)
        self.map = handle.getMapState("map", "key long, kind string", "n long, s string", 100)


def test_values_expire_one_by_one_also_over_a_restore() -> None:
    group = Group(spec(Fleeting(), TimeMode.PROCESSING), Clock(1000), ["k"])
    group.rows(batch([("a", "update", 1, 1), ("a", "append", 1, 0), ("a", "set", 1, 1)]))
    group.clock.now_ms = 1050
    group.rows(batch([("a", "append", 2, 0), ("a", "set", 2, 2)]))
    group = group.restored(group.freeze()(), 2)
    group.clock.now_ms = 1099
    group.rows(batch([("a", "tell", 1, 0)]))
    value, elements, entries, *_ = told(group.made[-1])[0]
    assert (value, elements) == ((True, (1, "s1")), (True, [(1,), (2,)]))
    assert entries[1] == [((1, "x"), (1, None)), ((2, "x"), (2, None))]
    group.clock.now_ms = 1100
    group.rows(batch([("a", "tell", 1, 0)]))
    value, elements, entries, *_ = told(group.made[-1])[0]
    assert (value, elements) == ((False, None), (True, [(2,)]))
    assert entries[1] == [((2, "x"), (2, None))]
    group.time(2000)
    assert not any(segment.batch.num_rows for segment in group.freeze()() if not segment.name.startswith("__"))


def test_at_the_end_of_the_input_each_timer_fires_once_and_new_ones_do_not() -> None:
    """A processor that sets the next timer in each would go on for ever; it never learns of the end of time."""

    class Beats(Interpreter):
        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
            at, now_ms = expiredTimerInfo.getExpiryTimeInMs(), timerValues.getCurrentWatermarkInMs()
            self.handle.registerTimer(now_ms + 10)
            yield self.row(k=key[0], told=repr([at, now_ms]))

    schema = pa.schema(
        [("k", pa.string()), ("op", pa.string()), ("a", pa.int64()), ("b", pa.int64()), ("t", pa.timestamp("us"))]
    )
    group = Group(spec(Beats(), TimeMode.EVENT, schema=schema), Clock(), ["k"])
    group.rows(batch([("a", "timer", 20, 0), ("b", "timer", 4, 0), ("a", "timer", 4, 0)], [1, 1, 1]))
    group.made.clear()
    group.watermark(10_000)
    assert sorted(map(told, group.made)) == [[5, 10], [5, 10]]
    group.made.clear()
    group.watermark(MAX_WATERMARK)
    assert sorted((row["k"], *told(row)) for row in group.made) == [("a", 20, 20), ("a", 21, 21), ("b", 20, 20)]


def test_an_emptied_list_or_map_does_not_exist() -> None:
    """As in Spark; its tester keeps the empty collection."""

    class Empties(Interpreter):
        def told(self, op: str, a: int, b: int, times: Any) -> Any:
            self.map.updateValue((1, "x"), (1, None))
            self.map.removeKey((1, "x"))
            self.list.put([(1,)])
            self.list.put([])
            return self.map.exists(), self.list.exists(), list(self.map.keys()), list(self.list.get())

    group = Group(spec(Empties()), Clock(), ["k"])
    group.rows(batch([("a", "tell", 0, 0)]))
    assert told(group.made[0]) == [(False, False, [], [])]


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where local time is not UTC."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


VALUES: dict[T.DataType, Any] = {
    T.BooleanType(): True,
    T.ByteType(): -128,
    T.ShortType(): 2**15 - 1,
    T.IntegerType(): -(2**31),
    T.LongType(): 2**63 - 1,
    T.FloatType(): 0.5,
    T.DoubleType(): 1e300,
    T.StringType(): "grün",
    T.BinaryType(): b"\0\1",
    T.DateType(): dt.date(1969, 12, 31),
    T.TimestampType(): dt.datetime(2024, 7, 1, 12, 30, 0, 123),
    T.TimestampNTZType(): dt.datetime(2024, 1, 1, 12, 30, 0, 123),
    T.DecimalType(20, 3): decimal.Decimal("12345678901234567.125"),
    T.ArrayType(T.TimestampType()): [dt.datetime(2024, 7, 1), None],
    T.MapType(T.StringType(), T.TimestampType()): {"a": dt.datetime(2024, 7, 1), "b": None},
    T.StructType([T.StructField("x", T.LongType()), T.StructField("t", T.TimestampType())]): Row(
        x=1, t=dt.datetime(2024, 1, 1)
    ),
}


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.simpleString())
@pytest.mark.parametrize("ttl", [None, 1000])
def test_a_value_of_every_type_comes_back_as_it_was(kind: T.DataType, ttl: int | None, new_york: None) -> None:
    """Out of the state, also over a restore, and out of a row into the next step's rows."""
    value, schema = VALUES[kind], T.StructType([T.StructField("v", kind), T.StructField("w", kind)])

    class Keeps(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.one = handle.getValueState("one", schema, ttl)
            self.some = handle.getListState("some", schema, ttl)
            self.by_name = handle.getMapState("map", "k long", schema, ttl)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
            if not self.one.exists():
                self.one.update((value, None))
                self.some.appendValue((None, value))
                self.by_name.updateValue((1,), (value, value))
            assert self.one.get() == (value, None)
            assert list(self.some.get()) == [(None, value)]
            assert list(self.by_name.iterator()) == [((1,), (value, value))]
            assert type(self.one.get()[0]) is type(value)
            for row in rows:
                assert row.v is None or row.v == value
                yield Row(k=key[0], v=self.one.get()[0])

    out = T.StructType([T.StructField("k", T.LongType()), T.StructField("v", kind)])
    arrow = ProcessorSpec(pa.schema({"k": pa.int64()}), ("k",), Interpreter(), out).output_schema
    made = ProcessorSpec(arrow, ("k",), Keeps(), out, TimeMode.PROCESSING)
    group = Group(made, Clock(), ["k"])
    group.rows(pa.RecordBatch.from_arrays([pa.array([1]), pa.array([None], arrow.field("v").type)], schema=arrow))
    group = group.restored(group.freeze()(), 2)
    group.rows(pa.RecordBatch.from_arrays([pa.array([1]), pa.array([None], arrow.field("v").type)], schema=arrow))
    group.rows(pa.RecordBatch.from_pylist(group.made, arrow))
    assert len(group.made) == 2
    if isinstance(kind, T.TimestampType):
        assert group.made[0]["v"] == dt.datetime(2024, 7, 1, 16, 30, 0, 123, dt.UTC)
    assert group.made[0] == group.made[1]


def test_processors_in_a_chain_and_their_event_time() -> None:
    flow = cw.Dataflow("chain")
    rows = flow.read(
        "in", cw.memory([], schema="k string, op string, a long, b long, t timestamp_ntz"), event_time="t"
    ).key_by("k")
    first = rows.transform_with_state("first", Interpreter(), "k string, u timestamp_ntz", event_time="u")
    assert first.type.event_time == "u"
    second = first.key_by("k").transform_with_state("second", Interpreter(), "k string", "Update", "eventtime")
    assert second.schema.names == ["k"]
    assert second.late.schema.names == ["k", "u"]


def processing(**asked: str) -> Any:
    """A plan with a processor that asks for these value states; those asked for as nothing are deleted."""

    class Asks(StatefulProcessor):
        def init(self, handle: Any) -> None:
            for name, schema in asked.items():
                if schema:
                    setattr(self, name, handle.getValueState(name, schema))
                else:
                    handle.deleteIfExists(name)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
            for name, schema in asked.items():
                if schema:
                    state = getattr(self, name)
                    yield Row(k=key[0], told=f"{name} {state.get()}")
                    state.update((1,))

    return Asks()


def plan_of(processor: Any) -> Any:
    flow = cw.Dataflow("job")
    keyed = flow.read("in", cw.memory([], schema="k string")).key_by("k")
    keyed.transform_with_state("p", processor, "k string, told string").write("out", cw.discard())
    return make_plan(flow, 2, 128)


STATES = {"a": "n long", "b": "n long"}


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (STATES, ["a (1,)", "b (1,)"]),
        ({"b": "n long", "a": "n long"}, ["b (1,)", "a (1,)"]),
        ({"a": "n long", "new": "n long", "b": "n long"}, ["a (1,)", "new None", "b (1,)"]),
        ({"a": "n long", "b": ""}, ["a (1,)"]),
        ({"b": "", "new": "n int", "a": "n long"}, ["new None", "a (1,)"]),
    ],
)
def test_the_next_version_may_ask_for_more_states_and_delete_some(after: dict[str, str], told: list[str]) -> None:
    old, new = processing(**STATES), processing(**after)
    before = plan_of(old)
    manifest = Manifest("job", "u", 7, 1, "aligned", 128, 2, 0, 0, step_records(before), [], [])
    check_compatible(plan_of(new), manifest)
    rows = pa.record_batch({"k": ["a"]})
    group = Group(ProcessorSpec(rows.schema, ("k",), old, OUT), Clock(), ["k"])
    group.rows(rows)
    group.spec = ProcessorSpec(rows.schema, ("k",), new, OUT)
    group = group.restored(group.freeze()(), 2)
    group.rows(rows)
    assert [row["told"] for row in group.made] == told


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ({"a": "n long"}, r"step 'p', state 'b' is gone; handle.deleteIfExists\('b'\) gives it up"),
        ({"a": "n string", "b": "n long"}, "step 'p', state 'a': column 'n' was int64 and is string"),
    ],
)
def test_a_state_that_is_not_asked_for_any_more_or_has_another_type_is_refused(after: dict[str, str], why: str) -> None:
    before = plan_of(processing(**STATES))
    manifest = Manifest("job", "u", 7, 1, "aligned", 128, 2, 0, 0, step_records(before), [], [])
    with pytest.raises(BuildError, match=why):
        check_compatible(plan_of(processing(**after)), manifest)
