"""Rows that users' readers yield, as columns, and columns as the Rows that their writers get: as Spark has them."""

from __future__ import annotations

import datetime as dt
import decimal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import Row, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

import cutwater as cw
from cutwater.connectors.data_source import spark_api
from cutwater.connectors.data_source.partitions import RowDigest
from cutwater.errors import BuildError, DataError
from cutwater.spark.session import session

ALL = (
    "b boolean, i byte, s short, n int, l long, f float, d double, t string, x binary, day date, at timestamp, "
    "local timestamp_ntz, price decimal(10,2), tags array<string>, props map<string,int>, "
    "who struct<name:string,age:int>"
)
ZONE = dt.timezone(dt.timedelta(hours=5))
ROWS: list[tuple[Any, ...]] = [
    (
        True,
        1,
        2,
        3,
        4,
        0.5,
        0.25,
        "a",
        b"\x00",
        dt.date(2026, 1, 1),
        dt.datetime(2026, 7, 1, 12, 0, 0, 5),  # of the machine's zone
        dt.datetime(2026, 7, 1, 12),
        decimal.Decimal("1.5"),
        ["x", None],
        {"a": 1, "b": None},
        Row(name="Ada", age=36),
    ),
    (*[None] * 10, dt.datetime(2026, 7, 1, 12, tzinfo=ZONE), *[None] * 5),
    (False, -1, -2, -3, -4, float("inf"), -0.0, 17, bytearray(b"y"), *[None] * 4, [], {}, ("Bob", None)),
]


class Everything(DataSource):
    def schema(self) -> str:
        return ALL

    def reader(self, schema: Any) -> DataSourceReader:
        return EverythingReader()


class EverythingReader(DataSourceReader):
    def read(self, partition: InputPartition) -> Iterator[Any]:
        yield from ROWS


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    found = session(2)
    found.conf.set("spark.sql.session.timeZone", "UTC")
    yield found
    found.stop()


def read_all(source: Any) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    for split in source.discover():
        reader = source.open(split, None, None)
        while not reader.exhausted:
            batch = reader.read(1000)
            batches += [batch] if batch is not None else []
    return pa.Table.from_batches(batches, source.schema)


def columns(rows: list[Any], schema: str = ALL) -> pa.RecordBatch:
    return spark_api.RowsToColumns(spark_api.struct_type(schema)).batch(list(rows))


@pytest.fixture
def shipped() -> Iterator[None]:
    """Spark's processes do not know this module: they get its classes whole."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.spark
def test_spark_makes_the_same_of_the_same_rows(spark: SparkSession, shipped: None, tmp_path: Path) -> None:
    spark.dataSource.register(Everything)
    theirs = spark.read.format("Everything").load().toArrow()
    ours = read_all(cw.data_source(Everything).as_source().stage(str(tmp_path / "in")))
    assert theirs.schema.names == ours.schema.names
    assert [f.type for f in theirs.schema] == [f.type for f in ours.schema]
    assert sorted(map(str, theirs.to_pylist())) == sorted(map(str, ours.to_pylist()))


def test_there_and_back() -> None:
    struct = spark_api.struct_type(ALL)
    back = list(spark_api.ColumnsToRows(struct).rows(columns(ROWS)))
    assert back[0]["who"] == Row(name="Ada", age=36)
    assert back[0]["props"] == {"a": 1, "b": None}
    assert back[0]["at"] == ROWS[0][10]  # of the machine's zone again
    assert back[0]["local"] == ROWS[0][11]
    assert back[2]["t"] == "17"
    assert columns(back) == columns(ROWS)


def test_rows_with_names_are_put_into_order() -> None:
    rows = [Row(text="a", id=1), Row(id=2, text="b"), (3, "c"), [4, "d"], Row(5, "e")]
    assert columns(rows, "id long, text string")["text"].to_pylist() == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("rows", "schema", "says"),
    [
        ([{"id": 1}], "id long", "a dict is no row"),
        ([7], "id long", "a int is no row"),
        ([(1, 2)], "id long", "a row has 2 values, the schema has 1 columns"),
        ([(1,), ("x",)], "id long", r"column 'id' is int64 and cannot hold 'x'"),
        ([(2.5,)], "id long", r"column 'id' is int64 and cannot hold 2.5"),
        ([(2**40,)], "id int", r"column 'id' is int32 and cannot hold 1099511627776"),
        ([(1,), (None,)], "id long not null", "column 'id' is not null, and a row has no value"),
        ([Row(ID=1)], "id long", r"a Row has the fields \['ID'\]"),
        ([(5,)], "at timestamp", r"column 'at' is timestamp\[us, tz=UTC\] and cannot hold 5"),
    ],
)
def test_what_is_no_row_is_named(rows: list[Any], schema: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        columns(rows, schema)


def test_batches_have_the_schemas_columns() -> None:
    to_columns = spark_api.RowsToColumns(spark_api.struct_type("id long, text string"))
    batch = pa.record_batch({"text": pa.array(["a"], pa.large_string()), "id": pa.array([1], pa.int32())})
    assert to_columns.conforming(batch).to_pylist() == [{"id": 1, "text": "a"}]
    for wrong, says in (
        (pa.record_batch({"id": [1]}), r"a batch has the columns \['id'\]"),
        (pa.record_batch({"id": ["a"], "text": ["a"]}), "column 'id' is string, not int64"),
    ):
        with pytest.raises(DataError, match=says):
            to_columns.conforming(wrong)


def slices(rows: Iterator[Any], took_s: float) -> list[int]:
    """Sizes of the slices that are made of rows, if each slice takes so long."""
    now = [0.0]

    def clock() -> float:
        now[0] += took_s
        return now[0]

    to_columns = spark_api.RowsToColumns(spark_api.struct_type("id long"))
    return [b.num_rows for b in spark_api.batches(rows, to_columns, most=100, long_s=1.0, clock=clock)]


def test_few_rows_of_a_slow_reader_are_handed_on_and_many_of_a_quick_one() -> None:
    rows = [(n,) for n in range(300)]
    assert slices(iter(rows), 0.1) == [16, 32, 64, 100, 88]
    assert slices(iter(rows[:20]), 5.0) == [16, 4]
    assert slices(iter(rows[:40]), 5.0) == [16, 8, 4, 2, *[1] * 10]
    assert slices(iter(()), 0.1) == []


def test_a_batch_behind_rows_and_rows_behind_a_batch_are_refused() -> None:
    batch = pa.record_batch({"id": [1]})
    for mixed in ([batch, (2,)], [(2,), batch]):
        with pytest.raises(DataError):
            slices(iter(mixed), 0.1)


def test_the_hash_of_rows_goes_by_their_values_alone() -> None:
    whole = pa.concat_batches([columns(ROWS)] * 900)
    digests = set[str]()
    for size in (1, 7, 1024, 5000):
        digest = RowDigest()
        for at in range(0, whole.num_rows, size):
            digest.update(whole.slice(at, size))
        digests.add(digest.hexdigest())
    assert len(digests) == 1
    other = RowDigest()
    other.update(whole.slice(1))
    other.update(whole.slice(0, 1))
    assert other.hexdigest() not in digests


def test_schemas() -> None:
    struct = spark_api.struct_type(ALL)
    assert spark_api.struct_type(struct) is struct
    assert spark_api.arrow_schema(struct).field("at").type == pa.timestamp("us", "UTC")
    for wrong in ("id lnog", 7, pa.schema({"a": pa.month_day_nano_interval()})):
        with pytest.raises(BuildError):
            spark_api.struct_type(wrong)
