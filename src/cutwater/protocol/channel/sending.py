"""The sending end of a channel: numbering, credit, watermarks that ride on frames, overtaking, replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import InvariantError
from cutwater.protocol.channel.items import (
    Barrier,
    Batch,
    End,
    Item,
    Rows,
    Timed,
    Watermark,
    rows_in,
    through_last_row,
)


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


class SendingEnd:
    """Frames of rows that wait for credit, and what goes before or behind them.

    A frame of rows, or a lone watermark, costs one credit; barriers and the end of data are free.  While a frame waits
    the channel is ``full``, and whatever follows waits behind it, except a barrier that overtakes.

    Where two threads use it (one offers, one grants), whoever owns it holds a lock around every call but those to
    ``mark``, ``offer_watermark``, ``full`` and ``waiting_frames``.

    Args:
        key: names the channel.
        send: hands an item to the other side; never blocks.
        credit: frames that may be sent at once; ``grant`` adds more.
        next_row: number of the next row, as restored.
        watermark, idle: the last one sent, as restored.
        kept: for receivers that go back by themselves (R4); ``None``: all go back together.

    >>> sent = []
    >>> end = SendingEnd("out", sent.append)
    >>> end.offer_watermark(5); overtaken = end.offer_barrier(1); sent, end.full
    ([], True)
    >>> end.grant(1), sent
    (True, [Watermark(watermark=5, idle=False), Barrier(checkpoint_id=1, final=False, overtake=False, overtaken=(), \
probe=False, behind=0, savepoint=False)])
    """

    __slots__ = (
        "_ahead_bytes", "_arrived", "_credit", "_gone", "_kept", "_send", "_waiting", "ended", "idle", "key",
        "next_row", "watermark", "watermark_unsent",
    )  # fmt: skip

    def __init__(
        self,
        key: Any,
        send: Callable[[Item], None],
        *,
        credit: int = 0,
        next_row: int = 0,
        watermark: int = MIN_WATERMARK,
        idle: bool = False,
        kept: ReplayBuffer | None = None,
    ) -> None:
        self.key, self._send, self._credit, self._kept = key, send, credit, kept
        self.next_row, self.watermark, self.idle, self.ended = next_row, watermark, idle, False
        self.watermark_unsent = False
        """The watermark was offered, and no frame has carried it yet."""
        self._waiting: deque[Item] = deque()
        self._arrived = 0
        self._gone, self._ahead_bytes = False, -1  # below 0: who sends more waits for the receiver

    def send_through(self, send: Callable[[Item], None]) -> Callable[[Item], None]:
        """Have items handed to ``send`` from now on; returns where they went before, for ``send`` to pass them on."""
        before, self._send = self._send, send
        return before

    # ------------------------------------------------------------------------------------------------ what is sent

    def offer(self, batch: Batch, late_before: int = MIN_WATERMARK) -> None:
        """Send rows as one frame, which carries the newest watermark.  Accepted even when ``full``.

        Raises:
            InvariantError: the channel has ended.
        """
        if self.ended:
            raise InvariantError(f"{self.key}: rows offered after the end of data")
        first = self.next_row
        self.next_row = first + batch.num_rows
        self._enqueue(Rows(batch, first, self.watermark, late_before))
        if not self.idle:
            self.watermark_unsent = False

    def offer_watermark(self, watermark: int, idle: bool = False) -> None:
        """Announce a watermark: it rides on the next frame, or goes alone with ``flush_watermark``.

        Raises:
            InvariantError: the watermark fell.
        """
        if watermark < self.watermark:
            raise InvariantError(f"{self.key}: watermark fell from {self.watermark} to {watermark}")
        if watermark != self.watermark or idle != self.idle:
            self.watermark, self.idle, self.watermark_unsent = watermark, idle, True

    def flush_watermark(self) -> None:
        """Send a watermark that no frame has carried, alone."""
        if self.watermark_unsent:
            self.watermark_unsent = False
            self._enqueue(Watermark(self.watermark, self.idle))

    def offer_barrier(
        self,
        checkpoint_id: int,
        final: bool = False,
        overtake: bool = False,
        probe: bool = False,
        savepoint: bool = False,
    ) -> list[Timed]:
        """Send a barrier behind everything offered so far (``next_row`` is its place in the row order).

        With ``overtake`` it goes before the frames that wait for credit; these are returned (through the last row):
        they belong to the snapshot, in the sender's part, and are sent afterwards all the same.  A barrier of the same
        checkpoint that waits already is moved, and only what lies before it counts.
        """
        self.flush_watermark()
        barrier = Barrier(checkpoint_id, final, overtake, probe=probe, savepoint=savepoint)
        if not overtake:
            self._enqueue(barrier)
            return []
        place = self._place(checkpoint_id)
        overtaken = self._before(len(self._waiting) if place is None else place)
        if place is not None:
            del self._waiting[place]
        self._send(barrier._replace(behind=rows_in(overtaken)))
        return overtaken

    def overtake(self, checkpoint_id: int) -> list[Timed]:
        """Move a barrier that waits for its turn to the front, as ``offer_barrier`` does; nothing if none waits."""
        place = self._place(checkpoint_id)
        if place is None:
            return []
        overtaken = self._before(place)
        barrier = self._waiting[place]
        del self._waiting[place]
        assert type(barrier) is Barrier
        self._send(barrier._replace(overtake=True, behind=rows_in(overtaken)))
        return overtaken

    def holds(self, checkpoint_id: int) -> bool:
        """The barrier of this checkpoint waits here behind frames without credit."""
        return self._place(checkpoint_id) is not None

    def offer_end(self) -> None:
        """Send the end of data, once.  Only barriers may follow."""
        self.flush_watermark()
        if not self.ended:
            self.ended = True
            self._enqueue(End())

    # ------------------------------------------------------------------------------------------------------ credit

    @property
    def full(self) -> bool:
        """True while frames wait for credit (after a loss: too many): do not schedule the subtask."""
        if self._ahead_bytes >= 0 and self._kept is not None:
            return self._ahead_bytes >= self._kept.most_memory_bytes
        return bool(self._waiting)

    @property
    def waiting_frames(self) -> int:
        return len(self._waiting)

    def grant(self, frames: int) -> bool:
        """The receiver has room for ``frames`` more; true if nothing waits any more that waited before."""
        self._credit += frames
        if not self._waiting:
            return False
        while self._waiting and self._affordable(self._waiting[0]):
            self._send(self._waiting.popleft())
        if self._waiting:
            return False
        self._ahead_bytes = -1
        return True

    # ------------------------------------------------------------------- a receiver that goes back by itself (R4)

    @property
    def keeps(self) -> bool:
        """What is sent is kept for a receiver that goes back."""
        return self._kept is not None

    def mark(self, checkpoint_id: int) -> None:
        """The subtask froze: what follows is what a receiver needs that goes back to this checkpoint."""
        if self._kept is not None:
            self._kept.mark(checkpoint_id)

    def settled(self, checkpoint_id: int, completed: bool) -> None:
        """A checkpoint completed, so that nobody goes behind it any more, or was given up."""
        if self._kept is not None:
            settle = self._kept.completed if completed else self._kept.aborted
            settle(checkpoint_id)

    def restore(self, items: Iterable[Timed]) -> None:
        """What a barrier overtook here: a receiver that lives may not have it.  Call before the first credit."""
        self._waiting.extend(items)

    def arrived(self, next_row: int) -> None:
        """The receiver lives, and lacks only rows from this one on: others are not sent again.

        A barrier that overtakes must not find them here, or a snapshot would say that they are still to be taken.
        """
        self._arrived = next_row
        waiting, self._waiting = self._waiting, deque[Item]()
        for item in waiting:
            lacking = self._lacking(item) if type(item) is Rows else item
            if type(lacking) is Watermark and self._waiting and type(self._waiting[-1]) is Watermark:
                self._waiting.pop()
            self._waiting.append(lacking)

    def let_go(self) -> bool:
        """The receiver is lost: what it would get is kept for the next one, and the sender need not wait for it.

        Until the next one has all of it, as many bytes may be offered as a channel keeps in memory; then it is full.
        False: nothing is kept here.
        """
        if self._kept is None:
            return False
        self._gone, self._credit = True, 0
        self._ahead_bytes = max(self._ahead_bytes, 0)
        self._waiting.clear()  # all of it is kept; barriers are of a checkpoint that is given up
        return True

    def take_over(self, send: Callable[[Item], None], checkpoint_id: int) -> None:
        """The receiver is another one, which was restored from a checkpoint: send it all that it lacks, on its credit.

        Raises:
            InvariantError: what it lacks is not kept.
        """
        if self._kept is None:
            raise InvariantError(f"{self.key}: nothing is kept for a new receiver")
        self._send, self._credit, self._arrived, self._gone = send, 0, 0, False
        self._waiting = deque(self._kept.since(checkpoint_id))
        if not self._waiting:
            self._ahead_bytes = -1

    # ---------------------------------------------------------------------------------------------------- the queue

    def _enqueue(self, item: Item) -> None:
        waiting, kept = self._waiting, self._kept
        if type(item) is Watermark and waiting and (kept is None or kept.may_join(waiting[-1])):
            last, joined = waiting[-1], None  # at most one watermark waits behind the last rows
            if type(last) is Watermark:
                joined = item
            elif type(last) is Rows and not item.idle:
                joined = last._replace(watermark=item.watermark)
            if joined is not None:
                waiting[-1] = joined
                if kept is not None:
                    kept.join(joined)
                return
        if kept is not None and not isinstance(item, Barrier):
            if self._ahead_bytes >= 0 and type(item) is Rows:
                self._ahead_bytes += item.batch.nbytes
            item = kept.add(item)
        if self._gone:
            return
        if type(item) is Rows and item.first_row < self._arrived:
            item = self._lacking(item)
        if not waiting and self._affordable(item):
            self._send(item)
            return
        waiting.append(item)

    def _affordable(self, item: Item) -> bool:
        """Pay for an item; False if there is no credit."""
        if type(item) is Barrier or type(item) is End:
            return True
        if self._credit <= 0:
            return False
        self._credit -= 1
        return True

    def _lacking(self, item: Rows) -> Rows | Watermark:
        """What the receiver has not of a frame: some of its rows, or only what it says of time."""
        has = self._arrived - item.first_row
        if has <= 0:
            return item
        if has >= item.batch.num_rows:
            return Watermark(item.watermark)
        return item.part(item.batch.slice(has), self._arrived)

    def _place(self, checkpoint_id: int) -> int | None:
        """Where a barrier waits."""
        for i, item in enumerate(self._waiting):
            if type(item) is Barrier and item.checkpoint_id == checkpoint_id:
                return i
        return None

    def _before(self, place: int) -> list[Timed]:
        """Rows, and watermarks among them, that wait before a place."""
        waiting = self._waiting
        items = (waiting[i] for i in range(place))
        return through_last_row([i for i in items if isinstance(i, Rows | Watermark)])
