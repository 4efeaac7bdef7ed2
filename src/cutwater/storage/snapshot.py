"""Writing and reading the data of a snapshot: segments to files and back, every byte under a digest."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any, cast

import msgspec
import pyarrow as pa
import xxhash

from cutwater.decoding import prepare
from cutwater.errors import CorruptSnapshotError, DataError, FormatVersionError, InvariantError
from cutwater.state.segments import Segment, SegmentKind
from cutwater.storage.base import Readable, Store
from cutwater.storage.data_file import DataFile, encode
from cutwater.storage.log_entries import CheckpointCompleted, attached_to
from cutwater.storage.manifest import FORMAT_VERSION, KNOWN_VERSIONS, Entry, Manifest
from cutwater.storage.paths import data_path, entry_at, shared_path, writer_of_shared

__all__ = [
    "BATCH_FORMAT",
    "SEGMENT_FORMAT",
    "SnapshotWriter",
    "dumps_manifest",
    "load_manifest",
    "read_batch",
    "read_segment",
    "read_verified",
]

SEGMENT_FORMAT = "arrow-ipc/1"
"""A segment is a stream of its own."""
BATCH_FORMAT = "arrow-file/1"
"""A segment is a record batch within an Arrow file; the entry has its schema."""


class SnapshotWriter:
    """Writes one worker's part of one checkpoint: one file, or none if all of it is small.

    What later checkpoints may name, too, goes into another file, so that it does not keep the rest, or behind what an
    earlier checkpoint wrote (``Continued``).

    Used from one thread.  A worker that fails half-way calls ``abort``; what even that leaves behind is named by
    attempt and incarnation, so nobody mistakes it for data, and retention removes it.

    Args:
        store: where to.
        job: folder of the job in the store.
        checkpoint_id: of the checkpoint.
        attempt: of the job; with ``incarnation`` it names the file, so that no path is ever written twice.
        incarnation: unique among all writers of the attempt and checkpoint.
        inline_threshold_bytes: segments below this encoded size travel inside their entry.
        continued: the shared file to go on with, if not a new one.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        checkpoint_id: int,
        attempt: int,
        incarnation: int,
        inline_threshold_bytes: int,
        continued: DataFile | None = None,
    ) -> None:
        self.path = data_path(checkpoint_id, attempt, incarnation)
        """Relative to the job's folder; the file exists only once something was too large to be inline."""
        self._own = DataFile(store, job, self.path)
        self._shared = DataFile(store, job, shared_path(checkpoint_id, attempt, incarnation))
        self._continued, self._checkpoint_id = continued, checkpoint_id
        self._extends = False
        self._inline_below = inline_threshold_bytes
        self._closed = False

    def add(
        self,
        step: str,
        subtask: int,
        segments: Iterable[Segment],
        *,
        shared: bool = False,
        extends: bool = False,
    ) -> list[Entry]:
        """Write segments, in order; their entries may be acknowledged only after ``close`` (A6).

        Args:
            step, subtask: whose they are.
            segments: what to write.
            shared: later checkpoints may refer to them.
            extends: of these, what builds upon segments of older checkpoints: it never lies in a file with them, or
                the loss of that file would take the older checkpoints, too.

        Raises:
            StorageError: the store fails; the writer can only be aborted.
        """
        self._check_open(step)
        file = self._own if not shared else self._shared if extends else self._continued or self._shared
        entries = [
            self._add(
                segment.batch,
                file,
                step=step,
                subtask=subtask,
                name=segment.name,
                kind=segment.kind,
                key_groups=segment.key_groups,
                ungrouped=segment.ungrouped,
            )
            for segment in segments
        ]
        self._extends = self._extends or (extends and any(entry.file for entry in entries))
        return entries

    def add_batch(self, batch: pa.RecordBatch, **described: Any) -> Entry:
        """Write one batch; ``described`` are the fields of its entry that say what it is.

        Raises:
            StorageError: the store fails; the writer can only be aborted.
        """
        self._check_open(described.get("step"))
        return self._add(batch, self._own, **described)

    def _add(self, batch: pa.RecordBatch, file: DataFile, **described: Any) -> Entry:
        described |= {"rows": batch.num_rows, "format": SEGMENT_FORMAT}
        if pa.ipc.get_record_batch_size(batch) < self._inline_below:
            small = io.BytesIO()
            length, digest = encode(batch, small)
            if length < self._inline_below:
                return Entry(**described, length=length, digest=digest, inline=small.getvalue())
        if file is self._continued:
            described["written"] = self._checkpoint_id
        return file.append(batch, described)

    def _check_open(self, step: object) -> None:
        if self._closed:
            raise InvariantError(f"snapshot file {self.path} was closed before {step!r} added to it")

    def close(self, *, go_on: bool = False) -> DataFile | None:
        """Make everything durable.  Nothing to do, and no file, if all segments were inline.

        Args:
            go_on: leave open, and return, the file with which a later checkpoint may go on, if there is one.

        Raises:
            StorageError: the store fails; the writer can only be aborted.
        """
        self._closed = True
        self._own.close()
        last = self._continued or (None if self._extends else self._shared)
        left = last if last is not None and go_on and last.sync() else None
        for file in (self._shared, self._continued):
            if file is not None and file is not left:
                file.close()
        return left

    def abort(self) -> None:
        """Drop everything written.  A store that fails here leaves the files to retention."""
        self._closed = True
        for file in (self._own, self._shared, self._continued):
            if file is not None:
                file.abort()


def read_verified(store: Readable, job: str, entry: Entry) -> bytes | memoryview:
    """The bytes of an entry, compared with its length and digest.

    Raises:
        CorruptSnapshotError: names file and offset, and what was expected.
        FormatVersionError: the entry's format is not known here.
    """
    where = f"{job}/{entry.file} at offset {entry.offset}" if entry.file else f"inline segment of {job}"
    if entry.format not in (SEGMENT_FORMAT, BATCH_FORMAT):
        known = f"{SEGMENT_FORMAT!r} and {BATCH_FORMAT!r}"
        raise FormatVersionError(f"{where} has format {entry.format!r}, this release knows {known}", step=entry.step)
    if entry.file:
        data = store.read(f"{job}/{entry.file}", entry.offset, entry.length)
    else:
        data = entry.inline or b""
    found = xxhash.xxh3_128_hexdigest(data)
    if len(data) != entry.length or found != entry.digest:
        raise CorruptSnapshotError(
            f"{where} is damaged: expected {entry.length} bytes with digest {entry.digest}, "
            f"found {len(data)} with {found}",
            step=entry.step,
        )
    return data


def read_segment(store: Readable, job: str, entry: Entry) -> Segment:
    """The segment of an entry; its bytes are compared with length and digest before they are decoded.

    The batch refers to the bytes read, it is not copied; the rows of a loose segment are, sorted by key group.

    Raises:
        CorruptSnapshotError: names file and offset, and what was expected.
        FormatVersionError: the entry's format is not known here.
    """
    batch = read_batch(store, job, entry)
    if entry.ungrouped is not None:
        from cutwater.state.grouping import in_groups  # compiled code, which the driver does without

        batch = in_groups(batch, *entry.ungrouped)
    return Segment(entry.name, cast(SegmentKind, entry.kind), batch, entry.key_groups)


def read_batch(store: Readable, job: str, entry: Entry) -> pa.RecordBatch:
    """The rows of an entry of any kind, as ``read_segment``."""
    data = read_verified(store, job, entry)
    where = f"{job}/{entry.file or 'manifest'} at offset {entry.offset}"
    try:
        if entry.format == BATCH_FORMAT:
            schema = pa.ipc.read_schema(pa.py_buffer(entry.schema))
            batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
        else:
            batch = pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()
    except (pa.ArrowInvalid, OSError, StopIteration) as error:
        raise CorruptSnapshotError(f"{where} is not an Arrow stream ({error})", step=entry.step) from error
    if batch.num_rows != entry.rows:
        raise CorruptSnapshotError(
            f"{where} holds {batch.num_rows} rows, the manifest says {entry.rows}", step=entry.step
        )
    return batch


def dumps_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """Deterministic JSON of a manifest, in the oldest format that can tell it, and its digest (xxh3_128, hex).

    Raises:
        DataError: a position, handle or split description is no JSON value.
    """
    manifest = msgspec.structs.replace(manifest, format_version=_version_of(manifest))
    try:
        data = msgspec.json.encode(manifest, order="deterministic") + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError(
            f"checkpoint {manifest.checkpoint_id}: a position or handle cannot be written as JSON ({error})",
            hint="Connectors must use numbers, texts, lists and dictionaries for positions, handles and states.",
        ) from error
    return data, xxhash.xxh3_128_hexdigest(data)


def _version_of(manifest: Manifest) -> int:
    if any(e.ungrouped is not None for e in manifest.entries):
        return FORMAT_VERSION
    newer = any(e.kind == "delete" or writer_of_shared(e.file) is not None for e in manifest.entries)
    return 2 if newer else 1


class _Versioned(msgspec.Struct):
    format_version: int = 1


prepare(_Versioned)


def load_manifest(store: Store, job: str, completed: CheckpointCompleted) -> Manifest:
    """The manifest of a completed checkpoint, verified against the digest in the log.

    Raises:
        CorruptSnapshotError: missing, torn, changed, or of another checkpoint.
        FormatVersionError: written by a newer release.
    """
    path = f"{job}/{completed.path}"
    data = store.read(path)
    if entry_at(completed.path) is not None:
        data = attached_to(data)
    found = xxhash.xxh3_128_hexdigest(data)
    if found != completed.digest:
        raise CorruptSnapshotError(
            f"the manifest in {path} is damaged: expected digest {completed.digest}, found {found} over "
            f"{len(data)} bytes"
        )
    try:
        version = msgspec.json.decode(data, type=_Versioned).format_version
        if version not in KNOWN_VERSIONS:
            raise FormatVersionError(
                f"{path} has format version {version}, this release knows {', '.join(map(str, KNOWN_VERSIONS))}",
                hint="Use the release that wrote it, or a newer one.",
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptSnapshotError(f"{path} is not a manifest ({error})") from error
    if (manifest.checkpoint_id, manifest.attempt) != (completed.checkpoint_id, completed.attempt):
        raise CorruptSnapshotError(
            f"{path} is of checkpoint {manifest.checkpoint_id}, attempt {manifest.attempt}; "
            f"the log says {completed.checkpoint_id}, {completed.attempt}"
        )
    return manifest
