"""The states of a processor's next version: which changes of a schema are taken, and what becomes of stored values.

The rules are those of Spark with Avro encoding (``spark.sql.streaming.stateStore.encodingFormat``): columns may come
(they are null in old values), go, change places, and become wider; keys of map states stay as they are.  Columns of
structs in columns go by the same rules.  States and their columns can also be renamed, which Spark has no words for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.types as pt

from cutwater.operators.state_ttl import stamped_type

__all__ = ["Renames", "converter", "element_type", "refusals"]

Renames: TypeAlias = Mapping[str, str]
"""New name by old name."""

Convert: TypeAlias = Callable[[Any], Any]

_MANTISSA_BITS = {pa.float32(): 24, pa.float64(): 53}


def refusals(old: pa.DataType, new: pa.DataType, renames: Renames, where: str = "") -> Iterator[str]:
    """Why values of type ``old`` cannot become ``new``; nothing if they can.

    Args:
        renames: of the columns of the outermost struct.
        where: name of the column, for messages.

    >>> list(refusals(pa.struct({"n": pa.int32()}), pa.struct({"n": pa.int64(), "s": pa.string()}), {}))
    []
    >>> list(refusals(pa.struct({"n": pa.int64()}), pa.struct({"n": pa.int32()}), {}))
    ["column 'n' was int64 and is int32, which is not wider"]
    """
    if old == new:
        return
    if pt.is_struct(old) and pt.is_struct(new):
        before = _by_new_name(old, renames)
        if len(before) < old.num_fields:
            yield f"two of its columns ({', '.join(f.name for f in _fields(old))}) would have one name"
        for field in _fields(new):
            name = f"{where}.{field.name}" if where else field.name
            found = before.get(field.name)
            if found is None:
                if not field.nullable:
                    yield f"column {name!r} is new and declared not null, but old values have none"
                continue
            if found.nullable and not field.nullable:
                yield f"column {name!r} could be null and is declared not null"
            yield from refusals(found.type, field.type, {}, name)
    elif pt.is_list(old) and pt.is_list(new):
        yield from _nested(old.value_field, new.value_field, where)
    elif pt.is_map(old) and pt.is_map(new) and old.key_type == new.key_type:
        yield from _nested(old.item_field, new.item_field, where)
    elif not _wider(old, new):
        yield f"column {where!r} was {old} and is {new}, which is not wider"


def _nested(old: pa.Field, new: pa.Field, where: str) -> Iterator[str]:
    if old.nullable and not new.nullable:
        yield f"values of column {where!r} could be null and are declared not null"
    yield from refusals(old.type, new.type, {}, where)


def _wider(old: pa.DataType, new: pa.DataType) -> bool:
    if old == new:
        return True
    if pt.is_signed_integer(old):
        return pt.is_floating(new) or (pt.is_signed_integer(new) and new.bit_width > old.bit_width)
    if pt.is_decimal(old):
        return pt.is_decimal(new) and new.scale == old.scale and new.precision > old.precision
    texts = (pa.string(), pa.binary())
    return (old, new) == (pa.float32(), pa.float64()) or (old in texts and new in texts)


def converter(old: pa.DataType, new: pa.DataType, renames: Renames) -> Convert | None:
    """Makes stored values of type ``old`` such of type ``new``, where nothing refuses it; ``None``: they stay.

    It raises ``ValueError`` for a value that the new type cannot hold in full.

    >>> convert = converter(pa.struct({"n": pa.int32()}), pa.struct({"s": pa.string(), "m": pa.float64()}), {"n": "m"})
    >>> convert({"n": 7})
    {'s': None, 'm': 7.0}
    """
    made = None if old == new else _converter(old, new, renames)
    return None if made is None else lambda value: None if value is None else made(value)


def _converter(old: pa.DataType, new: pa.DataType, renames: Renames) -> Convert | None:
    if pt.is_struct(new):
        before = _by_new_name(old, renames)
        parts = [
            (f.name, before[f.name].name, converter(before[f.name].type, f.type, {}))
            if f.name in before
            else (f.name, None, None)
            for f in _fields(new)
        ]
        return lambda row: {
            name: None if source is None else row[source] if convert is None else convert(row[source])
            for name, source, convert in parts
        }
    if pt.is_list(new):
        each = converter(old.value_type, new.value_type, {}) or _same
        return lambda values: [each(value) for value in values]
    if pt.is_map(new):
        item = converter(old.item_type, new.item_type, {}) or _same
        return lambda pairs: [(key, item(value)) for key, value in pairs]
    if pt.is_floating(new) and pt.is_integer(old):
        return lambda value: _as_float(value, new)
    if pt.is_binary(new) and pt.is_string(old):
        return str.encode
    return bytes.decode if pt.is_string(new) and pt.is_binary(old) else None


def _same(value: Any) -> Any:
    return value


def _as_float(value: int, kind: pa.DataType) -> float:
    bits = _MANTISSA_BITS[kind]
    if value and (abs(value) // (value & -value)).bit_length() > bits:
        raise ValueError(f"{kind} cannot hold {value} in full")
    return float(value)


def element_type(kind: str, stored: pa.DataType) -> tuple[pa.DataType, pa.DataType, bool]:
    """Of a state as it is stored: the type of a key of a map (else null), of a value, and whether that expires."""
    key: pa.DataType = pa.null()
    if kind == "list":
        stored = stored.value_type
    elif kind == "map":
        key, stored = stored.key_type, stored.item_type
    record = stored.field(0).type if pt.is_struct(stored) and stored.num_fields == 2 else stored
    expires = pt.is_struct(record) and stored == stamped_type(record)
    return key, record if expires else stored, expires


def _by_new_name(old: pa.DataType, renames: Renames) -> dict[str, pa.Field]:
    return {renames.get(field.name, field.name): field for field in _fields(old)}


def _fields(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(number) for number in range(kind.num_fields)]
