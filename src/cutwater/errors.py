"""Every error that Cutwater raises.

    CutwaterError
    ├── BuildError              the dataflow is wrong; found before anything runs
    ├── ConfigError             a setting is wrong
    ├── DataError               a row cannot be read, keyed or converted
    ├── UserCodeError           a user's function failed; carries its own traceback
    │   └── NondeterminismError     it, or a source, gave something else the second time
    ├── StorageError            the checkpoint directory cannot be used
    │   ├── CorruptSnapshotError    a file differs from its digest, is torn or missing
    │   │   └── SealError               it is not sealed with a key that this job has
    │   ├── InDoubtError            it is not known whether something was written
    │   ├── FormatVersionError      written by a version that this one cannot read
    │   └── ForeignDirectoryError   the directory belongs to another program
    ├── FencedError             a newer attempt or driver owns the job; stop and commit nothing
    ├── IncompleteSnapshotError a global snapshot is not complete; names who is missing
    ├── ResourceError           the cluster gave fewer cores than the job needs
    ├── JobFailedError          the job failed and its restart budget is used up
    ├── JobCancelledError       the job was cancelled
    ├── WireError               a peer broke the wire protocol or failed to authenticate
    └── InvariantError          a bug in Cutwater itself: an illegal transition, a broken invariant

Each message says what happened, where, and (``hint``) what to do next.  The command line exits with ``exit_code``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BuildError",
    "ConfigError",
    "CorruptSnapshotError",
    "CutwaterError",
    "DataError",
    "FencedError",
    "ForeignDirectoryError",
    "FormatVersionError",
    "InDoubtError",
    "IncompleteSnapshotError",
    "InvariantError",
    "JobCancelledError",
    "JobFailedError",
    "NondeterminismError",
    "ResourceError",
    "SealError",
    "StorageError",
    "UserCodeError",
    "WireError",
    "did_you_mean",
]

_MANY_NAMES = 24
"""A hint that guesses a name does not list the others beside it if there are more."""


class CutwaterError(Exception):
    """Base of all errors.

    Args:
        message: what happened and where.
        hint: what to do next, one sentence; empty where nothing helps.
        step: id of the step concerned, if one is.

    >>> str(CutwaterError("no such column 'dealy'", step="late", hint="Did you mean 'delay'?"))
    "step 'late': no such column 'dealy'. Did you mean 'delay'?"
    """

    exit_code = 1
    row: int | None = None
    """Index into the batch of the row concerned, where one is known."""

    def __init__(self, message: str, *, hint: str = "", step: str | None = None) -> None:
        self.message = message.rstrip(".")
        self.hint = hint
        self.step = step
        super().__init__(message)

    def __str__(self) -> str:
        where = f"step {self.step!r}: " if self.step else ""
        return f"{where}{self.message}. {self.hint}".strip() if self.hint else f"{where}{self.message}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.step), {"row": self.row}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for a wrong name: the nearest of the known ones, and all of them unless they are many.

    >>> did_you_mean("dealy", ["origin", "delay"]), did_you_mean("x", ["origin"]), did_you_mean("x", [])
    ("Did you mean 'delay'? There are: origin, delay.", 'There are: origin.', 'There are none.')
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    everything = f"There are: {', '.join(names)}." if names else "There are none."
    if not near:
        return everything
    guess = f"Did you mean {near[0]!r}?"
    return guess if len(names) > _MANY_NAMES else f"{guess} {everything}"


def _rebuild(cls: type[CutwaterError], message: str, hint: str, step: str | None) -> CutwaterError:
    return cls(message, hint=hint, step=step)


class BuildError(CutwaterError):
    """The dataflow is wrong: unknown column, duplicate step id, type mismatch, missing key, unsuitable sink."""

    exit_code = 2


class ConfigError(CutwaterError):
    """A setting is unknown, out of range or contradicts another."""

    exit_code = 2


class DataError(CutwaterError):
    """A row cannot be parsed, keyed or converted; the message names file and line (or row) where known."""

    exit_code = 3


class UserCodeError(CutwaterError):
    """A user's function raised; the message has that function's own traceback."""

    exit_code = 4


class NondeterminismError(UserCodeError):
    """A function or a source gave something else for the same input when a part of a job went back by itself.

    >>> error = NondeterminismError("subtask 1 made 3 rows once more, where it had made 5", step="draw")
    >>> error.hint
    "Make it deterministic, or choose recovery='region' or 'job'."
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "Make it deterministic, or choose recovery='region' or 'job'.",
        step: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, step=step)


class StorageError(CutwaterError):
    """The checkpoint directory cannot be read, written or trusted."""

    exit_code = 5


class CorruptSnapshotError(StorageError):
    """A file of a snapshot is missing, torn or differs from its digest."""


class SealError(CorruptSnapshotError):
    """A file is not sealed with a key that was given: another key's, no key's, or somebody else wrote it."""


class InDoubtError(StorageError):
    """It is not known whether something was written, and it may yet appear: the answer of a server got lost."""


class FormatVersionError(StorageError):
    """A file was written in a format version that this release does not know."""


class ForeignDirectoryError(StorageError):
    """The directory holds something that is not (or not this job's) checkpoint data."""


class FencedError(CutwaterError):
    """A newer attempt or another driver owns the job."""

    exit_code = 6


class IncompleteSnapshotError(CutwaterError):
    """A global snapshot of a process network was not complete in time, or cannot be any more; names who is missing."""

    exit_code = 10


class ResourceError(CutwaterError):
    """Spark gave the job fewer cores than it needs."""

    exit_code = 7


class JobFailedError(CutwaterError):
    """The job failed for good, and no worker told an error: its message says what happened and why it was given up."""

    exit_code = 8


class JobCancelledError(CutwaterError):
    """The job was cancelled before it ended."""

    exit_code = 9


class WireError(CutwaterError):
    """A peer sent something that the wire protocol does not allow, or could not prove the job's secret."""


class InvariantError(CutwaterError):
    """An invariant of Cutwater itself is broken: please report it, with the story in the message."""

    exit_code = 70
