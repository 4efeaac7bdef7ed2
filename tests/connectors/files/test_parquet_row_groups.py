"""Row groups that were encoded one by one lie in one file, which readers that know nothing of it read."""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cutwater.connectors.files.parquet_row_groups import MAGIC, Footer, placed
from cutwater.connectors.files.part_formats import ParquetEncoder
from cutwater.errors import CorruptSnapshotError
from damage import flipped, truncated

SCHEMA = pa.schema(
    {
        "n": pa.int64(),
        "word": pa.string(),
        "ok": pa.bool_(),
        "at": pa.timestamp("us", tz="UTC"),
        "many": pa.list_(pa.struct([("x", pa.float64()), ("y", pa.decimal128(9, 2))])),
    }
)


def rows(first: int, number: int) -> pa.RecordBatch:
    many = [[{"x": n / 4, "y": None}] * (n % 3) if n % 5 else None for n in range(first, first + number)]
    columns = {
        "n": range(first, first + number),
        "word": [f"w{n % 7}" for n in range(first, first + number)],
        "ok": [n % 2 == 0 for n in range(first, first + number)],
        "at": [n * 10**9 for n in range(first, first + number)],
        "many": many,
    }
    return pa.RecordBatch.from_pydict(columns, SCHEMA)


def file_of(table: pa.RecordBatch | pa.Table, **options: Any) -> pa.Buffer:
    into = pa.BufferOutputStream()
    with pq.ParquetWriter(into, table.schema, **options) as writer:
        writer.write(table)
    return into.getvalue()


def body_of(encoder: ParquetEncoder, batches: list[pa.RecordBatch]) -> bytes:
    return b"".join(bytes(memoryview(body)) for body in encoder.rows(batches))


def test_a_file_with_dead_footers_is_read_by_everybody_and_so_is_each_of_its_cuts(tmp_path: Path) -> None:
    encoder = ParquetEncoder(SCHEMA, "zstd", None, 100)
    body = bytes(encoder.begin())
    cuts: list[tuple[int, int]] = []
    for group in range(40):
        body += body_of(encoder, [rows(group * 100, 60), rows(group * 100 + 60, 40)])
        if group % 3 == 2 or group == 39:
            body += bytes(encoder.end())
            cuts.append((len(body), (group + 1) * 100))
    for length, number in cuts:
        path = tmp_path / f"{length}.parquet"
        path.write_bytes(body[:length])
        expected = rows(0, number)
        assert pq.read_table(path).combine_chunks().to_batches() == [expected]
        assert pq.read_metadata(path).num_row_groups == number // 100
    path = tmp_path / f"{len(body)}.parquet"
    found = duckdb.sql(f"select count(*), sum(n), count(distinct word), sum(len(many)) from '{path}'").fetchone()
    lengths = sum(n % 3 for n in range(4_000) if n % 5)
    assert found == (4_000, 7_998_000, 7, lengths)
    assert pl.read_parquet(path).equals(pl.from_arrow(rows(0, 4_000)))
    found = duckdb.sql(f"select n from '{path}' where n between 2345 and 2347 order by n").fetchall()
    assert found == [(2345,), (2346,), (2347,)], "by the statistics of row groups"


@pytest.mark.parametrize("options", [{}, {"write_page_index": True}, {"compression": "none", "use_dictionary": False}])
def test_files_of_others_are_taken_over_whole(tmp_path: Path, options: dict[str, Any]) -> None:
    """With indexes of pages, whose offsets move as well."""
    encoder = ParquetEncoder(SCHEMA, "snappy", None, 1_000)
    body = bytes(encoder.begin())
    for first in (0, 500, 900):
        body += bytes(memoryview(encoder.taken_over(file_of(rows(first, 500 if not first else 400), **options))))
    body += body_of(encoder, [rows(1_300, 10)]) + bytes(encoder.end())
    path = tmp_path / "all.parquet"
    path.write_bytes(body)
    assert pq.read_table(path).combine_chunks().to_batches() == [rows(0, 1_310)]
    assert pl.scan_parquet(path).filter(pl.col("n") == 1_299).collect()["word"].to_list() == [f"w{1_299 % 7}"]
    assert duckdb.sql(f"select sum(n) from '{path}' where n < 950").fetchone() == (950 * 949 // 2,)


def test_a_footer_comes_out_as_it_came_in() -> None:
    for file in (file_of(rows(0, 50)), file_of(pa.table({f"c{n}": [float(n)] for n in range(40)}))):
        footer = Footer(file)
        (group,) = footer.row_groups
        assert footer.end_of_file([placed(group, 0, 0)], group.rows) == bytes(memoryview(file)[footer.data_end :])


def test_a_damaged_file_is_no_file_or_another_one_and_nothing_worse() -> None:
    """Digests are compared before; whoever has none to fear may have written anything."""
    file = bytes(memoryview(file_of(pa.table({"n": [1, 2, 3]}), compression="none")))
    refused = 0
    for damaged in itertools.chain(flipped(file), truncated(file)):
        encoder = ParquetEncoder(pa.schema({"n": pa.int64()}), "zstd", None, 10)
        try:
            encoder.begin()
            encoder.taken_over(pa.py_buffer(damaged))
            with suppress(OverflowError):
                encoder.end()
        except CorruptSnapshotError:
            refused += 1
    assert refused > len(file)
    with pytest.raises(CorruptSnapshotError, match="no whole Parquet file"):
        Footer(pa.py_buffer(MAGIC))
