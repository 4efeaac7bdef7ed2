"""A channel of the cut world: a queue at the sender, a queue at the receiver, barriers that may overtake in both."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

CREDIT = 5
"""Rows at the receiver above which no more are let through; barriers need none, a back-edge has no limit (C7)."""


class Violation(AssertionError):
    """A rule of the protocol is broken."""


@dataclass
class Barrier:
    """A barrier on its way."""

    id: int
    final: bool
    probe: bool
    urgent: bool
    ahead: int = 0
    """Items that waited at the receiver when it overtook them."""


@dataclass
class Link:
    """One channel with the books about it: everything ever sent, everything ever taken, in order."""

    feedback: bool = False
    waiting: deque[Any] = field(default_factory=deque)
    queue: deque[Any] = field(default_factory=deque)
    sent: list[Any] = field(default_factory=list)
    taken: list[Any] = field(default_factory=list)

    def send(self, item: Any) -> None:
        if ("end",) in self.sent[-1:] and not isinstance(item, Barrier):
            raise Violation(f"{item} is sent after the end of data")
        self.waiting.append(item)
        self.sent.append(item)

    def send_first(self, barrier: Barrier) -> list[Any]:
        """The barrier overtakes what waits at the sender; returns that."""
        self.sent.append(barrier)
        overtaken = plain(self.waiting)
        self._put_first(self.waiting, barrier)
        return overtaken

    def overtake(self, id: int) -> list[Any]:
        """The barrier, if it still waits at the sender, overtakes what lies before it; returns that."""
        place = index_of(self.waiting, id)
        if place is None:
            return []
        barrier, before = self.waiting[place], plain(list(self.waiting)[:place])
        if barrier.urgent:
            raise Violation(f"barrier {id} is asked to overtake twice")
        del self.waiting[place]
        barrier.urgent = True
        self._put_first(self.waiting, barrier)
        return before

    def may_pass(self) -> bool:
        if not self.waiting:
            return False
        free = self.feedback or len(rows_of(self.queue)) < CREDIT
        return free or isinstance(self.waiting[0], Barrier)

    def let_pass(self) -> Any:
        """The first item goes over to the receiver; returns a barrier that will have to wait there."""
        item = self.waiting.popleft()
        if isinstance(item, Barrier) and item.urgent:
            item.ahead = sum(not urgent(i) for i in self.queue)
            self._put_first(self.queue, item)
            return item
        self.queue.append(item)
        return item

    def expedite(self, id: int) -> None:
        place = index_of(self.queue, id)
        if place is None:
            raise Violation(f"no barrier {id} waits to be expedited")
        barrier = self.queue[place]
        barrier.ahead = sum(not urgent(i) for i in list(self.queue)[:place])
        del self.queue[place]
        barrier.urgent = True
        self._put_first(self.queue, barrier)

    @property
    def head(self) -> Any:
        return self.queue[0] if self.queue else None

    def take(self) -> tuple[Any, list[Any]]:
        """The first item; for an overtaking barrier also what it overtook at the receiver."""
        item = self.queue.popleft()
        self.taken.append(item)
        behind = [i for i in self.queue if not urgent(i)]
        return item, behind[: item.ahead] if urgent(item) else []

    def _put_first(self, where: deque[Any], barrier: Barrier) -> None:
        """Behind overtaking barriers that are there already."""
        where.insert(sum(urgent(i) for i in where), barrier)


def urgent(item: Any) -> bool:
    return isinstance(item, Barrier) and item.urgent


def plain(items: Any) -> list[Any]:
    """Rows and watermarks."""
    return [i for i in items if not isinstance(i, Barrier) and i[0] != "end"]


def rows_of(items: Any) -> list[int]:
    return [i[1] for i in items if not isinstance(i, Barrier) and i[0] == "row"]


def index_of(items: deque[Any], id: int) -> int | None:
    return next((n for n, i in enumerate(items) if isinstance(i, Barrier) and i.id == id), None)
