"""A savepoint that a job has taken over from its user: it goes when the job does not need it any more.

A word in the job's folder and the same one in the savepoint's say so.  So whoever can write into the one, and not into
the other, cannot have a savepoint removed that nobody gave away.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import msgspec

from cutwater.data.decoding import prepare
from cutwater.errors import CorruptSnapshotError, StorageError
from cutwater.storage.savepoint.manifest import delete_savepoint
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import another
from cutwater.storage.store.paths import CLAIM_FILE


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
    """The claim of one job, if it has one.

    Args:
        store: where the job lies.
        job: its folder.
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
        """The savepoint is the job's from now on.

        Raises:
            StorageError: that cannot be noted.
        """
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
