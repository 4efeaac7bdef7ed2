"""Deduplicate against a model in plain Python: first and latest rows, for ever and within a time, over restores."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal
from unittest import mock

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_world import Change, Running, pieces, table_after, values

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import BuildError, DataError
from cutwater.operators.aggregate import keyed_operator
from cutwater.operators.ranking.deduplicate_spec import DeduplicateSpec
from keyed_world import cuts

SCHEMA = pa.schema({"t": pa.timestamp("us"), "k": pa.string(), "v": pa.list_(pa.int32()), "row": pa.int64()})
Row = tuple[int, str]


def batch_of(rows: list[Row], first: int = 0) -> pa.RecordBatch:
    columns = [
        pa.array([r[0] for r in rows], pa.timestamp("us")),
        pa.array([r[1] for r in rows], pa.string()),
        pa.array([None if i % 3 == 0 else [i] for i in range(len(rows))], pa.list_(pa.int32())),
        pa.array(range(first, first + len(rows)), pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def spec_of(keep: Literal["first", "last"], within: int | None = None) -> DeduplicateSpec:
    return DeduplicateSpec(SCHEMA, ("k",), keep, None if within is None else "t", within)


class Model:
    """As the specification words it, one row at a time."""

    def __init__(self, keep: str, within: int | None) -> None:
        self.keep, self.within = keep, within
        self.watermark = MIN_WATERMARK
        self.held: dict[object, tuple[float, Change]] = {}
        self.late: list[Change] = []
        self.dropped = 0

    def rows(self, batch: pa.RecordBatch) -> list[Change]:
        out: list[Change] = []
        times = batch["t"].cast(pa.int64()).to_pylist()
        for time, row in zip(times, (tuple(r.values()) for r in batch.to_pylist()), strict=True):
            if self.within is not None and time <= self.watermark:
                self.late.append(row)
                continue
            until, before = self.held.get(row[1], (None, None))
            again = until is not None and time < until
            until = until if again else float("inf") if self.within is None else time + self.within
            if self.keep == "first":
                out += [] if again else [row]
                self.dropped += again
            else:
                assert before is not None or not again
                out += [("-U", *before), ("+U", *row)] if again and before else [("+I", *row)]
            self.held[row[1]] = (until, row)  # type: ignore[assignment]
        return out


ROWS = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["", "a", "b", "c"])), max_size=14)
EVENTS = st.lists(ROWS | st.integers(-5, 60), min_size=1, max_size=10)


@mock.patch.object(keyed_operator, "_SLACK_KEYS", 2)  # keys are swept all the time
@given(
    events=EVENTS,
    keep=st.sampled_from(["first", "last"]),
    within=st.sampled_from([None, 1, 10, 10, 35]),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_any_history_cut_anywhere_and_restored_anywhere_equals_the_model(
    events: list[list[Row] | int], keep: Literal["first", "last"], within: int | None, data: st.DataObject
) -> None:
    model, running = Model(keep, within), Running(spec_of(keep, within), [("k",)])
    late: list[Change] = []
    count = 0
    for event in events:
        if data.draw(st.integers(0, 3)) == 0:
            running = running.restored(data.draw(st.integers(1, 3)), lambda s: data.draw(st.permutations(s)))
        if isinstance(event, int):
            model.watermark = max(model.watermark, event)
            assert running.watermark(event) == []
            continue
        batch = batch_of(event, count)
        count += len(event)
        outputs = [o for part in cuts(batch, data.draw(pieces(len(event)))) for o in running.rows(part)]
        expected = model.rows(batch)
        late += values(outputs, 1)
        by_key = 2 if keep == "last" else 1
        for key in ("", "a", "b", "c"):  # keys may lie in different subtasks: only their own order is promised
            ours = [c for c in values(outputs) if c[by_key] == key]
            assert ours == [c for c in expected if c[by_key] == key]
    assert sorted(late, key=lambda r: r[3]) == model.late  # type: ignore[arg-type,return-value]
    counted = {"rows_late": len(late), "rows_duplicate": model.dropped}
    assert running.count() == Counter({name: n for name, n in counted.items() if n})


@pytest.mark.parametrize("parallelism", [1, 2])
def test_it_agrees_with_duckdb(parallelism: int) -> None:
    random = np.random.default_rng(3)
    rows = [(int(t), f"k{k}") for t, k in zip(range(6000), random.integers(0, 900, 6000), strict=True)]
    batch = batch_of(rows)
    table = pa.Table.from_batches([batch])
    for keep in ("first", "last"):
        running = Running(spec_of(keep), [("k",)], parallelism)  # type: ignore[arg-type]
        outputs = []
        for begin in range(0, 6000, 700):
            outputs += running.rows(batch.slice(begin, 700))
            running = running.restored(3 - parallelism)
        order = "asc" if keep == "first" else "desc"
        rank = f"row_number() over (partition by k order by row {order})"
        query = f"select k, row from t qualify {rank} = 1 order by row"
        expected = duckdb.from_arrow(table).query("t", query).fetchall()
        if keep == "last":
            got = [(r[1], r[3]) for r in table_after((*c[:3], None, c[4]) for c in values(outputs))]
        else:
            got = [(r[1], r[3]) for r in values(outputs)]
        assert sorted(got, key=lambda r: r[1]) == expected  # type: ignore[arg-type,return-value]


def test_keys_are_forgotten_when_the_watermark_has_passed_their_time() -> None:
    running = Running(spec_of("last", 100), [("k",)])
    for i in range(60):
        running.rows(batch_of([(1000 * i + j % 7, f"k{i}-{j}") for j in range(1000)]))
        running.watermark(1000 * i + 200)
    operator: Any = running._operators[0]
    assert len(operator._table) < 10_000
    assert values(running.rows(batch_of([(60_000, "k0-0")])))[0][0] == "+I"


def test_mistakes_are_found_when_it_is_built_and_nulls_when_they_come() -> None:
    with pytest.raises(BuildError, match="keep is 'first' or 'last'"):
        DeduplicateSpec(SCHEMA, ("k",), "latest")  # type: ignore[arg-type]
    with pytest.raises(BuildError, match="no such event-time column"):
        DeduplicateSpec(SCHEMA, ("k",), "first", "time", 5)
    with pytest.raises(BuildError, match="not timestamp"):
        DeduplicateSpec(SCHEMA, ("k",), "first", "row", 5)
    with pytest.raises(BuildError, match="within 0 us"):
        DeduplicateSpec(SCHEMA, ("k",), "first", "t", 0)
    with pytest.raises(BuildError, match="a column is named 'op' already"):
        DeduplicateSpec(pa.schema({"k": pa.int8(), "op": pa.string()}), ("k",), "last")
    running = Running(spec_of("first", 5), [("k",)])
    nulls = pa.RecordBatch.from_pylist([{"t": None, "k": "a", "row": 1}], schema=SCHEMA)
    with pytest.raises(DataError, match="event time 't' is null in row 0"):
        running.rows(nulls)
