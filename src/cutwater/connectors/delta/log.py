"""Entries of a table's log, as they lie there: what each version adds and removes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.compute

from cutwater.connectors.delta.table import LOG_FOLDER, delta_errors, entry_version, log_entry
from cutwater.data.decoding import prepare
from cutwater.errors import StorageError

_compute: Any = pyarrow.compute


class FileAction(msgspec.Struct, frozen=True, rename="camel"):
    """A file that comes into the table, or leaves it; or one that lists changes."""

    path: str
    data_change: bool = True
    partition_values: dict[str, str | None] | None = None
    size: int | None = None
    modification_time: int = 0
    deletion_vector: Mapping[str, Any] | None = None

    @property
    def file(self) -> str:
        """Below the table's folder; some writers name files elsewhere."""
        return unquote(self.path)

    @property
    def name(self) -> str:
        """Of the file, without its folders."""
        return self.file.rpartition("/")[2]


class TransactionAction(msgspec.Struct, frozen=True, rename="camel"):
    """How far a program has come."""

    app_id: str
    version: int


class MetadataAction(msgspec.Struct, frozen=True, rename="camel"):
    """What the table is from now on."""

    schema_string: str


class Action(msgspec.Struct, frozen=True):
    """A line of an entry."""

    add: FileAction | None = None
    remove: FileAction | None = None
    cdc: FileAction | None = None
    txn: TransactionAction | None = None
    metadata: MetadataAction | None = msgspec.field(default=None, name="metaData")
    protocol: Mapping[str, Any] | None = None


prepare(Action)


class Entry(NamedTuple):
    """One version."""

    version: int
    actions: list[Action]

    @property
    def added(self) -> list[FileAction]:
        """Files that bring rows."""
        return [a.add for a in self.actions if a.add is not None and a.add.data_change]

    @property
    def removed(self) -> list[FileAction]:
        """Files that take rows along."""
        return [a.remove for a in self.actions if a.remove is not None and a.remove.data_change]

    @property
    def changes(self) -> list[FileAction]:
        """Files that list what changes; where there are some, they stand for what is added and removed."""
        return [a.cdc for a in self.actions if a.cdc is not None]

    @property
    def schema(self) -> str | None:
        """The table's columns from now on, if they change."""
        return next((a.metadata.schema_string for a in self.actions if a.metadata is not None), None)

    def number(self, app: str) -> int | None:
        """How far a program has come with it."""
        return next((a.txn.version for a in self.actions if a.txn is not None and a.txn.app_id == app), None)


def read_entry(path: str, version: int) -> Entry | None:
    """A version of the table at ``path``; ``None``: it is not there.

    Raises:
        StorageError: it cannot be read.
    """
    name = os.path.join(path, LOG_FOLDER, log_entry(version))
    try:
        with open(name, "rb") as file:
            body = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {name!r}: {error.strerror}") from error
    try:
        return Entry(version, [msgspec.json.decode(line, type=Action) for line in body.splitlines() if line])
    except msgspec.MsgspecError as error:
        raise StorageError(f"{name!r} is no entry of a Delta log: {error}") from error


def newest_entry(path: str) -> int | None:
    """The newest version that has an entry; ``None``: there is none.

    Raises:
        StorageError: the log cannot be listed.
    """
    try:
        names = os.listdir(os.path.join(path, LOG_FOLDER))
    except OSError as error:
        raise StorageError(f"cannot list the log of the Delta table {path!r}: {error.strerror}") from error
    return max((v for name in names if (v := entry_version(name)) is not None), default=None)


def active_files(handle: Any, stem: str = "") -> list[FileAction]:
    """The files of a handle's version whose names begin so, the oldest first.

    Raises:
        StorageError: the log cannot be read.
    """
    with delta_errors("cannot list the files of the Delta table", handle.table_uri):
        table = pa.table(handle.get_add_actions(flatten=False))
    if stem:
        table = table.filter(_compute.match_substring(table.column("path"), stem))
    wanted = ("path", "size_bytes", "modification_time", "partition")
    found: list[FileAction] = []
    for row in table.select([name for name in wanted if name in table.column_names]).to_pylist():
        values = {name: _text(value) for name, value in (row.get("partition") or {}).items()}
        found.append(FileAction(row["path"], True, values, row["size_bytes"], row["modification_time"]))
    found = [action for action in found if action.name.startswith(stem)]
    return sorted(found, key=lambda action: (action.modification_time, action.path))


def _text(value: object) -> str | None:
    """A partition value as the log has it."""
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)
