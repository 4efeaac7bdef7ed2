"""What may happen between the look at an input and the taking from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cutwater.runtime.channels import Barrier
from cutwater.runtime.subtask import Subtask


def test_a_barrier_that_overtakes_after_the_rows_were_looked_at_is_taken_as_a_barrier():
    """Its reader thread puts it in front of the rows at any moment; this once ended the attempt."""
    barrier = Barrier(7, False, True)
    channel = SimpleNamespace(take=lambda max_rows: barrier)
    told: list[Any] = []
    subtask: Any = object.__new__(Subtask)
    subtask.inputs = [channel]
    subtask.chain = SimpleNamespace(room=None)
    subtask.performer = SimpleNamespace(barrier=lambda channel, item: told.append((channel, item)))
    subtask._take_rows(0, 100)
    assert told == [(channel, barrier)]
