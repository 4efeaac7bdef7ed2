"""A Delta table as a sink: each row once, whoever is killed, paused, or writes to the same table."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from delta_world import SCHEMA, Identity, Job, batch, entries, seen, table

import cutwater as cw
from cutwater.connectors.base import SinkSnapshot
from cutwater.connectors.delta.written_table import WrittenTable
from cutwater.errors import BuildError, ConfigError, CutwaterError, DataError, FencedError, StorageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


def at_once(path: Path, **options: Any) -> Any:
    return cw.delta(path, roll_interval_ms=0, **options)


def test_rows_come_with_their_checkpoint_in_one_version_and_once(path: Path) -> None:
    job = Job(at_once(path), 1)
    version = deltalake.DeltaTable(path).version()
    first = job.checkpoint(1, 1, 2, 3)
    assert seen(path) == []
    job.commit(first)
    assert seen(path) == [1, 2, 3]
    assert deltalake.DeltaTable(path).version() == version + 1
    job.commit(first)
    assert deltalake.DeltaTable(path).version() == version + 1
    second = job.checkpoint(2, 4)
    Job(at_once(path), 2, second)  # the driver died before it committed
    assert seen(path) == [1, 2, 3, 4]
    Job(at_once(path), 3, second)
    assert seen(path) == [1, 2, 3, 4]


def test_a_late_commit_takes_all_that_waits_and_none_that_is_in(path: Path) -> None:
    job = Job(at_once(path), 1)
    first, second = job.checkpoint(1, 1, 2), job.checkpoint(2, 3)
    handles = [*first.handles, *second.handles]
    job.commit(first)
    third = job.checkpoint(3, 4)
    job.commit(SinkSnapshot(3, [*handles, *third.handles]))
    assert seen(path) == [1, 2, 3, 4]
    job.commit(second)
    assert seen(path) == [1, 2, 3, 4]


def test_files_of_a_commit_that_failed_come_with_the_next_try(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(at_once(path), 1)
    first = job.checkpoint(1, 1, 2)

    def full(self: WrittenTable, *args: object) -> None:
        raise StorageError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(WrittenTable, "commit", full)
        with pytest.raises(StorageError, match="no space"):
            job.commit(first)
    assert seen(path) == []
    Job(at_once(path), 2, first)
    assert seen(path) == [1, 2]


def test_a_commit_of_which_the_driver_never_heard_is_not_done_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(at_once(path), 1)
    first = job.checkpoint(1, 1, 2)
    real = WrittenTable.commit

    def dies_after(self: WrittenTable, *args: Any) -> None:
        real(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WrittenTable, "commit", dies_after)
        with pytest.raises(KeyboardInterrupt):
            job.commit(first)
    second = Job(at_once(path), 2, first)
    assert seen(path) == [1, 2]
    second.commits(2, 3)
    assert seen(path) == [1, 2, 3]


def test_a_driver_that_wakes_up_with_its_old_handle_commits_nothing(path: Path) -> None:
    zombie = Job(at_once(path), 1)
    first = zombie.commits(1, 1, 2)
    late = zombie.checkpoint(2, 3)
    Job(at_once(path), 2, first)
    with pytest.raises(FencedError, match="attempt 2"):
        zombie.commit(late)
    assert seen(path) == [1, 2]


def test_a_driver_whose_look_was_before_the_fence_commits_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It read the number, was paused, and goes on with the handle that it read it from."""
    zombie = Job(at_once(path), 1)
    first = zombie.commits(1, 1, 2)
    late = zombie.checkpoint(2, 3)
    real = WrittenTable.commit
    calls: list[int] = []

    def paused(self: WrittenTable, *args: Any) -> None:
        if not calls:
            calls.append(1)
            Job(at_once(path), 2, first)
        real(self, *args)

    monkeypatch.setattr(WrittenTable, "commit", paused)
    with pytest.raises(FencedError):
        zombie.commit(late)
    assert seen(path) == [1, 2]


def test_t5_a_driver_that_wakes_up_with_a_new_handle_commits_nothing(path: Path) -> None:
    zombie = Job(at_once(path), 1)
    late = zombie.checkpoint(2, 3)
    successor = Job(at_once(path), 2)
    with pytest.raises(FencedError):
        zombie.committer().commit(late.checkpoint_id, late.handles)
    with pytest.raises(FencedError):
        zombie.committer().settle(late, [late], 1)
    assert seen(path) == []
    successor.commits(5, 3)
    assert seen(path) == [3]


def test_going_back_takes_our_rows_of_later_checkpoints_and_nobody_elses(path: Path) -> None:
    job = Job(at_once(path), 1)
    kept = job.commits(1, 1, 2)
    job.commits(2, 3, 4)
    deltalake.write_deltalake(path, pa.Table.from_batches([batch(100, 101)]), mode="append")
    job.commits(3, 5)
    other = at_once(path).as_sink().committer(SCHEMA, "c0ffee", "another")
    other.settle(None, [], 1)
    again = Job(at_once(path), 2, kept)
    assert again.driver.takes_back
    assert seen(path) == [1, 2, 100, 101]
    again.commits(4, 3, 4, 5)
    assert seen(path) == [1, 2, 3, 4, 5, 100, 101]
    Job(at_once(path), 3, None)
    assert seen(path) == [100, 101]


def test_rows_that_were_rewritten_by_others_cannot_be_taken_back(path: Path) -> None:
    job = Job(at_once(path), 1)
    kept = job.commits(1, 1, 2)
    job.commits(2, 3, 4)
    deltalake.DeltaTable(path).optimize.compact()
    with pytest.raises(StorageError, match="rewritten or removed 2 of their files") as raised:
        Job(at_once(path), 2, kept)
    assert "Restore the newest checkpoint" in raised.value.hint
    assert seen(path) == [1, 2, 3, 4]


def test_rows_of_an_append_only_table_cannot_be_taken_back(path: Path) -> None:
    job = Job(at_once(path), 1)
    kept = job.commits(1, 1)
    deltalake.DeltaTable(path).alter.set_table_properties({"delta.appendOnly": "true"})
    job.commits(2, 2)
    with pytest.raises(StorageError, match="appendOnly"):
        Job(at_once(path), 2, kept)
    assert seen(path) == [1, 2]


def test_others_append_at_the_same_time(path: Path) -> None:
    Job(at_once(path), 1)
    stop = threading.Event()
    theirs: list[int] = []

    def append() -> None:
        while not stop.is_set():
            value = 10_000 + len(theirs)
            deltalake.write_deltalake(path, pa.Table.from_batches([batch(value)]), mode="append")
            theirs.append(value)

    thread = threading.Thread(target=append)
    thread.start()
    job = Job(at_once(path), 2)
    for n in range(1, 31):
        job.commits(n, n, 100 + n)
    stop.set()
    thread.join()
    assert theirs
    assert seen(path) == sorted([*range(1, 31), *range(101, 131), *theirs])


@pytest.mark.parametrize("what", ["append", "property", "compaction", "deletion", "checkpoint"])
def test_a_commit_on_a_version_that_is_not_the_newest_is_tried_again(
    path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer is there between our look and our commit."""
    job = Job(at_once(path), 1)
    job.commits(1, 1, 2)
    second = job.checkpoint(2, 3)
    real = WrittenTable.commit
    calls: list[object] = []

    def raced(self: WrittenTable, *args: Any) -> None:
        if not calls:
            table = deltalake.DeltaTable(path)
            match what:
                case "append":
                    deltalake.write_deltalake(path, pa.Table.from_batches([batch(100)]), mode="append")
                case "property":
                    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
                case "compaction":
                    table.optimize.compact()
                case "deletion":
                    table.delete("row = 1")
                case _:
                    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
                    deltalake.DeltaTable(path).create_checkpoint()
        calls.append(None)
        real(self, *args)

    monkeypatch.setattr(WrittenTable, "commit", raced)
    job.commit(second)
    assert len(calls) == 2
    job.commits(3, 4)
    wanted = {"append": [1, 2, 3, 4, 100], "deletion": [2, 3, 4]}
    assert seen(path) == wanted.get(what, [1, 2, 3, 4])


def test_entries_that_were_cleaned_up_are_not_taken_for_ones_to_come(path: Path) -> None:
    """A job that was silent for long looks at a log of which its own newest version is gone."""
    job = Job(at_once(path), 1)
    job.commits(1, 1)
    for value in (100, 101, 102):
        deltalake.write_deltalake(path, pa.Table.from_batches([batch(value)]), mode="append")
    deltalake.DeltaTable(path).create_checkpoint()
    newest = deltalake.DeltaTable(path).version()
    for entry in (path / "_delta_log").glob("*.json"):
        if int(entry.stem) < newest:
            entry.unlink()
    job.commits(2, 2)
    assert seen(path) == [1, 2, 100, 101, 102]
    assert deltalake.DeltaTable(path).version() == newest + 1


def test_versions_made_over_others_would_be_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link
    monkeypatch.setattr(os, "link", lambda a, b, **how: real(a, b, **how) if how else os.replace(a, b))
    with pytest.raises((AssertionError, CutwaterError)):
        test_a_commit_on_a_version_that_is_not_the_newest_is_tried_again(path, "append", monkeypatch)


def test_a_column_that_others_put_in_is_null_and_one_of_another_type_is_an_error(path: Path) -> None:
    job = Job(at_once(path), 1)
    job.commits(1, 1)
    more = pa.table({"row": [7], "t": ["x"], "extra": [1.5]})
    deltalake.write_deltalake(path, more, mode="append", schema_mode="merge")
    job.commits(2, 2)
    assert table(path).sort_by("row")["extra"].to_pylist() == [None, None, 1.5]
    deltalake.write_deltalake(path, pa.table({"row": ["a"], "t": ["x"]}), mode="overwrite", schema_mode="overwrite")
    with pytest.raises(BuildError, match=r"'row' is int64, and 'row' of the Delta table .* is string") as raised:
        job.commits(3, 3)
    assert "write to another table" in raised.value.hint


@pytest.mark.parametrize(
    ("configuration", "told"),
    [
        ({"delta.enableDeletionVectors": "true"}, "deletion vectors"),
        ({"delta.columnMapping.mode": "name"}, "column mapping"),
        ({"delta.constraints.positive": "row > 0"}, "a CHECK constraint 'positive'"),
    ],
    ids=str,
)
def test_features_that_are_not_written_are_refused_by_name(
    path: Path, configuration: dict[str, str], told: str
) -> None:
    schema = deltalake.Schema.from_arrow(SCHEMA)
    if "delta.constraints.positive" in configuration:
        made = deltalake.DeltaTable.create(path, schema)
        made.alter.add_constraint({"positive": "row > 0"})
    else:
        deltalake.DeltaTable.create(path, schema, configuration=configuration)
    sink = at_once(path).as_sink()
    with pytest.raises(BuildError, match=f"has {told}, which this sink does not write"):
        sink.check(SCHEMA)
    with pytest.raises(BuildError, match=told):
        sink.committer(SCHEMA, "c0ffee", "out").settle(None, [], 1)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the log's first entry, as a writer that is not at hand would have written it."""
    first = path / "_delta_log" / f"{0:020}.json"
    actions = [json.loads(line) for line in first.read_text().splitlines()]
    for action in actions:
        change(action)
    first.write_text("\n".join(map(json.dumps, actions)))


@pytest.mark.parametrize(
    ("metadata", "feature", "told"),
    [
        ({"delta.generationExpression": "row + 1"}, "generatedColumns", "a generated column 'row'"),
        ({"delta.identity.start": 1, "delta.identity.step": 1}, "identityColumns", "an identity column 'row'"),
        ({"delta.invariants": '{"expression":{"expression":"row > 0"}}'}, "invariants", "an invariant on column 'row'"),
        ({}, "rowTracking", "row tracking"),
        ({}, "clustering", "the feature 'clustering'"),
    ],
    ids=str,
)
def test_features_of_other_writers_are_refused_by_name(
    path: Path, metadata: dict[str, Any], feature: str, told: str
) -> None:
    deltalake.DeltaTable.create(path, deltalake.Schema.from_arrow(SCHEMA))

    def change(action: dict[str, Any]) -> None:
        if "protocol" in action:
            action["protocol"] = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": [feature]}
            if feature == "rowTracking":
                action["protocol"]["writerFeatures"].append("domainMetadata")
        if "metaData" in action:
            schema = json.loads(action["metaData"]["schemaString"])
            schema["fields"][0]["metadata"] = metadata
            action["metaData"]["schemaString"] = json.dumps(schema)

    rewrite(path, change)
    with pytest.raises((BuildError, StorageError)) as raised:
        at_once(path).as_sink().check(SCHEMA)
    assert told in raised.value.message or feature in raised.value.message


def test_a_column_that_must_not_be_null(path: Path) -> None:
    strict = pa.schema([pa.field("row", pa.int64(), nullable=False), pa.field("t", pa.string())])
    deltalake.DeltaTable.create(path, deltalake.Schema.from_arrow(strict))
    job = Job(at_once(path), 1)
    job.commits(1, 1)
    with pytest.raises(DataError, match="'row' is null"):
        job.writers[0].write(pa.record_batch([[None], ["x"]], schema=SCHEMA))
    with pytest.raises(BuildError, match="'row' that must not be null, and the stream has none"):
        at_once(path).as_sink().check(pa.schema({"t": pa.string()}))


def test_columns_are_added_if_that_was_asked_for(path: Path) -> None:
    Job(at_once(path), 1).commits(1, 1)
    wider = pa.schema([*SCHEMA, pa.field("day", pa.date32())])
    with pytest.raises(BuildError, match="has no column 'day'") as raised:
        at_once(path).as_sink().check(wider)
    assert "evolve=True" in raised.value.hint
    sink = at_once(path, evolve=True).as_sink()
    sink.check(wider)
    job = Job(sink, 2, SinkSnapshot(1), schema=wider)
    job.writers[0].write(pa.record_batch([[2], ["t"], [date(2026, 1, 1)]], schema=wider))
    job.commits(3)
    assert table(path).sort_by("row").to_pylist()[1:] == [{"row": 2, "t": "t", "day": date(2026, 1, 1)}]


def test_rows_of_an_older_program_wait_with_their_own_columns(path: Path) -> None:
    job = Job(cw.delta(path, roll_interval_ms="1h", partition_by="t"), 1)
    waiting = job.checkpoint(1, 1, 2, 3)
    assert waiting.handles == []
    wider = pa.schema([*SCHEMA, pa.field("n", pa.int32())])
    job = Job(cw.delta(path, evolve=True), 2, waiting, schema=wider)
    assert seen(path) == []
    for writer in job.writers:
        writer.roll()
    job.commits(2)
    assert sorted(table(path)["row"].to_pylist()) == [1, 2, 3]


def test_partitions(path: Path) -> None:
    schema = pa.schema({"n": pa.int64(), "who": pa.string(), "day": pa.date32(), "ok": pa.bool_()})
    whos = ["a/b", "ä ö=%~#?'", None, "", "a/b"]
    days = [date(2026, 1, 1), date(2026, 1, 1), None, date(2026, 1, 2), date(2026, 1, 1)]
    rows = pa.record_batch([range(5), whos, days, [True, False, None, True, True]], schema=schema)
    sink = at_once(path, partition_by=["who", "day", "ok"]).as_sink()
    sink.check(schema)
    job = Job(sink, 1, schema=schema)
    job.writers[0].write(rows)
    job.commits(1)
    found = table(path).sort_by("n").select(schema.names).to_pylist()
    assert found == [{**row, "who": row["who"] or None} for row in rows.to_pylist()]
    added = [action["add"] for action in entries(path) if "add" in action]
    assert len(added) == 4
    assert {"who": "a/b", "day": "2026-01-01", "ok": "true"} in [add["partitionValues"] for add in added]
    kept = SinkSnapshot(0)
    Job(sink, 2, kept, schema=schema)
    assert table(path).num_rows == 0
    with pytest.raises(BuildError, match="is partitioned by who, day, ok, not by n"):
        at_once(path, partition_by="n").as_sink().check(schema)
    adopting = Job(at_once(path), 3, kept, schema=schema)
    adopting.writers[0].write(rows)
    adopting.commits(5)
    assert table(path).num_rows == 5


@pytest.mark.parametrize(
    ("schema", "columns", "told"),
    [
        ({"x": pa.float64(), "n": pa.int64()}, "x", "cannot be partitioned by 'x' of type double"),
        ({"n": pa.int64()}, "n", "needs a column besides"),
        ({"n": pa.int64(), "m": pa.int64()}, "k", "no such column 'k' to partition by"),
    ],
    ids=str,
)
def test_partitions_that_cannot_be(path: Path, schema: dict[str, pa.DataType], columns: str, told: str) -> None:
    with pytest.raises(BuildError, match=told):
        at_once(path, partition_by=columns).as_sink().check(pa.schema(schema))


def test_types_and_statistics(path: Path) -> None:
    schema = pa.schema(
        {
            "n": pa.int64(),
            "u": pa.uint32(),
            "t": pa.timestamp("us"),
            "z": pa.timestamp("ms", "Europe/Berlin"),
            "s": pa.large_string(),
            "long": pa.string(),
            "f": pa.float64(),
            "d": pa.date32(),
            "c": pa.decimal128(9, 2),
            "l": pa.list_(pa.int32()),
            "m": pa.map_(pa.string(), pa.int64()),
            "b": pa.binary(),
        }
    )
    moment = datetime(2026, 3, 1, 12, 0, 0, 123456)
    utc = moment.replace(tzinfo=UTC)
    one = [
        1,
        4_000_000_000,
        moment,
        utc,
        "a",
        "x" * 40,
        float("nan"),
        date(2026, 1, 1),
        Decimal("1.50"),
        [1],
        {"k": 1},
        b"\0",
    ]
    two = [2, None, None, utc.replace(hour=13), "b", "y", 2.0, date(2026, 1, 2), Decimal("2.50"), None, None, None]
    columns = [
        pa.array(values, field.type, safe=False)
        for values, field in zip(zip(one, two, strict=True), schema, strict=True)
    ]
    job = Job(at_once(path), 1, subtasks=1, schema=schema)
    job.writers[0].write(pa.RecordBatch.from_arrays(columns, schema=schema))
    job.commits(1)
    found = table(path)
    assert found.schema.field("u").type == pa.int64()
    assert found.schema.field("t").type == pa.timestamp("us")
    assert found.schema.field("z").type == pa.timestamp("us", "UTC")
    assert found["u"].to_pylist() == [4_000_000_000, None]
    assert found["l"].to_pylist() == [[1], None]
    assert found["m"].to_pylist() == [[("k", 1)], None]
    stats = json.loads(next(action["add"]["stats"] for action in entries(path) if "add" in action))
    assert stats["numRecords"] == 2
    assert stats["minValues"] == {
        "n": 1,
        "u": 4_000_000_000,
        "t": "2026-03-01T12:00:00.123456",
        "z": "2026-03-01T12:00:00.123000Z",
        "s": "a",
        "d": "2026-01-01",
    }
    assert stats["maxValues"]["z"] == "2026-03-01T13:00:00.123000Z"
    assert stats["nullCount"] == {"n": 0, "u": 1, "t": 1, "z": 0, "s": 0, "long": 0, "f": 0, "d": 0, "c": 0, "b": 1}
    pruned = deltalake.DeltaTable(path).to_pyarrow_dataset().scanner(filter=pa.compute.field("n") > 5)
    assert pruned.count_rows() == 0
    with pytest.raises(BuildError, match="'x' of type uint64 cannot be written to Delta"):
        at_once(path).as_sink().check(pa.schema({"x": pa.uint64()}))


def test_a_time_with_a_zone_is_not_one_without(path: Path) -> None:
    deltalake.DeltaTable.create(path, deltalake.Schema.from_arrow(pa.schema({"t": pa.timestamp("us", "UTC")})))
    with pytest.raises(BuildError) as raised:
        at_once(path).as_sink().check(pa.schema({"t": pa.timestamp("us")}))
    assert "replace_time_zone('UTC')" in raised.value.hint


def test_short_intervals_make_no_small_files(path: Path) -> None:
    job = Job(cw.delta(path, roll_rows=10, roll_interval_ms="1h"), 1, subtasks=1)
    for n in range(1, 26):
        job.commits(n, n)
    assert seen(path) == list(range(1, 21))
    assert len([action for action in entries(path) if "add" in action]) == 2
    last = job.checkpoint(26, final=True)
    job.commit(last)
    job.driver.finish(1)
    assert seen(path) == list(range(1, 26))
    assert not (path / "_cutwater").exists()
    Job(cw.delta(path), 2, last)  # it has ended, and is restored all the same
    assert seen(path) == list(range(1, 26))


def test_the_log_is_put_together_and_the_number_stays(path: Path) -> None:
    job = Job(at_once(path, log_checkpoint_commits=5), 1)
    for n in range(1, 13):
        job.commits(n, n)
    checkpoints = sorted((path / "_delta_log").glob("*.checkpoint.parquet"))
    assert len(checkpoints) >= 2
    for entry in (path / "_delta_log").glob("*.json"):
        if int(entry.stem) < int(checkpoints[-1].name.split(".")[0]):
            entry.unlink()
    with pytest.raises(FencedError):
        at_once(path).as_sink().committer(SCHEMA, "c0ffee", "out").settle(None, [], 0)
    job = Job(at_once(path), 2, SinkSnapshot(12))
    job.commits(13, 13)
    assert seen(path) == list(range(1, 14))


def test_a_file_that_is_gone_is_told(path: Path) -> None:
    job = Job(at_once(path), 1)
    first = job.checkpoint(1, 1, 2)
    for file in (path / "_cutwater").rglob("part-*"):
        file.unlink()
    with pytest.raises(StorageError, match="is lost"):
        job.commit(first)


def test_a_handle_that_names_what_is_not_ours_is_refused(path: Path) -> None:
    job = Job(at_once(path), 1)
    first = job.checkpoint(1, 1)
    handle = json.loads(json.dumps(first.handles[0]))
    handle["part"]["staged"] = handle["part"]["final"] = "../elsewhere.parquet"
    with pytest.raises(StorageError, match="no file that this step writes"):
        job.driver.commit(1, [handle])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"start": 3}, "delta as a sink has no option 'start'"),
        ({"key": "row"}, "a key is for upserts"),
        ({"mode": "merge"}, "mode 'merge' is unknown"),
        ({"mode": "upsert"}, "an upsert needs a key"),
        ({"mode": "upsert", "key": "row", "roll_rows": 5}, "an upsert has no option 'roll_rows'"),
        ({"roll_bytes": 0}, "roll_bytes must be at least 1"),
        ({"log_checkpoint_commits": 0}, "log_checkpoint_commits must be at least 1"),
        ({"compression": "brotli"}, "compression 'brotli' is unknown"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        cw.delta(path, **options).as_sink()


def test_a_name_that_there_is_not_and_places_that_are_none() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'partition_by'"):
        cw.delta("/t", partition="day")
    with pytest.raises(BuildError, match="s3 is not supported"):
        cw.delta("s3://bucket/t")


def test_a_table_that_cannot_be_opened(path: Path) -> None:
    (path / "_delta_log").mkdir(parents=True)
    (path / "_delta_log" / f"{0:020}.json").write_text("{")
    with pytest.raises(CutwaterError):
        at_once(path).as_sink().check(SCHEMA)


def test_identity_is_in_the_files_names(path: Path) -> None:
    job = Job(at_once(path), 3)
    handles = job.checkpoint(7, 1, 2).handles
    for subtask, handle in enumerate(handles):
        assert handle["part"]["final"].endswith(f"-out-{subtask:05}-0000000007-0000000003-0000.parquet")
    assert Identity(0, 3).job_uid not in handles[0]["part"]["final"]
