"""Rows on their way, between the channels and the snapshot: collected piece by piece here, written by its thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cutwater.errors import BuildError
from cutwater.plan.graph import Channel, Edge
from cutwater.runtime.channels.items import Rows, Timed, Watermark
from cutwater.storage.snapshot.channel_log import ChannelLog, LogItem


def edge_name(edge: Edge) -> str:
    """What an edge is called in a snapshot: its number changes when steps are added before it, this does not."""
    return f"{edge.source_step}.{edge.source_output}>{edge.target_step}.{edge.target_input}"


def fitting(edge: Edge, item: LogItem) -> LogItem:
    """Rows of a snapshot with the columns that this program sends over the edge: it may read fewer than the old one.

    Raises:
        BuildError: it reads one more.
    """
    if item.batch is None or item.batch.schema.names == edge.schema.names:
        return item
    missing = [name for name in edge.schema.names if name not in item.batch.schema.names]
    if missing:
        raise BuildError(
            f"the snapshot holds rows on their way along {edge_name(edge)!r} without column {missing[0]!r}",
            step=edge.target_step,
            hint="Restore with the old program, take an aligned checkpoint there, and go on from that one.",
        )
    return item._replace(batch=item.batch.select(edge.schema.names))


@dataclass(slots=True)
class LoggedChannel:
    """One side of a channel, as it was kept: batches by reference."""

    edge: Edge
    channel: Channel
    side: str
    """"receiver" or "sender"."""
    items: list[Timed]

    def to_log(self) -> ChannelLog:
        """What the snapshot thread writes."""
        sending = self.side == "sender"
        first = next((i.first_row for i in self.items if type(i) is Rows), 0)
        return ChannelLog(
            step=self.edge.source_step if sending else self.edge.target_step,
            subtask=self.channel.source if sending else self.channel.target,
            name=edge_name(self.edge),
            channel=(self.channel.edge, self.channel.source, self.channel.target),
            side=self.side,
            first_row=first,
            items=[
                LogItem(i.batch, i.watermark, late_before=i.late_before)
                if type(i) is Rows
                else LogItem(None, i.watermark, _idle(i))
                for i in self.items
            ],
        )


def _idle(item: Timed) -> bool:
    return type(item) is Watermark and item.idle


def to_items(log: Iterable[LogItem], first_row: int) -> list[Timed]:
    """Items of a log as a channel delivers them; rows are numbered from ``first_row`` on."""
    items: list[Timed] = []
    for batch, watermark, idle, late_before in log:
        if batch is None:
            items.append(Watermark(watermark, idle))
        else:
            items.append(Rows(batch, first_row, watermark, late_before))
            first_row += batch.num_rows
    return items


@dataclass(slots=True)
class _Kept:
    overtaken: dict[Channel, tuple[Timed, ...]] = field(default_factory=dict[Channel, "tuple[Timed, ...]"])
    """At the receiver, by a barrier of which it is not known yet whether somebody wants them."""
    logs: list[LoggedChannel] = field(default_factory=list[LoggedChannel])


class ChannelLogs:
    """What one subtask keeps of its channels for the snapshots in progress.

    Args:
        edges: of all its channels, inputs and outputs.
    """

    def __init__(self, edges: Mapping[Channel, Edge]) -> None:
        self._edges = edges
        self._kept: dict[int, _Kept] = {}

    def overtaken(self, checkpoint_id: int, channel: Channel, items: tuple[Timed, ...]) -> None:
        """A barrier was taken that overtook these at the receiver."""
        if items:
            self._kept.setdefault(checkpoint_id, _Kept()).overtaken[channel] = items

    def complete(self, checkpoint_id: int, channel: Channel, recorded: list[Timed]) -> None:
        """The log of an input ends: what was recorded, then what its barrier overtook."""
        kept = self._kept.setdefault(checkpoint_id, _Kept())
        items = [*recorded, *kept.overtaken.pop(channel, ())]
        if items:
            kept.logs.append(LoggedChannel(self._edges[channel], channel, "receiver", items))

    def sent(self, checkpoint_id: int, channel: Channel, items: list[Timed]) -> None:
        """A barrier overtook these at the sender."""
        if items:
            kept = self._kept.setdefault(checkpoint_id, _Kept())
            kept.logs.append(LoggedChannel(self._edges[channel], channel, "sender", items))

    def take(self, checkpoint_id: int) -> list[LoggedChannel]:
        """All logs of the snapshot, to be written; they are forgotten here."""
        kept = self._kept.pop(checkpoint_id, None)
        return kept.logs if kept is not None else []

    def forget(self, checkpoint_id: int) -> None:
        """Nobody will ask for this snapshot."""
        self._kept.pop(checkpoint_id, None)

    def keep_only(self, checkpoint_ids: Iterable[int]) -> None:
        """Forget every snapshot but these."""
        for gone in self._kept.keys() - set(checkpoint_ids):
            del self._kept[gone]
