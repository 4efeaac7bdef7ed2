"""The coordinator of a dataflow: its checkpoints, splits, sinks, rescales and cutovers, in its driver's thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from cutwater.config import JobConfig
from cutwater.connectors.base import Split
from cutwater.errors import CutwaterError, FencedError, InvariantError, NondeterminismError
from cutwater.plan.graph import PhysicalPlan
from cutwater.plan.regions import recovery_division, subtasks_of, widened
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.job import messages as j
from cutwater.protocol.job import rescale as r
from cutwater.protocol.reasons import CheckpointKind, FailureReason
from cutwater.runtime.control import messages as c
from cutwater.runtime.control import reports as cr
from cutwater.runtime.control.links import WorkerLink
from cutwater.runtime.control.read_limit import Limits
from cutwater.runtime.driver.checkpointing import Checkpointing, now_ms
from cutwater.runtime.driver.cutover import Cutover
from cutwater.runtime.driver.deploying import Deploying, held_by
from cutwater.runtime.driver.driver import Driver, Duties, MakeHost
from cutwater.runtime.driver.finished import finished_text
from cutwater.runtime.driver.publisher import Publisher
from cutwater.runtime.driver.rescaling import Rescaling
from cutwater.runtime.driver.splits import Splits
from cutwater.runtime.driver.user_calls import UserCalls
from cutwater.runtime.status.board import StatusBoard
from cutwater.runtime.worker.worker import WorkerArgs
from cutwater.storage.reading.recovery import Restorable
from cutwater.storage.store.base import Store

if TYPE_CHECKING:
    from cutwater.runtime.worker.tracing import DriverTrace

_DEPLOYED = frozenset({j.JobPhase.DEPLOYING, j.JobPhase.RUNNING})


class Coordinator(Duties):
    """Runs one job to its end.

    Args:
        plan: the physical plan; sources are staged and sinks bound already.
        config: settings.
        publisher: storage; its log has been read.
        host: makes a ``SparkHost`` from the callback for a slot's Spark job that ended.
        store: the checkpoint directory.
        splits: per read step, the splits discovered before the start.
    """

    def __init__(
        self,
        plan: PhysicalPlan,
        config: JobConfig,
        publisher: Publisher,
        host: MakeHost,
        *,
        store: Store,
        splits: dict[str, list[Split]],
    ) -> None:
        self.plan, self.publisher, self.config = plan, publisher, config
        self.board = StatusBoard(plan, config, publisher)
        self._store = store
        self._splits = Splits(plan, splits)
        self._rescaling = Rescaling(plan, publisher.parallelism, config, self)
        self.checkpoints: Checkpointing | None = None
        self._committing: set[tuple[int, int]] = set()
        """Slots and regions whose sinks have not committed the final checkpoint yet."""
        self._final_id = 0
        self._trace = _open_trace(config, plan, publisher)
        self._handing_over = Cutover(publisher, self)
        self._division = recovery_division(plan, config.recovery)
        self.driver = Driver(
            self,
            publisher.job,
            plan.parallelism,
            config,
            host,
            self.board,
            subtasks=subtasks_of(plan),
            attempt=publisher.log.state.attempt,
            division=self._division,
        )
        self._machine, self._group = self.driver.machine, self.driver.group
        self._deploying = Deploying(publisher, self._splits, self._machine, config, self.driver.secret)
        self.calls = UserCalls(self.driver, publisher, self._rescaling, self._handing_over, self)
        self._machine.fewest = self._rescaling.core.fewest

    # ------------------------------------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Begin; a job that finished in an earlier run is at its end at once (A7)."""
        if (state := self.publisher.log.state).finished:
            self.publisher.sweep()
            self.board.warn(finished_text(self.plan, self._store, state, self.publisher.upgrade.step_ids))
            self.board.ended(j.Outcome.FINISHED.value, "it had finished in an earlier run")
            self.driver.end_unstarted()
        else:
            self.driver.start()

    # -------------------------------------------------------------------------------------------------- the events

    def message(self, link: WorkerLink, message: c.FromWorker) -> None:
        match message:
            case cr.Metrics():
                self.board.metrics(link.slot, message)
            case cr.Ack():
                region = self._machine.regions[message.region]
                held = sorted(subtask for subtask in region if subtask[1] == link.slot)
                self._deploying.hear(message.news)  # first: a verdict rests on it
                self._checkpointing.acknowledged(held, message)
            case cr.SourceTime():
                for slot, told in self._splits.reported(message):
                    if (reader := self._group.links.get(slot)) is not None:
                        reader.send(msgspec.structs.replace(told, attempt=self._machine.attempt))
            case cr.ProbeWanted():
                self._checkpointing.probe_wanted(message)
            case cr.CaughtUp(region=region):
                if self._deploying.caught_up((link.slot, region)) and not self._machine.down:
                    self.resumed()
            case cr.Decline():
                self._checkpointing.declined(message)
            case cr.Finished(attempt=attempt, vertex=vertex, subtask=subtask):
                self.driver.handle(j.SubtaskFinished(attempt, (vertex, subtask), now_ms()))
            case cr.Committed(checkpoint_id=checkpoint_id, region=region):
                self._committed((link.slot, region), checkpoint_id)
            case cr.Log(level=cr.CONSOLE, message=text):
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()
            case cr.Log(level=level, message=text):
                self.board.worker_said(link.slot, level, text)
            case _:
                pass  # hello, sign of life; parts of global snapshots belong to networks

    def _committed(self, part: tuple[int, int], checkpoint_id: int) -> None:
        self._handing_over.committed(part, checkpoint_id)
        if checkpoint_id == self._final_id:
            self._committing.discard(part)
            if not self._committing:
                self.driver.handle(j.FinalCommitted(self._machine.attempt, now_ms()))

    def _new_splits(self, step: str, splits: list[Split], no_more: bool) -> None:
        for subtask, fresh in self._splits.found(step, splits, no_more):
            if (fresh or no_more) and self._machine.phase in _DEPLOYED:
                link = self._group.links.get(subtask)  # a worker that comes back is told of its splits when it begins
                if link is not None:
                    link.send(c.AssignSplits(self._machine.attempt, step, fresh, no_more))

    def failing(self, failure: cr.Failure) -> bool:
        self.publisher.failed(failure.kind)
        self.board.failed(failure)
        alone = failure.kind != NondeterminismError.__name__  # which a part would end in again and again
        if not alone:
            self.board.warn(f"everything goes back, because a part of it cannot alone: {failure.message}")
        return alone

    def due_ms(self) -> float | None:
        checkpoint_ms = self.checkpoints.next_due_ms if self.checkpoints else None
        dues = [checkpoint_ms, self._rescaling.next_due_ms, self._deploying.due_ms]
        return min((due for due in dues if due is not None), default=None)

    def on_time(self) -> None:
        self._rescaling.on_time(frozenset(self._group.links))
        if late := self._deploying.overdue(now_ms()):
            self.driver.fail(
                "JobFailedError", late, hint="Checkpoints at shorter intervals leave less to catch up with."
            )
        due = self.checkpoints.next_due_ms if self.checkpoints else None
        runs = self._machine.phase in (j.JobPhase.RUNNING, j.JobPhase.DRAINING) and not self._machine.down
        if due is not None and now_ms() >= due and runs:
            self._checkpointing.on_time()

    def stepped(self) -> None:
        self.board.phase(self._machine, self._deploying.awaited)

    # ---------------------------------------------------------------------------------------------------- rescale

    @property
    def cores(self) -> frozenset[int]:
        return self._group.cores

    @property
    def waits(self) -> bool:
        return self._machine.waits

    def recruit(self, workers: int) -> None:
        self._group.recruit(workers)

    def dismiss(self) -> None:
        for lost in self._group.resize(self._group.slots, "the job goes on without it"):
            self.driver.handle(lost)

    def snapshot(self, done: Callable[[cm.RequestAnswered], None]) -> None:
        if self.checkpoints is None:
            done(cm.RequestAnswered(done, None, FailureReason.JOB_NOT_RUNNING))
        else:
            self.checkpoints.request(lambda answer: self.driver.later(lambda: done(answer)))

    def switch(self, plan: PhysicalPlan, parallelism: int, reason: str) -> None:
        if self.checkpoints is not None:
            self.checkpoints.stopped(reason)
            self.checkpoints.reshape(plan)
        self._group.broadcast(c.Reset(self._machine.attempt))
        self._group.resize(plan.parallelism, reason)
        self.plan = self.publisher.plan = self._splits.plan = plan
        self.publisher.parallelism, self.publisher.wanted = parallelism, self._rescaling.core.wanted.parallelism
        self.board.rescaled(plan, reason)
        divided = self._division = recovery_division(plan, self.config.recovery)
        fewest, subtasks = self._rescaling.core.fewest, subtasks_of(plan)
        self.driver.handle(j.Reshape(plan.parallelism, subtasks, fewest, now_ms(), divided.regions, divided.upstream))

    def note(self, text: str) -> None:
        self.board.warn(text)

    # ----------------------------------------------------------------------------------------------------- forks

    @property
    def running_attempt(self) -> int:
        running = self._machine.phase is j.JobPhase.RUNNING and not self._machine.down
        return self._machine.attempt if running else 0

    def later(self, function: Callable[[], None]) -> None:
        self.driver.later(function)

    def read_up_to(self, limits: Limits) -> None:
        self._group.broadcast(c.ReadUpTo(self._machine.attempt, limits))

    def retire(self, reason: str) -> None:
        self.driver.handle(j.EndRequested(j.Outcome.STOPPED, reason, now_ms()))

    # ----------------------------------------------------------------------------------------- effects of the job

    def launched(self) -> None:
        if note := widened(self.plan, self.config.recovery):
            self.board.warn(note)
        self._handing_over.start()
        self._splits.start_discovery(
            lambda step, splits, ended: self.driver.later(lambda: self._new_splits(step, splits, ended)),
            lambda step, e: self.driver.later(lambda: self.driver.fail(type(e).__name__, str(e), step=step)),
        )

    def running(self) -> None:
        self.board.running()
        self._checkpointing.running(self._machine.attempt)
        self._rescaling.handle(r.AttemptRuns(now_ms()))
        self._machine.fewest = self._rescaling.core.fewest

    def _tell_restart(self, reason: str) -> None:
        restart = self._machine.restart
        self.board.restarting(reason, *self.driver.failures.budget(reason, restart.budget), restart.latest.delay_ms)

    def stopped(self, reason: str) -> None:
        self._tell_restart(reason)
        self._deploying.behind.clear()
        if self.checkpoints is not None:
            self.checkpoints.stopped(reason)
        self._handing_over.stopped(reason)
        self._rescaling.handle(r.AttemptFailed(reason, now_ms()))

    def short(self, workers: int, reason: str) -> None:
        self._rescaling.handle(r.Short(workers, reason, now_ms()))

    def take_final(self) -> None:
        self._checkpointing.handle(cm.RequestFinal(now_ms()))

    def shutting_down(self, reason: str) -> None:
        self._deploying.behind.clear()
        if self.checkpoints is not None:
            self.checkpoints.stopped(reason)
        self._splits.stop()

    def end(self, outcome: j.Outcome, reason: str) -> None:
        self.publisher.end(outcome, reason, self._final_id, warn=self.board.warn)
        self.board.ended(outcome.value, reason)

    def crashed(self, error: CutwaterError) -> None:
        self.publisher.end(j.Outcome.FAILED, str(error), 0, warn=self.board.warn)
        self.board.ended(j.Outcome.FAILED.value, str(error))

    def closing(self) -> None:
        self._splits.stop()
        self._handing_over.close()
        if self._trace is not None:
            self._trace.close()

    def deploy(self, attempt: int) -> None:
        try:
            self.publisher.begin_attempt(attempt)
            restorable = self.publisher.choose(held_by(self._group.links.values()))
            manifest = restorable.manifest if restorable else None
            self.publisher.settle_sinks(manifest)
            if self.checkpoints is None:
                self.checkpoints = self._make_checkpointing()
            self.board.restored(manifest)
            if manifest is not None and manifest.final and not self.publisher.foreign:  # nothing is left to do (A7)
                self._final_id = manifest.checkpoint_id
                self.driver.handle(j.FinalCommitted(attempt, now_ms()))
            else:
                self._deploy_from(attempt, restorable)
        except FencedError:
            raise
        except CutwaterError as e:
            self.driver.fail(type(e).__name__, e.message, step=e.step or "", retryable=False, hint=e.hint)
        except Exception as e:
            self.driver.fail("StorageError", f"{type(e).__name__}: {e}")

    def _deploy_from(self, attempt: int, restorable: Restorable | None) -> None:
        if self._trace is not None and restorable is not None and not self.publisher.foreign:
            self._trace.restoring(restorable.completed.checkpoint_id, attempt)
        assigned = self._splits.assign(restorable.manifest if restorable else None)
        splits = {(step, slot): found for step, deal in assigned.items() for slot, found in enumerate(deal)}
        self._send_deploy(attempt, restorable, range(len(self._machine.regions)), splits)

    # ---------------------------------------------------------------------------------------------------- regions

    def stop_regions(self, regions: tuple[int, ...], reason: str) -> None:
        if self._checkpointing.final_under_way:  # the others may have passed it, and read no more
            self.driver.handle(j.Widened(self._machine.attempt, reason, now_ms()))
            return
        why = f"{reason} ({self._deploying.stopped(regions)} go back)"
        self._tell_restart(why)
        self._checkpointing.suspended(reason)
        self._handing_over.stopped(reason)
        self._rescaling.handle(r.AttemptFailed(reason, now_ms()))
        self._group.broadcast(c.Reset(self._machine.attempt, list(regions)))

    def begin_regions(self, attempt: int, regions: tuple[int, ...]) -> None:
        subtasks = frozenset[tuple[int, int]]().union(*(self._machine.regions[region] for region in regions))
        try:
            restorable = self.publisher.restore_subtasks(attempt, subtasks, held_by(self._group.links.values()))
            manifest = restorable.manifest if restorable else None
            self.board.regions_restored(manifest, set(regions))
            self._send_deploy(attempt, restorable, regions, self._splits.again(manifest, subtasks))
        except FencedError:
            raise
        except Exception as e:
            self.board.warn(f"the whole job goes back, because a part of it cannot alone: {e}")
            self.driver.handle(j.Widened(attempt, str(e), now_ms()))

    def _send_deploy(
        self,
        attempt: int,
        restorable: Restorable | None,
        regions: Iterable[int],
        splits: dict[tuple[str, int], list[c.SplitAssignment]],
    ) -> None:
        links = [self._group.links[slot] for slot in range(self.plan.parallelism)]
        last_id, limits = self._checkpointing.last_id, self._handing_over.limits
        for link, message in self._deploying.messages(attempt, restorable, regions, links, splits, last_id, limits):
            link.send(message)

    def resumed(self) -> None:
        if self._deploying.behind:
            return
        self.board.running()
        self._checkpointing.resumed(self._machine.attempt)
        self._rescaling.handle(r.AttemptRuns(now_ms()))
        self._machine.fewest = self._rescaling.core.fewest

    # ------------------------------------------------------------------------------------------------------ parts

    @property
    def _checkpointing(self) -> Checkpointing:
        if self.checkpoints is None:
            raise InvariantError("a checkpoint before the first attempt")
        return self.checkpoints

    def _make_checkpointing(self) -> Checkpointing:
        return Checkpointing(
            self.config,
            self.plan,
            self.publisher,
            self.board,
            broadcast=self._group.broadcast,
            completed=self._checkpoint_completed,
            failed=lambda e: self.driver.fail(type(e).__name__, e.message, step=e.step or "", hint=e.hint),
            trace=self._trace,
        )

    def _checkpoint_completed(self, checkpoint_id: int, kind: CheckpointKind) -> None:
        if kind is CheckpointKind.FINAL:
            self._final_id, self._committing = checkpoint_id, set(self._machine.parts)
        self.driver.failures.progressed()
        self.driver.handle(j.CheckpointCompleted(self._machine.attempt, now_ms()))
        self._handing_over.completed(checkpoint_id, self._machine.parts if kind.final else ())
        self._deploying.completed(checkpoint_id)

    def worker_args(self, slot: int) -> WorkerArgs:
        return WorkerArgs(
            slot=slot,
            address=self.driver.address,
            secret=self.driver.secret,
            job=self.publisher.job,
            uid=self.publisher.uid,
            plan=self.plan,
            parallelism=self.publisher.parallelism,
            division=self._division,
            config=self.config,
            store=self._store,
            shadow_dir=self.publisher.forks.shadow_dir,
        )


def _open_trace(config: JobConfig, plan: PhysicalPlan, publisher: Publisher) -> DriverTrace | None:
    if config.trace_dir is None:
        return None
    from cutwater.runtime.worker.tracing import DriverTrace

    return DriverTrace(
        config.trace_dir, plan, publisher.uid, known=[e.checkpoint_id for e in publisher.log.state.completed]
    )
