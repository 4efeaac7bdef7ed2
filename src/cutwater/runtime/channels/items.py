"""What travels through a channel, as the receiver sees it."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import pyarrow as pa

from cutwater.data.time import MIN_WATERMARK


class Rows(NamedTuple):
    """Rows ``first_row .. first_row + batch.num_rows - 1`` of a channel; the watermark holds *after* the last of them.

    A slice that is not the last of its frame repeats the watermark from before the frame.
    """

    batch: pa.RecordBatch
    first_row: int
    watermark: int = MIN_WATERMARK
    late_before: int = MIN_WATERMARK
    """Event time that the rows' own splits had reached before them: what ends at it or before is over for these rows,
    whatever the channel's watermark is (rule W4).  Only rows that break the promise of their split have one."""
    body: pa.Buffer | None = None
    """The batch as a connection sends it, if it was encoded already."""

    def part(self, batch: pa.RecordBatch, first_row: int) -> Rows:
        """Some of the rows."""
        return self._replace(batch=batch, first_row=first_row, body=None)

    def encoded(self, body: pa.Buffer) -> Rows:
        """The same rows, in the memory of their encoded form."""
        return self._replace(batch=pa.ipc.read_record_batch(body, self.batch.schema), body=body)


class Watermark(NamedTuple):
    """The channel's watermark (microseconds since the epoch) and whether its sender has nothing to say for now."""

    watermark: int
    idle: bool = False


class Barrier(NamedTuple):
    """The barrier of a checkpoint.

    ``overtaken``: what still waits at the receiver although it was sent before the barrier: rows, and watermarks among
    them (not those behind the last row).  They belong to the channel's state and are taken later, in order.
    """

    checkpoint_id: int
    final: bool = False
    overtake: bool = False
    overtaken: tuple[Rows | Watermark, ...] = ()
    probe: bool = False
    behind: int = 0
    """So many rows it overtook at the sender: they are still to arrive."""
    savepoint: bool = False
    """Of a savepoint: it is aligned, whatever the protocol."""


class End(NamedTuple):
    """End of data: no row follows; barriers may (rule A7)."""


Item: TypeAlias = Rows | Watermark | Barrier | End
Timed: TypeAlias = Rows | Watermark
"""What the log of a channel is made of."""


def through_last_row(items: list[Timed]) -> list[Timed]:
    """Without the watermarks behind the last rows: they may be younger than the cut, whose watermark is in the record.

    >>> through_last_row([Watermark(1), Watermark(2)])
    []
    """
    while items and type(items[-1]) is Watermark:
        items.pop()
    return items
