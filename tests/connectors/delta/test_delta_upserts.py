"""A Delta table that is what an updating stream says, whatever comes twice."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from delta_world import Job, table

import cutwater as cw
from cutwater.connectors.base import SinkSnapshot
from cutwater.connectors.delta import upserts as delta_upserts
from cutwater.connectors.delta.upserts import DeltaUpsertCommitter, DeltaUpsertSink
from cutwater.errors import BuildError, DataError, FencedError, StorageError

SCHEMA = pa.schema({"op": pa.string(), "k": pa.int64(), "v": pa.string()})
Row = tuple[str, int | None, str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


@pytest.fixture
def make(path: Path, tmp_path: Path) -> Callable[..., DeltaUpsertSink]:
    def made(**options: Any) -> DeltaUpsertSink:
        sink = cw.delta(path, mode="upsert", key="k", **options).as_sink()
        assert isinstance(sink, DeltaUpsertSink)
        return sink.bind(str(tmp_path / "job")).applying(("k",))

    return made


class Upserts(Job):
    def __init__(self, sink: Any, attempt: int, restored: SinkSnapshot | None = None) -> None:
        super().__init__(sink, attempt, restored, subtasks=1, schema=SCHEMA)

    def changes(self, checkpoint_id: int, *rows: Row) -> SinkSnapshot:
        self.writers[0].write(pa.record_batch(list(map(list, zip(*rows, strict=True))), schema=SCHEMA))
        return self.checkpoint(checkpoint_id)


def found(path: Path) -> dict[int | None, str]:
    rows = table(path).select(["k", "v"]).to_pylist()
    assert len({row["k"] for row in rows}) == len(rows)
    return {row["k"]: row["v"] for row in rows}


def test_rows_replace_others_and_leave_with_their_key(path: Path, make: Callable[..., DeltaUpsertSink]) -> None:
    job = Upserts(make(), 1)
    job.commit(job.changes(1, ("+I", 1, "a"), ("+I", 2, "b"), ("+I", 3, "c")))
    assert found(path) == {1: "a", 2: "b", 3: "c"}
    second = job.changes(2, ("-U", 1, "a"), ("+U", 1, "A"), ("-D", 2, "b"), ("+I", 4, "d"), ("-D", 4, "d"))
    job.commit(second)
    assert found(path) == {1: "A", 3: "c"}
    version = deltalake.DeltaTable(path).version()
    job.commit(second)
    Upserts(make(), 2, second)
    assert found(path) == {1: "A", 3: "c"}
    assert deltalake.DeltaTable(path).version() == version + 1  # the fence


def test_null_is_a_key_like_others(path: Path, make: Callable[..., DeltaUpsertSink]) -> None:
    job = Upserts(make(), 1)
    job.commit(job.changes(1, ("+I", None, "a")))
    job.commit(job.changes(2, ("-U", None, "a"), ("+U", None, "b")))
    assert found(path) == {None: "b"}
    job.commit(job.changes(3, ("-D", None, "b")))
    assert found(path) == {}


def test_several_checkpoints_in_one_commit_and_an_older_one_behind_it(
    path: Path, make: Callable[..., DeltaUpsertSink]
) -> None:
    job = Upserts(make(), 1)
    first = job.changes(1, ("+I", 1, "a"))
    both = job.changes(2, ("-U", 1, "a"), ("+U", 1, "b"))
    job.commit(SinkSnapshot(2, [*first.handles, *both.handles]))
    assert found(path) == {1: "b"}
    job.commit(first)
    assert found(path) == {1: "b"}


def test_changes_that_come_to_nothing_are_recorded(path: Path, make: Callable[..., DeltaUpsertSink]) -> None:
    job = Upserts(make(), 1)
    nothing = job.changes(1, ("+I", 1, "a"), ("-D", 1, "a"))
    job.commit(nothing)
    again = Upserts(make(), 2, nothing)
    again.commit(again.changes(2, ("+I", 1, "b")))
    assert found(path) == {1: "b"}


def test_drivers_that_wake_up_merge_nothing(path: Path, make: Callable[..., DeltaUpsertSink], tmp_path: Path) -> None:
    zombie = Upserts(make(), 1)
    late = zombie.changes(2, ("+I", 1, "late"))
    files = {file: file.read_bytes() for file in tmp_path.rglob("*.arrows")}
    Upserts(make(), 2)
    for file, body in files.items():
        file.write_bytes(body)
    with pytest.raises(FencedError):
        zombie.commit(late)
    with pytest.raises(FencedError):
        zombie.committer().commit(2, late.handles)
    assert found(path) == {}


def test_a_driver_that_dies_behind_the_merge_does_not_do_it_again(
    path: Path, make: Callable[..., DeltaUpsertSink], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Upserts(make(), 1)
    first = job.changes(1, ("+I", 1, "a"))
    real = DeltaUpsertCommitter._merge

    def dies_after(self: DeltaUpsertCommitter, *args: Any) -> None:
        real(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeltaUpsertCommitter, "_merge", dies_after)
        with pytest.raises(KeyboardInterrupt):
            job.commit(first)
    deltalake.DeltaTable(path).update(updates={"v": "'theirs'"})  # would be written over by a second merge
    Upserts(make(), 2, first)
    assert found(path) == {1: "theirs"}


def test_a_driver_whose_look_was_before_the_fence_merges_nothing(
    path: Path, make: Callable[..., DeltaUpsertSink], monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie = Upserts(make(), 1)
    late = zombie.changes(2, ("+I", 1, "late"))
    real = DeltaUpsertCommitter._rows
    calls: list[object] = []

    def paused(self: DeltaUpsertCommitter, due: Any) -> Any:
        rows = real(self, due)
        if not calls:
            calls.append(None)
            Upserts(make(), 2)
        return rows

    monkeypatch.setattr(DeltaUpsertCommitter, "_rows", paused)
    with pytest.raises(FencedError):
        zombie.commit(late)
    assert found(path) == {}


def test_others_change_the_table_at_the_same_time(path: Path, make: Callable[..., DeltaUpsertSink]) -> None:
    job = Upserts(make(), 1)
    job.commit(job.changes(1, *(("+I", n, "new") for n in range(10))))
    stop = threading.Event()
    theirs: list[int] = []

    def append() -> None:
        while not stop.is_set():
            key = 1_000 + len(theirs)
            with contextlib.suppress(deltalake.exceptions.CommitFailedError):  # it loses sometimes, and tries again
                deltalake.write_deltalake(path, pa.table({"k": [key], "v": ["theirs"]}), mode="append")
                theirs.append(key)
            stop.wait(0.03)

    thread = threading.Thread(target=append)
    thread.start()
    for n in range(2, 12):
        job.commit(job.changes(n, ("-U", n - 2, "new"), ("+U", n - 2, f"v{n}")))
    stop.set()
    thread.join()
    assert theirs
    assert found(path) == {n - 2: f"v{n}" for n in range(2, 12)} | dict.fromkeys(theirs, "theirs")


def test_random_changes_through_crashes_make_the_table_of_the_stream(
    path: Path, make: Callable[..., DeltaUpsertSink]
) -> None:
    choose = random.Random(7)
    job, attempt, wanted = Upserts(make(log_checkpoint_commits=7), 1), 1, dict[int | None, str]()
    for checkpoint_id in range(1, 31):
        rows: list[Row] = []
        for _ in range(choose.randrange(1, 12)):
            key: int | None = choose.choice([None, *range(8)])
            value = f"{checkpoint_id}-{len(rows)}"
            if key not in wanted:
                rows.append(("+I", key, value))
            elif choose.random() < 0.3:
                rows.append(("-D", key, wanted.pop(key)))
                continue
            else:
                rows += [("-U", key, wanted[key]), ("+U", key, value)]
            wanted[key] = value
        snapshot = job.changes(checkpoint_id, *rows)
        if choose.random() < 0.6:
            job.commit(snapshot)
        if choose.random() < 0.5:
            attempt += 1
            job = Upserts(make(log_checkpoint_commits=7), attempt, snapshot)
        else:
            job.commit(snapshot)
        assert found(path) == wanted


@pytest.mark.full
def test_many_rows(path: Path, make: Callable[..., DeltaUpsertSink]) -> None:
    """The library's check of double matches has been wrong for many rows."""
    count = 300_000
    job = Upserts(make(), 1)
    schema, ops = SCHEMA, pa.repeat(pa.scalar("+I"), count)
    for number, first in enumerate((0, count // 2, 0), start=1):
        values = pa.repeat(pa.scalar(f"v{number}"), count)
        keys = pa.array(range(first, first + count), pa.int64())
        job.writers[0].write(pa.RecordBatch.from_arrays([ops, keys, values], schema=schema))
        job.commit(job.checkpoint(number))
    counts = table(path).group_by("v").aggregate([("k", "count_distinct"), ("k", "count")]).sort_by("v").to_pylist()
    assert [(row["v"], row["k_count"]) for row in counts] == [("v2", count // 2), ("v3", count)]
    assert all(row["k_count"] == row["k_count_distinct"] for row in counts)


def test_what_is_refused(path: Path, make: Callable[..., DeltaUpsertSink], tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="told apart by k, v"):
        cw.delta(path, mode="upsert", key="k").as_sink().applying(("k", "v"))
    with pytest.raises(BuildError, match="no such key column 'k'"):
        make().check(pa.schema({"op": pa.string(), "v": pa.string()}))
    job = Upserts(make(), 1)
    with pytest.raises(DataError, match="is none of"):
        job.writers[0].write(pa.record_batch([["?"], [1], ["a"]], schema=SCHEMA))
    lost = job.changes(1, ("+I", 1, "a"))
    for file in tmp_path.rglob("*.arrows"):
        file.unlink()
    with pytest.raises(StorageError, match="are lost"):
        job.commit(lost)
    deltalake.DeltaTable(path).alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(BuildError, match="appendOnly"):
        make().check(SCHEMA)


def _merges_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delta_upserts.CommitNumber, "of", classmethod(lambda cls, value: cls(0, 0)))


def _finds_no_null(patch: pytest.MonkeyPatch) -> None:
    real = deltalake.DeltaTable.merge
    merge: Any = lambda self, rows, on, **options: real(self, rows, on.replace("IS NOT DISTINCT FROM", "="), **options)  # noqa: E731
    patch.setattr(deltalake.DeltaTable, "merge", merge)


@pytest.mark.parametrize("plant", [_merges_again, _finds_no_null], ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    path: Path,
    make: Callable[..., DeltaUpsertSink],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, StorageError)):
        test_random_changes_through_crashes_make_the_table_of_the_stream(path, make)
