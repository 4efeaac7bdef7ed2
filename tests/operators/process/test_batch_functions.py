"""Process functions of batches: the same as row by row, however the rows are cut and wherever they are restored."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_world import Clock, Group

from cutwater.errors import UserCodeError
from cutwater.operators.process.functions import BatchContext, BatchProcessFunction, ProcessContext, group_rows
from cutwater.operators.process.operator_state import OperatorListState
from cutwater.operators.process.spec import ProcessSpec
from cutwater.operators.process.states import ListState, ValueState

SCHEMA = pa.schema([("a", pa.string()), ("b", pa.float64()), ("n", pa.int64())])
OUT = pa.schema([("a", pa.string()), ("b", pa.float64()), ("sum", pa.int64()), ("last", pa.int64())])
SIDE = (("odd", pa.schema([("n", pa.int32())])),)


class Sums(BatchProcessFunction):
    """A running sum and count for every row; a timer tells the count of its key."""

    total = ValueState("long")
    count = ValueState("int", ttl="1h")
    seen = ListState("long")

    def process_batch(self, batch: pa.RecordBatch, ctx: BatchContext) -> Iterator[pa.RecordBatch]:
        groups = ctx.group(batch)
        n = batch.column("n").to_numpy()
        before = np.array(self.total.get_many(groups.keys, 0))
        order = np.argsort(groups.codes, kind="stable")
        sums = np.cumsum(n[order])
        begin = np.searchsorted(groups.codes[order], np.arange(len(groups)))
        sums -= np.repeat(sums[begin] - n[order][begin], np.bincount(groups.codes))
        running = np.empty_like(sums)
        running[order] = sums
        running += before[groups.codes]
        self.total.put_many(groups.keys, before + np.bincount(groups.codes, n).astype(np.int64))
        counts = np.array(self.count.get_many(groups.keys, 0)) + np.bincount(groups.codes)
        self.count.put_many(groups.keys, pa.array(counts))
        for key in groups.keys:
            ctx.use(key)
            assert ctx.key == key
            ctx.timers.register_event(100)
        for code, value in zip(groups.codes, n, strict=True):
            ctx.use(groups.keys[code])
            self.seen.append(value)
        odd = batch.filter(pa.array(n % 2 == 1)).select(["n"])
        ctx.emit("odd", odd)
        yield pa.record_batch({"sum": running, "a": batch.column("a"), "b": batch.column("b"), "last": n})

    def on_timer(self, time: int, domain: str, ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        a, b = ctx.key
        yield {"a": a, "b": b, "sum": self.total.value, "last": self.count.value * 1000 + len(self.seen)}


ROWS = st.lists(
    st.tuples(st.sampled_from("xyz"), st.sampled_from([0.0, -0.0, 1.5]), st.integers(-5, 5)), min_size=1, max_size=12
)


def batch_of(rows: list[tuple[str, float, int]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([r[i] for r in rows], SCHEMA[i].type) for i in range(3)], schema=SCHEMA)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(ROWS, st.integers(0, 3)), max_size=6))
def test_batches_give_what_rows_give_over_any_cut_and_restore(steps: list[tuple[Any, int]]) -> None:
    group = Group(ProcessSpec(SCHEMA, ("a", "b"), Sums(), OUT, SIDE), Clock(), ["a", "b"])
    totals: dict[tuple[str, float], list[int]] = {}
    got: list[tuple[Any, ...]] = []
    odd: list[int] = []
    expected: list[tuple[Any, ...]] = []
    for rows, parallelism in steps:
        group.rows(batch_of(rows))
        for a, b, n in rows:
            mine = totals.setdefault((a, b), [])
            mine.append(n)
            expected.append((a, b, sum(mine), n))
        if parallelism:
            got += [tuple(r.values()) for r in group.made]
            odd += [r["n"] for r in group.side[0]]
            group = group.restored(group.freeze()(), parallelism)
    group.watermark(100)
    got += [tuple(r.values()) for r in group.made]
    odd += [r["n"] for r in group.side[0]]
    expected += [(a, b, sum(mine), len(mine) * 1001) for (a, b), mine in totals.items()]
    assert sorted(got) == sorted(expected)
    assert sorted(odd) == sorted(n for rows, _ in steps for _, _, n in rows if n % 2 == 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 2), st.sampled_from(["", "ä", "b"]), st.booleans()), max_size=30))
def test_rows_are_grouped_as_a_dict_groups_them(rows: list[tuple[int, str, bool]]) -> None:
    names = ["i", "s", "f"]
    types = [pa.decimal128(4, 1), pa.string(), pa.bool_()]
    columns = [pa.array([Decimal(r[0]) if i == 0 else r[i] for r in rows], t) for i, t in enumerate(types)]
    batch = pa.RecordBatch.from_arrays(columns, names=names)
    for keys in (["i"], ["s", "f"], ["f", "i", "s"]):
        found = group_rows(batch, keys)
        assert len(set(found.keys)) == len(found)
        wanted = list(zip(*(batch.column(k).to_pylist() for k in keys), strict=True))
        assert [found.keys[c] for c in found.codes] == wanted
        assert set(found.keys) == set(wanted)


def state(kind: str = "long", **settings: Any) -> ValueState:
    return ValueState(kind, **settings)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("long", np.array([1.5])),
        ("long", np.array(["3"])),
        ("long", np.array([True])),
        ("tinyint", pa.array([128])),
        ("long", [1.0]),
        ("string", np.array([3])),
        ("long", [1, 2]),
    ],
)
def test_values_that_do_not_fit_are_refused_and_change_nothing(kind: str, values: Any) -> None:
    one = state(kind)
    with pytest.raises(UserCodeError):
        one.put_many([("a",)], values)
    assert one.get_many([("a",)]) == [None]


def test_many_keys_at_once_leave_the_current_key_alone_and_a_null_clears() -> None:
    for one in (state(), state(ttl="1h", ttl_update="on_read_and_write")):
        one.bind(("b",))
        one.put_many([("a",), ("b",)], np.array([1, 2]))
        assert one.get_many([("b",), ("c",), ("a",)], 0) == [2, 0, 1]
        assert one.value == 2
        one.put_many([("a",), ("b",)], [None, 3])
        assert (one.get_many([("a",)]), one.value) == ([None], 3)


class Wrong(BatchProcessFunction):
    kept = OperatorListState("long")

    def process_batch(self, batch: pa.RecordBatch, ctx: BatchContext) -> Any:
        match batch.column("n")[0].as_py():
            case 0:
                return [{"a": 1}]
            case 1:
                return [pa.record_batch({"a": ["x"]})]
            case 2:
                ctx.group(batch)
            case 3:
                ctx.emit("odd", pa.record_batch({"m": [1]}))
            case _:
                raise ZeroDivisionError("mine")
        return None


@pytest.mark.parametrize(
    ("n", "message"),
    [
        (0, "yielded dict, not a pyarrow.RecordBatch"),
        (1, "not of its declared schema"),
        (2, "rows without key cannot be grouped"),
        (3, "not of its declared schema"),
        (4, "raised ZeroDivisionError"),
    ],
)
def test_errors_say_what_the_function_did(n: int, message: str) -> None:
    group = Group(ProcessSpec(SCHEMA, (), Wrong(), OUT, SIDE), Clock(), ["a"])
    with pytest.raises(UserCodeError, match=message):
        group.rows(batch_of([("x", 0.0, n)]))
