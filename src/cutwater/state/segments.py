"""The state seam: what an operator's snapshot is made of.

An operator *freezes* its state in the loop thread (cheap, no I/O); the snapshot thread later asks the frozen state for
its *segments* and writes them while the stream goes on.  A restore hands segments back.  Keyed segments are sorted by
key group, with the group of each row in the column ``GROUP_COLUMN``, so that any key-group range of them can be cut
out: that is what makes one snapshot restorable at any parallelism.  Whoever writes a checkpoint may leave that to the
one that reads it (*unsorted* segments): most checkpoints are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import pyarrow as pa

T = TypeVar("T")

GROUP_COLUMN = "__key_group"
"""Column (uint16) of a keyed segment that holds the key group of each row."""

SegmentKind = Literal["base", "delta", "delete"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of one named state of one operator.

    Attributes:
        name: which state of the operator ("agg", "window", "left" ...).
        kind: "base" replaces what came before it, "delta" updates it by key, "delete" holds only keys, which are gone.
            Segments are applied in order.
        batch: the rows.  A keyed segment carries ``GROUP_COLUMN`` and is sorted by it, if it is not unsorted.
        key_groups: half-open range of the key groups whose owners are offered the rows, as a rule that which the rows
            lie in; ``None`` for state that belongs to subtask numbers.
        identity: so many columns after ``GROUP_COLUMN`` tell the rows of the state apart, and their order says nothing;
            0: the order is part of the state.
        to_come: at a restore, how many rows of this state come from here on, roughly, where no later segment takes rows
            of this one away: they can be set at once.  0: later segments may, or nobody looked.
        ungrouped: of an unsorted segment, whose rows are in any order and lack ``GROUP_COLUMN``: the hash of how many
            columns, the first ones, decides the key group, and how many groups there are.
    """

    name: str
    kind: SegmentKind
    batch: pa.RecordBatch
    key_groups: tuple[int, int] | None = None
    identity: int = 0
    to_come: int = 0
    ungrouped: tuple[int, int] | None = None


class Frozen(Protocol):
    """State as it was at one instant.  Used by the snapshot thread, while the operator goes on."""

    @property
    def incremental(self) -> bool:
        """True if ``changes`` may give anything, now or later."""
        ...

    def segments(self, *, unsorted: bool = False) -> Iterator[Segment]:
        """The segments, in the order a restore applies them.  May take long; releases the GIL where it can.

        Args:
            unsorted: some may be unsorted.
        """
        ...

    def changes(self, since: int) -> Iterator[Segment] | None:
        """The changes since the freeze of an older, completed checkpoint; ``None``: not known, or not worth it.

        Deltas and deletions go behind the segments that the older checkpoint holds.  A name that has a base among them
        begins anew, one without any segment is as it was.
        """
        ...

    def release(self) -> None:
        """Free what the freeze holds, and the memory of its segments.  Called once, also after a failed or aborted
        checkpoint."""
        ...


class FrozenSegments:
    """A ``Frozen`` over segments that exist already, or over a function that makes them.

    >>> list(EMPTY.segments())
    []
    """

    def __init__(self, make: Sequence[Segment] | Callable[[], Iterable[Segment]] = ()) -> None:
        self._make = make

    def segments(self, *, unsorted: bool = False) -> Iterator[Segment]:
        yield from self._make() if callable(self._make) else self._make

    @property
    def incremental(self) -> bool:
        return False

    def changes(self, since: int) -> Iterator[Segment] | None:
        return None

    def release(self) -> None:
        self._make = ()


def pieces(items: Iterable[T], size: Callable[[T], int], most_bytes: int, most: int = 1 << 62) -> Iterator[list[T]]:
    """The items in pieces of a bounded size: each ends with the item that makes it large, or so many, enough.

    >>> list(pieces(["a", "bcd", "e"], len, 3))
    [['a', 'bcd'], ['e']]
    """
    piece: list[T] = []
    held = 0
    for item in items:
        piece.append(item)
        held += size(item)
        if held >= most_bytes or len(piece) == most:
            yield piece
            piece, held = [], 0
    if piece:
        yield piece


EMPTY = FrozenSegments()
"""The frozen state of a stateless operator."""
