"""The narrow port through which the core of a subtask has things done.

A host owns operators, a source, sinks and files.  The core (``SubtaskCore``) says when rows are taken, a watermark
passes, the state freezes and a file is written, and in which order; the host does it.  A worker process and the
simulator are hosts of the same core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from cutwater.data.time import MAX_WATERMARK
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Barrier, Item, Rows, Timed
from cutwater.protocol.channel.receiving import ReceivingEnd
from cutwater.protocol.messages import InputId
from cutwater.protocol.subtask.watermarks import InputTime


class Output(Protocol):
    """The sending end of a channel, with what its host puts before it (``SendingEnd`` is one)."""

    @property
    def key(self) -> Any: ...

    def offer_barrier(
        self, checkpoint_id: int, final: bool, overtake: bool, probe: bool, savepoint: bool
    ) -> list[Timed]: ...

    def overtake(self, checkpoint_id: int) -> list[Timed]: ...

    def holds(self, checkpoint_id: int) -> bool: ...

    def mark(self, checkpoint_id: int) -> None: ...

    def settled(self, checkpoint_id: int, completed: bool) -> None: ...

    def offer_end(self) -> None: ...


class ChannelLog(NamedTuple):
    """Rows and watermarks of one channel that belong to a snapshot."""

    channel: Any
    side: Literal["receiver", "sender"]
    """Where they were: recorded, or overtaken, at the receiver, or overtaken at the sender."""
    items: list[Timed]


class SubtaskChannels(msgspec.Struct, frozen=True):
    """The channels of one subtask.

    Attributes:
        inputs: receiving ends, in the order in which the subtask loop numbers them.
        outputs: sending ends.
        back_edges: inputs that close a loop.
        loop_inputs: inputs from the same loop, back-edges among them.
        loop_outputs: outputs to the same loop.
    """

    inputs: list[ReceivingEnd]
    outputs: Sequence[Output]
    back_edges: frozenset[InputId]
    loop_inputs: frozenset[InputId]
    loop_outputs: frozenset[InputId]


_NOTHING_OUTSIDE = InputTime(MAX_WATERMARK)


class LoopReport(msgspec.Struct, frozen=True):
    """A subtask's view of a wave: ``quiet`` and ``outside_ended`` are those of its ``Acknowledge``."""

    quiet: bool
    outside_ended: bool
    drained: bool
    """``WatermarkMerger.drained`` at its freeze."""
    outside: InputTime = _NOTHING_OUTSIDE
    """``WatermarkMerger.outside`` at its freeze."""


class SubtaskHost(Protocol):
    """Operators, source, sinks and files of one subtask."""

    @property
    def name(self) -> str: ...

    # ----------------------------------------------------------------------------------------------------- operators

    @property
    def working(self) -> bool:
        """An operator is in the middle of what a call makes: the state must not be frozen."""
        ...

    @property
    def answered(self) -> bool:
        """Something came from outside that an operator may take."""
        ...

    @property
    def keeps_rows(self) -> bool:
        """An operator keeps rows that something outside will set free."""
        ...

    @property
    def timers_pending(self) -> bool:
        """The clock alone may make rows."""
        ...

    @property
    def timers_due(self) -> bool:
        """An operator waits for a moment that has come."""
        ...

    @property
    def watermark(self) -> int:
        """The newest that has entered the operators."""
        ...

    @property
    def full(self) -> bool:
        """An output takes no more rows."""
        ...

    @property
    def room(self) -> int | None:
        """Rows that the operators take now; ``None``: any number."""
        ...

    def process(self, index: int, rows: Rows) -> None:
        """Rows of the input with this place go through the operators."""

    def start_watermark(self, watermark: int) -> None:
        """A watermark begins its passage through the operators, to all outputs."""

    def resume(self) -> None:
        """Do a slice of what is left from the last call, or take what came from outside."""

    def fire_timers(self) -> None:
        """Do a slice of what is due by the clock."""

    def offer_idle(self, idle: bool) -> None:
        """Say downstream that nothing is to be expected for now, or that something is."""

    # -------------------------------------------------------------------------------------------------------- source

    @property
    def reads(self) -> bool:
        """The subtask has a source."""
        ...

    @property
    def source_ready(self) -> bool:
        """The source may have rows to read."""
        ...

    @property
    def source_idle(self) -> bool:
        """The source has nothing to read for now."""
        ...

    @property
    def source_queued(self) -> bool:
        """The source has given rows that have not left the reader."""
        ...

    @property
    def exhausted(self) -> bool:
        """The source has been read to its end."""
        ...

    def read(self, max_rows: int) -> bool:
        """Read rows, and give them to the operators; false if there were none."""
        ...

    # ----------------------------------------------------------------------------------------------------- snapshots

    def now_ms(self) -> float:
        """A clock that never goes back."""
        ...

    def freeze(self, effect: m.Freeze) -> None:
        """Capture the state of operators, source and sinks, and keep it for ``hand_over``."""

    def hand_over(self, checkpoint_id: int, logs_follow: bool) -> None:
        """Give what was captured to the writer, which answers with ``Durable`` or ``WriteFailed``."""

    def write_logs(self, checkpoint_id: int, logs: list[ChannelLog]) -> None:
        """Give the logs of channels to the writer, which answers with ``LogsDurable`` or ``WriteFailed``."""

    def commit(self, checkpoint_id: int) -> None:
        """Make visible what the sinks have pre-committed up to this checkpoint."""

    def forget(self, checkpoint_id: int) -> None:
        """The checkpoint is given up: nothing of it is written any more but what sinks have staged."""

    # -------------------------------------------------------------------------------------------------- coordination

    def acknowledge(self, checkpoint_id: int, report: LoopReport | None) -> None: ...

    def decline(self, effect: m.Decline) -> None: ...

    def finished(self) -> None:
        """The end of data has been said on all outputs."""

    def probe_wanted(self) -> None:
        """The head of a loop wants a wave."""

    # ---------------------------------------------------------------------------- choices and traces (nothing follows)

    def took(self, index: int, item: Item) -> Item | None:
        """Something that counts was taken from an input, and nothing has come of it yet; returns what is to come of it.

        That is the item itself; or, of a choice that is made once more, all of its rows when the last of them was taken
        (``None`` before that).
        """
        ...

    def heard(self, verdict: m.LoopVerdict) -> None:
        """A verdict on the loop is about to be taken; nothing has come of it yet."""

    def follow(self) -> bool:
        """Make the next choice of a determinant log that needs no input; false if what it needs is not there yet."""
        ...

    def barrier_taken(self, index: int, barrier: Barrier) -> None:
        """A barrier was taken from an input, and is about to be told to the machine."""

    def barrier_leaves(self, effect: m.BroadcastBarrier) -> None:
        """A barrier is about to be offered to all outputs."""
