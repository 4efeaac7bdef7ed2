"""The determinant log of a simulated subtask, and what a replacement and its neighbours do with it (R0)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.protocol import messages as m
from cutwater.protocol.channel.items import Item, Rows, Watermark
from cutwater.protocol.determinants import CONTROL, DeterminantLog, InputWatermark, Verdict
from cutwater.sim.world.disk import Part

if TYPE_CHECKING:
    from cutwater.sim.world.subtask import SimSubtask


class Choices:
    """Logs the choices of a subtask; makes those once more that others know of.

    Args:
        subtask: whose choices they are.
        part: of the checkpoint that it goes on from.
    """

    def __init__(self, subtask: SimSubtask, part: Part | None) -> None:
        self._subtask, self._world = subtask, subtask.world
        attempt = subtask.attempt
        self.known = subtask.worker.known.setdefault(attempt.plan.region_of[subtask.task], {})
        """How much of each log this part of a region has heard of."""
        self.log: DeterminantLog | None = None
        """From ``follow`` on, if one is kept."""
        same = part is not None and self._world.keeps_order and part.choice[0] == attempt.lineage
        self._position = part.choice[1] if part is not None and same else 0
        self._times: dict[Any, int] = {}
        """Input -> watermark that the log knows."""
        self.behind = False
        """It follows the log, or has passed over what came meanwhile."""

    def follow(self) -> None:
        """Take inputs in the order that survivors know of, from the checkpoint on."""
        if not self._world.keeps_order:
            return
        subtask = self._subtask
        self.log = log = subtask.attempt.order(subtask.task)
        log.go_back(self._position, self.known.get(subtask.task, 0))
        self.known[subtask.task] = log.length
        self._times = {input: time.watermark for input, time in subtask.core.merger.snapshot().items()}
        if log.next_run() is not None:
            self._world.seen["followed an order"] += 1
            subtask.core.loop.follow(log)
            self.behind = True

    @property
    def following(self) -> bool:
        """Choices are made once more."""
        return self.log is not None and self.log.next_run() is not None

    @property
    def mark(self) -> tuple[int, int]:
        """Lineage of the log, and position in it."""
        return (self._subtask.attempt.lineage, self.log.position) if self.log is not None else (0, 0)

    def hear_of(self, sender: Choices) -> None:
        """What leaves a worker's part of a region tells all that is known there."""
        if sender.known is self.known:
            return
        told, known = sender.known, self.known
        if not self._world.passes_on:
            theirs = {c.subtask_number for s in sender._subtask.worker.subtasks if (c := s.choices).known is told}
            told = {task: told.get(task, 0) for task in theirs}
        for task, choices in told.items():
            if choices > known.get(task, 0):
                known[task] = choices

    @property
    def subtask_number(self) -> int:
        return self._subtask.task

    # ------------------------------------------------------------------------------------------------------- logging

    def took(self, index: int, item: Item) -> Item | None:
        """Something was taken; returns what is to come of it now."""
        log, input = self.log, self._subtask.inputs[index].index
        if log is None:
            return item
        if log.next_run() is not None:
            return self._took_again(log, input, item)
        if type(item) is Rows:
            log.took(input, item.batch.num_rows)
            self._heard_time(log, input, item.watermark)
        elif type(item) is Watermark:
            self._heard_time(log, input, item.watermark)
        elif input not in self._subtask.machine.ended:
            self._times[input] = MAX_WATERMARK
            log.took(input, CONTROL)
        self._tell(log)
        return item

    def _heard_time(self, log: DeterminantLog, input: int, watermark: int) -> None:
        if watermark > self._times[input]:
            self._times[input] = watermark
            log.chose(InputWatermark(input, watermark))

    def _took_again(self, log: DeterminantLog, input: int, item: Item) -> Item | None:
        """Rows and ends as then; what the log says of time holds, whatever comes with them now."""
        if type(item) is Rows:
            log.took(input, item.batch.num_rows)
            return item._replace(watermark=MIN_WATERMARK)
        if type(item) is Watermark:
            return None
        if input not in self._subtask.machine.ended:
            log.took(input, CONTROL)
            self._times[input] = MAX_WATERMARK
        return item

    def heard(self, verdict: m.LoopVerdict) -> None:
        """What a verdict on the loop is about to change is a choice."""
        if self.log is None:
            return
        merger = self._subtask.core.merger
        passes = max(merger.combined, merger.passing(verdict.checkpoint_id, verdict.watermark))
        ends = verdict.ended and self._subtask.machine.loop_open
        if ends or passes > merger.combined:
            self.log.chose(Verdict(passes, ends))
            self._tell(self.log)

    def _tell(self, log: DeterminantLog) -> None:
        self.known[self._subtask.task] = log.length

    # ----------------------------------------------------------------------------------------------------- following

    def make_own(self) -> None:
        """Make the next choice of the log, which needs no input."""
        assert self.log is not None
        subtask, core, choice = self._subtask, self._subtask.core, self.log.next_own()
        self.log.chose(choice)
        if isinstance(choice, InputWatermark):
            self._times[choice.input] = choice.watermark
            core.advance(subtask.place_of[choice.input], choice.watermark, False)
            return
        self._world.seen["followed a verdict"] += 1
        risen = core.merger.let_pass(choice.watermark)
        if risen is not None:
            subtask.start_watermark(risen)
        if choice.ended:
            core.handle(m.LoopVerdict(subtask.machine.newest_id, True))

    def catch_up(self) -> bool:
        """Where the log ends: take what it passed over, one watermark after the other; false if nothing is left."""
        if self.following:
            return False
        assert self.log is not None
        for index, link in enumerate(self._subtask.inputs):
            watermark = link.receiving.watermark
            if watermark > self._times[link.index] and self._times[link.index] != MAX_WATERMARK:
                self._heard_time(self.log, link.index, watermark)
                self._tell(self.log)
                self._subtask.core.advance(index, watermark, False)
                return True
        self.behind = False
        return False
