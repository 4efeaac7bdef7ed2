"""Values as a ``StatefulProcessor`` sees them, and as Arrow holds them.

A processor sees structs as ``Row``, maps as dicts, and timestamps as Spark gives them to Python: naive, in the local
time zone.  What it keeps in a state is a tuple with one value for each column of the state's schema.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from cutwater.operators.process.state_types import value_check
from cutwater.operators.stateful_processor.spark_types import row_maker

Convert = Callable[[Any], Any]


@dataclass(frozen=True)
class Codec:
    """Of values of one type.

    Args:
        check: the value as the processor gets it back; raises ``TypeError`` and the like for what the type cannot hold.
        store: to what Arrow takes; ``None``: it takes the value itself.
        revive: from what Arrow gives; ``None``: that is the value.
    """

    check: Convert
    store: Convert | None = None
    revive: Convert | None = None


def codec(type: pa.DataType) -> Codec:
    """The codec of a type.

    >>> codec(pa.struct({"n": pa.int64()})).revive({"n": 3})
    Row(n=3)
    """
    if pt.is_timestamp(type) and type.tz is not None:
        return Codec(_local, _with_zone, _without_zone)
    if pt.is_struct(type):
        return _struct_codec(type)
    if pt.is_map(type):
        return _map_codec(type)
    if pt.is_list(type) or pt.is_large_list(type):
        return _list_codec(type)
    return Codec(value_check(type))


class Record:
    """The codec of tuples with one value for each column of a schema.

    >>> pair = Record(pa.schema({"n": pa.int64(), "s": pa.string()}))
    >>> pair.check((1, "x")), pair.revive({"n": 1, "s": "x"})
    ((1, 'x'), (1, 'x'))
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.names: list[str] = schema.names
        self.type = pa.struct(list(schema))
        self.columns = [_nullable(codec(field.type), field.nullable) for field in schema]
        self._checks = [codec(field.type).check for field in schema]
        self._required = [number for number, field in enumerate(schema) if not field.nullable]
        self.store: Convert | None = None
        """Of a tuple; ``None``: Arrow takes it as it is."""
        if any(column.store is not None for column in self.columns):
            stores = [column.store or _same for column in self.columns]
            self.store = lambda values: tuple([store(v) for store, v in zip(stores, values, strict=True)])
        self._revives = [(name, column.revive) for name, column in zip(self.names, self.columns, strict=True)]

    def check(self, values: Any) -> tuple[Any, ...]:
        """The tuple as it is kept.

        Raises:
            TypeError, ValueError, OverflowError: not a tuple (or list, or Row) of as many values of these types.
        """
        if not isinstance(values, tuple | list):
            raise TypeError
        pairs = zip(self._checks, values, strict=True)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        made = tuple([None if value is None else check(value) for check, value in pairs])  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if self._required and any(made[number] is None for number in self._required):
            raise ValueError
        return made

    def revive(self, stored: Mapping[str, Any]) -> tuple[Any, ...]:
        """The tuple, from what Arrow gives."""
        return tuple([stored[name] if revive is None else revive(stored[name]) for name, revive in self._revives])

    def seen(self, columns: Sequence[pa.Array]) -> list[list[Any]]:
        """The values of a batch's columns as the processor sees them, column by column."""
        found: list[list[Any]] = []
        for column, (_, revive) in zip(columns, self._revives, strict=True):
            values = column.to_pylist()
            found.append(values if revive is None else [revive(value) for value in values])
        return found


def _same(value: Any) -> Any:
    return value


def _nullable(inner: Codec, nullable: bool) -> Codec:
    """A null is a null; where none may be, checking it is an error."""
    check, store, revive = inner.check, inner.store, inner.revive

    def checked(value: Any) -> Any:
        if value is None:
            if not nullable:
                raise ValueError
            return None
        return check(value)

    return Codec(
        checked,
        None if store is None else lambda value: None if value is None else store(value),
        None if revive is None else lambda value: None if value is None else revive(value),
    )


def _struct_codec(type: pa.StructType) -> Codec:
    record = Record(pa.schema([type.field(i) for i in range(type.num_fields)]))
    row, store = row_maker(record.names), record.store

    def check(value: Any) -> Any:
        if isinstance(value, dict):
            if not value.keys() <= set(record.names):
                raise ValueError
            value = tuple(value.get(name) for name in record.names)
        return row(record.check(value))

    return Codec(check, store, lambda stored: row(record.revive(stored)))


def _list_codec(type: Any) -> Codec:
    inner = _nullable(codec(type.value_type), type.value_field.nullable)
    store, revive = inner.store, inner.revive

    def check(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple | np.ndarray):
            raise TypeError
        return [inner.check(v) for v in value]  # pyright: ignore[reportUnknownVariableType]

    return Codec(
        check,
        None if store is None else lambda values: [store(v) for v in values],
        None if revive is None else lambda values: [revive(v) for v in values],
    )


def _map_codec(type: pa.MapType) -> Codec:
    keys, values = _nullable(codec(type.key_type), False), _nullable(codec(type.item_type), type.item_field.nullable)
    store_key, store_value = keys.store or _same, values.store or _same
    revive_key, revive_value = keys.revive or _same, values.revive or _same

    def check(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise TypeError
        return {keys.check(k): values.check(v) for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType]

    return Codec(
        check,
        lambda entries: [(store_key(k), store_value(v)) for k, v in entries.items()],
        lambda pairs: {revive_key(k): revive_value(v) for k, v in pairs},
    )


def _local(value: Any) -> dt.datetime:
    """A timestamp without zone, in local time; one with a zone is converted."""
    if not isinstance(value, dt.datetime):
        raise TypeError
    plain = dt.datetime.combine(value.date(), value.timetz())  # also of pandas, which has its own class
    return plain if plain.tzinfo is None else _without_zone(plain)


def _with_zone(value: dt.datetime) -> dt.datetime:
    return value.astimezone(dt.UTC)


def _without_zone(value: dt.datetime) -> dt.datetime:
    return value.astimezone().replace(tzinfo=None)
