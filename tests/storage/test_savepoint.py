"""Savepoints on disk: canonical, open to any program, relocatable, every byte under a digest."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import polars as pl
import pyarrow as pa
import pytest

import cutwater as cw
from cutwater.errors import CorruptSnapshotError, FormatVersionError
from cutwater.state.segments import GROUP_COLUMN, Segment
from cutwater.storage.reading import choose, open_snapshot, resolve_snapshot, snapshots_at
from cutwater.storage.snapshot import savepoint_files as canonical_module
from cutwater.storage.snapshot.channel_log import ChannelLog, LogItem
from cutwater.storage.snapshot.manifest import Manifest, SplitRecord, StepRecord, SubtaskRecord
from cutwater.storage.snapshot.savepoint import Claim, SavepointManifest, delete_savepoint, publish_savepoint
from cutwater.storage.snapshot.savepoint_files import SavepointWriter, canonical
from cutwater.storage.store.local import LocalStore
from cutwater.ui.inspect import inspect_snapshot, render_inspect, verify_snapshot

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_ROWS = ((7, 9), (0, 5), (3, 1), (0, 2))

Row = tuple[int, str, int]
"""Key group, key, value."""


def rows_of(count: int, seed: int = 1) -> list[Row]:
    rng = random.Random(seed)
    return [(rng.randrange(8), f"key {i:04}", rng.randrange(1000)) for i in range(count)]


def segments_of(rows: list[Row], sizes: list[int] | None = None) -> list[Segment]:
    """The rows in ascending order of groups only, in segments of these sizes."""
    rows = sorted(rows, key=lambda row: row[0])
    found: list[Segment] = []
    last = -1
    for size in sizes or [len(rows)]:
        part, rows = rows[:size], rows[size:]
        if not part:
            continue
        groups, keys, values = zip(*part, strict=True)
        batch = pa.record_batch({GROUP_COLUMN: pa.array(groups, pa.uint16()), "key": keys, "value": pa.array(values)})
        kind = "delta" if groups[0] == last else "base"
        found.append(Segment("agg", kind, batch, (groups[0], groups[-1] + 1), identity=1))
        last = groups[-1]
    return found


def written(folder: Path, segments: list[Segment], log: ChannelLog | None = None) -> Path:
    """A savepoint of a step ``count`` in one subtask, and of rows in a loop."""
    store = LocalStore.open(folder.parent)
    writer = SavepointWriter(store, folder.name)
    files = writer.add_state("count", 0, range(8), segments)
    files += writer.add_log(log) if log is not None else []
    manifest = SavepointManifest(
        format_version=1,
        job="delays",
        uid="u" * 32,
        checkpoint_id=8,
        committed_by=9,
        attempt=2,
        protocol="aligned",
        max_parallelism=8,
        parallelism=1,
        triggered_ms=1_000,
        completed_ms=1_010,
        steps=[StepRecord("count", "aggregate", 1, ["key"], [[("n", "int64")]], [("n", "int64")])],
        subtasks=[SubtaskRecord(0, 0, 0, "aligned", splits={"read": [SplitRecord("s", None, 70)]})],
        files=files,
    )
    publish_savepoint(store, folder.name, manifest)
    return folder


def a_log() -> ChannelLog:
    batch = pa.record_batch({"value": pa.array([7, 8, 9])})
    return ChannelLog("count", 0, "count.0>count.1", (3, 0, 0), "receiver", 41, [LogItem(batch, 5), LogItem(None, 6)])


def content(path: Path) -> list[Row]:
    found = []
    for _, segment in open_snapshot(str(path)).segments("count", "agg"):
        columns = [segment.batch.column(name).to_pylist() for name in (GROUP_COLUMN, "key", "value")]
        found += list(zip(*columns, strict=True))
    return found


def test_what_was_written_comes_back_also_from_another_place(tmp_path: Path) -> None:
    rows = rows_of(500)
    path = written(tmp_path / "sp", segments_of(rows), a_log())
    assert sorted(content(path)) == sorted(rows)
    moved = tmp_path / "somewhere" / "else"
    moved.parent.mkdir()
    shutil.move(path, moved)
    snapshot = open_snapshot(str(moved / "savepoint.json"))
    assert snapshot.is_savepoint
    assert snapshot.manifest.uid == "u" * 32
    assert snapshot.manifest.subtasks[0].splits["read"][0].position == 70
    assert sorted(content(moved)) == sorted(rows)
    ((entry, items),) = snapshot.logs()
    assert (entry.channel, entry.side, entry.first_row) == ((3, 0, 0), "receiver", 41)
    assert [(i.batch and i.batch.to_pylist(), i.watermark) for i in items] == [
        ([{"value": 7}, {"value": 8}, {"value": 9}], 5),
        (None, 6),
    ]


def test_any_program_can_open_its_files(tmp_path: Path) -> None:
    rows = rows_of(300)
    path = written(tmp_path / "sp", segments_of(rows)) / "count" / "agg.00000-00007.arrow"
    read = pl.read_ipc(path.read_bytes())
    assert read.rows() == sorted(rows)


def test_no_absolute_path_is_in_it(tmp_path: Path) -> None:
    path = written(tmp_path / "sp", segments_of(rows_of(50)), a_log())
    for file in path.rglob("*"):
        assert not file.is_file() or str(tmp_path).encode() not in file.read_bytes()


@pytest.mark.parametrize("batch_rows", [7, 64, 1 << 16])
def test_the_same_state_gives_the_same_bytes_however_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_rows: int
) -> None:
    monkeypatch.setattr(canonical_module, "BATCH_ROWS", batch_rows)
    rows, rng = rows_of(400), random.Random(5)
    expected = None
    for n, sizes in enumerate([[400], [1] * 400, [13] * 40, [390, 10], [150, 1, 249]]):
        rng.shuffle(rows)
        path = written(tmp_path / f"sp{n}", segments_of(rows, sizes))
        found = {f.relative_to(path): f.read_bytes() for f in (path / "count").iterdir()}
        expected = expected or found
        assert found == expected, sizes
        assert content(path) == sorted(rows)
    segments = list(canonical(segments_of(rows)))
    replaced = [g for s in segments if s.kind == "base" and s.key_groups for g in range(*s.key_groups)]
    assert len(replaced) == len(set(replaced)), "a later base must not replace what an earlier one brought"
    assert len(segments) > 1 or batch_rows > 400


def test_rows_that_replace_others_come_behind_them() -> None:
    """As from a table that lies partly on disk: what is in memory is newer."""
    (disk,), (memory,) = segments_of([(0, "a", 1), (5, "b", 2)]), segments_of([(0, "a", 9)])
    found = list(canonical([disk, replace(memory, kind="delta")]))
    assert [(s.kind, s.batch.column("value").to_pylist()) for s in found] == [("base", [1, 2]), ("delta", [9])]


def test_state_whose_order_says_something_stays_as_it_is() -> None:
    batch = pa.record_batch({GROUP_COLUMN: pa.array([3, 3], pa.uint16()), "row": pa.array([9, 1])})
    given = [Segment("left", "base", batch, (0, 8)), Segment("left", "delta", batch.slice(0, 0), None)]
    assert list(canonical(given)) == given


def test_every_byte_is_under_a_digest(tmp_path: Path) -> None:
    whole = written(tmp_path / "sp", segments_of(rows_of(40)), a_log())
    address = resolve_snapshot(str(whole))
    report = choose(address.store, address.job, snapshots_at(address))
    assert report is not None
    rng = random.Random(3)
    for file in sorted(p for p in whole.rglob("*") if p.is_file()):
        data = file.read_bytes()
        for place in sorted({0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(60))}):
            file.write_bytes(data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :])
            with pytest.raises(CorruptSnapshotError):
                choose(address.store, address.job, snapshots_at(address))
        for length in (0, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:length])
            with pytest.raises(CorruptSnapshotError):
                choose(address.store, address.job, snapshots_at(address))
        file.unlink()
        with pytest.raises((CorruptSnapshotError, cw.ConfigError)):
            choose(address.store, address.job, snapshots_at(resolve_snapshot(str(whole))))
        file.write_bytes(data)
    assert choose(address.store, address.job, snapshots_at(address)) is not None


def test_one_without_manifest_is_none(tmp_path: Path) -> None:
    path = written(tmp_path / "sp", segments_of(rows_of(10)))
    (path / "savepoint.json").unlink()
    with pytest.raises(cw.ConfigError, match="no job and no savepoint"):
        resolve_snapshot(str(path))


def test_a_newer_format_is_refused_with_its_version(tmp_path: Path) -> None:
    path = written(tmp_path / "sp", segments_of(rows_of(10)))
    store = LocalStore(tmp_path)
    body = msgspec.json.decode((path / "savepoint.json").read_bytes().split(b"\n")[0], type=SavepointManifest)
    publish_savepoint(store, "newer", msgspec.structs.replace(body, format_version=99))
    with pytest.raises(FormatVersionError, match="version 99, this release knows 1, 2"):
        open_snapshot(str(tmp_path / "newer"))


def test_inspect_and_verify_take_savepoints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "sp", segments_of(rows_of(40)), a_log())
    found = resolve_snapshot(str(path))
    info = inspect_snapshot(found.store, found.job)
    assert (info["savepoint"], info["job"], info["checkpoint_id"]) == (True, "delays", 8)
    assert render_inspect(info).startswith("savepoint 8 of delays\n")
    assert verify_snapshot(found.store, found.job)["ok"]
    file = path / "count" / "agg.00000-00007.arrow"
    data = file.read_bytes()
    file.write_bytes(data[:-3] + b"\0" + data[-2:])  # behind all batches
    (report,) = verify_snapshot(found.store, found.job)["checkpoints"]
    assert [p["file"] for p in report["problems"]] == ["sp/count/agg.00000-00007.arrow"]


def test_golden_files_of_every_version_can_be_read_for_ever() -> None:
    """``golden/savepoint-1`` was made by ``make_golden`` below with the first release that took savepoints."""
    snapshot = open_snapshot(str(GOLDEN / "savepoint-1"))
    report = choose(snapshot.store, snapshot.folder, snapshots_at(resolve_snapshot(str(GOLDEN / "savepoint-1"))))
    assert report is not None
    manifest = snapshot.manifest
    assert (manifest.job, manifest.checkpoint_id, manifest.attempt, manifest.parallelism) == ("delays", 8, 2, 1)
    assert [(s.id, s.kind, s.keys) for s in manifest.steps] == [("count", "aggregate", ["key"])]
    assert manifest.subtasks[0].splits["read"] == [SplitRecord("s", None, 70)]
    assert content(GOLDEN / "savepoint-1") == [(g, f"key {i}", 100 * i) for g, i in ((0, 2), (0, 5), (3, 1), (7, 9))]
    ((entry, items),) = snapshot.logs()
    assert (entry.channel, entry.first_row, items[0].batch.to_pydict()) == ((3, 0, 0), 41, {"value": [7, 8, 9]})


def test_a_savepoint_says_all_that_a_checkpoint_says() -> None:
    assert set(Manifest.__struct_fields__) - {"entries"} <= set(SavepointManifest.__struct_fields__)


def make_golden(version: int) -> None:
    """Run once for each version of the format."""
    written(GOLDEN / f"savepoint-{version}", segments_of([(g, f"key {i}", 100 * i) for g, i in GOLDEN_ROWS]), a_log())


def test_deleting_takes_what_belongs_to_it_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path / "sp", segments_of(rows_of(10)), a_log())
    address = resolve_snapshot(str(path))
    digest = snapshots_at(address).completed[0].digest
    assert not delete_savepoint(address.store, address.job, "another")
    assert path.exists()
    (path / "count" / "notes.txt").write_text("mine")
    assert delete_savepoint(address.store, address.job, digest)
    assert [p.name for p in path.rglob("*") if p.is_file()] == ["notes.txt"]
    assert not delete_savepoint(address.store, address.job, digest)


def test_a_writer_that_gives_up_leaves_no_file(tmp_path: Path) -> None:
    writer = SavepointWriter(LocalStore.open(tmp_path), "sp")
    writer.add_state("count", 0, range(8), segments_of(rows_of(10)))
    writer.abort()
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_claim_removes_the_savepoint_that_bears_its_mark_and_no_other(tmp_path: Path) -> None:
    """Whoever can write ``claim.json`` names savepoints of others in it; what bears their claim's mark stays."""
    store = LocalStore.open(tmp_path)
    theirs, mine = (written(tmp_path / name, segments_of(rows_of(10))) for name in ("theirs", "mine"))
    digest = {p: snapshots_at(resolve_snapshot(str(p))).completed[0].digest for p in (theirs, mine)}
    Claim(store, "another job").take(str(tmp_path), "theirs", digest[theirs], 1)
    Claim(store, "job").take(str(tmp_path), "mine", digest[mine], 1)
    path = tmp_path / "job" / "claim.json"
    honest = path.read_bytes()
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(honest) | {"folder": "theirs", "digest": digest[theirs]}))
    assert Claim(store, "job").collect(range(9), needed=1) == []
    assert (theirs / "savepoint.json").exists()
    path.write_bytes(honest)
    assert Claim(store, "job").collect(range(9), needed=1) == []
    assert not mine.exists()
    assert (theirs / "savepoint.json").exists()
