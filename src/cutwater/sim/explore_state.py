"""One state of the explorer: machines, channels and what is under way; and how the core's effects change it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Self, TypeAlias

from cutwater.protocol import messages as m
from cutwater.protocol.rows import PROTOCOLS, FreezeOn
from cutwater.protocol.subtask import SubtaskMachine
from cutwater.sim.channels import BARRIER, END
from cutwater.sim.graphs import Graph
from cutwater.sim.small import Cut, canonical, clone, new_coordinator

__all__ = ["SmallState"]

_Item: TypeAlias = Any


class SmallState:
    """A state.  Actions work on a copy; what they do not touch is shared.

    Args:
        graph, protocol, rows: what runs, with so many rows of each source.
        machine: the machine under test.
        eager: what is written is durable at once, and acknowledgements arrive at once (they only count): fewer states.
        outside: requests for checkpoints, crashes and expiries that may come.
    """

    __slots__ = (
        "absorbed", "acks", "attempt", "control", "coordinator", "crashes", "cuts", "done", "eager", "emitted", "ended",
        "expiries", "final", "graph", "history", "inq", "keys", "logs", "machine", "machines", "now", "out",
        "overtakes", "protocol", "publishing", "requests", "row", "rows", "taken", "timers", "urgent", "writes",
    )  # fmt: skip

    def __init__(
        self,
        graph: Graph,
        protocol: str,
        rows: int,
        machine: type[SubtaskMachine] = SubtaskMachine,
        *,
        eager: bool = True,
        outside: tuple[int, int, int] = (2, 1, 1),
    ) -> None:
        self.graph, self.protocol, self.row, self.rows = graph, protocol, PROTOCOLS[protocol], rows
        self.machine = machine
        self.overtakes = self.row.switches or self.row.halts
        self.eager = eager
        self.requests, self.crashes, self.expiries = outside
        self.now, self.attempt = 0.0, 1
        self.coordinator = new_coordinator(protocol, self.row, len(graph.tasks), graph.sources)
        self.coordinator.handle(m.JobRunning(1, 0.0))
        self.done: tuple[int, dict[int, Cut], dict[Any, Any]] | None = None
        self.history: list[tuple[int, ...]] = [() for _ in graph.channels]
        self.cuts: dict[tuple[int, int], Cut] = {}
        self.logs: dict[tuple[int, int], tuple[_Item, ...]] = {}
        """(checkpoint, channel) -> at the receiver; (checkpoint, -1 - channel) -> overtaken at the sender."""
        self.begin(None)

    def begin(self, restored: tuple[int, dict[int, Cut], dict[Any, Any]] | None) -> None:
        """All subtasks start, from a checkpoint (id, parts, logs) or from nothing."""
        tasks, channels = len(self.graph.tasks), self.graph.channels
        self.final = False
        self.control: list[tuple[m.Event, ...]] = [() for _ in range(tasks)]
        self.writes: list[tuple[m.Event, ...]] = [() for _ in range(tasks)]
        self.acks: tuple[Any, ...] = ()
        self.publishing: tuple[Any, ...] = ()
        self.timers: tuple[Any, ...] = ()
        self.out: list[tuple[_Item, ...]] = [() for _ in channels]
        self.inq: list[tuple[_Item, ...]] = [() for _ in channels]
        self.urgent: list[tuple[_Item, ...]] = [() for _ in channels]
        self.taken = [0 for _ in channels]
        cuts = restored[1] if restored else {}
        for spec in channels if restored else ():
            c = spec.index
            sent, taken = dict(cuts[spec.source].outs)[c], dict(cuts[spec.target].ins)[c]
            self.history[c] = self.history[c][:sent]
            self.taken[c] = min(sent, taken)
            self.inq[c] = (*restored[2].get(c, ()), *restored[2].get(-1 - c, ()))  # type: ignore[index]
            if cuts[spec.source].has_ended and c not in cuts[spec.target].ended:
                self.inq[c] += ((END,),)
        self.emitted = [cuts[t].position if restored else 0 for t in range(tasks)]
        self.absorbed: list[tuple[int, ...]] = [cuts[t].absorbed if restored else () for t in range(tasks)]
        self.ended = [cuts[t].has_ended if restored else False for t in range(tasks)]
        self.machines = [self._new_machine(t, cuts.get(t), cuts) for t in range(tasks)]
        self.keys = [canonical(machine) for machine in self.machines]

    def _new_machine(self, task: int, cut: Cut | None, cuts: dict[int, Cut]) -> SubtaskMachine:
        graph = self.graph
        ended = [c for c in cut.ended if cuts[graph.channels[c].source].has_ended] if cut else []
        return self.machine(
            graph.names[task],
            graph.inputs[task],
            protocol=self.row,
            back_edges=graph.back.intersection(graph.inputs[task]),
            loop_inputs=graph.loop_inputs[task],
            last_checkpoint_id=self.coordinator.last_id,
            ended=ended,
            exhausted=bool(cut and cut.has_ended and task in graph.sources),
        )

    def copy(self) -> Self:
        """A state that can be changed without changing this one."""
        new = object.__new__(type(self))
        for name in SmallState.__slots__:
            value = getattr(self, name)
            kind = type(value)
            setattr(new, name, value.copy() if kind is list or kind is dict else value)
        return new

    def key(self) -> Hashable:
        """Equal states have equal keys."""
        return (
            *self.keys, canonical(self.coordinator), *self.out, *self.inq, *self.urgent, *self.control, *self.writes,
            frozenset(self.acks), self.publishing, frozenset(self.timers), *self.taken, *map(len, self.history),
            *self.emitted, *self.absorbed, *self.ended, frozenset(self.logs.items()), frozenset(self.cuts),
            self.done and self.done[0], self.final, self.requests, self.crashes, self.expiries, self.attempt,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------- performing effects

    def send(self, channel: int, item: _Item) -> None:
        if self.overtakes:
            self.out[channel] += (item,)
        else:
            self.arrive(channel, item)

    def arrive(self, channel: int, item: _Item) -> None:
        if type(item) is tuple and item[-1] == "urgent":
            self.urgent[channel] += ((item, self.taken[channel] + rows_of(self.inq[channel])),)
            return
        if self.row.switches and type(item) is tuple and item[0] == BARRIER and self.inq[channel]:
            target = self.graph.channels[channel].target
            self.control[target] += (m.BarrierWaits(channel, item[1], item[2], item[3]),)
        self.inq[channel] += (item,)

    def acknowledge(self, ack: Any) -> None:
        """An acknowledgement, any of those on their way, reaches the coordinator."""
        self.acks = tuple(a for a in self.acks if a is not ack)
        self.coordinate(ack)

    def written(self, task: int) -> None:
        """Something is durable."""
        event, *rest = self.writes[task]
        self.writes[task] = tuple(rest)
        self.feed(task, event)

    def feed(self, task: int, event: m.Event, items: tuple[_Item, ...] = ()) -> None:
        """Let the machine of a subtask decide, and perform it."""
        machine = self.machines[task] = clone(self.machines[task])
        for effect in machine.handle(event):
            self._perform(task, effect, items)
        self.keys[task] = canonical(machine)
        while self.eager and self.writes[task]:
            self.written(task)
        while self.eager and self.acks:
            self.acknowledge(self.acks[0])

    def _perform(self, task: int, effect: m.Effect, items: tuple[_Item, ...]) -> None:
        match effect:
            case m.Freeze(checkpoint_id=id):
                self.cuts[task, id] = self._cut(task)
                self.writes[task] += (m.Durable(id),)
            case m.BroadcastBarrier():
                self._broadcast(task, effect)
            case m.Overtake(checkpoint_id=id):
                self._overtake(task, id)
            case m.Expedite(input=c, checkpoint_id=id):
                self._expedite(int(str(c)), id)
            case m.WatchAlignment(checkpoint_id=id):
                self.timers += ((task, id),)
            case m.Record(input=c, checkpoint_ids=ids):
                for id in ids:
                    self.logs[id, int(str(c))] = (*self.logs.get((id, int(str(c))), ()), *items)
            case m.StopRecording(input=c, checkpoint_id=id):
                if items:
                    self.logs[id, int(str(c))] = (*self.logs.get((id, int(str(c))), ()), *items)
            case m.WriteLogs(checkpoint_id=id):
                self.writes[task] += (m.LogsDurable(id),)
            case m.Acknowledge(checkpoint_id=id):
                self.acks += (m.AckReceived(id, self.attempt, task, None, 0.0),)
            case m.Decline(checkpoint_id=id, reason=reason):
                self.acks += (m.DeclineReceived(id, self.attempt, task, reason, 0.0),)
            case m.EndOfInput():
                self.ended[task] = True
                for c in self.graph.outputs[task]:
                    self.send(c, (END,))
            case _:
                pass

    def _cut(self, task: int) -> Cut:
        graph = self.graph
        return Cut(
            task,
            self.attempt,
            self.emitted[task],
            self.absorbed[task],
            tuple((c, self.taken[c]) for c in graph.inputs[task]),
            tuple((c, len(self.history[c])) for c in graph.outputs[task]),
            frozenset(int(str(c)) for c in self.machines[task].ended),
            self.ended[task],
        )

    def _broadcast(self, task: int, effect: m.BroadcastBarrier) -> None:
        id, outputs = effect.checkpoint_id, self.graph.outputs[task]
        barrier = (BARRIER, id, effect.final, effect.probe)
        rows = 0
        for c in outputs:
            if effect.overtake:
                place = sum(type(i) is tuple and i[-1] == "urgent" for i in self.out[c])
                left = tuple(i for i in self.out[c][place:] if type(i) is int)
                self.out[c] = (*self.out[c][:place], (*barrier, "urgent"), *self.out[c][place:])
                if left:
                    self.logs[id, -1 - c] = left
                rows += len(left)
            else:
                self.send(c, barrier)
        if effect.overtake:
            self.control[task] = (m.RowsOvertaken(id, rows), *self.control[task])
        elif self.row.switches and not outputs:
            self.control[task] += (m.BarriersSent(id),)

    def _overtake(self, task: int, id: int) -> None:
        rows = 0
        for c in self.graph.outputs[task]:
            items = self.out[c]
            place = next((n for n, i in enumerate(items) if type(i) is tuple and i[:2] == (BARRIER, id)), None)
            if place is not None:
                left = tuple(i for i in items[:place] if type(i) is int)
                self.out[c] = ((*items[place], "urgent"), *items[:place], *items[place + 1 :])
                if left:
                    self.logs[id, -1 - c] = left
                rows += len(left)
        self.control[task] = (m.RowsOvertaken(id, rows), *self.control[task])

    def _expedite(self, channel: int, id: int) -> None:
        items = self.inq[channel]
        place = next((n for n, i in enumerate(items) if type(i) is tuple and i[:2] == (BARRIER, id)), None)
        if place is not None:
            self.inq[channel] = (*items[:place], *items[place + 1 :])
            position = self.taken[channel] + rows_of(items[:place])
            self.urgent[channel] += ((items[place], position),)

    def coordinate(self, event: m.CoordinatorEvent) -> None:
        """Let the coordinator decide, and perform it."""
        self.coordinator = clone(self.coordinator)
        for effect in self.coordinator.handle(event):
            match effect:
                case m.SendTrigger(checkpoint_id=id, final=final):
                    everybody = self.row.freeze_on is FreezeOn.TRIGGER
                    for t in range(len(self.machines)) if everybody else sorted(self.graph.sources):
                        self.control[t] += (m.Trigger(id, final),)
                case m.Publish():
                    self.publishing = (effect,)
                case m.NotifyComplete(checkpoint_id=id, commit=commit):
                    self.control = [(*found, m.CompleteNotice(id, commit)) for found in self.control]
                    self._drop(id)
                case m.NotifyAborted(checkpoint_id=id, latest_completed=latest):
                    self.control = [(*found, m.AbortNotice(id, latest)) for found in self.control]
                case _:
                    pass

    def _drop(self, id: int) -> None:
        """Nobody looks at this checkpoint's parts any more."""
        self.cuts = {k: v for k, v in self.cuts.items() if k[1] > id}
        self.logs = {k: v for k, v in self.logs.items() if k[0] > id}


def rows_of(items: tuple[_Item, ...]) -> int:
    return sum(type(i) is int for i in items)
