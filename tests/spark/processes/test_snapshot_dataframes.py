"""Snapshots in a session that Cutwater made: read with filters, joined, changed and written again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import cutwater as cw

pytestmark = [pytest.mark.spark, pytest.mark.full]


def test_a_snapshot_is_a_dataframe_and_a_dataframe_a_snapshot(spark: Any, tmp_path: Path) -> None:
    flow = cw.Dataflow("counting")
    rows = flow.read("in", cw.rate(None, rows=3_000)).with_columns("key", k=pl.col("value") % 100)
    rows.key_by("k").aggregate("counts", n=cw.count(), mean=cw.mean("value")).write("out", cw.discard())
    flow.run(spark, checkpoint=tmp_path / "chk", interval="1s")
    job = f"{tmp_path}/chk/counting"

    def read(path: str = job, **options: Any) -> Any:
        return spark.read.format("cutwater").options(state="counts", **options).load(path)

    frame = read()
    assert frame.columns == ["k", "n", "mean", "key_group", "subtask"]
    assert {(r.k, r.n, r["mean"]) for r in frame.collect()} == {(k, 30, k + 1450.0) for k in range(100)}
    one = frame.where("k = 7")
    assert [r.n for r in one.collect()] == [30]
    assert one.rdd.getNumPartitions() == 1
    assert read(checkpoint=cw.Snapshot(job).checkpoint_id).count() == 100
    with pytest.raises(Exception, match=r"There are: .*counts\.aggregates"):
        spark.read.format("cutwater").option("state", "nothing").load(job).schema  # noqa: B018

    changed = read(raw="true").where("k < 10").selectExpr("k", "n * 2 AS n", "`mean.sum`", "`mean.count`")
    target = str(tmp_path / "edited")
    changed.write.format("cutwater").options(base=job, state="counts").mode("append").save(target)
    assert {(r.k, r.n, r["mean"]) for r in read(target).collect()} == {(k, 60, k + 1450.0) for k in range(10)}
