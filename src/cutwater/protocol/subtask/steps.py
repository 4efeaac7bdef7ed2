"""The transitions of a snapshot in a subtask: begin, freeze, switch, settle, acknowledge, give up.

The rules A1-A8, C2-C4 and CL1-CL5 (docs/rules.md) are named where they are carried out.
"""

from __future__ import annotations

from cutwater.protocol import messages as m
from cutwater.protocol.messages import Effect, InputId
from cutwater.protocol.protocols import PROTOCOLS, FreezeOn
from cutwater.protocol.reasons import FailureReason
from cutwater.protocol.subtask.stages import Part, PhaseStep, Snapshot, Stage, StageStep
from cutwater.protocol.subtask.state import IDS_REMEMBERED, SubtaskState


class SubtaskSteps(SubtaskState):
    """What events have in common; ``SubtaskMachine`` takes the events."""

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

    def _remember_done(self, id: int) -> None:
        _remember(self._done, id)


def _remember(ids: dict[int, None], id: int) -> None:
    ids[id] = None
    while len(ids) > IDS_REMEMBERED:
        del ids[min(ids)]
