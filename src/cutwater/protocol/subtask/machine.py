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

Events are taken here, what they have in common is in ``subtask_steps``, the state with its invariants in
``subtask_state``.
"""

from __future__ import annotations

from cutwater.protocol import messages as m
from cutwater.protocol.messages import Effect, Event
from cutwater.protocol.protocols import BeforeFreeze, FreezeOn
from cutwater.protocol.reasons import FailureReason
from cutwater.protocol.subtask.stages import Part, Snapshot, StageStep
from cutwater.protocol.subtask.steps import SubtaskSteps


class SubtaskMachine(SubtaskSteps):
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
            self._remember_done(id)
        if not snapshot.final:  # after a final one nothing moves any more
            self._resume(id)
        if not event.commit or id <= self._committed_id:
            return []
        self._committed_id = id
        return [m.Commit(id)]
