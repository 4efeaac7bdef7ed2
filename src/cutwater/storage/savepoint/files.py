"""The data files of a savepoint: Arrow files that any program can open, every byte of them under a digest.

    <step>/<state>.<first>-<last>.arrow         state of the subtask with these key groups, in canonical form
    <step>/<edge>.<from>-<to>.<side>.arrow      rows on their way, of an edge that closes a loop

A file is in Arrow's file format, uncompressed.  Each of its record batches has a digest of its own, so that a worker
reads what it needs and no more; the digest of the file covers what lies around them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, BinaryIO, cast
from urllib.parse import quote

import msgspec
import pyarrow as pa

from cutwater.errors import InvariantError, StorageError
from cutwater.state.segments import Segment
from cutwater.storage.savepoint.canonical import canonical
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND, ChannelLog, log_batches
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.snapshot.segment_files import BATCH_FORMAT
from cutwater.storage.store.base import Store
from cutwater.storage.store.seal import Seal

_MAGIC_BYTES = 8
"""Before the schema: the name of the format, padded."""


class SavepointBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record batch of a file: a segment, or a piece of a channel's log."""

    offset: int
    length: int
    rows: int
    digest: str
    """Of its bytes: xxh3_128, hex, or a seal."""
    kind: str
    key_groups: tuple[int, int] | None = None
    first_row: int = 0


class SavepointFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """One data file."""

    path: str
    """Relative to the savepoint's folder."""
    step: str
    subtask: int
    name: str
    """Of the state, or of the edge."""
    length: int
    digest: str
    """Of the whole file, as those of its batches."""
    schema: bytes
    """As an Arrow IPC message."""
    batches: list[SavepointBatch]
    channel: tuple[int, int, int] | None = None
    side: str = ""


def entries_of(files: Iterable[SavepointFile]) -> list[Entry]:
    """What a manifest says of the files, in their order."""
    return [
        Entry(
            step=file.step,
            subtask=file.subtask,
            name=file.name,
            kind=batch.kind,
            rows=batch.rows,
            length=batch.length,
            digest=batch.digest,
            key_groups=batch.key_groups,
            file=file.path,
            offset=batch.offset,
            format=BATCH_FORMAT,
            channel=file.channel,
            side=file.side,
            first_row=batch.first_row,
            schema=file.schema,
        )
        for file in files
        for batch in file.batches
    ]


class SavepointWriter:
    """Writes one worker's part of a savepoint.  Used from one thread.

    Args:
        store: where to.
        folder: of the savepoint, in the store.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder
        self._paths: set[str] = set()
        self._open: _ArrowFile | None = None

    def add_state(self, step: str, subtask: int, key_groups: range, segments: Iterable[Segment]) -> list[SavepointFile]:
        """Write the whole state of a step in one subtask, durably.

        Args:
            step, subtask: whose it is.
            key_groups: those of the subtask; they name the files.
            segments: see ``canonical``.

        Raises:
            StorageError: the store fails; the writer can only be aborted.
        """
        owned = f"{key_groups.start:05}-{key_groups.stop - 1:05}"
        files: list[SavepointFile] = []
        for segment in canonical(segments):
            file = self._open
            if file is None or file.described["name"] != segment.name or file.schema != segment.batch.schema:
                files += self._close()
                described = {"step": step, "subtask": subtask, "name": segment.name}
                file = self._begin(f"{step}/{quote(segment.name, safe='')}.{owned}", segment.batch.schema, described)
            file.append(segment.batch, kind=segment.kind, key_groups=segment.key_groups)
        return files + self._close()

    def add_log(self, log: ChannelLog) -> list[SavepointFile]:
        """Write the rows of a channel, durably; nothing if there are none.

        Raises:
            StorageError: the store fails; the writer can only be aborted.
        """
        _, source, target = log.channel
        stem = f"{log.step}/{quote(log.name, safe='')}.{source}-{target}.{log.side}"
        described = {"step": log.step, "subtask": log.subtask, "name": log.name}
        files: list[SavepointFile] = []
        for batch, first_row in log_batches(log):
            file = self._begin(stem, batch.schema, described | {"channel": log.channel, "side": log.side})
            file.append(batch, kind=CHANNEL_KIND, first_row=first_row)
            files += self._close()
        return files

    def abort(self) -> None:
        """Remove what was written, as far as the store lets."""
        file, self._open = self._open, None
        try:
            if file is not None:
                file.file.close()
            for path in self._paths:
                self._store.delete(f"{self._folder}/{path}")
        except StorageError:
            pass  # the driver removes the folder as well

    def _begin(self, stem: str, schema: pa.Schema, described: dict[str, Any]) -> _ArrowFile:
        path, number = f"{stem}.arrow", 1
        while path in self._paths:
            path, number = f"{stem}.{number}.arrow", number + 1
        self._paths.add(path)
        file = self._store.write(f"{self._folder}/{path}")
        self._open = _ArrowFile(file, path, schema, described, self._store.seal)
        return self._open

    def _close(self) -> list[SavepointFile]:
        file, self._open = self._open, None
        if file is None:
            return []
        file.finish()
        self._store.close_durably(file.file)
        return [file.record()]


class _ArrowFile:
    """An Arrow file that is being written; keeps the digests of its batches and of the whole."""

    closed = False

    def __init__(self, file: BinaryIO, path: str, schema: pa.Schema, described: dict[str, Any], seal: Seal) -> None:
        self.file, self.schema, self.described = file, schema, described
        self._path = path
        self._message = schema.serialize().to_pybytes()
        self._seal = seal
        self._whole, self._batch = seal.hasher("file"), seal.hasher("segment")
        self._length = 0
        self._begins = _MAGIC_BYTES + len(self._message)
        self._batches: list[SavepointBatch] = []
        self._arrow = pa.ipc.new_file(pa.PythonFile(cast(Any, self), mode="w"), schema)

    def append(self, batch: pa.RecordBatch, **described: Any) -> None:
        start = max(self._length, self._begins)  # Arrow writes the schema with the first batch
        self._batch = self._seal.hasher("segment")
        self._arrow.write_batch(batch)
        length, digest = self._length - start, self._batch.hexdigest()
        self._batches.append(SavepointBatch(start, length, batch.num_rows, digest, **described))

    def finish(self) -> None:
        self._arrow.close()

    def record(self) -> SavepointFile:
        return SavepointFile(
            path=self._path,
            length=self._length,
            digest=self._whole.hexdigest(),
            schema=self._message,
            batches=self._batches,
            **self.described,
        )

    # -- what Arrow asks of a file

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.file.write(view)
        self._whole.update(view)
        ahead = max(0, self._begins - self._length)  # magic and schema belong to no batch
        if len(view) > ahead:
            self._batch.update(view[ahead:])
        self._length += len(view)
        return len(view)

    def tell(self) -> int:
        return self._length

    def flush(self) -> None:
        """Arrow asks for it; the store syncs once, at the end."""

    def close(self) -> None:
        """Arrow asks for it; ``SavepointWriter`` closes the file."""
        if self._length < self._begins:
            raise InvariantError(f"{self._path}: Arrow wrote {self._length} bytes, fewer than its schema takes")
