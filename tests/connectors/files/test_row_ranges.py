"""A big file of text is read in ranges of whole rows, which many readers share."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cutwater.connectors.base import Split
from cutwater.connectors.files import line_blocks, listing
from cutwater.connectors.files.source import FileSource
from cutwater.errors import DataError
from cutwater.runtime.driver.splits import Enumerator
from cutwater.storage.snapshot.manifest import SplitRecord

SCHEMA = "n long, text string"
SPLIT_BYTES = 1_000


@pytest.fixture(autouse=True)
def _small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "SPLIT_BYTES", SPLIT_BYTES)


class Context:
    def __init__(self) -> None:
        self.letters: list[tuple[int, str]] = []

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        self.letters.append((position, raw))


def read(source: FileSource, split: Split, position: Any = None, context: Context | None = None) -> list[Any]:
    reader = source.open(split, position, context or Context())
    found: list[Any] = []
    while not reader.exhausted:
        batch = reader.read(7)
        if batch is not None:
            found += batch.column("n").to_pylist()
            assert reader.origin
    reader.close()
    return found


def written(path: Path, kind: str, rows: int, seed: int, *, end: str = "\n", last: bool = True) -> list[int]:
    """Rows of very different lengths, with blank lines between them."""
    dice = random.Random(seed)
    lines = ["n,text"] if kind == "csv" else []
    for n in range(rows):
        text = "x" * dice.choice([0, 3, 40, 200, 2_500])
        lines.append(f"{n},{text}" if kind == "csv" else json.dumps({"n": n, "text": text}))
        if dice.random() < 0.1:
            lines.append("")
    path.write_bytes((end.join(lines) + (end if last else "")).encode())
    return list(range(rows))


@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize(("end", "last"), [("\n", True), ("\n", False), ("\r\n", True)])
@pytest.mark.parametrize("seed", range(5))
def test_every_row_lies_in_one_range(tmp_path: Path, kind: str, end: str, last: bool, seed: int) -> None:
    expected = written(tmp_path / f"a.{kind}", kind, 200, seed, end=end, last=last)
    source = FileSource(str(tmp_path / f"a.{kind}"), schema=SCHEMA)
    splits = source.discover()
    assert len(splits) > 10
    assert len({split.id for split in splits}) == len(splits)
    assert [n for split in splits for n in read(source, split)] == expected


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_position_is_one_of_the_range(tmp_path: Path, kind: str) -> None:
    written(tmp_path / f"a.{kind}", kind, 100, 1)
    source = FileSource(str(tmp_path / f"a.{kind}"), schema=SCHEMA)
    for split in source.discover():
        whole = read(source, split)
        reader, seen = source.open(split, None, Context()), list[int]()
        while not reader.exhausted:
            position = json.loads(json.dumps(reader.position))
            assert seen + read(source, split, position) == whole
            batch = reader.read(3)
            seen += batch.column("n").to_pylist() if batch is not None else []
        reader.close()


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_lines_are_those_of_the_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    written(path, kind, 200, 2)
    lines = path.read_bytes().split(b"\n")
    bad = [40, 90, len(lines) - 1]  # numbers of lines, from 1
    for number in bad:
        lines[number - 1] = b"nonsense,x" if kind == "csv" else b'{"n": "nonsense"}'
    path.write_bytes(b"\n".join(lines))
    source, context = FileSource(str(path), schema=SCHEMA, bad_rows="dead_letter"), Context()
    splits = source.discover()
    rows = [n for split in splits for n in read(source, split, context=context)]
    assert len(rows) == len(set(rows))
    assert [number for number, _ in context.letters] == bad
    failing, told = FileSource(str(path), schema=SCHEMA), list[str]()
    for split in failing.discover():
        try:
            read(failing, split)
        except DataError as e:
            told.append(str(e))
    numbers = [number for number in bad for text in told if f"line {number}:" in text]
    assert len(numbers) == len(told)
    assert numbers[0] == bad[0]


def test_what_cannot_be_told_apart_is_read_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "quoted.csv").write_text("n,text\n" + "".join(f'{n},"a\nb"\n' for n in range(500)))
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(random.Random(1).randbytes(5_000).hex().encode()))
    for name in ("quoted.csv", "packed.json.gz"):
        (split,) = FileSource(str(tmp_path / name), schema=SCHEMA).discover()
        assert split.id == str(tmp_path / name)
    whole = FileSource(str(tmp_path / "quoted.csv"), schema=SCHEMA)
    assert read(whole, whole.discover()[0]) == list(range(500))
    # Without quoting every newline ends a row.
    (tmp_path / "plain.csv").write_text("n,text\n" + "".join(f'{n},5" pipe\n' for n in range(500)))
    plain = FileSource(str(tmp_path / "plain.csv"), schema=SCHEMA, quote=None)
    assert len(plain.discover()) > 1
    assert [n for split in plain.discover() for n in read(plain, split)] == list(range(500))


def test_a_snapshot_that_knows_the_whole_file_reads_it_on(tmp_path: Path) -> None:
    """Of a version that had one split a file: its parts would be rows twice."""
    path = tmp_path / "a.json"
    written(path, "json", 200, 3)
    written(tmp_path / "b.json", "json", 200, 4)
    source = FileSource(str(tmp_path), schema=SCHEMA)
    enumerator = Enumerator("in", source, 2)
    record = SplitRecord(str(path), listing.FileEntry(str(path), path.stat().st_size, None).to_data(), None, 0, False)
    enumerator.restore({0: [record]}, 2, {})
    dealt = [split.id for some in enumerator.assign(source.discover()) for split in some]
    assert len(dealt) > 10
    assert all(id.startswith(f"{tmp_path}/b.json#") for id in dealt)
    assert read(source, Split(record.id, record.data)) == list(range(200))


def test_a_file_that_shrinks_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    written(path, "json", 200, 5)
    source = FileSource(str(path), schema=SCHEMA)
    splits = source.discover()
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(DataError, match="shrank"):
        read(source, splits[-1])


def test_parts_that_are_known_are_not_read_again_as_a_whole(tmp_path: Path) -> None:
    """The program says now that there are quotes: then the file is listed as a whole."""
    (tmp_path / "a.csv").write_text("n,text\n" + "".join(f'{n},5" pipe\n' for n in range(500)))
    parts = FileSource(str(tmp_path), schema=SCHEMA, quote=None).discover()
    whole = FileSource(str(tmp_path), schema=SCHEMA).discover()
    assert len(parts) > 1
    assert [split.id for split in whole] == [str(tmp_path / "a.csv")]
    enumerator = Enumerator("in", None, 2)
    enumerator.restore({0: [SplitRecord(s.id, s.data, None, 0, True) for s in parts]}, 2, {})
    assert enumerator.assign(whole) == [[], []]


def test_another_encoding_is_one_error_and_no_dead_letters(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes("".join(f'{{"n": {n}}}\n' for n in range(500)).encode("utf-16"))
    source, context = FileSource(str(tmp_path), schema=SCHEMA, bad_rows="dead_letter"), Context()
    (split,) = source.discover()
    with pytest.raises(DataError, match="is UTF-16"):
        read(source, split, context=context)
    assert context.letters == []


def test_a_header_behind_many_blank_lines_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n" * 3 * SPLIT_BYTES + "n,text\n" + "".join(f"{n},x\n" for n in range(500)))
    source = FileSource(str(tmp_path), schema=SCHEMA)
    assert [n for split in source.discover() for n in read(source, split)] == list(range(500))


def test_what_stands_before_a_range_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    written(path, "json", 300, 6)
    counted: list[int] = []
    real = line_blocks._lines_before

    def before(entry: listing.FileEntry, offset: int) -> int:
        nearest = max((at for at, _ in line_blocks._COUNTED.get(entry, []) if at <= offset), default=0)
        counted.append(offset - nearest)
        return real(entry, offset)

    monkeypatch.setattr(line_blocks, "_lines_before", before)
    source = FileSource(str(path), schema=SCHEMA)
    for split in source.discover():
        read(source, split)
    assert sum(counted) <= path.stat().st_size


def test_an_origin_is_told_although_the_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    written(path, "json", 200, 7)
    source = FileSource(str(path), schema=SCHEMA)
    reader = source.open(source.discover()[3], None, Context())
    assert reader.read(5) is not None
    path.unlink()
    assert reader.origin == f"{path} lines 1 to 5 of a part of it"


@pytest.mark.parametrize("parallelism", [2, 3])
def test_parts_of_unequal_size_are_dealt_by_their_bytes(tmp_path: Path, parallelism: int) -> None:
    """Each file has a large part and a small one: in turns one subtask would get all of the large ones."""
    for number in range(12):
        table = pa.table({"n": np.random.default_rng(number).integers(0, 1 << 60, 240)})
        pq.write_table(
            table, tmp_path / f"{number:02}.parquet", row_group_size=80, compression="none", use_dictionary=False
        )
    splits = FileSource(str(tmp_path)).discover()
    sizes = {split.id: split.data["weight"] for split in splits}
    assert len(splits) == 24
    assert max(sizes.values()) > 1.5 * min(sizes.values())
    dealt = Enumerator("in", None, parallelism).assign(splits)
    loads = [sum(sizes[split.id] for split in some) for some in dealt]
    assert max(loads) - min(loads) <= max(sizes.values())
    again = Enumerator("in", None, parallelism)
    records = [SplitRecord(split.id, split.data, None, 0, False) for split in splits]
    loads = [sum(sizes[split.id] for split in some) for some in again.restore({0: records}, 1, {})]
    assert max(loads) - min(loads) <= max(sizes.values())
