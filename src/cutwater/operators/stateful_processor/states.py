"""The states of a ``StatefulProcessor``: tuples in the states of process functions, behind Spark's interface.

A processor sees structs as ``Row``, maps as dicts, and timestamps as Spark gives them to Python: naive, in the local
time zone.  What it keeps in a state is a tuple with one value for each column of the state's schema.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from cutwater.data.python_values import column_values
from cutwater.errors import BuildError, UserCodeError
from cutwater.operators.process.state_types import value_check
from cutwater.operators.process.states import KeyedState, ListState, MapState, ValueState
from cutwater.operators.stateful_processor.spark_types import row_maker

Convert = Callable[[Any], Any]

_TUPLES = (tuple, list)
_LISTS = (list, tuple, np.ndarray)


@dataclass(frozen=True)
class Codec:
    """Values of one type as a processor sees them, and as Arrow holds them.

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
    """The codec of what a processor keeps in a state: tuples with one value for each column of its schema.

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
        if not isinstance(values, _TUPLES):
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
            values = column_values(column)
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
        if not isinstance(value, _LISTS):
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


Tuple: TypeAlias = tuple[Any, ...]


class HostedValue(ValueState):
    """``pyspark.sql.streaming.stateful_processor.ValueState``; ``get`` and ``clear`` are inherited."""

    def __init__(self, name: str, record: Record, ttl: str | None) -> None:
        super().__init__(record.type, ttl=ttl)
        self.name, self._checks, self._record = name, [record.check], record

    def exists(self) -> bool:
        return self.value is not None

    def update(self, newValue: Tuple) -> None:
        self.value = _given(newValue, self)

    def stored(self, value: Any) -> Any:
        return _stored(self._record, super().stored(value), self.expires)

    def _revive(self, value: Any) -> Any:
        return super()._revive(_revived(self._record, value, self.expires))


class _TupleList(ListState):
    def __init__(self, name: str, record: Record, ttl: str | None) -> None:
        super().__init__(record.type, ttl=ttl)
        self.name, self._checks, self._record = name, [record.check], record

    def stored(self, value: Any) -> Any:
        return [_stored(self._record, v, self.expires) for v in super().stored(value)]

    def _revive(self, value: Any) -> Any:
        return super()._revive([_revived(self._record, v, self.expires) for v in value])


class _TupleMap(MapState):
    def __init__(self, name: str, key: Record, record: Record, ttl: str | None) -> None:
        super().__init__(key.type, record.type, ttl=ttl)
        self.name, self._checks = name, [key.check, record.check]
        self._key, self._record = key, record

    def stored(self, value: Any) -> Any:
        key = self._key.store or tuple
        return [(key(k), _stored(self._record, v, self.expires)) for k, v in super().stored(value)]

    def _revive(self, value: Any) -> Any:
        return super()._revive([(self._key.revive(k), _revived(self._record, v, self.expires)) for k, v in value])


def _stored(record: Record, value: Any, expires: bool) -> Any:
    if record.store is None:
        return value
    return {**value, "value": record.store(value["value"])} if expires else record.store(value)


def _revived(record: Record, value: Any, expires: bool) -> Any:
    return {**value, "value": record.revive(value["value"])} if expires else record.revive(value)


@dataclass(frozen=True)
class StateDeclaration:
    """What a processor asked its handle for.

    Args:
        kind: of state.
        name: of the state.
        schema: of the values.
        key_schema: of the keys of a map.
        ttl_ms: how long a value lives after it was written; for ever if ``None``.

    Raises:
        BuildError: not a time to live, or a map whose keys cannot be compared.
    """

    kind: Literal["value", "list", "map"]
    name: str
    schema: pa.Schema
    key_schema: pa.Schema | None = None
    ttl_ms: int | None = None

    @property
    def ttl(self) -> str | None:
        """The time to live as a state takes it."""
        return None if self.ttl_ms is None else f"{self.ttl_ms}ms"

    def make(self) -> KeyedState:
        """The state, empty."""
        record = Record(self.schema)
        if self.kind == "value":
            return HostedValue(self.name, record, self.ttl)
        if self.kind == "list":
            return _TupleList(self.name, record, self.ttl)
        assert self.key_schema is not None
        for field in self.key_schema:
            if pa.types.is_nested(field.type) and not pa.types.is_struct(field.type):
                raise BuildError(
                    f"map state {self.name!r} has a key with column {field.name!r} of type {field.type}",
                    hint="Keys of a map state are of simple types, or structs of such.",
                )
        return _TupleMap(self.name, Record(self.key_schema), record, self.ttl)

    def host(self, state: KeyedState) -> HostedState:
        """What the processor gets."""
        if isinstance(state, HostedValue):
            return state
        if isinstance(state, ListState):
            return HostedList(state)
        assert isinstance(state, MapState)
        return HostedMap(state)


S = TypeVar("S", ListState, MapState)


class _Hosted(Generic[S]):
    """A state that does not exist when it is empty."""

    __slots__ = ("_state",)

    def __init__(self, state: S) -> None:
        self._state = state

    def exists(self) -> bool:
        return len(self._state) > 0

    def clear(self) -> None:
        self._state.clear()


class HostedList(_Hosted[ListState]):
    """``pyspark.sql.streaming.stateful_processor.ListState``."""

    __slots__ = ()

    def get(self) -> Iterator[Tuple]:
        return iter(self._state)

    def put(self, newState: list[Tuple]) -> None:
        self._state.set(newState)

    def appendValue(self, newState: Tuple) -> None:
        self._state.append(newState)

    def appendList(self, newState: list[Tuple]) -> None:
        self._state.extend(newState)


class HostedMap(_Hosted[MapState]):
    """``pyspark.sql.streaming.stateful_processor.MapState``."""

    __slots__ = ()

    def getValue(self, key: Tuple) -> Tuple | None:
        return self._state.get(_hashable(key, self._state))

    def containsKey(self, key: Tuple) -> bool:
        return _hashable(key, self._state) in self._state

    def updateValue(self, key: Tuple, value: Tuple) -> None:
        self._state[key] = _given(value, self._state)

    def iterator(self) -> Iterator[tuple[Tuple, Tuple]]:
        return iter(list(self._state.items()))

    def keys(self) -> Iterator[Tuple]:
        return iter(self._state)

    def values(self) -> Iterator[Tuple]:
        return iter(list(self._state.values()))

    def removeKey(self, key: Tuple) -> None:
        self._state.pop(_hashable(key, self._state), None)


HostedState: TypeAlias = HostedValue | HostedList | HostedMap


def _given(value: Any, state: KeyedState) -> Any:
    if value is None:
        raise UserCodeError(
            f"state {state.name!r} cannot hold None",
            hint="Give a tuple with one value for each column of the state's schema; clear() forgets it.",
        )
    return value


def _hashable(key: Any, state: KeyedState) -> Hashable:
    """A key to look for, which need not be one that the state can hold."""
    try:
        found: Hashable = tuple(key)
        hash(found)
    except TypeError:
        raise UserCodeError(
            f"{key!r} is no key of map state {state.name!r}",
            hint="Give a tuple with one value for each column of the key's schema.",
        ) from None
    return found
