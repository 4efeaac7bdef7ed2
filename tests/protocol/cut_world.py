"""Subtask machines and a coordinator joined by fake FIFO links in one thread, in seeded random order.

The world performs effects literally and keeps its own books: what was sent and taken on each channel, where each
subtask's cut lies, what was durable, blocked, completed and committed when.  From these, never from the machines, it
decides whether a checkpoint is a consistent cut (sent before the sender's cut = taken before the receiver's cut + log,
in order) and whether every row reached the sinks' committed output once.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

from cut_graphs import Channel, Graph, Task

from cutwater.config import JobConfig
from cutwater.protocol import messages as m
from cutwater.protocol.coordinator import CheckpointCoordinator
from cutwater.protocol.loop import Head, ReadSource, SubtaskLoop, TakeControl, TakeRows
from cutwater.protocol.reasons import CheckpointKind
from cutwater.protocol.rows import PROTOCOLS
from cutwater.protocol.subtask import SubtaskMachine

CAPACITY = 4
"""Items in a channel at which it is full (loop mode only)."""


class Violation(AssertionError):
    """A rule of the protocol is broken."""


class World:
    """One run.

    Args:
        graph: subtasks and channels.
        seed: of every choice.
        protocol: name of the row.
        machine, coordinator: the classes under test (or mutants of them).
        rows: rows per source.
        chaos: probability that a write or a publication fails.
        timeout_ms: of a checkpoint; every action takes 0.2 ms, so that a short one aborts many.
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
        rows: int = 30,
        chaos: float = 0.0,
        timeout_ms: float = 1e9,
        loop: bool = False,
    ) -> None:
        self.graph, self.rng, self.protocol, self.chaos, self.loop = graph, random.Random(seed), protocol, chaos, loop
        self.exactly = protocol != "at_least_once"
        self.now = 0.0
        self.bounded = not graph.back_edges
        self.machines = {
            t: machine(
                f"{t[0]} {t[1]}",
                graph.inputs(t),
                protocol=PROTOCOLS[protocol],
                back_edges=graph.back_edges & set(graph.inputs(t)),
            )
            for t in graph.tasks
        }
        self.loops = {t: SubtaskLoop(mach, graph.inputs(t), 5.0, 64) for t, mach in self.machines.items()}
        settings = JobConfig(
            interval_ms=6.0, timeout_ms=timeout_ms, max_concurrent=2, tolerable_failed=10**9, protocol=protocol
        )
        self.coordinator = coordinator(settings, frozenset(graph.tasks), graph.sources, 0)
        # links
        self.queues: dict[Channel, deque[Any]] = {c: deque() for c in graph.channels}
        self.control: dict[Task, deque[m.Event]] = {t: deque() for t in graph.tasks}
        self.reports: dict[Task, deque[Callable[[], Any]]] = {t: deque() for t in graph.tasks}
        self.writes: dict[Task, deque[m.Event]] = {t: deque() for t in graph.tasks}
        self.publishing: deque[m.Publish] = deque()
        # books
        self.to_emit = dict.fromkeys(graph.sources, rows)
        self.emitted: list[int] = []
        self.sent: dict[Channel, list[Any]] = defaultdict(list)
        self.taken: dict[Channel, list[Any]] = defaultdict(list)
        self.cuts: dict[int, dict[Task, dict[Channel, int]]] = defaultdict(dict)
        self.logs: dict[tuple[int, Channel], list[int]] = defaultdict(list)
        self.undurable: dict[tuple[Task, int], int] = {}
        self.blocked: dict[Task, list[Channel]] = defaultdict(list)
        self.acked: dict[int, set[Task]] = defaultdict(set)
        self.told_aborted: set[tuple[Task, int]] = set()
        self.published: set[int] = set()
        self.uncommitted: dict[Task, list[int]] = defaultdict(list)
        self.pre_commits: dict[Task, dict[int, list[int]]] = defaultdict(dict)
        self.committed: list[int] = []
        self.finished: set[Task] = set()
        self.ended = False
        self.seen: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------------ running

    def run(self, max_steps: int = 60_000) -> World:
        """Until the final checkpoint is committed (acyclic), or the rows have left the loops (cyclic)."""
        self.coordinate(m.JobRunning(1, self.now))
        for step in range(max_steps):
            actions = self.actions()
            if (self.ended and not actions) or (not self.bounded and self.drained and step > 800):
                break
            self.now += 0.2
            if actions:
                self.rng.choice(actions)()
            due = self.coordinator.next_due_ms
            if due is not None and (due <= self.now or not actions):
                self.now = max(self.now, due)
                self.coordinate(m.Tick(self.now))
        else:
            raise Violation("the run does not end")
        kept = [
            r for t in self.graph.tasks for rows in (self.uncommitted[t], *self.pre_commits[t].values()) for r in rows
        ]
        if (kept and self.bounded) or sorted(self.committed + kept) != sorted(self.emitted):
            raise Violation(f"{len(self.committed)} rows committed and {len(kept)} kept of {len(self.emitted)}")
        return self

    @property
    def drained(self) -> bool:
        """No row is left in a loop."""
        return not any(self.to_emit.values()) and not any(i[0] == "row" for q in self.queues.values() for i in q)

    def actions(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for task in self.graph.tasks:
            if self.loop:
                action = self.decide(task)
                if action is not None:
                    found.append(action)
            elif self.to_emit.get(task) and self.machines[task].may_read:
                found.append(lambda t=task: self.emit(t))
            if self.control[task]:
                found.append(lambda t=task: self.control_event(t))
            if self.reports[task]:
                found.append(lambda t=task: self.reports[t].popleft()())
            if self.writes[task]:
                found.append(lambda t=task: self.write(t))
        if not self.loop:
            for channel, queue in self.queues.items():
                if queue and self.machines[channel[1]].can_take(channel):
                    found.append(lambda c=channel: self.take(c))
        if self.publishing:
            found.append(self.publish)
        return found

    def decide(self, task: Task) -> Callable[[], None] | None:
        inputs = self.graph.inputs(task)
        kinds = [self.queues[c][0][0] if self.queues[c] else "" for c in inputs]
        heads = [{"": Head.EMPTY, "row": Head.ROWS}.get(kind, Head.CONTROL) for kind in kinds]
        full = any(sum(i[0] == "row" for i in self.queues[c]) >= CAPACITY for c in self.graph.outputs(task))
        ready = bool(self.to_emit.get(task))
        action = self.loops[task].decide(heads, outputs_full=full, operator_pending=False, source_ready=ready)
        match action:
            case TakeControl(index):
                if heads[index] is not Head.CONTROL:
                    raise Violation("control item announced where there is none")
                return lambda: self.take(inputs[index])
            case TakeRows(index, _):
                if full or heads[index] is not Head.ROWS:
                    raise Violation("rows taken with a full output, or where there are none")
                return lambda: self.take(inputs[index])
            case ReadSource():
                return lambda: self.emit(task)
            case _:
                return None

    # ------------------------------------------------------------------------------------------------------ actions

    def emit(self, task: Task) -> None:
        self.to_emit[task] -= 1
        row = len(self.emitted)
        self.emitted.append(row)
        self.route(task, row, hops=self.rng.randrange(6) if self.graph.back_edges else 99)
        if not self.to_emit[task] and self.bounded:
            self.feed(task, m.SourceExhausted())

    def route(self, task: Task, row: int, hops: int) -> None:
        """One row to one output; without outputs (or hops) it has arrived."""
        outputs = self.graph.outputs(task)
        if outputs and (hops > 0 or task in self.graph.sources):
            self.send(self.rng.choice(outputs), ("row", row, hops))
        else:
            self.uncommitted[task].append(row)

    def send(self, channel: Channel, item: Any) -> None:
        self.queues[channel].append(item)
        self.sent[channel].append(item)

    def take(self, channel: Channel) -> None:
        task = channel[1]
        if channel in self.blocked[task]:
            raise Violation(f"{channel} is blocked, but can be taken from (A3)")
        item = self.queues[channel].popleft()
        self.taken[channel].append(item)
        match item:
            case ("row", row, hops):
                if self.machines[task].recording(channel):
                    self.feed(task, m.RowsTaken(channel, 1), row)
                self.route(task, row, hops - 1)
            case ("barrier", id, final):
                self.feed(task, m.BarrierTaken(channel, id, final))
            case _:
                self.feed(task, m.EndTaken(channel))

    def control_event(self, task: Task) -> None:
        event = self.control[task].popleft()
        if isinstance(event, m.AbortNotice):
            self.told_aborted.add((task, event.checkpoint_id))
        self.feed(task, event)

    def write(self, task: Task) -> None:
        event = self.writes[task].popleft()
        id = event.checkpoint_id  # type: ignore[union-attr]
        if self.rng.random() < self.chaos:
            self.feed(task, m.WriteFailed(id, "disk full"))
        else:
            self.undurable[task, id] -= 1
            self.feed(task, event)

    def publish(self) -> None:
        effect = self.publishing.popleft()
        if self.rng.random() < self.chaos:
            self.coordinate(m.PublishFailed(effect.checkpoint_id, "disk full", self.now))
        else:
            self.check_cut(effect.checkpoint_id)
            self.published.add(effect.checkpoint_id)
            self.coordinate(m.Published(effect.checkpoint_id, self.now))

    # ------------------------------------------------------------------------------------------ performing effects

    def feed(self, task: Task, event: m.Event, row: int = -1) -> None:
        machine = self.machines[task]
        effects = machine.handle(event)
        machine.validate()
        self.check_order(effects)
        for effect in effects:
            self.perform(task, effect, row)
        for channel in self.graph.inputs(task):
            if machine.can_take(channel) != (channel not in self.blocked[task]):
                raise Violation(f"{channel}: can_take and the effects disagree")

    def perform(self, task: Task, effect: m.Effect, row: int) -> None:
        match effect:
            case m.Block(channel):
                self.blocked[task].append(channel)
                self.seen["blocked"] += 1
            case m.Unblock(channel):
                if self.blocked[task][0] != channel:
                    raise Violation(f"{task} unblocks {channel} before {self.blocked[task][0]} (A5)")
                self.blocked[task].pop(0)
            case m.Freeze(id, _):
                self.freeze(task, id)
            case m.BroadcastBarrier(id, final):
                if task not in self.cuts[id]:
                    raise Violation(f"{task} broadcasts barrier {id} before it froze (A4)")
                for channel in self.graph.outputs(task):
                    self.send(channel, ("barrier", id, final))
            case m.Record(channel, ids):
                for id in ids:
                    self.logs[id, channel].append(row)
                self.seen["recorded"] += 1
            case m.StartRecording(id, _):
                self.undurable[task, id] = 2
            case m.StopRecording(id, channel, rows):
                if rows != len(self.logs[id, channel]):
                    raise Violation(f"the log of {channel} holds {len(self.logs[id, channel])} rows, not {rows}")
            case m.WriteLogs(id):
                self.writes[task].append(m.LogsDurable(id))
            case m.Acknowledge(id):
                if self.undurable[task, id]:
                    raise Violation(f"{task} acknowledges {id} before it is durable (A6)")
                ack = m.AckReceived(id, 1, task, (task, id), 0.0)
                self.reports[task].append(lambda: self.acknowledge(ack))
            case m.Decline(id, reason, _):
                self.seen[reason.code] += 1
                self.reports[task].append(lambda: self.coordinate(m.DeclineReceived(id, 1, task, reason, self.now)))
            case m.Commit(id):
                self.commit(task, id)
            case m.EndOfInput():
                for channel in self.graph.outputs(task):
                    self.send(channel, ("end",))
                self.reports[task].append(lambda: self.finish(task))
            case m.Forget():
                self.seen["forgotten"] += 1

    def freeze(self, task: Task, id: int) -> None:
        if (task, id) in self.told_aborted:
            raise Violation(f"{task} freezes for {id} after the abort notice (A8)")
        if task in self.cuts[id]:
            raise Violation(f"{task} freezes twice for {id}")
        books = {c: len(self.sent[c]) for c in self.graph.outputs(task)}
        books |= {("in", c): len(self.taken[c]) for c in self.graph.inputs(task)}  # type: ignore[dict-item]
        self.cuts[id][task] = books
        self.undurable[task, id] = 1
        self.writes[task].append(m.Durable(id))
        self.pre_commits[task][id], self.uncommitted[task] = self.uncommitted[task], []

    def commit(self, task: Task, id: int) -> None:
        if id not in self.published:
            raise Violation(f"{task} commits {id}, which is not published")
        for older in [n for n in self.pre_commits[task] if n <= id]:
            self.committed += self.pre_commits[task].pop(older)
            self.seen["commits of an older id"] += older < id

    def acknowledge(self, ack: m.AckReceived) -> None:
        self.acked[ack.checkpoint_id].add(ack.subtask)  # type: ignore[arg-type]
        self.coordinate(m.AckReceived(ack.checkpoint_id, 1, ack.subtask, ack.payload, self.now))

    def finish(self, task: Task) -> None:
        self.finished.add(task)
        if len(self.finished) == len(self.graph.tasks):
            self.coordinate(m.RequestFinal(self.now))

    def coordinate(self, event: m.CoordinatorEvent) -> None:
        effects = self.coordinator.handle(event)
        self.coordinator.validate()
        self.seen["concurrent"] += len(self.coordinator.pending) > 1
        for effect in effects:
            match effect:
                case m.SendTrigger(id, _, final):
                    for task in sorted(self.graph.sources):
                        self.control[task].append(m.Trigger(id, final))
                case m.Publish(id):
                    if self.acked[id] != set(self.graph.tasks):
                        raise Violation(f"{id} is published without all acknowledgements")
                    self.publishing.append(effect)
                case m.NotifyComplete(id, kind, commit):
                    if id not in self.published:
                        raise Violation(f"{id} is called complete before it is published")
                    self.seen["completed"] += 1
                    self.ended |= kind is CheckpointKind.FINAL
                    self.tell(m.CompleteNotice(id, commit))
                case m.NotifyAborted(id, reason, latest):
                    if id in self.published:
                        raise Violation(f"{id} is aborted after it was published")
                    self.seen["aborted"] += 1
                    self.seen[f"aborted: {reason.code}"] += 1
                    self.tell(m.AbortNotice(id, latest))
                case _:
                    pass

    def tell(self, event: m.Event) -> None:
        for task in self.graph.tasks:
            self.control[task].append(event)

    # ------------------------------------------------------------------------------------------------------- oracle

    def check_order(self, effects: list[m.Effect]) -> None:
        """A4, C3: freeze, then broadcast, then unblock."""
        rank = {m.Freeze: 0, m.BroadcastBarrier: 1, m.StartRecording: 2, m.Unblock: 3}
        order = [rank[type(e)] for e in effects if type(e) in rank]
        skipped = any(isinstance(e, m.Decline) for e in effects)  # an older id is given up first, and unblocks
        order = order[order.index(0) :] if skipped and 0 in order else order
        if 0 in order and order != sorted(order):
            raise Violation(f"effects out of order: {effects}")

    def check_cut(self, id: int) -> None:
        cut = self.cuts[id]
        if set(cut) != set(self.graph.tasks):
            raise Violation(f"checkpoint {id} lacks {set(self.graph.tasks) - set(cut)}")
        for channel in self.graph.channels:
            before = self.sent[channel][: cut[channel[0]][channel]]
            taken = self.taken[channel][: cut[channel[1]]["in", channel]]  # type: ignore[index]
            if any(item[:2] == ("barrier", id) for item in before):
                raise Violation(f"{channel}: barrier {id} lies before the sender's cut (A2)")
            sent_rows = [item[1] for item in before if item[0] == "row"]
            got_rows = [item[1] for item in taken if item[0] == "row"] + self.logs[id, channel]
            doubled = len(got_rows) - len(sent_rows)
            if got_rows[: len(sent_rows)] != sent_rows or (self.exactly and doubled):
                raise Violation(f"{channel}: cut {id} has {got_rows} of {sent_rows}")
            self.seen["doubled"] += doubled
