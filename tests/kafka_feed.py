"""Unique ids into a topic at a rate, and what comes out of another one, through whatever happens to brokers."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

import confluent_kafka as client


class Feed:
    """Produces ``{"id": 0}``, ``{"id": 1}`` and so on, in a thread, each of them once.

    Args:
        servers, topic: where to.
        rate: rows a second.
    """

    def __init__(self, servers: str, topic: str, rate: int) -> None:
        self._topic, self._each = topic, rate // 50
        self._producer = client.Producer({"bootstrap.servers": servers, "enable.idempotence": True, "log_level": 0})
        self._ended = threading.Event()
        self.sent, self.lost = 0, list[Any]()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.lost.append(error)

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            for _ in range(self._each):
                self._producer.produce(self._topic, json.dumps({"id": self.sent}), on_delivery=self._delivered)
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
    """Reads committed messages as they come, of all partitions of a topic.

    Args:
        column: of unique numbers.
    """

    def __init__(self, servers: str, topic: str, column: str = "id", partitions: int = 1) -> None:
        options = {"bootstrap.servers": servers, "group.id": "reader", "isolation.level": "read_committed"}
        self._consumer = client.Consumer({**options, "enable.auto.commit": False, "log_level": 0})
        self._consumer.assign([client.TopicPartition(topic, partition, 0) for partition in range(partitions)])
        self._column = column
        self.times: Counter[int] = Counter()
        """By number, how often it came."""

    def seen(self) -> int:
        """How many numbers there are by now."""
        messages = self._consumer.consume(10_000, 0.1)
        self.times.update(json.loads(m.value())[self._column] for m in messages if m.error() is None)
        return len(self.times)

    def close(self) -> None:
        self._consumer.close()
