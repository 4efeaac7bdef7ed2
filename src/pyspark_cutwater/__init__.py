"""The data source that Spark finds by itself: it looks into packages whose names begin with ``pyspark_``."""

from __future__ import annotations

from cutwater.spark.snapshot_source import SnapshotSource as DefaultSource

__all__ = ["DefaultSource"]
