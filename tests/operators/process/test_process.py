"""Process functions: state per key, snapshots while it changes, rescaling, and errors that name the row."""

import datetime as dt
import pickle
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark import cloudpickle

import cutwater as cw
from cutwater.errors import BuildError, UserCodeError
from cutwater.operators.process.functions import ProcessContext, ProcessFunction
from cutwater.operators.process.spec import ProcessSpec
from cutwater.operators.process.states import KeyedState, ListState, MapState, ValueState
from cutwater.operators.row_output import ROWS_AT_ONCE
from keyed_world import feed, opened, rescaled, rows_of, snapshot

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


class Ledger(ProcessFunction):
    """One state of each kind, and a row that tells all of them."""

    total = ValueState("long")
    seen = ListState("long")
    counts = MapState("string", "long")

    def process(self, row: dict[str, Any], ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        n = row["n"]
        if n == 0:  # forget everything
            self.total.clear()
            self.seen.clear()
            self.counts.clear()
            return
        self.total.value = self.total.get(0) + n
        self.seen.append(n)
        kind = "odd" if n % 2 else "even"
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if n % 7 == 0:
            del self.counts[kind]
        if n < 0:
            ctx.emit("negative", {"n": n})
        counts = ",".join(f"{k}={v}" for k, v in sorted(self.counts.items()))
        yield {"k": ctx.key, "total": self.total.value, "seen": list(self.seen), "counts": counts}


def ledger() -> ProcessSpec:
    output = "k string, total long, seen array<long>, counts string"
    return ProcessSpec(SCHEMA, ("k",), Ledger(), output, (("negative", "n long"),))  # type: ignore[arg-type]


def model(rows: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """The same in plain Python, one dict for each key."""
    totals: dict[str, int] = {}
    seen: dict[str, list[int]] = {}
    counts: dict[str, dict[str, int]] = {}
    made: list[dict[str, Any]] = []
    for k, n in rows:
        if n == 0:
            for state in (totals, seen, counts):
                state.pop(k, None)
            continue
        totals[k] = totals.get(k, 0) + n
        seen.setdefault(k, []).append(n)
        mine = counts.setdefault(k, {})
        kind = "odd" if n % 2 else "even"
        mine[kind] = mine.get(kind, 0) + 1
        if n % 7 == 0:
            del mine[kind]
        text = ",".join(f"{kind}={count}" for kind, count in sorted(mine.items()))
        made.append({"k": k, "total": totals[k], "seen": list(seen[k]), "counts": text})
    return made


def batch_of(rows: list[tuple[str, int]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([r[i] for r in rows], SCHEMA[i].type) for i in (0, 1)], schema=SCHEMA)


ROWS = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(-20, 20)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(before=ROWS, between=ROWS, after=ROWS, parallelism=st.integers(1, 3))
def test_a_snapshot_is_what_was_at_its_freeze_whatever_comes_later(
    before: list[tuple[str, int]], between: list[tuple[str, int]], after: list[tuple[str, int]], parallelism: int
) -> None:
    spec = ledger()
    operator = opened(spec)
    operator.process(0, batch_of(before))
    frozen = operator.freeze(1)
    operator.process(0, batch_of(between))  # must not be seen by the frozen state
    segments = list(frozen.segments())
    frozen.release()
    went_on = operator.process(0, batch_of(after))
    assert [r for o, b in went_on if o == 0 for r in b.to_pylist()] == model(before + between + after)[
        len(model(before + between)) :
    ]
    restored = rescaled(spec, segments, parallelism)
    outputs = feed(restored, batch_of(after), ["k"])
    got = [r for per in outputs for o, b in per if o == 0 for r in b.to_pylist()]
    expected = model(before + after)[len(model(before)) :]
    assert sorted(got, key=repr) == sorted(expected, key=repr)


def test_side_outputs_and_several_key_columns() -> None:
    class Both(ProcessFunction):
        n = ValueState("int")

        def process(self, row: dict[str, Any], ctx: ProcessContext) -> list[dict[str, Any]]:
            self.n.value = self.n.get(0) + 1
            if self.n.value == 2:
                ctx.emit("twice", {"key": str(ctx.key)})
            return [{"n": self.n.value}]

    side = (("twice", pa.schema([("key", pa.string())])),)
    spec = ProcessSpec(SCHEMA, ("k", "n"), Both(), pa.schema([("n", pa.int32())]), side)
    operator = opened(spec)
    outputs = operator.process(0, batch_of([("a", 1), ("a", 2), ("a", 1)]))
    assert [(o, b.to_pylist()) for o, b in outputs] == [
        (0, [{"n": 1}, {"n": 1}, {"n": 2}]),
        (1, [{"key": "('a', 1)"}]),
    ]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("boolean", True),
        ("tinyint", -128),
        ("float", 0.5),
        ("double", 1.25),
        ("string", "ü"),
        ("binary", b"\x00"),
        ("date", dt.date(1960, 1, 2)),
        ("timestamp", dt.datetime(2024, 1, 2, 3, 4, 5, 6, dt.UTC)),
        ("decimal(10, 2)", Decimal("1.50")),
        ("array<long>", [1, 2]),
        ("struct<a: long>", {"a": 1}),
    ],
)
def test_every_type_comes_back_from_a_snapshot(kind: str, value: object) -> None:
    class Keep(ProcessFunction):
        kept = ValueState(kind)

        def process(self, row: dict[str, Any], ctx: ProcessContext) -> list[dict[str, Any]]:
            before = self.kept.value
            self.kept.value = value
            return [{"same": before == value}]

    spec = ProcessSpec(SCHEMA, ("k",), Keep(), pa.schema([("same", pa.bool_())]))
    operator = opened(spec)
    operator.process(0, batch_of([("a", 1)]))
    (again,) = rescaled(spec, snapshot(operator), 1)
    assert rows_of(again.process(0, batch_of([("a", 1)]))) == [{"same": True}]


def test_a_wrong_value_is_an_error_on_its_row_that_shows_the_users_line() -> None:
    class Wrong(ProcessFunction):
        small = ValueState("tinyint")

        def process(self, row: dict[str, Any], ctx: ProcessContext) -> None:
            self.small.value = row["n"]

    operator = opened(ProcessSpec(SCHEMA, ("k",), Wrong(), pa.schema([("n", pa.int64())])))
    with pytest.raises(UserCodeError, match=r"state 'small' of type int8 cannot hold 128 \(int\)") as raised:
        operator.process(0, batch_of([("a", 127), ("b", 128)]))
    assert raised.value.row == 1
    assert "self.small.value = row" in raised.value.message
    assert "cutwater/operators/process" not in raised.value.message.split("self.small.value")[0], (
        "frames above the user's are ours"
    )


@pytest.mark.parametrize("value", [True, 1.0, "1", 2**63])
def test_a_long_state_takes_whole_numbers_only(value: object) -> None:
    state = ValueState("long")
    with pytest.raises(UserCodeError, match="cannot hold"):
        state.value = value


def test_rows_that_are_none_and_side_outputs_that_are_not_declared() -> None:
    def made_by(what: Any) -> ProcessFunction:
        class Made(ProcessFunction):
            def process(self, row: dict[str, Any], ctx: ProcessContext) -> Any:
                return what(ctx)

        return Made()

    for what, message in [
        (lambda ctx: {"n": 1}, "returned dict instead of an iterable of dicts"),
        (lambda ctx: [{"m": 1}], "undeclared columns 'm'"),
        (lambda ctx: ctx.emit("x", {"n": 1}), r"side output 'x' \(declared: none\)"),
        (lambda ctx: 1 // 0, "ZeroDivisionError on row 0"),
    ]:
        operator = opened(ProcessSpec(SCHEMA, ("k",), made_by(what), pa.schema([("n", pa.int64())])))
        with pytest.raises(UserCodeError, match=message):
            operator.process(0, batch_of([("a", 1)]))


@pytest.mark.parametrize("at", [3, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 1])
@pytest.mark.parametrize("what", ["nothing", "raises", "undeclared", "not a number", "side"])
def test_rows_of_a_large_batch_are_named_by_their_place(what: str, at: int) -> None:
    class Some(ProcessFunction):
        def process(self, row: dict[str, Any], ctx: ProcessContext) -> Iterator[dict[str, Any]]:
            wrong = what if row["n"] == at else "nothing"
            for number in range(row["n"] % 3):
                yield {"n": "x" if wrong == "not a number" else row["n"], "m": number}
            if wrong == "raises":
                raise ValueError
            if wrong == "undeclared":
                yield {"n": 1, "more": 2}
            if wrong == "side":
                ctx.emit("other", {"n": "x"})
            ctx.emit("other", {"n": row["n"]})

    count = 2 * ROWS_AT_ONCE + 5
    spec = ProcessSpec(SCHEMA, ("k",), Some(), "n long, m long", (("other", "n long"),))  # type: ignore[arg-type]
    operator = opened(spec)
    batch = batch_of([("ab"[n % 2], n) for n in range(count)])
    if what == "nothing" or (what == "not a number" and at % 3 == 0):
        main, other = (b.to_pydict() for _, b in operator.process(0, batch))
        assert main == {
            "n": [n for n in range(count) for _ in range(n % 3)],
            "m": [number for n in range(count) for number in range(n % 3)],
        }
        assert other == {"n": list(range(count))}
        return
    with pytest.raises(UserCodeError) as caught:
        operator.process(0, batch)
    assert caught.value.row == at
    assert f"n: {at}}}" in str(caught.value)


def test_open_and_close_are_called_once_and_subtasks_do_not_share() -> None:
    calls: list[str] = []

    class Loud(ProcessFunction):
        n = ValueState("long")

        def open(self, ctx: ProcessContext) -> None:
            calls.append(f"open {ctx.subtask}")

        def process(self, row: dict[str, Any], ctx: ProcessContext) -> list[dict[str, Any]]:
            self.n.value = self.n.get(0) + 1
            return [{"n": self.n.value}]

        def close(self) -> None:
            calls.append("close")

    spec = ProcessSpec(SCHEMA, ("k",), Loud(), pa.schema([("n", pa.int64())]))
    first, second, idle = opened(spec, 0, 2), opened(spec, 1, 2), opened(spec, 1, 2)
    assert rows_of(first.process(0, batch_of([("a", 1)]))) == [{"n": 1}]
    assert rows_of(second.process(0, batch_of([("a", 1)]))) == [{"n": 1}]
    for operator in (first, second, idle):
        operator.close()
    assert calls == ["open 0", "open 1", "close", "close"]


def test_built_from_the_dataflow() -> None:
    flow = cw.Dataflow("gaps")
    rows = flow.read("rows", cw.memory([pa.table({"k": ["a"], "n": [1]})]))
    made = rows.key_by("k").process("ledger", Ledger(), "k string, total long", side={"negative": "n long"})
    made.side("negative").write("negative", cw.discard())
    assert made.schema.names == ["k", "total"]
    with pytest.raises(BuildError, match="no side output 'positive'"):
        made.side("positive")
    with pytest.raises(BuildError, match="process function is needed"):
        rows.key_by("k").process("other", Ledger, "k string")  # type: ignore[arg-type]


def test_a_state_is_declared_with_a_type() -> None:
    for wrong in (lambda: ValueState("lung"), lambda: ValueState(int), lambda: MapState("string", "")):  # type: ignore[arg-type]
        with pytest.raises(BuildError):
            wrong()
    assert isinstance(Ledger.__dict__["total"], KeyedState)


def test_a_class_of_a_script_travels_as_its_declaration() -> None:
    """A class that no worker can import goes to them with its states, of which none holds anything."""

    class Counting(ProcessFunction):
        total = ValueState("long", ttl="1h")
        seen = ListState("long")

        def process(self, row: dict[str, Any], ctx: ProcessContext) -> Iterator[dict[str, Any]]:
            yield row

    Counting.total.bind("a")
    Counting.total.value = 1
    Counting.seen.bind("a")
    found = pickle.loads(cloudpickle.dumps(Counting))
    total, seen = vars(found)["total"], vars(found)["seen"]
    total.bind("a")
    seen.bind("a")
    assert (total.name, total.value, list(seen)) == ("total", None, [])
    total.value = 7
    assert total.value == 7
