"""One subtask of the barrier family: barriers in, freezes, blocks and acknowledgements out.

Theory of operation.  The machine keeps one ``Snapshot`` per checkpoint that has begun here and is neither completed nor
given up; each walks through ``STAGES``.  A barrier on an input (a trigger at a source) begins or advances one.  The
protocol's row says when the subtask freezes, whether inputs that are ahead wait, which inputs are recorded afterwards,
and whether barriers overtake.  Writing is somebody else's work and may take long: any number of snapshots may be
writing while a newer one aligns.  An acknowledgement leaves only when everything of its snapshot is durable (A6).

Row ``unaligned`` begins like ``aligned``.  When that takes too long (``AlignmentTimeout``), or when a barrier comes
that has overtaken rows elsewhere, the checkpoint *switches* here: the subtask freezes at once, its own barriers go
first, and what they pass becomes part of the snapshot.  Row ``synchronous`` stands still from its freeze to the
outcome.  A savepoint is aligned under every row: nothing overtakes it, and only back-edges are in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cutwater.errors import InvariantError
from cutwater.protocol import messages as m
from cutwater.protocol.messages import Effect, Event, InputId
from cutwater.protocol.protocols import PROTOCOLS, AfterFreeze, BeforeFreeze, FailureReason, FreezeOn, ProtocolSpec
from cutwater.protocol.subtask.stages import PHASES, STAGES, Part, Phase, PhaseStep, Snapshot, Stage, StageStep

STORY_EVENTS = 16
IDS_REMEMBERED = 1024


class SubtaskMachine:
    """The protocol's decisions for one subtask.

    Args:
        name: for messages.
        inputs: all input channels; none for a source.
        protocol: a row of ``PROTOCOLS``.
        back_edges: inputs that close a loop (C1).
        loop_inputs: inputs from the same strongly connected component, back-edges included; empty outside loops.
        last_checkpoint_id: the checkpoint restored from; barriers up to it are dropped.

    >>> from cutwater.protocol import messages as m
    >>> from cutwater.protocol.protocols import PROTOCOLS
    >>> machine = SubtaskMachine("sum 0", ["a", "b"], protocol=PROTOCOLS["aligned"])
    >>> machine.handle(m.BarrierTaken("a", 1))
    [Block(input='a')]
    >>> for effect in machine.handle(m.BarrierTaken("b", 1)): print(effect)
    Freeze(checkpoint_id=1, final=False, probe=False, savepoint=False)
    BroadcastBarrier(checkpoint_id=1, final=False, probe=False, overtake=False, savepoint=False)
    Unblock(input='a')
    >>> machine.handle(m.Durable(1))
    [Acknowledge(checkpoint_id=1, quiet=True, outside_ended=False)]
    """

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

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; the effects are to be performed in their order.

        Raises:
            InvariantError: the event is illegal in this state; the machine must not be used any more.
        """
        self._events.append(event)
        match event:
            case m.RowsTaken():
                return self._on_rows(event)
            case m.BarrierTaken():
                return self._on_barrier(event)
            case m.Durable():
                return self._durable(event.checkpoint_id, Part.STATE)
            case m.LogsDurable():
                return self._durable(event.checkpoint_id, Part.LOGS)
            case m.CompleteNotice():
                return self._on_complete(event)
            case m.Trigger():
                return self._on_trigger(event)
            case m.WatermarkTaken():
                return self._on_watermark(event)
            case m.WriteFailed():
                return self._on_write_failed(event)
            case m.AbortNotice():
                return self._on_abort(event)
            case m.EndTaken():
                return self._on_end(event)
            case m.SourceExhausted():
                return self._on_exhausted()
            case m.BarrierWaits():
                return self._on_barrier_waits(event)
            case m.AlignmentTimeout():
                return self._on_timeout(event)
            case m.RowsOvertaken():
                return self._on_overtaken(event)
            case m.BarriersSent():
                return self._on_sent(event)
            case m.LoopVerdict():
                return self._on_verdict(event)
        raise self._broken(f"{type(event).__name__} is no event of a subtask")

    # -------------------------------------------------------------------------------------------- waves begin here

    def _on_trigger(self, event: m.Trigger) -> list[Effect]:
        """A1, A2, CL1: the trigger is the barrier."""
        anywhere = self.protocol.freeze_on in (FreezeOn.FIRST, FreezeOn.TRIGGER)
        if not self.is_source and (event.savepoint or not anywhere):
            raise self._broken("only a source is triggered")
        id = event.checkpoint_id
        if self._is_over(id) or id in self._snapshots:
            return []
        if id <= self._newest_id and not self.protocol.any_order:
            self._remember_aborted(id)
            return [m.Decline(id, FailureReason.BARRIER_SKIPPED, f"checkpoint {self._newest_id} had begun here")]
        snapshot = self._begin(id, event.final, event.probe, event.savepoint)
        return self._watch(snapshot) + self._freeze(snapshot)

    def _on_barrier(self, event: m.BarrierTaken) -> list[Effect]:
        input, id, overtook = event.input, event.checkpoint_id, event.overtook is not None
        self._check_taken(input, overtook)
        if overtook and not self._overtaking_row:
            raise self._broken(f"barrier {id} overtook rows of input {input!r}")
        if not self.protocol.any_order and id <= self._last_barrier[input]:
            if id < self._last_barrier[input] and self._overtaking_row:
                return []  # a newer barrier had overtaken it, and ended its checkpoint here
            raise self._broken(f"input {input!r} brought barrier {id} after {self._last_barrier[input]}")
        self._last_barrier[input] = max(id, self._last_barrier[input])
        effects = [] if self.protocol.any_order else self._give_up_skipped(input, id)
        snapshot = self._snapshots.get(id)
        if snapshot is None:
            if id in self._done:
                raise self._broken(f"input {input!r} brought barrier {id} twice")
            if self._is_over(id):
                return effects  # A8: a late barrier
            if id <= self._newest_id and not self.protocol.any_order:
                self._remember_aborted(id)
                reason = f"input {input!r} brought barrier {id} after another input had skipped it"
                return [*effects, m.Decline(id, FailureReason.BARRIER_SKIPPED, reason)]
            snapshot = self._begin(id, event.final, event.probe, event.savepoint)
            if not overtook:
                effects += self._watch(snapshot)
        return effects + self._arrive(snapshot, event)

    def _arrive(self, snapshot: Snapshot, event: m.BarrierTaken) -> list[Effect]:
        input, id, overtook = event.input, event.checkpoint_id, event.overtook is not None
        if (snapshot.final, snapshot.probe, snapshot.savepoint) != (event.final, event.probe, event.savepoint):
            raise self._broken(f"barrier {id} is another kind of barrier on input {input!r} than before")
        if input in snapshot.arrived:
            raise self._broken(f"input {input!r} brought barrier {id} twice")
        if overtook and not (snapshot.may_switch or snapshot.row.halts):
            raise self._broken(f"barrier {id} overtook rows, but is final, a probe or a savepoint's")
        snapshot.arrived.add(input)
        snapshot.waiting.discard(input)
        if snapshot.frozen:
            effects = self._close_log(snapshot, event)
            return effects + self._switch(snapshot) if overtook else effects
        self._step(snapshot, StageStep.BARRIER)
        if overtook and snapshot.may_switch:
            return self._switch(snapshot, event)
        if self._freeze_is_due(snapshot):
            return self._freeze(snapshot, event)
        if snapshot.row.before_freeze is BeforeFreeze.BLOCK:  # A3, and C2 for a back-edge
            self._blocked[input] = id
            self.block_version += 1
            return [m.Block(input)]
        return []

    def _is_over(self, id: int) -> bool:
        """Nothing of this checkpoint is wanted any more."""
        return id in self._aborted or id in self._done or id <= self._restored_id

    # ------------------------------------------------------------------------------------------------- unaligned

    def _watch(self, snapshot: Snapshot) -> list[Effect]:
        return [m.WatchAlignment(snapshot.checkpoint_id)] if snapshot.may_switch else []

    def _on_barrier_waits(self, event: m.BarrierWaits) -> list[Effect]:
        """The alignment begins: nobody knows how long the barrier will wait."""
        input, id = event.input, event.checkpoint_id
        if input not in self._last_barrier:
            raise self._broken(f"{input!r} is not an input")
        aligned = event.final or event.probe or event.savepoint
        if not self.protocol.switches or aligned or id <= self._last_barrier[input]:
            return []
        snapshot = self._snapshots.get(id)
        effects: list[Effect] = []
        if snapshot is None:
            if self._is_over(id) or id <= self._newest_id:
                return []
            snapshot = self._begin(id, False, False, False)
            effects = self._watch(snapshot)
        snapshot.waiting.add(input)
        return [m.Expedite(input, id)] if snapshot.switched and input in snapshot.logs else effects

    def _on_timeout(self, event: m.AlignmentTimeout) -> list[Effect]:
        snapshot = self._written(event.checkpoint_id)
        return [] if snapshot is None else self._switch(snapshot)

    def _on_overtaken(self, event: m.RowsOvertaken) -> list[Effect]:
        snapshot = self._written(event.checkpoint_id)
        if snapshot is None:
            return []
        if not snapshot.outputs_open or not self._overtakes(snapshot):
            raise self._broken(f"barrier {event.checkpoint_id} overtook rows in the outputs; nobody asked for that")
        snapshot.outputs_open = False
        if event.rows > 0 if event.in_loop is None else event.in_loop:
            snapshot.quiet = False
        return self._settle(snapshot, StageStep.OUTPUTS_SETTLED)

    def _on_sent(self, event: m.BarriersSent) -> list[Effect]:
        snapshot = self._written(event.checkpoint_id)
        if snapshot is None or not snapshot.outputs_open or self._overtakes(snapshot):
            return []  # nobody waits for it, or the answer to Overtake is on its way
        snapshot.outputs_open = False
        return self._settle(snapshot, StageStep.OUTPUTS_SETTLED)

    # --------------------------------------------------------------------------------------------- rows and ends

    def _on_rows(self, event: m.RowsTaken) -> list[Effect]:
        """C3, CL3: rows taken between the freeze and the barrier belong to the log."""
        self._check_taken(event.input)
        if event.input in self._ended:
            raise self._broken(f"input {event.input!r} brought rows after its end of data")
        recorders = self._recorders.get(event.input)
        if not recorders:
            return []
        for snapshot in recorders:
            snapshot.logs[event.input] += event.rows
        return self._record(event.input, recorders)

    def _on_watermark(self, event: m.WatermarkTaken) -> list[Effect]:
        """A watermark on its way may still make rows: with it in a channel the loop is not quiet."""
        self._check_taken(event.input)
        recorders = self._recorders.get(event.input, [])
        for snapshot in recorders:
            self._not_quiet(snapshot, event.input)
        return self._record(event.input, recorders)

    def _record(self, input: m.InputId, recorders: list[Snapshot]) -> list[Effect]:
        ids = tuple(s.checkpoint_id for s in recorders if not s.probe)
        return [m.Record(input, ids)] if ids else []

    def _on_end(self, event: m.EndTaken) -> list[Effect]:
        self._check_taken(event.input)
        if event.input in self._late_ends:  # it ended with its loop
            self._late_ends.discard(event.input)
            return []
        if event.input in self._ended:
            raise self._broken(f"input {event.input!r} ended twice")
        self._ended.add(event.input)
        return self._end() if len(self._ended) == len(self._inputs) else []

    def _on_exhausted(self) -> list[Effect]:
        if not self.is_source:
            raise self._broken("only a source is exhausted")
        return self._end()

    def _on_verdict(self, event: m.LoopVerdict) -> list[Effect]:
        """C6, W3: the loop was quiet at that wave; if it has ended, nothing comes over its back-edges any more."""
        if not self._loop_inputs or event.checkpoint_id > self._newest_id:
            raise self._broken(f"a verdict on checkpoint {event.checkpoint_id}, which saw no loop here")
        effects: list[Effect] = [m.ReleaseWatermark(event.checkpoint_id, event.watermark)] if self._back_edges else []
        open = self._back_edges - self._ended
        if not event.ended or not open:
            return effects
        self._late_ends |= open
        self._ended |= open
        return effects + self._end() if len(self._ended) == len(self._inputs) else effects

    # -------------------------------------------------------------------------------------------------- outcomes

    def _on_write_failed(self, event: m.WriteFailed) -> list[Effect]:
        snapshot = self._written(event.checkpoint_id)
        if snapshot is None:
            return []
        declined = m.Decline(event.checkpoint_id, FailureReason.WRITE_FAILED, event.reason)
        return [declined, *self._give_up(snapshot, StageStep.WRITE_FAILED)]

    def _on_abort(self, event: m.AbortNotice) -> list[Effect]:
        """A8: unblock in order and forget; remember the id for barriers still on their way."""
        snapshot = self._snapshots.get(event.checkpoint_id)
        if snapshot is not None:
            return self._give_up(snapshot, StageStep.ABORT)
        if event.checkpoint_id > self._restored_id:
            self._remember_aborted(event.checkpoint_id)
        return []

    def _on_complete(self, event: m.CompleteNotice) -> list[Effect]:
        id = event.checkpoint_id
        snapshot = self._snapshots.get(id)
        if snapshot is None:
            if id > self._completed_id or id in self._aborted:
                raise self._broken(f"checkpoint {id} completed without an acknowledgement from here")
            return []
        self._step(snapshot, StageStep.COMPLETE)
        del self._snapshots[id]
        self._completed_id = max(self._completed_id, id)
        if self.protocol.any_order:
            _remember(self._done, id)
        if not snapshot.final:  # after a final one nothing moves any more
            self._resume(id)
        if not event.commit or id <= self._committed_id:
            return []
        self._committed_id = id
        return [m.Commit(id)]

    # ------------------------------------------------------------------------- what becomes of a snapshot

    def _begin(self, id: int, final: bool, probe: bool, savepoint: bool) -> Snapshot:
        if self.protocol.freeze_on is FreezeOn.NEVER and not (final or probe):
            raise self._broken("protocol 'none' takes no checkpoint but the final one")
        row = PROTOCOLS["aligned"] if savepoint else self.protocol
        snapshot = Snapshot(id, final, row, probe, savepoint, may_switch=row.switches and not (final or probe))
        self._step(snapshot, StageStep.BEGIN)
        self._snapshots[id] = snapshot
        self._newest_id = max(self._newest_id, id)
        return snapshot

    def _freeze(self, snapshot: Snapshot, first: m.BarrierTaken | None = None) -> list[Effect]:
        """A4, C3, CL1, CL2: freeze, broadcast, record what is still to come, then unblock in the order of blocking.

        What ``first``, the barrier that makes it freeze, overtook is all of the log of its input.
        """
        id, overtakes = snapshot.checkpoint_id, self._overtakes(snapshot)
        effects: list[Effect] = self._give_up_unfrozen(before=id) if overtakes else []
        snapshot.logs = dict.fromkeys(self._to_record(snapshot), 0)
        snapshot.outputs_open = overtakes or snapshot.may_switch
        snapshot.log_written = overtakes or bool(snapshot.logs)
        snapshot.undurable = {Part.STATE, Part.LOGS} if snapshot.recording else {Part.STATE}
        snapshot.outside_ended = bool(self._loop_inputs) and self._ended >= set(self._inputs) - self._loop_inputs
        self._step(snapshot, StageStep.FREEZE_AND_RECORD if snapshot.recording else StageStep.FREEZE)
        for input in snapshot.logs:
            self._recorders.setdefault(input, []).append(snapshot)
        if snapshot.final:
            self._final_id = id
            self._turn(PhaseStep.FINAL_FREEZE)
        if snapshot.row.halts:
            self._halted.add(id)
            self.block_version += 1
        effects.append(m.Freeze(id, snapshot.final, snapshot.probe, snapshot.savepoint))
        effects.append(m.BroadcastBarrier(id, snapshot.final, snapshot.probe, overtakes, snapshot.savepoint))
        if not snapshot.probe:
            effects += [m.StartRecording(id, input) for input in snapshot.logs]
        if first is not None and first.overtook is not None:
            effects += self._log_complete(snapshot, first, first.overtook)
        if snapshot.switched:
            effects += self._expedite(snapshot)
        return effects + self._unblock(id)

    def _switch(self, snapshot: Snapshot, barrier: m.BarrierTaken | None = None) -> list[Effect]:
        """Unaligned from now on: freeze at once, or, after the freeze, let what is still under way overtake."""
        if snapshot.switched or not snapshot.may_switch or snapshot.stage not in (Stage.ALIGNING, Stage.RECORDING):
            return []
        self._step(snapshot, StageStep.SWITCH)
        snapshot.switched = True
        if not snapshot.frozen:
            return self._freeze(snapshot, barrier)
        effects: list[Effect] = []
        if snapshot.outputs_open:
            snapshot.log_written = True
            effects.append(m.Overtake(snapshot.checkpoint_id))
        return effects + self._expedite(snapshot)

    def _expedite(self, snapshot: Snapshot) -> list[Effect]:
        """Barriers that wait in the queues of recorded inputs come first."""
        waiting = [input for input in snapshot.logs if input in snapshot.waiting]
        return [m.Expedite(input, snapshot.checkpoint_id) for input in waiting]

    def _close_log(self, snapshot: Snapshot, event: m.BarrierTaken) -> list[Effect]:
        """C3, CL3: the barrier ends the log of its input; what it overtook is the end of it."""
        rows = snapshot.logs.pop(event.input) + (event.overtook or 0)
        self._drop_recorder(snapshot, event.input)
        return self._log_complete(snapshot, event, rows) + self._settle(snapshot, StageStep.BARRIER)

    def _log_complete(self, snapshot: Snapshot, event: m.BarrierTaken, rows: int) -> list[Effect]:
        if rows or event.overtook_time:
            self._not_quiet(snapshot, event.input)
        return [] if snapshot.probe else [m.StopRecording(snapshot.checkpoint_id, event.input, rows)]

    def _settle(self, snapshot: Snapshot, step: StageStep) -> list[Effect]:
        """One thing less to record; if it was the last, the logs are complete."""
        self._step(snapshot, step if snapshot.recording else StageStep.LOGS_COMPLETE)
        if snapshot.recording:
            return []
        if snapshot.log_written and not snapshot.probe:
            return [m.WriteLogs(snapshot.checkpoint_id)]
        return self._durable(snapshot.checkpoint_id, Part.LOGS)

    def _durable(self, id: int, part: Part) -> list[Effect]:
        """A6, C4: acknowledge when the last part is durable."""
        snapshot = self._written(id)
        if snapshot is None:
            return []
        if part not in snapshot.undurable or (part is Part.LOGS and snapshot.recording):
            raise self._broken(
                f"checkpoint {id}: {part.value} durable, but not handed to the writer or durable already"
            )
        snapshot.undurable.discard(part)
        self._step(snapshot, StageStep.PART_DURABLE if snapshot.undurable else StageStep.ALL_DURABLE)
        return [] if snapshot.undurable else [m.Acknowledge(id, snapshot.quiet, snapshot.outside_ended)]

    def _give_up_skipped(self, input: InputId, id: int) -> list[Effect]:
        """A8: a barrier on an input that never brought an older one ends the older one here."""
        return [
            effect
            for older in [s for s in self._snapshots.values() if s.checkpoint_id < id and s.awaits(input)]
            for effect in self._skip(older, f"input {input!r} brought barrier {id} without {older.checkpoint_id}")
        ]

    def _give_up_unfrozen(self, before: int) -> list[Effect]:
        """What is older and has not frozen cannot any more: its barriers would leave after the overtaking ones."""
        return [
            effect
            for older in [s for s in self._snapshots.values() if s.checkpoint_id < before and not s.frozen]
            for effect in self._skip(older, f"overtaken by checkpoint {before}")
        ]

    def _skip(self, snapshot: Snapshot, detail: str) -> list[Effect]:
        declined = m.Decline(snapshot.checkpoint_id, FailureReason.BARRIER_SKIPPED, detail)
        return [declined, *self._give_up(snapshot, StageStep.ABORT)]

    def _give_up(self, snapshot: Snapshot, step: StageStep) -> list[Effect]:
        id, frozen = snapshot.checkpoint_id, snapshot.frozen
        self._step(snapshot, step)
        for input in snapshot.logs:
            self._drop_recorder(snapshot, input)
        del self._snapshots[id]
        self._remember_aborted(id)
        self._resume(id)
        if self._final_id == id:
            self._final_id = None
            self._turn(PhaseStep.FINAL_ABORTED)
        forget: list[Effect] = [m.Forget(id)] if frozen else []
        return forget + self._unblock(id)

    def _unblock(self, id: int) -> list[Effect]:
        freed = tuple(input for input, blocker in self._blocked.items() if blocker == id)
        if freed:
            for input in freed:
                del self._blocked[input]
            self.unblocked = freed
            self.block_version += 1
        return [m.Unblock(input) for input in freed]

    def _resume(self, id: int) -> None:
        """The outcome of a halting checkpoint is known."""
        if id in self._halted:
            self._halted.discard(id)
            self.block_version += 1

    def _end(self) -> list[Effect]:
        self._turn(PhaseStep.END)
        return [m.EndOfInput()]

    def _not_quiet(self, snapshot: Snapshot, input: InputId) -> None:
        if input in self._loop_inputs or not self._loop_inputs:
            snapshot.quiet = False

    def _written(self, id: int) -> Snapshot | None:
        """The snapshot that a report of the performer is about; ``None`` if it was given up meanwhile."""
        snapshot = self._snapshots.get(id)
        if snapshot is None and id > self._newest_id:
            raise self._broken(f"a report about checkpoint {id}, which never began here")
        return snapshot

    def _drop_recorder(self, snapshot: Snapshot, input: InputId) -> None:
        self._recorders[input].remove(snapshot)
        if not self._recorders[input]:
            del self._recorders[input]

    def _remember_aborted(self, id: int) -> None:
        _remember(self._aborted, id)

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
        if broken := self._broken_here():
            raise self._broken(f"invariant broken: {broken}")
        recorded, ahead = 0, dict[InputId, int]()
        for id, snapshot in self._snapshots.items():
            recorded += len(snapshot.logs)
            if snapshot.stage is Stage.ALIGNING and snapshot.row.before_freeze is BeforeFreeze.BLOCK:
                if ahead and snapshot.arrived:
                    raise self._broken("invariant broken: one checkpoint at a time aligns and blocks")
                ahead |= dict.fromkeys(snapshot.arrived, id)
            if broken := self._broken_in(id, snapshot):
                raise self._broken(f"invariant broken of checkpoint {id}: {broken}")
        if ahead != self._blocked:
            raise self._broken("invariant broken: exactly the inputs that are ahead, where rows block, are blocked")
        if recorded != sum(map(len, self._recorders.values())):
            raise self._broken("invariant broken: nothing else is recorded than what snapshots wait for")

    def _broken_here(self) -> str:
        """The first invariant that does not hold of the subtask as a whole."""
        phase, halted = self.phase, self._halted
        final = phase is Phase.STOPPED or phase is Phase.FINISHED
        if not len(self._aborted) <= IDS_REMEMBERED >= len(self._done):
            return "the memory of ids is bounded"
        if halted and not (self.protocol.halts and (final or halted <= self._snapshots.keys())):
            return "it halts only for what is undecided, or for ever"
        ended = len(self._ended) == len(self._inputs)
        if self._inputs and ended != (phase is Phase.ENDED or phase is Phase.FINISHED):
            return "the phase agrees with the ended inputs"
        if self._late_ends and not self._late_ends <= self._ended & self._back_edges:
            return "only ended back-edges may end late"
        if (self._final_id is not None) != final:
            return "a final checkpoint is known exactly after its freeze"
        return ""

    def _broken_in(self, id: int, s: Snapshot) -> str:
        """The first that does not hold of one snapshot."""
        stage, row, logs, recorders = s.stage, s.row, s.logs, self._recorders
        aligning, recording = stage is Stage.ALIGNING, stage is Stage.RECORDING
        if not self._restored_id < id <= self._newest_id:
            return "it is newer than the restored one and not above the newest"
        if id in self._aborted or id in self._done:
            return "it is not remembered as over"
        if aligning and self._freeze_is_due(s):
            return "who is due to freeze has frozen"
        if aligning and not (s.arrived or s.waiting):
            return "an alignment has begun with a barrier"
        if s.waiting and not s.waiting.isdisjoint(s.arrived):
            return "no barrier waits where it has come"
        if s.switched and (aligning or not s.may_switch):
            return "a switch is at once a freeze, of a checkpoint that may switch"
        if s.may_switch and (s.final or s.probe or not row.switches):
            return "only an unaligned checkpoint that is neither final nor a probe may switch"
        if row.halts and not (aligning or id in self._halted):
            return "what is frozen in a halting row halts"
        if logs and not s.arrived.isdisjoint(logs):
            return "recorded inputs have not brought the barrier"
        if logs and not all(s in recorders.get(i, ()) for i in logs):
            return "recorders and logs agree"
        if recording != s.recording:
            return "it records exactly as long as there is something to record"
        if (recording or stage is Stage.WRITING) != bool(s.undurable):
            return "it waits for the writer exactly between freeze and acknowledgement"
        return ""


def _remember(ids: dict[int, None], id: int) -> None:
    ids[id] = None
    while len(ids) > IDS_REMEMBERED:
        del ids[min(ids)]
