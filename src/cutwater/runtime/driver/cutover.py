"""Handing a job over to its fork: what the one that serves does, and what the fork does.

The job that serves stops with a savepoint, commits everything up to it, and says in its log that it is over: from this
entry on it cannot serve.  The fork reads exactly as far, takes a checkpoint there, and says in its own log that its
sinks are real: from that entry on it serves.  Each of both does its part as often as it must; nobody else has a part.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cutwater.errors import CutwaterError
from cutwater.protocol.checkpoint import messages as cm
from cutwater.runtime.control.read_limit import Limits
from cutwater.runtime.cutover.following import Following, Lead, Leader, is_at_rest
from cutwater.runtime.cutover.log import Successor
from cutwater.runtime.driver.publisher import Publisher
from cutwater.storage.reading.any_snapshot import open_snapshot
from cutwater.storage.store.seal import Seal


@dataclass(frozen=True, eq=False)
class CutoverOrder:
    """Somebody wants the job to be handed over; ``done`` gets what went wrong, or nothing.

    Attributes:
        savepoint: with which the job has stopped reading.
        checkpoint_id: of the savepoint.
        attempt: that took it.
    """

    to: Successor
    savepoint: str
    checkpoint_id: int
    attempt: int
    done: queue.SimpleQueue[str]

    @classmethod
    def after(cls, savepoint: str, to: Successor, seal: Seal, done: queue.SimpleQueue[str]) -> CutoverOrder:
        """The wish of a job that has just stopped reading with a savepoint."""
        manifest = open_snapshot(savepoint, seal).manifest
        return cls(to, savepoint, manifest.checkpoint_id, manifest.attempt, done)


class CutoverHost(Protocol):
    """The driver; everything is called in its thread."""

    @property
    def running_attempt(self) -> int:
        """The attempt whose subtasks all run; 0: none."""
        ...

    @property
    def committed_id(self) -> int:
        """The checkpoint behind which nothing is read in this attempt, once all its output is committed; 0: none."""
        ...

    def later(self, function: Callable[[], None]) -> None:
        """Call it in the driver's thread; from any thread."""
        ...

    def note(self, text: str) -> None:
        """Tell the user."""
        ...

    def read_up_to(self, limits: Limits) -> None:
        """Tell the sources how far they may read."""
        ...

    def snapshot(self, done: Callable[[cm.RequestAnswered], None]) -> None:
        """Take a checkpoint."""
        ...

    def begin_anew(self, reason: str) -> None:
        """Go on from the newest checkpoint."""
        ...

    def retire(self, reason: str) -> None:
        """End the job: another one goes on."""
        ...


class Cutover:
    """Both parts, of one job in one driver.  Belongs to the coordinator's thread."""

    def __init__(self, publisher: Publisher, host: CutoverHost) -> None:
        self._publisher, self._host = publisher, host
        self._wanted: CutoverOrder | None = None
        self._following: Following | None = None
        self._promotions: list[queue.SimpleQueue[str]] = []
        self._asked = False
        self._noted = ""
        fork = publisher.forks.fork
        if fork is not None and fork.follow and publisher.forks.shadows:
            leader = Leader(fork, publisher.seal, publisher.upgrade.step_ids)
            self._following = Following(leader, lambda lead: host.later(lambda: self._moved(lead)), self._later_note)

    @property
    def limits(self) -> Limits | None:
        """Limits of the sources' reading; ``None``: as far as they can."""
        return self._following.lead.limits if self._following is not None else self._publisher.forks.held

    def start(self) -> None:
        """The job begins."""
        if self._following is not None:
            self._following.start()

    def close(self) -> None:
        """The job is over."""
        if self._following is not None:
            self._following.close()

    # --------------------------------------------------------------------------------------- of the one that serves

    def request(self, wanted: CutoverOrder) -> None:
        """The job has stopped reading, and is to be handed over as soon as all output is committed."""
        self._wanted = wanted
        self.committed()

    def stopped(self, reason: str) -> None:
        """The attempt is over; the next one reads on."""
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            wanted.done.put(f"it restarted meanwhile, and goes on: {reason}")

    def committed(self) -> None:
        """Hand over, if that is wanted and all output is committed."""
        wanted = self._wanted
        if wanted is None:
            return
        if self._host.running_attempt != wanted.attempt:
            self.stopped("a failure came between")
        elif self._host.committed_id >= wanted.checkpoint_id:
            self._wanted = None
            try:
                self._publisher.forks.hand_over(wanted.to, wanted.savepoint)
            except CutwaterError as e:
                wanted.done.put(str(e))
                raise
            wanted.done.put("")
            self._host.retire(f"handed over to job {wanted.to.job!r} at checkpoint {wanted.checkpoint_id}")

    # ------------------------------------------------------------------------------------------------- of the fork

    def request_promotion(self, done: queue.SimpleQueue[str]) -> None:
        """Somebody waits until the fork serves; ``done`` gets what is against it, or nothing."""
        if self._following is None:
            done.put("")
            return
        self._promotions.append(done)
        self.look()

    def _moved(self, lead: Lead) -> None:
        if self._following is not None:
            self._host.read_up_to(lead.limits)
            self.look()

    def look(self) -> None:
        """Take over, if the leader has handed over and everything up to there has been read."""
        if self._following is None:
            return
        lead, publisher = self._following.lead, self._publisher
        over = lead.handed_over
        if over is not None and over.uid != publisher.uid:
            self._refuse(f"job {self._leader!r} was handed over to another fork, {over.job!r}")
        elif over is None and lead.finished:
            self._refuse(f"job {self._leader!r} has finished: nothing is left to take over")
        elif over is not None and self._host.running_attempt and not publisher.in_doubt:
            newest = publisher.newest
            if newest is None or not is_at_rest(newest, lead.limits):
                self._ask()
            else:
                self._host.later(self._take_over)  # first the checkpoint's own effects

    @property
    def _leader(self) -> str:
        fork = self._publisher.forks.fork
        return fork.job if fork is not None else ""

    def _refuse(self, reason: str) -> None:
        for done in self._promotions:
            done.put(reason)
        self._promotions.clear()
        if reason != self._noted:
            self._noted = reason
            self._host.note(reason)

    def _ask(self) -> None:
        if not self._asked:
            self._asked = True
            self._host.snapshot(self._answered)

    def _answered(self, answer: cm.RequestAnswered) -> None:
        self._asked = False

    def _take_over(self) -> None:
        publisher, following = self._publisher, self._following
        newest = publisher.newest
        if following is None or newest is None or not self._host.running_attempt:
            return
        if not is_at_rest(newest, following.lead.limits):
            return
        publisher.promote()
        following.close()
        self._following = None
        reason = f"takes over from job {self._leader!r} at checkpoint {newest.checkpoint_id}"
        self._host.begin_anew(reason)
        for done in self._promotions:
            done.put("")
        self._promotions.clear()

    def _later_note(self, text: str) -> None:
        self._host.later(lambda: self._host.note(text))
