"""State without key, functions over two streams and broadcast rows: models in plain Python, at any parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_world import Clock, Group

import cutwater as cw
from cutwater.errors import BuildError, UserCodeError
from cutwater.operators.process.functions import (
    BroadcastProcessFunction,
    CoProcessFunction,
    ProcessContext,
    ProcessFunction,
)
from cutwater.operators.process.operator_state import BroadcastState, OperatorListState, UnionListState
from cutwater.operators.process.spec import ProcessInput, ProcessSpec
from cutwater.operators.process.states import ListState, ValueState

ROW = pa.schema([("n", pa.int64())])
KEPT = pa.schema([("kept", pa.list_(pa.int64()))])


class Keeps(ProcessFunction):
    kept = OperatorListState("long")

    def process(self, row: dict[str, Any], ctx: ProcessContext) -> None:
        assert ctx.key is None
        self.kept.append(row["n"])


class KeepsUnion(Keeps):
    kept = UnionListState("long")


def lists(group: Group, name: str = "kept") -> list[list[int]]:
    return [list(op._others[name]) for op in group.operators]  # type: ignore[attr-defined]


def numbers(values: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(values, pa.int64())], schema=ROW)


def filled(function: ProcessFunction, shares: list[list[int]]) -> Group:
    group = Group(ProcessSpec(ROW, (), function, KEPT), Clock(), [], len(shares))
    for operator, share in zip(group.operators, shares, strict=True):
        operator.process(0, numbers(share))
    return group


SHARES = st.lists(st.lists(st.integers(0, 99), max_size=12), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(shares=SHARES, parallelism=st.integers(1, 5))
def test_a_list_is_shared_out_and_a_union_is_everywhere(shares: list[list[int]], parallelism: int) -> None:
    for function in (Keeps(), KeepsUnion()):
        group = filled(function, shares)
        write = group.freeze()
        for operator in group.operators:
            operator.process(0, numbers([-1]))  # after the cut
        segments = write()
        again = lists(group.restored(segments, parallelism))
        if isinstance(function, KeepsUnion):
            assert again == [[n for share in shares for n in share]] * parallelism
        elif parallelism == len(shares):
            assert again == shares, "at the same parallelism everything stays where it was, in its order"
        else:
            assert sorted(n for share in again for n in share) == sorted(n for share in shares for n in share)


def test_every_new_subtask_gets_its_share_of_a_list() -> None:
    shares = [list(range(100)), list(range(100, 200))]
    for parallelism in (3, 4, 5):
        sizes = [
            len(share)
            for share in lists(filled(Keeps(), shares).restored(filled(Keeps(), shares).freeze()(), parallelism))
        ]
        assert min(sizes) > 0.6 * 200 / parallelism, sizes


RULE = pa.schema([("kind", pa.string()), ("limit", pa.int64())])
MAIN = pa.schema([("k", pa.string()), ("kind", pa.string()), ("n", pa.int64())])
TOLD = pa.schema([("k", pa.string()), ("limit", pa.int64()), ("before", pa.int64())])


class Limited(BroadcastProcessFunction):
    """Tells the limit of a row's kind, and how many rows its key had before."""

    limits = BroadcastState("string", "long")
    seen = ValueState("long")

    def process(self, row: dict[str, Any], ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"k": ctx.key, "limit": self.limits.get(row["kind"]), "before": self.seen.get(0)}
        self.seen.value = self.seen.get(0) + 1
        if row["n"] == 13:
            self.limits["x"] = 13

    def process_broadcast(self, row: dict[str, Any], ctx: ProcessContext) -> None:
        assert ctx.key is None
        if row["limit"] == 13:
            self.seen.value = 1
        if row["limit"] is None:
            self.limits.pop(row["kind"], None)
        else:
            self.limits[row["kind"]] = row["limit"]


def limited(keys: tuple[str, ...] = ("k",)) -> ProcessSpec:
    return ProcessSpec(MAIN, keys, Limited(), TOLD, (), ProcessInput(RULE, (), broadcast=True))


def batch_of(schema: pa.Schema, *rows: tuple[Any, ...]) -> pa.RecordBatch:
    columns = [pa.array([r[i] for r in rows], f.type) for i, f in enumerate(schema)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


STEPS = st.lists(
    st.tuples(st.just("row"), st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz"), st.just(0)))
    | st.tuples(st.just("rule"), st.tuples(st.sampled_from("xyz"), st.none() | st.integers(0, 9)))
    | st.tuples(st.just("restore"), st.integers(1, 4)),
    max_size=30,
)


@settings(max_examples=80, deadline=None)
@given(steps=STEPS, parallelism=st.integers(1, 3))
def test_broadcast_state_is_the_same_everywhere_over_any_restore(steps: list[Any], parallelism: int) -> None:
    group = Group(limited(), Clock(), ["k"], parallelism)
    limits: dict[str, int] = {}
    seen: dict[str, int] = {}
    for what, value in steps:
        if what == "row":
            k, kind, _ = value
            group.rows(batch_of(MAIN, value))
            assert group.made == [{"k": k, "limit": limits.get(kind), "before": seen.get(k, 0)}]
            seen[k] = seen.get(k, 0) + 1
            group.made.clear()
        elif what == "rule":
            group.everywhere(batch_of(RULE, value), 1)
            kind, limit = value
            if limit is None:
                limits.pop(kind, None)
            else:
                limits[kind] = limit
        else:
            write = group.freeze()
            group.everywhere(batch_of(RULE, ("x", 77)), 1)  # after the cut
            group = group.restored(write(), value)


def test_a_subtask_takes_the_copy_that_its_waiting_broadcast_rows_belong_to() -> None:
    """In an unaligned snapshot the copies differ by the rows on their way: subtask t goes on as subtask t modulo n."""
    group = Group(limited(), Clock(), ["k"], 3)
    for subtask in (1, 2):  # the rows of subtask 0 still wait in its channel
        group.operators[subtask].process(1, batch_of(RULE, ("x", subtask)))
    again = group.restored(group.freeze()(), 5)
    assert [dict(op._others["limits"]) for op in again.operators] == [{}, {"x": 1}, {"x": 2}, {}, {"x": 1}]  # type: ignore[attr-defined]


def test_who_may_do_what() -> None:
    group = Group(limited(), Clock(), ["k"])
    with pytest.raises(UserCodeError, match="broadcast state 'limits' can be changed by broadcast rows only"):
        group.rows(batch_of(MAIN, ("a", "x", 13)))
    with pytest.raises(UserCodeError, match="row without key has no keyed state") as raised:
        group.everywhere(batch_of(RULE, ("x", 13)), 1)
    assert "cw.BroadcastState" in str(raised.value.hint)
    state = OperatorListState("tinyint")
    with pytest.raises(UserCodeError, match="cannot hold 128"):
        state.append(128)


LEFT = pa.schema([("item", pa.int32()), ("count", pa.int64())])
RIGHT = pa.schema([("id", pa.int64()), ("cents", pa.int64())])
PAID = pa.schema([("item", pa.int64()), ("cents", pa.int64())])


class Priced(CoProcessFunction):
    """Orders wait for the price of their item; a timer counts those that still wait."""

    price = ValueState("long")
    waiting = ListState("long")

    def process_left(self, row: dict[str, Any], ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        if self.price.value is None:
            self.waiting.append(row["count"])
            ctx.timers.register_event(100)
        else:
            yield {"item": ctx.key, "cents": row["count"] * self.price.value}

    def process_right(self, row: dict[str, Any], ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        self.price.value = row["cents"]
        for count in self.waiting:
            yield {"item": ctx.key, "cents": count * row["cents"]}
        self.waiting.clear()

    def on_timer(self, time: int, domain: str, ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"item": ctx.key, "cents": -len(self.waiting)}


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["left", "right"]), st.tuples(st.integers(0, 5), st.integers(1, 9)))
        | st.tuples(st.just("restore"), st.integers(1, 3)),
        max_size=30,
    )
)
def test_two_streams_share_the_state_of_a_key(steps: list[Any]) -> None:
    spec = ProcessSpec(LEFT, ("item",), Priced(), PAID, (), ProcessInput(RIGHT, ("id",)))
    group = Group(spec, Clock(), ["item"])
    prices: dict[int, int] = {}
    waiting: dict[int, list[int]] = {}
    expected: list[tuple[int, int]] = []
    timers: set[int] = set()
    got: list[dict[str, Any]] = []
    for what, value in [*steps, ("end", None)]:
        if what == "left":
            item, count = value
            group.keys = ["item"]
            group.rows(batch_of(LEFT, value), 0)
            if item in prices:
                expected.append((item, count * prices[item]))
            else:
                waiting.setdefault(item, []).append(count)
                timers.add(item)
        elif what == "right":
            item, cents = value
            group.keys = ["id"]
            group.rows(batch_of(RIGHT, value), 1)
            prices[item] = cents
            expected += [(item, count * cents) for count in waiting.pop(item, [])]
        elif what == "restore":
            got += group.made
            group = group.restored(group.freeze()(), value)
        else:
            group.watermark(100)
            expected += [(item, -len(waiting.get(item, []))) for item in timers]
    got += group.made
    assert sorted((r["item"], r["cents"]) for r in got) == sorted(expected)


def test_what_does_not_fit_is_refused_when_the_dataflow_is_built() -> None:
    flow = cw.Dataflow("refused")
    rows = flow.read("rows", cw.memory([{"k": "a", "kind": "x", "n": 1}], schema="k string, kind string, n long"))
    rules = flow.read("rules", cw.memory([{"kind": "x", "limit": 1}], schema="kind string, limit long"))
    keyed, told = rows.key_by("k"), "k string, limit long, before long"

    class Timed(Keeps):
        def on_timer(self, time: int, domain: str, ctx: ProcessContext) -> None:
            return

    class Ruled(ProcessFunction):
        rules = BroadcastState("string", "long")

        def process(self, row: dict[str, Any], ctx: ProcessContext) -> None:
            return

    class Counts(ProcessFunction):
        n = ValueState("long")

        def process(self, row: dict[str, Any], ctx: ProcessContext) -> None:
            return

    for build, message in [
        (lambda: rows.process("p", Counts(), told), "keyed state 'n', but the stream has no key"),
        (lambda: rows.process("p", Timed(), told), "timers belong to keys"),
        (lambda: keyed.process("p", Ruled(), told), "broadcast state 'rules', but no stream is broadcast"),
        (lambda: keyed.process("p", Limited(), told), "a process function is needed, not Limited"),
        (lambda: keyed.connect(rules.broadcast()).process("p", Priced(), told), "with broadcast rows is needed"),
        (lambda: keyed.connect(rules.key_by("kind")).process("p", Limited(), told), "of two streams is needed"),
        (lambda: keyed.connect(rules), "the right stream has no key"),
        (lambda: rows.connect(rules.key_by("kind")), "the left stream has no key"),
        (lambda: rows.broadcast().connect(rules), "the broadcast stream is the left one"),
        (lambda: keyed.connect(rules.key_by("limit")).process("p", Priced(), told), "key columns of different types"),
        (lambda: rows.key_by("k", "n").connect(rules.key_by("kind")).process("p", Priced(), told), "has 2 key columns"),
    ]:
        with pytest.raises(BuildError, match=message):
            build()
    made = keyed.connect(rules.broadcast()).process("limited", Limited(), told)
    made.write("out", cw.discard())
    rules.broadcast().process("ruled", Ruled(), "k string").write("none", cw.discard())
    flow.validate()
    assert "process" in flow.explain()


def test_a_stream_without_watermark_takes_the_event_time_away() -> None:
    flow = cw.Dataflow("times")
    schema = "k string, kind string, n long, at timestamp"
    rows = flow.read("rows", cw.memory([], schema=schema), event_time="at", out_of_order="1s").key_by("k")
    rules = flow.read("rules", cw.memory([], schema="kind string, limit long"))
    made = rows.connect(rules.broadcast()).process("limited", Limited(), "k string, at timestamp")
    with pytest.raises(BuildError, match="right stream has no event time, so that no watermark passes"):
        made.key_by("k").window("w", cw.tumbling("1s"))
