"""Tables as a sink: files with all that Iceberg wants to know, and commits that happen once, whoever else writes."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.transforms import BucketTransform, DayTransform, HourTransform, MonthTransform, YearTransform
from pyspark import cloudpickle

import cutwater as cw
from connectors.sink_identity import Identity
from cutwater.connectors.base import SinkHooks, SinkSnapshot
from cutwater.connectors.iceberg import writer as writer_module
from cutwater.connectors.iceberg.commit_record import record_key
from cutwater.connectors.iceberg.sink import IcebergSink
from cutwater.errors import BuildError, ConfigError, CorruptSnapshotError, DataError, FencedError, StorageError
from iceberg_world import ROWS, Warehouse, rows_of

KEY = record_key("uid", "out")


class Step:
    """A write step as the driver and a worker see it."""

    def __init__(self, sink: IcebergSink, attempt: int = 1, schema: pa.Schema = ROWS) -> None:
        self.sink, self.schema, self.attempt = sink, schema, attempt
        self.committer = sink.committer(schema, "uid", "out")
        self.handles: dict[int, list[Any]] = {}
        self.writer: Any = None

    def begin(self, restored: int | None = None, handles: list[Any] | None = None) -> Step:
        chosen = None if restored is None else SinkSnapshot(restored, handles or [], [])
        self.committer.settle(chosen, [] if chosen is None else [chosen], self.attempt)
        self.writer = self.sink.writer(self.schema, Identity(incarnation=self.attempt), [])
        return self

    def cut(self, checkpoint_id: int, *batches: pa.RecordBatch) -> list[Any]:
        for batch in batches:
            self.writer.write(batch)
        made = self.writer.pre_commit(checkpoint_id, False)()
        assert made.state is None
        self.handles[checkpoint_id] = json.loads(json.dumps(made.handles))
        return self.handles[checkpoint_id]

    def put(self, checkpoint_id: int, *numbers: int) -> None:
        self.committer.commit(checkpoint_id, self.cut(checkpoint_id, rows_of(numbers)))


def test_rows_are_there_with_their_commit_and_once(warehouse: Warehouse) -> None:
    step = Step(warehouse.named().as_sink()).begin()
    assert SinkHooks(step.sink).commits_globally
    handles = step.cut(1, rows_of([1, 2]), rows_of([3]))
    assert warehouse.numbers() == []
    step.committer.commit(1, handles)
    step.committer.commit(1, handles)
    assert warehouse.numbers() == [1, 2, 3]
    step.committer.commit(2, handles + step.cut(2, rows_of([4])) + handles)
    assert warehouse.numbers() == [1, 2, 3, 4]
    assert warehouse.table().scan().to_arrow().sort_by("n")["text"].to_pylist() == ["t1", "t2", "t3", "t4"]
    summary = warehouse.table().current_snapshot().summary
    assert (summary[KEY], summary["added-records"]) == ("1.2", "1")
    before = len(warehouse.table().metadata.snapshots)
    step.committer.commit(3, step.cut(3))
    assert len(warehouse.table().metadata.snapshots) == before, "a checkpoint without rows makes no snapshot"
    step.writer.close()


def test_one_snapshot_for_all_subtasks_and_checkpoints(warehouse: Warehouse) -> None:
    sink = warehouse.named().as_sink()
    step = Step(sink).begin()
    other = sink.writer(ROWS, Identity(subtask=1, parallelism=2), [])
    handles: list[Any] = []
    for checkpoint_id in (1, 2, 3):
        handles += step.cut(checkpoint_id, rows_of([checkpoint_id]))
        other.write(rows_of([10 * checkpoint_id]))
        handles += other.pre_commit(checkpoint_id, False)().handles
    before = len(warehouse.table().metadata.snapshots)
    step.committer.commit(3, handles)
    assert warehouse.numbers() == [1, 2, 3, 10, 20, 30]
    assert len(warehouse.table().metadata.snapshots) == before + 1


def test_rows_of_a_checkpoint_that_was_aborted_come_with_the_next(warehouse: Warehouse) -> None:
    step = Step(warehouse.named().as_sink()).begin()
    step.writer.write(rows_of([1]))
    late = step.writer.pre_commit(1, False)  # its snapshot thread never came to it
    step.writer.write(rows_of([2]))
    handles = step.writer.pre_commit(2, False)().handles
    assert late().handles == []
    step.committer.commit(2, handles)
    assert warehouse.numbers() == [1, 2]


def test_files_are_told_of_as_the_library_itself_would(warehouse: Warehouse) -> None:
    """Statistics, field ids and sizes; the oracle reads the file's own footer."""
    schema = pa.schema(
        {
            "i": pa.int32(), "n": pa.int64(), "x": pa.float64(), "f": pa.float32(), "b": pa.bool_(), "d": pa.date32(),
            "t": pa.timestamp("us"), "z": pa.timestamp("us", "UTC"), "s": pa.string(), "y": pa.binary(),
            "m": pa.decimal128(12, 3), "l": pa.list_(pa.struct({"k": pa.string()})),
            "o": pa.map_(pa.string(), pa.int64()),
        }
    )  # fmt: skip
    day = dt.date(2026, 1, 31)
    at = dt.datetime(2026, 1, 31, 12, 30, 1, 5)
    rows = {
        "i": [1, None, -7], "n": [2**40, 5, None], "x": [0.5, float("nan"), -1.0], "f": [1.5, None, 2.5],
        "b": [True, False, None], "d": [day, None, dt.date(1969, 1, 1)], "t": [at, None, at], "z": [at, at, None],
        "s": ["x" * 40, "ö" * 30, None], "y": [b"\xff" * 20, b"", None], "m": [decimal.Decimal("-1.250"), None, None],
        "l": [[{"k": "a"}], [], None], "o": [[("a", 1)], None, []],
    }  # fmt: skip
    step = Step(warehouse.named().as_sink(), schema=schema).begin()
    step.committer.commit(1, step.cut(1, *[pa.RecordBatch.from_pydict(rows, schema)] * 3))
    table = warehouse.table()
    read = table.scan().to_arrow().slice(0, 3).to_pydict()
    assert repr(read["x"]) == repr(rows["x"])
    read["l"][2] = None  # which the library reads as an empty list: see the query below
    assert {**read, "x": 0} == {**rows, "x": 0, "z": [at and at.replace(tzinfo=dt.UTC) for at in rows["z"]]}
    (found,) = (task.file for task in table.scan().plan_files())
    told = parquet_file_to_data_file(table.io, table.metadata, found.file_path)
    for name in (
        "record_count", "file_size_in_bytes", "column_sizes", "value_counts", "null_value_counts", "lower_bounds",
        "upper_bounds", "split_offsets", "file_format", "content",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(told, name), name
    read = warehouse.by_duckdb("SELECT n, s, l, o FROM files WHERE i = 1")
    assert read == [(2**40, "x" * 40, [{"k": "a"}], {"a": 1})] * 3
    assert warehouse.by_duckdb("SELECT l, o FROM files WHERE n IS NULL") == [(None, {})] * 3


TIMES = {"year": YearTransform(), "month": MonthTransform(), "day": DayTransform(), "hour": HourTransform()}


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")], ids=str)
@pytest.mark.parametrize("name", TIMES)
def test_partitions_by_time_are_those_of_the_specification(warehouse: Warehouse, name: str, kind: pa.DataType) -> None:
    """The oracle: the library's transform of one value."""
    if name == "hour" and pa.types.is_date(kind):
        return
    rng = np.random.default_rng(7)
    us = [int(n) for n in rng.integers(-(2**48), 2**51, 60)] + [0, -1, 3_600_000_000, -3_600_000_001]
    values = pa.array([None, *us], pa.timestamp("us")).cast(pa.timestamp("us", getattr(kind, "tz", None)))
    schema = pa.schema({"n": pa.int64(), "at": kind})
    column = values.cast(kind, safe=False)
    rows = pa.RecordBatch.from_arrays([pa.array(range(len(column)), pa.int64()), column], schema=schema)
    step = Step(warehouse.named(partition_by=f"{name}(at)").as_sink(), schema=schema).begin()
    step.committer.commit(1, step.cut(1, rows))
    assert warehouse.numbers() == list(range(len(column)))
    table = warehouse.table()
    transform = TIMES[name].transform(table.schema().find_field("at").field_type)
    by_number = dict(enumerate(column.to_pylist()))
    seen = set()
    for task in table.scan().plan_files():
        path = task.file.file_path.removeprefix("file://")
        inside = {transform(by_number[n]) for n in pa.parquet.ParquetFile(path).read(["n"])["n"].to_pylist()}
        assert inside == {task.file.partition[0]}
        assert not inside & seen
        seen |= inside
    for wanted in (us[3], us[40]):
        at = pa.scalar(wanted, pa.timestamp("us")).cast(values.type).as_py()
        literal = at.date().isoformat() if pa.types.is_date(kind) else at.isoformat()
        found = table.scan(row_filter=f"at == '{literal}'").to_arrow()["n"].to_pylist()
        assert [by_number[n] for n in found] == [at.date() if pa.types.is_date(kind) else at] * len(found) != []


def test_partitions_by_values(warehouse: Warehouse) -> None:
    schema = pa.schema({"n": pa.int64(), "s": pa.string(), "b": pa.bool_(), "d": pa.decimal128(9, 2), "t": pa.date32()})
    count = 240
    rows = pa.RecordBatch.from_pydict(
        {
            "n": range(count),
            "s": [None if n % 7 == 0 else ("a/b=c" if n % 2 else "ü %") for n in range(count)],
            "b": [n % 3 == 0 for n in range(count)],
            "d": [decimal.Decimal(n % 2) / 4 for n in range(count)],
            "t": [dt.date(2026, 1, 1 + n % 2) for n in range(count)],
        },
        schema,
    )
    step = Step(warehouse.named(partition_by=["s", "b", "d", "t"]).as_sink(), schema=schema).begin()
    step.committer.commit(1, step.cut(1, rows.slice(0, 100), rows.slice(100)))
    assert warehouse.numbers() == list(range(count))
    scan = warehouse.table().scan(row_filter="s == 'a/b=c' and b == true and t == '2026-01-02'")
    assert sorted(scan.to_arrow()["n"].to_pylist()) == [n for n in range(count) if n % 6 == 3 and n % 7]
    assert len(list(scan.plan_files())) == 1
    assert warehouse.by_duckdb("SELECT count(DISTINCT (s, b, d, t)) FROM files") == [(len(warehouse.files()),)]


def test_files_end_at_the_size_that_the_table_wants(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_WAITING_BYTES", 1 << 16)
    properties = {"write.target-file-size-bytes": "100000", "write.parquet.compression-codec": "uncompressed"}
    step = Step(warehouse.named(partition_by="text", table_properties=properties).as_sink()).begin()
    rng = np.random.default_rng(3)
    for first in range(0, 60_000, 6_000):
        numbers = pa.array(rng.permutation(6_000) + first)
        texts = pa.array(["ab"[n % 2] for n in range(6_000)])
        step.writer.write(pa.RecordBatch.from_arrays([numbers, texts], schema=ROWS))
    step.committer.commit(1, step.cut(1))
    assert warehouse.numbers() == list(range(60_000))
    sizes = [task.file.file_size_in_bytes for task in warehouse.table().scan().plan_files()]
    assert len(sizes) >= 4
    assert max(sizes) < 400_000


# ------------------------------------------------------------------------------------------------- who may commit


def test_other_writers_are_no_matter(warehouse: Warehouse, before_commits: Callable[..., None]) -> None:
    step = Step(warehouse.named().as_sink()).begin()
    step.put(1, 1)
    warehouse.append([-1])
    handles = step.cut(2, rows_of([2]))
    before_commits(lambda: warehouse.append([-2]))
    step.committer.commit(2, handles)
    assert warehouse.numbers() == [-2, -1, 1, 2]


def test_a_stale_committer_cannot_repeat_a_commit(warehouse: Warehouse, before_commits: Callable[..., None]) -> None:
    """Both have seen the same state: the library's own retry would commit the rows twice."""
    step = Step(warehouse.named().as_sink()).begin()
    handles = step.cut(1, rows_of([1]))
    other = step.sink.committer(ROWS, "uid", "out")
    before_commits(lambda: other.commit(1, handles))
    step.committer.commit(1, handles)
    assert warehouse.numbers() == [1]
    assert "commit.retry.num-retries" not in warehouse.table().properties, "the table's own setting is not ours"


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("handle", ["stale", "fresh"])
def test_t5_a_driver_from_before_commits_nothing(
    warehouse: Warehouse, before_commits: Callable[..., None], handle: str, others: bool
) -> None:
    old = Step(warehouse.named().as_sink()).begin()
    old.put(1, 1)
    late = old.cut(2, rows_of([2]))
    new = Step(warehouse.named().as_sink(), attempt=2)

    def take_over() -> None:
        new.begin(1, old.handles[1])
        if others:
            warehouse.append([-1])

    if handle == "stale":
        before_commits(take_over)
    else:
        take_over()
    with pytest.raises(FencedError, match="attempt 2 of the job writes already"):
        old.committer.commit(2, late)
    with pytest.raises(FencedError):
        old.sink.committer(ROWS, "uid", "out").commit(2, late)  # one that knows no attempt of its own
    with pytest.raises(FencedError):
        old.begin(1, old.handles[1])
    new.put(3, 20)
    assert warehouse.numbers() == sorted([1, 20, *([-1] if others else [])])


def test_a_commit_whose_outcome_is_unknown_is_decided_by_the_table(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    real = SqlCatalog.commit_table

    for attempt, performed in enumerate((True, False), 1):
        step = Step(warehouse.named(f"db.t{attempt}").as_sink()).begin()
        handles = step.cut(1, rows_of([1]))

        def lost(self: Any, *arguments: Any, performed: bool = performed) -> Any:
            if performed:
                real(self, *arguments)
            raise ConnectionError("the answer is lost")

        with monkeypatch.context() as patch:
            patch.setattr(SqlCatalog, "commit_table", lost)
            with pytest.raises(StorageError, match="cannot commit: ConnectionError: the answer is lost"):
                step.committer.commit(1, handles)
        Step(step.sink, attempt=2).begin(1, handles)
        assert warehouse.numbers(f"db.t{attempt}") == [1]


def test_a_restore_commits_what_the_driver_did_not_come_to(warehouse: Warehouse) -> None:
    step = Step(warehouse.named().as_sink()).begin()
    handles = step.cut(1, rows_of([1])) + step.cut(2, rows_of([2]))
    again = Step(step.sink, attempt=2).begin(2, handles)
    before = len(warehouse.table().metadata.snapshots)
    again.begin(2, handles)
    assert (warehouse.numbers(), len(warehouse.table().metadata.snapshots)) == ([1, 2], before)
    again.put(3, 3)
    assert warehouse.numbers() == [1, 2, 3]


def test_the_record_outlives_snapshots_that_others_expire(warehouse: Warehouse) -> None:
    step = Step(warehouse.named().as_sink()).begin()
    step.put(1, 1)
    warehouse.append([-1])
    table = warehouse.table()
    table.maintenance.expire_snapshots().by_ids([s.snapshot_id for s in table.metadata.snapshots[:-1]]).commit()
    Step(step.sink, attempt=2).begin(1, step.handles[1])
    assert warehouse.numbers() == [-1, 1]


def test_the_record_is_found_in_snapshots_where_properties_were_replaced(warehouse: Warehouse) -> None:
    step = Step(warehouse.named().as_sink()).begin()
    step.put(1, 1)
    warehouse.append([-1])
    with warehouse.table().transaction() as transaction:
        transaction.remove_properties(KEY)
    step.committer.commit(1, step.handles[1])
    assert warehouse.numbers() == [-1, 1]


def test_a_record_that_is_none_is_refused(warehouse: Warehouse) -> None:
    step = Step(warehouse.named().as_sink()).begin()
    handles = step.cut(1, rows_of([1]))
    with warehouse.table().transaction() as transaction:
        transaction.set_properties({KEY: "seven"})
    with pytest.raises(CorruptSnapshotError, match=r"'seven'.*Set it back"):
        step.committer.commit(1, handles)


# ----------------------------------------------------------------------------------------------------- going back


def test_going_back_leaves_rows_of_others(warehouse: Warehouse) -> None:
    step = Step(warehouse.named(partition_by="text").as_sink()).begin()
    step.put(1, 1)
    warehouse.append([-1])
    step.put(2, 2, 22)
    warehouse.append([-2])
    step.put(3, 3)
    again = Step(step.sink, attempt=2).begin(1, step.handles[1])
    assert warehouse.numbers() == [-2, -1, 1]
    again.put(4, 2, 3)
    assert warehouse.numbers() == [-2, -1, 1, 2, 3]
    assert again.committer.takes_back
    Step(step.sink, attempt=3).begin(1, step.handles[1])
    assert warehouse.numbers() == [-2, -1, 1]
    Step(step.sink, attempt=4).begin(None)
    assert warehouse.numbers() == [-2, -1]


def test_going_back_by_checkpoints_of_one_commit(warehouse: Warehouse) -> None:
    """Slow commits bring several checkpoints in one snapshot; each is told from the others all the same."""
    step = Step(warehouse.named().as_sink()).begin()
    step.committer.commit(3, [h for n in (1, 2, 3) for h in step.cut(n, rows_of([n]))])
    Step(step.sink, attempt=2).begin(2, step.handles[1] + step.handles[2])
    assert warehouse.numbers() == [1, 2]


def test_rows_that_others_have_rewritten_are_not_doubled(warehouse: Warehouse) -> None:
    step = Step(warehouse.named().as_sink()).begin()
    step.put(1, 1)
    step.put(2, 2)
    step.put(3, 3)
    whole = warehouse.table().scan().to_arrow()
    warehouse.table().overwrite(whole)  # as a compaction does
    for restored, fails in ((3, False), (2, True), (1, True)):
        again = Step(step.sink, attempt=10 - restored)
        if fails:
            with pytest.raises(StorageError, match=r"goes back to checkpoint \d, but \d files .* rewritten or removed"):
                again.begin(restored, step.handles[restored])
        else:
            again.begin(restored, step.handles[restored])
        assert warehouse.numbers() == [1, 2, 3]


def test_a_table_that_was_made_again_does_not_get_rows_of_the_old_one(warehouse: Warehouse) -> None:
    step = Step(warehouse.named().as_sink()).begin()
    handles = step.cut(1, rows_of([1]))
    warehouse.catalog.drop_table("db.t")
    with pytest.raises(StorageError, match=r"there is no Iceberg table 'db.t'"):
        step.committer.commit(1, handles)
    warehouse.make()
    with pytest.raises(StorageError, match="dropped and made again: 1 rows of checkpoint 1"):
        step.committer.commit(1, handles)


def test_a_partitioning_that_changes_meanwhile(warehouse: Warehouse) -> None:
    step = Step(warehouse.named().as_sink()).begin()
    handles = step.cut(1, rows_of([1]))
    with warehouse.table().update_spec() as update:
        update.add_identity("text")
    with pytest.raises(StorageError, match="partitioned anew"):
        step.committer.commit(1, handles)


def test_handles_that_name_others_files_are_refused(warehouse: Warehouse) -> None:
    step = Step(warehouse.named().as_sink()).begin()
    (handle,) = step.cut(1, rows_of([1]))
    for change in ({"path": "file:///etc/passwd"}, {"checkpoint_id": 2}, {"incarnation": 7}, {"path": 3}):
        with pytest.raises(CorruptSnapshotError):
            step.committer.commit(1, [{**handle, **change}])
    step.sink.committer(ROWS, "another", "out").commit(1, [handle])  # T3
    assert warehouse.numbers() == []


def test_snapshots_are_expired_on_request_and_only_ours(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutwater.connectors.iceberg import committer as committer_module

    monkeypatch.setattr(committer_module, "_EXPIRE_EVERY", 4)
    step = Step(warehouse.named(expire_after="1ms").as_sink()).begin()
    step.put(1, 1)
    table = warehouse.table()
    tagged = table.current_snapshot().snapshot_id
    table.manage_snapshots().create_tag(tagged, "kept").commit()
    warehouse.append([-1])
    foreign = warehouse.table().current_snapshot().snapshot_id
    for n in range(2, 9):
        step.put(n, n)
    left = [snapshot.snapshot_id for snapshot in warehouse.table().metadata.snapshots]
    assert {tagged, foreign} <= set(left)
    assert len(left) <= 6
    assert warehouse.numbers() == [-1, *range(1, 9)]


# ---------------------------------------------------------------------------------------------------- what is told


def test_what_does_not_fit_is_found_when_the_flow_is_built(warehouse: Warehouse) -> None:
    warehouse.make(schema=pa.schema({"n": pa.int64(), "text": pa.string(), "at": pa.timestamp("us", "UTC")}))
    sink = warehouse.named().as_sink()
    sink.check(pa.schema({"text": pa.large_string(), "n": pa.int16()}))
    for schema, told in (
        ({"m": pa.int64()}, r"has no column 'm'.*evolve=True.*There are: n, text"),
        ({"n": pa.string()}, r"'n' is string, but int64 in iceberg table 'db.t'"),
        ({"at": pa.timestamp("us")}, r"'at' is timestamp\[us\], but timestamp\[us, tz=UTC\]"),
        ({"n": pa.uint64()}, r"Iceberg has no uint64"),
        ({"n": pa.duration("s")}, r"cannot be written"),
    ):
        with pytest.raises(BuildError, match=told):
            sink.check(pa.schema(schema))
    with pytest.raises(BuildError, match="no such column 'day' to partition by"):
        warehouse.named("db.new", partition_by="day").as_sink().check(ROWS)


def test_tables_that_are_not_written(warehouse: Warehouse) -> None:
    warehouse.made_v3()
    with pytest.raises(BuildError, match="format version 3, whose row ids are not written"):
        warehouse.named("db.v3").as_sink().check(ROWS)
    spec = PartitionSpec(PartitionField(1, 1000, BucketTransform(4), "bucket"))
    schema = warehouse.make("db.plain").schema()
    warehouse.catalog.create_table("db.buckets", schema, partition_spec=spec)
    with pytest.raises(BuildError, match=r"partitioned by bucket\[4\] of 'n', which is not written"):
        warehouse.named("db.buckets").as_sink().check(ROWS)
    required = pa.schema([pa.field("n", pa.int64(), nullable=False), pa.field("text", pa.string())])
    warehouse.make("db.required", required)
    with pytest.raises(BuildError, match="requires column 'n'"):
        warehouse.named("db.required").as_sink().check(pa.schema({"text": pa.string()}))
    step = Step(warehouse.named("db.required").as_sink()).begin()
    with pytest.raises(DataError, match=r"column 'n' is null, but iceberg table 'db.required' requires it"):
        step.writer.write(pa.RecordBatch.from_pydict({"n": [None], "text": ["x"]}, ROWS))


def test_a_table_of_the_first_format_version(warehouse: Warehouse) -> None:
    warehouse.make(properties={"format-version": "1"})
    step = Step(warehouse.named().as_sink()).begin()
    step.put(1, 1)
    step.put(2, 2)
    Step(step.sink, attempt=2).begin(1, step.handles[1])
    assert warehouse.numbers() == [1]


def test_columns_are_added_on_request(warehouse: Warehouse) -> None:
    warehouse.make(schema=pa.schema({"n": pa.int32()}))
    warehouse.table().append(pa.table({"n": pa.array([-1], pa.int32())}))
    sink = warehouse.named(evolve=True).as_sink()
    sink.check(ROWS)
    with pytest.raises(BuildError, match="'n' is string, but int32"):
        sink.check(pa.schema({"n": pa.string()}))
    step = Step(sink).begin()
    step.put(1, 2**40)
    assert warehouse.table().scan().to_arrow().sort_by("n").to_pylist() == [
        {"n": -1, "text": None},
        {"n": 2**40, "text": f"t{2**40}"},
    ]
    narrow = Step(sink, attempt=2, schema=pa.schema({"n": pa.int8()})).begin(1, step.handles[1])
    narrow.committer.commit(2, narrow.cut(2, pa.record_batch({"n": pa.array([5], pa.int8())})))
    assert warehouse.by_duckdb("SELECT n, text FROM files WHERE n = 5") == [(5, None)]


def test_settings_that_make_no_sense(warehouse: Warehouse) -> None:
    for options, told in (
        ({"start": "latest"}, "as a sink has no option 'start'.*for reading"),
        ({"mode": "upsert"}, r"no option 'mode'. Rows are appended. cw.table"),
        ({"evolv": True}, "Did you mean 'evolve'"),
        ({"partition_by": "bucket(4, n)"}, "cannot partition by"),
        ({"parallelism": 0}, "at least 1"),
        ({"expire_after": 0}, "longer than nothing"),
    ):
        with pytest.raises(ConfigError, match=told):
            warehouse.named(**options).as_sink()
    with pytest.raises(ConfigError, match="names no Iceberg table"):
        warehouse.named("t")
    with pytest.raises(ConfigError, match="catalog 'nowhere' cannot be opened"):
        cw.iceberg("db.t", catalog="nowhere").as_sink().check(ROWS)


def test_secrets_are_named_and_never_told(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {**warehouse.properties, "s3.secret-access-key": "hunter2"}
    with pytest.raises(ConfigError, match=r"'s3.secret-access-key' holds a secret") as raised:
        cw.iceberg("db.t", catalog=plain)
    assert "hunter2" not in str(raised.value)
    with pytest.raises(ConfigError, match="'uri' holds a secret"):
        cw.iceberg("db.t", catalog={"type": "sql", "uri": "postgresql://me:hunter2@host/db"})
    monkeypatch.setenv("URI", "sqlite:////nowhere/hunter2/catalog.db")
    named = {**warehouse.properties, "uri": "env:URI", "s3.secret-access-key": "env:KEY"}
    sink = cw.iceberg("db.t", catalog=named).as_sink()
    assert b"hunter2" not in cloudpickle.dumps(sink)
    assert cloudpickle.loads(cloudpickle.dumps(sink)) == sink
    with pytest.raises(ConfigError, match="no variable 'KEY' here"):
        sink.check(ROWS)
    monkeypatch.setenv("KEY", "hunter3")
    with pytest.raises(StorageError) as failed:
        sink.check(ROWS)
    assert "hunter" not in str(failed.value)


def test_a_catalog_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutwater.connectors.iceberg import rest_catalog

    monkeypatch.setattr(rest_catalog, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sink = cw.iceberg("db.t", catalog={"uri": f"http://127.0.0.1:{server.getsockname()[1]}"}).as_sink()
        with pytest.raises(StorageError, match="cannot open the catalog: ReadTimeout"):
            sink.check(ROWS)
