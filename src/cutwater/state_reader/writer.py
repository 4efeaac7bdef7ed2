"""Writing a snapshot out of tables: the state that a dataflow begins with, or another snapshot with some replaced.

What is written is a savepoint.  A table has the columns that reading gives, so that what was read can be changed and
written again; where a result does not say what it was made of, as a mean, the stored columns are asked for
(``Snapshot.table(..., raw=True)``).
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from cutwater import __version__
from cutwater.errors import BuildError, ConfigError
from cutwater.plan.checks import check_complete
from cutwater.plan.compatibility import step_records
from cutwater.plan.planner import make_plan
from cutwater.state.keys import key_group_range
from cutwater.state.segments import Segment
from cutwater.state_reader.layout import TableLayout, layouts
from cutwater.state_reader.merge import chunks, merged
from cutwater.state_reader.reader import Snapshot
from cutwater.state_reader.stored import as_table, segments_of
from cutwater.storage.savepoint.files import SavepointFile, SavepointWriter
from cutwater.storage.savepoint.manifest import SavepointManifest, is_savepoint, load_savepoint, publish_savepoint
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND, ChannelLog, read_log
from cutwater.storage.snapshot.manifest import Manifest, Shape
from cutwater.storage.snapshot.segment_files import read_segment
from cutwater.storage.store.opening import joined, open_store, parted

if TYPE_CHECKING:
    from cutwater.plan.checks import check_complete
from cutwater.plan.planner import HasGraph

_VERBATIM = (Shape.ELEMENTS, Shape.WATERMARKS, Shape.REQUESTS)
"""Shapes that are written whole at every checkpoint: there is nothing to merge."""


def write_savepoint(
    path: str | os.PathLike[str],
    states: Mapping[str, Any],
    *,
    flow: HasGraph | None = None,
    base: str | os.PathLike[str] | Snapshot | None = None,
    max_parallelism: int = 128,
) -> str:
    """Write a savepoint for ``restore=``: of a dataflow that has not run yet, or of another snapshot.

    Args:
        path: folder to be made.
        states: tables by what names the state, ``STEP`` or ``STEP.STATE``: Arrow, Polars, pandas or Spark DataFrames,
            with the columns that ``Snapshot.table`` gives; ``key_group`` and ``subtask`` need not be among them.
        flow: the dataflow to begin: all state that is not given is empty, and its sources begin at their start.
        base: a snapshot, of which everything else is kept.
        max_parallelism: number of key groups that the job is started with; with ``base`` it is that one's.

    Returns:
        The folder.

    Raises:
        BuildError: no such state, a column that is missing or of another type, or the dataflow is not whole.
        ConfigError: neither or both of ``flow`` and ``base``, or there is something at ``path`` already.
        DataError: a key without value, or a key twice.

    Example::

        history = spark.sql("SELECT user, count(*) AS n FROM clicks GROUP BY user")
        cw.write_savepoint("begin", {"counts": history}, flow=flow)
        flow.start(spark, checkpoint="checkpoints", restore="begin")
    """
    if (flow is None) == (base is None):
        raise ConfigError("give either flow= or base=", hint="base= takes a snapshot, of which the rest is kept.")
    if base is not None:
        source = base if isinstance(base, Snapshot) else Snapshot(base)
        manifest = source.manifest
    else:
        assert flow is not None
        source, manifest = None, _empty(flow, max_parallelism)
    above, folder = parted(path)
    store = open_store(above)
    if is_savepoint(store, folder) or store.names(folder):
        raise ConfigError(f"{os.fspath(path)!r} is there already", hint="Give a folder that is to be made.")
    known = source.layouts if source is not None else layouts(manifest, _no_schema)
    given = _by_layout(known, states)
    writer = SavepointWriter(store, folder)
    try:
        files = [*_new_state(writer, manifest, given)]
        if source is not None:
            files += _kept_state(writer, source, set(given))
            files += _logs(writer, source)
        publish_savepoint(store, folder, _described(manifest, source, files))
    except BaseException:
        writer.abort()
        raise
    return joined(store.uri, folder)


def _no_schema(_: object) -> pa.Schema:
    raise AssertionError("an empty snapshot has no entries")


def _empty(flow: HasGraph, max_parallelism: int) -> Manifest:
    """Manifest of a flow that never ran."""
    check_complete(flow.graph)
    plan = make_plan(flow, 1, max_parallelism)
    now_ms = time.time_ns() // 1_000_000
    return Manifest(
        job=plan.name,
        uid=uuid.uuid4().hex,
        checkpoint_id=1,
        attempt=1,
        protocol="aligned",
        max_parallelism=max_parallelism,
        parallelism=1,
        triggered_ms=now_ms,
        completed_ms=now_ms,
        steps=[msgspec.structs.replace(record, parallelism=1) for record in step_records(plan)],
        subtasks=[],
        entries=[],
        back_edges=plan.back_edges,
        engine=__version__,
    )


def _by_layout(known: list[TableLayout], states: Mapping[str, Any]) -> dict[int, tuple[TableLayout, pa.Table]]:
    """Which table is given for which state; numbered as ``known``."""
    found: dict[int, tuple[TableLayout, pa.Table]] = {}
    names = {f"{t.step}.{t.name}": n for n, t in enumerate(known)}
    for name, frame in states.items():
        mine = [n for n, t in enumerate(known) if t.step == name and t.main]
        number = names.get(name, mine[0] if len(mine) == 1 else None)
        if number is None:
            listed = ", ".join(a for a, n in names.items() if known[n].shape not in _VERBATIM) or "none"
            raise BuildError(f"no state {name!r} to write", hint=f"There are: {listed}.")
        found[number] = (known[number], as_table(frame, name))
    return found


def _new_state(
    writer: SavepointWriter, manifest: Manifest, given: Mapping[int, tuple[TableLayout, pa.Table]]
) -> Iterator[SavepointFile]:
    for layout, table in given.values():
        whole = segments_of(layout, table, manifest.max_parallelism)
        assert layout.record is not None
        for subtask, owned in _subtasks(layout.record.parallelism, manifest.max_parallelism):
            mine = (s for s in whole if s.key_groups is not None and s.key_groups[0] in owned)
            yield from writer.add_state(layout.step, subtask, owned, mine)


def _subtasks(parallelism: int, max_parallelism: int) -> Iterator[tuple[int, range]]:
    return ((n, key_group_range(n, parallelism, max_parallelism)) for n in range(parallelism))


def _kept_state(writer: SavepointWriter, source: Snapshot, replaced: set[int]) -> Iterator[SavepointFile]:
    manifest = source.manifest
    listed: set[tuple[str, str]] = set()
    for number, layout in enumerate(source.layouts):
        listed |= {(layout.step, name) for name in layout.segments}
        if number in replaced or layout.record is None or not layout.entries or layout.shape in _VERBATIM:
            continue
        for name in layout.segments:
            for subtask, owned in _subtasks(layout.record.parallelism, manifest.max_parallelism):
                yield from writer.add_state(layout.step, subtask, owned, _merged(source, layout, name, owned))
    verbatim = {(t.step, n) for t in source.layouts if t.shape in _VERBATIM for n in t.segments}
    parallelism = {record.id: record.parallelism for record in manifest.steps}
    for entry in manifest.entries:
        place = (entry.step, entry.name)
        if entry.kind != CHANNEL_KIND and (place in verbatim or place not in listed):
            owned = key_group_range(entry.subtask, parallelism[entry.step], manifest.max_parallelism)
            segment = read_segment(source.store, source.folder, entry)
            yield from writer.add_state(entry.step, entry.subtask, owned, [segment])


def _merged(source: Snapshot, layout: TableLayout, name: str, owned: range) -> Iterator[Segment]:
    for part in chunks(layout.entries, owned):
        kind = "base"
        for batch in merged(layout, name, source.segments, part):
            yield Segment(name, kind, batch, (part.start, part.stop), len(layout.identity))
            kind = "delta"


def _logs(writer: SavepointWriter, source: Snapshot) -> Iterator[SavepointFile]:
    """Rows on their way, piece by piece."""
    for entry in source.manifest.entries:
        if entry.kind == CHANNEL_KIND:
            assert entry.channel is not None
            items = read_log(source.store, source.folder, entry)
            place = (entry.step, entry.subtask, entry.name, entry.channel, entry.side, entry.first_row)
            yield from writer.add_log(ChannelLog(*place, items))


def _described(manifest: Manifest, source: Snapshot | None, files: list[SavepointFile]) -> SavepointManifest:
    """The new savepoint: for its job it is the one that it was made from."""
    committed_by = manifest.checkpoint_id
    if source is not None and source.is_savepoint:
        committed_by = load_savepoint(source.store, source.folder).committed_by
    replaced = msgspec.structs.replace(manifest, engine=__version__)
    return SavepointManifest.of(replaced, files, committed_by=committed_by)
