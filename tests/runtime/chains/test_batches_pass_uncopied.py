"""A function of batches gets the buffers that came, and what it passes on is what the next step gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pyarrow as pa

from cutwater.operators.stateless.functions import MapBatchesSpec
from cutwater.runtime.chains.chain import Chain, EdgeOut, Node, Target
from cutwater.runtime.channels.output import OutputChannel

SCHEMA = pa.schema(
    {
        "n": pa.int64(),
        "text": pa.string(),
        "flag": pa.bool_(),
        "list": pa.list_(pa.float64()),
        "kind": pa.dictionary(pa.int32(), pa.string()),
    }
)
"""Of each kind of layout one: fixed width, offsets, bits, nested, with a dictionary."""


def a_batch() -> pa.RecordBatch:
    numbers = range(1_000)
    return pa.record_batch(
        {
            "n": pa.array(np.arange(1_000)),
            "text": pa.array([None if i % 7 == 0 else f"text {i}" for i in numbers]),
            "flag": pa.array([i % 3 == 0 for i in numbers]),
            "list": pa.array([[float(i)] * (i % 4) for i in numbers]),
            "kind": pa.array([f"kind {i % 5}" for i in numbers]).dictionary_encode(),
        },
        schema=SCHEMA,
    )


def addresses(batch: pa.RecordBatch) -> list[tuple[int, list[int | None]]]:
    """Of each column: where in its buffers it begins, and where these lie."""
    return [
        (column.offset, [None if buffer is None else buffer.address for buffer in column.buffers()])
        for column in batch.columns
    ]


class Sent:
    """The end of the chain: keeps what leaves it."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []

    def offer(self, batch: pa.RecordBatch, late_before: int) -> None:
        self.batches.append(batch)


def chained(*functions: Callable[[Iterator[pa.RecordBatch]], Any]) -> tuple[Chain, Sent]:
    """Functions of batches, each a step behind the one before."""
    sent = Sent()
    out = EdgeOut([cast(OutputChannel, sent)], partitioner=None, broadcast=False, schema=SCHEMA)
    operators = [MapBatchesSpec(SCHEMA, function, SCHEMA).build() for function in functions]
    last = len(operators) - 1
    nodes = [Node((str(i),), op, [[out if i == last else Target(i + 1, 0)]]) for i, op in enumerate(operators)]
    return Chain(nodes, [out]), sent


def test_what_a_function_passes_on_lies_where_it_came_through_every_step() -> None:
    seen: list[list[tuple[int, list[int | None]]]] = []

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            seen.append(addresses(batch))
            yield batch

    batch = a_batch()
    for part in (batch, batch.slice(100, 300)):  # a call gets a slice where one of all rows would last too long
        chain, sent = chained(look, lambda batches: batches, look)
        seen.clear()
        chain.process(0, part)
        assert seen == [addresses(part)] * 2
        assert [addresses(out) for out in sent.batches] == [addresses(part)]


def test_a_function_may_look_at_columns_in_place_and_adds_only_what_it_makes() -> None:
    def doubled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            numbers = batch.column("n").to_numpy(zero_copy_only=True)
            assert not numbers.flags.owndata
            yield batch.set_column(0, "n", pa.array(2 * numbers))

    batch = a_batch()
    chain, sent = chained(doubled)
    chain.process(0, batch)
    [out] = sent.batches
    assert out.column("n").to_pylist() == [2 * i for i in range(1_000)]
    assert addresses(out)[1:] == addresses(batch)[1:]
    assert addresses(out)[:1] != addresses(batch)[:1]


def test_batches_of_fewer_columns_or_in_another_order_are_views() -> None:
    def turned(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.select(SCHEMA.names[::-1])  # columns are matched by name

    batch = a_batch()
    chain, sent = chained(turned)
    chain.process(0, batch)
    [out] = sent.batches
    assert out.schema == SCHEMA
    assert addresses(out) == addresses(batch)
