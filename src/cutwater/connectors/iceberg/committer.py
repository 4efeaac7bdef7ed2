"""One snapshot for all subtasks, with a record of its checkpoint.  See ``docs/decisions/0059-iceberg.md``."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from cutwater.connectors.base import Json, SinkSnapshot
from cutwater.connectors.iceberg.catalog import IcebergTable, iceberg_library
from cutwater.connectors.iceberg.commit_record import CommitRecord, own_snapshots, record_key, record_of
from cutwater.connectors.iceberg.data_files import DataFileHandle, OwnFiles, data_file, origin_of
from cutwater.connectors.iceberg.partitions import Partitioning
from cutwater.errors import FencedError, StorageError

_TRIES = 40
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
_EXPIRE_EVERY = 16
"""Commits between two looks for snapshots that are old enough to go."""


class Change(NamedTuple):
    """What a snapshot is to bring."""

    record: CommitRecord
    added: Sequence[DataFileHandle] = ()
    removed: Sequence[Any] = ()


class IcebergCommitter:
    """Commits the data files of one write step.

    The table's commit record is read before each commit, from the state of the table that the commit builds on, and
    written with it.  Each change of a record makes a snapshot, so whoever has read an older record builds on a snapshot
    that is not the newest any more, and the catalog refuses.

    Args:
        table: where to.
        prepared: the table as it is now, made or changed as the rows want it.
        job_uid, step: whose rows.
        expire_after: our own snapshots that are older go away; ``None``: never.
    """

    takes_back = True

    def __init__(
        self,
        table: IcebergTable,
        prepared: Callable[[], Any],
        job_uid: str,
        step: str,
        expire_after: timedelta | None,
    ) -> None:
        self._table, self._prepared, self._expire_after = table, prepared, expire_after
        self._own = OwnFiles(job_uid, step)
        self._key = record_key(job_uid, step)
        self._authority: int | None = None
        self._commits = 0

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        """Make the files that are not in the table part of it, by one snapshot.

        Raises:
            CorruptSnapshotError: a handle names a file that this step has not written.
            FencedError: a newer attempt has taken over.
            StorageError: the catalog does not answer, or the table is another one.
        """
        files = self._own.handles(handles)

        def change(table: Any, record: CommitRecord) -> Change | None:
            fresh = _above(files, record.checkpoint_id)
            if not fresh:
                return None
            self._check_authority(record, fresh)
            return Change(record._replace(checkpoint_id=max(checkpoint_id, fresh[-1].checkpoint_id)), fresh)

        if files and self._brought(change) and self._expire_after is not None:
            self._commits += 1
            if self._commits % _EXPIRE_EVERY == 0:
                self._expire(self._expire_after)

    def settle(self, restored: SinkSnapshot | None, retained: Sequence[SinkSnapshot], incarnation: int) -> None:
        """See ``Committer.settle``: raises the fence, and with the same snapshot commits what ``restored`` names, or
        removes the files of later checkpoints.  Rows of others stay.

        Raises:
            FencedError: a newer attempt has taken over.
            StorageError: the catalog does not answer; or rows that must go lie in files of somebody else now.
        """
        goal = 0 if restored is None else restored.checkpoint_id
        files = self._own.handles([] if restored is None else restored.handles)
        self._authority = incarnation
        self._prepared()

        def change(table: Any, record: CommitRecord) -> Change | None:
            if record.attempt > incarnation:
                raise self._fenced(record, incarnation)
            fresh = _above(files, record.checkpoint_id)
            removed: list[Any] = []
            if record.checkpoint_id > goal:
                removed = self._later_files(table, goal, incarnation)
            after = CommitRecord(incarnation, goal)
            return Change(after, fresh, removed) if after != record else None

        self._brought(change)

    def retire(self, retired: SinkSnapshot, retained: Sequence[SinkSnapshot]) -> None:
        """Nothing to do: all files that a checkpoint names are in the table once the next one completes."""

    def finish(self, incarnation: int) -> None:
        """See ``Committer.finish``.  The commit record stays: a driver from before may still come."""

    # ---------------------------------------------------------------------------------------------------- one commit

    def _brought(self, change: Callable[[Any, CommitRecord], Change | None]) -> bool:
        """Commit what ``change`` makes of the table's newest state; False if that is nothing.

        Raises:
            StorageError: others commit all the time.
        """
        conflict, wait_s = iceberg_library("exceptions").CommitFailedException, _FIRST_WAIT_S
        for _ in range(_TRIES):
            table = self._table.loaded()
            wanted = change(table, record_of(table.metadata, self._key))
            if wanted is None:
                return False
            try:
                with self._table.errors("cannot commit"):
                    self._perform(table, wanted)
                return True
            except conflict:
                time.sleep(wait_s * random.uniform(0.5, 1))
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise StorageError(
            f"iceberg table {self._table.name!r}: {_TRIES} commits in a row were refused, since others were quicker",
            hint="The job tries again. Let fewer writers commit to the table, or checkpoint less often.",
        )

    def _perform(self, table: Any, change: Change) -> None:
        """A snapshot with the change and the commit record, on the very state of the table that was looked at."""
        entries = self._entries(table, change.added)
        text = change.record.text()
        transaction = table.transaction()
        update = transaction.update_snapshot(snapshot_properties={self._key: text})
        with update.overwrite() if change.removed else update.fast_append() as snapshot:
            for entry in entries:
                snapshot.append_data_file(entry)
            for entry in change.removed:
                snapshot.delete_data_file(entry)
        transaction.set_properties({self._key: text})
        transaction.commit_transaction()

    def _entries(self, table: Any, files: Sequence[DataFileHandle]) -> list[Any]:
        if not files:
            return []
        metadata = table.metadata
        for file in files:
            if file.table != str(metadata.table_uuid):
                raise StorageError(
                    f"iceberg table {self._table.name!r} was dropped and made again: {file.rows} rows of checkpoint "
                    f"{file.checkpoint_id} were written for the old one",
                    hint="Write to the new table with a job of another name, or rename the old one back.",
                )
            if file.spec != metadata.default_spec_id:
                raise StorageError(
                    f"iceberg table {self._table.name!r} was partitioned anew while files were written for it",
                    hint=f"Set partition spec {file.spec} again, let the job go on, then stop it and change the spec.",
                )
        partitioning = Partitioning(metadata, self._table.name)
        return [data_file(file, partitioning) for file in files]

    def _check_authority(self, record: CommitRecord, files: Sequence[DataFileHandle]) -> None:
        authority = self._authority
        if authority is None:
            authority = max(file.incarnation for file in files)
        if authority < record.attempt:
            raise self._fenced(record, authority)

    def _fenced(self, record: CommitRecord, attempt: int) -> FencedError:
        return FencedError(
            f"iceberg table {self._table.name!r}: attempt {record.attempt} of the job writes already, this is "
            f"{attempt}",
            hint="Another driver has taken over the job.",
        )

    # --------------------------------------------------------------------------------------------------- going back

    def _later_files(self, table: Any, goal: int, incarnation: int) -> list[Any]:
        """The files that checkpoints after ``goal`` have made part of the table.

        Raises:
            StorageError: not all of them are there any more, so their rows may lie in others.
        """
        with self._table.errors("cannot list its files"):
            found: dict[str, Any] = {}
            for manifest in table.metadata.current_snapshot().manifests(table.io):
                for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                    if self._is_later(entry.data_file.file_path, goal, None, incarnation):
                        found[entry.data_file.file_path] = entry.data_file
            lost = self._added_later(table, goal, incarnation) - found.keys()
        if lost:
            raise StorageError(
                f"iceberg table {self._table.name!r}: the job goes back to checkpoint {goal}, but {len(lost)} files of "
                f"later ones, such as {min(lost)!r}, were rewritten or removed by others: their rows cannot be told "
                "from those of others, and would come twice",
                hint="Restore a newer checkpoint; or roll the table back yourself. Under another step id the sink "
                "writes the rows again whatever the table holds.",
            )
        return list(found.values())

    def _added_later(self, table: Any, goal: int, incarnation: int) -> set[str]:
        """Files of checkpoints after ``goal`` that were added and not taken back, as far as snapshots tell."""
        added: set[str] = set()
        limit: int | None = None
        for snapshot, record in own_snapshots(table.metadata, self._key):
            if record.checkpoint_id <= goal:
                break
            limit = record.checkpoint_id if limit is None else min(limit, record.checkpoint_id)
            for manifest in snapshot.manifests(table.io):
                if manifest.added_snapshot_id != snapshot.snapshot_id:
                    continue
                for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                    path = entry.data_file.file_path
                    if entry.snapshot_id == snapshot.snapshot_id and self._is_later(path, goal, limit, incarnation):
                        added.add(path)
        return added

    def _is_later(self, path: str, goal: int, limit: int | None, below: int) -> bool:
        origin = origin_of(path, self._own.stem)
        if origin is None or origin.checkpoint_id <= goal or origin.incarnation >= below:
            return False
        return limit is None or origin.checkpoint_id <= limit

    # ----------------------------------------------------------------------------------------------- old snapshots

    def _expire(self, older_than: timedelta) -> None:
        """Forget old snapshots of this step, but for its newest, and for those that a branch or tag names."""
        table = self._table.loaded()
        before_ms = (time.time() - older_than.total_seconds()) * 1000
        named = {reference.snapshot_id for reference in table.metadata.refs.values()}
        own = [snapshot for snapshot, _ in own_snapshots(table.metadata, self._key)][1:]
        old = [s.snapshot_id for s in own if s.timestamp_ms < before_ms and s.snapshot_id not in named]
        if not old:
            return
        try:
            with self._table.errors("cannot expire snapshots"):
                table.maintenance.expire_snapshots().by_ids(old).commit()
        except iceberg_library("exceptions").CommitFailedException:
            return  # the next time


def _above(files: Sequence[DataFileHandle], checkpoint_id: int) -> list[DataFileHandle]:
    return [file for file in files if file.checkpoint_id > checkpoint_id]
