from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest

from cutwater.connectors.files.schemas import cast_batch, parquet_schema, plain_schema
from cutwater.errors import BuildError, DataError

PARQUET_FORMS = [
    (pa.timestamp("s"), pa.timestamp("us")),
    (pa.timestamp("ns", tz="Europe/Berlin"), pa.timestamp("us", tz="Europe/Berlin")),
    (pa.date64(), pa.date32()),
    (pa.float16(), pa.float32()),
    (pa.binary(4), pa.binary()),
    (pa.large_string(), pa.string()),
    (pa.string_view(), pa.string()),
    (pa.large_binary(), pa.binary()),
    (pa.binary_view(), pa.binary()),
    (pa.uuid(), pa.binary()),
    (pa.dictionary(pa.int16(), pa.large_string()), pa.string()),
    (pa.run_end_encoded(pa.int32(), pa.int64()), pa.int64()),
    (pa.large_list(pa.float16()), pa.list_(pa.float32())),
    (pa.list_(pa.int8(), 3), pa.list_(pa.int8())),
    (pa.map_(pa.large_string(), pa.timestamp("ms")), pa.map_(pa.string(), pa.timestamp("us"))),
    (pa.struct({"a": pa.timestamp("ns")}), pa.struct({"a": pa.timestamp("us")})),
    (pa.uint64(), pa.uint64()),
    (pa.decimal128(38, 4), pa.decimal128(38, 4)),
]


@pytest.mark.parametrize(("given", "written"), PARQUET_FORMS, ids=str)
def test_every_type_has_a_form_that_spark_reads(given: pa.DataType, written: pa.DataType) -> None:
    assert parquet_schema(pa.schema({"c": given})).field("c").type == written


@pytest.mark.parametrize(
    "kind",
    [pa.duration("s"), pa.time32("s"), pa.null(), pa.struct([]), pa.decimal256(60, 2), pa.list_view(pa.int8())],
    ids=str,
)
def test_a_type_that_spark_cannot_read_is_refused_with_its_column(kind: pa.DataType) -> None:
    with pytest.raises(BuildError, match=r"column 'outer'.*cannot be written"):
        parquet_schema(pa.schema({"outer": pa.list_(kind)}))


def test_columns_that_spark_takes_for_one_are_refused() -> None:
    with pytest.raises(BuildError, match="'Id' and 'ID'"):
        parquet_schema(pa.schema([("Id", pa.int64()), ("ID", pa.int64())]))
    with pytest.raises(BuildError, match="without columns"):
        parquet_schema(pa.schema([]))


def test_values_keep_their_meaning() -> None:
    moment = dt.datetime(1931, 7, 4, 12, 30, 1, 250_000)
    batch = pa.RecordBatch.from_pydict(
        {
            "at": pa.array([moment, None], pa.timestamp("ms")),
            "word": pa.array(["b", None]).dictionary_encode(),
            "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array(["z"])),
            "half": pa.array([1.5, None], pa.float16()),
            "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0123456789abcdef", None], pa.binary(16))),
        }
    )
    cast = cast_batch(batch, parquet_schema(batch.schema))
    assert cast.to_pylist() == [
        {"at": moment, "word": "b", "runs": "z", "half": 1.5, "uuid": b"0123456789abcdef"},
        {"at": None, "word": None, "runs": "z", "half": None, "uuid": None},
    ]


def test_nanoseconds_are_refused_rather_than_cut_off() -> None:
    schema = parquet_schema(pa.schema({"at": pa.timestamp("ns")}))
    whole = pa.RecordBatch.from_pydict({"at": pa.array([5000], pa.timestamp("ns"))})
    assert cast_batch(whole, schema)["at"].cast(pa.int64()).to_pylist() == [5]
    with pytest.raises(DataError, match=r"column 'at'.*lose data"):
        cast_batch(pa.RecordBatch.from_pydict({"at": pa.array([5001], pa.timestamp("ns"))}), schema)


def test_a_batch_of_other_columns_is_refused() -> None:
    with pytest.raises(DataError, match="columns"):
        cast_batch(pa.RecordBatch.from_pydict({"b": [1]}), pa.schema({"a": pa.int64()}))


def test_plain_types_are_kept_without_a_copy() -> None:
    batch = pa.RecordBatch.from_pydict({"t": pa.array([1], pa.timestamp("ns")), "f": pa.array([b"ab"], pa.binary(2))})
    assert plain_schema(batch.schema) == batch.schema
    assert cast_batch(batch, plain_schema(batch.schema)) is batch
