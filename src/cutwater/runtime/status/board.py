"""Collects what the coordinator sees into ``JobStatus`` values (any thread may read)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from cutwater.config import JobConfig
from cutwater.data.time import MAX_WATERMARK
from cutwater.plan.graph import PhysicalPlan
from cutwater.protocol.checkpoint.coordinator import CheckpointStatistics
from cutwater.protocol.job.machine import JobMachine
from cutwater.protocol.job.messages import JobPhase
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.messages import CopiesHeld
from cutwater.runtime.failures import headline
from cutwater.runtime.status.status import (
    CheckpointStatus,
    CopiesStatus,
    JobStatus,
    RestartEvent,
    StartingStatus,
    StepStatus,
    SubtaskLoad,
    WaitingStatus,
    WorkerStatus,
    failure_text,
)
from cutwater.storage.snapshot.manifest import Manifest

_TOLD_AFTER = 5
"""Reports in a row that say so before the user is told: a fit may be wrong for a moment."""


class StepLoads:
    """Shares of the time between the last two reports of each worker."""

    def __init__(self) -> None:
        self._loads: dict[tuple[int, int], dict[str, SubtaskLoad]] = {}
        """By slot and region, then by step."""

    def clear(self, regions: Collection[int] | None = None) -> None:
        """These regions begin anew; ``None``: all do."""
        self._loads = {w: found for w, found in self._loads.items() if regions is not None and w[1] not in regions}

    def report(self, slot: int, before: c.Metrics, now: c.Metrics) -> None:
        """Two reports of one attempt of a worker."""
        span_ms = now.time_ms - before.time_ms
        if span_ms > 0:
            self._loads[slot, now.region] = {
                step: SubtaskLoad(
                    subtask=slot,
                    busy=_share(busy_ms - before.busy_ms.get(step, 0.0), span_ms),
                    backpressured=_share(
                        now.backpressured_ms.get(step, 0.0) - before.backpressured_ms.get(step, 0.0), span_ms
                    ),
                )
                for step, busy_ms in now.busy_ms.items()
            }

    def of_step(self, step: str) -> list[SubtaskLoad]:
        """One for each subtask that has told, by its number."""
        found = [loads[step] for loads in self._loads.values() if step in loads]
        return sorted(found, key=lambda load: load.subtask)

    def mean(self, step: str) -> tuple[float, float]:
        """Busy and backpressured, over the subtasks; zeros if none has told."""
        loads = self.of_step(step)
        count = max(len(loads), 1)
        return round(sum(x.busy for x in loads) / count, 3), round(sum(x.backpressured for x in loads) / count, 3)

    def of_worker(self, slot: int) -> tuple[float, float]:
        """Busy is the sum of its steps, which share one thread; backpressured the most of any step."""
        loads = [load for where, found in self._loads.items() if where[0] == slot for load in found.values()]
        busy = round(min(sum((load.busy for load in loads), 0.0), 1.0), 3)
        return busy, max((load.backpressured for load in loads), default=0.0)


def _share(part_ms: float, span_ms: float) -> float:
    return round(max(0.0, min(part_ms / span_ms, 1.0)), 3)


_BLAMED = 0.2
"""Of what a call costs without rows, the share of a step that is told of."""


class SlowCalls:
    """Makes the warnings on steps whose calls cost more than the budget without any row: one for each.

    >>> from cutwater.runtime.control.messages import FixedCost, Metrics
    >>> calls = SlowCalls(JobConfig())
    >>> costs = {"call": FixedCost("call", 50, 50, 350, 9000)}
    >>> report = Metrics(1, 0.0, {}, {}, {}, {}, {}, {}, 0.0, fixed_costs=costs)
    >>> told = [calls.fresh(0, report) for _ in range(6)]
    >>> len(told[0]), told[4][0].partition(". ")[0], len(told[5])
    (0, "step 'call': a call costs 50 ms whatever the number of its rows, and slice_budget_ms is 10", 0)
    """

    def __init__(self, config: JobConfig) -> None:
        self._budget_ms, self._max_ms = config.slice_budget_ms, config.max_call_ms
        self._seen: dict[tuple[int, int, str], int] = {}
        """By slot, region and step: reports in a row."""
        self._told: set[str] = set()

    def fresh(self, slot: int, report: c.Metrics) -> list[str]:
        """Warnings of what a report of a worker says for some time now, and nobody said before."""
        place = slot, report.region
        for where in [w for w in self._seen if w[:2] == place and w[2] not in report.fixed_costs]:
            del self._seen[where]
        new: list[str] = []
        for step, cost in report.fixed_costs.items():
            if cost.step_ms < _BLAMED * cost.chain_ms:
                continue  # a busy machine: no step is slow by itself
            seen = self._seen[*place, step] = self._seen.get((*place, step), 0) + 1
            if seen >= _TOLD_AFTER and step not in self._told:
                self._told.add(step)
                new.append(self._text(step, cost))
        return new

    def _text(self, step: str, cost: c.FixedCost) -> str:
        name = f"step {step!r}" if cost.first == step else f"steps {cost.first!r} to {step!r}, which run as one"
        chain = f" (its whole chain {cost.chain_ms:.0f} ms)" if cost.chain_ms > 1.2 * cost.step_ms else ""
        limit = "at most" if cost.call_ms <= self._max_ms else "more than"
        return (
            f"{name}: a call costs {cost.step_ms:.0f} ms{chain} whatever the number of its rows, and slice_budget_ms "
            f"is {self._budget_ms:g}. So that rows get on, calls have {cost.rows:,} rows and last {cost.call_ms:.0f} "
            f"ms, {limit} max_call_ms ({self._max_ms:g}); barriers wait for them. Make a call cheaper, or set "
            "max_call_ms: lower for quicker checkpoints, higher for more rows per second."
        )


_SIDES = {1: "late_left", 2: "late_right"}
_STREAMS: Mapping[str, Mapping[int, str]] = {
    "window": {1: "late"},
    "deduplicate": {1: "late"},
    "processor": {1: "late"},
    "join": _SIDES,
    "window_join": _SIDES,
    "join_as_of": _SIDES,
}
"""By kind of step and number of its output: what the stream of late rows is called."""


class LateRows:
    """Makes the warnings: one for each stream of late rows when its first ones are seen, one with the sum in the end.

    >>> from cutwater.runtime.control.messages import Metrics
    >>> import cutwater as cw
    >>> from cutwater.plan.planner import make_plan
    >>> flow = cw.Dataflow("example")
    >>> rows = flow.read("in", cw.rate(10), event_time="timestamp")
    >>> rows.key_by("value").deduplicate("once", within="1s").write("out", cw.discard())
    >>> late = LateRows(make_plan(flow, 1))
    >>> late.count([Metrics(1, 0.0, {"once": 9}, {}, {}, {}, {}, {}, 0.0, rows_unread={"once": {1: 7}})])
    >>> [warning.partition(". ")[0] for warning in late.fresh()], late.fresh()
    (["step 'once': rows come too late and are dropped (7 so far)"], [])
    >>> [warning.partition(". ")[0] for warning in late.total(3)]
    ["step 'once': 7 of 9 rows came too late and were dropped, since checkpoint 3"]
    """

    def __init__(self, plan: PhysicalPlan) -> None:
        self._kinds = {step.id: step.kind for step in plan.steps.values()}
        self._late: dict[tuple[str, int], int] = {}
        self._rows_in: dict[str, int] = {}
        self._told: set[tuple[str, int]] = set()

    def count(self, reports: Iterable[c.Metrics]) -> None:
        """The newest reports of all workers."""
        self._late.clear()
        self._rows_in.clear()
        for report in reports:
            for step, rows in report.rows_in.items():
                self._rows_in[step] = self._rows_in.get(step, 0) + rows
            for step, outputs in report.rows_unread.items():
                for output, rows in outputs.items():
                    if output in _STREAMS.get(self._kinds[step], {}):
                        self._late[step, output] = self._late.get((step, output), 0) + rows

    def fresh(self) -> list[str]:
        """Warnings of what has begun to come late."""
        new = [where for where in self._late if where not in self._told]
        self._told.update(new)
        return [
            f"step {step!r}: rows come too late and are {self._fate(step, output)} "
            f"({self._late[step, output]:,} so far). {self._advice(step, output)}"
            for step, output in new
        ]

    def total(self, restored_id: int) -> list[str]:
        """Warnings with the sums.

        Args:
            restored_id: the checkpoint since which rows are counted; 0: the beginning.
        """
        since = f", since checkpoint {restored_id}" if restored_id else ""
        return [
            f"step {step!r}: {rows:,} of {self._rows_in[step]:,} rows came too late and were "
            f"{self._fate(step, output)}{since}. {self._advice(step, output)}"
            for (step, output), rows in self._late.items()
        ]

    def _fate(self, step: str, output: int) -> str:
        versions = self._kinds[step] == "join_as_of" and output == 2  # they count for rows to come
        return "missing in what is out already" if versions else "dropped"

    def _advice(self, step: str, output: int) -> str:
        kind = self._kinds[step]
        stream = _STREAMS[kind][output]
        lateness = ", or window(...) a larger allowed_lateness=" if kind == "window" else ""
        return f"Read them as .{stream}, or give read(...) a larger out_of_order={lateness}."


_RATE_WINDOW_S = 3.0
_LOG = logging.getLogger("cutwater.job")
_WORKER_LOG = logging.getLogger("cutwater.worker")


class JobRecord(Protocol):
    """Newest checkpoints in storage of the job that is watched."""

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
        self._hellos: dict[int, c.Hello] = {}
        self._copies: dict[int, CopiesHeld] = {}
        self._metrics: dict[tuple[int, int], c.Metrics] = {}
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

    def _update_checkpoints(self, **changes: Any) -> None:
        with self._lock:
            self._checkpoints = msgspec.structs.replace(self._checkpoints, **changes)

    def phase(self, machine: JobMachine, awaited: list[int]) -> None:
        """Phase of the job, and the workers that its checkpoints wait for."""
        if self._checkpoints.waits_for != awaited:
            self._update_checkpoints(waits_for=awaited)
        waiting = _waiting(machine)
        if waiting is not None or self._status.waiting is not None:
            self._update(waiting=waiting)
        if self._status.phase != machine.phase.value or self._status.attempt != machine.attempt:
            self._update(phase=machine.phase.value, attempt=machine.attempt)

    def ended(self, outcome: str, reason: str) -> None:
        for warning in self._late.total(self._checkpoints.restored_id):
            self.warn(warning)
        self._update(phase="ended", outcome=outcome, reason=reason)

    def joined(self, hello: c.Hello) -> None:
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

    def restored(self, manifest: Manifest | None, regions: set[int] | None = None) -> None:
        """These regions count anew, the others go on; ``None``: all count anew."""
        restored_id = manifest.checkpoint_id if manifest else 0
        with self._lock:
            self._metrics = {w: m for w, m in self._metrics.items() if regions is not None and w[1] not in regions}
            self._loads.clear(regions)
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

    def failed(self, failure: c.Failure) -> None:
        where = f"step {failure.step!r}, " if failure.step else ""
        self.log(f"worker {failure.subtask} failed: {where}{failure.kind}: {failure.message}\n{failure.traceback}")

    # ---------------------------------------------------------------------------------------------- checkpoints

    def completed(self, checkpoint_id: int, size_bytes: int, written_bytes: int) -> None:
        self._update_checkpoints(
            last_completed_id=checkpoint_id, last_size_bytes=size_bytes, last_written_bytes=written_bytes
        )

    def acked(self, ack: c.Ack) -> None:
        self._update_checkpoints(last_freeze_ms=ack.freeze_ms)

    def counts(self, statistics: CheckpointStatistics) -> None:
        """Totals over all attempts of this driver."""
        self._update_checkpoints(
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

    def metrics(self, slot: int, metrics: c.Metrics) -> None:
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
    """The lack of workers as of now, if the job waits for nothing else."""
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
