"""The part of a specification that joins share: two keyed sides, and the columns that come out."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import pyarrow as pa

from cutwater.operators.base import OperatorSpec
from cutwater.operators.join.columns import check_times, common_key_types
from cutwater.storage.snapshot.manifest import Shape, TableRecord


@dataclass(frozen=True, eq=False)
class JoinSpec(OperatorSpec):
    """Rows of two keyed streams that meet by key.

    Args:
        left_schema: rows of input 0.
        right_schema: rows of input 1.
        left_keys: key columns of the left side.
        right_keys: their partners on the right side, in the same order.

    Raises:
        BuildError: unknown columns, or keys of types that do not fit.
    """

    repeatable = True

    left_schema: pa.Schema
    right_schema: pa.Schema
    left_keys: tuple[str, ...]
    right_keys: tuple[str, ...]
    key_types: tuple[pa.DataType, ...] = field(init=False, repr=False)
    """The types in which keys are compared."""
    _joined: pa.Schema = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kinds = common_key_types(self.left_schema, self.right_schema, self.left_keys, self.right_keys)
        object.__setattr__(self, "key_types", kinds)
        self._check()
        object.__setattr__(self, "_joined", pa.schema(self._joined_fields()))

    def _check(self) -> None:
        """Refuse what else cannot be.  Keys have been checked."""

    @abstractmethod
    def _joined_fields(self) -> list[pa.Field]:
        """Columns of output 0."""

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        return (self._joined,)

    @property
    def input_schemas(self) -> tuple[pa.Schema, ...]:
        return self.left_schema, self.right_schema

    @property
    def dropped(self) -> tuple[str, ...]:
        """Right columns that do not come out: keys that the left side has under the same name."""
        return tuple(b for a, b in zip(self.left_keys, self.right_keys, strict=True) if a == b)

    @property
    def settings(self) -> dict[str, str]:
        return {"right keys": ", ".join(self.right_keys)}


@dataclass(frozen=True, eq=False)
class TimedJoinSpec(JoinSpec):
    """A join by key and event time that keeps rows of both sides; late rows go to output 1 (left) and 2 (right).

    Args:
        left_time: event-time column of the left side, ``timestamp[us]``.
        right_time: event-time column of the right side, ``timestamp[us]``.

    Raises:
        BuildError: also times that cannot be compared.
    """

    left_time: str
    right_time: str

    def _check(self) -> None:
        check_times(self.left_schema, self.right_schema, self.left_time, self.right_time)

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        return self._joined, self.left_schema, self.right_schema

    @property
    def state_tables(self) -> tuple[TableRecord, ...]:
        return (
            TableRecord("left", shape=Shape.ROWS),
            TableRecord("right", shape=Shape.ROWS, keys=list(self.right_keys)),
        )

    @property
    def settings(self) -> dict[str, str]:
        return {"event time": f"{self.left_time}, {self.right_time}", **super().settings}

    @property
    def state_schema(self) -> pa.Schema:
        """A row type per side."""
        return pa.schema({"left": pa.struct(list(self.left_schema)), "right": pa.struct(list(self.right_schema))})
