"""The shapes of a job: the plans of its program at other parallelisms, and which of them may be asked for."""

from __future__ import annotations

from cutwater.config import JobConfig
from cutwater.errors import ConfigError
from cutwater.plan.graph import PhysicalPlan
from cutwater.plan.planner import replan
from cutwater.protocol.job import rescale as r


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
