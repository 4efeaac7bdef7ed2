"""A stage for a handful of processes: somebody says who does what next, and everything that happens becomes a trace.

Snapshots are decided by one ``SubtaskMachine`` per process, the same that real jobs run, or by something wrong that is
put in its place.  ``walk`` lets rows go over a stage at random.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from cutwater.errors import InvariantError
from cutwater.protocol import messages as m
from cutwater.protocol.protocols import NETWORK, ProtocolSpec
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.trace import events as t


class Machine(Protocol):
    """Maker of the machine that decides about snapshots: the real one, or a wrong one."""

    def handle(self, event: m.Event) -> Sequence[m.Effect]: ...
    def can_take(self, input: m.InputId) -> bool: ...
    def recording(self, input: m.InputId) -> bool: ...


MachineFactory: TypeAlias = Callable[..., Machine]


class Row(NamedTuple):
    """A row in a channel: its number, its printable value, and what only the model knows of it."""

    number: int
    value: str
    load: Any = None


class _Marker(NamedTuple):
    snapshot: int
    position: int


class Stage:
    """Processes, channels, and the trace of what they do.

    Args:
        title: of the picture.
        processes: from top to bottom.
        links: name, from, to.
        states: printable first state of each process.
        row: the protocol.
        back_edges: channels that close a loop.
        machine: makes the machine of a process; ``None``: there is none, and cuts are made by hand.

    >>> stage = Stage("", "pq", [("c", "p", "q"), ("d", "q", "p")])
    >>> stage.send("p", "c", "token")
    >>> stage.begin("p", 1)
    >>> stage.drain()
    >>> [type(event).__name__ for event in stage.trace().events][:5]
    ['Step', 'Cut', 'MarkerSent', 'Step', 'MarkerTaken']
    >>> stage.complete
    {1}
    """

    def __init__(
        self,
        title: str,
        processes: Iterable[str],
        links: Iterable[tuple[str, str, str]],
        *,
        states: Mapping[str, str] | None = None,
        row: ProtocolSpec = NETWORK,
        back_edges: frozenset[str] = frozenset(),
        machine: MachineFactory | None = SubtaskMachine,
    ) -> None:
        channels = tuple(t.Link(*link) for link in links)
        self.header = t.Header(tuple(processes), channels, title=title)
        self.states = {p: (states or {}).get(p, "") for p in self.header.processes}
        self.links = {link.name: link for link in channels}
        self.queues: dict[str, deque[Row | _Marker]] = {name: deque() for name in self.links}
        self.sent = dict.fromkeys(self.links, 0)
        self.now_ms = 0.0
        self.attempt = 1
        self.complete: set[int] = set()
        self.cuts: dict[int, set[str]] = {}
        self.rows_logged = 0
        self._events: list[t.Event] = []
        self._logs: dict[tuple[int, str], list[Row]] = {}
        self._acknowledged: dict[int, set[str]] = {}
        self._machines: dict[str, Machine] = {}
        for process in self.header.processes if machine else ():
            inputs = self.inputs(process)
            backs = back_edges & frozenset(inputs)
            self._machines[process] = machine(process, inputs, protocol=row, back_edges=backs)  # type: ignore[misc]

    def trace(self) -> t.Trace:
        """History so far."""
        return t.Trace(self.header, tuple(self._events))

    def inputs(self, process: str) -> list[str]:
        """Channels to a process."""
        return [link.name for link in self.links.values() if link.target == process]

    def outputs(self, process: str) -> list[str]:
        """Channels from a process."""
        return [link.name for link in self.links.values() if link.source == process]

    # ------------------------------------------------------------------------------------------------ what may be done

    def local(self, process: str, *, state: str | None = None, label: str = "") -> None:
        """A step that neither takes nor sends."""
        self._step(process, (), (), state, label)

    def send(
        self, process: str, channel: str, value: str, *, state: str | None = None, label: str = "", load: Any = None
    ) -> None:
        """A step that sends a row."""
        self._step(process, (), ((channel, value, load),), state, label)

    def take(
        self,
        channel: str,
        *,
        state: str | None = None,
        label: str = "",
        send: Iterable[tuple[str, str] | tuple[str, str, Any]] = (),
    ) -> Row | None:
        """Take what is at the head of a channel: a row, in a step that may send others, or a marker (then ``None``)."""
        if not self.can_take(channel):
            raise InvariantError(f"nothing can be taken from {channel}: it is blocked, or empty")
        item, process = self.queues[channel].popleft(), self.links[channel].target
        if isinstance(item, _Marker):
            self._add(t.MarkerTaken, process, item.snapshot, channel, item.position)
            self._feed(process, m.BarrierTaken(channel, item.snapshot))
            return None
        machine = self._machines.get(process)
        if machine is not None and machine.recording(channel):
            self._feed(process, m.RowsTaken(channel, 1), item)
        sends = tuple((s[0], s[1], s[2] if len(s) > 2 else None) for s in send)
        self._step(process, ((channel, item),), sends, state, label)
        return item

    def can_take(self, channel: str) -> bool:
        """Something waits in the channel, and the process may take it."""
        machine = self._machines.get(self.links[channel].target)
        return bool(self.queues[channel]) and (machine is None or machine.can_take(channel))

    def head(self, channel: str) -> Row | None:
        """The row that would be taken next; ``None`` for a marker, or if the channel is empty."""
        item = self.queues[channel][0] if self.queues[channel] else None
        return item if isinstance(item, Row) else None

    def begin(self, process: str, snapshot: int) -> None:
        """The process begins a snapshot."""
        self._feed(process, m.Trigger(snapshot))

    def cut(self, process: str, snapshot: int) -> None:
        """By hand: the process records its own state now, without a word to anybody."""
        self._add(t.Cut, process, snapshot, self.states[process])
        self.cuts.setdefault(snapshot, set()).add(process)

    def record(self, snapshot: int, channel: str, rows: Iterable[Row] = ()) -> None:
        """By hand: a channel's state."""
        spans = tuple(t.Span(channel, row.number, 1, (row.value,)) for row in rows)
        self._add(t.Recorded, self.links[channel].target, snapshot, channel, spans)

    def finish(self, snapshot: int) -> None:
        """By hand: the snapshot is said to be complete."""
        self._add(t.Completed, "coordinator", snapshot)
        self.complete.add(snapshot)

    def crash(self, process: str) -> None:
        """The process loses what it has."""
        self._add(t.Crashed, process)

    def go_back(self, processes: Iterable[str]) -> None:
        """These begin anew, in a new attempt; all others go on with what they have."""
        back = set(processes)
        self.attempt += 1
        for process in self.header.processes:
            if process in back:
                self._add(t.Restored, process, None)
                self.states[process] = ""
            else:
                self._add(t.Survived, process)
        for link in self.links.values():
            if link.source in back:
                self.queues[link.name].clear()
                self.sent[link.name] = 0

    def commit(self, process: str, snapshot: int, values: Iterable[str]) -> None:
        """A sink makes its output visible."""
        self._add(t.Committed, process, snapshot, tuple(values))

    def waiting(self, channel: str) -> list[Row]:
        """The rows in a channel."""
        return [item for item in self.queues[channel] if isinstance(item, Row)]

    def drain(self) -> None:
        """Take whatever can be taken, channel by channel, until nothing is left."""
        while any(self.can_take(channel) for channel in self.queues):
            for channel in self.queues:
                if self.can_take(channel):
                    self.take(channel)

    def take_several(self, channel: str, count: int) -> list[Row]:
        """By hand: take so many rows in one step."""
        rows = [row for row in (self.queues[channel].popleft() for _ in range(count)) if isinstance(row, Row)]
        self._step(self.links[channel].target, tuple((channel, row) for row in rows), (), None, "")
        return rows

    def send_several(self, process: str, channel: str, values: Iterable[str]) -> None:
        """A step that sends several rows."""
        self._step(process, (), tuple((channel, value, None) for value in values), None, "")

    # ---------------------------------------------------------------------------------------------------- performing

    def _step(
        self,
        process: str,
        takes: tuple[tuple[str, Row], ...],
        sends: tuple[tuple[str, str, Any], ...],
        state: str | None,
        label: str,
    ) -> None:
        taken = tuple(t.Span(channel, row.number, 1, (row.value,)) for channel, row in takes)
        sent: list[t.Span] = []
        for channel, value, load in sends:
            row = Row(self.sent[channel], value, load)
            self.sent[channel] += 1
            self.queues[channel].append(row)
            sent.append(t.Span(channel, row.number, 1, (value,)))
        before = self.states[process]
        after = before if state is None else state
        self.states[process] = after
        self._add(t.Step, process, taken, tuple(sent), before, after, label)

    def _feed(self, process: str, event: m.Event, row: Row | None = None) -> None:
        for effect in self._machines[process].handle(event):
            self._perform(process, effect, row)

    def _perform(self, process: str, effect: m.Effect, row: Row | None) -> None:
        match effect:
            case m.Freeze(id):
                self.cut(process, id)
                self._feed(process, m.Durable(id))
            case m.BroadcastBarrier(id):
                for channel in self.outputs(process):
                    self.queues[channel].append(_Marker(id, self.sent[channel]))
                    self._add(t.MarkerSent, process, id, channel, self.sent[channel])
            case m.StartRecording(id, channel):
                self._logs[id, str(channel)] = []
            case m.Record(channel, ids) if row is not None:
                for id in ids:
                    self._logs[id, str(channel)].append(row)
                    self.rows_logged += 1
            case m.StopRecording(id, channel):
                self.record(id, str(channel), self._logs.pop((id, str(channel))))
            case m.WriteLogs(id):
                self._feed(process, m.LogsDurable(id))
            case m.Acknowledge(id):
                acknowledged = self._acknowledged.setdefault(id, set())
                acknowledged.add(process)
                if len(acknowledged) == len(self._machines):
                    self.finish(id)
                    for other in self._machines:
                        self._feed(other, m.CompleteNotice(id))
            case _:
                return

    def _add(self, kind: type[t.Event], process: str, *fields: Any) -> None:
        self.now_ms += 1.0
        self._events.append(kind(self.now_ms, process, self.attempt, *fields))


def all_pairs(processes: Sequence[str]) -> list[tuple[str, str, str]]:
    """A channel from each of these processes, named P1, P2 and so on, to each other one."""
    return [(f"C{a[1:]}{b[1:]}", a, b) for a in processes for b in processes if a != b]


STEPS_MAX = 4000


def walk(
    stage: Stage,
    rng: random.Random,
    *,
    sources: Sequence[str],
    rows: int,
    hops: int,
    begin_after: Mapping[str, int] | None = None,
    cut_at_ms: Mapping[str, float] | None = None,
) -> None:
    """Let rows walk until nothing moves.

    Args:
        sources: processes that make rows by themselves.
        rows: how many all of them make.
        hops: a row goes on from process to process up to so many times.
        begin_after: process -> begins snapshot 1 once so many rows are made (at the latest when they all are).
        cut_at_ms: process -> records itself at that time, without a word to anybody.
    """
    made = 0
    to_begin, to_cut = dict(begin_after or {}), dict(cut_at_ms or {})
    for _ in range(STEPS_MAX):
        for process in [p for p, at in to_cut.items() if stage.now_ms >= at]:
            del to_cut[process]
            stage.cut(process, 1)
        moves: list[tuple[str, str]] = [("take", channel) for channel in stage.links if stage.can_take(channel)]
        moves += [("begin", process) for process, after in to_begin.items() if made >= after]
        if made < rows:
            moves += [("make", process) for process in sources]
        if not moves:
            break
        kind, name = rng.choice(moves)
        if kind == "begin":
            del to_begin[name]
            stage.begin(name, 1)
        elif kind == "make":
            stage.send(name, rng.choice(stage.outputs(name)), f"r{made}", load=rng.randrange(hops + 1))
            made += 1
        else:
            row, outputs = stage.head(name), stage.outputs(stage.links[name].target)
            if row is None or not row.load or not outputs:
                stage.take(name)
            else:
                stage.take(name, send=[(rng.choice(outputs), row.value, row.load - 1)])
    for process in to_cut:
        stage.cut(process, 1)
