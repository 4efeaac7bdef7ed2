"""The driver's side of savepoints: where they go, when they are whole, and what the user is told.

A savepoint is handed out only when a checkpoint behind it is in the log: then its sinks have committed, or will for
certain, all that they handed out before it, and the entry proves that no other driver had taken the job.  Until then
its files lie there without a manifest, and are no savepoint.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from cutwater.config import FileAccess
from cutwater.errors import CutwaterError, StorageError
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.job.hosts import Follow
from cutwater.protocol.protocols import FailureReason
from cutwater.storage.snapshot.manifest import Manifest
from cutwater.storage.snapshot.savepoint import SavepointManifest, publish_savepoint
from cutwater.storage.snapshot.savepoint_files import SavepointFile
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import joined, open_store
from cutwater.storage.store.paths import savepoint_folder
from cutwater.storage.store.seal import Seal

SavepointKind = Literal["savepoint", "stop", "drain"]
"""The job goes on; it stops behind it; it ends as if its sources were exhausted."""


@dataclass(eq=False)
class SavepointRequest:
    """A user's wish for a savepoint; ``done`` gets its answer once."""

    kind: SavepointKind
    store: Store
    """The directory that the user named."""
    folder: str
    """Of the savepoint, in ``store``; new."""
    done: queue.SimpleQueue[CutwaterError | None] = field(default_factory=queue.SimpleQueue[CutwaterError | None])
    """The savepoint is whole, or why there is none."""

    @classmethod
    def prepare(cls, kind: SavepointKind, directory: str, job: str, seal: Seal, access: FileAccess) -> SavepointRequest:
        """Make the directory, and the savepoint's folder in it.

        Args:
            seal, access: of the savepoint.

        Raises:
            ConfigError: no directory was named, it is a file, or there is no such store.
            StorageError: it cannot be written.
        """
        store = open_store(directory, seal, access)
        folder = savepoint_folder(job)
        store.make_folder(folder)
        return cls(kind, store, folder)

    @property
    def path(self) -> str:
        """Place (URI) of the savepoint to be."""
        return joined(self.store.uri, self.folder)

    def result(self, wait: Callable[[], CutwaterError | None]) -> str:
        """Wait for the savepoint, and give its place (URI).

        Args:
            wait: for the answer; raises if the job has ended, so that nobody will answer unless somebody just did.

        Raises:
            CutwaterError: there is none, with the reason.
        """
        try:
            error = wait()
        except CutwaterError as ended:
            if self.done.empty():
                self.answer(ended)
            error = self.done.get()
        if error is not None:
            raise error
        return self.path

    def answer(self, error: CutwaterError | None) -> None:
        """It is whole, or there is none: then nothing is left of it."""
        if error is not None:
            try:
                self.store.delete(self.folder)
            except StorageError as e:
                error.hint = f"{error.hint} Remove what lies in {self.path}: {e}".strip()
        self.done.put(error)


class Savepoints:
    """The savepoints of one job that are durable and not handed out yet.  Belongs to the coordinator's thread.

    Args:
        failed: called when a savepoint with which the job was to stop could not be made whole.
    """

    def __init__(self, failed: Callable[[str], None]) -> None:
        self._failed = failed
        self._held: dict[int, tuple[SavepointRequest, Manifest, list[SavepointFile]]] = {}

    def durable(self, request: SavepointRequest, manifest: Manifest, files: list[SavepointFile]) -> None:
        """Every worker has written its part."""
        self._held[manifest.checkpoint_id] = (request, manifest, files)

    def committed(self, checkpoint_id: int) -> None:
        """A checkpoint is in the log: savepoints up to it are handed out."""
        for held in [id for id in self._held if id <= checkpoint_id]:
            request, manifest, files = self._held.pop(held)
            try:
                whole = SavepointManifest.of(manifest, files, committed_by=checkpoint_id)
                publish_savepoint(request.store, request.folder, whole)
            except CutwaterError as e:
                request.answer(e)
                if request.kind != "savepoint":
                    self._failed(f"the job was to stop with a savepoint, which failed: {e}")
            else:
                request.answer(None)

    def answered(self, request: SavepointRequest, answer: cm.RequestAnswered) -> None:
        """Hear what became of a request, or of that for the checkpoint behind its savepoint."""
        follows = isinstance(answer.request_id, Follow)
        if answer.reason is None or (follows and answer.reason is FailureReason.JOB_ENDING):
            return  # in the latter case the final checkpoint does as well
        held = [id for id, (holder, _, _) in self._held.items() if holder is request]
        for id in held:
            del self._held[id]
        if held or not follows:
            what = "the checkpoint behind the savepoint" if follows else "the savepoint"
            request.answer(CutwaterError(f"{what} failed: {answer.reason.message} {answer.detail}".rstrip()))

    def stopped(self, reason: str) -> None:
        """The attempt is over: nothing commits what was handed out before those that wait."""
        for request, _, _ in self._held.values():
            why = (
                f"the savepoint failed: the job stopped or restarted before its output up to it was committed: {reason}"
            )
            request.answer(CutwaterError(why, hint="Ask again when the job runs."))
        self._held.clear()
