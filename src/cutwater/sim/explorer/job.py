"""A state of a small job: machines, channels and what is under way; and every step that may come next.

Rows are numbered per channel, as on real channels; what they contain is in ``history``, which is the truth about what
was sent.  Queues, logs and cuts hold numbers only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Self

from cutwater.protocol import messages as m
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.loops import ProbeWanted
from cutwater.protocol.protocols import CheckpointKind
from cutwater.sim.explorer.effects import acknowledge, coordinate, feed, watch_loops, written
from cutwater.sim.explorer.scopes import make_scope
from cutwater.sim.explorer.world import (
    END,
    HERE,
    Action,
    Barrier,
    Cut,
    Done,
    Item,
    JobWorld,
    new_coordinator,
    rows_of,
    tell_completed,
)
from cutwater.sim.schedules.graphs import source_row
from cutwater.sim.world.oracle import Violation
from cutwater.trace import events as e

EXPIRY_MS = 2000.0
PROBE_MS = 1e6
"""Later than any pause before a probe."""


class JobState:
    """A state.  A step changes the state that it is called on; what a step does not touch is shared with copies."""

    __slots__ = (
        "acks", "attempt", "committed", "completed", "control", "coordinator", "crashes", "cuts", "done", "emitted",
        "expiries", "final", "history", "inq", "logs", "machines", "monitor", "now", "open", "out", "probes",
        "publishing", "requests", "savepoints", "scope", "staged", "story", "taken", "timers", "urgent", "work",
        "world", "writes",
    )  # fmt: skip

    def __init__(self, world: JobWorld) -> None:
        self.world = world
        graph, budget = world.graph, world.budget
        self.requests, self.crashes, self.expiries = world.requests, budget.crashes, budget.expiries
        self.probes, self.savepoints = world.probes, world.savepoints
        self.now, self.attempt = 0.0, 1
        coordinator = new_coordinator(world.mutant.coordinator, world.row, len(graph.tasks), graph.sources)
        self.coordinator = world.memo.number("coordinator", coordinator)
        self.done: Done | None = None
        self.completed: Hashable = None
        """Set by the step that completes a checkpoint: what there is to check."""
        self.scope = make_scope(world.graph, world.recovery)
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
            self.restore_channel(c.index, cuts[c.source], cuts[c.target], dict(done.logs))  # type: ignore[union-attr]
        self.emitted = [cuts[t].position if done else 0 for t in world.tasks]
        self.open: list[tuple[int, ...]] = [()] * tasks
        """Identities of rows that ended here since the last freeze."""
        self.staged: list[tuple[tuple[int, tuple[int, ...]], ...]] = [()] * tasks
        self.work: list[tuple[tuple[int, int], ...]] = [()] * tasks
        """Rows that are made and have not left: channel and row, or ``HERE`` and the identity of one that ends here."""
        for t, cut in cuts.items():  # T2
            self.commit(t, cut.staged, done.id if done else 0)
        self.machines = [world.memo.number(t, self.new_machine(t)) for t in world.tasks]
        self.monitor = world.memo.number("loops", world.mutant.monitor(graph.loop_tasks)) if graph.cyclic else -1
        coordinate(self, cm.JobRunning(self.attempt, self.now))
        self.scope.begin(self)

    def restore_channel(self, c: int, sender: Cut, receiver: Cut, logs: dict[int, tuple[int, ...]]) -> None:
        """The recorded rows come first; the sender goes on with the number of its cut."""
        sent, taken = dict(sender.outs)[c], dict(receiver.ins)[c]
        self.history[c] = self.history[c][:sent]
        self.taken[c] = min(sent, taken)
        self.inq[c] = (*logs.get(c, ()), *logs.get(-1 - c, ()))

    def new_machine(self, task: int) -> Any:
        graph = self.world.graph
        return self.world.mutant.machine(
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
        new.monitor, new.completed, new.story, new.scope = self.monitor, None, None, self.scope.copy()
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
            self.probes, self.savepoints, self.attempt, self.now, *self.scope.key(),
        )  # fmt: skip

    @property
    def exactly(self) -> bool:
        """Nothing may be committed twice."""
        return self.world.exactly

    def header(self) -> e.Header:
        """The first line of a trace of this job."""
        graph = self.world.graph
        ends = [(graph.names[c.source], graph.names[c.target]) for c in graph.channels]
        links = tuple(e.Link(name, *pair) for name, pair in zip(graph.channel_names, ends, strict=True))
        return e.Header(tuple(graph.names), links, title=f"{graph.name}, {self.world.row.name}", marked=True)

    # ------------------------------------------------------------------------------------------- channels and output

    def is_idle(self, task: int) -> bool:
        """It is not in the middle of work: what may freeze the state does not have to wait (A1)."""
        return not self.work[task]

    def send(self, channel: int, item: Item) -> None:
        """An item goes into a channel; a second end of data does not."""
        if item == END and self.scope.has_end(self, channel):
            return
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

    # ------------------------------------------------------------------------------------------------- what may come

    def actions(self) -> tuple[list[Action], list[Action]]:
        """Steps that may come next: of what is under way; and from outside, requests, a crash, an expiry."""
        found: list[Action] = []
        world, machines = self.world, self.machines
        known = [world.known(n) for n in machines]
        for t in world.sources:
            if known[t][0] and not known[t][2] and not self.work[t]:
                found.append(("read", t))
        for spec in world.graph.channels:
            c = spec.index
            if self.out[c]:
                found.append(("deliver", c))
            if self.work[spec.target]:
                continue
            if self.urgent[c]:
                found.append(("take urgent", c))
            elif self.inq[c] and c in known[spec.target][1] and self.scope.may_take(self, c):
                found.append(("take", c))
        for t in world.tasks:
            if self.work[t]:
                found.append(("slice", t))
            if self.control[t] and self._may_hear(t):
                found.append(("hear", t))
                if world.budget.crossing and self._may_cross(t):
                    found.append(("hear second", t))
            if self.writes[t]:
                found.append(("durable", t))
        found += [("acknowledge", n) for n in range(len(self.acks))]
        found += [("timeout", *timer) for timer in self.timers if self.is_idle(timer[0])]
        if self.publishing:
            found.append(("publish",))
        if not self.final and all(k[2] for k in known):
            found.append(("final",))
        wanted = bool(world.heads) and any(self._wants_probe(t) for t in world.heads)
        if not found and wanted:
            found.append(("probe", 0))  # nothing else moves: sooner or later its pause is over
        return found, self._from_outside(wanted and bool(found))

    def _from_outside(self, probes: bool) -> list[Action]:
        found: list[Action] = []
        if self.requests:
            found.append(("request",))
        if self.savepoints:
            found.append(("savepoint",))
        if self.crashes:
            found += self.scope.crashes(self)
        if self.expiries and not self.publishing and self.world.memo.cores[self.coordinator].pending:
            found.append(("expire",))
        if self.probes and probes:
            found.append(("probe", 1))
        return found

    def _may_hear(self, task: int) -> bool:
        """The next control message, and so those behind it, may have to wait for the end of work (A1)."""
        event = self.world.memo.events[self.control[task][0]]
        return self.is_idle(task) or not isinstance(event, m.Trigger | m.LoopVerdict)

    def _may_cross(self, task: int) -> bool:
        """Two triggers are on their way, as of two initiators."""
        events = self.world.memo.events
        return [type(events[number]) for number in self.control[task][:2]] == [m.Trigger, m.Trigger]

    def _wants_probe(self, task: int) -> bool:
        """A head asks for a wave when its outside has ended and its loop has not."""
        world = self.world
        ended = world.known(self.machines[task])[2]
        return not ended and world.outside[task] <= world.memo.cores[self.machines[task]].ended

    def act(self, action: Action) -> None:
        """Take a step.

        Raises:
            Violation, InvariantError: a promise is broken.
        """
        _STEPS[action[0]](self, *action[1:])
        at_once, events = self.world.at_once, self.world.memo.events
        if at_once:
            while any(self.control):
                heard = [
                    t
                    for t in self.world.tasks
                    if self.control[t] and type(events[self.control[t][0]]) in at_once and self._may_hear(t)
                ]
                if not heard:
                    break
                for t in heard:
                    self.hear(t)
        self.scope.stepped(self)

    def describe(self, action: Action) -> str:
        """A step, for people."""
        graph, name, *rest = self.world.graph, *action
        if name == "read":
            at_end = self.emitted[rest[0]] == len(self.world.budget.rows)
            return f"{graph.names[rest[0]]} {'is exhausted' if at_end else 'reads a row'}"
        if name in ("hear", "hear second"):
            number = self.control[rest[0]][name == "hear second"]
            return f"{graph.names[rest[0]]} hears {self.world.memo.events[number]}"
        if name == "durable":
            return f"{graph.names[rest[0]]} has written {self.world.memo.events[self.writes[rest[0]][0]]}"
        if name in ("deliver", "take", "take urgent"):
            queue: Any = {"deliver": self.out, "take": self.inq, "take urgent": self.urgent}[name][rest[0]]
            item = queue[0]
            if type(item) is Barrier:
                kind = "probe" if item.probe else "final barrier" if item.final else "barrier"
                item = f"{kind} {item.id}{' of a savepoint' if item.savepoint else ''}"
            elif type(item) is int:
                item = f"row {item}"
            return f"{name} {graph.channel_names[rest[0]]}: {item}"
        if name == "acknowledge":
            event = self.acks[rest[0]][0]
            return f"{type(event).__name__} of {graph.names[event.subtask]}: checkpoint {event.checkpoint_id}"
        if name == "slice":
            return f"{graph.names[rest[0]]} goes on with its work"
        if name == "timeout":
            return f"timeout {graph.names[rest[0]]}: checkpoint {rest[1]}"
        if name == "crash":
            return self.scope.describe_crash(self, *rest)
        return f"publish: checkpoint {self.publishing[0]}" if name == "publish" else str(name)

    # ------------------------------------------------------------------------------------------------------ the steps

    def read(self, task: int) -> None:
        """A source hands out a row; after its last one it says so."""
        number, rows = self.emitted[task], self.world.budget.rows
        if number == len(rows):
            feed(self, task, self.world.exhausted)
            return
        self.emitted[task] = number + 1
        self.process(task, source_row(task, rows[number], self.world.graph.cyclic), ())

    def process(self, task: int, row: int, takes: tuple[e.Span, ...]) -> None:
        """One event of the dataflow: what is made of a row goes where it has to, or ends here; later, if in slices."""
        graph, step = self.world.graph, self.world.graph.tasks[task][0]
        made = graph.moves[task][row] or tuple((HERE, piece >> 4) for piece in graph.made_of(step, row))
        if graph.steps[step].slices:
            self.work[task], made = made, ()
        self._hand_out(task, made, takes)

    def slice(self, task: int) -> None:
        """One of the rows that were made leaves."""
        self._check_not_halted(task)
        made, *rest = self.work[task]
        self.work[task] = tuple(rest)
        self._hand_out(task, (made,), ())

    def _hand_out(self, task: int, made: tuple[tuple[int, int], ...], takes: tuple[e.Span, ...]) -> None:
        graph, sends = self.world.graph, list[e.Span]()
        for channel, row in made:
            if channel == HERE:
                self.open[task] = tuple(sorted((*self.open[task], row)))
            else:
                sends.append(e.Span(graph.channel_names[channel], self.scope.emit(self, channel, row)))
        if self.story is not None:
            self.story.append(e.Step(0.0, graph.names[task], self.attempt, takes, tuple(sends)))

    def _check_not_halted(self, task: int) -> None:
        if any(cut.halts for (t, _), cut in self.cuts.items() if t == task):
            raise Violation("not halted", f"{self.world.graph.names[task]} moves rows while a checkpoint is undecided")

    def deliver(self, channel: int) -> None:
        """The next item goes from the sender's queue to the receiver's."""
        item, *rest = self.out[channel]
        self.out[channel] = tuple(rest)
        self.arrive(channel, item)
        if self.world.row.switches and type(item) is Barrier:
            source = self.world.graph.channels[channel].source
            others = [i for c in self.world.graph.outputs[source] for i in self.out[c] if type(i) is Barrier]
            if not any(i.id == item.id for i in others):
                self.post(source, m.BarriersSent(item.id))

    def take(self, channel: int) -> None:
        """The receiver takes the next item."""
        world = self.world
        task = world.graph.channels[channel].target
        self.scope.takes(self, task, channel)
        item, *rest = self.inq[channel]
        self.inq[channel] = tuple(rest)
        if type(item) is int:
            if item != self.taken[channel]:
                what = f"row {item} was taken when row {self.taken[channel]} was next"
                raise Violation("order of a channel", f"{world.graph.channel_names[channel]}: {what}")
            self._check_not_halted(task)
            self.taken[channel] += 1
            feed(self, task, world.row_taken[channel], (item,))
            self.process(task, self.history[channel][item], (e.Span(world.graph.channel_names[channel], item),))
        elif type(item) is Barrier:
            self._tell_taken(task, channel, item)
            event = m.BarrierTaken(channel, item.id, item.final, item.probe, savepoint=item.savepoint)
            feed(self, task, world.memo.event(event))
        else:
            feed(self, task, world.end_taken[channel])

    def take_urgent(self, channel: int) -> None:
        """The receiver takes a barrier that overtook."""
        item, *rest = self.urgent[channel]
        self.urgent[channel] = tuple(rest)
        left = tuple(row for row in rows_of(self.inq[channel]) if row < item.reach)
        task = self.world.graph.channels[channel].target
        self._tell_taken(task, channel, item)
        event = m.BarrierTaken(channel, item.id, item.final, item.probe, len(left), False)
        feed(self, task, self.world.memo.event(event), left)

    def _tell_taken(self, task: int, channel: int, item: Barrier) -> None:
        if self.story is not None and not item.probe and item.id > self.scope.over_id:
            names = self.world.graph.names[task], self.world.graph.channel_names[channel]
            self.story.append(e.MarkerTaken(0.0, names[0], self.attempt, item.id, names[1], item.position))

    def hear(self, task: int) -> None:
        """A control message comes."""
        number, *rest = self.control[task]
        self.control[task] = tuple(rest)
        event = self.world.memo.events[number]
        if self.timers and isinstance(event, m.CompleteNotice | m.AbortNotice):
            self.timers = tuple(x for x in self.timers if x != (task, event.checkpoint_id))
        feed(self, task, number)

    def hear_second(self, task: int) -> None:
        """The second of two triggers was faster."""
        first, second, *rest = self.control[task]
        self.control[task] = (second, first, *rest)
        self.hear(task)

    def timeout(self, task: int, id: int) -> None:
        """An alignment took too long."""
        self.timers = tuple(x for x in self.timers if x != (task, id))
        feed(self, task, self.world.memo.event(m.AlignmentTimeout(id)))

    def publish(self) -> None:
        """The log takes the checkpoint: it must be a consistent cut."""
        (id, final, logged), self.publishing = self.publishing, ()
        cuts = {t: self.cuts[t, id] for t in self.world.tasks if (t, id) in self.cuts}
        logs = {c: rows for (i, c), rows in self.logs.items() if i == id}
        before = self.done.id if self.done else 0
        self.completed: Hashable = frozenset(cuts.items()), frozenset(logs.items()), before, self.attempt
        if self.story is not None:
            names = self.world.graph.channel_names
            recorded = [(name, (*logs.get(c, ()), *logs.get(-1 - c, ()))) for c, name in enumerate(names)]
            tell_completed(self.story, "coordinator", self.attempt, id, recorded)
        else:
            self._check_cut(id, cuts, logs)
        if logged and (self.done is None or id > self.done.id):
            self.done = Done(id, tuple(sorted(cuts.items())), tuple(sorted(logs.items())), bool(final))
        coordinate(self, cm.Published(id, self.now))

    def _check_cut(self, id: int, cuts: dict[int, Cut], logs: dict[int, tuple[int, ...]]) -> None:
        """CL6: rows taken before the receiver's cut, then the recorded ones, are those sent before the sender's."""
        if len(cuts) < len(self.machines):
            raise Violation("part missing", f"checkpoint {id} has parts of {sorted(cuts)} only")
        for spec in self.world.graph.channels:
            c = spec.index
            sent, taken = dict(cuts[spec.source].outs)[c], dict(cuts[spec.target].ins)[c]
            log = (*logs.get(c, ()), *logs.get(-1 - c, ()))
            if log != tuple(range(taken, sent)) or (self.world.exactly and taken > sent):
                text = (
                    f"checkpoint {id}, {self.world.graph.channel_names[c]}: sent {sent}, taken {taken}, recorded {log}"
                )
                raise Violation("inconsistent cut", text)

    def request(self) -> None:
        """A checkpoint is asked for."""
        self.requests -= 1
        coordinate(self, cm.RequestCheckpoint(self.now, CheckpointKind.ON_DEMAND, self.requests))

    def savepoint(self) -> None:
        """A savepoint is asked for."""
        self.savepoints -= 1
        coordinate(self, cm.RequestCheckpoint(self.now, CheckpointKind.SAVEPOINT, -1 - self.savepoints))

    def request_final(self) -> None:
        """Every subtask has handled its end of data (A7)."""
        self.final = True
        coordinate(self, cm.RequestFinal(self.now))

    def probe(self, cost: int) -> None:
        """Heads ask for a wave, and the pause before it is over (C6)."""
        self.probes -= cost
        for t in self.world.heads:
            if self._wants_probe(t):
                watch_loops(self, ProbeWanted(t, PROBE_MS))

    def expire(self) -> None:
        """Everything pending is given up."""
        self.expiries -= 1
        self.now += EXPIRY_MS
        coordinate(self, cm.Tick(self.now))

    def crash_all(self) -> None:
        """A worker dies; all subtasks go back to the last completed checkpoint (R1)."""
        self.crashes -= 1
        coordinate(self, cm.JobStopped("crash", self.now))
        if self.publishing:  # what was being written when it happened is lost
            coordinate(self, cm.PublishFailed(self.publishing[0], "crash", self.now))
        if self.story is not None:
            self.story += [e.Crashed(0.0, name, self.attempt) for name in self.world.graph.names]
        self.attempt += 1
        if self.story is not None:
            id = self.done.id if self.done else None
            self.story += [e.Restored(0.0, name, self.attempt, id) for name in self.world.graph.names]
        self.begin()

    # ----------------------------------------------------------------------------------------------------- the verdict

    def check_end(self) -> None:
        """Nothing more comes by itself: the job must have ended, and all of its output be there, once.

        Raises:
            Violation: it is stuck, or the output is wrong.
        """
        if self.done is None or not self.done.final or not self.final:
            raise Violation("stuck", f"nothing moves: rows {self.inq}, {self.out}, read {self.emitted}")
        got = Counter(row for *_, rows in self.committed for row in rows)
        expected = self.world.expected
        if expected - got or got.keys() - expected.keys() or (self.world.exactly and got != expected):
            raise Violation("lost or doubled rows", f"{sorted(got.elements())} of {sorted(expected.elements())}")

    def outcome(self) -> Hashable:
        """Values to check at an end."""
        return self.committed, *self.history, self.attempt, self.done and self.done.id

    def oracle(self) -> list[str]:
        """The rows that must be committed at an end."""
        return [str(row) for row in self.world.expected.elements()]


_STEPS: dict[str, Callable[..., None]] = {
    "read": JobState.read,
    "deliver": JobState.deliver,
    "take": JobState.take,
    "take urgent": JobState.take_urgent,
    "hear": JobState.hear,
    "hear second": JobState.hear_second,
    "slice": JobState.slice,
    "durable": written,
    "acknowledge": acknowledge,
    "timeout": JobState.timeout,
    "publish": JobState.publish,
    "final": JobState.request_final,
    "probe": JobState.probe,
    "request": JobState.request,
    "savepoint": JobState.savepoint,
    "crash": lambda state, *what: state.scope.crash(state, *what),
    "expire": JobState.expire,
}
