"""The states of a ``StatefulProcessor``: tuples in the states of process functions, behind Spark's interface."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from cutwater.errors import BuildError, UserCodeError
from cutwater.operators.process.keyed_state import KeyedState
from cutwater.operators.process.states import ListState, MapState, ValueState
from cutwater.operators.stateful_processor.records import Record

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


class HostedList:
    """``pyspark.sql.streaming.stateful_processor.ListState``.  An emptied list does not exist."""

    __slots__ = ("_state",)

    def __init__(self, state: ListState) -> None:
        self._state = state

    def exists(self) -> bool:
        return len(self._state) > 0

    def get(self) -> Iterator[Tuple]:
        return iter(self._state)

    def put(self, newState: list[Tuple]) -> None:
        self._state.set(newState)

    def appendValue(self, newState: Tuple) -> None:
        self._state.append(newState)

    def appendList(self, newState: list[Tuple]) -> None:
        self._state.extend(newState)

    def clear(self) -> None:
        self._state.clear()


class HostedMap:
    """``pyspark.sql.streaming.stateful_processor.MapState``.  An emptied map does not exist."""

    __slots__ = ("_state",)

    def __init__(self, state: MapState) -> None:
        self._state = state

    def exists(self) -> bool:
        return len(self._state) > 0

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

    def clear(self) -> None:
        self._state.clear()


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
