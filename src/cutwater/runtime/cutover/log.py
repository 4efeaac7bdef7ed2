"""Forks in the log of a job: the leader that it was forked from, and the fork that it was handed over to."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import msgspec

from cutwater.errors import ConfigError, StorageError
from cutwater.plan.graph import PhysicalPlan
from cutwater.plan.other_sinks import shadowed_plan
from cutwater.runtime.control.read_limit import Limits
from cutwater.storage.log.entries import Fork, Forked, HandedOver, Promoted
from cutwater.storage.log.job_log import JobLog, wall_clock_ms
from cutwater.storage.snapshot.manifest import Manifest
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import joined
from cutwater.storage.store.paths import shadow_folder


@dataclass(frozen=True)
class Successor:
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
