"""Writing and reading the data of a snapshot: segments to files and back, every byte under a digest."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any, cast

import msgspec
import pyarrow as pa

from cutwater.data.decoding import prepare
from cutwater.errors import CorruptSnapshotError, FormatVersionError, InvariantError, StorageError
from cutwater.state.segments import Segment, SegmentKind
from cutwater.storage.log_entries import CheckpointCompleted, attached_to, check_version
from cutwater.storage.snapshot.data_file import DataFile, encode
from cutwater.storage.snapshot.limits import SEGMENT_BYTES_MAX, check_entry, check_manifest, decoded
from cutwater.storage.snapshot.manifest import KNOWN_VERSIONS, SEALED_VERSIONS, Entry, Manifest, encoded
from cutwater.storage.snapshot.packed_splits import with_all_splits
from cutwater.storage.store.base import Readable, Store
from cutwater.storage.store.paths import data_path, entry_at, shared_path, writer_of_shared
from cutwater.storage.store.seal import Kind, Seal, is_sealed

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
        attempt: of the job; with ``incarnation`` it names the file, so that no path is ever written twice.
        incarnation: unique among all writers of the attempt and checkpoint.
        inline_threshold_bytes: segments below this encoded size travel inside their entry.
        continued: the shared file to go on with, if not a new one.

    Raises:
        StorageError: of all methods: the store fails; the writer can only be aborted.
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
        self._seal = store.seal
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
            shared: later checkpoints may refer to them.
            extends: of these, what builds upon segments of older checkpoints: it never lies in a file with them, or
                the loss of that file would take the older checkpoints, too.
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
        """Write one batch; ``described`` are the fields of its entry that say what it is."""
        self._check_open(described.get("step"))
        return self._add(batch, self._own, **described)

    def _add(self, batch: pa.RecordBatch, file: DataFile, **described: Any) -> Entry:
        described |= {"rows": batch.num_rows, "format": SEGMENT_FORMAT}
        size = pa.ipc.get_record_batch_size(batch)
        if size > SEGMENT_BYTES_MAX:
            raise StorageError(
                f"state {described['name']!r} has {size} bytes in one segment, at most {SEGMENT_BYTES_MAX} can be read",
                step=described["step"],
                hint="A segment holds whole key groups: raise max_parallelism, so that a group holds fewer keys.",
            )
        if size < self._inline_below:
            small = io.BytesIO()
            length, digest = encode(batch, small, self._seal.hasher("segment"))
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
        SealError: it is not sealed with a key that is known here.
        FormatVersionError: the entry's format is not known here.
    """
    where = f"{job}/{entry.file} at offset {entry.offset}" if entry.file else f"inline segment of {job}"
    if entry.format not in (SEGMENT_FORMAT, BATCH_FORMAT):
        known = f"{SEGMENT_FORMAT!r} and {BATCH_FORMAT!r}"
        raise FormatVersionError(f"{where} has format {entry.format!r}, this release knows {known}", step=entry.step)
    check_entry(entry, where)
    if entry.file:
        data = store.read(f"{job}/{entry.file}", entry.offset, entry.length)
    else:
        data = entry.inline or b""
    if len(data) != entry.length:
        raise CorruptSnapshotError(
            f"{where} is damaged: expected {entry.length} bytes, found {len(data)}", step=entry.step
        )
    _compare(store.seal, "segment", data, entry.digest, where, entry.step)
    return data


def _compare(seal: Seal, kind: Kind, data: Any, digest: str, what: str, step: str | None = None) -> None:
    if problem := seal.problem(kind, data, digest, what, step):
        raise CorruptSnapshotError(f"{what} is damaged: {problem} over {len(data)} bytes", step=step)


def read_segment(store: Readable, job: str, entry: Entry) -> Segment:
    """The segment of an entry; its bytes are compared with length and digest before they are decoded.

    The batch refers to the bytes read, it is not copied; the rows of an unsorted segment are, sorted by key group.
    """
    batch = read_batch(store, job, entry)
    if entry.ungrouped is not None:
        from cutwater.state.table.keyed_segments import in_groups  # compiled code, which the driver does without

        try:
            batch = in_groups(batch, *entry.ungrouped)
        except Exception as error:  # whatever the kernels say of types that no key has
            raise CorruptSnapshotError(
                f"the rows of {job}/{entry.file} have no key ({error})", step=entry.step
            ) from error
    return Segment(entry.name, cast(SegmentKind, entry.kind), batch, entry.key_groups)


def read_batch(store: Readable, job: str, entry: Entry) -> pa.RecordBatch:
    """The rows of an entry of any kind, as ``read_segment``."""
    data = read_verified(store, job, entry)
    where = f"{job}/{entry.file or 'manifest'} at offset {entry.offset}"
    schema = entry.schema if entry.format == BATCH_FORMAT else None
    batch = decoded(data, schema, where, entry.step, trusted=is_sealed(entry.digest))
    if batch.num_rows != entry.rows:
        raise CorruptSnapshotError(
            f"{where} holds {batch.num_rows} rows, the manifest says {entry.rows}", step=entry.step
        )
    return batch


def dumps_manifest(manifest: Manifest, seal: Seal) -> tuple[bytes, str]:
    """The JSON of a manifest, in the oldest format that can tell it, and its digest or seal."""
    manifest = msgspec.structs.replace(manifest, format_version=_version_of(manifest, sealed=seal.keyed))
    data = encoded(manifest, f"checkpoint {manifest.checkpoint_id}") + b"\n"
    return data, seal.digest("manifest", data)


def _version_of(manifest: Manifest, *, sealed: bool) -> int:
    packed = any(record.packed for record in manifest.subtasks)
    if sealed:
        return 6 if packed else 4
    if packed:
        return 5
    if any(e.ungrouped is not None for e in manifest.entries):
        return 3
    newer = any(e.kind == "delete" or writer_of_shared(e.file) is not None for e in manifest.entries)
    return 2 if newer else 1


class _Versioned(msgspec.Struct):
    format_version: int = 1


prepare(_Versioned)


def load_manifest(store: Store, job: str, completed: CheckpointCompleted) -> Manifest:
    """The manifest of a completed checkpoint, verified against the digest in the log, with each split told by itself.

    Raises:
        CorruptSnapshotError: missing, torn, changed, of another checkpoint, or it names what no manifest does.
        SealError: it is not sealed with a key that is known here.
        FormatVersionError: written by a newer release.
    """
    path = f"{job}/{completed.path}"
    data = store.read(path)
    if entry_at(completed.path) is not None:
        data = attached_to(data)
    _compare(store.seal, "manifest", data, completed.digest, f"the manifest in {path}")
    try:
        version = msgspec.json.decode(data, type=_Versioned).format_version
        check_version(path, "format", version, KNOWN_VERSIONS)
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptSnapshotError(f"{path} is not a manifest ({error})") from error
    if (manifest.checkpoint_id, manifest.attempt) != (completed.checkpoint_id, completed.attempt):
        raise CorruptSnapshotError(
            f"{path} is of checkpoint {manifest.checkpoint_id}, attempt {manifest.attempt}; "
            f"the log says {completed.checkpoint_id}, {completed.attempt}"
        )
    if (version in SEALED_VERSIONS) != is_sealed(completed.digest):
        raise CorruptSnapshotError(f"{path} is damaged: its version is {version}")
    check_manifest(manifest, path, savepoint=False)
    return with_all_splits(manifest)
