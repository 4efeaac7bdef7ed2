"""Distinct counts: sketches against their definition in plain Python, their error, their merging, and exact sets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cutwater as cw
from cutwater.errors import BuildError
from cutwater.operators.aggregate.accumulators import Accumulator, Aggregate
from cutwater.operators.aggregate.running_spec import RunningAggregateSpec
from cutwater.operators.window.kinds import TumblingWindow
from cutwater.operators.window.spec import WindowAggregateSpec
from cutwater.state.keys import hash_keys, key_groups
from keyed_world import opened, rescaled, rows_of, snapshot

ONE = np.zeros(1, np.int32)
MASK = 2**64 - 1


def sketch_of(values: Any, precision: int = 12) -> Accumulator:
    batch = pa.record_batch({"v": values})
    accumulator = Aggregate("x", "approx_count_distinct", "v", precision).accumulator(batch.schema)
    accumulator.reserve(1)
    accumulator.update(np.zeros(batch.num_rows, np.int32), batch)
    return accumulator


def registers_by_definition(values: pa.Array, precision: int) -> dict[int, int]:
    """Register and rank of every value with Python's integers, from the hash of keys on."""
    found: dict[int, int] = {}
    for hashed in hash_keys([values]).tolist():
        x = hashed ^ 0x9E3779B97F4A7C15
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
        x ^= x >> 31
        index, rest = x % 2**precision, x >> precision
        rank = (rest & -rest).bit_length() if rest else 64
        found[index] = max(found.get(index, 0), min(rank, 48))
    return found


def written(accumulator: Accumulator, precision: int) -> dict[int, int]:
    """A sketch as it lies on disk, read by its documentation."""
    content = accumulator.state(ONE)[0][0].as_py()
    if len(content) == 2**precision:
        return {index: rank for index, rank in enumerate(content) if rank}
    words = np.frombuffer(content, "<u4").tolist()
    assert words == sorted(words)
    return {word >> 6: word & 63 for word in words}


@pytest.mark.parametrize("precision", [4, 9, 12])
@pytest.mark.parametrize("count", [0, 1, 3, 40, 700, 20_000])
def test_a_sketch_holds_what_its_definition_says(precision: int, count: int) -> None:
    values = pa.array([f"user-{i}" for i in range(count)], pa.string())
    assert written(sketch_of(values, precision), precision) == registers_by_definition(values, precision)


@pytest.mark.parametrize(("rsd", "runs"), [(0.1, 40), (0.05, 20), (0.02, 20), (0.008, 8)])
def test_the_error_is_what_rsd_promises(rsd: float, runs: int) -> None:
    """Root mean square over ranges of numbers, at sizes below, around and above the number of registers."""
    precision = cw.approx_count_distinct("v", rsd).precision
    assert precision is not None
    assert 1.04 / math.sqrt(2**precision) <= rsd
    for size in (100, 3_000, 50_000):
        misses = []
        for run in range(runs):
            values = np.arange(size, dtype=np.int64) + run * 10**9
            misses.append(sketch_of(values, precision).result(ONE)[0].as_py() / size - 1)
        assert math.sqrt(float(np.mean(np.square(misses)))) <= 1.6 * rsd, size
        assert abs(float(np.mean(misses))) <= 4 * rsd / math.sqrt(runs), size


def test_few_values_are_counted_exactly_and_repeats_not_at_all() -> None:
    assert sketch_of(np.arange(20)).result(ONE).to_pylist() == [20]
    assert sketch_of(np.arange(200_000) % 20).result(ONE).to_pylist() == [20]
    assert sketch_of(pa.array([None, None], pa.int64())).result(ONE).to_pylist() == [0]
    assert sketch_of(np.array([np.nan, -np.nan, 0.0, -0.0])).result(ONE).to_pylist() == [2]


@given(data=st.data(), precision=st.sampled_from([4, 7, 12]))
@settings(max_examples=60, deadline=None)
def test_merged_sketches_are_the_sketch_of_the_union(data: st.DataObject, precision: int) -> None:
    """Sparse into dense and dense into sparse too: what merging overwrites would be missing."""
    bounds = st.tuples(st.integers(0, 3000), st.integers(0, 3000)).map(sorted)
    (a, b), (c, d) = data.draw(bounds), data.draw(bounds)
    merged = sketch_of(np.arange(a, b), precision)
    other = sketch_of(np.arange(c, d), precision)
    merged.merge(ONE, other.state(ONE))
    union = sketch_of(np.union1d(np.arange(a, b), np.arange(c, d))[::-1].copy(), precision)
    assert merged.state(ONE) == union.state(ONE)
    assert merged.result(ONE) == union.result(ONE)


@pytest.mark.parametrize("kind", ["count_distinct", "approx_count_distinct"])
@pytest.mark.parametrize("after", [1, 3])
def test_a_restored_count_knows_what_it_had_seen(kind: str, after: int) -> None:
    """At another parallelism; nothing that was counted before is counted again, and what is new is."""
    random = np.random.default_rng(8)
    keys, values = random.integers(0, 7, 9000), random.integers(0, 2000, 9000)
    batch = pa.record_batch({"k": keys, "v": values, "row": np.arange(9000)})
    spec = RunningAggregateSpec(batch.schema, ("k",), (Aggregate("n", kind, "v"),), "row")
    expected = rows_of(opened(spec).process(0, batch))
    stopped = opened(spec)
    stopped.process(0, batch.slice(0, 5000))
    got = []
    for operator in rescaled(spec, snapshot(stopped), after):
        part = batch.slice(5000)
        got += rows_of(operator.process(0, part.filter(pa.array(_owned(operator, part)))))
    assert sorted(got, key=lambda row: row["row"]) == expected[5000:]  # type: ignore[arg-type,return-value]
    if kind == "count_distinct":
        last = {row["k"]: row["n"] for row in expected}
        assert last == {int(k): len(set(values[keys == k].tolist())) for k in np.unique(keys)}


def _owned(operator: Any, batch: pa.RecordBatch) -> list[bool]:
    groups = key_groups(hash_keys([batch.column("k")]), operator.ctx.max_parallelism)
    return [int(g) in operator.ctx.key_groups for g in groups]


def test_windows_count_distinct_values_and_forget_them_with_the_window() -> None:
    random = np.random.default_rng(4)
    times = np.sort(random.integers(0, 60_000, 20_000))
    batch = pa.record_batch(
        {
            "t": pa.array(times, pa.timestamp("us")),
            "k": random.integers(0, 300, 20_000),
            "v": pa.array([f"v{i}" for i in random.integers(0, 90, 20_000)]),
        }
    )
    aggregates = (Aggregate("n", "count_distinct", "v"), Aggregate("about", "approx_count_distinct", "v"))
    operator = opened(WindowAggregateSpec(batch.schema, ("k",), "t", TumblingWindow(500), aggregates))
    outputs = []
    for begin in range(0, 20_000, 500):
        part = batch.slice(begin, 500)
        outputs += operator.process(0, part)
        outputs += operator.on_watermark(int(times[begin + 499]) - 1)
    outputs += operator.on_watermark(2**62)
    sets: dict[tuple[int, int], set[str]] = {}
    for time, k, v in zip(times.tolist(), batch["k"].to_pylist(), batch["v"].to_pylist(), strict=True):
        sets.setdefault((time // 500, k), set()).add(v)
    rows = rows_of(outputs)
    assert len(rows) == len(sets)
    for row in rows:
        distinct = sets[row["window_start"].microsecond // 500, row["k"]]  # type: ignore[attr-defined,index]
        assert row["n"] == len(distinct)
        assert abs(row["about"] - len(distinct)) <= 1  # type: ignore[operator]


@pytest.mark.parametrize("rsd", [0, 0.001, 0.5, "2%", None])
def test_an_rsd_out_of_range_is_refused(rsd: Any) -> None:
    with pytest.raises(BuildError, match="rsd is a number from"):
        cw.approx_count_distinct("v", rsd)
