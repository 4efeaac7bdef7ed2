"""The determinant log of a simulated subtask, and what a replacement and its neighbours do with it (R0, R4)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, cast

from cutwater.data.time import MAX_WATERMARK
from cutwater.protocol import messages as m
from cutwater.protocol.replay.determinants import Verdict
from cutwater.sim.world.channels import WATERMARK, Link
from cutwater.sim.world.subtask_state import SubtaskState

if TYPE_CHECKING:
    from cutwater.sim.world.attempt import Attempt
    from cutwater.sim.world.subtask import SimSubtask


class ReplayingSubtask(SubtaskState, ABC):
    """Logs its choices; follows them where others know of them; stays where it is while others go back."""

    def survive(self, attempt: Attempt) -> None:
        """Others go back (R4): turn to the channels that they will use."""
        for place, link in enumerate(self.inputs):
            now = attempt.links[link.index]
            if now is not link:
                now.take_over_receiver(cast("SimSubtask", self))
                self.inputs[place] = now
        for place, link in enumerate(self.outputs):
            now = attempt.links[link.index]
            if now is not link:
                now.take_over_sender(cast("SimSubtask", self))
                self.outputs[place] = now
        self._links = attempt.links

    def follow(self) -> None:
        """Take inputs in the order that survivors know of, from the checkpoint on."""
        if not self.world.keeps_order:
            return
        self.order = order = self.attempt.order(self.task)
        order.go_back(self._choice, self.known.get(self.task, 0))
        self.known[self.task] = order.length
        if order.next_run() is not None:
            self.world.seen["followed an order"] += 1
            self.loop.follow(order)

    def hear_of(self, sender: ReplayingSubtask) -> None:
        """What leaves a worker's part of a region tells all that is known there."""
        if sender.known is self.known:
            return
        told, known = sender.known, self.known
        if not self.world.passes_on:
            told = {s.task: told.get(s.task, 0) for s in sender.worker.subtasks if s.known is told}
        for task, choices in told.items():
            if choices > known.get(task, 0):
                known[task] = choices

    def chose(self, link: Link, rows: int) -> None:
        if self.order is not None:
            self.order.took(link.index, rows)
            self.known[self.task] = self.order.length

    def heard_of_time(self) -> object:
        """What control items change: one that changes nothing, as an end after its loop has ended, is no choice."""
        return (self.merger.snapshot(), self.machine.ended) if self.order is not None else None

    def verdict(self, verdict: m.LoopVerdict) -> None:
        """The loop was quiet, or has ended: what that changes here is a choice."""
        before = self.merger.combined, self.machine.loop_open
        self.handle(verdict)
        after = self.merger.combined, self.machine.loop_open
        if self.order is not None and after != before:
            self.order.heard(Verdict(after[0], before[1] and not after[1]))
            self.known[self.task] = self.order.length

    def hear_again(self) -> None:
        """What a verdict did before, it does once more."""
        assert self.order is not None
        verdict = self.order.next_verdict()
        self.order.heard(verdict)
        self.world.seen["followed a verdict"] += 1
        self._advance(self.merger.let_pass(verdict.watermark))
        if verdict.ended:
            self.handle(m.LoopVerdict(self.machine.newest_id, True))
        self.tell_if_caught_up()

    @abstractmethod
    def handle(self, event: m.Event) -> None:
        """Feed the machine and perform what it asks for."""

    def tell_if_caught_up(self) -> None:
        """No barrier may leave before the receivers have nothing that is still to be sent."""
        if not self.behind or any(link.behind for link in self.outputs):
            return
        if self.order is None or self.order.next_run() is None:
            self.behind = False
            self.worker.tell("caught_up", self.attempt.number, self.task)

    def _advance(self, risen: int | None) -> None:
        if risen is not None and risen > self.watermark:
            self.watermark = risen
            for out in self.outputs:
                leaves = risen == MAX_WATERMARK and out.index not in self._in_loop  # with the end (W5)
                if not (out.back or leaves):
                    out.send_control((WATERMARK, risen))
            if self.behind:
                self.tell_if_caught_up()
