"""Process functions whose next version declares other states; in memory, on disk, at another parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from process_world import Clock, Group

import cutwater as cw
from cutwater.errors import StorageError
from cutwater.operators.evolution import Evolution, Former
from cutwater.operators.process.spec import ProcessSpec

ROWS = pa.schema({"k": pa.string(), "n": pa.int32()})
OUT = pa.schema({"k": pa.string(), "told": pa.string()})
KEYS = [f"key {i}" for i in range(12)]


class First(cw.ProcessFunction):
    last = cw.ValueState("int")
    seen = cw.ListState("struct<n: int, gone: string>")
    by_id = cw.MapState("string", "int")
    most = cw.ValueState("int")
    files = cw.OperatorListState("int")

    def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
        n = row["n"]
        self.last.value = self.most.value = n
        self.seen.append({"n": n, "gone": "x"})
        self.by_id[f"id {n}"] = n
        self.files.append(n)
        yield {"k": row["k"], "told": ""}


class Second(cw.ProcessFunction):
    latest = cw.ValueState("double")
    seen = cw.ListState("struct<s: string, number: long>")
    by_id = cw.MapState("string", "long")
    most = cw.ReducingState("long", max)
    new = cw.ValueState("long")
    files = cw.OperatorListState("long")

    def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
        self.most.add(row["n"])
        told = (self.latest.value, list(self.seen), dict(self.by_id), self.most.value, self.new.value)
        yield {"k": row["k"], "told": repr(told)}


RENAMES = {("last",): "latest", ("seen", "n"): "number"}


def spec_of(function: cw.ProcessFunction) -> ProcessSpec:
    return ProcessSpec(ROWS, ("k",), function, OUT)


def evolution(old: Any, new: Any, renames: Any = None, *, drop: bool = False) -> Evolution:
    return new.evolve(Former(old.state_schema, old.state_parts, {"last": 12}), renames or {}, drop=drop)


def numbers(start: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(KEYS), pa.array([start + i for i in range(len(KEYS))], pa.int32())], schema=ROWS)


def segments_of(group: Group, found: Evolution) -> list[Any]:
    assert found.refusals == ()
    assert found.convert is not None
    return [made for segment in group.freeze()() if (made := found.convert(segment)) is not None]


class SameName(cw.ProcessFunction):
    k = cw.ValueState("int")

    def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
        yield {"k": row["k"], "told": str(self.k.value)}
        self.k.value = row["n"]


def test_a_state_may_be_called_like_the_key_column():
    spec = spec_of(SameName())
    found = evolution(spec, spec)
    assert (found.refusals, found.changes, found.convert) == ((), (), None)
    group = Group(spec, Clock(), ["k"], 2)
    group.rows(numbers(0))
    group = group.restored(list(group.freeze()()), 1)
    group.rows(numbers(100))
    assert {row["k"]: row["told"] for row in group.made} == {key: str(i) for i, key in enumerate(KEYS)}


@pytest.mark.parametrize("memory_bytes", [None, 1 << 20])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_states_go_on_with_other_names_and_wider_types(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: int | None, parallelism: int
) -> None:
    monkeypatch.setattr(Group, "memory_bytes", memory_bytes)
    old, new = spec_of(First()), spec_of(Second())
    group = Group(old, Clock(), ["k"], 2)
    group.rows(numbers(0))
    group.rows(numbers(100))
    found = evolution(old, new, RENAMES)
    group.spec = new
    group = group.restored(segments_of(group, found), parallelism)
    group = group.restored(group.freeze()(), 2)
    group.rows(numbers(50))
    told = {row["k"]: row["told"] for row in group.made}
    assert told == {
        key: repr(
            (
                100.0 + i,
                [{"s": None, "number": i}, {"s": None, "number": 100 + i}],
                {f"id {i}": i, f"id {100 + i}": 100 + i},
                100 + i,
                None,
            )
        )
        for i, key in enumerate(KEYS)
    }
    files = [n for operator in group.operators for n in operator._others["files"]]  # type: ignore[attr-defined]
    assert sorted(files) == sorted([*range(12), *range(100, 112)])
    assert {str(change) for change in found.changes} == {
        "last: renamed to latest",
        "latest: widened from int32 to double",
        "seen.gone: dropped",
        "seen.n: renamed to number",
        "seen.number: widened from int32 to int64",
        "seen.s: added",
        "by_id: widened from int32 to int64",
        "most: changed from a value state to a reducing state",
        "most: widened from int32 to int64",
        "files: widened from int32 to int64",
        "new: added",
    }


def test_a_state_that_nobody_takes_needs_leave() -> None:
    old, new = spec_of(First()), spec_of(Second())
    assert any("state 'last' is gone" in reason for reason in evolution(old, new).refusals)
    found = evolution(old, new, drop=True)
    assert found.dropped == ("last",)
    assert "last: dropped (12 rows)" in map(str, found.changes)
    group = Group(old, Clock(), ["k"])
    group.rows(numbers(0))
    assert "last" not in {segment.name for segment in segments_of(group, found)}


class Narrow(First):
    last = cw.ValueState("short")


class Timed(First):
    last = cw.ValueState("int", ttl="1h")


class Listed(First):
    last = cw.ListState("int")


class Shared(First):
    files = cw.UnionListState("int")


class OtherKeys(First):
    by_id = cw.MapState("long", "int")


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (Narrow, "state 'last': it was int32 and is int16, which is not wider"),
        (Timed, "had no time to live, and have one now"),
        (Listed, "of the kind 'value', and is a state of the kind 'list' now"),
        (Shared, "of the kind 'elements', and is a state of the kind 'union' now"),
        (OtherKeys, "its keys were string and are int64"),
    ],
)
def test_all_else_is_refused(new: type[cw.ProcessFunction], why: str) -> None:
    assert any(why in reason for reason in evolution(spec_of(First()), spec_of(new())).refusals)


def test_timers_need_somebody_who_takes_them() -> None:
    old, new = spec_of(First()), spec_of(First())
    former = Former(old.state_schema or pa.schema([]), old.state_parts, {"__event_timers": 3})
    (reason,) = new.evolve(former, {}, drop=False).refusals
    assert reason == "3 timers are set, and First has no on_timer any more"


def test_a_value_that_does_not_fit_is_named_with_its_key() -> None:
    class Big(cw.ProcessFunction):
        n = cw.ValueState("long")

        def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
            self.n.value = 2**53 + row["n"]
            yield {"k": row["k"], "told": ""}

    class Float(cw.ProcessFunction):
        n = cw.ValueState("double")

        def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
            yield {"k": row["k"], "told": ""}

    group = Group(spec_of(Big()), Clock(), ["k"])
    group.rows(pa.record_batch([pa.array(["a", "b"]), pa.array([2, 1], pa.int32())], schema=ROWS))
    with pytest.raises(StorageError, match=r"state 'n' of key \{'k': 'b'\} .* cannot hold 9007199254740993 in full"):
        segments_of(group, evolution(group.spec, spec_of(Float())))
