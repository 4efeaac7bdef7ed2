"""Waiting for Spark jobs: one deadline for all of them.  Which masters keep everything on this machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cutwater.runtime.hosts import spark as spark_host
from cutwater.runtime.hosts.spark import SparkHost


class Stuck:
    """A thread whose Spark job never ends; waiting for it makes the clock go on."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    def join(self, timeout_s: float) -> None:
        self._clock[0] += timeout_s

    def is_alive(self) -> bool:
        return True


def test_join_waits_no_longer_for_many_workers_than_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(spark_host, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    session: Any = SimpleNamespace(sparkContext=None)
    host = SparkHost(session, "job", lambda slot, error: None)
    host._threads = [Stuck(clock) for _ in range(8)]  # type: ignore[misc]
    assert not host.join(5.0)
    assert clock[0] == 105.0


@pytest.mark.parametrize(
    ("master", "address"),
    [
        ("local", "127.0.0.1"),
        ("local[*]", "127.0.0.1"),
        ("local[4,10000]", "127.0.0.1"),
        ("local-cluster[2,1,1024]", "127.0.0.1"),
        ("spark://localhost:7077", "10.1.2.3"),
        ("spark://127.0.0.1:7077", "10.1.2.3"),
        ("k8s://https://127.0.0.1:6443", "10.1.2.3"),
        ("yarn", "10.1.2.3"),
    ],
)
def test_only_a_local_master_means_loopback(master: str, address: str) -> None:
    """A tunnel or a proxy on this machine says nothing about where executors run."""
    context = SimpleNamespace(master=master, getConf=lambda: {"spark.driver.host": "10.1.2.3"})
    session: Any = SimpleNamespace(sparkContext=context)
    assert SparkHost(session, "job", lambda slot, error: None).address == address
    assert spark_host.master_of(session) == master


def test_a_start_without_a_session_and_one_with_connect_are_not_asked_for_a_master() -> None:
    class Connect:
        @property
        def sparkContext(self) -> None:
            raise RuntimeError("not here")

    assert spark_host.master_of(Connect()) == "local"
    assert spark_host.master_of(object()) == "local"
