"""States of a process function: declared as class attributes, bound to the current key while a row is processed.

Values are checked against the declared type when they are set, so that a wrong one is an error on the row that brought
it and not one of the snapshot, later and elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from cutwater.errors import BuildError, UserCodeError
from cutwater.operators.rows import loses_value, shorten_value
from cutwater.operators.schema_text import parse_schema
from cutwater.state.objects import FrozenObjects, ObjectTable

__all__ = ["Cursor", "KeyedState", "ListState", "MapState", "ValueState"]

Check: TypeAlias = Callable[[Any], Any]


class Cursor:
    """The key that the states of one subtask are about at the moment."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Hashable = None


class KeyedState:
    """A state of a process function: one thing for each key.  Declared in the class, used through ``self``.

    Args:
        types: Spark's names of the types of what it holds.

    Raises:
        BuildError: no such type.
    """

    kind: ClassVar[str]

    def __init__(self, *types: str | pa.DataType) -> None:
        self.types = tuple(_as_type(t) for t in types)
        self.name = ""
        self._cursor = Cursor()
        self._checks = [_check(t) for t in self.types]
        self._table: ObjectTable[Any] = self._make_table()

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @property
    def stored_type(self) -> pa.DataType:
        """The Arrow type of one key's content in a snapshot."""
        return self.types[0]

    def fresh(self) -> KeyedState:
        """An empty state of the same declaration, for one subtask."""
        state = type(self)(*self.types)
        state.name = self.name
        return state

    def attach(self, cursor: Cursor) -> None:
        """Let the key be that of a cursor, which all states of a subtask share."""
        self._cursor = cursor

    def bind(self, key: Hashable) -> None:
        """The key that the next calls are about."""
        self._cursor.key = key

    def clear(self) -> None:
        """Forget what is kept of this key."""
        self._table.remove(self._cursor.key)

    def freeze(self) -> FrozenObjects[Any]:
        """All keys, as they are now."""
        return self._table.freeze()

    def restore(self, keys: Iterable[Hashable], values: Iterable[Any]) -> None:
        """Set keys to what a snapshot held of them."""
        for key, value in zip(keys, values, strict=True):
            self._table.put(key, self._revive(value))

    def stored(self, value: Any) -> Any:
        """One key's content as Arrow takes it."""
        return value

    def _revive(self, value: Any) -> Any:
        return value

    def _make_table(self) -> ObjectTable[Any]:
        return ObjectTable()

    def _checked(self, value: Any, check: int = 0) -> Any:
        try:
            return self._checks[check](value)
        except (TypeError, ValueError, OverflowError, pa.ArrowException):
            raise UserCodeError(
                f"state {self.name!r} of type {self.types[check]} cannot hold {shorten_value(value)} "
                f"({type(value).__name__})",
                hint="Convert the value, or declare the state with its type.",
            ) from None


class ValueState(KeyedState):
    """One value for each key.

    >>> best = ValueState("long")
    >>> best.bind("a"); best.value = 3; best.bind("b")
    >>> best.value is None, best.get(0)
    (True, 0)
    """

    kind = "value"

    def __init__(self, type: str | pa.DataType) -> None:
        super().__init__(type)

    @property
    def value(self) -> Any:
        """The value, or ``None``.  Setting it to ``None`` clears it.  Not to be changed in place: set it anew.

        Raises:
            UserCodeError: set to something that the declared type cannot hold.
        """
        return self._table.get(self._cursor.key)

    @value.setter
    def value(self, value: Any) -> None:
        if value is None:
            self._table.remove(self._cursor.key)
        else:
            self._table.put(self._cursor.key, self._checked(value))

    def get(self, default: Any = None) -> Any:
        """The value, or ``default``."""
        value = self._table.get(self._cursor.key)
        return default if value is None else value


class ListState(KeyedState):
    """A list for each key.

    >>> seen = ListState("string")
    >>> seen.bind("a"); seen.append("x"); seen.extend(["y", "z"])
    >>> list(seen), len(seen), seen[0]
    (['x', 'y', 'z'], 3, 'x')
    """

    kind = "list"

    def __init__(self, type: str | pa.DataType) -> None:
        super().__init__(type)

    @property
    def stored_type(self) -> pa.DataType:
        return pa.list_(self.types[0])

    def append(self, value: Any) -> None:
        """Add to the end.

        Raises:
            UserCodeError: the declared type cannot hold it.
        """
        checked = self._checked(value)
        values = self._table.own(self._cursor.key)
        if values is None:
            self._table.put(self._cursor.key, [checked])
        else:
            values.append(checked)

    def extend(self, values: Iterable[Any]) -> None:
        """Add all of them to the end."""
        for value in values:
            self.append(value)

    def set(self, values: Iterable[Any]) -> None:
        """Exactly these values; none clears the list."""
        checked = [self._checked(value) for value in values]
        if checked:
            self._table.put(self._cursor.key, checked)
        else:
            self.clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._table.get(self._cursor.key) or ()))

    def __len__(self) -> int:
        return len(self._table.get(self._cursor.key) or ())

    def __getitem__(self, index: int) -> Any:
        return (self._table.get(self._cursor.key) or ())[index]

    def _make_table(self) -> ObjectTable[Any]:
        return ObjectTable(list)


class MapState(KeyedState, MutableMapping[Any, Any]):
    """A dict for each key, in the order of insertion.

    >>> routes = MapState("string", "int")
    >>> routes.bind("a"); routes["JFK"] = 2; routes["LGA"] = 1; del routes["JFK"]
    >>> dict(routes), routes.get("EWR"), "LGA" in routes
    ({'LGA': 1}, None, True)
    """

    kind = "map"

    def __init__(self, key_type: str | pa.DataType, value_type: str | pa.DataType) -> None:
        super().__init__(key_type, value_type)

    @property
    def stored_type(self) -> pa.DataType:
        return pa.map_(self.types[0], self.types[1])

    def __getitem__(self, key: Any) -> Any:
        return self._entries()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        key, value = self._checked(key, 0), None if value is None else self._checked(value, 1)
        entries = self._table.own(self._cursor.key)
        if entries is None:
            self._table.put(self._cursor.key, {key: value})
        else:
            entries[key] = value

    def __delitem__(self, key: Any) -> None:
        entries = self._entries()
        if key not in entries:
            raise KeyError(key)
        if len(entries) == 1:
            self.clear()
        else:
            owned: Any = self._table.own(self._cursor.key)
            del owned[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries()

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._entries()))

    def __len__(self) -> int:
        return len(self._entries())

    def clear(self) -> None:
        self._table.remove(self._cursor.key)

    def stored(self, value: Any) -> Any:
        return list(value.items())

    def _revive(self, value: Any) -> Any:
        return dict(value)

    def _entries(self) -> Mapping[Any, Any]:
        return self._table.get(self._cursor.key) or {}

    def _make_table(self) -> ObjectTable[Any]:
        return ObjectTable(dict)


def _as_type(type: str | pa.DataType) -> pa.DataType:
    if isinstance(type, pa.DataType):
        return type
    if not isinstance(type, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BuildError(f"{type!r} is not the name of a type", hint="Write for example cw.ValueState('long').")
    return parse_schema(f"value {type}").field(0).type


def _check(type: pa.DataType) -> Check:
    """A function that returns the value as the type holds it, and raises for anything else."""
    if pt.is_boolean(type):
        return lambda value: _only(value, bool, np.bool_)
    if pt.is_integer(type):
        return _integer_check(type)
    if pt.is_float64(type):
        return lambda value: float(_only(value, int, float, np.integer, np.floating))
    if pt.is_string(type):
        return lambda value: _only(value, str)
    if pt.is_binary(type):
        return lambda value: bytes(_only(value, bytes, bytearray))
    return lambda value: _through_arrow(value, type)


def _integer_check(type: pa.DataType) -> Check:
    bits = type.bit_width
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if pt.is_signed_integer(type) else (0, (1 << bits) - 1)

    def check(value: Any) -> int:
        number = int(_only(value, int, np.integer))
        if not low <= number <= high:
            raise OverflowError
        return number

    return check


def _only(value: Any, *types: type) -> Any:
    """The value if it is of one of these types; a bool is no number."""
    if not isinstance(value, types) or (isinstance(value, bool | np.bool_) and bool not in types):
        raise TypeError
    return value


def _through_arrow(value: Any, type: pa.DataType) -> Any:
    """What comes back from a snapshot: the value as Arrow holds it."""
    values: Sequence[Any] = [value]
    if loses_value(values, type) is not None:
        raise ValueError
    return pa.array(values, type)[0].as_py()
