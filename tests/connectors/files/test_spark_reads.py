"""What Spark makes of a target, while the job still writes to it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from sink_identity import SCHEMA, Identity, numbers

from cutwater.connectors.files.sink import FileSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    settings = {"spark.ui.enabled": "false", "spark.sql.session.timeZone": "UTC", "spark.sql.shuffle.partitions": "1"}
    shared = SparkSession.getActiveSession()
    session = shared or SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()
    yield session
    if shared is None:
        session.stop()


def test_spark_sees_committed_rows_only(spark: SparkSession, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    sink = FileSink(out, roll_interval_ms=0)
    writer = sink.writer(SCHEMA, Identity(), [])
    committer = sink.committer(SCHEMA, "uid", "out")
    writer.write(numbers(1, 2))
    committer.commit(1, writer.pre_commit(1, False)().handles)
    writer.write(numbers(3))
    second = writer.pre_commit(2, False)()
    writer.write(numbers(4))
    assert sorted(row.n for row in spark.read.parquet(out).collect()) == [1, 2]
    committer.commit(2, second.handles)
    assert sorted(row.n for row in spark.read.parquet(out).collect()) == [1, 2, 3]


def test_spark_reads_every_type_back(spark: SparkSession, tmp_path: Path) -> None:
    moment = dt.datetime(1931, 7, 4, 12, 30, 1)
    local = moment.replace(tzinfo=dt.UTC).astimezone().replace(tzinfo=None)  # collect() gives local time
    values = {
        "zoned": (pa.array([moment], pa.timestamp("ms", tz="UTC")), local),
        "naive": (pa.array([moment], pa.timestamp("ns")), moment),
        "day": (pa.array([moment.date()], pa.date64()), moment.date()),
        "word": (pa.array(["ä"]).dictionary_encode(), "ä"),
        "view": (pa.array(["v"], pa.string_view()), "v"),
        "raw": (pa.array([b"ab"], pa.binary(2)), b"ab"),
        "half": (pa.array([0.5], pa.float16()), 0.5),
        "huge": (pa.array([2**64 - 1], pa.uint64()), Decimal(2**64 - 1)),
        "money": (pa.array([Decimal("1.50")], pa.decimal128(38, 2)), Decimal("1.50")),
        "many": (pa.array([[1, 2]], pa.list_(pa.int16(), 2)), [1, 2]),
        "map": (pa.array([[("k", 1)]], pa.map_(pa.large_string(), pa.int8())), {"k": 1}),
    }
    batch = pa.RecordBatch.from_pydict({name: array for name, (array, _) in values.items()})
    sink = FileSink(str(tmp_path / "out"))
    sink.check(batch.schema)
    writer = sink.writer(batch.schema, Identity(), [])
    writer.write(batch)
    sink.committer(batch.schema, "uid", "out").commit(1, writer.pre_commit(1, True)().handles)
    (row,) = spark.read.parquet(sink.path).collect()
    assert row.asDict() == {name: expected for name, (_, expected) in values.items()}
