"""The log of a table that a job writes: followed entry by entry, and continued by entries of our own.

The library would do both.  But what it does for a commit takes time by the number of files in the table, and its own
commits are not made durable.  See ``docs/decisions/0058-delta.md``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import pyarrow as pa

from cutwater import __version__
from cutwater.connectors.delta.log import Entry, FileAction, read_entry
from cutwater.connectors.delta.table import (
    LOG_FOLDER,
    Conflict,
    Description,
    delta_errors,
    delta_library,
    described,
    log_entry,
    opened,
)
from cutwater.connectors.staging_folders import fsync_path, storage_errors
from cutwater.errors import StorageError

_UNSYNCED = 16
"""Entries that others may have left, and not synced, when the table is first looked at."""
_MERGE_RETRIES = 15
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.(?:.+\.)?(?:parquet|json)", re.ASCII)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class State(NamedTuple):
    """A table at a version."""

    version: int
    number: int
    """How far the job has come with it; 0: it has not begun."""
    description: Description
    """The same object for as long as the table says the same of itself."""


class NewFile(NamedTuple):
    """A file to come into a table."""

    path: str
    bytes: int
    partition: Mapping[str, str | None]
    stats: str


class WrittenTable:
    """A table that one step of a job commits to.

    A commit makes the entry behind the version that was looked at, or fails if there is one: so it rests on exactly
    that version.  Whatever the log says is made durable before anything is built on it.

    Args:
        path: where, absolute.
        app: stands for the job's step in the table; the number that goes with it only grows.
    """

    def __init__(self, path: str, app: str) -> None:
        self.path, self.app = path, app
        self._log = os.path.join(path, LOG_FOLDER)
        self._state: State | None = None

    def create(self, schema: pa.Schema, partition_by: Sequence[str]) -> None:
        """Make the table, unless somebody has.

        Raises:
            StorageError: it cannot be made.
        """
        library = delta_library()
        with storage_errors("cannot make the Delta table", self.path):
            os.makedirs(self._log, exist_ok=True)
        with delta_errors("cannot make the Delta table", self.path), contextlib.suppress(Conflict):
            made = library.Schema.from_arrow(schema)
            library.DeltaTable.create(self.path, made, mode="ignore", partition_by=list(partition_by))
        fsync_path(os.path.dirname(self.path))
        self._state = None

    def newest(self) -> State | None:
        """The newest version; ``None``: there is no table.

        Raises:
            StorageError: it cannot be read.
        """
        state = self._state
        if state is None or not os.path.exists(os.path.join(self._log, log_entry(state.version))):
            return self._load()  # what was cleaned up is not to be taken for what is not there yet
        seen: list[int] = []
        while (entry := read_entry(self.path, state.version + 1)) is not None:
            seen.append(entry.version)
            self._sync_files(entry)
            if any(action.metadata is not None or action.protocol is not None for action in entry.actions):
                return self._load()
            number = entry.number(self.app)
            state = State(entry.version, state.number if number is None else number, state.description)
        self._sync(seen)
        self._state = state
        return state

    def _load(self) -> State | None:
        handle = opened(self.path)
        if handle is None:
            self._state = None
            return None
        with delta_errors("cannot read the Delta table", self.path):
            number = handle.transaction_version(self.app) or 0
            self._state = State(handle.version(), number, described(handle))
        self._sync(range(max(0, handle.version() - _UNSYNCED), handle.version() + 1))
        fsync_path(self.path)
        return self._state

    def handle(self) -> Any:
        """The library's handle of the version that was looked at last.

        Raises:
            StorageError: it cannot be read.
        """
        handle = None if self._state is None else opened(self.path, self._state.version)
        if handle is None:
            raise StorageError(f"the Delta table {self.path!r} is gone", hint="Somebody removed it, or its log.")
        return handle

    def commit(
        self, added: Iterable[NewFile], removed: Iterable[FileAction], number: int, told: Mapping[str, str]
    ) -> None:
        """The next version, behind the one that was looked at, durably.

        Args:
            added: files that lie where they are to be, durably.
            removed: files that leave, as the log has them.
            number: how far the job has come with it.
            told: for people.

        Raises:
            Conflict: somebody else has made this version; nothing was committed.
            StorageError: the disk is full, or the like.
        """
        assert self._state is not None
        version, now_ms = self._state.version + 1, int(time.time() * 1000)
        info = {
            "timestamp": now_ms,
            "operation": "WRITE",
            "operationParameters": {"mode": "Append"},
            "readVersion": self._state.version,
            "isBlindAppend": False,
            "engineInfo": f"cutwater/{__version__}",
            **told,
        }
        actions: list[dict[str, Any]] = [{"commitInfo": info}, {"txn": {"appId": self.app, "version": number}}]
        actions += [{"add": _add(file, now_ms)} for file in added]
        actions += [{"remove": _remove(file, now_ms)} for file in removed]
        body = b"\n".join(map(msgspec.json.encode, actions)) + b"\n"
        self._create(log_entry(version), body)
        self._state = self._state._replace(version=version, number=number)

    def _create(self, name: str, body: bytes) -> None:
        """Make an entry with this body, all of it at once, unless there is one."""
        path, temporary = os.path.join(self._log, name), os.path.join(self._log, f"_commit_{secrets.token_hex(16)}.tmp")
        with storage_errors("cannot commit into", path):
            try:
                with open(temporary, "xb") as file:
                    file.write(body)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(temporary, path)
            except FileExistsError:
                raise Conflict(f"version {name} of the Delta table {self.path!r} was made by somebody else") from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise StorageError(
                    f"cannot commit into {path!r}: the file system has no hard links, and a version must come all at "
                    "once and only once",
                    hint="Put the table on another file system.",
                ) from error
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
        fsync_path(self._log)

    def merge_properties(self, number: int, told: Mapping[str, str]) -> dict[str, Any]:
        """What goes with a commit that the library makes: the number, nothing that it does behind the commit."""
        transaction = delta_library("deltalake.transaction")
        commit = transaction.CommitProperties(
            app_transactions=[transaction.Transaction(self.app, number)],
            custom_metadata=dict(told),
            max_commit_retries=_MERGE_RETRIES,
        )
        hooks = transaction.PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
        return {"commit_properties": commit, "post_commithook_properties": hooks}

    def tidy(self, every: int) -> None:
        """Put the log together if so many versions have come since that was done last, and remove what is too old.

        Raises:
            StorageError: it cannot be written.
        """
        if self._state is None or self._state.version - _last_checkpoint(self._log) < every:
            return
        handle = self.handle()
        with delta_errors("cannot put together the log of the Delta table", self.path):
            handle.create_checkpoint()
        with storage_errors("cannot list", self._log):
            names = os.listdir(self._log)
        for name in names:
            if name == "_last_checkpoint" or _checkpoint_version(name) == self._state.version:
                fsync_path(os.path.join(self._log, name))
        fsync_path(self._log)
        with delta_errors("cannot remove old entries of the log of the Delta table", self.path):
            handle.cleanup_metadata()

    def _sync(self, versions: Sequence[int]) -> None:
        """Make entries durable that others made; old ones may be gone."""
        for version in versions:
            entry = os.path.join(self._log, log_entry(version))
            if os.path.exists(entry):
                fsync_path(entry)
        if versions:
            fsync_path(self._log)

    def _sync_files(self, entry: Entry) -> None:
        """Make files durable that the library wrote for us."""
        if entry.number(self.app) is None:
            return
        files = [os.path.join(self.path, action.file) for action in (*entry.added, *entry.changes)]
        for path in sorted({*files, *(os.path.dirname(file) for file in files)}):
            fsync_path(path)


def _add(file: NewFile, now_ms: int) -> dict[str, Any]:
    return {
        "path": quote(file.path, safe="/=-_.~"),
        "partitionValues": dict(file.partition),
        "size": file.bytes,
        "modificationTime": now_ms,
        "dataChange": True,
        "stats": file.stats,
    }


def _remove(file: FileAction, now_ms: int) -> dict[str, Any]:
    return {
        "path": file.path,
        "deletionTimestamp": now_ms,
        "dataChange": True,
        "extendedFileMetadata": True,
        "partitionValues": file.partition_values,
        "size": file.size,
    }


def _checkpoint_version(name: str) -> int | None:
    match = _CHECKPOINT.fullmatch(name)
    return None if match is None else int(match[1])


def _last_checkpoint(log: str) -> int:
    """The version at which the log was put together last; -1: never."""
    try:
        with open(os.path.join(log, "_last_checkpoint"), "rb") as file:
            return int(json.load(file)["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1
