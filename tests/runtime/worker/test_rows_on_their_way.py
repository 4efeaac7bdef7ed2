"""Rows of a snapshot go on over an edge that carries other columns now."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cutwater.errors import BuildError
from cutwater.plan.graph import Edge, EdgeType
from cutwater.runtime.worker.restore import fitting
from cutwater.storage.snapshot.channel_log import LogItem

ROWS = pa.record_batch({"k": [1, 2], "v": [3, 4], "w": ["a", "b"]})


def edge(*columns: str) -> Edge:
    return Edge(0, EdgeType.HASH, 0, "read", 0, 1, "sum", 0, ROWS.select(columns).schema, ("k",))


def test_columns_that_are_read_no_more_are_left_out() -> None:
    item = fitting(edge("k", "v"), LogItem(ROWS, 7, late_before=5))
    assert item.batch is not None
    assert item.batch.to_pylist() == [{"k": 1, "v": 3}, {"k": 2, "v": 4}]
    assert (item.watermark, item.late_before) == (7, 5)


def test_what_fits_stays_as_it_is() -> None:
    for item in (LogItem(ROWS, 7), LogItem(None, 8, idle=True)):
        assert fitting(edge("k", "v", "w"), item) is item


def test_a_column_that_the_snapshot_lacks_is_named() -> None:
    with pytest.raises(BuildError, match=r"'read.0>sum.0' without column 'w'.*aligned checkpoint"):
        fitting(edge("k", "w"), LogItem(ROWS.select(["k", "v"]), 7))
