"""The operators of one subtask, joined: rows, watermarks and freezes go through them in order.

A vertex is a tree of steps.  ``Chain`` routes each output either to the next operator (a call, no queue) or to the
outgoing edges.  It holds no protocol: when to freeze and what to take next is decided by the core.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from cutwater.connectors.base import Committer, Json, PreCommit, Sink, SinkHooks, SinkWriter
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import CutwaterError, UserCodeError
from cutwater.operators.base import Operator, Outputs
from cutwater.protocol.subtask.call_size import CallCost, CallSize
from cutwater.runtime.channels.output import OutputChannel
from cutwater.runtime.channels.partitioner import HashPartitioner
from cutwater.runtime.channels.texts import plain_rows
from cutwater.runtime.control.messages import FixedCost
from cutwater.runtime.failures import sink_error
from cutwater.state.segments import EMPTY, Frozen


@dataclass(slots=True)
class Target:
    """Where an output goes inside the chain."""

    node: int
    input: int


class EdgeOut:
    """The sending end of an edge in one subtask: picks the channel for each row, and makes texts plain.

    ``schema``: of the rows that go over it.  ``columns``: those that do, if not all.  ``back``: it closes a loop; no
    watermark goes over it (W3).  ``in_loop``: both ends lie in the same loop.
    """

    def __init__(
        self,
        channels: Sequence[OutputChannel],
        *,
        partitioner: HashPartitioner | None,
        broadcast: bool,
        schema: pa.Schema,
        columns: list[str] | None = None,
        back: bool = False,
        in_loop: bool = False,
    ) -> None:
        self.channels, self._schema = list(channels), schema
        self.timed = [] if back else self.channels
        self.in_loop = in_loop
        self._partitioner = partitioner
        self._broadcast = broadcast
        self._columns = columns
        self._next = 0

    def begin_turns(self) -> None:
        """The first channel is the next one: where the state is frozen, if what follows may have to be done again."""
        self._next = 0

    def send(self, batch: pa.RecordBatch, late_before: int) -> None:
        if self._columns is not None:
            batch = batch.select(self._columns)
        if self._partitioner is not None:
            for target, part in self._partitioner.split(batch):
                self.channels[target].offer(plain_rows(part, self._schema), late_before)
            return
        batch = plain_rows(batch, self._schema)
        if self._broadcast:
            for channel in self.channels:
                channel.offer(batch, late_before)
        else:  # forward has one channel; rebalance takes turns
            self.channels[self._next].offer(batch, late_before)
            self._next = (self._next + 1) % len(self.channels)


@dataclass(slots=True)
class Node:
    """One operator of the chain (several fused steps share one)."""

    steps: tuple[str, ...]
    operator: Operator
    routes: list[list[Target | EdgeOut]]
    """Per output."""
    rows_in: int = 0
    rows_out: int = 0
    rows_unread: dict[int, int] = field(default_factory=dict[int, int])
    """Per output that leads nowhere."""
    busy_s: float = 0.0
    """Time spent in the operator, and in sending what it gave out."""

    @property
    def step(self) -> str:
        return self.steps[-1]


class Chain:
    """Operators in topological order; node 0 is the head.

    ``pending`` is true while a bounded slice of work (timers, joined rows, a watermark on its way) is left; the caller
    must ``resume`` until it is false before it brings the next input or freezes.
    """

    def __init__(self, nodes: Sequence[Node], outs: Sequence[EdgeOut]) -> None:
        self.nodes = list(nodes)
        self.outs = list(outs)
        self.watermark = MIN_WATERMARK
        self._passing: int | None = None  # node that the watermark in passage has reached
        self._entered = False
        self._late_before = MIN_WATERMARK  # of the rows in passage, and of what comes of them
        # Most operators wait for no clock; those are not asked before every action.
        self._clocked = [i for i, n in enumerate(self.nodes) if _overrides(n.operator, "next_processing_time_ms")]
        self._stateful = [n for n in self.nodes if _overrides(n.operator, "freeze")]
        # Those that keep rows back: the watermark that went out may be behind the one that came in.
        self._keepers = [n.operator for n in self.nodes if _overrides(n.operator, "held_watermark")]
        self._sent = MIN_WATERMARK

    @property
    def pending(self) -> bool:
        if self._passing is not None or any(n.operator.pending for n in self.nodes):
            return True
        return bool(self._keepers) and self._sendable > self._sent

    @property
    def answered(self) -> bool:
        """Whether something has come from outside (``Operator.answered``)."""
        return bool(self._keepers) and any(operator.answered for operator in self._keepers)

    @property
    def room(self) -> int | None:
        """How many rows the operators take now; ``None``: any number."""
        rooms = [room for operator in self._keepers if (room := operator.room) is not None]
        return min(rooms) if rooms else None

    @property
    def keeps_rows(self) -> bool:
        """Whether rows are kept back, that something outside will set free."""
        return any(operator.held_watermark is not None for operator in self._keepers)

    @property
    def full(self) -> bool:
        """True while some outgoing channel takes no more rows."""
        return any(c.full for out in self.outs for c in out.channels)

    def process(self, input: int, batch: pa.RecordBatch, late_before: int = MIN_WATERMARK) -> None:
        """Rows for one input of the head; ``late_before``: see ``Rows``."""
        self._late_before = late_before
        self._run(0, input, batch)

    def read(self, outputs: Outputs, late_before: int) -> None:
        """What the source at the head gives; ``late_before``: see ``Rows``."""
        self._late_before = late_before
        self.emit(0, outputs)

    def emit(self, node: int, outputs: Outputs) -> None:
        """Route what an operator gave out."""
        routes = self.nodes[node].routes
        for output, batch in outputs:
            if batch.num_rows == 0:
                continue
            if output == 0:
                self.nodes[node].rows_out += batch.num_rows
            targets = routes[output]
            if not targets:
                unread = self.nodes[node].rows_unread
                unread[output] = unread.get(output, 0) + batch.num_rows
            for target in targets:
                if isinstance(target, Target):
                    self._run(target.node, target.input, batch)
                else:
                    started = time.perf_counter()
                    target.send(batch, self._late_before)
                    self.nodes[node].busy_s += time.perf_counter() - started

    @property
    def next_processing_time_ms(self) -> int | None:
        """When the first operator wants ``on_processing_time``; ``None`` if none waits."""
        times = [t for n in self._clocked if (t := self.nodes[n].operator.next_processing_time_ms) is not None]
        return min(times) if times else None

    @property
    def timers_pending(self) -> bool:
        """Whether the clock alone may make rows."""
        return any(self.nodes[n].operator.timers_pending for n in self._clocked)

    def on_processing_time(self, now_ms: int) -> None:
        """One slice of what is due, of the operator that waited longest."""
        due: list[tuple[int, int]] = []
        for index in self._clocked:
            time_ms = self.nodes[index].operator.next_processing_time_ms
            if time_ms is not None and time_ms <= now_ms:
                due.append((time_ms, index))
        if not due:
            return
        _, first = min(due)
        self._late_before = MIN_WATERMARK
        with _located(self.nodes[first]):
            outputs = self.nodes[first].operator.on_processing_time(now_ms)
        self.emit(first, outputs)

    def start_watermark(self, watermark: int) -> None:
        """Begin the passage of a watermark through all operators, then to all edges."""
        self.watermark, self._late_before = watermark, MIN_WATERMARK
        self._passing, self._entered = 0, False
        self.resume()

    def resume(self) -> None:
        """One slice of pending work."""
        for index, node in enumerate(self.nodes):
            if node.operator.pending:
                with _located(node):
                    outputs = node.operator.resume()
                self.emit(index, outputs)
                return
        if self._passing is None:
            self._send_watermark()
            return
        while self._passing < len(self.nodes):
            node = self.nodes[self._passing]
            if not self._entered:
                self._entered = True
                with _located(node):
                    outputs = node.operator.on_watermark(self.watermark)
                self.emit(self._passing, outputs)
            if any(n.operator.pending for n in self.nodes):
                return
            self._passing += 1
            self._entered = False
        self._passing = None
        self._send_watermark()

    def take_results(self, log: Callable[[int, bytes], None]) -> None:
        """What has come from outside, at the first operator that has something.

        Args:
            log: is told the place of the operator, and what it took, before anything leaves.
        """
        for index, node in enumerate(self.nodes):
            if node.operator.answered:
                with _located(node):
                    outputs, taken = node.operator.take_results()
                if taken:
                    log(index, taken)
                self._late_before = node.operator.late_before
                self.emit(index, outputs)
                break
        self._send_watermark()  # it is due before the rows of the next slice

    def repeat_results(self, place: int, taken: bytes) -> None:
        """The operator at this place took that."""
        with _located(self.nodes[place]):
            outputs = self.nodes[place].operator.repeat_results(taken)
        self._late_before = self.nodes[place].operator.late_before
        self.emit(place, outputs)
        self._send_watermark()

    @property
    def _sendable(self) -> int:
        """The watermark that no kept row holds back."""
        held = [w for operator in self._keepers if (w := operator.held_watermark) is not None]
        return min(self.watermark, *held) if held else self.watermark

    def _send_watermark(self) -> None:
        """The end of time goes with the end of the rows (W5): in a loop it may make more of them, which then leave."""
        watermark = self._sendable if self._keepers else self.watermark
        if self._keepers and watermark <= self._sent:
            return
        self._sent = watermark
        for out in self.outs:
            if watermark == MAX_WATERMARK and not out.in_loop:
                continue
            for channel in out.timed:
                channel.offer_watermark(watermark)

    def offer_idle(self, idle: bool) -> None:
        """Say that nothing is to be expected for now, or that something is."""
        for out in self.outs:
            for channel in out.timed:
                channel.offer_watermark(channel.watermark, idle)

    def freeze(self, checkpoint_id: int) -> list[tuple[str, Frozen]]:
        """The state of every operator that has some, under the id of its step."""
        frozen: list[tuple[str, Frozen]] = []
        for node in self._stateful:
            try:
                state = node.operator.freeze(checkpoint_id)
            except Exception as e:
                raise _locate(e, node) from e
            if state is not EMPTY:
                frozen.append((node.step, state))
        return frozen

    def close(self) -> None:
        for node in self.nodes:
            with contextlib.suppress(Exception):  # a failing close must not hide the failure that led here
                node.operator.close()

    def _run(self, index: int, input: int, batch: pa.RecordBatch) -> None:
        node = self.nodes[index]
        operator = node.operator
        while operator.pending:
            with _located(node):
                left = operator.resume()
            self.emit(index, left)
        node.rows_in += batch.num_rows
        operator.late_before = self._late_before
        started = time.perf_counter()
        try:
            outputs = operator.process(input, batch)
        except Exception as e:
            raise _locate(e, node) from e
        node.busy_s += time.perf_counter() - started
        self.emit(index, outputs)


def _overrides(operator: Operator, name: str) -> bool:
    return getattr(type(operator), name, None) is not getattr(Operator, name)


@contextlib.contextmanager
def _located(node: Node):
    """The operator works: what it raises says where, and the time counts as its own."""
    started = time.perf_counter()
    try:
        yield
    except Exception as e:
        raise _locate(e, node) from e
    node.busy_s += time.perf_counter() - started


def _locate(error: Exception, node: Node) -> Exception:
    """The error with the step it happened in; anything that is not ours is a failing user function or library call."""
    if isinstance(error, CutwaterError):
        if error.step is None:
            error.step = node.step
        return error
    return UserCodeError(f"{type(error).__name__}: {error}", step=node.step)


class ProcessingClock:
    """The wall clock, except that it never goes back: not when somebody sets it, not over a restore (W2).

    Args:
        floor_ms: the highest processing time that the restored snapshot holds, milliseconds since the epoch.

    >>> clock = ProcessingClock(floor_ms=2**60)
    >>> clock.now_ms() == 2**60
    True
    """

    __slots__ = ("_last_ms",)

    def __init__(self, floor_ms: int = 0) -> None:
        self._last_ms = floor_ms

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        self._last_ms = max(self._last_ms, time.time_ns() // 1_000_000)
        return self._last_ms


class StepCosts:
    """Fits the share of each step, while calls of the whole chain cost more than the budget without any row.

    Args:
        nodes: of the chain; they count their own time.
        calls: what calls of the whole chain cost.
    """

    def __init__(self, nodes: Sequence[Node], calls: CallSize) -> None:
        self._nodes, self._calls = nodes, calls
        self._costs: list[CallCost] = []
        self._began: list[float] | None = None

    def begin(self) -> None:
        """A call begins."""
        self._began = [node.busy_s for node in self._nodes] if self._calls.is_large else None

    def observe(self, rows: int) -> None:
        """The call had so many rows."""
        if self._began is None:
            self._costs = []
            return
        self._costs = self._costs or [CallCost() for _ in self._nodes]
        for cost, node, began in zip(self._costs, self._nodes, self._began, strict=True):
            cost.add(rows, (node.busy_s - began) * 1000)

    def report(self) -> tuple[str, FixedCost] | None:
        """The step with the largest fixed cost; ``None`` while calls are cheap."""
        if not self._costs or not self._calls.is_large:
            return None
        fixed_ms, at = max((cost.fixed_ms, at) for at, cost in enumerate(self._costs))
        node, calls = self._nodes[at], self._calls
        return node.step, FixedCost(node.steps[0], fixed_ms, calls.cost.fixed_ms, calls.cost.of(calls.rows), calls.rows)


@dataclass(slots=True)
class SinkIdentity:
    """Who writes (SinkContext); a pre-commit handle is named by it (T1)."""

    job_uid: str
    step: str
    subtask: int
    parallelism: int
    incarnation: int


class SinkOperator(Operator):
    """A sink's writer as the last operator of a chain.

    Its part of a snapshot is not a segment but what ``pre_commit``, called at a freeze, returns: handles to ``commit``
    when the checkpoint completes, and the writer's state.  Both go into the subtask's record.  Where the driver commits
    for all subtasks, handles are kept until it has.
    """

    def __init__(self, step: str, sink: Sink, schema: pa.Schema, identity: SinkIdentity, restored: list[Json]) -> None:
        self.step = step
        self._writer: SinkWriter = sink.writer(schema, identity, restored)
        hooks = SinkHooks(sink)
        here = not hooks.commits_globally
        self._committer: Committer | None = sink.committer(schema, identity.job_uid, step) if here else None
        self.commits_in_background = here and hooks.commits_in_background
        self._handles: dict[int, list[Json]] = {}
        self._lock = threading.Lock()
        self.rows = 0

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        self.rows += batch.num_rows
        self._writer.write(batch)
        return []

    def pre_commit(self, checkpoint_id: int, final: bool, savepoint: bool) -> Callable[[], PreCommit]:
        """Cut at the barrier; the returned function runs in the snapshot thread.

        A savepoint leaves no row in progress: it must not depend on files that the writer goes on with.
        """
        if savepoint:
            self._writer.roll()
        return self._writer.pre_commit(checkpoint_id, final)

    def pre_committed(self, checkpoint_id: int, handles: list[Json]) -> list[Json]:
        """Note what the snapshot thread made durable; returns every handle that is not committed yet.

        They all belong to this checkpoint: if an older one was aborted, its rows were handed on before its barrier and
        come never again, so the next checkpoint that completes commits them.
        """
        with self._lock:
            self._handles[checkpoint_id] = handles
            return [h for i in sorted(self._handles) if i <= checkpoint_id for h in self._handles[i]]

    def commit(self, checkpoint_id: int) -> None:
        """Commit this checkpoint and all older ones that were not (a newer notice commits all older).

        Handles are kept until they are committed: a checkpoint that completes meanwhile has them, too.

        Raises:
            CutwaterError: it failed; names the step.
        """
        if self._committer is None:
            return
        with self._lock:
            due = {i: self._handles[i] for i in sorted(self._handles) if i <= checkpoint_id}
        for known, handles in due.items():
            try:
                self._committer.commit(known, handles)
            except Exception as e:
                raise sink_error(e, "commit", known, self.step) from e
            self._forget_until(known)

    def committed_globally(self, checkpoint_id: int) -> None:
        """The driver has committed this checkpoint and all older ones."""
        if self._committer is None:
            self._forget_until(checkpoint_id)

    def _forget_until(self, checkpoint_id: int) -> None:
        with self._lock:
            self._handles = {i: handles for i, handles in self._handles.items() if i > checkpoint_id}

    def close(self) -> None:
        self._writer.close()
