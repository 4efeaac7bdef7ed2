"""The legal transitions of a subtask and of one snapshot in it, as tables (the docs are generated from them)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from cutwater.protocol.messages import InputId

__all__ = ["PHASES", "STAGES", "Part", "Phase", "PhaseStep", "Snapshot", "Stage", "StageStep"]


class Phase(enum.Enum):
    """The life of a subtask."""

    RUNNING = "running"
    STOPPED = "stopped"
    """A final barrier has passed while there was still input (stop with savepoint): a source reads nothing more."""
    ENDED = "ended"
    """All inputs have ended, or the source is exhausted.  Barriers are still forwarded (A7)."""
    FINISHED = "finished"
    """Ended, and the final barrier has passed."""


class PhaseStep(enum.Enum):
    END = "last input ended, or source exhausted"
    FINAL_FREEZE = "freeze for a final barrier"
    FINAL_ABORTED = "the final checkpoint is given up"


PHASES: dict[tuple[Phase, PhaseStep], Phase] = {
    (Phase.RUNNING, PhaseStep.END): Phase.ENDED,
    (Phase.RUNNING, PhaseStep.FINAL_FREEZE): Phase.STOPPED,
    (Phase.STOPPED, PhaseStep.END): Phase.FINISHED,
    (Phase.STOPPED, PhaseStep.FINAL_FREEZE): Phase.STOPPED,
    (Phase.STOPPED, PhaseStep.FINAL_ABORTED): Phase.RUNNING,
    (Phase.ENDED, PhaseStep.FINAL_FREEZE): Phase.FINISHED,
    (Phase.FINISHED, PhaseStep.FINAL_FREEZE): Phase.FINISHED,
    (Phase.FINISHED, PhaseStep.FINAL_ABORTED): Phase.ENDED,
}


class Stage(enum.Enum):
    """How far the snapshot of one checkpoint is in one subtask."""

    ABSENT = "absent"
    ALIGNING = "aligning"
    """Some barriers are in, but not those that the freeze waits for."""
    RECORDING = "recording"
    """Frozen; the barrier of at least one recorded input is still out."""
    WRITING = "writing"
    """Frozen, all logs complete; something is not durable yet."""
    ACKNOWLEDGED = "acknowledged"
    COMPLETED = "completed"
    ABORTED = "aborted"


class StageStep(enum.Enum):
    BEGIN = "first barrier, or trigger"
    BARRIER = "another barrier"
    FREEZE = "freeze, nothing to record"
    FREEZE_AND_RECORD = "freeze, inputs to record"
    LOGS_COMPLETE = "last barrier of a recorded input"
    PART_DURABLE = "state or logs durable, the other not"
    ALL_DURABLE = "everything durable"
    COMPLETE = "complete notice"
    ABORT = "abort notice, or barrier skipped"
    WRITE_FAILED = "write failed"


STAGES: dict[tuple[Stage, StageStep], Stage] = {
    (Stage.ABSENT, StageStep.BEGIN): Stage.ALIGNING,
    (Stage.ALIGNING, StageStep.BARRIER): Stage.ALIGNING,
    (Stage.ALIGNING, StageStep.FREEZE): Stage.WRITING,
    (Stage.ALIGNING, StageStep.FREEZE_AND_RECORD): Stage.RECORDING,
    (Stage.ALIGNING, StageStep.ABORT): Stage.ABORTED,
    (Stage.RECORDING, StageStep.BARRIER): Stage.RECORDING,
    (Stage.RECORDING, StageStep.PART_DURABLE): Stage.RECORDING,
    (Stage.RECORDING, StageStep.LOGS_COMPLETE): Stage.WRITING,
    (Stage.RECORDING, StageStep.WRITE_FAILED): Stage.ABORTED,
    (Stage.RECORDING, StageStep.ABORT): Stage.ABORTED,
    (Stage.WRITING, StageStep.PART_DURABLE): Stage.WRITING,
    (Stage.WRITING, StageStep.ALL_DURABLE): Stage.ACKNOWLEDGED,
    (Stage.WRITING, StageStep.WRITE_FAILED): Stage.ABORTED,
    (Stage.WRITING, StageStep.ABORT): Stage.ABORTED,
    (Stage.ACKNOWLEDGED, StageStep.COMPLETE): Stage.COMPLETED,
    (Stage.ACKNOWLEDGED, StageStep.ABORT): Stage.ABORTED,
}


class Part(enum.Enum):
    """What an acknowledgement waits for."""

    STATE = "state"
    LOGS = "logs"


@dataclass(slots=True)
class Snapshot:
    """One checkpoint in one subtask."""

    checkpoint_id: int
    final: bool
    stage: Stage = Stage.ABSENT
    arrived: set[InputId] = field(default_factory=set[InputId])
    """Inputs whose barrier has come."""
    logs: dict[InputId, int] = field(default_factory=dict[InputId, int])
    """Rows so far in the log of each input that is being recorded."""
    undurable: set[Part] = field(default_factory=set[Part])
    """Parts that the acknowledgement still waits for."""

    @property
    def frozen(self) -> bool:
        return self.stage not in (Stage.ABSENT, Stage.ALIGNING)

    def awaits(self, input: InputId) -> bool:
        """The snapshot cannot be completed without this input's barrier."""
        return input not in self.arrived and (self.stage is Stage.ALIGNING or input in self.logs)
