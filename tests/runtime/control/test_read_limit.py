"""A split read up to a position gives exactly the rows before it, whatever the reader and wherever the position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cutwater as cw
from cutwater.errors import DataError
from cutwater.runtime.control.read_limit import is_before, read_up_to

ROWS = 300


class Context:
    step, subtask = "in", 0

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        raise AssertionError("no bad rows here")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("in")
    table = pa.table({"n": pa.array(range(ROWS), pa.int64())})
    pq.write_table(table, folder / "rows.parquet", row_group_size=50)
    lines = "".join(f"{n}\n\n" if n % 7 == 0 else f"{n}\n" for n in range(ROWS))
    (folder / "rows.csv").write_text("n\n" + lines)
    batches = [batch for start in range(0, ROWS, 40) for batch in table.slice(start, 40).to_batches()]
    return {
        "parquet": cw.files(folder / "rows.parquet").as_source(),
        "csv": cw.files(folder / "rows.csv", schema="n long").as_source(),
        "memory": cw.memory(batches, schema="n long"),
        "stripes": cw.generate(
            lambda start, n: pa.record_batch({"n": list(range(start, start + n))}),
            rows=2 * ROWS,
            stripe_rows=16,
            partitions=2,
        ),
    }


def rows_of(batch: pa.RecordBatch | None) -> list[int]:
    return batch.column(0).to_pylist() if batch is not None else []


@pytest.mark.parametrize("kind", ["parquet", "csv", "memory", "stripes"])
def test_exactly_the_rows_before_the_position(sources: dict[str, Any], kind: str) -> None:
    source = sources[kind]
    split = source.discover()[0]

    def opened(position: Any) -> Any:
        return source.open(split, position, Context())

    @given(st.lists(st.integers(1, 90), max_size=4), st.lists(st.integers(1, 120), min_size=1, max_size=4))
    @settings(max_examples=25, deadline=None, database=None)
    def check(ahead: list[int], sizes: list[int]) -> None:
        leader, expected = opened(None), []
        for size in ahead:  # the leader's reads are cut differently
            expected += rows_of(leader.read(size))
        limit = leader.position
        reader, found, turn = opened(None), [], 0
        while is_before(reader.position, limit):
            reader, batch = read_up_to(reader, limit, sizes[turn % len(sizes)], opened)
            found += rows_of(batch)
            turn += 1
            assert turn < 2 * ROWS
        assert found == expected
        assert reader.position == limit or not expected
        assert read_up_to(reader, limit, 10, opened)[1] is None
        rest = []
        while not leader.exhausted:
            rest += rows_of(leader.read(64))
        behind = opened(reader.position)
        while not behind.exhausted:
            found += rows_of(behind.read(64))
        assert found == expected + rest

    check()


def test_positions_without_an_order_are_named() -> None:
    with pytest.raises(DataError, match="'abc' has no order"):
        is_before("abc", 3)
    with pytest.raises(DataError, match="has no order"):
        is_before({"token": "x"}, {"token": "y"})
