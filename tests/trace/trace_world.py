"""Chandy-Lamport written down once more, on a page, for the checker's tests: it shares no code with the core.

Processes send numbered rows at random; a snapshot may be told to go wrong in one of several ways.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import Any

from cutwater.trace.events import (
    Completed,
    Crashed,
    Cut,
    Event,
    Header,
    Link,
    MarkerSent,
    MarkerTaken,
    Recorded,
    Restored,
    Span,
    Step,
    Trace,
)


class TinyNetwork:
    """A run of ``count`` processes, every pair joined by two channels.

    Args:
        seed: of every choice.
        fault: "", or what goes wrong: "late cut", "marker late", "log short", "log long", "log empty".
    """

    def __init__(self, seed: int, count: int = 3, fault: str = "") -> None:
        self.rng, self.fault = random.Random(seed), fault
        names = [f"p{i}" for i in range(count)]
        links = tuple(Link(f"{a}{b}", a, b) for a in names for b in names if a != b)
        self.header = Header(tuple(names), links, marked=True)
        self.events: list[Event] = []
        self.clock, self.attempt, self.snapshot = 0.0, 1, 0
        self.total = dict.fromkeys(names, 0)
        self.sent = {c.name: 0 for c in links}
        self.queues: dict[str, deque[Any]] = {c.name: deque() for c in links}
        self.cut: dict[str, int] = {}
        self.late: set[str] = set()
        self.logs: dict[str, list[int]] = {}
        self.waiting: set[str] = set()
        self.parts: dict[int, dict[str, Any]] = defaultdict(dict)

    def trace(self) -> Trace:
        return Trace(self.header, tuple(self.events))

    def add(self, kind: type[Event], process: str, *fields: Any) -> None:
        self.clock += 1.0
        self.events.append(kind(self.clock, process, self.attempt, *fields))

    def outputs(self, process: str) -> list[str]:
        return [c.name for c in self.header.channels if c.source == process]

    def step(self) -> None:
        """A process sends a row, or takes what is at the head of a channel."""
        full = [name for name, queue in self.queues.items() if queue]
        if not full or self.rng.random() < 0.45:
            process = self.rng.choice(self.header.processes)
            self.act(process, (), self.rng.choice(self.outputs(process)))
            return
        channel = self.rng.choice(full)
        self.take(channel)

    def act(self, process: str, takes: tuple[Span, ...], send_to: str | None) -> None:
        before = str(self.total[process])
        self.total[process] += 1
        sends: tuple[Span, ...] = ()
        if send_to is not None:
            row = self.sent[send_to]
            sends = (Span(send_to, row, 1, (f"{send_to}{row}a{self.attempt}",)),)
            self.queues[send_to].append((row, sends[0].values[0]))
            self.sent[send_to] = row + 1
        self.add(Step, process, takes, sends, before, str(self.total[process]))
        if process in self.late:
            self.late.discard(process)
            self.send_markers(process)

    def take(self, channel: str) -> None:
        target = channel[2:]
        item = self.queues[channel].popleft()
        if item[0] == "marker":
            self.add(MarkerTaken, target, self.snapshot, channel, item[1])
            self.take_marker(target, channel)
            return
        row, value = item
        if channel in self.logs and channel in self.waiting:
            self.logs[channel].append(row)
        forward = self.rng.choice([None, *self.outputs(target)]) if self.rng.random() < 0.5 else None
        self.act(target, (Span(channel, row, 1, (value,)),), forward)

    def begin(self, snapshot: int) -> None:
        self.snapshot, self.cut, self.logs = snapshot, {}, {}
        self.waiting = set(self.queues)
        self.record(self.rng.choice(self.header.processes))

    def record(self, process: str) -> None:
        self.cut[process] = self.total[process]
        self.parts[self.snapshot][process] = self.total[process], {c: self.sent[c] for c in self.outputs(process)}
        self.add(Cut, process, self.snapshot, str(self.total[process]))
        for link in self.header.channels:
            if link.target == process:
                self.logs[link.name] = []
        if self.fault == "marker late":
            self.late.add(process)
        else:
            self.send_markers(process)

    def send_markers(self, process: str) -> None:
        for channel in self.outputs(process):
            self.add(MarkerSent, process, self.snapshot, channel, self.sent[channel])
            self.queues[channel].append(("marker", self.sent[channel]))

    def take_marker(self, process: str, channel: str) -> None:
        if process not in self.cut:
            if self.fault == "late cut" and not self.late:
                self.late.add(process)
                self.act_late(process)
            self.record(process)
        self.waiting.discard(channel)
        rows = self.logs[channel]
        if self.fault == "log short" and rows:
            rows = rows[1:]
        if self.fault == "log long" and channel in self.logs and rows:
            rows = [rows[0] - 1, *rows] if rows[0] else [*rows, rows[-1] + 1]
        if self.fault == "log empty":
            rows = []
        spans = tuple(Span(channel, row) for row in rows)
        self.add(Recorded, process, self.snapshot, channel, spans)
        self.parts[self.snapshot][channel] = rows
        if not self.waiting:
            self.add(Completed, "p0", self.snapshot)

    def act_late(self, process: str) -> None:
        """Rows of other channels slip in between the marker and the cut, from behind their markers too."""
        self.late.discard(process)
        for link in self.header.channels:
            queue = self.queues[link.name]
            if link.target == process and queue and queue[0][0] != "marker":
                self.take(link.name)
        self.act(process, (), None)
        for link in self.header.channels:
            queue = self.queues[link.name]
            if link.target == process and len(queue) > 1 and queue[0][0] == "marker" and queue[1][0] != "marker":
                row, value = queue[1]
                del queue[1]
                self.act(process, (Span(link.name, row, 1, (value,)),), None)

    def complete(self) -> bool:
        return any(isinstance(e, Completed) and e.snapshot == self.snapshot for e in self.events)

    def crash_and_restore(self, snapshot: int) -> None:
        """One process is lost; all go back to the snapshot, its channel contents first."""
        self.add(Crashed, self.rng.choice(self.header.processes))
        parts = self.parts[snapshot]
        values = {(s.channel, s.first): s.values[0] for e in self.events if isinstance(e, Step) for s in e.sends}
        self.attempt += 1
        for process in self.header.processes:
            self.total[process], sent = parts[process]
            self.sent |= sent
            self.add(Restored, process, snapshot)
        for channel in self.queues:
            self.queues[channel] = deque((row, values[channel, row]) for row in parts.get(channel, ()))


def run(seed: int, *, count: int = 3, fault: str = "", steps: int = 60, crash: bool = False) -> Trace:
    """One snapshot in the middle of a run; with ``crash`` a recovery from it and a second snapshot."""
    world = TinyNetwork(seed, count, fault)
    for _ in range(steps // 3):
        world.step()
    world.begin(1)
    for _ in range(50 * steps):
        if world.complete():
            break
        world.step()
    if crash:
        for _ in range(world.rng.randrange(10)):
            world.step()
        world.crash_and_restore(1)
        for _ in range(10):
            world.step()
        world.begin(2)
        for _ in range(50 * steps):
            if world.complete():
                break
            world.step()
    return world.trace()
