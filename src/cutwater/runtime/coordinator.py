"""The coordinator: performs, in the driver, what the job machine and the checkpoint coordinator decide.

One thread owns all state and takes one event after the other; workers' connections, Spark's threads and the user's
calls only put events into its queue.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from cutwater import errors
from cutwater.config import JobConfig
from cutwater.connectors.base import Source, Split
from cutwater.dataflow.graph import PhysicalPlan
from cutwater.errors import CutwaterError, FencedError, JobFailedError, ResourceError
from cutwater.protocol import job as j
from cutwater.protocol import messages as m
from cutwater.protocol.coordinator import CheckpointCoordinator
from cutwater.protocol.reasons import AckAnswer, CheckpointKind, FailureReason
from cutwater.protocol.restart import RestartDecider
from cutwater.runtime import control as c
from cutwater.runtime.auth import new_secret
from cutwater.runtime.control_server import ControlServer, WorkerLink
from cutwater.runtime.enumerator import Enumerator
from cutwater.runtime.publisher import Publisher
from cutwater.runtime.spark_host import SparkHost
from cutwater.runtime.status_board import StatusBoard
from cutwater.storage.manifest import Manifest, SplitRecord, SubtaskRecord
from cutwater.storage.recovery import Restorable

__all__ = ["Coordinator"]

_SAME_FAILURE_LIMIT = 3
"""The same error of the same step this often in a row, without a completed checkpoint in between, ends the job."""
_RELAUNCH_LIMIT = 8
"""A slot's Spark job may end this often in a row without its worker ever saying hello."""
_LIMITED = frozenset({"UserCodeError", "CorruptSnapshotError", "InvariantError"})
_NOT_RETRYABLE = frozenset(
    {"DataError", "BuildError", "ConfigError", "FencedError", "FormatVersionError", "ForeignDirectoryError"}
)


@dataclass(frozen=True, slots=True)
class _Joined:
    link: WorkerLink
    hello: c.Hello


@dataclass(frozen=True, slots=True)
class _Message:
    link: WorkerLink
    message: c.FromWorker


@dataclass(frozen=True, slots=True)
class _Lost:
    link: WorkerLink
    reason: str


@dataclass(frozen=True, slots=True)
class _SlotEnded:
    slot: int
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class _NewSplits:
    step: str
    splits: list[Split]


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[], None]


def now_ms() -> float:
    """The driver's monotonic clock."""
    return time.monotonic() * 1000


class Coordinator:
    """Runs one job to its end.

    Args:
        plan: the physical plan; sources are staged and sinks bound already.
        config: settings.
        publisher: storage; its log has been read.
        host: makes a ``SparkHost`` from the slot-ended callback.
        store_uri: where workers find the checkpoint directory.
        splits: per read step, the splits discovered before the start.
    """

    def __init__(
        self,
        plan: PhysicalPlan,
        config: JobConfig,
        publisher: Publisher,
        host: Callable[[Callable[[int, BaseException | None], None]], SparkHost],
        *,
        store_uri: str,
        splits: dict[str, list[Split]],
    ) -> None:
        self.plan, self.config, self.publisher = plan, config, publisher
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._host = host(lambda slot, error: self._events.put(_SlotEnded(slot, error)))
        self._store_uri = store_uri
        self._discovered = splits
        self._secret = new_secret()
        self._subtasks = frozenset((v.index, i) for v in plan.vertices for i in range(v.parallelism))
        self._sources = frozenset(
            (v.index, i) for v in plan.vertices if not plan.inputs(v.index) for i in range(v.parallelism)
        )
        restart = RestartDecider(config.restart, Random(secrets.randbits(64)))
        self.machine = j.JobMachine(
            plan.parallelism,
            self._subtasks,
            restart,
            config.group_deadline_ms,
            now_ms=now_ms(),
            attempt=publisher.log.state.attempt,
        )
        self._checkpoints: CheckpointCoordinator | None = None
        self._links: dict[int, WorkerLink] = {}
        self._incarnation = 0
        self._silent_ends = dict.fromkeys(range(plan.parallelism), 0)
        self._enumerators: dict[str, Enumerator] = {}
        self._triggered: dict[int, int] = {}
        self._committing: set[int] = set()
        self._final_id = 0
        self._same_failure: tuple[str, int] = ("", 0)
        self._polled_ms = 0.0
        self._discover_threads: list[threading.Thread] = []
        self.error: CutwaterError | None = None
        self.board = StatusBoard(plan, config, publisher)
        self.ended = threading.Event()
        self._stopping = threading.Event()
        self._server = ControlServer(
            self._host.address,
            self._secret,
            publisher.job,
            joined=lambda link, hello: self._events.put(_Joined(link, hello)),
            received=lambda link, message: self._events.put(_Message(link, message)),
            lost=lambda link, reason: self._events.put(_Lost(link, reason)),
        )
        self._thread = threading.Thread(target=self._run, name=f"cutwater-{plan.name}", daemon=True)

    # ------------------------------------------------------------------------------------------ from other threads

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has cleaned up."""
        self._thread.join()

    def request_end(self, outcome: j.Outcome, reason: str) -> None:
        """Cancel or stop the job (any thread); wait for ``ended`` afterwards."""
        self._events.put(j.EndRequested(outcome, reason, now_ms()))

    def request_checkpoint(self) -> int:
        """Take a checkpoint now and wait for it; returns its id.

        Raises:
            CutwaterError: it failed, with the reason.
        """
        done: queue.SimpleQueue[m.RequestAnswered] = queue.SimpleQueue()
        self._events.put(_Call(lambda: self._request_checkpoint(done)))
        while True:
            try:
                answer = done.get(timeout=0.5)
                break
            except queue.Empty:
                if self.ended.is_set():
                    raise CutwaterError("the job ended before the checkpoint was taken") from None
        if answer.reason is not None or answer.checkpoint_id is None:
            why = answer.reason.message if answer.reason else "no checkpoint"
            raise CutwaterError(f"the checkpoint failed: {why} {answer.detail}".rstrip())
        return answer.checkpoint_id

    # ---------------------------------------------------------------------------------------------------- the loop

    def _run(self) -> None:
        try:
            self._server.start()
            for slot in range(self.plan.parallelism):
                self._launch(slot)
            self._start_discovery()
            while not self.ended.is_set():
                self._step()
        except BaseException as e:
            self.error = e if isinstance(e, CutwaterError) else _internal(e)
            self.board.ended("failed", str(self.error))
        finally:
            self._clean_up()

    def _step(self) -> None:
        timeout = max(0.0, min(self._due_ms() - now_ms(), 500.0)) / 1000
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            event = None
        try:
            if event is not None:
                self._take(event)
            self._on_time()
        except FencedError as e:
            self.error = e
            self._perform_job(self.machine.handle(j.EndRequested(j.Outcome.FAILED, str(e), now_ms())))
        self.board.phase(self.machine)

    def _due_ms(self) -> float:
        dues = [self.machine.next_due_ms, self._checkpoints.next_due_ms if self._checkpoints else None]
        return min((d for d in dues if d is not None), default=now_ms() + 500.0)

    def _take(self, event: Any) -> None:
        match event:
            case _Message(link=link, message=message):
                link.seen_ms = now_ms()
                if self._links.get(link.slot) is link:
                    self._message(link, message)
            case _Joined(link=link, hello=hello):
                self._joined(link, hello)
            case _Lost(link=link, reason=reason):
                self._lost(link, reason)
            case _SlotEnded(slot=slot, error=error):
                self._slot_ended(slot, error)
            case _NewSplits(step=step, splits=splits):
                self._new_splits(step, splits)
            case _Call(function=function):
                function()
            case _:
                self._perform_job(self.machine.handle(event))

    def _on_time(self) -> None:
        now = now_ms()
        if self.machine.phase is j.JobPhase.FORMING and now - self._polled_ms > 400:
            self._polled_ms = now
            self._perform_job(self.machine.handle(j.Progress(self._running_tasks(), now)))
        self._perform_job(self.machine.handle(j.Tick(now)))
        if self._checkpoints is not None and self.machine.phase in (j.JobPhase.RUNNING, j.JobPhase.DRAINING):
            due = self._checkpoints.next_due_ms
            if due is not None and now >= due:
                self._checkpoint(m.Tick(now))
        for link in list(self._links.values()):
            if now - link.seen_ms > self.config.heartbeat_timeout_ms:
                self._lost(link, f"silent for {self.config.heartbeat_timeout_ms / 1000:.0f} s")
                self._host.cancel(link.slot)  # a stopped process would keep its core for ever

    def _running_tasks(self) -> int:
        try:
            return self._host.running_tasks
        except Exception:  # a status call must not end the job; the deadline still holds
            return 0

    # ------------------------------------------------------------------------------------------------- membership

    def _launch(self, slot: int) -> None:
        from cutwater.runtime.worker import WorkerArgs

        args = WorkerArgs(
            slot=slot,
            address=self._server.address,
            secret=self._secret,
            job=self.publisher.job,
            uid=self.publisher.uid,
            plan=self.plan,
            config=self.config,
            store_uri=self._store_uri,
        )
        self._host.launch(slot, args)

    def _joined(self, link: WorkerLink, hello: c.Hello) -> None:
        if not 0 <= hello.slot < self.plan.parallelism or self.machine.phase in (j.JobPhase.ENDING, j.JobPhase.ENDED):
            link.send(c.Stop("the job has ended"))
            link.close()
            return
        self._incarnation += 1
        link.slot, link.incarnation, link.hello, link.seen_ms = hello.slot, self._incarnation, hello, now_ms()
        old = self._links.get(hello.slot)
        if old is not None:  # a zombie of the slot: fenced from here on
            old.send(c.Stop("replaced"))
            old.close()
        self._links[hello.slot] = link
        self._silent_ends[hello.slot] = 0
        self.board.joined(hello)
        self._perform_job(self.machine.handle(j.WorkerJoined(hello.slot, link.incarnation, now_ms())))

    def _lost(self, link: WorkerLink, reason: str) -> None:
        if self._links.get(link.slot) is not link:
            return
        del self._links[link.slot]
        link.close()
        self.board.left(link.slot)
        self._perform_job(self.machine.handle(j.WorkerLost(link.slot, link.incarnation, reason, now_ms())))

    def _slot_ended(self, slot: int, error: BaseException | None) -> None:
        if self.machine.phase in (j.JobPhase.ENDING, j.JobPhase.ENDED):
            return
        self._silent_ends[slot] += 1
        if self._silent_ends[slot] > _RELAUNCH_LIMIT:
            text = str(error) if error is not None else "it ended without an error"
            self._fail("ResourceError", f"the worker of slot {slot} does not start: {_first_line(text)}", False)
            return
        if self._silent_ends[slot] > 1:
            delay_s = min(0.1 * 2 ** self._silent_ends[slot], 5.0)
            threading.Timer(delay_s, lambda: self._events.put(_Call(lambda: self._relaunch(slot)))).start()
        else:
            self._launch(slot)

    def _relaunch(self, slot: int) -> None:
        if self.machine.phase not in (j.JobPhase.ENDING, j.JobPhase.ENDED) and slot not in self._links:
            self._launch(slot)

    def _fail(self, kind: str, message: str, retryable: bool, step: str = "") -> None:
        """A failure of the current attempt."""
        text, count = self._same_failure
        key = f"{kind}:{step}:{_first_line(message)}"
        self._same_failure = (key, count + 1 if key == text else 1)
        if kind in _LIMITED and self._same_failure[1] >= _SAME_FAILURE_LIMIT:
            retryable = False
        cls = getattr(errors, kind, None)
        made = cls(message, step=step or None) if isinstance(cls, type) else JobFailedError(f"{kind}: {message}")
        self.error = made
        self._perform_job(self.machine.handle(j.TaskFailed(self.machine.attempt, str(made), retryable, now_ms())))

    # ---------------------------------------------------------------------------------------------- worker messages

    def _message(self, link: WorkerLink, message: c.FromWorker) -> None:
        attempt = getattr(message, "attempt", self.machine.attempt)
        if attempt != self.machine.attempt:
            return
        match message:
            case c.Metrics():
                self.board.metrics(link.slot, message)
            case c.Ack():
                self._ack(message)
            case c.Decline(checkpoint_id=checkpoint_id, vertex=vertex, subtask=subtask):
                reason = FailureReason.of(message.reason)
                self._checkpoint(
                    m.DeclineReceived(checkpoint_id, attempt, (vertex, subtask), reason, now_ms(), message.message)
                )
            case c.Ready():
                self._perform_job(self.machine.handle(j.WorkerReady(link.slot, attempt, now_ms())))
            case c.Finished(vertex=vertex, subtask=subtask):
                self._perform_job(self.machine.handle(j.SubtaskFinished(attempt, (vertex, subtask))))
            case c.Committed(checkpoint_id=checkpoint_id):
                self._committed(link.slot, checkpoint_id)
            case c.Failure():
                self.board.failed(message)
                retryable = message.retryable and message.kind not in _NOT_RETRYABLE
                text = f"{message.message}\n{message.traceback}" if message.traceback else message.message
                self._fail(message.kind, text, retryable, message.step)
            case c.Log(level=level, message=text):
                self.board.log(f"worker {link.slot} {level}: {text}")
            case c.Hello():
                pass

    def _ack(self, ack: c.Ack) -> None:
        self.board.acked(ack)
        for record in ack.subtasks:
            steps = self.plan.vertices[record.vertex].steps
            entries = [e for e in ack.entries if e.subtask == record.subtask and e.step in steps]
            self._checkpoint(
                m.AckReceived(
                    ack.checkpoint_id, ack.attempt, (record.vertex, record.subtask), (record, entries), now_ms()
                )
            )

    def _committed(self, slot: int, checkpoint_id: int) -> None:
        if checkpoint_id == self._final_id:
            self._committing.discard(slot)
            if not self._committing:
                self._perform_job(self.machine.handle(j.FinalCommitted(self.machine.attempt)))

    # ----------------------------------------------------------------------------------------- effects of the job

    def _perform_job(self, effects: list[j.Effect]) -> None:
        for effect in effects:
            match effect:
                case j.BeginAttempt(attempt=attempt):
                    self._begin(attempt)
                case j.StartProcessing(attempt=attempt):
                    self._broadcast(c.Start(attempt))
                    self.board.running()
                    self._checkpoint(m.JobRunning(attempt, now_ms()))
                case j.StopAttempt(reason=reason):
                    self.board.restarting(reason)
                    self._checkpoint(m.JobStopped(reason, now_ms()))
                    self._broadcast(c.Reset(self.machine.attempt))
                case j.TakeFinalCheckpoint():
                    self._checkpoint(m.RequestFinal(now_ms()))
                case j.ShutDown(outcome=outcome, reason=reason):
                    self._shut_down(outcome, reason)
                case j.Ended(outcome=outcome, reason=reason):
                    self._ended(outcome, reason)

    def _begin(self, attempt: int) -> None:
        try:
            taken = self.publisher.begin_attempt()
            if taken != attempt:
                raise FencedError(f"job {self.publisher.job!r} was taken over by another driver (attempt {taken - 1})")
            restorable = self.publisher.choose()
            manifest = restorable.manifest if restorable else None
            self.publisher.settle_sinks(manifest)
            if self._checkpoints is None:
                last_id = self.publisher.next_checkpoint_id() - 1
                self._checkpoints = CheckpointCoordinator(self.config, self._subtasks, self._sources, last_id)
            self.board.restored(manifest)
            if manifest is not None and manifest.final:  # committed just now: nothing is left to do (A7)
                self._final_id = manifest.checkpoint_id
                self._perform_job(self.machine.handle(j.FinalCommitted(attempt)))
                return
            self._deploy(attempt, restorable)
        except FencedError:
            raise
        except Exception as e:
            kind = type(e).__name__ if isinstance(e, CutwaterError) else "JobFailedError"
            message = e.message if isinstance(e, CutwaterError) else f"{type(e).__name__}: {e}"
            self._fail(kind, message, kind not in _NOT_RETRYABLE and kind != "CorruptSnapshotError")

    def _deploy(self, attempt: int, restorable: Restorable | None) -> None:
        assignments = self._assign_splits(restorable.manifest if restorable else None)
        slots = range(self.plan.parallelism)
        hellos = [cast(c.Hello, self._links[s].hello) for s in slots]
        for slot in slots:
            mine = {step: a[slot] for step, a in assignments.items() if slot < len(a)}
            rates = {s: e.rates()[slot] for s, e in self._enumerators.items() if slot < e.parallelism}
            self._links[slot].send(
                c.Deploy(
                    attempt=attempt,
                    incarnations=[self._links[s].incarnation for s in slots],
                    peers=[h.data_address for h in hellos],
                    restore=restorable.completed if restorable else None,
                    splits=mine,
                    rates=rates,
                    no_more_splits=[s for s, e in self._enumerators.items() if e.source and e.source.bounded],
                    last_checkpoint_id=self.publisher.next_checkpoint_id() - 1,
                )
            )

    def _assign_splits(self, manifest: Manifest | None) -> dict[str, list[list[c.SplitAssignment]]]:
        result: dict[str, list[list[c.SplitAssignment]]] = {}
        self._enumerators = {}
        for vertex in self.plan.vertices:
            step = self.plan.steps[vertex.steps[0]]
            if step.role != "source":
                continue
            enumerator = Enumerator(step.id, cast(Source, step.spec), vertex.parallelism)
            records: dict[int, list[SplitRecord]] = {}
            for record in manifest.subtasks if manifest else ():
                if step.id in record.splits:
                    records[record.subtask] = record.splits[step.id]
            old = max(records, default=-1) + 1
            assigned = enumerator.restore(records, old)
            for subtask, fresh in enumerate(enumerator.assign(self._discovered.get(step.id, []))):
                assigned[subtask] += fresh
            self._enumerators[step.id] = enumerator
            result[step.id] = assigned
        return result

    def _shut_down(self, outcome: j.Outcome, reason: str) -> None:
        self._stopping.set()
        if self._checkpoints is not None:
            self._checkpoint(m.JobStopped(reason, now_ms()))
        self._broadcast(c.Stop(outcome.value))
        threading.Thread(target=self._await_workers, name="cutwater-shutdown", daemon=True).start()

    def _await_workers(self) -> None:
        if not self._host.join(self.config.cancel_timeout_ms / 1000):
            self._host.cancel_all()
            self._host.join(self.config.cancel_timeout_ms / 1000)
        self._events.put(j.WorkersGone())

    def _ended(self, outcome: j.Outcome, reason: str) -> None:
        if outcome is j.Outcome.FINISHED:
            self.publisher.finish(self._final_id)
            self.error = None
        elif outcome is j.Outcome.FAILED:
            self.error = self._final_error(reason)
        else:
            self.error = None
        self.board.ended(outcome.value, reason)
        self.ended.set()

    def _final_error(self, reason: str) -> CutwaterError:
        if self.error is None:
            if "workers got a core" in reason:
                return ResourceError(reason)
            return JobFailedError(reason)
        return self.error

    # ---------------------------------------------------------------------------------- effects of the checkpoints

    def _request_checkpoint(self, done: queue.SimpleQueue[m.RequestAnswered]) -> None:
        if self._checkpoints is None:
            done.put(m.RequestAnswered(done, None, FailureReason.JOB_NOT_RUNNING))
            return
        self._checkpoint(m.RequestCheckpoint(now_ms(), CheckpointKind.ON_DEMAND, done))

    def _checkpoint(self, event: m.CoordinatorEvent) -> None:
        if self._checkpoints is None:
            return
        pending: deque[m.CoordinatorEffect] = deque(self._checkpoints.handle(event))
        while pending:
            pending.extend(self._perform_checkpoint(pending.popleft()))
        self.board.counts(self._checkpoints.statistics)

    def _perform_checkpoint(self, effect: m.CoordinatorEffect) -> list[m.CoordinatorEffect]:
        assert self._checkpoints is not None
        attempt = self.machine.attempt
        match effect:
            case m.SendTrigger(checkpoint_id=checkpoint_id, final=final):
                self._triggered[checkpoint_id] = int(time.time() * 1000)
                self._broadcast(c.Trigger(attempt, checkpoint_id, final))
            case m.Publish():
                return self._checkpoints.handle(self._publish(effect))
            case m.NotifyComplete(checkpoint_id=checkpoint_id, kind=kind):
                final = kind is CheckpointKind.FINAL
                if final:
                    self._final_id, self._committing = checkpoint_id, set(self._links)
                self._same_failure = ("", 0)
                self._perform_job(self.machine.handle(j.CheckpointCompleted(attempt, now_ms())))
                self._broadcast(c.CompleteNotice(attempt, checkpoint_id, final))
                for warning in self.publisher.collect():
                    self.board.warn(warning)
            case m.NotifyAborted(checkpoint_id=checkpoint_id, reason=reason, latest_completed=latest):
                self._triggered.pop(checkpoint_id, None)
                if reason is not FailureReason.JOB_STOPPED:
                    self.board.warn(f"checkpoint {checkpoint_id} failed: {reason.message} {effect.detail}".rstrip())
                self._broadcast(c.AbortNotice(attempt, checkpoint_id, latest))
            case m.FailJob(reason=reason, detail=detail):
                self._fail("StorageError", f"checkpoint failed: {reason.message} {detail}".rstrip(), True)
            case m.RequestAnswered(request_id=request_id):
                cast("queue.SimpleQueue[m.RequestAnswered]", request_id).put(effect)
            case m.AckAnswered(answer=answer) if answer is AckAnswer.UNKNOWN:
                self.board.log(f"acknowledgement of unknown checkpoint {effect.checkpoint_id}")
            case _:
                pass
        return []

    def _publish(self, effect: m.Publish) -> m.Published | m.PublishFailed:
        parts = [cast("tuple[SubtaskRecord, list[Any]]", payload) for _, payload in effect.payloads]
        try:
            completed, size = self.publisher.publish(
                effect.checkpoint_id,
                attempt=self.machine.attempt,
                final=effect.kind is CheckpointKind.FINAL,
                triggered_ms=self._triggered.pop(effect.checkpoint_id, 0),
                parts=parts,
            )
        except FencedError:
            raise
        except CutwaterError as e:
            return m.PublishFailed(effect.checkpoint_id, str(e), now_ms())
        self.board.completed(completed.checkpoint_id, size)
        return m.Published(effect.checkpoint_id, now_ms())

    def _broadcast(self, message: c.ToWorker) -> None:
        for link in list(self._links.values()):
            link.send(message)

    # -------------------------------------------------------------------------------------------- growing sources

    def _start_discovery(self) -> None:
        for step in self.plan.steps.values():
            if step.role == "source" and not cast(Source, step.spec).bounded:
                thread = threading.Thread(target=self._discover, args=(step.id,), daemon=True)
                self._discover_threads.append(thread)
                thread.start()

    def _discover(self, step: str) -> None:
        source = cast(Source, self.plan.steps[step].spec)
        while not self._stopping.wait(source.discover_interval_ms / 1000):
            try:
                self._events.put(_NewSplits(step, source.discover()))
            except Exception as e:
                self._events.put(_Call(lambda e=e: self._fail(type(e).__name__, str(e), True, step)))

    def _new_splits(self, step: str, splits: list[Split]) -> None:
        known = {s.id for s in self._discovered.setdefault(step, [])}
        self._discovered[step] += [s for s in splits if s.id not in known]
        enumerator = self._enumerators.get(step)
        if enumerator is None or self.machine.phase not in (j.JobPhase.DEPLOYING, j.JobPhase.RUNNING):
            return
        no_more = bool(getattr(enumerator.source, "ended", False))
        for subtask, fresh in enumerate(enumerator.assign(splits)):
            if fresh or no_more:
                self._links[subtask].send(c.AssignSplits(self.machine.attempt, step, fresh, no_more))

    def _clean_up(self) -> None:
        self._stopping.set()
        self._server.close()
        if not self.ended.is_set():
            self._host.cancel_all()
        for link in list(self._links.values()):
            link.close()
        self.ended.set()


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"


def _internal(error: BaseException) -> CutwaterError:
    story = "".join(traceback.format_exception(error))
    return errors.InvariantError(f"the coordinator failed: {type(error).__name__}: {error}\n{story}")
