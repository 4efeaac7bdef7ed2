"""A network in this process: one thread, a seeded order of events, a simulated clock."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from cutwater.config import parse_duration_ms
from cutwater.errors import ConfigError, CutwaterError, IncompleteSnapshotError
from cutwater.process_networks.cell import Cell, CellPort, Tracer
from cutwater.process_networks.graph import ChannelSpec, Network, suitable
from cutwater.process_networks.messages import Item, names_of
from cutwater.process_networks.run import PendingSnapshot, Run
from cutwater.process_networks.snapshot import GlobalSnapshot
from cutwater.protocol.snapshot_algorithms import AlgorithmName
from cutwater.runtime.control.messages import Message, ProcessPart

STEP_MS = 0.01
"""Simulated time of one event."""


class LocalRun(Run):
    """Obtained from ``Network.run_local``.  Nothing happens between the calls of its methods.

    Every step takes one item from one channel that has any, chosen by the seed, or fires a timer that is due; when
    there is nothing to take, the clock goes on to the next timer.

    Args:
        algorithm: ``None`` takes Chandy-Lamport where all channels are FIFO, Lai-Yang otherwise.
        checked: verify the counts of each snapshot (CL6).  Turned off to show a wrong one.

    Other arguments as for ``Network.run_local``.
    """

    def __init__(
        self,
        network: Network,
        *,
        seed: int = 0,
        restore: GlobalSnapshot | None = None,
        snapshot_every: str | None = None,
        trace: str | os.PathLike[str] | None = None,
        algorithm: AlgorithmName | None = None,
        checked: bool = True,
    ) -> None:
        super().__init__(network, algorithm or suitable(network), restore)
        self._seed, self._checked = seed, checked
        self._random = random.Random(seed)
        self._every_ms = parse_duration_ms(snapshot_every, name="snapshot_every") if snapshot_every else None
        self._next_snapshot_ms = 0.0
        self._periodic: PendingSnapshot | None = None
        self._now_ms = max((p.time_ms for p in restore.parts.values()), default=0.0) if restore is not None else 0.0
        self._paused: set[str] = set()
        self.attempt = 1
        self.steps = 0
        """Items taken and timers fired so far."""
        self._stream: BinaryIO | None = None
        self._port = CellPort()
        self._port.send, self._port.part = self._send, self._part
        self._port.now_ms = lambda: self._now_ms
        if trace is not None:
            self._stream = Path(trace).open("wb")  # noqa: SIM115 - open until stop()
            self._port.tracer = Tracer(self._stream, network, self._port.now_ms)
        self._cells: dict[str, Cell] = {}
        self._queues: dict[str, ItemQueue] = {}
        self._ready = ReadySet(self._random)
        self._timers: set[str] = set()
        self._build(restore)

    # --------------------------------------------------------------------------------------------- what users call

    @property
    def now_ms(self) -> float:
        """Simulated milliseconds since the network first started."""
        return self._now_ms

    def advance(self, duration: str) -> None:
        """Let simulated time pass.

        Raises:
            UserCodeError: a process failed.
        """
        self.wait_until(lambda: False, parse_duration_ms(duration, name="duration"))

    def step(self, count: int = 1) -> int:
        """Take up to ``count`` steps; returns how many there were to take."""
        for done in range(count):
            if not self._step(float("inf")):
                return done
        return count

    def run_until_quiet(self, max_steps: int = 10_000_000) -> int:
        """Run until there is nothing to do; returns the steps taken.

        Raises:
            CutwaterError: there still was after ``max_steps``.
        """
        done = self.step(max_steps)
        if done == max_steps and (self._ready or self._next_timer() is not None):
            raise CutwaterError(
                f"network {self.network.name!r} is not quiet after {max_steps} steps",
                hint="Does it ever end? advance('1s') lets time pass, watch(...) looks for a property.",
            )
        return done

    def state(self, process: str) -> object:
        """The state of a process now; for looking, not for changing."""
        return self._cell(process).process

    def pause(self, process: str) -> None:
        """A process takes nothing any more, as if it hung."""
        self._paused.add(self._cell(process).name)
        for channel in self._cell(process).inputs:
            self._ready.discard(channel)

    def resume(self, process: str) -> None:
        """The process goes on."""
        self._paused.discard(process)
        for channel in self._cell(process).inputs:
            if self._queues[channel]:
                self._ready.add(channel)

    def crash(self, process: str) -> None:
        """A process loses everything: the network goes back to the last global snapshot, or to its beginning.

        What lies in the channels of the snapshot is delivered again; what was sent after it never was.
        """
        tracer, last = self._port.tracer, self.last_snapshot
        self._cell(process)
        if tracer is not None:
            for name in self._cells:
                tracer.crashed(name)
        self._periodic = None
        self._fail_pending(
            IncompleteSnapshotError(
                f"process {process!r} crashed while the snapshot was taken",
                hint="The network went back to its last snapshot: take a new one.",
            )
        )
        self.attempt += 1
        self._random.seed(f"{self._seed}/{self.attempt}")
        if tracer is not None:
            tracer.attempt = self.attempt
        self._build(last)

    def stop(self) -> None:
        """Close the trace."""
        if self._stream is not None:
            self._stream.close()

    # ---------------------------------------------------------------------------------------------------- the steps

    def wait_until(self, condition: Callable[[], bool], timeout_ms: float) -> bool:
        end_ms = self._now_ms + timeout_ms
        while not condition():
            if self._now_ms >= end_ms:
                return False
            if not self._step(end_ms):
                self._now_ms, over = end_ms, self._next_due() is None
                if over:
                    return True
        return True

    def _step(self, end_ms: float) -> bool:
        """One event before ``end_ms``; false if there is none."""
        timers = self._due_timer() if self._timers else None
        if not self._ready and timers is None:
            due = self._next_due()
            if due is None or due > end_ms:
                return False
            self._now_ms = max(self._now_ms, due)
            timers = self._due_timer()
        self._now_ms += STEP_MS
        if self._every_ms is not None and self._now_ms >= self._next_snapshot_ms:
            if self._periodic is None or self._periodic.done:
                self._periodic = self._begin(self.network.initiators())
            self._next_snapshot_ms = self._now_ms + self._every_ms
        if timers is not None and (not self._ready or self._random.random() < 0.5):
            self._fire(timers)
        elif self._ready:
            self._take(self._ready.pick())
        self.steps += 1
        return True

    def _take(self, channel: str) -> None:
        queue = self._queues[channel]
        item = queue.pop()
        if not queue:
            self._ready.discard(channel)
        cell = self._cells[queue.spec.target]
        cell.take(channel, item)
        if cell.next_timer_ms is not None:
            self._timers.add(cell.name)

    def _fire(self, name: str) -> None:
        cell = self._cells[name]
        cell.fire()
        if cell.next_timer_ms is None:
            self._timers.discard(name)

    def _send(self, channel: ChannelSpec, item: Item) -> None:
        self._queues[channel.name].push(item)
        if channel.target not in self._paused:
            self._ready.add(channel.name)

    def _due_timer(self) -> str | None:
        """Whose timer is due, the earliest first."""
        found = min(
            ((due, n) for n in self._timers if n not in self._paused and (due := self._cells[n].next_timer_ms)
             is not None and due <= self._now_ms),
            default=None,
        )  # fmt: skip
        return found[1] if found is not None else None

    def _next_timer(self) -> float | None:
        due = (self._cells[n].next_timer_ms for n in self._timers if n not in self._paused)
        return min((d for d in due if d is not None), default=None)

    def _next_due(self) -> float | None:
        """Time at which something happens by itself, while no channel has anything."""
        if self._ready:
            return self._now_ms
        return self._next_timer()

    # ---------------------------------------------------------------------------------------------------- snapshots

    def _begin(self, initiators: tuple[str, ...]) -> PendingSnapshot:
        pending = self._new_pending(initiators)
        for name in initiators:
            if name not in self._paused:  # a hung process does not begin anything either
                self._cells[name].trigger(pending.id)
        return pending

    def give_up(self, pending: PendingSnapshot) -> None:
        self._pending.pop(pending.id, None)
        for cell in self._cells.values():
            cell.abort(pending.id)
        if self._port.tracer is not None:
            self._port.tracer.aborted(pending.id)

    def _part(self, id: int, part: ProcessPart) -> None:
        if self.part_arrived(id, part) is not None and self._port.tracer is not None:
            self._port.tracer.completed(id)

    def _check(self, snapshot: GlobalSnapshot) -> None:
        if self._checked:
            snapshot.check()

    # ------------------------------------------------------------------------------------------------------ building

    def _build(self, restore: GlobalSnapshot | None) -> None:
        """Processes and channels, from the beginning or as a snapshot has them."""
        network = self.network
        inputs: dict[str, list[ChannelSpec]] = {n: [] for n in network.processes}
        outputs: dict[str, list[ChannelSpec]] = {n: [] for n in network.processes}
        for channel in network.channels.values():
            inputs[channel.target].append(channel)
            outputs[channel.source].append(channel)
        self._ready.clear()
        self._queues = {c.name: ItemQueue(c, self._random) for c in network.channels.values()}
        self._cells = {
            name: Cell(
                network,
                name,
                self._port,
                inputs=inputs[name],
                outputs=outputs[name],
                algorithm=self.algorithm,
                seed=self._seed,
                restore=restore.parts[name] if restore is not None else None,
                last=self.newest_id,
            )
            for name in network.processes
        }
        if restore is not None or self.attempt > 1:
            for cell in self._cells.values():
                cell.trace_restored(restore.id if restore is not None else None)
        if restore is not None:
            for channel in network.channels.values():
                for m in restore.log(channel.name):
                    self._send(channel, Message(m.number, m.kind, m.body, self.newest_id))
        order = list(self._cells.values())
        self._random.shuffle(order)
        for cell in order:
            cell.start()
        self._timers = {cell.name for cell in order if cell.next_timer_ms is not None}
        self._next_snapshot_ms = self._now_ms + (self._every_ms or 0.0)

    def _cell(self, name: str) -> Cell:
        cell = self._cells.get(name)
        if cell is None:
            raise ConfigError(f"no process {name!r}", hint=f"There are: {names_of(self._cells)}.")
        return cell


class ItemQueue:
    """Items under way in one channel: first in, first out, or any order if the channel says so."""

    __slots__ = ("_items", "_random", "spec")

    def __init__(self, spec: ChannelSpec, random: random.Random) -> None:
        self.spec = spec
        self._random = random
        self._items: deque[Item] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def push(self, item: Item) -> None:
        self._items.append(item)

    def pop(self) -> Item:
        """Take the next item."""
        items = self._items
        if self.spec.fifo:
            return items.popleft()
        at = self._random.randrange(len(items))
        items[at], items[-1] = items[-1], items[at]
        return items.pop()


class ReadySet:
    """A set with a fair random choice, each operation in constant time.

    >>> ready = ReadySet(random.Random(1))
    >>> for name in ("a", "b", "c"): ready.add(name)
    >>> ready.discard("b")
    >>> sorted({ready.pick() for _ in range(50)})
    ['a', 'c']
    """

    __slots__ = ("_names", "_places", "_random")

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._names: list[str] = []
        self._places: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        """Add a name; nothing if it is in."""
        if name not in self._places:
            self._places[name] = len(self._names)
            self._names.append(name)

    def discard(self, name: str) -> None:
        """Remove a name; nothing if it is not in."""
        place = self._places.pop(name, None)
        if place is not None:
            last = self._names.pop()
            if last != name:
                self._names[place] = last
                self._places[last] = place

    def clear(self) -> None:
        self._names.clear()
        self._places.clear()

    def pick(self) -> str:
        """One of the names."""
        return self._names[int(self._random.random() * len(self._names))]
