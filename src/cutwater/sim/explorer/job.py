"""One state of a small job: machines, channels and what is under way; and how the core's effects change it.

Rows are numbered per channel, as on real channels; what they contain is in ``history``, which is the truth about what
was sent.  Queues, logs and cuts hold numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Self

from cutwater.protocol import messages as m
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.loops import (
    LoopEvent,
    LoopReport,
    LoopReported,
    StartProbe,
    WaveCompleted,
    WaveFailed,
)
from cutwater.protocol.protocols import FreezeOn
from cutwater.protocol.reasons import CheckpointKind
from cutwater.sim.explorer.small import new_coordinator
from cutwater.sim.explorer.world import END, Barrier, Cut, Done, Item, JobWorld, rows_of
from cutwater.sim.world.oracle import Violation
from cutwater.trace import events as e


class JobState:
    """A state.  Steps work on a copy; what they do not touch is shared."""

    __slots__ = (
        "acks", "attempt", "committed", "completed", "control", "coordinator", "crashes", "cuts", "done", "emitted",
        "expiries", "final", "history", "inq", "logs", "machines", "monitor", "now", "open", "out", "probes",
        "publishing", "requests", "savepoints", "staged", "story", "taken", "timers", "urgent", "work", "world",
        "writes",
    )  # fmt: skip

    def __init__(self, world: JobWorld) -> None:
        self.world = world
        graph, budget = world.graph, world.budget
        self.requests, self.crashes, self.expiries = world.requests, budget.crashes, budget.expiries
        self.probes, self.savepoints = world.probes, world.savepoints
        self.now, self.attempt = 0.0, 1
        coordinator = new_coordinator(world.plant.coordinator, world.row, len(graph.tasks), graph.sources)
        self.coordinator = world.memo.number("coordinator", coordinator)
        self.done: Done | None = None
        self.completed: Hashable = None
        """Set by the step that completes a checkpoint: what there is to check."""
        self.story: list[e.Event] | None = None
        """The history for the independent checker, while a path is walked again."""
        self.history: list[tuple[int, ...]] = [() for _ in graph.channels]
        self.committed: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
        """Subtask, checkpoint, identities of rows."""
        self.begin()

    def begin(self) -> None:
        """All subtasks start, from the last completed checkpoint or from nothing."""
        world, done = self.world, self.done
        graph, tasks = world.graph, len(world.graph.tasks)
        cuts = dict(done.cuts) if done else {}
        self.final = False
        self.cuts: dict[tuple[int, int], Cut] = {}
        self.logs: dict[tuple[int, int], tuple[int, ...]] = {}
        """(checkpoint, channel) -> at the receiver; (checkpoint, -1 - channel) -> overtaken at the sender."""
        self.control: list[tuple[int, ...]] = [()] * tasks
        self.writes: list[tuple[int, ...]] = [()] * tasks
        self.acks: tuple[Any, ...] = ()
        self.publishing: tuple[int, ...] = ()  # checkpoint, is it a final one, does it go into the log
        self.timers: tuple[tuple[int, int], ...] = ()
        self.out: list[tuple[Item, ...]] = [()] * len(graph.channels)
        self.inq: list[tuple[Item, ...]] = [()] * len(graph.channels)
        self.urgent: list[tuple[Barrier, ...]] = [()] * len(graph.channels)
        self.taken = [0] * len(graph.channels)
        if done is None:
            self.history = [()] * len(graph.channels)
        for c in graph.channels if done else ():
            self._restore_channel(c.index, cuts[c.source], cuts[c.target], dict(done.logs))  # type: ignore[union-attr]
        self.emitted = [cuts[t].position if done else 0 for t in world.tasks]
        self.open: list[tuple[int, ...]] = [()] * tasks
        """Identities of rows that ended here since the last freeze."""
        self.staged: list[tuple[tuple[int, tuple[int, ...]], ...]] = [()] * tasks
        self.work: list[tuple[tuple[int, int], ...]] = [()] * tasks
        """What is made and has not left: channel and row, or ``HERE`` and the identity of a row that ends here."""
        for t, cut in cuts.items():  # T2
            self.commit(t, cut.staged, done.id if done else 0)
        self.machines = [world.memo.number(t, self._new_machine(t)) for t in world.tasks]
        self.monitor = world.memo.number("loops", world.plant.monitor(graph.loop_tasks)) if graph.cyclic else -1
        self.coordinate(cm.JobRunning(self.attempt, self.now))

    def _restore_channel(self, c: int, sender: Cut, receiver: Cut, logs: dict[int, tuple[int, ...]]) -> None:
        """The recorded rows come first; the sender goes on with the number of its cut."""
        sent, taken = dict(sender.outs)[c], dict(receiver.ins)[c]
        self.history[c] = self.history[c][:sent]
        self.taken[c] = min(sent, taken)
        self.inq[c] = (*logs.get(c, ()), *logs.get(-1 - c, ()))

    def _new_machine(self, task: int) -> Any:
        graph = self.world.graph
        return self.world.plant.machine(
            graph.names[task],
            graph.inputs[task],
            protocol=self.world.row,
            back_edges=graph.back.intersection(graph.inputs[task]),
            loop_inputs=graph.loop_inputs[task],
            last_checkpoint_id=self.world.memo.cores[self.coordinator].last_id,
        )

    def copy(self) -> Self:
        """A state that can be changed without changing this one."""
        new = object.__new__(type(self))
        new.world, new.now, new.attempt, new.final, new.done = self.world, self.now, self.attempt, self.final, self.done
        new.requests, new.crashes, new.expiries = self.requests, self.crashes, self.expiries
        new.probes, new.savepoints, new.coordinator = self.probes, self.savepoints, self.coordinator
        new.acks, new.publishing, new.timers, new.committed = self.acks, self.publishing, self.timers, self.committed
        new.monitor, new.completed, new.story = self.monitor, None, None
        new.history, new.taken, new.emitted = self.history[:], self.taken[:], self.emitted[:]
        new.open, new.staged, new.machines = self.open[:], self.staged[:], self.machines[:]
        new.control, new.writes, new.work = self.control[:], self.writes[:], self.work[:]
        new.out, new.inq, new.urgent = self.out[:], self.inq[:], self.urgent[:]
        new.cuts, new.logs = self.cuts.copy(), self.logs.copy()
        return new

    def key(self) -> Hashable:
        """Equal states have equal keys; nothing that may matter later is left out."""
        return (
            *self.machines, self.coordinator, self.monitor, *self.out, *self.inq, *self.urgent, *self.control,
            *self.writes, self.acks, self.publishing, self.timers, *self.history, *self.taken, *self.emitted,
            *self.open, *self.staged, *self.work, self.committed, frozenset(self.cuts.items()),
            frozenset(self.logs.items()), self.done, self.final, self.requests, self.crashes, self.expiries,
            self.probes, self.savepoints, self.attempt, self.now,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------- channels and output

    def next_row(self, channel: int) -> int:
        """Number of the next row that the sender sends."""
        return len(self.history[channel])

    def choices(self, task: int) -> int:
        """How many a subtask has made: not counted where everything goes back."""
        return 0

    def is_idle(self, task: int) -> bool:
        """It is not in the middle of work: what may freeze the state does not have to wait (A1)."""
        return not self.work[task]

    def emit(self, channel: int, row: int) -> int:
        """A row leaves its subtask; returns its number."""
        number = len(self.history[channel])
        self.history[channel] += (row,)
        self.send(channel, number)
        return number

    def send(self, channel: int, item: Item) -> None:
        if self.world.queued:
            self.out[channel] += (item,)
        else:
            self.arrive(channel, item)

    def arrive(self, channel: int, item: Item) -> None:
        """An item comes into the receiver's queue."""
        if self.world.row.switches and type(item) is Barrier and self.inq[channel]:
            event = m.BarrierWaits(channel, item.id, item.final, item.probe, item.savepoint)
            self.post(self.world.graph.channels[channel].target, event)
        self.inq[channel] += (item,)

    def post(self, task: int, event: m.Event) -> None:
        """An event for a subtask, to be heard after those before it."""
        self.control[task] += (self.world.memo.event(event),)

    def commit(self, task: int, staged: tuple[tuple[int, tuple[int, ...]], ...], id: int) -> None:
        """Pre-commits become visible; those that are so already stay so."""
        known = {(t, made_for) for t, made_for, _ in self.committed}
        fresh = [(task, made_for, rows) for made_for, rows in staged if (task, made_for) not in known]
        if fresh:
            self.committed = tuple(sorted((*self.committed, *fresh)))
            if self.story is not None:
                values = tuple(str(row) for *_, rows in fresh for row in rows)
                name = f"output of {self.world.graph.names[task]}"
                self.story.append(e.Committed(0.0, name, self.attempt, id, values))

    # ------------------------------------------------------------------------------------------- effects of a subtask

    def feed(self, task: int, event: int, rows: tuple[int, ...] = ()) -> None:
        """Let the machine of a subtask decide, and perform it.  ``rows``: what is in hand, or was overtaken."""
        self.machines[task], effects = self.world.memo.handle(self.machines[task], event)
        answers: list[m.Event] = []
        for effect in effects:
            perform = self._PERFORM.get(type(effect))
            if perform is not None:
                answer = perform(self, task, effect, rows)
                if answer is not None:
                    answers.append(answer)
        for answer in answers:
            self.feed(task, self.world.memo.event(answer))
        if self.world.budget.eager:
            while self.writes[task]:
                self.written(task)
            while self.acks:
                self.acknowledge(0)

    def written(self, task: int) -> None:
        """Something is durable."""
        event, *rest = self.writes[task]
        self.writes[task] = tuple(rest)
        self.feed(task, event)

    def acknowledge(self, number: int) -> None:
        """An acknowledgement or a refusal, any of those on their way, reaches the coordinator."""
        event, report = self.acks[number]
        self.acks = (*self.acks[:number], *self.acks[number + 1 :])
        if report is not None:
            self.watch_loops(LoopReported(event.checkpoint_id, event.subtask, report))
        self.coordinate(event)

    def _freeze(self, task: int, effect: m.Freeze, _: object) -> None:
        id, world = effect.checkpoint_id, self.world
        self.writes[task] += (world.memo.event(m.Durable(id)),)
        if effect.probe:
            return
        graph = world.graph
        if self.open[task]:
            self.staged[task] += ((id, self.open[task]),)
            self.open[task] = ()
        self.cuts[task, id] = Cut(
            self.emitted[task],
            tuple((c, self.taken[c]) for c in graph.inputs[task]),
            tuple((c, self.next_row(c)) for c in graph.outputs[task]),
            self.staged[task],
            self.choices(task),
            world.row.halts and not effect.savepoint,
        )
        if self.story is not None:
            self.story.append(e.Cut(0.0, graph.names[task], self.attempt, id))

    def _broadcast(self, task: int, effect: m.BroadcastBarrier, _: object) -> m.Event | None:
        id, graph = effect.checkpoint_id, self.world.graph
        found: list[tuple[int, tuple[int, ...]]] = []
        for c in graph.outputs[task]:
            end = self.next_row(c)
            left = rows_of(self.out[c]) if effect.overtake else ()
            barrier = Barrier(id, effect.final, effect.probe, end, end - len(left), effect.savepoint)
            if self.story is not None and not effect.probe:
                name = graph.channel_names[c]
                self.story.append(e.MarkerSent(0.0, graph.names[task], self.attempt, id, name, end))
            if effect.overtake:
                found.append((c, left))
                self.urgent[c] += (barrier,)
            else:
                self.send(c, barrier)
        if effect.overtake:
            return self._overtook(task, id, found, keep=not effect.probe)
        if self.world.row.switches and not (graph.outputs[task] and self.world.queued):
            self.post(task, m.BarriersSent(id))
        return None

    def _overtake(self, task: int, effect: m.Overtake, _: object) -> m.Event:
        found: list[tuple[int, tuple[int, ...]]] = []
        for c in self.world.graph.outputs[task]:
            items = self.out[c]
            place = _place(items, effect.checkpoint_id)
            if place is not None:
                left, barrier = rows_of(items[:place]), items[place]
                found.append((c, left))
                self.urgent[c] += (barrier._replace(reach=barrier.position - len(left)),)  # type: ignore[union-attr]
                self.out[c] = (*items[:place], *items[place + 1 :])
        return self._overtook(task, effect.checkpoint_id, found, keep=True)

    def _overtook(self, task: int, id: int, found: list[tuple[int, tuple[int, ...]]], *, keep: bool) -> m.Event:
        in_loop = self.world.graph.loop_outputs[task]
        for c, rows in found:
            if rows and keep:
                self.logs[id, -1 - c] = rows
        total = sum(len(rows) for _, rows in found)
        return m.RowsOvertaken(id, total, any(rows and c in in_loop for c, rows in found))

    def _expedite(self, task: int, effect: m.Expedite, _: object) -> None:
        c: Any = effect.input
        place = _place(self.inq[c], effect.checkpoint_id)
        if place is not None:
            items = self.inq[c]
            self.inq[c] = (*items[:place], *items[place + 1 :])
            self.urgent[c] += (items[place],)  # type: ignore[operator]

    def _watch(self, task: int, effect: m.WatchAlignment, _: object) -> m.Event | None:
        if self.world.budget.hasty and self.is_idle(task):
            return m.AlignmentTimeout(effect.checkpoint_id)
        self.timers += ((task, effect.checkpoint_id),)
        return None

    def _record(self, task: int, effect: m.Record, rows: tuple[int, ...]) -> None:
        c: Any = effect.input
        for id in effect.checkpoint_ids:
            self.logs[id, c] = (*self.logs.get((id, c), ()), *rows)

    def _stop_recording(self, task: int, effect: m.StopRecording, rows: tuple[int, ...]) -> None:
        if rows:
            self._record(task, m.Record(effect.input, (effect.checkpoint_id,)), rows)

    def _write_logs(self, task: int, effect: m.WriteLogs, _: object) -> None:
        self.writes[task] += (self.world.memo.event(m.LogsDurable(effect.checkpoint_id)),)

    def _acknowledge(self, task: int, effect: m.Acknowledge, _: object) -> None:
        report = LoopReport(effect.quiet, effect.outside_ended, effect.outside_ended) if self.monitor >= 0 else None
        self._tell(cm.AckReceived(effect.checkpoint_id, self.attempt, task, None, self.now), report)

    def _decline(self, task: int, effect: m.Decline, _: object) -> None:
        self._tell(cm.DeclineReceived(effect.checkpoint_id, self.attempt, task, effect.reason, self.now), None)

    def _tell(self, event: cm.AckReceived | cm.DeclineReceived, report: LoopReport | None) -> None:
        """They may overtake each other: kept in one order, whatever order they were sent in."""
        found = (*self.acks, (event, report))
        self.acks = tuple(sorted(found, key=lambda a: (a[0].subtask, a[0].checkpoint_id, type(a[0]).__name__)))

    def _forget(self, task: int, effect: m.Forget, _: object) -> None:
        graph, id = self.world.graph, effect.checkpoint_id
        self.cuts.pop((task, id), None)
        for c in (*graph.inputs[task], *(-1 - c for c in graph.outputs[task])):
            self.logs.pop((id, c), None)

    def _commit(self, task: int, effect: m.Commit, _: object) -> None:
        id = effect.checkpoint_id
        if self.done is None or id > self.done.id:
            raise Violation("early commit", f"{self.world.graph.names[task]} commits checkpoint {id}: not complete")
        self.commit(task, tuple(found for found in self.staged[task] if found[0] <= id), id)
        self.staged[task] = tuple(found for found in self.staged[task] if found[0] > id)

    def _end_of_input(self, task: int, effect: m.EndOfInput, _: object) -> None:
        for c in self.world.graph.outputs[task]:
            self.send(c, END)

    _PERFORM: ClassVar[dict[type, Callable[..., m.Event | None]]] = {
        m.Freeze: _freeze,
        m.BroadcastBarrier: _broadcast,
        m.Overtake: _overtake,
        m.Expedite: _expedite,
        m.WatchAlignment: _watch,
        m.Record: _record,
        m.StopRecording: _stop_recording,
        m.WriteLogs: _write_logs,
        m.Acknowledge: _acknowledge,
        m.Decline: _decline,
        m.Forget: _forget,
        m.Commit: _commit,
        m.EndOfInput: _end_of_input,
    }

    # ------------------------------------------------------------------------------------- effects of the coordinator

    def coordinate(self, event: cm.CoordinatorEvent) -> None:
        """Let the coordinator decide, and perform it."""
        memo = self.world.memo
        self.coordinator, effects = memo.handle(self.coordinator, memo.event(event))
        for effect in effects:
            match effect:
                case cm.SendTrigger(checkpoint_id=id, final=final, kind=kind, savepoint=savepoint):
                    everybody = self.world.row.freeze_on is FreezeOn.TRIGGER and not savepoint
                    for t in self.world.tasks if everybody else self.world.sources:
                        self.post(t, m.Trigger(id, final, kind is CheckpointKind.PROBE, savepoint))
                case cm.Publish(checkpoint_id=id, kind=kind):
                    self.publishing = (id, kind.final, kind.commits)
                case cm.NotifyComplete(checkpoint_id=id, commit=commit):
                    self.watch_loops(WaveCompleted(id, 0.0))
                    self._tell_everybody(m.CompleteNotice(id, commit))
                    self._drop(id)
                case cm.NotifyAborted(checkpoint_id=id, latest_completed=latest):
                    self.watch_loops(WaveFailed(id, 0.0))
                    self._tell_everybody(m.AbortNotice(id, latest))
                    self._drop(id)
                case _:
                    pass

    def _tell_everybody(self, event: m.Event) -> None:
        for t in self.world.tasks:
            self.post(t, event)

    def watch_loops(self, event: LoopEvent) -> None:
        """Let the monitor of the loops decide, and perform it."""
        if self.monitor < 0:
            return
        memo = self.world.memo
        self.monitor, effects = memo.handle(self.monitor, memo.event(event))
        for effect in effects:
            if isinstance(effect, StartProbe):
                self.coordinate(cm.RequestProbe(self.now))
            else:
                verdict = m.LoopVerdict(effect.checkpoint_id, effect.ended, effect.watermark)
                for t in sorted(self.world.graph.loop_tasks[effect.loop]):
                    self.post(t, verdict)

    def _drop(self, id: int) -> None:
        """Nobody looks at the parts of this checkpoint any more."""
        self.cuts = {k: v for k, v in self.cuts.items() if k[1] != id}
        self.logs = {k: v for k, v in self.logs.items() if k[0] != id}


def _place(items: tuple[Item, ...], id: int) -> int | None:
    return next((n for n, i in enumerate(items) if type(i) is Barrier and i.id == id), None)
