"""The data files of a savepoint: Arrow files that any program can open, every byte of them under a digest.

    <step>/<state>.<first>-<last>.arrow         state of the subtask with these key groups, in canonical form
    <step>/<edge>.<from>-<to>.<side>.arrow      rows on their way, of an edge that closes a loop

A file is in Arrow's file format, uncompressed.  Each of its record batches has a digest of its own, so that a worker
reads what it needs and no more; the digest of the file covers what lies around them.

Keyed state is written in a canonical form, whoever kept it and however it was cut.  Rows are in the order of their key
group, then of the columns that tell them apart; they are cut after the first key group with which there are
``BATCH_ROWS`` of them.  State in which the order of rows means something stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, cast
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cutwater.errors import InvariantError, StorageError
from cutwater.state.segments import GROUP_COLUMN, Segment
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND, ChannelLog, log_batches
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.snapshot.segment_files import BATCH_FORMAT
from cutwater.storage.store.base import Store
from cutwater.storage.store.seal import Seal

BATCH_ROWS = 1 << 16


def canonical(segments: Iterable[Segment]) -> Iterator[Segment]:
    """All segments of one subtask's state, in canonical form; holds about a key group of them in memory.

    Args:
        segments: the whole state (no deletions), the rows of each name in ascending order of key groups; deltas may
            begin anew, with rows that replace earlier ones of their keys.

    >>> def segment(groups, keys):
    ...     columns = {GROUP_COLUMN: pa.array(groups, pa.uint16()), "key": keys}
    ...     return Segment("agg", "base", pa.record_batch(columns), (groups[0], groups[-1] + 1), identity=1)
    >>> (whole,) = canonical([segment([0, 0], ["b", "a"]), segment([3], ["c"])])
    >>> whole.key_groups, whole.batch.column("key").to_pylist()
    ((0, 4), ['a', 'b', 'c'])
    """
    for (name, identity), run in itertools.groupby(segments, lambda s: (s.name, s.identity)):
        if identity:
            yield from _in_order(name, identity, run)
        else:
            yield from run


def _in_order(name: str, identity: int, run: Iterable[Segment]) -> Iterator[Segment]:
    waiting: list[pa.RecordBatch] = []
    again = False  # rows come that replace, by key, some that came before
    count = of_last = 0  # rows that wait, and those among them of the last key group, of which more may come
    last = -1
    for segment in run:
        if segment.batch.num_rows == 0:
            continue
        groups = _groups(segment.batch)
        if segment.kind == "delete" or (int(groups[0]) < last and segment.kind == "base"):
            raise InvariantError(f"state {name!r}: its segments are not those of a whole state in order of key groups")
        if int(groups[0]) < last:
            yield from _rest(name, identity, waiting, again)
            waiting, again, count, of_last, last = [], True, 0, 0, -1
        of_last = of_last if int(groups[0]) == int(groups[-1]) == last else 0
        last = int(groups[-1])
        of_last += int(np.count_nonzero(groups == last))
        waiting.append(segment.batch)
        count += len(groups)
        if count - of_last >= BATCH_ROWS:
            rows = pa.concat_batches(waiting)
            cuts = _cuts(_groups(rows)[: count - of_last])
            yield from _cut(name, identity, rows, cuts, again)
            waiting, count = [rows.slice(cuts[-1])], count - cuts[-1]
    yield from _rest(name, identity, waiting, again)


def _rest(name: str, identity: int, waiting: list[pa.RecordBatch], again: bool) -> Iterator[Segment]:
    if waiting:
        rows = pa.concat_batches(waiting)
        yield from _cut(name, identity, rows, [*_cuts(_groups(rows)), rows.num_rows], again)


def _cut(name: str, identity: int, rows: pa.RecordBatch, cuts: list[int], again: bool) -> Iterator[Segment]:
    for start, end in itertools.pairwise([0, *cuts]):
        yield from _pieces(name, identity, rows.slice(start, end - start), again)


def _groups(batch: pa.RecordBatch) -> npt.NDArray[np.uint16]:
    return batch.column(GROUP_COLUMN).to_numpy()


def _cuts(groups: npt.NDArray[np.uint16]) -> list[int]:
    """Ends of whole groups with which there are enough rows.

    >>> _cuts(np.zeros(10, np.uint16))
    []
    """
    cuts: list[int] = []
    start = 0
    while len(groups) - start >= BATCH_ROWS:
        start = int(np.searchsorted(groups, groups[start + BATCH_ROWS - 1], side="right"))
        cuts.append(start)
    return cuts


def _pieces(name: str, identity: int, rows: pa.RecordBatch, again: bool) -> Iterator[Segment]:
    """Whole groups as one segment, or, where a group is large, a base and what adds to it; ``again``: only deltas."""
    if rows.num_rows == 0:
        return
    groups = _groups(rows)
    covered = (int(groups[0]), int(groups[-1]) + 1)
    order = _order(rows, 1 + identity)
    for start in range(0, rows.num_rows, 2 * BATCH_ROWS):
        batch = rows.take(order.slice(start, 2 * BATCH_ROWS))
        yield Segment(name, "delta" if start or again else "base", batch, covered, identity)


def _order(rows: pa.RecordBatch, columns: int) -> Any:
    """Indices that sort by the first columns; what Arrow cannot sort by keeps the order that it has."""
    names = [str(i) for i in range(columns)]
    keys = pa.table(rows.columns[:columns], names=names)
    try:
        return _sorted(keys, names)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, TypeError):
        return _sorted(keys, names[:1])


def _sorted(keys: pa.Table, names: list[str]) -> Any:
    options = pc.SortOptions(sort_keys=[(name, "ascending") for name in names])
    return pc.call_function("sort_indices", [keys], options)


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
    """Entries of a manifest for the files, in their order."""
    return [
        Entry(
            **msgspec.structs.asdict(batch),
            step=file.step,
            subtask=file.subtask,
            name=file.name,
            file=file.path,
            format=BATCH_FORMAT,
            channel=file.channel,
            side=file.side,
            schema=file.schema,
        )
        for file in files
        for batch in file.batches
    ]


class SavepointWriter:
    """Writes one worker's part of a savepoint.  Used from one thread.

    Raises:
        StorageError: of all methods: the store fails; the writer can only be aborted.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder
        self._paths: set[str] = set()
        self._open: _ArrowFile | None = None

    def add_state(self, step: str, subtask: int, key_groups: range, segments: Iterable[Segment]) -> list[SavepointFile]:
        """Write the whole state of a step in one subtask, durably.

        Args:
            key_groups: those of the subtask; they name the files.
            segments: see ``canonical``.
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
        """Write the rows of a channel, durably; nothing if there are none."""
        _, source, target = log.channel
        stem = f"{log.step}/{quote(log.name, safe='')}.{source}-{target}.{log.side}"
        files: list[SavepointFile] = []
        for batch, first_row in log_batches(log):
            file = self._begin(stem, batch.schema, log.described)
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
