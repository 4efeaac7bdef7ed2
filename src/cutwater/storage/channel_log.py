"""Rows on their way, as they lie in a snapshot: entries of kind "channel".

What travels through a channel is a sequence of items: rows, each batch with the watermark that holds after its last,
and watermarks alone.  A log keeps them one by one, so that after a restore the same rows are late.  Its segments hold
the rows, one batch after the other; the items stand in the metadata of the schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import pyarrow as pa

from cutwater.errors import CorruptSnapshotError
from cutwater.storage.base import Readable
from cutwater.storage.manifest import Entry
from cutwater.storage.snapshot import SnapshotWriter, read_batch

__all__ = ["CHANNEL_KIND", "ChannelLog", "LogItem", "add_log", "log_batches", "read_log"]

CHANNEL_KIND = "channel"
_ITEMS = b"cutwater.items"
_SEGMENT_BYTES = 64 << 20
"""A log is cut into segments of about this size (a text column must not grow beyond 2 GiB)."""


class LogItem(NamedTuple):
    """One item of a channel."""

    batch: pa.RecordBatch | None
    """``None``: a watermark alone."""
    watermark: int
    """Microseconds since the epoch; holds after the last row."""
    flag: bool = False
    """Rows: the watermark stands between these rows and the next on every further channel too.  Watermark: idle."""


@dataclass(frozen=True, slots=True)
class ChannelLog:
    """The state of one channel on one side of it.

    Attributes:
        step: the receiving step (side "receiver") or the sending one.
        subtask: of that step.
        name: of the edge.
        channel: edge, sending subtask, receiving subtask.
        first_row: number of the first row.
        items: in the order in which they were sent.
    """

    step: str
    subtask: int
    name: str
    channel: tuple[int, int, int]
    side: str
    first_row: int
    items: list[LogItem]

    @property
    def rows(self) -> int:
        return sum(i.batch.num_rows for i in self.items if i.batch is not None)


def add_log(writer: SnapshotWriter, log: ChannelLog) -> list[Entry]:
    """Write a log; nothing if it holds no rows (a watermark alone is known from the sender's record).

    Raises:
        StorageError: the store fails; the writer can only be aborted.
    """
    return [
        writer.add_batch(
            batch,
            step=log.step,
            subtask=log.subtask,
            name=log.name,
            kind=CHANNEL_KIND,
            channel=log.channel,
            side=log.side,
            first_row=first_row,
        )
        for batch, first_row in log_batches(log)
    ]


def log_batches(log: ChannelLog) -> Iterator[tuple[pa.RecordBatch, int]]:
    """A log as batches of a bounded size, each with the number of its first row; the items are in their metadata."""
    first_row = log.first_row
    for items in _portions(log.items):
        batches = [i.batch for i in items if i.batch is not None]
        if not batches:
            continue  # behind the last rows
        batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        listed = [(i.batch.num_rows if i.batch is not None else 0, i.watermark, i.flag) for i in items]
        yield batch.replace_schema_metadata({_ITEMS: msgspec.json.encode(listed)}), first_row
        first_row += batch.num_rows


def read_log(store: Readable, job: str, entry: Entry) -> list[LogItem]:
    """The items of one entry, in order; their batches refer to the bytes read.

    Raises:
        CorruptSnapshotError: the bytes do not have their digest, or are no log.
        FormatVersionError: the entry's format is not known here.
    """
    batch = read_batch(store, job, entry)
    try:
        listed = msgspec.json.decode((batch.schema.metadata or {})[_ITEMS], type=list[tuple[int, int, bool]])
    except (KeyError, msgspec.MsgspecError) as error:
        raise CorruptSnapshotError(f"the log of channel {entry.channel} has no items", step=entry.step) from error
    if sum(rows for rows, _, _ in listed) != batch.num_rows:
        raise CorruptSnapshotError(f"the items of channel {entry.channel} do not add up", step=entry.step)
    batch = batch.replace_schema_metadata(None)
    items: list[LogItem] = []
    start = 0
    for rows, watermark, flag in listed:
        items.append(LogItem(batch.slice(start, rows) if rows else None, watermark, flag))
        start += rows
    return items


def _portions(items: Iterable[LogItem]) -> Iterator[list[LogItem]]:
    """The items in portions of a bounded size."""
    portion: list[LogItem] = []
    size = 0
    for item in items:
        portion.append(item)
        size += item.batch.nbytes if item.batch is not None else 0
        if size >= _SEGMENT_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion
