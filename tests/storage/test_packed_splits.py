"""Blocks of splits in a manifest: what comes out is what went in, and older releases learn that they cannot read it."""

from __future__ import annotations

import uuid
from pathlib import Path
from unittest import mock

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_world import JOB, expected_values, manifest_of, restored_values, write_parts

from cutwater.errors import CorruptSnapshotError, DataError
from cutwater.runtime.driver.forks import is_at_rest, limits_of
from cutwater.storage.job_log import JobLog
from cutwater.storage.reading import choose, verify_checkpoint
from cutwater.storage.snapshot import packed_splits
from cutwater.storage.snapshot.manifest import Manifest, SplitRecord
from cutwater.storage.snapshot.packed_splits import BLOCK_SPLITS, pack, unpack, with_all_splits
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.savepoint import SavepointManifest
from cutwater.storage.snapshot.segment_files import dumps_manifest, load_manifest
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.seal import PLAIN, Seal
from memory_store import MemoryStore

GOLDEN = Path(__file__).parent / "golden"
KEYED = Seal([b"the key of the golden files"])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
RECORDS = st.builds(
    SplitRecord,
    st.text(),
    JSON | st.builds(lambda size: {"file": "a", "size": size}, st.integers(0, 9)),
    JSON | st.builds(lambda row: {"row": row}, st.integers(0, 9)),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.booleans(),
    st.booleans(),
)


def files(subtask: int, count: int) -> list[SplitRecord]:
    """Splits of files of which the first ones are read."""
    return [
        SplitRecord(
            name := f"/data/{subtask}/part-{number:05}.json",
            {"file": name, "size": 1000 + number, "mtime_ns": 1_790_000_000_000_000_000 + number * 7_654_321},
            {"offset": 1000 + number, "line": 12} if number < count // 2 else None,
            number,
            number < count // 2,
        )
        for number in range(count)
    ]


def with_files(manifest: Manifest, count: int, *, packed: bool) -> Manifest:
    """A manifest whose subtasks read so many files each."""
    subtasks: list[object] = []
    for record in manifest.subtasks:
        splits = files(record.subtask, count)
        whole = len(splits) // BLOCK_SPLITS * BLOCK_SPLITS if packed else 0
        blocks = [pack(splits[first : first + BLOCK_SPLITS]) for first in range(0, whole, BLOCK_SPLITS)]
        of_blocks = {"read": blocks} if blocks else {}
        subtasks.append(msgspec.structs.replace(record, splits={"read": splits[whole:]}, packed=of_blocks))
    return msgspec.structs.replace(manifest, subtasks=subtasks)


@given(st.lists(RECORDS, max_size=20))
@settings(max_examples=200, deadline=None)
def test_a_block_gives_back_what_was_packed(splits: list[SplitRecord]) -> None:
    assert unpack(pack(splits)) == splits


@pytest.mark.parametrize("count", [BLOCK_SPLITS - 1, BLOCK_SPLITS, 3 * BLOCK_SPLITS + 7])
def test_whoever_loads_a_manifest_sees_each_split_in_its_place(count: int) -> None:
    store = MemoryStore()
    log = JobLog(store, JOB)
    log.begin_attempt("test")
    manifest = with_files(manifest_of(log, 1, []), count, packed=True)
    completed = publish(store, log, manifest)
    loaded = load_manifest(store, JOB, completed)
    assert loaded.format_version == (1 if count < BLOCK_SPLITS else 5), "older releases read what they can"
    for record in loaded.subtasks:
        assert (record.splits["read"], record.packed) == (files(record.subtask, count), {})
    savepoint = SavepointManifest.of(manifest, [], committed_by=1)
    assert [r.splits for r in savepoint.subtasks] == [r.splits for r in loaded.subtasks]
    assert not any(r.packed for r in savepoint.subtasks), "a savepoint stays readable for every release"


def test_a_fork_sees_splits_in_blocks_when_it_asks_whether_it_has_caught_up() -> None:
    log = JobLog(MemoryStore(), JOB)
    log.begin_attempt("test")
    leader = with_files(manifest_of(log, 1, []), 2 * BLOCK_SPLITS, packed=False)
    leader = msgspec.structs.replace(leader, steps=[*leader.steps, msgspec.structs.replace(leader.steps[0], id="read")])
    own = with_files(leader, 2 * BLOCK_SPLITS, packed=True)
    assert is_at_rest(own, limits_of(leader, {}))
    behind = with_files(leader, BLOCK_SPLITS, packed=True)
    assert not is_at_rest(behind, limits_of(leader, {}))


def test_a_hundred_thousand_finished_files_take_two_megabytes() -> None:
    """They took 22; most of it were paths.  Here are 10,000, half of them read."""
    log = JobLog(MemoryStore(), JOB)
    log.begin_attempt("test")
    manifest = manifest_of(log, 1, [])
    sizes = [len(dumps_manifest(with_files(manifest, 5_000, packed=packed), PLAIN)[0]) for packed in (False, True)]
    assert sizes[0] > 1_500_000
    assert sizes[1] < 200_000


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"\1",
        (1 << 31).to_bytes(4, "little"),
        b"\4\0\0\0" + b"abcd",
        b"\2\0\0\0" + pa.Codec("zstd").compress(b"{}", asbytes=True),
        pack(files(0, 3))[:-1],
    ],
)
def test_what_is_no_block_is_refused(block: bytes) -> None:
    log = JobLog(MemoryStore(), JOB)
    log.begin_attempt("test")
    manifest = manifest_of(log, 1, [])
    record = msgspec.structs.replace(manifest.subtasks[0], packed={"read": [block]})
    with pytest.raises(CorruptSnapshotError, match="block of splits"):
        with_all_splits(msgspec.structs.replace(manifest, subtasks=[record]))


def test_columns_of_different_lengths_are_refused() -> None:
    whole = msgspec.json.encode({"id": ["a", "b"], "data": {}, "position": {}, "max_time": [], "done": [], "idle": []})
    block = len(whole).to_bytes(4, "little") + pa.Codec("zstd").compress(whole, asbytes=True)
    with pytest.raises(CorruptSnapshotError, match="different lengths"):
        unpack(block)


def test_a_position_that_is_no_json_or_far_too_large_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="cannot be written as JSON"):
        pack([SplitRecord("a", object())])
    monkeypatch.setattr(packed_splits, "BLOCK_BYTES_MAX", 100)
    with pytest.raises(DataError, match="of 1 splits from 'a' on take"):
        pack([SplitRecord("a", "x" * 100)])


@pytest.mark.parametrize(("version", "seal"), [(5, PLAIN), (6, KEYED)])
def test_format_versions_5_and_6_are_read_for_ever(version: int, seal: Seal) -> None:
    """Files made by the first release with blocks of splits (``make_golden`` below); they never change."""
    store = LocalStore(GOLDEN / f"format-{version}", seal)
    state = JobLog(store, JOB).read()
    found = choose(store, JOB, state)
    assert found is not None
    assert found.manifest.format_version == version
    assert all(verify_checkpoint(store, JOB, c).ok for c in state.completed)
    assert restored_values(store, found) == expected_values(1)
    for record in found.manifest.subtasks:
        assert record.splits["read"] == files(record.subtask, 300)


def make_golden(version: int, seal: Seal) -> None:
    """How the golden files were made (run once for each version)."""
    store = LocalStore.open(GOLDEN / f"format-{version}", seal)
    with mock.patch.object(uuid, "uuid4", return_value=uuid.UUID(int=1)):
        log = JobLog(store, JOB, clock_ms=lambda: 1_000)
        log.begin_attempt("golden")
        manifest = manifest_of(log, 1, write_parts(store, 1, log.attempt))
        with mock.patch("cutwater.storage.snapshot.publish.ATTACHED_BYTES", 0):
            publish(store, log, with_files(manifest, 300, packed=True))
