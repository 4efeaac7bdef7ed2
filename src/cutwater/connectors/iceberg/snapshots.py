"""What there is to read in a table: the files of a snapshot, and those that later ones append."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from datetime import datetime
from typing import Any, Literal

from cutwater.connectors.base import SIZE, Split
from cutwater.connectors.iceberg.catalog import IcebergTable, iceberg_library
from cutwater.connectors.iceberg.commit_record import ancestors, properties_of
from cutwater.errors import BuildError, DataError

OnOverwrite = Literal["fail", "ignore"]
SNAPSHOT, FILE, ROWS = "snapshot", "file", "rows"
"""In ``Split.data``: the snapshot (of those to be read) that has the file, its path, and how many rows it has.

A split without a file only says how far the table was looked at.
"""
SPEC, PARTITION, DELETES = "spec", "partition", "deletes"
"""Where there are some: the number of its partitioning with the values, and its delete files."""
GONE_HINT = "What was appended since cannot be told. Start a job of another name, and keep snapshots for longer."


class History:
    """The snapshots of a table as it is now.

    Args:
        table: of the catalog.
        loaded: as it is now.
    """

    def __init__(self, table: IcebergTable, loaded: Any) -> None:
        self._table, self._loaded = table, loaded
        self._newest_first = list(ancestors(loaded.metadata))

    @property
    def current(self) -> int | None:
        """The current snapshot; ``None`` if the table never had one."""
        return self._newest_first[0].snapshot_id if self._newest_first else None

    def newest_of(self, known: Container[int]) -> int | None:
        """The newest snapshot that is known, or whose successor says that it was before."""
        for snapshot in self._newest_first:
            if snapshot.snapshot_id in known:
                return snapshot.snapshot_id
        oldest = self._newest_first[-1] if self._newest_first else None
        parent = None if oldest is None else oldest.parent_snapshot_id
        return parent if parent is not None and parent in known else None

    def whole(self, snapshot_id: int) -> list[Split]:
        """All files of a snapshot, with those that delete rows of them, oldest first.

        Raises:
            DataError: a delete file that is not applied.
            StorageError: it cannot be read.
        """
        metadata = self._loaded.metadata
        with self._table.errors("cannot list its files"):
            manifests = metadata.snapshot_by_id(snapshot_id).manifests(self._loaded.io)
            content = iceberg_library("manifest").ManifestContent
            if any(manifest.content == content.DELETES for manifest in manifests):
                return self._with_deletes(snapshot_id)
            entries = [e for m in manifests for e in m.fetch_manifest_entry(self._loaded.io, discard_deleted=True)]
        entries.sort(key=lambda entry: (entry.sequence_number or 0, entry.data_file.file_path))
        return [self._split(snapshot_id, entry.data_file) for entry in entries]

    def _with_deletes(self, snapshot_id: int) -> list[Split]:
        try:
            tasks = list(self._loaded.scan(snapshot_id=snapshot_id).plan_files())
        except ValueError as error:
            raise DataError(
                f"iceberg table {self._table.name!r}: snapshot {snapshot_id} cannot be read: {error}",
                hint="Rewrite its data files, so that equality deletes are applied, or begin with start='latest'.",
            ) from None
        tasks.sort(key=lambda task: task.file.file_path)
        return [self._split(snapshot_id, task.file, task.delete_files) for task in tasks]

    def appended(self, snapshots: Sequence[Any], on_overwrite: OnOverwrite) -> list[Split]:
        """The files that snapshots add, oldest first.

        Raises:
            DataError: a snapshot takes rows away.
            StorageError: they cannot be read.
        """
        splits: list[Split] = []
        for snapshot in snapshots:
            operation = "append" if snapshot.summary is None else snapshot.summary.operation.value
            if operation == "append":
                splits += self._added_by(snapshot)
            elif operation != "replace" and on_overwrite == "fail":
                raise DataError(
                    f"iceberg table {self._table.name!r}: snapshot {snapshot.snapshot_id} is no append but "
                    f"{operation!r}: rows that were read before are changed or gone",
                    hint="Pass over such snapshots with on_overwrite='ignore', or start a job of another name.",
                )
        if snapshots and (not splits or splits[-1].data[SNAPSHOT] != snapshots[-1].snapshot_id):
            splits.append(marker(snapshots[-1].snapshot_id))
        return splits

    def after(self, snapshot_id: int | None) -> list[Any]:
        """The snapshots after one, oldest first; ``None``: after the table was empty.

        Raises:
            DataError: some of them are not known any more.
        """
        later: list[Any] = []
        for snapshot in self._newest_first:
            if snapshot.snapshot_id == snapshot_id:
                return later[::-1]
            later.append(snapshot)
        if snapshot_id is None and (not later or _is_first(later[-1])):
            return later[::-1]
        if later and snapshot_id is not None and later[-1].parent_snapshot_id == snapshot_id:
            return later[::-1]
        raise self._gone(snapshot_id)

    def _gone(self, snapshot_id: int | None) -> DataError:
        return DataError(
            f"iceberg table {self._table.name!r}: snapshot {snapshot_id}, up to which the job has read, is not before "
            "the current one any more: it was expired, with others after it, or the table was rolled back",
            hint=GONE_HINT,
        )

    def _added_by(self, snapshot: Any) -> list[Split]:
        content = iceberg_library("manifest").ManifestContent
        splits: list[Split] = []
        with self._table.errors("cannot list its files"):
            for manifest in snapshot.manifests(self._loaded.io):
                if manifest.added_snapshot_id != snapshot.snapshot_id or manifest.content != content.DATA:
                    continue
                entries = manifest.fetch_manifest_entry(self._loaded.io, discard_deleted=True)
                mine = [entry.data_file for entry in entries if entry.snapshot_id == snapshot.snapshot_id]
                splits += [self._split(snapshot.snapshot_id, file) for file in mine]
        return sorted(splits, key=lambda split: split.data[FILE])

    def beginning(self, start: int | datetime) -> list[Any]:
        """The snapshots from one on, or from a time on, oldest first.

        Raises:
            BuildError: they are not known any more.
        """
        found: list[Any] = []
        for snapshot in self._newest_first:
            if isinstance(start, datetime) and snapshot.timestamp_ms < start.timestamp() * 1000:
                return found[::-1]
            found.append(snapshot)
            if snapshot.snapshot_id == start:
                return found[::-1]
        if isinstance(start, datetime) and (not found or _is_first(found[-1])):
            return found[::-1]
        what = f"snapshots since {start} were" if isinstance(start, datetime) else f"snapshot {start} never was, or was"
        raise BuildError(
            f"iceberg table {self._table.name!r}: {what} expired",
            hint=f"Begin with start={found[-1].snapshot_id}, the oldest that is left, or 'earliest'." if found else "",
        )

    def _split(self, snapshot_id: int, file: Any, deletes: Iterable[Any] = ()) -> Split:
        data = {SNAPSHOT: snapshot_id, **self._entry(file), ROWS: file.record_count}
        removing = sorted((self._entry(delete) for delete in deletes), key=lambda entry: entry[FILE])
        if removing:
            data[DELETES] = removing
        return Split(f"{snapshot_id}:{file.file_path}", data)

    def _entry(self, file: Any) -> dict[str, Any]:
        """A file of a manifest in JSON."""
        if file.file_format.value != "PARQUET":
            raise DataError(
                f"iceberg table {self._table.name!r}: {file.file_path!r} is {file.file_format.value}, not Parquet",
                hint="Rewrite the table's data files, and its delete files, as Parquet.",
            )
        entry: dict[str, Any] = {FILE: file.file_path, SIZE: file.file_size_in_bytes}
        if file.spec_id or len(file.partition):
            metadata, to_bytes = self._loaded.metadata, iceberg_library("conversions").to_bytes
            types = metadata.specs()[file.spec_id].partition_type(metadata.schema()).fields
            values = [file.partition[i] for i in range(len(types))]
            coded = [
                None if value is None else to_bytes(field.field_type, value).hex()
                for field, value in zip(types, values, strict=True)
            ]
            entry |= {SPEC: file.spec_id, PARTITION: coded}
        return entry


def marker(snapshot_id: int | None) -> Split:
    """A split without rows: the table was looked at up to this snapshot."""
    return Split(f"{snapshot_id}", {SNAPSHOT: snapshot_id, FILE: None})


def _is_first(snapshot: Any) -> bool:
    """True if no rows were in the table before; whoever expires snapshots may also cut what leads to them."""
    if snapshot.parent_snapshot_id is not None:
        return False
    said = properties_of(snapshot)
    return int(said.get("total-data-files", 0)) <= int(said.get("added-data-files", 0))


def known_snapshots(known: Sequence[Any]) -> set[int]:
    """The snapshots that splits are of."""
    return {data[SNAPSHOT] for data in known if isinstance(data, dict) and data[SNAPSHOT] is not None}
