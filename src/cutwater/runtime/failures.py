"""What a failure means: whether a restart may help, and which error the user gets in the end."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

from cutwater import errors
from cutwater.errors import CutwaterError, InvariantError, JobFailedError, ResourceError

__all__ = ["FailureLedger", "first_line", "internal_error", "root_cause"]

_SAME_FAILURE_LIMIT = 3
"""The same error of the same step this often in a row, without a completed checkpoint in between, ends the job."""
_LIMITED = frozenset({"UserCodeError", "CorruptSnapshotError", "InvariantError"})
_NOT_RETRYABLE = frozenset(
    {"DataError", "BuildError", "ConfigError", "FencedError", "FormatVersionError", "ForeignDirectoryError"}
)


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line for line in text.splitlines() if line.strip()), "no message")


_CAUSE = re.compile(r"\s*(?:\w+\.)*(\w*(?:Error|Exception)): .*")


def root_cause(text: str) -> str:
    """The line of a Spark error that says what the Python worker raised, else its first line.

    >>> root_cause("Job aborted\\nTraceback ...\\nModuleNotFoundError: No module named 'x'\\n\\n\\tat org.apache")
    "ModuleNotFoundError: No module named 'x'"
    """
    python = text.partition("Traceback")[2]
    found = [line.strip() for line in python.splitlines() if _CAUSE.fullmatch(line)]
    return found[0] if found else first_line(text)


@dataclass
class FailureLedger:
    """Remembers the last failure.

    >>> ledger = FailureLedger()
    >>> text = "KeyError: 'x' on row {} of the batch (in subtask 0 of 'score', channel (0, 0, 0), row {})"
    >>> [ledger.note("UserCodeError", text.format(row, row), "score", True) for row in (7, 3, 5)]
    [True, True, False]
    """

    error: CutwaterError | None = None
    _key: str = ""
    _count: int = 0

    def note(self, kind: str, message: str, step: str, retryable: bool, hint: str = "") -> bool:
        """A failure of an attempt; whether a restart may help."""
        # Where in the stream it happened says nothing: batches are cut differently in every attempt.
        headline = re.sub(r"\d+", "#", first_line(message).partition(" (in subtask")[0])
        key = f"{kind}:{step}:{headline}"
        self._count = self._count + 1 if key == self._key else 1
        self._key = key
        found = getattr(errors, kind, None)
        if isinstance(found, type) and issubclass(found, CutwaterError):
            self.error = found(message, step=step or None, hint=hint)
        else:
            self.error = JobFailedError(f"{kind}: {message}", step=step or None, hint=hint)
        if kind in _LIMITED and self._count >= _SAME_FAILURE_LIMIT:
            return False
        return retryable and kind not in _NOT_RETRYABLE

    def progressed(self) -> None:
        """A checkpoint completed: what failed before is overcome."""
        self._key, self._count, self.error = "", 0, None

    def final(self, reason: str) -> CutwaterError:
        """The error of a job that failed for good."""
        if "got a core of the Spark cluster" in reason:
            return ResourceError(reason)
        return self.error or JobFailedError(reason)


def internal_error(error: BaseException) -> CutwaterError:
    """Something that the coordinator itself did wrong, with all that helps to find it."""
    story = "".join(traceback.format_exception(error))
    return InvariantError(f"the coordinator failed: {type(error).__name__}: {error}\n{story}")
