"""What every accumulator promises, of every kind and type."""

import numpy as np
import pyarrow as pa
import pytest
from keyed_world import VALUES, fitting

from cutwater.operators.aggregate.accumulators import KINDS, Accumulator, Aggregate, make_accumulator

CASES = [(kind, name) for kind in KINDS for name in fitting(kind)]
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
    """Slots 0 and 1 hold values, 2 has seen a null only."""
    batch = rows_of(name)
    aggregate = Aggregate("x", kind, "v")
    accumulator = make_accumulator(aggregate, batch.schema)
    accumulator.reserve(3)
    nulls = batch["v"].is_null().to_numpy(zero_copy_only=False)
    accumulator.update(np.where(nulls, 2, [0, 1, 0, 1]).astype(np.int32), batch)
    return accumulator, aggregate, batch


@each_case
def test_results_and_states_have_the_declared_types(kind: str, name: str) -> None:
    accumulator, aggregate, batch = filled(kind, name)
    slots = np.array([2, 0, 1], np.int32)
    result = accumulator.result(slots)
    result.validate(full=True)
    assert result.type == aggregate.result_type(batch.schema)
    assert result[0].as_py() == (0 if "count" in kind else None)
    fields = aggregate.state_fields(batch.schema)
    assert [array.type for array in accumulator.state(slots)] == [field.type for field in fields]


@each_case
def test_a_restored_state_replaces_what_a_slot_held(kind: str, name: str) -> None:
    accumulator, _, _ = filled(kind, name)
    everything = np.arange(3, dtype=np.int32)
    turned = everything[::-1].copy()
    state, before = accumulator.state(everything), accumulator.result(everything)
    accumulator.restore(turned, state)
    assert accumulator.result(turned).equals(before)
    accumulator.restore(everything, state)
    assert accumulator.result(everything).equals(before)


@each_case
def test_kept_slots_are_renumbered_and_the_others_start_anew(kind: str, name: str) -> None:
    accumulator, _, _ = filled(kind, name)
    kept = accumulator.result(np.array([1], np.int32))
    accumulator.keep(np.array([1], np.int32))
    accumulator.reserve(5000)
    assert accumulator.result(np.array([0], np.int32)).equals(kept)
    fresh = accumulator.result(np.arange(1, 5000, dtype=np.int32))
    assert set(fresh.to_pylist()) == {0 if "count" in kind else None}
