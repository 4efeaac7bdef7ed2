"""A file sink whose directory lies in a bucket.

Nothing is renamed there and nothing appended.  So the rows that wait for their part are staged as an object for each
subtask and checkpoint, and the part itself, once it is full or old enough, as one more.  The commit is a copy within
the bucket: the part is there at once and whole, under a name that is final and its own, so that doing it again, by
whoever, makes the same object.  Taking back is a delete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import msgspec
import pyarrow as pa

from cutwater.connectors.base import Json, PreCommit, SinkContext
from cutwater.connectors.files.part_commit import (
    LogState,
    PartHandle,
    StagedPartCommitter,
    is_visible,
    part_stem,
    part_suffix,
)
from cutwater.connectors.files.part_draft import StagedPart, WaitingRows, WholeFile
from cutwater.connectors.files.part_formats import PartFormat
from cutwater.connectors.files.schemas import cast_batch
from cutwater.connectors.files.sink import FileSink, RollRules
from cutwater.connectors.staging import EndHandle, StagingArea, StagingLog, converted, open_piece, staging_in_store
from cutwater.connectors.staging_folders import REMOVED_HINT, StoreFolder
from cutwater.errors import CorruptSnapshotError, StorageError
from cutwater.storage.store.objects import ObjectStore, bucket_and_prefix, open_objects


@dataclass(frozen=True)
class ObjectSink(FileSink):
    """As ``FileSink``, in a bucket: ``s3://bucket/prefix``.

    Raises:
        ConfigError: the path holds more than a bucket and a prefix.
    """

    @staticmethod
    def place(path: str) -> str:
        scheme, name, prefix = bucket_and_prefix(path)
        return f"{scheme}://{name}/{prefix}".rstrip("/")

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink.check``: the bucket is there, and can be written."""
        self.parts.schema(schema)
        open_objects(self.path, self.guard.seal, self.guard.access, make=True)

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> ObjectPartWriter:
        area = staging_in_store(self.path, ctx.job_uid, ctx.step, self.guard)
        return ObjectPartWriter(area, self.parts, self, self.parts.schema(schema), ctx, restored)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> ObjectPartCommitter:
        area = staging_in_store(self.path, job_uid, step, self.guard)
        stem = part_stem(job_uid, step)
        return ObjectPartCommitter(area, self.parts, self.parts.schema(schema), stem, self.path)


class _Body:
    """A part in the making, in memory: rows are encoded block by block."""

    def __init__(self, parts: PartFormat, schema: pa.Schema) -> None:
        self.schema, self._blocks = schema, parts.blocks
        self._encoder = parts.encoder(schema)
        self._made = [bytes(memoryview(self._encoder.begin()))]
        self._rest = WaitingRows()
        self._rows = self._bytes = 0

    @property
    def rows(self) -> int:
        return self._rows + self._rest.rows

    @property
    def bytes(self) -> int:
        """Of Arrow data."""
        return self._bytes + self._rest.bytes

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows.

        Raises:
            DataError: a value that the format cannot hold.
        """
        self._rest.add(cast_batch(batch, self.schema))
        if block := self._rest.block(self._blocks):
            self._encode(block)

    def whole(self) -> list[bytes]:
        """The file, in pieces; it takes no more rows.

        Raises:
            DataError: as ``add``.
        """
        if block := self._rest.all():
            self._encode(block)
        return [*self._made, bytes(memoryview(self._encoder.end()))]

    def _encode(self, block: list[pa.RecordBatch]) -> None:
        # What an encoder gives may be overwritten by what it gives next.
        self._made += [bytes(memoryview(body)) for body in self._encoder.rows(block)]
        self._rows += sum(batch.num_rows for batch in block)
        self._bytes += sum(batch.nbytes for batch in block)


class _ObjectPart(StagedPart):
    """A part that nobody adds to any more.

    Args:
        files: staged pieces that hold its rows.
    """

    def __init__(self, area: StagingArea[StoreFolder], suffix: str, body: _Body, files: list[str]) -> None:
        super().__init__(area, suffix)
        self._folder, self._seal = area.folder, area.guard.seal
        self._body: _Body | None = body
        self._files, self._rows = files, body.rows

    @property
    def files(self) -> list[str]:
        return self._files

    @property
    def rows(self) -> int:
        return self._rows

    def _make(self, name: str) -> WholeFile:
        assert self._body is not None
        data = b"".join(self._body.whole())
        self._folder.put(name, data)
        self._body = None
        return WholeFile(len(data), self._seal.digest("part", data))


class ObjectPartWriter:
    """The rows of a subtask.  Arguments and errors as of ``PartWriter``."""

    def __init__(
        self,
        area: StagingArea[StoreFolder],
        parts: PartFormat,
        rules: RollRules,
        schema: pa.Schema,
        ctx: SinkContext,
        restored: Sequence[Json],
    ) -> None:
        self._area, self._parts, self._rules, self._schema, self._ctx = area, parts, rules, schema, ctx
        states = [converted(state, LogState) for state in restored if state is not None]
        own = [state for state in states if state.uid == ctx.job_uid]
        cuts = [cut for state in own for cut in state.pieces]
        self._log = StagingLog(area, schema, ctx.subtask, ctx.incarnation, cuts)
        self._unlogged: list[pa.RecordBatch] = []
        """Rows of the body that came since the last checkpoint."""
        self._body = _Body(parts, schema)
        self._ready: list[_ObjectPart] = []
        self._pending: list[_ObjectPart] = []
        self._take_over()
        self._named = {cut.file for cut in cuts}
        age_ms = max((state.age_ms for state in own), default=0.0)
        self._oldest: float | None = time.monotonic() - age_ms / 1000 if cuts else None
        self._roll_asked = any(not area.guard.seal.is_current(cut.digest) for cut in cuts)

    def _take_over(self) -> None:
        """Rows that an earlier writer staged; those with other columns become parts of their own."""
        others: list[tuple[_Body, list[str]]] = []
        for cut in self._log.cuts():
            with open_piece(self._area, cut, verify=False) as rows:
                body = self._body
                if not rows.schema.equals(self._schema.remove_metadata()):
                    if not others or not others[-1][0].schema.equals(rows.schema):
                        others.append((_Body(self._parts, rows.schema), []))
                    body, files = others[-1]
                    files.append(cut.file)
                for batch in rows:
                    body.add(batch)
        self._log.drop({file for _, files in others for file in files})
        self._ready += [_ObjectPart(self._area, self._parts.suffix, body, files) for body, files in others]

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows.

        Raises:
            DataError: a value does not fit its type in the file.
        """
        if batch.num_rows == 0:
            return
        if self._oldest is None:
            self._oldest = time.monotonic()
        batch = cast_batch(batch, self._schema)
        self._body.add(batch)
        self._unlogged.append(batch)
        if self._body.rows >= self._rules.roll_rows or self._body.bytes >= self._rules.roll_bytes:
            self._end_body()

    def roll(self) -> None:
        """See ``SinkWriter.roll``: the next ``pre_commit`` puts every row into a part."""
        self._roll_asked = True

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        age_ms = 0.0 if self._oldest is None else (time.monotonic() - self._oldest) * 1000
        due = final or self._roll_asked or age_ms >= cast("float", self._rules.roll_interval_ms)
        self._roll_asked = False
        if due and self._body.rows:
            self._end_body()
        for batch in self._unlogged:
            self._log.append(batch)
        self._unlogged = []
        self._log.seal()  # an object is not written on
        cuts = self._log.cuts()
        self._pending = [part for part in self._pending if not part.committed] + self._named_parts(checkpoint_id)
        self._named.update(cut.file for cut in cuts)
        if not cuts:
            self._oldest = None
        parts = list(self._pending)
        state = LogState(self._ctx.job_uid, cuts, round(age_ms, 1)) if cuts else None
        return lambda: self._snapshot(parts, state, final)

    def close(self) -> None:
        self._log.close()

    def _end_body(self) -> None:
        files = [cut.file for cut in self._log.cuts()]
        self._ready.append(_ObjectPart(self._area, self._parts.suffix, self._body, files))
        self._log.drop(files)
        self._body, self._unlogged = _Body(self._parts, self._schema), []

    def _named_parts(self, checkpoint_id: int) -> list[_ObjectPart]:
        parts, self._ready = self._ready, []
        stem = part_stem(self._ctx.job_uid, self._ctx.step)
        for number, part in enumerate(parts):
            name = stem + part_suffix(self._ctx.subtask, checkpoint_id, self._ctx.incarnation, number, part.suffix)
            part.name_it(name, self._named)
            self._named.difference_update(part.files)
        return parts

    def _snapshot(self, parts: list[_ObjectPart], state: LogState | None, final: bool) -> PreCommit:
        earlier = [part for part in parts if part.durable]
        there = set(self._area.folder.names()) if earlier else set[str]()
        handles: list[Json] = []
        for part in parts:
            handle = part.stage()
            part.committed = part.durable and handle.staged not in there
            part.durable = True
            if not part.committed:
                handles.append(msgspec.to_builtins(handle))
        if state is not None:
            self._log.make_durable(state.pieces)
        if final:
            handles.append(msgspec.to_builtins(EndHandle(self._ctx.job_uid)))
        return PreCommit(handles, None if state is None else msgspec.to_builtins(state))


class ObjectPartCommitter(StagedPartCommitter[StoreFolder]):
    """Commits by copies within the bucket.

    Args:
        target: URI of the directory.
    """

    def __init__(
        self, area: StagingArea[StoreFolder], parts: PartFormat, schema: pa.Schema, stem: str, target: str
    ) -> None:
        super().__init__(area, parts, schema, stem)
        self._uri = target

    @cached_property
    def _target(self) -> ObjectStore:
        return ObjectStore(self._uri, self._area.guard.seal, self._area.guard.access)

    def _publish(self, parts: Sequence[PartHandle]) -> None:
        for part in parts:
            if not self._target.copy(self._staged(part), part.final):
                self._require_committed(part)

    def _staged(self, part: PartHandle) -> str:
        return self._area.path(part.staged).removeprefix(f"{self._target.uri}/")

    def _left_over(self, parts: Sequence[PartHandle]) -> list[str]:
        return [part.staged for part in parts]

    def _require_committed(self, part: PartHandle) -> None:
        """What is not staged any more is visible, or was moved on by whoever consumes the target."""
        if self._target.is_object(part.final) or self._area.folder.exists():
            return
        raise StorageError(
            f"output part {part.final!r} ({part.rows} rows) is lost: neither {self._area.folder.path!r} nor the part "
            "exists",
            hint=REMOVED_HINT,
        )

    def _verify(self, part: PartHandle) -> None:
        path = self._area.path(part.staged)
        try:
            body = self._area.folder.read(part.staged, part.bytes)
        except FileNotFoundError:
            self._require_committed(part)
            return
        if body.size != part.bytes or self._area.problem("part", body, part.digest, f"staged output {path!r}"):
            raise CorruptSnapshotError(
                f"staged output {path!r} differs from its digest",
                hint="Restore an older checkpoint: start the job with restore='DIR/JOB@ID'.",
            )

    def _take_back(self, checkpoint_id: int, incarnation: int) -> None:
        names: Iterable[str] = self._target.names()
        self._target.delete_files([name for name in names if self._is_later(name, checkpoint_id, incarnation)])

    def _make_dataset(self) -> None:
        if any(is_visible(name, self._parts.suffix) for name in self._target.names()):
            return
        name = self._stem + part_suffix(0, 0, 0, 0, self._parts.suffix)
        self._target.create(name, b"".join(_Body(self._parts, self._schema).whole()))
