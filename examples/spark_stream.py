"""Any streaming DataFrame of Spark is a source: Spark stages its micro-batches, Cutwater reads them as a stream."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

import cutwater as cw
from cutwater.connectors.spark_source import StreamingDataFrameSource
from cutwater.spark.session import session


def build(spark: SparkSession) -> cw.Dataflow:
    folder = str(Path("out/spark/in").absolute())
    spark.range(3_000).selectExpr("id % 5 AS shop", "id AS cents").write.mode("overwrite").parquet(folder)
    orders = spark.readStream.schema("shop long, cents long").parquet(folder)

    flow = cw.Dataflow("orders")
    stream = flow.read("orders", StreamingDataFrameSource(orders, trigger={"availableNow": True}))
    stream.key_by("shop").aggregate("revenue", orders=cw.count(), cents=cw.sum("cents")).collect("so-far")
    return flow


if __name__ == "__main__":
    spark = session(2)
    job = build(spark).run(spark, interval="500ms")
    job.result("so-far").groupBy("shop").agg({"orders": "max", "cents": "max"}).orderBy("shop").show()
