"""Change events of a table through a topic into aggregates that follow it, with kills; DuckDB is the oracle."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import confluent_kafka
import duckdb
import polars as pl
import pyarrow as pa
import pytest
from fake_host import FakeSpark
from runtime_world import kill_some, wait_until
from servers.kafka import Broker

import cutwater as cw
import debezium_world as world
from kafka_world import broker, topic

__all__ = ["broker", "topic"]


def produce(broker: Broker, topic: str, messages: list[tuple[str, bytes | None]]) -> None:
    """By the key, as Kafka Connect does: events of a row stay in order."""
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.address})
    for key, value in messages:
        producer.produce(topic, value, key=key)
        producer.poll(0)
    assert producer.flush(30) == 0


def flow_of(broker: Broker, topic: str, out: str, key: str | tuple[str, ...]) -> cw.Dataflow:
    flow = cw.Dataflow("orders")
    format = cw.debezium(world.SCHEMA, key=key)
    orders = flow.read("orders", cw.kafka(broker.address, topic, format=format))
    assert orders.type.changes is not None
    orders.write("table", cw.kafka(broker.address, f"{out}-table", key="id", mode="upsert")) if key else None
    added = pl.col("op").is_in(["+I", "+U"])
    weight = pl.when(added).then(1).otherwise(-1)
    signed = orders.with_columns(
        "signed", n=weight.cast(pl.Int64), cents=(pl.col("price") * 100).cast(pl.Int64) * weight
    ).select("kept", "city", "n", "cents")
    sums = signed.key_by("city", nulls="key").aggregate("sums", n=cw.sum("n"), cents=cw.sum("cents"))
    sums.write("out", cw.kafka(broker.address, out, key="city", mode="upsert"))
    return flow


def newest(broker: Broker, topic: str) -> dict[bytes | None, Any]:
    """The compacted topic."""

    found: dict[bytes | None, Any] = {}
    for message in broker.committed(topic):
        if message.value() is None:
            found.pop(message.key(), None)
        else:
            found[message.key()] = json.loads(message.value())
    return found


@pytest.mark.parametrize(
    ("identity", "form", "key"),
    [
        ("default", "enveloped", "id"),
        pytest.param("full", "enveloped", (), marks=pytest.mark.full),
        pytest.param("full", "enveloped", "id", marks=pytest.mark.full),
    ],
)
def test_aggregates_follow_the_table(
    start: Any,
    fake_spark: FakeSpark,
    broker: Broker,
    topic: str,
    identity: Literal["full", "default"],
    form: world.Form,
    key: str | tuple[str, ...],
) -> None:
    out = f"{topic}-out"
    for name in (out, f"{out}-table"):
        broker.create_topic(name, 2)
    orders = world.Orders(7, identity, form)
    sent = list(orders.events(1_500))
    produce(broker, topic, sent)
    job = start(flow_of(broker, topic, out, key), parallelism=2, interval="200ms")
    wait_until(lambda: len(broker.committed(out)) > 0, "rows", 120, job=job)
    kill_some(job, fake_spark, 1, seed=1)
    if key:  # the connector came back to where it was: its last events come again
        produce(broker, topic, sent[-500:])
    more = list(orders.events(1_500))
    produce(broker, topic, more)
    wait_until(lambda: job.status.phase == "running", "the recovery", 120, job=job)
    kill_some(job, fake_spark, 1, seed=2)
    wanted = pa.Table.from_pylist(orders.table())
    expected = duckdb.sql("SELECT city, count(*)::bigint, sum(cents)::bigint FROM wanted GROUP BY ALL").fetchall()

    def is_right() -> bool:
        time.sleep(0.3)  # to read a whole topic is work
        found = [(row["city"], row["n"], row["cents"]) for row in newest(broker, out).values() if row["n"]]
        return sorted(found, key=str) == sorted(expected, key=str)

    wait_until(is_right, "the sums of the table", 120, job=job)
    if key:
        wait_until(lambda: len(newest(broker, f"{out}-table")) == len(wanted), "the table", 120, job=job)
        found = {row["id"]: row["city"] for row in newest(broker, f"{out}-table").values()}
        assert found == {row["id"]: row["city"] for row in orders.table()}
    job.stop()
