"""Types of states: their names, and checks that a value is of one, made when it is set.

A wrong value is then an error on the row that brought it, and not one of the snapshot, later and elsewhere.
"""

from __future__ import annotations

import copy
import datetime as dt
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from cutwater.data.rows import loses_value, shorten_value
from cutwater.data.schema_text import parse_schema
from cutwater.errors import BuildError, UserCodeError

Check: TypeAlias = Callable[[Any], Any]
"""Returns the value as the type holds it; raises one of ``MISFITS`` for anything else."""
_SHORT = (1 << 30) - 1
MISFITS = (TypeError, ValueError, OverflowError, pa.ArrowException)


def as_type(type: str | pa.DataType) -> pa.DataType:
    """The Arrow type of a name as Spark writes it.

    Raises:
        BuildError: no such type.

    >>> as_type("array<long>")
    ListType(list<element: int64>)
    """
    if isinstance(type, pa.DataType):
        return type
    if not isinstance(type, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BuildError(f"{type!r} is not the name of a type", hint="Write for example cw.ValueState('long').")
    return parse_schema(f"value {type}").field(0).type


def value_check(type: pa.DataType) -> Check:
    """The check of a type.

    >>> value_check(pa.int8())(127)
    127
    """
    if pt.is_boolean(type):
        return lambda value: _only(value, bool, np.bool_)
    if pt.is_integer(type):
        return _integer_check(type)
    if pt.is_float64(type):
        return _unless(float, lambda value: float(_only(value, int, float, np.integer, np.floating)))
    if pt.is_string(type):
        return _unless(str, lambda value: _only(value, str))
    if pt.is_binary(type):
        return _unless(bytes, lambda value: bytes(_only(value, bytes, bytearray)))
    if pt.is_timestamp(type) and type.unit == "us" and type.tz in (None, "UTC"):
        return _time_check(type)
    if pt.is_date32(type):
        return _unless(dt.date, lambda value: _through_arrow(value, type))
    return lambda value: _through_arrow(value, type)


def _unless(kind: type[Any], check: Check) -> Check:
    """A check of what is not exactly of a Python type whose values the state holds as they are."""
    return lambda value: value if value.__class__ is kind else check(value)


def _time_check(type: pa.TimestampType) -> Check:
    zone = pa.scalar(0, type).as_py().tzinfo

    def check(value: Any) -> Any:
        if value.__class__ is dt.datetime and value.tzinfo is zone and not value.fold:  # as Arrow would give it
            return value
        return _through_arrow(value, type)

    return check


def integer_range(type: pa.DataType) -> tuple[int, int]:
    """The least and the greatest integer of a type; a range of none if it is not one of integers.

    >>> integer_range(pa.int8()), integer_range(pa.string())
    ((-128, 127), (1, 0))
    """
    if not pt.is_integer(type):
        return 1, 0
    bits = type.bit_width
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if pt.is_signed_integer(type) else (0, (1 << bits) - 1)


def short_range(type: pa.DataType) -> tuple[int, int]:
    """Those integers of a type that Python compares in half the time.

    >>> short_range(pa.int64())
    (-1073741823, 1073741823)
    """
    low, high = integer_range(type)
    return max(low, -_SHORT), min(high, _SHORT)


def _integer_check(type: pa.DataType) -> Check:
    low, high = integer_range(type)

    def check(value: Any) -> int:
        if value.__class__ is int and low <= value <= high:  # nearly always
            return value
        number = int(_only(value, int, np.integer))
        if not low <= number <= high:
            raise OverflowError
        return number

    return check


_BOOLS = (bool, np.bool_)


def _only(value: Any, *types: type) -> Any:
    """The value if it is of one of these types; a bool is no number."""
    if not isinstance(value, types) or (isinstance(value, _BOOLS) and bool not in types):
        raise TypeError
    return value


def _through_arrow(value: Any, type: pa.DataType) -> Any:
    """What comes back from a snapshot: the value as Arrow holds it."""
    values: Sequence[Any] = [value]
    if loses_value(values, type) is not None:
        raise ValueError
    return pa.array(values, type)[0].as_py()


class DeclaredState(ABC):
    """A state that the class of a process function declares as an attribute.

    Args:
        types: Spark's names of the types of what it holds.

    Raises:
        BuildError: no such type.
    """

    def __init__(self, *types: str | pa.DataType) -> None:
        self.types = tuple(as_type(t) for t in types)
        self.name = ""
        self._checks = [value_check(t) for t in self.types]

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def fresh(self) -> Self:
        """An empty state of the same declaration, for one subtask."""
        state = copy.copy(self)
        state._empty()
        return state

    @abstractmethod
    def _empty(self) -> None:
        """Forget everything."""

    def _checked(self, value: Any, check: int = 0) -> Any:
        try:
            return self._checks[check](value)
        except MISFITS:
            raise self._misfit(value, check) from None

    def _misfit(self, value: Any, check: int = 0) -> UserCodeError:
        return UserCodeError(
            f"state {self.name!r} of type {self.types[check]} cannot hold {shorten_value(value)} "
            f"({type(value).__name__})",
            hint="Convert the value, or declare the state with its type.",
        )
