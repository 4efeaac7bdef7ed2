"""Segments and manifests: to bytes and back, unchanged, and the same bytes each time."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from storage_world import JOB, expected_values, manifest_of, restored_values, take_checkpoint, write_parts

from cutwater.errors import CorruptSnapshotError, DataError, FencedError, FormatVersionError, InvariantError
from cutwater.state.segments import Segment
from cutwater.storage.job_log import JobLog
from cutwater.storage.reading import choose, verify_checkpoint
from cutwater.storage.snapshot.manifest import KNOWN_VERSIONS
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.segment_files import SnapshotWriter, dumps_manifest, load_manifest, read_segment
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.seal import PLAIN
from memory_store import Fault, MemoryStore

GOLDEN = Path(__file__).parent / "golden" / "format-1"


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    return LocalStore.open(tmp_path) if request.param == "local" else MemoryStore()


BATCHES = {
    "ints": pa.record_batch({"k": pa.array(range(1000), pa.int64())}),
    "no rows": pa.record_batch({"k": pa.array([], pa.int64()), "s": pa.array([], pa.string())}),
    "nulls": pa.record_batch({"k": pa.array([None, 1, None], pa.int32()), "n": pa.nulls(3)}),
    "text": pa.record_batch({"s": ["", "ü\n", None, "x" * 100_000]}),
    "nested": pa.record_batch({"l": [[1, None], [], None], "d": [{"a": 1}, None, {"a": 2}]}),
    "dictionary": pa.record_batch({"c": pa.array(["a", "b", "a"]).dictionary_encode()}),
    "odd types": pa.record_batch(
        {
            "d": [Decimal("1.20"), None],
            "t": pa.array([datetime.datetime(1969, 1, 1), None], pa.timestamp("us", "UTC")),
            "b": pa.array([b"\0", b""], pa.binary()),
            "v": pa.array([True, None]),
        }
    ),
    "slice": pa.record_batch({"k": pa.array(range(1000), pa.int64()), "s": [str(i) for i in range(1000)]}).slice(
        500, 3
    ),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("inline_below", [0, 1 << 30], ids=["file", "inline"])
def test_a_segment_comes_back_as_it_was(store, name, inline_below):
    writer = SnapshotWriter(store, JOB, 1, 1, 0, inline_below)
    segments = [Segment("agg", "base", BATCHES[name], (0, 64)), Segment("agg", "delta", BATCHES[name])]
    entries = writer.add("count", 3, iter(segments))
    writer.close()
    for segment, entry in zip(segments, entries, strict=True):
        back = read_segment(store, JOB, entry)
        assert back.batch.equals(segment.batch, check_metadata=True)
        assert (back.name, back.kind, back.key_groups) == (segment.name, segment.kind, segment.key_groups)
        assert (entry.step, entry.subtask, entry.rows) == ("count", 3, segment.batch.num_rows)
        assert bool(entry.file) == (inline_below == 0)


@pytest.mark.parametrize(("inline_below", "length"), [(1 << 20, 360), (0, 4_096)])
def test_a_slice_is_written_without_its_parent(inline_below, length):
    writer = SnapshotWriter(MemoryStore(), JOB, 1, 1, 0, inline_below)
    (entry,) = writer.add("s", 0, [Segment("x", "base", pa.record_batch({"k": range(1_000_000)}).slice(5, 10))])
    assert entry.length == length


def test_the_threshold_decides_between_inline_and_file():
    store = MemoryStore()
    batch = BATCHES["ints"]
    probe = SnapshotWriter(MemoryStore(), JOB, 1, 1, 0, 1 << 20)
    (entry,) = probe.add("s", 0, [Segment("x", "base", batch)])
    for threshold, inline in ((entry.length, False), (entry.length + 1, True)):
        writer = SnapshotWriter(store, JOB, threshold, 1, 0, threshold)
        (found,) = writer.add("s", 0, [Segment("x", "base", batch)])
        writer.close()
        assert (found.inline is not None) is inline
        assert found.length == (entry.length if inline else 3 * 4_096), "a file holds whole blocks"
        assert read_segment(store, JOB, found).batch.equals(batch)


def test_small_state_makes_no_file():
    store = MemoryStore()
    writer = SnapshotWriter(store, JOB, 1, 1, 0, 1 << 20)
    writer.add("s", 0, [Segment("x", "base", BATCHES["ints"])])
    writer.add("t", 0, [])
    writer.close()
    writer.abort()
    assert store.operations == []


def test_one_file_per_worker_holds_all_steps_without_a_gap(store):
    writer = SnapshotWriter(store, JOB, 7, 3, 12, 0)
    entries = [e for step in "abc" for e in writer.add(step, 0, [Segment("x", "base", BATCHES["ints"])] * 2)]
    writer.close()
    assert {e.file for e in entries} == {"chk-7/3-12.data"}
    end = 0
    for entry in entries:
        assert entry.offset == end
        end += entry.length
    assert len(store.read(f"{JOB}/chk-7/3-12.data")) == end


def test_abort_leaves_no_file(store):
    writer = SnapshotWriter(store, JOB, 1, 1, 0, 0)
    writer.add("s", 0, [Segment("x", "base", BATCHES["ints"])])
    writer.abort()
    assert store.list(JOB) == []
    with pytest.raises(InvariantError, match="was closed"):
        writer.add("s", 0, [])


def test_abort_survives_a_store_that_fails():
    store = MemoryStore([Fault(1, "error", "delete")])
    writer = SnapshotWriter(store, JOB, 1, 1, 0, 0)
    writer.add("s", 0, [Segment("x", "base", BATCHES["ints"])])
    writer.abort()


def test_a_batch_read_back_refers_to_the_bytes_read():
    store = MemoryStore()
    writer = SnapshotWriter(store, JOB, 1, 1, 0, 0)
    (entry,) = writer.add("s", 0, [Segment("x", "base", pa.record_batch({"k": range(100_000)}))])
    writer.close()
    read_segment(store, JOB, entry)
    before = pa.total_allocated_bytes()
    kept = read_segment(store, JOB, entry)
    assert pa.total_allocated_bytes() - before < 100_000, "800,000 bytes of values were not copied"
    assert kept.batch.num_rows == 100_000


def test_wrong_row_count_and_unknown_format_are_refused():
    store = MemoryStore()
    writer = SnapshotWriter(store, JOB, 1, 1, 0, 1 << 20)
    (entry,) = writer.add("s", 0, [Segment("x", "base", BATCHES["ints"])])
    with pytest.raises(CorruptSnapshotError, match="1000 rows, the manifest says 999"):
        read_segment(store, JOB, msgspec.structs.replace(entry, rows=999))
    with pytest.raises(FormatVersionError, match="arrow-ipc/2"):
        read_segment(store, JOB, msgspec.structs.replace(entry, format="arrow-ipc/2"))


def test_equal_manifests_have_equal_bytes(store):
    log = JobLog(store, JOB)
    log.begin_attempt("a")
    manifest = manifest_of(log, 1, write_parts(store, 1, 1))
    shuffled = [msgspec.structs.replace(s, splits=dict(reversed(s.splits.items()))) for s in manifest.subtasks]
    again = msgspec.structs.replace(manifest, subtasks=shuffled)
    assert dumps_manifest(manifest, PLAIN) == dumps_manifest(again, PLAIN)
    assert json.loads(dumps_manifest(manifest, PLAIN)[0])["uid"] == log.state.uid


def test_a_manifest_comes_back_equal(store):
    log = JobLog(store, JOB)
    log.begin_attempt("a")
    manifest = manifest_of(log, 1, write_parts(store, 1, 1))
    assert load_manifest(store, JOB, publish(store, log, manifest)) == manifest


def test_a_handle_that_is_no_json_is_refused_by_name():
    log = JobLog(MemoryStore(), JOB)
    log.begin_attempt("a")
    manifest = manifest_of(log, 1, [])
    bad = msgspec.structs.replace(manifest.subtasks[0], handles={"out": [object()]})
    with pytest.raises(DataError, match="cannot be written as JSON"):
        dumps_manifest(msgspec.structs.replace(manifest, subtasks=[bad]), PLAIN)


def test_publish_refuses_another_attempts_and_another_jobs_manifest():
    store = MemoryStore()
    log = JobLog(store, JOB)
    log.begin_attempt("a")
    manifest = manifest_of(log, 1, [])
    with pytest.raises(InvariantError, match="job uid"):
        publish(store, log, msgspec.structs.replace(manifest, uid="other"))
    log.begin_attempt("a")
    with pytest.raises(FencedError):
        publish(store, log, manifest)
    assert store.names(JOB) == ["log"]


def test_a_paused_drivers_manifest_of_the_same_id_does_not_disturb():
    store = MemoryStore()
    old, new = JobLog(store, JOB), JobLog(store, JOB)
    old.begin_attempt("old")
    new.begin_attempt("new")
    with pytest.raises(FencedError):
        take_checkpoint(store, old, 1)
    take_checkpoint_as = write_parts(store, 1, new.attempt, incarnation=10)
    publish(store, new, manifest_of(new, 1, take_checkpoint_as))
    assert restored_values(store, choose(store, JOB, new.state)) == expected_values(1)


def test_format_version_1_is_read_for_ever():
    """Files made by the first release (``make_golden`` below); they never change."""
    store = LocalStore(GOLDEN)
    state = JobLog(store, JOB).read()
    assert state.uid == "0" * 31 + "1"
    found = choose(store, JOB, state)
    assert found.manifest.format_version == 1 < max(KNOWN_VERSIONS)
    assert found.manifest.subtasks[1].splits["read"][0].position == 20
    assert restored_values(store, found) == expected_values(2)
    assert all(verify_checkpoint(store, JOB, c).ok for c in state.completed)


def test_log_entries_with_manifests_are_read_for_ever():
    """Files made by the first release that has them (``make_golden`` below); they never change."""
    store = LocalStore(GOLDEN.parent / "log-2")
    state = JobLog(store, JOB).read()
    assert [c.path for c in state.completed] == ["log/000000000004.json", "log/000000000003.json"]
    assert restored_values(store, choose(store, JOB, state)) == expected_values(2)
    assert all(verify_checkpoint(store, JOB, c).ok for c in state.completed)


def make_golden(root: Path) -> None:
    """How the golden files were made (run once per format version)."""
    import uuid
    from unittest import mock

    store = LocalStore.open(root)
    with mock.patch.object(uuid, "uuid4", return_value=uuid.UUID(int=1)):
        log = JobLog(store, JOB, clock_ms=lambda: 1_000)
        log.begin_attempt("golden")
        for checkpoint_id in (1, 2):
            take_checkpoint(store, log, checkpoint_id)
