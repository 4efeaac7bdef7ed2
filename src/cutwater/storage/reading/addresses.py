"""From what a user types to a store, a job and a checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass

from cutwater.errors import ConfigError
from cutwater.storage.savepoint.manifest import is_savepoint
from cutwater.storage.snapshot.retention import list_jobs
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import absolute_uri, another, joined, parted, store_at
from cutwater.storage.store.paths import SAVEPOINT_FILE, checkpoint_id_of
from cutwater.storage.store.seal import Seal, environment_seal


@dataclass(frozen=True)
class SnapshotAddress:
    """One job in a checkpoint directory, and one of its checkpoints (``None``: not said which); or a savepoint.

    Attributes:
        job: folder in ``directory``: the job's, or the savepoint's.
        is_savepoint: which of both it is.
    """

    store: Store
    directory: str
    job: str
    checkpoint_id: int | None = None
    is_savepoint: bool = False

    def __str__(self) -> str:
        suffix = "" if self.checkpoint_id is None else f"@{self.checkpoint_id}"
        return f"{self.directory}/{self.job}{suffix}"


def resolve_snapshot(address: str, seal: Seal | None = None) -> SnapshotAddress:
    """``DIR/JOB``, ``DIR/JOB@7`` or ``DIR/JOB/chk-7``; ``DIR`` alone if it holds one job; or the folder of a savepoint.

    Args:
        seal: of what lies there; ``None``: that of the environment.

    Raises:
        ConfigError: there is no such job or savepoint; the hint lists what there is.
    """
    seal = environment_seal() if seal is None else seal
    above, name = parted(_unlinked(address))
    if name == SAVEPOINT_FILE:
        above, name = parted(above)
    here = store_at(above, seal)
    if here.exists() and name and is_savepoint(here, name):
        return SnapshotAddress(here, here.uri, name, is_savepoint=True)
    job, at, number = name.rpartition("@")
    checkpoint_id = checkpoint_id_of(name)
    if checkpoint_id is not None:
        above, job = parted(above)
        here = store_at(above, seal)
    elif at and number.isdecimal():
        checkpoint_id = int(number)
    elif at:
        raise ConfigError(f"{number!r} in {address!r} is no checkpoint id", hint="Write for example DIR/JOB@7.")
    else:
        job = name
    if here.exists() and job in list_jobs(here):
        return SnapshotAddress(here, here.uri, job, checkpoint_id)
    return _only_job(here, job, address, checkpoint_id)


def _only_job(above: Store, name: str, address: str, checkpoint_id: int | None) -> SnapshotAddress:
    folder = another(above, joined(above.uri, name))
    jobs = list_jobs(folder) if folder.exists() else []
    if len(jobs) == 1:
        return SnapshotAddress(folder, folder.uri, jobs[0], checkpoint_id)
    if jobs:
        raise ConfigError(
            f"{address!r} holds {len(jobs)} jobs", hint=f"Say which: {', '.join(joined(folder.uri, j) for j in jobs)}."
        )
    beside = list_jobs(above) if above.exists() else []
    forms = "Give DIR/JOB, DIR/JOB@7, DIR/JOB/chk-7, or the folder of a savepoint."
    hint = f"There are: {', '.join(beside)}." if beside else forms
    raise ConfigError(f"no job and no savepoint at {address!r}", hint=hint)


def _unlinked(address: str) -> str:
    """The address of what a link leads to: what a user names may be one, what lies below it may not."""
    place = absolute_uri(address)
    return os.path.realpath(place) if os.path.islink(place) else place
