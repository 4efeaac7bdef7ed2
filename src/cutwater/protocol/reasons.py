"""Closed enumerations on checkpoints: kinds, answers to acknowledgements, reasons for not completing."""

from __future__ import annotations

import enum


class CheckpointKind(enum.Enum):
    """Kind that a checkpoint was asked for as."""

    PERIODIC = "periodic"
    ON_DEMAND = "on_demand"
    SAVEPOINT = "savepoint"
    """User-owned: waits for no pause and no place, subsumes nothing and is not subsumed, and commits no sink."""
    STOP_WITH_SAVEPOINT = "stop_with_savepoint"
    """A savepoint after whose barrier the sources are silent; its sinks commit and the job stops."""
    FINAL = "final"
    """Taken once every subtask has handled its end of data (A7)."""
    PROBE = "probe"
    """A wave that stores nothing and only asks whether the loops are quiet (C6)."""

    @property
    def stored(self) -> bool:
        """It is published when all have acknowledged; all kinds but PROBE."""
        return self is not CheckpointKind.PROBE

    @property
    def final(self) -> bool:
        """No row follows its barrier."""
        return self in (CheckpointKind.STOP_WITH_SAVEPOINT, CheckpointKind.FINAL)

    @property
    def user_owned(self) -> bool:
        return self in (CheckpointKind.SAVEPOINT, CheckpointKind.STOP_WITH_SAVEPOINT)

    @property
    def commits(self) -> bool:
        """Sinks commit when it completed.

        Not for a plain savepoint: it belongs to the user, who may delete or move it, so that no recovery may depend
        on it.  Its pre-commits stay with the sink and are committed by the next checkpoint that completes.
        """
        return self not in (CheckpointKind.SAVEPOINT, CheckpointKind.PROBE)


class AckAnswer(enum.Enum):
    """Answer to an acknowledgement."""

    SUCCESS = "success"
    DUPLICATE = "duplicate"
    """This subtask had acknowledged already, or the checkpoint is complete: nothing is touched."""
    UNKNOWN = "unknown"
    """No such checkpoint, or no such subtask in it."""
    DISCARDED = "discarded"
    """The checkpoint was given up before; the state in the acknowledgement is deleted."""


class FailureReason(enum.Enum):
    """Reason for which a checkpoint was not taken or given up.

    ``counts``: it adds to the consecutive failures that ``tolerable_failed`` bounds (declines, expiry, I/O).
    ``preflight``: no subtask has heard of the checkpoint.

    >>> FailureReason.EXPIRED.counts, FailureReason.JOB_NOT_RUNNING.preflight
    (True, True)
    """

    JOB_NOT_RUNNING = ("job_not_running", "the job is not running", False, True)
    JOB_ENDING = ("job_ending", "the job is ending with its final checkpoint", False, True)
    CHECKPOINTING_DISABLED = ("checkpointing_disabled", "the job runs with protocol 'none'", False, True)
    TOO_MANY_REQUESTS = ("too_many_requests", "too many checkpoint requests are waiting", False, True)
    SUBSUMED = ("subsumed", "a newer checkpoint completed first", False, False)
    JOB_STOPPED = ("job_stopped", "the job stopped or restarted", False, False)
    EXPIRED = ("expired", "not acknowledged by all subtasks within timeout_ms", True, False)
    BARRIER_SKIPPED = ("barrier_skipped", "an input brought a later barrier without this one", True, False)
    WRITE_FAILED = ("write_failed", "a subtask could not write its snapshot", True, False)
    DECLINED = ("declined", "a subtask declined", True, False)
    PUBLISH_FAILED = ("publish_failed", "the manifest or the log entry could not be written", True, False)

    def __init__(self, code: str, message: str, counts: bool, preflight: bool) -> None:
        self.code = code
        """Short name, as it stands in messages on the wire and in metrics."""
        self.message = message
        self.counts = counts
        self.preflight = preflight

    @classmethod
    def of(cls, code: str) -> FailureReason:
        """The reason with this ``code``.

        Raises:
            KeyError: there is none.
        """
        return _BY_CODE[code]


_BY_CODE = {reason.code: reason for reason in FailureReason}
