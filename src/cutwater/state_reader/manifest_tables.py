"""Tables of what a snapshot holds besides state: positions of sources, handles of sinks, rows on their way."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from cutwater.data.time import MIN_WATERMARK
from cutwater.storage.snapshot.channel_log import read_log
from cutwater.storage.snapshot.manifest import Entry, Manifest
from cutwater.storage.store.base import Store

_TIME, _INT, _TEXT = pa.timestamp("us", "UTC"), pa.int32(), pa.string()
POSITIONS = pa.schema(
    {"subtask": _INT, "split": _TEXT, "position": _TEXT, "max_time": _TIME, "done": pa.bool_(), "data": _TEXT}
)
"""Positions and split descriptions are JSON."""
HANDLES = pa.schema({"subtask": _INT, "handle": _TEXT})
"""Handles are JSON."""
PLACES = pa.schema({"__sender": _INT, "__receiver": _INT, "__side": _TEXT, "__row_number": pa.int64()})
"""Columns of a row on its way besides its own."""


def positions(manifest: Manifest, step: str) -> pa.RecordBatch:
    """Positions of a source, by split."""
    rows = [
        {
            "subtask": record.subtask,
            "split": split.id,
            "position": json.dumps(split.position),
            "max_time": None if split.max_time == MIN_WATERMARK else split.max_time,
            "done": split.done,
            "data": json.dumps(split.data),
        }
        for record in manifest.subtasks
        for split in record.splits.get(step, ())
    ]
    return pa.RecordBatch.from_pylist(rows, schema=POSITIONS)


def handles(manifest: Manifest, step: str) -> pa.RecordBatch:
    """Handles that a sink was to commit when the checkpoint counted."""
    rows = [
        {"subtask": record.subtask, "handle": json.dumps(handle)}
        for record in manifest.subtasks
        for handle in record.handles.get(step, ())
    ]
    return pa.RecordBatch.from_pylist(rows, schema=HANDLES)


def rows_on_their_way(store: Store, folder: str, entry: Entry) -> Iterator[pa.RecordBatch]:
    """The rows of one piece of a channel's log, in their order, with ``PLACES``.

    Raises:
        CorruptSnapshotError: its bytes differ from their digest.
    """
    assert entry.channel is not None
    _, sender, receiver = entry.channel
    number = entry.first_row
    for item in read_log(store, folder, entry):
        if item.batch is None:
            continue
        rows = item.batch.num_rows
        more = [
            pa.array([sender] * rows, _INT),
            pa.array([receiver] * rows, _INT),
            pa.array([entry.side] * rows, _TEXT),
            pa.array(np.arange(number, number + rows)),
        ]
        number += rows
        yield pa.RecordBatch.from_arrays([*item.batch.columns, *more], schema=pa.schema([*item.batch.schema, *PLACES]))
