"""Failures of a job: texts for people, whether a restart may help, and the error that the user gets in the end."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

from cutwater import errors
from cutwater.errors import CutwaterError, InvariantError, JobFailedError, ResourceError, StorageError
from cutwater.protocol.job.messages import JobPhase


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line for line in text.splitlines() if line.strip()), "no message")


_CAUSE = re.compile(r"\s*(?:\w+\.)*(\w*(?:Error|Exception)): .*")
_NO_PYTHON = re.compile(r".*Cannot run program .*")


def root_cause(text: str) -> str:
    """The line of a Spark error that says what the Python worker raised, else its first line.

    >>> root_cause("Job aborted\\nTraceback ...\\nModuleNotFoundError: No module named 'x'\\n\\n\\tat org.apache")
    "ModuleNotFoundError: No module named 'x'"
    >>> root_cause('An error occurred\\njava.io.IOException: Cannot run program "python9": error=2')
    'java.io.IOException: Cannot run program "python9": error=2'
    """
    if found := _NO_PYTHON.search(text):
        return found[0].strip()
    python = text.partition("Traceback")[2]
    found = [line.strip() for line in python.splitlines() if _CAUSE.fullmatch(line)]
    return found[0] if found else first_line(text)


def headline(text: str) -> str:
    """Headline of a failure: equal for two failures that are the same one.

    Where in the stream it happened says nothing, nor does the row that happened to be the first: batches are cut
    differently in every attempt, and the workers differ in which of them reports first.  Another host is another
    failure.

    >>> headline("KeyError: 'x' on row 7 of the batch")
    "KeyError: 'x'"
    >>> headline("worker 1 on host node7 (pid 4242) was lost: silent for 12 s")
    'worker 1 on host node7 (pid #) was lost: silent for # s'
    """
    told = re.split(r" on row | \(in subtask", first_line(text))[0]
    return re.sub(r"(on host \S+)|(?<!worker )(?<!\d)\d+", lambda found: found[1] or "#", told)


def error_of(kind: str, message: str, step: str, hint: str = "") -> CutwaterError:
    """An error that a worker told of, by the name of its class.

    >>> error_of("UserCodeError", "KeyError: 'x'", "score")
    UserCodeError("KeyError: 'x'")
    """
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, CutwaterError):
        return found(message, step=step or None, hint=hint)
    return JobFailedError(f"{kind}: {message}", step=step or None, hint=hint)


def snapshot_error(error: Exception, what: str, step: str | None = None) -> CutwaterError:
    """Error for a part of a snapshot that is not durable: its storage failed, or the code that makes it.

    The first may be over when it is tried again.  The second is not, so it has to be told apart.

    Args:
        error: what was raised.
        what: what was being made, for the message.
        step: whose.

    >>> snapshot_error(OSError(28, "No space left on device"), "the state")
    StorageError('the state could not be written: OSError: [Errno 28] No space left on device')
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, CutwaterError):
        return type(error)(error.message, step=error.step or step, hint=error.hint)
    if isinstance(error, OSError | MemoryError) or type(error) is Exception:  # RocksDB raises no class of its own
        return StorageError(f"{what} could not be written: {text}", step=step)
    story = "".join(traceback.format_exception(error))
    return InvariantError(f"{what} could not be put into a snapshot: {text}\n{story}", step=step)


def sink_error(error: Exception, doing: str, checkpoint_id: int, step: str) -> CutwaterError:
    """Error for a sink that failed: what other systems raise may be over when it is tried again.

    >>> print(sink_error(StorageError("no answer"), "commit", 7, "out"))
    step 'out': no answer
    """
    if isinstance(error, CutwaterError):
        return snapshot_error(error, "", step)
    story = "".join(traceback.format_exception(error))
    text = f"checkpoint {checkpoint_id}: the sink could not {doing}: {type(error).__name__}: {error}"
    return StorageError(f"{text}\n{story}", step=step)


def internal_error(error: BaseException) -> CutwaterError:
    """Something that the coordinator itself did wrong, with all that helps to find it."""
    story = "".join(traceback.format_exception(error))
    return InvariantError(f"the coordinator failed: {type(error).__name__}: {error}\n{story}")


_SAME_FAILURE_LIMIT = 3
"""The same error of the same step this often in a row, without a completed checkpoint in between, ends the job."""
_LIMITED = frozenset({"UserCodeError", "NondeterminismError", "CorruptSnapshotError", "InvariantError"})
_NOT_RETRYABLE = frozenset(
    {"DataError", "BuildError", "ConfigError", "FencedError", "FormatVersionError", "ForeignDirectoryError"}
)


@dataclass
class FailureLedger:
    """Remembers the last failure, and says in the end what the job failed of.

    >>> ledger = FailureLedger()
    >>> text = "KeyError: 'x' on row {} of the batch (in subtask 0 of 'score', channel (0, 0, 0), row {})"
    >>> [ledger.note("UserCodeError", text.format(row, row), "score", True) for row in (7, 3, 5)]
    [True, True, False]
    >>> print(ledger.final(str(ledger.error)))
    step 'score': KeyError: 'x' on row 5 of the batch (in subtask 0 of 'score', channel (0, 0, 0), row 5)
    The job was given up: 3 times the same failure, with no completed checkpoint in between
    """

    error: CutwaterError | None = None
    _key: str = ""
    _count: int = 0

    @staticmethod
    def counts(kind: str, retryable: bool, phase: JobPhase) -> bool:
        """True if a failure decides anything: of what several workers report of one attempt, the first does.

        After that only one that no restart helps against counts, and nothing does once the job is ending.
        """
        if phase in (JobPhase.FORMING, JobPhase.RESTARTING):
            return not retryable or kind in _NOT_RETRYABLE
        return phase not in (JobPhase.ENDING, JobPhase.ENDED)

    def note(self, kind: str, message: str, step: str, retryable: bool, hint: str = "") -> bool:
        """A failure of an attempt; whether a restart may help."""
        key = f"{kind}:{step}:{headline(message)}"
        self._count = self._count + 1 if key == self._key else 1
        self._key = key
        self.error = error_of(kind, message, step, hint)
        if kind in _LIMITED and self._count >= _SAME_FAILURE_LIMIT:
            return False
        return retryable and kind not in _NOT_RETRYABLE

    def progressed(self) -> None:
        """A checkpoint completed: what failed before is overcome."""
        self._key, self._count, self.error = "", 0, None

    def budget(self, reason: str, restarts: tuple[int, int]) -> tuple[int, int]:
        """Number of failures that count now, and the number after which the job is still restarted.

        Args:
            reason: of the failure that the job machine was told of last.
            restarts: what the restart strategy says of it.

        >>> ledger = FailureLedger()
        >>> ledger.note("UserCodeError", "KeyError: 'x'", "score", True)
        True
        >>> ledger.budget(str(ledger.error), (1, 12)), ledger.budget("worker 1 was lost", (1, 12))
        ((1, 2), (1, 12))
        """
        if type(self.error).__name__ not in _LIMITED or not reason.startswith(str(self.error)):
            return restarts
        return min((self._count, _SAME_FAILURE_LIMIT - 1), restarts, key=lambda budget: budget[1] - budget[0])

    def final(self, reason: str) -> CutwaterError:
        """The error of a job that failed for good: its cause, and why it was not tried again.

        Args:
            reason: of the job machine: the failure it was told of, and in parentheses why it gives up.
        """
        if "got a core of the Spark cluster" in reason:
            return ResourceError(reason)
        error, told = self.error, str(self.error)
        if error is None or not reason.startswith(told):  # an earlier one; this time a worker was lost, for example
            return JobFailedError(reason)
        verdict = reason.removeprefix(told).removeprefix(" (").removesuffix(")")
        if not verdict and error.__class__.__name__ in _LIMITED and self._count >= _SAME_FAILURE_LIMIT:
            verdict = f"{self._count} times the same failure, with no completed checkpoint in between"
        if not verdict:
            return error
        return type(error)(f"{error.message}\nThe job was given up: {verdict}", step=error.step, hint=error.hint)
