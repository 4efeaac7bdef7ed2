"""The end of a transaction is lost on its way, and the worker dies: the rows come once, whatever the broker made of it.

A reader of uncommitted messages tells what happened: rows of an aborted transaction are there for it as well.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from fake_host import FakeSpark
from runtime_world import wait_until
from servers.kafka import Broker

import cutwater as cw
from kafka_proxy import Loss, Proxy
from kafka_world import broker, produce, proxy, topic

__all__ = ["broker", "produce", "proxy", "topic"]
ROWS = 3_000


def flow_of(broker: Broker, source: str, out: str) -> cw.Dataflow:
    flow = cw.Dataflow("lost")
    rows = flow.read("in", cw.kafka(broker.address, source, schema="id long"))
    rows.write("out", cw.kafka(broker.proxied, out, key="id"))
    return flow


def seen(broker: Broker, topic: str, isolation: str = "read_committed") -> Counter[int]:
    return Counter(json.loads(message.value())["id"] for message in broker.committed(topic, isolation=isolation))


@pytest.mark.full
@pytest.mark.parametrize("loss", ["request", "answer"])
def test_killed_in_a_commit_whose_end_is_lost(
    start: Any,
    fake_spark: FakeSpark,
    broker: Broker,
    proxy: Proxy,
    topic: str,
    produce: Callable[..., None],
    loss: Loss,
) -> None:
    out = f"{topic}-out"
    broker.create_topic(out, 2)
    produce(topic, [{"id": id} for id in range(ROWS)])
    job = start(flow_of(broker, topic, out), parallelism=1, interval="200ms")
    wait_until(lambda: len(seen(broker, out)) == ROWS, "the first rows", job=job)
    proxy.lose(loss)
    produce(topic, [{"id": id} for id in range(ROWS, 2 * ROWS)])
    assert proxy.lost.wait(30), "void: nothing was lost"
    committed = seen(broker, out)
    in_doubt = set(seen(broker, out, "read_uncommitted")) - set(range(ROWS))
    assert in_doubt, "void: no row was in that transaction"
    assert in_doubt & set(committed) == (set() if loss == "request" else in_doubt)
    (worker,) = job.status.workers
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: job.status.restarts, "the restart", job=job)
    wait_until(lambda: len(seen(broker, out)) == 2 * ROWS, "all rows", job=job)
    job.stop()
    assert seen(broker, out) == Counter(range(2 * ROWS))
    twice = {id for id, times in seen(broker, out, "read_uncommitted").items() if times > 1}
    assert twice == (in_doubt if loss == "request" else set()), (
        "rows of the transaction that was aborted, and of no other"
    )


def test_a_connection_that_ends_in_place_of_an_answer_needs_no_restart(
    start: Any, broker: Broker, proxy: Proxy, topic: str, produce: Callable[..., None]
) -> None:
    """The client asks again, and the broker says what it did."""
    out = f"{topic}-out"
    broker.create_topic(out, 2)
    produce(topic, [{"id": id} for id in range(ROWS)])
    job = start(flow_of(broker, topic, out), parallelism=1, interval="200ms")
    wait_until(lambda: len(seen(broker, out)) == ROWS, "the first rows", job=job)
    proxy.lose("connection")
    produce(topic, [{"id": id} for id in range(ROWS, 2 * ROWS)])
    assert proxy.lost.wait(30), "void: nothing was lost"
    wait_until(lambda: len(seen(broker, out)) == 2 * ROWS, "all rows", job=job)
    produce(topic, [{"id": id} for id in range(2 * ROWS, 3 * ROWS)])
    wait_until(lambda: len(seen(broker, out)) == 3 * ROWS, "rows of later transactions", job=job)
    job.stop()
    assert seen(broker, out) == Counter(range(3 * ROWS))
    assert job.status.restarts == 0
