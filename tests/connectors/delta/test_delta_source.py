"""A Delta table as a source: each row once from any position, and what is gone or cannot be read is said."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

import cutwater as cw
from cutwater.connectors.base import Split
from cutwater.connectors.delta.source import DeltaSource
from cutwater.errors import BuildError, ConfigError, DataError


class Context:
    step, subtask = "read", 0

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        raise AssertionError


def rows(first: int, end: int) -> pa.Table:
    numbers = range(first, end)
    return pa.table({"k": list(numbers), "part": [f"p{n % 2}" for n in numbers], "v": [f"v{n}" for n in numbers]})


def append(path: Path, first: int, end: int) -> None:
    deltalake.write_deltalake(path, rows(first, end), mode="append")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Four versions, 0 to 3, of five rows each."""
    path = tmp_path / "table"
    deltalake.write_deltalake(path, rows(0, 5), partition_by=["part"])
    for version in range(1, 4):
        append(path, version * 5, version * 5 + 5)
    return path


def source(path: Path, **options: Any) -> DeltaSource:
    """As a dataflow has it that was built now."""
    made = cw.delta(path, discover_interval_ms=0, **options).as_source()
    assert made.schema.names
    return made


def forget(path: Path, before: int) -> None:
    """What clean-up does to the log, a month later."""
    deltalake.DeltaTable(path).create_checkpoint()
    for version in range(before):
        (path / "_delta_log" / f"{version:020}.json").unlink()


def read(source: DeltaSource, splits: list[Split] | None = None, size: int = 3) -> list[dict[str, Any]]:
    """All rows that are there; behind each batch the reader is opened anew at its position."""
    found: list[dict[str, Any]] = []
    for split in source.discover() if splits is None else splits:
        reader = source.open(split, None, Context())
        while (batch := reader.read(size)) is not None:
            assert batch.schema.equals(source.schema)
            found += batch.to_pylist()
            position = json.loads(json.dumps(reader.position))
            assert set(position) == {"version", "file", "row"}
            reader.close()
            reader = source.open(split, position, Context())
        reader.close()
    return found


def keys(found: list[dict[str, Any]]) -> list[int]:
    return sorted(row["k"] for row in found)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_the_rows_of_the_start_and_those_of_later_versions(path: Path, size: int) -> None:
    following = source(path)
    assert not following.bounded
    splits = following.discover()
    assert keys(read(following, splits[:-1], size)) == list(range(20))
    assert following.ended
    append(path, 20, 27)
    append(path, 27, 30)
    found = read(following, splits[-1:], size)
    assert sorted(found, key=lambda row: row["k"]) == rows(20, 30).to_pylist()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"until": "latest"}, range(20)),
        ({"until": 1}, range(10)),
        ({"start": 0, "until": 2}, range(15)),
        ({"start": 2, "until": "latest"}, range(20)),
        ({"start": "latest", "until": "latest"}, range(0)),
    ],
    ids=str,
)
def test_where_it_begins_and_ends(path: Path, options: dict[str, Any], wanted: range) -> None:
    bounded = source(path, **options)
    assert bounded.bounded
    splits = bounded.discover()
    append(path, 20, 25)
    assert keys(read(bounded, splits)) == list(wanted)
    log = bounded.open(splits[-1], None, Context())
    while log.read(100) is not None:
        pass
    assert log.exhausted


def test_it_begins_at_a_time(path: Path) -> None:
    log = path / "_delta_log"
    for version, entry in enumerate(sorted(log.glob("*.json"))):
        lines = [json.loads(line) for line in entry.read_text().splitlines()]
        for line in lines:
            if "commitInfo" in line:
                line["commitInfo"]["timestamp"] = 1_700_000_000_000 + version * 60_000
        entry.write_text("\n".join(map(json.dumps, lines)))
        os.utime(entry, (1_700_000_000 + version * 60,) * 2)
    moment = datetime.fromtimestamp(1_700_000_000 + 90, UTC)
    begun = source(path, start=moment, until="latest")
    splits = begun.discover()
    assert {split.data["version"] for split in splits[:-1]} == {1}
    assert keys(read(begun, splits)) == list(range(20))


def test_a_restart_goes_on_where_it_began(path: Path) -> None:
    first = source(path, start="latest")
    [log] = first.discover()
    append(path, 20, 23)
    again = pickle.loads(pickle.dumps(source(path, start="latest")))
    listed = again.discover()
    append(path, 23, 25)
    splits = again.goes_on({log.id: log.data}, listed)
    assert keys(read(again, splits)) == [20, 21, 22, 23, 24]


def test_a_restart_asks_nothing_of_the_first_version(path: Path) -> None:
    first = source(path, start=1)
    known = {split.id: split.data for split in first.discover()}
    forget(path, 3)
    again = source(path, start=1)
    listed = again.discover()
    with pytest.raises(DataError, match="has no version 1"):
        again.open(listed[0], None, Context())
    assert keys(read(again, again.goes_on(known, listed)[:-1])) == list(range(10))


def test_columns_that_came_later_are_null_in_older_rows_and_new_ones_are_told(path: Path) -> None:
    following = source(path)
    splits = following.discover()
    deltalake.write_deltalake(
        path, pa.table({"k": [20], "part": ["p0"], "v": ["x"], "more": [1.5]}), mode="append", schema_mode="merge"
    )
    with pytest.raises(DataError, match=r"since version 4 .* has a column 'more' of double") as raised:
        read(following, splits)
    assert "Start the job again" in raised.value.hint
    found = read(source(path, start=0, until="latest"))
    assert [row["more"] for row in sorted(found, key=lambda row: row["k"])] == [None] * 20 + [1.5]


def test_only_columns_that_somebody_reads(path: Path) -> None:
    narrow = source(path, until="latest").reading(frozenset({"part"}))
    assert Counter(row["part"] for row in read(narrow)) == {"p0": 10, "p1": 10}
    assert {row["v"] for row in read(narrow)} == {None}


def changed(path: Path) -> None:
    table = deltalake.DeltaTable(path)
    table.update(predicate="k = 3", updates={"v": "'new'"})
    table.delete("k = 4")
    append(path, 20, 22)
    merged = pa.table({"k": [1, 30], "part": ["p1", "p0"], "v": ["merged", "merged"]})
    merging = deltalake.DeltaTable(path).merge(merged, "t.k = s.k", source_alias="s", target_alias="t")
    merging.when_matched_update_all().when_not_matched_insert_all().execute()


def net(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The table that an updating stream comes to; each key is there once at most at any time."""
    there: dict[int, tuple[Any, ...]] = {}
    for row in found:
        values = (row["k"], row["part"], row["v"])
        if row["op"] in ("-U", "-D"):
            assert there.pop(row["k"]) == values
        else:
            assert row["k"] not in there
            there[row["k"]] = values
    return sorted(there.values())


@pytest.mark.parametrize("feed", [True, False], ids=["with change data feed", "by files"])
@pytest.mark.parametrize("size", [1, 100])
def test_changes(path: Path, feed: bool, size: int) -> None:
    if feed:
        deltalake.DeltaTable(path).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    following = source(path, changes=True)
    assert following.schema.names == ["op", "k", "part", "v"]
    stream = cw.Dataflow("f").read("rows", following)
    with pytest.raises(BuildError, match="updating stream"):
        stream.key_by("k").deduplicate("latest", keep="last")  # nobody has said what tells rows apart
    stream.with_changes("k").key_by("k").deduplicate("one", keep="last")
    splits = following.discover()
    changed(path)
    deltalake.DeltaTable(path).optimize.compact()
    found = read(following, splits, size)
    assert net(found) == sorted(
        (row["k"], row["part"], row["v"]) for row in deltalake.DeltaTable(path).to_pyarrow_table().to_pylist()
    )
    if feed:
        ops = Counter(row["op"] for row in found)
        assert ops == {"+I": 23, "-U": 2, "+U": 2, "-D": 1}


def test_updates_and_deletes_are_refused_without_changes(path: Path) -> None:
    following = source(path)
    splits = following.discover()[-1:]
    deltalake.DeltaTable(path).update(predicate="k = 3", updates={"v": "'new'"})
    with pytest.raises(DataError, match=r"version 4 .* updates or rewrites rows") as raised:
        read(following, splits)
    assert raised.value.hint == "Read it as an updating stream: changes=True."
    following = source(path)
    splits = following.discover()[-1:]
    deltalake.DeltaTable(path).delete("part = 'p0'")
    with pytest.raises(DataError, match=r"version 5 .* deletes rows") as raised:
        read(following, splits)
    assert "ignore_deletes=True" in raised.value.hint
    append(path, 40, 42)
    assert keys(read(source(path, ignore_deletes=True), splits)) == [40, 41]


def test_what_is_only_rewritten_is_not_read_again(path: Path) -> None:
    following = source(path)
    splits = following.discover()[-1:]
    deltalake.DeltaTable(path).optimize.compact()
    append(path, 20, 21)
    assert keys(read(following, splits)) == [20]


def test_versions_that_are_gone(path: Path) -> None:
    following = source(path, start=1)
    splits = following.discover()
    append(path, 20, 21)
    forget(path, 4)
    with pytest.raises(DataError, match=r"version 2 of the Delta table .* is gone from its log") as raised:
        following.open(splits[-1], None, Context()).read(5)
    assert "logRetentionDuration" in raised.value.hint


def test_a_file_that_was_vacuumed(path: Path) -> None:
    following = source(path, start=0)
    splits = following.discover()
    table = deltalake.DeltaTable(path)
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(DataError, match="is not there any more") as raised:
        read(following, splits)
    assert "VACUUM" in raised.value.hint


def test_a_table_that_was_made_anew(path: Path) -> None:
    following = source(path, start="latest")
    [log] = following.discover()
    reader = following.open(log, None, Context())
    deltalake.write_deltalake(path, rows(0, 1), mode="overwrite")
    for file in (path / "_delta_log").iterdir():
        file.unlink()
    deltalake.write_deltalake(path, rows(0, 1))
    with pytest.raises(DataError, match="was made anew"):
        reader.read(5)
    with pytest.raises(DataError, match="was removed and made again"):
        following.open(log, None, Context())


def test_deletion_vectors_are_refused_by_name(path: Path) -> None:
    following = source(path)
    splits = following.discover()
    entry = path / "_delta_log" / f"{4:020}.json"
    vector = {
        "storageType": "u",
        "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^",
        "offset": 4,
        "sizeInBytes": 40,
        "cardinality": 6,
    }
    add = {"path": "x.parquet", "partitionValues": {"part": "p0"}, "size": 1, "modificationTime": 1, "dataChange": True}
    entry.write_text(json.dumps({"add": {**add, "deletionVector": vector}}))
    with pytest.raises(DataError, match=r"version 4 .* deletes rows by deletion vectors"):
        read(following, splits)


@pytest.mark.parametrize("name", ["/etc/x.parquet", "../x.parquet", "file:///etc/x.parquet", "s3://b/x", "a/%2E%2E/x"])
def test_a_file_outside_of_the_table_is_not_read(path: Path, name: str) -> None:
    following = source(path)
    splits = following.discover()
    add = {"path": name, "partitionValues": {"part": "p0"}, "size": 1, "modificationTime": 1, "dataChange": True}
    (path / "_delta_log" / f"{4:020}.json").write_text(json.dumps({"add": add}))
    with pytest.raises(DataError, match="has a file elsewhere"):
        read(following, splits)


def test_types_come_as_they_were_written(tmp_path: Path) -> None:
    moment = datetime(2026, 1, 1, 12, 30)
    table = pa.table(
        {
            "t": pa.array([moment, None], pa.timestamp("us")),
            "z": pa.array([moment.replace(tzinfo=UTC), None], pa.timestamp("us", "UTC")),
            "c": pa.array([Decimal("1.25"), None], pa.decimal128(10, 2)),
            "l": pa.array([[1, None], None], pa.list_(pa.int32())),
            "m": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
            "s": pa.array([{"a": 1, "b": ["x"]}, None], pa.struct({"a": pa.int16(), "b": pa.list_(pa.string())})),
            "p": pa.array([date(2026, 1, 1), None], pa.date32()),
            "q": pa.array([True, None], pa.bool_()),
            "d": pa.array([Decimal("2.50"), None], pa.decimal128(9, 2)),
        }
    )
    deltalake.write_deltalake(tmp_path, table, partition_by=["p", "q", "d"])
    following = source(tmp_path)
    splits = following.discover()
    by_time = sorted(read(following, splits), key=lambda row: row["t"] is None)
    assert by_time == table.to_pylist()
    deltalake.write_deltalake(tmp_path, table, mode="append")
    assert sorted(read(following, splits[-1:]), key=lambda row: row["t"] is None) == table.to_pylist()


def test_column_mapping_is_refused_by_name(tmp_path: Path) -> None:
    schema = deltalake.Schema.from_arrow(rows(0, 1).schema)
    deltalake.DeltaTable.create(tmp_path, schema, configuration={"delta.columnMapping.mode": "name"})
    with pytest.raises(BuildError, match="has column mapping, which this source does not read"):
        source(tmp_path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"start": "oldest"}, "start 'oldest' is unknown"),
        ({"start": -1}, "start -1 is unknown"),
        ({"start": datetime(2026, 1, 1)}, "start needs a zone"),
        ({"until": "end"}, "until 'end' is unknown"),
        ({"start": 5, "until": 3}, "until version 3 is before start 5"),
        ({"changes": True, "ignore_deletes": True}, "changes tell deletes"),
        ({"key": "k"}, "delta as a source has no option 'key'"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        source(path, **options)


def test_there_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="there is no Delta table"):
        source(tmp_path)


def test_one_subtask_reads_changes_so_that_none_overtakes_its_row(path: Path) -> None:
    flow = cw.Dataflow("changes")
    flow.read("all", cw.delta(path, changes=True)).write("out", cw.discard())
    flow.read("rows", cw.delta(path)).write("more", cw.discard())
    steps = flow.graph.steps
    assert (steps["all"].parallelism, steps["rows"].parallelism) == (1, None)
    with pytest.raises(BuildError, match="must not overtake"):
        flow.read("again", cw.delta(path, changes=True), parallelism=2)
