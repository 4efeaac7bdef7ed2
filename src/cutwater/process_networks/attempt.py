"""One attempt of a process network in one worker: its processes, and their channels to each other and to other workers.

Between workers a channel is a channel like those of a dataflow: one message is one row, a marker is a barrier, and both
are numbered.  Within a worker it is a queue.  Channels have no bound: a process never waits until it may send, or two
that send to each other could wait for ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from cutwater.errors import InvariantError
from cutwater.plan.graph import Channel
from cutwater.process_networks.cell import Cell, CellPort, Tracer
from cutwater.process_networks.graph import ChannelSpec, Network
from cutwater.process_networks.messages import Item, Marker
from cutwater.protocol.channel.items import Barrier, Rows
from cutwater.protocol.channel.receiving import ReceivingEnd
from cutwater.protocol.snapshot_algorithms import AlgorithmName
from cutwater.runtime.channels.output import OutputChannel
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.messages import (
    Message,
    NetworkDeploy,
    ProcessPart,
    SnapshotAbort,
    SnapshotParts,
    SnapshotTrigger,
)
from cutwater.runtime.worker.peers import ConnectedAttempt, PeerLost
from cutwater.runtime.worker.worker import SlotArgs

if TYPE_CHECKING:
    from cutwater.runtime.worker.tracing import PartFile
    from cutwater.runtime.worker.worker import Worker

_SCHEMA = pa.schema([("kind", pa.string()), ("body", pa.binary()), ("colour", pa.int64())])
_RUN = 64
"""Messages taken from one channel before the next one gets a turn."""
_ROUND = 512
"""Messages taken before the mailbox and the clock are looked at."""


@dataclass(frozen=True)
class NetworkArgs(SlotArgs):
    """The workers of a process network."""

    network: Network
    placement: dict[str, int]
    """Process -> slot."""
    algorithm: AlgorithmName
    seed: int

    def attempt(self, deploy: Any, worker: Worker) -> ConnectedAttempt:
        return NetworkAttempt(deploy, worker, self)


class NetworkAttempt(ConnectedAttempt):
    """See the module.

    Args:
        deploy: what the coordinator asks for.
        worker: the process it lives in.
        args: the network.
    """

    def __init__(self, deploy: NetworkDeploy, worker: Worker, args: NetworkArgs) -> None:
        super().__init__(deploy, worker)
        self._deploy, self._args = deploy, args
        self._cells: dict[str, Cell] = {}
        self._local: dict[str, deque[Item]] = {}
        """Per channel that ends here: what was restored, and of a channel that begins here all that waits in it."""
        self._arrivals: dict[str, ReceivingEnd] = {}
        self._outputs: dict[str, OutputChannel] = {}
        self._unsent: dict[str, list[Message]] = {}
        """Messages for other workers, not handed to their channel yet."""
        self._ready: deque[str] = deque()
        """Names of channels that may have something to take; some twice, some for nothing."""
        self._timers: set[str] = set()
        self._parts: dict[int, list[ProcessPart]] = {}
        self._started = False
        self._began_s = time.monotonic()
        self._taken = 0
        self._sent = 0
        self._trace: PartFile | None = None

    # ------------------------------------------------------------------------------------------------------- build

    def build(self) -> None:
        self._connect()
        network, slot, placement = self._args.network, self._slot, self._args.placement
        inputs: dict[str, list[ChannelSpec]] = {}
        outputs: dict[str, list[ChannelSpec]] = {}
        for number, spec in enumerate(network.channels.values()):
            key = Channel(number, placement[spec.source], placement[spec.target])
            if key.target == slot:
                inputs.setdefault(spec.target, []).append(spec)
                self._local[spec.name] = deque()
                if key.source != slot:
                    self._arrivals[spec.name] = self._input(spec, key)
            if key.source == slot:
                outputs.setdefault(spec.source, []).append(spec)
        parts = {p.process: p for p in self._deploy.parts or []}
        port = CellPort()
        port.send, port.part, port.now_ms = self._send, self._part, lambda: time.time() * 1000
        port.tracer = self._open_trace(port.now_ms)
        for name in network.processes:
            if placement[name] == slot:
                part = parts.get(name)
                self._cells[name] = Cell(
                    network,
                    name,
                    port,
                    inputs=inputs.get(name, []),
                    outputs=outputs.get(name, []),
                    algorithm=self._args.algorithm,
                    seed=self._args.seed,
                    restore=part,
                    last=self._deploy.last_id,
                )
                if self.number > 1 or part is not None:
                    self._cells[name].trace_restored(self._deploy.restored)
                self._restore_channels(part)
        for number, spec in enumerate(network.channels.values()):
            key = Channel(number, placement[spec.source], placement[spec.target])
            if key.source == slot and key.target != slot:
                self._outputs[spec.name] = self._output(spec, key)
        self._start_connections()

    def _open_trace(self, now_ms: Callable[[], float]) -> Tracer | None:
        folder, args = self._config.trace_dir, self._args
        if folder is None:
            return None
        from cutwater.runtime.worker.tracing import part_of_worker

        incarnation = self._deploy.incarnations[self._slot]
        self._trace = part_of_worker(
            folder, args.network.name, args.uid, attempt=self.number, slot=self._slot, incarnation=incarnation
        )
        tracer = Tracer(self._trace, args.network, now_ms, run=args.uid, contents=False)
        tracer.attempt = self.number
        return tracer

    def _input(self, spec: ChannelSpec, key: Channel) -> ReceivingEnd:
        def ready() -> None:
            self._ready.append(spec.name)
            self._worker.signal.set()

        frames, next_row = self._config.channel_frames, self._deploy.sent.get(spec.name, 0)
        channel = ReceivingEnd(key, frames, ready, credit_batch=max(1, frames // 2), next_row=next_row)
        self._connections[key.source, 0].add_input(channel, _SCHEMA)
        return channel

    def _output(self, spec: ChannelSpec, key: Channel) -> OutputChannel:
        next_row = self._cells[spec.source].sent[spec.name]
        connection, config = self._connections[key.target, 0], self._config
        channel = OutputChannel(
            key,
            _SCHEMA,
            connection.sender(key),
            batch_rows=config.batch_rows,
            max_batch_bytes=config.max_frame_bytes // 2,
            on_ready=self._worker.signal.set,
            next_row=next_row,
        )
        connection.add_output(channel)
        return channel

    def _restore_channels(self, part: ProcessPart | None) -> None:
        """Deliver again the channels' contents in the snapshot, before anything that is sent from now on."""
        for channel, log in (part.logs if part is not None else {}).items():
            last = self._deploy.last_id
            self._local[channel].extend(Message(m.number, m.kind, m.body, last) for m in log)
            self._ready.append(channel)

    # ----------------------------------------------------------------------------------------------------- running

    def round(self, now_s: float) -> float:
        if not self._started:
            self._started = True
            for cell in self._cells.values():
                cell.start()
                self._note_timer(cell)
        worked = self._fire_timers()
        budget = _ROUND
        while budget > 0 and self._ready:
            taken = self._take_some(self._ready.popleft())
            budget -= max(1, taken)
            worked = worked or taken > 0
        self._hand_over()
        if worked or self._ready:
            return 0.0
        due_ms = min((d for n in self._timers if (d := self._cells[n].next_timer_ms) is not None), default=None)
        return float("inf") if due_ms is None else max(0.0, due_ms / 1000 - time.time())

    def _take_some(self, channel: str) -> int:
        """Take up to a run of items from a channel; returns how many."""
        spec = self._args.network.channels[channel]
        cell, queue = self._cells[spec.target], self._local[channel]
        taken = 0
        while queue and taken < _RUN:
            cell.take(channel, queue.popleft())
            taken += 1
        arrivals = self._arrivals.get(channel)
        while arrivals is not None and not queue and taken < _RUN and arrivals.head():
            taken += self._take_arrival(cell, channel, arrivals, _RUN - taken)
        self._taken += taken
        if taken == _RUN:
            self._ready.append(channel)
        self._note_timer(cell)
        return taken

    def _take_arrival(self, cell: Cell, channel: str, arrivals: ReceivingEnd, limit: int) -> int:
        item = arrivals.take(limit)
        if isinstance(item, Barrier):
            cell.take(channel, Marker(item.checkpoint_id, arrivals.next_row))
            return 1
        if not isinstance(item, Rows):
            raise InvariantError(f"channel {channel!r} brought {item}, which is nothing of a network's")
        columns = (cast("list[Any]", column.to_pylist()) for column in item.batch.columns)
        for number, (kind, body, colour) in enumerate(zip(*columns, strict=True), start=item.first_row):
            cell.take(channel, Message(number, kind, body, colour))
        return item.batch.num_rows

    def _send(self, spec: ChannelSpec, item: Item) -> None:
        if spec.name not in self._outputs:
            self._local[spec.name].append(item)
            self._ready.append(spec.name)
        elif isinstance(item, Message):
            self._unsent.setdefault(spec.name, []).append(item)
        else:
            self._flush(spec.name)  # CL1: behind everything sent before the cut, ahead of everything after it
            self._outputs[spec.name].offer_barrier(item.snapshot)
        self._sent += 1

    def _flush(self, channel: str) -> None:
        messages = self._unsent.pop(channel, None)
        if messages:
            columns = [[m.kind for m in messages], [m.body for m in messages], [m.colour for m in messages]]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
            self._outputs[channel].offer(pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA))
            self._outputs[channel].flush()

    def _hand_over(self) -> None:
        """Give what was sent in this round to the channels that have room (others gather larger batches), and what was
        recorded to the driver."""
        for channel in [n for n in self._unsent if not self._outputs[n].full]:
            self._flush(channel)
        for snapshot, parts in self._parts.items():
            self._worker.link.send(SnapshotParts(self.number, snapshot, parts))
        self._parts = {}

    def _fire_timers(self) -> bool:
        now_ms = time.time() * 1000
        due = [n for n in self._timers if (d := self._cells[n].next_timer_ms) is not None and d <= now_ms]
        for name in due:
            self._cells[name].fire()
            self._note_timer(self._cells[name])
        return bool(due)

    def _note_timer(self, cell: Cell) -> None:
        if cell.next_timer_ms is None:
            self._timers.discard(cell.name)
        else:
            self._timers.add(cell.name)

    def _part(self, snapshot: int, part: ProcessPart) -> None:
        self._parts.setdefault(snapshot, []).append(part)

    # ---------------------------------------------------------------------------------------------------- messages

    def take(self, message: object) -> None:
        match message:
            case c.Start():
                self.running = True
            case SnapshotTrigger(snapshot=snapshot, initiators=initiators):
                for name in initiators:
                    if name in self._cells:
                        self._cells[name].trigger(snapshot)
                self._hand_over()
            case SnapshotAbort(snapshot=snapshot):
                for cell in self._cells.values():
                    cell.abort(snapshot)
            case PeerLost(error=error):
                raise error
            case _:
                pass

    def metrics(self) -> c.Metrics:
        """Messages and markers, in all."""
        elapsed_ms = (time.monotonic() - self._began_s) * 1000
        counts = {"taken": self._taken}, {"sent": self._sent}
        return c.Metrics(self.number, elapsed_ms, *counts, {}, {}, {}, {}, self.idle_s * 1000)

    def close(self) -> None:
        self._close_connections()
        if self._trace is not None:
            self._trace.close()
