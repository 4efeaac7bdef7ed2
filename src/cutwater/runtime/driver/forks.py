"""Forks of a job: what the log says of them, following the leader, and the cutover from it to the fork.

The job that serves stops with a savepoint, commits everything up to it, and says in its log that it is over: from this
entry on it cannot serve.  The fork reads exactly as far, takes a checkpoint there, and says in its own log that its
sinks are real: from that entry on it serves.  Each of both does its part as often as it must; nobody else has a part.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import ConfigError, CutwaterError, StorageError
from cutwater.plan.graph import PhysicalPlan
from cutwater.plan.replaced_sinks import shadowed_plan
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.job import messages as j
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.links import now_ms
from cutwater.runtime.control.read_limit import Limits, ReadLimit, StepLimit, is_before
from cutwater.storage.job_log import JobLog, wall_clock_ms
from cutwater.storage.log_entries import Fork, Forked, HandedOver, Promoted
from cutwater.storage.reading import open_snapshot
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND
from cutwater.storage.snapshot.manifest import Manifest, SplitRecord, SubtaskRecord
from cutwater.storage.snapshot.packed_splits import with_all_splits
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import joined, open_existing
from cutwater.storage.store.paths import LOG_FOLDER, shadow_folder
from cutwater.storage.store.seal import Seal

if TYPE_CHECKING:
    from cutwater.runtime.driver.checkpointing import Checkpointing
    from cutwater.runtime.driver.driver import Driver
    from cutwater.runtime.driver.publisher import Publisher


class Successor(msgspec.Struct, frozen=True):
    """The fork that a job is handed over to."""

    directory: str
    job: str
    uid: str


class ForkLog:
    """One driver's view.  Belongs to the coordinator's thread, once that runs.

    Args:
        log: of the job; it is created.
        store: the checkpoint directory.
    """

    def __init__(self, log: JobLog, store: Store) -> None:
        self._log, self._store = log, store
        self.shadow_dir = joined(store.uri, shadow_folder(log.job))
        """Folder (URI) of the rows that a fork's sinks would have been given."""
        self.held: Limits | None = None
        """Limits of reading, where the driver is there to hand the job over only."""

    @property
    def fork(self) -> Fork | None:
        """The leader of the job, if it is a fork."""
        return self._log.state.fork

    @property
    def shadows(self) -> bool:
        """Its rows go to shadows of its sinks."""
        return self.fork is not None and not self.fork.promoted

    @property
    def promoted(self) -> int:
        """The checkpoint from which on a fork serves; 0: it does not, or the job is no fork."""
        return self.fork.promoted if self.fork is not None else 0

    def writing(self, plan: PhysicalPlan) -> PhysicalPlan:
        """The plan with the sinks that rows go to now."""
        return shadowed_plan(plan, self.shadow_dir) if self.shadows else plan

    def check_not_handed_over(self) -> None:
        """Refuse to go on with a job that another one goes on with.

        Raises:
            ConfigError: this one was handed over.
        """
        over = self._log.state.handed_over
        if over is not None:
            raise ConfigError(
                f"job {self._log.job!r} was handed over to job {over.job!r} at checkpoint {over.checkpoint_id}",
                hint=f"Start that one: name={over.job!r} (--name) with checkpoint directory {over.directory}. To take "
                f"this one back, stop that one for good and give restore={over.savepoint!r}.",
            )

    def check_serves(self, manifest: Manifest) -> None:
        """Refuse to let a promoted fork go back to where its leader still served.

        Raises:
            ConfigError: the snapshot is of that time.
        """
        fork = self.fork
        if fork is not None and manifest.uid == self._log.state.uid and manifest.checkpoint_id < fork.promoted:
            raise ConfigError(
                f"job {self._log.job!r} serves from checkpoint {fork.promoted} on and cannot go back to "
                f"{manifest.checkpoint_id}: what follows it was written by job {fork.job!r}",
                hint=f"Go back to checkpoint {fork.promoted} or later, or to a savepoint of job {fork.job!r}.",
            )

    def fresh_sinks(self, checkpoint_id: int) -> bool:
        """True if a checkpoint of this job tells of shadows, where the sinks are real by now."""
        return checkpoint_id <= self.promoted

    def without_shadows(self, manifest: Manifest) -> Manifest:
        """A checkpoint's manifest, without the words of shadows that are no more."""
        if manifest.uid != self._log.state.uid or not self.fresh_sinks(manifest.checkpoint_id):
            return manifest
        records = [msgspec.structs.replace(r, handles={}, sinks={}) for r in manifest.subtasks]
        return msgspec.structs.replace(manifest, subtasks=records)

    def begins(self, checkpoint_id: int) -> None:
        """Say where a fork begins, unless the log says so.

        Raises:
            FencedError: another driver owns the job.
        """
        if self.fork is not None and self.fork.cut != checkpoint_id:
            self._log.append(Forked(self._log.attempt, checkpoint_id, wall_clock_ms()))

    def hand_over(self, to: Successor, savepoint: str) -> None:
        """Say that the job is over, and who goes on.

        Raises:
            FencedError: another driver owns the job.
        """
        newest, now = self._log.state.newest_id, wall_clock_ms()
        self._log.append(HandedOver(self._log.attempt, newest, to.directory, to.job, to.uid, savepoint, now))

    def promote(self) -> None:
        """Say that the fork's sinks are real, from its newest checkpoint on.

        Raises:
            FencedError: another driver owns the job.
        """
        self._log.append(Promoted(self._log.attempt, self._log.state.newest_id, wall_clock_ms()))

    def drop_shadows(self) -> None:
        """Remove the rows of shadows once the fork serves: they were the leader's to write."""
        if self.promoted:
            with contextlib.suppress(StorageError):  # they are in nobody's way
                self._store.delete(shadow_folder(self._log.job))


POLL_S = 0.1
"""Between two looks at the leader's log."""
_PATIENCE = 20
"""So many looks in a row may fail before the user hears of it."""


class Lead(msgspec.Struct, frozen=True):
    """The leader's progress."""

    checkpoint_id: int
    """Its newest checkpoint."""
    limits: Limits
    """Its positions at that checkpoint, by the fork's names of the read steps."""
    handed_over: HandedOver | None
    finished: bool


@dataclass
class Leader:
    """The job that a fork was made from, as its log tells of it.

    Args:
        fork: where it is.
        seal: of its directory.
        step_ids: the fork's ids of its steps, where they differ.
    """

    fork: Fork
    seal: Seal
    step_ids: Mapping[str, str] = field(default_factory=dict[str, str])
    _seen: list[str] = field(default_factory=list[str])

    @property
    def store(self) -> Store:
        return open_existing(self.fork.directory, self.seal)

    def look(self) -> Lead | None:
        """The leader's progress now; ``None`` if nothing is new since the last look.

        Raises:
            CutwaterError: its directory cannot be read, or it has no checkpoint.
        """
        store, job = self.store, self.fork.job
        names = sorted(store.names(f"{job}/{LOG_FOLDER}"))[-3:]
        if names == self._seen:
            return None
        state = JobLog(store, job).read()
        if state.uid != self.fork.uid or state.latest is None:
            raise ConfigError(
                f"there is no job {job!r} with checkpoints in {self.fork.directory}, of which this one is a fork",
                hint="Bring it back; or fork with follow=False (--no-follow), which reads without regard to it.",
            )
        manifest = load_manifest(store, job, state.latest)
        self._seen = names
        limits = limits_of(manifest, self.step_ids, announce=state.handed_over is not None)
        return Lead(manifest.checkpoint_id, limits, state.handed_over, state.finished)


def limits_of(manifest: Manifest, step_ids: Mapping[str, str], *, announce: bool = False) -> Limits:
    """Positions of a checkpoint in its sources."""
    limits: dict[str, dict[str, ReadLimit]] = {}
    for record in manifest.subtasks:
        for step, splits in record.splits.items():
            limits.setdefault(step, {}).update({s.id: ReadLimit(s.position, s.done) for s in splits})
    return {
        step_ids.get(step, step): StepLimit(splits, _event_time(manifest, step), announce)
        for step, splits in limits.items()
    }


def _event_time(manifest: Manifest, step: str) -> int:
    """The watermark that all subtasks of a read step have told, but for those that are idle."""
    told = [r.watermark for r in manifest.subtasks if step in r.splits and not _idle(r)]
    return min(told, default=MIN_WATERMARK)


def _idle(record: SubtaskRecord) -> bool:
    return bool(record.output_rows) and all(channel.idle for channel in record.output_rows)


def not_reached(manifest: Manifest, limits: Limits) -> str:
    """A split that a checkpoint has not read exactly up to the limits, for messages; empty if there is none.

    A split that the leader has read to its end must be at its end here too; elsewhere, the position must be the same.
    """
    known: dict[str, dict[str, SplitRecord]] = {}
    for record in manifest.subtasks:
        for step, splits in record.splits.items():
            known.setdefault(step, {}).update({s.id: s for s in splits})
    for step, limit in limits.items():
        if step not in {s.id for s in manifest.steps}:
            continue  # the program has it no more
        own = known.get(step, {})
        for split in own.keys() | limit.splits.keys():
            if not _same(own.get(split, SplitRecord(split)), limit.splits.get(split, ReadLimit(None, False))):
                return f"split {split!r} of step {step!r}"
        if limit.announce and _event_time(manifest, step) < limit.watermark:
            return f"the event time of step {step!r}"
    return ""


def _same(own: SplitRecord, limit: ReadLimit) -> bool:
    if limit.done:
        return own.done
    return not is_before(own.position, limit.position) and not is_before(limit.position, own.position)


def is_at_rest(manifest: Manifest, limits: Limits) -> bool:
    """True if a checkpoint holds exactly the effects of the rows before the limits, with none on its way."""
    waiting = any(e.kind == CHANNEL_KIND for e in manifest.entries)
    return not waiting and not not_reached(with_all_splits(manifest), limits)


class Following:
    """Looks after the leader, from a thread of its own.

    Args:
        leader: the job to follow.
        moved: called, from that thread, with what the leader has done; again and again once it has handed over.
        warn: called if the leader cannot be read for a while; this job waits where it is.

    Raises:
        CutwaterError: the leader cannot be read.
    """

    def __init__(self, leader: Leader, moved: Callable[[Lead], None], warn: Callable[[str], None]) -> None:
        first = leader.look()
        assert first is not None  # nothing was seen before
        self.lead = first
        self._leader, self._moved, self._warn = leader, moved, warn
        self._closed = threading.Event()
        self._failed = 0

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name=f"cutwater-follow-{self._leader.fork.job}", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(POLL_S):
            try:
                found = self._leader.look()
            except CutwaterError as e:  # it may just be removing what was to be read
                self._failed += 1
                if self._failed == _PATIENCE:
                    self._warn(f"the job that this one is a fork of cannot be read: {e}")
                continue
            self._failed = 0
            if found is not None:
                self.lead = found
            if found is not None or self.lead.handed_over is not None:
                self._moved(self.lead)


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


class Cutover:
    """Both parts, of one job in one driver.  Belongs to the coordinator's thread.

    Args:
        driver: of the job; made after this object.
        checkpoints: takes the one at which the fork takes over.
    """

    def __init__(self, publisher: Publisher, driver: Callable[[], Driver], checkpoints: Checkpointing) -> None:
        self._publisher, self._driver, self._checkpoints = publisher, driver, checkpoints
        self._wanted: CutoverOrder | None = None
        self._following: Following | None = None
        self._promotions: list[queue.SimpleQueue[str]] = []
        self._asked = False
        self._noted = ""
        fork = publisher.forks.fork
        if fork is not None and fork.follow and publisher.forks.shadows:
            leader = Leader(fork, publisher.seal, publisher.upgrade.step_ids)
            self._following = Following(
                leader,
                lambda lead: self._later(lambda: self._moved(lead)),
                lambda text: self._later(lambda: self._driver().note(text)),
            )

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
        if self._driver().core.running_attempt != wanted.attempt:
            self.stopped("a failure came between")
        elif self._driver().core.committed_id >= wanted.checkpoint_id:
            self._wanted = None
            try:
                self._publisher.forks.hand_over(wanted.to, wanted.savepoint)
            except CutwaterError as e:
                wanted.done.put(str(e))
                raise
            wanted.done.put("")
            reason = f"handed over to job {wanted.to.job!r} at checkpoint {wanted.checkpoint_id}"
            self._driver().handle(j.EndRequested(j.Outcome.STOPPED, reason, now_ms()))

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
            driver = self._driver()
            driver.group.broadcast(c.ReadUpTo(driver.machine.attempt, lead.limits))
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
        elif over is not None and self._driver().core.running_attempt and not publisher.in_doubt:
            newest = publisher.newest
            if newest is None or not is_at_rest(newest, lead.limits):
                self._ask()
            else:
                self._later(self._take_over)  # first the checkpoint's own effects

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
            self._driver().note(reason)

    def _ask(self) -> None:
        if not self._asked:
            self._asked = True
            self._checkpoints.request(self._answered)

    def _answered(self, answer: cm.RequestAnswered) -> None:
        self._asked = False

    def _take_over(self) -> None:
        publisher, following = self._publisher, self._following
        newest = publisher.newest
        if following is None or newest is None or not self._driver().core.running_attempt:
            return
        if not is_at_rest(newest, following.lead.limits):
            return
        publisher.promote()
        following.close()
        self._following = None
        reason = f"takes over from job {self._leader!r} at checkpoint {newest.checkpoint_id}"
        self._driver().core.begin_anew(reason, now_ms())
        for done in self._promotions:
            done.put("")
        self._promotions.clear()

    def _later(self, function: Callable[[], None]) -> None:
        self._driver().later(function)
