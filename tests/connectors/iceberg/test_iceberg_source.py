"""Tables as a source: positions are exact, snapshots follow each other, and what cannot be told is an error."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg import manifest as library_manifest
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update import snapshot as snapshot_module
from pyiceberg.types import LongType, StringType
from pyspark import cloudpickle

from cutwater.connectors.base import Json, SourceHooks, Split, lag_of
from cutwater.connectors.iceberg import reader as reader_module
from cutwater.connectors.iceberg.source import IcebergSource
from cutwater.errors import BuildError, ConfigError, DataError
from iceberg_world import ROWS, Warehouse, rows_of


class Context:
    step, subtask = "read", 0

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        raise AssertionError("no row is bad")


def read(source: IcebergSource, split: Split, position: Json = None, most: int = 7) -> list[dict[str, Any]]:
    """All rows of a split, as a worker reads them."""
    rows: list[dict[str, Any]] = []
    opened = cloudpickle.loads(cloudpickle.dumps(source)).open(split, position, Context())
    while not opened.exhausted:
        before = opened.position
        batch = opened.read(most)
        if batch is not None:
            assert 0 < batch.num_rows <= most
            assert opened.position > (before or 0)
            rows += batch.to_pylist()
    opened.close()
    return rows


def numbers(source: IcebergSource, splits: list[Split]) -> list[int]:
    return sorted(row["n"] for split in splits for row in read(source, split))


def news(source: IcebergSource, known: list[Split]) -> list[Split]:
    ids = {split.id for split in known}
    found = source.discover()
    assert found[: len(known)] == known
    return [split for split in found if split.id not in ids]


def test_any_position_gives_the_rest(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_BATCH_ROWS", 16)
    warehouse.make(properties={"write.parquet.row-group-limit": "30"})
    warehouse.append(range(100))
    source = warehouse.named(until="latest").as_source()
    assert source.schema == ROWS
    (split,) = (split for split in source.discover() if split.data["file"])
    whole = read(source, split)
    assert [row["n"] for row in whole] == list(range(100))
    for at in (0, 1, 15, 16, 29, 30, 31, 90, 99, 100):
        assert read(source, split, at, most=5) == whole[at:]
    opened = source.open(split, 97, Context())
    assert lag_of(opened) == 3
    while not opened.exhausted:
        opened.read(2)
    assert lag_of(opened) == 0
    assert opened.origin.endswith(".parquet to row 100")


def test_the_table_then_what_is_appended(warehouse: Warehouse) -> None:
    warehouse.make()
    warehouse.append([1])
    warehouse.append([2])
    source = warehouse.named().as_source()
    assert (source.bounded, source.replayable) == (False, True)
    known = source.discover()
    assert [row["n"] for split in known for row in read(source, split)] == [1, 2], "in the order of the snapshots"
    assert news(source, known) == []
    for n in (3, 4):
        warehouse.append([n])
    fresh = news(source, known)
    assert [row["n"] for split in fresh for row in read(source, split)] == [3, 4]
    assert len({split.id for split in known + fresh}) == len(known + fresh)


def test_a_restart_goes_on_behind_what_is_known(warehouse: Warehouse) -> None:
    warehouse.make()
    warehouse.append([1])
    source = warehouse.named().as_source()
    known = source.discover()
    warehouse.append([2])
    known = source.discover()
    warehouse.append([3])
    again = warehouse.named().as_source()
    warehouse.append([4])
    hooks = SourceHooks(again)
    listed = hooks.goes_on({split.id: split.data for split in known}, again.discover())
    ids = {split.id for split in known}
    assert ids <= {split.id for split in listed}
    assert numbers(again, [split for split in listed if split.id not in ids]) == [3, 4]
    warehouse.append([5])
    assert numbers(again, news(again, listed)) == [5]


def test_a_job_that_saw_an_empty_table_misses_nothing(warehouse: Warehouse) -> None:
    warehouse.make()
    for start in ("earliest", "latest"):
        source = warehouse.named(start=start).as_source()
        known = source.discover()
        assert [split.data["file"] for split in known] == [None]
        assert numbers(source, known) == []
    warehouse.append([1])
    again = warehouse.named(start="latest").as_source()
    listed = again.goes_on({split.id: split.data for split in known}, again.discover())
    assert numbers(again, listed) == [1]


def test_where_to_begin(warehouse: Warehouse) -> None:
    warehouse.make()
    for n in (1, 2, 3):
        warehouse.append([n])
    snapshots = warehouse.table().metadata.snapshots
    at = dt.datetime.fromtimestamp(snapshots[1].timestamp_ms / 1000, dt.UTC)
    old = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
    for start, expected in (
        ("earliest", [1, 2, 3]),
        ("latest", []),
        (snapshots[1].snapshot_id, [2, 3]),
        (snapshots[0].snapshot_id, [1, 2, 3]),
        (at, [2, 3]),
        (old, [1, 2, 3]),
    ):
        bounded = warehouse.named(start=start, until="latest").as_source()
        unbounded = warehouse.named(start=start).as_source()
        assert numbers(bounded, bounded.discover()) == numbers(unbounded, unbounded.discover()) == expected
    warehouse.append([4])
    assert numbers(bounded, bounded.discover()) == [1, 2, 3], "bounded: what is there at the start"
    assert numbers(unbounded, unbounded.discover()) == [1, 2, 3, 4]
    again = warehouse.named(until="latest").as_source()
    known = {split.id: split.data for split in bounded.discover()}
    assert numbers(again, again.goes_on(known, again.discover())) == [1, 2, 3]
    with pytest.raises(BuildError, match="snapshot 7 never was, or was expired"):
        warehouse.named(start=7).as_source().discover()


def test_a_time_that_is_still_to_come_is_the_end(warehouse: Warehouse) -> None:
    warehouse.make()
    warehouse.append([1])
    known = warehouse.named(start=dt.datetime(2100, 1, 1, tzinfo=dt.UTC)).as_source().discover()
    warehouse.append([2])
    again = warehouse.named().as_source()
    listed = again.goes_on({split.id: split.data for split in known}, again.discover())
    assert numbers(again, listed) == [2]


def test_manifests_that_writers_merge(warehouse: Warehouse) -> None:
    """A new manifest names files of older snapshots as well."""
    warehouse.make(properties={"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"})
    warehouse.append([1])
    source = warehouse.named().as_source()
    known = source.discover()
    for n in (2, 3, 4):
        warehouse.append([n])
    assert len(warehouse.table().current_snapshot().manifests(warehouse.table().io)) < 4
    assert numbers(source, news(source, known)) == [2, 3, 4]


def expire(warehouse: Warehouse, *places: int) -> None:
    table = warehouse.table()
    ids = [table.metadata.snapshots[place].snapshot_id for place in places]
    table.maintenance.expire_snapshots().by_ids(ids).commit()


def test_expired_snapshots(warehouse: Warehouse) -> None:
    warehouse.make()
    for n in (1, 2):
        warehouse.append([n])
    source = warehouse.named().as_source()
    known = {split.id: split.data for split in source.discover()}
    warehouse.append([3])
    expire(warehouse, 0, 1)
    with pytest.raises(DataError, match="is not before the current one any more: it was expired"):
        source.discover()
    again = warehouse.named().as_source()
    listed = again.discover()
    with pytest.raises(DataError, match=r"none of the snapshots that the job has read.*expired, or .* rolled back"):
        again.goes_on(known, listed)
    assert numbers(again, listed) == [1, 2, 3]
    with pytest.raises(BuildError, match=r"snapshots since .* were expired.*Begin with start="):
        warehouse.named(start=dt.datetime(2000, 1, 1, tzinfo=dt.UTC)).as_source().discover()


def test_a_snapshot_between_that_was_expired(warehouse: Warehouse) -> None:
    warehouse.make()
    warehouse.append([1])
    source = warehouse.named().as_source()
    source.discover()
    for n in (2, 3):
        warehouse.append([n])
    expire(warehouse, 1)
    with pytest.raises(DataError, match=r"is not before the current one any more: it was expired"):
        source.discover()


def test_a_table_that_is_rolled_back(warehouse: Warehouse) -> None:
    warehouse.make()
    for n in (1, 2):
        warehouse.append([n])
    source = warehouse.named().as_source()
    source.discover()
    table = warehouse.table()
    table.manage_snapshots().rollback_to_snapshot(table.metadata.snapshots[0].snapshot_id).commit()
    with pytest.raises(DataError, match="or the table was rolled back"):
        source.discover()


@pytest.mark.parametrize("act", ["delete", "overwrite"])
def test_snapshots_that_take_rows_away(warehouse: Warehouse, act: str) -> None:
    warehouse.make()
    warehouse.append([1, 2])
    strict = warehouse.named().as_source()
    lenient = warehouse.named(on_overwrite="ignore").as_source()
    known = strict.discover()
    assert lenient.discover() == known
    if act == "delete":
        warehouse.table().delete("n == 1")
    else:
        warehouse.table().overwrite(pa.Table.from_batches([rows_of([9])]), overwrite_filter="n == 1")
    warehouse.append([3])
    with pytest.raises(DataError, match=r"is no append but '\w+'.*on_overwrite='ignore'"):
        strict.discover()
    assert numbers(lenient, news(lenient, known)) == ([3] if act == "delete" else [3, 9])
    fresh = warehouse.named().as_source()
    assert numbers(fresh, fresh.discover()) == ([2, 3] if act == "delete" else [2, 3, 9])


def test_compaction_is_passed_over(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    warehouse.make()
    for n in (1, 2):
        warehouse.append([n])
    source = warehouse.named().as_source()
    known = source.discover()
    table = warehouse.table()
    files = [task.file for task in table.scan().plan_files()]
    whole = table.scan().to_arrow()
    monkeypatch.setattr(snapshot_module, "update_snapshot_summaries", lambda summary, previous_summary: summary)
    with table.transaction() as transaction, transaction.update_snapshot().overwrite() as update:
        update._operation = Operation.REPLACE
        for file in _dataframe_to_data_files(table.metadata, whole, table.io):
            update.append_data_file(file)
        for file in files:
            update.delete_data_file(file)
    warehouse.append([3])
    assert numbers(source, news(source, known)) == [3]
    fresh = warehouse.named().as_source()
    assert numbers(fresh, fresh.discover()) == [1, 2, 3]


def test_columns_keep_their_ids(warehouse: Warehouse) -> None:
    """Renamed, widened, added, dropped and moved ones are found in older files; the oracle is the library's scan."""
    old = pa.schema({"n": pa.int32(), "gone": pa.string(), "s": pa.struct({"a": pa.int32(), "b": pa.string()})})
    warehouse.make(schema=old)
    rows = [{"n": 1, "gone": "x", "s": {"a": 1, "b": "y"}}, {"n": 2, "gone": None, "s": None}]
    warehouse.table().append(pa.Table.from_pylist(rows, old))
    with warehouse.table().update_schema() as update:
        update.rename_column("n", "number")
        update.update_column("n", LongType())
        update.delete_column("gone")
        update.add_column("gone", StringType())
        update.rename_column("s.b", "c")
        update.add_column(("s", "d"), LongType())
    with warehouse.table().update_schema() as update:
        update.move_first("gone")
    source = warehouse.named().as_source()
    assert source.schema.names == ["gone", "number", "s"]
    found = [row for split in source.discover() for row in read(source, split)]
    assert found == warehouse.table().scan().to_arrow().to_pylist()
    assert found[0] == {"gone": None, "number": 1, "s": {"a": 1, "c": "y", "d": None}}
    part = source.reading(frozenset({"number"}), dictionaries=False)
    assert [row["number"] for split in part.discover() for row in read(part, split)] == [1, 2]
    warehouse.table().append(pa.table({"gone": ["new"], "number": [3]}))
    assert read(source, source.discover()[-1])[0]["gone"] == "new"


NESTED = pa.schema(
    {
        "n": pa.int64(),
        "l": pa.list_(pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())})),
        "m": pa.map_(pa.string(), pa.struct({"a": pa.int64()})),
        "p": pa.list_(pa.int64()),
    }
)


@pytest.mark.parametrize("evolved", [False, True])
def test_nested_columns(warehouse: Warehouse, evolved: bool) -> None:
    """With nulls where they were: the library itself reads lists of structs that are null as empty ones."""
    warehouse.make(schema=NESTED)
    rows = [
        {"n": 0, "l": [{"a": 1, "b": ["x", None]}, None], "m": [("k", {"a": 1}), ("q", None)], "p": [1, None]},
        {"n": 1, "l": None, "m": None, "p": None},
        {"n": 2, "l": [], "m": [], "p": []},
        {"n": 3, "l": [{"a": None, "b": None}], "m": [("z", {"a": None})], "p": [7]},
    ]
    sink = warehouse.named().as_sink()
    from test_iceberg_sink import Step

    step = Step(sink, schema=NESTED).begin()
    step.committer.commit(1, step.cut(1, pa.RecordBatch.from_pylist(rows * 9, NESTED)))
    if evolved:
        with warehouse.table().update_schema() as update:
            update.rename_column("l.a", "z")
            update.add_column(("l", "new"), LongType())
            update.add_column(("m", "new"), LongType())
    for row in rows if evolved else ():
        row["l"] = row["l"] and [one and {"z": one["a"], "b": one["b"], "new": None} for one in row["l"]]
        row["m"] = row["m"] and [(key, one and {"a": one["a"], "new": None}) for key, one in row["m"]]
    source = warehouse.named().as_source()
    (split,) = (split for split in source.discover() if split.data["file"])
    for at in (0, 1, 6, 35):
        assert read(source, split, at, most=5) == (rows * 9)[at:]


def test_files_without_ids_are_read_by_the_name_mapping(warehouse: Warehouse, tmp_path: Path) -> None:
    warehouse.make()
    path = str(tmp_path / "foreign.parquet")
    pq.write_table(pa.Table.from_batches([rows_of([1, 2])]), path)
    warehouse.table().add_files([f"file://{path}"])
    with warehouse.table().update_schema() as update:
        update.rename_column("text", "words")
    source = warehouse.named().as_source()
    found = [row for split in source.discover() for row in read(source, split)]
    assert found == [{"n": 1, "words": "t1"}, {"n": 2, "words": "t2"}]
    with warehouse.table().transaction() as transaction:
        transaction.remove_properties("schema.name-mapping.default")
    with pytest.raises(DataError, match="says no ids of its columns"):
        numbers(source, source.discover())


def delete_rows(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch, content: str, **file: Any) -> None:
    """A snapshot with a delete file, which the library can read but not write."""
    table = warehouse.table()
    made = library_manifest.DataFile.from_args(
        content=library_manifest.DataFileContent[content],
        partition=library_manifest.Record(),
        file_format=library_manifest.FileFormat.PARQUET,
        **file,
    )
    made.spec_id = 0
    with monkeypatch.context() as patch:
        deletes = library_manifest.ManifestContent.DELETES
        patch.setattr(library_manifest.ManifestWriterV2, "content", lambda self: deletes)
        with table.transaction() as transaction, transaction.update_snapshot().fast_append() as update:
            update.append_data_file(made)


def test_delete_files_are_applied(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    warehouse.make()
    warehouse.append(range(20))
    warehouse.append(range(20, 30))
    (path,) = (file for file in warehouse.files() if 0 in pq.read_table(file)["n"].to_pylist())
    gone = [0, 3, 4, 5, 6, 7, 19]
    deletes = pa.table({"file_path": ["file://else"] + [f"file://{path}"] * 7, "pos": pa.array([1, *gone], pa.int64())})
    where = str(tmp_path / "deletes.parquet")
    pq.write_table(deletes, where)
    size = Path(where).stat().st_size
    delete_rows(
        warehouse, monkeypatch, "POSITION_DELETES", file_path=f"file://{where}", record_count=8, file_size_in_bytes=size
    )
    left = [n for n in range(30) if n not in gone]
    assert sorted(warehouse.table().scan().to_arrow()["n"].to_pylist()) == left
    source = warehouse.named().as_source()
    splits = source.discover()
    assert numbers(source, splits) == left
    (split,) = (split for split in splits if split.data.get("rows") == 20)
    for at in range(21):
        assert [row["n"] for row in read(source, split, at, most=2)] == [n for n in range(at, 20) if n not in gone]
    delete_rows(
        warehouse, monkeypatch, "EQUALITY_DELETES", file_path=f"file://{where}", record_count=8,
        file_size_in_bytes=size, equality_ids=[1],
    )  # fmt: skip
    with pytest.raises(DataError, match=r"cannot be read: .*equality deletes"):
        warehouse.named().as_source().discover()


def test_a_file_that_is_gone(warehouse: Warehouse) -> None:
    warehouse.make()
    warehouse.append([1])
    source = warehouse.named().as_source()
    splits = source.discover()
    Path(warehouse.files()[0]).unlink()
    with pytest.raises(DataError, match=r"is gone before it was read.*Keep snapshots"):
        numbers(source, splits)


def test_partition_values_stand_for_columns_that_files_leave_out(warehouse: Warehouse, tmp_path: Path) -> None:
    warehouse.make()
    with warehouse.table().update_spec() as update:
        update.add_identity("text")
    table = warehouse.table()
    path = str(tmp_path / "hive.parquet")
    field = pa.field("n", pa.int64(), metadata={"PARQUET:field_id": "1"})
    pq.write_table(pa.table([pa.array([1, 2])], schema=pa.schema([field])), path)
    made = library_manifest.DataFile.from_args(
        content=library_manifest.DataFileContent.DATA,
        partition=library_manifest.Record("a ü"),
        file_format=library_manifest.FileFormat.PARQUET,
        file_path=f"file://{path}",
        record_count=2,
        file_size_in_bytes=Path(path).stat().st_size,
    )
    made.spec_id = table.spec().spec_id
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as snapshot:
        snapshot.append_data_file(made)
    source = warehouse.named().as_source()
    found = [row for split in source.discover() for row in read(source, split)]
    assert found == [{"n": 1, "text": "a ü"}, {"n": 2, "text": "a ü"}]


def test_settings_that_make_no_sense(warehouse: Warehouse) -> None:
    for options, told in (
        ({"start": "newest"}, "start 'newest' is unknown"),
        ({"start": dt.datetime(2026, 1, 1)}, "start needs a zone"),
        ({"until": "now"}, "until is 'latest' or None"),
        ({"on_overwrite": "skip"}, "on_overwrite is 'fail' or 'ignore'"),
        ({"evolve": True}, "as a source has no option 'evolve'"),
        ({"rate": 0}, "rows per second"),
    ):
        with pytest.raises((ConfigError, BuildError), match=told):
            warehouse.named(**options).as_source()
    with pytest.raises(BuildError, match=r"no Iceberg table 'db.t' in catalog 'default'"):
        _ = warehouse.named().as_source().schema
