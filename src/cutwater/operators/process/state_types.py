"""Types of states: their names, and checks that a value is of one, made when it is set.

A wrong value is then an error on the row that brought it, and not one of the snapshot, later and elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from cutwater.data.rows import loses_value, shorten_value
from cutwater.data.schema_text import parse_schema
from cutwater.errors import BuildError, UserCodeError

Check: TypeAlias = Callable[[Any], Any]
"""Returns the value as the type holds it; raises for anything else."""


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
        return lambda value: float(_only(value, int, float, np.integer, np.floating))
    if pt.is_string(type):
        return lambda value: _only(value, str)
    if pt.is_binary(type):
        return lambda value: bytes(_only(value, bytes, bytearray))
    return lambda value: _through_arrow(value, type)


def checked(value: Any, check: Check, name: str, kind: pa.DataType) -> Any:
    """The value as the state ``name`` of type ``kind`` holds it.

    Raises:
        UserCodeError: it cannot.
    """
    try:
        return check(value)
    except (TypeError, ValueError, OverflowError, pa.ArrowException):
        raise UserCodeError(
            f"state {name!r} of type {kind} cannot hold {shorten_value(value)} ({type(value).__name__})",
            hint="Convert the value, or declare the state with its type.",
        ) from None


def _integer_check(type: pa.DataType) -> Check:
    bits = type.bit_width
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if pt.is_signed_integer(type) else (0, (1 << bits) - 1)

    def check(value: Any) -> int:
        if value.__class__ is int and low <= value <= high:  # nearly always
            return value
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
