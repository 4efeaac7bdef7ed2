"""A job whose states lie on its workers' disks, killed in the midst: each row counts once, no file is left behind."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fake_host import FakeSpark
from runtime_world import gated, kill_some, open_gate, wait_until

import cutwater as cw
from cutwater.errors import BuildError

pytest.importorskip("rocksdict")

ROWS, KEYS = 12_000, 3_000


class Counts(cw.ProcessFunction):
    count = cw.ValueState("long")
    seen = cw.ListState("long")

    def process(self, row: dict[str, Any], ctx: Any) -> Iterator[dict[str, Any]]:
        self.count.value = self.count.get(0) + 1
        self.seen.append(row["value"])
        yield {"key": ctx.key, "n": self.count.value, "sum": sum(self.seen)}


def abandoned() -> set[Path]:
    """Folders for state whose process is gone."""
    found = set[Path]()
    for lock in Path(tempfile.gettempdir(), f"cutwater-state-{os.getuid()}").glob("*/owner.lock"):
        try:
            with open(lock) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.add(lock.parent)
        except OSError:  # it is in use, or has gone meanwhile
            pass
    return found


def processed(keyed: Any) -> Any:
    return keyed.process("counts", Counts(), "key long, n long, sum long")


def aggregated(keyed: Any) -> Any:
    return keyed.aggregate("counts", n=cw.count(), sum=cw.sum("value"), text=cw.last("text")).drop("rest", "text")


@pytest.mark.parametrize("counted", [processed, aggregated])
def test_a_killed_job_counts_each_row_once_and_leaves_no_file(
    start: Any, fake_spark: FakeSpark, tmp_path: Path, counted: Callable[[Any], Any]
) -> None:
    before = abandoned()
    flow = cw.Dataflow("on-disk")
    rows = flow.read("in", gated(tmp_path, ROWS, rate=6_000))
    text = pl.col("value").cast(pl.String) + "-" * 500
    keyed = rows.with_columns("keyed", key=pl.col("value") % KEYS, text=text).key_by("key")
    counted(keyed).write("out", cw.files(tmp_path / "out"))
    job = start(flow, state_backend="rocksdb", state_memory_bytes=1 << 20)
    wait_until(lambda: job.status.checkpoints.last_completed_id > 1, "a checkpoint")
    kill_some(job, fake_spark, 1, seed=1)
    wait_until(lambda: job.status.checkpoints.restored_id > 0, "the restore")
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert abandoned() <= before
    made = pl.read_parquet(tmp_path / "out" / "**" / "*.parquet").select("key", "n", "sum").sort("key", "n")
    assert (made["n"] == made.select(pl.int_range(1, pl.len() + 1).over("key")).to_series()).all()
    values = made.select("key", value=pl.col("sum").diff().over("key").fill_null(pl.col("sum")))
    expected = pl.DataFrame({"value": range(ROWS)}).select(key=pl.col("value") % KEYS, value="value")
    assert sorted(values.rows()) == sorted(expected.rows()), "each row once, in the order in which it came"


def test_a_step_that_keeps_its_state_in_memory_only_is_refused(start: Any, tmp_path: Path) -> None:
    flow = cw.Dataflow("columns")
    rows = flow.read("in", cw.memory([{"k": 1}], schema="k long"))
    visits = rows.key_by("k").window("visits", cw.session("1m", time="processing"))
    visits.aggregate("n-by-k", n=cw.count()).write("out", cw.files(tmp_path / "out"))
    with pytest.raises(BuildError, match="in memory only, because each row of a session looks for neighbours") as e:
        start(flow, state_backend="rocksdb")
    assert e.value.step == "n-by-k"
