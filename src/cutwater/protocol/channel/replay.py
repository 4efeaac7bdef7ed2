"""What a channel sent since the newest checkpoint, for a receiver that goes back to it by itself (R4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cutwater.errors import InvariantError
from cutwater.protocol.channel.items import End, Item, Rows, Timed


class Kept(NamedTuple):
    """Rows of a frame, twice."""

    sent: Rows
    """As they are to be sent now."""
    kept: Rows
    """As they are kept."""
    size: int
    """Bytes of memory that they take while they are kept."""


class ReplayBuffer:
    """The items of one channel, in the order in which they were sent, barriers left out.

    It begins at a *mark*: the place of the newest completed checkpoint's barrier among them.  What lay in the channel
    at that cut comes behind the barrier's place, or is in the snapshot.  An end of data is kept for ever, because no
    snapshot tells a receiver of it.

    Belongs to its ``SendingEnd``; ``mark`` may be called while that one's owner does not hold its lock.

    Args:
        keep: called with rows that are sent, and the bytes kept in memory before them; says what is sent and kept.
        most_memory_bytes: kept in memory, for a sender that goes on although its receiver is lost.
        base: the checkpoint that the channel was restored from; 0: none.

    >>> from cutwater.protocol.channel.items import Watermark
    >>> kept = ReplayBuffer(lambda rows, memory_bytes: Kept(rows, rows, 0))
    >>> _ = kept.add(Watermark(3)); kept.mark(1); _ = kept.add(Watermark(5))
    >>> kept.completed(1); list(kept.since(1))
    [Watermark(watermark=5, idle=False)]
    """

    def __init__(self, keep: Callable[[Rows, int], Kept], *, most_memory_bytes: int = 1 << 62, base: int = 0) -> None:
        self.most_memory_bytes, self._base, self._keep = most_memory_bytes, base, keep
        self._items: deque[tuple[Timed, int]] = deque()
        """With the bytes that each takes in memory."""
        self._sent: Timed | None = None
        """The last one, as it was sent."""
        self._first = 0
        """Number of the first item that is kept, counted from the channel's beginning."""
        self._marks: dict[int, int] = {}
        self._ended = False
        self.memory_bytes = 0
        """Bytes of rows that are kept in memory now."""

    @property
    def _next(self) -> int:
        return self._first + len(self._items)

    def add(self, item: Timed | End) -> Timed | End:
        """Keep an item that is being sent; returns it as it is to be sent.

        Raises:
            StorageError: the disk is full, or fails.
        """
        if isinstance(item, End):
            self._ended = True
            return item
        kept, size = item, 0
        if type(item) is Rows:
            item, kept, size = self._keep(item, self.memory_bytes)
            self.memory_bytes += size
        self._sent = item
        self._items.append((kept, size))
        return item

    def may_join(self, waiting: Item) -> bool:
        """Whether a watermark may be joined with what waits last: not over a mark, nor with a part of what is kept."""
        return bool(self._items) and self._sent is waiting and self._next not in self._marks.values()

    def join(self, joined: Timed) -> None:
        """The last item was joined with a watermark while it waited."""
        kept, size = self._items[-1]
        if type(kept) is Rows:
            kept = kept._replace(watermark=joined.watermark)
        else:
            kept = joined
        self._sent, self._items[-1] = joined, (kept, size)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def mark(self, checkpoint_id: int) -> None:
        """The barrier of a checkpoint has its place here."""
        self._marks[checkpoint_id] = self._next

    def aborted(self, checkpoint_id: int) -> None:
        """The mark is of no use."""
        self._marks.pop(checkpoint_id, None)

    def completed(self, checkpoint_id: int) -> None:
        """Nobody goes behind this checkpoint any more: forget what lies before it."""
        place = self._marks.get(checkpoint_id)
        if place is None:
            return
        while self._first < place:
            self.memory_bytes -= self._items.popleft()[1]
            self._first += 1
        self._base = checkpoint_id
        self._marks = {id: at for id, at in self._marks.items() if id > checkpoint_id}

    def since(self, checkpoint_id: int) -> Iterator[Timed | End]:
        """Everything behind a checkpoint's barrier, with the end if there was one.

        Raises:
            InvariantError: what it needs is not kept (any more).
        """
        place = self._marks.get(checkpoint_id, self._first if checkpoint_id == self._base else None)
        if place is None:
            raise InvariantError(f"what was sent since checkpoint {checkpoint_id} is not kept, only since {self._base}")
        for i in range(place - self._first, len(self._items)):
            yield self._items[i][0]
        if self._ended:
            yield End()
