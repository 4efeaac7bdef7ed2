"""Status of a running job: one value that the handle, the command line and tests read."""

from __future__ import annotations

import msgspec

from cutwater.config import format_us
from cutwater.runtime.failures import first_line


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over the job's life in this driver; names as in Flink's metrics."""

    completed: int = 0
    failed: int = 0
    in_progress: int = 0
    last_completed_id: int = 0
    last_duration_ms: float = 0.0
    last_size_bytes: int = 0
    last_written_bytes: int = 0
    """Of these, written for it; the rest lies in files of older checkpoints."""
    last_freeze_ms: float = 0.0
    restored_id: int = 0
    """Checkpoint that the job, or the part of it that went back last, was restored from; 0: the beginning."""
    waits_for: list[int] = []
    """Workers that go back beside others, or in part (every ``recovery`` but ``"job"``): no checkpoint begins until
    they are where the others are."""


class CopiesStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of the newest checkpoint outside the checkpoint directory, over all workers."""

    checkpoint_id: int = 0
    """All workers have brought what they wrote of it where it should be, as far as there was room."""
    missing_bytes: int = 0
    """Of the newest checkpoint: what lacks some of the copies that were asked for."""
    memory_bytes: int = 0
    """Held by workers for others."""
    local_bytes: int = 0
    """On the workers' machines."""
    restored_local_bytes: int = 0
    """Read by the last restore of each worker from its machine."""
    restored_replica_bytes: int = 0
    """From other workers."""
    restored_storage_bytes: int = 0
    """From the checkpoint directory."""


class SubtaskLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of time of one subtask of a step, between its worker's last two reports."""

    subtask: int
    busy: float = 0.0
    """Spent in the step, and in sending what it made."""
    backpressured: float = 0.0
    """It could make no rows, because an output of its chain had no room."""


class StepStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Of a step; several that run as one are told under the last one's name."""

    rows_in: int = 0
    rows_out: int = 0
    busy: float = 0.0
    """Mean of the subtasks (``SubtaskLoad``)."""
    backpressured: float = 0.0
    """Mean of the subtasks."""
    call_fixed_ms: float = 0.0
    """Cost of a call whatever the number of its rows, where that is above ``slice_budget_ms``; else 0."""
    counters: dict[str, int] = {}
    subtasks: list[SubtaskLoad] = []


class StartingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that has a core, and whose Python has not been heard of yet."""

    slot: int
    host: str
    """Empty if Spark does not say."""
    starting_ms: float
    """So long it has the core."""


class WaitingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The lack of workers that a job waits for."""

    text: str
    """All of it in one line."""
    waiting_ms: float
    """So long the job, or a part of it, has lacked workers."""
    wanted: int
    """Workers."""
    present: int
    """Workers that are there."""
    cores: int
    """Workers that are there, or have a core at least."""
    starting: list[StartingStatus] = []


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    slot: int
    pid: int
    host: str
    busy: float = 0.0
    """Share of the time spent in its steps since the last report."""
    backpressured: float = 0.0
    """The most of any of its steps."""


class RestartEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One failure and what became of it."""

    time_ms: int
    attempt: int
    reason: str
    failed_ms: float
    """Monotonic, milliseconds: when the failure was noticed."""
    running_ms: float | None = None
    """Time at which all subtasks of the next attempt ran."""
    restored_id: int = 0
    again: bool = False
    """The reason is that of the failure before, and no checkpoint was completed in between."""
    counted: int = 0
    """Number of failures that counted then, of those that ``restart`` allows."""
    allowed: int = 0
    pause_ms: float = 0.0
    """Before the next attempt."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the job's state.  ``phase`` is one of forming, deploying, running, draining, restarting, ending,
    ended; ``outcome`` is set once it ended: finished, failed, cancelled, stopped."""

    name: str
    uid: str
    phase: str
    outcome: str = ""
    reason: str = ""
    attempt: int = 0
    parallelism: int = 0
    restarts: int = 0
    rescales: int = 0
    """Number of changes of parallelism; no restart is counted for them."""
    checkpoint_dir: str = ""
    rows_read: int = 0
    """Rows that left the sources in the current attempt."""
    rows_per_second: float = 0.0
    watermark_ms: int | None = None
    """Lowest watermark of the sources, milliseconds since the epoch."""
    checkpoints: CheckpointStatus = CheckpointStatus()
    copies: CopiesStatus | None = None
    """None: the job keeps none."""
    steps: dict[str, StepStatus] = {}
    workers: list[WorkerStatus] = []
    waiting: WaitingStatus | None = None
    """None: the job lacks no workers, or other things keep it from going on, too."""
    failures: list[RestartEvent] = []
    warnings: list[str] = []
    log: list[str] = []
    """Last lines of the workers' logs."""

    @property
    def active(self) -> bool:
        return self.phase != "ended"

    def __repr__(self) -> str:
        from cutwater.runtime.status.progress import as_line

        return f"JobStatus({as_line(self)})"

    def __str__(self) -> str:
        from cutwater.runtime.status.progress import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from cutwater.runtime.status.progress import as_html

        return as_html(self)


def failure_text(failure: RestartEvent) -> str:
    """A failure in one line; one that comes again is told shortly.

    >>> event = RestartEvent(time_ms=0, attempt=5, reason="no space", failed_ms=0, counted=5, allowed=12, pause_ms=812)
    >>> failure_text(event)
    'attempt 5 failed: no space'
    >>> import msgspec
    >>> failure_text(msgspec.structs.replace(event, again=True))
    'attempt 5 failed: the same (5 of 12), next in 812ms'
    """
    what = first_line(failure.reason)
    if failure.again:
        unit_us = 1_000 if failure.pause_ms < 1_000 else 1_000_000
        pause = format_us(round(failure.pause_ms * 1_000 / unit_us) * unit_us)
        what = f"the same ({failure.counted} of {failure.allowed}), next in {pause}"
    return f"attempt {failure.attempt} failed: {what}"
