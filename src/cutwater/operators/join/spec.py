"""Joins of two keyed streams: what goes in, what comes out, and every check that can be made before rows flow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import pyarrow as pa

from cutwater.config import format_us
from cutwater.data.changes import OP, marked_schema, row_type
from cutwater.errors import BuildError
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.base import Operator, OperatorSpec
from cutwater.operators.join.columns import check_times, common_key_types, joined_fields
from cutwater.operators.window.kinds import Period, Window
from cutwater.operators.window.spec import WINDOW_END, WINDOW_START
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
        from cutwater.operators.join.two_sided import IntervalJoin  # Numba: only where rows flow

        return IntervalJoin(self)


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
        from cutwater.operators.join.two_sided import AsOfJoin  # Numba: only where rows flow

        return AsOfJoin(self)


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


JoinType = Literal["inner", "left", "right", "full"]
TABLES = (".left", ".right")
"""State columns: the row of each table."""


@dataclass(frozen=True, eq=False)
class TableJoinSpec(JoinSpec):
    """An updating stream (see ``changes``) of the join of two tables by key.

    A row that comes replaces the row of its key in its table.  An input that is an updating stream itself sets a row
    with ``+I`` and ``+U`` and removes it with ``-U`` and ``-D``; a removed row that is not there counts in
    ``rows_unmatched``.

    Output: ``op``, the left columns, the right ones without keys of the same name as their left partner.  Such a key
    column holds the key also where the left side has no row; a right column whose name the left side has gets
    ``suffix``.

    Args:
        how: which rows come out without a partner: none, those of one side, or of both.
        suffix: appended to a right name that the left side has too.
        updating: whether the left and the right input are updating streams.

    Raises:
        BuildError: unknown columns, keys of types that do not fit, colliding names.

    >>> rows = pa.schema({"k": pa.int64(), "v": pa.string()})
    >>> TableJoinSpec(rows, rows, ("k",), ("k",)).outputs[0].names
    ['op', 'k', 'v', 'v_right']
    """

    how: JoinType = "inner"
    suffix: str = "_right"
    updating: tuple[bool, bool] = (False, False)

    def __post_init__(self) -> None:
        if self.how not in get_args(JoinType):
            raise BuildError(f"how is one of {', '.join(map(repr, get_args(JoinType)))}, not {self.how!r}")
        super().__post_init__()

    def _joined_fields(self) -> list[pa.Field]:
        left, right = self.tables
        of_left: list[pa.Field] = []
        for column in left:
            if column.name in self.dropped:
                of_left.append(pa.field(column.name, self.key_types[self.left_keys.index(column.name)]))
            else:
                of_left.append(column.with_nullable(column.nullable or self.outer[1]))
        of_right = joined_fields(left, right, self.dropped, self.suffix, nullable=self.outer[0])
        return list(marked_schema(pa.schema([*of_left, *of_right])))

    @property
    def tables(self) -> tuple[pa.Schema, pa.Schema]:
        """Columns of the two tables: those of the inputs without the mark of an updating stream."""
        left, right = (
            pa.schema([column for column in schema if not (updating and column.name == OP)])
            for schema, updating in zip((self.left_schema, self.right_schema), self.updating, strict=True)
        )
        return left, right

    @property
    def outer(self) -> tuple[bool, bool]:
        """Whether rows of the left, and of the right table come out without a partner."""
        return self.how in ("left", "full"), self.how in ("right", "full")

    @property
    def held_schema(self) -> pa.Schema:
        """Columns of which the state keeps the latest value by key."""
        return pa.schema([pa.field(n, row_type(t)) for n, t in zip(TABLES, self.tables, strict=True)])

    @property
    def held(self) -> tuple[Aggregate, ...]:
        """What the state keeps by key, over rows of ``held_schema``."""
        return tuple(Aggregate(name, "last", name) for name in TABLES)

    @property
    def keeps_every_row(self) -> bool:
        return self.how == "left"

    @property
    def state_schema(self) -> pa.Schema:
        keys = [pa.field(name, kind) for name, kind in zip(self.left_keys, self.key_types, strict=True)]
        return pa.schema([*keys, *self.held_schema])

    def build(self) -> Operator:
        from cutwater.operators.join.table_operator import TableJoin  # Numba: only where rows flow

        return TableJoin(self)
