"""The rows of a keyed table out of its segments, a stretch of key groups at a time: newest wins, deletions honoured."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from cutwater.state.index.nullable import NullableIndex
from cutwater.state.segments import GROUP_COLUMN, Segment
from cutwater.state.table.keyed_segments import keyed_rows
from cutwater.state_reader.layout import TableLayout
from cutwater.state_reader.values import DOMAIN, TIME
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.snapshot.segment_files import read_segment
from cutwater.storage.store.base import Store

_CHUNK_ROWS = 1 << 18
_KEPT_BYTES = 64 << 20
_MICROSECONDS = 1000


class Segments:
    """Reads segments of one snapshot, and keeps those read last: a delta may concern many stretches of key groups.

    Args:
        store: where the snapshot lies.
        folder: of the job in it.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder
        self._kept: OrderedDict[int, tuple[Entry, Segment]] = OrderedDict()
        self._kept_bytes = 0
        self.bytes_read = 0
        """Of segments, since the beginning."""

    def read(self, entry: Entry) -> Segment:
        """The segment of an entry, verified.

        Raises:
            CorruptSnapshotError: its bytes differ from their digest.
        """
        found = self._kept.get(id(entry))
        if found is not None:
            self._kept.move_to_end(id(entry))
            return found[1]
        segment = read_segment(self._store, self._folder, entry)
        self.bytes_read += entry.length
        self._kept[id(entry)] = (entry, segment)
        self._kept_bytes += entry.length
        while self._kept_bytes > _KEPT_BYTES:
            _, (gone, _) = self._kept.popitem(last=False)
            self._kept_bytes -= gone.length
        return segment


def chunks(entries: Sequence[Entry], wanted: range) -> Iterator[range]:
    """Cut key groups into stretches of about as many rows as fit memory well, at least one group each.

    >>> at = [Entry("s", 0, "agg", "base", 2**20, 0, "", (0, 8))]
    >>> [(c.start, c.stop) for c in chunks(at, range(1, 6))]
    [(1, 3), (3, 5), (5, 6)]
    """
    rows = np.zeros(wanted.stop + 1)
    for entry in entries:
        if entry.key_groups is not None:
            start, stop = entry.key_groups
            rows[start:stop] += entry.rows / max(stop - start, 1)
    begin, held = wanted.start, 0.0
    for group in wanted:
        if group > begin and held + rows[group] > _CHUNK_ROWS:
            yield range(begin, group)
            begin, held = group, 0.0
        held += rows[group]
    if begin < wanted.stop:
        yield range(begin, wanted.stop)


def merged(layout: TableLayout, name: str, segments: Segments, groups: range) -> list[pa.RecordBatch]:
    """The stored rows of these key groups, under one of the names of ``layout.segments``."""
    concerned = (
        segments.read(entry)
        for entry in layout.entries
        if entry.name == name
        and entry.key_groups is not None
        and entry.key_groups[0] < groups.stop
        and groups.start < entry.key_groups[1]
    )
    batches = keyed_rows(concerned, layout.stored, groups)
    if layout.identity and len(batches) > 1:
        return [_newest(pa.concat_batches(batches), layout.identity)]
    return batches


def with_clocks(batch: pa.RecordBatch, segment: str) -> pa.RecordBatch:
    """Timers with the clock that they go by, and their times in microseconds."""
    event = "event" in segment
    times = batch.column(TIME).to_numpy() * (1 if event else _MICROSECONDS)
    batch = batch.set_column(batch.schema.get_field_index(TIME), TIME, pa.array(times))
    domain = pa.array(["event" if event else "processing"] * batch.num_rows, pa.string())
    return batch.append_column(DOMAIN, domain)


def _newest(batch: pa.RecordBatch, identity: Sequence[str]) -> pa.RecordBatch:
    """The last row of each key."""
    columns = [batch.column(name) for name in identity]
    index = NullableIndex([column.type for column in columns], batch.num_rows)
    gids = index.upsert(columns)
    if len(index) == batch.num_rows:
        return batch
    last = np.empty(len(index), np.int64)
    last[gids] = np.arange(batch.num_rows)  # of rows of one group id the last one stays
    groups = batch.column(GROUP_COLUMN).to_numpy()[last]
    return batch.take(pa.array(last[np.argsort(groups, kind="stable")]))
