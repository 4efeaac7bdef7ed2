"""A network's run as a trace: what the cells do, in the words of ``cutwater.trace``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from cutwater.process_networks.graph import ChannelSpec, Network
from cutwater.runtime.control.process_network_messages import Message
from cutwater.trace import events as t


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
