"""A table that is what an updating stream says: rows of each checkpoint are merged into it by their key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pyarrow as pa

from cutwater.connectors.base import Guarantee, Json, SinkContext, SinkSnapshot
from cutwater.connectors.delta.columns import delta_schema
from cutwater.connectors.delta.commit_number import CommitNumber
from cutwater.connectors.delta.committer import Commits
from cutwater.connectors.delta.table import delta_errors
from cutwater.connectors.delta.target import DeltaTarget
from cutwater.connectors.delta.writer import check_required
from cutwater.connectors.foreach_batch import (
    EpochCommitter,
    EpochHandle,
    EpochSink,
    EpochWriter,
    check_upsert_key,
)
from cutwater.connectors.staging import StagingArea, incarnation_of, open_piece
from cutwater.connectors.staging_folders import StoreFolder
from cutwater.connectors.table_sink import last_of_each_key
from cutwater.data.changes import OP, added_rows
from cutwater.errors import BuildError, ConfigError, StorageError, did_you_mean

_GONE = "_cutwater_gone"


@dataclass(frozen=True)
class DeltaUpsertSink(EpochSink):
    """Merges rows into a table by their key; each row's effect exactly once.

    Args:
        target: the table.
        key: the columns that tell its rows apart.
        changes: of an updating stream, the columns that tell its rows apart; given through ``applying``.

    Raises:
        ConfigError: no key.
    """

    target: DeltaTarget
    key: tuple[str, ...]
    changes: tuple[str, ...] | None = None

    guarantee: ClassVar[Guarantee] = "exactly-once"
    parallelism: ClassVar[int | None] = 1
    commits_globally: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.key:
            raise ConfigError("an upsert needs a key", hint="Name the columns that tell rows apart: key=['id'].")

    def applying(self, changes: tuple[str, ...]) -> DeltaUpsertSink:
        """The same sink for an updating stream: the table becomes what the stream's added rows are.

        Raises:
            BuildError: rows that are not told apart by the key of the upsert would replace each other.
        """
        kept = f"the upsert keeps one row for each {', '.join(self.key)}: they would replace, and delete, each other"
        check_upsert_key(changes, self.key, kept)
        return replace(self, changes=changes)

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink.check``.

        Raises:
            BuildError: the table cannot take such rows, or there is no such key.
            StorageError: it cannot be read.
        """
        for name in self.key:
            if name not in schema.names:
                raise BuildError(f"no such key column {name!r}", hint=did_you_mean(name, schema.names))
        self.target.check(self.stored(schema))

    def stored(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the stream that the table has: the mark of a change is none."""
        fields = [column for column in delta_schema(schema) if self.changes is None or column.name != OP]
        return pa.schema(fields)

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> EpochWriter:
        """See ``Sink.writer``.

        Raises:
            StorageError: the table cannot be read.
        """
        found = self.target.describe()
        required = [] if found is None else found.asked.required
        return _UpsertWriter(self, delta_schema(schema), ctx, required)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> DeltaUpsertCommitter:
        commits = Commits(self.target, self.stored(schema), job_uid, step)
        return DeltaUpsertCommitter(commits, self, self.area(job_uid, step))


class _UpsertWriter(EpochWriter):
    """Refuses what the table cannot take when it comes: once its checkpoint is complete it would be too late."""

    def __init__(self, sink: DeltaUpsertSink, schema: pa.Schema, ctx: SinkContext, required: Sequence[str]) -> None:
        super().__init__(sink.area(ctx.job_uid, ctx.step), schema, ctx)
        self._marked, self._required = sink.changes is not None, tuple(required)
        self._path = sink.target.path

    def write(self, batch: pa.RecordBatch) -> None:
        if self._marked:
            added_rows(batch)
        check_required(batch, self._required, self._path)
        super().write(batch)


class DeltaUpsertCommitter:
    """Merges the epochs of one write step.

    Args:
        commits: of the step.
        sink: how.
        area: the step's staging.
    """

    takes_back = False

    def __init__(self, commits: Commits, sink: DeltaUpsertSink, area: StagingArea[StoreFolder]) -> None:
        self._commits, self._sink, self._area = commits, sink, area

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        """See ``Committer.commit``: what the epochs come to, in one version.

        Raises:
            CorruptSnapshotError: staged rows are torn or flipped.
            FencedError: a later attempt has taken over.
            StorageError: the table does not take them; they stay for the next try.
        """
        own = self._own(handles)
        if not own:
            return
        attempt = self._commits.attempt
        if attempt is None:
            attempt = max(incarnation_of(epoch.piece.file) for epoch in own)
        self._bring_in(checkpoint_id, own, attempt, settling=False)
        self._commits.tidy()

    def settle(self, restored: SinkSnapshot | None, retained: Sequence[SinkSnapshot], incarnation: int) -> None:
        """See ``Committer.settle``.  What was merged stays: what is computed again is merged again.

        Raises:
            CorruptSnapshotError, FencedError, StorageError: as ``commit``.
        """
        own = self._own(restored.handles) if restored is not None else []
        self._bring_in(0 if restored is None else restored.checkpoint_id, own, incarnation, settling=True)
        self._commits.attempt = incarnation
        self._area.sweep(incarnation)

    def retire(self, retired: SinkSnapshot, retained: Sequence[SinkSnapshot]) -> None:
        """Nothing to do: epochs are removed when they are in."""

    def finish(self, incarnation: int) -> None:
        """See ``Committer.finish``."""
        self._area.finish(incarnation)

    def _own(self, handles: list[Json]) -> list[EpochHandle]:
        """The epochs of this job, each once, oldest first."""
        found = [h for h in EpochCommitter.decode(handles) if isinstance(h, EpochHandle)]
        own = {epoch.piece.file: epoch for epoch in found if epoch.uid == self._area.job_uid}
        return sorted(own.values(), key=lambda epoch: (epoch.checkpoint_id, epoch.subtask))

    def _bring_in(self, checkpoint_id: int, own: Sequence[EpochHandle], attempt: int, *, settling: bool) -> None:
        table = self._commits.table

        def commit(number: CommitNumber) -> None:
            due = [epoch for epoch in own if epoch.checkpoint_id > number.checkpoint_id]
            after = CommitNumber(attempt, checkpoint_id).value
            if due:
                self._merge(self._rows(due), after, checkpoint_id)
                state = table.newest()
                number = CommitNumber.of(0 if state is None else state.number)
                number.check(attempt, table.path)
            if number.value != after and (due or settling):
                # The fence; or a merge that changed nothing, and may have left no version behind.
                table.commit([], [], after, self._commits.told(checkpoint_id))

        self._commits.perform(attempt, commit)
        self._area.folder.remove(epoch.piece.file for epoch in own)

    def _rows(self, due: Sequence[EpochHandle]) -> pa.Table:
        """The net effect of epochs: for each key the row that is there, or the mark that none is."""
        there = set(self._area.folder.names())
        lost = next((epoch for epoch in due if epoch.piece.file not in there), None)
        if lost is not None:
            raise StorageError(
                f"{lost.rows} staged rows of checkpoint {lost.checkpoint_id} are lost: "
                f"{self._area.path(lost.piece.file)!r} is gone, and the Delta table does not have them",
                hint="Leave the job's folder to the job, and the table to its log. Start afresh.",
            )
        pieces = [open_piece(self._area, epoch.piece, verify=True).read_all() for epoch in due]
        rows = pa.concat_tables(pieces, promote_options="default").combine_chunks()
        if self._sink.changes is None:
            rows = rows.add_column(0, OP, pa.repeat(pa.scalar("+I"), rows.num_rows))
        gone, kept = last_of_each_key(rows, self._sink.key)
        marked = [
            part.append_column(_GONE, pa.array(np.full(part.num_rows, is_gone)))
            for part, is_gone in ((gone, True), (kept, False))
        ]
        return pa.concat_tables(marked, promote_options="default")

    def _merge(self, rows: pa.Table, number: int, checkpoint_id: int) -> None:
        # Keys that are null are keys like others: "=" would never find them, and insert them again and again.
        on = " AND ".join(f"t.{_quoted(name)} IS NOT DISTINCT FROM s.{_quoted(name)}" for name in self._sink.key)
        values = {_quoted(name): f"s.{_quoted(name)}" for name in rows.column_names if name != _GONE}
        gone = f"s.{_quoted(_GONE)}"
        with delta_errors("cannot merge into the Delta table", self._commits.table.path):
            merging = self._commits.table.handle().merge(
                rows,
                on,
                source_alias="s",
                target_alias="t",
                **self._commits.table.merge_properties(number, self._commits.told(checkpoint_id)),
            )
            merging = merging.when_matched_delete(gone)
            merging = merging.when_matched_update(values, f"not {gone}")
            merging.when_not_matched_insert(values, f"not {gone}").execute()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
