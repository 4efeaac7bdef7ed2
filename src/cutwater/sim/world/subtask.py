"""One simulated subtask: performs what the core decides, with rows that are numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutwater.data.time import MAX_WATERMARK
from cutwater.protocol import messages as m
from cutwater.protocol.replay.determinants import CONTROL
from cutwater.protocol.subtask.host import LoopReport
from cutwater.protocol.subtask.loop import Follow, ReadSource, Resume, TakeControl, TakeRows
from cutwater.protocol.subtask.watermarks import InputTime
from cutwater.sim.schedules.graphs import source_row
from cutwater.sim.world.channels import BARRIER, END, SENDER_FULL, WATERMARK, Item, Link
from cutwater.sim.world.subtask_state import ROWS_PER_SLICE, Part
from cutwater.sim.world.working import WorkingSubtask

if TYPE_CHECKING:
    from cutwater.sim.world.attempt import Attempt
    from cutwater.sim.world.worker import SimWorker

_NO_HEADS: list[int] = []
WATERMARK_EVERY = 8


class SimSubtask(WorkingSubtask):
    """A running subtask of one attempt."""

    def __init__(self, worker: SimWorker, attempt: Attempt, task: int, part: Part | None) -> None:
        super().__init__(worker, attempt, task, part)
        for link in self.outputs:
            link.sender = self
        for link in self.inputs:
            link.receiver = self
            link.flush()

    # ------------------------------------------------------------------------------------------------------ the loop

    def wake(self, _: object = None) -> None:
        """There may be something to do."""
        self.awake = True
        self.worker.wake()

    def act(self) -> bool:
        """One action; false if there is nothing to do."""
        pending = bool(self.work)
        if self._waiting:
            return self._make_way()
        if self._ending and not self.finished:
            return self._end()
        ready, heads = False, _NO_HEADS
        if self._is_source:
            if self._ending:
                return False
            ready = self.ready_ms <= self.world.now
            if ready and not pending and self.exhausted and not self.machine.halted:
                self.handle(m.SourceExhausted())
                return True
        else:
            heads = [link.head() if link.queue or link.urgent else 0 for link in self.inputs]
            if not (any(heads) or self.behind or pending):
                return False
        full = False
        for link in self.outputs:
            if link.rows_out >= SENDER_FULL and not link.back:
                full = True
        rows = self.loop_rows
        action = self.loop.decide(
            heads, outputs_full=full, operator_pending=pending, source_ready=ready, loop_rows=rows
        )
        kind = type(action)
        if kind is TakeRows:
            self._take_rows(self.inputs[action.input], action.max_rows)  # type: ignore[union-attr]
        elif kind is TakeControl:
            link = self.inputs[action.input]  # type: ignore[union-attr]
            if link.urgent:
                self._take_urgent(link)
            else:
                self._take_control(link)
        elif kind is ReadSource:
            self._read(action.max_rows)  # type: ignore[union-attr]
        elif kind is Resume:
            self._resume()
        elif kind is Follow:
            self.hear_again()
        else:
            return False
        return True

    def start(self) -> None:
        """All subtasks of the attempt are ready.  Ends come again: none is in a snapshot (W5)."""
        self.running = True
        self.tell_if_caught_up()
        self._want_probe()

    def _take_rows(self, link: Link, most: int) -> None:
        first = link.taken
        self.merger.rows(link.index)
        rows = link.take_rows(min(most, 1 + self.world.draws.below(ROWS_PER_SLICE)))
        start = first - link.base
        if link.history[start : start + len(rows)] != rows:
            self.world.judge.broken("fifo", f"{self.name} took {rows} as rows {first}.. of {link.index}")
        if self.machine.recording(link.index):
            self.handle(m.RowsTaken(link.index, len(rows)), rows)
        self.chose(link, len(rows))
        self._process(link, first, rows)
        self.loop.observe(len(rows), 0.5)

    def _take_control(self, link: Link) -> None:
        item = link.take_control()
        kind = item[0]
        before = self.heard_of_time()
        if kind == BARRIER:
            if not item[3]:
                self.world.note("marker taken", self.task, self.attempt.number, item[1], link.index, link.taken)
            self.handle(m.BarrierTaken(link.index, item[1], item[2], item[3], savepoint=item[5]))
        elif kind == WATERMARK:
            if self.machine.recording(link.index):
                self.handle(m.WatermarkTaken(link.index), [item])
            if not link.back:
                self._advance(self.merger.update(link.index, item[1], False))
                self._want_probe()
        else:
            if not link.back:
                self._advance(self.merger.end(link.index))
            self.handle(m.EndTaken(link.index))
            self._want_probe()
        if self.order is not None and self.heard_of_time() != before:
            self.chose(link, CONTROL)
        self.tell_if_caught_up()

    def _take_urgent(self, link: Link) -> None:
        barrier, left = link.take_urgent()
        rows = sum(type(item) is int for item in left)
        _, id, final, probe, position, *_ = barrier
        if not probe:
            self.world.note("marker taken", self.task, self.attempt.number, id, link.index, position)
        self.world.seen["overtook at the receiver"] += bool(rows)
        self.handle(m.BarrierTaken(link.index, id, final, probe, rows, len(left) > rows), left)

    def barrier_waits(self, link: Link, barrier: tuple[Any, ...]) -> None:
        """A barrier lies behind other items in the input."""
        _, id, final, probe, _, savepoint, *_ = barrier
        self.worker.post(lambda: self._if_current(m.BarrierWaits(link.index, id, final, probe, savepoint)))

    def barrier_left(self, id: int) -> None:
        """A barrier that goes in its turn has left an output queue."""
        if not any(link.holds_barrier(id) for link in self.outputs):
            self.worker.post(lambda: self._if_current(m.BarriersSent(id)))

    def _if_current(self, event: m.Event) -> None:
        if not self.dropped:
            self.handle(event)

    def outcome(self, event: m.CompleteNotice | m.AbortNotice) -> None:
        """The coordinator says what became of a wave."""
        self.handle(event)
        id = event.checkpoint_id
        self._times.pop(id, None)
        self._parts.pop(id, None)
        if type(event) is m.AbortNotice:
            self._aborted.add(id)
        self._asked = False
        self._want_probe()

    @property
    def exhausted(self) -> bool:
        """All of its splits are read, if it has any."""
        return all(position >= self.world.schedule.rows for position in self.positions.values())

    def _read(self, most: int) -> None:
        """The next rows, of the split that is furthest behind; up to where event time rises."""
        world, positions, rows = self.world, self.positions, list[int]()
        risen = False
        for _ in range(min(most, 1 + world.draws.below(3))):
            split = min(positions, key=positions.__getitem__)
            if positions[split] >= world.schedule.rows or risen:
                break
            rows.append(source_row(split, positions[split], self.graph.cyclic))
            positions[split] += 1
            reached = min(positions.values())
            risen = positions[split] % WATERMARK_EVERY == 0 and reached == positions[split]
        self._process(None, 0, rows)
        if risen:
            self._advance_behind_work(min(positions.values()))
        self.ready_ms = world.now + world.schedule.pace_ms * (1 + world.draws.below(4))
        world.at(self.ready_ms, self.wake)

    def _end(self) -> bool:
        self._advance(MAX_WATERMARK)
        for out in self.outputs:
            out.send_control((END,))
        self.finished = True
        if self.behind:
            self.tell_if_caught_up()
        self.worker.tell("finished", self.attempt.number, self.task)
        return True

    # -------------------------------------------------------------------------------------------------- the protocol

    def handle(self, event: m.Event, rows: list[Any] | None = None) -> None:
        """Feed the machine and perform what it asks for."""
        machine, effects = self.machine, self.machine.handle(event)
        if machine.block_version != self._seen_version or machine.phase is not self._seen_phase:
            self._seen_version, self._seen_phase = machine.block_version, machine.phase
            self.awake = True
        machine.validate()
        for effect in effects:
            getattr(self, _PERFORM[type(effect)])(effect, rows)
        while self._answers:
            self.handle(self._answers.pop(0))

    def _block(self, effect: m.Block, _: object) -> None:
        self.world.seen["blocked"] += 1
        self._blocked.append(effect.input)

    def _unblock(self, effect: m.Unblock, _: object) -> None:
        """The loop asks the machine itself; here only the order is looked at (A5)."""
        if not self._blocked or self._blocked.pop(0) != effect.input:
            self.world.judge.broken("unblocked out of order", f"{self.name}: {effect.input} is not the first (A5)")

    def _freeze(self, effect: m.Freeze, _: object) -> None:
        id, number = effect.checkpoint_id, self.attempt.number
        if id in self._aborted:
            self.world.judge.broken("froze after the abort", f"{self.name} freezes for {id}, which was given up (A8)")
        self.merger.mark(id)
        self._times[id] = self.merger.drained, self.merger.outside, effect.savepoint
        if effect.probe:
            self.worker.post(lambda: self._if_current(m.Durable(id)))
            return
        self.world.note("cut", self.task, number, id, self.sign)
        part = Part()
        part.task, part.attempt, part.positions = self.task, number, dict(self.positions)
        part.counts, part.sign = dict(self.counts), self.sign
        part.ins = {link.index: link.taken for link in self.inputs}
        part.outs = {link.index: link.sent for link in self.outputs}
        if self.order is not None:
            part.items = {link.index: (link.serial, link.items) for link in self.inputs}
            part.kept = {link.index: (link.serial, len(link.kept)) for link in self.outputs}
            part.choice = self.attempt.lineage, self.order.position
        part.watermark = self.watermark
        part.heard = {link.index: link.heard for link in self.inputs}
        part.said = {link.index: link.said for link in self.outputs}
        part.ended, part.has_ended = self.machine.ended, self.finished
        part.logs, part.overtaken = {}, {}
        part.pieces, part.handles = (), []
        if self.sink is not None:
            part.pieces = self.sink.freeze(id, effect.final)
            part.handles = list(self.sink.handles.values())
        part.files = [f"{id}/{self.task}-{number}"]
        self._parts[id] = part
        self._write(id, part.files[0], m.Durable(id))

    def _write(self, id: int, name: str, durable: m.Event) -> None:
        worker = self.worker

        def done(error: str) -> None:
            worker.post(lambda: self._wrote(id, error, durable))

        self.world.disk.write(worker, name, done)

    def _wrote(self, id: int, error: str, durable: m.Event) -> None:
        if not self.dropped:
            self.handle(m.WriteFailed(id, error) if error else durable)

    def _broadcast(self, effect: m.BroadcastBarrier, _: object) -> None:
        id = effect.checkpoint_id
        kind = (BARRIER, id, effect.final, effect.probe)
        for link in self.outputs:
            if not effect.probe:
                self.world.note("marker sent", self.task, self.attempt.number, id, link.index, link.sent)
        if effect.overtake:
            self._overtaken(id, [(link, link.send_urgent((*kind, link.sent, False))) for link in self.outputs])
            return
        for link in self.outputs:
            link.send_control((*kind, link.sent, effect.savepoint))
        if not self.outputs and self.world.row.switches:
            self.worker.post(lambda: self._if_current(m.BarriersSent(id)))

    def _overtake(self, effect: m.Overtake, _: object) -> None:
        id = effect.checkpoint_id
        found = [(link, link.overtake(id)) for link in self.outputs]
        self._overtaken(id, [(link, left) for link, left in found if left is not None])

    def _overtaken(self, id: int, found: list[tuple[Link, list[Item]]]) -> None:
        rows, in_loop = 0, False
        part = self._parts.get(id)
        for link, left in found:
            if left and part is not None:
                part.overtaken[link.index] = left
            rows += sum(type(item) is int for item in left)
            in_loop |= bool(left) and link.index in self._in_loop
        self.world.seen["overtook at the sender"] += bool(rows)
        self._answers.append(m.RowsOvertaken(id, rows, in_loop))

    def _expedite(self, effect: m.Expedite, _: object) -> None:
        self._links[effect.input].expedite(effect.checkpoint_id)  # type: ignore[index]
        self.world.seen["expedited"] += 1
        self.wake()

    def _watch(self, effect: m.WatchAlignment, _: object) -> None:
        timeout_ms = self.world.settings.aligned_timeout_ms or 0.0
        if not timeout_ms and self.graph.sliced and self.world.draws.below(2):
            timeout_ms = 2 * self.world.latency()  # the barrier has left in its turn, and waits where work is done

        def fire(_: object) -> None:
            self.worker.post(timeout)

        def timeout() -> None:
            if not self.dropped:
                self.when_idle(m.AlignmentTimeout(effect.checkpoint_id))

        if timeout_ms:
            self.world.after(timeout_ms, fire)
        elif self.work:
            timeout()
        else:
            self._answers.append(m.AlignmentTimeout(effect.checkpoint_id))

    def _release(self, effect: m.ReleaseWatermark, _: object) -> None:
        self._advance(self.merger.release(effect.checkpoint_id, effect.watermark))

    def _start_recording(self, effect: m.StartRecording, _: object) -> None:
        log = self._parts[effect.checkpoint_id].logs[effect.input] = []  # type: ignore[index]
        self._logs.setdefault(effect.input, {})[effect.checkpoint_id] = log  # type: ignore[arg-type]

    def _record(self, effect: m.Record, items: list[Item] | None) -> None:
        logs = self._logs[effect.input]  # type: ignore[index]
        for id in effect.checkpoint_ids:
            logs[id].extend(items or ())
        self.world.seen["recorded"] += 1

    def _stop_recording(self, effect: m.StopRecording, overtaken: list[Item] | None) -> None:
        id, input = effect.checkpoint_id, effect.input
        log = self._logs.get(input, {}).pop(id, None)  # type: ignore[call-overload]
        if log is None:
            log = self._parts[id].logs[input] = []  # type: ignore[index]
        log.extend(overtaken or ())
        if sum(type(item) is int for item in log) != effect.rows:
            self.world.judge.broken("log", f"{self.name}: {effect} for {log}")

    def _write_logs(self, effect: m.WriteLogs, _: object) -> None:
        id = effect.checkpoint_id
        part = self._parts[id]
        part.files.append(f"{id}/{self.task}-{self.attempt.number}-logs")
        self._write(id, part.files[-1], m.LogsDurable(id))

    def _acknowledge(self, effect: m.Acknowledge, _: object) -> None:
        id = effect.checkpoint_id
        part = self._parts.get(id)
        report = LoopReport(effect.quiet, effect.outside_ended, *self._times.get(id, (False, InputTime(), False))[:2])
        known = self.known.copy() if self.world.keeps_order and self._in_loop else None
        self.worker.tell("ack", self.attempt.number, id, self.task, part, report, known)

    def _decline(self, effect: m.Decline, _: object) -> None:
        self.worker.tell("decline", self.attempt.number, effect.checkpoint_id, self.task, effect.reason, effect.detail)

    def _forget(self, effect: m.Forget, _: object) -> None:
        id = effect.checkpoint_id
        self._parts.pop(id, None)
        self._times.pop(id, None)
        for logs in self._logs.values():
            logs.pop(id, None)

    def _commit(self, effect: m.Commit, _: object) -> None:
        if self.sink is not None:
            self.sink.commit(effect.checkpoint_id)

    def _end_of_input(self, effect: m.EndOfInput, _: object) -> None:
        self._ending = True


_PERFORM: dict[type, str] = {
    m.Block: "_block",
    m.Unblock: "_unblock",
    m.Freeze: "_freeze",
    m.BroadcastBarrier: "_broadcast",
    m.Overtake: "_overtake",
    m.Expedite: "_expedite",
    m.WatchAlignment: "_watch",
    m.ReleaseWatermark: "_release",
    m.StartRecording: "_start_recording",
    m.Record: "_record",
    m.StopRecording: "_stop_recording",
    m.WriteLogs: "_write_logs",
    m.Acknowledge: "_acknowledge",
    m.Decline: "_decline",
    m.Forget: "_forget",
    m.Commit: "_commit",
    m.EndOfInput: "_end_of_input",
}
