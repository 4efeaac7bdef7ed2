"""Files that the first release with keys wrote are read for ever, and each seal is what it is said to be.

The seals are computed here from the key with the standard library alone, as ``docs/decisions`` tells.
"""

from __future__ import annotations

import hashlib
import hmac
import shutil
import uuid
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from storage_world import (
    JOB,
    expected_values,
    manifest_of,
    restored_values,
    segment,
    take_checkpoint,
    write_shared,
)

from cutwater.errors import SealError
from cutwater.storage.job_log import JobLog
from cutwater.storage.reading import choose, open_snapshot, verify_checkpoint
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.savepoint import SavepointManifest, publish_savepoint
from cutwater.storage.snapshot.savepoint_files import SavepointWriter
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.seal import PLAIN, Seal
from cutwater.ui.inspect import verify_snapshot

GOLDEN = Path(__file__).parent / "golden" / "sealed"
KEY = b"the key of the golden files"
SEALED = Seal([KEY])


def sealed_by_hand(kind: str, data: bytes) -> str:
    """HMAC-SHA256 under a key of its kind."""
    key_id = hmac.new(KEY, b"cutwater key id", hashlib.sha256).hexdigest()[:8]
    key = hmac.new(KEY, f"cutwater {kind}".encode(), hashlib.sha256).digest()
    return f"hs256:{key_id}:{hmac.new(key, data, hashlib.sha256).hexdigest()}"


def test_sealed_log_and_manifests_are_read_for_ever() -> None:
    """Log version 3, manifest version 4, behind a log entry and by itself (``make_golden`` below)."""
    store = LocalStore(GOLDEN, SEALED)
    state = JobLog(store, JOB).read()
    assert [c.path for c in state.completed] == [
        "chk-3/manifest-1.json",
        "log/000000000004.json",
        "log/000000000003.json",
    ]
    assert all(verify_checkpoint(store, JOB, c).ok for c in state.completed)
    newest = choose(store, JOB, state)
    assert newest is not None
    assert newest.manifest.format_version == 4
    assert restored_values(store, newest) == [3000 + i for i in range(40)]
    older = choose(store, JOB, msgspec.structs.replace(state, completed=state.completed[1:]))
    assert older is not None
    assert older.manifest.format_version == 4
    assert restored_values(store, older) == expected_values(2)


def test_every_golden_seal_is_an_hmac_that_anybody_with_the_key_can_compute() -> None:
    entries = sorted((GOLDEN / JOB / "log").glob("*.json"))
    assert len(entries) == 5
    for path in entries:
        body, digest, manifest = path.read_bytes().split(b"\n", 2)
        entry = msgspec.json.decode(body)
        assert (entry["version"], digest.decode()) == (3, sealed_by_hand("log", body))
        if entry["event"]["type"] == "checkpoint_completed":
            manifest = manifest or (GOLDEN / JOB / entry["event"]["path"]).read_bytes()
            assert entry["event"]["digest"] == sealed_by_hand("manifest", manifest)
            for stored in msgspec.json.decode(manifest)["entries"]:
                if stored.get("file"):
                    data = (GOLDEN / JOB / stored["file"]).read_bytes()
                    data = data[stored.get("offset", 0) :][: stored["length"]]
                    assert stored["digest"] == sealed_by_hand("segment", data)
    body, digest, _ = (GOLDEN / "savepoint-2" / "savepoint.json").read_bytes().split(b"\n")
    assert (msgspec.json.decode(body)["format_version"], digest.decode()) == (2, sealed_by_hand("savepoint", body))


def test_a_sealed_savepoint_is_read_for_ever() -> None:
    """Version 2."""
    snapshot = open_snapshot(str(GOLDEN / "savepoint-2"), SEALED)
    assert (snapshot.manifest.job, snapshot.manifest.checkpoint_id, snapshot.manifest.format_version) == (JOB, 2, 2)
    rows = [value for _, s in snapshot.segments("count", "agg") for value in s.batch.column("value").to_pylist()]
    assert rows == [2000 + i for i in range(40)]
    assert verify_snapshot(snapshot.store, snapshot.folder)["ok"]


def test_without_the_key_nothing_of_it_is_read(tmp_path: Path) -> None:
    for seal in (PLAIN, Seal([b"another key, as long"])):
        with pytest.raises(SealError, match="it is sealed with key"):
            JobLog(LocalStore(GOLDEN, seal), JOB).read()
        with pytest.raises(SealError, match="it is sealed with key"):
            open_snapshot(str(GOLDEN / "savepoint-2"), seal)


def test_a_job_goes_on_from_golden_files(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / JOB, tmp_path / JOB)
    store = LocalStore.open(tmp_path, SEALED)
    log = JobLog(store, JOB)
    assert log.begin_attempt("a later release") == 2
    completed = take_checkpoint(store, log, 4)
    assert load_manifest(store, JOB, completed).checkpoint_id == 4
    assert [c.checkpoint_id for c in JobLog(store, JOB).read().completed] == [4, 3, 2]


def make_golden() -> None:
    """How the files were made (run once)."""
    store = LocalStore.open(GOLDEN, SEALED)
    with mock.patch.object(uuid, "uuid4", return_value=uuid.UUID(int=1)):
        log = JobLog(store, JOB, clock_ms=lambda: 1_000)
        log.begin_attempt("golden")
        for checkpoint_id in (1, 2):
            take_checkpoint(store, log, checkpoint_id)
        savepoint = LocalStore.open(GOLDEN, SEALED)
        files = SavepointWriter(savepoint, "savepoint-2").add_state("count", 0, range(128), [segment(2, 0, 40)])
        manifest = SavepointManifest.of(manifest_of(log, 2, []), files, committed_by=2)
        publish_savepoint(savepoint, "savepoint-2", manifest)
        with mock.patch("cutwater.storage.snapshot.publish.ATTACHED_BYTES", 0):
            publish(store, log, manifest_of(log, 3, write_shared(store, 3, 1, [])))
