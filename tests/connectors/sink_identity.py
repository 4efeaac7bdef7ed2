"""What the unit tests of sinks share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema({"n": pa.int64()})


@dataclass(frozen=True)
class Identity:
    subtask: int = 0
    parallelism: int = 1
    incarnation: int = 1
    job_uid: str = "uid"
    step: str = "out"


def numbers(*values: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": list(values)}, SCHEMA)


def parts(directory: Path) -> list[list[int]]:
    """The rows of each visible file, in name order."""
    names = sorted(name for name in os.listdir(directory) if not name.startswith(("_", ".")))
    return [pq.ParquetFile(directory / name).read()["n"].to_pylist() for name in names]
