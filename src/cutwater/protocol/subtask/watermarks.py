"""Event time of a subtask: the smallest watermark over its inputs that have a say, and where it begins on new channels.

Redistribution
--------------
An edge had channels from each old sender to each old receiver; now it has others.  All that was on its way to a new
receiver comes first, over one of its channels, in an order that a job without failure could have had: of the old
channels that concern it, the one with the lowest watermark always gives its next item.  The watermark in between is the
lowest of them all, which is the one of the channel that gave the item.  So every row meets the watermark that stood
before it in its own channel, and the same rows are late.

Behind these items, and on all other channels from the beginning, stands what every new sender begins with: the time of
the slowest old one.  Nothing on a channel is ever beyond that, however far the old channels were that happen to concern
its receiver, since the new sender goes on from there.  What concerns nobody begins there, too: no rows on their way do
not mean that time has ended (W5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import InvariantError
from cutwater.protocol.messages import InputId

_MARKS_KEPT = 64
"""Waves whose verdict may still come."""


class InputTime(NamedTuple):
    """Event time of one input, as it stands in a snapshot (W2)."""

    watermark: int = MIN_WATERMARK
    """Microseconds since the epoch.  The largest value means that the input has ended."""
    idle: bool = False


class WatermarkMerger:
    """Merges the watermarks of the inputs; the result never falls.

    An ended input never holds the others back, an idle one does not as long as it is idle.  When all that have not
    ended are idle, the largest of their watermarks holds: the order in which they fell idle then makes no difference.

    Back-edges have no say, and at the head of a loop (where there are some) a risen watermark is *held*: it may pass
    only when a wave has seen no row in the loop (W3).  ``mark`` it at the freeze of every wave, ``release`` what was
    marked when the verdict of that wave is in.  Rows that came into the loop at other subtasks circulate, too: what
    passes is limited by what all ``outside`` inputs of the loop had reached at that wave.

    Args:
        inputs: all inputs, back-edges included.
        back_edges: those that close a loop; a feedback channel carries no watermark.
        loop_inputs: those from the same loop, back-edges included.

    >>> head = WatermarkMerger(["in", "back"], frozenset({"back"}))
    >>> head.update("in", 10, False), head.held
    (None, True)
    >>> head.mark(1); head.update("in", 20, False); head.release(1, 15), head.held
    (10, True)

    >>> merger = WatermarkMerger(["a", "b"])
    >>> merger.update("a", 10, False), merger.update("b", 5, False), merger.update("b", 4, True)
    (None, 5, 10)
    """

    def __init__(
        self,
        inputs: Sequence[InputId],
        back_edges: frozenset[InputId] = frozenset(),
        loop_inputs: frozenset[InputId] = frozenset(),
    ) -> None:
        self._times: dict[InputId, InputTime] = {input: InputTime() for input in inputs}
        self._back_edges = back_edges
        self._loop_inputs = loop_inputs | back_edges
        self._candidate = MIN_WATERMARK
        self._marks: dict[int, int] = {}
        self.combined = MIN_WATERMARK
        """The combined watermark so far: what has passed."""

    @property
    def idle(self) -> bool:
        """Every input that has not ended is idle (false once all have ended: there is nothing left to wait for)."""
        open = [
            time for i, time in self._times.items() if time.watermark != MAX_WATERMARK and i not in self._back_edges
        ]
        return bool(open) and all(time.idle for time in open)

    @property
    def held(self) -> bool:
        """A higher watermark waits until the loop is quiet (never true without back-edges)."""
        return self._candidate > self.combined

    @property
    def drained(self) -> bool:
        """The largest watermark has passed: nothing more can be due."""
        return self.combined == MAX_WATERMARK

    @property
    def outside(self) -> InputTime:
        """Event time of the inputs from outside the loop taken together (the largest value if all have ended).

        A subtask without such inputs limits nothing.
        """
        times = [time for input, time in self._times.items() if input not in self._loop_inputs]
        return merged_time(times) if times else InputTime(MAX_WATERMARK)

    def update(self, input: InputId, watermark: int, idle: bool) -> int | None:
        """Take what a frame says of its input; the new combined watermark if it rose (``None`` where it is held).

        A watermark below the input's last one counts as the last one.

        Raises:
            KeyError: no such input.
        """
        before = self._times[input]
        if watermark <= before.watermark and idle == before.idle:
            return None
        self._times[input] = InputTime(max(watermark, before.watermark), idle)
        return self._rise()

    def rows(self, input: InputId) -> None:
        """Rows are taken from an input.

        Raises:
            InvariantError: its time has ended, so that they would be late for whoever waits for time (W5).
            KeyError: no such input.
        """
        if (
            self._times[input].watermark == MAX_WATERMARK and input not in self._loop_inputs
        ):  # a loop may start again (C6)
            raise InvariantError(f"input {input!r} brought rows behind the end of its time")

    def end(self, input: InputId) -> int | None:
        """The input has ended; the new combined watermark if it rose (the largest value once all have ended)."""
        return self.update(input, MAX_WATERMARK, False)

    def mark(self, checkpoint_id: int) -> None:
        """The subtask freezes for this wave: remember what it would let pass if the wave finds the loop quiet."""
        if not self._back_edges:
            return
        self._marks[checkpoint_id] = self._candidate
        while len(self._marks) > _MARKS_KEPT:
            del self._marks[min(self._marks)]

    def release(self, checkpoint_id: int, limit: int = MAX_WATERMARK) -> int | None:
        """The loop was quiet at that wave: what was marked passes, up to ``limit``.

        Returns the new combined watermark if it rose.
        """
        marked = self.passing(checkpoint_id, limit)
        self._marks = {id: mark for id, mark in self._marks.items() if id > checkpoint_id}
        return self.let_pass(marked)

    def passing(self, checkpoint_id: int, limit: int = MAX_WATERMARK) -> int:
        """The combined watermark would be this, or stay, with ``release``."""
        return min(self._marks.get(checkpoint_id, MIN_WATERMARK), limit)

    def let_pass(self, watermark: int) -> int | None:
        """A verdict let this pass before, and does so once more (R0).  Returns the watermark if it rose."""
        if watermark <= self.combined:
            return None
        self.combined = watermark
        return watermark

    def snapshot(self) -> dict[InputId, InputTime]:
        """Event time of every input; together with ``combined`` all that ``restore`` needs."""
        return dict(self._times)

    def restore(self, times: Mapping[InputId, InputTime], combined: int) -> None:
        """Go on from a snapshot.  Inputs that are not in it (after a rescale) start without a watermark.

        Raises:
            KeyError: the snapshot names an input that is not here.
        """
        unknown = times.keys() - self._times.keys()
        if unknown:
            raise KeyError(f"no input {sorted(map(repr, unknown))}")
        self._times.update(times)
        self.combined = combined
        if self._back_edges:
            self._candidate = max(combined, self._merged())

    def _rise(self) -> int | None:
        now = self._merged()
        if self._back_edges:
            self._candidate = max(self._candidate, now)
            return None
        if now <= self.combined:
            return None
        self.combined = now
        return now

    def _merged(self) -> int:
        return merged_time(time for input, time in self._times.items() if input not in self._back_edges).watermark


def merged_time(times: Iterable[InputTime]) -> InputTime:
    """The smallest watermark of those that are not idle; the largest of the idle ones if all are; ended: no say.

    Raises:
        InvariantError: of no input.  That is no time: it is not that all have ended.

    >>> merged_time([InputTime(7), InputTime(5), InputTime(3, idle=True)])
    InputTime(watermark=5, idle=False)
    """
    active_min, idle_max, any_input, any_active, any_idle = MAX_WATERMARK, MIN_WATERMARK, False, False, False
    for watermark, idle in times:
        any_input = True
        if watermark == MAX_WATERMARK:
            continue
        if idle:
            any_idle = True
            idle_max = max(idle_max, watermark)
        else:
            any_active = True
            active_min = min(active_min, watermark)
    if not any_input:
        raise InvariantError("no input has no event time, and not the end of time")
    return InputTime(active_min) if any_active or not any_idle else InputTime(idle_max, True)


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class OldChannel(Generic[R]):
    """A channel of the snapshot: what its receiver had taken, what was between, and what its sender had said."""

    received: InputTime
    items: Sequence[tuple[R | None, InputTime]]
    """Rows, or time alone, each with the time behind it."""
    sent: InputTime
    """The largest watermark: it had ended."""


@dataclass(frozen=True, slots=True)
class Passed(Generic[R]):
    """Something that a new channel delivers before anything that arrives."""

    rows: R | None
    watermark: int
    rises: bool
    """It is news: behind what was delivered before it was lower."""


class RedistributedEdge:
    """Event time on the new channels of one edge.

    Args:
        sent: what the senders of all old channels had said; at least one.
        reached: the time that a new sender has reached; ``None``: nobody knows.

    >>> edge = RedistributedEdge([InputTime(9), InputTime(6)], 7)
    >>> old = [OldChannel(InputTime(3), [("a", InputTime(8))], InputTime(9))]
    >>> edge.begins, edge.receives(old), edge.receives([])
    (6, 3, 6)
    >>> [(p.rows, p.watermark) for p in edge.replayed(old, lambda rows: rows)]
    [('a', 6)]
    """

    def __init__(self, sent: Iterable[InputTime], reached: int | None) -> None:
        slowest = merged_time(sent).watermark
        self.begins = slowest if reached is None else min(slowest, reached)
        """Time from which each new channel's sender goes on, and the receiver of one that delivers nothing first."""

    def receives(self, old: Sequence[OldChannel[R]]) -> int:
        """Time from which a receiver goes on that first gets the rows on their way over these old channels."""
        return min([self.begins, *([merged_time(o.received for o in old).watermark] if old else [])])

    def replayed(self, old: Sequence[OldChannel[R]], share: Callable[[R], R | None]) -> Iterator[Passed[R]]:
        """Rows and ends that a new channel delivers first.

        Args:
            old: those that concern its receiver.
            share: the rows that the receiver owns; ``None``: none of them.
        """
        times = [o.received for o in old]
        queues = [deque([*o.items, (None, o.sent)]) for o in old]
        told = self.receives(old)
        while left := [n for n, queue in enumerate(queues) if queue]:
            first = min(left, key=lambda n: times[n].watermark)
            rows, time = queues[first].popleft()
            times[first] = InputTime(max(times[first].watermark, time.watermark), time.idle)
            watermark = max(told, min(self.begins, merged_time(times).watermark))
            mine = share(rows) if rows is not None else None
            if mine is not None or watermark > told:
                yield Passed(mine, watermark, watermark > told)
            told = watermark
        if told < self.begins:
            yield Passed(None, self.begins, True)
