"""What the data source reads for which filters, without a session: a savepoint of known content, and its key groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, LessThan

import cutwater as cw
from cutwater.errors import ConfigError
from cutwater.spark.snapshot_sink import SnapshotSinkWriter
from cutwater.spark.snapshot_source import SnapshotReader, SnapshotSource
from cutwater.state_reader import reader

KEYS = 2_000


@pytest.fixture
def savepoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(reader, "_CHUNK_ROWS", 100)
    flow = cw.Dataflow("job")
    keyed = flow.read("in", cw.memory([], schema="k string, v long")).key_by("k")
    keyed.aggregate("counts", n=cw.count(), mean=cw.mean("v")).write("out", cw.discard())
    numbers = pa.array(range(KEYS), pa.int64())
    columns = {"k": [f"key {n}" for n in range(KEYS)], "n": numbers, "mean.sum": numbers, "mean.count": [2] * KEYS}
    return cw.write_savepoint(tmp_path / "begin", {"counts": pa.table(columns)}, flow=flow)


def rows(reader: SnapshotReader) -> list[dict[str, Any]]:
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_the_schema_and_all_rows(savepoint: str) -> None:
    source = SnapshotSource({"path": savepoint, "state": "counts"})
    types = {field.name: field.dataType.simpleString() for field in source.schema()}
    assert types == {"k": "string", "n": "bigint", "mean": "double", "key_group": "int", "subtask": "int"}
    reader = source.reader(source.schema())
    assert len(reader.partitions()) > 10
    found = rows(reader)
    assert {r["k"]: (r["n"], r["mean"]) for r in found} == {f"key {n}": (n, n / 2) for n in range(KEYS)}
    assert len(found) == KEYS


def test_a_filter_on_the_key_leaves_one_key_group(savepoint: str) -> None:
    reader = SnapshotReader({"path": savepoint, "step": "counts"})
    everything = [EqualTo(("k",), "key 17")]
    assert list(reader.pushFilters(everything)) == everything, "Spark filters them as well"
    (part,) = reader.partitions()
    assert part.value[1] - part.value[0] == 1
    found = rows(reader)
    assert len({r["key_group"] for r in found}) == 1
    assert "key 17" in {r["k"] for r in found}
    assert len(found) < KEYS / 10


def test_a_filter_on_key_groups_leaves_those(savepoint: str) -> None:
    reader = SnapshotReader({"path": savepoint, "state": "counts", "columns": "key_group,n"})
    reader.pushFilters([GreaterThanOrEqual(("key_group",), 5), LessThan(("key_group",), 9)])
    found = rows(reader)
    assert {r["key_group"] for r in found} == {5, 6, 7, 8}
    assert set(found[0]) == {"key_group", "n"}


def test_a_filter_that_cannot_match_a_key_changes_nothing(savepoint: str) -> None:
    reader = SnapshotReader({"path": savepoint, "state": "counts"})
    reader.pushFilters([EqualTo(("k",), 3), EqualTo(("n",), 3), EqualTo(("mean", "deep"), 3)])
    assert len(rows(reader)) == KEYS


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "no snapshot is named"),
        ({"path": "PATH"}, "no state is named"),
        ({"path": "PATH", "state": "count"}, "There are: counts.aggregates"),
        ({"path": "PATH", "state": "counts", "column": "n"}, "unknown option 'column'"),
        ({"path": "PATH-gone", "state": "counts"}, "no job and no savepoint"),
    ],
)
def test_a_wrong_option_is_told_with_what_there_is(options: dict[str, str], says: str, savepoint: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SnapshotSource({k: v.replace("PATH", savepoint) for k, v in options.items()}).schema()


def test_a_state_is_replaced_by_the_parts_of_a_frame(savepoint: str, tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "edited"), "base": savepoint, "state": "counts"}
    writer = SnapshotSinkWriter(options, overwrite=False)
    parts = [
        pa.record_batch({"k": [k], "n": [n], "mean.sum": [1.0], "mean.count": [n]}) for k, n in (("a", 1), ("b", 2))
    ]
    writer.commit([writer.write(iter([part])) for part in parts] + [writer.write(iter([]))])
    found = cw.Snapshot(tmp_path / "edited").table("counts", columns=["k", "n", "mean"]).to_pylist()
    assert sorted(found, key=lambda r: r["k"]) == [{"k": "a", "n": 1, "mean": 1.0}, {"k": "b", "n": 2, "mean": 0.5}]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["begin", "edited"]


@pytest.mark.parametrize(
    ("options", "overwrite", "says"),
    [({"path": "x", "base": "y", "state": "s"}, True, "never replaced"), ({"path": "x"}, False, "'base' is missing")],
)
def test_what_the_sink_refuses(options: dict[str, str], overwrite: bool, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SnapshotSinkWriter(options, overwrite=overwrite)
