"""What users ask of a coordinator, from threads of their own, and how they hear what became of it."""

from __future__ import annotations

import abc
import queue
from collections.abc import Callable
from typing import TypeVar

from cutwater.errors import CutwaterError
from cutwater.plan.graph import PhysicalPlan
from cutwater.protocol.checkpoint import messages as cm
from cutwater.runtime.cutover.log import Successor
from cutwater.runtime.driver.checkpointing import Checkpointing
from cutwater.runtime.driver.cutover import Cutover, CutoverOrder
from cutwater.runtime.driver.driver import Driver
from cutwater.runtime.driver.publisher import Publisher
from cutwater.runtime.driver.rescaling import Rescaling
from cutwater.runtime.driver.savepoints import SavepointKind, SavepointRequest

T = TypeVar("T")


class AnsweringDriver(Driver):
    """A driver of a dataflow; its own thread answers."""

    plan: PhysicalPlan
    publisher: Publisher
    _rescaling: Rescaling
    _handing_over: Cutover
    _checkpoints: Checkpointing | None

    @abc.abstractmethod
    def snapshot(self, done: Callable[[cm.RequestAnswered], None]) -> None:
        """Take a checkpoint; called in the driver's thread."""

    def request_checkpoint(self) -> int:
        """Take a checkpoint now and wait for it; returns its id.

        Raises:
            CutwaterError: it failed, with the reason.
        """
        done: queue.SimpleQueue[cm.RequestAnswered] = queue.SimpleQueue()
        self._later(lambda: self.snapshot(done.put))
        answer = self._answer(done, "the checkpoint was taken")
        if answer.reason is not None or answer.checkpoint_id is None:
            why = answer.reason.message if answer.reason else "nothing was taken"
            raise CutwaterError(f"the checkpoint failed: {why} {answer.detail}".rstrip())
        return answer.checkpoint_id

    def request_rescale(self, parallelism: int) -> None:
        """Go on at another parallelism; returns when the job runs there.

        Raises:
            CutwaterError: it does not, with the reason; it goes on as it was, unless it has ended.
        """
        done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._later(lambda: self._rescaling.request(parallelism, done))
        if error := self._answer(done, "it was rescaled"):
            raise CutwaterError(f"not rescaled to {parallelism}: {error}")

    def request_savepoint(self, kind: SavepointKind, directory: str) -> str:
        """Take a savepoint and wait until it is whole; returns where it lies, or raises why there is none."""
        request = SavepointRequest.prepare(
            kind, directory, self.publisher.job, self.publisher.seal, self.config.file_access
        )
        self._later(lambda: request.hand_to(self._checkpoints))
        return request.result(lambda: self._answer(request.done, "the savepoint was whole"))

    def request_hand_over(self, to: Successor, directory: str) -> str:
        """Stop with a savepoint and leave the rest to a fork; returns where the savepoint lies.

        Raises:
            CutwaterError: nothing was handed over, with the reason; the job goes on.
        """
        path = self.request_savepoint("stop", directory)
        done: queue.SimpleQueue[str] = queue.SimpleQueue()
        wanted = CutoverOrder.after(path, to, self.publisher.seal, done)
        self._later(lambda: self._handing_over.request(wanted))
        if error := self._answer(done, "it was handed over"):
            raise CutwaterError(f"job {self.plan.name!r} was not handed over: {error}")
        return path

    def request_promotion(self) -> None:
        """Wait until the fork has taken over; its leader has handed over, or is about to.

        Raises:
            CutwaterError: it will not, with the reason.
        """
        done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._later(lambda: self._handing_over.request_promotion(done))
        if error := self._answer(done, "it was promoted"):
            raise CutwaterError(f"job {self.plan.name!r} is not promoted: {error}")

    def _answer(self, done: queue.SimpleQueue[T], what: str) -> T:
        while True:
            try:
                return done.get(timeout=0.2)
            except queue.Empty:
                if self.ended.is_set():
                    why = f": {self.error}" if self.error is not None else ""
                    raise CutwaterError(f"the job ended before {what}{why}") from self.error
