"""Waiting for Spark jobs: one deadline for all of them.  Which masters keep everything on this machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cutwater.runtime import spark_host
from cutwater.runtime.spark_host import SparkHost, is_local
from reversal import Reversal


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
    context: Any = SimpleNamespace()
    host = SparkHost(context, "job", lambda slot, error: None)
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
    context: Any = SimpleNamespace(master=master, getConf=lambda: {"spark.driver.host": "10.1.2.3"})
    session: Any = SimpleNamespace(sparkContext=context)
    assert SparkHost(context, "job", lambda slot, error: None).address == address
    assert spark_host.master_of(session) == master


def test_a_start_without_a_session_and_one_with_connect_are_not_asked_for_a_master() -> None:
    class Connect:
        @property
        def sparkContext(self) -> None:
            raise RuntimeError("not here")

    assert spark_host.master_of(Connect()) == "local"
    assert spark_host.master_of(object()) == "local"


def test_without_an_address_of_its_own_a_driver_is_found_on_loopback_and_nowhere_else() -> None:
    context: Any = SimpleNamespace(master="yarn", getConf=dict)
    assert SparkHost(context, "job", lambda slot, error: None).address == "127.0.0.1"
    assert SparkHost(None, "job", lambda slot, error: None).address == "127.0.0.1"


LOCAL = 'master == "local" or master.startswith(("local[", "local-cluster["))'
REVERSALS = {
    "a name of this machine": (
        Reversal(is_local, LOCAL, f'{LOCAL} or "localhost" in master', test_only_a_local_master_means_loopback),
        ("spark://localhost:7077", "10.1.2.3"),
    ),
    "an address of this machine": (
        Reversal(is_local, LOCAL, f'{LOCAL} or "127.0.0.1" in master', test_only_a_local_master_means_loopback),
        ("k8s://https://127.0.0.1:6443", "10.1.2.3"),
    ),
    "no master is local": (
        Reversal(is_local, LOCAL, "False", test_only_a_local_master_means_loopback),
        ("local[*]", "127.0.0.1"),
    ),
    "the address is the session's also where it is local": (
        Reversal(
            SparkHost.address.fget,  # type: ignore[attr-defined]
            " or is_local(str(self._context.master))",
            "",
            test_only_a_local_master_means_loopback,
        ),
        ("local[*]", "127.0.0.1"),
    ),
}


@pytest.mark.parametrize("bug", REVERSALS)
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    reversal, (master, address) = REVERSALS[bug]
    reversal._replace(test=lambda: reversal.test(master, address)).is_seen(monkeypatch)
