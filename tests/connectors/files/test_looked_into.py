"""Small text files are opened once, though somebody looks for their first times before they are read."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_bad_input import Context

from cutwater.connectors.base import earliest_time
from cutwater.connectors.files import looked_into
from cutwater.connectors.files.listing import FileEntry
from cutwater.connectors.files.source import FileSource
from cutwater.errors import DataError

SCHEMA = "at timestamp, n long"
ZERO = 1_767_225_600_000_000


def write(folder: Path, kind: str, rows: int) -> Path:
    path = folder / f"rows.{kind}"
    times = [f"2026-01-01T00:00:{second:02}Z" for second in range(rows)]
    if "json" in kind:
        text = "".join(f'{{"at":"{at}","n":{n}}}\n' for n, at in enumerate(times))
    else:
        text = "\nat,n\n" + "".join(f"{at},{n}\n" for n, at in enumerate(times))
    path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    return path


def numbers(source: FileSource, split: Any, position: Any = None) -> tuple[list[int], list[Any]]:
    """Column n, and the positions on the way."""
    reader, found, positions = source.open(split, position, Context()), list[int](), list[Any]()
    while not reader.exhausted:
        positions.append(reader.position)
        batch = reader.read(3)
        found += batch["n"].to_pylist() if batch is not None else []
    reader.close()
    return found, positions


def opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that are opened from now on."""
    opened: list[str] = []
    whole = FileEntry.open

    def count(entry: FileEntry, **options: Any) -> Any:
        opened.append(entry.path)
        return whole(entry, **options)

    monkeypatch.setattr(FileEntry, "open", count)
    return opened


@pytest.mark.parametrize("kind", ["json", "csv", "json.gz", "csv.gz"])
def test_a_small_file_is_opened_once_and_read_the_same(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, kind, 20)
    source = FileSource(tmp_path, schema=SCHEMA)
    (split,) = source.discover()
    expected = numbers(source, split)
    opened = opens(monkeypatch)
    assert earliest_time(source, split, "at", 5) == ZERO - 5
    assert numbers(source, split) == expected
    assert len(opened) == 1
    assert numbers(source, split) == expected, "what was kept is given once"
    assert len(opened) == 2
    assert earliest_time(source, split, "at", 5) == ZERO - 5
    assert numbers(source, split, expected[1][2]) == (expected[0][6:], expected[1][2:])


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_a_file_that_changes_after_it_was_looked_into_is_told_of(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, 20)
    source = FileSource(tmp_path, schema=SCHEMA)
    (split,) = source.discover()
    assert earliest_time(source, split, "at", 0) == ZERO
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="it shrank from"):
        numbers(source, split)
    assert earliest_time(source, split, "at", 0) is None
    path.unlink()
    with pytest.raises(DataError, match="vanished"):
        numbers(source, split)


def test_so_much_is_kept_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number), "json", 20)
    size = (tmp_path / "0" / "rows.json").stat().st_size
    monkeypatch.setattr(looked_into, "_MOST_BYTES", 3 * size)
    source = FileSource(tmp_path, schema=SCHEMA)
    splits = source.discover()
    for split in splits:
        assert earliest_time(source, split, "at", 0) == ZERO
    opened = opens(monkeypatch)
    for split in splits:
        assert numbers(source, split)[0] == list(range(20))
    assert opened == [split.data["file"] for split in splits[3:]]


def test_a_bad_row_is_met_by_whoever_reads_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "json", 20)
    path.write_text(path.read_text() + '{"n":"x"}\n')
    source = FileSource(tmp_path, schema=SCHEMA, bad_rows="dead_letter")
    (split,) = source.discover()
    assert earliest_time(source, split, "at", 0) is None
    context = Context()
    reader = source.open(split, None, context)
    while not reader.exhausted:
        reader.read(100)
    assert [position for position, _ in context.letters] == [21]


def test_footers_are_kept_while_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": [1, 2]}), path)
    footer = pq.read_metadata(path)
    monkeypatch.setattr(looked_into, "_FOOTER_BYTES", 2 * footer.serialized_size)
    kept = looked_into.LookedInto(dictionaries=False)
    for split in ("a", "b", "b", "c"):
        kept.keep_footer(split, footer)
    assert kept.take_footer("a") is footer
    assert kept.take_footer("a") is None, "it is taken once"
    assert kept.take_footer("c") is None, "there was no room"
    kept.keep_footer("c", footer)
    assert kept.take_footer("c") is footer
