"""Texts of Parquet files come as dictionaries where they lie so, if that is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cutwater.connectors.files.source import FileSource

ROWS = 30_000


class Context:
    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        raise AssertionError("no row is bad")


def table(text: pa.DataType) -> pa.Table:
    few: list[str | None] = ["view", "click", None, "käuflich", ""]
    return pa.table(
        {
            "few": pa.array([few[i % 5] for i in range(ROWS)], text),
            "many": pa.array([f"user-{i}" for i in range(ROWS)], text),
            "n": pa.array(range(ROWS), pa.int32()),
        }
    )


def batches(source: FileSource, position: Any = None, max_rows: int = 1_000) -> list[pa.RecordBatch]:
    found: list[pa.RecordBatch] = []
    for split in source.discover():
        reader = source.open(split, position, Context())
        while not reader.exhausted:
            batch = reader.read(max_rows)
            found += [batch] if batch is not None else []
        reader.close()
    return found


def rows_of(found: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in found for row in batch.to_pylist()]


@pytest.mark.parametrize("text", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
@pytest.mark.parametrize("row_group_size", [700, ROWS])
def test_few_texts_come_as_dictionaries_and_the_rows_are_the_same(
    tmp_path: Path, text: pa.DataType, row_group_size: int
) -> None:
    made = table(pa.string() if pa.types.is_dictionary(text) else text)
    if pa.types.is_dictionary(text):
        made = made.set_column(0, "few", made.column("few").cast(text))
    pq.write_table(made, tmp_path / "rows.parquet", row_group_size=row_group_size, dictionary_pagesize_limit=1 << 14)
    source = FileSource(str(tmp_path / "rows.parquet"), schema="few string, many string, n long")
    expected = rows_of(batches(source))
    found = batches(source.reading(None, dictionaries=True))
    assert rows_of(found) == expected == made.to_pylist()
    kinds = {batch.schema.field("few").type for batch in found}
    assert kinds == {pa.dictionary(pa.int32(), pa.string())}
    assert {batch.schema.field("many").type for batch in found} == {pa.string()}
    for skipped in (1, 699, 700, ROWS - 1):
        rest = batches(source.reading(frozenset({"few", "n"}), dictionaries=True), {"row": skipped})
        assert rows_of(rest) == [{**row, "many": None} for row in expected[skipped:]]


def test_without_the_wish_they_are_plain(tmp_path: Path) -> None:
    pq.write_table(table(pa.string()), tmp_path / "rows.parquet")
    source = FileSource(str(tmp_path / "rows.parquet"))
    assert {batch.schema.field("few").type for batch in batches(source)} == {pa.string()}


def test_rows_that_may_be_dead_letters_are_plain(tmp_path: Path) -> None:
    pq.write_table(table(pa.string()), tmp_path / "rows.parquet")
    source = FileSource(str(tmp_path / "rows.parquet"), bad_rows="dead_letter")
    found = batches(source.reading(None, dictionaries=True))
    assert {batch.schema.field("few").type for batch in found} == {pa.string()}
