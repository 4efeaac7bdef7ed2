"""The file sink: exactly-once output into a directory that Spark (or anything else) reads as one dataset.

The collecting sink keeps a bounded job's result in such a directory, of the job's own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import BinaryIO, ClassVar, Self, cast

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cutwater.config import parse_duration_ms
from cutwater.connectors.base import Guarantee, Json, PreCommit, SinkContext, SinkWriter, SubtaskCommitter
from cutwater.connectors.files.part_commit import (
    LogState,
    PartCommitter,
    PartHandle,
    is_visible,
    part_status,
    part_stem,
    part_suffix,
    write_part,
)
from cutwater.connectors.files.part_formats import ParquetParts, PartFormat
from cutwater.connectors.files.schemas import cast_batch, parquet_schema
from cutwater.connectors.staging import (
    UNGUARDED,
    EndHandle,
    Guard,
    PieceCut,
    StagingArea,
    StagingLog,
    converted,
    open_piece,
    staging_beside,
)
from cutwater.connectors.staging_folders import TargetFolder, fsync_path, storage_errors
from cutwater.errors import BuildError, ConfigError, InvariantError, StorageError
from cutwater.storage.store.opening import store_at
from cutwater.storage.store.seal import PLAIN


def local_path(path: str) -> str:
    """Absolute form of a local path or ``file:`` address: workers do not share the driver's working directory.

    Raises:
        BuildError: the path names another kind of storage.

    >>> local_path("file:///data/out/")
    '/data/out'
    """
    scheme, colon, rest = path.partition("://")
    if colon and scheme != "file":
        raise BuildError(
            f"cannot write to {path!r}: only file systems that every worker mounts are supported, not {scheme!r}",
            hint="Write to a local or mounted path, or use foreach_batch with a Spark or cloud writer.",
        )
    if not path:
        raise BuildError("a sink needs the path of a directory, got an empty one")
    return os.path.abspath(rest if colon else path.removeprefix("file:"))


@dataclass(frozen=True)
class FileSink:
    """Appends rows to a directory of files, each row exactly once.

    Rows wait in ``<path>/_cutwater`` and become visible with the checkpoint at which their file is full or old enough
    (T4), so that short checkpoint intervals do not make small files.  Several jobs may write to one directory.

    Args:
        path: a directory, made if missing; local or mounted on every worker.
        parts: format of the files.
        roll_rows: a file ends at the first barrier after about this many rows.
        roll_bytes: the same by size, in bytes of Arrow data (a compressed file is smaller).
        roll_interval_ms: the same by age; a duration such as ``"10s"`` or milliseconds.  0: at every checkpoint.

    Raises:
        BuildError: the path is not a local one.
        ConfigError: a setting is out of range.

    >>> FileSink("/data/out", roll_interval_ms="1m").roll_interval_ms
    60000.0
    """

    path: str
    parts: PartFormat = field(default_factory=ParquetParts)
    roll_rows: int = 10_000_000
    roll_bytes: int = 128 << 20
    roll_interval_ms: float | str | timedelta = 10_000.0
    guard: Guard = field(default=UNGUARDED, repr=False, compare=False, kw_only=True)
    """Given by the runtime through ``guarded``."""

    guarantee: ClassVar[Guarantee] = "exactly-once"
    parallelism: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", local_path(self.path))
        object.__setattr__(self, "roll_interval_ms", parse_duration_ms(self.roll_interval_ms, name="roll_interval_ms"))
        for name in ("roll_rows", "roll_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    def guarded(self, guard: Guard) -> FileSink:
        """The same sink, whose staged files are guarded."""
        return replace(self, guard=guard)

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink.check``.  Files that others wrote into the target are fine unless their types contradict."""
        schema = self.parts.schema(schema)
        existing = self.path
        while not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        if not os.path.isdir(existing):
            which = "it" if existing == self.path else repr(existing)
            raise BuildError(f"cannot write to {self.path!r}: {which} is not a directory", hint="Name a directory.")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise BuildError(f"cannot write to {self.path!r}: no right to write in {existing!r}")
        _check_neighbours(self.path, self.parts, schema)

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> PartWriter:
        """See ``Sink.writer``; cuts of another job's uid in ``restored`` stay that job's (T3)."""
        return PartWriter(self, self.parts.schema(schema), ctx, restored)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> PartCommitter:
        area = staging_beside(self.path, job_uid, step, self.guard)
        return PartCommitter(area, self.parts, self.parts.schema(schema), part_stem(job_uid, step))


class PartWriter:
    """One subtask's writer of a ``FileSink``: a log of rows, and the parts cut from it that are not visible yet."""

    def __init__(self, sink: FileSink, schema: pa.Schema, ctx: SinkContext, restored: Sequence[Json]) -> None:
        self._sink = sink
        self._schema = schema
        self._ctx = ctx
        self._area = staging_beside(sink.path, ctx.job_uid, ctx.step, sink.guard)
        states: list[LogState] = [converted(state, LogState) for state in restored if state is not None]
        own = [state for state in states if state.uid == ctx.job_uid]
        self._log = StagingLog(
            self._area,
            schema,
            ctx.subtask,
            ctx.incarnation,
            [cut for state in own for cut in state.pieces],
            piece_bytes=sink.roll_bytes,
            piece_rows=sink.roll_rows,
        )
        self._others = {cut.file: kind for cut in self._log.cuts() if (kind := self._other_schema(cut)) is not None}
        """Schemas of pieces that another version of the program wrote, with other columns; no part mixes them."""
        age_ms = max((state.age_ms for state in own), default=0.0)
        self._oldest: float | None = None if self._log.empty else time.monotonic() - age_ms / 1000
        self._pending: list[_Part] = []
        # Pieces that are in some checkpoint's state: to restore it, they must outlive the part that holds their rows.
        self._shared = {cut.file for cut in self._log.cuts()}
        # Rows with another key's seal, or none, go into a part at once: nothing else is to need that key for longer.
        self._roll_asked = any(not sink.guard.seal.is_current(cut.digest) for cut in self._log.cuts())

    def _other_schema(self, cut: PieceCut) -> pa.Schema | None:
        with open_piece(self._area, cut, verify=False) as rows:
            found = rows.schema
        return None if found.equals(self._schema.remove_metadata()) else found

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows.

        Raises:
            DataError: a value does not fit its type in the file.
            StorageError: the disk is full.
        """
        if self._oldest is None:
            self._oldest = time.monotonic()
        self._log.append(cast_batch(batch, self._schema))

    def roll(self) -> None:
        """See ``SinkWriter.roll``: the next ``pre_commit`` puts every row into a part."""
        self._roll_asked = True

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        self._log.flush()
        age_ms = 0.0 if self._oldest is None else (time.monotonic() - self._oldest) * 1000
        self._cut_parts(
            checkpoint_id, everything=final or self._roll_asked or age_ms >= cast("float", self._sink.roll_interval_ms)
        )
        self._roll_asked = False
        cuts = self._log.cuts()
        self._shared = {cut.file for cut in cuts}
        if not cuts:
            self._oldest = None
        # A part whose checkpoint was aborted is pre-committed again with this one, else its rows would be nowhere.
        self._pending = [part for part in self._pending if not part.committed]
        parts = list(self._pending)
        state = LogState(self._ctx.job_uid, cuts, round(age_ms, 1)) if cuts else None
        return lambda: self._snapshot(parts, state, final)

    def close(self) -> None:
        self._log.close()

    def _cut_parts(self, checkpoint_id: int, everything: bool) -> None:
        sink, cuts = self._sink, self._log.cuts()
        groups: list[list[PieceCut]] = []
        full = True
        for cut in cuts:
            other = self._others.get(cut.file)
            if full or other != self._others.get(groups[-1][-1].file):
                groups.append([])
            groups[-1].append(cut)
            full = (
                sum(c.length for c in groups[-1]) >= sink.roll_bytes
                or sum(c.rows for c in groups[-1]) >= sink.roll_rows
            )
        if not full and not everything and cuts[-1].file not in self._others:
            groups.pop()
        taken = sum(len(group) for group in groups)
        if taken == len(cuts):
            self._log.seal()
        self._log.drop(taken)
        stem = part_stem(self._ctx.job_uid, self._ctx.step)
        for number, group in enumerate(groups):
            suffix = part_suffix(self._ctx.subtask, checkpoint_id, self._ctx.incarnation, number, sink.parts.suffix)
            schema = self._others.get(group[0].file, self._schema)
            self._pending.append(_Part(stem + suffix, schema, group, self._shared))

    def _snapshot(self, parts: list[_Part], state: LogState | None, final: bool) -> PreCommit:
        handles: list[Json] = []
        for part in parts:
            handle = part.stage(self._area, self._sink.parts)
            if handle is not None:
                handles.append(msgspec.to_builtins(handle))
        if state is not None:
            self._log.make_durable(state.pieces)
        if final:
            handles.append(msgspec.to_builtins(EndHandle(self._ctx.job_uid)))
        return PreCommit(handles, None if state is None else msgspec.to_builtins(state))


class _Part:
    """A file to be: cut in the loop, made in a snapshot thread, done with once it was committed."""

    def __init__(self, name: str, schema: pa.Schema, cuts: Sequence[PieceCut], shared: Container[str]) -> None:
        self.committed = False
        self._name = name
        self._schema = schema
        self._cuts = cuts
        self._shared = shared
        self._handle: PartHandle | None = None
        # Two checkpoints may be written at once, and both carry a part that the older one made.
        self._lock = threading.Lock()

    def stage(self, area: StagingArea[TargetFolder], parts: PartFormat) -> PartHandle | None:
        """Make the file durable unless it is already; ``None`` once it is committed."""
        with self._lock:
            if self._handle is None:
                self._handle = self._make(area, parts)
            elif part_status(area, self._handle) == "committed":
                # The next manifest will not name it any more, so that the rename must not be undone by a crash.
                fsync_path(area.folder.root)
                self.committed = True
                return None
            return self._handle

    def _make(self, area: StagingArea[TargetFolder], parts: PartFormat) -> PartHandle:
        batches = (batch for cut in self._cuts for batch in open_piece(area, cut, verify=False))
        temporary = f"{self._name}.tmp"
        path = area.path(temporary)
        area.folder.remove([temporary])  # of a try that failed
        size = write_part(cast(BinaryIO, area.folder.new_file(temporary, 0o666)), path, parts, self._schema, batches)
        with storage_errors("cannot finish", path), area.folder.opened() as folder:
            digest = area.guard.seal.digest("part", area.folder.mapped(temporary))
            os.rename(temporary, self._name, src_dir_fd=folder, dst_dir_fd=folder)
        fsync_path(area.folder.path)
        rows = sum(cut.rows for cut in self._cuts)
        files = [cut.file for cut in self._cuts]
        own = [file for file in files if file not in self._shared]
        shared = [file for file in files if file in self._shared]
        return PartHandle(area.job_uid, self._name, self._name, rows, size, own, shared, digest)


def _check_neighbours(path: str, parts: PartFormat, schema: pa.Schema) -> None:
    """Refuse a target whose newest file has a column of ours with another type."""
    try:
        entries = [entry for entry in os.scandir(path) if is_visible(entry.name, parts.suffix) and entry.is_file()]
        newest = max(entries, key=lambda entry: entry.stat().st_mtime_ns, default=None)
    except OSError:
        return  # not there yet
    theirs = parts.neighbour_schema(newest.path) if newest else None
    if newest is None or theirs is None:
        return  # nothing that we could compare with
    for column in schema:
        index = theirs.get_field_index(column.name)
        if index >= 0 and not _same_type(theirs.field(index).type, column.type):
            raise BuildError(
                f"{path!r} already holds {newest.name!r}, whose column {column.name!r} is {theirs.field(index).type}; "
                f"this stream's is {column.type}",
                hint="Write to another directory, or cast the column.",
            )


def _same_type(one: pa.DataType, other: pa.DataType) -> bool:
    if pa.types.is_timestamp(one) and pa.types.is_timestamp(other):
        return True  # Spark writes INT96 by default, which bears no zone
    return pa.types.is_nested(one) == pa.types.is_nested(other) and (pa.types.is_nested(one) or one.equals(other))


@dataclass(frozen=True)
class CollectSink:
    """Keeps the rows, exactly once, in a folder of the job, for the driver to read when the job has ended.

    The runtime gives it that folder by ``bind``; ``spark.read.parquet(directory)`` or ``read_result`` reads it.

    Args:
        directory: that folder.
        roll_interval_ms: see ``FileSink``.
        guard: of staged files; given through ``guarded``.
    """

    directory: str | None = None
    roll_interval_ms: float | str | timedelta = FileSink.roll_interval_ms
    guard: Guard = field(default=UNGUARDED, repr=False, compare=False, kw_only=True)

    guarantee: ClassVar[Guarantee] = "exactly-once"
    parallelism: ClassVar[int | None] = None

    def bind(self, directory: str) -> Self:
        """The same sink, writing to ``directory``.

        Raises:
            ConfigError: it is none of the file system, where whoever reads the rows would find them.
        """
        return replace(self, directory=store_at(directory, PLAIN).local_folder())

    def guarded(self, guard: Guard) -> Self:
        """The same sink, whose staged files are guarded."""
        return replace(self, guard=guard)

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink.check``."""
        parquet_schema(schema)

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> SinkWriter:
        return self._parquet().writer(schema, ctx, restored)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> SubtaskCommitter:
        return self._parquet().committer(schema, job_uid, step)

    def _parquet(self) -> FileSink:
        if self.directory is None:
            raise InvariantError("a collecting sink was started before it was bound to a directory")
        return FileSink(self.directory, roll_interval_ms=self.roll_interval_ms, guard=self.guard)


def read_result(directory: str, schema: pa.Schema) -> pa.Table:
    """All committed rows of a collected step, in each subtask's order, with the types of ``schema``.

    Raises:
        StorageError: the directory or one of its files cannot be read.
    """
    try:
        names = sorted(name for name in os.listdir(directory) if is_visible(name, ".parquet"))
        tables = [pq.ParquetFile(os.path.join(directory, name)).read() for name in names]
    except (OSError, pa.ArrowInvalid) as error:
        raise StorageError(
            f"cannot read the result in {directory!r}: {error}", hint="Is the job finished, and was it this directory?"
        ) from error
    batches = [cast_batch(batch, schema) for table in tables for batch in table.to_batches()]
    return pa.Table.from_batches(batches, schema)
