"""Rows on their way in a snapshot come back item by item."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pytest

from cutwater.errors import CorruptSnapshotError
from cutwater.storage.snapshot import channel_log
from cutwater.storage.snapshot.channel_log import ChannelLog, LogItem, add_log, read_log
from cutwater.storage.snapshot.segment_files import SnapshotWriter
from cutwater.storage.store.local import LocalStore

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])


def batch(first: int, rows: int) -> pa.RecordBatch:
    numbers = list(range(first, first + rows))
    return pa.record_batch([pa.array(numbers), pa.array([str(n) for n in numbers])], schema=SCHEMA)


ITEMS = [
    LogItem(batch(7, 3), 10, late_before=4),
    LogItem(None, 12, True),
    LogItem(batch(10, 2).slice(1), 12),
    LogItem(None, 12),
    LogItem(batch(12, 4), 20),
    LogItem(None, 25),
]


def log(items: list[LogItem]) -> ChannelLog:
    return ChannelLog("count", 1, "grow>count", (3, 0, 1), "receiver", 7, items)


@pytest.mark.parametrize("inline", [0, 1 << 20])
@pytest.mark.parametrize("portion", [1, 1 << 20])
def test_items_come_back_one_by_one(tmp_path, monkeypatch, inline: int, portion: int) -> None:
    monkeypatch.setattr(channel_log, "_SEGMENT_BYTES", portion)
    store = LocalStore(str(tmp_path))
    writer = SnapshotWriter(store, "job", 5, 1, 0, inline)
    entries = add_log(writer, log(ITEMS))
    writer.close()
    assert [(e.kind, e.channel, e.side, e.step, e.subtask) for e in entries] == [
        ("channel", (3, 0, 1), "receiver", "count", 1)
    ] * len(entries)
    assert entries[0].first_row == 7
    assert sum(e.rows for e in entries) == 8
    found = [item for e in entries for item in read_log(store, "job", e)]
    wanted = ITEMS if portion > 1 else ITEMS[:-1]  # what follows the last rows is in the sender's record
    assert [(i.watermark, i.idle, i.late_before, i.batch and i.batch.to_pydict()) for i in found] == [
        (i.watermark, i.idle, i.late_before, i.batch and i.batch.to_pydict()) for i in wanted
    ]
    assert all(i.batch is None or i.batch.schema.equals(SCHEMA, check_metadata=True) for i in found)
    starts = [e.first_row for e in entries]
    assert starts == [7, 10, 11][: len(starts)]


def test_a_log_without_rows_writes_nothing(tmp_path) -> None:
    writer = SnapshotWriter(LocalStore(str(tmp_path)), "job", 5, 1, 0, 0)
    assert add_log(writer, log([LogItem(None, 3)])) == []


def test_an_entry_that_is_no_log_is_named(tmp_path) -> None:
    store = LocalStore(str(tmp_path))
    writer = SnapshotWriter(store, "job", 5, 1, 0, 1 << 20)
    entry = writer.add_batch(batch(0, 3), step="count", subtask=0, name="x", kind="channel", channel=(0, 0, 0))
    with pytest.raises(CorruptSnapshotError, match="has no items"):
        read_log(store, "job", entry)
    (good,) = add_log(writer, log(ITEMS[:1]))
    with pytest.raises(CorruptSnapshotError, match="damaged"):
        read_log(store, "job", msgspec.structs.replace(good, inline=(good.inline or b"")[:-1] + b"x"))
