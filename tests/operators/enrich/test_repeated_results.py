"""What an operator took from outside comes again from what it gave for the determinant log, and nobody is asked for it
(R0).

The oracle is the operator itself, had it not gone back: its function answers differently each time.
"""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import pyarrow as pa
import pytest

from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import NondeterminismError
from cutwater.operators.enrich.async_map import AsyncMapOperator, AsyncMapSpec
from subtask_context import Subtask

IN = pa.schema({"n": pa.int64()})
OUT = pa.schema({"n": pa.int64(), "answer": pa.int64()})


class Oracle:
    """Whoever is asked; never says the same twice, and drops some rows, and is late with some."""

    def __init__(self, batched: bool) -> None:
        self.asked: list[list[int]] = []
        self._numbers, self._batched = itertools.count(), batched
        self._lock, self.over = threading.Lock(), threading.Event()

    def fn(self, given: Any) -> Any:
        rows = given if self._batched else [given]
        with self._lock:
            self.asked.append([row["n"] for row in rows])
        if any(row["n"] % 7 == 0 for row in rows):
            self.over.wait(20)  # its time is up long before
        made = [None if row["n"] % 5 == 0 else {"n": row["n"], "answer": next(self._numbers)} for row in rows]
        return made if self._batched else made[0]


class Life:
    """An operator from a snapshot on."""

    def __init__(self, spec: AsyncMapSpec, segments: list[Any] | None, *, repeating: bool) -> None:
        self.context = Subtask(repeatable=True, repeating=repeating)
        self.operator: AsyncMapOperator = spec.build()
        self._woken = threading.Event()
        self.context.wake = self._woken.set  # type: ignore[method-assign]
        self.operator.open(self.context)
        if segments is not None:
            self.operator.restore(segments)
        self.made: list[Any] = []

    def perform(self, what: str, value: Any) -> None:
        if what == "rows":
            self._note(self.operator.process(0, value))
        elif what == "watermark":
            self._note(self.operator.on_watermark(value))
        else:
            self._note(self.operator.repeat_results(value))

    def answers(self) -> bytes:
        """Those that come next, if anything comes of them."""
        taken = b""
        while not taken and self.operator.answered:
            outputs, taken = self.operator.take_results()
            self._note(outputs)
        return taken

    def wait(self) -> None:
        assert self._woken.wait(20)
        self._woken.clear()

    def _note(self, outputs: Any) -> None:
        self.made += [(output, batch.to_pylist()) for output, batch in outputs]


def live_on(life: Life, chance: random.Random, numbers: Any, calls: int) -> list[tuple[str, Any]]:
    """What chance has done to it, as a determinant log would have it."""
    history: list[tuple[str, Any]] = []
    for _ in range(calls):
        what = chance.random()
        if what < 0.4 and life.operator.room:
            rows = [next(numbers) for _ in range(chance.randint(1, 6))]
            history.append(("rows", pa.RecordBatch.from_pydict({"n": rows}, IN)))
        elif what < 0.6:
            history.append(("watermark", next(numbers)))
        else:
            if life.operator._sent and not life.operator.answered:
                life.wait()
            if taken := life.answers():
                history.append(("answers", taken))
            continue
        life.perform(*history[-1])
    return history


@pytest.mark.parametrize("batch_rows", [None, 4])
@pytest.mark.parametrize("ordered", [True, False])
def test_what_was_answered_is_not_asked_again(ordered: bool, batch_rows: int | None) -> None:
    chance, repeated = random.Random(f"{ordered}{batch_rows}"), 0
    for _ in range(6):
        oracle = Oracle(batched=batch_rows is not None)
        spec = AsyncMapSpec(
            IN, oracle.fn, OUT, ordered=ordered, capacity=20, timeout_ms=20, on_timeout="dead_letter",
            batch_rows=batch_rows,
        )  # fmt: skip
        first, numbers = Life(spec, None, repeating=False), itertools.count(1)
        live_on(first, chance, numbers, 15)
        segments = list(first.operator.freeze(1).segments())
        first.made.clear()
        history = live_on(first, chance, numbers, 40)
        first.operator.close()
        asked = len(oracle.asked)

        again = Life(spec, segments, repeating=True)
        for what, value in history:
            assert not again.operator.answered, "an answer is a choice, and those of then come first"
            again.perform(what, value)
        assert again.made == first.made
        assert len(oracle.asked) == asked
        repeated += sum(len(rows) for _, rows in again.made)
        kept = [n for segment in again.operator.freeze(2).segments() for n in segment.batch["n"].to_pylist()]
        assert kept == [n for segment in first.operator.freeze(2).segments() for n in segment.batch["n"].to_pylist()]

        again.context.repeating = False  # the log ends: what is left is asked for, once
        again.perform("watermark", MAX_WATERMARK)
        while again.operator.held_watermark is not None:
            if not again.operator.answered:
                again.wait()
            again.answers()
        assert sorted(n for rows in oracle.asked[asked:] for n in rows) == sorted(kept)
        assert again.operator._passed == MAX_WATERMARK
        oracle.over.set()
        again.operator.close()
    assert repeated > 100


def test_what_is_left_is_asked_for_in_calls_as_large_as_before() -> None:
    """Which of them would be left was not known when they came."""
    oracle = Oracle(batched=True)
    spec = AsyncMapSpec(IN, oracle.fn, OUT, batch_rows=3)
    life = Life(spec, None, repeating=True)
    life.perform("rows", pa.RecordBatch.from_pydict({"n": [1, 2, 3, 4]}, IN))
    life.perform("watermark", 9)
    life.perform("rows", pa.RecordBatch.from_pydict({"n": [11, 12, 13, 16, 17]}, IN))
    assert (oracle.asked, life.operator.answered) == ([], False)
    life.context.repeating = False
    while life.operator.held_watermark is not None:
        life.answers()
        if not life.operator.answered and life.operator.held_watermark is not None:
            life.wait()
    assert sorted(oracle.asked) == [[1, 2, 3], [4], [11, 12, 13], [16, 17]]
    assert [row["n"] for _, rows in life.made for row in rows] == [1, 2, 3, 4, 11, 12, 13, 16, 17]
    life.operator.close()


def test_a_result_of_a_row_that_has_not_come_again_is_told() -> None:
    oracle = Oracle(batched=False)
    spec = AsyncMapSpec(IN, oracle.fn, OUT)
    first = Life(spec, None, repeating=False)
    first.perform("rows", pa.RecordBatch.from_pydict({"n": [1]}, IN))
    taken = b""
    while not taken:
        first.wait()
        taken = first.answers()
    first.operator.close()
    again = Life(spec, None, repeating=True)
    with pytest.raises(NondeterminismError, match="results of 1 rows that have not come again"):
        again.perform("answers", taken)
    again.operator.close()
