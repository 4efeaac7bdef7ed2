"""The legal transitions of a subtask and of one snapshot in it, as tables (the docs are generated from them)."""

from __future__ import annotations

from dataclasses import dataclass, field

from cutwater.protocol.messages import InputId
from cutwater.protocol.protocols import ProtocolSpec
from cutwater.protocol.states import State


class Phase(State):
    """The life of a subtask."""

    RUNNING = "running"
    STOPPED = "stopped"
    """A final barrier has passed while there was still input (stop with savepoint): a source reads nothing more."""
    ENDED = "ended"
    """All inputs have ended, or the source is exhausted.  Barriers are still forwarded (A7)."""
    FINISHED = "finished"
    """Ended, and the final barrier has passed."""


class PhaseStep(State):
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


class Stage(State):
    """How far the snapshot of one checkpoint is in one subtask."""

    ABSENT = "absent"
    ALIGNING = "aligning"
    """Some barriers are in, but not those that the freeze waits for."""
    RECORDING = "recording"
    """Frozen; the barrier of a recorded input is still out, or its own barriers may still overtake rows."""
    WRITING = "writing"
    """Frozen, nothing left to record; something is not durable yet."""
    ACKNOWLEDGED = "acknowledged"
    COMPLETED = "completed"
    ABORTED = "aborted"


class StageStep(State):
    BEGIN = "first barrier, or trigger"
    BARRIER = "another barrier"
    SWITCH = "alignment takes too long, or an overtaking barrier came"
    FREEZE = "freeze, nothing to record"
    FREEZE_AND_RECORD = "freeze, something to record"
    OUTPUTS_SETTLED = "own barriers left, or went first"
    LOGS_COMPLETE = "nothing left to record"
    PART_DURABLE = "state or logs durable, the other not"
    ALL_DURABLE = "everything durable"
    COMPLETE = "complete notice"
    ABORT = "abort notice, or barrier skipped"
    WRITE_FAILED = "write failed"


STAGES: dict[tuple[Stage, StageStep], Stage] = {
    (Stage.ABSENT, StageStep.BEGIN): Stage.ALIGNING,
    (Stage.ALIGNING, StageStep.BARRIER): Stage.ALIGNING,
    (Stage.ALIGNING, StageStep.SWITCH): Stage.ALIGNING,
    (Stage.ALIGNING, StageStep.FREEZE): Stage.WRITING,
    (Stage.ALIGNING, StageStep.FREEZE_AND_RECORD): Stage.RECORDING,
    (Stage.ALIGNING, StageStep.ABORT): Stage.ABORTED,
    (Stage.RECORDING, StageStep.BARRIER): Stage.RECORDING,
    (Stage.RECORDING, StageStep.SWITCH): Stage.RECORDING,
    (Stage.RECORDING, StageStep.OUTPUTS_SETTLED): Stage.RECORDING,
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


class Part(State):
    """What an acknowledgement waits for."""

    STATE = "state"
    LOGS = "logs"
    """Rows of channels: the logs of the inputs, and what was overtaken in the output queues."""


@dataclass(slots=True)
class Snapshot:
    """One checkpoint in one subtask."""

    checkpoint_id: int
    final: bool
    row: ProtocolSpec = field(repr=False)
    """The job's, or that of a savepoint: aligned."""
    probe: bool = False
    savepoint: bool = False
    may_switch: bool = False
    """It may go over to freezing at once (row ``unaligned``)."""
    switched: bool = False
    stage: Stage = Stage.ABSENT
    arrived: set[InputId] = field(default_factory=set[InputId])
    """Inputs whose barrier has come."""
    waiting: set[InputId] = field(default_factory=set[InputId])
    """Inputs in whose queue the barrier is known to wait."""
    logs: dict[InputId, int] = field(default_factory=dict[InputId, int])
    """Rows so far in the log of each input that is being recorded."""
    outputs_open: bool = False
    """Its own barriers may still overtake rows in the output queues, or it is not known yet which they overtook."""
    log_written: bool = False
    """There is a log to write, be it empty."""
    undurable: set[Part] = field(default_factory=set[Part])
    """Parts that the acknowledgement still waits for."""
    quiet: bool = True
    """Nothing has been seen on its way inside the loop (outside loops: on its way at all)."""
    outside_ended: bool = False
    """At the freeze all inputs from outside the loop had ended."""

    @property
    def frozen(self) -> bool:
        return self.stage not in (Stage.ABSENT, Stage.ALIGNING)

    @property
    def recording(self) -> bool:
        """Something is still to be recorded: the contents of stage RECORDING."""
        return bool(self.logs) or self.outputs_open

    def awaits(self, input: InputId) -> bool:
        """The snapshot cannot be completed without this input's barrier."""
        return input not in self.arrived and (self.stage is Stage.ALIGNING or input in self.logs)
