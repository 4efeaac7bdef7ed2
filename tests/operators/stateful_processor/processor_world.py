"""What the tests of hosted processors share: processors made of state operations, Spark's own tester beside ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
from process_world import Clock, Group
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.tws_tester import TwsTester

from cutwater.operators.stateful_processor.spark_types import TimeMode
from cutwater.operators.stateful_processor.spec import Form, ProcessorSpec

SCHEMA = pa.schema([("k", pa.string()), ("op", pa.string()), ("a", pa.int64()), ("b", pa.int64()), ("t", pa.int64())])
TIMED = SCHEMA.set(4, pa.field("t", pa.timestamp("us")))
OUT = "k string, told string"

Operation = tuple[str, int, int]


class Interpreter(StatefulProcessor):
    """Each row is one operation on a state or timer; what it found is told.  The user's side of every interface."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n long, s string")
        self.list = handle.getListState("list", "n long")
        self.map = handle.getMapState("map", "key long, kind string", "n long, s string")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        told = [self.told(row.op, row.a, row.b, timerValues) for row in self.all(rows)]
        yield self.row(k=key[0], told=repr(told))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        told: list[Any] = [at, list(self.handle.listTimers()), self.told("tell", at, 0, timerValues)]
        if at % 3 == 0:
            self.handle.registerTimer(at + 1000)
        if at % 5 == 0:
            self.value.clear()
        yield self.row(k=key[0], told=repr(told))

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        for row in self.all(iter([initialState])):
            self.told(row.op, row.a, row.b, timerValues)

    def all(self, rows: Iterator[Any]) -> Iterator[Any]:
        return rows

    def row(self, **columns: Any) -> Any:
        return Row(**columns)

    def told(self, op: str, a: int, b: int, times: Any) -> Any:
        match op:
            case "update":
                self.value.update((a, f"s{b}"))
            case "clear":
                self.value.clear()
            case "append":
                self.list.appendValue((a,))
            case "extend":
                self.list.appendList([(a,), (b,)])
            case "put":
                self.list.put([(b,), (a,)])
            case "forget":
                self.list.clear()
            case "set":
                self.map.updateValue((a % 3, "x"), (b, None))
            case "remove":
                self.map.removeKey((a % 3, "x"))
            case "drop":
                self.map.clear()
            case "timer":
                self.handle.registerTimer(
                    times.getCurrentWatermarkInMs() + times.getCurrentProcessingTimeInMs() + a + 1
                )
            case "untimer":
                self.handle.deleteTimer(a + 1)
            case _:
                return self.tell(a, times)
        return None

    def tell(self, a: int, times: Any) -> Any:
        entries = list(self.map.iterator())
        return (
            (self.value.exists(), self.value.get()),
            (self.list.exists(), list(self.list.get())),
            # Emptied, a map of Spark's tester exists and one of Spark does not.
            (self.map.exists() and bool(entries), entries, list(self.map.keys()), list(self.map.values())),
            (self.map.containsKey((a % 3, "x")), self.map.getValue((a % 3, "x")), self.map.getValue((9, "x"))),
            (times.getCurrentProcessingTimeInMs(), times.getCurrentWatermarkInMs()),
        )


class PandasInterpreter(Interpreter):
    def all(self, rows: Iterator[Any]) -> Iterator[Any]:
        for frame in rows:
            assert list(frame.index) == list(range(len(frame)))
            yield from frame.itertuples(index=False)

    def row(self, **columns: Any) -> Any:
        return pd.DataFrame({name: [value] for name, value in columns.items()})


class NoTimers(Interpreter):
    """Of the time mode None, in which there are no timers."""

    def told(self, op: str, a: int, b: int, times: Any) -> Any:
        return None if "timer" in op else super().told(op, a, b, times)


def spec(
    processor: Any = None, mode: TimeMode = TimeMode.NONE, form: Form = "rows", schema: pa.Schema = SCHEMA, **more: Any
) -> ProcessorSpec:
    time = "t" if mode is TimeMode.EVENT else None
    return ProcessorSpec(schema, ("k",), processor or Interpreter(), OUT, mode, form, time, **more)


def batch(rows: list[tuple[str, str, int, int]], times: list[int] | None = None) -> pa.RecordBatch:
    """Rows (key, operation, a, b); event times in milliseconds."""
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    stamps = [t * 1000 for t in times] if times is not None else [0] * len(rows)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=False)]
    schema = SCHEMA if times is None else TIMED
    return pa.RecordBatch.from_arrays([*arrays, pa.array(stamps, schema.field("t").type)], schema=schema)


def by_key(batch: pa.RecordBatch) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in batch.to_pylist():
        found.setdefault(row["k"], []).append(Row(**row))
    return found


class Beside:
    """The same processor in Spark's tester and in ours; whatever comes out is compared at once."""

    def __init__(self, group: Group, tester: TwsTester, form: Form = "rows") -> None:
        self.group, self.tester, self.form = group, tester, form

    def rows(self, batch: pa.RecordBatch) -> None:
        expected: list[Any] = []
        for key, rows in by_key(batch).items():
            if self.form == "rows":
                expected += self.tester.test(key, rows)
            else:
                frame = pd.DataFrame([row.asDict() for row in rows])
                expected += list(self.tester.testInPandas(key, frame).itertuples(index=False))
        self.group.rows(batch)
        self.compare(expected)

    def compare(self, expected: Any) -> None:
        rows = expected.itertuples(index=False) if isinstance(expected, pd.DataFrame) else expected
        ours, self.group.made = self.group.made, []
        assert sorted((row["k"], row["told"]) for row in ours) == sorted((row.k, row.told) for row in rows)

    def restored(self, parallelism: int) -> None:
        self.group = self.group.restored(self.group.freeze()(), parallelism)


def beside(processor: type[Interpreter], mode: TimeMode = TimeMode.NONE, form: Form = "rows") -> Beside:
    extractor = (lambda row: int(row.t.timestamp() * 1000)) if mode is TimeMode.EVENT else None
    tester = TwsTester(processor(), timeMode=mode.value, eventTimeExtractor=extractor)
    schema = TIMED if mode is TimeMode.EVENT else SCHEMA
    return Beside(Group(spec(processor(), mode, form, schema), Clock(), ["k"]), tester, form)


def told(row: dict[str, Any]) -> Any:
    return ast.literal_eval(row["told"])
