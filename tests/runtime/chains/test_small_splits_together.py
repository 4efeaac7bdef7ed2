"""Small files are read together, and nobody behind the source can tell: order, late rows, positions, bad rows.

That late rows and windows are the same at any order of reading is in ``test_lateness``, over joined files, too.
"""

from __future__ import annotations

import json
import random
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pytest
from late_world import SCHEMA, SECOND, ZERO, File, World

from cutwater.connectors.files.source import FileSource
from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import DataError
from cutwater.operators.window.kinds import TumblingWindow
from cutwater.plan.graph import Step, StreamType
from cutwater.runtime.chains import source_runner
from cutwater.runtime.chains.source_runner import Read, SourceRunner
from cutwater.runtime.control.messages import SplitAssignment


@pytest.fixture(autouse=True)
def _no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_runner, "_JOIN_S", 60.0)


def reader_of(folder: Path, *, bound_s: int = 5, rate: float | None = None) -> SourceRunner:
    world = World(FileSource(folder, schema=SCHEMA), 1, TumblingWindow(SECOND), bound_s, random.Random(1))
    if rate is not None:
        world.readers[0].rate = rate
    return world.readers[0]


def all_reads(reader: SourceRunner, max_rows: int = 1000) -> list[Read]:
    found: list[Read] = []
    now_s = 0.0
    while not reader.exhausted:
        now_s += 1.0
        read = reader.read(max_rows, now_s)
        if read is not None:
            found.append(read)
    return found


def ids(reads: list[Read]) -> list[int]:
    return [id for read in reads for _, batch in read.outputs for id in batch.column("id").to_pylist()]


def days(folder: Path, kind: str, count: int, rows: int = 10) -> list[int]:
    """Files that follow each other in time; returns the ids of all rows."""
    for day in range(count):
        rows_of_day = tuple((day * rows + i, 0, 100 * day + i) for i in range(rows))
        File(f"{day:02}.{kind}", rows_of_day).write(folder)
    return list(range(count * rows))


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_small_files_are_one_batch_in_the_order_of_their_paths(tmp_path: Path, kind: str) -> None:
    expected = days(tmp_path, kind, 20)
    reader = reader_of(tmp_path)
    reads = all_reads(reader)
    assert ids(reads) == expected
    assert len(reads) == 1
    assert len(reads[0].outputs) == 1
    assert ZERO + 1894 * SECOND < reads[0].watermark < ZERO + 1900 * SECOND, "as the last file allowed before its end"
    assert "00." in reader.origin, "an error behind names the first and the last"
    assert f"19.{kind}" in reader.origin
    assert all(record.done for record in reader.records().splits)


@pytest.mark.parametrize("most", [1, 7, 10, 35])
def test_no_read_has_more_rows_than_asked_for_and_positions_are_behind_them(tmp_path: Path, most: int) -> None:
    expected = days(tmp_path, "csv", 6)
    reader = reader_of(tmp_path)
    rest = expected
    while not reader.exhausted:
        read = reader.read(most, 0.0)
        if read is None:
            continue
        assert len(ids([read])) <= most
        rest = rest[len(ids([read])) :]
        again = reader_of(tmp_path)
        again.assign([], False)
        for record in reader.records().splits:
            split = again._splits[record.id]
            split.position, split.max_time, split.done = record.position, record.max_time, record.done
            if record.done:
                again._order.remove(record.id)
        assert ids(all_reads(again)) == rest, "who goes on from here reads the rest and nothing else"
    assert rest == []


def test_a_row_beyond_the_bound_of_its_file_keeps_its_own_time(tmp_path: Path) -> None:
    days(tmp_path, "csv", 3)
    File("01.csv", ((10, 0, 100), (11, 0, 140), (12, 0, 101), (13, 0, 141))).write(tmp_path)
    reads = all_reads(reader_of(tmp_path))
    assert ids(reads) == [*range(10), 10, 11, 12, 13, *range(20, 30)]
    (late,) = [read for read in reads if read.late_before != MIN_WATERMARK]
    assert ids([late]) == [12, 13]
    assert late.late_before == ZERO + (140 - 5) * SECOND - 1
    assert [ids([read]) for read in reads].index([12, 13]) == 1, "rows before it came with those of the file before"


def test_files_whose_texts_come_as_dictionaries_are_not_joined_with_others(tmp_path: Path) -> None:
    """Few different texts come as a dictionary, many do not."""
    texts = [["a", "b"] * 1500, ["b", "c"] * 1500, [f"text {n}" for n in range(3000)], ["c", "a"] * 1500]
    for number, those in enumerate(texts):
        lines = (json.dumps({"k": text, "n": n}) for n, text in enumerate(those))
        (tmp_path / f"{number}.json").write_text("\n".join(lines) + "\n")
    schema = pa.schema([("k", pa.string()), ("n", pa.int64())])
    step = Step("in", "read", FileSource(tmp_path, schema=schema), (), (StreamType(schema, None),), options={})
    reader = SourceRunner(step, 0, dictionaries=True)
    reader.assign([SplitAssignment(s.id, s.data, None, MIN_WATERMARK, False) for s in reader.source.discover()], True)
    batches = [batch for read in all_reads(reader, 1 << 14) for _, batch in read.outputs]
    assert [text for batch in batches for text in batch.column("k").to_pylist()] == [*chain.from_iterable(texts)]
    kinds = [(pa.types.is_dictionary(batch.schema.field("k").type), batch.num_rows) for batch in batches]
    assert kinds == [(True, 6000), (False, 3000), (False, 3000)], "after many no dictionary is tried any more"


def test_files_at_a_pace_are_read_one_by_one(tmp_path: Path) -> None:
    expected = days(tmp_path, "csv", 5)
    reads = all_reads(reader_of(tmp_path, rate=1e9))
    assert ids(reads) == expected
    assert len(reads) >= 5


def test_a_row_without_time_names_its_own_file(tmp_path: Path) -> None:
    days(tmp_path, "csv", 5)
    with (tmp_path / "03.csv").open("a") as file:
        file.write("99,0,\n")
    with pytest.raises(DataError, match=r"event time 't' is null in .*03\.csv lines 2 to 12, row 10"):
        all_reads(reader_of(tmp_path))
