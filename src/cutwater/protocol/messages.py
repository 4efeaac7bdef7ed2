"""Every event that goes into the protocol machines and every effect that comes out of them.

    performer --event--> machine.handle(event) --list of effects, in the order to perform them--> performer

Both are small frozen values.  An *input* is any hashable name of an input channel, a *subtask* any hashable name of a
subtask; the machines only compare them.  Times are milliseconds of one monotonic clock and come in the events.

Here are those of a subtask; those of the coordinator are in ``checkpoint.messages``.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import msgspec

from cutwater.data.time import MAX_WATERMARK
from cutwater.protocol.protocols import FailureReason

InputId: TypeAlias = Hashable

# ---------------------------------------------------------------------------------------------- events of a subtask


class Trigger(msgspec.Struct, frozen=True):
    """The coordinator asks for the wave to begin here (A1, CL1).

    It goes to every source; with row ``synchronous`` to every subtask; with ``chandy_lamport`` to any, also to several.
    One for a snapshot that has begun here is ignored, one that comes after a newer one, where ids keep their order,
    declined.
    """

    checkpoint_id: int
    final: bool = False
    probe: bool = False
    """Nothing is stored: the wave only asks whether the loops are quiet (C6)."""
    savepoint: bool = False
    """The wave is aligned, whatever the protocol."""


class BarrierTaken(msgspec.Struct, frozen=True):
    """A barrier was taken from an input: from the head of its queue, or past what waits there (an overtaking one).

    An overtaking barrier may be taken from a blocked input.  A copy of the items that it overtook in the receiver's
    queue is the end of the channel's log if the answer says ``StopRecording`` for this input, and else superfluous.
    """

    input: InputId
    checkpoint_id: int
    final: bool = False
    probe: bool = False
    overtook: int | None = None
    """Rows that still wait at the receiver ahead of the barrier; ``None``: the barrier came in its turn."""
    overtook_time: bool = False
    """A watermark or an idleness was among what it overtook (a header of rows does not count: rows do)."""
    savepoint: bool = False


class BarrierWaits(msgspec.Struct, frozen=True):
    """A barrier that goes in its turn has come into the queue of the input and lies behind other items.

    Told once per barrier; only row ``unaligned`` listens.
    """

    input: InputId
    checkpoint_id: int
    final: bool = False
    probe: bool = False
    savepoint: bool = False


class AlignmentTimeout(msgspec.Struct, frozen=True):
    """``aligned_timeout_ms`` have passed since ``WatchAlignment``."""

    checkpoint_id: int


class RowsOvertaken(msgspec.Struct, frozen=True):
    """The barrier is at the front of all output queues; so many rows in them were overtaken and are kept.

    The answer to ``BroadcastBarrier(overtake=True)`` and to ``Overtake``, also when it is 0 or there are no outputs.
    ``in_loop``: something overtaken (a row or a watermark) is on its way to a subtask of the same loop.
    """

    checkpoint_id: int
    rows: int
    in_loop: bool | None = None
    """``None``: as if every output went into the loop, that is ``rows > 0``."""


class BarriersSent(msgspec.Struct, frozen=True):
    """The barriers of the checkpoint, going in their turn, have left all output queues.

    Row ``unaligned`` waits for it (or for the overtaking) with the acknowledgement; harmless in every other.
    """

    checkpoint_id: int


class LoopVerdict(msgspec.Struct, frozen=True):
    """The wave found the loop of this subtask without a row; ``ended``: there will never be one again (C6)."""

    checkpoint_id: int
    ended: bool
    watermark: int = MAX_WATERMARK
    """Every row that came or comes into the loop behind this wave, at whatever subtask, is later than this (W3)."""


class WatermarkTaken(msgspec.Struct, frozen=True):
    """A watermark or an idleness was taken from an input as an item of its own.

    Needed only while ``machine.recording(input)``; harmless otherwise.
    """

    input: InputId


class EndTaken(msgspec.Struct, frozen=True):
    """EndOfData was taken from an input: it brings no more rows, but still barriers (A7)."""

    input: InputId


class SourceExhausted(msgspec.Struct, frozen=True):
    """This source has read its last row for ever."""


class RowsTaken(msgspec.Struct, frozen=True):
    """Rows were taken from an input.  Needed only while ``machine.recording(input)``; harmless otherwise."""

    input: InputId
    rows: int


class Durable(msgspec.Struct, frozen=True):
    """Everything that ``Freeze`` handed to the writer is durable."""

    checkpoint_id: int


class LogsDurable(msgspec.Struct, frozen=True):
    """Everything that ``WriteLogs`` handed to the writer is durable."""

    checkpoint_id: int


class WriteFailed(msgspec.Struct, frozen=True):
    """Something of this checkpoint could not be written; ``reason`` is for people."""

    checkpoint_id: int
    reason: str


class AbortNotice(msgspec.Struct, frozen=True):
    """The coordinator gave the checkpoint up; ``latest_completed`` is the newest one that did complete (0: none)."""

    checkpoint_id: int
    latest_completed: int = 0


class CompleteNotice(msgspec.Struct, frozen=True):
    """The checkpoint is published.  ``commit`` is false for a plain savepoint."""

    checkpoint_id: int
    commit: bool = True


Event: TypeAlias = (
    Trigger | BarrierTaken | BarrierWaits | AlignmentTimeout | RowsOvertaken | BarriersSent | LoopVerdict | EndTaken
    | SourceExhausted | RowsTaken | WatermarkTaken | Durable | LogsDurable | WriteFailed | AbortNotice | CompleteNotice
)  # fmt: skip

# --------------------------------------------------------------------------------------------- effects of a subtask


class Block(msgspec.Struct, frozen=True):
    """Take nothing more from this input."""

    input: InputId


class Unblock(msgspec.Struct, frozen=True):
    """Go on taking from this input.  Several come in the order in which the inputs were blocked (A5)."""

    input: InputId


class Freeze(msgspec.Struct, frozen=True):
    """Freeze all operators of the chain now and hand the writing to the background thread.

    The performer answers with ``Durable`` or ``WriteFailed``.  Writes of one subtask keep their order.  With ``probe``
    nothing is frozen or written; the performer remembers the watermark (``WatermarkMerger.mark``, as at every freeze)
    and answers ``Durable`` at once.
    """

    checkpoint_id: int
    final: bool
    probe: bool = False
    savepoint: bool = False
    """Of a savepoint: the whole state is wanted, in its canonical form; sinks leave nothing open."""


class BroadcastBarrier(msgspec.Struct, frozen=True):
    """Put the barrier on every output, behind all rows produced so far.

    With ``overtake`` it leaves before everything that waits in the output queues; a copy of that is kept for the
    snapshot (of a probe: only counted), and ``RowsOvertaken`` is the answer.
    """

    checkpoint_id: int
    final: bool
    probe: bool = False
    overtake: bool = False
    savepoint: bool = False


class WatchAlignment(msgspec.Struct, frozen=True):
    """Feed ``AlignmentTimeout`` after ``aligned_timeout_ms`` (at once if that is 0); needless once forgotten."""

    checkpoint_id: int


class Overtake(msgspec.Struct, frozen=True):
    """Barriers of the checkpoint that wait in output queues go first; a copy of what they overtake is kept.

    The answer is ``RowsOvertaken``.
    """

    checkpoint_id: int


class Expedite(msgspec.Struct, frozen=True):
    """The barrier that waits in the queue of this input comes first, as an overtaking one (``Head.URGENT``)."""

    input: InputId
    checkpoint_id: int


class ReleaseWatermark(msgspec.Struct, frozen=True):
    """The loop was quiet at that wave: ``WatermarkMerger.release(checkpoint_id, watermark)`` (W3)."""

    checkpoint_id: int
    watermark: int = MAX_WATERMARK


class Acknowledge(msgspec.Struct, frozen=True):
    """Everything is durable: tell the coordinator, with names and digests of the files, and the answers about loops."""

    checkpoint_id: int
    quiet: bool = True
    """No row and no watermark in any log of an input from the same loop, nor overtaken on the way into it.

    Outside a loop: in any log.
    """
    outside_ended: bool = False
    """At the freeze all inputs from outside the loop had ended."""


class Decline(msgspec.Struct, frozen=True):
    """Tell the coordinator that this checkpoint cannot complete here."""

    checkpoint_id: int
    reason: FailureReason
    detail: str = ""


class Forget(msgspec.Struct, frozen=True):
    """Drop what was frozen, recorded and written for this checkpoint; it will not complete.

    Not a sink's pre-commits: the rows in them were handed on before the barrier and come never again.  They stay with
    the sink, belong to its part of the *next* snapshot too, and are committed with it (``Commit`` says up to which).
    """

    checkpoint_id: int


class Commit(msgspec.Struct, frozen=True):
    """Sinks commit every pre-commit of this checkpoint and of all older ones not yet committed."""

    checkpoint_id: int


class StartRecording(msgspec.Struct, frozen=True):
    """From now on rows taken from this input belong to the checkpoint's log of it."""

    checkpoint_id: int
    input: InputId


class Record(msgspec.Struct, frozen=True):
    """Append the rows (or the watermark) just taken to the input's log of each of these checkpoints."""

    input: InputId
    checkpoint_ids: tuple[int, ...]


class StopRecording(msgspec.Struct, frozen=True):
    """The log of this input is complete; ``rows`` is how many it holds.

    If the barrier overtook, what it overtook at the receiver is the end of the log (without a ``StartRecording``
    before: all of it).
    """

    checkpoint_id: int
    input: InputId
    rows: int


class WriteLogs(msgspec.Struct, frozen=True):
    """All logs of the checkpoint are complete: write them; answer with ``LogsDurable`` or ``WriteFailed``.

    The logs are those of the inputs and what was overtaken in the output queues.  A probe has none.
    """

    checkpoint_id: int


class EndOfInput(msgspec.Struct, frozen=True):
    """No more rows will come: let the operators finish, send EndOfData on all outputs, tell the coordinator."""


Effect: TypeAlias = (
    Block | Unblock | Freeze | BroadcastBarrier | WatchAlignment | Overtake | Expedite | ReleaseWatermark | Acknowledge
    | Decline | Forget | Commit | StartRecording | Record | StopRecording | WriteLogs | EndOfInput
)  # fmt: skip
