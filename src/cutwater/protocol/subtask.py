"""One subtask of the aligned-barrier family: barriers in, freezes, blocks and acknowledgements out.

Theory of operation.  The machine keeps one ``Snapshot`` per checkpoint that has begun here and is neither completed nor
given up; each walks through ``STAGES``.  A barrier on an input (a trigger at a source) begins or advances one.  The
protocol's row says when the subtask freezes, whether inputs that are ahead wait, and which inputs are recorded
afterwards.  Writing is somebody else's work and may take long: any number of snapshots may be writing while a newer one
aligns.  An acknowledgement leaves only when everything of its snapshot is durable (A6).

The rules A1-A8 and C2-C4 of the design are named where they are carried out.
"""

from __future__ import annotations

from cutwater.protocol import messages as m
from cutwater.protocol.messages import Effect, Event, InputId
from cutwater.protocol.reasons import FailureReason
from cutwater.protocol.rows import AfterFreeze, BeforeFreeze, FreezeOn
from cutwater.protocol.stages import Part, PhaseStep, Snapshot, StageStep
from cutwater.protocol.subtask_state import ABORTED_IDS_REMEMBERED, SubtaskState

__all__ = ["SubtaskMachine"]


class SubtaskMachine(SubtaskState):
    """The protocol's decisions for one subtask.

    Args:
        name: for messages.
        inputs: all input channels; none for a source.
        protocol: a row of ``PROTOCOLS``.
        back_edges: inputs that close a loop (C1).
        loop_inputs: inputs from the same strongly connected component, back-edges included; empty outside loops.
        last_checkpoint_id: the checkpoint restored from; barriers up to it are dropped.
        ended: inputs whose end of data lies in the restored checkpoint.
        exhausted: the same for a source.

    >>> from cutwater.protocol import messages as m
    >>> from cutwater.protocol.rows import PROTOCOLS
    >>> machine = SubtaskMachine("sum 0", ["a", "b"], protocol=PROTOCOLS["aligned"])
    >>> machine.handle(m.BarrierTaken("a", 1))
    [Block(input='a')]
    >>> for effect in machine.handle(m.BarrierTaken("b", 1)): print(effect)
    Freeze(checkpoint_id=1, final=False, probe=False)
    BroadcastBarrier(checkpoint_id=1, final=False, probe=False, overtake=False)
    Unblock(input='a')
    >>> machine.handle(m.Durable(1))
    [Acknowledge(checkpoint_id=1, quiet=True, outside_ended=False)]
    """

    # ---------------------------------------------------------------------------------------------------- events

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
            case m.Trigger():
                return self._on_trigger(event)
            case m.Durable():
                return self._durable(event.checkpoint_id, Part.STATE)
            case m.LogsDurable():
                return self._durable(event.checkpoint_id, Part.LOGS)
            case m.WriteFailed():
                return self._on_write_failed(event)
            case m.CompleteNotice():
                return self._on_complete(event)
            case m.AbortNotice():
                return self._on_abort(event)
            case m.EndTaken():
                return self._on_end(event)
            case m.SourceExhausted():
                return self._on_exhausted()
            case _:
                pass
        raise self._broken(f"{type(event).__name__} is no event of a subtask")

    def _on_trigger(self, event: m.Trigger) -> list[Effect]:
        """A1, A2: at a source the trigger is the barrier."""
        if not self.is_source:
            raise self._broken("only a source is triggered")
        if event.checkpoint_id <= self._newest_id or event.checkpoint_id in self._aborted:
            return []
        return self._freeze(self._begin(event.checkpoint_id, event.final))

    def _on_barrier(self, event: m.BarrierTaken) -> list[Effect]:
        input, id = event.input, event.checkpoint_id
        self._check_taken(input)
        if id <= self._last_barrier[input]:
            raise self._broken(f"input {input!r} brought barrier {id} after {self._last_barrier[input]}")
        self._last_barrier[input] = id
        effects = self._give_up_skipped(input, id)
        snapshot = self._snapshots.get(id)
        if snapshot is None:
            if id in self._aborted or id <= self._restored_id:
                return effects  # A8: a late barrier
            if id <= self._newest_id:
                self._remember_aborted(id)
                reason = f"input {input!r} brought barrier {id} after another input had skipped it"
                return [*effects, m.Decline(id, FailureReason.BARRIER_SKIPPED, reason)]
            snapshot = self._begin(id, event.final)
        elif snapshot.final != event.final:
            raise self._broken(f"barrier {id} is final on one input and not on {input!r}")
        snapshot.arrived.add(input)
        if snapshot.frozen:
            return effects + self._close_log(snapshot, input)
        self._step(snapshot, StageStep.BARRIER)
        if self._freeze_is_due(snapshot):
            return effects + self._freeze(snapshot)
        if self.protocol.before_freeze is BeforeFreeze.BLOCK:  # A3, and C2 for a back-edge
            self._blocked[input] = id
            self.block_version += 1
            effects.append(m.Block(input))
        return effects

    def _on_end(self, event: m.EndTaken) -> list[Effect]:
        self._check_taken(event.input)
        if event.input in self._ended:
            raise self._broken(f"input {event.input!r} ended twice")
        self._ended.add(event.input)
        return self._end() if len(self._ended) == len(self._inputs) else []

    def _on_exhausted(self) -> list[Effect]:
        if not self.is_source:
            raise self._broken("only a source is exhausted")
        return self._end()

    def _on_rows(self, event: m.RowsTaken) -> list[Effect]:
        """C3: rows taken between the freeze and the barrier belong to the log."""
        self._check_taken(event.input)
        if event.input in self._ended:
            raise self._broken(f"input {event.input!r} brought rows after its end of data")
        recorders = self._recorders.get(event.input)
        if not recorders:
            return []
        for snapshot in recorders:
            snapshot.logs[event.input] += event.rows
        return [m.Record(event.input, tuple(s.checkpoint_id for s in recorders))]

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
        snapshot = self._snapshots.get(event.checkpoint_id)
        if snapshot is None:
            if event.checkpoint_id > self._completed_id or event.checkpoint_id in self._aborted:
                raise self._broken(f"checkpoint {event.checkpoint_id} completed without an acknowledgement from here")
            return []
        self._step(snapshot, StageStep.COMPLETE)
        del self._snapshots[event.checkpoint_id]
        self._completed_id = max(self._completed_id, event.checkpoint_id)
        if not event.commit or event.checkpoint_id <= self._committed_id:
            return []
        self._committed_id = event.checkpoint_id
        return [m.Commit(event.checkpoint_id)]

    # ------------------------------------------------------------------------------------------------ transitions

    def _begin(self, id: int, final: bool) -> Snapshot:
        if self.protocol.freeze_on is FreezeOn.NEVER and not final:
            raise self._broken("protocol 'none' takes no checkpoint but the final one")
        snapshot = Snapshot(id, final)
        self._step(snapshot, StageStep.BEGIN)
        self._snapshots[id] = snapshot
        self._newest_id = id
        return snapshot

    def _freeze(self, snapshot: Snapshot) -> list[Effect]:
        """A4, C3: freeze, broadcast, record what is still to come, then unblock in the order of blocking."""
        id, final = snapshot.checkpoint_id, snapshot.final
        recorded = self._inputs if self.protocol.after_freeze is AfterFreeze.RECORD_ALL else self._back_edges
        snapshot.logs = {i: 0 for i in self._inputs if i in recorded and i not in snapshot.arrived}
        snapshot.undurable = {Part.STATE, Part.LOGS} if snapshot.logs else {Part.STATE}
        self._step(snapshot, StageStep.FREEZE_AND_RECORD if snapshot.logs else StageStep.FREEZE)
        for input in snapshot.logs:
            self._recorders.setdefault(input, []).append(snapshot)
        if final:
            self._final_id = id
            self._turn(PhaseStep.FINAL_FREEZE)
        effects: list[Effect] = [m.Freeze(id, final), m.BroadcastBarrier(id, final)]
        effects += [m.StartRecording(id, input) for input in snapshot.logs]
        return effects + self._unblock(id)

    def _close_log(self, snapshot: Snapshot, input: InputId) -> list[Effect]:
        """C3, CL3: the barrier ends the log of its input."""
        rows = snapshot.logs.pop(input)
        self._drop_recorder(snapshot, input)
        stopped = m.StopRecording(snapshot.checkpoint_id, input, rows)
        self._step(snapshot, StageStep.BARRIER if snapshot.logs else StageStep.LOGS_COMPLETE)
        return [stopped] if snapshot.logs else [stopped, m.WriteLogs(snapshot.checkpoint_id)]

    def _durable(self, id: int, part: Part) -> list[Effect]:
        """A6, C4: acknowledge when the last part is durable."""
        snapshot = self._written(id)
        if snapshot is None:
            return []
        if part not in snapshot.undurable or (part is Part.LOGS and snapshot.logs):
            raise self._broken(
                f"checkpoint {id}: {part.value} durable, but not handed to the writer or durable already"
            )
        snapshot.undurable.discard(part)
        self._step(snapshot, StageStep.PART_DURABLE if snapshot.undurable else StageStep.ALL_DURABLE)
        return [] if snapshot.undurable else [m.Acknowledge(id)]

    def _give_up_skipped(self, input: InputId, id: int) -> list[Effect]:
        """A8: a barrier on an input that never brought an older one ends the older one here."""
        effects: list[Effect] = []
        for older in [s for s in self._snapshots.values() if s.checkpoint_id < id and s.awaits(input)]:
            detail = f"input {input!r} brought barrier {id} without {older.checkpoint_id}"
            effects.append(m.Decline(older.checkpoint_id, FailureReason.BARRIER_SKIPPED, detail))
            effects += self._give_up(older, StageStep.ABORT)
        return effects

    def _give_up(self, snapshot: Snapshot, step: StageStep) -> list[Effect]:
        id, frozen = snapshot.checkpoint_id, snapshot.frozen
        self._step(snapshot, step)
        for input in snapshot.logs:
            self._drop_recorder(snapshot, input)
        del self._snapshots[id]
        self._remember_aborted(id)
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

    def _end(self) -> list[Effect]:
        self._turn(PhaseStep.END)
        return [m.EndOfInput()]

    def _written(self, id: int) -> Snapshot | None:
        """The snapshot that a report of the writer is about; ``None`` if it was given up meanwhile."""
        snapshot = self._snapshots.get(id)
        if snapshot is None and id > self._newest_id:
            raise self._broken(f"the writer reports checkpoint {id}, which never began here")
        return snapshot

    def _drop_recorder(self, snapshot: Snapshot, input: InputId) -> None:
        self._recorders[input].remove(snapshot)
        if not self._recorders[input]:
            del self._recorders[input]

    def _remember_aborted(self, id: int) -> None:
        self._aborted[id] = None
        while len(self._aborted) > ABORTED_IDS_REMEMBERED:
            del self._aborted[min(self._aborted)]
