"""SIGKILL of workers and drivers with everything in a bucket: input, output, log, state, staged rows."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from fake_host import FakeHost, FakeSpark, adopt, context, server_address
from servers.object_store import ObjectServer

import cutwater as cw
from cutwater.api.jobs import job as job_module
from cutwater.storage.store.opening import open_store, store_at
from object_world import in_environment

KEYS, OBJECT_ROWS = 20, 500


def _flow(uri: str) -> cw.Dataflow:
    flow = cw.Dataflow("job")
    source = cw.files(
        f"{uri}/in", format="json", schema="value long", watch=True, end_marker="_DONE", discover_interval_ms="200ms"
    )
    rows = flow.read("in", source).with_columns("key", key=pl.col("value") % KEYS)
    counts = rows.key_by("key").aggregate("count", n=cw.count(), eid=cw.last("value"))
    counts.write("out", cw.files(f"{uri}/out", roll_rows=700, roll_interval_ms="500ms"))
    return flow


def drive(uri: str, folder: str, server: str, environment: Mapping[str, str], seed: int) -> None:
    """A driver in a process of its own, whose workers are killed at random moments; the log tells each kill."""
    adopt(server)
    os.environ.update(environment)
    job_module.SparkHost = FakeHost  # type: ignore[misc]
    spark, rng = FakeSpark(), random.Random(seed)
    spark.prepare = in_environment(environment)
    job = _flow(uri).start(
        spark,  # type: ignore[arg-type]
        checkpoint=f"{uri}/chk",
        interval="100ms",
        parallelism=2,
        inline_threshold_bytes=0,
        restart={"strategy": "fixed_delay", "attempts": 1_000, "delay_ms": 50},
    )

    def kill() -> None:
        while job.is_active:
            time.sleep(rng.uniform(0.3, 2.0))
            if job.status.phase == "running" and spark.pids and Path(folder, "storm").exists():
                os.kill(rng.choice(spark.pids), signal.SIGKILL)
                with open(Path(folder, "kills"), "a") as log:
                    log.write("worker\n")

    threading.Thread(target=kill, daemon=True).start()
    job.await_termination()
    Path(folder, "ended").write_text(job.status.outcome or "")


def _kills(folder: Path) -> int:
    log = folder / "kills"
    return len(log.read_text().splitlines()) if log.exists() else 0


def storm(uri: str, folder: Path, environment: Mapping[str, str], kills: int, objects: int) -> Counter[str]:
    """Kill until there were so many, then let the job come to its end; who was killed how often."""
    rng, input = random.Random(kills), open_store(f"{uri}/in")
    (folder / "storm").touch()
    written = drivers = 0

    def write() -> None:
        nonlocal written
        body = (json.dumps({"value": written * OBJECT_ROWS + row}) for row in range(OBJECT_ROWS))
        input.create(f"{written:06}", "\n".join([*body, ""]).encode())
        written += 1

    def start() -> Any:
        arguments = (uri, str(folder), server_address(), dict(environment), rng.randrange(1 << 30))
        process = context().Process(target=drive, args=arguments)
        process.start()
        return process

    write()
    process = start()
    while _kills(folder) + drivers < kills:
        known = _kills(folder)
        ends_s = time.monotonic() + rng.uniform(4.0, 10.0)
        while time.monotonic() < ends_s and _kills(folder) - known < 4:
            if written < objects:
                write()
            time.sleep(0.2)
            assert process.is_alive(), "the job failed"
        if _kills(folder) + drivers < kills:
            process.kill()
            process.join()
            drivers += 1
            process = start()
    (folder / "storm").unlink()
    while written < objects:
        write()
    input.create("_DONE", b"")
    process.join(120)
    assert (folder / "ended").read_text() == "finished"
    return Counter({"workers": _kills(folder), "drivers": drivers})


def assert_exact(uri: str, rows: int) -> None:
    """Each row of the input has its row in the output, once, with the count that it made."""
    out = store_at(f"{uri}/out")
    names = [name for name in out.names() if name.endswith(".parquet")]
    tables = [pq.read_table(io.BytesIO(bytes(out.read(name)))) for name in names]
    ids = Counter(eid for table in tables for eid in table["eid"].to_pylist())
    lost, doubled = set(range(rows)) - set(ids), [eid for eid, times in ids.items() if times > 1]
    assert (len(lost), len(doubled), len(ids)) == (0, 0, rows)
    counts: dict[int, list[int]] = defaultdict(list)
    for table in tables:
        for key, n in zip(table["key"].to_pylist(), table["n"].to_pylist(), strict=True):
            counts[key].append(n)
    assert all(sorted(of_key) == list(range(1, len(of_key) + 1)) for of_key in counts.values())
    assert out.list("_cutwater") == [], "staging is gone"


@pytest.mark.full
def test_some_kills(tmp_path: Path, bucket: str, object_server: ObjectServer) -> None:
    killed = storm(bucket, tmp_path, object_server.environment, kills=4, objects=30)
    assert killed["drivers"] >= 1
    assert_exact(bucket, 30 * OBJECT_ROWS)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_a_hundred_kills(tmp_path: Path, bucket: str, object_server: ObjectServer) -> None:
    killed = storm(bucket, tmp_path, object_server.environment, kills=100, objects=400)
    print(f"killed {killed}")
    assert_exact(bucket, 400 * OBJECT_ROWS)
