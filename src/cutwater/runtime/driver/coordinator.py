"""The coordinator of a dataflow: its checkpoints, splits, sinks, rescales and cutovers, in its driver's thread."""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cutwater.config import JobConfig
from cutwater.connectors.base import Split
from cutwater.errors import BuildError, ConfigError, CutwaterError, FencedError, NondeterminismError
from cutwater.plan.graph import PhysicalPlan
from cutwater.plan.planner import replan
from cutwater.plan.recovery import recovery_division, topology_of, widened
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.job import messages as j
from cutwater.protocol.job import rescale as r
from cutwater.protocol.job.hosts import Topology
from cutwater.protocol.job.recovery_scope import Subtask
from cutwater.protocol.protocols import CheckpointKind
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.links import WorkerLink, now_ms
from cutwater.runtime.driver.checkpointing import Checkpointing
from cutwater.runtime.driver.deploying import Deploying, held_by, passes_rows
from cutwater.runtime.driver.driver import Driver, Duties, MakeHost
from cutwater.runtime.driver.forks import Cutover, CutoverOrder, Successor
from cutwater.runtime.driver.global_commits import GlobalCommits
from cutwater.runtime.driver.preparing import finished_text
from cutwater.runtime.driver.publisher import Publisher
from cutwater.runtime.driver.savepoints import SavepointKind, SavepointRequest
from cutwater.runtime.driver.splits import Splits
from cutwater.runtime.status.board import StatusBoard
from cutwater.runtime.worker.worker import WorkerArgs
from cutwater.storage.reading import Restorable
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
        self._final_id = 0
        self._trace = _open_trace(config, plan, publisher)
        self._division = recovery_division(plan, config.recovery)
        self._commits = GlobalCommits(lambda error: self.driver.later(lambda: self._commit_failed(error)))
        self.checkpoints = Checkpointing(
            config,
            publisher,
            self.board,
            driver=lambda: self.driver,
            completed=self._checkpoint_completed,
            committed=self._output_committed,
            commits=self._commits,
            trace=self._trace,
        )
        self._handing_over = Cutover(publisher, lambda: self.driver, self.checkpoints)
        self.driver = Driver(
            self,
            publisher.job,
            config,
            host,
            self.board,
            topology=topology_of(plan, self._division),
            rescaler=rescaler_of(plan, publisher.parallelism, config),
            checkpoints=self.checkpoints,
            attempt=publisher.log.state.attempt,
            catch_up_ms=config.catch_up_timeout_ms if passes_rows(config.recovery) else None,
        )
        self._machine, self._group = self.driver.machine, self.driver.group
        self._deploying = Deploying(publisher, self._splits, self._machine, config, self.driver.secret)
        self.calls = UserCalls(self.driver, publisher, self.checkpoints, self._handing_over)

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
            case c.Metrics():
                self.board.metrics(link.slot, message)
            case c.Ack():
                held = self._held(link.slot, message.region)
                self._deploying.hear(message.news)  # first: a verdict rests on it
                self.checkpoints.hear_ack(held, message)
            case c.SourceTime():
                for slot, told in self._splits.reported(message):
                    if (reader := self._group.links.get(slot)) is not None:
                        reader.send(msgspec.structs.replace(told, attempt=self._machine.attempt))
            case c.ProbeWanted():
                self.driver.core.probe_wanted((message.vertex, message.subtask), now_ms())
            case c.CaughtUp(region=region):
                self.driver.core.caught_up(self._held(link.slot, region), now_ms())
            case c.Decline():
                self.checkpoints.hear_decline(message)
            case c.Finished(attempt=attempt, vertex=vertex, subtask=subtask):
                self.driver.handle(j.SubtaskFinished(attempt, (vertex, subtask), now_ms()))
            case c.Committed(checkpoint_id=checkpoint_id, region=region):
                self.driver.core.committed([(link.slot, region)], checkpoint_id, now_ms())
            case c.Log(level=c.CONSOLE, message=text):
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()
            case c.Log(level=level, message=text):
                self.board.worker_said(link.slot, level, text)
            case _:
                pass  # hello, sign of life; parts of global snapshots belong to networks

    def _held(self, slot: int, region: int) -> list[Subtask]:
        """The subtasks of a region in a worker."""
        return sorted(subtask for subtask in self._machine.regions[region] if subtask[1] == slot)

    def _new_splits(self, step: str, splits: list[Split], no_more: bool) -> None:
        for subtask, fresh in self._splits.found(step, splits, no_more):
            if (fresh or no_more) and self._machine.phase in _DEPLOYED:
                link = self._group.links.get(subtask)  # a worker that comes back is told of its splits when it begins
                if link is not None:
                    link.send(c.AssignSplits(self._machine.attempt, step, fresh, no_more))

    def failing(self, failure: c.Failure) -> bool:
        self.publisher.failed(failure.kind)
        self.board.failed(failure)
        alone = failure.kind != NondeterminismError.__name__  # which a part would end in again and again
        if not alone:
            self.board.warn(f"everything goes back, because a part of it cannot alone: {failure.message}")
        return alone

    def stepped(self) -> None:
        self.board.phase(self._machine, self.driver.core.awaited)

    # ---------------------------------------------------------------------------------------------------- rescale

    def switch(self, shape: r.Shape, reason: str) -> Topology:
        rescales = shape.parallelism != self.publisher.parallelism
        plan = replan(self.plan, shape.parallelism) if rescales else self.plan
        self.plan = self.publisher.plan = self._splits.plan = plan
        self.publisher.parallelism = shape.parallelism
        self.publisher.wanted = self.driver.core.rescaler.wanted.parallelism
        self.board.rescaled(plan, reason)
        self._division = recovery_division(plan, self.config.recovery)
        return topology_of(plan, self._division)

    def note(self, text: str) -> None:
        self.board.warn(text)

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

    def going_back(self, reason: str, regions: tuple[int, ...] | None) -> None:
        why = reason if regions is None else f"{reason} ({self._deploying.going_back(regions)} go back)"
        restart = self._machine.restart
        self.board.restarting(why, *self.driver.failures.budget(why, restart.budget), restart.latest.delay_ms)
        self._handing_over.stopped(reason)

    def shutting_down(self, reason: str) -> None:
        self._commits.close()
        self._splits.stop()

    def end(self, outcome: j.Outcome, reason: str) -> None:
        self.publisher.end(outcome, reason, self._final_id, warn=self.board.warn)
        self.board.ended(outcome.value, reason)

    def crashed(self, error: CutwaterError) -> None:
        self.publisher.end(j.Outcome.FAILED, str(error), 0, warn=self.board.warn)
        self.board.ended(j.Outcome.FAILED.value, str(error))

    def closing(self) -> None:
        self._commits.close(perform=False)
        self._splits.stop()
        self.publisher.close()
        self._handing_over.close()
        if self._trace is not None:
            self._trace.close()

    def deploy(self, attempt: int, regions: tuple[int, ...] | None) -> None:
        if regions is None:
            self._begin_everything(attempt)
        else:
            self._begin_regions(attempt, regions)

    def _commit_failed(self, error: CutwaterError) -> None:
        if isinstance(error, FencedError):
            raise error
        self.driver.fail(type(error).__name__, error.message, step=error.step or "", hint=error.hint)

    def _begin_everything(self, attempt: int) -> None:
        try:
            self._commits.halt()
            self.publisher.begin_attempt(attempt)
            restorable = self.publisher.choose(held_by(self._group.links.values()))
            manifest = restorable.manifest if restorable else None
            self.publisher.settle_sinks(manifest)
            self.driver.core.log_taken(self.publisher.next_checkpoint_id() - 1)
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

    def _begin_regions(self, attempt: int, regions: tuple[int, ...]) -> None:
        subtasks = frozenset[tuple[int, int]]().union(*(self._machine.regions[region] for region in regions))
        try:
            self._commits.halt()
            restorable = self.publisher.restore_subtasks(attempt, subtasks, held_by(self._group.links.values()))
            manifest = restorable.manifest if restorable else None
            if manifest is not None:  # sinks that run on may have waited for it
                newest = manifest.checkpoint_id
                self.checkpoints.commit_globally(newest, self.publisher.global_commits(newest))
            self.board.restored(manifest, set(regions))
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
        last_id, limits = self.driver.core.last_id, self._handing_over.limits
        for link, message in self._deploying.messages(attempt, restorable, regions, links, splits, last_id, limits):
            link.send(message)

    def _checkpoint_completed(self, checkpoint_id: int, kind: CheckpointKind) -> None:
        if not kind.commits:
            return
        if kind is CheckpointKind.FINAL:
            self._final_id = checkpoint_id
        self.driver.failures.progressed()
        self._handing_over.look()
        self._deploying.completed(checkpoint_id)

    def _output_committed(self) -> None:
        self._handing_over.committed()

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


def rescaler_of(plan: PhysicalPlan, parallelism: int, config: JobConfig) -> r.Rescaler:
    """The machine that decides over the parallelism of a job.

    Args:
        plan: what the job begins with.
        parallelism: of steps that name none, there.
    """
    least = min(config.min_parallelism, parallelism)
    return r.Rescaler(
        r.Shape(parallelism, plan.parallelism),
        deadline_ms=config.rescale_timeout_ms,
        least=_shape(plan, least) if config.scheduler == "adaptive" else None,
        stable_ms=config.resource_stabilization_timeout_ms,
        shape_of=lambda workers: _widest(plan, workers),
    )


def asked_shape(plan: PhysicalPlan, parallelism: int, config: JobConfig) -> r.Shape:
    """The shape that a user asks for.

    Raises:
        BuildError: a step wants more subtasks than there are key groups.
        ConfigError: the job cannot be rescaled, or not to that.
    """
    if config.protocol == "none":
        raise ConfigError("protocol 'none' keeps no checkpoint to rescale from")
    if config.trace_dir is not None:
        raise ConfigError("a trace tells of one parallelism, and the job has a trace_dir")
    if parallelism < 1:
        raise ConfigError(f"parallelism must be at least 1, got {parallelism}")
    return _shape(plan, parallelism)


def _widest(plan: PhysicalPlan, workers: int) -> r.Shape:
    """The widest shape that so many workers suffice for; 1 where even that needs more."""
    for parallelism in range(min(workers, plan.max_parallelism), 0, -1):
        shape = _shape(plan, parallelism)
        if shape.workers <= workers:
            return shape
    return _shape(plan, 1)


def _shape(plan: PhysicalPlan, parallelism: int) -> r.Shape:
    return r.Shape(parallelism, replan(plan, parallelism).parallelism)


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
