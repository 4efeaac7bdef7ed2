"""Rows of many columns, of which few are read: batches are as large as those of narrow files, and positions hold."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cutwater.connectors.files import parquet_reader, text_reader
from cutwater.connectors.files.source import FileSource

NAMES = [f"c{i}" for i in range(40)]
READ = frozenset({"c3", "c17", "c18"})
SCHEMA = "c3 long, c17 string, c18 double"
ROWS = 700


class Context:
    """Takes dead letters, and knows how many there were."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        self.lines.append(position)


def rows(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {name: rng.choice([rng.random(), "a,b", 'say "x"', None, "plain text", 7, -1.5]) for name in NAMES}
        | {"c3": number, "c17": rng.choice(["view", "click", "käuflich"]), "c18": rng.random()}
        for number in range(ROWS)
    ]


def write(path: Path, made: list[dict[str, Any]], bad: set[int]) -> None:
    if path.suffix == ".json":
        lines = [json.dumps(row) for row in made]
    else:
        with path.open("w", newline="") as out:
            writer = csv.DictWriter(out, NAMES, lineterminator="\n")
            writer.writeheader()
            writer.writerows(made)
        lines = path.read_text().splitlines()
    first = len(lines) - len(made)
    for row in bad:
        lines[first + row] = lines[first + row].replace(f"{made[row]['c18']!r}", '"none"')
    path.write_text("\n".join(lines) + "\n")


def read_from(source: FileSource, position: Any, size: int, context: Context) -> list[tuple[list[int], Any, int]]:
    """Numbers of the rows of each read, the position behind them, and how many dead letters there were by then."""
    reader = source.open(source.discover()[0], position, context)
    found: list[tuple[list[int], Any, int]] = []
    while not reader.exhausted:
        batch = reader.read(size)
        found.append((batch["c3"].to_pylist() if batch is not None else [], reader.position, len(context.lines)))
    reader.close()
    return found


@pytest.mark.parametrize("kind", ["json", "csv"])
@pytest.mark.parametrize("bad", [set[int](), {0, 1, 350, 351, 699}])
def test_blocks_that_are_joined_have_the_positions_of_their_rows(
    tmp_path: Path, kind: str, bad: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on from any position reads the rest, and gets the rest of the dead letters."""
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", 20_000)
    path, made = tmp_path / f"rows.{kind}", rows(len(bad))
    write(path, made, bad)
    names = ", ".join(f"{name} {'long' if name == 'c3' else 'double' if name == 'c18' else 'string'}" for name in NAMES)
    source = FileSource(path, schema=SCHEMA if kind == "json" else names, bad_rows="dead_letter")
    context = Context()
    found = read_from(source.reading(READ), None, 97, context)
    assert [n for numbers, *_ in found for n in numbers] == [n for n in range(ROWS) if n not in bad]
    assert context.lines == sorted(n + (1 if kind == "json" else 2) for n in bad)
    for place, (_, position, told) in enumerate(found[:-1]):
        again = Context()
        rest = [n for numbers, *_ in read_from(source.reading(READ), position, 61, again) for n in numbers]
        assert rest == [n for numbers, *_ in found[place + 1 :] for n in numbers]
        assert again.lines == context.lines[told:]


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_few_columns_of_wide_text_come_in_large_batches(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_reader, "BLOCK_BYTES", 20_000)
    path, made = tmp_path / f"rows.{kind}", rows(3)
    write(path, made, set())
    names = ", ".join(f"{name} {'long' if name == 'c3' else 'double' if name == 'c18' else 'string'}" for name in NAMES)
    source = FileSource(path, schema=SCHEMA if kind == "json" else names).reading(READ)
    blocks = -(-path.stat().st_size // 20_000)
    found = read_from(source, None, 100_000, Context())
    assert blocks > 8
    assert len(found) <= blocks // 4 + 2
    reader = source.open(source.discover()[0], None, Context())
    batch = reader.read(100_000)
    assert batch is not None
    got = [(row["c3"], row["c17"], row["c18"]) for row in batch.to_pylist()]
    assert got == [(row["c3"], row["c17"], row["c18"]) for row in made[: batch.num_rows]]


def test_batches_of_parquet_are_as_large_as_the_columns_that_are_read_allow(tmp_path: Path) -> None:
    columns: dict[str, Any] = {f"t{i}": [f"{i} {n} of a long text" for n in range(20_000)] for i in range(60)}
    columns |= {"n": range(20_000), "a.b": range(20_000), "s": [{"x": n, "y": "z"} for n in range(20_000)]}
    pq.write_table(pa.table(columns), tmp_path / "wide.parquet", use_dictionary=False)
    source = FileSource(tmp_path / "wide.parquet")

    def batches(names: set[str] | None) -> int:
        reading = source if names is None else source.reading(frozenset(names))
        reader = reading.open(reading.discover()[0], None, Context())
        count = 0
        while not reader.exhausted:
            count += reader.read(1 << 20) is not None
        reader.close()
        return count

    assert batches(None) > 2
    assert batches({"n", "a.b", "s"}) == 1


@pytest.mark.parametrize("dictionaries", [False, True])
def test_a_large_row_group_is_not_held_in_memory(
    tmp_path: Path, dictionaries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_reader, "_HELD_BYTES", 4 << 20)
    monkeypatch.setattr(parquet_reader, "_PIECE_BYTES", 1 << 16)
    columns = {"n": range(1_000_000), "kind": ["view", "click"] * 500_000}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=1_000_000, compression="none")
    source = FileSource(tmp_path / "a.parquet").reading(None, dictionaries=dictionaries)
    before = pa.total_allocated_bytes()
    reader = source.open(source.discover()[0], {"row": 70_000}, Context())
    batch, rows = reader.read(1 << 20), 0
    assert (tmp_path / "a.parquet").stat().st_size > 7 << 20
    assert pa.total_allocated_bytes() - before < 5 << 20
    while batch is not None:
        assert np.array_equal(batch["n"], np.arange(70_000 + rows, 70_000 + rows + batch.num_rows))
        assert set(batch["kind"].unique().to_pylist()) == {"view", "click"}
        rows, batch = rows + batch.num_rows, reader.read(1 << 20)
    assert rows == 930_000
    reader.close()
