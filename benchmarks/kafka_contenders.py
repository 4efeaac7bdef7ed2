"""What runs in the processes of ``kafka_to_kafka``: one contender each, until it is ended.

    python -m benchmarks.kafka_contenders cutwater|spark|limit SERVERS IN OUT FOLDER

The limit reads and parses with the readers of Cutwater, in two processes, and does nothing with the columns.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import sys
import time
from typing import Any, cast

import polars as pl

import cutwater as cw
from benchmarks import peers
from benchmarks.kafka_rows import OUT_OF_ORDER_MS, SCHEMA
from cutwater.spark.session import session

__all__ = ["main"]

PARALLELISM = 2
SPARK_ROWS = 400_000
"""Most rows of a micro-batch: with all in one there is no stream."""


def cutwater(servers: str, source: str, out: str, folder: str) -> None:
    """Exactly once, a checkpoint every second."""
    flow = cw.Dataflow("kafka-windows")
    topic = cw.kafka(servers, source, schema=SCHEMA)
    rows = flow.read("clicks", topic, event_time="ts", out_of_order=f"{OUT_OF_ORDER_MS}ms")
    bought = rows.filter("no-views", pl.col("kind") != "view")
    minutes = bought.key_by("page").window("minutes", cw.tumbling("1m"))
    sums = minutes.aggregate("sums", n=cw.count(), cents=cw.sum("cents"))
    told = sums.select("columns", "page", "n", "cents", w="window_start")
    told.write("out", cw.kafka(servers, out, key="page"))
    job = flow.start(session(PARALLELISM), checkpoint=folder, parallelism=PARALLELISM, interval="1s")
    job.await_termination()


def spark(servers: str, source: str, out: str, folder: str) -> None:
    """Structured Streaming, a micro-batch as soon as the last one ended; its sink is at least once."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as f

    jars = ",".join(map(str, sorted(peers.jars("spark-kafka").glob("*.jar"))))
    settings = {
        "spark.jars": jars,
        "spark.driver.memory": "3g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": folder,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(PARALLELISM),
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
        "spark.ui.enabled": "false",
    }
    builder: Any = SparkSession.builder.master(f"local[{PARALLELISM}]")  # type: ignore[reportUnknownMemberType]
    for name, value in settings.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("ERROR")
    read = made.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", source)
    read = read.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", SPARK_ROWS)
    read = read.option("kafka.isolation.level", "read_committed")
    schema = "ts timestamp, user bigint, page string, kind string, cents bigint"
    rows = read.load().select(f.from_json(f.col("value").cast("string"), schema).alias("row")).select("row.*")
    bought = rows.withWatermark("ts", f"{OUT_OF_ORDER_MS} milliseconds").where("kind <> 'view'")
    sums = bought.groupBy(f.window("ts", "1 minute"), "page").agg(
        f.count("*").alias("n"), f.sum("cents").alias("cents")
    )
    w = f.date_format("window.start", "yyyy-MM-dd HH:mm:ss").alias("w")
    told = sums.select(f.to_json(f.struct(w, "page", "n", "cents")).alias("value"))
    write = told.writeStream.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", out)
    write.option("checkpointLocation", f"{folder}/checkpoints").outputMode("append").start().awaitTermination()


def limit(servers: str, source: str, out: str, folder: str) -> None:
    """Says when it begins to read, and at the end how long that took and what processor time."""
    barrier, told = mp.Barrier(PARALLELISM), cast(Any, mp.Queue())
    parts = [mp.Process(target=_part, args=(n, servers, source, barrier, told)) for n in range(PARALLELISM)]
    for part in parts:
        part.start()
    found = [told.get(timeout=600) for _ in parts]
    for part in parts:
        part.join()
    rows, seconds, used = zip(*found, strict=True)
    print("RESULT", json.dumps({"rows": sum(rows), "seconds": max(seconds), "cpu_s": sum(used)}), flush=True)


def _part(number: int, servers: str, topic: str, barrier: Any, told: Any) -> None:
    from benchmarks.kafka_source import Context

    source = cw.kafka(servers, topic, schema=SCHEMA, until="latest").as_source()
    mine = source.discover()[number::PARALLELISM]
    context = Context()
    for again in (False, True):  # first a few rows: what is compiled does not count
        barrier.wait()
        began_s, used_s, rows = time.perf_counter(), time.process_time(), 0
        readers = [source.open(split, None, context) for split in mine]
        while readers and (again or rows < 100_000):
            waits = True
            for reader in list(readers):
                batch = reader.read(1 << 14)
                if batch is not None:
                    rows, waits = rows + batch.num_rows, False
                if reader.exhausted:
                    reader.close()
                    readers.remove(reader)
            if waits:
                time.sleep(0.001)
        for reader in readers:
            reader.close()
    told.put((rows, time.perf_counter() - began_s, time.process_time() - used_s))


def main() -> None:
    {"cutwater": cutwater, "spark": spark, "limit": limit}[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
