"""Aggregates, as the user writes them: ``keyed.aggregate("id", n=cw.count(), worst=cw.max("delay"))``.

Each is only a description; nulls in the column are skipped, as in SQL.
"""

from __future__ import annotations

from cutwater.errors import BuildError
from cutwater.operators.accumulators import AggregateCall

__all__ = ["count", "first", "last", "max", "mean", "min", "sum"]


def count(column: str | None = None) -> AggregateCall:
    """Number of rows (int64), or of rows whose ``column`` is not null.

    >>> count()
    AggregateCall(kind='count', column=None)
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


def _of(kind: str, column: str) -> AggregateCall:
    return AggregateCall(kind, _column(kind, column))


def _column(kind: str, column: object) -> str:
    if not isinstance(column, str) or not column:
        raise BuildError(
            f"{kind}() takes the name of a column, not {column!r}",
            hint="Compute an expression with with_columns first, then aggregate its column.",
        )
    return column
