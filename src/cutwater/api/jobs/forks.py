"""Forking a job: a second job from the same cut, whose sinks are shadows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from cutwater.api.jobs import job
from cutwater.api.steps.build import GraphBuilder
from cutwater.connectors.base import Source, SourceHooks
from cutwater.errors import BuildError, ConfigError
from cutwater.plan.graph import LogicalGraph, Step
from cutwater.storage.log.entries import Fork
from cutwater.storage.log.job_log import JobLog
from cutwater.storage.reading.addresses import SnapshotAddress, resolve_snapshot
from cutwater.storage.reading.any_snapshot import open_snapshot
from cutwater.storage.store.opening import absolute_uri, store_at
from cutwater.storage.store.seal import seal_of

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
