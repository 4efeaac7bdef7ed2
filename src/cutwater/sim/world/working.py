"""What a simulated subtask makes of rows: it leaves at once, or in slices, and then some things have to wait (A1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from cutwater.protocol import messages as m
from cutwater.sim.schedules.graphs import MOOD_AT, key_of, row_time
from cutwater.sim.world.replaying import ReplayingSubtask
from cutwater.sim.world.subtask_state import Part

if TYPE_CHECKING:
    from cutwater.sim.world.attempt import Attempt
    from cutwater.sim.world.channels import Link
    from cutwater.sim.world.worker import SimWorker

TIME = -1

IN_SLICES = 3
"""Of four calls so many leave their work for later."""
ROWS_TOGETHER = 2
"""A slice has so many at most."""


class WorkingSubtask(ReplayingSubtask, ABC):
    """Takes rows and sends what it makes of them."""

    def __init__(self, worker: SimWorker, attempt: Attempt, task: int, part: Part | None) -> None:
        super().__init__(worker, attempt, task, part)
        self._slices = self.graph.steps[self.step].slices > 0
        self.work: deque[tuple[int, int]] = deque()
        """What it has made and not sent: (channel, row), or (TIME, watermark)."""
        self._waiting: deque[m.Event] = deque()
        """What must not come in the middle of work."""

    @abstractmethod
    def wake(self, _: object = None) -> None:
        """There may be something to do."""

    def when_idle(self, event: m.Event) -> None:
        """An event that may freeze the state, or change the time: not in the middle of work (A1)."""
        if self.work or self._waiting:
            self.world.seen["waited for work"] += 1
            self._waiting.append(event)
            self.wake()
        else:
            self.hear(event)

    def hear(self, event: m.Event) -> None:
        """Such an event has its turn."""
        if type(event) is m.LoopVerdict:
            self.verdict(event)
        else:
            self.handle(event)

    def _make_way(self) -> bool:
        """For what waits work goes on over full outputs, too: it is bounded."""
        if self.work:
            self._resume()
        else:
            self.hear(self._waiting.popleft())
        return True

    def _process(self, link: Link | None, first: int, rows: list[int]) -> None:
        world = self.world
        self._check_not_halted()
        before, sign, moves, links, counts = self.sign, self.sign, self._moves, self._links, self.counts
        sink, work = self.sink, self.work
        later = self._slices and world.draws.below(4) > 3 - IN_SLICES
        sent = [out.sent for out in self.outputs]
        late = world.judges_lateness and self.merger.combined
        for row in rows:
            sign = (sign * 31 + row + 1) & 0xFFFFFFFFFFFF
            if link is not None:
                key = key_of(row)
                counts[key] = counts.get(key, 0) + 1
                if late is not False and row_time(row) < late:
                    world.judge.broken("late row", f"{self.name} took a row of time {row_time(row)} after {late}")
            if sink is not None:
                sink.rows.append(row >> 4)
                continue
            made = moves[row | (sign >> 2 & 3) << MOOD_AT] if self._moody else moves[row]
            if later:
                work.extend(made)
            else:
                for channel, after in made:
                    links[channel].send(after)
        self.sign = sign
        self._sent(sent, (link.index, first, len(rows)) if link is not None else (), before)

    def _resume(self) -> None:
        """The next slice of what was made leaves."""
        self._check_not_halted()
        sent = [out.sent for out in self.outputs]
        for _ in range(min(len(self.work), 1 + self.world.draws.below(ROWS_TOGETHER))):
            channel, row = self.work.popleft()
            if channel == TIME:
                self._advance(row)
            else:
                self._links[channel].send(row)
        self.world.seen["sent a slice"] += 1
        self._sent(sent, (), self.sign)

    def _advance_behind_work(self, watermark: int) -> None:
        if self.work:
            self.work.append((TIME, watermark))
        else:
            self._advance(watermark)

    def _sent(self, sent: list[int], took: tuple[int, ...], before: int) -> None:
        """A step is over: of every output the rows up to ``sent`` had left before it."""
        sends = [(out.index, n, out.sent - n) for out, n in zip(self.outputs, sent, strict=True) if out.sent > n]
        for out in self.outputs:
            out.flush()
        if self.behind:
            self.tell_if_caught_up()
        self.world.note("step", self.task, self.attempt.number, took, sends, before, self.sign)

    def _check_not_halted(self) -> None:
        world = self.world
        if world.row.halts and not all(savepoint for *_, savepoint in self._times.values()):
            world.judge.broken("not halted", f"{self.name} moves rows while {[*self._times]} are undecided")
