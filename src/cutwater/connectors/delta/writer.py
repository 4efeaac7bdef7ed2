"""One subtask's files for a table: those of the file sink, with what the log says of each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cutwater.connectors.base import Json, PreCommit, SinkContext
from cutwater.connectors.delta.columns import Partition, partition_folder, partitioned
from cutwater.connectors.delta.statistics import statistics_of
from cutwater.connectors.files.part_commit import LogState, PartHandle, check_part, checkpoint_of_part, write_part
from cutwater.connectors.files.part_draft import CutPart, RewrittenPart, StagedPart, WholeFile
from cutwater.connectors.files.part_formats import Blocks, PartFormat
from cutwater.connectors.files.sink import PartWriter, RollRules
from cutwater.connectors.staging import EndHandle, PieceCut, StagingArea, converted, incarnation_of, open_piece
from cutwater.connectors.staging_folders import TargetFolder
from cutwater.data.decoding import prepare
from cutwater.errors import DataError


class DeltaHandle(msgspec.Struct, frozen=True, tag="delta"):
    """A staged file that is to come into the table, and what the log is to say of it."""

    part: PartHandle
    stats: str
    partition: dict[str, str | None] = {}

    @property
    def checkpoint_id(self) -> int:
        """At which it was cut."""
        return checkpoint_of_part(self.part.final) or 0

    @property
    def incarnation(self) -> int:
        """Of its writer."""
        return incarnation_of(self.part.final)

    @property
    def folders(self) -> list[str]:
        """Where in the table it lies."""
        return partition_folder(self.partition)

    @property
    def path(self) -> str:
        """Its path in the table."""
        return "/".join([*self.folders, self.part.final])


prepare(DeltaHandle | EndHandle)


def own_handles(handles: Sequence[Json], job_uid: str, stem: str) -> list[DeltaHandle]:
    """Handles as they lie in a manifest, those of this job, each once; what they name is checked here.

    Raises:
        CorruptSnapshotError: one names what this step does not write.
    """
    own: dict[str, DeltaHandle] = {}
    for handle in handles:
        decoded: DeltaHandle | EndHandle = converted(handle, DeltaHandle | EndHandle)
        if isinstance(decoded, DeltaHandle) and decoded.part.uid == job_uid:
            check_part(decoded.part, stem)
            own[decoded.part.final] = decoded
    return list(own.values())


class PartitionPart(CutPart):
    """Rows of one partition, as they wait in memory.

    Args:
        area: where the file is made.
        parts: its format.
        values: of the partition.
        rows: without the columns of the partition.
        files: pieces that hold its rows; of the parts of one piece the first names it, for all are committed at once.
    """

    def __init__(
        self, area: StagingArea[TargetFolder], parts: PartFormat, values: Partition, rows: pa.Table, files: list[str]
    ) -> None:
        super().__init__(area, parts.suffix, [])
        self.values = values
        self._parts, self._files, self._table, self._count = parts, files, rows, rows.num_rows

    @property
    def files(self) -> list[str]:
        return self._files

    @property
    def rows(self) -> int:
        return self._count

    def _make(self, name: str) -> WholeFile:
        with self._new_file(name) as (file, path):
            write_part(file, path, self._parts, self._table.schema, iter(self._table.to_batches()))
        self._table = self._table.slice(0, 0)
        return self._digest(name)


class DeltaWriter(PartWriter):
    """A ``PartWriter`` whose files become files of a table.

    Those of a partitioned table are made when they are due: until then all their rows wait, in memory and in the log.

    Args:
        area, parts, rules, schema, ctx, restored: as of ``PartWriter``.
        partition_by: columns that are in the files' folders and not in the files.
        required: columns in which no null may be.
    """

    def __init__(
        self,
        area: StagingArea[TargetFolder],
        parts: PartFormat,
        rules: RollRules,
        schema: pa.Schema,
        ctx: SinkContext,
        restored: Sequence[Json],
        partition_by: Sequence[str],
        required: Sequence[str],
    ) -> None:
        self._partition_by, self._required = tuple(partition_by), tuple(required)
        self._stats: WeakKeyDictionary[StagedPart, str] = WeakKeyDictionary()
        super().__init__(area, parts, rules, schema, ctx, restored)
        if self._partition_by:
            self._blocks = Blocks(sys.maxsize, sys.maxsize, rest_waits=True)

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows.

        Raises:
            DataError: a value does not fit its type in the table, or is null where none may be.
            StorageError: the disk is full.
        """
        check_required(batch, self._required, self._area.folder.root)
        super().write(batch)

    def _take_over(self, log: Sequence[PieceCut]) -> list[StagedPart]:
        others = super()._take_over(log)
        if not self._partition_by:
            return others
        made: list[StagedPart] = []
        for part in others:
            assert isinstance(part, RewrittenPart)
            batches = [batch for cut in part.cuts for batch in open_piece(self._area, cut, verify=False)]
            made += self._parts_of(pa.Table.from_batches(batches, part.schema), part.files)
        return made

    def _end_full_draft(self) -> None:
        if self._partition_by:
            self._end_draft()
        else:
            super()._end_full_draft()

    def _end_draft(self) -> None:
        if not self._partition_by:
            super()._end_draft()
            return
        self._log.seal()
        files = [cut.file for cut in self._log.cuts()]
        rows = pa.Table.from_batches(self._rest.all(), self._schema)
        self._ready += self._parts_of(rows, files)
        self._log.drop(files)

    def _parts_of(self, rows: pa.Table, files: list[str]) -> list[StagedPart]:
        made: list[StagedPart] = []
        for values, part in partitioned(rows, self._partition_by):
            made.append(PartitionPart(self._area, self._parts, values, part, [] if made else files))
        return made

    def _snapshot(self, parts: list[StagedPart], state: LogState | None, final: bool) -> PreCommit:
        made = super()._snapshot(parts, state, final)
        by_name = {part.name: part for part in parts}
        handles: list[Json] = []
        for handle in made.handles:
            if handle["type"] == "end":
                handles.append(handle)
            elif (told := self._told(handle, by_name[handle["final"]])) is not None:
                handles.append(told)
        return PreCommit(handles, made.state)

    def _told(self, handle: Json, part: StagedPart) -> Json | None:
        stats = self._stats.get(part)
        if stats is None:
            try:
                footer = pq.read_metadata(pa.BufferReader(self._area.folder.mapped(part.name)))
            except FileNotFoundError:
                return None  # a younger checkpoint was quicker, and is committed
            stats = self._stats[part] = statistics_of(footer, self._schema)
        partition = part.values if isinstance(part, PartitionPart) else {}
        return msgspec.to_builtins(DeltaHandle(msgspec.convert(handle, PartHandle), stats, partition))


def check_required(batch: pa.RecordBatch, required: Sequence[str], path: str) -> None:
    """Refuse rows that are null where a table says that none is.

    Raises:
        DataError: with the column.
    """
    for name in required:
        if batch.column(name).null_count:
            raise DataError(
                f"column {name!r} is null, and the Delta table {path!r} says that it never is",
                hint="Fill or filter the nulls before the sink.",
            )
