"""Files that several checkpoints name: in formats, in what people are shown, and in a race with retention."""

from __future__ import annotations

import uuid
from pathlib import Path
from unittest import mock

import msgspec
import pyarrow as pa
import pytest
from storage_world import JOB, manifest_of, segment, write_shared

from cutwater.errors import CorruptSnapshotError, StorageError
from cutwater.state.segments import GROUP_COLUMN, Segment
from cutwater.storage.job_log import JobLog
from cutwater.storage.reading import verify_checkpoint
from cutwater.storage.snapshot.increments import MAX_DELTAS, Increments, extended, worth_extending
from cutwater.storage.snapshot.manifest import KNOWN_VERSIONS, Entry
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.retention import Retention, list_shared, shared_files
from cutwater.storage.snapshot.segment_files import SnapshotWriter, dumps_manifest, load_manifest, read_segment
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.seal import PLAIN
from cutwater.ui.inspect import inspect_snapshot, render_inspect, verify_snapshot
from memory_store import MemoryStore

GOLDEN = Path(__file__).parent / "golden"


def publish_shared(store, log: JobLog, retention: Retention, checkpoint_id: int, entries: list[Entry]):
    manifest = manifest_of(log, checkpoint_id, entries)
    retention.shared.check(manifest)
    completed = publish(store, log, manifest)
    retention.shared.published(completed, manifest)
    return completed


def begun(store, num_retained: int):
    log = JobLog(store, JOB, num_retained=num_retained)
    log.begin_attempt("driver")
    return log, Retention(store, log)


def test_older_releases_refuse_only_what_they_cannot_read():
    store = MemoryStore()
    log, _ = begun(store, 1)
    plain = SnapshotWriter(store, JOB, 1, 1, 0, 100).add("count", 0, [segment(1, 0, 40)])
    unsorted = SnapshotWriter(store, JOB, 3, 1, 0, 100).add("count", 0, [unsorted_segment(40)])
    for entries, version in ((plain, 1), (write_shared(store, 2, 1, []), 2), (unsorted, 3)):
        data, _ = dumps_manifest(manifest_of(log, 1, entries), PLAIN)
        assert msgspec.json.decode(data).get("format_version", 1) == version


def test_what_people_see_tells_shared_files_apart(tmp_path):
    store = LocalStore.open(tmp_path)
    log, retention = begun(store, 3)
    base = write_shared(store, 1, 1, [])
    publish_shared(store, log, retention, 1, base)
    publish_shared(store, log, retention, 2, write_shared(store, 2, 1, base))
    info = inspect_snapshot(store, JOB, 2)
    assert (info["files"], info["older_files"]) == (2, 1)
    assert info["bytes"] == 2 * info["older_bytes"] > 0
    assert "of older checkpoints" in render_inspect(info)
    assert inspect_snapshot(store, JOB, 1)["older_files"] == 0
    assert [c["files"] for c in verify_snapshot(store, JOB)["checkpoints"]] == [3, 2]


def test_damage_of_a_shared_file_damages_every_checkpoint_that_names_it(tmp_path):
    store = LocalStore.open(tmp_path)
    log, retention = begun(store, 3)
    base = write_shared(store, 1, 1, [])
    first = publish_shared(store, log, retention, 1, base)
    second = publish_shared(store, log, retention, 2, write_shared(store, 2, 1, base))
    third = publish_shared(store, log, retention, 3, write_shared(store, 3, 1, []))
    file = tmp_path / JOB / base[0].file
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    found = {c: verify_checkpoint(store, JOB, c) for c in (first, second, third)}
    assert [report.ok for report in found.values()] == [False, False, True]
    assert found[second].problems[0].file == f"{JOB}/{base[0].file}"


def test_a_checkpoint_under_way_may_build_on_one_that_is_retired_meanwhile():
    """A worker froze checkpoint 3 before it heard that 2 completed: it builds on 1, which is no longer retained."""
    store = MemoryStore()
    log, retention = begun(store, 1)
    base = write_shared(store, 1, 1, [])
    publish_shared(store, log, retention, 1, base)
    retention.collect()
    third = write_shared(store, 3, 1, base)
    publish_shared(store, log, retention, 2, write_shared(store, 2, 1, []))
    retention.collect()
    completed = publish_shared(store, log, retention, 3, third)
    retention.collect()
    assert verify_checkpoint(store, JOB, completed).ok


def test_the_same_if_nothing_was_collected_in_between():
    """Old checkpoints are collected once a second, however many complete meanwhile."""
    store = MemoryStore()
    log, retention = begun(store, 1)
    base = write_shared(store, 1, 1, [])
    publish_shared(store, log, retention, 1, base)
    third = write_shared(store, 3, 1, base)
    publish_shared(store, log, retention, 2, write_shared(store, 2, 1, []))
    completed = publish_shared(store, log, retention, 3, third)
    retention.collect()
    assert verify_checkpoint(store, JOB, completed).ok
    publish_shared(store, log, retention, 4, write_shared(store, 4, 1, []))
    for _ in range(2):
        retention.collect()
    assert [file for file, _ in list_shared(store, JOB)] == ["shared/4-1-0.data"]


def test_a_checkpoint_that_names_a_file_which_is_gone_never_counts():
    store = MemoryStore()
    log, retention = begun(store, 1)
    base = write_shared(store, 1, 1, [])
    publish_shared(store, log, retention, 1, base)
    for n in (2, 3):
        retention.collect()
        publish_shared(store, log, retention, n, write_shared(store, n, 1, []))
    retention.collect()
    assert [file for file, _ in list_shared(store, JOB)] == ["shared/2-1-0.data", "shared/3-1-0.data"]
    with pytest.raises(StorageError, match="no retained checkpoint names"):
        publish_shared(store, log, retention, 5, write_shared(store, 5, 1, base))
    assert log.state.newest_id == 3


def test_while_a_retained_manifest_cannot_be_read_no_shared_file_goes(tmp_path):
    store = LocalStore.open(tmp_path)
    log, retention = begun(store, 2)
    base = write_shared(store, 1, 1, [])
    completed = publish_shared(store, log, retention, 1, base)
    publish_shared(store, log, retention, 2, write_shared(store, 2, 1, []))
    path = tmp_path / JOB / completed.path
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    log.begin_attempt("driver")
    retention = Retention(store, log)
    (warning,) = retention.collect()
    assert warning.startswith("checkpoint 1 cannot be restored any more and no longer counts as retained: the manifest")
    assert path.name in warning
    assert retention.collect() == [], "it is told once"
    path.write_bytes(content)
    assert {file for file, _ in list_shared(store, JOB)} >= shared_files(load_manifest(store, JOB, completed).entries)
    with pytest.raises(CorruptSnapshotError):
        path.write_bytes(content[:-1])
        load_manifest(store, JOB, completed)


def test_a_chain_is_folded_when_it_gets_long_or_large():
    base = Entry("s", 0, "agg", "base", 10, 1000, "")
    delta = Entry("s", 0, "agg", "delta", 1, 20, "")
    assert worth_extending([base, *[delta] * (MAX_DELTAS - 1)])
    assert not worth_extending([base, *[delta] * MAX_DELTAS])
    assert not worth_extending([base, *[msgspec.structs.replace(delta, length=300)] * 2])
    files = [msgspec.structs.replace(delta, length=10, file=f"shared/{n}-1-0.data") for n in range(MAX_DELTAS)]
    pieces = [piece for file in files for piece in (file, file)]  # a delta of many rows has several
    assert worth_extending([base, *pieces[:-2]])
    assert not worth_extending([base, *pieces])
    watermark = msgspec.structs.replace(base, name="watermark", length=8)
    again = [msgspec.structs.replace(watermark, digest="new"), delta]
    assert extended([watermark, base, delta], again) == [base, delta, *again]


def test_nothing_builds_on_a_checkpoint_that_is_not_complete():
    increments, entry = Increments(), Entry("s", 0, "agg", "base", 10, 1000, "")
    assert increments.of(("s", 0)) is None
    for n in (1, 2, 3):
        increments.written(n, ("s", 0), [entry])
    assert increments.of(("s", 0)) is None
    increments.completed(1)
    assert increments.of(("s", 0)) == (1, [entry])
    increments.dropped(2)
    increments.completed(2)  # a late notice of a forgotten one
    assert increments.of(("s", 0)) == (1, [entry])
    increments.completed(3)
    assert increments.of(("s", 0)) == (3, [entry])


def test_format_version_2_is_read_for_ever():
    """Files made by the first release that shares some (``make_golden`` below); they never change."""
    store = LocalStore(GOLDEN / "format-2")
    state = JobLog(store, JOB).read()
    assert [c.checkpoint_id for c in state.completed] == [2, 1]
    assert all(verify_checkpoint(store, JOB, c).ok for c in state.completed)
    manifest = load_manifest(store, JOB, state.completed[0])
    assert manifest.format_version == 2
    assert [(e.kind, e.file, e.key_groups) for e in manifest.entries] == [
        ("base", "shared/1-1-0.data", (0, 64)),
        ("delete", "", (0, 64)),
        ("delta", "shared/2-1-0.data", (0, 64)),
    ]
    rows = [read_segment(store, JOB, e).batch.column("value").to_pylist() for e in manifest.entries]
    assert rows == [[1000 + i for i in range(40)], [1007], [2000 + i for i in range(40)]]


def unsorted_segment(rows: int) -> Segment:
    keys = [7 * number for number in range(rows)]
    batch = pa.record_batch({"key": keys, "value": [key + 1 for key in keys]})
    return Segment("agg", "base", batch, (0, 64), 1, ungrouped=(1, 64))


def test_format_version_3_is_read_for_ever():
    """Files made by the first release with unsorted segments (``make_golden_3`` below); they never change."""
    store = LocalStore(GOLDEN / "format-3")
    (completed,) = JobLog(store, JOB).read().completed
    assert verify_checkpoint(store, JOB, completed).ok
    manifest = load_manifest(store, JOB, completed)
    assert manifest.format_version == 3 < max(KNOWN_VERSIONS)
    (entry,) = manifest.entries
    assert (entry.ungrouped, entry.key_groups) == ((1, 64), (0, 64))
    batch = read_segment(store, JOB, entry).batch
    keys = batch.column("key").to_pylist()
    assert sorted(keys) == [7 * number for number in range(40)]
    assert batch.column("value").to_pylist() == [key + 1 for key in keys]
    assert batch.column(GROUP_COLUMN).to_pylist()[:9] == [0, 0, 1, 7, 8, 10, 15, 16, 18]
    assert keys[:9] == [133, 196, 21, 49, 224, 119, 147, 245, 252]


def make_golden_3(root):
    """How the golden files were made (run once)."""
    store = LocalStore.open(root)
    with mock.patch.object(uuid, "uuid4", return_value=uuid.UUID(int=1)):
        log = JobLog(store, JOB, clock_ms=lambda: 1_000)
        log.begin_attempt("golden")
        writer = SnapshotWriter(store, JOB, 1, 1, 0, 100)
        entries = writer.add("count", 0, [unsorted_segment(40)])
        writer.close()
        publish(store, log, manifest_of(log, 1, entries))


def make_golden(root):
    """How the golden files were made (run once per format version)."""
    store = LocalStore.open(root)
    with mock.patch.object(uuid, "uuid4", return_value=uuid.UUID(int=1)):
        log = JobLog(store, JOB, clock_ms=lambda: 1_000)
        log.begin_attempt("golden")
        base = write_shared(store, 1, 1, [])
        publish(store, log, manifest_of(log, 1, base))
        writer = SnapshotWriter(store, JOB, 2, 1, 0, 700)
        value = pa.record_batch({GROUP_COLUMN: pa.array([0], pa.uint16()), "value": pa.array([1007])})
        deleted = Segment("agg", "delete", value, (0, 64))
        changed = Segment("agg", "delta", segment(2, 0, 40).batch, (0, 64))
        changes = writer.add("count", 0, [deleted, changed], shared=True)
        writer.close()
        publish(store, log, manifest_of(log, 2, extended(base, changes)))


def test_the_last_shared_files_go_when_no_checkpoint_shares_any_more(tmp_path):
    store = LocalStore.open(tmp_path)
    log, retention = begun(store, 1)
    publish_shared(store, log, retention, 1, write_shared(store, 1, 1, []))
    assert retention.collect() == []
    publish_shared(store, log, retention, 2, [])
    for _ in range(2):  # a file stays for one collection longer than it is named
        assert retention.collect() == []
    assert list_shared(store, JOB) == []
