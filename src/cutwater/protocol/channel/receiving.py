"""The receiving end of a channel: numbering, credit, blocking, overtaking, recording.

Items arrive by ``put`` and are taken by ``take``.  Rows are numbered from the job's first attempt on, so that what a
sender repeats after a recovery is dropped here by its number.  Every waiting frame takes a place; a taken frame's place
goes back to the sender as credit, of several frames at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import InvariantError, NondeterminismError
from cutwater.protocol.channel.items import Barrier, End, Head, Item, Rows, Timed, Watermark, through_last_row

EMPTY: Final = int(Head.EMPTY)
ROWS: Final = int(Head.ROWS)
CONTROL: Final = int(Head.CONTROL)
URGENT: Final = int(Head.URGENT)

NO_LIMIT: Final = 1 << 62
"""Frames that a feedback channel may hold (rule C7)."""

FEW_ROWS: Final = 1024
"""Frames that have no more rows than this together may be taken as one: what a call costs by itself matters, then, and
not what it costs to put them together."""

_FEW_BYTES: Final = 1 << 20
"""Nor are they joined where they are larger than this."""

_BARRIERS_ANNOUNCED: Final = 16


class FrameStore(Protocol):
    """A place for the rows of waiting frames other than memory."""

    def keep(self, rows: Rows) -> Rows:
        """Take a frame that arrives; returns its rows as they are to be queued."""
        ...

    def keep_watermark(self) -> None:
        """A frame without rows arrives."""

    def restored(self, frames: int) -> None:
        """So many frames wait that came from a snapshot."""

    def left(self) -> None:
        """The oldest frame was taken."""


class Remaker(NamedTuple):
    """A sender that goes back without its receiver, and makes its rows again (R3, R4)."""

    step: str
    source: int
    target: int


class ReceivingEnd:
    """The receiving end.

    One thread at a time calls ``put``, another one everything else; each counter has one writer.

    Args:
        key: names the channel.
        capacity_frames: frames of rows (and lone watermarks) that may wait here; ``NO_LIMIT`` of a feedback channel.
        on_ready: called (in the thread of ``put``) when there is something to take.
        on_credit: called (in the thread of ``take``) with the number of frames that the sender may send again.
        credit_batch: credit is returned for this many frames at a time.
        next_row: number of the first row that is wanted; earlier ones are dropped on arrival.
        watermark, idle: as restored from a snapshot.
        store: where waiting rows lie; ``None``: in memory.  With one the receiver is woken while it is blocked, too, so
            that it can give places back (``relieve``).
        join: makes one batch of several; ``None``: each frame is taken by itself.

    >>> end = ReceivingEnd("in", 1)
    >>> end.put(Watermark(5)); end.head() == CONTROL, end.take(1)
    (True, Watermark(watermark=5, idle=False))
    """

    __slots__ = (
        "_blocked", "_credit_batch", "_credited_in", "_credited_out", "_end_arrived", "_join", "_next_arrival",
        "_offset", "_queue", "_recordings", "_rows_in", "_rows_out", "_store", "_taken", "_uncredited", "_urgent",
        "announced",
        "capacity_frames", "ended", "idle", "key", "made_again_by", "next_row", "on_credit", "on_ready", "watermark",
    )  # fmt: skip

    def __init__(
        self,
        key: Any,
        capacity_frames: int,
        on_ready: Callable[[], None] = lambda: None,
        *,
        on_credit: Callable[[int], None] | None = None,
        credit_batch: int = 1,
        next_row: int = 0,
        watermark: int = MIN_WATERMARK,
        idle: bool = False,
        store: FrameStore | None = None,
        join: Callable[[Sequence[Any]], Any] | None = None,
    ) -> None:
        self.key, self.capacity_frames = key, capacity_frames
        self.on_ready, self.on_credit = on_ready, on_credit
        self.next_row, self.watermark, self.idle, self.ended = next_row, watermark, idle, False
        self._store, self._join = store, join
        self._queue: deque[Item] = deque()
        self._urgent: deque[tuple[Barrier, int]] = deque()  # overtaking barriers, each with its place in the row order
        self.announced: deque[Barrier] = deque(maxlen=_BARRIERS_ANNOUNCED)
        """Barriers that have arrived in order; the subtask that wants to know of it takes them out."""
        self._recordings: dict[int, list[Timed]] = {}
        self._blocked = False
        self._offset = 0  # rows of the head frame that were taken already
        self._credit_batch, self._taken = credit_batch, 0
        self._uncredited = 0  # so many frames at the head give no credit: restored, or credited before they were taken
        # Each counter has one writing thread; differences are exact enough without a lock.
        self._credited_in = self._credited_out = self._rows_in = self._rows_out = 0
        self._next_arrival, self._end_arrived = next_row, False
        self.made_again_by: Remaker | None = None
        """The other end, once a sender that goes back makes its rows again."""

    # -- arrival (the thread of whoever carries items)

    def put(self, item: Item) -> None:
        """Append an item.  Rows below the wanted number are cut off (replay after a restore).

        Raises:
            InvariantError: rows are missing, rows follow an end, or the sender ignored its credit.
            NondeterminismError: rows that are made again are more than those before them.
        """
        kind = type(item)
        if kind is Barrier:
            self._put_barrier(item)  # type: ignore[arg-type]
            return
        if kind is End:
            if not self._end_arrived:
                self._end_arrived = True
                self._queue.append(item)
                self.on_ready()
            return
        if self._credited_in - self._credited_out >= self.capacity_frames:
            raise InvariantError(f"{self.key}: a frame arrived although all {self.capacity_frames} places are taken")
        self._credited_in += 1
        store = self._store
        if type(item) is Rows:
            self._put_rows(item if store is None else store.keep(item))
        else:
            if store is not None:
                store.keep_watermark()
            self._queue.append(item)
        if not self._blocked or store is not None:
            self.on_ready()

    def _put_rows(self, item: Rows) -> None:
        batch, first, watermark, late_before, _ = item
        rows, wanted = batch.num_rows, self._next_arrival
        if first != wanted:
            if first > wanted:
                raise InvariantError(f"{self.key}: row {wanted} is missing, row {first} arrived")
            if first + rows <= wanted:  # all seen before; what it says of time still holds, and its place is credited
                self._queue.append(Watermark(watermark))
                return
            batch = batch.slice(wanted - first)
            rows, item = batch.num_rows, Rows(batch, wanted, watermark, late_before)
        if self._end_arrived:
            raise self._beyond_the_end(item)
        self._rows_in += rows
        self._queue.append(item)
        self._next_arrival = wanted + rows  # after the append: see overtake

    def _beyond_the_end(self, item: Rows) -> InvariantError | NondeterminismError:
        sender = self.made_again_by
        if sender is None:
            return InvariantError(f"{self.key}: row {item.first_row} arrived after the end of data")
        return NondeterminismError(
            f"subtask {sender.source} made at least {item.first_row + item.batch.num_rows} rows for subtask "
            f"{sender.target} once more, where it had made {self._next_arrival} of the same input",
            step=sender.step,
        )

    def _put_barrier(self, item: Barrier) -> None:
        if item.overtake:
            self._urgent.append((item, self._next_arrival))
        else:
            self._queue.append(item)
            self.announced.append(item)
        self.on_ready()

    # -- the subtask loop

    def head(self) -> int:
        """What comes next.  While blocked: ``EMPTY``, except for a barrier that overtakes (``URGENT``)."""
        if self._urgent:
            return URGENT
        if self._blocked or not self._queue:
            return EMPTY
        return ROWS if type(self._queue[0]) is Rows else CONTROL

    def take(self, max_rows: int) -> Item:
        """The next item; of a larger batch only the first ``max_rows`` rows, the rest stays at the head.

        Several frames of few rows that wait are one item where nothing that lies between them says anything: whoever
        was held up has one call to make, not one for each.

        Raises:
            InvariantError: ``head`` is ``EMPTY``.
        """
        if self._urgent:
            barrier, place = self._urgent.popleft()
            return barrier._replace(overtaken=self._rows_before(place))
        if self._blocked or not self._queue:
            raise InvariantError(f"{self.key}: take from {'a blocked' if self._blocked else 'an empty'} channel")
        item = self._queue[0]
        if type(item) is Rows:
            return self._take_rows(item, max_rows)
        self._queue.popleft()
        if type(item) is Watermark:
            self._frame_left()
            self.watermark, self.idle = max(self.watermark, item.watermark), item.idle
            taken = Watermark(self.watermark, item.idle)
            for log in self._recordings.values():
                log.append(taken)
            return taken
        if type(item) is End:
            self.ended = True
        return item

    def _take_rows(self, item: Rows, max_rows: int) -> Rows:
        batch, first, watermark, late_before, _ = item
        offset = self._offset
        left = batch.num_rows - offset
        if left > max_rows:
            taken = Rows(batch.slice(offset, max_rows), first + offset, self.watermark, late_before)
            self._offset, left = offset + max_rows, max_rows
        else:
            self._queue.popleft()
            self._offset = 0
            risen = watermark > self.watermark
            if risen:
                self.watermark = watermark
            taken = Rows(batch.slice(offset) if offset else batch, first + offset, self.watermark, late_before)
            self._frame_left()
            if self._join is not None and self._queue and not risen and left < FEW_ROWS:
                taken = self._with_next(taken, self._join, min(max_rows, FEW_ROWS))
                left = taken.batch.num_rows
        self.idle = False
        self.next_row = taken.first_row + left
        self._rows_out += left
        if self._recordings:
            for log in self._recordings.values():
                log.append(taken)
        return taken

    def _with_next(self, taken: Rows, join: Callable[[Sequence[Any]], Any], most: int) -> Rows:
        """The rows of a frame, and those of the frames behind it, up to ``most`` in all.

        A frame whose watermark rises is the last, so that it is heard where it was: which rows are late must not depend
        on how many frames waited.
        """
        batches, rows, size = [taken.batch], taken.batch.num_rows, taken.batch.nbytes
        while self._queue and type(item := self._queue[0]) is Rows and item.late_before == taken.late_before:
            rows += item.batch.num_rows
            size += item.batch.nbytes
            if rows > most or size > _FEW_BYTES:
                break
            self._queue.popleft()
            batches.append(item.batch)
            self._frame_left()
            if item.watermark > self.watermark:
                self.watermark = item.watermark
                break
        if len(batches) == 1:
            return taken
        return Rows(join(batches), taken.first_row, self.watermark, taken.late_before)

    def _frame_left(self) -> None:
        """A frame's place is free again: tell the sender, for several at a time."""
        if self._store is not None:
            self._store.left()
        if self._uncredited:
            self._uncredited -= 1
            return
        self._credited_out += 1
        self._taken += 1
        if self._taken >= self._credit_batch and self.on_credit is not None:
            count, self._taken = self._taken, 0
            self.on_credit(count)

    def block(self) -> None:
        """Hold the queue (rule A3): ``head`` is ``EMPTY`` until ``unblock``.  Arrivals go on up to the capacity."""
        self._blocked = True

    def unblock(self) -> None:
        """Go on in FIFO order (rule A5)."""
        self._blocked = False

    @property
    def blocked(self) -> bool:
        return self._blocked

    def relieve(self) -> None:
        """Give the places of all waiting frames back to the sender now, so that it goes on although nobody takes."""
        frames = self._credited_in - self._credited_out
        if frames and self.on_credit is not None:
            self._credited_out += frames
            self._uncredited += frames
            self.on_credit(frames)

    def waits(self, checkpoint_id: int) -> bool:
        """The in-order barrier of this checkpoint lies in the queue."""
        for i in range(len(self._queue)):  # by index: the other thread may append meanwhile
            item = self._queue[i]
            if type(item) is Barrier and item.checkpoint_id == checkpoint_id:
                return True
        return False

    def overtake(self, checkpoint_id: int) -> bool:
        """Bring a barrier that waits in the queue to the front (aligned to unaligned); False if it is not here yet."""
        arrived, count = self._next_arrival, len(self._queue)
        for i in range(count):
            barrier = self._queue[i]
            if type(barrier) is Barrier and barrier.checkpoint_id == checkpoint_id:
                later = (r.first_row for j in range(i + 1, count) if type(r := self._queue[j]) is Rows)
                place = next(later, arrived)
                del self._queue[i]
                self._urgent.append((barrier._replace(overtake=True), place))
                return True
        return False

    def _rows_before(self, place: int) -> tuple[Timed, ...]:
        """Waiting rows with numbers below ``place``, and the watermarks among them."""
        found: list[Timed] = []
        for i in range(len(self._queue)):  # by index: the other thread may append meanwhile
            item = self._queue[i]
            if type(item) is Rows:
                if item.first_row >= place:
                    break
                skip = self._offset if i == 0 else 0
                found.append(item.part(item.batch.slice(skip), item.first_row + skip) if skip else item)
            elif type(item) is Watermark:
                found.append(item)
        return tuple(through_last_row(found))

    # -- recording and restoring (rules CL3, C3, C5)

    def record(self, checkpoint_id: int) -> None:
        """Keep, by reference, all rows and watermarks taken from now on, for this checkpoint."""
        self._recordings.setdefault(checkpoint_id, [])

    def stop_recording(self, checkpoint_id: int) -> list[Timed]:
        """What was recorded for this checkpoint, in order; empty if it was not being recorded."""
        return self._recordings.pop(checkpoint_id, [])

    @property
    def recording(self) -> bool:
        return bool(self._recordings)

    def restore(self, items: Iterable[Timed]) -> None:
        """Deliver recorded rows and watermarks before anything that arrives.  Call before the first arrival.

        Raises:
            InvariantError: something arrived already, or the rows do not continue at ``next_row`` without a gap.
        """
        if self._queue or self._urgent or self._uncredited:
            raise InvariantError(f"{self.key}: restore after the first arrival")
        for item in items:
            before = len(self._queue)
            if type(item) is Watermark:
                self._queue.append(item)
            elif type(item) is Rows and item.batch.num_rows:
                self._put_rows(item)
            self._uncredited += len(self._queue) - before
        if self._store is not None:
            self._store.restored(self._uncredited)

    # -- a sender that goes back without this end (R3, R4)

    def take_over(self, on_credit: Callable[[int], None], sender: Remaker) -> None:
        """The sender is another one, which sends again what arrived: that is dropped by its number.

        What waits stays; the new sender's first credit is ``places``.  Nothing of the old sender's may arrive any more.
        """
        self.on_credit, self._taken, self.made_again_by = on_credit, 0, sender

    @property
    def places(self) -> int:
        """Frames that the sender may send now, if nothing of them is on its way."""
        return self.capacity_frames - (self._credited_in - self._credited_out)

    # -- what a status shows

    @property
    def queued_frames(self) -> int:
        """Items waiting, the partly taken one included."""
        return len(self._queue) + len(self._urgent)

    @property
    def queued_rows(self) -> int:
        return self._rows_in - self._rows_out

    @property
    def next_arrival(self) -> int:
        """Number of the next row to arrive."""
        return self._next_arrival
