"""Python values of an Arrow type as bytes and back: MessagePack, for a store that holds bytes only.

What comes back is what Arrow would give (``as_py``) for what it would take, so that a state reads the same from bytes
as from a snapshot.  Numbers, text and bytes are MessagePack's own; times are the number Arrow has of them, decimals are
text, structs are lists of their fields; anything rare goes through Arrow itself.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.types as pt

Convert: TypeAlias = Callable[[Any], Any]
_Pair: TypeAlias = tuple[Convert, Convert]
"""To what MessagePack holds, and back; never called for ``None``."""


class Packer:
    """Packs values of one type.

    >>> packer = Packer(pa.list_(pa.timestamp("s")))
    >>> packer.unpack(packer.pack([None, 5]))
    [None, datetime.datetime(1970, 1, 1, 0, 0, 5)]
    """

    def __init__(self, kind: pa.DataType) -> None:
        self._pair = _pair(kind)

    def pack(self, value: Any) -> bytes:
        """The value as bytes.

        Raises:
            TypeError: it is not of the type.
        """
        if self._pair is not None and value is not None:
            value = self._pair[0](value)
        return _encode(value)

    def unpack(self, packed: bytes) -> Any:
        """The value, as Arrow gives it."""
        value = _decode(packed)
        return value if self._pair is None or value is None else self._pair[1](value)


class KeyPacker:
    """Packs keys of one or several columns, so that keys that are equal are equal bytes.

    >>> packer = KeyPacker([pa.string(), pa.float64()])
    >>> packer.pack(("a", -0.0)) == packer.pack(("a", 0.0)), packer.unpack(packer.pack(("a", 0.0)))
    (True, ('a', 0.0))
    """

    def __init__(self, kinds: Sequence[pa.DataType]) -> None:
        self._kinds = list(kinds)
        self._pairs = [(_positive_zero, _positive_zero) if pt.is_floating(kind) else _pair(kind) for kind in kinds]

    def pack(self, key: Sequence[Hashable]) -> bytes:
        """The key as bytes.

        Raises:
            TypeError: not of these types.
            ValueError: not as many.
        """
        packed = [
            value if pair is None or value is None else pair[0](value)
            for value, pair in zip(key, self._pairs, strict=True)
        ]
        return _encode(packed)

    def unpack(self, packed: bytes) -> tuple[Any, ...]:
        """The key."""
        return tuple(
            [
                value if pair is None or value is None else pair[1](value)
                for value, pair in zip(_decode(packed), self._pairs, strict=True)
            ]
        )


def _plain(value: Any) -> Any:
    """Types of other numbers."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no form in MessagePack")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain, decimal_format="string").encode
_decode = msgspec.msgpack.Decoder().decode


def _positive_zero(value: Any) -> float:
    return value + 0.0


def _pair(kind: pa.DataType) -> _Pair | None:
    """The way in which values of a type are packed; ``None``: as they are."""
    if pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind) or pt.is_null(kind):
        return None
    if pt.is_string(kind) or pt.is_large_string(kind) or pt.is_binary(kind) or pt.is_large_binary(kind):
        return None
    if pt.is_temporal(kind) and not pt.is_interval(kind):
        return lambda value: pa.scalar(value, kind).value, lambda number: pa.scalar(number, kind).as_py()
    if pt.is_decimal(kind):
        return str, decimal.Decimal
    if pt.is_struct(kind):
        return _struct_pair(kind)
    if pt.is_map(kind):
        return _map_pair(kind)
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        element = _pair(kind.value_type)
        return None if element is None else (_each(element[0]), _each(element[1]))
    return _through_arrow(kind)


def _each(convert: Convert) -> Convert:
    return lambda values: [None if value is None else convert(value) for value in values]


def _same(value: Any) -> Any:
    return value


def _struct_pair(kind: pa.StructType) -> _Pair:
    """Arrow takes a dict, or a tuple of the fields in order, and gives a dict."""
    fields = [kind.field(i) for i in range(kind.num_fields)]
    names = [field.name for field in fields]
    pairs = [_pair(field.type) or (_same, _same) for field in fields]

    def pack(value: Any) -> list[Any]:
        found = [value.get(name) for name in names] if isinstance(value, dict) else value
        return [None if part is None else pair[0](part) for part, pair in zip(found, pairs, strict=True)]

    def unpack(packed: list[Any]) -> dict[str, Any]:
        return {
            name: None if part is None else pair[1](part) for name, part, pair in zip(names, packed, pairs, strict=True)
        }

    return pack, unpack


def _map_pair(kind: pa.MapType) -> _Pair:
    """Arrow takes pairs (or a dict) and gives pairs."""
    key, item = _pair(kind.key_type) or (_same, _same), _pair(kind.item_type) or (_same, _same)

    def convert(number: int) -> Convert:
        def converted(entries: Any) -> list[tuple[Any, Any]]:
            pairs = entries.items() if isinstance(entries, dict) else entries
            return [(key[number](k), None if v is None else item[number](v)) for k, v in pairs]

        return converted

    return convert(0), convert(1)


def _through_arrow(kind: pa.DataType) -> _Pair:
    schema = pa.schema([pa.field("value", kind)])

    def pack(value: Any) -> bytes:
        return pa.RecordBatch.from_arrays([pa.array([value], kind)], schema=schema).serialize().to_pybytes()

    def unpack(packed: bytes) -> Any:
        return pa.ipc.read_record_batch(pa.py_buffer(packed), schema).column(0)[0].as_py()

    return pack, unpack
