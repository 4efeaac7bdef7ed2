"""foreach_batch, collect, discard and the name ``files``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
from sink_identity import SCHEMA, Identity, numbers

from cutwater.connectors.base import Json, Sink
from cutwater.connectors.discard import DiscardSink, LatencyHistogram, discard
from cutwater.connectors.files.files import files
from cutwater.connectors.files.sink import CollectSink, FileSink, read_result
from cutwater.connectors.foreach_batch import ForeachBatchSink
from cutwater.errors import BuildError, ConfigError, CutwaterError, InvariantError, StorageError, UserCodeError


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.failures = 0

    def __call__(self, table: pa.Table, *key: int) -> None:
        self.calls.append((table["n"].to_pylist(), *key))
        if self.failures:
            self.failures -= 1
            raise ValueError("no such host")


def checkpoint(sink: Sink, writer: object, checkpoint_id: int, *rows: int, final: bool = False) -> list[Json]:
    if rows:
        writer.write(numbers(*rows))  # type: ignore[attr-defined]
    return writer.pre_commit(checkpoint_id, final)().handles  # type: ignore[attr-defined]


def commit(sink: Sink, checkpoint_id: int, handles: list[Json]) -> None:
    sink.committer(SCHEMA, "uid", "out").commit(checkpoint_id, handles)


# ------------------------------------------------------------------------------------------------------- foreach_batch


def test_the_function_is_called_once_per_checkpoint_that_has_rows(tmp_path: Path) -> None:
    fn = Recorder()
    sink = ForeachBatchSink(fn).bind(str(tmp_path / "rows"))
    writer = sink.writer(SCHEMA, Identity(), [])
    for checkpoint_id, rows in ((1, (1, 2)), (2, ()), (3, (3,))):
        handles = checkpoint(sink, writer, checkpoint_id, *rows)
        assert not any(key == checkpoint_id for _, key in fn.calls), "not before the checkpoint is complete"
        commit(sink, checkpoint_id, handles)
    commit(sink, 4, checkpoint(sink, writer, 4, final=True))
    assert fn.calls == [([1, 2], 1), ([3], 3)]
    sink.committer(SCHEMA, "uid", "out").finish(1)
    assert not (tmp_path / "rows" / "_cutwater").exists()


def test_after_a_failure_the_same_rows_come_with_the_same_id(tmp_path: Path) -> None:
    fn = Recorder()
    fn.failures = 1
    sink = ForeachBatchSink(fn).bind(str(tmp_path))
    handles = checkpoint(sink, sink.writer(SCHEMA, Identity(), []), 7, 1, 2)
    with pytest.raises(UserCodeError) as caught:
        commit(sink, 7, handles)
    assert "checkpoint 7" in str(caught.value)
    assert "ValueError: no such host" in str(caught.value)
    assert "in __call__" in str(caught.value), "the user's own traceback"
    commit(sink, 7, handles)
    commit(sink, 7, handles)
    assert fn.calls == [([1, 2], 7)] * 2


def test_rows_of_an_aborted_checkpoint_keep_their_id_and_come_first(tmp_path: Path) -> None:
    fn = Recorder()
    sink = ForeachBatchSink(fn).bind(str(tmp_path))
    writer = sink.writer(SCHEMA, Identity(), [])
    checkpoint(sink, writer, 1, 1)
    commit(sink, 2, list(reversed(checkpoint(sink, writer, 2, 2))))
    assert fn.calls == [([1], 1), ([2], 2)]
    assert checkpoint(sink, writer, 3) == []


def test_the_restore_of_a_finished_job_calls_nothing(tmp_path: Path) -> None:
    fn = Recorder()
    sink = ForeachBatchSink(fn).bind(str(tmp_path / "rows"))
    handles = checkpoint(sink, sink.writer(SCHEMA, Identity(), []), 1, 1, final=True)
    for _ in range(2):
        commit(sink, 1, handles)
    assert fn.calls == [([1], 1)]


def test_parallel_calls_are_told_apart_by_the_subtask(tmp_path: Path) -> None:
    fn = Recorder()
    sink = ForeachBatchSink(fn, parallelism=2).bind(str(tmp_path))
    handles = [h for i in range(2) for h in checkpoint(sink, sink.writer(SCHEMA, Identity(i, 2, i), []), 1, i)]
    commit(sink, 1, handles)
    assert fn.calls == [([0], 1, 0), ([1], 1, 1)]


def test_staged_rows_that_vanish_are_an_error(tmp_path: Path) -> None:
    sink = ForeachBatchSink(Recorder()).bind(str(tmp_path / "rows"))
    writer = sink.writer(SCHEMA, Identity(), [])
    handles = checkpoint(sink, writer, 1, 1)
    (tmp_path / "rows").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="not handed over"):
        commit(sink, 1, handles)
    with pytest.raises(StorageError, match="not handed over"):
        checkpoint(sink, writer, 2)


def test_foreach_batch_says_which_guarantee_it_gives() -> None:
    assert ForeachBatchSink(print).guarantee == "exactly-once"
    assert ForeachBatchSink(print, idempotent=False).guarantee == "at-least-once"


def test_a_function_with_other_arguments_is_refused() -> None:
    ForeachBatchSink(lambda table, checkpoint_id: None).check(SCHEMA)
    with pytest.raises(BuildError, match=r"fn\(table, checkpoint_id\)"):
        ForeachBatchSink(lambda table: None).check(SCHEMA)
    with pytest.raises(BuildError, match=r"fn\(table, checkpoint_id, subtask\)"):
        ForeachBatchSink(lambda table, checkpoint_id: None, parallelism=2).check(SCHEMA)
    with pytest.raises(ConfigError):
        ForeachBatchSink(print, parallelism=0)


@pytest.mark.parametrize("sink", [ForeachBatchSink(print), CollectSink()], ids=["foreach_batch", "collect"])
def test_a_sink_without_a_place_must_be_bound_first(sink: Sink) -> None:
    with pytest.raises(InvariantError, match="bound"):
        sink.writer(SCHEMA, Identity(), [])


# ------------------------------------------------------------------------------------------------------------- collect


def test_a_collected_result_has_the_rows_in_order_and_the_streams_own_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = pa.schema({"at": pa.timestamp("ns"), "name": pa.large_string()})
    sink = CollectSink().bind(str(tmp_path / "result"))
    writer = sink.writer(schema, Identity(), [])
    times = [3000, 1000, None, *range(2000, 42_000, 1000)]
    expected = pa.table({"at": times, "name": [None if time is None else str(time) for time in times]}).cast(schema)
    for checkpoint_id, batch in enumerate(expected.to_batches(max_chunksize=1), 1):
        writer.write(batch)
        writer.roll()
        handles = writer.pre_commit(checkpoint_id, checkpoint_id == len(times))().handles
        sink.committer(schema, "uid", "out").commit(checkpoint_id, handles)
    sink.committer(schema, "uid", "out").finish(1)
    assert len(os.listdir(tmp_path / "result")) == len(times)
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listed(path), reverse=True))
    assert read_result(str(tmp_path / "result"), schema).equals(expected)


def test_an_empty_result_is_a_table_too(tmp_path: Path) -> None:
    sink = CollectSink().bind(str(tmp_path / "result"))
    commit(sink, 1, checkpoint(sink, sink.writer(SCHEMA, Identity(), []), 1, final=True))
    sink.committer(SCHEMA, "uid", "out").finish(1)
    assert read_result(str(tmp_path / "result"), SCHEMA).equals(SCHEMA.empty_table())


def test_a_result_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        read_result(str(tmp_path / "nowhere"), SCHEMA)
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(StorageError, match=str(tmp_path)):
        read_result(str(tmp_path), SCHEMA)


# ------------------------------------------------------------------------------------------------------------- discard


def test_discarded_rows_are_counted_exactly_once_over_restores_and_rescaling() -> None:
    sink = discard()
    writers = [sink.writer(SCHEMA, Identity(i, 2, i), []) for i in range(2)]
    states: list[Json] = []
    for writer, rows in zip(writers, ((1, 2), (3,)), strict=True):
        writer.write(numbers(*rows))
        states.append(writer.pre_commit(1, False)().state)
        writer.write(numbers(9, 9, 9))  # of an epoch that never completes
    heir = sink.writer(SCHEMA, Identity(incarnation=3), states)
    heir.write(numbers(4))
    assert heir.pre_commit(2, True)().state["rows"] == 4


def test_a_count_belongs_to_the_barrier_and_not_to_the_time_of_writing() -> None:
    writer = discard().writer(SCHEMA, Identity(), [])
    writer.write(numbers(1))
    make_durable = writer.pre_commit(1, False)
    writer.write(numbers(2))
    assert make_durable().state["rows"] == 1


@pytest.mark.parametrize("kind", [pa.int64(), pa.timestamp("ms", tz="UTC"), pa.timestamp("ns")], ids=str)
def test_latency_is_that_of_the_youngest_row_of_each_batch(kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 10_000_000_000)
    schema = pa.schema({"born": kind})
    sink = DiscardSink(latency_column="born")
    sink.check(schema)
    writer = sink.writer(schema, Identity(), [])
    for latency_ms in range(1, 101):
        born = pa.array([1_000_000_000, 10_000_000_000 - latency_ms * 1_000_000, None])
        writer.write(pa.RecordBatch.from_arrays([born.cast(pa.timestamp("ns")).cast(kind)], schema=schema))
    writer.write(pa.RecordBatch.from_pydict({"born": [None]}, schema))
    stats = writer.pre_commit(1, True)().state["stats"]
    assert stats["batches"] == 100
    assert stats["p50_ms"] == pytest.approx(50, rel=0.02)
    assert stats["p99_ms"] == pytest.approx(99, rel=0.02)
    assert stats["max_ms"] == pytest.approx(100, rel=0.02)


def test_histograms_of_subtasks_add_up() -> None:
    one, two = LatencyHistogram(), LatencyHistogram()
    one.add(1_000_000)
    two.add(100_000_000)
    both = LatencyHistogram([*one.buckets(), *two.buckets()])
    assert both.total == 2
    assert both.percentile_ms(100) == pytest.approx(100, rel=0.02)


def test_a_latency_column_must_exist_and_tell_a_time() -> None:
    with pytest.raises(BuildError, match="no column 'born'"):
        discard(latency_column="born").check(SCHEMA)
    with pytest.raises(BuildError, match="is string"):
        discard(latency_column="born").check(pa.schema({"born": pa.string()}))


# --------------------------------------------------------------------------------------------------------------- files


def test_files_become_a_file_sink() -> None:
    sink = files("/data/out", roll_interval_ms="1m", format="parquet").as_sink()
    assert sink == FileSink("/data/out", roll_interval_ms=60_000)


def test_files_become_a_source_with_the_sources_own_options(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    path.write_text("n\n1\n")
    assert files(path, schema="n long").as_source().schema == SCHEMA
    assert files([path, str(path)]).path == [str(path), str(path)]
    with pytest.raises(ConfigError, match=r"as a source has no option 'roll_rows'"):
        files(path, roll_rows=1).as_source()


def test_options_are_checked_against_what_the_files_are_used_for() -> None:
    with pytest.raises(ConfigError, match=r"no option 'roll_row'.*Did you mean 'roll_rows'"):
        files("/data/out", roll_row=1).as_sink()
    with pytest.raises(CutwaterError, match="format"):
        files("/data/out", format="orc").as_sink()
    with pytest.raises(BuildError, match="one directory"):
        files(["/a", "/b"]).as_sink()
