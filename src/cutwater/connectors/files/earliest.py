"""The earliest event time of a split, before it is read: its unread rows hold time back until then (rule W4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.connectors.base import Source, SourceHooks, Split, SplitReader
from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import CutwaterError

_ROWS = 64
"""The first row that has a time is looked for among so many."""


class _Unheard:
    """A reader's context when it only has a look: what it finds wrong is said when the rows are read."""

    step, subtask = "", 0

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        return


def earliest_time(source: Source, split: Split, column: str, bound_us: int) -> int | None:
    """No row of a split that keeps its promise has an event time before this, microseconds since the epoch.

    A source that knows better than by its first row has a method of this name, with the arguments behind ``source``.

    Args:
        source: of the split.
        split: not read yet.
        column: of the event time.
        bound_us: how far a row may come after a younger one of its split.

    Returns:
        the largest integer for a split without rows; ``None`` where it cannot be told.
    """
    told = SourceHooks(source).earliest_time
    try:
        if told is not None:
            return told(split, column, bound_us)
        return earliest_of_first_row(source.open(split, None, _Unheard()), column, bound_us)
    except CutwaterError:
        return None  # whoever reads the split will meet it again


def earliest_of_first_row(reader: SplitReader, column: str, bound_us: int) -> int | None:
    """As far before the first row as the bound allows; the reader is closed."""
    try:
        batch = reader.read(_ROWS)
        if batch is None or not batch.num_rows:
            return MAX_WATERMARK if reader.exhausted else None
        times: Any = batch.column(column)
        valid = times.drop_null().cast(pa.timestamp("us", getattr(times.type, "tz", None))).cast(pa.int64())
        return int(np.asarray(valid)[0]) - bound_us if len(valid) else None
    except pa.ArrowException:
        return None
    finally:
        reader.close()
