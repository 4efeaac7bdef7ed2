"""State with a right digest and wrong columns, as somebody without the job's key can make it, is an error of ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from stage_world import SCHEMA, SPECS, Stage

from cutwater.errors import CorruptSnapshotError, StorageError, UserCodeError
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.running_spec import RunningAggregateSpec
from cutwater.operators.base import OperatorSpec
from cutwater.runtime.worker.restore import Restore
from cutwater.state.segments import GROUP_COLUMN, Segment
from cutwater.storage.snapshot.segment_files import SnapshotWriter
from memory_store import MemoryStore

AGGREGATES = (Aggregate("n", "count"), Aggregate("texts", "count_distinct", "k"), Aggregate("mean", "mean", "v"))
ALL: dict[str, OperatorSpec] = SPECS | {"aggregate": RunningAggregateSpec(SCHEMA, ("k",), AGGREGATES)}


def restore_of(segments: list[Segment], inline_below: int = 0) -> Restore:
    store = MemoryStore()
    writer = SnapshotWriter(store, "job", 7, 1, 0, inline_below)
    entries = writer.add("step", 0, segments)
    writer.close()
    manifest = SimpleNamespace(entries=entries, checkpoint_id=7)
    return Restore(store, "job", cast(Any, manifest), True, cast(Any, None))


def segments_of(spec: OperatorSpec) -> list[Segment]:
    stage, dice = Stage(spec, 0, 1), random.Random(1)
    for _ in range(12):
        stage.change(dice)
    frozen = stage.freeze(1)
    return list(frozen.segments())


def renamed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.rename_columns([n if n == GROUP_COLUMN else f"{n}?" for n in batch.schema.names])


def shortened(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(batch.schema.names[:-1])


def texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    names = [n for n in batch.schema.names if n != GROUP_COLUMN]
    columns = {n: batch.column(n) for n in batch.schema.names if n == GROUP_COLUMN}
    return pa.record_batch(columns | {n: ["x"] * batch.num_rows for n in names})


def nulls(batch: pa.RecordBatch) -> pa.RecordBatch:
    fields = list(batch.schema)
    return pa.record_batch([pa.nulls(batch.num_rows, f.type) for f in fields], schema=pa.schema(fields))


def numbers(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = {GROUP_COLUMN: pa.array([0] * batch.num_rows, pa.uint16())}
    rest = [n for n in batch.schema.names if n != GROUP_COLUMN]
    return pa.record_batch(columns | {n: pa.array([2**62] * batch.num_rows) for n in rest})


def others(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"x": ["a", "b"], GROUP_COLUMN: pa.array([9, 3], pa.uint16())})


def ungrouped(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.drop_columns([GROUP_COLUMN])


CHANGES: dict[str, Callable[[pa.RecordBatch], pa.RecordBatch]] = {
    f.__name__: f for f in (renamed, shortened, texts, nulls, numbers, others, ungrouped)
}


@pytest.mark.parametrize("name", ALL)
def test_state_with_other_columns_is_restored_or_refused_with_its_file(name: str) -> None:
    """Whatever a step makes of it, it is no raw error of a library."""
    segments = [s for s in segments_of(ALL[name]) if s.batch.num_rows]
    assert segments
    restore_of(segments).into(Stage(ALL[name], 0, 1).operator, "step", 0, 1, range(16))
    refused: dict[str, StorageError] = {}
    for kind, change in CHANGES.items():
        for segment in segments:
            wrong = [replace(s, batch=change(s.batch)) if s is segment else s for s in segments]
            try:
                restore_of(wrong).into(Stage(ALL[name], 0, 1).operator, "step", 0, 1, range(16))
            except StorageError as error:
                refused[kind] = error
    for kind, error in refused.items():
        assert error.step == "step", kind
        assert "job/chk-7/1-0.data of checkpoint 7" in error.message, kind
        assert error.hint, (kind, error)
    assert {"shortened", "texts", "others"} <= refused.keys()


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def restore(self, segments: Any) -> None:
        list(segments)
        raise self.error


def test_the_error_tells_step_file_cause_and_what_to_do() -> None:
    segments = [s for s in segments_of(ALL["aggregate"]) if s.batch.num_rows]
    for inline_below, where in ((0, "job/chk-7/1-0.data"), (1 << 20, "the manifest")):
        restore = restore_of(segments, inline_below)
        with pytest.raises(CorruptSnapshotError) as caught:
            restore.into(cast(Any, Failing(KeyError("n"))), "step", 0, 1, range(16))
        assert str(caught.value) == (
            f"step 'step': what lies in {where} of checkpoint 7 is not what the step keeps (KeyError: 'n'). Somebody "
            'changed it, unless the step fails by itself: restore an older checkpoint (restore="DIR/JOB@ID"). '
            "With a key (key_file=) such state is refused before it is read."
        )


@pytest.mark.parametrize("error", [OSError("no space left"), MemoryError(), UserCodeError("a function failed")])
def test_what_says_nothing_of_the_state_is_not_called_damage(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        restore_of([]).into(cast(Any, Failing(error)), "step", 0, 1, range(16))
    assert not isinstance(caught.value, CorruptSnapshotError)
