"""Columns of few texts come from JSON and CSV as dictionaries: the same rows as plain, whatever the files hold."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cutwater.connectors.files.source import FileSource
from cutwater.connectors.text.text_dictionary import MOST_VALUES, TextDictionary
from cutwater.errors import DataError

ROWS = 3_000
FEW: list[str | None] = [
    "",
    "a",
    "12345678",
    "123456789",
    "12345678x",
    "ä",
    "日本語" * 9,
    'quo"te',
    "back\\slash",
    None,
]


class Context:
    """Keeps what could not be read."""

    def __init__(self) -> None:
        self.dead: list[tuple[int, str]] = []

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        self.dead.append((position, reason))


def source(path: Path, **settings: Any) -> FileSource:
    made = FileSource(path, schema="few string, many string, n long", **settings)
    return made.reading(None, dictionaries=True)


def batches(made: FileSource, context: Context, max_rows: int = 100_000) -> list[pa.RecordBatch]:
    found: list[pa.RecordBatch] = []
    for split in made.discover():
        reader = made.open(split, None, context)
        while not reader.exhausted:
            batch = reader.read(max_rows)
            if batch is not None:
                found.append(batch)
        reader.close()
    return found


def rows_of(found: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in found for row in batch.to_pylist()]


def random_rows(seed: int, rows: int = ROWS) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"few": rng.choice(FEW), "many": f"text {rng.random()}", "n": n} for n in range(rows)]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as out:
        if path.suffix == ".json":
            out.writelines(json.dumps(row, ensure_ascii=row["n"] % 2 == 0) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(out, ["few", "many", "n"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def expected(path: Path) -> list[dict[str, Any]]:
    """The same file read by Python; an empty field of CSV without quotes is null."""
    with path.open(newline="", encoding="utf-8") as lines:
        if path.suffix == ".json":
            return [json.loads(line) for line in lines]
        return [{**row, "few": row["few"] or None, "n": int(row["n"])} for row in csv.DictReader(lines)]


@pytest.mark.parametrize("suffix", ["json", "csv"])
@pytest.mark.parametrize("max_rows", [100_000, 7])
def test_the_rows_are_those_of_the_file(tmp_path: Path, suffix: str, max_rows: int) -> None:
    path = tmp_path / f"rows.{suffix}"
    write(path, random_rows(1))
    found = batches(source(path), Context(), max_rows)
    assert isinstance(found[0]["few"], pa.DictionaryArray)
    assert found[-1].schema.field("many").type == pa.string()  # too many values for a dictionary
    assert rows_of(found) == expected(path)


def test_one_dictionary_serves_all_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutwater.connectors.files.text_reader.BLOCK_BYTES", 100_000)
    path = tmp_path / "rows.json"
    write(path, random_rows(2, 36_000))
    found = batches(source(path), Context())
    assert len(found) > 4
    assert rows_of(found) == expected(path)
    few = [batch["few"] for batch in found[1:-1]]  # the last block may have too few rows
    memory = {column.dictionary.buffers()[2].address for column in few}
    assert len(memory) == 1


def test_a_bad_row_among_dictionaries_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write(path, random_rows(3))
    lines = path.read_bytes().split(b"\n")
    lines[1_700] = b'{"few":"a","many":"b","n":"no number"}'
    lines[2_200] = b'{"few":"\xff\xfe","many":"b","n":1}'
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match="line 1701"):
        batches(source(path), Context())
    context = Context()
    found = batches(source(path, bad_rows="dead_letter"), context)
    assert [line for line, _ in context.dead] == [1_701, 2_201]
    good = [json.loads(line) for n, line in enumerate(lines) if line and n not in (1_700, 2_200)]
    assert rows_of(found) == good


def test_texts_that_are_not_utf8_are_refused_among_dictionaries(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"few,many,n\n" + b"a,b,1\n" * 2_000 + b"\xc3(,b,2\n" + b"a,b,1\n" * 2_000)
    with pytest.raises(DataError, match="line 2002"):
        batches(source(path), Context())


def column(texts: list[str | None], dictionary: TextDictionary) -> pa.DictionaryArray | None:
    encoded = [(text or "").encode() for text in texts]
    data = np.frombuffer(b"".join(encoded) + bytes(16), np.uint8)
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    valid = np.array([text is not None for text in texts], np.uint8)
    mask = pa.py_buffer(np.packbits(valid, bitorder="little"))
    return dictionary.column(data, ends, valid, mask, len(valid) - int(valid.sum()))


def test_random_texts_keep_their_places() -> None:
    rng = random.Random(4)
    alphabet = ["", "a", "b", "\0", "a\0", "ab", "x" * 8, "x" * 9, "x" * 16, "x" * 16 + "y", "é"]
    dictionary = TextDictionary()
    seen: list[str] = []
    for _ in range(50):
        texts = [None if rng.random() < 0.1 else "".join(rng.choices(alphabet, k=rng.randrange(3))) for _ in range(90)]
        found = column(texts, dictionary)
        assert found is not None
        assert found.to_pylist() == texts
        seen += [text for text in dict.fromkeys(texts) if text is not None and text not in seen]
        assert found.dictionary.to_pylist() == seen


def test_more_values_than_a_dictionary_has_room_for() -> None:
    assert column([f"v{n}" for n in range(MOST_VALUES)] * 3, TextDictionary()) is not None
    assert column([f"v{n}" for n in range(MOST_VALUES + 1)] * 3, TextDictionary()) is None
    assert column([f"v{n}" for n in range(MOST_VALUES)], TextDictionary()) is None  # nearly all of them are new
    assert column(["long" * 9_000, "long " * 9_000, "very long " * 9_000], TextDictionary()) is None
