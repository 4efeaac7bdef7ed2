"""One simulated subtask: the host of the product's ``SubtaskCore``, with rows that are numbers.

What it makes of rows leaves at once, or in slices, and then some things have to wait (A1).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Barrier, Rows, rows_in
from cutwater.protocol.subtask.core import Deferred, SubtaskCore
from cutwater.protocol.subtask.host import ChannelLog, LoopReport, SubtaskChannels
from cutwater.protocol.subtask.loop import SubtaskLoop
from cutwater.protocol.subtask.watermarks import InputTime
from cutwater.sim.schedules.graphs import MOOD_AT, key_of, row_time, source_row
from cutwater.sim.world.channels import Link
from cutwater.sim.world.disk import Part
from cutwater.sim.world.output import SinkWriter

if TYPE_CHECKING:
    from cutwater.sim.world.attempt import Attempt
    from cutwater.sim.world.worker import SimWorker

ROWS_PER_SLICE = 4
WATERMARK_EVERY = 8
TIME = -1
IN_SLICES = 3
"""Of four calls so many leave their work for later."""
ROWS_TOGETHER = 2
"""A slice has so many at most."""


class SimSubtask:
    """A running subtask of one attempt."""

    answered = keeps_rows = timers_pending = timers_due = source_idle = source_queued = False
    """Its steps call nobody outside, wait for no clock, and its sources are never quiet (``SubtaskHost``)."""
    room = None

    def __init__(self, worker: SimWorker, attempt: Attempt, task: int, part: Part | None) -> None:
        world = worker.world
        self.graph = graph = attempt.plan.graph
        self.world, self.worker, self.attempt, self.task = world, worker, attempt, task
        self.step, self.name = graph.tasks[task][0], graph.names[task]
        self.inputs: list[Link] = [attempt.links[c] for c in graph.inputs[task]]
        self.outputs: list[Link] = [attempt.links[c] for c in graph.outputs[task]]
        self.place_of: dict[Any, int] = {link.index: place for place, link in enumerate(self.inputs)}
        self._links = attempt.links
        self._moves, self._moody = graph.moves[task], graph.steps[self.step].moody
        self._slices = graph.steps[self.step].slices > 0
        self.reads = task in graph.sources
        self.positions = dict(part.positions) if part else dict.fromkeys(graph.splits.get(task, ()), 0)
        self.counts = dict(part.counts) if part else {}
        self.sign = part.sign if part else 0
        self.watermark = part.watermark if part else MIN_WATERMARK
        self.sink = (
            SinkWriter(world, task, attempt.number, part.pieces if part else ()) if task in graph.sinks else None
        )
        self.work: deque[tuple[int, int]] = deque()
        """What it has made and not sent: (channel, row), or (TIME, watermark)."""
        self._parts: dict[int, Part] = {}
        self._aborted: set[int] = set()
        self._undecided: set[int] = set()
        """Checkpoints, no savepoints, that it froze for and that have no outcome."""
        self._blocked: list[Any] = []
        self.awake = True
        """Something has changed since it last found nothing to do."""
        self.ready_ms = 0.0
        self._due_ms = float("inf")
        self._watches = world.row.switches
        self._seen: object = None
        self.running = False
        """All that begins with it is ready."""
        self.dropped = False
        """Its region, or the whole job, goes back; it does nothing any more."""
        self.behind = world.keeps_order and attempt.lineage != attempt.number
        """It sends again what receivers have."""
        self.core = self._make_core(part)
        self.machine = self.core.machine
        self.choices = world.choices_class(self, part)
        self.took, self.heard = self.choices.took, self.choices.heard
        self._tick = self.core.tick if self.core.performer.ticks else None
        for link in self.outputs:
            link.sender = self
        for link in self.inputs:
            link.receiver = self
            link.flush()

    def _make_core(self, part: Part | None) -> SubtaskCore:
        world, graph, task = self.world, self.graph, self.task
        inputs = graph.inputs[task]
        back = graph.back.intersection(inputs)
        machine = world.machine_class(
            self.name,
            inputs,
            protocol=world.row,
            back_edges=back,
            loop_inputs=graph.loop_inputs[task],
            last_checkpoint_id=self.attempt.first_id,
        )
        merger = world.merger_class(inputs, back, graph.loop_inputs[task])
        if part:
            times: dict[Any, InputTime] = {c: InputTime(time) for c, time in part.heard.items()}
            if world.keeps_order:  # an end that was taken before the cut is not in the log
                times |= dict.fromkeys(part.ended, InputTime(MAX_WATERMARK))
            merger.restore(times, part.watermark if self.inputs else MIN_WATERMARK)
        timeout_ms = world.settings.aligned_timeout_ms or 0.0
        if not timeout_ms and graph.sliced and world.draws.below(2):
            timeout_ms = 2 * world.latency()  # the barrier has left in its turn, and waits where work is done
        core = world.core_class(
            self,
            SubtaskChannels(
                [link.receiving for link in self.inputs],
                self.outputs,
                back,
                graph.loop_inputs[task],
                graph.loop_outputs[task],
            ),
            machine,
            SubtaskLoop(machine, inputs, 5.0, ROWS_PER_SLICE),
            merger,
            aligned_timeout_ms=timeout_ms,
            performer=world.performer_class,
        )
        self._watch(machine)
        return core

    def _watch(self, machine: Any) -> None:
        """Every event of the machine is followed by a look at its invariants, and at the order of unblocking (A5)."""
        handle, validate, seen = machine.handle, machine.validate, self.world.seen
        told = frozenset((m.Block, m.Unblock, m.Record, m.Expedite))

        def watched(event: m.Event) -> list[m.Effect]:
            effects = handle(event)
            validate()
            for effect in effects:
                if type(effect) not in told:
                    continue
                if type(effect) is m.Block:
                    seen["blocked"] += 1
                    self._blocked.append(effect.input)
                elif type(effect) is m.Unblock:
                    if not self._blocked or self._blocked.pop(0) != effect.input:
                        what = f"{self.name}: {effect.input} is not the first (A5)"
                        self.world.oracle.broken("unblocked out of order", what)
                elif type(effect) is m.Record:
                    seen["recorded"] += 1
                elif type(effect) is m.Expedite:
                    seen["expedited"] += 1
            return effects

        machine.handle = watched

    # ------------------------------------------------------------------------------------------------------ the loop

    def wake(self, _: object = None) -> None:
        """There may be something to do."""
        self.awake = True
        self.worker.wake()

    def act(self) -> bool:
        """One action; false if there is nothing to do."""
        core, choices = self.core, self.choices
        following = False
        if self._tick is not None:
            self._tick(self.world.now)
        if choices.behind:
            if not self.work and choices.catch_up():
                return True
            following = choices.following
        worked = core.act(following)
        if not worked:
            for out in self.outputs:
                if out.sending.watermark_unsent:
                    out.sending.flush_watermark()
            if following:  # the order of then need not fit into the places of now
                for link in self.inputs:
                    link.receiving.relieve()
        if self.behind:
            self.tell_if_caught_up()
        if self._watches:
            self._wake_when_due()
        return worked

    def _wake_when_due(self) -> None:
        due, now = self.core.performer.due_ms, self.world.now
        if now < due < self._due_ms or self._due_ms <= now < due < float("inf"):
            self._due_ms = due
            self.world.at(due, self.wake)

    def _wake_if_changed(self) -> None:
        """Something was heard that may have set it free."""
        now = self.machine.block_version, self.machine.phase, self.core.waits
        if now != self._seen or self._watches or self.machine.loop_first:
            self._seen = now
            self.wake()

    def start(self) -> None:
        """All subtasks of the attempt are ready.  Ends come again: none is in a snapshot (W5)."""
        self.running = True
        self.tell_if_caught_up()

    def survive(self, attempt: Attempt) -> None:
        """Others go back (R4): turn to the channels that they will use."""
        id = attempt.restored.checkpoint_id if attempt.restored else 0
        for place, link in enumerate(self.inputs):
            now = attempt.links[link.index]
            if now is not link:
                now.take_over_receiver(self)
                self.inputs[place] = now
        for place, link in enumerate(self.outputs):
            now = attempt.links[link.index]
            if now is not link:
                now.take_over_sender(self, id)
                self.outputs[place] = now
        self._links = attempt.links
        self.wake()

    def dissolve(self) -> None:
        """Cut the references that run in circles.  Nothing works afterwards."""
        for thing in (self.machine, self.core.performer, self.core, self.choices, self):
            vars(thing).clear()

    def outputs_hold(self, link: Link) -> bool:
        """It still sends into this channel, and not into one that goes on for it."""
        return any(out is link for out in self.outputs)

    def tell_if_caught_up(self) -> None:
        """No barrier may leave before the receivers have nothing that is still to be sent."""
        if self.behind and not self.choices.following and not any(link.behind for link in self.outputs):
            self.behind = False
            self.worker.tell("caught_up", self.attempt.number, self.task)

    # ------------------------------------------------------------------------------------------- what it hears

    def when_idle(self, event: Deferred) -> None:
        """An event that may freeze the state, or change the time: not in the middle of work (A1)."""
        self.core.when_idle(event)
        self.wake()

    def outcome(self, event: m.CompleteNotice | m.AbortNotice) -> None:
        """The coordinator says what became of a wave."""
        self.core.outcome(event)
        id = event.checkpoint_id
        self._parts.pop(id, None)
        self._undecided.discard(id)
        if type(event) is m.AbortNotice:
            self._aborted.add(id)
        self._wake_if_changed()

    # -------------------------------------------------------------------------------------- operators (SubtaskHost)

    @property
    def working(self) -> bool:
        return bool(self.work)

    @property
    def full(self) -> bool:
        full = False
        for link in self.outputs:  # no generator: this is asked before every step
            full = full or link.sending.full
        return full

    def process(self, index: int, rows: Rows) -> None:
        link = self.inputs[index]
        first, numbers = rows.first_row, rows.batch
        place = first - link.base
        if link.history[place : place + len(numbers)] != list(numbers):
            self.world.oracle.broken("fifo", f"{self.name} took {numbers} as rows {first}.. of {link.index}")
        self._process(link, first, numbers)
        self.core.loop.observe(len(numbers), 0.5)

    def _process(self, link: Link | None, first: int, rows: Any) -> None:
        world = self.world
        if self._undecided:
            self._check_not_halted()
        before, sign, moves, links, counts = self.sign, self.sign, self._moves, self._links, self.counts
        sink, work = self.sink, self.work
        later = self._slices and world.draws.below(4) > 3 - IN_SLICES
        sent = [out.sending.next_row for out in self.outputs]
        late = world.checks_lateness and self.core.merger.combined
        for row in rows:
            sign = (sign * 31 + row + 1) & 0xFFFFFFFFFFFF
            if link is not None:
                key = key_of(row)
                counts[key] = counts.get(key, 0) + 1
                if late is not False and row_time(row) < late:
                    world.oracle.broken("late row", f"{self.name} took a row of time {row_time(row)} after {late}")
            if sink is not None:
                sink.rows.append(row >> 4)
                continue
            made = moves[row | (sign >> 2 & 3) << MOOD_AT] if self._moody else moves[row]
            if later:
                work.extend(made)
            else:
                for channel, after in made:
                    links[channel].send(after)
        self.sign = sign
        self._sent(sent, (link.index, first, len(rows)) if link is not None else (), before)

    def resume(self) -> None:
        """Some of what was made leaves."""
        self._check_not_halted()
        sent = [out.sending.next_row for out in self.outputs]
        for _ in range(min(len(self.work), 1 + self.world.draws.below(ROWS_TOGETHER))):
            channel, row = self.work.popleft()
            if channel == TIME:
                for out in self.outputs:
                    out.flush_rows()
                self._advance(row)
            else:
                self._links[channel].send(row)
        self.world.seen["sent a slice"] += 1
        self.world.seen["waited for work"] += self.core.waits
        self._sent(sent, (), self.sign)

    def _sent(self, sent: list[int], took: tuple[int, ...], before: int) -> None:
        """A step is over: of every output the rows up to ``sent`` had left before it."""
        sends: list[tuple[int, int, int]] = []
        for out, first in zip(self.outputs, sent, strict=True):
            out.flush_rows()
            after = out.sending.next_row
            if after > first:
                sends.append((out.index, first, after - first))
        self.world.note("step", self.task, self.attempt.number, took, sends, before, self.sign)

    def _check_not_halted(self) -> None:
        if self.world.row.halts and self._undecided:
            what = f"{self.name} moves rows while {sorted(self._undecided)} are undecided"
            self.world.oracle.broken("not halted", what)

    def start_watermark(self, watermark: int) -> None:
        if self.work:
            self.work.append((TIME, watermark))
        else:
            self._advance(watermark)

    def _advance(self, watermark: int) -> None:
        if watermark <= self.watermark:
            return
        self.watermark = watermark
        for out in self.outputs:
            leaves = watermark == MAX_WATERMARK and out.index not in self.graph.loop_outputs[self.task]  # with the end
            if not (out.back or leaves):
                out.sending.offer_watermark(watermark)

    def fire_timers(self) -> None:
        """No step waits for a clock."""

    def offer_idle(self, idle: bool) -> None:
        """No source is ever quiet."""

    # ---------------------------------------------------------------------------------------------------- the source

    @property
    def source_ready(self) -> bool:
        return self.ready_ms <= self.world.now

    @property
    def exhausted(self) -> bool:
        """All of its splits are read, if it has any."""
        return self.source_ready and all(n >= self.world.schedule.rows for n in self.positions.values())

    def read(self, max_rows: int) -> bool:
        """The next rows, of the split that is furthest behind; up to where event time rises."""
        world, positions, rows = self.world, self.positions, list[int]()
        risen = False
        for _ in range(min(max_rows, 1 + world.draws.below(3))):
            split = min(positions, key=positions.__getitem__)
            if positions[split] >= world.schedule.rows or risen:
                break
            rows.append(source_row(split, positions[split], self.graph.cyclic))
            positions[split] += 1
            reached = min(positions.values())
            risen = positions[split] % WATERMARK_EVERY == 0 and reached == positions[split]
        self._process(None, 0, rows)
        if risen:
            self.start_watermark(min(positions.values()))
        self.ready_ms = world.now + world.schedule.pace_ms * (1 + world.draws.below(4))
        world.at(self.ready_ms, self.wake)
        return True

    # ----------------------------------------------------------------------------------------------------- snapshots

    def now_ms(self) -> float:
        return self.world.now

    def freeze(self, effect: m.Freeze) -> None:
        id, number = effect.checkpoint_id, self.attempt.number
        if id in self._aborted:
            self.world.oracle.broken("froze after the abort", f"{self.name} freezes for {id}, which was given up (A8)")
        if not effect.savepoint:
            self._undecided.add(id)
        self.world.note("cut", self.task, number, id, self.sign)
        part = self._parts[id] = Part(
            task=self.task,
            attempt=number,
            positions=dict(self.positions),
            counts=dict(self.counts),
            sign=self.sign,
            ins={link.index: link.receiving.next_row for link in self.inputs},
            outs={link.index: link.sending.next_row for link in self.outputs},
            choice=self.choices.mark,
            watermark=self.watermark,
            heard={link.index: link.receiving.watermark for link in self.inputs},
            said={link.index: link.sending.watermark for link in self.outputs},
            ended=self.machine.ended,
            has_ended=self.core.finished,
            files=[f"{id}/{self.task}-{number}"],
        )
        if self.sink is not None:
            part.pieces = self.sink.freeze(id, effect.final)
            part.handles = list(self.sink.handles.values())

    def hand_over(self, checkpoint_id: int, logs_follow: bool) -> None:
        self._write(checkpoint_id, self._parts[checkpoint_id].files[0], m.Durable(checkpoint_id))

    def write_logs(self, checkpoint_id: int, logs: list[ChannelLog]) -> None:
        part = self._parts[checkpoint_id]
        for log in logs:
            (part.logs if log.side == "receiver" else part.overtaken)[log.channel] = log.items
        part.files.append(f"{checkpoint_id}/{self.task}-{self.attempt.number}-logs")
        self._write(checkpoint_id, part.files[-1], m.LogsDurable(checkpoint_id))

    def _write(self, id: int, name: str, durable: m.Event) -> None:
        worker = self.worker

        def done(error: str) -> None:
            worker.post(lambda: self._wrote(id, error, durable))

        self.world.disk.write(worker, name, done)

    def _wrote(self, id: int, error: str, durable: m.Event) -> None:
        if not self.dropped:
            self.core.handle(m.WriteFailed(id, error) if error else durable)
            self._wake_if_changed()

    def commit(self, checkpoint_id: int) -> None:
        if self.sink is not None:
            self.sink.commit(checkpoint_id)

    def forget(self, checkpoint_id: int) -> None:
        self._parts.pop(checkpoint_id, None)
        self._undecided.discard(checkpoint_id)

    # -------------------------------------------------------------------------------------------------- coordination

    def acknowledge(self, checkpoint_id: int, report: LoopReport | None) -> None:
        part = self._parts.get(checkpoint_id)
        known = self.choices.known.copy() if self.world.keeps_order and report is not None else None
        self.worker.tell("ack", self.attempt.number, checkpoint_id, self.task, part, report, known)

    def decline(self, effect: m.Decline) -> None:
        self.worker.tell("decline", self.attempt.number, effect.checkpoint_id, self.task, effect.reason, effect.detail)

    def finished(self) -> None:
        self.worker.tell("finished", self.attempt.number, self.task)

    def probe_wanted(self) -> None:
        self.worker.tell("probe", self.attempt.number, self.task)

    # ---------------------------------------------------------------------------------------------- choices and trace

    def follow(self) -> bool:
        self.choices.make_own()
        return True

    def barrier_taken(self, index: int, barrier: Barrier) -> None:
        link, overtaken = self.inputs[index], rows_in(barrier.overtaken)
        self.world.seen["overtook at the receiver"] += bool(overtaken)
        if not barrier.probe:
            position = link.receiving.next_row + overtaken + barrier.behind
            self.world.note("marker taken", self.task, self.attempt.number, barrier.checkpoint_id, link.index, position)

    def barrier_leaves(self, effect: m.BroadcastBarrier) -> None:
        if not effect.probe:
            for link in self.outputs:
                position = link.sending.next_row
                self.world.note(
                    "marker sent", self.task, self.attempt.number, effect.checkpoint_id, link.index, position
                )
