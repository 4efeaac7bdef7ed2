"""From Kafka through windows to Kafka, with kills, a rescale and a new start; DuckDB is the oracle."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import duckdb
import polars as pl
import pytest
from fake_host import FakeSpark
from runtime_world import kill_some, wait_until
from servers.kafka import Broker

import cutwater as cw
from kafka_world import broker, produce, proxy, topic

__all__ = ["broker", "produce", "proxy", "topic"]
PAGES, PER_MINUTE = 20, 2_000


def events(first: int, count: int) -> list[dict[str, Any]]:
    """Unique ids, in event time a minute for so many, up to a second out of order."""
    rows: list[dict[str, Any]] = []
    for id in range(first, first + count):
        ms = 60_000 + id * 60_000 // PER_MINUTE - id * 7919 % 1000
        at = f"2026-01-01T{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}.{ms % 1000:03}"
        rows.append({"id": id, "at": at, "page": f"p{id * 7919 % PAGES}", "cents": id % 997})
    return rows


def flow_of(broker: Broker, source: str, out: str, raw: str) -> cw.Dataflow:
    flow = cw.Dataflow("kafka")
    topics = cw.kafka(broker.address, source, schema="id long, at timestamp_ntz, page string, cents long")
    rows = flow.read("events", topics, event_time="at", out_of_order="2s")
    rows.filter("odd", pl.col("id") % 2 == 1).write("raw", cw.kafka(broker.address, raw, key="id"))
    minutes = rows.key_by("page").window("minute", cw.tumbling("1m"))
    sums = minutes.aggregate("sums", n=cw.count(), ids=cw.sum("id"), cents=cw.sum("cents"))
    sums.write("out", cw.kafka(broker.address, out, key="page"))
    return flow


def seen(broker: Broker, topic: str) -> list[dict[str, Any]]:
    return [json.loads(message.value()) for message in broker.committed(topic)]


@pytest.mark.parametrize(
    ("recovery", "shapes"),
    [
        ("job", (2, 3, 1)),
        pytest.param("task", (1, 2, 3), marks=pytest.mark.full),
        pytest.param("region", (3, 1, 2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_each_row_counts_once(
    start: Any,
    fake_spark: FakeSpark,
    broker: Broker,
    topic: str,
    produce: Callable[..., None],
    recovery: str,
    shapes: tuple[int, int, int],
) -> None:
    """``shapes``: parallelisms at first, after the rescale, and when the job is started again."""
    first, then, last = shapes
    out, raw, count, sent = f"{topic}-out", f"{topic}-raw", 30_000, 0
    broker.create_topic(out, 2)
    broker.create_topic(raw, 3)

    def more(rows: int) -> None:
        nonlocal sent
        produce(topic, events(sent, rows))
        sent += rows

    def started(parallelism: int) -> Any:
        job = start(flow_of(broker, topic, out, raw), parallelism=parallelism, interval="200ms", recovery=recovery)
        wait_until(lambda: job.status.phase == "running", "the start", job=job)
        return job

    def check() -> None:
        doubled = [id for id, times in Counter(row["id"] for row in seen(broker, raw)).items() if times > 1]
        assert doubled == []

    more(count // 3)
    job = started(first)
    wait_until(lambda: len(seen(broker, raw)) > 100, "rows", job=job)
    kill_some(job, fake_spark, 1, seed=first)
    more(count // 6)
    job.rescale(then)
    more(count // 6)
    kill_some(job, fake_spark, 1, seed=then)
    wait_until(lambda: job.status.phase == "running", "the recovery", job=job)
    check()
    job.stop()
    more(count // 3)
    job = started(last)
    kill_some(job, fake_spark, 1, seed=last)
    end = {"id": -2, "at": "2026-01-09T00:00:00", "page": "end", "cents": 0}
    produce(topic, [end, end])  # closes all windows, in both partitions
    wait_until(lambda: len(seen(broker, raw)) >= count // 2, "all rows", job=job)
    wanted = pl.DataFrame(events(0, count))
    expected = duckdb.sql(
        "SELECT strftime(date_trunc('minute', \"at\"::TIMESTAMP), '%Y-%m-%d %H:%M:%S') AS w, page, count(*)::bigint, "
        "sum(id)::bigint, sum(cents)::bigint FROM wanted GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    assert len(wanted) == count
    wait_until(lambda: len(seen(broker, out)) >= len(expected), "all windows", job=job)
    job.stop()
    found = sorted((row["window_start"], row["page"], row["n"], row["ids"], row["cents"]) for row in seen(broker, out))
    assert found == expected
    assert sorted(row["id"] for row in seen(broker, raw)) == list(range(1, count, 2))
