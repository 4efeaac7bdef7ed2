"""Keys, their hash, and the key groups that own them.

**A frozen format.**  State on disk is sorted by key group, so the functions below may never give another result.  All
arithmetic is on unsigned 64-bit integers, modulo 2**64.

- ``mix(x)``: ``x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31``.
- A value that fits 64 bits is its *word*: integers (and bool, dates, timestamps by their raw number) extended to 64
  bits, floats widened to ``float64`` by their bits with -0.0 as 0.0.  Its hash is ``mix(word + 0x9E3779B97F4A7C15)``.
  So a key column may be widened (``int32`` to ``int64``) and every row stays in its group.
- Bytes (strings as UTF-8, decimals as 16 bytes): ``h = length * 0x9E3779B97F4A7C15``; for each eight bytes
  (little-endian, the last padded with zeros) ``h = (h ^ word) * 0xBF58476D1CE4E5B9; h ^= h >> 32``; the hash is
  ``mix(h)``.
- A null of any type, where nulls are keys: ``mix(0x6E756C6C)``.
- Several columns, from left to right: ``h = mix(h * 0x9E3779B97F4A7C15 + next)``.
- The key group is the upper 32 bits times ``max_parallelism``, shifted right by 32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.words import bytes_view, fixed_view, to_words, valid_rows
from cutwater.errors import BuildError, DataError, did_you_mean

Hashes: TypeAlias = npt.NDArray[np.uint64]

NULL_HASH = np.uint64(0xE166071E7FB45925)
"""Of a null key: ``mix(0x6E756C6C)``."""

MAX_KEY_GROUPS = 1 << 15
"""Highest ``max_parallelism``; a key group must fit the ``uint16`` of ``GROUP_COLUMN``."""

_SHOWN_CHARS = 500


MAX_NULLABLE_KEYS = 63
"""Key columns that may hold nulls: an index has a bit for each, and one for the start of a window."""


class NullableKeys(tuple[str, ...]):
    """Key columns in which a null is a key like any other, equal to itself.

    In a plain tuple of key columns a null is no key: the row is refused.  Where rows are placed is the same, so both
    compare as tuples do.
    """

    __slots__ = ()


def key_group_range(subtask: int, parallelism: int, max_parallelism: int) -> range:
    """Key groups of a subtask: contiguous, and every group has exactly one owner at any parallelism.

    >>> [list(key_group_range(i, 2, 5)) for i in range(2)]
    [[0, 1, 2], [3, 4]]
    """
    lo = -(-subtask * max_parallelism // parallelism)
    hi = -(-(subtask + 1) * max_parallelism // parallelism)
    return range(lo, hi)


def key_group_owner(group: int, parallelism: int, max_parallelism: int) -> int:
    """The subtask whose ``key_group_range`` contains ``group``.

    >>> [key_group_owner(g, 2, 5) for g in range(5)]
    [0, 0, 0, 1, 1]
    """
    return group * parallelism // max_parallelism


def is_word_key(kind: pa.DataType) -> bool:
    """True if a key column of this type fits one 64-bit word."""
    t = pa.types
    number = t.is_integer(kind) or t.is_boolean(kind) or t.is_float32(kind) or t.is_float64(kind)
    return number or t.is_date(kind) or t.is_timestamp(kind)


def is_key_type(kind: pa.DataType) -> bool:
    """True if values of the type have a stable hash, so that rows can be keyed by them."""
    return is_word_key(kind) or is_text_or_bytes(kind) or pa.types.is_decimal128(kind)


def is_text_or_bytes(kind: pa.DataType) -> bool:
    """True if a value is a run of bytes, of whatever length."""
    t = pa.types
    return t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind)


def check_key_types(schema: pa.Schema, keys: Sequence[str]) -> None:
    """Check, while the dataflow is built, that rows can be keyed by these columns.

    Raises:
        BuildError: no key, a key named twice, an unknown column, or a type that has no stable hash.
    """
    if not keys:
        raise BuildError("no key column given", hint="Name at least one column to key by.")
    for position, name in enumerate(keys):
        if name in keys[:position]:
            raise BuildError(f"key column {name!r} is named twice")
        if schema.get_field_index(name) < 0:
            raise BuildError(f"no such key column {name!r}", hint=did_you_mean(name, schema.names))
        kind = schema.field(name).type
        if not is_key_type(kind):
            raise BuildError(
                f"column {name!r} of type {kind} cannot be a key",
                hint="Keys are integers, bool, float32, float64, string, binary, dates, timestamps or decimal128: "
                "cast the column first.",
            )


def valid_key_mask(batch: pa.RecordBatch, keys: Sequence[str]) -> npt.NDArray[np.bool_] | None:
    """Mask of the rows with a usable key, that is no NaN and (but in ``NullableKeys``) no null in any key column.

    ``None`` if all have.

    >>> rows = pa.record_batch({"k": [1.0, float("nan"), None]})
    >>> valid_key_mask(rows, ["k"]).tolist(), valid_key_mask(rows, NullableKeys(["k"])).tolist()
    ([True, False, False], [True, False, True])
    """
    return _usable([batch.column(name) for name in keys], nullable=isinstance(keys, NullableKeys))


def _usable(columns: Sequence[pa.Array], *, nullable: bool) -> npt.NDArray[np.bool_] | None:
    mask: npt.NDArray[np.bool_] | None = None
    for column in columns:
        valid = valid_rows(column)
        usable = None if nullable else valid
        if pa.types.is_floating(column.type):
            nan = np.isnan(fixed_view(column, column.type.to_pandas_dtype()))
            if nullable and valid is not None:
                nan &= valid  # under a null lies anything
            if nan.any():
                usable = ~nan if usable is None else usable & ~nan
        if usable is not None:
            mask = usable if mask is None else mask & usable
    return mask


def null_key_mask(columns: Sequence[pa.Array]) -> npt.NDArray[np.bool_] | None:
    """Mask of the rows with a null in any key column, so that they are equal to no row of a join; ``None`` if none has.

    >>> null_key_mask([pa.array([1, None])]).tolist()
    [False, True]
    """
    mask: npt.NDArray[np.bool_] | None = None
    for column in columns:
        valid = valid_rows(column)
        if valid is not None:
            mask = ~valid if mask is None else mask | ~valid
    return mask


def require_valid_keys(batch: pa.RecordBatch, keys: Sequence[str]) -> list[pa.Array]:
    """The key columns of a batch, which must not hold a row without a usable key.

    Raises:
        DataError: names the column, the row's number in the batch and its content.
    """
    columns = [batch.column(name) for name in keys]
    mask = _usable(columns, nullable=isinstance(keys, NullableKeys))
    if mask is not None and not mask.all():
        _refuse(batch, keys, mask)
    return columns


def _refuse(batch: pa.RecordBatch, keys: Sequence[str], mask: npt.NDArray[np.bool_]) -> None:
    row = int(np.flatnonzero(~mask)[0])
    hint = "Filter such rows out before key_by, or divert them: key_by(..., dead_letters='bad-keys')."
    for name in keys:
        value: Any = batch.column(name)[row].as_py()
        if value is None and not isinstance(keys, NullableKeys):
            what, hint = "null", f"{hint} Null is a key with key_by(..., nulls='key')."
        elif value is not None and value != value:
            what = "NaN"
        else:
            continue
        raise DataError(f"key column {name!r} is {what} in row {row} of the batch: {show_row(batch, row)}", hint=hint)


def show_row(batch: pa.RecordBatch, row: int) -> str:
    """A row as text for a message; long values are cut."""
    text = json.dumps(batch.slice(row, 1).to_pylist()[0], default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + " ..."


def hash_keys(columns: Sequence[pa.Array]) -> Hashes:
    """Hash of every row of the key columns; no NaN.  Of a dictionary each value is hashed once.

    >>> [hex(h) for h in hash_keys([pa.array([0, 1, -1, None])])]
    ['0xe220a8397b1dcdaf', '0x910a2dec89025cc1', '0xe4d971771b652c20', '0xe166071e7fb45925']
    """
    from cutwater.state import kernels  # Numba: only where rows flow

    out: Hashes = np.empty(len(columns[0]), np.uint64)
    _hash_column(columns[0], out)
    for column in columns[1:]:
        following: Hashes = np.empty(len(out), np.uint64)
        _hash_column(column, following)
        kernels.combine(out, following)
    return out


def _hash_column(column: pa.Array, out: Hashes) -> None:
    from cutwater.state import kernels

    if isinstance(column, pa.DictionaryArray):
        _gather_hashes(column, out)
    elif is_word_key(column.type):
        kernels.hash_words(to_words(column), out)
    else:
        data, offsets = bytes_view(as_bytes(column))
        kernels.hash_bytes(data, offsets, out)
    valid = valid_rows(column)
    if valid is not None:
        out[~valid] = NULL_HASH


def _gather_hashes(column: pa.DictionaryArray, out: Hashes) -> None:
    """The hash of each row's value; that of a null means nothing."""
    if len(column.dictionary) == 0:
        return
    indices = column.indices if column.null_count == 0 else column.indices.fill_null(0)
    values = hash_keys([column.dictionary])
    np.take(values, fixed_view(indices, indices.type.to_pandas_dtype()), out=out, mode="clip")


def as_bytes(column: pa.Array) -> pa.Array:
    """The column, if it is none of decimal128: that as binary rows of 16 bytes, without a copy of the content."""
    if not pa.types.is_decimal(column.type):
        return column
    offsets = np.arange(column.offset, column.offset + len(column) + 1, dtype=np.int64) * 16
    return pa.Array.from_buffers(pa.large_binary(), len(column), [None, pa.py_buffer(offsets), column.buffers()[1]])


def key_groups(hashes: Hashes, max_parallelism: int) -> npt.NDArray[np.uint16]:
    """Key group of every hash, 0 .. ``max_parallelism`` - 1.

    >>> key_groups(hash_keys([pa.array([0, 1, -1])]), 128).tolist()
    [113, 72, 114]
    """
    from cutwater.state import kernels

    out = np.empty(len(hashes), np.uint16)
    kernels.to_groups(hashes, max_parallelism, out)
    return out
