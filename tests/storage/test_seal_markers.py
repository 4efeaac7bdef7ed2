"""What says that it is sealed is so, and nothing else: a marker without its seal is refused, and a seal without it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from storage_world import JOB, a_job, manifest_of, segment

from cutwater.errors import CorruptSnapshotError, SealError
from cutwater.storage import log_entries as entries
from cutwater.storage.job_log import JobLog
from cutwater.storage.snapshot import savepoint as savepoints
from cutwater.storage.snapshot import staged_input
from cutwater.storage.snapshot.savepoint import SavepointManifest, load_savepoint, publish_savepoint
from cutwater.storage.snapshot.savepoint_files import SavepointWriter
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.snapshot.staged_input import Staged, read_staged, sealed_staged
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.seal import PLAIN, Seal
from reversal import Reversal

KEYED = Seal([b"0123456789abcdef"])
TURNING_ON = Seal([b"0123456789abcdef"], accept_unsealed=True)


def marked(path: Path, field: str, version: int, seal: Seal) -> None:
    """The file says that it is of another version, under a digest or seal made anew."""
    kind = "log" if field == "version" else "savepoint"
    head, _, behind = path.read_bytes().split(b"\n", 2)
    line = msgspec.json.encode(msgspec.json.decode(head) | {field: version})
    path.write_bytes(b"\n".join([line, seal.digest(kind, line).encode(), behind]))  # type: ignore[arg-type]


def newest_entry(root: Path) -> Path:
    return max((root / JOB / "log").glob("0*"))


@pytest.mark.parametrize("version", [1, 2])
def test_a_sealed_log_entry_of_a_version_that_is_not_sealed_is_refused(tmp_path: Path, version: int) -> None:
    store, _ = a_job(tmp_path, KEYED)
    marked(newest_entry(tmp_path), "version", version, KEYED)
    with pytest.raises(CorruptSnapshotError, match=f"its version is {version}\\."):
        JobLog(store, JOB).read()


@pytest.mark.parametrize("seal", [PLAIN, TURNING_ON], ids=["without a key", "while a key is turned on"])
def test_a_log_entry_that_says_it_is_sealed_and_is_not_is_refused(tmp_path: Path, seal: Seal) -> None:
    a_job(tmp_path)
    marked(newest_entry(tmp_path), "version", 3, PLAIN)
    with pytest.raises(CorruptSnapshotError, match="its version is 3\\."):
        JobLog(LocalStore(tmp_path, seal), JOB).read()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_with_a_key_no_log_entry_without_its_seal_is_read_whatever_it_says(tmp_path: Path, version: int) -> None:
    store, _ = a_job(tmp_path, KEYED)
    marked(newest_entry(tmp_path), "version", version, PLAIN)
    with pytest.raises(SealError, match="is not sealed with the job's key"):
        JobLog(store, JOB).read()


def a_savepoint(root: Path, seal: Seal) -> tuple[LocalStore, Path]:
    store, log = a_job(root, seal)
    parts = SavepointWriter(store, "sp").add_state("count", 0, range(64), [segment(1, 0, 40)])
    publish_savepoint(store, "sp", SavepointManifest.of(manifest_of(log, 2, []), parts, committed_by=2))
    return store, root / "sp/savepoint.json"


@pytest.mark.parametrize(
    ("written", "version", "read"),
    [(PLAIN, 2, PLAIN), (PLAIN, 2, TURNING_ON), (KEYED, 1, KEYED)],
    ids=["without a key", "while a key is turned on", "with a key"],
)
def test_a_savepoint_whose_version_and_seal_do_not_agree_is_refused(
    tmp_path: Path, written: Seal, version: int, read: Seal
) -> None:
    _, path = a_savepoint(tmp_path, written)
    marked(path, "format_version", version, written)
    with pytest.raises(CorruptSnapshotError, match=f"its version is {version}"):
        load_savepoint(LocalStore(tmp_path, read), "sp")


@pytest.mark.parametrize("version", [1, 2])
def test_with_a_key_no_savepoint_without_its_seal_is_read_whatever_it_says(tmp_path: Path, version: int) -> None:
    store, path = a_savepoint(tmp_path, KEYED)
    marked(path, "format_version", version, PLAIN)
    with pytest.raises(SealError, match="is not sealed with the job's key"):
        load_savepoint(store, "sp")


@pytest.mark.parametrize(
    ("written", "version", "read"),
    [(PLAIN, 4, PLAIN), (PLAIN, 4, TURNING_ON), (KEYED, 3, KEYED), (KEYED, 1, KEYED)],
    ids=["without a key", "while a key is turned on", "with a key", "with a key, the oldest"],
)
def test_a_manifest_whose_version_and_seal_do_not_agree_is_refused(
    tmp_path: Path, written: Seal, version: int, read: Seal
) -> None:
    store, log = a_job(tmp_path, written)
    completed = log.state.completed[0]
    manifest = msgspec.structs.replace(load_manifest(store, JOB, completed), format_version=version)
    data = msgspec.json.encode(manifest)
    store.create(f"{JOB}/chk-2/manifest-1.json", data)
    forged = msgspec.structs.replace(completed, path="chk-2/manifest-1.json", digest=written.digest("manifest", data))
    with pytest.raises(CorruptSnapshotError, match=f"manifest-1.json is damaged: its version is {version}"):
        load_manifest(LocalStore(tmp_path, read), JOB, forged)


@pytest.mark.parametrize("digest", ["", "\n", "\n" + PLAIN.digest("input", b"")], ids=["none", "empty", "of no key"])
def test_with_a_key_no_list_of_staged_files_without_its_seal_is_read(digest: str) -> None:
    body = sealed_staged(Staged("n int64", {"part-0.parquet": 4}, 2, {}), PLAIN)
    with pytest.raises(SealError, match="is not sealed with the job's key"):
        read_staged("x", body + digest.encode(), KEYED)


# ----------------------------------------------------------------------------------------------------------- the alarm

NO_LIST = lambda _: test_with_a_key_no_list_of_staged_files_without_its_seal_is_read("")  # noqa: E731
REVERSALS = {
    "log: sealed, and of another version": Reversal(
        entries.parse_entry,
        "(entry.version == LOG_VERSION) != is_sealed(digest)",
        "False",
        lambda folder: test_a_sealed_log_entry_of_a_version_that_is_not_sealed_is_refused(folder, 2),
    ),
    "log: of that version, and not sealed": Reversal(
        entries.parse_entry,
        "(entry.version == LOG_VERSION) != is_sealed(digest)",
        "False",
        lambda folder: test_a_log_entry_that_says_it_is_sealed_and_is_not_is_refused(folder, TURNING_ON),
    ),
    "a digest is as good as a seal": Reversal(
        Seal._hasher_of,
        "self.refuses_unsealed",
        "False",
        lambda folder: test_with_a_key_no_log_entry_without_its_seal_is_read_whatever_it_says(folder, 3),
    ),
    "savepoint": Reversal(
        savepoints._read,
        "(manifest.format_version == SAVEPOINT_VERSION) != is_sealed(said)",
        "False",
        lambda folder: test_a_savepoint_whose_version_and_seal_do_not_agree_is_refused(folder, KEYED, 1, KEYED),
    ),
    "manifest": Reversal(
        load_manifest,
        "(version in SEALED_VERSIONS) != is_sealed(completed.digest)",
        "False",
        lambda folder: test_a_manifest_whose_version_and_seal_do_not_agree_is_refused(folder, PLAIN, 4, PLAIN),
    ),
    "staged input": Reversal(staged_input.read_staged, "(said or seal.refuses_unsealed) and", "said and", NO_LIST),
}


@pytest.mark.parametrize("bug", REVERSALS)
def test_planted_bugs_are_found(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    REVERSALS[bug].is_seen(monkeypatch, tmp_path_factory)
