"""Reading a snapshot: which tables it holds, and their rows as Arrow batches."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import ConfigError, did_you_mean
from cutwater.state.key_index import NullableIndex
from cutwater.state.keys import hash_keys, key_groups
from cutwater.state.segments import GROUP_COLUMN, Segment
from cutwater.state.table.keyed_segments import keyed_rows
from cutwater.state_reader.layout import TableLayout, layouts
from cutwater.state_reader.values import DOMAIN, TIME, Column, can_be_put_together, columns_of, exploded, open_windows
from cutwater.storage.reading import open_snapshot, resolve_snapshot
from cutwater.storage.snapshot.channel_log import read_log
from cutwater.storage.snapshot.manifest import Entry, Manifest, Shape
from cutwater.storage.snapshot.segment_files import read_segment
from cutwater.storage.store.base import Store
from cutwater.storage.store.seal import seal_of

_CHUNK_ROWS = 1 << 18
_KEPT_BYTES = 64 << 20
_MICROSECONDS = 1000


class Segments:
    """Reads segments of one snapshot, and keeps those read last: a delta may concern many stretches of key groups."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder
        self._kept: OrderedDict[int, tuple[Entry, Segment]] = OrderedDict()
        self._kept_bytes = 0
        self.bytes_read = 0
        """Of segments, since the beginning."""

    def read(self, entry: Entry) -> Segment:
        """The segment of an entry, verified."""
        found = self._kept.get(id(entry))
        if found is not None:
            self._kept.move_to_end(id(entry))
            return found[1]
        segment = read_segment(self._store, self._folder, entry)
        self.bytes_read += entry.length
        self._kept[id(entry)] = (entry, segment)
        self._kept_bytes += entry.length
        while self._kept_bytes > _KEPT_BYTES:
            _, (gone, _) = self._kept.popitem(last=False)
            self._kept_bytes -= gone.length
        return segment


def chunks(entries: Sequence[Entry], wanted: range) -> Iterator[range]:
    """Cut key groups into stretches of about as many rows as fit memory well, at least one group each.

    >>> at = [Entry("s", 0, "agg", "base", 2**20, 0, "", (0, 8))]
    >>> [(c.start, c.stop) for c in chunks(at, range(1, 6))]
    [(1, 3), (3, 5), (5, 6)]
    """
    rows = np.zeros(wanted.stop + 1)
    for entry in entries:
        if entry.key_groups is not None:
            start, stop = entry.key_groups
            rows[start:stop] += entry.rows / max(stop - start, 1)
    begin, held = wanted.start, 0.0
    for group in wanted:
        if group > begin and held + rows[group] > _CHUNK_ROWS:
            yield range(begin, group)
            begin, held = group, 0.0
        held += rows[group]
    if begin < wanted.stop:
        yield range(begin, wanted.stop)


def merged(layout: TableLayout, name: str, segments: Segments, groups: range) -> list[pa.RecordBatch]:
    """The stored rows of these key groups, under one of the names of ``layout.segments``."""
    concerned = (
        segments.read(entry)
        for entry in layout.entries
        if entry.name == name
        and entry.key_groups is not None
        and entry.key_groups[0] < groups.stop
        and groups.start < entry.key_groups[1]
    )
    batches = keyed_rows(concerned, layout.stored, groups)
    if layout.identity and len(batches) > 1:
        return [_newest(pa.concat_batches(batches), layout.identity)]
    return batches


def with_clocks(batch: pa.RecordBatch, segment: str) -> pa.RecordBatch:
    """Timers with the clock that they go by, and their times in microseconds."""
    event = "event" in segment
    times = batch.column(TIME).to_numpy() * (1 if event else _MICROSECONDS)
    batch = batch.set_column(batch.schema.get_field_index(TIME), TIME, pa.array(times))
    domain = pa.array(["event" if event else "processing"] * batch.num_rows, pa.string())
    return batch.append_column(DOMAIN, domain)


def _newest(batch: pa.RecordBatch, identity: Sequence[str]) -> pa.RecordBatch:
    """The last row of each key."""
    columns = [batch.column(name) for name in identity]
    index = NullableIndex([column.type for column in columns], batch.num_rows)
    gids = index.upsert(columns)
    if len(index) == batch.num_rows:
        return batch
    last = np.empty(len(index), np.int64)
    last[gids] = np.arange(batch.num_rows)  # of rows of one group id the last one stays
    groups = batch.column(GROUP_COLUMN).to_numpy()[last]
    return batch.take(pa.array(last[np.argsort(groups, kind="stable")]))


_compute: Any = pyarrow.compute
_BATCH_ROWS = 1 << 16


@dataclass(frozen=True)
class StateTable:
    """One table of a snapshot.

    Attributes:
        step: id of the step; of rows on their way, the edge, such as ``clean.0>count.0``.
        name: of the table.
        kind: what the step is in the program: "aggregate", "window", "process" ...
        schema: columns, as they are read.
        keys: columns whose values tell its rows apart; none if rows may be equal.
        stored_rows: rows in all segments: more than it has where newer ones replace older ones.
        bytes: of the segments.
    """

    step: str
    name: str
    kind: str
    schema: pa.Schema
    keys: tuple[str, ...]
    stored_rows: int
    bytes: int
    partitioning: tuple[str, ...]
    """Key columns that say in which key group a row lies."""
    main: bool
    """True if the step's id alone may mean this table."""

    @property
    def address(self) -> str:
        """Full name: ``STEP.NAME``."""
        return f"{self.step}.{self.name}"


class Snapshot:
    """A completed checkpoint, or a savepoint, to be read.  Nothing is changed, and no job needs to run.

    Args:
        address: ``DIR/JOB`` (its newest checkpoint), ``DIR/JOB@7`` or ``DIR/JOB/chk-7``; or the folder of a savepoint.
        key_file: file with the key that it is sealed with; ``None`` leaves it to the environment.

    Raises:
        ConfigError: there is no such job or checkpoint; the hint lists what there is.
        CorruptSnapshotError: the manifest is damaged.

    Example::

        snapshot = cw.Snapshot("checkpoints/delays@7")
        snapshot.table("worst").to_pandas()
    """

    def __init__(self, address: str | os.PathLike[str], *, key_file: str | None = None) -> None:
        found = resolve_snapshot(os.fspath(address), seal_of(key_file))
        opened = open_snapshot(found)
        self.store, self.folder, self.manifest = opened.store, opened.folder, opened.manifest
        self.is_savepoint = opened.is_savepoint
        self.segments = Segments(self.store, self.folder)
        whole = f"{found.directory}/{found.job}"
        self.address = whole if opened.is_savepoint else f"{whole}@{self.checkpoint_id}"
        """Names this very snapshot, also where ``address`` left open which checkpoint."""

    def __str__(self) -> str:
        return self.address

    @property
    def job(self) -> str:
        """Name of the job."""
        return self.manifest.job

    @property
    def checkpoint_id(self) -> int:
        """Number of the checkpoint."""
        return self.manifest.checkpoint_id

    @property
    def max_parallelism(self) -> int:
        """Number of key groups."""
        return self.manifest.max_parallelism

    @property
    def bytes_read(self) -> int:
        """Bytes of state read so far."""
        return self.segments.bytes_read

    @cached_property
    def layouts(self) -> list[TableLayout]:
        """Layouts of the tables on disk, as many as ``states``."""
        return layouts(self.manifest, self._schema)

    def _schema(self, entry: Entry) -> pa.Schema:
        if entry.schema:
            return pa.ipc.read_schema(pa.py_buffer(entry.schema))
        return self.segments.read(entry).batch.schema

    @cached_property
    def states(self) -> tuple[StateTable, ...]:
        """All tables, in the order of the program."""
        return tuple(self._described(layout) for layout in self.layouts)

    def state(self, name: str) -> StateTable:
        """One table: ``STEP`` if the step has one that is meant by that, else ``STEP.NAME``.

        Raises:
            ConfigError: there is none; the hint lists what there is.
        """
        return self.states[self._find(name)]

    def batches(
        self,
        name: str,
        *,
        columns: Sequence[str] | None = None,
        key: Mapping[str, Any] | None = None,
        groups: range | None = None,
        raw: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a table, in the order of key groups, a stretch of them in memory at a time.

        Args:
            name: see ``state``.
            columns: only these, in this order.
            key: only the rows of one key: all key columns by name.  Reads what lies with its key group.
            groups: only these key groups.
            raw: what is stored, instead of what it stands for: of a mean, its sum and count.

        Raises:
            ConfigError: no such table or column, or not the whole key.
            CorruptSnapshotError: bytes differ from their digest.
        """
        layout = self.layouts[self._find(name)]
        wanted = self._wanted(layout, columns, raw)
        schema = _schema_of(wanted)
        keep: Callable[[pa.RecordBatch], pa.RecordBatch] | None = None
        whole = range(self.max_parallelism)
        groups = whole if groups is None else range(max(groups.start, 0), min(groups.stop, whole.stop))
        if key is not None:
            group = self.key_group(name, key)
            groups = range(group, group + 1) if group in groups else range(0)
            keep = _only(self._key_arrays(layout, key))
        return self._read(layout, wanted, schema, groups, keep, raw)

    def table(self, name: str, **which: Any) -> pa.Table:
        """All rows as one Arrow table; arguments and errors as of ``batches``."""
        found = list(self.batches(name, **which))
        layout = self.layouts[self._find(name)]
        wanted = self._wanted(layout, which.get("columns"), bool(which.get("raw")))
        return pa.Table.from_batches(found, _schema_of(wanted))

    def key_group(self, name: str, key: Mapping[str, Any]) -> int:
        """The key group that a key of a table lies in.

        Raises:
            ConfigError: no such table, or not the whole key.
        """
        arrays = self._key_arrays(self.layouts[self._find(name)], key)
        return int(key_groups(hash_keys(list(arrays.values())), self.max_parallelism)[0])

    def entries(self, name: str) -> tuple[Entry, ...]:
        """Places of the segments of a table, in the order they apply."""
        return self._entries_of(self.layouts[self._find(name)])

    def _entries_of(self, layout: TableLayout) -> tuple[Entry, ...]:
        return (*layout.entries, *(entry for part in layout.beside[:1] for entry in part.entries))

    # ------------------------------------------------------------------------------------------------------ finding

    def _find(self, name: str) -> int:
        of_step = [i for i, t in enumerate(self.layouts) if t.step == name]
        if len(main := [i for i in of_step if self.layouts[i].main]) == 1:
            return main[0]
        if len(of_step) == 1:
            return of_step[0]
        for number, layout in enumerate(self.layouts):
            if f"{layout.step}.{layout.name}" == name:
                return number
        listed = [f"{t.step}.{t.name}" for t in self.layouts]
        if of_step:
            mine = ", ".join(listed[i] for i in of_step)
            raise ConfigError(f"step {name!r} has several states in {self}", hint=f"Say which: {mine}.")
        hint = f"There are: {', '.join(listed)}." if listed else "It holds none at all."
        raise ConfigError(f"no state {name!r} in {self}", hint=hint)

    def _described(self, layout: TableLayout) -> StateTable:
        shown = self._columns(layout, raw=False)
        names = [c.name for c in shown]
        kind = layout.record.kind if layout.record is not None else "edge"
        return StateTable(
            layout.step,
            layout.name,
            kind,
            _schema_of(shown),
            tuple(n if n in names else "slice_start" for n in layout.identity if layout.shape is not Shape.TOP),
            self._rows_of(layout),
            sum(e.length for e in layout.entries),
            tuple(layout.partitioning),
            layout.main,
        )

    def _rows_of(self, layout: TableLayout) -> int:
        if layout.shape is Shape.POSITIONS:
            return sum(len(s.splits.get(layout.step, ())) for s in self.manifest.subtasks)
        if layout.shape is Shape.HANDLES:
            return sum(len(s.handles.get(layout.step, ())) for s in self.manifest.subtasks)
        return sum(e.rows for e in layout.entries if e.kind != "delete")

    def _key_arrays(self, layout: TableLayout, key: Mapping[str, Any]) -> dict[str, pa.Array]:
        names = layout.partitioning
        if not names or set(names) != set(key):
            has = f"Its key is ({', '.join(names)})." if names else "It has no key."
            raise ConfigError(f"{layout.step}.{layout.name} is not keyed by ({', '.join(key)})", hint=has)
        try:
            return {name: pa.array([key[name]], layout.stored.field(name).type) for name in names}
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"no key of {layout.step}.{layout.name}: {error}") from error

    # ------------------------------------------------------------------------------------------------------ reading

    def _wanted(self, layout: TableLayout, names: Sequence[str] | None, raw: bool) -> list[Column]:
        """The columns of a table, or some of them."""
        shown = self._columns(layout, raw)
        return shown if names is None else _chosen(shown, names, layout)

    def _columns(self, layout: TableLayout, raw: bool) -> list[Column]:
        if layout.shape is Shape.POSITIONS:
            return _from_schema(POSITIONS)
        if layout.shape is Shape.HANDLES:
            return _from_schema(HANDLES)
        if layout.shape is Shape.CHANNEL:
            return _from_schema(pa.schema([*layout.stored, *PLACES]))
        if layout.shape is Shape.REQUESTS:
            return _from_schema(pa.schema([*layout.stored, pa.field("__subtask", pa.int32())]))
        return columns_of(layout, self.max_parallelism, raw=raw)

    def _read(
        self,
        layout: TableLayout,
        wanted: Sequence[Column],
        schema: pa.Schema,
        groups: range,
        keep: Callable[[pa.RecordBatch], pa.RecordBatch] | None,
        raw: bool,
    ) -> Iterator[pa.RecordBatch]:
        for batch in self._stored(layout, groups, raw):
            batch = batch if keep is None else keep(batch)
            if layout.shape is Shape.TOP and not raw:
                batch = exploded(batch)
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                part = batch.slice(start, _BATCH_ROWS)
                arrays = [column.of(part) for column in wanted]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _stored(self, layout: TableLayout, groups: range, raw: bool) -> Iterator[pa.RecordBatch]:
        if layout.shape is Shape.POSITIONS:
            yield positions(self.manifest, layout.step)
        elif layout.shape is Shape.HANDLES:
            yield handles(self.manifest, layout.step)
        elif layout.shape is Shape.CHANNEL:
            for entry in sorted(layout.entries, key=lambda e: (e.channel, e.side == "sender", e.first_row)):
                yield from rows_on_their_way(self.store, self.folder, entry)
        elif layout.shape is Shape.REQUESTS:
            for entry in layout.entries:
                batch = self.segments.read(entry).batch
                yield batch.append_column("__subtask", pa.array([entry.subtask] * batch.num_rows, pa.int32()))
        else:
            for part in chunks(self._entries_of(layout), groups):
                yield from self._merged(layout, part)
                yield from self._not_out_yet(layout, part) if layout.beside and not raw else ()

    def _merged(self, layout: TableLayout, groups: range) -> Iterator[pa.RecordBatch]:
        for name in layout.segments:
            for batch in merged(layout, name, self.segments, groups):
                yield with_clocks(batch, name) if layout.shape is Shape.TIMERS else batch

    def _not_out_yet(self, layout: TableLayout, groups: range) -> Iterator[pa.RecordBatch]:
        """Sliding windows that only their slices tell of."""
        slices, marks = layout.beside
        if not can_be_put_together(layout):
            return
        watermarks = np.full(self.max_parallelism, MIN_WATERMARK, np.int64)
        for batch in self._merged(marks, groups):
            watermarks[batch.column(GROUP_COLUMN).to_numpy()] = batch.column(1).to_numpy()
        parts = list(self._merged(slices, groups))
        if parts:
            yield open_windows(layout, pa.concat_batches(parts), watermarks)


def _schema_of(columns: Sequence[Column]) -> pa.Schema:
    return pa.schema([pa.field(column.name, column.type) for column in columns])


def _from_schema(schema: pa.Schema) -> list[Column]:
    def reading(name: str) -> Callable[[pa.RecordBatch], pa.Array]:
        return lambda batch: batch.column(name)

    names = list(schema.names)
    shown = [n[2:] if n.startswith("__") and n[2:] not in names else n for n in names]
    return [Column(new, field.type, reading(field.name)) for new, field in zip(shown, schema, strict=True)]


def _chosen(shown: Sequence[Column], names: Sequence[str], layout: TableLayout) -> list[Column]:
    by_name = {column.name: column for column in shown}
    for name in names:
        if name not in by_name:
            what = f"{layout.step}.{layout.name} has no column {name!r}"
            raise ConfigError(what, hint=did_you_mean(name, by_name))
    return [by_name[name] for name in names]


def _only(key: Mapping[str, pa.Array]) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Leaves the rows of one key."""

    def keep(batch: pa.RecordBatch) -> pa.RecordBatch:
        mask: Any = None
        for name, value in key.items():
            column = batch.column(name)
            same = _compute.is_null(column) if value[0].as_py() is None else _compute.equal(column, value[0])
            mask = same if mask is None else _compute.and_(mask, same)
        return batch.filter(_compute.fill_null(mask, False))

    return keep


_TIME, _INT, _TEXT = pa.timestamp("us", "UTC"), pa.int32(), pa.string()
POSITIONS = pa.schema(
    {"subtask": _INT, "split": _TEXT, "position": _TEXT, "max_time": _TIME, "done": pa.bool_(), "data": _TEXT}
)
"""Positions and split descriptions are JSON."""
HANDLES = pa.schema({"subtask": _INT, "handle": _TEXT})
"""Handles are JSON."""
PLACES = pa.schema({"__sender": _INT, "__receiver": _INT, "__side": _TEXT, "__row_number": pa.int64()})
"""Columns of a row on its way besides its own."""


def positions(manifest: Manifest, step: str) -> pa.RecordBatch:
    """Positions of a source, by split."""
    rows = [
        {
            "subtask": record.subtask,
            "split": split.id,
            "position": json.dumps(split.position),
            "max_time": None if split.max_time == MIN_WATERMARK else split.max_time,
            "done": split.done,
            "data": json.dumps(split.data),
        }
        for record in manifest.subtasks
        for split in record.splits.get(step, ())
    ]
    return pa.RecordBatch.from_pylist(rows, schema=POSITIONS)


def handles(manifest: Manifest, step: str) -> pa.RecordBatch:
    """Handles that a sink was to commit when the checkpoint counted."""
    rows = [
        {"subtask": record.subtask, "handle": json.dumps(handle)}
        for record in manifest.subtasks
        for handle in record.handles.get(step, ())
    ]
    return pa.RecordBatch.from_pylist(rows, schema=HANDLES)


def rows_on_their_way(store: Store, folder: str, entry: Entry) -> Iterator[pa.RecordBatch]:
    """The rows of one piece of a channel's log, in their order, with ``PLACES``."""
    assert entry.channel is not None
    _, sender, receiver = entry.channel
    number = entry.first_row
    for item in read_log(store, folder, entry):
        if item.batch is None:
            continue
        rows = item.batch.num_rows
        more = [
            pa.array([sender] * rows, _INT),
            pa.array([receiver] * rows, _INT),
            pa.array([entry.side] * rows, _TEXT),
            pa.array(np.arange(number, number + rows)),
        ]
        number += rows
        yield pa.RecordBatch.from_arrays([*item.batch.columns, *more], schema=pa.schema([*item.batch.schema, *PLACES]))
