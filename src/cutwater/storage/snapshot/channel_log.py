"""Rows on their way, as they lie in a snapshot: entries of kind "channel".

What travels through a channel is a sequence of items: rows, each batch with the watermark that holds after its last,
and watermarks alone.  A log keeps them one by one, so that after a restore the same rows are late.  Its segments hold
the rows, one batch after the other; the items stand in the metadata of the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from cutwater.data.decoding import prepare
from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import CorruptSnapshotError
from cutwater.state.segments import pieces
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.snapshot.segment_files import SnapshotWriter, read_batch
from cutwater.storage.store.base import Readable

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
    idle: bool = False
    """Of a watermark alone: its sender had nothing to say."""
    late_before: int = MIN_WATERMARK
    """Of rows: the event time that their own split had reached before them, if they break its promise."""


class _Listed(msgspec.Struct, frozen=True, array_like=True):
    """An item in the metadata: how many rows of the segment it has (0: a watermark alone).

    Older releases set ``idle`` for some rows, with another meaning that no restore needs.
    """

    rows: int
    watermark: int
    idle: bool = False
    late_before: int = MIN_WATERMARK


prepare(list[_Listed])


@dataclass(frozen=True, slots=True)
class ChannelLog:
    """The state of one channel on one side of it.

    Attributes:
        step: the receiving step (side "receiver") or the sending one.
        channel: edge, sending subtask, receiving subtask.
    """

    step: str
    subtask: int
    name: str
    channel: tuple[int, int, int]
    side: str
    first_row: int
    items: list[LogItem]

    @property
    def described(self) -> dict[str, Any]:
        """The fields of an entry, or of a file, that say whose it is."""
        return {name: getattr(self, name) for name in ("step", "subtask", "name", "channel", "side")}

    @property
    def rows(self) -> int:
        return sum(i.batch.num_rows for i in self.items if i.batch is not None)


def add_log(writer: SnapshotWriter, log: ChannelLog) -> list[Entry]:
    """Write a log; nothing if it holds no rows (a watermark alone is known from the sender's record)."""
    return [
        writer.add_batch(batch, kind=CHANNEL_KIND, first_row=first_row, **log.described)
        for batch, first_row in log_batches(log)
    ]


def log_batches(log: ChannelLog) -> Iterator[tuple[pa.RecordBatch, int]]:
    """A log as batches of a bounded size, each with the number of its first row; the items are in their metadata."""
    first_row = log.first_row
    for items in pieces(log.items, lambda i: 0 if i.batch is None else i.batch.nbytes, _SEGMENT_BYTES):
        batches = [i.batch for i in items if i.batch is not None]
        if not batches:
            continue  # behind the last rows
        batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        yield batch.replace_schema_metadata({_ITEMS: msgspec.json.encode([_listed(i) for i in items])}), first_row
        first_row += batch.num_rows


def read_log(store: Readable, job: str, entry: Entry) -> list[LogItem]:
    """The items of one entry, in order; their batches refer to the bytes read.

    Raises:
        CorruptSnapshotError: the bytes do not have their digest, or are no log.
        FormatVersionError: the entry's format is not known here.
    """
    batch = read_batch(store, job, entry)
    try:
        listed = msgspec.json.decode((batch.schema.metadata or {})[_ITEMS], type=list[_Listed])
    except (KeyError, msgspec.MsgspecError) as error:
        raise CorruptSnapshotError(f"the log of channel {entry.channel} has no items", step=entry.step) from error
    if sum(item.rows for item in listed) != batch.num_rows:
        raise CorruptSnapshotError(f"the items of channel {entry.channel} do not add up", step=entry.step)
    batch = batch.replace_schema_metadata(None)
    items: list[LogItem] = []
    start = 0
    for item in listed:
        rows = batch.slice(start, item.rows) if item.rows else None
        items.append(LogItem(rows, item.watermark, item.idle and rows is None, item.late_before))
        start += item.rows
    return items


def _listed(item: LogItem) -> _Listed | list[int | bool]:
    """Without ``late_before`` where there is none, as older releases wrote it and expect it."""
    rows = item.batch.num_rows if item.batch is not None else 0
    if item.late_before == MIN_WATERMARK:
        return [rows, item.watermark, item.idle]
    return _Listed(rows, item.watermark, item.idle, item.late_before)
