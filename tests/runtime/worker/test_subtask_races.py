"""What may happen between the look at an input and the taking from it, or in the middle of work."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import InvariantError
from cutwater.operators.base import Operator, Outputs
from cutwater.plan.graph import Channel
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Barrier, Head, Item, Rows, Watermark
from cutwater.protocol.channel.receiving import ReceivingEnd
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.loop import SubtaskLoop, TakeRows
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.watermarks import InputTime, WatermarkMerger
from cutwater.runtime.chains.chain import Chain, EdgeOut, Node, ProcessingClock
from cutwater.runtime.channels.output import OutputChannel
from cutwater.runtime.worker.subtask import Subtask, SubtaskParts

ROWS = Rows(pa.record_batch({"n": [1, 2, 3]}), 0, MIN_WATERMARK)


def test_a_barrier_that_overtakes_after_the_rows_were_looked_at_is_taken_as_a_barrier():
    """Its reader thread puts it in front of the rows at any moment; this once ended the attempt."""
    subtask, operator, inputs = slicing(0.0)
    inputs[0].put(ROWS)
    head = inputs[0].head()
    inputs[0].put(Barrier(7, False, True))
    subtask.core._do(TakeRows(0, 100))
    assert (head, operator.did) == (Head.ROWS, ["freeze"])


class Slices(Operator):
    """What it makes of a batch leaves in three slices."""

    def __init__(self) -> None:
        self.left = 0
        self.did: list[str] = []

    @property
    def pending(self) -> bool:
        return self.left > 0

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        self.left = 3
        self.did.append("rows")
        return []

    def resume(self) -> Outputs:
        self.left -= 1
        self.did.append("slice")
        return []

    def freeze(self, checkpoint_id: int) -> Any:
        self.did.append("freeze")


def slicing(
    aligned_timeout_ms: float, outputs: tuple[OutputChannel, ...] = ()
) -> tuple[Subtask, Slices, list[ReceivingEnd]]:
    """A subtask with two inputs under the protocol ``unaligned``; a round of it ends with the call of an operator."""
    operator, nobody = Slices(), frozenset[Any]()
    port = SimpleNamespace(submit_snapshot=lambda part: None, called=False)
    inputs = [ReceivingEnd(Channel(0, source, 0), 8) for source in range(2)]
    keys = [channel.key for channel in inputs]
    parts = SubtaskParts(
        key=(1, 0),
        name="slices",
        incarnation=1,
        inputs=inputs,
        input_numbers=[0, 0],
        chain=Chain(
            [Node(("slices",), operator, [[]])],
            [EdgeOut(outputs, partitioner=None, broadcast=True, schema=ROWS.batch.schema)],
        ),
        clock=ProcessingClock(),
        source=None,
        sinks=[],
        edges=dict.fromkeys(keys, cast(Any, None)),
        back_edges=nobody,
        loop_inputs=nobody,
        loop_outputs=nobody,
        key_groups=range(1),
        aligned_timeout_ms=aligned_timeout_ms,
        spill=False,
    )
    machine = SubtaskMachine("slices 0", keys, protocol=PROTOCOLS["unaligned"])
    merger = WatermarkMerger(keys, nobody, nobody)
    subtask = Subtask(parts, machine, SubtaskLoop(machine, keys, 0.0, 100), merger, port, 0.0)  # type: ignore[arg-type]
    return subtask, operator, inputs


@pytest.mark.parametrize(
    ("aligned_timeout_ms", "before", "then"),
    [
        (1_000.0, ([Barrier(1)], [ROWS]), []),
        (0.0, ([], [ROWS]), [ROWS._replace(first_row=3), Barrier(1)]),
    ],
    ids=["the alignment takes too long", "a barrier is seen to wait"],
)
def test_nothing_is_frozen_in_the_middle_of_work(
    aligned_timeout_ms: float, before: tuple[list[Item], list[Item]], then: list[Item]
) -> None:
    """The watermark that closed a window was in the snapshot, and the rest of the window's rows nowhere."""
    subtask, operator, inputs = slicing(aligned_timeout_ms)
    now_s = time.monotonic()
    for channel, items in zip(inputs, before, strict=True):
        for item in items:
            channel.put(item)
    subtask.round(now_s)
    assert operator.did == ["rows"]
    for item in then:
        inputs[1].put(item)
    for number in range(10):
        subtask.round(now_s + 10 + number)
    assert operator.did[:5] == ["rows", "slice", "slice", "slice", "freeze"]


def test_who_was_idle_at_the_cut_says_when_it_is_not_any_more() -> None:
    """Its receivers were restored as not waiting for it, and would not until its first rows."""
    sent: list[Item] = []
    output = OutputChannel(Channel(1, 0, 0), ROWS.batch.schema, sent.append, credit=8, watermark=5, idle=True)
    subtask, _, inputs = slicing(0.0, (output,))
    subtask.core.merger.restore({channel.key: InputTime(5, True) for channel in inputs}, 5)
    inputs[0].put(Watermark(5))
    subtask.round(0.0)
    output.flush_idle()
    assert sent == [Watermark(5)]


def test_to_freeze_in_the_middle_of_work_is_refused() -> None:
    subtask, _, inputs = slicing(0.0)
    inputs[1].put(ROWS)
    subtask.round(time.monotonic())
    with pytest.raises(InvariantError, match="in the middle of work"):
        subtask.core.handle(m.BarrierTaken(inputs[0].key, 1, overtook=0))
