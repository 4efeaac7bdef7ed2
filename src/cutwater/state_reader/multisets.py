"""Differences of two tables as multisets of rows, found column by column."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import polars.selectors as cs

from cutwater.data.changes import OP

TIMES, OF_ONE, OF_OTHER, PLACE = "__times", "__in_one", "__in_other", "__place"
_ADDED = ("+I", "+U")


def rows_of(rows: pl.LazyFrame, *, updating: bool, digits: int | None, ignore: Sequence[str]) -> pl.LazyFrame:
    """Every different row once, with how often it is there (column ``TIMES``).

    Args:
        updating: the rows are changes of a table (``data.changes``): counted are the rows of the table.
        digits: floating point numbers are rounded to so many significant digits.
        ignore: columns that do not count; of those that are there.
    """
    kept = rows.select(cs.exclude(*ignore)) if ignore else rows
    columns = [c for c in kept.collect_schema().names() if not (updating and c == OP)]
    count = pl.when(pl.col(OP).is_in(_ADDED)).then(1).otherwise(-1).sum() if updating else pl.len()
    if digits is not None:
        kept = kept.with_columns(cs.float().round_sig_figs(digits))
    return kept.group_by(columns).agg(count.cast(pl.Int64).alias(TIMES)).filter(pl.col(TIMES) != 0)


def differing_rows(one: pl.LazyFrame, other: pl.LazyFrame) -> pl.DataFrame:
    """The rows of which two results of ``rows_of`` have not equally many, in the order of their columns.

    Columns ``OF_ONE`` and ``OF_OTHER`` say how many; ``PLACE``, how many rows come before in the first result.
    """
    columns = [c for c in one.collect_schema().names() if c != TIMES]
    both = one.rename({TIMES: OF_ONE}).join(
        other.rename({TIMES: OF_OTHER}), on=columns, how="full", coalesce=True, nulls_equal=True
    )
    both = both.with_columns(pl.col(OF_ONE, OF_OTHER).fill_null(0)).sort(columns)
    both = both.with_columns((pl.col(OF_ONE).cum_sum() - pl.col(OF_ONE)).alias(PLACE))
    return both.filter(pl.col(OF_ONE) != pl.col(OF_OTHER)).collect()
