"""Promoting a fork, from outside its driver's thread: what must be so, and asking its leader to hand over."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from cutwater.api.jobs import job
from cutwater.errors import ConfigError, CutwaterError
from cutwater.operators.enrich.async_map import AsyncMapSpec
from cutwater.operators.window.spec import WindowAggregateSpec
from cutwater.plan.graph import LogicalGraph, PhysicalPlan
from cutwater.runtime.driver.coordinator import Coordinator
from cutwater.runtime.driver.forks import Successor
from cutwater.runtime.driver.requests import send
from cutwater.storage.log.entries import Fork, LogState
from cutwater.storage.log.job_log import JobLog
from cutwater.storage.store.opening import joined, open_existing
from cutwater.storage.store.paths import SAVEPOINTS_FOLDER
from cutwater.storage.store.seal import Seal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S = 0.05
_NEVER_MS = 1e12
"""Between two periodic checkpoints where none are wanted."""


def promote(
    coordinator: Coordinator, directory: str, savepoint: str | None, graph: LogicalGraph, spark: SparkSession | None
) -> str:
    """See ``Job.promote``.

    Args:
        coordinator: of the fork.
        directory: of the fork's checkpoints.
        savepoint: folder for the leader's savepoint.
        graph: the fork's program, with which the leader is driven if nobody else does.
        spark: the session for that.
    """
    publisher, plan = coordinator.publisher, coordinator.plan
    fork = publisher.forks.fork
    if fork is None:
        raise ConfigError(f"job {plan.name!r} is no fork", hint="Only what was started with fork can be promoted.")
    if not fork.follow:
        raise ConfigError(
            f"job {plan.name!r} does not follow {fork.job!r}, and may have read beyond it",
            hint="Fork again, without follow=False (--no-follow).",
        )
    if publisher.forks.shadows:
        if reasons := undecided_steps(plan):
            raise ConfigError(
                f"job {plan.name!r} cannot take over without a gap or a double: {'; '.join(reasons)}",
                hint=f"Stop {fork.job!r} with a savepoint and start the new program from it.",
            )
        drive = partial(_drive, fork, coordinator, graph, spark)
        to = Successor(directory, plan.name, publisher.uid)
        _have_it_handed_over(fork, to, savepoint, publisher.seal, drive)
        coordinator.calls.promotion()
    over = _leader(fork, publisher.seal).handed_over
    return over.savepoint if over is not None else ""


def undecided_steps(plan: PhysicalPlan) -> list[str]:
    """Steps whose output up to a position depends on more than the rows before it; with the reason of each."""
    reasons = [f"step {a!r} closes a loop, in which rows may be on their way" for a, _ in plan.back_edges]
    for step in plan.steps.values():
        if isinstance(step.spec, AsyncMapSpec):
            reasons.append(f"step {step.id!r} waits for what is outside")
        elif isinstance(step.spec, WindowAggregateSpec) and step.spec.window.processing_time:
            reasons.append(f"the windows of step {step.id!r} go by the clock")
    return reasons


def _have_it_handed_over(
    fork: Fork, to: Successor, savepoint: str | None, seal: Seal, drive: Callable[[], job.Job]
) -> None:
    state = _leader(fork, seal)
    if state.handed_over is not None:
        return  # to this fork: it takes over by itself; to another one: it says so
    if state.finished:
        raise CutwaterError(f"job {fork.job!r} has finished: nothing is left to take over")
    folder = savepoint if savepoint is not None else joined(fork.directory, SAVEPOINTS_FOLDER)
    store = open_existing(fork.directory, seal)
    answer = send(store, fork.job, "hand over", savepoint=folder, successor=(to.directory, to.job, to.uid))
    if _leader(fork, seal).handed_over is not None:
        return  # whatever was answered
    if answer is None:
        _hand_over_ourselves(fork, to, folder, seal, drive)
        return
    raise CutwaterError(answer.detail, hint=f"{fork.job!r} serves on. Promote {to.job!r} once more.")


def _hand_over_ourselves(fork: Fork, to: Successor, folder: str, seal: Seal, drive: Callable[[], job.Job]) -> None:
    """Nobody drives the leader: be its next driver (R6), and do what that one would have been asked for.

    A driver that is only late finds that the log has a newer attempt, and stops.  What the leader had in progress is
    committed up to its newest checkpoint, with what was on its way there, and what lies behind it is dropped.
    """
    leader = drive()
    try:
        while leader.is_active and leader.status.phase != "running":
            time.sleep(_POLL_S)
        leader.hand_over(to, folder)
    except CutwaterError as e:
        leader.cancel()
        if _leader(fork, seal).handed_over is None:
            raise CutwaterError(
                f"nobody drives job {fork.job!r}, and it could not be brought back to be handed over: {e}",
                hint=f"Promote {to.job!r} once more.",
            ) from e


def _drive(fork: Fork, coordinator: Coordinator, graph: LogicalGraph, spark: SparkSession | None) -> job.Job:
    """The leader, at its newest checkpoint, without a look at who else may drive it: nobody took our request."""
    upgrade = coordinator.publisher.upgrade
    small = {"parallelism": 1, "min_parallelism": 1, "scheduler": "default", "state_replicas": 0}
    config = coordinator.config.replace(**small, interval_ms=_NEVER_MS, trace_dir=None)
    settings = msgspec.structs.asdict(config) | msgspec.structs.asdict(upgrade)
    own = {"checkpoint": fork.directory, "name": fork.job, "hold": True, "takeover": True}
    return job.start(graph, spark, **own, **settings)


def _leader(fork: Fork, seal: Seal) -> LogState:
    return JobLog(open_existing(fork.directory, seal), fork.job).read()
