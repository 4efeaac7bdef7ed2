"""Forks: a second job from the same cut, whose sinks are shadows; and its promotion, outside of its driver's thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from cutwater.api.jobs import job
from cutwater.api.steps.build import GraphBuilder
from cutwater.connectors.base import Source, SourceHooks
from cutwater.errors import BuildError, ConfigError, CutwaterError
from cutwater.operators.enrich.async_map import AsyncMapSpec
from cutwater.operators.window.spec import WindowAggregateSpec
from cutwater.plan.graph import LogicalGraph, PhysicalPlan, Step
from cutwater.runtime.driver.coordinator import Coordinator
from cutwater.runtime.driver.forks import Successor
from cutwater.runtime.driver.requests import send
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import Fork, LogState
from cutwater.storage.reading import SnapshotAddress, open_snapshot, resolve_snapshot
from cutwater.storage.store.opening import absolute_uri, joined, open_existing, store_at
from cutwater.storage.store.paths import SAVEPOINTS_FOLDER
from cutwater.storage.store.seal import Seal, seal_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutwater.api.flow import Dataflow


def fork(
    flow: Dataflow | LogicalGraph,
    snapshot: str,
    spark: SparkSession | None = None,
    *,
    name: str,
    checkpoint: str | os.PathLike[str] | None = None,
    follow: bool = True,
    **settings: Any,
) -> job.Job:
    """See ``Dataflow.fork``."""
    GraphBuilder.check_name(name)
    for step in flow.graph.steps.values():
        _check_source(step)
    seal = seal_of(settings.get("key_file"), accept_unsealed=bool(settings.get("accept_unsealed")))
    address = resolve_snapshot(snapshot, seal)
    manifest = open_snapshot(address).manifest
    directory = _directory(address, checkpoint)
    if name == manifest.job:
        raise ConfigError(f"a fork of job {manifest.job!r} needs a name of its own", hint="Give name= (--name).")
    leader = address.directory if not address.is_savepoint else directory
    store = store_at(leader, seal)
    log = JobLog(store, manifest.job).read() if store.exists() and manifest.job in store.names() else None
    if follow and (log is None or log.uid != manifest.uid):
        raise ConfigError(
            f"job {manifest.job!r}, which wrote {snapshot}, is not in {leader}: there is nobody to follow",
            hint="Give checkpoint= (--checkpoint) the directory of that job, or follow=False (--no-follow).",
        )
    made = Fork(leader, manifest.job, manifest.uid, str(address), follow)
    return job.start(flow, spark, checkpoint=directory, name=name, fork=made, **settings)


def _directory(address: SnapshotAddress, checkpoint: str | os.PathLike[str] | None) -> str:
    if checkpoint is not None:
        return absolute_uri(checkpoint)
    if address.is_savepoint:
        raise ConfigError(
            "a savepoint does not tell where the fork's checkpoints are to go",
            hint="Give checkpoint= (--checkpoint): the directory of the job that took it, if the fork is to follow it.",
        )
    return address.directory


def _check_source(step: Step) -> None:
    """Refuse what cannot be read by two jobs at once.

    Raises:
        BuildError: names the step.
    """
    if step.role != "source":
        return
    source = cast(Source, step.spec)
    if not source.replayable:
        raise BuildError(
            "its source can be read once only, and the first job reads it",
            step=step.id,
            hint="Write its rows somewhere first, and read them from there.",
        )
    if not source.bounded and SourceHooks(source).is_staged:
        raise BuildError(
            "its source is a streaming query, whose rows the first job stages for itself",
            step=step.id,
            hint="Write the stream to files or a table, and read those in both jobs.",
        )


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
