"""Random programs of state operations against plain Python: values, lists, dicts and timers, failures, restores.

A row carries what is to be done with the states of its key, and tells what came of each operation.  The oracle does the
same with a list, a dict and a set of its own for each key.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_world import Clock, Group

from cutwater.errors import UserCodeError
from cutwater.operators.process import spec
from cutwater.operators.process.functions import ProcessContext, ProcessFunction
from cutwater.operators.process.spec import ProcessSpec
from cutwater.operators.process.states import ListState, MapState, ValueState
from cutwater.state.segments import Segment

SCHEMA = pa.schema([("k", pa.string()), ("do", pa.string())])
Operation = tuple[str, int]


class States(Protocol):
    """What a program works on, here and in the oracle."""

    one: Any
    text: Any
    some: Any
    by: Any


def perform(states: States, name: str, n: int) -> Any:
    """One operation with a number, and what it tells."""
    match name:
        case "set":
            states.one.value = n
        case "add":
            states.one.value = states.one.get(0) + n
        case "none":
            states.one.value = None
        case "name":
            states.text.value = f"{states.text.get('')[:20]}{n}"
        case "append":
            states.some.append(n)
        case "extend":
            states.some.extend([n, n + 1])
        case "list":
            states.some.set([n] * (n % 3))
        case "at":
            return states.some[n % len(states.some)] if len(states.some) else None
        case "put":
            states.by[n % 4] = n
        case "null":
            states.by[n % 4] = None
        case "count":
            states.by[n % 4] = (states.by.get(n % 4) or 0) + 1
        case "pop":
            return states.by.pop(n % 4, -1)
        case "default":
            return states.by.setdefault(n % 4, n)
        case "update":
            states.by.update({n % 4: n, (n + 1) % 4: n + 1})
        case "look":
            return [states.by.get(n % 4, "none"), n % 4 in states.by, len(states.by)]
        case "forget":
            for state in (states.one, states.text, states.some, states.by)[n % 4 :]:
                state.clear()
        case _:
            return told(states)
    return None


def told(states: States) -> list[Any]:
    """All that a key has."""
    return [states.one.value, states.text.get(), list(states.some), list(states.by.items())]


class Programs(ProcessFunction):
    one = ValueState("long")
    text = ValueState("string")
    some = ListState("long")
    by = MapState("long", "long")

    def process(self, row: dict[str, Any], ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        for name, n in json.loads(row["do"]):
            if name == "fail":
                raise ValueError("as told")
            if name == "timer":
                ctx.timers.register_event(n)
            elif name == "untimer":
                yield {"k": ctx.key, "told": json.dumps(ctx.timers.delete_event(n))}
            else:
                yield {"k": ctx.key, "told": json.dumps(perform(self, name, n))}

    def on_timer(self, time: int, domain: str, ctx: ProcessContext) -> list[dict[str, Any]]:
        self.some.append(time)
        return [{"k": ctx.key, "told": json.dumps([time, told(self)])}]


class PlainValue:
    value: Any = None

    def get(self, default: Any = None) -> Any:
        return default if self.value is None else self.value

    def clear(self) -> None:
        self.value = None


class PlainList(list[Any]):
    def set(self, values: list[Any]) -> None:
        self[:] = values


class PlainKey:
    """What the oracle keeps of a key."""

    def __init__(self) -> None:
        self.one, self.text, self.some, self.by = PlainValue(), PlainValue(), PlainList(), dict[int, Any]()
        self.timers: set[int] = set()


class Oracle:
    def __init__(self) -> None:
        self.keys: dict[str, PlainKey] = {}

    def rows(self, rows: list[tuple[str, list[Operation]]]) -> list[tuple[str, str]]:
        """What the rows tell."""
        made: list[tuple[str, str]] = []
        for key, program in rows:
            mine = self.keys.setdefault(key, PlainKey())
            for name, n in program:
                if name == "timer":
                    mine.timers.add(n)
                elif name == "untimer":
                    made.append((key, json.dumps(n in mine.timers)))
                    mine.timers.discard(n)
                else:
                    made.append((key, json.dumps(perform(mine, name, n))))
        return made

    def watermark(self, watermark: int) -> list[tuple[str, str]]:
        """What the timers tell that are due."""
        made: list[tuple[str, str]] = []
        for key, mine in self.keys.items():
            for time in sorted(t for t in mine.timers if t <= watermark):
                mine.timers.discard(time)
                mine.some.append(time)
                made.append((key, json.dumps([time, told(mine)])))
        return made


STATES = [
    "set",
    "add",
    "none",
    "name",
    "append",
    "extend",
    "list",
    "at",
    "put",
    "null",
    "count",
    "pop",
    "default",
    "update",
    "look",
    "forget",
    "tell",
]
OPERATION = st.tuples(st.sampled_from([*STATES, "timer", "untimer"]), st.integers(0, 50))
ROW = st.tuples(st.sampled_from("abcd"), st.lists(OPERATION, max_size=6))
SLICE = st.lists(ROW, min_size=1, max_size=12)
STEP = st.one_of(
    st.tuples(st.just("rows"), SLICE),
    st.tuples(st.just("watermark"), st.integers(0, 60)),
    st.tuples(st.just("fail"), SLICE),
    st.tuples(st.sampled_from(["snapshot", "kill"]), st.just(None)),
)


def batch_of(rows: list[tuple[str, list[Operation]]]) -> pa.RecordBatch:
    return pa.record_batch([[key for key, _ in rows], [json.dumps(program) for _, program in rows]], schema=SCHEMA)


class World:
    """A step and the oracle, with what both were at the newest snapshot."""

    def __init__(self) -> None:
        self.group = Group(ProcessSpec(SCHEMA, ("k",), Programs(), "k string, told string"), Clock(), ["k"])  # type: ignore[arg-type]
        self.oracle, self.watermark = Oracle(), -1
        self.segments: list[Segment] | None = []
        self.snapshot()

    def snapshot(self) -> None:
        if self.segments is None:
            self.write()
        self.write, self.segments = self.group.freeze(), None
        self.saved = copy.deepcopy(self.oracle), self.watermark

    def restore(self) -> None:
        if self.segments is None:  # written late: what came since the freeze must not be in it
            self.segments = self.write()
        self.close()
        self.group = self.group.restored(self.segments, 1)
        self.oracle, self.watermark = copy.deepcopy(self.saved[0]), self.saved[1]

    def close(self) -> None:
        for operator in self.group.operators:
            operator.close()

    def step(self, kind: str, what: Any) -> None:
        match kind:
            case "snapshot":
                self.snapshot()
            case "kill":
                self.restore()
            case "fail":  # the last row does part of its work, then fails
                *before, (key, program) = what
                with pytest.raises(UserCodeError, match=r"raised ValueError on row (\d+) of the batch") as failed:
                    self.group.rows(batch_of([*before, (key, [*program, ("fail", 0)]), ("a", [("fail", 0)])]))
                assert failed.value.row == len(before)
                assert f"{{k: '{key}'" in str(failed.value)
                self.restore()
            case "rows":
                self.made_is(lambda: self.group.rows(batch_of(what)), self.oracle.rows(what), ordered=True)
            case _:
                self.watermark = max(self.watermark + 1, what)  # one that does not rise is none
                self.made_is(
                    lambda: self.group.watermark(self.watermark), self.oracle.watermark(self.watermark), ordered=False
                )

    def made_is(self, do: Any, expected: list[tuple[str, str]], *, ordered: bool) -> None:
        self.group.made.clear()
        do()
        got = [(row["k"], row["told"]) for row in self.group.made]
        if not ordered:  # timers of one time and several keys
            got, expected = sorted(got), sorted(expected)
        assert got == expected


@settings(max_examples=80, deadline=None)
@given(
    memory_bytes=st.sampled_from([None, None, None, 1 << 12]),
    rows_at_once=st.integers(1, 12),
    steps=st.lists(STEP, max_size=12),
)
def test_programs_of_state_operations_do_what_plain_python_does(
    memory_bytes: int | None, rows_at_once: int, steps: list[tuple[str, Any]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "memory_bytes", memory_bytes)
        patch.setattr(spec, "ROWS_AT_ONCE", rows_at_once)
        world = World()
        try:
            for kind, what in [*steps, ("rows", [(key, [("tell", 0)]) for key in "abcd"])]:
                world.step(kind, what)
        finally:
            world.close()
