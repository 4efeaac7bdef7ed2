"""From the plan to running subtasks: channels, operators and the core objects of one worker."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from cutwater.config import JobConfig
from cutwater.connectors.base import Sink
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import CutwaterError
from cutwater.operators.base import Operator, OperatorSpec
from cutwater.plan.graph import Channel, Edge, EdgeType, PhysicalPlan, Vertex
from cutwater.plan.planner import FusedNode, columns_of_source, filters_of_source, fuse_links, may_read_dictionaries
from cutwater.protocol.channel.items import Rows
from cutwater.protocol.channel.receiving import NO_LIMIT, ReceivingEnd
from cutwater.protocol.channel.sending import ReplayBuffer
from cutwater.protocol.job.recovery_scope import Division, Place
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.loop import SubtaskLoop
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.watermarks import InputTime, WatermarkMerger
from cutwater.runtime.chains.chain import Chain, EdgeOut, Node, ProcessingClock, SinkIdentity, SinkOperator, Target
from cutwater.runtime.chains.source_runner import SourceRunner
from cutwater.runtime.channels.connection import Connection
from cutwater.runtime.channels.output import MAX_BATCH_BYTES, OutputChannel
from cutwater.runtime.channels.partitioner import HashPartitioner
from cutwater.runtime.channels.spill import KeptRows, SpillingFrames
from cutwater.runtime.control.messages import Deploy
from cutwater.runtime.worker.restore import Restore
from cutwater.runtime.worker.subtask import Subtask, SubtaskParts, SubtaskPort
from cutwater.state.keys import key_group_range

if TYPE_CHECKING:
    from cutwater.runtime.control.determinant_logs import DeterminantLogs
    from cutwater.runtime.worker.recording import SubtaskDeterminants
    from cutwater.runtime.worker.tracing import WorkerTrace

LOOP_FRAMES = 2
"""Frames of rows that a channel of a loop, or into one, holds at most: what waits in a loop is in every snapshot, and
barriers wait behind what waits to enter.  One is being worked off while the other comes."""


@dataclass
class OperatorContext:
    """What an operator knows (``operators.base.Context``)."""

    step: str
    subtask: int
    parallelism: int
    max_parallelism: int
    key_groups: range
    counter: Callable[[str, str, int], None]
    clock: ProcessingClock
    incremental: bool
    notify: Callable[[], None]
    state_memory_bytes: int | None
    determinants: SubtaskDeterminants | None

    def __post_init__(self) -> None:
        self.repeatable = self.determinants is not None

    @property
    def repeating(self) -> bool:
        """It may be that its choices are known."""
        return self.determinants is not None and self.determinants.repeating

    def processing_time_ms(self) -> int:
        """Milliseconds since the epoch."""
        return self.clock.now_ms()

    def count(self, metric: str, amount: int = 1) -> None:
        """Add to one of the step's counters."""
        self.counter(self.step, metric, amount)

    def wake(self) -> None:
        """Wake the worker's loop, from any thread."""
        self.notify()


class _SourceNode(Operator):
    """Stands for the read step in its chain; its rows come from the ``SourceRunner``."""


class Wiring:
    """Builds the subtasks of a region that one worker holds, for one attempt.

    Args:
        notify: wakes the worker's loop, from any thread.
        handed_down: called, by the loop, when something goes to a subtask that comes later in the same round.
    """

    def __init__(
        self,
        plan: PhysicalPlan,
        config: JobConfig,
        *,
        slot: int,
        division: Division,
        attempt: int,
        job_uid: str,
        connections: dict[Place, Connection],
        restore: Restore,
        deploy: Deploy,
        notify: Callable[[], None],
        handed_down: Callable[[], None],
        count: Callable[[str, str, int], None],
        trace: WorkerTrace | None = None,
        logs: DeterminantLogs | None = None,
    ) -> None:
        self._plan, self._config, self._slot, self._attempt = plan, config, slot, attempt
        self._region_of, self._members = division.region_of, division.regions[deploy.region]
        self._uid, self._connections, self._restore, self._deploy = job_uid, connections, restore, deploy
        self._notify, self._handed_down, self._count, self._trace = notify, handed_down, count, trace
        self._clock = ProcessingClock(restore.processing_time_ms)
        self._logs = logs
        self._determinants: SubtaskDeterminants | None = None  # of the subtask that is being built
        self._inputs: dict[Channel, ReceivingEnd] = {}
        self._outputs: dict[Channel, OutputChannel] = {}
        self._senders: dict[Channel, Place] = {}
        self._receivers: dict[Channel, Place] = {}

    def build(self, port: SubtaskPort) -> list[Subtask]:
        """All subtasks, restored but not running.  The order lets rows flow down within one round."""
        for edge in self._plan.edges:
            self._make_channels(edge)
        return [self._subtask(v, port) for v in self._plan.vertices if (v.index, self._slot) in self._members]

    # --------------------------------------------------------------------------------------------------- channels

    def _make_channels(self, edge: Edge) -> None:
        for key in self._plan.channels(edge):
            receives = key.target == self._slot and (edge.target, key.target) in self._members
            sends = key.source == self._slot and (edge.source, key.source) in self._members
            if receives:
                self._make_input(edge, key, local=sends)
            if sends:
                self._make_output(edge, key, local=receives)

    def _make_input(self, edge: Edge, key: Channel, *, local: bool) -> None:
        known = self._restore.channel(key, sending=False)
        # Both ends go on with the sender's number, less what lies in the snapshot.  With at_least_once the receiver may
        # have taken rows beyond the barrier; a replay need not bring the same ones in their places, so none may be
        # dropped by number.
        sent = self._restore.channel(key, sending=True)
        waiting = self._restore.waiting(edge, key)
        next_row = next((i.first_row for i in waiting if type(i) is Rows), sent.next_row if sent else 0)
        sender = self._senders[key] = key.source, self._region_of[edge.source, key.source]
        capacity = NO_LIMIT if edge.back else self._frames(edge)
        # To disk where a sender must not be held up, nor whoever takes inputs in a given order.
        spills = edge.back or self._config.spill or bool(self._deploy.survivors)
        channel = self._inputs[key] = ReceivingEnd(
            key,
            capacity,
            self._handed_down if local and edge.source < edge.target else self._notify,
            credit_batch=1 if local else max(1, capacity // 2),
            next_row=next_row,
            watermark=known.watermark if known else MIN_WATERMARK,
            idle=known.idle if known else False,
            store=SpillingFrames(self._config.spill_memory_bytes) if spills else None,
            join=pa.concat_batches,
        )
        if not local:
            self._connections[sender].add_input(channel, edge.schema)
        channel.restore(waiting)

    def _make_output(self, edge: Edge, key: Channel, *, local: bool) -> None:
        known = self._restore.channel(key, sending=True)
        config = self._config
        place = self._receivers[key] = key.target, self._region_of[edge.target, key.target]
        receiver = self._inputs[key] if local else None
        output = self._outputs[key] = OutputChannel(
            key,
            edge.schema,
            receiver.put if receiver is not None else self._connections[place].sender(key),
            credit=receiver.capacity_frames if receiver is not None else NO_LIMIT if edge.back else 0,
            batch_rows=config.batch_rows,
            buffer_timeout_ms=config.buffer_timeout_ms,
            max_batch_bytes=MAX_BATCH_BYTES if local else config.max_frame_bytes // 2,
            on_ready=self._notify,
            next_row=known.next_row if known else 0,
            watermark=known.watermark if known else MIN_WATERMARK,
            idle=known.idle if known else False,
            kept=None if local else self._keep(),
        )
        if receiver is None:
            self._connections[place].add_output(output)
            if place in self._deploy.survivors:
                output.restore(self._restore.overtaken(edge, key))
        elif not edge.back:
            receiver.on_credit = output.grant

    def _keep(self) -> ReplayBuffer | None:
        if self._config.recovery != "task":
            return None
        base = self._deploy.restore.checkpoint_id if self._deploy.restore is not None else 0
        most = self._config.replay_memory_bytes
        return ReplayBuffer(KeptRows(most), most_memory_bytes=most, base=base)

    def inputs_from(self, place: Place) -> list[tuple[Channel, ReceivingEnd]]:
        """Receiving ends of the channels from there."""
        return [(key, channel) for key, channel in self._inputs.items() if self._senders[key] == place]

    def outputs_to(self, place: Place) -> list[OutputChannel]:
        """Sending ends of the channels to there."""
        return [channel for key, channel in self._outputs.items() if self._receivers[key] == place]

    def _frames(self, edge: Edge) -> int:
        """Frames that a channel may hold: in a loop, and on the way into one, few."""
        most = self._config.channel_frames
        return most if self._plan.loop_of(edge.target) is None else min(most, LOOP_FRAMES)

    # --------------------------------------------------------------------------------------------------- subtasks

    def _subtask(self, vertex: Vertex, port: SubtaskPort) -> Subtask:
        key = (vertex.index, self._slot)
        edges = {
            c: e for e in self._plan.inputs(vertex.index) for c in self._plan.channels(e) if c.target == self._slot
        }
        outgoing = {
            c: e for e in self._plan.outputs(vertex.index) for c in self._plan.channels(e) if c in self._outputs
        }
        loop = self._plan.loops[n] if (n := self._plan.loop_of(vertex.index)) is not None else frozenset[int]()
        inputs = [self._inputs[channel] for channel in edges]
        self._determinants = self._determinants_of(vertex, list(edges)) if outgoing else None
        chain, sinks = self._chain(vertex)
        parts = SubtaskParts(
            key=key,
            name=vertex.name,
            incarnation=self._attempt,
            inputs=inputs,
            input_numbers=[edge.target_input for edge in edges.values()],
            chain=chain,
            clock=self._clock,
            source=self._source(vertex),
            sinks=sinks,
            edges=edges | outgoing,
            back_edges=frozenset(c for c, e in edges.items() if e.back),
            loop_inputs=frozenset(c for c, e in edges.items() if e.source in loop),
            loop_outputs=frozenset(c for c, e in outgoing.items() if e.target in loop),
            key_groups=key_group_range(self._slot, vertex.parallelism, self._plan.max_parallelism),
            aligned_timeout_ms=self._config.aligned_timeout_ms or 0.0,
            spill=self._config.spill,
        )
        keys = [i.key for i in inputs]
        machine = SubtaskMachine(
            f"{vertex.name} {self._slot}",
            keys,
            protocol=PROTOCOLS[self._config.protocol],
            back_edges=frozenset[Hashable](parts.back_edges),
            loop_inputs=frozenset[Hashable](parts.loop_inputs),
            last_checkpoint_id=self._deploy.last_checkpoint_id,
        )
        budget_ms, max_call_ms = self._config.slice_budget_ms, self._config.max_call_ms
        decider = SubtaskLoop(machine, keys, budget_ms, self._config.batch_rows * 2, max_call_ms)
        merger = WatermarkMerger(keys, frozenset[Hashable](parts.back_edges), frozenset[Hashable](parts.loop_inputs))
        self._restore_subtask(vertex, parts, merger)
        if self._determinants is not None:
            from cutwater.runtime.worker.recording import RecordingSubtask

            return RecordingSubtask(parts, machine, decider, merger, port, budget_ms, determinants=self._determinants)
        make = Subtask if self._trace is None else self._trace.subtask
        return make(parts, machine, decider, merger, port, budget_ms)

    def _determinants_of(self, vertex: Vertex, inputs: list[Channel]) -> SubtaskDeterminants | None:
        """Where a recovery needs it: the determinant log of a subtask on whose choices others depend (R0)."""
        if self._logs is None:
            return None
        from cutwater.runtime.worker.recording import SubtaskDeterminants

        return SubtaskDeterminants(self._logs, (vertex.index, self._slot), vertex.steps, inputs, self._clock)

    def _source(self, vertex: Vertex) -> SourceRunner | None:
        step = self._plan.steps[vertex.steps[0]]
        if step.role != "source":
            return None
        rate = self._deploy.rates.get(step.id)
        columns = columns_of_source(self._plan, vertex)
        limit = self._deploy.limits.get(step.id) if self._deploy.limits is not None else None
        # Whoever follows a leader reads as far as the leader does, which may stand among rows of no use.
        filters = filters_of_source(self._plan, vertex) if limit is None else ()
        if self._determinants is None:
            runner = SourceRunner(step, self._slot, rate, columns, filters, may_read_dictionaries(self._plan, vertex))
        else:
            from cutwater.runtime.worker.recording import RecordingSource

            runner = RecordingSource(step, self._slot, rate, columns, filters, self._determinants)
        runner.limit, runner.job_uid, runner.incarnation = limit, self._uid, self._attempt
        runner.assign(self._deploy.splits.get(step.id, []), step.id in self._deploy.no_more_splits)
        return runner

    def _chain(self, vertex: Vertex) -> tuple[Chain, list[SinkOperator]]:
        fused = fuse_links(self._plan, vertex)
        nodes: list[Node] = []
        sinks: list[SinkOperator] = []
        for part in fused.nodes:
            operator = self._operator(part, vertex)
            if isinstance(operator, SinkOperator):
                sinks.append(operator)
            outputs = len(self._plan.steps[part.steps[-1]].outputs)
            nodes.append(Node(part.steps, operator, [[] for _ in range(outputs)]))
        for link in fused.links:
            nodes[link.source].routes[link.output].append(Target(link.target, link.input))
        outs: list[EdgeOut] = []
        position = {step: i for i, part in enumerate(fused.nodes) for step in part.steps}
        for edge in self._plan.outputs(vertex.index):
            out = self._edge_out(edge)
            outs.append(out)
            nodes[position[edge.source_step]].routes[edge.source_output].append(out)
        return Chain(nodes, outs), sinks

    def _edge_out(self, edge: Edge) -> EdgeOut:
        channels = [self._outputs[k] for k in self._plan.channels(edge) if k.source == self._slot]
        partitioner = None
        if edge.type is EdgeType.HASH:
            targets = self._plan.vertices[edge.target].parallelism
            partitioner = HashPartitioner(edge.schema, edge.keys, targets, self._plan.max_parallelism)
        sent = self._plan.steps[edge.source_step].outputs[edge.source_output].schema
        columns = edge.schema.names if len(edge.schema) < len(sent) else None
        broadcast = edge.type is EdgeType.BROADCAST
        loop = self._plan.loop_of(edge.source)
        in_loop = loop is not None and loop == self._plan.loop_of(edge.target)
        return EdgeOut(
            channels,
            partitioner=partitioner,
            broadcast=broadcast,
            schema=edge.schema,
            columns=columns,
            back=edge.back,
            in_loop=in_loop,
        )

    def _operator(self, part: FusedNode, vertex: Vertex) -> Operator:
        step = self._plan.steps[part.steps[-1]]
        operator: Operator
        if step.role == "source":
            operator = _SourceNode()
        elif step.role == "sink":
            source = step.inputs[0]
            schema = self._plan.steps[source.step].outputs[source.output].schema
            identity = SinkIdentity(self._uid, step.id, self._slot, vertex.parallelism, self._attempt)
            states = self._restore.sink_states(step.id, self._slot, vertex.parallelism)
            operator = SinkOperator(step.id, cast(Sink, step.spec), schema, identity, states)
        else:
            operator = cast(OperatorSpec, part.spec).build()
        groups = key_group_range(self._slot, vertex.parallelism, self._plan.max_parallelism)
        shape = (self._slot, vertex.parallelism, self._plan.max_parallelism, groups)
        incremental = self._config.tracks_changes
        on_disk = self._config.state_memory_bytes if self._config.state_backend == "rocksdb" else None
        clock = self._clock if self._determinants is None else self._determinants.clock
        ask = (self._notify, on_disk, self._determinants)
        try:
            operator.open(OperatorContext(step.id, *shape, self._count, clock, incremental, *ask))
        except CutwaterError as e:
            e.step = e.step or step.id
            raise
        if step.role == "operator":
            self._restore.into(operator, step.id, self._slot, vertex.parallelism, groups)
        return operator

    def _restore_subtask(self, vertex: Vertex, parts: SubtaskParts, merger: WatermarkMerger) -> None:
        watermark = self._restore.watermark(vertex.index, self._slot)
        if watermark is None:
            return
        parts.chain.watermark = watermark
        times: dict[Hashable, InputTime] = {c.key: InputTime(c.watermark, c.idle) for c in parts.inputs}
        if self._determinants is not None:  # an end that was taken before the cut is not in the log
            records = (self._restore.channel(c.key, sending=False) for c in parts.inputs)
            ended = InputTime(MAX_WATERMARK)
            times |= {Channel(r.edge, r.source, r.target): ended for r in records if r is not None and r.ended}
        merger.restore(times, watermark if parts.inputs else MIN_WATERMARK)
        if parts.source is not None:
            parts.source.restore_watermark(watermark)
