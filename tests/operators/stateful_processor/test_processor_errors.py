"""What can be got wrong with a ``StatefulProcessor`` is said with a name and a way out, most of it at build time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from process_world import Clock, Group
from processor_world import Interpreter, NoTimers, batch, spec
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import cutwater as cw
from cutwater.errors import BuildError, UserCodeError
from cutwater.operators.enrich.table import EnrichmentTable
from cutwater.operators.stateful_processor.spark_types import TimeMode

ROW = batch([("a", "tell", 0, 0)])


def processor(
    init: Callable[[Any, Any], None] | None = None, handle: Callable[[Any], Any] | None = None
) -> StatefulProcessor:
    """One whose ``init`` or ``handleInputRows`` does this."""

    class Mine(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            if init is not None:
                init(self, handle)

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Any:
            return iter([]) if handle is None else handle(self)

    return Mine()


INIT = {
    "asks for state 'n' twice": lambda self, h: (h.getValueState("n", "a long"), h.getValueState("n", "a int")),
    "schema 'a lng': unknown type": lambda self, h: h.getListState("n", "a lng"),
    "the schema of state 'n' has no columns": lambda self, h: h.getValueState("n", pa.schema([])),
    "cannot be the name of a state": lambda self, h: h.getValueState("", "a long"),
    "has a time to live, and the time mode is None": lambda self, h: h.getValueState("n", "a long", 1000),
    "a key with column 'k' of type list": lambda self, h: h.getMapState("n", "k array<long>", "a long"),
    "there is no key yet": lambda self, h: h.registerTimer(5),
    "reads or writes a state": lambda self, h: h.getValueState("n", "a long").update((1,)),
    "raised ZeroDivisionError": lambda self, h: 1 // 0,
}


@pytest.mark.parametrize("message", INIT)
def test_an_init_that_cannot_work_is_refused_when_the_flow_is_built(message: str) -> None:
    with pytest.raises(BuildError, match=message):
        spec(processor(INIT[message]))


def test_a_time_to_live_must_be_above_0() -> None:
    with pytest.raises(BuildError, match="'0ms' is not above 0"):
        spec(processor(lambda self, h: h.getValueState("n", "a long", 0)), TimeMode.PROCESSING)


def stream(**more: Any) -> Any:
    flow = cw.Dataflow("wrong")
    return flow.read("in", cw.memory([{"k": "a", "n": 1}], schema="k string, n long"), **more).key_by("k")


STEP: dict[str, Callable[[Any], Any]] = {
    "a StatefulProcessor is needed, not NoTimers": lambda s: s.transform_with_state("p", NoTimers, "k string"),
    "a StatefulProcessor is needed, not int": lambda s: s.transform_with_state("p", 3, "k string"),
    "time_mode='Wall' is unknown": lambda s: s.transform_with_state("p", NoTimers(), "k string", "Append", "Wall"),
    "output_mode='Complete' would give": lambda s: s.transform_with_state("p", NoTimers(), "k string", "Complete"),
    "output_mode='All' is unknown": lambda s: s.transform_with_state("p", NoTimers(), "k string", "All"),
    "needs event time, but the stream has no event time": lambda s: s.transform_with_state(
        "p", Interpreter(), "k string", "Append", "EventTime"
    ),
    "unknown type": lambda s: s.transform_with_state("p", NoTimers(), "k strng"),
    "two columns are named 'k'": lambda s: s.transform_with_state("p", NoTimers(), pa.schema([("k", pa.int8())] * 2)),
    "has no handleInitialState": lambda s: s.transform_with_state(
        "p", processor(), "k string", initial_state=pa.table({"k": ["a"]})
    ),
    "the initial state has no key column 'k'": lambda s: s.transform_with_state(
        "p", NoTimers(), "k string", initial_state=pa.table({"l": ["a"]})
    ),
    "key column 'k' is string in the stream and int64": lambda s: s.transform_with_state_in_pandas(
        "p", NoTimers(), "k string", initial_state=pa.table({"k": [1]})
    ),
    "cannot be a int": lambda s: s.transform_with_state("p", NoTimers(), "k string", initial_state=3),
    "no row is late here": lambda s: s.transform_with_state("p", NoTimers(), "k string").late,
    "no watermark comes from above": lambda s: s.transform_with_state("p", NoTimers(), "t timestamp", event_time="t"),
}


@pytest.mark.parametrize("message", STEP)
def test_a_wrong_step_is_refused_with_its_id(message: str) -> None:
    with pytest.raises(BuildError, match=message) as caught:
        STEP[message](stream())
    assert caught.value.step == "p"


CALLS: dict[str, Callable[[Any], Any]] = {
    "must be an iterable, not NoneType": lambda self: None,
    "made dict instead of a Row": lambda self: iter([{"k": "a"}]),
    "made a row of 1 values for 2 columns": lambda self: iter([Row(k="a")]),
    "made 7 for column 'told' of type string": lambda self: iter([Row(k="a", told=7)]),
    "raised ZeroDivisionError on key 0 of the batch, {k: 'a'}": lambda self: iter([1 // 0]),
    "asks for state 'late' outside init": lambda self: self.handle.getValueState("late", "n long"),
    "deletes state 'n' outside init": lambda self: self.handle.deleteIfExists("n"),
    "uses timers, and the time mode is None": lambda self: self.handle.registerTimer(1),
    "state 'n' cannot hold None": lambda self: self.n.update(None),
    r"cannot hold \('x',\)": lambda self: self.n.update(("x",)),
    r"cannot hold \(1, 2\)": lambda self: self.n.update((1, 2)),
    "cannot hold 5": lambda self: self.n.update(5),
    r"5 is no key of map state 'm'": lambda self: self.m.containsKey(5),
}


@pytest.mark.parametrize("message", CALLS)
def test_a_wrong_call_names_the_key(message: str) -> None:
    def init(self: Any, handle: Any) -> None:
        self.n = handle.getValueState("n", "a long")
        self.m = handle.getMapState("m", "a long", "b long")

    def call(self: Any) -> Any:
        made = CALLS[message](self)
        return iter([]) if made is None and "an iterable" not in message else made

    group = Group(spec(processor(init, call)), Clock(), ["k"])
    with pytest.raises(UserCodeError, match=message):
        group.rows(ROW)


@pytest.mark.parametrize("time", [1.5, "1", None, True, 2**63])
def test_what_is_no_time_of_a_timer(time: Any) -> None:
    group = Group(
        spec(processor(handle=lambda self: self.handle.registerTimer(time)), TimeMode.PROCESSING), Clock(), ["k"]
    )
    with pytest.raises(UserCodeError, match="is not the time of a timer"):
        group.rows(ROW)


def test_init_must_ask_for_the_same_states_everywhere() -> None:
    asked: list[str] = ["n"]

    def init(self: Any, handle: Any) -> None:
        handle.getValueState(asked[0], "a long")

    made = spec(processor(init))
    asked[0] = "other"
    with pytest.raises(UserCodeError, match="asks for state 'other' in the worker"):
        Group(made, Clock(), ["k"]).rows(ROW)


def test_a_wrong_initial_state_names_the_row() -> None:
    class Fails(NoTimers):
        def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
            raise KeyError(initialState.k)

    table = EnrichmentTable(pa.Table.from_batches([ROW]))
    with pytest.raises(UserCodeError, match="raised KeyError on row 0"):
        Group(spec(Fails(), initial=table), Clock(), ["k"]).rows(ROW)
