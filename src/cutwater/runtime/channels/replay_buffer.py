"""What a channel sent since the newest checkpoint, for a receiver that goes back to it by itself (R4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pyarrow as pa

from cutwater.errors import InvariantError
from cutwater.runtime.channels.items import End, Item, Rows, Timed
from cutwater.runtime.channels.spill import SpillFile

_POOL = pa.system_memory_pool()
"""Arrow's own pool gives memory back that rests for some milliseconds, and the next batches pay for its pages again."""


class ReplayBuffer:
    """The items of one channel, in the order in which they were sent, barriers left out.

    Rows are kept as a connection sends them: they are encoded once, and the memory they came in is soon used again,
    while it is still in the processor's caches.

    It begins at a *mark*: the place of the newest completed checkpoint's barrier among them.  What lay in the channel
    at that cut comes behind the barrier's place, or is in the snapshot.  An end of data is kept for ever, because no
    snapshot tells a receiver of it.

    Belongs to its ``OutputChannel``, under whose lock everything but ``mark`` is called.

    Args:
        memory_bytes: rows beyond this lie in a file.
        base: the checkpoint that the channel was restored from; 0: none.

    >>> import pyarrow as pa
    >>> kept, rows = ReplayBuffer(memory_bytes=1 << 20), pa.record_batch({"n": [1]})
    >>> _ = kept.add(Rows(rows, 0)); kept.mark(1); _ = kept.add(Rows(rows, 1))
    >>> kept.completed(1); [item.first_row for item in kept.since(1)]
    [1]
    """

    def __init__(self, *, memory_bytes: int, base: int = 0) -> None:
        self.most_memory_bytes, self._base = memory_bytes, base
        self._items: deque[tuple[Timed, int]] = deque()
        """With the bytes that each takes in memory."""
        self._sent: Timed | None = None
        """The last one, as it was sent."""
        self._first = 0
        """Number of the first item that is kept, counted from the channel's beginning."""
        self._marks: dict[int, int] = {}
        self._ended = False
        self._file: SpillFile | None = None
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
        if type(item) is End:
            self._ended = True
            return item
        assert not isinstance(item, End)
        kept, size = item, 0
        if type(item) is Rows:
            body = item.batch.serialize(memory_pool=_POOL)
            if self.memory_bytes + body.size <= self.most_memory_bytes:
                item = kept = item.encoded(body)
                size = body.size
            else:  # what is sent now need not be read from the file's pages
                self._file = self._file or SpillFile()
                item, kept = item._replace(body=body), item.encoded(self._file.write(body))
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

    @property
    def spilled_bytes(self) -> int:
        """Written to disk so far."""
        return self._file.stored_bytes if self._file is not None else 0
