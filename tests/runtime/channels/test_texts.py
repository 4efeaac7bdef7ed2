"""Texts that come as dictionaries reach the owner of their key as plain ones do, and each value is hashed once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import DataError
from cutwater.runtime.chains.chain import EdgeOut
from cutwater.runtime.channels.output import OutputChannel
from cutwater.runtime.channels.partitioner import HashPartitioner
from cutwater.runtime.channels.texts import plain_rows
from cutwater.state import kernels
from cutwater.state.keys import NullableKeys

SCHEMA = pa.schema({"k": pa.string(), "n": pa.int64(), "more": pa.string(), "row": pa.int64()})
TEXTS = ["", "a", "a\0", "é", "x" * 8, "x" * 15, "x" * 16, "x" * 17, "x" * 300]


@st.composite
def dictionaries(draw: st.DrawFn, rows: int) -> pa.DictionaryArray:
    """Any dictionary: values that come twice, that nobody has, null among them; nulls with anything below."""
    values = draw(st.lists(st.sampled_from(TEXTS) | st.none(), max_size=6))
    width = draw(st.sampled_from([np.int8, np.int16, np.int32, np.uint8]))
    skipped = draw(st.integers(0, 9))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    valid = (
        random.random(rows + skipped) < draw(st.sampled_from([0.5, 1.0])) if values else np.zeros(rows + skipped, bool)
    )
    places = np.where(valid, random.integers(0, max(1, len(values)), rows + skipped), 99).astype(width)
    bits = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    indices = pa.Array.from_buffers(pa.from_numpy_dtype(width), len(places), [bits, pa.py_buffer(places)])
    return pa.DictionaryArray.from_arrays(indices, pa.array(values, pa.string())).slice(skipped)


def as_texts(column: pa.Array) -> pa.Array:
    """In plain Python."""
    return pa.array(column.to_pylist(), pa.string())


@settings(deadline=None, max_examples=150)
@given(data=st.data(), rows=st.integers(1, 150), parallelism=st.integers(1, 4))
def test_any_dictionary_reaches_the_owner_as_plain_texts_do(data: st.DataObject, rows: int, parallelism: int) -> None:
    numbers = np.arange(rows)
    columns = [data.draw(dictionaries(rows)), pa.array(numbers % 3), data.draw(dictionaries(rows)), pa.array(numbers)]
    batch = pa.RecordBatch.from_arrays(columns, names=SCHEMA.names)
    plain = pa.record_batch([as_texts(columns[0]), columns[1], as_texts(columns[2]), columns[3]], schema=SCHEMA)
    assert plain_rows(batch, SCHEMA).equals(plain)
    keys = NullableKeys(data.draw(st.sampled_from([["k"], ["k", "n"], ["more", "k"], ["n"]])))
    found = HashPartitioner(SCHEMA, keys, parallelism, 16).split(batch)
    expected = HashPartitioner(SCHEMA, keys, parallelism, 16).split(plain)
    assert [target for target, _ in found] == [target for target, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        one.validate(full=True)
        one = plain_rows(one, SCHEMA)
        one.validate(full=True)
        assert one.equals(other)
        assert one.schema == SCHEMA


def few(rows: int) -> pa.RecordBatch:
    return pa.record_batch({"k": pa.array([f"k{i % 7}" for i in range(rows)]).dictionary_encode(), "n": range(rows)})


def test_each_value_is_hashed_once_and_leaves_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    real = kernels.hash_bytes

    def hash_bytes(data: object, offsets: object, out: np.ndarray) -> None:
        hashed.append(len(out))
        real(data, offsets, out)

    monkeypatch.setattr(kernels, "hash_bytes", hash_bytes)
    parts = HashPartitioner(pa.schema({"k": pa.string(), "n": pa.int64()}), ["k"], 3, 16).split(few(700))
    assert hashed == [7]
    assert sum(part.num_rows for _, part in parts) == 700
    assert all(pa.types.is_dictionary(part.schema.field("k").type) for _, part in parts)


def test_a_null_in_a_dictionary_is_refused_as_a_key() -> None:
    schema = pa.schema({"k": pa.string()})
    for indices, values in (([0, None, 0], ["a"]), ([0, 1, 0, 0], ["a", None])):
        column = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), pa.array(values))
        with pytest.raises(DataError, match="'k' is null in row 1"):
            HashPartitioner(schema, ["k"], 2, 16).split(pa.RecordBatch.from_arrays([column], names=["k"]))


@pytest.mark.parametrize("kind", ["hash", "broadcast", "forward"])
def test_behind_an_edge_texts_are_plain(kind: str) -> None:
    schema = pa.schema({"k": pa.string(), "n": pa.int64()})
    sent: list[pa.RecordBatch] = []
    channels = [OutputChannel((0, 0, i), schema, lambda item: sent.append(item.batch), credit=9) for i in range(2)]
    partitioner = HashPartitioner(schema, ["k"], 2, 16) if kind == "hash" else None
    out = EdgeOut(channels, partitioner=partitioner, broadcast=kind == "broadcast", schema=schema)
    out.send(few(1000), MIN_WATERMARK)
    for channel in channels:
        channel.flush()
    assert {batch.schema for batch in sent} == {schema}
    copies = 2 if kind == "broadcast" else 1
    assert sorted(row for batch in sent for row in batch.column("n").to_pylist()) == sorted([*range(1000)] * copies)
    assert all(row["k"] == f"k{row['n'] % 7}" for batch in sent for row in batch.to_pylist())


@pytest.mark.parametrize("keys", [["n"], ["n", "row"]])
def test_dictionaries_that_the_schema_declares_stay(keys: list[str]) -> None:
    """A function of batches may declare one; what is behind the edge expects it."""
    declared = SCHEMA.set(2, pa.field("more", pa.dictionary(pa.int32(), pa.string())))
    for values in (["a", "b"], [f"v{n}" for n in range(1000)], ["a", None]):
        texts = pa.array([values[n % len(values)] for n in range(1000)])
        columns = [
            pa.array(["k"] * 1000),
            pa.array(np.arange(1000) % 7),
            texts.dictionary_encode(),
            pa.array(range(1000)),
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=declared)
        parts = [plain_rows(part, declared) for _, part in HashPartitioner(declared, keys, 2, 16).split(batch)]
        assert {part.schema for part in parts} == {declared}
        rows = [row for part in parts for row in part.to_pylist()]
        assert sorted(rows, key=lambda row: row["row"]) == batch.to_pylist()
