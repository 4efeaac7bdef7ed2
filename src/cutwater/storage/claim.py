"""A savepoint that a job has taken over from its user: it goes when the job does not need it any more."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cutwater.decoding import prepare
from cutwater.errors import CorruptSnapshotError, StorageError
from cutwater.storage.base import Store
from cutwater.storage.local import LocalStore
from cutwater.storage.savepoint import delete_savepoint

__all__ = ["Claim"]


class _Claimed(msgspec.Struct, frozen=True):
    """What lies in ``claim.json`` in the job's folder, so that a later driver knows it."""

    directory: str
    folder: str
    digest: str
    """Of the savepoint's manifest: another savepoint in its place is nobody's."""
    newest_id: int
    """Highest checkpoint id of the job when it claimed the savepoint."""


prepare(_Claimed)


class Claim:
    """The claim of one job, if it has one.

    Args:
        store: where the job lies.
        job: its folder.
    """

    def __init__(self, store: Store, job: str) -> None:
        self._store, self._job = store, job
        self._path = f"{job}/claim.json"
        self._claimed = self._read()

    def _read(self) -> _Claimed | None:
        if "claim.json" not in self._store.names(self._job):
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
        self._claimed = _Claimed(directory, folder, digest, newest_id)
        self._store.delete(self._path)
        self._store.create(self._path, msgspec.json.encode(self._claimed))

    def collect(self, completed: Iterable[int], *, needed: int) -> list[str]:
        """Remove the savepoint once ``needed`` checkpoints have completed since; returns warnings."""
        claimed = self._claimed
        if claimed is None or sum(id > claimed.newest_id for id in completed) < needed:
            return []
        try:
            delete_savepoint(LocalStore(claimed.directory), claimed.folder, claimed.digest)
            self._store.delete(self._path)
        except StorageError as error:
            return [f"the claimed savepoint {claimed.directory}/{claimed.folder} stays for now: {error}"]
        self._claimed = None
        return []
