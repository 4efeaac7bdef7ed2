"""Starting a job, and the handle on it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from cutwater.api.steps.build import GraphBuilder
from cutwater.config import JobConfig
from cutwater.connectors.files.sink import read_result
from cutwater.connectors.staging import Guard
from cutwater.errors import ConfigError, CutwaterError
from cutwater.plan.graph import PhysicalPlan
from cutwater.plan.planner import replan
from cutwater.plan.upgrade import upgrade_of
from cutwater.protocol.job.messages import Outcome
from cutwater.runtime.driver.coordinator import Coordinator
from cutwater.runtime.driver.forks import Successor
from cutwater.runtime.driver.lease import Lease, Turn, await_turn
from cutwater.runtime.driver.preparing import (
    checked_plan,
    discover,
    make_publisher,
    open_job_store,
    prepare,
    result_directory,
    result_schema,
)
from cutwater.runtime.driver.publisher import Publisher
from cutwater.runtime.driver.requests import actions_of, watch
from cutwater.runtime.settings import make_config
from cutwater.runtime.spark_host import SparkHost, is_local, master_of
from cutwater.runtime.status.status import JobStatus
from cutwater.runtime.transport.sockets import nothing
from cutwater.spark.session import session, usable_context
from cutwater.storage.log_entries import Fork
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import absolute_uri, joined

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

    from cutwater.api.flow import Dataflow
    from cutwater.plan.graph import LogicalGraph


class Job:
    """Handle on a running job; the names are those of Spark's ``StreamingQuery``.

    Obtained from ``Dataflow.start``.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        spark: SparkSession | None,
        graph: LogicalGraph,
        directory: str,
        temporary: bool,
        lease: Lease | None,
    ) -> None:
        self._coordinator, self._spark, self._graph = coordinator, spark, graph
        self._directory, self._temporary, self._lease = directory, temporary, lease
        self._stop_watching: Callable[[], None] = nothing

    def __repr__(self) -> str:
        return repr(self.status).replace("JobStatus", type(self).__name__, 1)

    def __str__(self) -> str:
        return str(self.status)

    def _repr_html_(self) -> str:
        from cutwater.runtime.status.progress import as_html

        return as_html(self.status)

    @property
    def name(self) -> str:
        return self._coordinator.plan.name

    @property
    def id(self) -> str:
        """Uid of the job: the same over all drivers and restarts."""
        return self._coordinator.publisher.uid

    @property
    def checkpoint_dir(self) -> str:
        """The job's folder: log, checkpoints, staged input and collected output."""
        return joined(self._directory, self.name)

    @property
    def plan(self) -> PhysicalPlan:
        return self._coordinator.plan

    @property
    def status(self) -> JobStatus:
        """Present state of the job."""
        return msgspec.structs.replace(self._coordinator.board.status, checkpoint_dir=self.checkpoint_dir)

    @property
    def last_progress(self) -> dict[str, Any]:
        """The status as plain data, for logs and scripts."""
        return cast("dict[str, Any]", msgspec.to_builtins(self.status))

    @property
    def outcome(self) -> str:
        """End of the job: "finished", "stopped", "cancelled" or "failed"; empty while it runs."""
        return self._coordinator.board.status.outcome

    @property
    def is_active(self) -> bool:
        return not self._coordinator.driver.ended.is_set()

    def exception(self) -> CutwaterError | None:
        """Error that made the job fail; ``None`` while it runs or if it did not fail."""
        return self._coordinator.driver.error if self._coordinator.driver.ended.is_set() else None

    def await_termination(self, timeout_s: float | None = None) -> bool:
        """Wait until the job ends; False if it still runs after ``timeout_s``.

        Raises:
            CutwaterError: the job failed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._coordinator.driver.ended.wait(0.2):  # in slices, so that Ctrl-C gets through
            if deadline is not None and time.monotonic() >= deadline:
                return False
        self._coordinator.driver.join()
        self._clean_up()
        if self._coordinator.driver.error is not None:
            raise self._coordinator.driver.error
        return True

    def checkpoint(self) -> int:
        """Take a checkpoint, now or when a part of the job that goes back is there again; returns its id once complete.

        Raises:
            CutwaterError: it did not complete, with the reason.
        """
        return self._coordinator.calls.checkpoint()

    def rescale(self, parallelism: int) -> None:
        """Go on at another parallelism; returns when the job runs there.

        The workers that it lacks are started while it runs on.  Then a checkpoint is taken, and the job goes on from
        it: keys move to their new owners, splits are dealt anew.

        Args:
            parallelism: of all steps that name no number of their own.

        Raises:
            CutwaterError: too few free cores, or the checkpoint failed; the job goes on as it was.
        """
        self._coordinator.calls.rescale(parallelism)

    def savepoint(self, directory: str | os.PathLike[str]) -> str:
        """Take a savepoint: a snapshot that is yours, whole and in a form of its own.  The job goes on.

        Args:
            directory: a folder that driver and workers see; the savepoint gets a new folder in it.

        Returns:
            The savepoint's folder: give it to ``restore=``, move it, copy it, delete it as you like.

        Raises:
            CutwaterError: there is none, with the reason; the job goes on.
        """
        return self._coordinator.calls.savepoint("savepoint", absolute_uri(directory))

    def stop(self, savepoint: str | os.PathLike[str] | None = None, *, drain: bool = False) -> str | None:
        """Take a last checkpoint and stop; a later start resumes there.  Returns when all workers are gone.

        Args:
            savepoint: a folder for a savepoint of the very moment at which the job stops: no row is read behind it.
            drain: with ``savepoint``: the job ends as if its sources were exhausted, so that the last windows fire. It
                has finished then, and does not go on.

        Returns:
            The savepoint's folder, if one was wanted.

        Raises:
            ConfigError: ``drain`` without ``savepoint``.
            CutwaterError: there is no savepoint, with the reason; the job goes on.
        """
        if savepoint is not None:
            path = self._coordinator.calls.savepoint("drain" if drain else "stop", absolute_uri(savepoint))
            if drain:
                self.await_termination()
            else:
                self._end(Outcome.STOPPED, f"stopped by the user, with savepoint {path}")
            return path
        if drain:
            raise ConfigError(
                "a job is drained with a savepoint", hint="Say where to: stop(savepoint=..., drain=True)."
            )
        waiting = self.status.waiting
        if self.is_active and waiting is not None and waiting.cores < waiting.wanted:  # who knows how long
            self._coordinator.board.warn(f"stopped without a last checkpoint: {waiting.text}")
        elif self.is_active:
            try:
                self.checkpoint()
            except CutwaterError as e:
                self._coordinator.board.warn(f"stopped without a last checkpoint: {e}")
        self._end(Outcome.STOPPED, "stopped by the user")
        return None

    def cancel(self) -> None:
        """Stop now, without a checkpoint; what was committed stays.  Returns when all workers are gone."""
        self._end(Outcome.CANCELLED, "cancelled by the user")

    def promote(self, savepoint: str | os.PathLike[str] | None = None) -> str:
        """Let this fork take over from the job that it was forked from, its leader; returns when it serves.

        The leader stops with a savepoint, all its output committed.  The fork reads exactly as far, drops what its
        shadows kept, and writes to the real sinks what follows.  Whatever fails: until the leader's log says that it
        was handed over the leader goes on; from then on this job takes over, also if it was started again.  So the
        call can be repeated, and returns at once if the fork serves.  If nobody drives the leader any more, this job's
        driver does so until it is handed over, with this job's program, and reads nothing: that takes one core.

        Args:
            savepoint: a folder for the leader's savepoint (default: ``savepoints`` in its checkpoint directory).

        Returns:
            The leader's savepoint: with it and the old program there is a way back.

        Raises:
            ConfigError: the job is no fork, does not follow its leader, or has a step whose output is not decided by
                what was read alone.
            CutwaterError: the leader could not be stopped, or has finished.

        Example::

            back = fork.promote()
            fork.status.outcome, back  # "" (it runs, and serves), "checkpoints/savepoints/..."
        """
        from cutwater.api.jobs.forks import promote

        folder = None if savepoint is None else absolute_uri(savepoint)
        return promote(self._coordinator, self._directory, folder, self._graph, self._spark)

    def hand_over(self, to: Successor, savepoint: str) -> str:
        """Stop with a savepoint and leave the rest to a fork; returns where the savepoint lies.

        Raises:
            CutwaterError: nothing was handed over, with the reason; the job goes on.
        """
        path = self._coordinator.calls.hand_over(to, savepoint)
        self._await_end()
        return path

    def disconnect(self, slot: int) -> None:
        """Break the connection to a worker, as a network does: a fault drill.  The worker is replaced."""
        self._coordinator.driver.disconnect(slot)

    def result(self, step: str) -> DataFrame:
        """Rows of a ``collect`` step of a finished job, as a Spark DataFrame."""
        directory = result_directory(self.plan, step)
        spark = self._spark or session(self.plan.parallelism)
        return spark.read.parquet(directory)

    def result_table(self, step: str) -> pa.Table:
        """Rows of a ``collect`` step of a finished job, as an Arrow table in this process."""
        return read_result(result_directory(self.plan, step), result_schema(self.plan, step))

    def watch_requests(self, store: Store) -> None:
        """Let other processes use the handle through the job's folder (``cutwater stop`` and others)."""
        self._stop_watching = watch(
            store,
            self.name,
            attempt=lambda: self._coordinator.board.status.attempt,
            actions=actions_of(self),
            ended=self._coordinator.driver.ended,
        )

    def _end(self, outcome: Outcome, reason: str) -> None:
        self._coordinator.driver.request_end(outcome, reason)
        self._await_end()

    def _await_end(self) -> None:
        self._coordinator.driver.ended.wait()
        self._coordinator.driver.join()
        self._clean_up()

    def _clean_up(self) -> None:
        self._stop_watching()
        if self._lease is not None:
            self._lease.close()
        if self._temporary and not any(s.kind == "collect" for s in self.plan.steps.values()):
            shutil.rmtree(self._directory, ignore_errors=True)


def start(
    flow: Dataflow | LogicalGraph,
    spark: SparkSession | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    restore: str = "latest",
    claim: Literal["no_claim", "claim"] = "no_claim",
    name: str | None = None,
    fork: Fork | None = None,
    hold: bool = False,
    takeover: bool = False,
    **settings: Any,
) -> Job:
    """Start a dataflow on a Spark session; returns at once.

    Args:
        spark: the session; ``None`` makes a local one that suits the job, unless the job has finished already.
        checkpoint: directory for checkpoints (shared by driver and workers).  Without one a temporary directory
            serves, which survives failures of workers but not of the driver.
        restore: "latest" goes on from the newest checkpoint in ``checkpoint``, if there is one; or a snapshot to begin
            from: ``DIR/JOB``, ``DIR/JOB@7``, ``DIR/JOB/chk-7``, or the folder of a savepoint.
        claim: "claim" gives the savepoint to the job, which removes it when it has ``num_retained`` checkpoints of its
            own, or has finished; else it stays the user's.
        name, fork: of the job, if not the dataflow's; and what it is a fork of, at its first start (``Dataflow.fork``).
        hold: it reads nothing beyond its newest checkpoint; it is there to be handed over (``Job.promote``).
        takeover: take the job from a driver that lives; a dead one is replaced anyway.
        settings: fields of ``JobConfig`` and ``Upgrade``; names without ``_ms`` (``interval="1s"``) take durations.

    Raises:
        BuildError: the dataflow is not whole, or a sink or source cannot do what the protocol demands.
        ConfigError: an unknown or impossible setting.
        FencedError: another driver runs the job, and ``takeover`` was not given.
        StorageError: the checkpoint directory cannot be used, or its snapshot does not fit the program.
    """
    upgrade, settings = upgrade_of(settings)
    config = make_config(settings).on_master(is_local(master_of(spark)))
    graph = flow.graph if name is None else replace(flow.graph, name=GraphBuilder.check_name(name))
    plan = checked_plan(graph, config)
    temporary = checkpoint is None
    directory = tempfile.mkdtemp(prefix="cutwater-") if checkpoint is None else absolute_uri(checkpoint)
    with ExitStack() as undo:
        if temporary:
            undo.callback(shutil.rmtree, directory, ignore_errors=True)
        store = open_job_store(directory, config)
        turn = await_turn(store, plan.name, takeover=takeover)
        publisher = make_publisher(store, plan, config, upgrade, restore=restore, claim=claim, fork=fork, hold=hold)
        plan = plan if publisher.parallelism == config.parallelism else replan(plan, publisher.parallelism)
        finished = publisher.log.state.finished
        lease = None if temporary or finished else _lease(store, publisher, turn, undo)
        context = None if finished and spark is None else usable_context(spark, plan.parallelism)
        coordinator = _coordinator(plan, config, publisher, store, context)
        undo.pop_all()
    coordinator.start()
    job = Job(coordinator, spark, graph, directory, temporary, lease)
    if lease is not None:
        lease.follow(lambda: coordinator.board.status, coordinator.driver.ended)
        job.watch_requests(store)
    return job


def _lease(store: Store, publisher: Publisher, turn: Turn, undo: ExitStack) -> Lease:
    lease = Lease(store, publisher.job, turn)
    undo.callback(lease.close)
    publisher.warnings += [turn.note] if turn.note else []
    return lease


def _coordinator(
    plan: PhysicalPlan, config: JobConfig, publisher: Publisher, store: Store, context: SparkContext | None
) -> Coordinator:
    guard = Guard(store.seal, config.file_access)
    plan = publisher.plan = prepare(plan, store, publisher.forks.fork, publisher.upgrade.step_ids, guard)
    sources = [] if publisher.log.state.finished else [s for s in plan.steps.values() if s.role == "source"]
    host = partial(SparkHost, context, f"cutwater-{plan.name}-{os.getpid()}-{time.monotonic_ns()}")
    return Coordinator(plan, config, publisher, host, store=store, splits={s.id: discover(s) for s in sources})
