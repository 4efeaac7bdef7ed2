"""W1: a watermark W says that no row at or before W will come; what a row at W is, every step says alike."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.base import OperatorSpec
from cutwater.operators.join.spec import AsOfJoinSpec, IntervalJoinSpec, WindowJoinSpec
from cutwater.operators.ranking.deduplicate_spec import DeduplicateSpec
from cutwater.operators.window.kinds import SessionWindow, SlidingWindow, TumblingWindow
from cutwater.operators.window.spec import WindowAggregateSpec
from keyed_world import opened, rows_of

ROWS = pa.schema({"k": pa.int64(), "t": pa.timestamp("us")})
SIDES: Any = (ROWS, ROWS, ("k",), ("k",), "t", "t")
COUNT = (Aggregate("n", "count"),)
STEPS: dict[str, OperatorSpec] = {
    "tumbling": WindowAggregateSpec(ROWS, ("k",), "t", TumblingWindow(1), COUNT),
    "sliding": WindowAggregateSpec(ROWS, ("k",), "t", SlidingWindow(1, 1), COUNT),
    "session": WindowAggregateSpec(ROWS, ("k",), "t", SessionWindow(1), COUNT),
    "deduplicate": DeduplicateSpec(ROWS, ("k",), "first", "t", 1),
    "interval join": IntervalJoinSpec(*SIDES, 0, 0),
    "as-of join": AsOfJoinSpec(*SIDES),
    "window join": WindowJoinSpec(*SIDES, TumblingWindow(1)),
}
"""With windows of one instant, so that a row is late exactly if its time is."""


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("watermark", [-3, 0, 100])
def test_w1_a_row_at_the_watermark_is_late_in_every_step(name: str, watermark: int) -> None:
    spec = STEPS[name]
    for side in range(len(spec.outputs) - 1):
        operator = opened(spec)
        operator.on_watermark(watermark)
        times = [watermark - 1, watermark, watermark + 1]
        batch = pa.record_batch({"k": [1, 2, 3], "t": pa.array(times, pa.timestamp("us"))})
        late = rows_of(operator.process(side, batch), 1 + side)
        assert [row["k"] for row in late] == [1, 2]
        assert operator.ctx.counters["rows_late"] == 2  # type: ignore[attr-defined]
