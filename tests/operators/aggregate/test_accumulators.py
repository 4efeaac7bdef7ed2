"""What every accumulator promises, of every kind and type."""

import numpy as np
import pyarrow as pa
import pytest

from cutwater.operators.aggregate.accumulators import Accumulator, Aggregate, aggregate_functions
from keyed_world import AGGREGATES, VALUES, aggregate, fitting

CASES = [(kind, name) for kind in AGGREGATES for name in fitting(kind)]
each_case = pytest.mark.parametrize(("kind", "name"), CASES)

EXAMPLES: dict[str, list[object]] = {
    "list": [[1], [2, 3], None, [4]],
    "struct": [{"x": 1}, None, {"x": 2}, {"x": 3}],
    "string": ["b", None, "a", "c"],
    "binary": [b"b", None, b"a", b"c"],
    "bool": [True, None, False, True],
}


def rows_of(name: str) -> pa.RecordBatch:
    arrow, _ = VALUES[name]
    if name in EXAMPLES:
        return pa.record_batch({"v": pa.array(EXAMPLES[name], arrow)})
    whole = pa.int64() if pa.types.is_temporal(arrow) and not pa.types.is_date32(arrow) else pa.int32()
    return pa.record_batch({"v": pa.array([2, None, 1, 3], whole).cast(arrow)})


def filled(kind: str, name: str) -> tuple[Accumulator, Aggregate, pa.RecordBatch]:
    """Group ids 0 and 1 hold values, 2 has seen a null only."""
    batch = rows_of(name)
    of = Aggregate("x", kind, "v")
    accumulator = of.accumulator(batch.schema)
    accumulator.reserve(3)
    nulls = batch["v"].is_null().to_numpy(zero_copy_only=False)
    accumulator.update(np.where(nulls, 2, [0, 1, 0, 1]).astype(np.int32), batch)
    return accumulator, of, batch


def test_every_aggregate_has_an_oracle() -> None:
    assert list(AGGREGATES) == list(aggregate_functions())


@pytest.mark.parametrize("kind", AGGREGATES)
def test_a_snapshot_knows_an_aggregate_by_its_text(kind: str) -> None:
    for column in ("v", "a column (s), 2**9 registers"):
        of = Aggregate("x", kind, column, 9 if kind == "approx_count_distinct" else None)
        assert Aggregate.parse("x", of.description(pa.schema({column: VALUES[fitting(kind)[-1]][0]}))) == of
    assert Aggregate.parse("x", str(Aggregate("x", "count"))) == Aggregate("x", "count")


@each_case
def test_a_stored_state_says_what_it_is_of(kind: str, name: str) -> None:
    """Without the type of the column: an accumulator for another type with the same state has the same results."""
    accumulator, of, _ = filled(kind, name)
    gids = np.arange(3, dtype=np.int32)
    state = accumulator.state(gids)
    assert len(state) == len(of.function.state(pa.float64()))
    column = of.function.column_of([array.type for array in state])
    assert list(of.function.state(column).values()) == [array.type for array in state]
    results = state[0] if of.function.plain else of.function.results(of, state)
    assert results.equals(accumulator.result(gids))
    assert results.type == of.function.result_type(column)


@each_case
def test_results_and_states_have_the_declared_types(kind: str, name: str) -> None:
    accumulator, of, batch = filled(kind, name)
    gids = np.array([2, 0, 1], np.int32)
    result = accumulator.result(gids)
    result.validate(full=True)
    assert result.type == of.result_type(batch.schema)
    assert result[0].as_py() == aggregate(kind, [])
    fields = of.state_fields(batch.schema)
    assert [array.type for array in accumulator.state(gids)] == [field.type for field in fields]


@each_case
def test_a_restored_state_replaces_what_a_gid_held(kind: str, name: str) -> None:
    accumulator, _, _ = filled(kind, name)
    everything = np.arange(3, dtype=np.int32)
    turned = everything[::-1].copy()
    state, before = accumulator.state(everything), accumulator.result(everything)
    accumulator.restore(turned, state)
    assert accumulator.result(turned).equals(before)
    accumulator.restore(everything, state)
    assert accumulator.result(everything).equals(before)


@each_case
def test_kept_gids_are_renumbered_and_the_others_start_anew(kind: str, name: str) -> None:
    accumulator, _, _ = filled(kind, name)
    kept = accumulator.result(np.array([1], np.int32))
    accumulator.keep(np.array([1], np.int32))
    accumulator.reserve(5000)
    assert accumulator.result(np.array([0], np.int32)).equals(kept)
    fresh = accumulator.result(np.arange(1, 5000, dtype=np.int32))
    assert set(fresh.to_pylist()) == {aggregate(kind, [])}
