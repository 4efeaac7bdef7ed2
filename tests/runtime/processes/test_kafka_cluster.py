"""Three brokers, of which one is killed in the middle of commits: each row once, and the job goes on."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import confluent_kafka as client
import pytest
from runtime_world import wait_until
from servers.kafka import Cluster

import cutwater as cw

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

SOURCE, OUT, RATE = "in", "out", 500


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        started.create_topic(SOURCE, 2)
        started.create_topic(OUT, 1)
        yield started


class Feed:
    """Produces unique ids at a rate, acknowledged by two brokers at least, through whatever happens to them."""

    def __init__(self, cluster: Cluster) -> None:
        options = {"bootstrap.servers": cluster.address, "enable.idempotence": True, "log_level": 0}
        self._producer = client.Producer(options)
        self._ended = threading.Event()
        self.sent, self.lost = 0, list[Any]()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.lost.append(error)

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            for _ in range(RATE // 50):
                body = json.dumps({"id": self.sent})
                self._producer.produce(SOURCE, body, on_delivery=self._delivered)
                self.sent += 1
            self._producer.poll(0)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def end(self) -> int:
        """How many there are."""
        self.stop()
        assert self._producer.flush(120) == 0
        assert self.lost == [], "void: the input is not whole"
        return self.sent


class Reader:
    """Reads committed messages as they come."""

    def __init__(self, cluster: Cluster) -> None:
        options = {"bootstrap.servers": cluster.address, "group.id": "reader", "isolation.level": "read_committed"}
        self._consumer = client.Consumer({**options, "enable.auto.commit": False, "log_level": 0})
        self._consumer.assign([client.TopicPartition(OUT, 0, 0)])
        self.times: Counter[int] = Counter()

    def seen(self) -> int:
        """How many ids there are by now."""
        messages = self._consumer.consume(10_000, 0.1)
        self.times.update(json.loads(m.value())["id"] for m in messages if m.error() is None)
        return len(self.times)

    def close(self) -> None:
        self._consumer.close()


def test_rows_come_once_whichever_broker_is_killed_during_commits(start: Any, cluster: Cluster) -> None:
    """The leader of the output, then who decides over its transactions, then who keeps its commit records."""
    flow = cw.Dataflow("cluster")
    rows = flow.read("in", cw.kafka(cluster.address, SOURCE, schema="id long"))
    rows.write("out", cw.kafka(cluster.address, OUT))
    feed, reader = Feed(cluster), Reader(cluster)
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
