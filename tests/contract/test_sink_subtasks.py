"""A sink of which only some subtasks go back (R2): a settle of all of them instead is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from sink_targets import Calls, target_of

from cutwater.connectors.base import Sink, SinkSnapshot
from cutwater.connectors.files.sink import FileSink
from cutwater.connectors.foreach_batch import ForeachBatchSink
from cutwater.testing.sinks import Attempt, partial_restart

MAKE: dict[str, Callable[[str], Sink]] = {
    "parquet, a file per checkpoint": lambda path: FileSink(path, roll_interval_ms=0),
    "parquet, rolled by size": lambda path: FileSink(path, roll_rows=12, roll_interval_ms="1h"),
    "foreach_batch of three": lambda path: ForeachBatchSink(Calls(), parallelism=3).bind(path),
}


@pytest.mark.parametrize("name", MAKE)
def test_settling_all_of_them_instead_is_found(name: str, tmp_path: Path) -> None:
    def settle(job: Attempt, restored: SinkSnapshot, whole: SinkSnapshot) -> None:
        job.committer.settle(whole, [whole], 2)

    target = target_of(MAKE[name](str(tmp_path / "out")), str(tmp_path / "out"))
    try:
        rows = partial_restart(target, settle)
    except Exception:
        return  # a writer misses what it staged
    assert Counter(target.rows()) != Counter(rows)
