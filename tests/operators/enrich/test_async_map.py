"""Async enrichment as an operator: order, watermarks, capacity, failures, what a snapshot holds.

Functions wait for gates that the test opens, so that nothing here depends on how fast anything is.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import BuildError, UserCodeError
from cutwater.operators.enrich.async_map import AsyncMapOperator, AsyncMapSpec

IN = pa.schema({"n": pa.int64()})
OUT = pa.schema({"n": pa.int64(), "square": pa.int64()})
WAIT_S = 20.0


class Gates:
    """Calls of ``fn`` wait until the test lets each go; results can be waited for."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._open: set[int] = set()
        self._condition = threading.Condition()
        self._events: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}

    async def fn(self, row: dict[str, Any]) -> dict[str, Any]:
        n, event = row["n"], asyncio.Event()
        with self._condition:
            self.begun.append(n)
            self._events[n] = asyncio.get_running_loop(), event
            if n in self._open:
                event.set()
            self._condition.notify_all()
        await event.wait()
        return {"n": n, "square": n * n}

    def open(self, *numbers: int) -> None:
        with self._condition:
            self._open.update(numbers)
            for n in numbers:
                if n in self._events:
                    loop, event = self._events[n]
                    loop.call_soon_threadsafe(event.set)

    def wait_begun(self, count: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: len(self.begun) >= count, WAIT_S), self.begun


class Bench:
    """An operator as the loop drives it."""

    def __init__(self, make_context: Callable[..., Any], fn: Any, **settings: Any) -> None:
        self.spec = AsyncMapSpec(IN, fn, OUT, **{"timeout_ms": WAIT_S * 1000, **settings})
        self.operator: AsyncMapOperator = self.spec.build()
        self.context = make_context()
        self._woken = threading.Event()
        self.context.wake = self._woken.set
        self.operator.open(self.context)
        self.out: list[Any] = []
        """Numbers, ``("late", n)`` for dead letters and ``("w", time)`` for watermarks, as they leave."""
        self._watermark = self._sent = MIN_WATERMARK

    def rows(self, *numbers: int) -> None:
        self.operator.process(0, pa.RecordBatch.from_pydict({"n": list(numbers)}, IN))

    def watermark(self, time: int) -> None:
        self._watermark = time
        self.operator.on_watermark(time)
        self._pass_watermark()

    def turn(self) -> None:
        """What the chain does as long as there is something."""
        while self.operator.answered:
            for output, batch in self.operator.take_results()[0]:
                numbers = batch["n"].to_pylist()
                if output == 0:
                    assert batch["square"].to_pylist() == [n * n for n in numbers]
                self.out += numbers if output == 0 else [("late", n) for n in numbers]
            self._pass_watermark()

    def until(self, condition: Callable[[], bool]) -> None:
        """Turns, one for each time it is woken."""
        self.turn()
        while not condition():
            assert self._woken.wait(WAIT_S), self.out
            self._woken.clear()
            self.turn()

    def until_out(self, count: int) -> None:
        self.until(lambda: len(self.out) >= count)

    def kept(self) -> list[int]:
        return [n for s in self.operator.freeze(1).segments() for n in s.batch["n"].to_pylist()]

    def _pass_watermark(self) -> None:
        held = self.operator.held_watermark
        watermark = self._watermark if held is None else min(self._watermark, held)
        if watermark > self._sent:
            self._sent = watermark
            self.out.append(("w", watermark))


@pytest.fixture
def gates() -> Gates:
    return Gates()


@pytest.fixture
def bench(make_context: Callable[..., Any]) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(fn: Any, **settings: Any) -> Bench:
        made.append(Bench(make_context, fn, **settings))
        return made[-1]

    yield make
    for one in made:
        one.operator.close()
    names = [t.name for t in threading.enumerate()]
    assert not [name for name in names if name == "cutwater-async-step"], "a thread was left behind"


# ---------------------------------------------------------------------------------------------- order and watermarks


def test_ordered_results_leave_in_the_order_of_their_rows(bench: Any, gates: Gates) -> None:
    b = bench(gates.fn)
    b.rows(1, 2, 3)
    gates.open(3, 2)
    b.until(lambda: len(b.operator._done) == 0 and sum(c.over for c in b.operator._segments[0].waiting.values()) == 2)
    assert b.out == []
    gates.open(1)
    b.until_out(3)
    assert b.out == [1, 2, 3]


def test_unordered_results_leave_as_they_come(bench: Any, gates: Gates) -> None:
    b = bench(gates.fn, ordered=False)
    b.rows(1, 2, 3)
    for n in (3, 1, 2):
        gates.open(n)
        b.until(lambda n=n: n in b.out)
    assert b.out == [3, 1, 2]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_watermark_overtakes_no_row(bench: Any, gates: Gates, ordered: bool) -> None:
    b = bench(gates.fn, ordered=ordered)
    b.watermark(5)
    assert b.out == [("w", 5)], "nothing is kept: it goes on at once"
    b.rows(1, 2)
    b.watermark(10)
    b.rows(3)
    b.watermark(20)
    b.watermark(30)
    gates.open(3, 2)
    b.until(lambda: len(b.operator._done) == 0 and (ordered or 2 in b.out))
    assert [x for x in b.out if x != 2] == [("w", 5)], "row 1 is under way, and row 3 lies behind a watermark"
    gates.open(1)
    b.until(lambda: ("w", 30) in b.out)
    first = [1, 2] if ordered else [2, 1]
    assert b.out == [("w", 5), *first, ("w", 10), 3, ("w", 30)]
    assert b.operator.held_watermark is None


def test_watermarks_go_on_although_rows_are_always_under_way(bench: Any, gates: Gates) -> None:
    b = bench(gates.fn, ordered=False, capacity=3)
    for n in range(50):
        b.rows(n)
        b.watermark(n)
        if n >= 2:
            gates.open(n - 2)
            b.until(lambda n=n: ("w", n - 2) in b.out)
            assert b.operator.held_watermark == n - 2
    gates.open(48, 49)
    b.watermark(MAX_WATERMARK)
    b.until(lambda: ("w", MAX_WATERMARK) in b.out)
    assert [x for x in b.out if isinstance(x, int)] == list(range(50))


# ------------------------------------------------------------------------------------------------- capacity and calls


def test_no_more_rows_are_under_way_than_the_capacity(bench: Any, gates: Gates) -> None:
    b = bench(gates.fn, capacity=4)
    assert b.operator.room == 4
    b.rows(*range(10))  # the loop brings four, but a step before may have made more of them
    assert b.operator.room == 0
    gates.wait_begun(4)
    assert sorted(gates.begun) == [0, 1, 2, 3]
    gates.open(0, 1)
    b.until_out(2)
    gates.wait_begun(6)
    assert sorted(gates.begun) == [0, 1, 2, 3, 4, 5]
    gates.open(*range(10))
    b.until_out(10)
    assert b.out == list(range(10))
    assert b.operator.room == 4


def test_a_plain_function_runs_in_threads_side_by_side(bench: Any) -> None:
    together = threading.Barrier(3)

    def fn(row: dict[str, Any]) -> dict[str, Any]:
        together.wait(WAIT_S)
        return {"n": row["n"], "square": row["n"] ** 2}

    b = bench(fn, capacity=3)
    b.rows(1, 2, 3)
    b.until_out(3)
    assert b.out == [1, 2, 3]


def test_batches_of_rows_and_dropped_rows(bench: Any) -> None:
    sizes: list[int] = []

    async def fn(rows: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        sizes.append(len(rows))
        return [None if r["n"] % 2 else {"n": r["n"], "square": r["n"] ** 2} for r in rows]

    b = bench(fn, batch_rows=4)
    b.rows(*range(10))
    b.until_out(5)
    assert (sorted(sizes), b.out) == ([2, 4, 4], [0, 2, 4, 6, 8])
    assert b.operator.held_watermark is None


@pytest.mark.parametrize("kind", ["partial", "object", "lambda"])
def test_whatever_can_be_awaited_is_an_async_function(bench: Any, kind: str) -> None:
    async def square(power: int, row: dict[str, Any]) -> dict[str, Any]:
        return {"n": row["n"], "square": row["n"] ** power}

    class Squares:
        async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            return await square(2, row)

    fns: dict[str, Any] = {
        "partial": functools.partial(square, 2),
        "object": Squares(),
        "lambda": lambda row: square(2, row),
    }
    b = bench(fns[kind])
    b.rows(3)
    b.until_out(1)
    assert b.out == [3]


# ----------------------------------------------------------------------------------------------------------- failures


def test_a_failing_call_names_the_row_and_keeps_the_users_traceback(bench: Any) -> None:
    async def lookup(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == 12:
            raise KeyError("no such customer")
        return {"n": row["n"], "square": row["n"] ** 2}

    b = bench(lookup)
    b.rows(1, 2, 3)
    b.until_out(3)
    b.rows(11, 12)
    with pytest.raises(UserCodeError) as caught:
        b.until_out(5)
    message = caught.value.message
    headline = message.splitlines()[0]
    assert "lookup' raised KeyError on row 1 of the batch, {n: 12}" in headline
    assert headline.endswith("(in subtask 0, row 4 since it started)")
    assert "no such customer" in message.splitlines()[-1]


def test_a_call_is_tried_again(bench: Any) -> None:
    tries: list[int] = []

    def fn(row: dict[str, Any]) -> dict[str, Any]:
        tries.append(row["n"])
        if len(tries) < 3:
            raise ConnectionError("down")
        return {"n": row["n"], "square": row["n"] ** 2}

    b = bench(fn, retries=2, retry_delay_ms=1)
    b.rows(7)
    b.until_out(1)
    assert (b.out, tries, b.context.counters["calls_retried"]) == ([7], [7, 7, 7], 2)
    tries.clear()
    b = bench(fn, retries=1, retry_delay_ms=1)
    b.rows(7)
    with pytest.raises(UserCodeError, match=r"ConnectionError.*tried 2 times"):
        b.until_out(1)


def test_a_row_without_result_in_time_fails_the_job_or_is_diverted(bench: Any, gates: Gates) -> None:
    gates.open(1, 3)
    b = bench(gates.fn, timeout_ms=50)
    b.rows(2)
    with pytest.raises(UserCodeError, match=r"gave no result within 50 ms for row 0, \{n: 2\} .*subtask 0, row 0") as e:
        b.until_out(1)
    assert "on_timeout='dead_letter'" in e.value.hint
    b = bench(gates.fn, timeout_ms=50, on_timeout="dead_letter")
    b.rows(1, 2, 3)
    b.watermark(9)
    b.until(lambda: ("w", 9) in b.out)
    assert [x for x in b.out if x != ("late", 2)] == [1, 3, ("w", 9)]
    assert b.out.index(("late", 2)) < b.out.index(("w", 9))
    assert b.context.counters["rows_dead_letter"] == 1


def test_a_thread_that_never_returns_holds_nothing_up(bench: Any) -> None:
    never = threading.Event()

    def fn(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == 1:
            never.wait()
        return {"n": row["n"], "square": row["n"] ** 2}

    b = bench(fn, timeout_ms=100, on_timeout="dead_letter", ordered=False)
    b.rows(1, 2)
    b.until_out(2)
    assert b.out == [2, ("late", 1)]
    b.operator.close()
    never.set()


@pytest.mark.parametrize(
    ("made", "match"),
    [
        ({"n": "text"}, r"made 'text' for column 'n'.*row 1 since it started"),
        ({"m": 1}, "undeclared columns 'm'"),
        ([1], "made list instead of a dict"),
    ],
)
def test_a_result_that_does_not_fit_is_told(bench: Any, made: Any, match: str) -> None:
    async def fn(row: dict[str, Any]) -> Any:
        return made if row["n"] == 2 else {"n": 1, "square": 1}

    b = bench(fn)
    b.rows(1, 2)
    with pytest.raises(UserCodeError, match=match):
        b.until_out(2)


def test_a_batch_function_must_answer_for_each_row(bench: Any) -> None:
    async def fn(rows: list[dict[str, Any]]) -> Any:
        return rows[:1]

    b = bench(fn, batch_rows=2)
    b.rows(1, 2)
    with pytest.raises(UserCodeError, match="returned 1 rows for 2 rows"):
        b.until_out(2)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"capacity": 0}, "capacity must be at least 1"),
        ({"retries": -1}, "retries must be at least 0"),
        ({"timeout_ms": 0}, "timeout must be above 0"),
        ({"on_timeout": "skip"}, "'error' or 'dead_letter'"),
        ({"batch_rows": 0}, "batch_rows must be at least 1"),
        ({"batch_rows": 200}, "above capacity 100"),
        ({"fn": 5}, "a function is needed, got int"),
        ({"output_schema": pa.schema([])}, "has no columns"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], match: str) -> None:
    async def fn(row: Any) -> Any:
        return row

    with pytest.raises(BuildError, match=match):
        AsyncMapSpec(**{"input_schema": IN, "fn": fn, "output_schema": OUT, **wrong})
    with pytest.raises(BuildError, match="yields"):
        AsyncMapSpec(IN, lambda row: (yield row), OUT)


# ---------------------------------------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_under_way_is_in_the_snapshot_and_is_asked_for_again(bench: Any, gates: Gates, ordered: bool) -> None:
    b = bench(gates.fn, ordered=ordered, capacity=3)
    b.rows(1, 2, 3, 4, 5)
    b.watermark(10)
    gates.open(1)
    b.until_out(1)
    gates.open(3)  # over, but in order it may not leave
    b.until(lambda: not ordered or any(c.over for c in b.operator._segments[0].waiting.values()))
    if not ordered:
        b.until_out(2)
    frozen = b.operator.freeze(1)
    kept = [2, 3, 4, 5] if ordered else [2, 4, 5]
    gates.open(2)
    b.until(lambda: 2 in b.out)  # leaving does not change what was frozen
    segments = list(frozen.segments())
    assert [n for s in segments for n in s.batch["n"].to_pylist()] == kept

    again = bench(gates.fn, ordered=ordered, capacity=3)
    again.operator.restore(segments)
    assert again.kept() == kept
    again.watermark(20)
    gates.open(4, 5)
    again.until(lambda: ("w", 20) in again.out)
    numbers = again.out[:-1]
    assert (numbers if ordered else sorted(numbers)) == kept
    assert list(again.operator.freeze(2).segments()) == []


def test_a_restore_calls_nothing_before_the_first_turn(bench: Any, gates: Gates) -> None:
    b = bench(gates.fn)
    b.rows(1)
    segments = list(b.operator.freeze(1).segments())
    gates.wait_begun(1)
    again = bench(gates.fn)
    again.operator.restore(segments)
    assert again.operator._calls._thread is None
    assert again.operator.answered
    again.turn()
    gates.wait_begun(2)
    assert not again.operator.answered
