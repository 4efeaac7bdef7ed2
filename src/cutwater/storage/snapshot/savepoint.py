"""Savepoints: snapshots that belong to the user, in a format of their own that only grows.

    <savepoint>/savepoint.json      what it consists of, and the digest of that; written last: without it there is none
    <savepoint>/<step>/...          the data, see ``savepoint_files``

All paths are relative, so that the folder can be moved, copied and renamed.  Its name is nobody's business.

A job may take over a savepoint from its user: see ``Claim``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator

import msgspec

from cutwater.data.decoding import prepare
from cutwater.errors import CorruptSnapshotError, SealError, StorageError
from cutwater.storage.log_entries import CheckpointCompleted, LogState, check_version
from cutwater.storage.snapshot.limits import check_manifest
from cutwater.storage.snapshot.manifest import EdgeRecord, Manifest, StepRecord, SubtaskRecord, encoded
from cutwater.storage.snapshot.packed_splits import with_all_splits
from cutwater.storage.snapshot.savepoint_files import SavepointFile, entries_of
from cutwater.storage.store.base import Store
from cutwater.storage.store.no_follow import check_relative
from cutwater.storage.store.opening import another
from cutwater.storage.store.paths import CLAIM_FILE, SAVEPOINT_FILE
from cutwater.storage.store.seal import Seal, is_sealed

SAVEPOINT_VERSION = 2
KNOWN_VERSIONS = (1, 2)
"""2: sealed.  1: not, and so it stays without a key."""


class SavepointManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Content of ``savepoint.json``; see ``Manifest`` for fields of the same name."""

    format_version: int
    job: str
    uid: str
    """Of the job that took it."""
    checkpoint_id: int
    """The number that the job gave it, among those of its checkpoints."""
    committed_by: int
    """The checkpoint in the job's log with which its sinks committed all that they had handed out up to the savepoint;
    ``checkpoint_id`` itself if the job stopped with it."""
    attempt: int
    protocol: str
    max_parallelism: int
    parallelism: int
    triggered_ms: int
    completed_ms: int
    steps: list[StepRecord]
    subtasks: list[SubtaskRecord]
    files: list[SavepointFile]
    edges: list[EdgeRecord] = []
    back_edges: list[tuple[str, str]] = []
    final: bool = False
    """Taken after the job was drained: its windows have fired, and nothing is left to do."""
    engine: str = ""

    @classmethod
    def of(cls, manifest: Manifest, files: list[SavepointFile], *, committed_by: int) -> SavepointManifest:
        """A snapshot as a savepoint, each split told by itself; the manifest's own entries are not part of it."""
        manifest = with_all_splits(manifest)
        fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__ if name in cls.__struct_fields__}
        fields["format_version"] = 1
        return cls(**fields, files=files, committed_by=committed_by)

    def to_manifest(self) -> Manifest:
        """The same as the manifest of a checkpoint, whose files lie in the savepoint's folder."""
        names = [name for name in self.__struct_fields__ if name not in ("files", "committed_by")]
        return Manifest(**{name: getattr(self, name) for name in names}, entries=entries_of(self.files))


class _Versioned(msgspec.Struct):
    format_version: int = 0


prepare(_Versioned, SavepointManifest)


def publish_savepoint(store: Store, folder: str, manifest: SavepointManifest) -> None:
    """Make the savepoint whole: its data files are durable already.

    Raises:
        DataError: a position or handle is no JSON value.
        StorageError: the store fails, or there is a savepoint already.
    """
    version = max(manifest.format_version, SAVEPOINT_VERSION if store.seal.keyed else 1)
    manifest = msgspec.structs.replace(manifest, format_version=version)
    body = encoded(manifest, f"savepoint {manifest.checkpoint_id}")
    path = f"{folder}/{SAVEPOINT_FILE}"
    if not store.create(path, body + b"\n" + store.seal.digest("savepoint", body).encode() + b"\n"):
        raise StorageError(f"{path} exists already: no path is ever written twice")


def is_savepoint(store: Store, folder: str) -> bool:
    """True if a folder holds a savepoint that was completed."""
    return SAVEPOINT_FILE in store.names(folder)


def savepoint_state(store: Store, folder: str) -> LogState:
    """A savepoint as the log of a job would tell of it: one snapshot to restore; see ``load_savepoint``."""
    manifest, digest = _read(store, folder)
    completed = CheckpointCompleted(
        checkpoint_id=manifest.checkpoint_id,
        attempt=manifest.attempt,
        digest=digest,
        path=SAVEPOINT_FILE,
        time_ms=manifest.completed_ms,
        kind="savepoint",
    )
    return LogState(
        uid=manifest.uid,
        name=manifest.job,
        attempt=manifest.attempt,
        completed=(completed,),
        newest_id=manifest.checkpoint_id,
    )


def load_savepoint(store: Store, folder: str) -> SavepointManifest:
    """The manifest of a savepoint, verified.

    Raises:
        CorruptSnapshotError: the manifest is missing or damaged.
        FormatVersionError: written by a newer release.
    """
    return _read(store, folder)[0]


def damaged_files(store: Store, folder: str) -> Iterator[tuple[str, str]]:
    """Files whose bytes differ from their digests, and what is wrong; reads everything."""
    for file in load_savepoint(store, folder).files:
        path = f"{folder}/{file.path}"
        try:
            data = store.read(path)
        except CorruptSnapshotError as error:
            yield path, error.message
            continue
        problem = f"expected {file.length} bytes, found {len(data)}"
        if len(data) == file.length:
            problem = _problem(store.seal, data, file)
        if problem:
            yield path, f"{path} is damaged: {problem}"


def _problem(seal: Seal, data: bytes | memoryview, file: SavepointFile) -> str:
    try:
        return seal.problem("file", data, file.digest)
    except SealError as error:
        return error.message


def delete_savepoint(store: Store, folder: str, digest: str) -> bool:
    """Remove a savepoint, what marks it as one first; false if another one (or none) lies there by now.

    Files that do not belong to it stay.

    Args:
        digest: of its manifest's bytes, as ``savepoint_state`` tells it.
    """
    if not is_savepoint(store, folder):
        return False
    manifest, found = _read(store, folder)
    if found != digest:
        return False
    store.delete(f"{folder}/{SAVEPOINT_FILE}")
    for file in manifest.files:
        store.delete(f"{folder}/{file.path}")
    for step in {file.path.partition("/")[0] for file in manifest.files}:
        store.delete_empty(f"{folder}/{step}")
    store.delete_empty(folder)
    return True


def _read(store: Store, folder: str) -> tuple[SavepointManifest, str]:
    """The manifest, and the digest of its bytes."""
    path = f"{folder}/{SAVEPOINT_FILE}"
    data = bytes(store.read(path))
    body, _, tail = data.partition(b"\n")
    said = tail.removesuffix(b"\n").decode("ascii", errors="replace")
    if not tail.endswith(b"\n") or store.seal.problem("savepoint", body, said, path):
        raise CorruptSnapshotError(f"{path} is damaged: its content differs from its digest")
    manifest = _parse(path, body)
    if (manifest.format_version == SAVEPOINT_VERSION) != is_sealed(said):
        raise CorruptSnapshotError(f"{path} is damaged: its version is {manifest.format_version}")
    for file in manifest.files:
        if len(check_relative(file.path)) != 2:
            raise CorruptSnapshotError(f"{path} names {file.path[:128]!r}, which is no file of a savepoint")
    check_manifest(manifest.to_manifest(), path, savepoint=True)
    return manifest, store.seal.digest("savepoint", data)


def _parse(path: str, body: bytes) -> SavepointManifest:
    try:
        version = msgspec.json.decode(body, type=_Versioned).format_version
        check_version(path, "savepoint format", version, KNOWN_VERSIONS)
        return msgspec.json.decode(body, type=SavepointManifest)
    except msgspec.MsgspecError as error:
        raise CorruptSnapshotError(f"{path} is not the manifest of a savepoint ({error})") from error


class _Claimed(msgspec.Struct, frozen=True):
    """Content of ``claim.json`` in the job's folder, so that a later driver knows it."""

    directory: str
    folder: str
    digest: str
    """Of the savepoint's manifest: another savepoint in its place is nobody's."""
    newest_id: int
    """Highest checkpoint id of the job when it claimed the savepoint."""
    word: str = ""
    """Text that lies in the savepoint's folder, too; older releases left none there, and what they claimed stays."""


prepare(_Claimed)

_MARK = "claimed"
"""In the savepoint's folder."""


class Claim:
    """The savepoint that a job has taken over from its user, if any: it goes when the job does not need it any more.

    A word in the job's folder and the same one in the savepoint's say so.  So whoever can write into the one, and not
    into the other, cannot have a savepoint removed that nobody gave away.
    """

    def __init__(self, store: Store, job: str) -> None:
        self._store, self._job = store, job
        self._path = f"{job}/{CLAIM_FILE}"
        self._claimed = self._read()

    def _read(self) -> _Claimed | None:
        if CLAIM_FILE not in self._store.names(self._job):
            return None
        try:
            return msgspec.json.decode(self._store.read(self._path), type=_Claimed)
        except (CorruptSnapshotError, msgspec.MsgspecError):
            return None  # then nobody removes it

    def take(self, directory: str, folder: str, digest: str, newest_id: int) -> None:
        """The savepoint is the job's from now on."""
        if self._claimed is not None and self._claimed.digest == digest:
            return
        word = secrets.token_hex(16)
        savepoint = another(self._store, directory)
        savepoint.delete(f"{folder}/{_MARK}")
        savepoint.create(f"{folder}/{_MARK}", word.encode())
        self._claimed = _Claimed(directory, folder, digest, newest_id, word)
        self._store.delete(self._path)
        self._store.create(self._path, msgspec.json.encode(self._claimed))

    def collect(self, completed: Iterable[int], *, needed: int) -> list[str]:
        """Remove the savepoint once ``needed`` checkpoints have completed since; returns warnings."""
        claimed = self._claimed
        if claimed is None or sum(id > claimed.newest_id for id in completed) < needed:
            return []
        try:
            self._remove(claimed)
            self._store.delete(self._path)
        except StorageError as error:
            return [f"the claimed savepoint {claimed.directory}/{claimed.folder} stays for now: {error}"]
        self._claimed = None
        return []

    def _remove(self, claimed: _Claimed) -> None:
        store = another(self._store, claimed.directory)
        if _MARK not in store.names(claimed.folder):
            return  # it is gone, or nobody gave it away
        mark = f"{claimed.folder}/{_MARK}"
        if not claimed.word or bytes(store.read(mark, 0, len(claimed.word))) != claimed.word.encode():
            return
        delete_savepoint(store, claimed.folder, claimed.digest)
        store.delete(mark)
        store.delete_empty(claimed.folder)
