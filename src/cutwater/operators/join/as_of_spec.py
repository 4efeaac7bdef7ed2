"""As-of join (temporal join): each row of a stream with the version of a table that was valid at the row's time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from cutwater.errors import BuildError
from cutwater.operators.base import Operator
from cutwater.operators.join.columns import joined_fields
from cutwater.operators.join.spec import TimedJoinSpec


@dataclass(frozen=True, eq=False)
class AsOfJoinSpec(TimedJoinSpec):
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

    how: Literal["inner", "left"] = "inner"
    suffix: str = "_right"

    def __post_init__(self) -> None:
        if self.how not in ("inner", "left"):
            raise BuildError(f"how is 'inner' or 'left', not {self.how!r}")
        super().__post_init__()

    def _joined_fields(self) -> list[pa.Field]:
        outer = self.how == "left"
        right = joined_fields(self.left_schema, self.right_schema, self.dropped, self.suffix, nullable=outer)
        return [*self.left_schema, *right]

    @property
    def keeps_every_row(self) -> bool:
        return self.how == "left"

    def build(self) -> Operator:
        from cutwater.operators.join.as_of_operator import AsOfJoin  # Numba: only where rows flow

        return AsOfJoin(self)
