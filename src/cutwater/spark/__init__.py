"""What Spark users touch: sessions, and snapshots as DataFrames."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Teach a session ``spark.read.format("cutwater")`` and ``df.write.format("cutwater")``.

    Sessions find them by themselves where Cutwater is installed (``pyspark_cutwater``).  The setting
    ``spark.sql.python.filterPushdown.enabled`` is switched on.
    """
    from cutwater.spark.snapshot_source import SnapshotSource

    spark.dataSource.register(SnapshotSource)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
