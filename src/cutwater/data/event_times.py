"""The event times of a batch, checked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.rows import describe_row, row_contents
from cutwater.data.words import fixed_view, valid_rows
from cutwater.errors import DataError

_LIMIT_US = 2**62


def event_times(batch: pa.RecordBatch, name: str, of: str = "") -> npt.NDArray[np.int64]:
    """Microseconds since 1970 of a ``timestamp[us]`` column, read-only.

    Args:
        batch: at least one row.
        name: the column.
        of: whose time it is, for the message.

    Raises:
        DataError: a null, or a time so far away that sums with it could overflow.

    >>> event_times(pa.record_batch({"t": pa.array([7], pa.timestamp("us"))}), "t").tolist()
    [7]
    """
    column = batch.column(name)
    valid = valid_rows(column)
    times = fixed_view(column, np.int64)
    if valid is not None:
        bad, what = int(np.flatnonzero(~valid)[0]), "null"
    elif int(times.max()) > _LIMIT_US or int(times.min()) < -_LIMIT_US:
        bad, what = int(np.flatnonzero((times > _LIMIT_US) | (times < -_LIMIT_US))[0]), "over 146,000 years"
    else:
        return times
    error = DataError(
        f"event time {name!r}{of} is {what} in row {bad} of the batch: {describe_row(row_contents(batch, bad))}",
        hint="Filter such rows out, or correct the column, before this step.",
    )
    error.row = bad
    raise error
