"""Union: equal schemas only, rows as they come."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cutwater.errors import BuildError
from cutwater.operators.stateless.rows import UnionSpec, check_same_schema

A = pa.schema([pa.field("k", pa.int64(), nullable=False), pa.field("v", pa.string())])


def test_batches_of_all_inputs_pass_in_arrival_order() -> None:
    operator = UnionSpec(A, 3).build()
    batches = [pa.record_batch({"k": [i], "v": ["x"]}, schema=A) for i in range(3)]
    assert [operator.process(i, batches[i]) for i in (2, 0, 1)] == [[(0, batches[i])] for i in (2, 0, 1)]


def test_stricter_stream_takes_the_schema_of_the_union() -> None:
    loose = pa.schema([pa.field("k", pa.int64()), pa.field("v", pa.string())])
    union = check_same_schema([A, loose])
    assert union == loose
    ((_, out),) = UnionSpec(union, 2).build().process(0, pa.record_batch({"k": [1], "v": ["x"]}, schema=A))
    assert out.schema == loose


def test_equal_schemas_make_that_schema() -> None:
    assert check_same_schema([A, A, A]) == A


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (pa.schema({"k": pa.int64()}), "stream 3 of the union differs from the first: column 'v' is missing"),
        (pa.schema({"k": pa.int32(), "v": pa.binary()}), "'k' is int32 instead of int64; column 'v' is binary"),
        (pa.schema({"k": pa.int64(), "v": pa.string(), "w": pa.int8()}), "column 'w' is extra"),
        (pa.schema({"v": pa.string(), "k": pa.int64()}), "in the order v, k instead of k, v"),
    ],
)
def test_differences_are_listed(other: pa.Schema, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        check_same_schema([A, A, other])


def test_union_of_nothing_is_refused() -> None:
    with pytest.raises(BuildError, match="at least 1 stream"):
        UnionSpec(A, 0)
