"""Jobs whose workers are real processes, started without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeHost, FakeSpark, context

import cutwater as cw
from cutwater.api.jobs import job as job_module
from cutwater.api.jobs.job import Job


@pytest.fixture(autouse=True, scope="session")
def fork_server() -> None:
    """Loads the data path once, before any deadline runs."""
    process = context().Process(target=len, args=("",))
    process.start()
    process.join()


@pytest.fixture(autouse=True)
def fake_spark(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeSpark]:
    """A session with many cores; every job of the test runs on it, must leave nothing behind, and no worker crash."""
    monkeypatch.setattr(job_module, "SparkHost", FakeHost)
    spark = FakeSpark(crash_log=tmp_path_factory.mktemp("crash") / "stacks")
    yield spark
    left = spark.pids
    for host in spark.hosts:
        host.cancel_all()
    assert not left, f"the test left workers running: {left}"
    if spark.crashes and spark.crash_log is not None:
        raise AssertionError("\n".join([*spark.crashes, spark.crash_log.read_text()]))


StartJob = Callable[..., Job]


@pytest.fixture
def start(fake_spark: FakeSpark, tmp_path: Path) -> Iterator[StartJob]:
    """Starts a dataflow with settings that suit quick tests; what still runs at the end is shown and cancelled."""
    jobs: list[Job] = []

    def start(flow: cw.Dataflow, **settings: Any) -> Job:
        settings = {"checkpoint": tmp_path / "chk", "interval": "50ms", "parallelism": 2, **settings}
        job = flow.start(fake_spark, **settings)  # type: ignore[arg-type]
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        if job.is_active:
            print(job.status)  # in the report of a test that waited in vain
            job.cancel()
