"""``foreach_batch`` under kills: the same rows come again under the same id, so a call that overwrites is exact."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from runtime_world import gated, kill_some, open_gate, query

import cutwater as cw

ROWS = 20_000


def test_a_function_that_is_idempotent_by_checkpoint_sees_every_row_once(start, fake_spark, tmp_path: Path) -> None:
    out = tmp_path / "batches"
    out.mkdir()

    def write(rows: pa.Table, checkpoint_id: int) -> None:
        fresh = out / f".{checkpoint_id}-{os.getpid()}"
        pq.write_table(rows, fresh)
        fresh.replace(out / f"{checkpoint_id}.parquet")

    flow = cw.Dataflow("batches")
    rows = flow.read("in", gated(tmp_path, ROWS))
    rows.foreach_batch("each", write)
    job = start(flow)
    kill_some(job, fake_spark, 3, 11)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.restarts >= 1
    counts = query("SELECT count(*), count(DISTINCT value), max(value) FROM {out}", out=out)
    assert counts == [(ROWS, ROWS, ROWS - 1)]
