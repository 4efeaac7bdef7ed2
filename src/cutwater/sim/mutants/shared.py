"""Mutants of what the runtime and the simulator perform with: subtasks, their effects, both ends of a channel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Item, Rows, Timed, Watermark
from cutwater.protocol.channel.receiving import ReceivingEnd
from cutwater.protocol.channel.replay import ReplayBuffer
from cutwater.protocol.channel.sending import SendingEnd
from cutwater.protocol.subtask.core import SubtaskCore
from cutwater.protocol.subtask.performer import Performer
from cutwater.sim.mutants.planting import of_cores, of_ends, of_performers
from cutwater.sim.schedules.schedule import Fault

if TYPE_CHECKING:
    from cutwater.sim.world.world import World


class _TimeBeforeItsRows(SubtaskCore):
    """A watermark that rides on rows is taken before them."""

    def rows(self, index: int, item: Rows) -> None:
        self.advance(index, item.watermark, False)
        super().rows(index, item)


class _EndWithoutTime(SubtaskCore):
    """The end of an input says nothing of time: what waits for the last watermark waits on (W5)."""

    def advance(self, index: int, watermark: int, idle: bool) -> None:
        if watermark < 2**63 - 1:
            super().advance(index, watermark, idle)


class _AnswersNothing(Performer):
    """What barriers overtook in the outputs is not told to the machine."""

    def handle(self, event: m.Event) -> None:
        super().handle(event)
        self._events.clear()

    def _overtook(self, checkpoint_id: int, overtaken: Any, keep: bool) -> None:
        super()._overtook(checkpoint_id, overtaken, keep)
        self._events.pop()


class _AsksOnce(Performer):
    """The head of a loop asks for one wave, and never again (C6, W3)."""

    def outcome(self, event: m.CompleteNotice | m.AbortNotice) -> None:
        asked = self._asked
        super().outcome(event)
        self._asked = asked


class _ForgetsItsLogs(Performer):
    """What was recorded is written for the first input only."""

    def _write_logs(self, checkpoint_id: int) -> None:
        del self._mine(checkpoint_id).logs[1:]
        super()._write_logs(checkpoint_id)


class _FreezesBehindItsBarriers(Performer):
    """Outputs are marked where the next checkpoint finds them: what is kept for a receiver begins too late (R4)."""

    def _broadcast(self, effect: m.BroadcastBarrier) -> None:
        super()._broadcast(effect)
        for output in self._channels.outputs:
            output.settled(effect.checkpoint_id, True)


class _GivesCreditTwice(ReceivingEnd):
    """A place that became free is given back twice."""

    def _frame_left(self) -> None:
        super()._frame_left()
        if self.on_credit is not None:
            self.on_credit(1)


class _RecordsFromTheNextItem(ReceivingEnd):
    """A recording begins one item too late."""

    def stop_recording(self, checkpoint_id: int) -> list[Timed]:
        return super().stop_recording(checkpoint_id)[1:]


class _OvertakesEverything(ReceivingEnd):
    """What arrived behind a barrier that overtook is taken for overtaken, too."""

    def _rows_before(self, place: int) -> tuple[Timed, ...]:
        return super()._rows_before(1 << 62)


class _LetsWatermarksPass(SendingEnd):
    """A watermark goes before the rows that wait for credit."""

    def flush_watermark(self) -> None:
        if self.watermark_unsent and self._waiting:
            self.watermark_unsent = False
            self._send(Watermark(self.watermark, self.idle))
        else:
            super().flush_watermark()


class _LosesAPart(SendingEnd):
    """A frame of which a receiver has some rows is not sent again at all."""

    def _lacking(self, item: Rows) -> Rows | Watermark:
        lacking = super()._lacking(item)
        return lacking if lacking is item else Watermark(item.watermark)


class _KeepsFromTheNewest(ReplayBuffer):
    """What is kept begins at the newest mark, whether its checkpoint completes or not."""

    def mark(self, checkpoint_id: int) -> None:
        super().mark(checkpoint_id)
        before = self._base
        self.completed(checkpoint_id)
        self._base = before


class _KeepsTooLittle(SendingEnd):
    """The sending end of a channel with such a buffer."""

    def __init__(self, key: Any, send: Callable[[Item], None], **others: Any) -> None:
        kept: ReplayBuffer | None = others.pop("kept", None)
        if kept is not None:
            kept = _KeepsFromTheNewest(
                kept._keep,  # pyright: ignore[reportPrivateUsage]
                most_memory_bytes=kept.most_memory_bytes,
                base=kept._base,  # pyright: ignore[reportPrivateUsage]
            )
        super().__init__(key, send, kept=kept, **others)


_TASK: Mapping[str, Any] = {"recovery": "task", "rows": 32, "pace_ms": 1.0}
_KILLED_IN_CHECKPOINTS = _TASK | {
    "interval_ms": 5.0,
    "faults": tuple(Fault(12.0 + 17 * k, "kill_worker", k, 0.0) for k in range(6)),
}

MUTANTS_OF_SHARED_CODE: tuple[tuple[str, str, str, Mapping[str, Any], Callable[[World], None]], ...] = (
    ("takes the time of rows before them", "shuffle", "aligned", {}, of_cores(_TimeBeforeItsRows)),
    ("an end says nothing of time (W5)", "self_loop", "aligned", {}, of_cores(_EndWithoutTime)),
    ("does not tell what was overtaken", "shuffle", "unaligned", {}, of_performers(_AnswersNothing)),
    ("a head asks once (C6)", "two_heads", "none", {}, of_performers(_AsksOnce)),
    ("writes the log of one channel", "sources", "chandy_lamport", {}, of_performers(_ForgetsItsLogs)),
    ("forgets what a receiver needs when its barriers leave (R4)", "shuffle", "aligned", _KILLED_IN_CHECKPOINTS,
     of_performers(_FreezesBehindItsBarriers)),
    ("gives credit twice", "four", "aligned", {}, of_ends(receiving=_GivesCreditTwice)),
    ("records from the next item on (CL2)", "sources", "chandy_lamport", {},
     of_ends(receiving=_RecordsFromTheNextItem)),
    ("a barrier overtakes what came behind it", "shuffle", "unaligned", {}, of_ends(receiving=_OvertakesEverything)),
    ("a watermark overtakes rows", "spread", "aligned", {}, of_ends(sending=_LetsWatermarksPass)),
    ("does not send the rest of a frame again (R3)", "shuffle", "aligned", _TASK, of_ends(sending=_LosesAPart)),
    ("keeps rows since the newest mark only (R4)", "shuffle", "aligned", _KILLED_IN_CHECKPOINTS,
     of_ends(sending=_KeepsTooLittle)),
)  # fmt: skip
"""Name, world, protocol, settings, and how the world is prepared."""
