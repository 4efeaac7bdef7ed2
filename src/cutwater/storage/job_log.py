"""The job log: which attempt owns the job, and which checkpoints count.  It is the fence against paused drivers.

Theory of operation
-------------------
The log is a dense sequence of small files, ``log/<number>.json``.  Each is made by *atomic create*, so of two drivers
that want the same number exactly one gets it, and the other one reads what the winner wrote.  A new driver takes a
number with *attempt k began*.  A driver that was paused meanwhile finds its next number taken, reads on, finds the
newer attempt, and stops with ``FencedError`` before it tells any sink to commit.  The manifest of a checkpoint lies in
the file of the entry that publishes it, unless it is large.

Every entry carries the state that results from it, so the newest entry alone says everything, and old ones can go.
That alone would break the fence: a driver that slept long enough would find its number *free again*.  Therefore:

1. An entry names ``base``: all numbers from there on are present; what lies below may be deleted.  No manifest of a
   retained checkpoint lies below.
2. Deletion runs upwards, only below the base of an entry that is durable, never beyond a failure, and never before the
   file ``log/trimmed`` is durable, which stays for ever.
3. An append is believed only after the predecessor was read again *after* the create and is, byte for byte, the one
   known.  Had the number been used and deleted, then its predecessor would have been deleted before it (2), and nobody
   can bring it back with the same bytes, for they hold an attempt and a time.  Number 1 has no predecessor: it is
   believed only if ``log/trimmed`` is not there.

What a late driver leaves at a deleted number lies below the base: nobody reads it, and the next trim removes it.

What somebody removes is another matter.  Without the newest entries the log says what it said before, so a driver
whose own newest entry is gone stops at once: others may have begun, and be gone, too.  Older ones: see the end.

If storing fails in a way that leaves open whether the entry is there (the file was made, but is not known to be
durable), this log refuses all further appends.  The next attempt reads what is there and makes it durable with its own
first entry, whose create syncs the same folder.

Entries below the newest one.  Who owns the job, and which checkpoints count, is what the newest entry says.  Of the
others only the manifests behind them are needed.  So one that somebody removed or damaged is told, and costs no more
than its manifest; the next attempt fills its number with ``LOST``, or a late driver would find it free.

The log is refused where the newest does not follow the one before it, which is there, and where none below the newest
is left: then the newest may be what a late driver wrote at a number that had been trimmed, and all newer ones be lost
(trimming runs upwards, so that nothing lies below such an entry).  So it is where more are gone than anybody loses.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime

from cutwater.errors import (
    ConfigError,
    CorruptSnapshotError,
    FencedError,
    ForeignDirectoryError,
    InDoubtError,
    InvariantError,
    StorageError,
)
from cutwater.storage.log_entries import (
    DAMAGED_HINT,
    AttemptBegan,
    CheckpointCompleted,
    Event,
    Fork,
    Forked,
    HandedOver,
    JobCreated,
    JobEnded,
    JobFinished,
    LogState,
    Promoted,
    RolledBack,
    StoredEntry,
    next_entry,
    parse_entry,
)
from cutwater.storage.store.base import Store
from cutwater.storage.store.paths import LOG_FOLDER, check_job_name, checkpoint_id_of, log_path, log_seq_of
from cutwater.storage.store.seal import Seal

TRIMMED = "trimmed"
_OUR_FOLDERS = frozenset({LOG_FOLDER, "shared", "input", "output", "control"})
LOST = b"This entry of the log was lost.\n"
"""Stands at the number of an entry that was."""
_MOST_LOST = 1_000
"""Each is looked for and filled, and how many there were to be is only the newest entry's word."""


class _LostEntryError(CorruptSnapshotError):
    """An entry was lost, and an attempt that began since then has told it."""


_LOG = logging.getLogger(__name__)

KEEP_ENTRIES = 64
_MAX_TRIES = 1_000
"""Numbers lost to others in a row before an append gives up: only a broken store comes that far."""
_READ_TRIES = 4


def wall_clock_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class JobLog:
    """One driver's view of a job's log.  Used from one thread.

    Args:
        store: must have ``atomic_create``.
        num_retained: completed checkpoints that stay in the state.
        clock_ms: wall clock for the entries' times (information only; nothing depends on it).
        keep: entries that a trim leaves; one is made when twice as many lie there.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        *,
        name: str = "",
        num_retained: int = 3,
        clock_ms: Callable[[], int] = wall_clock_ms,
        keep: int = KEEP_ENTRIES,
    ) -> None:
        if num_retained < 1 or keep < 2:
            raise ConfigError(f"num_retained must be at least 1 and keep at least 2, got {num_retained} and {keep}")
        self.job = check_job_name(job)
        self._store = store
        self._name = name or job
        self._num_retained = num_retained
        self._clock_ms = clock_ms
        self._keep = keep
        self._known: StoredEntry | None = None
        self.attempt = 0
        """The attempt this object began; 0 before ``begin_attempt``."""
        self.in_doubt = False
        """True after a failure that leaves open whether the last entry is durable: only a new attempt may go on."""
        self.damaged: dict[int, str] = {}
        """Entries below the newest that are lost or damaged, and what is wrong with them (empty: it was told)."""

    @property
    def state(self) -> LogState:
        """As of the last read or append of this object."""
        return self._known.entry.state if self._known else LogState()

    def read(self) -> LogState:
        """Read the log's present state from the store (an empty state if the job was never started).

        Raises:
            CorruptSnapshotError: the newest entry is torn or changed, or all others are; the message names the file.
            FormatVersionError: written by a newer release.
            ForeignDirectoryError: the job's folder holds other things and no log.
            FencedError: the entry that this driver's attempt rests on is gone, or is another one.
        """
        before = self._known if self.attempt else None
        try:
            known = self._load()
        except CorruptSnapshotError:
            if before is None:
                raise
            known = None
        if before is not None and not self._follows(known, before):
            raise FencedError(
                f"log entry {self._path(before.entry.seq)}, the newest that attempt {self.attempt} knew, is gone or "
                "was changed: nobody can say any more who owns the job",
                hint="Nothing was committed after it. "
                "Make sure that no other driver runs the job, then start it again.",
            )
        self._known = known
        return self.state

    def _follows(self, newest: StoredEntry | None, before: StoredEntry) -> bool:
        """The newest entry comes after another one, which is there as it was, or was trimmed."""
        if newest is None or newest.entry.base > before.entry.seq:
            return newest is not None
        return newest.data == before.data or self._holds(self._path(before.entry.seq), before.data)

    def create(self, fork: Fork | None = None) -> LogState:
        """Read the state; a job that was never started gets its uid here, before anybody has to be told of it.

        Raises:
            StorageError: as ``read``, or nothing can be written.
        """
        self.read()
        while not self.state.uid:
            self._try_append(JobCreated(uuid.uuid4().hex, self._name, self._clock_ms(), fork))
        return self.state

    def begin_attempt(
        self,
        driver: str,
        *,
        after: int | None = None,
        rescaled: tuple[int, int] | None = None,
        take_back: bool = False,
    ) -> int:
        """Take the job: every attempt before is fenced from here on (R6).  Creates the job at its first start.

        Args:
            driver: who takes it (host, process ...), for the message that a fenced driver shows.
            after: only if this attempt still owns the job (a driver that restarts its own job must not take it back
                from another one); ``None``: whoever owns it.
            rescaled: see ``AttemptBegan``.
            take_back: also if the job was handed over to a fork.

        Raises:
            FencedError: another attempt than ``after`` owns the job, or it was handed over.
        """
        self.create()
        self._sweep()
        for seq in self.damaged:
            self._store.create(self._path(seq), LOST)
        self.in_doubt = False
        self.attempt = 0
        for _ in range(_MAX_TRIES):
            if after is not None and (self.state.attempt != after or self.state.finished):
                raise self._fenced(after)  # finished: by a driver that this one was about to replace
            if self.state.handed_over is not None and not take_back:
                raise self._fenced(self.state.attempt)
            attempt = self.state.attempt + 1
            if self._try_append(AttemptBegan(attempt, driver, self._clock_ms(), rescaled)):
                self.attempt = attempt
                return attempt
        raise self._no_number()

    def append(
        self,
        event: CheckpointCompleted | RolledBack | Forked | HandedOver | Promoted | JobFinished | JobEnded,
        manifest: bytes = b"",
    ) -> LogState:
        """Make an event of this attempt part of the log, durably.

        Args:
            manifest: of a completed checkpoint, if it is to lie in the log; the event's path is set accordingly.

        Raises:
            FencedError: a newer attempt owns the job; commit nothing.
            StorageError: nothing was added, or (``in_doubt``) that is not known.
        """
        if self.in_doubt:
            raise StorageError(
                f"job {self.job!r}: it is not known whether the last log entry of attempt {self.attempt} is durable",
                hint="Begin a new attempt: it reads what is there.",
            )
        for _ in range(_MAX_TRIES):
            self._check_owner(event.attempt)
            if isinstance(event, CheckpointCompleted) and event.checkpoint_id <= self.state.newest_id:
                raise InvariantError(
                    f"checkpoint {event.checkpoint_id} was to be published after {self.state.newest_id} (A1: ids grow)"
                )
            if self._try_append(event, manifest):
                return self.state
        raise self._no_number()

    def check_fence(self) -> None:
        """Raise ``FencedError`` if a newer attempt has begun since the last append."""
        if self._is_there(self._known.entry.seq + 1 if self._known else 1):
            self.read()
        self._check_owner(self.attempt)

    # -- appending

    def _check_owner(self, attempt: int) -> None:
        if not attempt == self.attempt == self.state.attempt > 0:
            raise self._fenced(attempt)

    def _fenced(self, attempt: int) -> FencedError:
        """The error of an attempt's driver, which names the new owner of the job."""
        state = self.state
        since = datetime.fromtimestamp(state.began_ms / 1000, UTC).isoformat(timespec="seconds")
        if state.finished:
            return FencedError(
                f"job {self.job!r} finished, with attempt {state.attempt} of {state.driver or 'nobody'}",
                hint="Nothing is left to do; stop this driver.",
            )
        if (over := state.handed_over) is not None:
            return FencedError(
                f"job {self.job!r} was handed over to job {over.job!r} at checkpoint {over.checkpoint_id}",
                hint=f"Job {over.job!r} goes on in {over.directory}. To take this one back: stop that one, then start "
                f"with restore={over.savepoint!r}.",
            )
        return FencedError(
            f"attempt {attempt} of job {self.job!r} was superseded by attempt {state.attempt} "
            f"of {state.driver or 'nobody'}, begun {since}",
            hint="Nothing was committed; stop this driver, the other one goes on.",
        )

    def _try_append(self, event: Event, manifest: bytes = b"") -> bool:
        """Try one number.  ``False``: it was not to be had; the state is read anew."""
        known = self._known
        entry = next_entry(
            known, event, manifest, num_retained=self._num_retained, keep=self._keep, seal=self._store.seal
        )
        path = self._path(entry.entry.seq)
        self.in_doubt = True
        try:
            made = self._store.create(path, entry.data)
        except InDoubtError:  # what is not there now may come yet
            raise
        except StorageError:
            self.in_doubt = self._may_hold(path, entry.data)
            raise
        believed = made and self._never_used_before()
        self.in_doubt = False
        if not believed:
            self.read()
            return False
        self._known = entry
        if known is not None and entry.entry.base > known.entry.base:
            self._trim(entry.entry.base)
        return True

    def _never_used_before(self) -> bool:
        """Rule 3, after a create that succeeded: the number was free because nobody had taken it yet."""
        known = self._known
        return TRIMMED not in self._names() if known is None else self._holds(self._path(known.entry.seq), known.data)

    def _holds(self, path: str, data: bytes) -> bool:
        try:
            return self._store.read(path) == data
        except CorruptSnapshotError:
            return False

    def _is_there(self, seq: int) -> bool:
        """Whether something bears a number: cheaper than all names, and true where a listing comes late."""
        try:
            self._store.read(self._path(seq))
        except CorruptSnapshotError:
            return False
        return True

    def _may_hold(self, path: str, data: bytes) -> bool:
        """After a create that failed: whether the entry may be there all the same."""
        try:
            return self._holds(path, data)
        except StorageError:
            return True

    def _trim(self, base: int) -> None:
        try:
            self._store.create(f"{self.job}/{LOG_FOLDER}/{TRIMMED}", b"Old entries of this log have been removed.\n")
            for seq in self._numbers():
                if seq < base:
                    self._store.delete_files([self._path(seq)])
        except StorageError as error:
            _LOG.warning("old log entries stay for now: %s", error)

    def _sweep(self) -> None:
        try:
            self._store.sweep(f"{self.job}/{LOG_FOLDER}")
        except StorageError as error:
            _LOG.warning("leftovers of dead drivers stay for now: %s", error)

    def _no_number(self) -> StorageError:
        return StorageError(
            f"no log number to be had for job {self.job!r} in {_MAX_TRIES} tries",
            hint="Either many drivers start this job all the time, or the store's create is not exclusive.",
        )

    # -- reading

    def _path(self, seq: int) -> str:
        return f"{self.job}/{log_path(seq)}"

    def _names(self) -> list[str]:
        return self._store.names(f"{self.job}/{LOG_FOLDER}")

    def _numbers(self) -> list[int]:
        return sorted(seq for seq in map(log_seq_of, self._names()) if seq is not None)

    def _load(self) -> StoredEntry | None:
        """The newest entry, after a check of all that it says to be there."""
        for left in reversed(range(_READ_TRIES)):
            names = self._names()
            numbers = [seq for seq in map(log_seq_of, names) if seq is not None]
            newest = max(numbers, default=0)
            while self._is_there(newest + 1):  # since the names were told, or told late
                newest += 1
            if not newest:
                self._refuse_foreign(names)
                return None
            try:
                return self._load_chain(newest, trimmed=TRIMMED in names, lenient=not left)
            except CorruptSnapshotError:
                # The owner may have trimmed what was to be read; what is really damaged stays so.
                if not left:
                    raise
        return None

    def _load_chain(self, newest: int, *, trimmed: bool, lenient: bool) -> StoredEntry:
        seal = self._store.seal
        known = self._read_entry(newest, seal)
        self._check_name(known)
        if trimmed and known.entry.base == 1:
            raise CorruptSnapshotError(f"newer entries than {self._path(newest)} are missing", hint=DAMAGED_HINT)
        self.damaged = self._damaged_below(known, lenient=lenient)
        return known

    def _damaged_below(self, newest: StoredEntry, *, lenient: bool) -> dict[int, str]:
        """Check everything that the newest entry says to be there; returns what is wrong by number, empty if told.

        Some may be wrong if it is to be ``lenient``, but not all, and not too many.
        """
        seal = self._store.seal.for_links()  # nothing is taken of them: the newest says it all
        damaged: dict[int, str] = {}
        after, base, uid = newest, newest.entry.base, newest.entry.state.uid
        for seq in range(newest.entry.seq - 1, base - 1, -1):
            try:
                before = self._read_entry(seq, seal)
                if after.entry.seq == seq + 1 and after.entry.previous != before.digest:
                    lenient = lenient and after is not newest
                    raise CorruptSnapshotError(
                        f"log entry {self._path(seq + 1)} does not follow {self._path(seq)}", hint=DAMAGED_HINT
                    )
                if before.entry.state.uid != uid:
                    raise CorruptSnapshotError(f"log entry {self._path(seq)} is of another job", hint=DAMAGED_HINT)
            except CorruptSnapshotError as error:
                damaged[seq] = "" if isinstance(error, _LostEntryError) else error.message
                if not lenient or len(damaged) == newest.entry.seq - base:
                    raise
                if len(damaged) > _MOST_LOST:
                    raise CorruptSnapshotError(
                        f"more than {_MOST_LOST} entries before log entry {self._path(newest.entry.seq)} are lost or "
                        "damaged",
                        hint=DAMAGED_HINT,
                    ) from error
            else:
                after = before
        return damaged

    def _refuse_foreign(self, log_names: list[str]) -> None:
        """Without a log, the job's folder must be empty, or hold only what is made before the log."""
        names = self._store.names(self.job)
        foreign = [n for n in names if n not in _OUR_FOLDERS and checkpoint_id_of(n) is None]
        foreign += [f"{LOG_FOLDER}/{n}" for n in log_names if n != TRIMMED]
        if foreign:
            raise ForeignDirectoryError(
                f"folder {self.job!r} holds {foreign[0]!r} and no job log: it is not Cutwater's",
                hint="Give the job another name, or the checkpoints another directory.",
            )
        if TRIMMED in log_names or any(checkpoint_id_of(n) is not None for n in names):
            raise CorruptSnapshotError(
                f"the entries of {self.job}/{LOG_FOLDER} are missing although the job has run", hint=DAMAGED_HINT
            )

    def _check_name(self, newest: StoredEntry) -> None:
        """A key is for many jobs: what it sealed for one of them is not another one's."""
        name = newest.entry.state.name
        if self._store.seal.keyed and name not in (self.job, self._name):
            raise ForeignDirectoryError(
                f"folder {self.job!r} holds the sealed log of job {name!r}",
                hint="A job with a key keeps its name: rename the folder back, or begin from a savepoint.",
            )

    def _read_entry(self, seq: int, seal: Seal) -> StoredEntry:
        path = self._path(seq)
        try:
            data = self._store.read(path)
        except CorruptSnapshotError as error:
            raise CorruptSnapshotError(f"log entry {error.message}", hint=DAMAGED_HINT) from error
        if data == LOST:
            raise _LostEntryError(f"log entry {path} was lost", hint=DAMAGED_HINT)
        return parse_entry(path, seq, bytes(data), seal)
