"""Columns that nobody reads are not read from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cutwater.connectors.files.source import FileSource
from cutwater.errors import DataError

ROWS = [{"a": 1, "b": "x", "c": 1.5}, {"a": 2, "b": "y", "c": 2.5}]
SCHEMA = "a long, b string, c double"


class Context:
    """Takes dead letters."""

    def __init__(self) -> None:
        self.letters: list[tuple[str, int, str, str]] = []

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        self.letters.append((origin, position, reason, raw))


def write(folder: Path, kind: str) -> str:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif kind == "csv":
        path.write_text("a,b,c\n1,x,1.5\n2,y,2.5\n")
    else:
        path.write_text('{"a":1,"b":"x","c":1.5}\n{"a":2,"b":"y","c":2.5}\n')
    return str(path)


def rows_of(source: FileSource, context: Context | None = None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for split in source.discover():
        reader = source.open(split, None, context or Context())
        while not reader.exhausted:
            batch = reader.read(100)
            rows += batch.to_pylist() if batch is not None else []
        reader.close()
    return rows


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_what_nobody_reads_is_null(tmp_path: Path, kind: str):
    source = FileSource(write(tmp_path, kind), schema=SCHEMA)
    assert rows_of(source) == ROWS
    assert rows_of(source.reading(frozenset({"b"}))) == [{**row, "a": None, "c": None} for row in ROWS]
    assert source.reading(frozenset({"b"})).schema == source.schema


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_rows_are_counted_where_nobody_reads_any_column(tmp_path: Path, kind: str):
    source = FileSource(write(tmp_path, kind), schema=SCHEMA).reading(frozenset())
    assert len(rows_of(source)) == len(ROWS)


@pytest.mark.parametrize(("kind", "bad"), [("csv", "a,b,c\n1,x,?\n"), ("json", '{"a":1,"b":"x","c":"?"}\n')])
@pytest.mark.parametrize("odd", ["", "odd"])
def test_a_bad_value_passes_where_nobody_reads_it_however_the_row_is_parsed(
    tmp_path: Path, kind: str, bad: str, odd: str
):
    """``odd``: a row of the block is not plain, so that all of it is parsed by the slow means."""
    more = {
        "csv": "007,y,1\n+7,z,1\n",
        "json": '{"a":2,"b":"\\ud83d\\ude00","c":1}\n{"a":3,"b":"z","c":[1,2,{"d":0}]}\n',
    }
    path = tmp_path / f"rows.{kind}"
    path.write_text(bad + (more[kind] if odd else ""))
    source = FileSource(str(path), schema=SCHEMA)
    with pytest.raises(DataError):
        rows_of(source)
    assert rows_of(source.reading(frozenset({"b"})))[0]["b"] == "x"


def test_json_without_a_given_schema_is_read_whole(tmp_path: Path):
    """Else nobody would see a field that is new."""
    path = write(tmp_path, "json")
    assert rows_of(FileSource(path).reading(frozenset({"b"}))) == ROWS
    with (tmp_path / "rows.json").open("a") as file:
        file.write('{"a":3,"new":1}\n')
    source = FileSource(path)
    assert source.schema.names == ["a", "b", "c", "new"]


def test_dead_letters_of_parquet_are_whole_rows(tmp_path: Path):
    pq.write_table(pa.table({"a": [1, None], "b": ["u", "v"]}), tmp_path / "rows.parquet")
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False), ("b", pa.string())])
    source = FileSource(str(tmp_path / "rows.parquet"), schema=schema, bad_rows="dead_letter")
    context = Context()
    rows = rows_of(source.reading(frozenset({"a"})), context)
    assert [row["a"] for row in rows] == [1]
    assert [json.loads(raw) for _, _, _, raw in context.letters] == [{"a": None, "b": "v"}]
