"""Jobs that have finished: nothing is run again, and the user is told why and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
import pyarrow as pa

from cutwater.config import JobConfig
from cutwater.errors import ConfigError, CorruptSnapshotError
from cutwater.plan.graph import PhysicalPlan
from cutwater.plan.records import step_records
from cutwater.storage.log.entries import LogState
from cutwater.storage.log.job_log import JobLog
from cutwater.storage.snapshot.manifest import Manifest, StepRecord
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import open_store, require_exactly_once
from cutwater.storage.store.seal import seal_of

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
