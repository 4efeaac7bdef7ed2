"""Preparation of a job: its store, its plan checked, its inputs staged, its splits found; or that it has finished."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import pyarrow as pa

from cutwater.config import JobConfig
from cutwater.connectors.base import Sink, SinkHooks, Source, SourceHooks, Split
from cutwater.connectors.staging import Guard
from cutwater.errors import BuildError, ConfigError, CorruptSnapshotError, CutwaterError
from cutwater.plan.checks import check_guarantees
from cutwater.plan.compatibility import step_records
from cutwater.plan.graph import LogicalGraph, PhysicalPlan, Step
from cutwater.plan.planner import make_plan
from cutwater.plan.recovery import check_recovery, pin_tables
from cutwater.plan.replaced_sinks import shadowed_plan
from cutwater.plan.upgrade import Upgrade
from cutwater.runtime.driver.forks import limits_of
from cutwater.runtime.driver.publisher import Publisher
from cutwater.runtime.spark_host import ship_program
from cutwater.state.disk.rocks import require_rocksdb
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import Fork, LogState
from cutwater.storage.reading import resolve_snapshot
from cutwater.storage.snapshot.manifest import Manifest, StepRecord
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import another, joined, open_store, require_exactly_once
from cutwater.storage.store.paths import input_folder, output_folder, shadow_folder
from cutwater.storage.store.seal import seal_of


def checked_plan(graph: LogicalGraph, config: JobConfig) -> PhysicalPlan:
    """The plan of a graph that can do what the settings demand.

    Raises:
        BuildError: it cannot, or is not whole.
        ConfigError: the package of the state backend is not installed.
    """
    plan = make_plan(graph, config.parallelism, config.max_parallelism)
    check_guarantees(graph, config.protocol)
    if config.state_backend == "rocksdb":
        require_rocksdb()
    check_recovery(plan, config)
    return pin_tables(plan, config)


def make_publisher(
    store: Store,
    plan: PhysicalPlan,
    config: JobConfig,
    upgrade: Upgrade,
    *,
    restore: str,
    claim: str,
    fork: Fork | None,
    hold: bool,
) -> Publisher:
    """The job's log, opened, and where the job begins; a fork without a checkpoint begins where it was forked.

    Args:
        restore: as ``start`` takes it, like ``claim``, ``fork`` and ``hold``.

    Raises:
        ConfigError: there is no such snapshot, the job is something else already, or a fork that is to recover in a way
            that would have to know how far its leader let it read.
        BuildError: the rows of a sink cannot be kept by a shadow.
    """
    known = JobLog(store, plan.name).read()
    fork = _fork_of(known, fork)
    if fork is not None:
        if config.records_order:
            raise ConfigError(
                f"job {plan.name!r} is a fork, and recovery is {config.recovery!r}: "
                "no determinant log says how far it was let read",
                hint="Choose recovery='region' or 'job' for it.",
            )
        shadowed_plan(plan, joined(store.uri, shadow_folder(plan.name)))
        if not known.completed and restore == "latest":
            restore = fork.snapshot
    origin = None if restore == "latest" else resolve_snapshot(restore, store.seal)
    if claim not in ("no_claim", "claim"):
        raise ConfigError(f"claim {claim!r} is unknown", hint="Choose 'no_claim' or 'claim'.")
    claims = claim == "claim"
    publisher = Publisher(store, plan, config, origin, upgrade, claim=claims, fork=fork)
    if hold and known.latest is not None:
        publisher.forks.held = limits_of(load_manifest(store, plan.name, known.latest), upgrade.step_ids)
    return publisher


def _fork_of(known: LogState, asked: Fork | None) -> Fork | None:
    """Job that the job is a fork of: as its log says, once it has one."""
    if asked is None or not known.uid:
        return asked or known.fork
    if known.fork is None or known.fork.uid != asked.uid:
        what = "no fork" if known.fork is None else f"a fork of another job, {known.fork.job!r}"
        raise ConfigError(f"there is a job {known.name!r} already, and it is {what}", hint="Choose another name.")
    return known.fork


def prepare(
    plan: PhysicalPlan, store: Store, fork: Fork | None, step_ids: Mapping[str, str], guard: Guard
) -> PhysicalPlan:
    """Stage DataFrames (a fork reads what its leader has staged), and give sinks that need one their directory.

    Args:
        store: the checkpoint directory.
        fork: what it is a fork of.
        step_ids: its ids of the leader's steps, where they differ.
        guard: of what is staged.
    """
    inputs, job = (another(store, fork.directory), fork.job) if fork is not None else (store, plan.name)
    old = {new: old for old, new in step_ids.items()} if fork is not None else {}
    steps: dict[str, Step] = {}
    for step in plan.steps.values():
        spec: Any = step.spec
        if step.role == "source" and SourceHooks(spec).is_staged:
            hooks, folder = SourceHooks(spec), input_folder(job, old.get(step.id, step.id))
            if hooks.pickles_user_code:
                ship_program()
            spec = hooks.stage(
                joined(inputs.uri, folder) if hooks.stages_in_store else inputs.local_folder(folder),
                guard.seal,
                guard.access,
                fork is None,
            )
        elif step.role == "sink":
            spec = SinkHooks(spec).bind(joined(store.uri, output_folder(plan.name, step.id)))
        steps[step.id] = replace(step, spec=cast("Source | Sink", spec))
    return replace(plan, steps=steps)


def discover(step: Step) -> list[Split]:
    """The splits of a read step; errors name it."""
    try:
        return cast(Source, step.spec).discover()
    except CutwaterError as e:
        raise type(e)(e.message, step=e.step or step.id, hint=e.hint) from e
    except OSError as e:
        raise BuildError(f"the source cannot be listed: {e}", step=step.id) from e


_ADVICE = (
    "To run {what}, give another job name (name=, --name) or checkpoint directory (checkpoint=, --checkpoint); with "
    "restore= (--restore) it begins from a snapshot of this one."
)


def has_finished(checkpoint: str | os.PathLike[str], job: str, config: JobConfig) -> bool:
    """True if the log of a job says that nothing is left to do.

    Args:
        config: its key.

    Raises:
        ConfigError: the checkpoint directory cannot be one.
        StorageError: it cannot be used, or the log is damaged.
    """
    return JobLog(open_job_store(os.fspath(checkpoint), config), job).read().finished


def open_job_store(directory: str, config: JobConfig) -> Store:
    """The checkpoint directory of a job, with its key; refused where it cannot do what the protocol demands.

    Raises:
        ConfigError: it cannot be one, or the key cannot be had.
        StorageError: it cannot be made or written.
    """
    seal = seal_of(config.key_file, accept_unsealed=config.accept_unsealed)
    store = open_store(directory, seal, config.file_access)
    if config.protocol not in ("none", "at_least_once"):
        require_exactly_once(store)
    return store


def finished_text(plan: PhysicalPlan, store: Store, state: LogState, step_ids: Mapping[str, str]) -> str:
    """Text on why nothing is run, and on whether the job that finished was this program.

    Args:
        plan: of the program.
        store: the checkpoint directory.
        state: what the log says of the job.
        step_ids: new ids of steps by old ones.
    """
    try:
        manifest = load_manifest(store, plan.name, state.latest) if state.latest is not None else None
    except CorruptSnapshotError:  # nothing is restored from it, and what it would tell is only a hint
        manifest = None
    changed = list(differences(plan, manifest, step_ids)) if manifest is not None else []
    if not changed:
        return f"had finished already: nothing was run. {_ADVICE.format(what='it again')}"
    return (
        f"had finished already, as another program: {'; '.join(changed)}. Nothing was run. "
        f"{_ADVICE.format(what='this program')}"
    )


def differences(plan: PhysicalPlan, manifest: Manifest, step_ids: Mapping[str, str]) -> Iterator[str]:
    """In what a program's steps are not those of a checkpoint, as far as that tells; parallelism is no difference."""
    old = {step_ids.get(r.id, r.id): r for r in manifest.steps}
    new = {r.id: r for r in step_records(plan)}
    yield from (f"step {id!r} is new" for id in new if id not in old)
    yield from (f"step {old[id].id!r} is gone" for id in old if id not in new)
    yield from (f"step {id!r} has changed" for id in new if id in old and _meaning(new[id]) != _meaning(old[id]))


def _meaning(record: StepRecord) -> StepRecord:
    """A step without its id, its place, and what older releases did not write."""
    return msgspec.structs.replace(record, id="", parallelism=0, vertex=0, types=b"", parts=[])


def result_directory(plan: PhysicalPlan, step: str) -> str:
    """Folder of the rows of a ``collect`` step.

    Raises:
        ConfigError: it is none; the hint lists those that are.
    """
    known = plan.steps.get(step)
    if known is None or known.kind != "collect":
        collects = ", ".join(s.id for s in plan.steps.values() if s.kind == "collect")
        raise ConfigError(f"step {step!r} collects nothing", hint=f"Steps that do: {collects or 'none'}.")
    return str(cast(Any, known.spec).directory)


def result_schema(plan: PhysicalPlan, step: str) -> pa.Schema:
    """Of the rows that a ``collect`` step gets."""
    source = plan.steps[step].inputs[0]
    return plan.steps[source.step].outputs[source.output].schema
