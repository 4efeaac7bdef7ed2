"""Time to live: what has expired is never seen, what has not is, and memory comes back; against plain dicts."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_world import Clock, Group

from cutwater.errors import BuildError, UserCodeError
from cutwater.operators.process.functions import ProcessContext, ProcessFunction
from cutwater.operators.process.spec import ProcessSpec
from cutwater.operators.process.states import KeyedState, ListState, MapState, ReducingState, ValueState

SCHEMA = pa.schema([("k", pa.string()), ("do", pa.string()), ("n", pa.int64())])
OUT = pa.schema(
    [
        ("k", pa.string()),
        ("value", pa.int64()),
        ("sum", pa.int64()),
        ("list", pa.list_(pa.int64())),
        ("map", pa.string()),
    ]
)
TTL_MS = 100
TTL = f"{TTL_MS}ms"


class Fleeting(ProcessFunction):
    """Puts the number of a row into one of its states and tells all of them."""

    one = ValueState("long", ttl=TTL)
    total = ReducingState("long", operator.add, ttl=TTL)
    some = ListState("long", ttl=TTL)
    by_name = MapState("long", "long", ttl=TTL)

    def process(self, row: dict[str, Any], ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        n = row["n"]
        match row["do"]:
            case "one":
                self.one.value = n
            case "total":
                self.total.add(n)
            case "some":
                self.some.append(n)
            case "map":
                self.by_name[n % 4] = n
            case "drop":
                self.by_name.pop(n % 4, None)
            case _:
                pass
        assert len(self.some) == len(list(self.some))
        assert len(self.by_name) == len(dict(self.by_name))
        told = dict(self.by_name)
        assert all((name in self.by_name) == (name in told) for name in range(4))
        yield {
            "k": ctx.key,
            "value": self.one.value,
            "sum": self.total.get(),
            "list": list(self.some),
            "map": ",".join(f"{k}={v}" for k, v in told.items()),
        }


class Lasting(Fleeting):
    """The same, except that what is read lives on."""

    one = ValueState("long", ttl=TTL, ttl_update="on_read_and_write")
    total = ReducingState("long", operator.add, ttl=TTL, ttl_update="on_read_and_write")
    some = ListState("long", ttl=TTL, ttl_update="on_read_and_write")
    by_name = MapState("long", "long", ttl=TTL, ttl_update="on_read_and_write")


class Model:
    """Each key's values with their expiry, in plain Python."""

    def __init__(self, on_read: bool) -> None:
        self.on_read = on_read
        self.parts: dict[str, dict[str, Any]] = {}

    def row(self, k: str, do: str, n: int, now: int) -> dict[str, Any]:
        mine = self.parts.setdefault(k, {"one": [], "total": [], "some": [], "map": {}})
        for name in ("one", "total", "some"):
            mine[name] = [(v, e) for v, e in mine[name] if e > now]
        mine["map"] = {key: (v, e) for key, (v, e) in mine["map"].items() if e > now}
        until = now + TTL_MS
        if do == "one":
            mine["one"] = [(n, until)]
        elif do == "total":
            mine["total"] = [(sum(v for v, _ in mine["total"]) + n, until)]
        elif do == "some":
            mine["some"].append((n, until))
        elif do == "map":
            mine["map"][n % 4] = (n, until)
        elif do == "drop":
            mine["map"].pop(n % 4, None)
        if self.on_read:  # the row told all of them
            for name in ("one", "total", "some"):
                mine[name] = [(v, until) for v, _ in mine[name]]
            mine["map"] = {key: (v, until) for key, (v, _) in mine["map"].items()}
        return {
            "k": k,
            "value": next((v for v, _ in mine["one"]), None),
            "sum": next((v for v, _ in mine["total"]), None),
            "list": [v for v, _ in mine["some"]],
            "map": ",".join(f"{key}={v}" for key, (v, _) in mine["map"].items()),
        }


ACTIONS = st.lists(
    st.tuples(
        st.just("row"),
        st.tuples(
            st.sampled_from("abcd"),
            st.sampled_from(["one", "total", "some", "map", "drop", "look"]),
            st.integers(0, 9),
        ),
    )
    | st.tuples(st.just("time"), st.sampled_from([1, 30, 99, 100, 101, 250]))
    | st.tuples(st.just("clean"), st.integers(0, 2))
    | st.tuples(st.just("restore"), st.integers(1, 3)),
    max_size=30,
)


def batch_of(rows: list[tuple[str, str, int]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([r[i] for r in rows], SCHEMA[i].type) for i in range(3)], schema=SCHEMA)


@pytest.mark.parametrize("function", [Fleeting, Lasting])
def test_what_is_visible_is_what_plain_dicts_say(function: type[ProcessFunction]) -> None:
    @settings(max_examples=60, deadline=None)
    @given(actions=ACTIONS, parallelism=st.integers(1, 2))
    def check(actions: list[Any], parallelism: int) -> None:
        group = Group(ProcessSpec(SCHEMA, ("k",), function(), OUT), Clock(1_000), ["k"], parallelism)
        model = Model(function is Lasting)
        for what, value in actions:
            if what == "row":
                group.rows(batch_of([value]))
                assert group.made == [model.row(*value, group.clock.now_ms)]
                group.made.clear()
            elif what == "time":
                group.clock.now_ms += value
            elif what == "clean":  # cleaning up never changes what is seen
                group.time(0, slices=value)
            else:
                write = group.freeze()
                group.rows(batch_of([("a", "some", 1), ("b", "drop", 1), ("c", "one", 1)]))  # after the cut
                group = group.restored(write(), value)

    check()


def states_of(group: Group) -> list[KeyedState]:
    return [state for op in group.operators for state in op._states.values()]  # type: ignore[attr-defined]


def test_an_idle_stream_gives_the_memory_of_what_has_expired_back_in_slices() -> None:
    group = Group(ProcessSpec(SCHEMA, ("k",), Fleeting(), OUT), Clock(1_000), ["k"])
    count = 3_000
    group.rows(batch_of([(f"k{i}", do, i) for i in range(count) for do in ("one", "some", "map")]))
    again = group.restored(group.freeze()(), 2)
    for one in (group, again):
        (next_ms,) = {min(t for s in [op] if (t := s.next_processing_time_ms)) for op in one.operators}
        assert 1_000 + TTL_MS <= next_ms <= 1_000 + TTL_MS * 9 // 8
        assert not any(op.timers_pending for op in one.operators), "cleaning makes no rows: a loop may end"
        one.time(next_ms - 1)
        assert sum(len(s._table) for s in states_of(one)) == 3 * count
        one.time(next_ms, slices=1)
        assert 0 < sum(len(s._table) for s in states_of(one)) < 3 * count
        one.time(next_ms)
        assert [len(s._table) for s in states_of(one)] == [0] * len(states_of(one))
        assert [op.next_processing_time_ms for op in one.operators] == [None] * len(one.operators)


def test_a_key_that_is_written_all_the_time_waits_once() -> None:
    group = Group(ProcessSpec(SCHEMA, ("k",), Fleeting(), OUT), Clock(1_000), ["k"])
    for _ in range(200):
        group.clock.now_ms += 1
        group.rows(batch_of([("a", "one", 1), ("a", "some", 2)]))
        group.time(0)
    queues = [len(s._expiries._queue) for s in states_of(group) if s._expiries is not None]
    assert max(queues) == 1
    (some,) = [s for s in states_of(group) if s.name == "some"]
    kept = some._table.get(("a",))
    assert kept is not None
    assert len(kept) <= TTL_MS * 9 // 8, "old elements of a list that goes on growing go, too"


def test_reducing_checks_what_comes_out_and_wrong_declarations_are_refused() -> None:
    small = ReducingState("tinyint", operator.add)
    small.bind("a")
    small.add(100)
    with pytest.raises(UserCodeError, match=r"cannot hold 200"):
        small.add(100)
    with pytest.raises(UserCodeError, match=r"cannot hold 'x'"):
        small.add("x")
    assert small.value == 100
    for wrong in (
        lambda: ReducingState("long", 3),  # type: ignore[arg-type]
        lambda: ValueState("long", ttl="soon"),
        lambda: ListState("long", ttl=0),
        lambda: MapState("long", "long", ttl="1h", ttl_update="never"),  # type: ignore[arg-type]
    ):
        with pytest.raises(BuildError):
            wrong()
