"""Values in Python are those of ``to_pylist``, whatever the type, the nulls and the slice; so are its errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutwater.data.python_values import BatchValues, column_values

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TIMES = [
    *(
        pa.timestamp(unit, zone)
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "UTC", "Europe/Berlin", "+05:30")
    ),
    pa.date32(),
    pa.time64("us"),
    pa.duration("us"),
    pa.duration("ns"),
]
TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view(), pa.binary(3)]


def _of(kind: Any) -> st.SearchStrategy[Any]:
    """Values that ``pa.array`` takes for a type."""
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_integer(kind):
        info = np.iinfo(kind.to_pandas_dtype())
        return st.integers(int(info.min), int(info.max))
    if pa.types.is_floating(kind):
        return st.floats(width=kind.bit_width)  # NaN, -0.0 and infinities among them
    if pa.types.is_fixed_size_binary(kind):
        return st.binary(min_size=3, max_size=3)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return st.binary(max_size=5)
    if pa.types.is_decimal(kind):
        return st.decimals(-999, 999, places=2)
    if pa.types.is_date32(kind):
        return st.integers(-800_000, 3_000_000)  # also days that Python has not
    if pa.types.is_time(kind):
        return st.integers(0, 86_399_999_999)
    if pa.types.is_temporal(kind):
        far = 2**62 if pa.types.is_duration(kind) or kind.unit == "ns" else 2**40
        return st.one_of(st.integers(-far, far), st.integers(-(2**31), 2**31))
    return st.text(max_size=5)


SIMPLE = [pa.bool_(), *INTEGERS, pa.float32(), pa.float64(), *TIMES, *TEXTS, pa.decimal128(9, 2), pa.null()]


@st.composite
def columns(draw: st.DrawFn) -> pa.Array:
    """A column of any type: plain, in a dictionary, in lists, structs or maps; with nulls or without; a slice."""
    kind = draw(st.sampled_from(SIMPLE))
    value = st.none() if pa.types.is_null(kind) else _of(kind)
    if draw(st.booleans()):
        value = st.one_of(st.none(), value)
    values = draw(st.lists(value, max_size=12))
    column = pa.array(values, kind)
    shape = draw(st.sampled_from(["plain", "plain", "dictionary", "list", "struct", "map"]))
    if shape == "dictionary" and kind in (pa.string(), pa.int64(), pa.binary(), pa.timestamp("us", "UTC")):
        column = column.dictionary_encode()
    elif shape == "list":
        column = pa.ListArray.from_arrays(pa.array(range(len(column) + 1), pa.int32()), column)
    elif shape == "struct":
        column = pa.StructArray.from_arrays([column, column], ["a", "b"])
    elif shape == "map":
        keys = pa.array([f"k{i}" for i in range(len(column))])
        column = pa.MapArray.from_arrays(pa.array(range(len(column) + 1), pa.int32()), keys, column)
    start = draw(st.integers(0, len(column)))
    return column.slice(start, draw(st.integers(0, len(column) - start)))


def told(values: Any) -> Any:
    """Equal for equal values of equal types, zones and signs; NaN is equal to NaN."""
    if isinstance(values, list | tuple):
        return [told(value) for value in values]
    if isinstance(values, dict):
        return [(key, told(value)) for key, value in values.items()]
    return type(values), repr(values)


def outcome(made: Any) -> Any:
    try:
        return told(made())
    except (OverflowError, ValueError) as exc:
        return type(exc), str(exc)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(columns())
def test_values_are_those_of_arrow(column: pa.Array) -> None:
    assert outcome(lambda: column_values(column)) == outcome(column.to_pylist)


def rows_in_parts(batch: pa.RecordBatch, size: int) -> list[dict[str, Any]]:
    values = BatchValues(batch)
    return [row for start in range(0, batch.num_rows, size) for row in values.rows(start, start + size)]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(columns(), min_size=1, max_size=4),
    st.lists(st.sampled_from(["a", "b b", "'", "é", "\\", "{x}"])),
    st.integers(1, 9),
)
def test_rows_are_those_of_arrow(found: list[pa.Array], names: list[str], size: int) -> None:
    rows = min(map(len, found))
    names = [*names, "c", "d", "e", "f"][: len(found)]  # also one name twice
    batch = pa.RecordBatch.from_arrays([column.slice(0, rows) for column in found], names)
    assert outcome(lambda: rows_in_parts(batch, size)) == outcome(batch.to_pylist)


@pytest.mark.parametrize("rows", [0, 3])
def test_batch_without_columns(rows: int) -> None:
    batch = pa.record_batch({"n": list(range(rows))}).select([])
    assert rows_in_parts(batch, 2) == batch.to_pylist()


def test_text_that_is_none() -> None:
    broken = pa.array([b"a", b"\xff"]).view(pa.string())
    with pytest.raises(ValueError, match="codec can't decode byte"):
        column_values(broken)


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("s"), pa.date32()])
@pytest.mark.parametrize("number", [-(2**31), -719_162, 2_932_896, 2_932_897, 2**31 - 1])
def test_times_at_the_ends_of_the_calendar(kind: Any, number: int) -> None:
    number *= 1 if pa.types.is_date(kind) else 86_400 * {"s": 1, "us": 10**6}[kind.unit]
    for off in (-1, 0, 1):
        bits = kind.bit_width
        within = max(-(2 ** (bits - 1)), min(number + off, 2 ** (bits - 1) - 1))
        column = pa.array([within], pa.int32() if bits == 32 else pa.int64()).view(kind)
        assert outcome(lambda column=column: column_values(column)) == outcome(column.to_pylist)
