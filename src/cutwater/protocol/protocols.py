"""The protocols, each a row of three parameters of one machine; kinds of checkpoints, and reasons for which they fail.

| protocol | freeze on | input whose barrier came, before the freeze | input without barrier, after the freeze |
|---|---|---|---|
| ``none`` | never (the final wave of a bounded job only) | blocked | |
| ``aligned`` | all regular barriers | blocked | back-edges: recorded |
| ``at_least_once`` | all regular barriers | open | back-edges: recorded |
| ``chandy_lamport`` | first barrier | open | recorded |
| ``unaligned`` | like ``aligned``; once it switches, like ``chandy_lamport``, with barriers that overtake | | |
| ``synchronous`` | trigger, at every subtask | everything stands still until the outcome is known | recorded |
"""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias

import msgspec


class FreezeOn(enum.Enum):
    """Moment at which a subtask freezes."""

    NEVER = "never"
    """Only for a final barrier, when nothing is in flight: sinks commit once, nothing is kept on the way."""
    FIRST = "first"
    TRIGGER = "trigger"
    """Every subtask is triggered; a barrier that is faster than the trigger counts as one."""
    ALL_REGULAR = "all_regular"
    """Barriers of back-edges are not waited for."""


class BeforeFreeze(enum.Enum):
    """Treatment of an input whose barrier came before the freeze."""

    BLOCK = "block"
    OPEN = "open"


class AfterFreeze(enum.Enum):
    """Inputs that are recorded from the freeze until their barrier comes."""

    RECORD_BACK_EDGES = "record_back_edges"
    RECORD_ALL = "record_all"


Guarantee: TypeAlias = Literal["at-most-once", "at-least-once", "exactly-once"]


class ProtocolSpec(msgspec.Struct, frozen=True):
    """One protocol of the family.

    >>> PROTOCOLS["aligned"].before_freeze
    <BeforeFreeze.BLOCK: 'block'>
    """

    name: str
    freeze_on: FreezeOn
    before_freeze: BeforeFreeze
    after_freeze: AfterFreeze
    guarantee: Guarantee = "exactly-once"
    """Promise of a job under it, on loops too."""
    concurrent: bool = True
    """Several of its checkpoints may be under way."""
    switches: bool = False
    """A checkpoint may go over from this row to freezing at once, with overtaking barriers and all inputs recorded."""
    halts: bool = False
    """From its freeze until it hears the outcome a subtask takes and reads nothing; its barriers overtake."""
    any_order: bool = False
    """Any process begins snapshots, and those of several may cross: ids come in any order on a channel (CL1, CL5).

    Not in a job, under no row: its coordinator alone begins them, and its sinks commit all that came before an id.
    """


PROTOCOLS: dict[str, ProtocolSpec] = {
    row.name: row
    for row in (
        ProtocolSpec("none", FreezeOn.NEVER, BeforeFreeze.BLOCK, AfterFreeze.RECORD_BACK_EDGES, "at-most-once"),
        ProtocolSpec("aligned", FreezeOn.ALL_REGULAR, BeforeFreeze.BLOCK, AfterFreeze.RECORD_BACK_EDGES),
        ProtocolSpec(
            "at_least_once",
            FreezeOn.ALL_REGULAR,
            BeforeFreeze.OPEN,
            AfterFreeze.RECORD_BACK_EDGES,
            guarantee="at-least-once",
        ),
        ProtocolSpec("chandy_lamport", FreezeOn.FIRST, BeforeFreeze.OPEN, AfterFreeze.RECORD_ALL),
        ProtocolSpec(
            "unaligned",
            FreezeOn.ALL_REGULAR,
            BeforeFreeze.BLOCK,
            AfterFreeze.RECORD_BACK_EDGES,
            concurrent=False,
            switches=True,
        ),
        ProtocolSpec(
            "synchronous", FreezeOn.TRIGGER, BeforeFreeze.OPEN, AfterFreeze.RECORD_ALL, concurrent=False, halts=True
        ),
    )
}
"""All protocols that run today, by the name in ``JobConfig.protocol``."""

NETWORK = msgspec.structs.replace(PROTOCOLS["chandy_lamport"], any_order=True)
"""The same for process networks."""


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

    def __init__(self, kind: str) -> None:
        self.stored = kind != "probe"
        """It is published when all have acknowledged; all kinds but PROBE."""
        self.final = kind in ("stop_with_savepoint", "final")
        """No row follows its barrier."""
        self.user_owned = kind in ("savepoint", "stop_with_savepoint")
        self.commits = kind not in ("savepoint", "probe")
        """Sinks commit when it completed.

        Not for a plain savepoint: it belongs to the user, who may delete or move it, so that no recovery may depend
        on it.  Its pre-commits stay with the sink and are committed by the next checkpoint that completes.
        """


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
