"""One process at work: its handlers, counters and timers, its part in every snapshot, and the trace of it.

Both hosts, the one in this process and the workers on Spark, run exactly this.  They only carry items from cell to cell
and say what time it is.
"""

from __future__ import annotations

import heapq
import random
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from cutwater.errors import InvariantError, UserCodeError
from cutwater.process_networks.graph import ChannelSpec, Network, Process
from cutwater.process_networks.messages import Codec, Item, Marker, decode_state, encode_state, names_of
from cutwater.protocol import messages as m
from cutwater.protocol.snapshot_algorithms import Algorithm, AlgorithmName, ChandyLamport, LaiYang
from cutwater.runtime.control.messages import Message, ProcessPart, Timer
from cutwater.trace import events as t


class CellPort:
    """Services that a cell asks of its host; set by the host before anything runs."""

    send: Callable[[ChannelSpec, Item], None]
    """Put an item into a channel, behind everything before it."""
    part: Callable[[int, ProcessPart], None]
    """A process has done its part of a snapshot."""
    now_ms: Callable[[], float]
    tracer: Tracer | None = None


class Cell:
    """One process.

    Args:
        network: what it belongs to.
        name: which process of it.
        port: the host.
        algorithm: how snapshots are taken.
        seed: of ``ctx.random``.
        restore: the process's part of the snapshot to go on from.
        last: the newest snapshot id given out before.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        port: CellPort,
        *,
        inputs: Sequence[ChannelSpec],
        outputs: Sequence[ChannelSpec],
        algorithm: AlgorithmName,
        seed: int,
        restore: ProcessPart | None,
        last: int = 0,
    ) -> None:
        self.name, self.port = name, port
        self.inputs = {c.name: c for c in inputs}
        self.codec = network.codec
        first = network.processes[name]
        self.kind: type[Process] = type(first)
        self.events = 0
        self.sent: dict[str, int] = {c.name: 0 for c in outputs}
        self.taken: dict[str, int] = dict.fromkeys(self.inputs, 0)
        self._timers: list[tuple[float, int, str, bytes]] = []
        self._timer_number = 0
        self._parts: dict[int, ProcessPart] = {}
        """Recordings so far, by snapshot."""
        self._hand: Message | None = None
        state = restore.state if restore is not None else encode_state(name, first)
        self.process: Process = decode_state(name, state, self.kind)
        if restore is not None:
            self._restore(restore)
        self.algorithm: Algorithm = (
            LaiYang(name, list(self.inputs), last, self.taken)
            if algorithm == "lai_yang"
            else ChandyLamport(name, list(self.inputs), last)
        )
        self._context = _Context(self, network, inputs, outputs, seed)

    def _restore(self, part: ProcessPart) -> None:
        self.events = part.events
        self.sent |= part.sent
        self.taken |= part.taken
        now = self.port.now_ms()
        for timer in part.timers:
            self._set_timer(now + timer.left_ms, timer.kind, timer.body)

    def trace_restored(self, snapshot: int | None) -> None:
        """Note in the trace what the process begins from, before it does anything."""
        if self.port.tracer is not None:
            self.port.tracer.restored(self.name, snapshot, dict(self.sent), dict(self.taken))

    # ------------------------------------------------------------------------------------------------------ events

    def start(self) -> None:
        """``on_start``, unless the process goes on from a snapshot."""
        if self.events == 0:
            self._run("on_start", None, lambda: self.process.on_start(self._context))

    def take(self, channel: str, item: Item) -> None:
        """Take an item from the head of a channel: this is the moment at which it is received (CL2).

        Raises:
            UserCodeError: the process failed.
        """
        if isinstance(item, Marker):
            if self.port.tracer is not None:
                self.port.tracer.marker_taken(self.name, item.snapshot, channel, item.position)
            self._perform(self.algorithm.marker(channel, item.snapshot, item.position))
            return
        self._hand = item
        self._perform(self.algorithm.message(channel, item.colour))
        self._hand = None
        self.taken[channel] += 1
        message = self.codec.decode(item.kind, item.body)
        sender = self.inputs[channel].source
        self._context.channel = channel
        self._run("on_message", (channel, item), lambda: self.process.on_message(self._context, sender, message))
        self._context.channel = ""

    def trigger(self, snapshot: int) -> None:
        """Begin a snapshot here (CL1); one that already began is not begun again."""
        self._perform(self.algorithm.trigger(snapshot))

    def abort(self, snapshot: int) -> None:
        """A snapshot was given up."""
        self._perform(self.algorithm.abort(snapshot))

    @property
    def next_timer_ms(self) -> float | None:
        """Time at which the next timer is due."""
        return self._timers[0][0] if self._timers else None

    def fire(self) -> None:
        """Run the timer that is due next."""
        _, _, kind, body = heapq.heappop(self._timers)
        message = self.codec.decode(kind, body)
        self._run("on_timer", None, lambda: self.process.on_timer(self._context, message))

    # ---------------------------------------------------------------------------------------------------- handlers

    def _run(self, what: str, taken: tuple[str, Message] | None, handler: Callable[[], None]) -> None:
        """One atomic event of the process: what it sends leaves when the handler has returned."""
        tracer, context = self.port.tracer, self._context
        before = tracer.printable(self.process) if tracer is not None else ""
        self.events += 1
        context.begin()
        try:
            handler()
        except UserCodeError:
            raise
        except Exception as e:
            raise UserCodeError(
                f"process {self.name!r} failed in {what}, event {self.events}: {type(e).__name__}: {e}\n"
                + "".join(traceback.format_exception(e))
            ) from e
        outbox = [(c, Message(self._number(c), kind, body, self.algorithm.colour)) for c, kind, body in context.outbox]
        for due_ms, kind, body in context.timers:
            self._set_timer(due_ms, kind, body)
        context.end()
        if tracer is not None:
            tracer.step(self.name, taken, outbox, before, tracer.printable(self.process))
        for channel, message in outbox:
            self.port.send(channel, message)

    def _number(self, channel: ChannelSpec) -> int:
        number = self.sent[channel.name]
        self.sent[channel.name] = number + 1
        return number

    def _set_timer(self, due_ms: float, kind: str, body: bytes) -> None:
        self._timer_number += 1
        heapq.heappush(self._timers, (due_ms, self._timer_number, kind, body))

    # --------------------------------------------------------------------------------------------------- snapshots

    def _perform(self, effects: Iterable[m.Effect]) -> None:
        reports: list[m.Durable | m.LogsDurable] = []
        for effect in effects:
            match effect:
                case m.Freeze(checkpoint_id=id):
                    self._freeze(id)
                    reports.append(m.Durable(id))
                case m.BroadcastBarrier(checkpoint_id=id):
                    self._send_markers(id)
                case m.StartRecording(checkpoint_id=id, input=input):
                    self._parts[id].logs[str(input)] = []
                case m.Record(input=input, checkpoint_ids=ids):
                    assert self._hand is not None
                    for id in ids:
                        self._parts[id].logs[str(input)].append(self._hand)
                case m.StopRecording(checkpoint_id=id, input=input, rows=rows):
                    if len(self._parts[id].logs[str(input)]) != rows:
                        raise InvariantError(f"snapshot {id}: the log of {input!r} does not hold {rows} messages")
                case m.WriteLogs(checkpoint_id=id):
                    reports.append(m.LogsDurable(id))
                case m.Acknowledge(checkpoint_id=id):
                    self._done(id)
                case m.Forget(checkpoint_id=id):
                    self._parts.pop(id, None)
                case _:
                    raise InvariantError(f"process {self.name!r}: a network has no use for {effect}")
        for report in reports:  # only now: the markers go out before anybody hears that the part is done
            self._perform(self.algorithm.durable(report))

    def _freeze(self, snapshot: int) -> None:
        """The state as bytes: from here on nothing that the process does can change it."""
        now = self.port.now_ms()
        timers = [Timer(max(0.0, due - now), kind, body) for due, _, kind, body in sorted(self._timers)]
        state = encode_state(self.name, self.process)
        kind, sent, taken = self.kind.__name__, dict(self.sent), dict(self.taken)
        self._parts[snapshot] = ProcessPart(self.name, kind, state, self.events, timers, sent, taken, {}, now)
        if self.port.tracer is not None:
            self.port.tracer.cut(self.name, snapshot, self.port.tracer.printable(self.process))

    def _send_markers(self, snapshot: int) -> None:
        for channel in self._context.channels.values():
            position = self.sent[channel.name]
            if self.port.tracer is not None:
                self.port.tracer.marker_sent(self.name, snapshot, channel.name, position)
            self.port.send(channel, Marker(snapshot, position))

    def _done(self, snapshot: int) -> None:
        part = self._parts.pop(snapshot)
        for channel, log in part.logs.items():
            if not self.inputs[channel].fifo:  # a set: in the order of sending, for want of another
                log.sort(key=lambda message: message.number)
        if self.port.tracer is not None:
            for channel in self.inputs:
                self.port.tracer.recorded(self.name, snapshot, channel, part.logs.get(channel, []))
        logs = {channel: log for channel, log in part.logs.items() if log}
        self.port.part(snapshot, msgspec.structs.replace(part, logs=logs))


class _Context:
    """The ``Context`` of one process."""

    def __init__(
        self, cell: Cell, network: Network, inputs: Sequence[ChannelSpec], outputs: Sequence[ChannelSpec], seed: int
    ) -> None:
        self.name = cell.name
        self.channel = ""
        self.channels = {c.name: c for c in outputs}
        self.outputs = tuple(dict.fromkeys(c.target for c in outputs))
        self.inputs = tuple(dict.fromkeys(c.source for c in inputs))
        self.outbox: list[tuple[ChannelSpec, str, bytes]] = []
        self.timers: list[tuple[float, str, bytes]] = []
        self._cell, self._seed, self._network = cell, seed, network.name
        self._codec: Codec = cell.codec
        self._open = False
        self._random: random.Random | None = None
        self._to: dict[str, list[ChannelSpec]] = {}
        for channel in outputs:
            self._to.setdefault(channel.target, []).append(channel)
            self._to.setdefault(channel.name, []).append(channel)

    def begin(self) -> None:
        """A handler is about to run."""
        self.outbox, self.timers, self._random, self._open = [], [], None, True

    def end(self) -> None:
        """The handler has returned."""
        self._open = False

    @property
    def now_ms(self) -> float:
        return self._cell.port.now_ms()

    @property
    def random(self) -> random.Random:
        if self._random is None:
            self._random = random.Random(f"{self._seed}/{self._network}/{self.name}/{self._cell.events}")
        return self._random

    def send(self, to: str, message: Any) -> None:
        self._check_open("sends")
        found = self._to.get(to, ())
        if len(found) != 1:
            raise self._no_channel(to)
        self.outbox.append((found[0], *self._codec.encode(message)))

    def timer(self, delay_ms: float, message: Any) -> None:
        self._check_open("sets a timer")
        if not delay_ms >= 0:
            raise UserCodeError(f"process {self.name!r} sets a timer for {delay_ms} ms: it must be 0 or more")
        self.timers.append((self.now_ms + delay_ms, *self._codec.encode(message)))

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise UserCodeError(
                f"process {self.name!r} {what} outside its handlers", hint="Do not keep ctx for later: use ctx.timer."
            )

    def _no_channel(self, to: str) -> UserCodeError:
        several = self._to.get(to)
        if several:
            return UserCodeError(
                f"process {self.name!r} has {len(several)} channels to {to!r}",
                hint=f"Say which: ctx.send({several[0].name!r}, ...), for example.",
            )
        return UserCodeError(
            f"process {self.name!r} has no channel to {to!r}",
            hint=f"It can send to: {names_of(self.outputs) or 'nobody'}. Add network.connect({self.name!r}, {to!r}).",
        )


class Tracer:
    """Writes one run, or one part of it.

    Args:
        stream: where to; it is flushed at every end of a snapshot and never closed here.
        network: gives the header.
        now_ms: the run's clock.
        run: what its other parts are known by.
        contents: write messages and states too, and not only their numbers.
    """

    def __init__(
        self,
        stream: t.Stream,
        network: Network,
        now_ms: Callable[[], float],
        *,
        run: str = "",
        contents: bool = True,
    ) -> None:
        links = tuple(t.Link(c.name, c.source, c.target) for c in network.channels.values())
        fifo = all(c.fifo for c in network.channels.values())
        self._stream = stream
        # A marker, or with colours a notice, goes along every channel, and a part is done when all of them were taken.
        header = t.Header(tuple(network.processes), links, fifo, network.name, run=run, marked=True)
        self._writer = t.TraceWriter(stream, header)
        self._now_ms, self._contents = now_ms, contents
        self._decode = network.codec.decode
        self.attempt = 1

    def printable(self, value: object) -> str:
        """JSON; nothing if contents are not written."""
        return msgspec.json.encode(value).decode() if self._contents else ""

    def step(
        self,
        process: str,
        taken: tuple[str, Message] | None,
        sent: Iterable[tuple[ChannelSpec, Message]],
        before: str,
        after: str,
    ) -> None:
        """One event of a process."""
        takes = (self._span(*taken),) if taken is not None else ()
        sends = tuple(self._span(channel.name, message) for channel, message in sent)
        self._writer.write(t.Step(self._now_ms(), process, self.attempt, takes, sends, before, after))

    def cut(self, process: str, snapshot: int, state: str) -> None:
        self._writer.write(t.Cut(self._now_ms(), process, self.attempt, snapshot, state))

    def marker_sent(self, process: str, snapshot: int, channel: str, position: int) -> None:
        self._writer.write(t.MarkerSent(self._now_ms(), process, self.attempt, snapshot, channel, position))

    def marker_taken(self, process: str, snapshot: int, channel: str, position: int) -> None:
        self._writer.write(t.MarkerTaken(self._now_ms(), process, self.attempt, snapshot, channel, position))

    def recorded(self, process: str, snapshot: int, channel: str, log: Sequence[Message]) -> None:
        """The state of a channel."""
        spans = tuple(self._span(channel, message) for message in log)
        self._writer.write(t.Recorded(self._now_ms(), process, self.attempt, snapshot, channel, spans))

    def completed(self, snapshot: int) -> None:
        self._writer.write(t.Completed(self._now_ms(), "", self.attempt, snapshot))
        self._stream.flush()

    def aborted(self, snapshot: int) -> None:
        self._writer.write(t.Aborted(self._now_ms(), "", self.attempt, snapshot))
        self._stream.flush()

    def crashed(self, process: str) -> None:
        self._writer.write(t.Crashed(self._now_ms(), process, self.attempt))

    def restored(self, process: str, snapshot: int | None, sent: dict[str, int], taken: dict[str, int]) -> None:
        """The numbers are those of the next messages to be sent and taken, per channel."""
        self._writer.write(t.Restored(self._now_ms(), process, self.attempt, snapshot, sent, taken))

    def _span(self, channel: str, message: Message) -> t.Span:
        if not self._contents:
            return t.Span(channel, message.number)
        value = self.printable(self._decode(message.kind, message.body))
        return t.Span(channel, message.number, 1, (value,))
