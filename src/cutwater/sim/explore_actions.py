"""Every action that may happen next in a state of the explorer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from cutwater.protocol import messages as m
from cutwater.protocol.reasons import CheckpointKind
from cutwater.protocol.rows import FreezeOn
from cutwater.sim.channels import BARRIER
from cutwater.sim.explore_state import SmallState
from cutwater.sim.graphs import source_row
from cutwater.sim.judge import Violation
from cutwater.sim.small import Cut

__all__ = ["ActingState", "Action"]

Action: TypeAlias = "tuple[str, Callable[[ActingState], None]]"


class ActingState(SmallState):
    """A state with its actions; each changes the state that it is called on."""

    __slots__ = ()

    def actions(self) -> tuple[list[Action], list[Action]]:
        """What is under way and may come next; and what may come from outside: requests, a crash, an expiry."""
        found: list[Action] = []
        graph, machines = self.graph, self.machines
        for t in sorted(graph.sources):
            if machines[t].may_read and not self.ended[t]:
                found.append((f"read {t}", partial(ActingState.read, task=t)))
        for spec in graph.channels:
            c = spec.index
            if self.out[c]:
                found.append((f"deliver {c}", partial(ActingState.deliver, channel=c)))
            if self.urgent[c]:
                found.append((f"urgent {c}", partial(ActingState.take_urgent, channel=c)))
            elif self.inq[c] and machines[spec.target].can_take(c):
                found.append((f"take {c}", partial(ActingState.take, channel=c)))
        for t in range(len(machines)):
            if self.control[t]:
                found.append((f"control {t}", partial(ActingState.hear, task=t)))
            if self.writes[t]:
                found.append((f"durable {t}", partial(ActingState.written, task=t)))
        found += [(f"acknowledge {a.subtask}", partial(ActingState.acknowledge, ack=a)) for a in self.acks]
        found += [(f"timeout {t} {id}", partial(ActingState.timeout, task=t, id=id)) for t, id in self.timers]
        if self.publishing:
            found.append(("publish", ActingState.publish))
        if all(self.ended) and not self.final:
            found.append(("final", ActingState.request_final))
        outside: list[Action] = []
        if self.requests and self.row.freeze_on is not FreezeOn.NEVER:
            outside.append(("request", ActingState.request))
        if self.crashes:
            outside.append(("crash", ActingState.crash))
        if self.expiries and self.coordinator.pending and not self.publishing:
            outside.append(("expire", ActingState.expire))
        return found, outside

    def read(self, task: int) -> None:
        """A source hands out a row; after its last one it says so."""
        position = self.emitted[task]
        if position == self.rows:
            self.feed(task, m.SourceExhausted())
            return
        self.emitted[task] = position + 1
        self.process(task, source_row(task, position, self.graph.cyclic))

    def process(self, task: int, row: int) -> None:
        moves = self.graph.moves[task][row]
        for channel, after in moves:
            self.history[channel] += (after,)
            self.send(channel, after)
        if not moves:
            self.absorbed[task] = tuple(sorted((*self.absorbed[task], row >> 4)))

    def deliver(self, channel: int) -> None:
        """The next item goes from the sender's queue to the receiver's."""
        item, *rest = self.out[channel]
        self.out[channel] = tuple(rest)
        self.arrive(channel, item)
        if self.row.switches and type(item) is tuple and item[0] == BARRIER and item[-1] != "urgent":
            spec = self.graph.channels[channel]
            others = [i for c in self.graph.outputs[spec.source] for i in self.out[c] if type(i) is tuple]
            if not any(i[0] == BARRIER and i[1] == item[1] for i in others):
                self.control[spec.source] += (m.BarriersSent(item[1]),)

    def take(self, channel: int) -> None:
        """The receiver takes the next item."""
        task = self.graph.channels[channel].target
        item, *rest = self.inq[channel]
        self.inq[channel] = tuple(rest)
        if type(item) is int:
            self.taken[channel] += 1
            self.feed(task, m.RowsTaken(channel, 1), (item,))
            self.process(task, item)
        elif item[0] == BARRIER:
            self.feed(task, m.BarrierTaken(channel, item[1], item[2], item[3]))
        else:
            self.feed(task, m.EndTaken(channel))

    def take_urgent(self, channel: int) -> None:
        """The receiver takes a barrier that overtook."""
        (item, position), *rest = self.urgent[channel]
        self.urgent[channel] = tuple(rest)
        left = [i for i in self.inq[channel] if type(i) is int][: max(position - self.taken[channel], 0)]
        event = m.BarrierTaken(channel, item[1], item[2], item[3], len(left), False)
        self.feed(self.graph.channels[channel].target, event, tuple(left))

    def hear(self, task: int) -> None:
        """A control message comes."""
        event, *rest = self.control[task]
        self.control[task] = tuple(rest)
        self.feed(task, event)

    def timeout(self, task: int, id: int) -> None:
        """An alignment took too long."""
        self.timers = tuple(x for x in self.timers if x != (task, id))
        self.feed(task, m.AlignmentTimeout(id))

    def publish(self) -> None:
        """The log takes the checkpoint: it must be a consistent cut."""
        effect = self.publishing[0]
        self.publishing = ()
        id = effect.checkpoint_id
        cuts = {t: self.cuts[t, id] for t in range(len(self.machines)) if (t, id) in self.cuts}
        logs = {c: items for (i, c), items in self.logs.items() if i == id}
        self._check_cut(id, cuts, logs)
        if self.done is None or id > self.done[0]:
            self.done = id, cuts, logs
        self.coordinate(m.Published(id, self.now))

    def _check_cut(self, id: int, cuts: dict[int, Cut], logs: dict[int, tuple[Any, ...]]) -> None:
        if len(cuts) < len(self.machines):
            raise Violation("part missing", f"checkpoint {id} has parts of {sorted(cuts)} only")
        for spec in self.graph.channels:
            c = spec.index
            sent, taken = dict(cuts[spec.source].outs)[c], dict(cuts[spec.target].ins)[c]
            log = (*logs.get(c, ()), *logs.get(-1 - c, ()))
            exact = self.protocol != "at_least_once"
            if log != self.history[c][taken:sent] or (exact and taken > sent):
                text = f"checkpoint {id}, {self.graph.channel_names[c]}: sent {sent}, taken {taken}, recorded {log}"
                raise Violation("inconsistent cut", text)

    def request(self) -> None:
        """A checkpoint is asked for."""
        self.requests -= 1
        self.coordinate(m.RequestCheckpoint(self.now, CheckpointKind.ON_DEMAND, self.requests))

    def request_final(self) -> None:
        """Every subtask has handled its end of data (A7)."""
        self.final = True
        self.coordinate(m.RequestFinal(self.now))

    def expire(self) -> None:
        """Everything pending is given up."""
        self.expiries -= 1
        self.now += 2000.0
        self.coordinate(m.Tick(self.now))

    def crash(self) -> None:
        """A worker dies; all subtasks go back to the last completed checkpoint (R1)."""
        self.crashes -= 1
        self.coordinate(m.JobStopped("crash", self.now))
        if self.publishing:  # what was being written when it happened is lost
            self.coordinate(m.PublishFailed(self.publishing[0].checkpoint_id, "crash", self.now))
        self.publishing = ()
        self.cuts, self.logs = {}, {}
        if self.done is None:
            self.history = [() for _ in self.graph.channels]
        self.attempt += 1
        self.begin(self.done)
        self.coordinate(m.JobRunning(self.attempt, self.now))

    def check_end(self) -> None:
        """Nothing more comes by itself: everything must have arrived, and once."""
        unread = [t for t in self.graph.sources if self.emitted[t] < self.rows]
        if any(self.inq) or any(self.out) or unread:
            raise Violation("stuck", f"rows are left: {self.inq}, {self.out}, read {self.emitted}")
        got = Counter(i for found in self.absorbed for i in found)
        expected = self.graph.expected_anywhere(self.rows)
        if expected - got or (self.protocol != "at_least_once" and got - expected):
            raise Violation("lost or doubled rows", f"{sorted(got.elements())} of {sorted(expected.elements())}")
