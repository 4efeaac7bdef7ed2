"""Order of tests, second tries, a dataflow to begin with, and Spark: one session at a time in a process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from object_world import bucket, object_server, proxy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutwater.api.flow import Dataflow
    from cutwater.api.streams.stream import Stream

__all__ = ["bucket", "object_server", "proxy"]

SHORT_LIVED_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A Java process of a test ends before code that is compiled thoroughly has paid for its compilation."""

os.environ.setdefault("SPARK_SUBMIT_OPTS", SHORT_LIVED_JAVA)  # of every driver, also of one in a process of its own

REAL_PROCESSES = ("runtime/processes", "spark/processes", "docs")
"""Folders whose tests start workers; on a busy machine one of them may miss a moment that it wants to hit."""

SLOWEST_FIRST = ("spark/processes", "docs", "benchmarks", "runtime/processes", "sim")
"""Folders with tests of minutes: begun first, so that no process works alone at the end."""


SMALL_TABLES = ("operators", "state", "state_reader", "storage", "runtime")
"""Rooms whose tests, as far as they run in one process, have tables that stand for large ones."""


def _is_in(path: Path, folder: str) -> bool:
    return path.is_relative_to(Path(__file__).parent / folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test with real processes has a second try, which is reported (R) and is a matter to look into."""
    for item in items:
        if any(_is_in(item.path, folder) for folder in REAL_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    return next((n for n, folder in enumerate(SLOWEST_FIRST) if _is_in(item.path, folder)), len(SLOWEST_FIRST))


@pytest.fixture(autouse=True)
def small_tables_are_captured_like_large_ones(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have small tables, which are copied at once; what needs testing is the capture of large ones."""
    path = request.path
    if any(_is_in(path, room) for room in SMALL_TABLES) and not any(_is_in(path, f) for f in REAL_PROCESSES):
        from cutwater.state.table import keyed_table as capture

        monkeypatch.setattr(capture, "COPIED_AT_ONCE_BYTES", 0)


FLIGHTS = "scheduled timestamp_ntz, origin string, carrier string, delay long, distance double"


@pytest.fixture
def flow() -> Dataflow:
    """A dataflow that most tests of the API and of plans begin with."""
    import cutwater as cw

    return cw.Dataflow("delays")


@pytest.fixture
def flights(flow: Dataflow) -> Stream:
    """A stream of flights in it."""
    import cutwater as cw

    return flow.read("flights", cw.memory([], schema=FLIGHTS), event_time="scheduled", out_of_order="1h")


MakeSession = Callable[..., "SparkSession"]


@pytest.fixture(scope="module")
def make_session() -> Iterator[MakeSession]:
    """Makes Cutwater's own session for a master; a session that was there before is stopped."""
    made: list[SparkSession] = []

    def make(master: str | None = None, *, parallelism: int = 2, **conf: str) -> SparkSession:
        from cutwater.spark.session import session

        stop(made)
        names = {"spark.executor.extraJavaOptions": SHORT_LIVED_JAVA}
        names |= {key.replace("_", "."): value for key, value in conf.items()}
        made.append(session(parallelism, master=master, conf=names))
        return made[-1]

    yield make
    stop(made)


def stop(made: list[SparkSession]) -> None:
    while made:
        made.pop().stop()


@pytest.fixture(scope="module")
def spark(make_session: MakeSession) -> SparkSession:
    """The local session that ``flow.start()`` makes for itself."""
    return make_session()


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A standalone cluster on loopback, from the pip package: a master and two workers of two cores; its URL."""
    import pyspark

    from cutwater.spark.session import ensure_java

    ensure_java()
    port = _free_port()
    url = f"spark://127.0.0.1:{port}"
    launcher = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["SPARK_DAEMON_JAVA_OPTS"] = SHORT_LIVED_JAVA
    deploy = "org.apache.spark.deploy"
    commands = [[f"{deploy}.master.Master", "-h", "127.0.0.1", "-p", str(port), "--webui-port", "0"]]
    worker = [f"{deploy}.worker.Worker", "-h", "127.0.0.1", "-c", "2", "-m", "2g", "--webui-port", "0", url]
    commands += [worker, worker]
    processes: list[subprocess.Popen[bytes]] = []
    log = tmp_path_factory.mktemp("standalone") / "log"
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    [launcher, *command],
                    env=environment,
                    stdout=log.open("ab"),
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
            if len(processes) == 1:
                _wait_for_port(port, log)
        yield url
    finally:
        for process in reversed(processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int, log: Path, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                text = f"no Spark master on port {port} after {timeout_s:.0f} s:\n{log.read_text()}"
                raise AssertionError(text) from None
            time.sleep(0.1)
