"""Entries of the job log below the newest one: what is lost of them, and what that means.

Who owns the job, and which checkpoints count, is what the newest entry says.  Of the others only the manifests behind
them are needed.  So one that somebody removed or damaged is told, and costs no more than its manifest; the next attempt
fills its number with ``LOST``, or a late driver would find it free.

The log is refused where the newest does not follow the one before it, which is there, and where none below the newest
is left: then the newest may be what a late driver wrote at a number that had been trimmed, and all newer ones be lost
(trimming runs upwards, so that nothing lies below such an entry).  So it is where more are gone than anybody loses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cutwater.errors import CorruptSnapshotError, FencedError, ForeignDirectoryError
from cutwater.storage.log.entries import DAMAGED_HINT, StoredEntry
from cutwater.storage.store.paths import LOG_FOLDER, checkpoint_id_of

TRIMMED = "trimmed"
_OUR_FOLDERS = frozenset({LOG_FOLDER, "shared", "input", "output", "control"})
LOST = b"This entry of the log was lost.\n"
"""Stands at the number of an entry that was."""
_MOST_LOST = 1_000
"""Each is looked for and filled, and how many there were to be is only the newest entry's word."""


class _LostEntryError(CorruptSnapshotError):
    """An entry was lost, and an attempt that began since then has told it."""


def check_not_lost(path: str, data: bytes | memoryview) -> None:
    """Whether the file of an entry holds one.

    Raises:
        CorruptSnapshotError: it was lost.
    """
    if data == LOST:
        raise _LostEntryError(f"log entry {path} was lost", hint=DAMAGED_HINT)


def damaged_below(
    newest: StoredEntry, read: Callable[[int], StoredEntry], path: Callable[[int], str], *, lenient: bool
) -> dict[int, str]:
    """Check everything that the newest entry says to be there; returns what is wrong, by number (empty: it was told).

    Args:
        newest: the newest entry.
        read: reads another one.
        path: of an entry.
        lenient: some may be wrong.

    Raises:
        CorruptSnapshotError: some are, or all of them, or too many, or the newest does not belong here; names the file.
    """
    damaged: dict[int, str] = {}
    after, base, uid = newest, newest.entry.base, newest.entry.state.uid
    for seq in range(newest.entry.seq - 1, base - 1, -1):
        try:
            before = read(seq)
            if after.entry.seq == seq + 1 and after.entry.previous != before.digest:
                lenient = lenient and after is not newest
                raise CorruptSnapshotError(f"log entry {path(seq + 1)} does not follow {path(seq)}", hint=DAMAGED_HINT)
            if before.entry.state.uid != uid:
                raise CorruptSnapshotError(f"log entry {path(seq)} is of another job", hint=DAMAGED_HINT)
        except CorruptSnapshotError as error:
            damaged[seq] = "" if isinstance(error, _LostEntryError) else error.message
            if not lenient or len(damaged) == newest.entry.seq - base:
                raise
            if len(damaged) > _MOST_LOST:
                raise CorruptSnapshotError(
                    f"more than {_MOST_LOST} entries before log entry {path(newest.entry.seq)} are lost or damaged",
                    hint=DAMAGED_HINT,
                ) from error
        else:
            after = before
    return damaged


def refuse_foreign(job: str, names: Sequence[str], log_names: Sequence[str]) -> None:
    """Without a log, the job's folder must be empty, or hold only what is made before the log.

    Args:
        job: its folder.
        names: what lies in it.
        log_names: what lies in its log's folder.

    Raises:
        ForeignDirectoryError: it is another program's.
        CorruptSnapshotError: it had a log.
    """
    foreign = [n for n in names if n not in _OUR_FOLDERS and checkpoint_id_of(n) is None]
    foreign += [f"{LOG_FOLDER}/{n}" for n in log_names if n != TRIMMED]
    if foreign:
        raise ForeignDirectoryError(
            f"folder {job!r} holds {foreign[0]!r} and no job log: it is not Cutwater's",
            hint="Give the job another name, or the checkpoints another directory.",
        )
    if TRIMMED in log_names or any(checkpoint_id_of(n) is not None for n in names):
        raise CorruptSnapshotError(
            f"the entries of {job}/{LOG_FOLDER} are missing although the job has run", hint=DAMAGED_HINT
        )


def vanished_error(path: str, attempt: int) -> FencedError:
    """The entry that a driver's attempt rests on is not what it was."""
    return FencedError(
        f"log entry {path}, the newest that attempt {attempt} knew, is gone or was changed: nobody can say any more "
        "who owns the job",
        hint="Nothing was committed after it. Make sure that no other driver runs the job, then start it again.",
    )
