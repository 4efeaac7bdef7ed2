"""What the user's writers have written, until it is committed or given up: one commit for all subtasks.

A folder of the job's store, ``<uid>/``:

    message-<checkpoint>-<subtask>-<incarnation>    what ``write`` returned, before any checkpoint has it
    committed-<checkpoint>                          the newest that ``commit`` was called for, and returned
    fence-<incarnation>                             whoever has a smaller one commits no more

The messages are there for ``abort``: those of a checkpoint that never completed are in no manifest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from cutwater.connectors.base import Json, SinkSnapshot
from cutwater.connectors.data_source import spark_api
from cutwater.connectors.data_source.hosted import Hosted
from cutwater.connectors.data_source.range_log import FORMAT, opened, sealed
from cutwater.connectors.staging import Guard, converted
from cutwater.data.decoding import prepare
from cutwater.errors import CutwaterError, FencedError
from cutwater.storage.snapshot.limits import check_name
from cutwater.storage.store.opening import open_store, store_at

_log = logging.getLogger("cutwater.data_source")


class MessageHandle(msgspec.Struct, frozen=True, tag="message"):
    """What ``write`` returned for the rows of one subtask between two barriers."""

    uid: str
    checkpoint_id: int
    subtask: int
    incarnation: int
    rows: int
    message: str
    """Pickled."""
    format: int = FORMAT


prepare(MessageHandle)

_MESSAGE = re.compile(r"message-(\d{19})-(\d{5})-(\d{10})\.json", re.ASCII)
_COMMITTED = re.compile(r"committed-(\d{19})", re.ASCII)
_FENCE = re.compile(r"fence-(\d{10})", re.ASCII)


class Messages:
    """The folder.

    Args:
        directory: of the write step, in the job's store.
        job_uid: whose.
        guard: of the files.
    """

    def __init__(self, directory: str, job_uid: str, guard: Guard) -> None:
        self._directory, self._guard = directory, guard
        self._store = store_at(directory, guard.seal, guard.access)
        self._uid = check_name(job_uid, "the job's uid")

    def make(self) -> None:
        """Make the folder."""
        self._store = open_store(self._directory, self._guard.seal, self._guard.access)
        self._store.make_folder(self._uid)

    def keep(self, handle: MessageHandle) -> None:
        """Write a message down, durably."""
        self._store.create(self._path(_name(handle)), sealed(handle, self._guard.seal, "piece"))

    def kept(self, below: int) -> list[MessageHandle]:
        """The messages of writers of smaller incarnations.

        Raises:
            CorruptSnapshotError: one is damaged.
        """
        found = [match for name in self._names() if (match := _MESSAGE.fullmatch(name)) and int(match[3]) < below]
        return [
            opened(self._store.read(self._path(m[0])), MessageHandle, self._guard.seal, self._path(m[0]), "piece")
            for m in found
        ]

    def forget(self, handles: Iterable[MessageHandle]) -> None:
        """Remove messages; those that are gone are no error."""
        for handle in handles:
            self._store.delete(self._path(_name(handle)))

    @property
    def committed(self) -> int:
        """The newest checkpoint that is committed; 0: none is."""
        return max((int(m[1]) for name in self._names() if (m := _COMMITTED.fullmatch(name))), default=0)

    def note_committed(self, checkpoint_id: int) -> None:
        """``commit`` was called for this checkpoint, and returned."""
        before = [m for name in self._names() if (m := _COMMITTED.fullmatch(name)) and int(m[1]) < checkpoint_id]
        self._store.create(self._path(f"committed-{checkpoint_id:019}"), b"")
        for m in before:
            self._store.delete(self._path(m[0]))

    @property
    def fence(self) -> int:
        """The largest incarnation that has settled; 0: none has."""
        return max((int(m[1]) for name in self._names() if (m := _FENCE.fullmatch(name))), default=0)

    def raise_fence(self, incarnation: int) -> None:
        """From now on nobody of a smaller incarnation commits."""
        before = [m for name in self._names() if (m := _FENCE.fullmatch(name)) and int(m[1]) < incarnation]
        self._store.create(self._path(f"fence-{incarnation:010}"), b"")
        for m in before:
            self._store.delete(self._path(m[0]))

    def remove(self, incarnation: int) -> None:
        """Remove what is left of writers and drivers up to an incarnation; the folder, if nothing else is in it."""
        if self.fence <= incarnation:
            for name in self._names():
                match = _MESSAGE.fullmatch(name)
                if match is None or int(match[3]) <= incarnation:
                    self._store.delete(self._path(name))
        self._store.delete_empty(self._uid)

    def _names(self) -> list[str]:
        return self._store.names(self._uid) if self._store.exists(self._uid) else []

    def _path(self, name: str) -> str:
        return f"{self._uid}/{name}"


def _name(handle: MessageHandle) -> str:
    return f"message-{handle.checkpoint_id:019}-{handle.subtask:05}-{handle.incarnation:010}.json"


class GlobalCommitter:
    """Calls the user's ``commit`` and ``abort``, in the driver.

    Args:
        hosted, struct: whose, and of which rows.
        messages: what was written.
        job_uid: whose handles are committed.
    """

    takes_back = False

    def __init__(self, hosted: Hosted, struct: Any, messages: Messages, job_uid: str) -> None:
        self._hosted, self._struct, self._messages, self._uid = hosted, struct, messages, job_uid
        self._incarnation: int | None = None

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        """Commit each cut that is not committed, oldest first, by one call with the messages of all its subtasks.

        Raises:
            UserCodeError: the user's ``commit`` failed.
            FencedError: a newer attempt has settled.
        """
        cuts: dict[int, dict[tuple[int, int], MessageHandle]] = {}
        for handle in self._decoded(handles):
            cuts.setdefault(handle.checkpoint_id, {})[handle.subtask, handle.incarnation] = handle
        committed = self._messages.committed if cuts else 0
        for cut in sorted(cuts):
            found = [cuts[cut][key] for key in sorted(cuts[cut])]
            if cut > committed:
                # Who has not settled has no more authority than the newest writer whose rows it was given.
                authority = self._incarnation
                self._check_fence(max(handle.incarnation for handle in found) if authority is None else authority)
                self._call("commit", found, cut)
                self._messages.note_committed(cut)
            self._messages.forget(found)

    def settle(self, restored: SinkSnapshot | None, retained: Sequence[SinkSnapshot], incarnation: int) -> None:
        """Fence older drivers off, commit what ``restored`` names, and give up what nobody will commit.

        Raises:
            UserCodeError, FencedError: as ``commit``.
        """
        self._incarnation = incarnation
        self._messages.make()
        self._messages.raise_fence(incarnation)
        self._check_fence(incarnation)
        if restored is not None:
            self.commit(restored.checkpoint_id, restored.handles)
        self._give_up(incarnation)

    def retire(self, retired: SinkSnapshot, retained: Sequence[SinkSnapshot]) -> None:
        """Nothing to do: messages go when they are committed or given up."""

    def finish(self, incarnation: int) -> None:
        """See ``Committer.finish``."""
        self._give_up(incarnation + 1)
        self._messages.remove(incarnation)

    def _give_up(self, below: int) -> None:
        """Call ``abort``, once for each cut, for messages that were never committed.  Its failure is a warning."""
        committed = self._messages.committed
        cuts: dict[int, list[MessageHandle]] = {}
        for handle in self._messages.kept(below):
            cuts.setdefault(handle.checkpoint_id, []).append(handle)
        for cut, found in sorted(cuts.items()):
            if cut > committed:
                try:
                    self._call("abort", found, cut)
                except CutwaterError as error:
                    _log.warning("%s", error)
            self._messages.forget(found)

    def _call(self, method: str, handles: Sequence[MessageHandle], cut: int) -> None:
        with self._hosted.calling("streamWriter() failed"):
            writer: Any = self._hosted.made().streamWriter(self._struct, False)
        with self._hosted.calling(f"{method}() failed for batch {cut}"):
            getattr(writer, method)([spark_api.unpickled(handle.message) for handle in handles], cut)

    def _check_fence(self, incarnation: int) -> None:
        fence = self._messages.fence
        if fence > incarnation:
            raise FencedError(
                f"attempt {fence} of the job commits to {self._hosted.name} already, this is {incarnation}",
                hint="Another driver has taken over the job.",
            )

    def _decoded(self, handles: list[Json]) -> list[MessageHandle]:
        found: list[MessageHandle] = [converted(handle, MessageHandle) for handle in handles]
        return [handle for handle in found if handle.uid == self._uid]
