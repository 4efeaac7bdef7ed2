"""Waiting for Spark jobs: one deadline for all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cutwater.runtime import spark_host
from cutwater.runtime.spark_host import SparkHost


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
