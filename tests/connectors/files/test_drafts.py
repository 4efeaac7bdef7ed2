"""Rows are encoded once, into the file that readers see; what is in no file yet is found again whoever goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sink_identity import SCHEMA, Identity, numbers

import cutwater as cw
from cutwater.connectors.base import Json, PreCommit, SinkWriter
from cutwater.connectors.files.part_commit import LogState
from cutwater.connectors.files.part_formats import CsvParts, JsonParts, ParquetParts, PartFormat
from cutwater.connectors.files.sink import FileSink
from cutwater.connectors.staging import Guard, StagingLog, staging_beside
from cutwater.errors import CorruptSnapshotError, DataError, SealError
from cutwater.storage.store.seal import Seal

FORMATS: dict[str, PartFormat] = {
    "parquet": ParquetParts(row_group_rows=4),
    "json": JsonParts(),
    "json, zstd": JsonParts("zstd"),
    "csv, gzip": CsvParts("gzip"),
}
READERS = {".parquet": "read_parquet", ".jsonl": "read_json", ".csv": "read_csv"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def checkpoint(sink: FileSink, writer: SinkWriter, id: int, *rows: int, final: bool = False) -> PreCommit:
    """Rows, a checkpoint behind them, and its commit."""
    if rows:
        writer.write(numbers(*rows))
    made = writer.pre_commit(id, final)()
    sink.committer(SCHEMA, "uid", "out").commit(id, made.handles)
    return made


def visible(out: Path) -> dict[str, list[int]]:
    """By DuckDB: the rows of each file, by their names' end."""
    found: dict[str, list[int]] = {}
    for path in sorted(out.iterdir()):
        if not path.name.startswith("_"):
            suffix = next(suffix for suffix in READERS if suffix in path.name)
            rows = duckdb.sql(f"select n from {READERS[suffix]}('{path}')").fetchall()
            end = path.name.rsplit("-", 3)[1] + path.name[path.name.index(".") :]
            found.setdefault(end, []).extend(n for (n,) in rows)
    return found


def all_rows(out: Path) -> list[int]:
    return [n for rows in visible(out).values() for n in rows]


def staged(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "_cutwater" / "uid" / "out").iterdir())


@pytest.mark.parametrize("parts", FORMATS.values(), ids=FORMATS)
def test_where_each_checkpoint_ends_its_file_bytes_are_written_once(
    out: Path, parts: PartFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = FileSink(str(out), parts, roll_interval_ms=0)
    writer = sink.writer(SCHEMA, Identity(), [])
    written: list[int] = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (written.append(len(data)), real(fd, data))[1])
    for id in range(1, 5):
        checkpoint(sink, writer, id, *range(100 * id, 100 * id + 50))
    assert all_rows(out) == [n for id in range(1, 5) for n in range(100 * id, 100 * id + 50)]
    assert sum(written) == sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    assert staged(out) == []


def test_row_groups_do_not_depend_on_checkpoints(out: Path) -> None:
    sink = FileSink(str(out), ParquetParts(row_group_rows=10), roll_interval_ms="1h")
    writer = sink.writer(SCHEMA, Identity(), [])
    for id in range(1, 100):
        checkpoint(sink, writer, id, *range(3 * id, 3 * id + 3))
    checkpoint(sink, writer, 100, final=True)
    (path,) = out.glob("*.parquet")
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [10] * 29 + [7]
    assert pq.read_table(path)["n"].to_pylist() == list(range(3, 300))


@pytest.mark.parametrize("parts", FORMATS.values(), ids=FORMATS)
def test_who_goes_on_finds_each_row_once_whatever_the_old_writer_does(out: Path, parts: PartFormat) -> None:
    """Twice, with two subtasks that become one, and then one that becomes two."""
    sink = FileSink(str(out), parts, roll_interval_ms="1h")
    old = [sink.writer(SCHEMA, Identity(subtask=s, incarnation=1), []) for s in (0, 1)]
    states = [checkpoint(sink, writer, 1, *range(100 * s, 100 * s + 9)).state for s, writer in enumerate(old)]
    one = sink.writer(SCHEMA, Identity(incarnation=2), states)
    for zombie in old:
        zombie.write(numbers(*range(-20, 0)))
        zombie.pre_commit(2, False)()
    second = checkpoint(sink, one, 2, 500, 501)
    heirs = [sink.writer(SCHEMA, Identity(subtask=s, incarnation=3), [second.state] if not s else []) for s in (0, 1)]
    one.write(numbers(-1, -2, -3, -4, -5))
    one.pre_commit(3, False)()
    for s, heir in enumerate(heirs):
        checkpoint(sink, heir, 3, 600 + s, final=True)
    assert sorted(all_rows(out)) == [*range(9), *range(100, 109), 500, 501, 600, 601]


def test_what_a_program_with_another_format_left_becomes_a_file_as_it_is(out: Path) -> None:
    before = FileSink(str(out), JsonParts("gzip"), roll_interval_ms="1h")
    state = checkpoint(before, before.writer(SCHEMA, Identity(), []), 1, 1, 2, 3).state
    after = FileSink(str(out), roll_interval_ms="1h")
    heir = after.writer(SCHEMA, Identity(incarnation=2), [state])
    checkpoint(after, heir, 2, 4)
    assert visible(out) == {"0000000002.jsonl.gz": [1, 2, 3]}
    checkpoint(after, heir, 3, 5, final=True)
    assert visible(out) == {"0000000002.jsonl.gz": [1, 2, 3], "0000000003.parquet": [4, 5]}


@pytest.mark.parametrize("parts", FORMATS.values(), ids=FORMATS)
def test_rows_with_other_columns_lie_in_files_of_their_own(out: Path, parts: PartFormat) -> None:
    sink = FileSink(str(out), parts, roll_interval_ms="1h")
    state = checkpoint(sink, sink.writer(SCHEMA, Identity(), []), 1, *range(6)).state
    wider = pa.schema({"n": pa.int64(), "more": pa.string()})
    heir = sink.writer(wider, Identity(incarnation=2), [state])
    heir.write(pa.RecordBatch.from_pydict({"n": [6], "more": ["x"]}, wider))
    sink.committer(wider, "uid", "out").commit(2, heir.pre_commit(2, True)().handles)
    # of Parquet, row groups and what waited for one lay apart
    expected = [[0, 1, 2, 3], [4, 5], [6]] if isinstance(parts, ParquetParts) else [[0, 1, 2, 3, 4, 5], [6]]
    paths = sorted(out.glob("part-*"))
    reader = READERS[next(suffix for suffix in READERS if suffix in paths[0].name)]
    found = [duckdb.sql(f"select * from {reader}('{path}')") for path in paths]
    assert sorted([row[0] for row in rows.fetchall()] for rows in found) == expected
    assert sorted(len(rows.columns) for rows in found) == [1] * (len(expected) - 1) + [2]


@pytest.mark.parametrize("parts", FORMATS.values(), ids=FORMATS)
def test_a_snapshot_of_an_older_release_has_pieces_of_arrow_data(out: Path, parts: PartFormat) -> None:
    log = StagingLog(staging_beside(str(out), "uid", "out"), SCHEMA, 0, 1)
    for rows in (range(5), range(5, 7)):
        log.append(numbers(*rows))
        log.seal()
    log.make_durable(log.cuts())
    cuts = [{k: v for k, v in msgspec.to_builtins(cut).items() if k != "form"} for cut in log.cuts()]
    state: Json = {"uid": "uid", "pieces": cuts, "age_ms": 5.0}
    sink = FileSink(str(out), parts, roll_interval_ms="1h")
    heir = sink.writer(SCHEMA, Identity(incarnation=2), [state])
    checkpoint(sink, heir, 2, 7)
    assert all_rows(out) == []
    checkpoint(sink, heir, 3, 8, final=True)
    assert all_rows(out) == list(range(9))
    assert len(visible(out)) == 1


@pytest.mark.parametrize("parts", FORMATS.values(), ids=FORMATS)
def test_a_damaged_draft_is_found_before_anything_is_taken_over(out: Path, parts: PartFormat) -> None:
    keyed = Guard(Seal([b"0123456789abcdef"]))
    sink = FileSink(str(out), parts, roll_interval_ms="1h", guard=keyed)
    state = checkpoint(sink, sink.writer(SCHEMA, Identity(), []), 1, *range(8)).state
    (piece,) = msgspec.convert(state, LogState).pieces
    other = FileSink(str(out), parts, guard=Guard(Seal([b"another key, longer"])))
    with pytest.raises(SealError, match=rf"{piece.file}.*sealed with key"):
        other.writer(SCHEMA, Identity(incarnation=2), [state])
    rotated = FileSink(str(out), parts, guard=Guard(Seal([b"another key, longer", b"0123456789abcdef"])))
    made = rotated.writer(SCHEMA, Identity(incarnation=2), [state]).pre_commit(2, False)()
    assert (len(made.handles), made.state) == (1, None), "nothing is to need the old key for longer"
    path = out / "_cutwater/uid/out" / piece.file
    body = path.read_bytes()
    path.write_bytes(body[:40] + bytes([body[40] ^ 1]) + body[41:])
    with pytest.raises(CorruptSnapshotError, match=f"{piece.file}.*differs from its digest"):
        sink.writer(SCHEMA, Identity(incarnation=2), [state])


def test_without_hard_links_a_part_is_a_copy(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EOPNOTSUPP, "no links")))
    sink = FileSink(str(out), roll_interval_ms=0)
    made = checkpoint(sink, sink.writer(SCHEMA, Identity(), []), 1, 1, 2)
    assert visible(out) == {"0000000001.parquet": [1, 2]}
    assert made.handles[0]["bytes"] == next(out.glob("*.parquet")).stat().st_size
    assert staged(out) == []


def test_a_checkpoint_with_many_parts_looks_and_syncs_once(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = FileSink(str(out), roll_rows=1, roll_interval_ms="1h")
    writer = sink.writer(SCHEMA, Identity(), [])
    for n in range(20):
        writer.write(numbers(n))
    calls: list[str] = []
    sync, listing = os.fsync, os.listdir
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd))[1])
    monkeypatch.setattr(os, "listdir", lambda path: (calls.append(f"list {path}"), listing(path))[1])
    handles = writer.pre_commit(1, False)().handles
    folder = str(out / "_cutwater/uid/out")
    assert calls == [*(f"{folder}/{handle['pieces'][0]}" for handle in handles), folder]
    assert len(handles) == 20
    calls.clear()
    sink.committer(SCHEMA, "uid", "out").commit(1, handles)
    assert calls == [str(out)]
    assert sorted(all_rows(out)) == list(range(20))


SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    *[("parquet", {"compression": name}, ".parquet") for name in ("zstd", "snappy", "gzip", "lz4", "none")],
    ("parquet", {"compression": "zstd", "compression_level": 19, "row_group_rows": 100}, ".parquet"),
    ("json", {"compression": "gzip", "compression_level": 9}, ".jsonl.gz"),
    ("json", {"compression": "zstd", "compression_level": 5}, ".jsonl.zst"),
    ("json", {"compression": "none"}, ".jsonl"),
    ("csv", {"compression": "zstd"}, ".csv.zst"),
]


@pytest.mark.parametrize(("format", "options", "suffix"), SETTINGS, ids=str)
def test_settings_of_a_format_are_those_of_its_files(
    out: Path, format: Any, options: dict[str, Any], suffix: str
) -> None:
    sink = cw.files(out, format=format, roll_interval_ms=0, **options).as_sink()
    checkpoint(sink, sink.writer(SCHEMA, Identity(), []), 1, *range(300))
    assert visible(out) == {f"0000000001{suffix}": list(range(300))}
    (path,) = out.glob("part-*")
    assert path.name.endswith(suffix)
    if format == "parquet":
        group = pq.read_metadata(path).row_group(0)
        names = {"none": "UNCOMPRESSED"}
        compression = options["compression"]
        assert group.column(0).compression == names.get(compression, compression.upper())
        assert group.num_rows == options.get("row_group_rows", 300)


def test_a_value_that_a_format_cannot_hold_stops_the_writer(out: Path) -> None:
    schema = pa.schema({"s": pa.string()})
    writer = FileSink(str(out), CsvParts(), roll_interval_ms=0).writer(schema, Identity(), [])
    writer.write(pa.RecordBatch.from_pydict({"s": ["a", None]}, schema))
    snapshot = writer.pre_commit(1, False)
    for again in (snapshot, writer.pre_commit(2, False)):
        with pytest.raises(DataError, match="column 's' is null"):
            again()
