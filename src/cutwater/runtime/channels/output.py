"""The sending end of a channel."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable

import pyarrow as pa

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import InvariantError
from cutwater.plan.graph import Channel
from cutwater.runtime.channels.items import Barrier, End, Item, Rows, Timed, Watermark, through_last_row
from cutwater.runtime.channels.replay_buffer import ReplayBuffer
from cutwater.runtime.transport.signal import nothing


class OutputChannel:
    """The sending end: a builder of batches, then frames that wait for credit.

    Belongs to the subtask loop's thread, except ``grant``, which any thread may call.

    Args:
        key: edge, sending subtask, receiving subtask.
        schema: of every batch.
        send: hands an item to the other side; never blocks.  Called with the channel's lock held.
        credit: frames that may be sent at once; ``grant`` adds more.
        batch_rows: the builder flushes at this many rows; a batch of half of it passes without a copy.
        buffer_timeout_ms: rows (and watermarks) wait in the builder for at most this time while there is other work,
            see ``flush_if_due`` and ``flush_idle``.
        max_batch_bytes: larger batches are split.
        on_ready: called when a full channel has room again (in the thread of ``grant``).
        next_row: number of the next row, as restored.
        watermark: the last one sent, as restored.
        kept: for receivers that go back by themselves (R4); ``None``: all go back together.
    """

    __slots__ = (
        "_ahead_bytes",
        "_arrived",
        "_buffer",
        "_buffered_rows",
        "_credit",
        "_due_s",
        "_gone",
        "_kept",
        "_late_before",
        "_lock",
        "_max_batch_bytes",
        "_max_fixed_rows",
        "_send",
        "_timeout_s",
        "_waiting",
        "_watermark_unsent",
        "batch_rows",
        "ended",
        "idle",
        "key",
        "next_row",
        "on_ready",
        "schema",
        "watermark",
    )  # fmt: skip

    def __init__(
        self,
        key: Channel,
        schema: pa.Schema,
        send: Callable[[Item], None],
        *,
        credit: int = 0,
        batch_rows: int = 65_536,
        buffer_timeout_ms: float = 2.0,
        max_batch_bytes: int = 1 << 29,
        on_ready: Callable[[], None] = nothing,
        next_row: int = 0,
        watermark: int = MIN_WATERMARK,
        kept: ReplayBuffer | None = None,
    ) -> None:
        self._kept, self._arrived = kept, 0
        self._gone, self._ahead_bytes = False, -1  # below 0: who sends more waits for the receiver
        self.key, self.schema, self.on_ready = key, schema, on_ready
        self.batch_rows, self._timeout_s = batch_rows, buffer_timeout_ms / 1000
        self.next_row, self.watermark, self.idle, self.ended = next_row, watermark, False, False
        self._send, self._credit, self._max_batch_bytes = send, credit, max_batch_bytes
        self._max_fixed_rows = _fixed_rows(schema, max_batch_bytes)
        self._lock = threading.Lock()  # guards _waiting and _credit
        self._waiting: deque[Item] = deque()
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_rows = 0
        self._due_s = math.inf
        self._watermark_unsent = False
        self._late_before = MIN_WATERMARK

    def send_through(self, send: Callable[[Item], None]) -> Callable[[Item], None]:
        """Have items handed to ``send`` from now on; returns where they went before, for ``send`` to pass them on."""
        before, self._send = self._send, send
        return before

    # -- a receiver that goes back by itself (R4)

    def mark(self, checkpoint_id: int) -> None:
        """The subtask froze: what follows is what a receiver needs that goes back to this checkpoint."""
        if self._kept is not None:
            self.flush()
            self._kept.mark(checkpoint_id)

    def settled(self, checkpoint_id: int, completed: bool) -> None:
        """A checkpoint completed, so that nobody goes behind it any more, or was given up."""
        if self._kept is not None:
            with self._lock:
                settle = self._kept.completed if completed else self._kept.aborted
                settle(checkpoint_id)

    def restore(self, items: Iterable[Timed]) -> None:
        """What a barrier overtook here: a receiver that lives may not have it.  Call before the first credit."""
        with self._lock:
            self._waiting.extend(items)

    def arrived(self, next_row: int) -> None:
        """The receiver lives, and lacks only rows from this one on: others are not sent again (any thread).

        A barrier that overtakes must not find them here, or a snapshot would say that they are still to be taken.
        """
        with self._lock:
            self._arrived = next_row
            waiting, self._waiting = self._waiting, deque[Item]()
            for item in waiting:
                lacking = self._lacking(item) if type(item) is Rows else item
                if type(lacking) is Watermark and self._waiting and type(self._waiting[-1]) is Watermark:
                    self._waiting.pop()
                self._waiting.append(lacking)

    def _lacking(self, item: Rows) -> Rows | Watermark:
        """What the receiver has not of a frame: some of its rows, or only what it says of time."""
        has = self._arrived - item.first_row
        if has <= 0:
            return item
        if has >= item.batch.num_rows:
            return Watermark(item.watermark)
        return item.part(item.batch.slice(has), self._arrived)

    def let_go(self) -> None:
        """The receiver is lost: what it would get is kept for the next one, and the sender need not wait for it.

        Until the next one has all of it, as many bytes may be offered as a channel keeps in memory; then it is full.
        """
        if self._kept is None:
            return
        with self._lock:
            self._gone, self._credit = True, 0
            self._ahead_bytes = max(self._ahead_bytes, 0)
            self._waiting.clear()  # all of it is kept; barriers are of a checkpoint that is given up
        self.on_ready()

    def take_over(self, send: Callable[[Item], None], checkpoint_id: int) -> None:
        """The receiver is another one, which was restored from a checkpoint: send it all that it lacks, on its credit.

        Raises:
            InvariantError: what it lacks is not kept.
        """
        if self._kept is None:
            raise InvariantError(f"{self.key}: nothing is kept for a new receiver")
        with self._lock:
            self._send, self._credit, self._arrived, self._gone = send, 0, 0, False
            self._waiting = deque(self._kept.since(checkpoint_id))
            if not self._waiting:
                self._ahead_bytes = -1

    def offer(self, batch: pa.RecordBatch, late_before: int = MIN_WATERMARK) -> None:
        """Send rows, at once or with their neighbours.  Accepted even when ``full`` (a call may overshoot).

        Args:
            batch: of the channel's schema.
            late_before: see ``Rows``; rows with another one never lie in one frame.

        Raises:
            InvariantError: the schema is not the channel's, or the channel has ended.
        """
        rows = batch.num_rows
        if not rows:
            return
        self.idle = False
        if self.ended or not batch.schema.equals(self.schema):
            raise self._refusal(batch)
        if late_before != self._late_before:
            self._flush_rows()
            self._late_before = late_before
        if rows * 2 < self.batch_rows:
            self._buffer.append(batch)
            self._buffered_rows += rows
            self.next_row += rows
            if self._buffered_rows >= self.batch_rows:
                self._flush_rows()
            return
        self._flush_rows()
        if rows <= 2 * self.batch_rows:
            self._emit(batch)
        else:
            for start in range(0, rows, self.batch_rows):
                self._emit(batch.slice(start, self.batch_rows))

    def offer_watermark(self, watermark: int, idle: bool = False) -> None:
        """Announce a watermark: it rides on the next frame, or alone once it is due.

        Raises:
            InvariantError: the watermark fell.
        """
        if watermark < self.watermark:
            raise InvariantError(f"{self.key}: watermark fell from {self.watermark} to {watermark}")
        if watermark != self.watermark or idle != self.idle:
            self.watermark, self.idle, self._watermark_unsent = watermark, idle, True

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
        self.flush()
        barrier = Barrier(checkpoint_id, final, overtake, probe=probe, savepoint=savepoint)
        if not overtake:
            self._enqueue(barrier)
            return []
        with self._lock:
            place = self._place(checkpoint_id)
            overtaken = self._before(len(self._waiting) if place is None else place)
            if place is not None:
                del self._waiting[place]
            self._send(barrier._replace(behind=_rows_in(overtaken)))
        return overtaken

    def overtake(self, checkpoint_id: int) -> list[Timed]:
        """Move a barrier that waits for its turn to the front, as ``offer_barrier`` does; nothing if none waits."""
        with self._lock:
            place = self._place(checkpoint_id)
            if place is None:
                return []
            overtaken = self._before(place)
            barrier = self._waiting[place]
            del self._waiting[place]
            assert type(barrier) is Barrier
            self._send(barrier._replace(overtake=True, behind=_rows_in(overtaken)))
        return overtaken

    def holds(self, checkpoint_id: int) -> bool:
        """The barrier of this checkpoint waits here behind frames without credit."""
        if not self._waiting:
            return False
        with self._lock:
            return self._place(checkpoint_id) is not None

    def _place(self, checkpoint_id: int) -> int | None:
        """Where a barrier waits.  Holds the lock."""
        for i, item in enumerate(self._waiting):
            if type(item) is Barrier and item.checkpoint_id == checkpoint_id:
                return i
        return None

    def _before(self, place: int) -> list[Timed]:
        """Rows, and watermarks among them, that wait before a place.  Holds the lock."""
        waiting = self._waiting
        items = (waiting[i] for i in range(place))
        return through_last_row([i for i in items if isinstance(i, Rows | Watermark)])

    def offer_end(self) -> None:
        """Send the end of data, once.  Only barriers may follow."""
        self.flush()
        if not self.ended:
            self.ended = True
            self._enqueue(End())

    def flush(self) -> None:
        """Send what the builder holds, now."""
        self._flush_rows()
        if self._watermark_unsent:
            self._watermark_unsent = False
            self._enqueue(Watermark(self.watermark, self.idle))
        self._due_s = math.inf

    def flush_if_due(self, now_s: float) -> float:
        """Flush when the timeout has passed; returns when to call again (infinity: nothing waits).

        The timeout runs from the first call after something was offered.  While frames wait for credit nothing is
        flushed: a slow receiver gets fewer, larger batches.
        """
        if not (self._buffer or self._watermark_unsent) or self._waiting:
            return math.inf
        if self._due_s == math.inf:
            self._due_s = now_s + self._timeout_s
        if now_s < self._due_s:
            return self._due_s
        self.flush()
        return math.inf

    def flush_idle(self) -> bool:
        """Send what the builder holds, because its worker has nothing else to do; says whether there was anything.

        So few rows do not wait for others that are not there.  Where all work is done by a worker that never rests,
        ``flush_if_due`` decides, and batches are large.
        """
        if not (self._buffer or self._watermark_unsent) or self._waiting:
            return False
        self.flush()
        return True

    @property
    def full(self) -> bool:
        """True while frames wait for credit (after a loss: too many): do not schedule the subtask."""
        if self._ahead_bytes >= 0 and self._kept is not None:
            return self._ahead_bytes >= self._kept.most_memory_bytes
        return bool(self._waiting)

    @property
    def waiting_frames(self) -> int:
        return len(self._waiting)

    def grant(self, frames: int) -> None:
        """The receiver has room for ``frames`` more (any thread)."""
        with self._lock:
            self._credit += frames
            if not self._waiting:
                return
            while self._waiting and self._affordable(self._waiting[0]):
                self._send(self._waiting.popleft())
            drained = not self._waiting
            if drained:
                self._ahead_bytes = -1
        if drained:
            self.on_ready()

    def _flush_rows(self) -> None:
        if not self._buffer:
            return
        buffer, rows = self._buffer, self._buffered_rows
        self._buffer, self._buffered_rows, self._due_s = [], 0, math.inf
        self.next_row -= rows  # counted when offered; _emit counts again
        self._emit(buffer[0] if len(buffer) == 1 else pa.concat_batches(buffer))

    def _emit(self, batch: pa.RecordBatch) -> None:
        first, rows = self.next_row, batch.num_rows
        if rows > self._max_fixed_rows and rows > 1 and batch.nbytes > self._max_batch_bytes:
            self._emit(batch.slice(0, rows // 2))
            self._emit(batch.slice(rows // 2))
            return
        self.next_row = first + rows
        self._enqueue(Rows(batch, first, self.watermark, self._late_before))
        if not self.idle:
            self._watermark_unsent = False

    def _enqueue(self, item: Item) -> None:
        with self._lock:
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
        """Pay for an item; False if there is no credit.  Holds the lock."""
        if type(item) is Barrier or type(item) is End:
            return True
        if self._credit <= 0:
            return False
        self._credit -= 1
        return True

    def _refusal(self, batch: pa.RecordBatch) -> InvariantError:
        if self.ended:
            return InvariantError(f"{self.key}: rows offered after the end of data")
        return InvariantError(
            f"{self.key}: a batch has schema [{_types(batch.schema)}], the edge has [{_types(self.schema)}]"
        )


def _rows_in(items: list[Timed]) -> int:
    return sum(i.batch.num_rows for i in items if type(i) is Rows)


def _types(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name} {f.type}{'' if f.nullable else ' not null'}" for f in schema)


def _fixed_rows(schema: pa.Schema, max_bytes: int) -> int:
    """Rows that are surely below ``max_bytes`` (0 if a value may have any size)."""
    width = 0
    for type in schema.types:
        try:
            width += type.bit_width // 8 + 1
        except ValueError:
            return 0
    return max_bytes // max(1, width)
