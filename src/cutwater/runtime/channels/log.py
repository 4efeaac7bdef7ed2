"""Rows on their way, between the channels and the snapshot: collected piece by piece here, written by its thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cutwater.errors import BuildError
from cutwater.plan.graph import Channel, Edge
from cutwater.protocol.channel.items import Rows, Timed, Watermark
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
