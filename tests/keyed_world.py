"""What the tests of the keyed operators share: a context, cutting, snapshots, and aggregates in plain Python."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from cutwater.operators.base import Operator, OperatorSpec, Outputs
from cutwater.state.keys import hash_keys, key_group_range, key_groups
from cutwater.state.segments import GROUP_COLUMN, Segment
from subtask_context import Subtask


def opened(spec: OperatorSpec, subtask: int = 0, parallelism: int = 1) -> Operator:
    operator = spec.build()
    operator.open(Subtask(subtask, parallelism))
    return operator


def snapshot(operator: Operator) -> list[Segment]:
    """Segments, checked for what the seam promises."""
    frozen = operator.freeze(1)
    segments = list(frozen.segments())
    frozen.release()
    for segment in segments:
        groups = segment.batch.column(GROUP_COLUMN).to_pylist()
        assert groups == sorted(groups)
        assert segment.key_groups is not None
        assert all(segment.key_groups[0] <= g < segment.key_groups[1] for g in groups)
        segment.batch.validate(full=True)
    return segments


def rescaled(spec: OperatorSpec, segments: Iterable[Segment], parallelism: int) -> list[Operator]:
    """The operator restored at another parallelism: every subtask is offered everything."""
    everything = list(segments)
    operators = [opened(spec, subtask, parallelism) for subtask in range(parallelism)]
    for operator in operators:
        operator.restore(everything)
    return operators


def owner(batch: pa.RecordBatch, keys: Sequence[str], parallelism: int, groups: int = 16) -> list[int]:
    """The subtask of each row, by the ranges of the groups."""
    found = key_groups(hash_keys([batch.column(k) for k in keys]), groups).tolist()
    ranges = [key_group_range(s, parallelism, groups) for s in range(parallelism)]
    return [next(s for s, r in enumerate(ranges) if g in r) for g in found]


def feed(operators: Sequence[Operator], batch: pa.RecordBatch, keys: Sequence[str]) -> list[Outputs]:
    """Each subtask processes its rows of the batch; the outputs of each."""
    owners = owner(batch, keys, len(operators))
    masks = [pa.array([o == subtask for o in owners], pa.bool_()) for subtask in range(len(operators))]
    return [operator.process(0, batch.filter(mask)) for operator, mask in zip(operators, masks, strict=True)]


def cuts(batch: pa.RecordBatch, at: Iterable[int]) -> list[pa.RecordBatch]:
    """The batch in pieces; equal cuts give empty pieces."""
    bounds = [0, *sorted(min(a, batch.num_rows) for a in at), batch.num_rows]
    return [batch.slice(a, b - a) for a, b in itertools.pairwise(bounds)]


def rows_of(outputs: Outputs, output: int = 0) -> list[dict[str, object]]:
    for _, batch in outputs:
        batch.validate(full=True)
    return [row for number, batch in outputs if number == output for row in batch.to_pylist()]


@dataclass(frozen=True)
class Near:
    """A number that a result may miss by a little."""

    value: float
    by: float


def spread(kind: str, seen: list[object]) -> object:
    """Variance or standard deviation in exact arithmetic; doubles miss it in proportion to the largest square."""
    less = 0 if kind.endswith("_pop") else 1
    if len(seen) <= less:
        return None
    if any(isinstance(v, float) and math.isnan(v) for v in seen):
        return math.nan
    exact = [Fraction(v) for v in seen]  # type: ignore[arg-type]
    mean = sum(exact) / len(exact)
    variance = float(sum((v - mean) ** 2 for v in exact) / (len(exact) - less))
    miss = 1e-13 * float(max(abs(v) for v in exact)) ** 2
    if kind.startswith("variance"):
        return Near(variance, miss)
    return Near(math.sqrt(variance), math.sqrt(variance + miss) - math.sqrt(variance))


def same(a: object, b: object) -> bool:
    """Equal, one NaN like another, floats up to the last digits (sums of floats depend on order only there)."""
    if isinstance(b, Near):
        return isinstance(a, int | float) and abs(a - b.value) <= b.by + 1e-9 * abs(b.value)
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    return type(a) is type(b) and a == b


VALUES: dict[str, tuple[pa.DataType, st.SearchStrategy[object]]] = {
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int64": (pa.int64(), st.integers(-(2**50), 2**50)),
    "uint64": (pa.uint64(), st.integers(0, 2**50)),
    "bool": (pa.bool_(), st.booleans()),
    "float32": (pa.float32(), st.floats(-1e6, 1e6, width=32)),
    "float64": (pa.float64(), st.floats(-1e6, 1e6) | st.just(math.nan)),
    "date32": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(datetime.UTC))),
    "duration": (pa.duration("us"), st.timedeltas(datetime.timedelta(-9999), datetime.timedelta(9999))),
    "string": (pa.string(), st.text(max_size=6)),
    "binary": (pa.large_binary(), st.binary(max_size=6)),
    "decimal": (pa.decimal128(12, 2), st.decimals(-999, 999, places=2)),
    "list": (pa.list_(pa.int16()), st.lists(st.integers(-9, 9), max_size=3)),
    "struct": (pa.struct([("x", pa.int8())]), st.fixed_dictionaries({"x": st.integers(0, 9)})),
}

NUMERIC = ("int8", "int64", "uint64", "bool", "float32", "float64")
UNORDERED = ("list", "struct")


ORDERED = tuple(name for name in VALUES if name not in UNORDERED)
KEYS = tuple(name for name in ORDERED if name != "duration")

Oracle = Callable[[list[Any]], object]


def seen_or(empty: object, of: Oracle) -> Oracle:
    """The oracle for values of which some are null."""

    def oracle(values: list[Any]) -> object:
        seen = [v for v in values if v is not None]
        return of(seen) if seen else empty

    return oracle


def spark_order(value: Any) -> tuple[bool, Any]:
    nan = isinstance(value, float) and math.isnan(value)
    return nan, 0 if nan else value


def distinct(seen: list[Any]) -> int:
    return len({"NaN" if isinstance(v, float) and math.isnan(v) else v for v in seen})


AGGREGATES: dict[str, tuple[tuple[str, ...], Oracle]] = {
    "count": (tuple(VALUES), seen_or(0, len)),
    "sum": (NUMERIC, seen_or(None, sum)),
    "mean": (NUMERIC, seen_or(None, lambda seen: sum(map(float, seen)) / len(seen))),
    "min": (ORDERED, seen_or(None, lambda seen: min(seen, key=spark_order))),
    "max": (ORDERED, seen_or(None, lambda seen: max(seen, key=spark_order))),
    "first": (tuple(VALUES), seen_or(None, lambda seen: seen[0])),
    "last": (tuple(VALUES), seen_or(None, lambda seen: seen[-1])),
    "any": (("bool",), seen_or(None, any)),
    "all": (("bool",), seen_or(None, all)),
    "variance": (NUMERIC, seen_or(None, lambda seen: spread("variance", seen))),
    "variance_pop": (NUMERIC, seen_or(None, lambda seen: spread("variance_pop", seen))),
    "stddev": (NUMERIC, seen_or(None, lambda seen: spread("stddev", seen))),
    "stddev_pop": (NUMERIC, seen_or(None, lambda seen: spread("stddev_pop", seen))),
    "count_distinct": (KEYS, seen_or(0, distinct)),
    "approx_count_distinct": (KEYS, seen_or(0, lambda seen: Near(distinct(seen), 3))),
}
"""The contract suite of aggregates, by kind: the types of column that fit, and the result in plain Python."""


def aggregate(kind: str, values: list[object]) -> object:
    """An aggregate over values in order, nulls among them, in plain Python."""
    return AGGREGATES[kind][1](values)


def fitting(kind: str) -> tuple[str, ...]:
    """Names of ``VALUES`` that an aggregate takes."""
    return AGGREGATES[kind][0]
