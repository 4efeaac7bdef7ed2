"""Bounds on what a snapshot says, and names in it: looked at before anything is allocated, inflated or opened."""

from __future__ import annotations

import io
import os
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from storage_world import JOB, a_job, manifest_of, segment

from cutwater.connectors.staging import PieceCut, open_piece, read_piece, staging_beside
from cutwater.connectors.staging_folders import TargetFolder
from cutwater.errors import CorruptSnapshotError, StorageError
from cutwater.storage.job_log import JobLog
from cutwater.storage.snapshot import limits, segment_files
from cutwater.storage.snapshot import savepoint as savepoints
from cutwater.storage.snapshot.limits import (
    SEGMENT_BYTES_MAX,
    check_entry,
    check_manifest,
    check_time,
    checked_stream,
    decoded,
)
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.snapshot.savepoint import SavepointManifest, load_savepoint, publish_savepoint
from cutwater.storage.snapshot.savepoint_files import SavepointWriter
from cutwater.storage.snapshot.segment_files import SnapshotWriter
from cutwater.storage.store import local, no_follow
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.no_follow import check_relative
from reversal import Reversal

ROWS = 1_000_000
ZSTD = pa.ipc.IpcWriteOptions(compression="zstd")
ZEROS = pa.record_batch({"n": pa.array([0] * ROWS, pa.int64())})
SMALL = pa.record_batch({"n": pa.array([1], pa.int64())})
DICTIONARY = pa.record_batch({"s": pa.DictionaryArray.from_arrays(pa.array([0]), pa.array(["x" * ROWS]))})


def stream(*batches: pa.RecordBatch, compressed: bool = True) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batches[0].schema, options=ZSTD if compressed else None) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def second_one_compressed() -> bytes:
    """Only the second batch of the stream would inflate."""
    first, second = stream(SMALL, compressed=False), stream(ZEROS)
    end, schema = 8, len(SMALL.schema.serialize())
    return first[:-end] + second[schema:]


def leads_out() -> pa.RecordBatch:
    offsets = pa.array([0, 2**30, 5], pa.int32()).buffers()[1]
    return pa.RecordBatch.from_arrays([pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"hello"))], names=["x"])


def whole(data: bytes) -> None:
    checked_stream(pa.py_buffer(data), "x", trusted=False).read_all()


@pytest.mark.parametrize("place", ["first", "second", "dictionary"])
def test_staged_rows_that_would_inflate_are_refused_before_they_do(place: str) -> None:
    data = {"first": stream(ZEROS), "second": second_one_compressed(), "dictionary": stream(DICTIONARY)}[place]
    assert len(data) < ROWS / 10
    pa.ipc.open_stream(data).read_all()
    before = pa.total_allocated_bytes()
    with pytest.raises(CorruptSnapshotError, match="compressed, as nothing is that Cutwater writes"):
        checked_stream(pa.py_buffer(data), "x", trusted=False)
    assert pa.total_allocated_bytes() == before


def test_staged_rows_whose_offsets_lead_out_are_refused() -> None:
    with pytest.raises(CorruptSnapshotError, match="is not an Arrow stream"):
        whole(stream(leads_out(), compressed=False))


def test_rows_as_we_write_them_are_read() -> None:
    whole(stream(SMALL, SMALL, compressed=False))
    whole(stream(DICTIONARY, compressed=False))


def test_a_dictionary_that_would_inflate_is_refused_before_it_does() -> None:
    """Alone: the batch behind it is not compressed."""
    messages = list(pa.ipc.MessageReader.open_stream(stream(DICTIONARY)))
    assert [message.type for message in messages] == ["schema", "dictionary", "record batch"]
    plain = list(pa.ipc.MessageReader.open_stream(stream(DICTIONARY, compressed=False)))
    mixed = b"".join(bytes(m.serialize()) for m in (messages[0], messages[1], plain[2]))
    with pytest.raises(CorruptSnapshotError, match="compressed, as nothing is that Cutwater writes"):
        decoded(mixed, None, "x", "count", trusted=False)


def test_a_batch_that_lies_alone_and_would_inflate_is_refused_before_it_does() -> None:
    data, schema = alone(ZEROS), bytes(ZEROS.schema.serialize())
    assert decoded(data, schema, "x", "count", trusted=True).num_rows == ROWS
    before = pa.total_allocated_bytes()
    with pytest.raises(CorruptSnapshotError, match="compressed, as nothing is that Cutwater writes"):
        decoded(data, schema, "x", "count", trusted=False)
    assert pa.total_allocated_bytes() == before


def alone(batch: pa.RecordBatch) -> bytes:
    """The message of a compressed batch, as it lies in a file of a savepoint."""
    return bytes(list(pa.ipc.MessageReader.open_stream(stream(batch)))[1].serialize())


# ------------------------------------------------------------------------------------------------------------- lengths


def test_a_file_too_large_to_be_read_whole_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """With holes, so that it takes no space; in memory it would."""
    store = LocalStore.open(tmp_path)
    store.create("log", b"small")
    os.truncate(tmp_path / "log", local._READ_BYTES_MAX + 1)
    with pytest.raises(CorruptSnapshotError, match=r"log is too large: \d+ bytes, where few belong"):
        store.read("log")
    assert bytes(store.read("log", 0, 5)) == b"small"


def test_a_length_beyond_the_end_of_the_file_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    store = LocalStore.open(tmp_path)
    store.create("data", b"small")
    for offset, length in ((0, 2**62), (2**62, 5), (-1, 5), (0, -1), (1, 5)):
        with pytest.raises(CorruptSnapshotError, match="data is too short"):
            store.read("data", offset, length)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length", SEGMENT_BYTES_MAX + 1),
        ("length", -1),
        ("rows", 2**31 + 1),
        ("rows", -1),
        ("offset", -1),
        ("ungrouped", (-1, 64)),
        ("ungrouped", (1, 0)),
        ("ungrouped", (1, 2**17)),
        ("subtask", -1),
        ("subtask", 2**21),
        ("key_groups", (5, 4)),
        ("key_groups", (-1, 4)),
        ("key_groups", (0, 2**17)),
    ],
)
def test_an_entry_whose_numbers_cannot_be_is_refused(field: str, value: object) -> None:
    entry = Entry(step="s", subtask=0, name="n", kind="base", rows=1, length=1, digest="")
    check_entry(entry, "x")
    with pytest.raises(CorruptSnapshotError, match="x tells of"):
        check_entry(msgspec.structs.replace(entry, **{field: value}), "x")


@pytest.mark.parametrize("time_ms", [-1, 253_402_300_799_001])
def test_a_time_that_cannot_be_is_refused(time_ms: int) -> None:
    with pytest.raises(CorruptSnapshotError, match="is of no time"):
        check_time(time_ms, "x")


def test_a_segment_too_large_to_be_read_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(SnapshotWriter._add.__globals__, "SEGMENT_BYTES_MAX", 100)
        writer = SnapshotWriter(LocalStore.open(tmp_path), JOB, 1, 1, 0, 10)
        with pytest.raises(StorageError, match="raise max_parallelism"):
            writer.add("count", 0, [segment(1, 0, 40)])
        writer.abort()


def test_a_piece_is_read_up_to_a_bound_whatever_its_length_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    area = staging_beside(str(tmp_path), "uid", "out")
    area.folder.create()
    name = "wal-00000-0000000001-000000.arrows"
    Path(area.path(name)).write_bytes(b"rows")
    asked: list[int] = []
    read = TargetFolder.read
    with monkeypatch.context() as patch:
        patch.setattr(TargetFolder, "read", lambda self, name, n: (asked.append(n), read(self, name, n))[1])
        for length in (2**62, -1):
            with pytest.raises(CorruptSnapshotError, match="is torn"):
                open_piece(area, PieceCut(name, length, 1, ""), verify=False)
    assert asked == [SEGMENT_BYTES_MAX, 0]


# --------------------------------------------------------------------------------------------------------------- names

OUTSIDE = ["/etc/passwd", "..", "../x", "a/../../x", "a/..", "a\0b"]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_leads_out_of_its_folder_is_refused(path: str) -> None:
    with pytest.raises(StorageError, match="leads out of its folder"):
        check_relative(path)


@pytest.mark.parametrize(
    "file",
    [
        "/etc/passwd",
        "../../etc/passwd",
        "..",
        "chk-1",
        "chk-1/",
        "chk-1/../x",
        "chk-1/manifest-1.json",
        "shared/1-0.data",
        "log/000000000001.json",
        "chk-1/1-0.data/x",
        "other/1-1-0.data",
        "chk-0/1-0.data",
        "chk-1/1-0.data\n",
    ],
)
def test_a_data_file_that_is_none_of_a_checkpoints_is_refused(tmp_path: Path, file: str) -> None:
    log = JobLog(LocalStore.open(tmp_path), JOB)
    log.begin_attempt("driver")
    manifest = manifest_of(log, 1, [Entry("s", 0, "n", "base", 1, 1, "", file=file)])
    with pytest.raises(CorruptSnapshotError, match="which is no data file of a checkpoint"):
        check_manifest(manifest, "x", savepoint=False)


@pytest.mark.parametrize("file", ["..", "x", "a/b/c", "../a/b", "/etc/passwd", "", "a/.."])
def test_a_file_that_is_none_of_a_savepoints_is_refused(tmp_path: Path, file: str) -> None:
    store, log = a_job(tmp_path)
    parts = SavepointWriter(store, "sp").add_state("count", 0, range(64), [segment(1, 0, 40)])
    parts = [msgspec.structs.replace(part, path=file) for part in parts]
    publish_savepoint(store, "sp", SavepointManifest.of(manifest_of(log, 2, []), parts, committed_by=2))
    with pytest.raises(StorageError, match=r"which is no file of a savepoint|leads out of its folder"):
        load_savepoint(store, "sp")


# ----------------------------------------------------------------------------------------------------------- the alarm

REVERSALS = {
    "staged rows inflate": Reversal(
        checked_stream,
        "_refuse_compressed(buffer, alone=False, all=True)",
        "pass",
        lambda _: test_staged_rows_that_would_inflate_are_refused_before_they_do("first"),
    ),
    "staged rows behind the first batch inflate": Reversal(
        checked_stream,
        "all=True",
        "all=False",
        lambda _: test_staged_rows_that_would_inflate_are_refused_before_they_do("second"),
    ),
    "dictionaries inflate": Reversal(
        limits._batch_of,
        "not in (_RECORD_BATCH, _DICTIONARY_BATCH)",
        "!= _RECORD_BATCH",
        lambda _: test_a_dictionary_that_would_inflate_is_refused_before_it_does(),
    ),
    "a dictionary is taken for a batch": Reversal(
        limits._batch_of,
        "if kind == _DICTIONARY_BATCH:",
        "if False:",
        lambda _: test_a_dictionary_that_would_inflate_is_refused_before_it_does(),
    ),
    "a batch that lies alone inflates": Reversal(
        decoded,
        "_refuse_compressed(buffer, alone=schema is not None)",
        "schema is None and _refuse_compressed(buffer, alone=False)",
        lambda _: test_a_batch_that_lies_alone_and_would_inflate_is_refused_before_it_does(),
    ),
    "offsets of staged rows are followed": Reversal(
        limits._validated,
        "batch.validate(full=True)",
        "pass",
        lambda _: test_staged_rows_whose_offsets_lead_out_are_refused(),
    ),
    "files of any size are read whole": Reversal(
        LocalStore.read,
        "length is None and there > _READ_BYTES_MAX",
        "False",
        test_a_file_too_large_to_be_read_whole_is_refused_before_it_is_read,
    ),
    "a length is not compared with the file": Reversal(
        LocalStore.read,
        "0 <= wanted <= there and offset >= 0",
        "True",
        test_a_length_beyond_the_end_of_the_file_is_refused_before_it_is_allocated,
    ),
    "any length": Reversal(
        check_entry,
        "0 <= entry.length <= SEGMENT_BYTES_MAX",
        "0 <= entry.length",
        lambda _: test_an_entry_whose_numbers_cannot_be_is_refused("length", SEGMENT_BYTES_MAX + 1),
    ),
    "any number of rows": Reversal(
        check_entry,
        "0 <= entry.rows <= _ROWS_MAX",
        "0 <= entry.rows",
        lambda _: test_an_entry_whose_numbers_cannot_be_is_refused("rows", 2**31 + 1),
    ),
    "any offset": Reversal(
        check_entry,
        " or entry.offset < 0",
        "",
        lambda _: test_an_entry_whose_numbers_cannot_be_is_refused("offset", -1),
    ),
    "any number of key groups": Reversal(
        check_entry,
        "columns < 0 or not 1 <= groups <= _GROUPS_MAX",
        "False",
        lambda _: test_an_entry_whose_numbers_cannot_be_is_refused("ungrouped", (1, 2**17)),
    ),
    "any range": Reversal(
        check_entry,
        "not all(0 <= a <= b <= _GROUPS_MAX for a, b in ranges)",
        "False",
        lambda _: test_an_entry_whose_numbers_cannot_be_is_refused("key_groups", (0, 2**17)),
    ),
    "any time": Reversal(
        check_time, "not 0 <= time_ms <= _TIME_MS_MAX", "False", lambda _: test_a_time_that_cannot_be_is_refused(-1)
    ),
    "absolute paths": Reversal(
        no_follow.check_relative,
        'path.startswith("/") or ',
        "",
        lambda _: test_a_path_that_leads_out_of_its_folder_is_refused("/etc/passwd"),
    ),
    "zero bytes": Reversal(
        no_follow.check_relative,
        ' or "\\0" in path',
        "",
        lambda _: test_a_path_that_leads_out_of_its_folder_is_refused("a\0b"),
    ),
    "paths that go up": Reversal(
        no_follow.check_relative,
        '".." in parts',
        "False",
        lambda _: test_a_path_that_leads_out_of_its_folder_is_refused("a/../../x"),
    ),
    "any data file": Reversal(
        check_manifest,
        "not (savepoint or is_data_path(entry.file))",
        "False",
        lambda folder: test_a_data_file_that_is_none_of_a_checkpoints_is_refused(folder, "../../etc/passwd"),
    ),
    "any file of a savepoint": Reversal(
        savepoints._read,
        "len(check_relative(file.path)) != 2",
        "False",
        lambda folder: test_a_file_that_is_none_of_a_savepoints_is_refused(folder, "a/b/c"),
    ),
}
WITH_A_PATCH = {
    "a segment of any size is written": Reversal(
        segment_files.SnapshotWriter._add,
        "size > SEGMENT_BYTES_MAX",
        "False",
        lambda folder: test_a_segment_too_large_to_be_read_again_is_not_written(folder, pytest.MonkeyPatch()),
    ),
    "pieces of any length": Reversal(
        read_piece,
        "min(cut.length, SEGMENT_BYTES_MAX)",
        "cut.length",
        lambda folder: test_a_piece_is_read_up_to_a_bound_whatever_its_length_is_said_to_be(
            folder, pytest.MonkeyPatch()
        ),
    ),
}


@pytest.mark.parametrize("bug", REVERSALS | WITH_A_PATCH)
def test_planted_bugs_are_found(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    (REVERSALS | WITH_A_PATCH)[bug].is_seen(monkeypatch, tmp_path_factory)
