"""Interval join: pairs of rows of two keyed streams with equal keys and event times within reach of each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from cutwater.config import format_us
from cutwater.errors import BuildError
from cutwater.operators.base import Operator
from cutwater.operators.join.columns import joined_fields
from cutwater.operators.join.spec import TimedJoinSpec

MAX_BOUND_US = 2**61
"""Largest distance of an interval's bound, some 73,000 years: times plus bounds stay within 64 bits."""


@dataclass(frozen=True, eq=False)
class IntervalJoinSpec(TimedJoinSpec):
    """All pairs with equal keys and ``left.time + lower_us <= right.time <= left.time + upper_us``.

    Input 0 is the left stream, input 1 the right.  A pair comes out when its later row arrives: pairs of one arriving
    batch are ordered by arriving row, then by the arrival of the stored row.  A row is kept until the watermark says
    that nothing can match it any more.  A row at or behind the watermark at its arrival is late (W1): it joins nothing
    and goes to output 1 (left) or 2 (right), and counts as ``rows_late``.

    Output 0 has the left columns, then the right ones without key columns of the same name as their left partner; a
    right column whose name the left side has gets ``suffix``.

    Args:
        left_schema: rows of input 0.
        right_schema: rows of input 1.
        left_keys: key columns of the left side.
        right_keys: their partners on the right side, in the same order.
        left_time: event-time column of the left side, ``timestamp[us]``.
        right_time: event-time column of the right side, ``timestamp[us]``.
        lower_us: lowest ``right.time - left.time``, microseconds; may be negative.
        upper_us: highest ``right.time - left.time``, microseconds.
        suffix: appended to a right name that the left side has too.

    Raises:
        BuildError: unknown columns, keys or times of types that do not fit, an empty interval, colliding names.

    >>> rows = pa.schema({"k": pa.int64(), "t": pa.timestamp("us"), "v": pa.string()})
    >>> IntervalJoinSpec(rows, rows, ("k",), ("k",), "t", "t", -1_000_000, 0).outputs[0].names
    ['k', 't', 'v', 't_right', 'v_right']
    """

    lower_us: int
    upper_us: int
    suffix: str = "_right"

    def __post_init__(self) -> None:
        if self.lower_us > self.upper_us:
            raise BuildError(
                f"the interval is empty: its lower bound {self.lower_us} us is above its upper {self.upper_us} us",
                hint="Write for example within=('-1h', '30m').",
            )
        if max(abs(self.lower_us), abs(self.upper_us)) > MAX_BOUND_US:
            raise BuildError(f"an interval's bound may be {MAX_BOUND_US} us at most")
        super().__post_init__()

    def _joined_fields(self) -> list[pa.Field]:
        right = joined_fields(self.left_schema, self.right_schema, self.dropped, self.suffix, nullable=False)
        return [*self.left_schema, *right]

    @property
    def _within(self) -> str:
        return f"{format_us(self.lower_us)} to {format_us(self.upper_us)}"

    @property
    def settings(self) -> dict[str, str]:
        return {"within": self._within, **super().settings}

    def explanation(self) -> Iterator[str]:
        yield f"within {self._within}"

    def build(self) -> Operator:
        from cutwater.operators.join.interval_operator import IntervalJoin  # Numba: only where rows flow

        return IntervalJoin(self)
