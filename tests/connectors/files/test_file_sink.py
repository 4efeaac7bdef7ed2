from __future__ import annotations

import errno
import io
import itertools
import os
import shutil
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sink_identity import SCHEMA, Identity, numbers, parts

from cutwater.connectors.base import Json, PreCommit, SinkSnapshot
from cutwater.connectors.files import part_draft
from cutwater.connectors.files import sink as file_sink
from cutwater.connectors.files.part_commit import part_stem, part_suffix, write_part
from cutwater.connectors.files.part_formats import CsvParts, JsonParts, ParquetParts, PartFormat
from cutwater.connectors.files.sink import FileSink, PartWriter
from cutwater.connectors.staging import Guard, staging_beside
from cutwater.errors import BuildError, ConfigError, CorruptSnapshotError, DataError, StorageError
from cutwater.storage.store.seal import PLAIN, Seal
from damage import flipped, truncated


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


class Clock:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr(file_sink.time, "monotonic", lambda: self.now)


def checkpoint(writer: PartWriter, checkpoint_id: int, *rows: int, final: bool = False) -> PreCommit:
    if rows:
        writer.write(numbers(*rows))
    return writer.pre_commit(checkpoint_id, final)()


def commit(sink: FileSink, checkpoint_id: int, handles: list[Json], uid: str = "uid") -> None:
    sink.committer(SCHEMA, uid, "out").commit(checkpoint_id, handles)


def snapshot(checkpoint_id: int, *made: PreCommit) -> SinkSnapshot:
    return SinkSnapshot(checkpoint_id, [h for part in made for h in part.handles], [part.state for part in made])


def finish(sink: FileSink, incarnation: int = 1, uid: str = "uid") -> None:
    sink.committer(SCHEMA, uid, "out").finish(incarnation)


def test_t4_a_file_ends_by_age_and_not_at_every_checkpoint(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    sink = FileSink(str(out), roll_interval_ms="10s")
    writer = sink.writer(SCHEMA, Identity(), [])
    for checkpoint_id in range(1, 80):
        clock.now += 0.125
        assert checkpoint(writer, checkpoint_id, checkpoint_id).handles == []
    clock.now += 0.25
    commit(sink, 80, checkpoint(writer, 80, 80).handles)
    assert parts(out) == [list(range(1, 81))]


@pytest.mark.parametrize("part_format", [ParquetParts(), CsvParts()], ids=["parquet", "csv"])
def test_a_damaged_part_never_becomes_visible_by_a_restore(out: Path, part_format: PartFormat) -> None:
    """Every byte flipped, every truncation: found before anything is renamed, also of the healthy neighbour."""
    sink = FileSink(str(out), part_format, roll_interval_ms=0)
    made = [checkpoint(sink.writer(SCHEMA, Identity(subtask), []), 1, *range(9)) for subtask in (0, 1)]
    staged = out / "_cutwater" / "uid" / "out" / made[1].handles[0]["staged"]
    body = staged.read_bytes()
    committer = sink.committer(SCHEMA, "uid", "out")
    restored = snapshot(1, *made)
    for damaged in itertools.chain(flipped(body), truncated(body)):
        staged.write_bytes(damaged)
        with pytest.raises(CorruptSnapshotError, match=f"{staged.name}.*differs from its digest"):
            committer.settle(restored, [restored], 2)
        with pytest.raises(CorruptSnapshotError, match=f"{staged.name}.*differs from its digest"):
            committer.settle_subtasks(restored, [restored], 2, {0, 1})
    assert not [name for name in os.listdir(out) if name.startswith("part-")]
    staged.write_bytes(body)
    committer.settle(restored, [restored], 2)
    assert len([name for name in os.listdir(out) if name.startswith("part-")]) == 2


def test_t4_age_counts_on_over_a_restore(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    sink = FileSink(str(out), roll_interval_ms="10s")
    writer = sink.writer(SCHEMA, Identity(), [])
    writer.write(numbers(1))
    clock.now += 6
    state = checkpoint(writer, 1).state
    clock.now = 0.0  # another machine's clock
    heir = sink.writer(SCHEMA, Identity(incarnation=2), [state])
    clock.now += 3.9
    assert checkpoint(heir, 2).handles == []
    clock.now += 0.1
    commit(sink, 3, checkpoint(heir, 3).handles)
    assert parts(out) == [[1]]


def test_t4_a_file_ends_by_size_and_what_is_too_small_waits(out: Path) -> None:
    sink = FileSink(str(out), roll_rows=4, roll_interval_ms="1h")
    writer = sink.writer(SCHEMA, Identity(), [])
    first = checkpoint(writer, 1, 1, 2, 3)
    assert first.handles == []
    for n in range(4, 11):
        writer.write(numbers(n))
    second = checkpoint(writer, 2)
    commit(sink, 2, second.handles)
    assert [len(part) >= 4 for part in parts(out)] == [True] * len(parts(out))
    last = checkpoint(writer, 3, final=True)
    commit(sink, 3, last.handles)
    assert sorted(n for part in parts(out) for n in part) == list(range(1, 11))
    finish(sink)
    assert not (out / "_cutwater").exists()


def test_size_in_bytes_rolls_too(out: Path) -> None:
    writer = FileSink(str(out), roll_bytes=4096, roll_interval_ms="1h").writer(SCHEMA, Identity(), [])
    assert checkpoint(writer, 1, *range(100)).handles == []
    assert len(checkpoint(writer, 2, *range(1000)).handles) == 1


def test_roll_leaves_nothing_open_for_a_savepoint(out: Path) -> None:
    sink = FileSink(str(out), roll_interval_ms="1h")
    writer = sink.writer(SCHEMA, Identity(), [])
    writer.write(numbers(1))
    writer.roll()
    made = checkpoint(writer, 1)
    assert made.state is None
    commit(sink, 1, made.handles)
    assert parts(out) == [[1]]
    assert checkpoint(writer, 2, 2).handles == [], "only that once"


def test_t1_a_part_is_named_by_job_step_subtask_checkpoint_and_incarnation(out: Path) -> None:
    sink = FileSink(str(out), roll_interval_ms=0)
    identity = Identity(subtask=3, parallelism=4, incarnation=17, job_uid="job-one", step="my-out.v2")
    (handle,) = checkpoint(sink.writer(SCHEMA, identity, []), 9, 1).handles
    assert handle["final"].split("-", 2)[2] == "my-out.v2-00003-0000000009-0000000017-0000.parquet"
    other = Identity(subtask=3, parallelism=4, incarnation=17, job_uid="job-two", step="my-out.v2")
    (another,) = checkpoint(sink.writer(SCHEMA, other, []), 9, 1).handles
    assert handle["final"] != another["final"]


def test_rows_of_an_aborted_checkpoint_come_with_the_next_one_even_after_a_crash(out: Path) -> None:
    sink = FileSink(str(out), roll_interval_ms=0)
    writer = sink.writer(SCHEMA, Identity(), [])
    writer.write(numbers(1))
    writer.pre_commit(1, False)  # aborted before the snapshot thread came to it
    checkpoint(writer, 2, 2)  # aborted after
    third = checkpoint(writer, 3, 3)
    sink.committer(SCHEMA, "uid", "out").settle(snapshot(3, third), [snapshot(3, third)], 2)
    assert parts(out) == [[1], [2], [3]]
    assert checkpoint(writer, 4).handles == []


def test_a_failed_conversion_is_repeated_by_the_next_checkpoint(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = FileSink(str(out), roll_interval_ms=0)
    writer = sink.writer(SCHEMA, Identity(), [])
    writer.write(numbers(1))
    make_durable = writer.pre_commit(1, False)
    with monkeypatch.context() as patch:
        patch.setattr(part_draft.PartDraft, "encode", lambda *_: (_ for _ in ()).throw(StorageError("full")))
        with pytest.raises(StorageError):
            make_durable()
    commit(sink, 2, checkpoint(writer, 2, 2).handles)
    assert parts(out) == [[1], [2]]


def test_t2_leftovers_go_and_what_the_checkpoint_names_stays(out: Path) -> None:
    sink = FileSink(str(out), roll_rows=2, roll_interval_ms="1h")
    writer = sink.writer(SCHEMA, Identity(), [])
    chosen = checkpoint(writer, 1, 1)
    checkpoint(writer, 2, 2, 3, 4)
    sink.committer(SCHEMA, "uid", "out").settle(snapshot(1, chosen), [snapshot(1, chosen)], 2)
    assert os.listdir(out / "_cutwater/uid/out") == [chosen.state["pieces"][0]["file"]]
    heir = sink.writer(SCHEMA, Identity(incarnation=2), [chosen.state])
    commit(sink, 3, checkpoint(heir, 3, 5, final=True).handles)
    assert parts(out) == [[1, 5]]


def test_states_of_several_subtasks_merge_when_the_job_shrinks(out: Path) -> None:
    sink = FileSink(str(out), roll_interval_ms="1h")
    states = [
        checkpoint(sink.writer(SCHEMA, Identity(subtask=i, parallelism=3, incarnation=i), []), 1, i).state
        for i in range(3)
    ]
    heir = sink.writer(SCHEMA, Identity(incarnation=9), states)
    commit(sink, 2, checkpoint(heir, 2, 3, final=True).handles)
    assert parts(out) == [[0, 1, 2, 3]]
    finish(sink, 9)
    assert not (out / "_cutwater").exists()


def test_a_bounded_job_without_rows_leaves_an_empty_dataset_with_its_schema(out: Path) -> None:
    sink = FileSink(str(out))
    ends = [checkpoint(sink.writer(SCHEMA, Identity(i, 2, i), []), 1, final=True).handles for i in range(2)]
    for committed in ends:
        commit(sink, 1, committed)
    for _ in range(2):  # again: its first driver died
        finish(sink, 2)
        assert parts(out) == [[]]
    assert duckdb.sql(f"describe select * from '{out}/*.parquet'").fetchall()[0][:2] == ("n", "BIGINT")
    commit(sink, 1, ends[0] + ends[1])
    assert parts(out) == [[]]


def test_no_empty_file_where_there_are_rows(out: Path) -> None:
    sink = FileSink(str(out))
    handles = [
        checkpoint(sink.writer(SCHEMA, Identity(0, 2, 1), []), 1, final=True).handles,
        checkpoint(sink.writer(SCHEMA, Identity(1, 2, 2), []), 1, 7, final=True).handles,
    ]
    for committed in handles:
        commit(sink, 1, committed)
    finish(sink, 2)
    assert parts(out) == [[7]]
    assert [name for name in os.listdir(out) if name.startswith((".", "_"))] == []


def test_two_jobs_append_to_one_directory(out: Path) -> None:
    out.mkdir()
    pq.write_table(pa.table({"n": pa.array([0], pa.int64())}), out / "foreign.parquet")
    sink = FileSink(str(out), roll_interval_ms=0)
    sink.check(SCHEMA)
    made = {uid: checkpoint(sink.writer(SCHEMA, Identity(job_uid=uid), []), 1, 5, final=True) for uid in ("a", "b")}
    commit(sink, 1, made["a"].handles, "a")
    finish(sink, uid="a")
    assert os.listdir(out / "_cutwater") == ["b"]
    commit(sink, 1, made["b"].handles, "b")
    assert sorted(map(tuple, parts(out))) == [(0,), (5,), (5,)]


def test_a_consumer_may_take_committed_files_away(out: Path) -> None:
    sink = FileSink(str(out), roll_interval_ms=0)
    writer = sink.writer(SCHEMA, Identity(), [])
    handles = checkpoint(writer, 1, 1).handles
    commit(sink, 1, handles)
    for path in out.glob("*.parquet"):
        path.unlink()
    commit(sink, 1, handles)
    assert parts(out) == []


def test_a_finished_job_is_restored_after_its_output_was_taken_away(out: Path) -> None:
    sink = FileSink(str(out))
    handles = checkpoint(sink.writer(SCHEMA, Identity(), []), 1, 1, final=True).handles
    commit(sink, 1, handles)
    finish(sink)
    (path,) = out.glob("*.parquet")
    path.rename(out.parent / "taken")
    commit(sink, 1, handles)
    finish(sink, 2)
    assert parts(out) == []


def test_two_committers_at_once_do_no_harm(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = FileSink(str(out), roll_interval_ms=0)
    handles = checkpoint(sink.writer(SCHEMA, Identity(), []), 1, 1).handles
    real = os.rename

    def second_after_another(source: str, target: str, **folders: int) -> None:
        real(source, target, **folders)
        real(source, target, **folders)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", second_after_another)
        commit(sink, 1, handles)
    assert parts(out) == [[1]]


def test_a_foreign_file_with_a_parts_name_is_not_overwritten(out: Path) -> None:
    sink = FileSink(str(out), roll_interval_ms=0)
    (handle,) = checkpoint(sink.writer(SCHEMA, Identity(), []), 1, 1).handles
    (out / handle["final"]).write_bytes(b"mine")
    with pytest.raises(StorageError, match="another file bears this name"):
        commit(sink, 1, [handle])
    assert (out / handle["final"]).read_bytes() == b"mine"


def test_a_target_deleted_during_the_run_is_an_error_at_the_next_checkpoint(out: Path) -> None:
    sink = FileSink(str(out), roll_interval_ms="1h")
    writer = sink.writer(SCHEMA, Identity(), [])
    checkpoint(writer, 1, 1)
    shutil.rmtree(out)
    with pytest.raises(StorageError, match="removed while the job was running"):
        checkpoint(writer, 2, 2)


@pytest.mark.parametrize("deleted", ["out", "out/_cutwater"])
def test_staged_parts_deleted_before_their_commit_are_an_error(out: Path, deleted: str) -> None:
    sink = FileSink(str(out), roll_interval_ms=0)
    writer = sink.writer(SCHEMA, Identity(), [])
    handles = checkpoint(writer, 1, 1).handles
    shutil.rmtree(out.parent / deleted)
    with pytest.raises(StorageError, match=r"\(1 rows\) is lost"):
        commit(sink, 1, handles)
    with pytest.raises(StorageError, match=r"\(1 rows\) is lost"):
        checkpoint(writer, 2)


# ------------------------------------------------------------------------------------------------------ falling back


def test_t2_what_a_later_checkpoint_committed_is_taken_back_and_comes_again(out: Path) -> None:
    sink = FileSink(str(out), roll_rows=2, roll_interval_ms="1h")
    writer = sink.writer(SCHEMA, Identity(), [])
    commit(sink, 1, checkpoint(writer, 1, 1, 2).handles)
    old = checkpoint(writer, 2, 3)
    commit(sink, 3, checkpoint(writer, 3, 4).handles)  # a file with rows of checkpoints 2 and 3
    assert parts(out) == [[1, 2], [3, 4]]
    sink.committer(SCHEMA, "uid", "out").settle(snapshot(2, old), [snapshot(2, old)], 2)
    assert parts(out) == [[1, 2]]
    heir = sink.writer(SCHEMA, Identity(incarnation=2), [old.state])
    commit(sink, 4, checkpoint(heir, 4, 4, 5, final=True).handles)
    assert parts(out) == [[1, 2], [3, 4, 5]]


def test_staged_rows_stay_as_long_as_a_retained_checkpoint_needs_them(out: Path) -> None:
    sink = FileSink(str(out), roll_rows=4, roll_interval_ms="1h")
    writer = sink.writer(SCHEMA, Identity(), [])
    made = {i: checkpoint(writer, i, 2 * i, 2 * i + 1) for i in range(1, 4)}
    for i, part in made.items():
        commit(sink, i, part.handles)
    snapshots = [snapshot(i, part) for i, part in made.items()]
    committer = sink.committer(SCHEMA, "uid", "out")
    staged = staging_beside(str(out), "uid", "out").folder.names
    committer.retire(snapshots[0], snapshots[1:])
    (left,) = staged()
    assert made[3].state["pieces"][0]["file"] == left, "of checkpoint 1, whose rows are in a part, nothing is left"


def test_a_piece_that_no_checkpoint_names_goes_with_its_commit(out: Path) -> None:
    sink = FileSink(str(out), roll_interval_ms=0)
    commit(sink, 1, checkpoint(sink.writer(SCHEMA, Identity(), []), 1, 1).handles)
    assert staging_beside(str(out), "uid", "out").folder.names() == []


@pytest.mark.parametrize("moment", range(3))
def test_a_worker_that_commits_while_output_is_taken_back_changes_nothing(
    out: Path, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told of checkpoint 2 in an attempt that is over, and comes just after one of the folders was listed."""
    sink = FileSink(str(out), roll_interval_ms=0)
    writer = sink.writer(SCHEMA, Identity(), [])
    first = checkpoint(writer, 1, 1)
    commit(sink, 1, first.handles)
    second = checkpoint(writer, 2, 2)
    real, listed = os.listdir, []

    def listing(path: str) -> list[str]:
        names = real(path)
        listed.append(path)
        if len(listed) == moment + 1:
            commit(sink, 2, second.handles)
        return names

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", listing)
        sink.committer(SCHEMA, "uid", "out").settle(snapshot(1, first), [snapshot(1, first)], 2)
    assert len(listed) == 2, "the staging and the target"
    assert parts(out) == [[1]]


@pytest.mark.parametrize(
    "name",
    [
        "part-mine.parquet",
        "{stem}b-00000-0000000009-0000000001-0000.parquet",
        "{stem}00000-0000000009-0000000001-0000.parquet.tmp",
        "{other}00000-0000000009-0000000001-0000.parquet",
    ],
)
def test_t3_only_parts_of_this_job_and_step_are_taken_back(out: Path, name: str) -> None:
    out.mkdir()
    foreign = out / name.format(stem=part_stem("uid", "out"), other=part_stem("other", "out"))
    foreign.write_bytes(b"mine")
    own = out / (part_stem("uid", "out") + part_suffix(0, 9, 1, 0, ".csv.gz"))  # of whatever format it was
    own.touch()
    FileSink(str(out)).committer(SCHEMA, "uid", "out").settle(None, [], 2)
    assert not own.exists()
    assert foreign.read_bytes() == b"mine"


@pytest.mark.parametrize("parts", [ParquetParts("snappy"), JsonParts(), CsvParts()])
def test_a_full_disk_is_named_while_a_part_is_written(parts: PartFormat) -> None:
    full = io.FileIO("/dev/full", "w")
    with pytest.raises(StorageError, match=r"'/dev/full'.*No space left.*free space"):
        write_part(full, "/dev/full", parts, SCHEMA, iter([numbers(*range(100_000))]))


def test_a_full_disk_at_the_commit_leaves_the_rows_staged(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = FileSink(str(out), roll_interval_ms=0)
    handles = checkpoint(sink.writer(SCHEMA, Identity(), []), 1, 1).handles
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(StorageError, match="cannot commit"):
            commit(sink, 1, handles)
    assert parts(out) == []
    commit(sink, 1, handles)
    assert parts(out) == [[1]]


def test_timestamps_are_written_as_spark_means_them(out: Path) -> None:
    schema = pa.schema({"zoned": pa.timestamp("us", tz="UTC"), "naive": pa.timestamp("ms")})
    sink = FileSink(str(out), roll_interval_ms=0)
    writer = sink.writer(schema, Identity(), [])
    writer.write(pa.RecordBatch.from_pydict({"zoned": [-1], "naive": [-1]}, schema))
    sink.committer(schema, "uid", "out").commit(1, writer.pre_commit(1, False)().handles)
    (path,) = out.glob("*.parquet")
    types = {column.name: str(column.logical_type) for column in pq.ParquetFile(path).schema}
    assert "isAdjustedToUTC=true, timeUnit=microseconds" in types["zoned"]
    assert "isAdjustedToUTC=false, timeUnit=microseconds" in types["naive"]
    assert duckdb.sql(f"select epoch_us(zoned), epoch_us(naive) from '{path}'").fetchall() == [(-1, -1000)]


def test_a_null_in_a_required_column_is_a_data_error(out: Path) -> None:
    schema = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    writer = FileSink(str(out), roll_interval_ms=0).writer(schema, Identity(), [])
    writer.write(pa.RecordBatch.from_arrays([pa.array([None], pa.int64())], schema=schema))
    with pytest.raises(DataError, match="cannot be written as Parquet"):
        writer.pre_commit(1, False)()


def test_a_target_that_cannot_be_written_is_found_when_the_dataflow_is_built(out: Path) -> None:
    FileSink(str(out / "deeper")).check(SCHEMA)
    assert not out.exists(), "building makes nothing"
    out.write_text("a file")
    with pytest.raises(BuildError, match="not a directory"):
        FileSink(str(out)).check(SCHEMA)
    with pytest.raises(BuildError, match=f"'{out}' is not a directory"):
        FileSink(str(out / "below" / "it")).check(SCHEMA)
    with pytest.raises(BuildError, match="every worker mounts"):
        FileSink("s3://bucket/out")


def test_a_target_without_write_permission_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(out.parent))
    with pytest.raises(BuildError, match=f"no right to write in '{out.parent}'"):
        FileSink(str(out / "deeper")).check(SCHEMA)


def test_a_target_with_a_column_of_another_type_is_refused(out: Path) -> None:
    out.mkdir()
    pq.write_table(pa.table({"n": ["text"], "extra": [1]}), out / "foreign.parquet")
    with pytest.raises(BuildError, match="column 'n' is string; this stream's is int64"):
        FileSink(str(out)).check(SCHEMA)


@pytest.mark.parametrize("wrong", [{"roll_rows": 0}, {"roll_bytes": 0}, {"roll_interval_ms": "soon"}])
def test_wrong_settings_are_refused(wrong: dict[str, object], out: Path) -> None:
    with pytest.raises(ConfigError):
        FileSink(str(out), **wrong)  # type: ignore[arg-type]


def test_a_relative_path_means_the_drivers_directory(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(out.parent)
    sink = FileSink("out")
    monkeypatch.chdir("/")
    assert sink.path == str(out)


@pytest.mark.parametrize("before", [PLAIN, Seal([b"another key, as long"])], ids=["no key", "another key"])
def test_rows_staged_without_the_key_go_into_a_part_at_the_next_checkpoint(out: Path, before: Seal) -> None:
    """Else every checkpoint until a file is full or old enough would name a piece that needs the other key, or none."""
    key = b"0123456789abcdef"
    both = Seal([key, *before.reveal()[0]], accept_unsealed=not before.keyed)
    sink = FileSink(str(out), roll_interval_ms="1h")
    state = checkpoint(sink.guarded(Guard(before)).writer(SCHEMA, Identity(), []), 1, 1, 2).state
    made = checkpoint(sink.guarded(Guard(both)).writer(SCHEMA, Identity(incarnation=2), [state]), 2)
    assert made.state is None
    sink.guarded(Guard(Seal([key]))).committer(SCHEMA, "uid", "out").commit(2, made.handles)
    assert parts(out) == [[1, 2]]
