"""The driver's side of storage: attempts, manifests, sinks at a restore.

One ``Publisher`` per driver and job.  It owns the job log; everything that makes output visible happens only after the
log accepted this driver's attempt (the fence).
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import cast

import msgspec

from cutwater import __version__
from cutwater.config import JobConfig
from cutwater.connectors.base import Committer, Json, Sink, SinkHooks, SinkSnapshot, SubtaskCommitter
from cutwater.connectors.staging import Guard
from cutwater.errors import ConfigError, CorruptSnapshotError, FencedError, StorageError
from cutwater.plan.compatibility import check_compatible, edge_records, step_records
from cutwater.plan.graph import PhysicalPlan
from cutwater.plan.recovery import subtasks_of
from cutwater.plan.replaced_sinks import guarded_plan
from cutwater.plan.upgrade import Upgrade
from cutwater.protocol.job.messages import Outcome
from cutwater.protocol.job.recovery_scope import Region
from cutwater.runtime.copies.copies import sweep_copies
from cutwater.runtime.driver.forks import ForkLog
from cutwater.runtime.driver.source_commits import SourceCommits
from cutwater.runtime.failures import first_line
from cutwater.storage.job_log import JobLog, wall_clock_ms
from cutwater.storage.log_entries import Fork, JobEnded, JobFinished, RolledBack
from cutwater.storage.reading import (
    Restorable,
    SnapshotAddress,
    choose,
    next_checkpoint_id,
    no_such_checkpoint,
    snapshots_at,
)
from cutwater.storage.snapshot.manifest import EdgeRecord, Entry, Manifest, StepRecord, SubtaskRecord
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.retention import Retention, older_entries
from cutwater.storage.snapshot.savepoint import Claim
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.base import Store


class Sinks:
    """Calls the committers of all write steps.  Belongs to the coordinator's thread.

    It knows, from the last ``settle`` on, what each retained checkpoint says of the sinks: staged rows stay as long as
    one of them needs them, so that falling back to any is exact.  Of the plan it keeps what a rescale leaves as it is.
    """

    def __init__(self, plan: PhysicalPlan, uid: str) -> None:
        self._committers: dict[str, Committer] = {}
        self._global: list[str] = []
        for step in plan.steps.values():
            if step.role == "sink":
                source = step.inputs[0]
                schema = plan.steps[source.step].outputs[source.output].schema
                sink = cast(Sink, step.spec)
                self._committers[step.id] = sink.committer(schema, uid, step.id)
                self._global += [step.id] if SinkHooks(sink).commits_globally else []
        self._known: dict[int, dict[str, SinkSnapshot]] = {}

    @property
    def not_taken_back(self) -> list[str]:
        """The steps whose output stays where it is when the job falls back behind it."""
        return [step for step, committer in self._committers.items() if not committer.takes_back]

    def settle(self, restored: Manifest | None, retained: Iterable[Manifest], attempt: int) -> None:
        """Commit what ``restored`` names and undo everything later (T2), before workers of ``attempt`` are deployed.

        Args:
            restored: this job's own checkpoint; ``None``: it begins with nothing committed.
            retained: all checkpoints that a later restore may choose, ``restored`` included.
        """
        self._known = {}
        for manifest in retained:
            self.published(manifest)
        for step, committer in self._committers.items():
            chosen = self._known[restored.checkpoint_id][step] if restored is not None else None
            committer.settle(chosen, [snapshots[step] for snapshots in self._known.values()], attempt)

    def settle_subtasks(self, restored: Manifest | None, attempt: int, subtasks: Region, plan: PhysicalPlan) -> None:
        """``settle`` for these subtasks of ``plan`` only; what others have in progress is not touched (R2).

        Every committer of which they are not all the subtasks is a ``SubtaskCommitter``: see ``recovery_division``.
        """
        theirs = None
        if restored is not None:
            records = [r for r in restored.subtasks if (r.vertex, r.subtask) in subtasks]
            theirs = msgspec.structs.replace(restored, subtasks=records)
        for step, committer in self._committers.items():
            vertex = plan.vertex_of(step)
            members = {subtask for v, subtask in subtasks if v == vertex.index}
            chosen = _snapshot(theirs, step) if theirs is not None else None
            retained = [snapshots[step] for snapshots in self._known.values()]
            if len(members) == vertex.parallelism:
                committer.settle(chosen, retained, attempt)
            elif members:
                cast(SubtaskCommitter, committer).settle_subtasks(chosen, retained, attempt, members)

    def due(self, checkpoint_id: int) -> dict[str, tuple[Committer, list[Json]]]:
        """What the driver has to commit of a published checkpoint, by step."""
        return {step: (self._committers[step], self._known[checkpoint_id][step].handles) for step in self._global}

    def published(self, manifest: Manifest) -> None:
        """A checkpoint is in the log."""
        self._known[manifest.checkpoint_id] = {step: _snapshot(manifest, step) for step in self._committers}

    def collect(self, retained: Iterable[int]) -> list[str]:
        """Remove what only checkpoints needed that are not ``retained``; returns warnings."""
        kept = set(retained)
        warnings: list[str] = []
        for checkpoint_id in sorted(self._known.keys() - kept):
            retired = self._known.pop(checkpoint_id)
            for step, committer in self._committers.items():
                try:
                    committer.retire(retired[step], [self._known[i][step] for i in self._known.keys() & kept])
                except StorageError as error:  # the next restore, or the job's end, removes it
                    warnings.append(f"staged output of checkpoint {checkpoint_id} stays for now: {error}")
        return warnings

    def finish(self, attempt: int) -> list[str]:
        """The log says that the job finished: remove all staging up to ``attempt``; returns warnings."""
        warnings: list[str] = []
        for step, committer in self._committers.items():
            try:
                committer.finish(attempt)
            except StorageError as error:
                warnings.append(f"staged output of step {step!r} stays: {error}")
        return warnings


def _snapshot(manifest: Manifest, step: str) -> SinkSnapshot:
    """One write step in the records of all subtasks."""
    return SinkSnapshot(
        manifest.checkpoint_id,
        [handle for record in manifest.subtasks for handle in record.handles.get(step, [])],
        [record.sinks[step] for record in manifest.subtasks if step in record.sinks],
    )


_COLLECT_EVERY_S = 1.0
"""At ten checkpoints a second, looking each time what may go costs as much as publishing."""


class Publisher:
    """Takes attempts, publishes checkpoints, and brings sinks in line with what is published."""

    def __init__(
        self,
        store: Store,
        plan: PhysicalPlan,
        config: JobConfig,
        origin: SnapshotAddress | None = None,
        upgrade: Upgrade | None = None,
        *,
        claim: bool = False,
        fork: Fork | None = None,
    ) -> None:
        self.job = plan.name
        self.upgrade = upgrade or Upgrade()
        """Names for reading a checkpoint of another version of the program."""
        self.upgrade.check(plan)
        self._store, self.plan, self._config, self.seal = store, plan, config, store.seal
        self._described: tuple[PhysicalPlan, list[StepRecord], list[EdgeRecord]] | None = None
        self.log = JobLog(store, self.job, num_retained=config.num_retained)
        self.log.create(fork)  # workers name their output by the uid, so it is there before they are
        self.forks = ForkLog(self.log, store)
        if origin is None:
            self.forks.check_not_handed_over()
        self.newest: Manifest | None = None
        """The newest checkpoint that this driver has published."""
        self._retention: Retention | None = None
        self._collected_s = -math.inf
        self._doubted = False
        self.warnings: list[str] = []
        """Of restores, for the user."""
        self.parallelism = self.wanted = self._resumed_parallelism(config.parallelism)
        """The job's parallelism: the program's, unless it was rescaled since that last asked for another one."""
        self._origin = origin
        if claim and (origin is None or not origin.is_savepoint):
            raise ConfigError(
                "only a savepoint can be claimed", hint="Give restore= the folder of one, or leave claim away."
            )
        self._claims = claim
        self._claim = Claim(store, self.job)
        self._origin_uid = "" if origin is None else snapshots_at(origin).uid
        if self.foreign and self.log.state.completed:
            raise ConfigError(
                f"job {self.job!r} has checkpoints of its own in this directory and cannot begin from {origin}",
                hint="Give another checkpoint directory, or leave restore out.",
            )

    def _resumed_parallelism(self, asked: int) -> int:
        program, rescaled = self.log.state.rescaled or (0, 0)
        if program != asked:
            return asked
        self.warnings.append(
            f"goes on at parallelism {rescaled}, to which the job was rescaled; the program asks for {asked}, as before"
        )
        return rescaled

    @property
    def replicas(self) -> int | None:
        """Number of other workers that hold copies of each one's files; ``None``: there are no copies at all."""
        return self._config.state_replicas if self._config.keeps_copies else None

    @property
    def attempt(self) -> int:
        return self.log.state.attempt

    @property
    def uid(self) -> str:
        return self.log.state.uid

    @cached_property
    def _sinks(self) -> Sinks:  # not before they are bound to their directories
        guard = Guard(self.seal, self._config.file_access)
        return Sinks(guarded_plan(self.forks.writing(self.plan), guard), self.uid)

    @cached_property
    def _sources(self) -> SourceCommits:
        return SourceCommits(self.plan, self.uid)

    def has_fresh_sinks(self, restorable: Restorable | None) -> bool:
        """True if shadows that are no more wrote the sinks' part of the checkpoint to restore."""
        if restorable is None or self.foreign:
            return False
        return self.forks.fresh_sinks(restorable.completed.checkpoint_id)

    def promote(self) -> None:
        """Write to the real sinks of a fork from the newest checkpoint on.

        Raises:
            FencedError: another driver owns the job.
        """
        self.forks.promote()
        self.__dict__.pop("_sinks", None)

    def begin_attempt(self, attempt: int, *, survivors: bool = False) -> None:
        """Take the log for this attempt; with ``survivors`` some subtasks run on from the one before.

        Raises:
            FencedError: another driver has taken it since this one read it; it stays the other one's.
        """
        asked, wanted = self._config.parallelism, self.wanted
        driver = f"{socket.gethostname()}:{os.getpid()}"
        rescaled = (asked, wanted) if wanted != asked else None
        self.log.begin_attempt(driver, after=attempt - 1, rescaled=rescaled, take_back=self._origin is not None)
        lost = [f"{what}. The job goes on, for the newest entry is whole" for what in self.log.damaged.values() if what]
        self.warnings += [warning for warning in lost if warning not in self.warnings]
        if not survivors:  # what they have frozen may build upon a checkpoint that was retired just now
            self._retention = Retention(self._store, self.log)

    def restore_subtasks(self, attempt: int, subtasks: Region, held: Collection[str] = ()) -> Restorable | None:
        """Take the log, and bring the sinks of these subtasks to the newest checkpoint; all others run on (R2).

        Returns the checkpoint; ``None`` if none was taken, so that they begin anew.

        Raises:
            FencedError: as ``begin_attempt``.
            CorruptSnapshotError: it is damaged.
            ConfigError: it is another job's, or of another shape.
        """
        self.begin_attempt(attempt, survivors=True)
        found = self._newest(self._believed(held))
        restored = found.manifest if found is not None else None
        self._sinks.settle_subtasks(restored, self.log.attempt, subtasks, self.plan)
        return found

    def _believed(self, held: Collection[str]) -> Collection[str]:
        """Files that only workers verify, as they read them: none if the last restore found damage behind copies."""
        doubted, self._doubted = self._doubted, False
        return () if doubted else held

    def failed(self, kind: str) -> None:
        """A worker failed: if a snapshot was damaged, the next restore looks at all of it first."""
        self._doubted = self._doubted or kind == CorruptSnapshotError.__name__

    def _newest(self, held: Collection[str]) -> Restorable | None:
        self.log.check_fence()  # what runs on here is no cut with a checkpoint of another driver's
        state = self.log.read()
        if self._origin is not None:
            raise ConfigError("the job has not completed a checkpoint since it began from a chosen snapshot")
        if not state.completed:
            return None
        newest = msgspec.structs.replace(state, completed=state.completed[:1])
        found = choose(self._store, self.job, newest, held=held)
        assert found is not None  # it raises where entries exist and none is usable
        bound = check_compatible(self.plan, found.manifest, self.upgrade)
        if frozenset((r.vertex, r.subtask) for r in bound.manifest.subtasks) != subtasks_of(self.plan):
            raise ConfigError("the newest checkpoint was taken at another parallelism")
        return replace(found, manifest=self.forks.without_shadows(bound.manifest))

    def choose(self, held: Collection[str] = ()) -> Restorable | None:
        """The checkpoint to restore: the one asked for until this driver has completed one, then the newest.

        Args:
            held: files of the job that workers have copies of.

        Raises:
            BuildError: the program does not fit the snapshot.
            CorruptSnapshotError: completed checkpoints exist and none is usable.
        """
        state = self.log.read()
        if state.completed and self.foreign:  # one was in doubt when this driver's last attempt failed
            self._origin = None
        if self._origin is None and state.newest_id and not state.completed:
            raise ConfigError(
                f"job {self.job!r} went back to a savepoint, and has completed no checkpoint since",
                hint="Give the savepoint again: restore=... (--restore).",
            )
        if self._origin is None:
            restorable = choose(self._store, self.job, state, held=self._believed(held))
        else:
            restorable = self._choose_origin(self._origin)
        if restorable is None:
            return None
        bound = check_compatible(self.plan, restorable.manifest, self.upgrade, foreign=self.foreign)
        self.warnings += [w for w in (*restorable.warnings, *bound.report.warnings) if w not in self.warnings]
        if self._claims and self._origin is not None:
            origin, digest = self._origin, restorable.completed.digest
            self._claim.take(origin.directory, origin.job, digest, state.newest_id)
        self.forks.check_serves(restorable.manifest)
        if self.foreign:
            self.forks.begins(restorable.manifest.checkpoint_id)
        self._roll_back(restorable)
        return replace(restorable, manifest=self.forks.without_shadows(bound.manifest))

    def _choose_origin(self, origin: SnapshotAddress) -> Restorable:
        state = snapshots_at(origin)
        wanted = origin.checkpoint_id
        entries = tuple(e for e in state.completed if wanted in (None, e.checkpoint_id))
        if not entries:
            raise no_such_checkpoint(origin, state)
        found = choose(origin.store, origin.job, msgspec.structs.replace(state, completed=entries))
        assert found is not None  # it raises where entries exist and none is usable
        unread = [s.id for r in found.manifest.subtasks for splits in r.splits.values() for s in splits if not s.done]
        if found.manifest.final and unread and self.foreign:
            raise ConfigError(
                f"{origin} was taken when its job had been drained: its windows have fired and its time has ended, "
                f"but its sources have not, as {unread[0]!r}",
                hint="Begin from a savepoint that was taken without draining.",
            )
        return found

    def _roll_back(self, restorable: Restorable) -> None:
        """Restoring an own checkpoint makes it the newest one: say so in the log, before any output is taken back."""
        chosen = restorable.completed.checkpoint_id
        later = [e.checkpoint_id for e in self.log.state.completed if e.checkpoint_id > chosen]
        if restorable.manifest.uid != self.uid or not later:
            return
        self.log.append(RolledBack(self.log.attempt, chosen, wall_clock_ms()))
        dropped = f"The job goes back to checkpoint {chosen}; {', '.join(map(str, sorted(later)))} count no more."
        self.warnings.append(dropped)
        for step in self._sinks.not_taken_back:
            self.warnings.append(
                f"Step {step!r} cannot take back what it handed out after checkpoint {chosen}: those rows come again, "
                "under new checkpoint ids. Undo there what came with higher ids."
            )

    @property
    def foreign(self) -> bool:
        """The snapshot to restore is another job's."""
        return self._origin is not None and self._origin_uid != self.uid

    @property
    def location(self) -> tuple[str, str] | None:
        """Directory and folder of the snapshot to restore, if that is not this job's: another job's, or a savepoint."""
        origin = self._origin
        return (origin.directory, origin.job) if origin is not None and (origin.is_savepoint or self.foreign) else None

    def next_checkpoint_id(self) -> int:
        return next_checkpoint_id(self._store, self.job, self.log.state)

    def settle_sinks(self, manifest: Manifest | None) -> None:
        """Commit the handles of the chosen checkpoint, then undo everything later of this job (T2); tell sources.

        What another job's uid wrote is its own to commit (T3).
        """
        own = manifest if manifest is not None and manifest.uid == self.uid else None
        retained = list(self._retained(own))
        self._sinks.settle(own, retained, self.log.attempt)
        self.warnings += self._sources.settle(retained, self.log.attempt)
        self.forks.drop_shadows()

    def _retained(self, restored: Manifest | None) -> Iterator[Manifest]:
        """``restored``, and the older checkpoints that a later restore may fall back to."""
        if restored is not None and restored.checkpoint_id not in [c.checkpoint_id for c in self.log.state.completed]:
            yield restored  # a savepoint
        for completed in self.log.state.completed:
            if restored is not None and completed.checkpoint_id == restored.checkpoint_id:
                yield restored
                continue
            try:
                yield self.forks.without_shadows(load_manifest(self._store, self.job, completed))
            except CorruptSnapshotError:
                continue  # it will not be restored

    def manifest(
        self,
        checkpoint_id: int,
        *,
        attempt: int,
        final: bool,
        triggered_ms: int,
        parts: Iterable[tuple[SubtaskRecord, list[Entry]]],
    ) -> Manifest:
        """The manifest of a checkpoint, made of the subtasks' acknowledgements."""
        subtasks: list[SubtaskRecord] = []
        entries: list[Entry] = []
        for record, segments in parts:
            subtasks.append(record)
            entries += segments
        if self._described is None or self._described[0] is not self.plan:  # the same for every checkpoint of a plan
            self._described = self.plan, step_records(self.plan), edge_records(self.plan)
        _, steps, edges = self._described
        return Manifest(
            job=self.job,
            uid=self.uid,
            checkpoint_id=checkpoint_id,
            attempt=attempt,
            protocol=self._config.protocol,
            max_parallelism=self.plan.max_parallelism,
            parallelism=self.plan.parallelism,
            triggered_ms=triggered_ms,
            completed_ms=wall_clock_ms(),
            steps=steps,
            subtasks=sorted(subtasks, key=lambda r: (r.vertex, r.subtask)),
            entries=entries,
            edges=edges,
            back_edges=self.plan.back_edges,
            final=final,
            engine=__version__,
        )

    def publish(self, manifest: Manifest) -> tuple[int, int]:
        """Write manifest and log entry; returns the bytes of state, and how many of them are new.

        Raises:
            FencedError: another driver owns the job.
            StorageError: the checkpoint does not count.
        """
        assert self._retention is not None  # an attempt was begun
        shared = self._retention.shared
        shared.check(manifest)
        completed = publish(self._store, self.log, manifest, kind="final" if manifest.final else "checkpoint")
        shared.published(completed, manifest)
        self._sinks.published(manifest)
        self._sources.published(manifest)
        self._origin, self.newest = None, manifest
        size = sum(e.length for e in manifest.entries)
        return size, size - sum(e.length for e in older_entries(manifest))

    def global_commits(self, checkpoint_id: int) -> dict[str, tuple[Committer, list[Json]]]:
        """What the driver commits of a checkpoint that it has published, for all subtasks: see ``Sinks.due``."""
        return self._sinks.due(checkpoint_id)

    @property
    def in_doubt(self) -> bool:
        """It is not known whether the last entry is durable: only a new attempt may go on."""
        return self.log.in_doubt

    def end(self, outcome: Outcome, reason: str, checkpoint_id: int, *, warn: Callable[[str], None]) -> None:
        """Say in the log how the job ended.

        No row depends on it: what counts is the final checkpoint, and that is in the log before.  So a log that cannot
        be written is a warning only, and a fenced driver says nothing: the job is another one's.
        """
        sweep_copies(self._config)
        log = self.log
        if not log.attempt or log.state.outcome:  # none was begun: the log tells of an earlier driver
            return
        now = wall_clock_ms()
        try:
            if outcome is Outcome.FINISHED:
                log.append(JobFinished(log.attempt, checkpoint_id, now))
                gone = [*self._sinks.finish(log.attempt), *self._sources.finish(log.attempt)]
                for warning in [*gone, *self._claim.collect((), needed=0)]:
                    warn(warning)
            else:
                log.append(JobEnded(log.attempt, outcome.value, first_line(reason), now))
            for warning in [*self.collect(ended=True), *self._sources.close()]:
                warn(warning)
        except FencedError:
            pass
        except Exception as e:  # whatever it is, the job has ended
            warn(f"the job log does not say that the job ended ({outcome.value}): {e}")

    def collect(self, *, ended: bool = False) -> list[str]:
        """Remove checkpoints beyond the retained ones, and what only they needed; returns warnings.

        Does so once a second, however often it is called, less often where looking costs something, and when the job
        has ended.

        Raises:
            FencedError: another driver owns the job.
        """
        now_s = time.monotonic()
        next_s = self._collected_s + max(_COLLECT_EVERY_S, 10 * self._store.look_s)
        if self._retention is None or self.log.in_doubt or not (ended or now_s >= next_s):
            return []
        self._collected_s = now_s
        retained = [entry.checkpoint_id for entry in self.log.state.completed]
        claimed = self._claim.collect(retained, needed=self._config.num_retained)
        told = self._sources.retain(retained)
        return self._retention.collect(ended=ended) + self._sinks.collect(retained) + told + claimed

    def sweep(self) -> None:
        """Remove the staged output of a finished job: its driver may have died before it could; tell sources."""
        self.warnings += self._sinks.finish(self.log.state.attempt)
        if (newest := next(self._retained(None), None)) is not None:
            self._sources.published(newest)
        self.warnings += self._sources.finish(self.log.state.attempt)

    def close(self) -> None:
        """The driver ends."""
        self._sources.close()
