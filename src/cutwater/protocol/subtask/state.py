"""What a subtask knows of its checkpoints, the walk through the tables, and every invariant that must hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from cutwater.errors import InvariantError
from cutwater.protocol.messages import Event, InputId
from cutwater.protocol.protocols import AfterFreeze, BeforeFreeze, FreezeOn, ProtocolSpec
from cutwater.protocol.subtask.stages import PHASES, STAGES, Phase, PhaseStep, Snapshot, Stage, StageStep

STORY_EVENTS = 16
IDS_REMEMBERED = 1024


class SubtaskState:
    """The state of a ``SubtaskMachine``, with the questions that a performer may ask."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[InputId],
        *,
        protocol: ProtocolSpec,
        back_edges: frozenset[InputId] = frozenset(),
        loop_inputs: frozenset[InputId] = frozenset(),
        last_checkpoint_id: int = 0,
    ) -> None:
        self.name = name
        self.protocol = protocol
        self.phase = Phase.RUNNING
        self.block_version = 0
        """Grows whenever the answer of ``can_take`` or ``halted`` changes."""
        self.unblocked: tuple[InputId, ...] = ()
        """The inputs that the last unblocking set free, in the order in which they had been blocked (A5)."""
        self._events: deque[Event] = deque(maxlen=STORY_EVENTS)
        self._inputs = tuple(inputs)
        self._regular = frozenset(self._inputs) - back_edges
        self._back_edges = back_edges
        self._loop_inputs = loop_inputs | back_edges
        self._restored_id = last_checkpoint_id
        self._newest_id = last_checkpoint_id
        self._completed_id = last_checkpoint_id
        self._committed_id = last_checkpoint_id
        self._final_id: int | None = None
        self._snapshots: dict[int, Snapshot] = {}
        self._aborted: dict[int, None] = {}
        self._done: dict[int, None] = {}
        """Completed ids, where they come in any order."""
        self._last_barrier: dict[InputId, int] = dict.fromkeys(self._inputs, -1)
        self._blocked: dict[InputId, int] = {}
        self._halted: set[int] = set()
        """Checkpoints for whose outcome everything here stands still."""
        self._ended: set[InputId] = set()
        """Ends come again after a restore (W5): none is in a snapshot."""
        self._late_ends: set[InputId] = set()
        """Back-edges that ended with their loop: their EndOfData may still come, once."""
        self._recorders: dict[InputId, list[Snapshot]] = {}
        if len(set(self._inputs)) != len(self._inputs):
            raise self._broken("an input is named twice")
        if not back_edges <= set(self._inputs) or (self._inputs and not self._regular):
            raise self._broken("back-edges must be inputs, beside at least one regular input")
        if not loop_inputs <= set(self._inputs):
            raise self._broken("inputs from the same loop must be inputs")

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def is_source(self) -> bool:
        return not self._inputs

    @property
    def pending(self) -> dict[int, Stage]:
        """Checkpoints that have begun here and are neither completed nor given up, with their stage."""
        return {id: snapshot.stage for id, snapshot in self._snapshots.items()}

    @property
    def blocked(self) -> tuple[InputId, ...]:
        """Blocked inputs, in the order in which they were blocked."""
        return tuple(self._blocked)

    @property
    def ended(self) -> frozenset[InputId]:
        """Inputs that have brought their EndOfData, or ended with their loop."""
        return frozenset(self._ended)

    @property
    def loop_open(self) -> bool:
        """Rows may still come over a back-edge (false without one).

        A head wants a wave while ``merger.held or (merger.drained and machine.loop_open)`` (C6, W3).
        """
        return not self._back_edges <= self._ended

    @property
    def loop_first(self) -> frozenset[InputId]:
        """Inputs whose rows should go before those of the others, so that little is on its way in a loop.

        Where rows come in from outside the loop, those from inside it.  Where they do not, as at the head of an inner
        loop, the back-edges: what enters the inner loop comes by the other inputs.
        """
        return frozenset(self._loop_inputs if set(self._inputs) - self._loop_inputs else self._back_edges)

    @property
    def newest_id(self) -> int:
        """The highest checkpoint id that has begun here (or was restored)."""
        return self._newest_id

    @property
    def halted(self) -> bool:
        """Everything stands still for a checkpoint (row ``synchronous``): only overtaking barriers are taken."""
        return bool(self._halted)

    @property
    def may_read(self) -> bool:
        """Rows may be made unasked: a source may hand them out, timers may fire by the clock."""
        return self.phase is Phase.RUNNING and not self._halted

    def can_take(self, input: InputId) -> bool:
        """False while the input is blocked (A3) or the subtask halted; overtaking barriers may always be taken."""
        return input not in self._blocked and not self._halted

    def recording(self, input: InputId) -> bool:
        """True while what is taken from this input must be told with ``RowsTaken`` and ``WatermarkTaken``."""
        return input in self._recorders

    # ------------------------------------------------------------------------------------------------ the tables

    @property
    def _overtaking_row(self) -> bool:
        return self.protocol.switches or self.protocol.halts

    def _overtakes(self, snapshot: Snapshot) -> bool:
        """Its barriers go before what waits in the output queues."""
        return snapshot.switched or snapshot.row.halts

    def _freeze_is_due(self, snapshot: Snapshot) -> bool:
        at_once = snapshot.row.freeze_on in (FreezeOn.FIRST, FreezeOn.TRIGGER) or snapshot.switched
        return at_once or self._regular <= snapshot.arrived

    def _to_record(self, snapshot: Snapshot) -> list[InputId]:
        """The inputs to record from the freeze on (C3, CL2)."""
        everything = snapshot.row.after_freeze is AfterFreeze.RECORD_ALL or snapshot.switched
        inputs = self._inputs if everything else [i for i in self._inputs if i in self._back_edges]
        return [i for i in inputs if i not in snapshot.arrived]

    def _step(self, snapshot: Snapshot, step: StageStep) -> None:
        after = STAGES.get((snapshot.stage, step))
        if after is None:
            raise self._broken(f"checkpoint {snapshot.checkpoint_id} is {snapshot.stage.value}: no '{step.value}'")
        snapshot.stage = after

    def _turn(self, step: PhaseStep) -> None:
        after = PHASES.get((self.phase, step))
        if after is None:
            raise self._broken(f"no '{step.value}' here")
        self.phase = after

    def _check_taken(self, input: InputId, overtaking: bool = False) -> None:
        if input not in self._last_barrier:
            raise self._broken(f"{input!r} is not an input")
        if overtaking:
            return
        if input in self._blocked:
            raise self._broken(f"something was taken from input {input!r}, which is blocked")
        if self._halted:
            raise self._broken(f"something was taken from input {input!r}, but everything stands still")

    def _broken(self, what: str) -> InvariantError:
        events = "".join(f"\n  {event}" for event in self._events) or " none"
        return InvariantError(
            f"subtask {self.name!r}, protocol {self.protocol.name}, phase {self.phase.value}: {what}\n"
            f"pending {self._snapshots}, blocked {self._blocked}, last events, newest last:{events}"
        )

    # ------------------------------------------------------------------------------------------------- invariants

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            InvariantError: one is broken.
        """
        for what, holds in self._invariants():
            if not holds:
                raise self._broken(f"invariant broken: {what}")
        recorded, ahead = 0, dict[InputId, int]()
        for id, snapshot in self._snapshots.items():
            recorded += len(snapshot.logs)
            if snapshot.stage is Stage.ALIGNING and snapshot.row.before_freeze is BeforeFreeze.BLOCK:
                if ahead and snapshot.arrived:
                    raise self._broken("invariant broken: one checkpoint at a time aligns and blocks")
                ahead |= dict.fromkeys(snapshot.arrived, id)
            for what, holds in self._invariants_of(id, snapshot):
                if not holds:
                    raise self._broken(f"invariant broken of checkpoint {id}: {what}")
        if ahead != self._blocked:
            raise self._broken("invariant broken: exactly the inputs that are ahead, where rows block, are blocked")
        if recorded != sum(map(len, self._recorders.values())):
            raise self._broken("invariant broken: nothing else is recorded than what snapshots wait for")

    def _invariants(self) -> Iterable[tuple[str, bool]]:
        """Of the subtask as a whole."""
        phase, halted = self.phase, self._halted
        done = len(self._ended) == len(self._inputs) if self._inputs else None
        final = phase is Phase.STOPPED or phase is Phase.FINISHED
        return (
            ("the memory of ids is bounded", len(self._aborted) <= IDS_REMEMBERED >= len(self._done)),
            ("it halts only for what is undecided, or for ever",
             not halted or (self.protocol.halts and (final or halted <= self._snapshots.keys()))),
            ("the phase agrees with the ended inputs",
             done is None or done == (phase is Phase.ENDED or phase is Phase.FINISHED)),
            ("only ended back-edges may end late",
             not self._late_ends or self._late_ends <= self._ended & self._back_edges),
            ("a final checkpoint is known exactly after its freeze", (self._final_id is not None) == final),
        )  # fmt: skip

    def _invariants_of(self, id: int, s: Snapshot) -> Iterable[tuple[str, bool]]:
        """Of one snapshot."""
        stage, recorders = s.stage, self._recorders
        aligning, halts = stage is Stage.ALIGNING, s.row.halts
        return (
            ("it is newer than the restored one and not above the newest", self._restored_id < id <= self._newest_id),
            ("it is not remembered as over", id not in self._aborted and id not in self._done),
            ("who is due to freeze has frozen", not aligning or not self._freeze_is_due(s)),
            ("an alignment has begun with a barrier", not aligning or bool(s.arrived or s.waiting)),
            ("no barrier waits where it has come", not s.waiting or s.waiting.isdisjoint(s.arrived)),
            ("a switch is at once a freeze, of a checkpoint that may switch",
             not s.switched or (s.may_switch and not aligning)),
            ("only an unaligned checkpoint that is neither final nor a probe may switch",
             not s.may_switch or (s.row.switches and not (s.final or s.probe))),
            ("what is frozen in a halting row halts", not halts or aligning or id in self._halted),
            ("recorded inputs have not brought the barrier", not s.logs or s.arrived.isdisjoint(s.logs)),
            ("recorders and logs agree", all(s in recorders.get(i, ()) for i in s.logs) if s.logs else True),
            ("it records exactly as long as there is something to record", (stage is Stage.RECORDING) == s.recording),
            ("it waits for the writer exactly between freeze and acknowledgement",
             (stage is Stage.RECORDING or stage is Stage.WRITING) == bool(s.undurable)),
        )  # fmt: skip
