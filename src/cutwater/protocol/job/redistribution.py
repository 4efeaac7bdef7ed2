"""An edge whose channels are others than those of the snapshot: where event time begins, and what comes first.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cutwater.protocol.subtask.watermarks import InputTime, merged_time

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
