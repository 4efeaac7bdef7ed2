"""What travels through a channel, as the receiver sees it."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import pyarrow as pa

from cutwater.operators.base import MIN_WATERMARK

__all__ = ["Barrier", "End", "Item", "Rows", "Watermark", "nothing"]


class Rows(NamedTuple):
    """Rows ``first_row .. first_row + batch.num_rows - 1`` of a channel; the watermark holds *after* the last of them.

    A slice that is not the last of its frame repeats the watermark from before the frame.
    """

    batch: pa.RecordBatch
    first_row: int
    watermark: int = MIN_WATERMARK
    sharp: bool = False
    """The watermark must stand between these rows and the next on every further channel too (rule W1)."""


class Watermark(NamedTuple):
    """The channel's watermark (microseconds since the epoch) and whether its sender has nothing to say for now."""

    watermark: int
    idle: bool = False


class Barrier(NamedTuple):
    """The barrier of a checkpoint.

    ``overtaken``: rows that still wait at the receiver although they were sent before the barrier.  They belong to the
    channel's state and are taken later, in order.
    """

    checkpoint_id: int
    final: bool = False
    overtake: bool = False
    overtaken: tuple[Rows, ...] = ()


class End(NamedTuple):
    """End of data: no row follows; barriers may (rule A7)."""


Item: TypeAlias = Rows | Watermark | Barrier | End


def nothing() -> None:
    """The default wake-up: none."""
    return
