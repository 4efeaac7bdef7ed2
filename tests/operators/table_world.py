"""What the tests of updating streams share: the table that changes leave, and steps restored on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from cutwater.operators.base import Operator, OperatorSpec, Outputs
from cutwater.state.segments import Segment
from keyed_world import opened, owner, rescaled, snapshot

Change = tuple[object, ...]
"""The mark, then the row."""


class Running:
    """A step at some parallelism: rows go to the owner of their key, every subtask sees every watermark."""

    def __init__(self, spec: OperatorSpec, keys: Sequence[Sequence[str]], parallelism: int = 1) -> None:
        self.spec = spec
        self._keys = keys
        self._operators = [opened(spec, subtask, parallelism) for subtask in range(parallelism)]
        self.counters: Counter[str] = Counter()

    def rows(self, batch: pa.RecordBatch, input: int = 0) -> Outputs:
        owners = owner(batch, self._keys[input], len(self._operators))
        outputs: Outputs = []
        for subtask, operator in enumerate(self._operators):
            part = batch.filter(pa.array([o == subtask for o in owners], pa.bool_()))
            outputs += self._drained(operator, operator.process(input, part))
        return checked(self.spec, outputs)

    def watermark(self, watermark: int) -> Outputs:
        outputs: Outputs = []
        for operator in self._operators:
            outputs += self._drained(operator, operator.on_watermark(watermark))
        return checked(self.spec, outputs)

    @staticmethod
    def _drained(operator: Operator, outputs: Outputs) -> Outputs:
        while operator.pending:
            outputs = outputs + operator.resume()
        return outputs

    def restored(self, parallelism: int, shuffle: Any = list) -> Running:
        """Goes on from a snapshot; the old one is gone."""
        segments: list[Segment] = [s for operator in self._operators for s in snapshot(operator)]
        after = Running(self.spec, self._keys, 0)
        after._operators = rescaled(self.spec, shuffle(segments), parallelism)
        after.counters = self.count()
        return after

    def count(self) -> Counter[str]:
        return sum((o.ctx.counters for o in self._operators), self.counters)  # type: ignore[attr-defined]


def checked(spec: OperatorSpec, outputs: Outputs) -> Outputs:
    for number, batch in outputs:
        assert batch.schema == spec.outputs[number]
        assert batch.num_rows > 0
        batch.validate(full=True)
    return outputs


def values(outputs: Iterable[tuple[int, pa.RecordBatch]], output: int = 0) -> list[Change]:
    return [tuple(row.values()) for number, batch in outputs if number == output for row in batch.to_pylist()]


def table_after(changes: Iterable[Change], before: Counter[Change] | None = None) -> Counter[Change]:
    """The table that changes leave, checked on the way: nothing leaves that is not there, ``+U`` follows its ``-U``."""
    table: Counter[Change] = Counter(before or {})
    updated = False
    for op, *row in changes:
        assert updated == (op == "+U"), "each -U is followed by its +U"
        updated = op == "-U"
        if op in ("+I", "+U"):
            table[tuple(row)] += 1
        else:
            assert table[tuple(row)] > 0, (op, row)
            table[tuple(row)] -= 1
    assert not updated
    return +table


def pieces(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, count), max_size=4)
