"""Window join: rows of two keyed streams meet in the window that both lie in, when it closes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import pyarrow as pa

from cutwater.errors import BuildError
from cutwater.operators.base import Operator
from cutwater.operators.join.columns import joined_fields
from cutwater.operators.join.spec import TimedJoinSpec
from cutwater.operators.window.kinds import Period, Window
from cutwater.operators.window.spec import WINDOW_END, WINDOW_START

WindowJoinType: TypeAlias = Literal["inner", "left", "right", "full", "semi", "anti"]


@dataclass(frozen=True, eq=False)
class WindowJoinSpec(TimedJoinSpec):
    """Rows with equal keys that lie in the same window [start, end), once the watermark has reached its last instant.

    Input 0 is the left stream, input 1 the right.  Windows come out in the order of time, the rows of one in the order
    in which the left ones came, then the right ones; rows of the right side without a partner come last.  A row whose
    windows have all come out is late: it goes to output 1 (left) or 2 (right), and counts as ``rows_late``.  A row
    between two windows that do not touch belongs to none and counts in ``rows_outside_windows``.

    Output 0 has ``window_start`` and ``window_end``, the left columns, then (not for "semi" and "anti") the right ones
    without key columns of the same name as their left partner, which hold the key also where the left side has no row.
    A right column whose name is taken gets ``suffix``.

    Args:
        left_schema: rows of input 0.
        right_schema: rows of input 1.
        left_keys: key columns of the left side.
        right_keys: their partners on the right side, in the same order.
        left_time: event-time column of the left side, ``timestamp[us]``.
        right_time: event-time column of the right side, ``timestamp[us]``.
        windows: a kind with a period, so that both sides have the same.
        how: pairs only ("inner"), or also rows without a partner: of one side ("left", "right") or of both ("full");
            left rows that have a partner ("semi"), or that have none ("anti"), each once for each of its windows.
        suffix: appended to a right name that is taken.

    Raises:
        BuildError: unknown columns, keys or times of types that do not fit, colliding names.

    >>> from cutwater.operators.window.kinds import TumblingWindow
    >>> rows = pa.schema({"k": pa.int64(), "t": pa.timestamp("us"), "v": pa.string()})
    >>> WindowJoinSpec(rows, rows, ("k",), ("k",), "t", "t", TumblingWindow(3_600_000_000)).outputs[0].names
    ['window_start', 'window_end', 'k', 't', 'v', 't_right', 'v_right']
    """

    windows: Window
    how: WindowJoinType = "inner"
    suffix: str = "_right"

    def __post_init__(self) -> None:
        if self.how not in get_args(WindowJoinType):
            raise BuildError(f"how is one of {', '.join(map(repr, get_args(WindowJoinType)))}, not {self.how!r}")
        if self.windows.period is None:
            raise BuildError(
                f"{self.windows} is no window of a join: both sides must have the same windows",
                hint="Write for example window=cw.tumbling('1h').",
            )
        if self.windows.processing_time:
            raise BuildError("a window join goes by event time", hint="Leave time='processing' out.")
        super().__post_init__()

    def _joined_fields(self) -> list[pa.Field]:
        time = self.left_schema.field(self.left_time).type
        fields = [pa.field(WINDOW_START, time), pa.field(WINDOW_END, time)]
        for column in self.left_schema:
            if column.name in (WINDOW_START, WINDOW_END):
                raise BuildError(
                    f"two columns of the join would be named {column.name!r}",
                    hint="Rename that of the left side before the join.",
                )
            if self.outer[1] and column.name in self.dropped:
                column = pa.field(column.name, self.key_types[self.left_keys.index(column.name)])
            fields.append(column.with_nullable(column.nullable or self.outer[1]))
        if self.how not in ("semi", "anti"):
            fields += joined_fields(
                pa.schema(fields), self.right_schema, self.dropped, self.suffix, nullable=self.outer[0]
            )
        return fields

    @property
    def outer(self) -> tuple[bool, bool]:
        """Whether rows of the left, and of the right side come out without a partner, as well as with one."""
        return self.how in ("left", "full"), self.how in ("right", "full")

    @property
    def period(self) -> Period:
        """Places of the windows."""
        assert self.windows.period is not None
        return self.windows.period

    @property
    def keeps_every_row(self) -> bool:
        return self.how == "left"

    @property
    def settings(self) -> dict[str, str]:
        return {"windows": str(self.windows), **super().settings}

    def build(self) -> Operator:
        from cutwater.operators.join.window_operator import WindowJoin  # Numba: only where rows flow

        return WindowJoin(self)
