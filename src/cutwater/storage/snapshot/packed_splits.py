"""Blocks of splits in a manifest: a source of 100,000 files must not write 20 MB with each checkpoint.

A block is written by whoever reads its splits, once for as long as none of them is read on, and goes through the
driver as it is.  What lies in it is what would stand in ``SubtaskRecord.splits``: values of one kind side by side, as
JSON, compressed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pyarrow as pa

from cutwater.data.decoding import prepare
from cutwater.errors import CorruptSnapshotError, DataError
from cutwater.storage.snapshot.manifest import Manifest, SplitRecord, SubtaskRecord, encoded

BLOCK_SPLITS = 256
"""So many splits are one block; fewer are told one by one, which older releases can read."""
BLOCK_BYTES_MAX = 1 << 30
"""A block of more bytes of JSON is neither written nor read."""
_HEAD = struct.Struct("<I")
"""Before the compressed bytes: how many they become."""
_LEVEL = 1
"""Of zstd: higher ones make it larger, for it is texts that differ in their last digits."""


class _Columns(msgspec.Struct, omit_defaults=True):
    """Values side by side.  Of mappings with the same names, a column for each name."""

    values: list[Any] | None = None
    columns: dict[str, _Columns] | None = None


class _Block(msgspec.Struct):
    id: list[str]
    data: _Columns
    position: _Columns
    max_time: list[int]
    done: list[bool]
    idle: list[bool]


prepare(_Block)


def pack(splits: Sequence[SplitRecord]) -> bytes:
    """A block of splits.

    Raises:
        DataError: a position or a description is no JSON value, or they are far too large.

    >>> block = pack([SplitRecord(f"part-{n}", {"size": n}, {"row": 7}, done=True) for n in range(256)])
    >>> len(block) < 1024, unpack(block)[255].data
    (True, {'size': 255})
    """
    block = _Block(
        [split.id for split in splits],
        _columns([split.data for split in splits]),
        _columns([split.position for split in splits]),
        [split.max_time for split in splits],
        [split.done for split in splits],
        [split.idle for split in splits],
    )
    data = encoded(block, "a source's splits")
    if len(data) > BLOCK_BYTES_MAX:
        raise DataError(
            f"positions and descriptions of {len(splits)} splits from {splits[0].id!r} on take {len(data)} bytes",
            hint="A position says where to read on, and no more.",
        )
    return _HEAD.pack(len(data)) + pa.Codec("zstd", compression_level=_LEVEL).compress(data, asbytes=True)


def unpack(block: bytes) -> list[SplitRecord]:
    """The splits of a block.

    Raises:
        CorruptSnapshotError: it is none.
    """
    try:
        (size,) = _HEAD.unpack_from(block)
        if size > BLOCK_BYTES_MAX:
            raise CorruptSnapshotError(f"a block of splits would become {size} bytes")
        data = pa.Codec("zstd").decompress(block[_HEAD.size :], size, asbytes=True)
        found = msgspec.json.decode(data, type=_Block)
        count = len(found.id)
        fields = zip(
            found.id,
            _values(found.data, count),
            _values(found.position, count),
            found.max_time,
            found.done,
            found.idle,
            strict=True,
        )
        return [SplitRecord(*each) for each in fields]
    except (struct.error, OSError, ValueError, RecursionError, msgspec.MsgspecError, pa.ArrowException) as error:
        raise CorruptSnapshotError(f"a block of splits cannot be read ({error})") from error


def with_all_splits(manifest: Manifest) -> Manifest:
    """The manifest with each split told by itself.

    Raises:
        CorruptSnapshotError: a block of splits is none.
    """
    if not any(record.packed for record in manifest.subtasks):
        return manifest
    return msgspec.structs.replace(manifest, subtasks=[_told(record) for record in manifest.subtasks])


def _told(record: SubtaskRecord) -> SubtaskRecord:
    splits = dict(record.splits)
    for step, blocks in record.packed.items():
        found = [split for block in blocks for split in unpack(block)]
        splits[step] = [*found, *record.splits.get(step, ())]
    return msgspec.structs.replace(record, splits=splits, packed={})


def _columns(values: list[Any]) -> _Columns:
    names: tuple[str, ...] | None = None
    for value in values:
        if type(value) is not dict or not value:
            return _Columns(values)
        found = tuple(cast("dict[str, Any]", value))
        if names is None:
            names = found
        elif names != found:
            return _Columns(values)
    if names is None or not all(type(name) is str for name in names):
        return _Columns(values)
    return _Columns(columns={name: _columns([value[name] for value in values]) for name in names})


def _values(columns: _Columns, count: int) -> list[Any]:
    if columns.columns is not None:
        names = list(columns.columns)
        parts = [_values(columns.columns[name], count) for name in names]
        return [dict(zip(names, row, strict=True)) for row in zip(*parts, strict=True)]
    if columns.values is None or len(columns.values) != count:
        raise CorruptSnapshotError("a block of splits has columns of different lengths")
    return columns.values
