"""Calls of users, from threads of their own: each is handed to the driver's thread, and waits for its outcome."""

from __future__ import annotations

import queue
from typing import TypeVar

from cutwater.errors import BuildError, ConfigError, CutwaterError
from cutwater.protocol.checkpoint import messages as cm
from cutwater.runtime.cutover.log import Successor
from cutwater.runtime.driver.checkpointing import Checkpointing, now_ms
from cutwater.runtime.driver.cutover import Cutover, CutoverOrder
from cutwater.runtime.driver.driver import Driver
from cutwater.runtime.driver.publisher import Publisher
from cutwater.runtime.driver.rescaling import asked_shape
from cutwater.runtime.driver.savepoints import SavepointKind, SavepointRequest

T = TypeVar("T")


class UserCalls:
    """Calls to one running job.

    Args:
        driver: has the thread in which everything is done.
        publisher: of the job.
        checkpoints: takes checkpoints and savepoints.
        cutover: performs hand-overs and promotions.
    """

    def __init__(self, driver: Driver, publisher: Publisher, checkpoints: Checkpointing, cutover: Cutover) -> None:
        self._driver, self._publisher = driver, publisher
        self._checkpoints, self._cutover = checkpoints, cutover

    def checkpoint(self) -> int:
        """Take a checkpoint now and wait for it; returns its id.

        Raises:
            CutwaterError: it failed, with the reason.
        """
        done: queue.SimpleQueue[cm.RequestAnswered] = queue.SimpleQueue()
        self._driver.later(lambda: self._checkpoints.request(done.put))
        answer = self._wait(done, "the checkpoint was taken")
        if answer.reason is not None or answer.checkpoint_id is None:
            why = answer.reason.message if answer.reason else "nothing was taken"
            raise CutwaterError(f"the checkpoint failed: {why} {answer.detail}".rstrip())
        return answer.checkpoint_id

    def rescale(self, parallelism: int) -> None:
        """Go on at another parallelism; returns when the job runs there.

        Raises:
            CutwaterError: it does not, with the reason; it goes on as it was, unless it has ended.
        """
        done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._driver.later(lambda: self._ask_for(parallelism, done))
        if error := self._wait(done, "it was rescaled"):
            raise CutwaterError(f"not rescaled to {parallelism}: {error}")

    def _ask_for(self, parallelism: int, done: queue.SimpleQueue[str]) -> None:
        try:
            shape = asked_shape(self._publisher.plan, parallelism, self._driver.config)
        except (BuildError, ConfigError) as e:
            done.put(str(e))
        else:
            self._driver.core.request_rescale(shape, done, now_ms())

    def savepoint(self, kind: SavepointKind, directory: str) -> str:
        """Take a savepoint and wait until it is whole; returns its folder, or raises why there is none."""
        publisher = self._publisher
        request = SavepointRequest.prepare(
            kind, directory, publisher.job, publisher.seal, self._driver.config.file_access
        )
        self._driver.later(lambda: self._checkpoints.request_savepoint(request))
        return request.result(lambda: self._wait(request.done, "the savepoint was whole"))

    def hand_over(self, to: Successor, directory: str) -> str:
        """Stop with a savepoint and leave the rest to a fork; returns the savepoint's folder.

        Raises:
            CutwaterError: nothing was handed over, with the reason; the job goes on.
        """
        path = self.savepoint("stop", directory)
        done: queue.SimpleQueue[str] = queue.SimpleQueue()
        wanted = CutoverOrder.after(path, to, self._publisher.seal, done)
        self._driver.later(lambda: self._cutover.request(wanted))
        if error := self._wait(done, "it was handed over"):
            raise CutwaterError(f"job {self._publisher.job!r} was not handed over: {error}")
        return path

    def promotion(self) -> None:
        """Wait until the fork has taken over; its leader has handed over, or is about to.

        Raises:
            CutwaterError: it will not, with the reason.
        """
        done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._driver.later(lambda: self._cutover.request_promotion(done))
        if error := self._wait(done, "it was promoted"):
            raise CutwaterError(f"job {self._publisher.job!r} is not promoted: {error}")

    def _wait(self, done: queue.SimpleQueue[T], what: str) -> T:
        while True:
            try:
                return done.get(timeout=0.2)
            except queue.Empty:
                if self._driver.ended.is_set():
                    error = self._driver.error
                    why = f": {error}" if error is not None else ""
                    raise CutwaterError(f"the job ended before {what}{why}") from error
