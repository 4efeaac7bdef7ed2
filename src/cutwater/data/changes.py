"""Updating streams: rows that change a table, marked by a column ``op`` with Flink's short names.

| op   | the row                                               |
|------|-------------------------------------------------------|
| `+I` | comes into the table                                  |
| `-U` | is what an updated row was; `+U` follows it           |
| `+U` | is what the row is now                                |
| `-D` | leaves the table                                      |

A removed row comes as it was added, all columns of it: so the rows of a stream up to any place, added and removed, are
the table there.  What is emitted depends on the rows and their order only, never on where a batch ends.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from cutwater.data.rows import describe_row, row_contents
from cutwater.errors import BuildError, DataError

_compute: Any = pyarrow.compute

OP = "op"
"""Name of the column."""
_OP_FIELD = pa.field(OP, pa.string(), nullable=False)
INSERT, BEFORE, AFTER, DELETE = range(4)


@functools.cache
def _names() -> pa.StringArray:
    """Made on demand: the first array from Python values imports pandas."""
    return pa.array(["+I", "-U", "+U", "-D"])


def marked_schema(fields: pa.Schema) -> pa.Schema:
    """The schema of an updating stream: ``op``, then the columns of the table.

    Raises:
        BuildError: a column is named ``op`` already.

    >>> marked_schema(pa.schema({"k": pa.int64()})).names
    ['op', 'k']
    """
    if OP in fields.names:
        raise BuildError(
            f"a column is named {OP!r} already, which marks what happens to a row of an updating stream",
            hint=f"Rename it before this step: .rename('...', {{'{OP}': 'operation'}}).",
        )
    return pa.schema([_OP_FIELD, *fields])


def row_type(schema: pa.Schema) -> pa.DataType:
    """A whole row as one value."""
    return pa.struct([column.with_nullable(True) for column in schema])


def op_column(codes: npt.NDArray[np.int8]) -> pa.Array:
    """The column for codes.

    >>> op_column(np.array([BEFORE, AFTER], np.int8)).to_pylist()
    ['-U', '+U']
    """
    return _names().take(pa.array(codes))


def added_rows(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Mask of the rows of an updating stream that are added (``+I``, ``+U``); the others are removed.

    Raises:
        DataError: another ``op``, or none.

    >>> added_rows(pa.record_batch({"op": ["+I", "-D"], "k": [1, 1]})).tolist()
    [True, False]
    """
    codes = _compute.fill_null(_compute.index_in(batch.column(OP), value_set=_names()), -1).to_numpy()
    bad = np.flatnonzero(codes < 0)
    if len(bad):
        row = int(bad[0])
        error = DataError(
            f"{OP!r} is none of {', '.join(_names().to_pylist())} in row {row} of the batch: "
            f"{describe_row(row_contents(batch, row))}",
            hint="An updating stream marks each row; write the column so, or drop it if every row is to count.",
        )
        error.row = row
        raise error
    added: npt.NDArray[np.bool_] = (codes == INSERT) | (codes == AFTER)
    return added
