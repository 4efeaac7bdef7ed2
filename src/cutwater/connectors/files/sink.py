"""The file sink: exactly-once output into a directory that Spark (or anything else) reads as one dataset.

The collecting sink keeps a bounded job's result in such a directory, of the job's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import ClassVar, Protocol, Self, cast

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cutwater.config import parse_duration_ms
from cutwater.connectors.base import Guarantee, Json, PreCommit, SinkContext, SinkWriter, SubtaskCommitter
from cutwater.connectors.files.part_commit import LogState, PartCommitter, is_visible, part_stem, part_suffix
from cutwater.connectors.files.part_draft import (
    CopiedPart,
    DraftedPart,
    PartDraft,
    RewrittenPart,
    StagedPart,
    WaitingRows,
    stage_parts,
)
from cutwater.connectors.files.part_formats import ParquetParts, PartFormat
from cutwater.connectors.files.schemas import cast_batch, parquet_schema
from cutwater.connectors.staging import (
    LOG_SUFFIX,
    UNGUARDED,
    EndHandle,
    Guard,
    PieceCut,
    StagingArea,
    StagingLog,
    check_piece,
    converted,
    open_piece,
    piece_name,
    read_piece,
    staging_beside,
)
from cutwater.connectors.staging_folders import TargetFolder
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
            f"cannot write to {path!r}: only file systems that every worker mounts, and buckets, are supported, not "
            f"{scheme!r}",
            hint="Write to a local or mounted path, or to s3://, or use foreach_batch with a Spark or cloud writer.",
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
        object.__setattr__(self, "path", self.place(self.path))
        object.__setattr__(self, "roll_interval_ms", parse_duration_ms(self.roll_interval_ms, name="roll_interval_ms"))
        for name in ("roll_rows", "roll_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    @staticmethod
    def place(path: str) -> str:
        """The same path for every process."""
        return local_path(path)

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

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> SinkWriter:
        """See ``Sink.writer``; cuts of another job's uid in ``restored`` stay that job's (T3)."""
        area = staging_beside(self.path, ctx.job_uid, ctx.step, self.guard)
        return PartWriter(area, self.parts, self, self.parts.schema(schema), ctx, restored)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> SubtaskCommitter:
        area = staging_beside(self.path, job_uid, step, self.guard)
        return PartCommitter(area, self.parts, self.parts.schema(schema), part_stem(job_uid, step))


class RollRules(Protocol):
    """When a file ends, see ``FileSink``."""

    @property
    def roll_rows(self) -> int: ...

    @property
    def roll_bytes(self) -> int: ...

    @property
    def roll_interval_ms(self) -> object: ...


class PartWriter:
    """The rows of a file sink's subtask.

    Args:
        area: the step's staging; its root is the target.
        parts: format of the files.
        rules: when they end.
        schema: of the rows, with types that the format has.
        ctx: who writes.
        restored: states of the writers that this one follows; those of another job's uid are left alone (T3).

    Raises:
        CorruptSnapshotError: a restored piece is missing, torn or flipped.
        StorageError: the staging folder cannot be made.
    """

    def __init__(
        self,
        area: StagingArea[TargetFolder],
        parts: PartFormat,
        rules: RollRules,
        schema: pa.Schema,
        ctx: SinkContext,
        restored: Sequence[Json],
    ) -> None:
        self._area, self._parts, self._rules, self._schema, self._ctx = area, parts, rules, schema, ctx
        self._form, self._blocks = parts.form(schema), parts.blocks
        states: list[LogState] = [converted(state, LogState) for state in restored if state is not None]
        own = [state for state in states if state.uid == ctx.job_uid]
        cuts = [cut for state in own for cut in state.pieces]
        files = [cut for cut in cuts if not check_piece(cut.file).endswith(LOG_SUFFIX)]
        for cut in files:
            read_piece(area, cut, verify=True)
        log = [cut for cut in cuts if cut.file.endswith(LOG_SUFFIX)]
        self._log = StagingLog(area, schema, ctx.subtask, ctx.incarnation, log)
        self._drafts = 0
        self._draft = self._new_draft([cut for cut in files if cut.form == self._form])
        self._rest = WaitingRows()
        self._ready: list[StagedPart] = [CopiedPart(area, cut) for cut in files if cut.form != self._form]
        """Parts of the next checkpoint: drafts that reached their size, and what another version of the program left,
        with other columns or of another format, which no part mixes with its own."""
        self._ready += self._take_over(log)
        self._pending: list[StagedPart] = []
        age_ms = max((state.age_ms for state in own), default=0.0)
        self._oldest: float | None = time.monotonic() - age_ms / 1000 if cuts else None
        self._named = {cut.file for cut in cuts}
        """Pieces in some checkpoint's state: to restore it, they must outlive the part that holds their rows."""
        # Rows with another key's seal, or none, go into a part at once: nothing else is to need that key for longer.
        self._roll_asked = any(not area.guard.seal.is_current(cut.digest) for cut in cuts)

    def _take_over(self, log: Sequence[PieceCut]) -> list[StagedPart]:
        """Rows of the log wait for others again; those with other columns are given back as parts."""
        others: list[RewrittenPart] = []
        for cut in log:
            with open_piece(self._area, cut, verify=False) as rows:
                schema, batches = rows.schema, list(rows)
            if schema.equals(self._schema.remove_metadata()):
                self._rest.add(*(cast_batch(batch, self._schema) for batch in batches), logged=True)
            elif others and others[-1].schema.equals(schema):
                others[-1].cuts.append(cut)
            else:
                others.append(RewrittenPart(self._area, self._parts, schema, [cut]))
        self._log.drop({cut.file for part in others for cut in part.cuts})
        return list[StagedPart](others)

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows.

        Raises:
            DataError: a value does not fit its type in the file.
            StorageError: the disk is full.
        """
        if batch.num_rows == 0:
            return
        if self._oldest is None:
            self._oldest = time.monotonic()
        self._rest.add(cast_batch(batch, self._schema))
        if block := self._rest.block(self._blocks):
            self._encode(block)
        if self._is_full:
            self._end_full_draft()

    def roll(self) -> None:
        """See ``SinkWriter.roll``: the next ``pre_commit`` puts every row into a part."""
        self._roll_asked = True

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        age_ms = 0.0 if self._oldest is None else (time.monotonic() - self._oldest) * 1000
        due = final or self._roll_asked or age_ms >= cast("float", self._rules.roll_interval_ms)
        self._roll_asked = False
        if (due and self._rows) or self._is_full:
            self._end_draft()
        elif self._blocks.rest_waits:
            self._rest.log(self._log)
        else:
            self._encode(self._rest.all())
        cuts = [*self._draft.cuts(), *self._log.cuts()]
        # A part whose checkpoint was aborted is pre-committed again with this one, else its rows would be nowhere.
        self._pending = [part for part in self._pending if not part.committed] + self._named_parts(checkpoint_id)
        self._named.update(cut.file for cut in cuts)
        if not cuts:
            self._oldest = None
        parts = list(self._pending)
        state = LogState(self._ctx.job_uid, cuts, round(age_ms, 1)) if cuts else None
        return lambda: self._snapshot(parts, state, final)

    def close(self) -> None:
        self._draft.close()
        self._log.close()

    @property
    def _rows(self) -> int:
        return self._draft.rows + self._rest.rows

    @property
    def _is_full(self) -> bool:
        return self._rows >= self._rules.roll_rows or self._draft.bytes + self._rest.bytes >= self._rules.roll_bytes

    def _encode(self, block: list[pa.RecordBatch]) -> None:
        if block:
            self._draft.encode(block)
            self._absorb_log()

    def _end_full_draft(self) -> None:
        """The same between two checkpoints."""
        self._encode(self._rest.all())
        self._draft.complete()
        self._ready.append(DraftedPart(self._area, self._parts.suffix, self._draft, []))
        self._draft = self._new_draft()

    def _end_draft(self) -> None:
        """A part of this checkpoint; its last rows are encoded in the snapshot thread."""
        self._absorb_log()
        self._ready.append(DraftedPart(self._area, self._parts.suffix, self._draft, self._rest.all()))
        self._draft = self._new_draft()

    def _absorb_log(self) -> None:
        """Rows in the log are the oldest of those that wait, so that they are in any block."""
        self._log.seal()
        files = [cut.file for cut in self._log.cuts()]
        self._draft.files += files
        self._log.drop(files)

    def _new_draft(self, inherited: Sequence[PieceCut] = ()) -> PartDraft:
        name = piece_name(self._ctx.subtask, self._ctx.incarnation, self._drafts, self._parts.suffix)
        self._drafts += 1
        return PartDraft(self._area, name, self._parts.encoder(self._schema), self._form, inherited)

    def _named_parts(self, checkpoint_id: int) -> list[StagedPart]:
        parts, self._ready = self._ready, []
        stem = part_stem(self._ctx.job_uid, self._ctx.step)
        for number, part in enumerate(parts):
            name = stem + part_suffix(self._ctx.subtask, checkpoint_id, self._ctx.incarnation, number, part.suffix)
            part.name_it(name, self._named)
            self._named.difference_update(part.files)
        return parts

    def _snapshot(self, parts: list[StagedPart], state: LogState | None, final: bool) -> PreCommit:
        handles: list[Json] = [msgspec.to_builtins(handle) for handle in stage_parts(self._area, parts)]
        if state is not None:
            self._log.make_durable(state.pieces)
        if final:
            handles.append(msgspec.to_builtins(EndHandle(self._ctx.job_uid)))
        return PreCommit(handles, None if state is None else msgspec.to_builtins(state))


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
