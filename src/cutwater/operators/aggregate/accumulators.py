"""Aggregates: what the user asks for, its types, and the accumulator that keeps it by key.

Nulls are skipped, as in SQL; a result is null while no value has been seen (a count is 0).

| kind        | columns                                         | result                          | state            |
|-------------|-------------------------------------------------|---------------------------------|------------------|
| count       | any, or none (rows)                             | int64                           | name             |
| sum         | integers, bool; floats                          | int64 (overflow fails); float64 | name             |
| mean        | integers, bool, floats                          | float64                         | name.{sum,count} |
| min, max    | numbers, bool, times, text, binary, decimals    | as the column                   | name             |
| first, last | any                                             | as the column                   | name             |
| any, all    | bool                                            | bool                            | name             |

- ``variance``, ``variance_pop``, ``stddev``, ``stddev_pop`` take what ``mean`` takes and give float64; their state is
  name.{count,mean,squares}.  Those of a sample are null for one value, those of a population are 0 then.
- ``count_distinct`` and ``approx_count_distinct`` take what can be a key and give int64; their state is a list of the
  values, or a sketch (binary, see ``distinct_accumulators``).

Among floats NaN is the largest, as in Spark: ``max`` is NaN once one is seen, ``min`` only while nothing else is; and
-0.0 counts, and comes out, as 0.0 in ``min`` and ``max``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from cutwater.data.words import is_word_type
from cutwater.errors import BuildError, did_you_mean
from cutwater.state.keys import is_key_type

if TYPE_CHECKING:
    from cutwater.state.growing_array import GrowingArray, Values
    from cutwater.state.index.key_index import Slots

KINDS = (
    "count",
    "sum",
    "mean",
    "min",
    "max",
    "first",
    "last",
    "any",
    "all",
    "variance",
    "variance_pop",
    "stddev",
    "stddev_pop",
    "count_distinct",
    "approx_count_distinct",
)
_COUNTS = ("count", "count_distinct", "approx_count_distinct")
_SPREADS = ("variance", "variance_pop", "stddev", "stddev_pop")

DEFAULT_PRECISION = 12
"""Of ``approx_count_distinct``: log2 of the number of registers."""


@dataclass(frozen=True)
class AggregateCall:
    """An aggregate before it has a name: what ``cw.sum("delay")`` returns."""

    kind: str
    column: str | None = None
    precision: int | None = None


@dataclass(frozen=True)
class Aggregate:
    """One aggregate column: its name in the output, its kind (one of ``KINDS``) and the column it reads.

    ``precision`` is for ``approx_count_distinct``: log2 of its registers, 4 to 16.

    >>> schema = pa.schema([("k", pa.string()), ("v", pa.int32())])
    >>> Aggregate("total", "sum", "v").result_type(schema)
    DataType(int64)
    """

    name: str
    kind: str
    column: str | None = None
    precision: int | None = None
    ordered: bool = False
    """Keep the order of arrival of a ``first`` or ``last`` in the state, so that states merge in any order."""

    def __str__(self) -> str:
        registers = "" if self.precision is None else f", 2**{self.precision} registers"
        return f"{self.kind}({self.column or ''}{registers})"

    def result_type(self, schema: pa.Schema) -> pa.DataType:
        """Arrow type of the result.

        Raises:
            BuildError: unknown kind or column, no column where one is needed, or a type that does not fit.
        """
        if self.kind not in KINDS:
            raise BuildError(f"no such aggregate {self.kind!r}", hint=did_you_mean(self.kind, KINDS))
        if self.column is None:
            if self.kind == "count":
                return pa.int64()
            raise BuildError(f"{self.kind} {self.name!r} needs a column", hint=f"Write {self.kind}('column').")
        if schema.get_field_index(self.column) < 0:
            raise BuildError(
                f"{self.kind} {self.name!r}: no such column {self.column!r}",
                hint=did_you_mean(self.column, schema.names),
            )
        kind = schema.field(self.column).type
        fits, wanted = _FITS.get(self.kind, (_is_anything, ""))
        if not fits(kind):
            raise BuildError(
                f"{self.kind} {self.name!r}: column {self.column!r} of type {kind} does not fit",
                hint=f"{self.kind} takes {wanted}: cast it first.",
            )
        if self.kind in _COUNTS:
            return pa.int64()
        if self.kind == "mean" or self.kind in _SPREADS:
            return pa.float64()
        if self.kind == "sum":
            return pa.float64() if pa.types.is_floating(kind) else pa.int64()
        return kind

    def state_fields(self, schema: pa.Schema) -> list[pa.Field]:
        """Columns of the aggregate's state in a segment, readable as they are."""
        result = self.result_type(schema)
        if self.kind == "mean":
            return [pa.field(f"{self.name}.sum", pa.float64()), pa.field(f"{self.name}.count", pa.int64())]
        if self.kind in _SPREADS:
            parts = {"count": pa.int64(), "mean": pa.float64(), "squares": pa.float64()}
            return [pa.field(f"{self.name}.{part}", kind) for part, kind in parts.items()]
        if self.kind == "count_distinct":
            return [pa.field(self.name, pa.list_(schema.field(self.column).type))]
        if self.kind == "approx_count_distinct":
            return [pa.field(self.name, pa.binary())]
        if self.ordered:
            return [pa.field(self.name, result), pa.field(f"{self.name}.order", pa.int64())]
        return [pa.field(self.name, result)]


class Accumulator(ABC):
    """One aggregate's state, in arrays by slot.  Called from one thread; a frozen one serves another thread.

    ``columns`` are the arrays that change in place.  A table captures them for a snapshot before it lets rows change
    (see ``cutwater.state.table.capture``); whatever else an accumulator holds must never be changed in place.
    """

    columns: Sequence[GrowingArray]

    @property
    def varying_bytes(self) -> int:
        """What it holds besides ``columns``, roughly."""
        return 0

    @abstractmethod
    def reserve(self, slots: int) -> None:
        """Slots 0 .. ``slots`` - 1 are in use; new ones have seen nothing."""

    @abstractmethod
    def update(self, slots: Slots, batch: pa.RecordBatch) -> None:
        """Take the rows of a batch; ``slots[i]`` is the slot of row i."""

    @abstractmethod
    def running(self, slots: Slots, batch: pa.RecordBatch) -> pa.Array:
        """Like ``update``; returns the result after each row, in row order: row i has seen the rows 0 .. i."""

    @abstractmethod
    def result(self, slots: Slots) -> pa.Array:
        """The results of some slots."""

    @abstractmethod
    def state(self, slots: Slots) -> list[pa.Array]:
        """The state of some slots, one array per field of ``Aggregate.state_fields``."""

    @abstractmethod
    def restore(self, slots: Slots, columns: list[pa.Array]) -> None:
        """Set the state of some (reserved) slots to what ``state`` returned."""

    @abstractmethod
    def merge(self, slots: Slots, columns: list[pa.Array]) -> None:
        """Fold what ``state`` returned, here or elsewhere, into some (reserved) slots; several rows may go to one slot.

        The result is that of all the values together; for ``first`` and ``last`` as if they came now, in this order.
        """

    @abstractmethod
    def keep(self, slots: Slots) -> None:
        """Forget all slots but these, which become 0, 1, 2 ..."""

    @abstractmethod
    def frozen(self, columns: Sequence[Values]) -> Accumulator:
        """The accumulator as it is now, for ``state`` and ``result`` in another thread.

        Args:
            columns: captured copies of ``columns``, filled by the time they are read.
        """


def make_accumulator(aggregate: Aggregate, schema: pa.Schema) -> Accumulator:
    """An empty accumulator for rows of ``schema``.

    Raises:
        BuildError: as ``Aggregate.result_type``.
    """
    # Numba: only where rows flow.
    from cutwater.operators.aggregate import distinct_accumulators, ranked_rows, value_accumulators, word_accumulators
    from cutwater.operators.aggregate.top_rows import TopRows

    if isinstance(aggregate, TopRows):
        return ranked_rows.RankedRows(aggregate, schema)
    result = aggregate.result_type(schema)
    if aggregate.kind == "count":
        return word_accumulators.Count(aggregate.column)
    assert aggregate.column is not None
    if aggregate.kind == "mean":
        return word_accumulators.Mean(aggregate.column)
    if aggregate.kind == "sum":
        return word_accumulators.Sum(aggregate.column, result)
    if aggregate.kind in ("any", "all"):
        return word_accumulators.Pick("max" if aggregate.kind == "any" else "min", aggregate.column, result)
    if aggregate.kind in _SPREADS:
        return word_accumulators.Spread(aggregate.kind, aggregate.column)
    if aggregate.kind == "count_distinct":
        return distinct_accumulators.CountDistinct(aggregate.column, schema.field(aggregate.column).type)
    if aggregate.kind == "approx_count_distinct":
        return distinct_accumulators.ApproxCountDistinct(aggregate.column, aggregate.precision or DEFAULT_PRECISION)
    pick = word_accumulators.Pick if is_word_type(result) else value_accumulators.PickValue
    accumulator = pick(aggregate.kind, aggregate.column, result)
    if not aggregate.ordered:
        return accumulator
    from cutwater.operators.aggregate.ordered_accumulator import Ordered

    return Ordered(accumulator, aggregate.column, first=aggregate.kind == "first")


def _is_number(kind: pa.DataType) -> bool:
    t = pa.types
    return t.is_integer(kind) or t.is_boolean(kind) or t.is_float32(kind) or t.is_float64(kind)


def _is_ordered(kind: pa.DataType) -> bool:
    t = pa.types
    text = t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind)
    return is_word_type(kind) or text or t.is_decimal128(kind) or t.is_decimal256(kind)


def _is_anything(kind: pa.DataType) -> bool:
    return True


_NUMBERS = (_is_number, "integers, bool and floats")
_ORDERED = (_is_ordered, "any type with an order")
_KEYS = (is_key_type, "integers, bool, floats, texts, binary, dates, timestamps and decimal128")
_FITS: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "sum": _NUMBERS,
    "mean": _NUMBERS,
    **dict.fromkeys(_SPREADS, _NUMBERS),
    "min": _ORDERED,
    "max": _ORDERED,
    **dict.fromkeys(("any", "all"), (pa.types.is_boolean, "bool")),
    "count_distinct": _KEYS,
    "approx_count_distinct": _KEYS,
}
"""What the column of a kind must be, as a test and in words."""
