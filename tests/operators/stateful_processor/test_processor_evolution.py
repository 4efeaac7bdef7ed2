"""The next version of a StatefulProcessor goes on from the states of the last one, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from process_world import Clock, Group
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import cutwater as cw
from cutwater.errors import BuildError, StorageError
from cutwater.operators.evolution import Evolution
from cutwater.operators.stateful_processor.spark_types import TimeMode
from cutwater.operators.stateful_processor.spec import ProcessorSpec
from cutwater.plan.compatibility import check_compatible, step_records
from cutwater.plan.planner import make_plan
from cutwater.storage.snapshot.manifest import Manifest

OUT = pa.schema({"k": pa.string(), "told": pa.string()})
KINDS = ("value", "list", "map")
HOUR_MS = 3_600_000


class Version(StatefulProcessor):
    """One state; a row "set" puts values into it, a row "tell" tells what is there."""

    def __init__(self, kind: str, schema: Any, name: str = "s", ttl: int | None = None, values: Any = ()) -> None:
        self.kind, self.schema, self.name, self.ttl, self.values = kind, schema, name, ttl, values

    def init(self, handle: Any) -> None:
        if self.kind == "map":
            self.state = handle.getMapState(self.name, "id string", self.schema, self.ttl)
        else:
            get = handle.getValueState if self.kind == "value" else handle.getListState
            self.state = get(self.name, self.schema, self.ttl)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.op == "set":
                self.set()
            yield Row(k=key[0], told=repr(self.told()))

    def set(self) -> None:
        if self.kind == "value":
            self.state.update(self.values[-1])
        elif self.kind == "list":
            self.state.appendList(self.values)
        else:
            for number, value in enumerate(self.values):
                self.state.updateValue((f"id {number}",), value)

    def told(self) -> list[Any]:
        if self.kind == "value":
            return [self.state.get()]
        return list(self.state.get() if self.kind == "list" else self.state.values())

    def close(self) -> None:
        pass


def spec_of(version: Version, renames: Any = None) -> ProcessorSpec:
    mode = TimeMode.NONE if version.ttl is None else TimeMode.PROCESSING
    rows = pa.schema({"k": pa.string(), "op": pa.string()})
    return ProcessorSpec(rows, ("k",), version, OUT, mode, renames=renames or {})


def plan_of(version: Version, renames: Any = None) -> Any:
    flow = cw.Dataflow("job")
    keyed = flow.read("in", cw.memory([], schema="k string, op string")).key_by("k")
    mode = "None" if version.ttl is None else "ProcessingTime"
    made = keyed.transform_with_state("p", version, "k string, told string", time_mode=mode, renames=renames)
    made.write("out", cw.discard())
    return make_plan(flow, 2, 128)


def manifest_of(old: Version) -> Manifest:
    made = Manifest("job", "u", 7, 1, "aligned", 128, 2, 0, 0, step_records(plan_of(old)), [], [])
    return msgspec.json.decode(msgspec.json.encode(made), type=Manifest)


def rows(op: str) -> pa.RecordBatch:
    return pa.record_batch({"k": ["a", "b", "c"], "op": [op] * 3})


def converter(old: Version, new: Version, renames: Any = None) -> Any:
    """What a restore does to segments of the old version."""
    evolution = check_compatible(plan_of(new, renames), manifest_of(old)).evolutions.get("p", Evolution())
    convert = evolution.convert or (lambda segment: segment)
    return lambda segments: [made for segment in segments if (made := convert(segment)) is not None]


def evolved(old: Version, new: Version, renames: Any = None, parallelism: int = 2) -> list[str]:
    """What the new version finds for each of three keys, twice restored."""
    convert = converter(old, new, renames)
    group = Group(spec_of(old), Clock(), ["k"])
    group.rows(rows("set"))
    group.spec = spec_of(new, renames)
    group = group.restored(convert(group.freeze()()), parallelism)
    group = group.restored(group.freeze()(), 1)
    group.rows(rows("tell"))
    assert len(group.made) == 3
    return [row["told"] for row in group.made]


CHANGES: dict[str, tuple[Any, Any, list[Any], list[Any]]] = {
    "a column comes": ("n long", "n long, s string", [(1,), (2,)], [(1, None), (2, None)]),
    "a column goes": ("n long, s string", "s string", [(1, "x"), (2, "y")], [("x",), ("y",)]),
    "columns change places": ("n long, s string", "s string, n long", [(1, "x"), (2, None)], [("x", 1), (None, 2)]),
    "int to long": ("n int", "n long", [(1,), (-(2**31),)], [(1,), (-(2**31),)]),
    "byte to double": ("n byte", "n double", [(1,), (-128,)], [(1.0,), (-128.0,)]),
    "long to double": ("n long", "n double", [(3,), (2**60,)], [(3.0,), (float(2**60),)]),
    "float to double": ("x float", "x double", [(0.5,), (None,)], [(0.5,), (None,)]),
    "string to binary": ("s string", "s binary", [("ä",), (None,)], [("ä".encode(),), (None,)]),
    "binary to string": ("s binary", "s string", [("ä".encode(),), (None,)], [("ä",), (None,)]),
    "a wider decimal": (
        "d decimal(5,2)",
        "d decimal(9,2)",
        [(Decimal("1.50"),), (None,)],
        [(Decimal("1.50"),), (None,)],
    ),
    "all at once": (
        "n int, s string, gone long",
        "new string, s binary, n double",
        [(1, "x", 5), (2, "y", 6)],
        [(None, b"x", 1.0), (None, b"y", 2.0)],
    ),
    "in structs and arrays": (
        "o struct<n: int, gone: string>, l array<int>, m map<string, int>",
        "l array<bigint>, o struct<s: string, n: bigint>, m map<string, double>",
        [(Row(n=1, gone="x"), [1, None], {"a": 1}), (None, None, None)],
        [([1, None], Row(s=None, n=1), {"a": 1.0}), (None, None, None)],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_spark_takes_is_taken(kind: str, change: str) -> None:
    before, after, values, expected = CHANGES[change]
    found = evolved(Version(kind, before, values=values), Version(kind, after))
    assert found == [repr(expected[-1:] if kind == "value" else expected)] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_expire_go_on_expiring(kind: str) -> None:
    old = Version(kind, "n int", ttl=HOUR_MS, values=[(1,), (2,)])
    new = Version(kind, "s string, n long", ttl=HOUR_MS)
    convert = converter(old, new)
    group = Group(spec_of(old), Clock(), ["k"])
    group.rows(rows("set"))
    group.spec = spec_of(new)
    group = group.restored(convert(group.freeze()()), 2)
    group.rows(rows("tell"))
    assert {row["told"] for row in group.made} == {"[(None, 2)]" if kind == "value" else "[(None, 1), (None, 2)]"}
    group.made = []
    group.time(HOUR_MS)
    group.rows(rows("tell"))
    assert {row["told"] for row in group.made} == {"[None]" if kind == "value" else "[]"}


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_columns_can_be_renamed(kind: str) -> None:
    renames = {"s": "visits", ("s", "n"): "total"}
    old = Version(kind, "n int, s string", values=[(1, "x"), (2, "y")])
    found = evolved(old, Version(kind, "s string, total long", "visits"), renames)
    assert found == [repr([("y", 2)] if kind == "value" else [("x", 1), ("y", 2)])] * 3
    new = Version(kind, "s string, total long", "visits", values=[("z", 3)])
    check_compatible(plan_of(new, renames), manifest_of(new))  # the mapping may stay


REFUSED: dict[str, tuple[Version, Version, str]] = {
    "narrower": (
        Version("value", "n long"),
        Version("value", "n int"),
        r"state 's': column 'n' was int64 and is int32",
    ),
    "another type": (Version("list", "n long"), Version("list", "n string"), "column 'n' was int64 and is string"),
    "in a struct": (
        Version("value", "o struct<n: bigint>"),
        Version("value", "o struct<n: int>"),
        "column 'o.n' was int64 and is int32",
    ),
    "a new column that has no null": (
        Version("map", "n long"),
        Version("map", pa.schema([pa.field("n", pa.int64()), pa.field("m", pa.int64(), nullable=False)])),
        "column 'm' is new and declared not null",
    ),
    "nulls no more": (
        Version("value", "n long"),
        Version("value", pa.schema([pa.field("n", pa.int64(), nullable=False)])),
        "column 'n' could be null and is declared not null",
    ),
    "another kind": (
        Version("value", "n long"),
        Version("list", "n long"),
        "was stored as struct.* is a state of the kind 'list' now",
    ),
    "a time to live": (
        Version("list", "n long"),
        Version("list", "n long", ttl=9),
        "had no time to live, and have one",
    ),
    "a name that nobody told": (Version("value", "n long"), Version("value", "n long", "t"), "state 's' is gone"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_else_is_refused_with_step_state_and_reason(case: str) -> None:
    old, new, why = REFUSED[case]
    with pytest.raises(BuildError, match=f"step 'p', .*{why}"):
        check_compatible(plan_of(new), manifest_of(old))


def test_keys_of_a_map_state_stay_as_they_are() -> None:
    class Other(Version):
        def init(self, handle: Any) -> None:
            self.state = handle.getMapState("s", "id long", "n long")

    with pytest.raises(BuildError, match="keys were struct<id: string> and are struct<id: int64>"):
        check_compatible(plan_of(Other("map", "n long")), manifest_of(Version("map", "n long")))


def test_a_value_that_the_wider_type_cannot_hold_in_full_is_named() -> None:
    old = Version("value", "n long", values=[(2**53 + 1,)])
    with pytest.raises(StorageError, match=r"state 's' of key \{'k': '.'\} .* cannot hold 9007199254740993 in full"):
        evolved(old, Version("value", "n double"), parallelism=1)


@pytest.mark.parametrize(
    ("renames", "why"),
    [
        ({"s": "t"}, "called 't' now, but Version.init asks for no such state"),
        ({"s": "s"}, "still asks for it"),
        ({("s", "m"): "o"}, "column 'm' of state 's' is called 'o' now, which it has not"),
        ({("s", "n"): "s"}, "column 'n' of state 's' is renamed to 's', but it is still there"),
    ],
)
def test_mistakes_in_names_are_told_when_the_flow_is_written(renames: Any, why: str) -> None:
    with pytest.raises(BuildError, match=why):
        plan_of(Version("value", "n long, s string"), renames)


def test_two_columns_cannot_become_one() -> None:
    with pytest.raises(BuildError, match="would have one name"):
        check_compatible(
            plan_of(Version("value", "n long"), {("s", "m"): "n"}), manifest_of(Version("value", "n long, m long"))
        )
