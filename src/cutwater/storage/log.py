"""The job log: which attempt owns the job, and which checkpoints count.  It is the fence against paused drivers.

Theory of operation
-------------------
The log is a dense sequence of small files, ``log/<number>.json``.  Each is made by *atomic create*, so of two drivers
that want the same number exactly one gets it, and the other one reads what the winner wrote.  A new driver takes a
number with *attempt k began*.  A driver that was paused meanwhile finds its next number taken, reads on, finds the newer
attempt, and stops with ``FencedError`` before it tells any sink to commit.

Every entry carries the state that results from it, so the newest entry alone says everything, and old ones can go.
That alone would break the fence: a driver that slept long enough would find its number *free again*.  Therefore:

1. An entry names ``base``: numbers from there on are all present; what lies below may be deleted.
2. Deletion runs upwards, only below the base of an entry that is durable, and never takes number 1 (job created).
3. An entry holds the digest of its predecessor, and an append is believed only after the predecessor was read again
   *after* the create and still is, byte for byte, the one known.  If the number had been used and deleted, then by 2 its
   predecessor was deleted before it; no other driver can bring it back with the same bytes, for they hold its attempt.

What a late driver leaves at a deleted number lies below the base: nobody reads it, and the next trim removes it.

If storing fails in a way that leaves open whether the entry is there (the create was made but not known to be durable),
this log refuses all further appends.  The next attempt reads what is there and makes it durable with its own first entry.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import xxhash

from cutwater.errors import CorruptSnapshotError, FencedError, ForeignDirectoryError, FormatVersionError, StorageError
from cutwater.storage.base import Store
from cutwater.storage.paths import LOG_FOLDER, check_job_name, checkpoint_id_of, log_path, log_seq_of

__all__ = [
    "AttemptBegan",
    "CheckpointCompleted",
    "Event",
    "JobCreated",
    "JobFinished",
    "JobLog",
    "LogState",
    "wall_clock_ms",
]

LOG_VERSION = 1
OUR_FOLDERS = frozenset({LOG_FOLDER, "shared", "input", "output"})
_KEEP = 64
"""Entries that a trim leaves; one is made when twice as many lie there."""
_MAX_TRIES = 1_000
"""Numbers lost to others in a row before an append gives up: only a broken store comes that far."""


class JobCreated(msgspec.Struct, frozen=True, tag="job_created", forbid_unknown_fields=True):
    """The job's first start, entry number 1."""

    uid: str
    name: str
    time_ms: int


class AttemptBegan(msgspec.Struct, frozen=True, tag="attempt_began", forbid_unknown_fields=True):
    """From here on only this attempt may publish."""

    attempt: int
    driver: str
    """Who: host, process, start time - for people."""
    time_ms: int


class CheckpointCompleted(msgspec.Struct, frozen=True, tag="checkpoint_completed", forbid_unknown_fields=True):
    """A checkpoint is published: its sinks may commit."""

    checkpoint_id: int
    attempt: int
    digest: str
    """xxh3_128 of the manifest's bytes, hex."""
    path: str
    """Of the manifest, relative to the job's folder."""
    time_ms: int
    kind: str = "checkpoint"
    """"checkpoint", "savepoint" or "final"."""


class JobFinished(msgspec.Struct, frozen=True, tag="job_finished", forbid_unknown_fields=True):
    """Nothing is left to do; ``checkpoint_id`` is the final checkpoint (0: none was taken)."""

    attempt: int
    checkpoint_id: int
    time_ms: int


Event: TypeAlias = JobCreated | AttemptBegan | CheckpointCompleted | JobFinished


class LogState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the log says after its newest entry."""

    uid: str = ""
    """Empty: the job was never started."""
    name: str = ""
    attempt: int = 0
    """The attempt that owns the job; 0: none yet."""
    driver: str = ""
    began_ms: int = 0
    completed: tuple[CheckpointCompleted, ...] = ()
    """Retained checkpoints, newest first."""
    newest_id: int = 0
    """Highest checkpoint id ever completed."""
    finished: bool = False

    @property
    def latest(self) -> CheckpointCompleted | None:
        """The newest completed checkpoint."""
        return self.completed[0] if self.completed else None


def wall_clock_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class JobLog:
    """One driver's view of a job's log.

    Args:
        store: must have ``atomic_create``.
        job: folder of the job in the store.
        name: what ``JobCreated`` says at the first start (default: ``job``).
        num_retained: completed checkpoints that stay in the state.
        clock_ms: wall clock for the entries' times (information only; nothing depends on it).
    """

    def __init__(
        self,
        store: Store,
        job: str,
        *,
        name: str = "",
        num_retained: int = 3,
        clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> None: ...

    @property
    def state(self) -> LogState:
        """As of the last read or append of this object."""
        ...

    @property
    def attempt(self) -> int:
        """The attempt this object began; 0 before ``begin_attempt``."""
        ...

    def read(self) -> LogState:
        """Read the log's present state from the store (an empty state if the job was never started).

        Raises:
            CorruptSnapshotError: an entry is torn, changed or missing; the message names the file.
            FormatVersionError: written by a newer release.
            ForeignDirectoryError: the job's folder holds other things and no log.
        """
        ...

    def begin_attempt(self, driver: str) -> int:
        """Take the job: every attempt before is fenced from here on.  Creates the job at its first start."""
        ...

    def append(self, event: CheckpointCompleted | JobFinished) -> LogState:
        """Make an event of this attempt part of the log, durably.

        Raises:
            FencedError: a newer attempt owns the job; nothing was added, commit nothing.
            StorageError: nothing was added, or (``in_doubt``) that is not known.
        """
        ...

    @property
    def in_doubt(self) -> bool:
        """True after a failure that leaves open whether the last entry is durable: only a new attempt may go on."""
        ...
