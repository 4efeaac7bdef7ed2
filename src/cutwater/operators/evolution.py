"""State of an earlier version of the program: which changes of its form are taken, and what becomes of the values.

Columns may come (they are null in old values), go, change places, and become wider; what values are found by (keys of
steps and of map states) stays as it is.  Columns of structs in columns go by the same rules, which are those of Spark
with Avro encoding (``spark.sql.streaming.stateStore.encodingFormat``), and a little more: states and their columns can
be renamed, unsigned integers become longer ones, dates become timestamps at midnight.

What a step's operator restores has been through ``Evolution.convert`` before, so that no operator knows of other
versions.  Values are converted as Arrow columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.types as pt

from cutwater.state.objects.ttl import stamped_type
from cutwater.state.segments import Segment

Renames: TypeAlias = Mapping[str, str]
"""New name by old name."""

_MANTISSA_BITS = {pa.float32(): 24, pa.float64(): 53}


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was, and is taken."""

    what: Literal["added", "dropped", "renamed", "widened", "changed"]
    name: str
    detail: str = ""
    """A text for people: "from int32 to int64"."""

    def __str__(self) -> str:
        return f"{self.name}: {self.what}{f' {self.detail}' if self.detail else ''}"


@dataclass(frozen=True)
class Former:
    """What a snapshot says of a step's state."""

    schema: pa.Schema
    parts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What each part of the state is, by its name: an aggregate's function, a state's kind."""
    rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rows by name of segments."""


@dataclass(frozen=True)
class Evolution:
    """What becomes of a step's state.

    Attributes:
        changes: what is taken, in words.
        refusals: why it cannot be taken.
        dropped: names of the segments that nobody takes any more.
        convert: a segment as this program would have written it, ``None`` for one that goes; not called where
            something refuses it.
    """

    changes: tuple[Change, ...] = ()
    refusals: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    convert: Callable[[Segment], Segment | None] | None = None


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
        yield f"{f'column {where!r} was' if where else 'it was'} {old} and is {new}, which is not wider"


def _nested(old: pa.Field, new: pa.Field, where: str) -> Iterator[str]:
    if old.nullable and not new.nullable:
        yield f"values of column {where!r} could be null and are declared not null"
    yield from refusals(old.type, new.type, {}, where)


def _wider(old: pa.DataType, new: pa.DataType) -> bool:
    if old == new:
        return True
    if pt.is_integer(old):
        signs = not pt.is_unsigned_integer(new) or pt.is_unsigned_integer(old)
        return pt.is_floating(new) or (pt.is_integer(new) and signs and new.bit_width > old.bit_width)
    if pt.is_decimal(old):
        return pt.is_decimal(new) and new.scale == old.scale and new.precision > old.precision
    if pt.is_date32(old):
        return pt.is_timestamp(new) and new.tz is None
    texts = (pa.string(), pa.binary())
    return (old, new) == (pa.float32(), pa.float64()) or (old in texts and new in texts)


def changes(old: pa.DataType, new: pa.DataType, renames: Renames, where: str) -> Iterator[Change]:
    """What differs, where nothing refuses it.

    >>> old, new = pa.struct({"n": pa.int32(), "gone": pa.bool_()}), pa.struct({"m": pa.int64()})
    >>> for change in changes(old, new, {"n": "m"}, "visits"): print(change)
    visits.n: renamed to m
    visits.m: widened from int32 to int64
    visits.gone: dropped
    """
    if old == new:
        return
    if pt.is_struct(old) and pt.is_struct(new):
        before, after = _by_new_name(old, renames), {f.name: f.type for f in _fields(new)}
        for name, was in before.items():
            if name not in after:
                yield Change("dropped", f"{where}.{was.name}")
                continue
            if was.name != name:
                yield Change("renamed", f"{where}.{was.name}", f"to {name}")
            yield from changes(was.type, after[name], {}, f"{where}.{name}")
        yield from (Change("added", f"{where}.{name}") for name in after if name not in before)
    elif pt.is_list(old):
        yield from changes(old.value_type, new.value_type, {}, where)
    elif pt.is_map(old):
        yield from changes(old.item_type, new.item_type, {}, where)
    else:
        yield Change("widened", where, f"from {old} to {new}")


def converted(values: pa.Array, new: pa.DataType, renames: Renames) -> pa.Array:
    """Values of an older type, where nothing refuses them.

    Raises:
        ValueError: the new type cannot hold one of them in full.

    >>> old = pa.array([{"n": 7}, None], pa.struct({"n": pa.int32()}))
    >>> converted(old, pa.struct({"s": pa.string(), "m": pa.float64()}), {"n": "m"}).to_pylist()
    [{'s': None, 'm': 7.0}, None]
    """
    array: Any = values
    old = array.type
    if old == new:
        return array
    if pt.is_struct(new):
        before = {renames.get(f.name, f.name): number for number, f in enumerate(_fields(old))}
        columns = [
            converted(array.field(before[f.name]), f.type, {}) if f.name in before else pa.nulls(len(array), f.type)
            for f in _fields(new)
        ]
        return pa.StructArray.from_arrays(columns, fields=_fields(new), mask=array.is_null())
    if pt.is_list(new):
        return through_list(array, new, lambda elements: converted(elements, new.value_type, {}))
    if pt.is_map(new):
        return through_map(array, new, lambda items: converted(items, new.item_type, {}))
    try:
        return array.cast(new)
    except pa.ArrowInvalid as error:
        if pt.is_integer(old) and pt.is_floating(new):
            return pa.array([None if v is None else _as_float(v, new) for v in array.to_pylist()], new)
        raise ValueError(str(error)) from None


def through_list(values: pa.Array, new: pa.DataType, convert: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Lists of another type, their elements converted all at once."""
    array: Any = values
    offsets, first, count = _span(array)
    return pa.ListArray.from_arrays(offsets, convert(array.values.slice(first, count)), type=new, mask=array.is_null())


def through_map(values: pa.Array, new: pa.DataType, convert: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Maps of another type, their items converted all at once."""
    array: Any = values
    offsets, first, count = _span(array)
    keys, items = array.keys.slice(first, count), convert(array.items.slice(first, count))
    return pa.MapArray.from_arrays(offsets, keys, items, type=new, mask=array.is_null())


def _span(array: Any) -> tuple[pa.Array, int, int]:
    """Offsets from 0 on, where the first of them begins, and how many values lie there: the array may be a slice."""
    offsets = array.offsets.to_numpy()
    first = int(offsets[0])
    return pa.array(offsets - first, pa.int32()), first, int(offsets[-1]) - first


def _as_float(value: int, kind: pa.DataType) -> float:
    bits = _MANTISSA_BITS[kind]
    if value and (abs(value) // (value & -value)).bit_length() > bits:
        raise ValueError(f"{kind} cannot hold {value} in full")
    return float(value)


def element_type(kind: str, stored: pa.DataType, *, records: bool) -> tuple[pa.DataType, pa.DataType, bool]:
    """Of a state as it is stored: the type of a key of a map (else null), of a value, and whether that expires.

    Args:
        kind: of the state.
        stored: how one key's content lies in a snapshot.
        records: values are structs always: one of two fields with the names of a stamp is none.
    """
    key: pa.DataType = pa.null()
    if kind == "list":
        stored = stored.value_type
    elif kind == "map":
        key, stored = stored.key_type, stored.item_type
    record = stored.field(0).type if pt.is_struct(stored) and stored.num_fields == 2 else stored
    expires = (pt.is_struct(record) or not records) and stored == stamped_type(record)
    return key, record if expires else stored, expires


def _by_new_name(old: pa.DataType, renames: Renames) -> dict[str, pa.Field]:
    return {renames.get(field.name, field.name): field for field in _fields(old)}


def _fields(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(number) for number in range(kind.num_fields)]
