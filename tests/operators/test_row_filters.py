"""What a filter says about bounds: no piece is left out that has a row which fulfils it."""

from __future__ import annotations

import datetime as dt
import math
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from cutwater.operators.row_filters import Bounds, BoundsTest, Pieces, RowFilter
from cutwater.operators.stateless.expressions import Drop, ExpressionSpec, Filter, Rename, Select, WithColumns

NAN = float("nan")
UTC = dt.UTC
TYPES: dict[str, tuple[pa.DataType, list[Any], list[Any]]] = {
    # values of rows; constants they are compared with
    "i": (pa.int32(), [-(2**31), -3, -1, 0, 1, 2, 3, 7, 2**31 - 1], [-5, -1, 0, 1, 2.5, 7, 2**40, -0.5]),
    "u": (pa.uint64(), [0, 1, 5, 2**63, 2**64 - 1], [0, 1, 3, 2**63]),
    "f": (pa.float64(), [-math.inf, -1.5, -0.0, 0.0, 0.25, 3.0, math.inf, NAN], [-1.0, 0.0, 3, 2.5, math.inf, NAN]),
    "s": (pa.string(), ["", "a", "ab", "b", "ß", "\U0001f600", "z"], ["", "a", "aa", "ß", "zz"]),
    "b": (pa.bool_(), [True, False], [True, False]),
    "d": (pa.date32(), [dt.date(1960, 1, 1), dt.date(2026, 1, 1)], [dt.date(1970, 1, 1), dt.date(2026, 1, 1)]),
    "t": (
        pa.timestamp("us", "UTC"),
        [dt.datetime(1969, 1, 1, tzinfo=UTC), dt.datetime(2026, 1, 1, tzinfo=UTC), dt.datetime(2027, 1, 1, tzinfo=UTC)],
        [dt.datetime(2026, 1, 1, tzinfo=UTC), dt.datetime(2026, 5, 1, tzinfo=UTC)],
    ),
    "e": (pa.decimal128(10, 2), [Decimal("-1.50"), Decimal("0.00"), Decimal("2.25")], [Decimal("0.1"), 1, 2]),
}
SCHEMA = pa.schema([(name, kind) for name, (kind, _, _) in TYPES.items()])


def some_rows(chance: random.Random) -> pl.DataFrame:
    """Some neighbouring values of each type, so that bounds say something; nulls, or nothing but nulls."""
    rows, columns = chance.randrange(1, 6), dict[str, pa.Array]()
    for name, (kind, values, _) in TYPES.items():
        first = chance.randrange(len(values))
        some = values[first : first + chance.randrange(1, 4)]
        nulls = chance.choice([0.0, 0.0, 0.3, 1.0])
        columns[name] = pa.array([None if chance.random() < nulls else chance.choice(some) for _ in range(rows)], kind)
    return pl.DataFrame(pa.table(columns))


def bounds_of(pieces: list[pl.DataFrame], name: str, chance: random.Random) -> Bounds:
    """As a footer has them: without NaN, at times wider than the values or missing."""
    kind = TYPES[name][0]
    ends: list[tuple[Any, Any]] = []
    for piece in pieces:
        values = [v for v in piece[name].to_list() if v is not None and v == v]
        lowest = ("" if name == "s" else min(values)) if values and chance.random() < 0.2 else min(values, default=None)
        ends.append((None, None) if chance.random() < 0.1 else (lowest, max(values, default=None)))
    nulls = [None if chance.random() < 0.1 else piece[name].null_count() for piece in pieces]
    return Bounds(pa.array([a for a, _ in ends], kind), pa.array([b for _, b in ends], kind), nulls)


def some_condition(chance: random.Random, depth: int = 0) -> pl.Expr:
    kind = chance.randrange(11 if depth < 2 else 8)
    name = chance.choice(list(TYPES))
    column, constants = pl.col(name), TYPES[name][2]
    one, other = chance.choice(constants), chance.choice(constants)
    if kind < 3:
        compare: Callable[[Any, Any], Any] = chance.choice(
            [
                lambda a, b: a > b,
                lambda a, b: a >= b,
                lambda a, b: a < b,
                lambda a, b: a <= b,
                lambda a, b: a == b,
                lambda a, b: a != b,
                lambda a, b: pl.lit(b) < a,
                lambda a, b: ~(a <= b),
                lambda a, b: ~(a == b),
                lambda a, b: a.ne_missing(b),
                lambda a, b: a.alias("other") > b,
            ]
        )
        return compare(column, one)
    if kind == 3:
        return column.is_between(pl.lit(one), pl.lit(other), closed=chance.choice(["both", "left", "right", "none"]))
    if kind == 4:
        exact = [c for c in constants if type(c) is type(constants[0])]
        return column.is_in([chance.choice(exact) for _ in range(chance.randrange(1, 4))])
    if kind == 5:
        return chance.choice([column.is_null(), column.is_not_null(), ~column.is_null()])
    if kind == 6:
        return chance.choice([pl.col("b"), ~pl.col("b"), pl.col("f").is_nan(), pl.col("i") > pl.col("i") * 2])
    if kind == 7:
        return chance.choice([pl.col("s").str.starts_with("a"), pl.lit(True), column == column, column > pl.lit(None)])
    left, right = some_condition(chance, depth + 1), some_condition(chance, depth + 1)
    return chance.choice([left & right, left & right, left | right, ~(left & right)])


@pytest.mark.parametrize("block", range(4))
def test_no_piece_with_a_row_that_fulfils_it_is_left_out(block: int) -> None:
    left_out = 0
    for seed in range(block * 250, block * 250 + 250):
        chance = random.Random(seed)
        pieces = [some_rows(chance) for _ in range(chance.randrange(1, 6))]
        condition = some_condition(chance)
        bounds = {name: bounds_of(pieces, name, chance) for name in TYPES if chance.random() < 0.95}
        test = BoundsTest(RowFilter(condition, {name: name for name in TYPES}))
        may = test.may_hold(Pieces([piece.height for piece in pieces], bounds))
        left_out += len(may) - int(may.sum())
        for piece, read in zip(pieces, may, strict=True):
            assert read or piece.filter(condition).height == 0, f"seed {seed}: {condition} of {piece.to_dicts()}"
    assert left_out > 80


def numbers(low: int | float | None, high: int | float | None, nulls: int | None = 0, kind: Any = None) -> Pieces:
    return Pieces(
        [10], {"n": Bounds(pa.array([low], kind or pa.int64()), pa.array([high], kind or pa.int64()), [nulls])}
    )


N = pl.col("n")


@pytest.mark.parametrize(
    ("condition", "pieces", "expected"),
    [
        (N > 5, numbers(1, 5), False),
        (N > 5, numbers(1, 6), True),
        (N > 4.5, numbers(1, 5), True),
        (N < 1, numbers(1, 5), False),
        (pl.lit(5) < N, numbers(1, 5), False),
        (~(N <= 5), numbers(1, 5), False),
        (N == 7, numbers(1, 5), False),
        (N != 3, numbers(3, 3), True),  # bounds need not be values
        ((N > 5) & pl.col("other").str.starts_with("a"), numbers(1, 5), False),
        ((N > 5) | pl.col("other").str.starts_with("a"), numbers(1, 5), True),
        ((N > 5) | (N < 1), numbers(1, 5), False),
        (N.is_in([0, 9]), numbers(1, 5), False),
        (N.is_in([0, 3, 9]), numbers(1, 5), True),
        (N.is_in(list(range(100, 300))), numbers(1, 5), False),
        (N.is_in(list(range(300))), numbers(1, 5), True),
        (N.is_between(6, 9), numbers(1, 5), False),
        (N.is_between(5, 9, closed="right"), numbers(1, 5), False),
        (N.is_null(), numbers(1, 5, 0), False),
        (N.is_null(), numbers(1, 5, None), True),
        (N.is_not_null(), numbers(None, None, 10), False),
        (N > 5, numbers(None, None, 10), False),
        (N > 5, numbers(None, None, 9), True),
        (N > 5, numbers(1.0, 2.0, 0, pa.float64()), True),  # NaN counts as the largest
        ((N > 5) & (N < 9), numbers(1.0, 2.0, 0, pa.float64()), False),
        (N < 1, numbers(1.0, 2.0, 0, pa.float64()), False),
        (N == NAN, numbers(1.0, 2.0, 0, pa.float64()), True),
        (N.is_in([7.0, 8.0]), numbers(1.0, 2.0, 0, pa.float64()), False),
        (N + 1 > 9, numbers(1, 2), True),
    ],
)
def test_what_bounds_say(condition: pl.Expr, pieces: Pieces, expected: bool) -> None:
    assert BoundsTest(RowFilter(condition, {"n": "n", "other": "other"})).may_hold(pieces).tolist() == [expected]


def test_a_filter_of_which_bounds_say_nothing_is_known_as_such() -> None:
    names = {"n": "n"}
    assert BoundsTest(RowFilter(N > 5, names)).tells
    assert not BoundsTest(RowFilter(N + 1 > 5, names)).tells
    assert not BoundsTest(RowFilter(N.map_batches(lambda s: s > 1, return_dtype=pl.Boolean), names)).tells


def test_filters_of_a_step_are_told_in_the_names_of_its_input() -> None:
    schema = pa.schema({"a": pa.int64(), "b": pa.int64(), "c": pa.int64()})
    stages = (
        Filter(pl.col("a") > 1),
        Rename({"a": "x"}),
        WithColumns([(pl.col("b") * 2).alias("b")]),
        Filter(pl.col("x") < 9),
        Filter(pl.col("b") < 9),  # is no column of the input any more
        Select([pl.col("x").alias("y"), "c"]),
        Filter((pl.col("y") == 4) & (pl.col("c") == 1)),
        Drop(["c"]),
    )
    found = ExpressionSpec(schema, stages).row_filters
    assert [dict(one.columns) for one in found] == [{"a": "a"}, {"x": "a"}, {"y": "a", "c": "c"}]
