"""Runs written down as traces (``trace_dir=``): what the simulator shows of its runs, of real ones.

Every worker writes one file per attempt, the driver one; together they are one trace: ``cutwater check-trace DIR``.
Only where tracing is wanted are the classes here in use, and this module is loaded.

A trace that is cut off by a SIGKILL must not look like a wrong run: whatever others can see of an action leaves the
worker after the line that tells of it is in the file.  Markers are written before they are sent; rows that an action
sends are held back until it is over and written.  Lines hold numbers of rows, never their contents.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cutwater.errors import ConfigError, StorageError
from cutwater.plan.graph import Channel, PhysicalPlan
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Barrier, Item, Rows, rows_in
from cutwater.protocol.channel.receiving import ReceivingEnd
from cutwater.protocol.subtask.host import ChannelLog
from cutwater.runtime.channels.output import OutputChannel
from cutwater.runtime.worker.subtask import Subtask, SubtaskParts
from cutwater.trace import events as e
from cutwater.trace.parts import SUFFIX

COORDINATOR = "coordinator"


class PartFile:
    """A new file for one part of a trace, which only its owner may read.

    Nothing is buffered here: what was written survives the death of the process.

    Args:
        folder: made if it is not there.
        name: of the file, without its suffix.

    Raises:
        ConfigError: it cannot be made.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.path = Path(folder, name + SUFFIX)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the trace {self.path} cannot be written: {error.strerror}",
                hint="trace_dir must be a directory that every worker can write into.",
            ) from error
        self._stream = os.fdopen(handle, "wb", buffering=0)

    def write(self, data: bytes, /) -> None:
        """Append whole lines.

        Raises:
            StorageError: the disk is full, or gone.
        """
        try:
            self._stream.write(data)
        except OSError as error:
            raise StorageError(
                f"the trace {self.path} cannot be continued: {error.strerror}",
                hint="Make room, or run without trace_dir.",
            ) from error

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        self._stream.close()


def part_of_worker(folder: str, name: str, uid: str, *, attempt: int, slot: int, incarnation: int) -> PartFile:
    """The file of one worker in one attempt."""
    return PartFile(folder, f"{name}-{uid[:8]}-{attempt:06}-{slot:04}-{incarnation}")


def part_of_driver(folder: str, name: str, uid: str) -> PartFile:
    """The file of one driver."""
    return PartFile(folder, f"{name}-{uid[:8]}-driver-{time.time_ns()}-{os.getpid()}")


def _header(plan: PhysicalPlan, uid: str) -> e.Header:
    processes = [_process(plan, v.index, i) for v in plan.vertices for i in range(v.parallelism)]
    links = [
        e.Link(_link(plan, c), _process(plan, edge.source, c.source), _process(plan, edge.target, c.target))
        for edge in plan.edges
        for c in plan.channels(edge)
    ]
    return e.Header(tuple(processes), tuple(links), title=plan.name, run=uid, marked=True)


def _process(plan: PhysicalPlan, vertex: int, subtask: int) -> str:
    return f"{plan.vertices[vertex].name} {subtask}"


def _link(plan: PhysicalPlan, channel: Channel) -> str:
    return f"{plan.edges[channel.edge].name} {channel.source}-{channel.target}"


def _now_ms() -> float:
    return time.time() * 1000


class DriverTrace:
    """The outcome of every checkpoint.

    Args:
        known: checkpoints that were complete before this driver began.
    """

    def __init__(self, folder: str, plan: PhysicalPlan, uid: str, *, known: Iterable[int]) -> None:
        self._file = part_of_driver(folder, plan.name, uid)
        self._write = e.TraceWriter(self._file, _header(plan, uid)).write
        self._known = set(known)

    def completed(self, checkpoint_id: int, attempt: int) -> None:
        self._known.add(checkpoint_id)
        self._write(e.Completed(_now_ms(), COORDINATOR, attempt, checkpoint_id))

    def aborted(self, checkpoint_id: int, attempt: int) -> None:
        self._write(e.Aborted(_now_ms(), COORDINATOR, attempt, checkpoint_id))

    def restoring(self, checkpoint_id: int, attempt: int) -> None:
        """An attempt begins from it: it is complete, even if there was a doubt when it was published."""
        if checkpoint_id not in self._known:
            self.completed(checkpoint_id, attempt)

    def close(self) -> None:
        self._file.close()


class WorkerTrace:
    """Trace of the subtasks of one worker in one attempt.

    Args:
        file: of this worker and attempt.
        restored: the checkpoint that the attempt begins from.
    """

    def __init__(self, file: PartFile, plan: PhysicalPlan, uid: str, *, attempt: int, restored: int | None) -> None:
        self._file, self._plan, self._attempt, self._restored = file, plan, attempt, restored
        self._write = e.TraceWriter(file, _header(plan, uid)).write
        self._links = {c: _link(plan, c) for edge in plan.edges for c in plan.channels(edge)}

    def subtask(self, parts: SubtaskParts, *others: Any) -> Subtask:
        """A restored subtask whose actions are written down; arguments as of ``Subtask``."""
        trace = SubtaskTrace(self._write, _process(self._plan, *parts.key), self._attempt, self._links)
        subtask = _TracedSubtask(parts, *others, trace=trace)
        if self._attempt > 1 or self._restored is not None:
            trace.restored(self._restored)
        return subtask

    def close(self) -> None:
        self._file.close()


class SubtaskTrace:
    """The events of one process, and how far its channels were when the last line was written."""

    def __init__(self, write: Callable[[e.Event], None], process: str, attempt: int, links: dict[Channel, str]) -> None:
        self._write, self._process, self._attempt, self._links = write, process, attempt, links
        self._inputs: Sequence[ReceivingEnd] = ()
        self._outputs: Sequence[OutputChannel] = ()
        self._taken: list[int] = []
        self._sent: list[int] = []
        self._gates: list[_Gate] = []

    def attach(self, inputs: Sequence[ReceivingEnd], outputs: Sequence[OutputChannel]) -> None:
        """The channels of the process, restored; nothing has gone through them yet."""
        self._inputs, self._outputs = inputs, outputs
        self._taken, self._sent = [c.next_row for c in inputs], [c.next_row for c in outputs]
        self._gates = [_Gate(channel) for channel in outputs]

    def begin(self) -> None:
        """An action begins: hold back what it sends."""
        for gate in self._gates:
            gate.close()

    def end(self) -> None:
        """The action is over: write it down, then let go what it sent."""
        self.moved()
        for gate in self._gates:
            gate.open()

    def moved(self) -> None:
        """The rows that went through since the last line; before any other event, which they precede."""
        taken, sent = [c.next_row for c in self._inputs], [c.next_row for c in self._outputs]
        if taken == self._taken and sent == self._sent:
            return
        takes = self._spans(zip(self._inputs, self._taken, taken, strict=True))
        sends = self._spans(zip(self._outputs, self._sent, sent, strict=True))
        self._taken, self._sent = taken, sent
        self._write(e.Step(_now_ms(), self._process, self._attempt, takes, sends))

    def restored(self, snapshot: int | None) -> None:
        sent = {self._links[c.key]: c.next_row for c in self._outputs}
        taken = {self._links[c.key]: c.next_row for c in self._inputs}
        self._write(e.Restored(_now_ms(), self._process, self._attempt, snapshot, sent, taken))

    def cut(self, snapshot: int) -> None:
        self.moved()
        self._write(e.Cut(_now_ms(), self._process, self._attempt, snapshot))

    def marker_sent(self, snapshot: int, channel: Channel, position: int) -> None:
        self.moved()
        self._write(e.MarkerSent(_now_ms(), self._process, self._attempt, snapshot, self._links[channel], position))

    def marker_taken(self, snapshot: int, channel: Channel, position: int) -> None:
        self.moved()
        self._write(e.MarkerTaken(_now_ms(), self._process, self._attempt, snapshot, self._links[channel], position))

    def recorded(self, snapshot: int, log: ChannelLog) -> None:
        rows = [i for i in log.items if type(i) is Rows]
        if rows:
            name = self._links[log.channel]
            span = e.Span(name, rows[0].first_row, sum(i.batch.num_rows for i in rows))
            self._write(e.Recorded(_now_ms(), self._process, self._attempt, snapshot, name, (span,)))

    def committed(self, snapshot: int) -> None:
        self._write(e.Committed(_now_ms(), self._process, self._attempt, snapshot))

    def _spans(self, moves: Iterable[tuple[ReceivingEnd | OutputChannel, int, int]]) -> tuple[e.Span, ...]:
        return tuple(e.Span(self._links[c.key], start, end - start) for c, start, end in moves if end > start)


class _Gate:
    """Between the sending end of a channel and what carries its items away; credit may come in any thread."""

    def __init__(self, channel: OutputChannel) -> None:
        self._lock = threading.Lock()
        self._held: deque[Item] = deque()
        self._closed = False
        self._send = channel.send_through(self._pass)

    def close(self) -> None:
        self._closed = True

    def open(self) -> None:
        with self._lock:
            while self._held:
                self._send(self._held.popleft())
            self._closed = False

    def _pass(self, item: Item) -> None:
        with self._lock:
            if self._closed:
                self._held.append(item)
            else:
                self._send(item)


class _TracedSubtask(Subtask):
    """Tells the trace of what it does, before anybody else can see it."""

    def __init__(self, *arguments: Any, trace: SubtaskTrace) -> None:
        super().__init__(*arguments)
        self._trace = trace
        trace.attach(self.inputs, self.outputs)

    def act(self, now_s: float) -> bool:
        self._trace.begin()
        try:
            return super().act(now_s)
        finally:
            self._trace.end()

    def barrier_taken(self, index: int, barrier: Barrier) -> None:
        if not barrier.probe:
            channel = self.inputs[index]
            position = channel.next_row + rows_in(barrier.overtaken) + barrier.behind
            self._trace.marker_taken(barrier.checkpoint_id, channel.key, position)

    def barrier_leaves(self, effect: m.BroadcastBarrier) -> None:
        if not effect.probe:
            for channel in self.outputs:
                self._trace.marker_sent(effect.checkpoint_id, channel.key, channel.next_row)

    def freeze(self, effect: m.Freeze) -> None:
        super().freeze(effect)
        self._trace.cut(effect.checkpoint_id)

    def write_logs(self, checkpoint_id: int, logs: list[ChannelLog]) -> None:
        for log in sorted(logs, key=lambda log: log.side):  # the receiver's before the sender's
            self._trace.recorded(checkpoint_id, log)
        super().write_logs(checkpoint_id, logs)

    def committed(self, checkpoint_id: int) -> None:
        if self.sinks:
            self._trace.committed(checkpoint_id)
