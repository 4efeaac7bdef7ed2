"""Collects what the coordinator sees into ``JobStatus`` values (any thread may read)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any, Protocol

import msgspec

from cutwater.config import JobConfig
from cutwater.data.time import MAX_WATERMARK
from cutwater.plan.graph import PhysicalPlan
from cutwater.protocol.checkpoint.coordinator import CheckpointStatistics
from cutwater.protocol.job.machine import JobMachine
from cutwater.protocol.job.messages import JobPhase
from cutwater.runtime.control import reports as cr
from cutwater.runtime.control.reports import CopiesHeld
from cutwater.runtime.failures import headline
from cutwater.runtime.status.late_rows import LateRows
from cutwater.runtime.status.status import (
    CheckpointStatus,
    CopiesStatus,
    JobStatus,
    RestartEvent,
    StartingStatus,
    StepStatus,
    WaitingStatus,
    WorkerStatus,
    failure_text,
)
from cutwater.runtime.status.step_loads import SlowCalls, StepLoads
from cutwater.storage.snapshot.manifest import Manifest

_RATE_WINDOW_S = 3.0
_LOG = logging.getLogger("cutwater.job")
_WORKER_LOG = logging.getLogger("cutwater.worker")


class JobRecord(Protocol):
    """What lies in storage of the job that is watched."""

    warnings: list[str]

    @property
    def uid(self) -> str: ...

    @property
    def attempt(self) -> int: ...


class StatusBoard:
    """The job's state as it was last seen; written by the coordinator's thread only."""

    def __init__(self, plan: PhysicalPlan, config: JobConfig, record: JobRecord) -> None:
        self._plan, self._record = plan, record
        self._sources = [s.id for s in plan.steps.values() if s.role == "source"]
        self._lock = threading.Lock()
        self._status = JobStatus(
            name=plan.name, uid="", phase="forming", parallelism=plan.parallelism, attempt=record.attempt
        )
        self._hellos: dict[int, cr.Hello] = {}
        self._copies: dict[int, CopiesHeld] = {}
        self._metrics: dict[tuple[int, int], cr.Metrics] = {}
        """By slot and region."""
        self._late = LateRows(plan)
        self._loads, self._slow_calls = StepLoads(), SlowCalls(config)
        self._history: deque[tuple[float, int]] = deque()
        self._read_before = 0
        self._warnings: deque[str] = deque(maxlen=100)
        self._lines: deque[str] = deque(maxlen=200)
        self._failures: list[RestartEvent] = []
        self._failed_after = 0
        """The newest checkpoint when the last failure came."""
        self._checkpoints = CheckpointStatus()

    @property
    def status(self) -> JobStatus:
        """The newest state."""
        with self._lock:
            return msgspec.structs.replace(
                self._status,
                uid=self._record.uid,
                checkpoints=self._checkpoints,
                copies=self._all_copies() if self._copies else None,
                workers=[self._worker(s) for s in sorted(self._hellos)],
                failures=list(self._failures),
                warnings=[*self._record.warnings, *self._warnings],
                log=list(self._lines),
            )

    def _worker(self, slot: int) -> WorkerStatus:
        hello = self._hellos[slot]
        busy, blocked = self._loads.of_worker(slot)
        return WorkerStatus(slot=slot, pid=hello.pid, host=hello.host, busy=busy, backpressured=blocked)

    def _update(self, **changes: Any) -> None:
        with self._lock:
            self._status = msgspec.structs.replace(self._status, **changes)

    # ------------------------------------------------------------------------------------------- what happens

    def phase(self, machine: JobMachine, awaited: list[int]) -> None:
        """Where the job is, and the workers that its checkpoints wait for."""
        if self._checkpoints.waits_for != awaited:
            with self._lock:
                self._checkpoints = msgspec.structs.replace(self._checkpoints, waits_for=awaited)
        waiting = _waiting(machine)
        if waiting is not None or self._status.waiting is not None:
            self._update(waiting=waiting)
        if self._status.phase != machine.phase.value or self._status.attempt != machine.attempt:
            self._update(phase=machine.phase.value, attempt=machine.attempt)

    def ended(self, outcome: str, reason: str) -> None:
        for warning in self._late.total(self._checkpoints.restored_id):
            self.warn(warning)
        self._update(phase="ended", outcome=outcome, reason=reason)

    def joined(self, hello: cr.Hello) -> None:
        with self._lock:
            self._hellos[hello.slot] = hello
            self._copies.pop(hello.slot, None)  # its predecessor's

    def left(self, slot: int) -> None:
        with self._lock:
            self._hellos.pop(slot, None)

    def rescaled(self, plan: PhysicalPlan, reason: str) -> None:
        """The job goes on at another parallelism."""
        self.log(reason)
        with self._lock:
            self._copies.clear()
        self._update(parallelism=plan.parallelism, rescales=self._status.rescales + 1)

    def restored(self, manifest: Manifest | None) -> None:
        restored_id = manifest.checkpoint_id if manifest else 0
        with self._lock:
            self._metrics.clear()
            self._loads.clear()
            self._went_back_to(restored_id)

    def regions_restored(self, manifest: Manifest | None, regions: set[int]) -> None:
        """These regions count anew, the others go on."""
        restored_id = manifest.checkpoint_id if manifest else 0
        with self._lock:
            self._metrics = {where: found for where, found in self._metrics.items() if where[1] not in regions}
            self._loads.clear(regions)
            self._went_back_to(restored_id)

    def _went_back_to(self, restored_id: int) -> None:
        self._checkpoints = msgspec.structs.replace(self._checkpoints, restored_id=restored_id)
        self._history.clear()
        if self._failures and self._failures[-1].running_ms is None:
            self._failures[-1] = msgspec.structs.replace(self._failures[-1], restored_id=restored_id)

    def running(self) -> None:
        with self._lock:
            if self._failures and self._failures[-1].running_ms is None:
                now = time.monotonic() * 1000
                self._failures[-1] = msgspec.structs.replace(self._failures[-1], running_ms=now)

    def restarting(self, reason: str, counted: int, allowed: int, delay_ms: float) -> None:
        """The job, or a part of it, goes back.  A reason that comes again and again is told in full once.

        Args:
            reason: why.
            counted: failures of this kind that count towards the limit, this one included.
            allowed: the limit.
            delay_ms: the pause before the next attempt.
        """
        last, completed_id = self._failures[-1] if self._failures else None, self._checkpoints.last_completed_id
        again = last is not None and headline(reason) == headline(last.reason) and completed_id == self._failed_after
        self._failed_after = completed_id
        event = RestartEvent(
            time_ms=int(time.time() * 1000),
            attempt=self._status.attempt,
            reason=reason,
            failed_ms=time.monotonic() * 1000,
            again=again,
            counted=counted,
            allowed=allowed,
            pause_ms=delay_ms,
        )
        _LOG.warning("job %r: %s", self._plan.name, failure_text(event))
        with self._lock:
            self._failures.append(event)
            del self._failures[:-1000]
        self._update(restarts=self._status.restarts + 1)

    def warn(self, text: str) -> None:
        """Something that the user has to know of: in the status, and in the log of this process."""
        _LOG.warning("job %r: %s", self._plan.name, text)
        with self._lock:
            self._warnings.append(text)

    def log(self, text: str) -> None:
        with self._lock:
            self._lines.append(text)

    def worker_said(self, slot: int, level: str, text: str) -> None:
        """A line of a worker's log: in the status, and in the log of this process at the level that it had there."""
        number = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
        _WORKER_LOG.log(number, "job %r, worker %d: %s", self._plan.name, slot, text)
        self.log(f"worker {slot} {level}: {text}")

    def failed(self, failure: cr.Failure) -> None:
        where = f"step {failure.step!r}, " if failure.step else ""
        self.log(f"worker {failure.subtask} failed: {where}{failure.kind}: {failure.message}\n{failure.traceback}")

    # ---------------------------------------------------------------------------------------------- checkpoints

    def completed(self, checkpoint_id: int, size_bytes: int, written_bytes: int) -> None:
        with self._lock:
            self._checkpoints = msgspec.structs.replace(
                self._checkpoints,
                last_completed_id=checkpoint_id,
                last_size_bytes=size_bytes,
                last_written_bytes=written_bytes,
            )

    def acked(self, ack: cr.Ack) -> None:
        with self._lock:
            self._checkpoints = msgspec.structs.replace(self._checkpoints, last_freeze_ms=ack.freeze_ms)

    def counts(self, statistics: CheckpointStatistics) -> None:
        """Totals over all attempts of this driver."""
        with self._lock:
            self._checkpoints = msgspec.structs.replace(
                self._checkpoints,
                completed=statistics.completed,
                failed=statistics.failed,
                in_progress=statistics.in_progress,
                last_duration_ms=round(statistics.last_duration_ms or 0.0, 1),
            )

    def copied(self, slot: int, copies: CopiesHeld) -> None:
        """A worker's report on the copies that it has."""
        with self._lock:
            self._copies[slot] = copies

    def _all_copies(self) -> CopiesStatus:
        found = list(self._copies.values())
        local, replica, storage = (sum(part) for part in zip(*(f.restored_bytes for f in found), strict=True))
        return CopiesStatus(
            checkpoint_id=min(f.checkpoint_id for f in found) if self._hellos.keys() <= self._copies.keys() else 0,
            missing_bytes=sum(f.missing_bytes for f in found),
            memory_bytes=sum(f.memory_bytes for f in found),
            local_bytes=sum(f.local_bytes for f in found),
            restored_local_bytes=local,
            restored_replica_bytes=replica,
            restored_storage_bytes=storage,
        )

    # -------------------------------------------------------------------------------------------------- metrics

    def metrics(self, slot: int, metrics: cr.Metrics) -> None:
        """A worker's report."""
        where = slot, metrics.region
        with self._lock:
            before = self._metrics.get(where)
            self._metrics[where] = metrics
            if before is not None:
                self._loads.report(slot, before, metrics)
            steps = self._steps()
            rows = sum(steps[s].rows_out for s in self._sources if s in steps)
            watermarks = [w for m in self._metrics.values() for s, w in m.watermarks.items() if s in self._sources]
            real = [w for w in watermarks if w != MAX_WATERMARK]
            self._status = msgspec.structs.replace(
                self._status,
                rows_read=rows,
                rows_per_second=self._rate(rows),
                watermark_ms=min(real) // 1000 if real else self._status.watermark_ms,
                steps=steps,
            )
            self._late.count(self._metrics.values())
            running = self._status.phase == JobPhase.RUNNING.value
        for warning in self._late.fresh() if running else ():  # the end tells the sums
            self.warn(warning)
        for warning in self._slow_calls.fresh(slot, metrics):
            self.warn(warning)

    def _steps(self) -> dict[str, StepStatus]:
        steps: dict[str, StepStatus] = {}
        for metrics in self._metrics.values():
            for step, rows_in in metrics.rows_in.items():
                old = steps.get(step, StepStatus())
                counters = dict(old.counters)
                for name, value in metrics.counters.get(step, {}).items():
                    counters[name] = counters.get(name, 0) + value
                cost = metrics.fixed_costs.get(step)
                steps[step] = StepStatus(
                    rows_in=old.rows_in + rows_in,
                    rows_out=old.rows_out + metrics.rows_out.get(step, 0),
                    call_fixed_ms=max(old.call_fixed_ms, cost.step_ms if cost is not None else 0.0),
                    counters=counters,
                )
        for step, found in steps.items():
            busy, blocked = self._loads.mean(step)
            loads = self._loads.of_step(step)
            steps[step] = msgspec.structs.replace(found, busy=busy, backpressured=blocked, subtasks=loads)
        return steps

    def _rate(self, rows: int) -> float:
        now = time.monotonic()
        self._history.append((now, rows))
        while self._history[0][0] < now - _RATE_WINDOW_S:
            self._history.popleft()
        then, before = self._history[0]
        return round(max(0, rows - before) / (now - then), 1) if now > then else 0.0


def _waiting(machine: JobMachine) -> WaitingStatus | None:
    """What the job waits for as of now, if it lacks workers and nothing else."""
    found, now = machine.waiting, time.monotonic() * 1000
    if not machine.waits or found.since_ms is None:
        return None
    return WaitingStatus(
        text=found.text(now),
        waiting_ms=round(now - found.since_ms, 1),
        wanted=machine.slots,
        present=found.present,
        cores=found.cores,
        starting=[
            StartingStatus(slot=s.slot, host=s.host, starting_ms=round(now - s.since_ms, 1)) for s in found.starting
        ],
    )
