"""The coordinator: performs, in the driver, what the job machine decides.

One thread owns all state.  Workers' connections, Spark's threads and the user's calls only put functions into its
queue, and it runs one after the other; so nothing here needs a lock.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable
from random import Random
from typing import cast

from cutwater.config import JobConfig
from cutwater.connectors.base import Split
from cutwater.dataflow.graph import PhysicalPlan
from cutwater.errors import CutwaterError, FencedError, InvariantError
from cutwater.protocol import job_messages as j
from cutwater.protocol import messages as m
from cutwater.protocol.job import JobMachine
from cutwater.protocol.reasons import FailureReason
from cutwater.protocol.restart import RestartDecider
from cutwater.runtime import control as c
from cutwater.runtime.auth import new_secret
from cutwater.runtime.checkpointing import Checkpointing, now_ms
from cutwater.runtime.control_server import ControlServer, WorkerLink
from cutwater.runtime.failures import FailureLedger, internal_error
from cutwater.runtime.group import Group
from cutwater.runtime.publisher import Publisher
from cutwater.runtime.spark_host import SparkHost
from cutwater.runtime.splits import Splits
from cutwater.runtime.status_board import StatusBoard
from cutwater.runtime.worker import WorkerArgs
from cutwater.storage.base import Store
from cutwater.storage.recovery import Restorable

__all__ = ["Coordinator"]

_DEPLOYED = frozenset({j.JobPhase.DEPLOYING, j.JobPhase.RUNNING})
_ATTEMPT = _DEPLOYED | {j.JobPhase.DRAINING}
_PATIENCE_S = 0.5
"""So long a lost connection between workers waits for the report of the worker that caused it."""
_POLL_MS = 400.0
"""How often Spark is asked for running tasks while the group forms."""


class Coordinator:
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
        host: Callable[[Callable[[int, BaseException | None], None]], SparkHost],
        *,
        store: Store,
        splits: dict[str, list[Split]],
    ) -> None:
        self.plan, self.config, self.publisher = plan, config, publisher
        self.board = StatusBoard(plan, config, publisher)
        self.error: CutwaterError | None = None
        self.ended = threading.Event()
        self._store = store
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._splits = Splits(plan, splits)
        self._secret = new_secret()
        self._failures = FailureLedger()
        self._checkpoints: Checkpointing | None = None
        self._committing: set[int] = set()
        self._final_id = 0
        self._polled_ms = 0.0
        self._machine = JobMachine(
            plan.parallelism,
            frozenset((v.index, i) for v in plan.vertices for i in range(v.parallelism)),
            RestartDecider(config.restart, Random(secrets.randbits(64))),
            config.group_deadline_ms,
            now_ms=now_ms(),
            attempt=publisher.log.state.attempt,
        )
        spark = host(lambda slot, error: self._later(lambda: self._slot_ended(slot, error)))
        self._group = Group(plan.parallelism, spark, self.board, self._worker_args, self._after)
        self._server = ControlServer(
            spark.address,
            self._secret,
            publisher.job,
            joined=lambda link, hello: self._later(lambda: self._job(self._group.joined(link, hello))),
            received=lambda link, message: self._later(lambda: self._received(link, message)),
            lost=lambda link, reason: self._later(lambda: self._job(self._group.lost(link, reason))),
        )
        self._thread = threading.Thread(target=self._run, name=f"cutwater-{plan.name}", daemon=True)

    # ------------------------------------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Begin; a job that finished in an earlier run is at its end at once (A7)."""
        if self.publisher.log.state.finished:
            self.publisher.sweep()
            self.board.warn(f"job {self.plan.name!r} had finished already: nothing was run")
            self.board.ended(j.Outcome.FINISHED.value, "it had finished in an earlier run")
            self._server.close()
            self.ended.set()
            return
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has cleaned up."""
        if self._thread.ident is not None:
            self._thread.join()

    def request_end(self, outcome: j.Outcome, reason: str) -> None:
        """Cancel or stop the job; wait for ``ended`` afterwards."""
        self._later(lambda: self._job(j.EndRequested(outcome, reason, now_ms())))

    def request_checkpoint(self) -> int:
        """Take a checkpoint now and wait for it; returns its id.

        Raises:
            CutwaterError: it failed, with the reason.
        """
        done: queue.SimpleQueue[m.RequestAnswered] = queue.SimpleQueue()
        self._later(lambda: self._request_checkpoint(done))
        answer: m.RequestAnswered | None = None
        while answer is None:
            try:
                answer = done.get(timeout=0.2)
            except queue.Empty:
                if self.ended.is_set():
                    raise CutwaterError("the job ended before the checkpoint was taken") from None
        if answer.reason is not None or answer.checkpoint_id is None:
            why = answer.reason.message if answer.reason else "nothing was taken"
            raise CutwaterError(f"the checkpoint failed: {why} {answer.detail}".rstrip())
        return answer.checkpoint_id

    def _later(self, function: Callable[[], None]) -> None:
        self._calls.put(function)

    def _after(self, delay_s: float, function: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, lambda: self._later(function))
        timer.daemon = True
        timer.start()

    # ---------------------------------------------------------------------------------------------------- the loop

    def _run(self) -> None:
        try:
            self._server.start()
            self._group.launch_all()
            self._splits.start_discovery(
                lambda step, splits, ended: self._later(lambda: self._new_splits(step, splits, ended)),
                lambda step, e: self._later(lambda: self._fail(type(e).__name__, str(e), step=step)),
            )
            while not self.ended.is_set():
                self._step()
        except BaseException as e:
            self.error = e if isinstance(e, CutwaterError) else internal_error(e)
            self._group.abandon()
            self.publisher.end(j.Outcome.FAILED, str(self.error), 0, warn=self.board.warn)
            self.board.ended(j.Outcome.FAILED.value, str(self.error))
        finally:
            self._splits.stop()
            self._server.close()
            self._group.close()
            self.ended.set()

    def _step(self) -> None:
        dues = [self._machine.next_due_ms, self._checkpoints.next_due_ms if self._checkpoints else None]
        due = min((d for d in dues if d is not None), default=now_ms() + 500.0)
        try:
            function = self._calls.get(timeout=max(0.0, min(due - now_ms(), 300.0)) / 1000)
        except queue.Empty:
            function = None
        try:
            if function is not None:
                function()
            self._on_time()
        except FencedError as e:
            self._failures.error = e
            self._job(j.EndRequested(j.Outcome.FAILED, str(e), now_ms()))
        self.board.phase(self._machine)

    def _on_time(self) -> None:
        now, phase = now_ms(), self._machine.phase
        if phase is j.JobPhase.FORMING and now - self._polled_ms > _POLL_MS:
            self._polled_ms = now
            self._job(self._group.progress())
        self._job(j.Tick(now))
        if self._checkpoints is not None and phase in (j.JobPhase.RUNNING, j.JobPhase.DRAINING):
            due = self._checkpoints.next_due_ms
            if due is not None and now >= due:
                self._checkpoints.on_time()
        for link in self._group.silent(self.config.heartbeat_timeout_ms):
            silence = f"it was silent for {self.config.heartbeat_timeout_ms / 1000:.0f} s"
            self._job(self._group.lost(link, silence))

    # -------------------------------------------------------------------------------------------------- the events

    def _received(self, link: WorkerLink, message: c.FromWorker) -> None:
        link.seen_ms = now_ms()
        attempt = getattr(message, "attempt", self._machine.attempt)
        if attempt != self._machine.attempt or not self._group.is_current(link):
            return
        match message:
            case c.Metrics():
                self.board.metrics(link.slot, message)
            case c.Ack():
                self._checkpointing.acknowledged(link.slot, message)
            case c.ProbeWanted():
                self._checkpointing.probe_wanted(message)
            case c.Decline():
                self._checkpointing.declined(message)
            case c.Ready():
                self._job(j.WorkerReady(link.slot, attempt, now_ms()))
            case c.Finished(vertex=vertex, subtask=subtask):
                self._job(j.SubtaskFinished(attempt, (vertex, subtask)))
            case c.Committed(checkpoint_id=checkpoint_id):
                self._committed(link.slot, checkpoint_id)
            case c.Failure():
                if message.secondary:
                    self._after(_PATIENCE_S, lambda: self._still_failed(message))
                else:
                    self._failed(message)
            case c.Log(level=level, message=text):
                self.board.log(f"worker {link.slot} {level}: {text}")
            case _:  # hello, sign of life; parts of global snapshots belong to networks
                pass

    def _committed(self, slot: int, checkpoint_id: int) -> None:
        if checkpoint_id == self._final_id:
            self._committing.discard(slot)
            if not self._committing:
                self._job(j.FinalCommitted(self._machine.attempt))

    def _slot_ended(self, slot: int, error: BaseException | None) -> None:
        hopeless = self._group.slot_ended(slot, error)
        if hopeless is not None:
            self._failures.note("ResourceError", hopeless, "", False)
            self._job(j.EndRequested(j.Outcome.FAILED, hopeless, now_ms()))

    def _new_splits(self, step: str, splits: list[Split], no_more: bool) -> None:
        for subtask, fresh in self._splits.found(step, splits, no_more):
            if (fresh or no_more) and self._machine.phase in _DEPLOYED:
                self._group.links[subtask].send(c.AssignSplits(self._machine.attempt, step, fresh, no_more))

    def _request_checkpoint(self, done: queue.SimpleQueue[m.RequestAnswered]) -> None:
        if self._checkpoints is None:
            done.put(m.RequestAnswered(done, None, FailureReason.JOB_NOT_RUNNING))
        else:
            self._checkpoints.request(done)

    def _failed(self, failure: c.Failure) -> None:
        self.board.failed(failure)
        text = f"{failure.message}\n{failure.traceback}" if failure.traceback else failure.message
        self._fail(failure.kind, text, step=failure.step, retryable=failure.retryable, hint=failure.hint)

    def _still_failed(self, failure: c.Failure) -> None:
        """A worker lost another one some time ago, and nobody has told a better reason since."""
        if failure.attempt == self._machine.attempt and self._machine.phase in _ATTEMPT:
            self._failed(failure)

    def _fail(self, kind: str, message: str, *, step: str = "", retryable: bool = True, hint: str = "") -> None:
        """The current attempt failed."""
        if self._failures.counts(kind, retryable, self._machine.phase):
            retryable = self._failures.note(kind, message, step, retryable, hint)
            self._job(j.TaskFailed(self._machine.attempt, str(self._failures.error), retryable, now_ms()))

    # ----------------------------------------------------------------------------------------- effects of the job

    def _job(self, event: j.Event | None) -> None:
        """Feed the job machine and perform what it asks for."""
        if event is None:
            return
        for effect in self._machine.handle(event):
            match effect:
                case j.BeginAttempt(attempt=attempt):
                    self._begin(attempt)
                case j.StartProcessing(attempt=attempt):
                    self._group.broadcast(c.Start(attempt))
                    self.board.running()
                    self._checkpointing.running(attempt)
                case j.StopAttempt(reason=reason):
                    self.board.restarting(reason)
                    if self._checkpoints is not None:
                        self._checkpoints.stopped(reason)
                    self._group.broadcast(c.Reset(self._machine.attempt))
                case j.TakeFinalCheckpoint():
                    self._checkpointing.handle(m.RequestFinal(now_ms()))
                case j.ShutDown(outcome=outcome, reason=reason):
                    if self._checkpoints is not None:
                        self._checkpoints.stopped(reason)
                    self._splits.stop()
                    timeout_s = self.config.cancel_timeout_ms / 1000
                    self._group.shut_down(
                        outcome.value, timeout_s, lambda: self._later(lambda: self._job(j.WorkersGone()))
                    )
                case j.Ended(outcome=outcome, reason=reason):
                    self._end(outcome, reason)

    def _begin(self, attempt: int) -> None:
        try:
            self.publisher.begin_attempt(attempt)
            restorable = self.publisher.choose()
            manifest = restorable.manifest if restorable else None
            self.publisher.settle_sinks(manifest)
            if self._checkpoints is None:
                self._checkpoints = self._make_checkpointing()
            self.board.restored(manifest)
            if manifest is not None and manifest.final and self.publisher.foreign is None:  # nothing is left to do (A7)
                self._final_id = manifest.checkpoint_id
                self._job(j.FinalCommitted(attempt))
            else:
                self._deploy(attempt, restorable)
        except FencedError:
            raise
        except CutwaterError as e:
            self._fail(type(e).__name__, e.message, step=e.step or "", retryable=False, hint=e.hint)
        except Exception as e:
            self._fail("StorageError", f"{type(e).__name__}: {e}")

    def _deploy(self, attempt: int, restorable: Restorable | None) -> None:
        assignments = self._splits.assign(restorable.manifest if restorable else None)
        links = [self._group.links[slot] for slot in range(self.plan.parallelism)]
        for slot, link in enumerate(links):
            link.send(
                c.Deploy(
                    attempt=attempt,
                    incarnations=[other.incarnation for other in links],
                    peers=[cast(c.Hello, other.hello).data_address for other in links],
                    restore=restorable.completed if restorable else None,
                    restore_foreign=self.publisher.foreign,
                    splits={step: a[slot] for step, a in assignments.items() if slot < len(a)},
                    rates=self._splits.rates(slot),
                    no_more_splits=self._splits.complete,
                    last_checkpoint_id=self._checkpointing.last_id,
                )
            )

    def _end(self, outcome: j.Outcome, reason: str) -> None:
        if outcome is j.Outcome.FAILED:
            self.error = self._failures.final(reason)
            reason = str(self.error)
        self.publisher.end(outcome, reason, self._final_id, warn=self.board.warn)
        self.board.ended(outcome.value, reason)
        self.ended.set()

    # ------------------------------------------------------------------------------------------------------ parts

    @property
    def _checkpointing(self) -> Checkpointing:
        if self._checkpoints is None:
            raise InvariantError("a checkpoint before the first attempt")
        return self._checkpoints

    def _make_checkpointing(self) -> Checkpointing:
        return Checkpointing(
            self.config,
            self.plan,
            self.publisher,
            self.board,
            broadcast=self._group.broadcast,
            completed=self._checkpoint_completed,
            failed=lambda reason: self._fail("StorageError", reason),
        )

    def _checkpoint_completed(self, checkpoint_id: int, final: bool) -> None:
        if final:
            self._final_id, self._committing = checkpoint_id, set(self._group.links)
        self._failures.progressed()
        self._job(j.CheckpointCompleted(self._machine.attempt, now_ms()))

    def _worker_args(self, slot: int) -> WorkerArgs:
        return WorkerArgs(
            slot=slot,
            address=self._server.address,
            secret=self._secret,
            job=self.publisher.job,
            uid=self.publisher.uid,
            plan=self.plan,
            config=self.config,
            store=self._store,
        )
