"""Messages a second and core from a topic: to Arrow, and parsed to columns, by our readers and by the limit's parts.

    python -m benchmarks.kafka_source [--rows 4000000] [--rounds 3]

A broker of its own holds JSON of about 100 bytes in four partitions, and the same rows as Avro.  Processor time is that
of the whole reading process with all threads of the client library, so that the broker beside it does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.json as pa_json
from servers.kafka import Broker

from benchmarks.machine import facts
from cutwater.connectors.avro.formats import avro
from cutwater.connectors.files.part_formats import JsonParts
from cutwater.connectors.kafka.kafka import kafka
from cutwater.connectors.kafka.producer import Producer, messages_of
from cutwater.connectors.messages.encoders import LineEncoder, ValueEncoder

__all__ = ["main"]

TOPIC, AVRO_TOPIC, PARTITIONS = "clicks", "clicks-avro", 4
AVRO = avro(
    {
        "type": "record",
        "name": "Click",
        "fields": [
            {"name": "ts", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
            {"name": "user", "type": "long"},
            {"name": "page", "type": "string"},
            {"name": "kind", "type": "string"},
            {"name": "cents", "type": "long"},
        ],
    }
)
SCHEMA = "ts timestamp_ntz, user long, page string, kind string, cents long"
_READ_ROWS = 1 << 16
_BLOCK = 200_000


class Context:
    """Of a reader outside a job."""

    step, subtask = "read", 0

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        raise AssertionError(f"{origin} {position}: {reason}")


def fill(broker: Broker, rows: int, topic: str, encoder: ValueEncoder) -> None:
    """Events in the order of their times."""
    broker.create_topic(topic, PARTITIONS)
    cluster = kafka(broker.address, topic).cluster
    producer = Producer(cluster, topic, {"partitioner": "random", "linger_ms": 50, "batch_size": 1_000_000})
    rng = np.random.default_rng(1)
    for first in range(0, rows, _BLOCK):
        count = min(_BLOCK, rows - first)
        micros = (np.arange(count) + first) * 600
        frame = pl.DataFrame(
            {
                "ts": np.datetime64("2026-01-01T00:00:00") + micros.astype("timedelta64[us]"),
                "user": rng.integers(1_000_000, 10_000_000, count),
                "page": np.array([f"p{p:03}" for p in range(1_000)])[rng.integers(0, 1_000, count)],
                "kind": np.array(["view", "click", "buy"])[rng.choice(3, count, p=[0.5, 0.35, 0.15])],
                "cents": rng.integers(10_000, 100_000, count),
            }
        )
        if isinstance(encoder, LineEncoder):
            frame = frame.with_columns(pl.col("ts").dt.to_string("%Y-%m-%dT%H:%M:%S%.3f"))
        values = encoder.encode(frame.to_arrow().cast(_plain(frame.to_arrow().schema)))
        producer.send(messages_of(values, None, None))
        producer.flush()
    producer.close()


def _plain(schema: pa.Schema) -> pa.Schema:
    return pa.schema([(f.name, pa.string() if pa.types.is_large_string(f.type) else f.type) for f in schema])


def read_all(broker: Broker, handle: Callable[[pa.RecordBatch], object], **options: Any) -> tuple[int, float, float]:
    """Rows, seconds, and processor seconds of reading the whole topic in one thread."""
    source = kafka(broker.address, **{"topics": TOPIC, "until": "latest", **options}).as_source()
    splits = source.discover()
    began, used, rows = time.perf_counter(), time.process_time(), 0
    readers = [source.open(split, None, Context()) for split in splits]
    while readers:
        waits = True
        for reader in list(readers):
            batch = reader.read(_READ_ROWS)
            if batch is not None:
                rows, waits = rows + batch.num_rows, False
                handle(batch)
            if reader.exhausted:
                reader.close()
                readers.remove(reader)
        if waits:
            time.sleep(0.001)
    return rows, time.perf_counter() - began, time.process_time() - used


def by_pyarrow(batch: pa.RecordBatch) -> object:
    """The same columns by Arrow's own parser."""
    schema = pa.schema(
        {"ts": pa.timestamp("ms"), "user": pa.int64(), "page": pa.string(), "kind": pa.string(), "cents": pa.int64()}
    )
    lines = b"\n".join(batch.column(0).to_pylist())
    options = pa_json.ParseOptions(explicit_schema=schema)
    return pa_json.read_json(pa.BufferReader(lines), pa_json.ReadOptions(use_threads=False), options)


def by_duckdb() -> Callable[[pa.RecordBatch], object]:
    """The same columns by DuckDB with one thread."""
    import duckdb

    connection = duckdb.connect(config={"threads": 1})
    wanted = json.dumps({"ts": "TIMESTAMP", "user": "BIGINT", "page": "VARCHAR", "kind": "VARCHAR", "cents": "BIGINT"})

    def parse(batch: pa.RecordBatch) -> object:
        values = pa.table([batch.column(0)], names=["v"])
        connection.register("messages", values)
        return connection.sql(f"SELECT r.* FROM (SELECT from_json(v, '{wanted}') r FROM messages)").to_arrow_table()

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(facts())
    cases: dict[str, tuple[Callable[[pa.RecordBatch], object], dict[str, Any]]] = {
        "values to Arrow": (lambda batch: None, {"format": "bytes"}),
        "with key, time and offset": (
            lambda batch: None,
            {"format": "bytes", "metadata": ["key", "timestamp", "offset"]},
        ),
        "JSON to columns": (lambda batch: None, {"schema": SCHEMA}),
        "Avro to columns": (lambda batch: None, {"topics": AVRO_TOPIC, "format": AVRO}),
        "values, then DuckDB's parser": (by_duckdb(), {"format": "text"}),
        "values, then Arrow's parser": (by_pyarrow, {"format": "bytes"}),
    }
    with Broker(heap="1g") as broker:
        fill(broker, arguments.rows, TOPIC, LineEncoder(JsonParts()))
        fill(broker, arguments.rows, AVRO_TOPIC, AVRO.encoder(AVRO_TOPIC))
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for round in range(arguments.rounds + 1):
            for name, (handle, options) in cases.items():
                rows, seconds, used = read_all(broker, handle, **options)
                assert rows == arguments.rows, rows
                if round:  # the first compiles
                    found[name].append((rows / seconds / 1e6, rows / used / 1e6))
    print("\n| what | M messages/s | M messages/s and core |\n|---|---:|---:|")
    for name, runs in found.items():
        clock, core = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"| {name} | {clock:.2f} | {core:.2f} |")


if __name__ == "__main__":
    main()
