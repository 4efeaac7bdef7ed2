"""Sources of users' readers, driven by hand: plans, ranges, rows that are made durable, rows that come again."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cutwater as cw
from cutwater.connectors.base import SourceSnapshot, Split
from cutwater.connectors.data_source import partitions, range_log, staged_source
from cutwater.connectors.data_source.staged_source import StagedSource
from cutwater.connectors.staging import Guard
from cutwater.errors import BuildError, CorruptSnapshotError, DataError, SealError, UserCodeError
from cutwater.storage.store.seal import PLAIN, Seal
from data_source_world import Numbers, Simple, Ticks, Whims, grow, logged

KEY = Seal([b"a key of this test"])
_PATIENCE_S = 20.0


def staged(folder: Path, cls: Any, seal: Seal = PLAIN, **given: Any) -> Any:
    return cw.data_source(cls, **given).as_source().stage(str(folder), seal)


def worker(source: Any, seal: Seal = PLAIN) -> Any:
    """The source as a worker has it."""
    from pyspark import cloudpickle

    return cloudpickle.loads(cloudpickle.dumps(source)).guarded(Guard(seal))


def read(reader: Any, rows: int, size: int = 100) -> list[Any]:
    """So many rows, or all there are; waits for them."""
    found: list[Any] = []
    deadline = time.monotonic() + _PATIENCE_S
    while len(found) < rows and not reader.exhausted:
        batch = reader.read(min(size, rows - len(found)))
        found += zip(*batch.to_pydict().values(), strict=True) if batch is not None else []
        if batch is None:
            assert time.monotonic() < deadline, f"{len(found)} of {rows} rows came"
            time.sleep(0.002)
    return found


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows"
    path.touch()
    return path


# -------------------------------------------------------------------------------------------------------------- batches


def test_partitions_are_asked_for_once_whoever_starts(tmp_path: Path) -> None:
    options = {"count": 100, "parts": 4, "log": tmp_path / "log"}
    first = staged(tmp_path / "in", Numbers, options=options)
    again = staged(tmp_path / "in", Numbers, options={**options, "parts": 2})
    assert first.discover() == again.discover()
    assert [split.id for split in first.discover()] == ["0", "1", "2", "3"]
    assert logged(tmp_path / "log") == ["partitions"]


@pytest.mark.parametrize("kind", ["tuples", "rows", "batches"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_reader_goes_on_from_any_position(tmp_path: Path, kind: str, size: int) -> None:
    source = staged(tmp_path / "in", Numbers, options={"count": 2_500, "kind": kind})
    [split] = source.discover()
    reader = worker(source).open(split, None, None)
    before = read(reader, 1_234, size)
    position = reader.position
    reader.close()
    reader = worker(source).open(split, position, None)
    assert reader.position == position
    after = read(reader, 5_000, 1000)
    assert before + after == [(n, f"r{n}") for n in range(2_500)]
    assert reader.exhausted


def test_rows_that_do_not_come_again_are_found(tmp_path: Path) -> None:
    source = staged(tmp_path / "in", Whims, options={"count": 500})
    [split] = source.discover()
    reader = source.open(split, None, None)
    read(reader, 300)
    with pytest.raises(UserCodeError, match="up to row 300 before the last checkpoint; read once more, the rows"):
        read(source.open(split, reader.position, None), 1)


def test_fewer_rows_than_before_are_found(tmp_path: Path) -> None:
    source = staged(tmp_path / "in", Numbers, options={"count": 500})
    [split] = source.discover()
    reader = source.open(split, None, None)
    read(reader, 300)
    fewer = staged(tmp_path / "other", Numbers, options={"count": 200})
    fewer_split = Split(split.id, {**split.data, "plan": fewer.plan.id})
    with pytest.raises(UserCodeError, match=r"up to row 300 .*only 200 rows come"):
        read(fewer.open(fewer_split, reader.position, None), 1)


def test_planted_a_hash_that_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions.RowDigest, "hexdigest", lambda self: "same")
    with pytest.raises(pytest.fail.Exception):
        test_rows_that_do_not_come_again_are_found(tmp_path)


def test_a_plan_of_another_job_is_refused(tmp_path: Path) -> None:
    one, other = (staged(tmp_path / name, Numbers, options={"count": 10}) for name in ("one", "other"))
    [split] = one.discover()
    with pytest.raises(DataError, match="the snapshot says how far another job has read Numbers"):
        other.goes_on({split.id: split.data}, other.discover())
    with pytest.raises(DataError, match="another job"):
        other.open(split, None, None)


def test_a_fork_reads_what_its_leader_has_planned(tmp_path: Path) -> None:
    leader = staged(tmp_path / "in", Numbers, options={"count": 10})
    made = cw.data_source(Numbers, options={"count": 10}).as_source()
    fork = made.stage(str(tmp_path / "in"), PLAIN, "owner", False)
    assert fork.discover() == leader.discover()
    made = cw.data_source(Whims, options={"count": 10}, replayable=False).as_source()
    with pytest.raises(BuildError, match="a fork cannot read"):
        made.stage(str(tmp_path / "in"), PLAIN, "owner", False)


@pytest.mark.parametrize("cls", [Ticks, Simple])
def test_a_fork_takes_no_range_from_its_leader(tmp_path: Path, rows: Path, cls: Any) -> None:
    made = cw.data_source(cls, options={"rows": rows}, replayable=True).as_source()
    leader = made.stage(str(tmp_path / "in"))
    fork = made.stage(str(tmp_path / "in"), PLAIN, "owner", False)
    assert leader.committer("uid", "rows") is not None
    assert fork.committer("another", "rows") is None


class Failing(Ticks):
    def streamReader(self, schema: Any) -> Any:
        reader = super().streamReader(schema)
        reader.commit = lambda end: 1 / 0
        return reader


def test_a_commit_that_fails_takes_nothing_away_and_is_tried_again(tmp_path: Path, rows: Path) -> None:
    source = staged(tmp_path / "in", Failing, options={"rows": rows}, replayable=True)
    for _ in range(2):
        grow(rows, 10)
        source.discover()
    committer = source.committer("uid", "rows")
    for _ in range(2):
        with pytest.raises(UserCodeError, match=r"(?s)commit\(\) failed for offset \{'id': 10\}.*ZeroDivisionError"):
            committer.retain([SourceSnapshot(1, {"0": {"range": 1, "part": 0}})])
    assert source.log.numbers() == [0, 1]


def test_a_commit_that_hangs_does_not_hold_the_end_up(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = staged(tmp_path / "in", Ticks, options={"rows": rows}, replayable=True)
    grow(rows, 10)
    source.discover()
    let = threading.Event()
    monkeypatch.setattr(source.driver._reader, "commit", lambda end: let.wait(_PATIENCE_S), raising=False)
    monkeypatch.setattr(staged_source, "_END_S", 0.05)
    with pytest.raises(UserCodeError, match="Ticks: its commit"):
        source.committer("uid", "rows").finish(SourceSnapshot(1, {"0": {"range": 1, "part": 0}}), 1)
    let.set()


# --------------------------------------------------------------------------------------------------- durable before use


def durable(tmp_path: Path, seal: Seal = PLAIN, **options: Any) -> tuple[Any, Split]:
    source = staged(tmp_path / "in", Whims, seal, options={"count": 3_000, **options}, replayable=False)
    return source, source.discover()[0]


def test_rows_are_what_the_first_reader_got_for_everybody(tmp_path: Path) -> None:
    gate, log = tmp_path / "gate", tmp_path / "log"
    source, split = durable(tmp_path, hold=0, gate=gate, log=log)
    readers = [worker(source).open(split, None, None) for _ in range(3)]  # two of lost workers
    while len(logged(log)) < 3:
        time.sleep(0.01)
    gate.touch()
    all_rows = [read(reader, 5_000) for reader in readers]
    assert all_rows[0] == all_rows[1] == all_rows[2]
    assert len(all_rows[0]) == 3_000
    left = [p.name for p in (tmp_path / "in" / range_log.folder_of(0)).iterdir()]
    assert len(left) == 2, f"rows that nobody reads stay: {left}"
    for skip in (0, 1, 1_000, 3_000):
        assert read(worker(source).open(split, {"rows": skip}, None), 5_000) == all_rows[0][skip:]


def test_planted_the_last_reader_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutwater.storage.store.local import LocalStore

    def create(self: LocalStore, path: str, data: bytes) -> bool:
        Path(self.local_folder(), path).unlink(missing_ok=True)
        return real(self, path, data)

    real = LocalStore.create
    monkeypatch.setattr(LocalStore, "create", create)
    monkeypatch.setattr(sys.modules[__name__], "_PATIENCE_S", 1.0)
    with pytest.raises((AssertionError, CorruptSnapshotError)):
        test_rows_are_what_the_first_reader_got_for_everybody(tmp_path)


def test_rows_that_are_gone_or_damaged_are_not_read_anew(tmp_path: Path) -> None:
    source, split = durable(tmp_path)
    read(source.open(split, None, None), 10)
    folder = tmp_path / "in" / range_log.folder_of(0)
    [marker] = folder.glob("*.json")
    [data] = folder.glob("*.arrows")
    whole = data.read_bytes()
    data.chmod(0o600)
    data.write_bytes(whole[:-100] + bytes(100))
    with pytest.raises(CorruptSnapshotError, match=r"staged rows .* are damaged"):
        read(source.open(split, {"rows": 10}, None), 10)
    marker.unlink()
    with pytest.raises(CorruptSnapshotError, match=r"were staged in .* are gone"):
        read(source.open(split, {"rows": 10}, None), 10)


def test_with_a_key_nothing_is_believed_that_is_not_sealed(tmp_path: Path) -> None:
    source, split = durable(tmp_path, KEY)
    rows = read(worker(source, KEY).open(split, None, None), 5_000)
    assert len(rows) == 3_000
    with pytest.raises(SealError, match="no key was given"):
        worker(source).open(split, None, None)
    plan = tmp_path / "in" / "plan.json"
    body = plan.read_bytes().rpartition(b"\n")[0]
    plan.chmod(0o600)
    plan.write_bytes(body + b"\n" + PLAIN.digest("input", body).encode())
    with pytest.raises(SealError, match="not sealed with the job's key"):
        worker(source, KEY).open(split, None, None)
    with pytest.raises(SealError, match="not sealed"):
        staged(tmp_path / "in", Whims, KEY, options={"count": 3_000}, replayable=False)


def test_a_damaged_plan_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = staged(tmp_path / "in", Numbers, options={"count": 10})
    [split] = source.discover()
    plan = tmp_path / "in" / "plan.json"
    plan.chmod(0o600)
    plan.write_bytes(plan.read_bytes().replace(b'"reader":"g', b'"reader":"h'))
    monkeypatch.setattr("cutwater.connectors.data_source.spark_api.unpickled", lambda text: pytest.fail("unpickled"))
    with pytest.raises(CorruptSnapshotError, match=r"plan.json is damaged"):
        worker(source).open(split, None, None)


# -------------------------------------------------------------------------------------------------------------- streams


def test_ranges_are_planned_once_and_read_in_order(tmp_path: Path, rows: Path) -> None:
    options = {"rows": rows, "parts": 2, "log": tmp_path / "log"}
    source = staged(tmp_path / "in", Ticks, options=options, replayable=True)
    assert source.discover() == []
    for count in (100, 50, 1):
        grow(rows, count)
        splits = source.discover()
    assert [split.id for split in splits] == ["0", "1"]
    grow(rows, 20)
    again = staged(tmp_path / "in", Ticks, options=options, replayable=True)  # another driver, with the first alive
    again.discover()
    grow(rows, 20)
    for _ in range(2):
        assert source.discover() == splits
    readers = [worker(source).open(split, None, None) for split in splits]
    first, second = read(readers[0], 50 + 25 + 1 + 20), read(readers[1], 50 + 25 + 20)
    assert [id for id, _ in first] == [*range(50), *range(100, 125), 150, *range(151, 161), *range(171, 181)]
    assert sorted(first + second) == [(n, f"r{n}") for n in range(191)]


def test_planted_each_driver_believes_its_own_plan(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: range_log.RangeLog, planned: range_log.Range) -> range_log.Range:
        real(self, planned)
        return planned

    real = range_log.RangeLog.append
    monkeypatch.setattr(range_log.RangeLog, "append", append)
    monkeypatch.setattr(sys.modules[__name__], "_PATIENCE_S", 1.0)
    with pytest.raises(AssertionError):
        test_ranges_are_planned_once_and_read_in_order(tmp_path, rows)


@pytest.mark.parametrize("stop", [0, 1, 30, 50, 60, 76])
@pytest.mark.parametrize("replayable", [True, None], ids=["replayable", "staged"])
def test_a_split_goes_on_from_any_position(tmp_path: Path, rows: Path, stop: int, replayable: bool | None) -> None:
    kind = "" if replayable else "whims"
    source = staged(tmp_path / "in", Ticks, options={"rows": rows, "kind": kind}, replayable=replayable)
    for count in (50, 1, 26):
        grow(rows, count)
        splits = source.discover()
    reader = worker(source).open(splits[0], None, None)
    before = read(reader, stop, 11)
    position = reader.position
    after = read(worker(source).open(splits[0], position, None), 77 - stop)
    assert [id for id, _ in before + after] == list(range(77))
    assert after == read(reader, 77 - stop) or replayable


def test_a_promise_that_is_not_kept_is_found(tmp_path: Path, rows: Path) -> None:
    grow(rows, 100)
    source = staged(tmp_path / "in", Ticks, options={"rows": rows, "kind": "whims"}, replayable=True)
    [split] = source.discover()
    reader = source.open(split, None, None)
    read(reader, 30)
    with pytest.raises(UserCodeError, match=r"offsets \{'id': 0\} to \{'id': 100\}.*though replayable=True says"):
        read(source.open(split, reader.position, None), 1)


def test_at_most_so_many_splits(tmp_path: Path, rows: Path) -> None:
    grow(rows, 70)
    source = staged(tmp_path / "in", Ticks, options={"rows": rows, "parts": 7}, splits=3, replayable=True)
    splits = source.discover()
    assert len(splits) == 3
    found = [read(source.open(split, None, None), n) for split, n in zip(splits, (30, 20, 20), strict=True)]
    assert [id for id, _ in found[1]] == [*range(10, 20), *range(40, 50)]
    assert sorted(itertools.chain(*found)) == [(n, f"r{n}") for n in range(70)]


def test_readers_that_are_behind_are_waited_for(tmp_path: Path, rows: Path) -> None:
    source = staged(tmp_path / "in", Ticks, options={"rows": rows}, replayable=True)
    for _ in range(40):
        grow(rows, 10)
        [split] = source.discover()
    planned = source.log.numbers()
    assert len(planned) == 16
    reader = worker(source).open(split, None, None)
    assert len(read(reader, 160)) == 160
    assert reader.read(1) is None  # says where it is
    source.discover()
    assert source.log.find(16).end == {"id": 400}, "one range holds all that came meanwhile"


@pytest.mark.parametrize("replayable", [True, None], ids=["replayable", "staged"])
def test_what_no_checkpoint_needs_goes_and_the_reader_hears_of_it(
    tmp_path: Path, rows: Path, replayable: bool | None
) -> None:
    """An older checkpoint may be restored: then what was not made durable is asked for once more."""
    log = tmp_path / "log"
    source = staged(tmp_path / "in", Ticks, options={"rows": rows, "parts": 2, "log": log}, replayable=replayable)
    for _ in range(8):
        grow(rows, 10)
        source.discover()
    at = lambda one, two: {"0": {"range": one, "part": 0}, "1": {"range": two, "part": 0}}  # noqa: E731
    committer = source.committer("uid", "rows")
    four = SourceSnapshot(4, {"0": at(0, 0)["0"]})  # the second split was not found yet
    five, six = SourceSnapshot(5, at(3, 6)), SourceSnapshot(6, at(7, 6))
    committer.settle([four], 1)
    committer.retain([four, five])
    assert source.log.numbers() == list(range(8))
    committer.retain([five, six])
    assert source.log.numbers() == [3, 4, 5, 6, 7]
    committer.retain([SourceSnapshot(7, {"0": {"range": 8, "part": 0}, "1": None})])  # the second was never begun
    committer.finish(SourceSnapshot(8, at(8, 8)), 1)
    committer.close()
    committer.close()
    assert source.log.numbers() == [7]
    commits = ["commit 30", "commit 80"] if replayable else ["commit 30", "commit 60", "commit 80"]
    assert logged(log) == [*commits, "stop"]
    with pytest.raises(DataError, match="range 3 of Ticks is gone"):
        worker(source).open(Split("0", {"plan": source.plan.id, "first": 0}), at(3, 6)["0"], None)


@pytest.mark.parametrize("kind", ["", "new", "now"])
def test_up_to_the_newest_offset(tmp_path: Path, rows: Path, kind: str) -> None:
    grow(rows, 2_000)
    options = {"rows": rows, "kind": kind}
    source = staged(tmp_path / "in", Ticks, options=options, until="latest", replayable=True)
    assert source.bounded
    [split] = source.discover()
    grow(rows, 500)
    again = staged(tmp_path / "in", Ticks, options=options, until="latest", replayable=True)
    assert again.discover() == [split]
    assert [id for id, _ in read(again.open(split, None, None), 9_999, 1000)] == list(range(2_000))
    assert len(source.log.numbers()) == (4 if kind == "now" else 1)


def test_a_limit_is_the_readers_own(tmp_path: Path, rows: Path) -> None:
    grow(rows, 1_000)
    source = staged(tmp_path / "in", Ticks, options={"rows": rows, "kind": "new"})
    for _ in range(3):
        source.discover()
    assert [source.log.find(n).end for n in source.log.numbers()] == [{"id": 700}, {"id": 1_000}]


class Bad(Ticks):
    def streamReader(self, schema: Any) -> Any:
        return BadReader(self.options["what"])


class BadReader:
    def __init__(self, what: str) -> None:
        self.what = what

    def initialOffset(self) -> Any:
        return {"at": self} if self.what == "initialOffset" else {"at": 0}

    def latestOffset(self) -> Any:
        return 1 / 0 if self.what == "latestOffset" else {"at": 1}

    def partitions(self, start: Any, end: Any) -> Any:
        return {"partitions": [7], "lock": [lambda: 1 / 0], "none": None}[self.what]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("initialOffset", r"Bad: initialOffset\(\) failed: the offset .* cannot be written as JSON"),
        ("latestOffset", r"(?s)Bad: latestOffset\(\) failed, behind offset \{'at': 0\}:.*ZeroDivisionError"),
        (
            "partitions",
            r"partitions\(\) failed for offsets \{'at': 0\} to \{'at': 1\}: .*a int, not only InputPartition",
        ),
        ("none", r"partitions\(\) gives a NoneType, not a list"),
    ],
)
def test_what_the_users_reader_does_wrong_is_named(tmp_path: Path, what: str, says: str) -> None:
    with pytest.raises(UserCodeError, match=says):
        staged(tmp_path / "in", Bad, options={"what": what}).discover()


# ------------------------------------------------------------------------------------------------------- simple streams


@pytest.mark.parametrize("stop", [0, 1, 499, 500, 501, 1_200])
@pytest.mark.parametrize("replayable", [True, None], ids=["replayable", "staged"])
def test_a_simple_stream_goes_on_from_any_position(
    tmp_path: Path, rows: Path, stop: int, replayable: bool | None
) -> None:
    log = tmp_path / "log"
    grow(rows, 1_200)
    options = {"rows": rows, "log": log, "kind": "" if replayable else "whims"}
    source = staged(tmp_path / "in", Simple, options=options, replayable=replayable)
    [split] = source.discover()
    reader = worker(source).open(split, None, None)
    before = read(reader, stop, 100)
    position = reader.position
    again = worker(source).open(split, position, None)
    assert again.position == position
    after = read(again, 1_200 - stop)
    assert [id for id, _ in before + after] == list(range(1_200))
    if replayable and stop % 500 and stop < 1_200:
        start = stop // 500 * 500
        assert f"again {start} {min(start + 500, 1_200)}" in logged(log)
    grow(rows, 5)
    assert [id for id, _ in read(again, 5)] == list(range(1_200, 1_205))


def test_a_simple_stream_up_to_its_end_and_its_commits(tmp_path: Path, rows: Path) -> None:
    grow(rows, 1_200)
    log = tmp_path / "log"
    source = staged(tmp_path / "in", Simple, options={"rows": rows, "log": log}, until="latest")
    [split] = source.discover()
    reader = worker(source).open(split, None, None)
    rows_ = read(reader, 600)
    committer = source.committer("uid", "rows")
    committer.retain([SourceSnapshot(1, {"0": None}), SourceSnapshot(2, {"0": reader.position})])
    rows_ += read(reader, 9_999, 1000)
    assert reader.exhausted
    assert [id for id, _ in rows_] == list(range(1_200))
    committer.finish(SourceSnapshot(3, {"0": reader.position}), 1)
    committer.close()
    assert [line for line in logged(log) if line.startswith("commit")] == ["commit 500", "commit 1200"]
    assert source.log.numbers() == []


class Stuck(Simple):
    def simpleStreamReader(self, schema: Any) -> Any:
        return StuckReader()


class StuckReader:
    def initialOffset(self) -> Any:
        return {"id": 0}

    def read(self, start: Any) -> Any:
        return iter([(1, "a")]), start


@pytest.mark.parametrize("replayable", [True, None])
def test_rows_without_a_new_offset_are_refused(tmp_path: Path, replayable: bool | None) -> None:
    source = staged(tmp_path / "in", Stuck, replayable=replayable)
    with pytest.raises(UserCodeError, match=r"gives rows behind offset .* and the same offset as their end"):
        read(source.open(source.discover()[0], None, None), 1)


def test_a_source_without_its_folder_says_so(tmp_path: Path) -> None:
    source = staged(tmp_path / "in", Numbers, options={"count": 10})
    os.unlink(tmp_path / "in" / "plan.json")
    with pytest.raises(DataError, match="what was planned to read of Numbers is gone"):
        worker(source).discover()
    assert isinstance(source, StagedSource)


def test_large_partitions_are_made_durable_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "_CHUNK_BYTES", 10_000)
    source, split = durable(tmp_path)
    rows = read(source.open(split, None, None), 5_000)
    found = partitions.staged_rows(source.log.store, range_log.folder_of(0), "rows-00000")
    assert found is not None
    assert len(found.chunks) > 3
    reads: list[int] = []
    real: Callable[..., Any] = source.log.store.read
    monkeypatch.setattr(
        source.log.store, "read", lambda path, at=0, length=None: reads.append(at) or real(path, at, length)
    )
    assert read(source.open(split, {"rows": 2_990}, None), 5_000) == rows[2_990:]
    assert len([at for at in reads if at]) == 1, "only the chunk with the rows is read"
