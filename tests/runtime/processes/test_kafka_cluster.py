"""Three brokers, of which one is killed in the middle of commits: each row once, and the job goes on."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from runtime_world import wait_until
from servers.kafka import Cluster

import cutwater as cw
from kafka_feed import Feed, Reader

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

SOURCE, OUT, RATE = "in", "out", 500


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        started.create_topic(SOURCE, 2)
        started.create_topic(OUT, 1)
        yield started


def test_rows_come_once_whichever_broker_is_killed_during_commits(start: Any, cluster: Cluster) -> None:
    """The leader of the output, then who decides over its transactions, then who keeps its commit records."""
    flow = cw.Dataflow("cluster")
    rows = flow.read("in", cw.kafka(cluster.address, SOURCE, schema="id long"))
    rows.write("out", cw.kafka(cluster.address, OUT))
    feed, reader = Feed(cluster.address, SOURCE, RATE), Reader(cluster.address, OUT)
    try:
        job = start(flow, interval="200ms")

        def more() -> None:
            before = reader.seen()
            wait_until(lambda: reader.seen() > before + RATE, "more rows", 120, job=job)

        more()
        admin = cluster.admin
        groups = admin.list_consumer_groups(request_timeout=30).result()
        assert not groups.errors
        name = min(group.group_id for group in groups.valid if group.group_id.startswith("cutwater-"))
        killed: dict[str, int] = {}
        for role, find in {
            "leader of the output": lambda: cluster.leader(OUT, 0),
            "transaction coordinator": lambda: cluster.coordinator("__transaction_state", name),
            "group coordinator": lambda: cluster.coordinator("__consumer_offsets", name),
        }.items():
            node = killed[role] = find()
            time.sleep(0.13 * len(killed))  # somewhere in an interval
            cluster.kill(node)
            more()
            cluster.start(node)
            more()
        count = feed.end()
        wait_until(lambda: reader.seen() >= count, "all rows", 120, job=job)
        print(f"killed {killed}; {count} rows; {job.status.restarts} restarts: {job.status.failures}")
        job.stop()
    finally:
        feed.stop()
        reader.close()
    times = Counter(json.loads(message.value())["id"] for message in cluster.committed(OUT))
    assert times == Counter(range(count))
    assert times == reader.times
