"""How many requests a checkpoint in a bucket costs, counted by a proxy, and a job behind a network that fails."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
from fake_host import FakeSpark
from runtime_world import assert_running_counts, counting, gated, kill_some, open_gate, wait_until
from servers.object_store import ObjectServer

import cutwater as cw
from cutwater.storage.store.opening import store_at
from object_proxy import Answer, Proxy, Request, answer_lost, request_lost, slow, told
from object_world import in_environment

ROWS = 12_000


def _through(proxy: Proxy, server: ObjectServer, fake_spark: FakeSpark) -> None:
    fake_spark.prepare = in_environment({**server.environment, "AWS_ENDPOINT_URL": f"http://{proxy.address}"})


def _into_the_bucket(folder: Path, out: str) -> cw.Dataflow:
    flow = cw.Dataflow("job")
    rows = flow.read("in", gated(folder, ROWS)).with_columns("key", key=pl.col("value") % 97)
    counts = rows.key_by("key").aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    counts.write("out", cw.files(out, roll_rows=1_000, roll_interval_ms="1s"))
    return flow


def test_a_checkpoint_costs_few_requests(
    start: Any, fake_spark: FakeSpark, tmp_path: Path, bucket: str, proxy: Proxy, object_server: ObjectServer
) -> None:
    _through(proxy, object_server, fake_spark)
    flow = counting("job", gated(tmp_path, ROWS), tmp_path / "out")
    job = start(flow, checkpoint=bucket, interval="200ms", inline_threshold_bytes=0)
    wait_until(lambda: job.status.checkpoints.completed >= 2, "checkpoints", job=job)
    before, begun = job.status.checkpoints.completed, len(proxy.requests)
    wait_until(lambda: job.status.checkpoints.completed >= before + 8, "more", job=job)
    made, requests = job.status.checkpoints.completed - before, proxy.requests[begun:]
    open_gate(tmp_path)
    assert job.await_termination(60)
    of_checkpoints = [r for r in requests if "/control/" not in r.key and "control" not in r.target]
    kinds = collections.Counter((r.kind, re.sub(r"\d+", "N", r.key.rpartition("job/")[2])) for r in of_checkpoints)
    assert sum(kinds.values()) <= 4 * (made + 1), kinds
    assert not [r for r in of_checkpoints if r.kind == "list"], "of what is there, the loop knows"
    assert_running_counts(tmp_path / "out", ROWS, keys=97)


def test_a_job_behind_a_network_that_fails_loses_and_doubles_nothing(
    start: Any, fake_spark: FakeSpark, tmp_path: Path, bucket: str, proxy: Proxy, object_server: ObjectServer
) -> None:
    """Every seventh request meets with something; answers of the log's own writes get lost, too."""
    _through(proxy, object_server, fake_spark)
    deeds = [told(503, "SlowDown"), answer_lost, request_lost, slow(0.3), told(500, "InternalError")]
    met = collections.Counter[str]()

    def sometimes(request: Request, forward: Callable[[Request], Answer]) -> Answer | None:
        met["all"] += 1
        if met["all"] % 7:
            return forward(request)
        met["faults"] += 1
        return deeds[met["faults"] % len(deeds)](request, forward)

    job = start(
        _into_the_bucket(tmp_path, f"{bucket}/out"),
        checkpoint=f"{bucket}/chk",
        interval="300ms",
        inline_threshold_bytes=0,
    )
    proxy.add("", sometimes)
    wait_until(lambda: job.status.checkpoints.completed >= 4, "checkpoints", job=job)
    kill_some(job, fake_spark, 1, seed=1)
    open_gate(tmp_path)
    assert job.await_termination(120)
    assert met["faults"] >= 10
    proxy.faults.clear()
    found = store_at(f"{bucket}/out")
    for name in found.names():
        if name.endswith(".parquet"):
            (tmp_path / "got").mkdir(exist_ok=True)
            (tmp_path / "got" / name).write_bytes(found.read(name))
    assert_running_counts(tmp_path / "got", ROWS, keys=97)
