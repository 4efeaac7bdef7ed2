"""Subtask machines, coordinator and loop monitor joined by fake links in one thread, in seeded random order.

The world performs effects literally and keeps its own books: what was sent and taken on each channel, where each
subtask's cut lies, what was durable, blocked, completed and committed when.  From these, never from the machines, it
decides whether a checkpoint is a consistent cut (sent before the sender's cut = taken before the receiver's cut + what
the snapshot holds of the channel, in order), whether rows came late, and whether every row reached the sinks' committed
output once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from cut_books import Books
from cut_graphs import Channel, Graph, Task
from cut_links import Barrier, Violation, rows_of, urgent

from cutwater.config import JobConfig
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Head
from cutwater.protocol.checkpoint import loops
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.reasons import CheckpointKind
from cutwater.protocol.subtask.loop import ReadSource, SubtaskLoop, TakeControl, TakeRows
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.watermarks import InputTime, WatermarkMerger

__all__ = ["Violation", "World"]

CAPACITY = 4
"""Rows waiting at the sender at which a channel is full (loop mode only)."""
NEVER, MAX = -(2**63), 2**63 - 1


class World(Books):
    """One run.

    Args:
        graph: subtasks and channels.
        seed: of every choice.
        protocol: name of the row.
        machine, coordinator, monitor, merger: the classes under test (or mutants of them).
        rows: rows per source.
        chaos: probability that a write or a publication fails.
        timeout_ms: of a checkpoint; an action takes about 0.2 ms, so that a short one aborts many.
        switch: probability that an alignment timeout, once due, comes next (unaligned); 1: at once.
        interval_ms: of checkpoints; 0: a short one.
        loop: let ``SubtaskLoop`` choose what a subtask does, over bounded channels.
    """

    def __init__(
        self,
        graph: Graph,
        seed: int,
        *,
        protocol: str = "aligned",
        machine: type[SubtaskMachine] = SubtaskMachine,
        coordinator: type[CheckpointCoordinator] = CheckpointCoordinator,
        monitor: type[loops.LoopMonitor] = loops.LoopMonitor,
        merger: type[WatermarkMerger] = WatermarkMerger,
        rows: int = 30,
        chaos: float = 0.0,
        timeout_ms: float = 1e9,
        switch: float = 0.3,
        loop: bool = False,
        interval_ms: float = 0.0,
    ) -> None:
        super().__init__(graph, protocol != "at_least_once")
        self.rng, self.protocol, self.chaos, self.switch, self.loop = random.Random(seed), protocol, chaos, switch, loop
        self.now = 0.0
        backs = {t: graph.back_edges & set(graph.inputs(t)) for t in graph.tasks}
        self.machines = {
            t: machine(
                f"{t[0]} {t[1]}",
                graph.inputs(t),
                protocol=PROTOCOLS[protocol],
                back_edges=backs[t],
                loop_inputs=graph.loop_inputs(t),
            )
            for t in graph.tasks
        }
        self.mergers = {t: merger(graph.inputs(t), backs[t], graph.loop_inputs(t)) for t in graph.tasks}
        self.loops = {t: SubtaskLoop(mach, graph.inputs(t), 5.0, 64) for t, mach in self.machines.items()}
        one = protocol in ("unaligned", "synchronous")
        settings = JobConfig(
            interval_ms=interval_ms or (20.0 if protocol == "synchronous" else 6.0),
            timeout_ms=timeout_ms,
            max_concurrent=1 if one else 2,
            tolerable_failed=10**9,
            protocol=protocol,
        )
        self.coordinator = coordinator(settings, frozenset(graph.tasks), graph.sources, 0)
        self.monitor = monitor(graph.loops)
        # what has been asked for and not been done
        self.control: dict[Task, deque[m.Event]] = {t: deque() for t in graph.tasks}
        self.reports: dict[Task, deque[Callable[[], Any]]] = {t: deque() for t in graph.tasks}
        self.writes: dict[Task, deque[m.Event]] = {t: deque() for t in graph.tasks}
        self.answers: dict[Task, deque[m.Event]] = {t: deque() for t in graph.tasks}
        self.watched: dict[Task, set[int]] = {t: set() for t in graph.tasks}
        self.unsent: dict[tuple[Task, int], set[Channel]] = {}
        self.publishing: deque[cm.Publish] = deque()
        self.time: dict[tuple[Task, int], tuple[bool, InputTime]] = {}
        """At the freeze: whether the last watermark had passed, and how far the inputs from outside were."""
        self.to_emit = dict.fromkeys(graph.sources, rows)
        self.to_fire = dict.fromkeys(graph.tasks, 2)
        """Timers per subtask: each makes a row when a watermark passes."""
        self.finished: set[Task] = set()
        self.ended = False

    # ------------------------------------------------------------------------------------------------------ running

    def run(self, max_steps: int = 60_000) -> World:
        """Until the final checkpoint is committed."""
        self.coordinate(cm.JobRunning(1, self.now))
        for _ in range(max_steps):
            actions = self.actions()
            if self.ended and not actions:
                break
            self.now += 1.2 / len(self.graph.tasks)
            if actions:
                self.rng.choice(actions)()
            due = [d for d in (self.coordinator.next_due_ms, self.monitor.next_due_ms) if d is not None]
            if due and (min(due) <= self.now or not actions):
                self.now = max(self.now, min(due))
                self.coordinate(cm.Tick(self.now))
                self.watch_loops(cm.Tick(self.now))
        else:
            raise Violation("the run does not end")
        self.check_all_committed()
        return self

    def actions(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for task in self.graph.tasks:
            due = [id for id in self.watched[task] if self.switch == 1 or self.rng.random() < self.switch * 0.1]
            if due:
                found.append(partial(self.time_out, task, due[0]))
            if self.switch == 1 and due:
                continue
            if self.loop:
                action = self.decide(task)
                if action is not None:
                    found.append(action)
            elif self.to_emit.get(task) and self.machines[task].may_read:
                found.append(partial(self.emit, task))
            if self.control[task]:
                found.append(partial(self.control_event, task))
            if self.reports[task]:
                found.append(lambda t=task: self.reports[t].popleft()())
            if self.writes[task]:
                found.append(partial(self.write, task))
            if self.answers[task]:
                found.append(partial(self.answer, task))
        for channel, link in self.links.items():
            if link.may_pass():
                found.append(partial(self.let_pass, channel))
            if not self.loop and link.queue and (urgent(link.head) or self.machines[channel[1]].can_take(channel)):
                found.append(partial(self.take, channel))
        if self.publishing:
            found.append(self.publish)
        return found

    def decide(self, task: Task) -> Callable[[], None] | None:
        inputs = self.graph.inputs(task)
        heads = [self.head(self.links[c].head) for c in inputs]
        full = any(sum(i[0] == "row" for i in self.links[c].waiting if not isinstance(i, Barrier)) >= CAPACITY
                   for c in self.graph.outputs(task) if c not in self.graph.back_edges)  # fmt: skip
        ready = bool(self.to_emit.get(task))
        action = self.loops[task].decide(heads, outputs_full=full, operator_pending=False, source_ready=ready)
        match action:
            case TakeControl(index):
                if heads[index] < Head.CONTROL:
                    raise Violation("control item announced where there is none")
                return partial(self.take, inputs[index])
            case TakeRows(index, _):
                if full or heads[index] is not Head.ROWS or Head.URGENT in heads:
                    raise Violation("rows taken with a full output, before an urgent barrier, or where there are none")
                return partial(self.take, inputs[index])
            case ReadSource():
                return partial(self.emit, task)
            case _:
                return None

    def head(self, item: Any) -> Head:
        if item is None:
            return Head.EMPTY
        if isinstance(item, Barrier):
            return Head.URGENT if item.urgent else Head.CONTROL
        return Head.ROWS if item[0] == "row" else Head.CONTROL

    # ------------------------------------------------------------------------------------------------------ actions

    def emit(self, task: Task) -> None:
        self.stands_still(task)
        self.to_emit[task] -= 1
        row = len(self.emitted)
        self.emitted.append(row)
        self.route(task, row, self.rng.randrange(6) if self.graph.back_edges else 99, False)
        if not self.to_emit[task]:
            self.advance(task, MAX)
            self.feed(task, m.SourceExhausted())
        elif self.rng.random() < 0.2:
            self.advance(task, row)

    def route(self, task: Task, row: int, hops: int, born: bool) -> None:
        """One row to one output; without outputs (or hops) it has arrived."""
        outputs = self.graph.outputs(task)
        if outputs and (hops > 0 or task in self.graph.sources):
            self.links[self.rng.choice(outputs)].send(("row", row, hops, born))
        else:
            self.uncommitted[task].append(row)

    def advance(self, task: Task, watermark: int | None) -> None:
        """A risen watermark makes timers fire, then goes on; not over back-edges."""
        if watermark is None:
            return
        while self.to_fire[task] and self.rng.random() < 0.3 and task not in self.graph.sources:
            self.to_fire[task] -= 1
            self.emitted.append(len(self.emitted))
            self.route(task, self.emitted[-1], self.rng.randrange(5), True)
        for channel in self.graph.outputs(task):
            if channel not in self.graph.back_edges:
                self.links[channel].send(("watermark", watermark))

    def let_pass(self, channel: Channel) -> None:
        link, (sender, task) = self.links[channel], channel
        item = link.let_pass()
        if not isinstance(item, Barrier):
            return
        unsent = self.unsent.get((sender, item.id))
        if unsent is not None:
            unsent.discard(channel)
            if not unsent:
                del self.unsent[sender, item.id]
                self.answers[sender].append(m.BarriersSent(item.id))
        if not item.urgent and link.head is not item:
            self.feed(task, m.BarrierWaits(channel, item.id, item.final, item.probe))

    def take(self, channel: Channel) -> None:
        task = channel[1]
        item, overtaken = self.links[channel].take()
        if not urgent(item):
            self.stands_still(task)
            if channel in self.blocked[task]:
                raise Violation(f"{channel} is blocked, but can be taken from (A3)")
        merger, recording = self.mergers[task], self.machines[task].recording(channel)
        match item:
            case Barrier():
                rows = rows_of(overtaken)
                time = any(not isinstance(i, Barrier) and i[0] == "watermark" for i in overtaken)
                event = m.BarrierTaken(
                    channel, item.id, item.final, item.probe, len(rows) if item.urgent else None, time
                )
                self.seen["overtaken at the receiver"] += len(rows)
                self.feed(task, event, rows)
            case ("row", row, hops, born):
                if not born and row <= merger.combined:
                    raise Violation(f"row {row} reaches {task} behind watermark {merger.combined} (W3)")
                if recording:
                    self.feed(task, m.RowsTaken(channel, 1), [row])
                self.route(task, row, hops - 1, born)
            case ("watermark", watermark):
                if recording:
                    self.feed(task, m.WatermarkTaken(channel))
                self.advance(task, merger.update(channel, watermark, False))
            case _:
                self.advance(task, merger.end(channel))
                self.feed(task, m.EndTaken(channel))
        self.want_probe(task)

    def want_probe(self, task: Task) -> None:
        merger, machine = self.mergers[task], self.machines[task]
        if merger.held or (merger.drained and machine.loop_open):
            self.reports[task].append(lambda: self.watch_loops(loops.ProbeWanted(task, self.now)))

    def stands_still(self, task: Task) -> None:
        if self.machines[task].halted:
            raise Violation(f"{task} does something, but everything stands still")

    def control_event(self, task: Task) -> None:
        event = self.control[task].popleft()
        if isinstance(event, m.AbortNotice):
            self.told_aborted.add((task, event.checkpoint_id))
        self.feed(task, event)
        if isinstance(event, m.CompleteNotice | m.AbortNotice):
            self.want_probe(task)

    def time_out(self, task: Task, id: int) -> None:
        self.watched[task].discard(id)
        self.feed(task, m.AlignmentTimeout(id))

    def answer(self, task: Task) -> None:
        """Of the performer: what was overtaken, or that barriers have left; and ``Durable`` of a probe."""
        event = self.answers[task].popleft()
        id = event.checkpoint_id  # type: ignore[union-attr]
        if isinstance(event, m.Durable):
            self.undurable[task, id].discard("state")
        if self.unsettled.get((task, id)) is type(event):
            del self.unsettled[task, id]
        self.feed(task, event)

    def write(self, task: Task) -> None:
        event = self.writes[task].popleft()
        id = event.checkpoint_id  # type: ignore[union-attr]
        if self.rng.random() < self.chaos:
            self.feed(task, m.WriteFailed(id, "disk full"))
        else:
            self.undurable[task, id].discard("state" if isinstance(event, m.Durable) else "logs")
            self.feed(task, event)

    def publish(self) -> None:
        effect = self.publishing.popleft()
        if self.rng.random() < self.chaos:
            self.coordinate(cm.PublishFailed(effect.checkpoint_id, "disk full", self.now))
        else:
            self.check_cut(effect.checkpoint_id)
            self.published.add(effect.checkpoint_id)
            self.coordinate(cm.Published(effect.checkpoint_id, self.now))

    # ------------------------------------------------------------------------------------------ performing effects

    def feed(self, task: Task, event: m.Event, rows: list[int] | None = None) -> None:
        """``rows``: those just taken, or overtaken by the barrier just taken."""
        machine = self.machines[task]
        effects = machine.handle(event)
        machine.validate()
        self.check_order(effects)
        for effect in effects:
            self.perform(task, effect, event, rows or [])
        for channel in self.graph.inputs(task):
            if machine.can_take(channel) != (channel not in self.blocked[task] and not machine.halted):
                raise Violation(f"{channel}: can_take and the effects disagree")

    def perform(self, task: Task, effect: m.Effect, event: m.Event, rows: list[int]) -> None:
        match effect:
            case m.Block(channel):
                self.blocked[task].append(channel)
                self.seen["blocked"] += 1
            case m.Unblock(channel):
                if self.blocked[task][0] != channel:
                    raise Violation(f"{task} unblocks {channel} before {self.blocked[task][0]} (A5)")
                self.blocked[task].pop(0)
            case m.Freeze(id, _, probe):
                self.freeze(task, id, probe)
                self.mergers[task].mark(id)
                self.time[task, id] = self.mergers[task].drained, self.mergers[task].outside
                (self.answers if probe else self.writes)[task].append(m.Durable(id))
            case m.BroadcastBarrier():
                self.broadcast(task, effect)
            case m.Overtake(id):
                self.seen["switched after the freeze"] += 1
                self.settle(task, id, {c: self.links[c].overtake(id) for c in self.graph.outputs(task)})
            case m.WatchAlignment(id):
                self.watched[task] |= {id} if self.switch else set()
            case m.Expedite(channel, id):
                self.seen["expedited"] += 1
                self.links[channel].expedite(id)
            case m.ReleaseWatermark(id, limit):
                self.seen["released"] += 1
                self.advance(task, self.mergers[task].release(id, limit))
            case m.Record(channel, ids):
                for id in ids:
                    self.logs[id, channel] += rows
                self.seen["recorded"] += len(rows)
            case m.StartRecording(id, _):
                self.undurable[task, id].add("logs")
            case m.StopRecording(id, channel, count):
                self.undurable[task, id].add("logs")
                if isinstance(event, m.BarrierTaken) and event.overtook is not None:
                    self.logs[id, channel] += rows
                if count != len(self.logs[id, channel]):
                    raise Violation(f"the log of {channel} holds {len(self.logs[id, channel])} rows, not {count}")
            case m.WriteLogs(id):
                if (task, id) in self.unsettled:
                    raise Violation(f"{task} writes its logs of {id} before all are known")
                self.writes[task].append(m.LogsDurable(id))
            case m.Acknowledge(id):
                if self.undurable[task, id] or (task, id) in self.unsettled:
                    raise Violation(f"{task} acknowledges {id} before it is durable (A6)")
                report = loops.LoopReport(effect.quiet, effect.outside_ended, *self.time[task, id])
                self.reports[task].append(lambda: self.acknowledge(task, id, report))
            case m.Decline(id, reason, _):
                self.seen[reason.code] += 1
                self.reports[task].append(lambda: self.coordinate(cm.DeclineReceived(id, 1, task, reason, self.now)))
            case m.Commit(id):
                self.commit(task, id)
            case m.EndOfInput():
                for channel in self.graph.outputs(task):
                    self.links[channel].send(("end",))
                self.reports[task].append(lambda: self.finish(task))
            case m.Forget():
                self.seen["forgotten"] += 1

    def broadcast(self, task: Task, effect: m.BroadcastBarrier) -> None:
        id, outputs = effect.checkpoint_id, self.graph.outputs(task)
        if task not in self.cuts[id]:
            raise Violation(f"{task} broadcasts barrier {id} before it froze (A4)")
        barriers = {c: Barrier(id, effect.final, effect.probe, effect.overtake) for c in outputs}
        if effect.overtake:
            self.settle(task, id, {c: self.links[c].send_first(b) for c, b in barriers.items()}, effect.probe)
            return
        for channel, barrier in barriers.items():
            self.links[channel].send(barrier)
        if self.protocol == "unaligned" and not (effect.final or effect.probe):
            self.unsettled[task, id] = m.BarriersSent
        if outputs:
            self.unsent[task, id] = set(outputs)
        else:
            self.answers[task].append(m.BarriersSent(id))

    def settle(self, task: Task, id: int, overtaken: dict[Channel, list[Any]], probe: bool = False) -> None:
        """The barriers have gone first in the outputs; what they overtook belongs to the snapshot."""
        self.unsettled[task, id] = m.RowsOvertaken
        if not probe:
            self.undurable[task, id].add("logs")
            for channel, items in overtaken.items():
                self.overtaken[id, channel] = rows_of(items)
        in_loop = any(items and c in self.graph.loop_inputs(c[1]) for c, items in overtaken.items())
        rows = sum(len(rows_of(items)) for items in overtaken.values())
        self.answers[task].append(m.RowsOvertaken(id, rows, in_loop))

    def acknowledge(self, task: Task, id: int, report: loops.LoopReport) -> None:
        self.acked[id].add(task)
        self.watch_loops(loops.LoopReported(id, task, report))
        self.coordinate(cm.AckReceived(id, 1, task, (task, id), self.now))

    def finish(self, task: Task) -> None:
        self.finished.add(task)
        if len(self.finished) == len(self.graph.tasks):
            self.coordinate(cm.RequestFinal(self.now))

    def coordinate(self, event: cm.CoordinatorEvent) -> None:
        effects = self.coordinator.handle(event)
        self.coordinator.validate()
        self.seen["concurrent"] += len(self.coordinator.pending) > 1
        for effect in effects:
            match effect:
                case cm.SendTrigger(id, kind, final):
                    everybody = self.protocol == "synchronous"
                    for task in sorted(self.graph.tasks if everybody else self.graph.sources):
                        self.control[task].append(m.Trigger(id, final, kind is CheckpointKind.PROBE))
                case cm.Publish(id):
                    if self.acked[id] != set(self.graph.tasks):
                        raise Violation(f"{id} is published without all acknowledgements")
                    self.publishing.append(effect)
                case cm.NotifyComplete(id, kind, commit):
                    if kind is CheckpointKind.PROBE:
                        self.seen["probes"] += 1
                    elif id not in self.published:
                        raise Violation(f"{id} is called complete before it is published")
                    self.seen["completed"] += kind is not CheckpointKind.PROBE
                    self.ended |= kind is CheckpointKind.FINAL
                    self.tell(m.CompleteNotice(id, commit))
                    self.watch_loops(loops.WaveCompleted(id, self.now))
                case cm.NotifyAborted(id, reason, latest):
                    if id in self.published:
                        raise Violation(f"{id} is aborted after it was published")
                    self.seen["aborted"] += 1
                    self.seen[f"aborted: {reason.code}"] += 1
                    self.tell(m.AbortNotice(id, latest))
                    self.watch_loops(loops.WaveFailed(id, self.now))
                case _:
                    pass

    def watch_loops(self, event: loops.LoopEvent) -> None:
        for effect in self.monitor.handle(event):
            match effect:
                case loops.StartProbe():
                    self.coordinate(cm.RequestProbe(self.now))
                case loops.SendVerdict(id, number, ended, watermark):
                    self.seen["quiet"] += 1
                    self.seen["loops ended"] += ended
                    self.check_quiet(id, self.graph.loops[number])
                    for task in self.graph.loops[number]:
                        self.control[task].append(m.LoopVerdict(id, ended, watermark))

    def tell(self, event: m.Event) -> None:
        for task in self.graph.tasks:
            self.control[task].append(event)
