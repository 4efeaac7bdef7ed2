"""From what a user types to a store, a job and a checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cutwater.errors import ConfigError
from cutwater.storage.savepoint.manifest import is_savepoint
from cutwater.storage.snapshot.retention import list_jobs
from cutwater.storage.store.keys import environment_seal
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.opening import open_store
from cutwater.storage.store.paths import SAVEPOINT_FILE, checkpoint_id_of
from cutwater.storage.store.seal import Seal


@dataclass(frozen=True)
class SnapshotAddress:
    """One job in a checkpoint directory, and one of its checkpoints (``None``: not said which); or a savepoint.

    Attributes:
        job: folder in ``directory``: the job's, or the savepoint's.
        is_savepoint: which of both it is.
    """

    store: LocalStore
    directory: str
    job: str
    checkpoint_id: int | None = None
    is_savepoint: bool = False

    def __str__(self) -> str:
        suffix = "" if self.checkpoint_id is None else f"@{self.checkpoint_id}"
        return f"{self.directory}/{self.job}{suffix}"


def open_existing(uri: str, seal: Seal | None = None) -> LocalStore:
    """A store for reading: nothing is made or tried out, so a folder without write permission will do.

    Args:
        seal: of what lies there; ``None``: that of the environment.

    Raises:
        ConfigError: no such folder, or a scheme without a store.
    """
    folder = Path(_path(uri))
    if not folder.is_dir():
        raise ConfigError(f"no folder {uri!r}", hint="Give the directory that the job was started with as checkpoint.")
    return LocalStore(folder, environment_seal() if seal is None else seal)


def resolve_snapshot(address: str, seal: Seal | None = None) -> SnapshotAddress:
    """``DIR/JOB``, ``DIR/JOB@7`` or ``DIR/JOB/chk-7``; ``DIR`` alone if it holds one job; or the folder of a savepoint.

    Args:
        seal: of what lies there; ``None``: that of the environment.

    Raises:
        ConfigError: there is no such job or savepoint; the hint lists what there is.
    """
    path = Path(_path(address)).absolute()
    path = path.parent if path.name == SAVEPOINT_FILE else path
    path = (
        Path(os.path.realpath(path)) if path.is_symlink() else path
    )  # what a user names may be a link, what lies below it may not
    here = LocalStore(path.parent, environment_seal() if seal is None else seal)
    if path.is_dir() and is_savepoint(here, path.name):
        return SnapshotAddress(here, str(path.parent), path.name, is_savepoint=True)
    name, at, number = path.name.rpartition("@")
    checkpoint_id = checkpoint_id_of(path.name)
    if checkpoint_id is not None:
        path = path.parent
    elif at and number.isdecimal():
        path, checkpoint_id = path.with_name(name), int(number)
    elif at:
        raise ConfigError(f"{number!r} in {address!r} is no checkpoint id", hint="Write for example DIR/JOB@7.")
    here = here.at(path.parent)
    if path.parent.is_dir() and path.name in list_jobs(here):
        return SnapshotAddress(here, str(path.parent), path.name, checkpoint_id)
    return _only_job(path, address, checkpoint_id, here)


def _only_job(folder: Path, address: str, checkpoint_id: int | None, above: LocalStore) -> SnapshotAddress:
    jobs = list_jobs(above.at(folder)) if folder.is_dir() else []
    if len(jobs) == 1:
        return SnapshotAddress(above.at(folder), str(folder), jobs[0], checkpoint_id)
    if jobs:
        raise ConfigError(
            f"{address!r} holds {len(jobs)} jobs", hint=f"Say which: {', '.join(f'{folder}/{j}' for j in jobs)}."
        )
    beside = list_jobs(above) if folder.parent.is_dir() else []
    forms = "Give DIR/JOB, DIR/JOB@7, DIR/JOB/chk-7, or the folder of a savepoint."
    hint = f"There are: {', '.join(beside)}." if beside else forms
    raise ConfigError(f"no job and no savepoint at {address!r}", hint=hint)


def _path(uri: str) -> str:
    if "://" not in uri:
        return uri
    parts = urlsplit(uri)
    if parts.scheme.lower() != "file" or parts.netloc not in ("", "localhost"):
        open_store(uri)  # raises: it knows what there are stores for
    return unquote(parts.path)
