"""The aggregate functions.

Among floats NaN is the largest, as in Spark: ``max`` is NaN once one is seen, ``min`` only while nothing else is; and
-0.0 counts, and comes out, as 0.0 in ``min`` and ``max``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from cutwater.data.words import is_word_type
from cutwater.operators.aggregate.accumulators import Accumulator, Aggregate, AggregateFunction, aggregate_function
from cutwater.state.keys import is_key_type

DEFAULT_PRECISION = 12
"""Of ``approx_count_distinct``: log2 of the number of registers."""


@aggregate_function("count")
class Count(AggregateFunction):
    """Rows, or values that are not null."""

    needs_column = False

    def result_type(self, column: pa.DataType) -> pa.DataType:
        return pa.int64()

    def accumulator(self, aggregate: Aggregate, column: pa.DataType) -> Accumulator:
        return _accumulators().Count(aggregate.column)

    def column_of(self, stored: Sequence[pa.DataType]) -> pa.DataType:
        return pa.null()


class NumberFunction(AggregateFunction):
    """A function of numbers with a result in double precision."""

    takes = "integers, bool and floats"

    def fits(self, column: pa.DataType) -> bool:
        return pt.is_integer(column) or pt.is_boolean(column) or pt.is_float32(column) or pt.is_float64(column)

    def result_type(self, column: pa.DataType) -> pa.DataType:
        return pa.float64()


@aggregate_function("sum")
class Sum(NumberFunction):
    """Sum, in 64 bits for integers: an overflow fails the job."""

    def result_type(self, column: pa.DataType) -> pa.DataType:
        return pa.float64() if pt.is_floating(column) else pa.int64()

    def accumulator(self, aggregate: Aggregate, column: pa.DataType) -> Accumulator:
        return _accumulators().Sum(aggregate.column or "", self.result_type(column))


@aggregate_function("mean")
class Mean(NumberFunction):
    """Arithmetic mean."""

    def state(self, column: pa.DataType) -> dict[str, pa.DataType]:
        return {"sum": pa.float64(), "count": pa.int64()}

    def accumulator(self, aggregate: Aggregate, column: pa.DataType) -> Accumulator:
        return _accumulators().Mean(aggregate.column or "")


@aggregate_function("min", "max")
class Extreme(AggregateFunction):
    """The smallest, the largest value."""

    takes = "any type with an order"

    def fits(self, column: pa.DataType) -> bool:
        text = pt.is_string(column) or pt.is_large_string(column) or pt.is_binary(column) or pt.is_large_binary(column)
        return is_word_type(column) or text or pt.is_decimal128(column) or pt.is_decimal256(column)

    def accumulator(self, aggregate: Aggregate, column: pa.DataType) -> Accumulator:
        return _pick(self.kind, aggregate, column)


@aggregate_function("first", "last")
class End(AggregateFunction):
    """The first, the last value in the order of arrival."""

    by_arrival = True

    def accumulator(self, aggregate: Aggregate, column: pa.DataType) -> Accumulator:
        picked = _pick(self.kind, aggregate, column)
        if not aggregate.ordered:
            return picked
        return _accumulators().Ordered(picked, aggregate.column or "", first=self.kind == "first")


@aggregate_function("any", "all")
class Truth(AggregateFunction):
    """True if one value is, if all are."""

    takes = "bool"

    def fits(self, column: pa.DataType) -> bool:
        return pt.is_boolean(column)

    def accumulator(self, aggregate: Aggregate, column: pa.DataType) -> Accumulator:
        return _pick("max" if self.kind == "any" else "min", aggregate, column)


@aggregate_function("variance", "variance_pop", "stddev", "stddev_pop")
class Spread(NumberFunction):
    """Variance and standard deviation: of a sample null for one value, of a population 0 then."""

    def state(self, column: pa.DataType) -> dict[str, pa.DataType]:
        return {"count": pa.int64(), "mean": pa.float64(), "squares": pa.float64()}

    def accumulator(self, aggregate: Aggregate, column: pa.DataType) -> Accumulator:
        return _accumulators().Spread(self.kind, aggregate.column or "")

    def column_of(self, stored: Sequence[pa.DataType]) -> pa.DataType:
        return pa.float64()


class DistinctFunction(AggregateFunction):
    """A number of distinct values."""

    takes = "integers, bool, floats, texts, binary, dates, timestamps and decimal128"

    def fits(self, column: pa.DataType) -> bool:
        return is_key_type(column)

    def result_type(self, column: pa.DataType) -> pa.DataType:
        return pa.int64()

    @property
    def plain(self) -> bool:
        return False


@aggregate_function("count_distinct")
class CountDistinct(DistinctFunction):
    """An exact number; a snapshot keeps the list of the values."""

    def state(self, column: pa.DataType) -> dict[str, pa.DataType]:
        return {"": pa.list_(column)}

    def accumulator(self, aggregate: Aggregate, column: pa.DataType) -> Accumulator:
        from cutwater.operators.aggregate import distinct_accumulators

        return distinct_accumulators.CountDistinct(aggregate.column or "", column)

    def column_of(self, stored: Sequence[pa.DataType]) -> pa.DataType:
        return stored[0].value_type

    def results(self, aggregate: Aggregate, stored: Sequence[pa.Array]) -> pa.Array:
        return pc.call_function("list_value_length", [stored[0]]).cast(pa.int64())


@aggregate_function("approx_count_distinct")
class ApproxCountDistinct(DistinctFunction):
    """An estimate; a snapshot keeps a sketch (binary, see ``distinct_accumulators``)."""

    has_precision = True

    def state(self, column: pa.DataType) -> dict[str, pa.DataType]:
        return {"": pa.binary()}

    def state_text(self, column: pa.DataType) -> str:
        """A sketch is of hashes, in which all integers are alike and other types are not."""
        return " of integers" if pt.is_integer(column) else f" of {column}"

    def accumulator(self, aggregate: Aggregate, column: pa.DataType) -> Accumulator:
        from cutwater.operators.aggregate import distinct_accumulators

        precision = aggregate.precision or DEFAULT_PRECISION
        return distinct_accumulators.ApproxCountDistinct(aggregate.column or "", precision)


def _pick(kind: str, aggregate: Aggregate, column: pa.DataType) -> Accumulator:
    """First, last, min or max: as words where a value is one."""
    pick = _accumulators().Pick if is_word_type(column) else _accumulators().PickValue
    return pick(kind, aggregate.column or "", column)


def _accumulators():
    """The module of most accumulators; it loads Numba: only where rows flow."""
    from cutwater.operators.aggregate import value_accumulators

    return value_accumulators
