"""Columns of texts on their way to an edge: moved, and made plain where they came as dictionaries.

Behind an edge all texts are plain: what is sent, kept for another receiver, spilled or written into a snapshot looks
the same wherever it came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.words import batch_of, bytes_view, fixed_view, new_buffer
from cutwater.runtime.channels import kernels
from cutwater.state.keys import is_text_or_bytes

_MAX_BYTES = 1 << 30
"""Of the texts of a column that a kernel moves: their places are 32-bit numbers."""


def take_texts(column: pa.Array, rows: npt.NDArray[np.integer]) -> pa.Array:
    """``take`` of texts or binaries; no null, and at most 2 GB.

    >>> take_texts(pa.array(["a", "bc"]), np.array([1, 0, 1])).to_pylist()
    ['bc', 'a', 'bc']
    """
    data, offsets = bytes_view(column)
    places, begins = new_buffer(len(rows) + 1, offsets.dtype)
    size = kernels.place_texts(offsets, rows, begins)
    content, out = new_buffer(size + kernels.OVERRUN_BYTES, np.uint8)
    kernels.take_texts(data, offsets, rows, data.ctypes.data, out.ctypes.data, begins)
    return pa.Array.from_buffers(column.type, len(rows), [None, places, content.slice(0, size)])


def plain_rows(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows as the schema declares them: dictionaries are plain where it has none.

    >>> rows = pa.record_batch({"k": pa.array(["a", None, "a"]).dictionary_encode(), "n": [1, 2, 3]})
    >>> plain_rows(rows, pa.schema({"k": pa.string(), "n": pa.int64()})).column("k").to_pylist()
    ['a', None, 'a']
    """
    if batch.schema.equals(schema):  # asked first: to look at a schema costs a hundredth of looking at columns
        return batch
    return _made_plain(batch, [not pa.types.is_dictionary(declared) for declared in schema.types])


def _made_plain(batch: pa.RecordBatch, those: Sequence[bool]) -> pa.RecordBatch:
    if not any(those):
        return batch
    columns = [plain_column(column) if plain else column for column, plain in zip(batch.columns, those, strict=True)]
    return batch_of(columns, batch.schema)


def plain_column(column: pa.Array) -> pa.Array:
    """A column without its dictionary."""
    if not isinstance(column, pa.DictionaryArray):
        return column
    values = column.dictionary
    nulls = column.null_count or values.null_count
    if nulls or not is_text_or_bytes(values.type) or len(values) == 0 or _may_be_long(values, len(column)):
        return column.dictionary_decode()
    indices = column.indices
    return take_texts(values, fixed_view(indices, indices.type.to_pandas_dtype()))


def few_values(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows; dictionaries that the schema does not declare are made plain if they are no gain, or hold a null."""

    def is_no_gain(column: pa.Array, declared: pa.DataType) -> bool:
        if not isinstance(column, pa.DictionaryArray) or pa.types.is_dictionary(declared):
            return False
        values = column.dictionary
        return not is_text_or_bytes(values.type) or bool(values.null_count) or 2 * len(values) > len(column)

    if batch.schema.equals(schema):
        return batch
    return _made_plain(batch, [is_no_gain(c, kind) for c, kind in zip(batch.columns, schema.types, strict=True)])


def _may_be_long(texts: pa.Array, rows: int) -> bool:
    """True if so many rows of these texts may take more bytes than a kernel moves."""
    _, offsets = bytes_view(texts)
    if int(offsets[-1] - offsets[0]) * rows <= _MAX_BYTES:  # no text is longer than all of them
        return False
    return int(np.diff(offsets).max()) * rows > _MAX_BYTES
