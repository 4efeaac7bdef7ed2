"""The DataFrames of a processor: each key's are its own; what it makes comes out as by pandas and Arrow."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from process_world import Clock, clocked
from pyspark.sql.streaming import StatefulProcessor

from cutwater.errors import UserCodeError
from cutwater.operators.stateful_processor.spark_types import TimeMode
from cutwater.operators.stateful_processor.spec import ProcessorSpec


class Stateless(StatefulProcessor):
    def init(self, handle: Any) -> None:
        """There is nothing to keep."""


class InPlace(Stateless):
    """Changes its DataFrames in every way, and remembers them."""

    seen: list[pd.DataFrame]

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for frame in rows:
            assert frame.index.equals(pd.RangeIndex(len(frame)))
            frame["k"] += 1
            frame.loc[0, "k"] = frame.loc[0, "k"] + 10
            frame.index.name = "n"
            frame["new"] = 1
            self.seen.append(frame)
            yield frame[["k"]]


@pytest.mark.parametrize("more", [[], ["v"]])
def test_frames_are_the_keys_own_and_may_be_changed(more: list[str]) -> None:
    names = ["k", *more]  # one column alone comes out of Arrow without a copy, and may not be written to
    schema = pa.schema([(name, pa.int64()) for name in names])
    processor = InPlace()
    processor.seen = []
    operator = clocked(ProcessorSpec(schema, ("k",), processor, "k long", TimeMode.NONE, "pandas", None), Clock())
    batch = pa.record_batch([[1, 2, 1, 3]] * len(names), schema=schema)
    made = pa.Table.from_batches([out for _, out in operator.process(0, batch)])
    assert made.column("k").to_pylist() == [12, 2, 13, 14]
    assert batch.column("k").to_pylist() == [1, 2, 1, 3]
    assert [frame["k"].tolist() for frame in processor.seen] == [[12, 2], [13], [14]]


class Made(Stateless):
    """Makes one of the given DataFrames for each key."""

    frames: list[pd.DataFrame]

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield self.frames[key[0]]


KINDS: dict[str, st.SearchStrategy[Any]] = {
    "int64": st.integers(-(2**60), 2**60),
    "int16": st.integers(-9, 9),
    "uint8": st.integers(0, 9),
    "float64": st.one_of(st.floats(), st.integers(-9, 9).map(float)),
    "float32": st.floats(width=32),
    "bool": st.booleans(),
    "Int64": st.one_of(st.none(), st.integers(-9, 9)),
    "category": st.sampled_from(["a", "b"]),
    "string": st.one_of(st.none(), st.text(max_size=3)),
    "datetime64[ns]": st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2100, 1, 1)),
    "datetime64[ms]": st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2100, 1, 1)),
    "object": st.one_of(
        st.none(),
        st.text(max_size=3),
        st.integers(-9, 9),
        st.just(float("nan")),
        st.just(Decimal("1.50")),
        st.just(dt.date(2020, 1, 2)),
        st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2100, 1, 1)),
    ),
}
TYPES = ["long", "int", "double", "string", "boolean", "timestamp", "timestamp_ntz", "date", "decimal(9,2)"]
FITTING = {
    "long": ["int64", "int16", "float64", "Int64"],
    "int": ["int16", "uint8"],
    "double": ["float64", "float32", "int16"],
    "string": ["string", "category", "object"],
    "timestamp": ["datetime64[ns]", "datetime64[ms]", "object"],
    "timestamp_ntz": ["datetime64[ns]", "datetime64[ms]", "object"],
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[pd.DataFrame]]:
    types = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=3))
    kinds = [draw(st.sampled_from(FITTING.get(type, [*KINDS]))) for type in types]
    frames: list[pd.DataFrame] = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(0, 3))
        if draw(st.integers(0, 4)) == 0:
            kinds = [draw(st.sampled_from([*KINDS])) for _ in types]
        columns = {
            f"c{i}": pd.Series(draw(st.lists(KINDS[kind], min_size=size, max_size=size)), dtype=kind)
            for i, kind in enumerate(kinds)
        }
        frame = pd.DataFrame(columns)
        frames.append(frame[frame.columns[::-1]] if draw(st.integers(0, 9)) == 0 else frame)
    return ", ".join(f"c{i} {type}" for i, type in enumerate(types)), frames


def by_pandas(frames: list[pd.DataFrame], schema: pa.Schema) -> pa.RecordBatch | None:
    """The whole, or what of it is made one by one; ``None``: some does not fit."""
    from pyspark.sql.pandas.types import _get_local_timezone  # pyright: ignore[reportPrivateUsage]

    def converted(frame: pd.DataFrame) -> pa.RecordBatch:
        for field in schema:
            column = frame[field.name]
            if pa.types.is_timestamp(field.type) and field.type.tz is not None and column.dtype.kind == "M":
                zoned = column.dt.tz_localize(_get_local_timezone(), ambiguous=False)
                frame = frame.assign(**{field.name: zoned})
        return pa.RecordBatch.from_pandas(frame, schema, preserve_index=False).cast(schema)

    errors = (pa.ArrowException, TypeError, ValueError, OverflowError)
    try:
        return converted(pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0])
    except errors:
        try:
            return pa.Table.from_batches([converted(frame) for frame in frames]).combine_chunks().to_batches()[0]
        except errors:
            return None


def values(made: Any) -> str:
    """The values as text, in which NaN is NaN; times as numbers, for not all of them are times of Python."""
    columns = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in made.columns]
    return str([column.to_pylist() for column in columns])


# A warning of what it is compared with.
@pytest.mark.filterwarnings("ignore:The behavior of DataFrame concatenation:FutureWarning")
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_what_is_made_comes_out_as_by_pandas(case: tuple[str, list[pd.DataFrame]]) -> None:
    declared, frames = case
    processor = Made()
    processor.frames = frames
    schema = pa.schema([("k", pa.int64())])
    spec = ProcessorSpec(schema, ("k",), processor, declared, TimeMode.NONE, "pandas", None)
    operator = clocked(spec, Clock())
    filled = [frame for frame in frames if len(frame)]
    expected = by_pandas(filled, spec.outputs[0]) if filled else spec.outputs[0].empty_table()
    keys = pa.record_batch([np.arange(len(frames))], schema=schema)
    if expected is None:
        with pytest.raises(UserCodeError, match="made values that do not fit"):
            operator.process(0, keys)
        return
    made = pa.Table.from_batches([out for _, out in operator.process(0, keys)], spec.outputs[0])
    assert values(made) == values(expected)
