"""Bounds on what a snapshot may say, checked before anything is allocated, opened or inflated by its word.

Whoever may write into a checkpoint directory can write anything there, and a digest without a key is made in no time.
So what comes from there is a ``CorruptSnapshotError`` at worst: no path out of the folder, no memory beyond a limit, no
pointer out of its buffer.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from cutwater.errors import CorruptSnapshotError
from cutwater.storage.snapshot.manifest import Entry, Manifest
from cutwater.storage.store.paths import is_data_path

SEGMENT_BYTES_MAX = 1 << 33
"""A segment above this is neither written nor read."""

_ROWS_MAX = 1 << 31
_GROUPS_MAX = 1 << 16
_SUBTASKS_MAX = 1 << 20
_TIME_MS_MAX = 253_402_300_799_000
"""The end of the year 9999."""

_NAME = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,127}")
_NO_STREAM = (pa.ArrowException, OSError, StopIteration, EOFError, ValueError, struct.error)
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2
_BATCH_OF_DICTIONARY, _COMPRESSION = 1, 3
"""Numbers of fields in Arrow's ``DictionaryBatch`` and ``RecordBatch``."""


def check_name(name: str, what: str) -> str:
    """The name back, if it can be that of a file or folder of ours.

    >>> check_name("a3f0", "the uid")
    'a3f0'
    >>> check_name("../x", "the uid")
    Traceback (most recent call last):
    cutwater.errors.CorruptSnapshotError: the uid is '../x', which names no file or folder of Cutwater's
    """
    if not _NAME.fullmatch(name):
        raise CorruptSnapshotError(f"{what} is {name[:128]!r}, which names no file or folder of Cutwater's")
    return name


def check_time(time_ms: int, what: str) -> None:
    """Refuse a wall clock time before 1970 or after the year 9999."""
    if not 0 <= time_ms <= _TIME_MS_MAX:
        raise CorruptSnapshotError(f"{what} is of no time: {time_ms} ms since the epoch")


def check_manifest(manifest: Manifest, where: str, *, savepoint: bool) -> None:
    """Refuse a manifest that names files which none names, or subtasks and times that cannot be.

    Args:
        savepoint: its files lie in folders of steps; else they are data files of checkpoints.
    """
    for name in ("triggered_ms", "completed_ms"):
        check_time(getattr(manifest, name), f"{where}: {name}")
    records = [(r.vertex, r.subtask) for r in manifest.subtasks]
    counts = [manifest.parallelism, *(step.parallelism for step in manifest.steps), *(n for r in records for n in r)]
    if not all(0 <= n <= _SUBTASKS_MAX for n in counts) or not 0 <= manifest.max_parallelism <= _GROUPS_MAX:
        raise CorruptSnapshotError(f"{where} tells of subtasks, or of a parallelism, that no job has")
    for record in manifest.subtasks:
        check_time(record.processing_time_ms, f"{where}: processing_time_ms")
    for entry in manifest.entries:
        if entry.file and not (savepoint or is_data_path(entry.file)):
            raise CorruptSnapshotError(f"{where} names {entry.file[:128]!r}, which is no data file of a checkpoint")
        check_entry(entry, where)


def check_entry(entry: Entry, where: str) -> None:
    """Refuse an entry whose numbers cannot be."""
    if not 0 <= entry.length <= SEGMENT_BYTES_MAX or not 0 <= entry.rows <= _ROWS_MAX or entry.offset < 0:
        raise CorruptSnapshotError(
            f"{where} tells of a segment of {entry.length} bytes and {entry.rows} rows at {entry.offset}, "
            f"which cannot be",
            step=entry.step,
        )
    ranges = [entry.key_groups] if entry.key_groups is not None else []
    if entry.ungrouped is not None:
        columns, groups = entry.ungrouped
        if columns < 0 or not 1 <= groups <= _GROUPS_MAX:
            raise CorruptSnapshotError(f"{where} tells of {groups} key groups", step=entry.step)
    if not 0 <= entry.subtask <= _SUBTASKS_MAX or not all(0 <= a <= b <= _GROUPS_MAX for a, b in ranges):
        raise CorruptSnapshotError(f"{where} tells of key groups {ranges} of subtask {entry.subtask}", step=entry.step)


def decoded(data: Any, schema: bytes | None, where: str, step: str, *, trusted: bool) -> pa.RecordBatch:
    """The one batch of an Arrow stream, or, with its schema, a batch that lies alone.

    What is not trusted is looked at first: a compressed body could become any size (none of ours is compressed), and
    offsets that lead out of their buffers would be followed.

    Args:
        trusted: its seal was compared: it is as Arrow wrote it.
    """
    try:
        buffer = pa.py_buffer(data)
        if not trusted:
            _refuse_compressed(buffer, alone=schema is not None)
        if schema is None:
            batch = pa.ipc.open_stream(buffer).read_next_batch()
        else:
            batch = pa.ipc.read_record_batch(buffer, pa.ipc.read_schema(pa.py_buffer(schema)))
        if not trusted:
            batch.validate(full=True)
    except _NO_STREAM as error:
        raise CorruptSnapshotError(f"{where} is not an Arrow stream ({error})", step=step) from error
    return batch


def checked_stream(buffer: pa.Buffer, where: str, *, trusted: bool) -> pa.RecordBatchReader:
    """The batches of an Arrow stream; of one that is not trusted each is looked at as ``decoded`` does."""
    try:
        if trusted:
            return pa.ipc.open_stream(buffer)
        _refuse_compressed(buffer, alone=False, all=True)
        stream = pa.ipc.open_stream(buffer)
    except _NO_STREAM as error:
        raise CorruptSnapshotError(f"{where} is not an Arrow stream ({error})") from error
    return pa.RecordBatchReader.from_batches(stream.schema, _validated(stream, where))


def _validated(stream: pa.RecordBatchReader, where: str) -> Iterator[pa.RecordBatch]:
    try:
        for batch in stream:
            batch.validate(full=True)
            yield batch
    except _NO_STREAM as error:
        raise CorruptSnapshotError(f"{where} is not an Arrow stream ({error})") from error


def _refuse_compressed(buffer: pa.Buffer, *, alone: bool, all: bool = False) -> None:
    """Look at the messages up to the first batch, or at all, without decoding a body."""
    reader = None if alone else pa.ipc.MessageReader.open_stream(buffer)
    while True:
        try:
            message = pa.ipc.read_message(buffer) if reader is None else reader.read_next_message()
        except StopIteration:
            return
        kind, compressed = _batch_of(memoryview(message.metadata))
        if compressed:
            raise ValueError("its rows are compressed, as nothing is that Cutwater writes")
        if reader is None or (kind == _RECORD_BATCH and not all):
            return


def _batch_of(metadata: memoryview) -> tuple[int, bool]:
    """Kind of a message (Arrow's number), and whether the batch in it is compressed."""
    message = _u32(metadata, 0)
    at = _field(metadata, message, 1)
    kind = metadata[at] if at else 0
    header = _field(metadata, message, 2)
    if kind not in (_RECORD_BATCH, _DICTIONARY_BATCH) or not header:
        return kind, False
    table = header + _u32(metadata, header)
    if kind == _DICTIONARY_BATCH:
        data = _field(metadata, table, _BATCH_OF_DICTIONARY)
        if not data:
            return kind, False
        table = data + _u32(metadata, data)
    return kind, bool(_field(metadata, table, _COMPRESSION))


def _field(metadata: memoryview, table: int, number: int) -> int:
    """Position of a field of a table in a flat buffer; 0: it is not there."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    if vtable < 0 or table < 0:
        raise ValueError("its metadata leads out of itself")
    size = struct.unpack_from("<H", metadata, vtable)[0]
    slot = 4 + 2 * number
    offset = struct.unpack_from("<H", metadata, vtable + slot)[0] if slot + 2 <= size else 0
    return table + offset if offset else 0


def _u32(metadata: memoryview, at: int) -> int:
    return struct.unpack_from("<I", metadata, at)[0]
