"""As-of join (temporal join): each row of a stream with the version of a table that was valid at the row's time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from cutwater.errors import BuildError
from cutwater.operators.base import Operator
from cutwater.operators.join.columns import check_times, common_key_types, joined_fields


@dataclass(frozen=True, eq=False)
class AsOfJoinSpec:
    """Each left row with the right row of its key that has the highest event time at or before its own.

    A right row is a *version*: it is valid from its event time until the next one of its key; of versions of one time
    the last that came counts.  A left row waits until the watermark has passed its time, so that no version is
    missing, and comes out then, in the order of event time.

    A left row behind the watermark is late: it goes to output 1.  A version behind the watermark was not seen by rows
    that have come out already: it goes to output 2, and counts for the rows to come.  Both count in ``rows_late``.

    Output 0 has the left columns, then the right ones without key columns of the same name as their left partner; a
    right column whose name the left side has gets ``suffix``.

    Args:
        left_schema: rows of input 0.
        right_schema: versions, input 1.
        left_keys: key columns of the left side.
        right_keys: their partners on the right side, in the same order.
        left_time: event-time column of the left side, ``timestamp[us]``.
        right_time: event-time column of the right side: from when on the version is valid.
        how: whether left rows without a version come out ("left") or not ("inner").
        suffix: appended to a right name that the left side has too.

    Raises:
        BuildError: unknown columns, keys or times of types that do not fit, colliding names.

    >>> rows = pa.schema({"currency": pa.string(), "t": pa.timestamp("us"), "amount": pa.int64()})
    >>> rates = pa.schema({"currency": pa.string(), "since": pa.timestamp("us"), "rate": pa.float64()})
    >>> AsOfJoinSpec(rows, rates, ("currency",), ("currency",), "t", "since").outputs[0].names
    ['currency', 't', 'amount', 'since', 'rate']
    """

    left_schema: pa.Schema
    right_schema: pa.Schema
    left_keys: tuple[str, ...]
    right_keys: tuple[str, ...]
    left_time: str
    right_time: str
    how: Literal["inner", "left"] = "inner"
    suffix: str = "_right"
    outputs: tuple[pa.Schema, ...] = field(init=False, repr=False)
    key_types: tuple[pa.DataType, ...] = field(init=False, repr=False)
    """The types in which keys are compared."""

    def __post_init__(self) -> None:
        if self.how not in ("inner", "left"):
            raise BuildError(f"how is 'inner' or 'left', not {self.how!r}")
        kinds = common_key_types(self.left_schema, self.right_schema, self.left_keys, self.right_keys)
        object.__setattr__(self, "key_types", kinds)
        check_times(self.left_schema, self.right_schema, self.left_time, self.right_time)
        right = joined_fields(
            self.left_schema, self.right_schema, self.dropped, self.suffix, nullable=self.how == "left"
        )
        joined = pa.schema([*self.left_schema, *right])
        object.__setattr__(self, "outputs", (joined, self.left_schema, self.right_schema))

    @property
    def dropped(self) -> tuple[str, ...]:
        """Right columns that do not come out: keys that the left side has under the same name."""
        return tuple(b for a, b in zip(self.left_keys, self.right_keys, strict=True) if a == b)

    @property
    def meaning(self) -> dict[str, str]:
        """What the state's meaning depends on besides its schema."""
        times = f"{self.left_time}, {self.right_time}"
        return {"event time": times, "right keys": ", ".join(self.right_keys)}

    @property
    def state_schema(self) -> pa.Schema:
        """A row type per side."""
        return pa.schema({"left": pa.struct(list(self.left_schema)), "right": pa.struct(list(self.right_schema))})

    def build(self) -> Operator:
        from cutwater.operators.join.as_of_operator import AsOfJoin  # Numba: only where rows flow

        return AsOfJoin(self)
