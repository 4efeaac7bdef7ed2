"""Every aggregate over every type of column: what is accepted is computed, by DuckDB's word; the rest is refused."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import duckdb
import pyarrow as pa
import pytest

import cutwater as cw
from cutwater.api import aggregates
from cutwater.errors import BuildError
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.running_spec import RunningAggregateSpec
from keyed_world import opened, rows_of

DAY = dt.date(2026, 1, 1)
MOMENT = dt.datetime(2026, 1, 1, 12)
VALUES = {
    **{kind: [3, None, 1, 3] for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())},
    **{kind: [3, None, 1, 3] for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())},
    **{kind: [1.5, None, -2.0, 1.5] for kind in (pa.float32(), pa.float64())},
    pa.bool_(): [True, None, False, True],
    pa.decimal128(10, 2): [Decimal("1.50"), None, Decimal("-2.00"), Decimal("1.50")],
    pa.decimal128(38, 0): [Decimal(10**30), None, Decimal(-1), Decimal(10**30)],
    pa.string(): ["b", None, "a", "b"],
    pa.binary(): [b"b", None, b"a", b"b"],
    pa.date32(): [DAY, None, DAY - dt.timedelta(1), DAY],
    pa.timestamp("us"): [MOMENT, None, MOMENT - dt.timedelta(1), MOMENT],
    pa.timestamp("us", "UTC"): [t and t.replace(tzinfo=dt.UTC) for t in (MOMENT, None, MOMENT, MOMENT)],
    pa.list_(pa.int64()): [[1], None, [], [1]],
    pa.struct({"x": pa.int64()}): [{"x": 1}, None, {"x": 2}, {"x": 1}],
    pa.map_(pa.string(), pa.int64()): [[("a", 1)], None, [], [("a", 1)]],
}
NUMBER = "CAST(v AS DOUBLE)"
SQL = {
    "all": "bool_and(v)",
    "any": "bool_or(v)",
    "mean": f"avg({NUMBER})",
    "stddev": f"stddev_samp({NUMBER})",
    "variance": f"var_samp({NUMBER})",
    "count_distinct": "count(DISTINCT v)",
    "approx_count_distinct": "count(DISTINCT v)",
    "first": "first(v ORDER BY i) FILTER (v IS NOT NULL)",
    "last": "last(v ORDER BY i) FILTER (v IS NOT NULL)",
}


@pytest.mark.parametrize("kind", VALUES, ids=str)
@pytest.mark.parametrize("name", aggregates.__all__)
def test_it_is_refused_or_computed(name: str, kind: pa.DataType) -> None:
    rows = pa.record_batch({"k": pa.array([1] * 4), "i": pa.array(range(4)), "v": pa.array(VALUES[kind], kind)})
    call = getattr(cw, name)("v")
    made = Aggregate("a", call.kind, "v", call.precision)
    try:
        wanted = made.result_type(rows.schema)
    except BuildError:
        with pytest.raises(BuildError, match=rf"column 'v' of type .* does not fit. {call.kind} takes "):
            RunningAggregateSpec(rows.schema, ("k",), (made,))
        return
    found = rows_of(opened(RunningAggregateSpec(rows.schema, ("k",), (made,))).process(0, rows))[-1]["a"]
    # Texts compare by their bytes in both; DuckDB gives decimals, huge numbers and maps another form.
    with duckdb.connect() as db:
        db.execute("SET TimeZone = 'UTC'")
        table = pa.Table.from_batches([rows])
        db.register("rows", table)
        answer = db.execute(f"SELECT {SQL.get(name, f'{name}(v)')} AS a FROM rows").to_arrow_table().column("a")
    expected = answer.cast(wanted).to_pylist()[0]
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)
