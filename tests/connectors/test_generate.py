"""Computed rows: the same number gives the same row, wherever batches, stripes and partitions end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.connectors.files.source import FileSource
from cutwater.connectors.generate import RateSource, generate, rate
from cutwater.connectors.memory import memory
from cutwater.connectors.spark_source import DataFrameSource
from cutwater.errors import BuildError, UserCodeError


class Context:
    step, subtask = "read", 0

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        raise AssertionError(raw)


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count), pa.int64())})


def values(source: RateSource, size: int = 100) -> list[list[int]]:
    found: list[list[int]] = []
    for split in source.discover():
        reader = source.open(split, None, Context())
        part: list[int] = []
        while not reader.exhausted:
            batch = reader.read(size)
            assert batch is not None
            part += batch.column(0).to_pylist()
        found.append(part)
    return found


@given(st.integers(0, 60), st.integers(1, 5), st.integers(0, 9), st.integers(1, 12), st.integers(1, 40))
@settings(deadline=None)  # the first call imports what Arrow needs
def test_the_splits_hold_every_number_once_dealt_out_in_stripes(
    rows: int, partitions: int, start: int, stripe: int, size: int
) -> None:
    source = generate(numbers, rows=rows, partitions=partitions, start=start, stripe_rows=stripe)
    parts = values(source, size)
    expected = range(start, start + rows)
    assert parts == [[n for n in expected if (n - start) // stripe % partitions == p] for p in range(partitions)]


def test_stripes_that_are_large_are_not_copied_to_join_others() -> None:
    def wide(start: int, count: int) -> pa.RecordBatch:
        return pa.record_batch({"n": range(start, start + count), "text": ["x" * 5000] * count})

    source = generate(wide, schema="n long, text string", rows=4000, partitions=2, stripe_rows=500)
    reader = source.open(source.discover()[1], None, Context())
    sizes = [len(batch) for batch in iter(lambda: reader.read(2000), None)]
    assert sizes == [500] * 4
    assert values(source, 2000) == [[n for n in range(4000) if n // 500 % 2 == split] for split in range(2)]
    narrow = generate(numbers, schema="n long", rows=4000, partitions=2, stripe_rows=500)
    assert len(narrow.open(narrow.discover()[0], None, Context()).read(2000)) == 2000


def test_an_endless_source_goes_on_at_its_position() -> None:
    source = generate(numbers, partitions=2, stripe_rows=3)
    assert not source.bounded
    reader = source.open(source.discover()[1], 10**12 + 5, Context())
    batch = reader.read(4)
    assert batch is not None
    assert not reader.exhausted
    again = source.open(source.discover()[1], reader.position, Context()).read(2)
    assert again is not None
    assert len({*batch.column(0).to_pylist(), *again.column(0).to_pylist()}) == 6


def test_time_comes_from_the_number_and_not_from_the_clock() -> None:
    batch = rate(4.0).compute(8, 2)
    assert batch.column("value").to_pylist() == [8, 9]
    assert [t.isoformat() for t in batch.column("timestamp").to_pylist()] == [
        "2020-01-01T00:00:02+00:00",
        "2020-01-01T00:00:02.250000+00:00",
    ]
    assert rate(None).compute(0, 1).schema.equals(rate(None).schema)


def test_partitions_and_stripes_are_part_of_the_split_ids() -> None:
    ids = {s.id for p in (2, 3) for w in (4, 5) for s in generate(numbers, partitions=p, stripe_rows=w).discover()}
    assert len(ids) == 2 * (2 + 3)


def test_a_schema_given_as_text_is_what_the_rows_get() -> None:
    source = generate(numbers, schema="n double", rows=3, partitions=1)
    assert source.schema.field("n").type == pa.float64()
    assert source.compute(0, 2).schema.equals(source.schema)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda start, count: numbers(start, count + 1), "gave 3 rows instead of 2"),
        (lambda start, count: numbers(start, count).rename_columns(["m"]), "m int64 instead of n int64"),
        (lambda start, count: numbers(start, count).to_pylist(), "must return a pyarrow.RecordBatch, got list"),
        (lambda start, count: 1 // 0, "ZeroDivisionError"),
    ],
)
def test_a_wrong_function_is_named_with_its_call(fn: object, message: str) -> None:
    source = generate(fn, schema="n long")  # type: ignore[arg-type]
    with pytest.raises(UserCodeError, match=message) as caught:
        source.compute(7, 2)
    if "Zero" in message:
        assert "fn(7, 2)" in str(caught.value)
        assert "generate.py" not in str(caught.value).replace("test_generate.py", "")


@pytest.mark.parametrize(
    "options", [{"partitions": 0}, {"rows": -1}, {"stripe_rows": 0}, {"rate": 0.0}, {"start": -1}, {"rows": 1.5}]
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(BuildError, match=next(iter(options))):
        generate(numbers, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["fast", True, -1, float("nan"), 0, [1]])
def test_a_rate_that_is_none_is_refused_by_every_source_with_what_to_write(tmp_path: Path, wrong: object) -> None:
    sources: list[Callable[[], object]] = [
        lambda: rate(wrong),  # type: ignore[arg-type]
        lambda: memory([], schema="n long", rate=wrong),  # type: ignore[arg-type]
        lambda: FileSource(tmp_path, rate=wrong),  # type: ignore[arg-type]
        lambda: DataFrameSource(object(), rate=wrong),  # type: ignore[arg-type]
    ]
    for make in sources:
        with pytest.raises(BuildError, match=r"rows per second above 0, not .*Write for example 1000"):
            make()


def test_a_rate_may_be_any_kind_of_number() -> None:
    assert [rate(r).rate for r in (5, 0.5, np.int64(7), None)] == [5, 0.5, 7, None]


@given(
    partitions=st.integers(1, 4),
    rows=st.none() | st.integers(0, 3_000),
    start=st.sampled_from([0, 7]),
    stripe_rows=st.sampled_from([1, 3, 256]),
    reads=st.lists(st.sampled_from([1, 100, 256, 700, 3_000]), min_size=1, max_size=12),
)
@settings(max_examples=40, deadline=None)
def test_numbers_of_many_stripes_at_once_are_those_of_one_stripe_after_the_other(
    partitions: int, rows: int | None, start: int, stripe_rows: int, reads: list[int]
) -> None:
    """``rate`` makes its rows without a call for each of its short stripes; a function is asked for each."""
    own = RateSource(None, rows=rows, partitions=partitions, start=start, stripe_rows=stripe_rows)
    called = replace(own, fn=own.compute)
    for split in own.discover():
        at_once, one_by_one = own.open(split, None, Context()), called.open(split, None, Context())
        for count in reads:
            expected = one_by_one.read(count)
            assert at_once.read(count) == expected
            assert (at_once.position, at_once.exhausted) == (one_by_one.position, one_by_one.exhausted)
