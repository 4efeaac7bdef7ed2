"""DataFrames as sources: staged once, read by the file reader, found again after a crash."""

from __future__ import annotations

import datetime as dt
import decimal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cutwater.connectors import spark_source
from cutwater.connectors.base import Source
from cutwater.connectors.files.source import FileSource
from cutwater.connectors.spark_source import DataFrameSource, StreamingDataFrameSource
from cutwater.errors import BuildError, DataError, StorageError
from cutwater.spark.session import ensure_java

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    ensure_java()
    builder = SparkSession.builder.master("local[2]").appName("sources").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", "3").config("spark.log.level", "OFF")
    session = builder.config("spark.sql.session.timeZone", "America/New_York").getOrCreate()
    yield session
    session.stop()


class Context:
    step, subtask = "read", 0

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        raise AssertionError(raw)


def read_all(source: Source) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    for split in source.discover():
        reader = source.open(split, None, Context())
        while not reader.exhausted:
            batch = reader.read(1000)
            if batch is not None:
                batches.append(batch)
        reader.close()
    return pa.Table.from_batches(batches, source.schema)


ROWS: list[dict[str, Any]] = [
    {
        "k": 1,
        "b": 7,
        "price": decimal.Decimal("12.50"),
        "day": dt.date(1905, 1, 2),
        "at": dt.datetime(1955, 5, 6, 7, 8, 9, 123456, dt.UTC),
        "local": dt.datetime(2021, 3, 28, 2, 30),
        "tags": ["x", None],
        "inner": {"t": dt.datetime(1960, 1, 1, tzinfo=dt.UTC), "n": 3},
        "counts": {"a": 1},
        "raw": b"\x00\xff",
        "text": "ñ",
    },
    {"k": 2},
]
COLUMNS = (
    "k bigint, b tinyint, price decimal(10,2), day date, at timestamp, local timestamp_ntz, tags array<string>, "
    "inner struct<t:timestamp,n:int>, counts map<string,int>, raw binary, text string"
)


def test_every_type_arrives_as_the_schema_says(spark: SparkSession, tmp_path: Path) -> None:
    source = DataFrameSource(spark.createDataFrame(ROWS, COLUMNS))
    staged = source.stage(str(tmp_path / "in" / "read"))
    assert staged.schema.equals(source.schema)
    assert staged.schema.field("at").type == pa.timestamp("us", "UTC")
    rows = sorted(read_all(staged).to_pylist(maps_as_pydicts="strict"), key=lambda r: r["k"])
    assert rows[0] == ROWS[0]
    assert {v for k, v in rows[1].items() if k != "k"} == {None}


def test_a_resumed_job_reads_what_was_staged_and_not_the_frame_again(spark: SparkSession, tmp_path: Path) -> None:
    directory = str(tmp_path / "in")
    first = read_all(DataFrameSource(spark.range(10).select("id", F.rand(1).alias("x"))).stage(directory))
    again = DataFrameSource(spark.range(99).select("id", F.rand(2).alias("x"))).stage(directory)
    assert read_all(cloudpickle.loads(cloudpickle.dumps(again))).equals(first)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    with pytest.raises(BuildError, match="rows staged with"):
        DataFrameSource(spark.range(3)).stage(directory)


def test_staged_files_that_are_damaged_are_named(spark: SparkSession, tmp_path: Path) -> None:
    source = DataFrameSource(spark.range(10))
    source.stage(str(tmp_path / "in"))
    victim = min((tmp_path / "in").glob("part-*"))
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(StorageError, match=victim.name):
        source.stage(str(tmp_path / "in"))
    victim.unlink()
    with pytest.raises(StorageError, match=victim.name):
        source.stage(str(tmp_path / "in"))


def test_a_crash_while_staging_leaves_nothing_that_counts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(spark_source.os, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            DataFrameSource(spark.range(5)).stage(str(tmp_path / "in"))
    assert not (tmp_path / "in").exists()
    (tmp_path / "in.staging-of-a-dead-driver").mkdir()
    assert read_all(DataFrameSource(spark.range(7)).stage(str(tmp_path / "in"))).num_rows == 7
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_order_by_gives_files_in_rising_order(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.range(1000).select((F.col("id") * 7919 % 1000).alias("t"))
    staged = DataFrameSource(frame, order_by="t", partitions=4).stage(str(tmp_path / "in"))
    assert len(staged.discover()) == 4
    assert read_all(staged).column("t").to_pylist() == list(range(1000))


def test_a_frame_that_fails_or_has_unreadable_columns_gives_a_clear_error(spark: SparkSession, tmp_path: Path) -> None:
    failing = spark.range(3).select(F.raise_error(F.lit("boom")).cast("long").alias("x"))
    with pytest.raises(DataError, match="could not compute"):
        DataFrameSource(failing).stage(str(tmp_path / "in"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BuildError, match="interval"):
        _ = DataFrameSource(spark.sql("select interval '1' day as d")).schema


def test_an_empty_frame_has_its_schema_and_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    staged = DataFrameSource(spark.createDataFrame([], "k long, v string")).stage(str(tmp_path / "in"))
    assert read_all(staged).num_rows == 0
    assert staged.schema.names == ["k", "v"]


def wait_until_ended(source: Source) -> None:
    deadline = time.monotonic() + 60
    while not source.bounded:
        assert time.monotonic() < deadline, "the stream did not end"
        source.discover()
        time.sleep(0.05)


def test_a_streaming_frame_ends_with_its_query_and_goes_on_after_a_crash(spark: SparkSession, tmp_path: Path) -> None:
    source_directory, directory = tmp_path / "land", tmp_path / "in"
    spark.range(0, 5).coalesce(1).write.parquet(str(source_directory))
    frame = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(str(source_directory))
    source = StreamingDataFrameSource(frame, trigger={"availableNow": True})
    assert not source.bounded
    staged = source.stage(str(directory))
    wait_until_ended(staged)
    staged.stop()
    assert sorted(read_all(staged).column("id").to_pylist()) == list(range(5))
    before = staged.discover()

    # The driver dies after the folder of the batch was made and before Spark noted that; more input comes.
    (directory / "_END").unlink()
    for commit in (directory / "_spark_checkpoint" / "commits").iterdir():
        commit.unlink()
    spark.range(5, 8).coalesce(1).write.mode("append").parquet(str(source_directory))
    again = source.stage(str(directory))
    wait_until_ended(again)
    again.stop()
    assert sorted(read_all(again).column("id").to_pylist()) == list(range(8))
    assert again.discover()[: len(before)] == before
    assert source.stage(str(directory)).bounded is False
    copy = cloudpickle.loads(cloudpickle.dumps(again))
    assert read_all(copy).num_rows == 8


def test_a_failed_streaming_query_fails_the_source(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(0, 5).write.parquet(str(tmp_path / "land"))
    frame = spark.readStream.schema("id long").parquet(str(tmp_path / "land"))
    frame = frame.select(F.raise_error(F.lit("boom")).cast("long").alias("id"))
    staged = StreamingDataFrameSource(frame, trigger={"availableNow": True}).stage(str(tmp_path / "in"))
    with pytest.raises(DataError, match="streaming query failed"):
        wait_until_ended(staged)
    staged.stop()


def test_a_stopped_stream_has_not_ended(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.readStream.format("rate").option("rowsPerSecond", 5).load()
    staged = StreamingDataFrameSource(frame).stage(str(tmp_path / "in"))
    staged.stop()
    staged.stop()
    staged.discover()
    assert not staged.bounded
    assert not (tmp_path / "in" / "_END").exists()


def test_times_are_what_spark_says_they_are_by_a_frame_and_by_its_files(spark: SparkSession, tmp_path: Path) -> None:
    """TIMESTAMP is an instant, TIMESTAMP_NTZ the wall clock; the session's zone is New York's; Spark is the oracle."""
    frame = spark.sql(
        "SELECT TIMESTAMP '2026-01-01 00:00:00.5' AS at, TIMESTAMP_NTZ '2026-01-01 00:00:00.5' AS wall, "
        "DATE '2026-01-01' AS day"
    )
    wanted = frame.selectExpr("unix_micros(at) AS at", "CAST(wall AS STRING) AS wall").collect()[0]
    types = {"at": pa.timestamp("us", "UTC"), "wall": pa.timestamp("us"), "day": pa.date32()}
    frame.write.parquet(str(tmp_path / "files"))  # instants as INT96, unless Spark is told otherwise
    for source in (DataFrameSource(frame).stage(str(tmp_path / "in")), FileSource(tmp_path / "files")):
        found = read_all(source)
        assert dict(zip(found.schema.names, found.schema.types, strict=True)) == types
        assert found.column("at").cast(pa.int64()).to_pylist() == [wanted["at"]]
        assert [str(t)[:21] for t in found.column("wall").to_pylist()] == [wanted["wall"]]
