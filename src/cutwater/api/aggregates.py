"""Aggregates, as the user writes them: ``keyed.aggregate("id", n=cw.count(), worst=cw.max("delay"))``.

Each is only a description; nulls in the column are skipped, as in SQL.
"""

from __future__ import annotations

import math

from cutwater.errors import BuildError
from cutwater.operators.aggregate.accumulators import AggregateCall

__all__ = [
    "all",
    "any",
    "approx_count_distinct",
    "count",
    "count_distinct",
    "first",
    "last",
    "max",
    "mean",
    "min",
    "stddev",
    "sum",
    "variance",
]

_MIN_PRECISION, _MAX_PRECISION = 4, 16


def count(column: str | None = None) -> AggregateCall:
    """Number of rows (int64), or of rows whose ``column`` is not null.

    >>> count()
    AggregateCall(kind='count', column=None, precision=None)
    """
    return AggregateCall("count", None if column is None else _column("count", column))


def sum(column: str) -> AggregateCall:
    """Sum: int64 of integers (an overflow fails the job), float64 of floats; null before the first value."""
    return _of("sum", column)


def min(column: str) -> AggregateCall:
    """Smallest value, of the column's type; NaN counts as largest, as in Spark."""
    return _of("min", column)


def max(column: str) -> AggregateCall:
    """Largest value, of the column's type; NaN counts as largest, as in Spark."""
    return _of("max", column)


def mean(column: str) -> AggregateCall:
    """Arithmetic mean, float64; null before the first value."""
    return _of("mean", column)


def first(column: str) -> AggregateCall:
    """First value that is not null, in the order the step takes its rows."""
    return _of("first", column)


def last(column: str) -> AggregateCall:
    """Latest value that is not null, in the order the step takes its rows."""
    return _of("last", column)


def any(column: str) -> AggregateCall:
    """True if a value of a column of booleans is; null before the first value."""
    return _of("any", column)


def all(column: str) -> AggregateCall:
    """True if all values of a column of booleans are; null before the first value."""
    return _of("all", column)


def variance(column: str, *, population: bool = False) -> AggregateCall:
    """Variance of a sample, float64, null below two values; with ``population`` of all values, null below one.

    Computed by Welford's recurrence, so that it is right for values far from zero too.
    """
    return _of("variance_pop" if population else "variance", column)


def stddev(column: str, *, population: bool = False) -> AggregateCall:
    """Standard deviation, the root of ``variance``."""
    return _of("stddev_pop" if population else "stddev", column)


def count_distinct(column: str) -> AggregateCall:
    """Number of distinct values (int64), exact: all of them are kept, so prefer ``approx_count_distinct`` for many.

    NaN is one value, and -0.0 is 0.0.
    """
    return _of("count_distinct", column)


def approx_count_distinct(column: str, rsd: float = 0.02) -> AggregateCall:
    """Number of distinct values (int64), estimated by a HyperLogLog sketch.

    A sketch takes 16 bytes for a few values and grows to 2**p bytes, p being the smallest with
    ``1.04 / sqrt(2**p) <= rsd``: 4 KiB by default.  Few values are counted nearly exactly.  The result depends on the
    set of values only, not on their order, on the parallelism, or on the process.

    Args:
        rsd: relative standard deviation of the estimate, 0.0041 to 0.26; as in Spark, but 0.02 by default.

    Raises:
        BuildError: an ``rsd`` out of its range.

    >>> approx_count_distinct("user").precision, approx_count_distinct("user", rsd=0.05).precision
    (12, 9)
    """
    if not isinstance(rsd, float) or not 0.0041 <= rsd <= 0.26:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BuildError(f"rsd is a number from 0.0041 to 0.26, not {rsd!r}", hint="Write for example rsd=0.02.")
    precision = math.ceil(2 * math.log2(1.04 / rsd))
    column = _column("approx_count_distinct", column)
    return AggregateCall("approx_count_distinct", column, sorted((_MIN_PRECISION, precision, _MAX_PRECISION))[1])


def _of(kind: str, column: str) -> AggregateCall:
    return AggregateCall(kind, _column(kind, column))


def _column(kind: str, column: object) -> str:
    if not isinstance(column, str) or not column:
        raise BuildError(
            f"{kind}() takes the name of a column, not {column!r}",
            hint="Compute an expression with with_columns first, then aggregate its column.",
        )
    return column
