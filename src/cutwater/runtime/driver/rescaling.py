"""Performs the decisions over the parallelism of a running job."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Protocol, cast

from cutwater.config import JobConfig
from cutwater.errors import BuildError, ConfigError
from cutwater.plan.graph import PhysicalPlan
from cutwater.plan.planner import replan
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.job import rescale as r
from cutwater.runtime.driver.checkpointing import now_ms


class RescaleHost(Protocol):
    """The driver that is rescaled; everything is called in its thread."""

    @property
    def cores(self) -> frozenset[int]:
        """Slots with a worker, or a core for one."""
        ...

    @property
    def waits(self) -> bool:
        """True if nothing but missing workers keeps the job from going on."""
        ...

    def recruit(self, workers: int) -> None:
        """Start a worker for every slot below ``workers`` that has none."""
        ...

    def dismiss(self) -> None:
        """Send away the workers beyond the group."""
        ...

    def snapshot(self, done: Callable[[cm.RequestAnswered], None]) -> None:
        """Take a checkpoint."""
        ...

    def switch(self, plan: PhysicalPlan, parallelism: int, reason: str) -> None:
        """Go on with another plan from the newest checkpoint."""
        ...

    def note(self, text: str) -> None:
        """Tell the user."""
        ...


class Rescaling:
    """The rescales of one job.  Belongs to the coordinator's thread.

    Args:
        plan: what the job begins with.
        parallelism: of steps that name none, there.
    """

    def __init__(self, plan: PhysicalPlan, parallelism: int, config: JobConfig, host: RescaleHost) -> None:
        self._plan, self._config, self._host = plan, config, host
        self._seen: tuple[frozenset[int], bool] = frozenset(), False
        adaptive = config.scheduler == "adaptive"
        least = min(config.min_parallelism, parallelism)
        self.core = r.Rescaler(
            r.Shape(parallelism, plan.parallelism),
            deadline_ms=config.rescale_timeout_ms,
            least=r.Shape(least, replan(plan, least).parallelism) if adaptive else None,
            stable_ms=config.resource_stabilization_timeout_ms,
            shape_of=self._shape_of,
        )

    @property
    def next_due_ms(self) -> float | None:
        """Time at which ``on_time`` is wanted."""
        return self.core.next_due_ms

    def request(self, parallelism: int, done: queue.SimpleQueue[str]) -> None:
        """A user wants another parallelism; ``done`` gets what went wrong, or nothing."""
        try:
            if self._config.protocol == "none":
                raise ConfigError("protocol 'none' keeps no checkpoint to rescale from")
            if self._config.trace_dir is not None:
                raise ConfigError("a trace tells of one parallelism, and the job has a trace_dir")
            if parallelism < 1:
                raise ConfigError(f"parallelism must be at least 1, got {parallelism}")
            shape = r.Shape(parallelism, replan(self._plan, parallelism).parallelism)
        except (BuildError, ConfigError) as e:
            done.put(str(e))
            return
        self.handle(r.Requested(shape, done, now_ms()))

    def on_time(self, slots: frozenset[int]) -> None:
        """Time has gone on; these slots have a worker now."""
        due = self.core.next_due_ms
        seen = slots, self._host.waits
        if seen != self._seen or (due is not None and now_ms() >= due):
            self._seen = seen
            self.handle(r.GroupSeen(slots, self._host.cores, self._host.waits, now_ms()))
            self.handle(r.Tick(now_ms()))

    def handle(self, event: r.RescaleEvent) -> None:
        """Feed the core and perform what it asks for."""
        for effect in self.core.handle(event):
            match effect:
                case r.Recruit(workers=workers):
                    self._host.recruit(workers)
                case r.Dismiss():
                    self._host.dismiss()
                case r.TakeSnapshot():
                    self._host.snapshot(self._snapshot_ended)
                case r.Switch(shape=shape, reason=reason):
                    self._plan = replan(self._plan, shape.parallelism)
                    self._host.switch(self._plan, shape.parallelism, reason)
                case r.Answered(request=request, error=error):
                    cast("queue.SimpleQueue[str]", request).put(error)
                case r.Note(text=text):
                    self._host.note(text)

    def _snapshot_ended(self, answer: cm.RequestAnswered) -> None:
        error = ""
        if answer.reason is not None:
            error = f"the checkpoint failed: {answer.reason.message} {answer.detail}".rstrip()
        self.handle(r.SnapshotEnded(error, now_ms()))

    def _shape_of(self, workers: int) -> r.Shape:
        """The widest shape that so many workers suffice for; 1 where even that needs more."""
        for parallelism in range(min(workers, self._plan.max_parallelism), 0, -1):
            shape = r.Shape(parallelism, replan(self._plan, parallelism).parallelism)
            if shape.workers <= workers:
                return shape
        return r.Shape(1, replan(self._plan, 1).parallelism)
