"""Items of a channel, as its receiver sees them.

The rows of a channel are sized: the core asks a batch for its number of rows and for slices of it, never for a value.
A runtime's batches are Arrow's, a simulator's are tuples of numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias

from cutwater.data.time import MIN_WATERMARK


class Batch(Protocol):
    """Some rows in their order."""

    @property
    def num_rows(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def slice(self, offset: int = 0, length: int | None = None) -> Any:
        """The rows from ``offset`` on, at most ``length`` of them, as a batch of the same kind."""
        ...


class Rows(NamedTuple):
    """Rows ``first_row .. first_row + batch.num_rows - 1`` of a channel; the watermark holds *after* the last of them.

    A slice that is not the last of its frame repeats the watermark from before the frame.
    """

    batch: Any
    """A ``Batch``, of whatever kind the host has."""
    first_row: int
    watermark: int = MIN_WATERMARK
    late_before: int = MIN_WATERMARK
    """Event time that the rows' own splits had reached before them: what ends at it or before is over for these rows,
    whatever the channel's watermark is (rule W4).  Only rows that break the promise of their split have one."""
    body: Any = None
    """The batch as its host sends it, if it was encoded already."""

    def part(self, batch: Batch, first_row: int) -> Rows:
        """Some of the rows."""
        return self._replace(batch=batch, first_row=first_row, body=None)


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
    overtaken: tuple[Any, ...] = ()
    probe: bool = False
    behind: int = 0
    """So many rows it overtook at the sender: they are still to arrive."""
    savepoint: bool = False
    """Of a savepoint: it is aligned, whatever the protocol."""


class End(NamedTuple):
    """End of data: no row follows; barriers may (rule A7)."""


Timed: TypeAlias = Rows | Watermark
"""What the log of a channel is made of."""
Item: TypeAlias = Rows | Watermark | Barrier | End


class Head(enum.IntEnum):
    """What lies at the head of an input."""

    EMPTY = 0
    ROWS = 1
    CONTROL = 2
    """Barrier, watermark or end of data."""
    URGENT = 3
    """A barrier that overtakes what waits before it: taken before everything, also from a blocked input."""


def through_last_row(items: list[Timed]) -> list[Timed]:
    """Without the watermarks behind the last rows: they may be younger than the cut, whose watermark is in the record.

    >>> through_last_row([Watermark(1), Watermark(2)])
    []
    """
    while items and type(items[-1]) is Watermark:
        items.pop()
    return items


def rows_in(items: Iterable[Any]) -> int:
    """Number of rows in some items.

    >>> rows_in([Watermark(1), End()])
    0
    """
    return sum(item.batch.num_rows for item in items if type(item) is Rows)
