"""The hash partitioner: rows reach the owner of their key group, in order, and nothing is lost."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.errors import BuildError, DataError
from cutwater.runtime.channels.partitioner import HashPartitioner
from keyed_world import VALUES, owner


@given(data=st.data(), parallelism=st.integers(1, 5), rows=st.integers(0, 200), nulls=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_row_reaches_the_owner_of_its_key_in_order(
    data: st.DataObject, parallelism: int, rows: int, nulls: bool
) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=4))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    arrays = {"key": pa.array(random.integers(-20, 20, rows)), "row": pa.array(np.arange(rows))}
    for number, name in enumerate(names):
        kind, strategy = VALUES[name]
        strategy = strategy.filter(lambda value: value == value)  # RecordBatch.equals takes no NaN for another
        some = data.draw(st.lists(strategy | st.none() if nulls else strategy, min_size=1, max_size=5))
        arrays[f"{name}{number}"] = pa.array([some[i] for i in random.integers(0, len(some), rows)], kind)
    skipped = data.draw(st.integers(0, rows))
    batch = pa.record_batch(arrays).slice(skipped)
    parts = HashPartitioner(batch.schema, ["key"], parallelism, 16).split(batch)
    owners = owner(batch, ["key"], parallelism)
    assert [target for target, _ in parts] == sorted(set(owners))
    for target, part in parts:
        part.validate(full=True)
        assert part.schema == batch.schema
        assert part.equals(batch.take(pa.array([i for i, o in enumerate(owners) if o == target], pa.int64())))


@pytest.mark.parametrize("keys", [["s"], ["s", "n"], ["f"]])
def test_any_key_columns_partition(keys: list[str]) -> None:
    batch = pa.record_batch({"s": [f"k{i % 7}" for i in range(99)], "n": range(99), "f": [i / 8 for i in range(99)]})
    parts = HashPartitioner(batch.schema, keys, 4, 16).split(batch)
    owners = owner(batch, keys, 4)
    assert {t: p["n"].to_pylist() for t, p in parts} == {
        t: [i for i, o in enumerate(owners) if o == t] for t in sorted(set(owners))
    }


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65])
def test_few_rows_are_split_as_many_are(rows: int) -> None:
    random = np.random.default_rng(rows)
    batch = pa.record_batch(
        {
            "k": random.integers(0, 9, rows),
            "text": pa.array([None if i % 3 == 0 else f"t{i}" for i in range(rows)]),
            "word": pa.array([f"w{i % 4}" for i in range(rows)]).dictionary_encode(),
        }
    )
    many = pa.Table.from_batches([batch] * 70).combine_chunks().to_batches()[0]
    partitioner = HashPartitioner(batch.schema, ["k"], 3, 16)
    whole = dict(partitioner.split(many))
    for target, part in partitioner.split(batch):
        part.validate(full=True)
        assert part.to_pylist() == whole[target].slice(0, part.num_rows).to_pylist()
    assert sum(part.num_rows for _, part in partitioner.split(batch)) == rows


def test_parts_stay_valid_when_the_next_batch_is_split() -> None:
    split = HashPartitioner(pa.schema([("k", pa.int64())]), ["k"], 2, 16).split
    parts = split(pa.record_batch({"k": np.arange(1000)}))
    before = [part.to_pylist() for _, part in parts]
    for _ in range(20):
        split(pa.record_batch({"k": np.arange(1000) * 7 + 5}))
    assert [part.to_pylist() for _, part in parts] == before


def test_parts_begin_where_arrow_wants_buffers_to_begin() -> None:
    batch = pa.record_batch({"k": np.arange(1001), "small": pa.array(np.arange(1001) % 100, pa.int8())})
    parts = HashPartitioner(batch.schema, ["k"], 3, 16).split(batch)
    assert [part[c].buffers()[1].address % 64 for _, part in parts for c in ("k", "small")] == [0] * 6


def test_one_subtask_gets_the_batch_itself() -> None:
    batch = pa.record_batch({"k": [1, 2, 3]})
    [(target, part)] = HashPartitioner(batch.schema, ["k"], 1, 16).split(batch)
    assert target == 0
    assert part is batch


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_row_without_a_key_is_refused_and_not_lost(parallelism: int) -> None:
    batch = pa.record_batch({"k": [1, None, 3]})
    with pytest.raises(DataError, match="'k' is null in row 1"):
        HashPartitioner(batch.schema, ["k"], parallelism, 16).split(batch)


def test_an_impossible_parallelism_is_refused() -> None:
    schema = pa.schema([("k", pa.int64())])
    for parallelism, groups in ((0, 16), (17, 16), (2, 1 << 20)):
        with pytest.raises(BuildError, match="parallelism"):
            HashPartitioner(schema, ["k"], parallelism, groups)


def test_a_very_large_string_is_moved() -> None:
    batch = pa.record_batch({"k": [1, 2, 3, 4], "s": ["x" * 10_000_000, "", "y", None]})
    parts = HashPartitioner(batch.schema, ["k"], 2, 16).split(batch)
    got = {row["k"]: row["s"] for _, part in parts for row in part.to_pylist()}
    assert got == dict(zip(batch["k"].to_pylist(), batch["s"].to_pylist(), strict=True))
