"""The sending end of a channel: rows become batches of a good size here, the core decides when they leave."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Final

import pyarrow as pa

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import InvariantError
from cutwater.plan.graph import Channel
from cutwater.protocol.channel.items import Item, Timed
from cutwater.protocol.channel.sending import ReplayBuffer, SendingEnd
from cutwater.runtime.transport.sockets import nothing

MAX_BATCH_BYTES: Final = 1 << 29


class OutputChannel:
    """A builder of batches before a ``SendingEnd``.

    Belongs to the subtask loop's thread, except ``grant`` and ``arrived``, which any thread may call.

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
        watermark, idle: the last one sent, as restored.
        kept: for receivers that go back by themselves (R4); ``None``: all go back together.
    """

    __slots__ = (
        "_buffer", "_buffered_rows", "_due_s", "_end", "_late_before", "_lock", "_max_batch_bytes", "_max_fixed_rows",
        "_timeout_s", "batch_rows", "key", "on_ready", "schema",
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
        max_batch_bytes: int = MAX_BATCH_BYTES,
        on_ready: Callable[[], None] = nothing,
        next_row: int = 0,
        watermark: int = MIN_WATERMARK,
        idle: bool = False,
        kept: ReplayBuffer | None = None,
    ) -> None:
        self.key, self.schema, self.on_ready = key, schema, on_ready
        self.batch_rows, self._timeout_s = batch_rows, buffer_timeout_ms / 1000
        self._end = SendingEnd(key, send, credit=credit, next_row=next_row, watermark=watermark, idle=idle, kept=kept)
        self._max_batch_bytes = max_batch_bytes
        self._max_fixed_rows = _fixed_rows(schema, max_batch_bytes)
        self._lock = threading.Lock()  # guards the end's queue and credit
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_rows = 0
        self._due_s = math.inf
        self._late_before = MIN_WATERMARK

    # ------------------------------------------------------------------------------------------------ what it is now

    @property
    def next_row(self) -> int:
        """Number of the next row that is offered."""
        return self._end.next_row + self._buffered_rows

    @property
    def watermark(self) -> int:
        return self._end.watermark

    @property
    def idle(self) -> bool:
        return self._end.idle

    @property
    def ended(self) -> bool:
        return self._end.ended

    @property
    def full(self) -> bool:
        """True while frames wait for credit (after a loss: too many): do not schedule the subtask."""
        return self._end.full

    @property
    def waiting_frames(self) -> int:
        return self._end.waiting_frames

    def holds(self, checkpoint_id: int) -> bool:
        """The barrier of this checkpoint waits here behind frames without credit."""
        if not self._end.waiting_frames:
            return False
        with self._lock:
            return self._end.holds(checkpoint_id)

    def send_through(self, send: Callable[[Item], None]) -> Callable[[Item], None]:
        """Have items handed to ``send`` from now on; returns where they went before, for ``send`` to pass them on."""
        return self._end.send_through(send)

    # ----------------------------------------------------------------- a receiver that goes back by itself (R4)

    def mark(self, checkpoint_id: int) -> None:
        """The subtask froze: what follows is what a receiver needs that goes back to this checkpoint."""
        if self._end.keeps:
            self.flush()
            self._end.mark(checkpoint_id)

    def settled(self, checkpoint_id: int, completed: bool) -> None:
        """A checkpoint completed, so that nobody goes behind it any more, or was given up."""
        if self._end.keeps:
            with self._lock:
                self._end.settled(checkpoint_id, completed)

    def restore(self, items: Iterable[Timed]) -> None:
        """What a barrier overtook here: a receiver that lives may not have it.  Call before the first credit."""
        with self._lock:
            self._end.restore(items)

    def arrived(self, next_row: int) -> None:
        """The receiver lives, and lacks only rows from this one on: others are not sent again (any thread)."""
        with self._lock:
            self._end.arrived(next_row)

    def let_go(self) -> None:
        """The receiver is lost: what it would get is kept for the next one, and the sender need not wait for it."""
        with self._lock:
            free = self._end.let_go()
        if free:
            self.on_ready()

    def take_over(self, send: Callable[[Item], None], checkpoint_id: int) -> None:
        """The receiver is another one, which was restored from a checkpoint: send it all that it lacks, on its credit.

        Raises:
            InvariantError: what it lacks is not kept.
        """
        with self._lock:
            self._end.take_over(send, checkpoint_id)

    # ----------------------------------------------------------------------------------------------- what is offered

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
        end = self._end
        end.idle = False
        if end.ended or not batch.schema.equals(self.schema):
            raise self._refusal(batch)
        if late_before != self._late_before:
            self._flush_rows()
            self._late_before = late_before
        if rows * 2 < self.batch_rows:
            self._buffer.append(batch)
            self._buffered_rows += rows
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
        self._end.offer_watermark(watermark, idle)

    def offer_barrier(
        self,
        checkpoint_id: int,
        final: bool = False,
        overtake: bool = False,
        probe: bool = False,
        savepoint: bool = False,
    ) -> list[Timed]:
        """Send a barrier behind everything offered so far, or, with ``overtake``, before what waits for credit.

        Returns what it overtook, see ``SendingEnd.offer_barrier``.
        """
        self.flush()
        with self._lock:
            return self._end.offer_barrier(checkpoint_id, final, overtake, probe, savepoint)

    def overtake(self, checkpoint_id: int) -> list[Timed]:
        """Move a barrier that waits for its turn to the front, as ``offer_barrier`` does; nothing if none waits."""
        with self._lock:
            return self._end.overtake(checkpoint_id)

    def offer_end(self) -> None:
        """Send the end of data, once.  Only barriers may follow."""
        self.flush()
        with self._lock:
            self._end.offer_end()

    def grant(self, frames: int) -> None:
        """The receiver has room for ``frames`` more (any thread)."""
        with self._lock:
            drained = self._end.grant(frames)
        if drained:
            self.on_ready()

    # --------------------------------------------------------------------------------------------------- the builder

    @property
    def _holds_something(self) -> bool:
        """Something is in the builder, and nothing waits before it."""
        return bool((self._buffer or self._end.watermark_unsent) and not self._end.waiting_frames)

    def flush(self) -> None:
        """Send what the builder holds, now."""
        self._flush_rows()
        if self._end.watermark_unsent:
            with self._lock:
                self._end.flush_watermark()
        self._due_s = math.inf

    def flush_if_due(self, now_s: float) -> float:
        """Flush when the timeout has passed; returns when to call again (infinity: nothing waits).

        The timeout runs from the first call after something was offered.  While frames wait for credit nothing is
        flushed: a slow receiver gets fewer, larger batches.
        """
        if not self._holds_something:
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
        if not self._holds_something:
            return False
        self.flush()
        return True

    def _flush_rows(self) -> None:
        if not self._buffer:
            return
        buffer = self._buffer
        self._buffer, self._buffered_rows, self._due_s = [], 0, math.inf
        self._emit(buffer[0] if len(buffer) == 1 else pa.concat_batches(buffer))

    def _emit(self, batch: pa.RecordBatch) -> None:
        rows = batch.num_rows
        if rows > self._max_fixed_rows and rows > 1 and batch.nbytes > self._max_batch_bytes:
            self._emit(batch.slice(0, rows // 2))
            self._emit(batch.slice(rows // 2))
            return
        with self._lock:
            self._end.offer(batch, self._late_before)

    def _refusal(self, batch: pa.RecordBatch) -> InvariantError:
        if self.ended:
            return InvariantError(f"{self.key}: rows offered after the end of data")
        return InvariantError(
            f"{self.key}: a batch has schema [{_types(batch.schema)}], the edge has [{_types(self.schema)}]"
        )


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
