"""What the tests of process functions share: a clock, driving an operator as the subtask loop does, rescaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cutwater.operators.base import Operator, OperatorSpec, Outputs
from cutwater.state.segments import Segment
from keyed_world import owner
from subtask_context import Subtask

Rows = list[dict[str, Any]]


@dataclass
class Clock:
    now_ms: int = 0


@dataclass
class Clocked(Subtask):
    clock: Clock | None = None

    def processing_time_ms(self) -> int:
        assert self.clock is not None
        return self.clock.now_ms


def clocked(
    spec: OperatorSpec, clock: Clock, subtask: int = 0, parallelism: int = 1, memory_bytes: int | None = None
) -> Operator:
    """An open operator; with ``memory_bytes``, its states lie on disk."""
    operator = spec.build()
    operator.open(Clocked(subtask, parallelism, clock=clock, state_memory_bytes=memory_bytes))
    return operator


class Group:
    """All subtasks of a step, driven as the loop drives them.

    Args:
        spec: of the step.
        clock: of all its subtasks.
        keys: the key columns of its rows.
    """

    memory_bytes: int | None = None
    """As for ``clocked``."""

    def __init__(self, spec: OperatorSpec, clock: Clock, keys: Sequence[str], parallelism: int = 1) -> None:
        self.spec, self.clock, self.keys = spec, clock, list(keys)
        self.operators = [clocked(spec, clock, i, parallelism, self.memory_bytes) for i in range(parallelism)]
        self.made: Rows = []
        self.side: list[Rows] = [[] for _ in spec.outputs[1:]]

    def rows(self, batch: pa.RecordBatch, input: int = 0) -> None:
        """Each subtask gets its rows."""
        owners = owner(batch, self.keys, len(self.operators))
        for subtask, operator in enumerate(self.operators):
            self._take(operator.process(input, batch.filter(pa.array([o == subtask for o in owners], pa.bool_()))))

    def everywhere(self, batch: pa.RecordBatch, input: int) -> None:
        """Each subtask gets all rows."""
        for operator in self.operators:
            self._take(operator.process(input, batch))

    def watermark(self, watermark: int) -> None:
        for operator in self.operators:
            self._take(operator.on_watermark(watermark))
            while operator.pending:
                self._take(operator.resume())

    def time(self, now_ms: int, slices: int = 10**9) -> None:
        """The clock moves on; what is due by it is called, at most ``slices`` times a subtask."""
        self.clock.now_ms = max(self.clock.now_ms, now_ms)
        for operator in self.operators:
            for _ in range(slices):
                next_ms = operator.next_processing_time_ms
                if next_ms is None or next_ms > self.clock.now_ms:
                    break
                self._take(operator.on_processing_time(self.clock.now_ms))

    def freeze(self) -> Callable[[], list[Segment]]:
        """Freezes all; the returned function writes the segments, later."""
        frozen = [operator.freeze(1) for operator in self.operators]

        def segments() -> list[Segment]:
            found = [segment for part in frozen for segment in part.segments()]
            for part in frozen:
                part.release()
            for segment in found:
                segment.batch.validate(full=True)
            return found

        return segments

    def restored(self, segments: Iterable[Segment], parallelism: int, clock: Clock | None = None) -> Group:
        """A new group, at some parallelism, with the state of the segments; rows made so far are not taken along."""
        group = Group(self.spec, clock or Clock(self.clock.now_ms), self.keys, parallelism)
        everything = list(segments)
        for operator in group.operators:
            operator.restore(everything)
        return group

    def _take(self, outputs: Outputs) -> None:
        for number, batch in outputs:
            batch.validate(full=True)
            (self.side[number - 1] if number else self.made).extend(batch.to_pylist())
