"""One broker for the tests of a process, and a topic for each test."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import confluent_kafka as client
import pytest
from servers.kafka import Broker

from cutwater.connectors.kafka.kafka import Kafka, kafka
from kafka_proxy import Proxy

_numbers = itertools.count()
_between: dict[str, Proxy] = {}
"""By addresses of brokers."""


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    with Proxy() as between, Broker(proxied=between.port) as started:
        between.target = started.behind
        _between[started.address] = between
        yield started


@pytest.fixture
def proxy(broker: Broker) -> Proxy:
    """Between the broker and those that take its address ``proxied``."""
    return _between[broker.address]


@pytest.fixture
def topic(broker: Broker) -> str:
    """A fresh topic of two partitions."""
    name = f"topic-{next(_numbers)}"
    broker.create_topic(name, 2)
    return name


@pytest.fixture
def produce(broker: Broker) -> Callable[..., None]:
    """``produce(topic, values)``: objects as JSON, other values as they are; row n goes to partition n % 2."""

    def produce(topic: str, values: Iterable[Any], **more: Any) -> None:
        def delivered(error: Any, message: Any) -> None:
            assert error is None, error

        producer = client.Producer({"bootstrap.servers": broker.address})
        for number, value in enumerate(values):
            body = json.dumps(value) if isinstance(value, dict) else value
            producer.produce(topic, body, on_delivery=delivered, **{"partition": number % 2, **more})
            producer.poll(0)
        assert producer.flush(30) == 0

    return produce


@pytest.fixture
def read(broker: Broker) -> Callable[..., Kafka]:
    """``read(topic, schema=...)`` on the broker."""
    return lambda topics=(), **options: kafka(broker.address, topics, **options)
