"""The failures of a job: whether a restart may help, and which error the user gets in the end."""

from __future__ import annotations

from dataclasses import dataclass

from cutwater.errors import CutwaterError, JobFailedError, ResourceError
from cutwater.protocol.job.messages import JobPhase
from cutwater.runtime.failures import error_of, headline

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
        """Whether a failure decides anything: of what several workers report of one attempt, the first does.

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
        """How many failures count now, and after how many the job is still restarted.

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
