from __future__ import annotations

import errno
import gc
import itertools
import os
import stat
from pathlib import Path

import psutil
import pytest
from sink_identity import SCHEMA, numbers

from cutwater.connectors.staging import UNGUARDED, Guard, PieceCut, StagingArea, StagingLog, open_piece, staging_beside
from cutwater.connectors.staging_folders import TargetFolder
from cutwater.errors import CorruptSnapshotError, StorageError
from damage import flipped, truncated
from reversal import Reversal

Area = StagingArea[TargetFolder]


@pytest.fixture
def area(tmp_path: Path) -> Area:
    return staging_beside(str(tmp_path), "uid", "out")


def log_of(area: Area, incarnation: int = 1, restored: list[PieceCut] | None = None, **limits: int) -> StagingLog:
    return StagingLog(area, SCHEMA, 0, incarnation, restored or (), **limits)


def rows(area: Area, cuts: list[PieceCut]) -> list[int]:
    return [n for cut in cuts for n in open_piece(area, cut, verify=True).read_all()["n"].to_pylist()]


def test_a_cut_holds_the_rows_before_it_and_none_behind(area: Area) -> None:
    log = log_of(area)
    log.append(numbers(1, 2))
    log.flush()
    early = log.cuts()
    log.append(numbers(3))
    log.flush()
    assert rows(area, early) == [1, 2]
    assert rows(area, log.cuts()) == [1, 2, 3]


def test_a_new_incarnation_reads_the_old_file_and_writes_its_own(area: Area) -> None:
    zombie = log_of(area)
    zombie.append(numbers(1, 2))
    zombie.flush()
    cuts = zombie.cuts()
    old = Path(area.path(cuts[0].file)).read_bytes()
    heir = log_of(area, incarnation=2, restored=cuts)
    zombie.append(numbers(99))
    zombie.flush()
    heir.append(numbers(3))
    heir.flush()
    zombie.close()
    assert rows(area, heir.cuts()) == [1, 2, 3]
    assert Path(area.path(cuts[0].file)).read_bytes()[: len(old)] == old
    assert [cut.file for cut in heir.cuts()] == [
        "wal-00000-0000000001-000000.arrows",
        "wal-00000-0000000002-000000.arrows",
    ]


def test_no_path_is_ever_written_twice(area: Area) -> None:
    first = log_of(area)
    first.append(numbers(1))
    first.flush()
    second = log_of(area)
    second.append(numbers(2))
    with pytest.raises(StorageError, match="File exists"):
        second.flush()


def test_many_small_batches_become_one_message(area: Area) -> None:
    log = log_of(area)
    for n in range(1000):
        log.append(numbers(n))
    log.flush()
    (cut,) = log.cuts()
    assert rows(area, [cut]) == list(range(1000))
    assert cut.length < 1000 * 8 + 1000


def test_empty_batches_make_no_file(area: Area) -> None:
    log = log_of(area)
    log.append(numbers())
    log.seal()
    assert log.empty
    assert area.folder.names() == []


@pytest.mark.parametrize("damage", ["gone", "torn", "flipped"])
def test_a_damaged_piece_is_found_at_the_restore_and_named(area: Area, damage: str) -> None:
    log = log_of(area)
    log.append(numbers(*range(100)))
    log.seal()
    cuts = log.cuts()
    path = Path(area.path(cuts[0].file))
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(body if damage == "flipped" else body[:-1])
    with pytest.raises(CorruptSnapshotError, match=cuts[0].file):
        log_of(area, incarnation=2, restored=cuts)


def test_every_flipped_byte_and_every_truncation_of_a_piece_is_found(area: Area) -> None:
    log = log_of(area)
    log.append(numbers(*range(5)))
    log.seal()
    (cut,) = log.cuts()
    path = Path(area.path(cut.file))
    body = path.read_bytes()
    assert len(body) == cut.length > 300
    open_piece(area, cut, verify=True).close()
    for damaged in itertools.chain(flipped(body), truncated(body)):
        path.write_bytes(damaged)
        with pytest.raises(CorruptSnapshotError, match=cut.file):
            open_piece(area, cut, verify=True)


def test_a_full_disk_stops_the_writer_for_good(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(area)
    log.append(numbers(1))
    log.flush()
    real = os.write
    budget = [100]

    def almost_full(fd: int, data: memoryview) -> int:
        if not budget[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(fd, data[: budget[0]])
        budget[0] -= written
        return written

    log.append(numbers(*range(5)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", almost_full)
        with pytest.raises(StorageError, match=r"cannot write '.*wal-.*No space left.*free space"):
            log.flush()
    log.append(numbers(2))
    with pytest.raises(StorageError, match="closed"):
        log.flush()


def test_a_writer_that_nobody_closed_gives_its_descriptor_back(area: Area) -> None:
    """A thousand of them once took a process over the 1,023 descriptors that select() can watch."""
    gc.collect()  # what other tests left
    before = psutil.Process().num_fds()
    for incarnation in range(1, 20):
        log = log_of(area, incarnation=incarnation)
        log.append(numbers(1))
        log.flush()
    del log
    gc.collect()
    assert psutil.Process().num_fds() <= before


def test_a_fifo_in_the_place_of_a_piece_does_not_hang_who_makes_it_durable(area: Area) -> None:
    log = log_of(area)
    log.append(numbers(1))
    log.flush()
    cuts = log.cuts()
    piece = Path(area.path(cuts[0].file))
    piece.unlink()
    os.mkfifo(piece)
    with pytest.raises(StorageError, match=f"cannot make durable '.*{piece.name}'"):
        log.make_durable(cuts)


def test_rows_that_were_removed_under_the_job_are_an_error(area: Area) -> None:
    log = log_of(area)
    log.append(numbers(1))
    log.flush()
    log.make_durable(log.cuts())
    os.rename(area.folder.path, area.folder.path + ".moved")
    with pytest.raises(StorageError, match="removed while the job was running"):
        log.make_durable(log.cuts())


def test_only_what_grew_is_synced(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(area)
    log.append(numbers(1))
    log.flush()
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    log.make_durable(log.cuts())
    assert synced == [area.path(log.cuts()[0].file), area.folder.path]
    log.make_durable(log.cuts())
    assert len(synced) == 2
    log.append(numbers(2))
    log.flush()
    log.make_durable(log.cuts())
    assert synced[2:] == synced[:1]


def test_the_end_takes_the_folders_away_but_no_other_jobs_and_no_later_attempts(area: Area, tmp_path: Path) -> None:
    other = staging_beside(str(tmp_path), "other", "out")
    other.folder.create()
    area.folder.create()
    late = "wal-00001-0000000002-000000.arrows"
    for name in ("wal-00000-0000000001-000000.arrows", late, "part-a-out-00007-0000000001-0000000001-0000.parquet"):
        Path(area.path(name)).touch()
    area.finish(1)
    assert area.folder.names() == [late]
    area.finish(2)
    assert os.listdir(tmp_path / "_cutwater") == ["other"]
    area.finish(2)


def test_a_folder_survives_a_neighbour_that_ends_at_the_same_time(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = os.mkdir, [2]

    def racing(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if path == "uid" and failures[0]:
            failures[0] -= 1
            os.rmdir(os.path.dirname(os.path.dirname(area.folder.path)))
        real(path, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", racing)
    area.folder.create()
    assert area.folder.exists()


@pytest.mark.parametrize(
    ("guard", "file", "folder"),
    [(UNGUARDED, 0o600, 0o700), (Guard(access="group"), 0o660, 0o770)],
    ids=["owner", "group"],
)
def test_a_staged_piece_is_its_owners_or_the_groups_whatever_the_umask(
    tmp_path: Path, guard: Guard, file: int, folder: int
) -> None:
    old = os.umask(0)
    try:
        area = staging_beside(str(tmp_path), "uid", "out", guard)
        log = log_of(area)
        log.append(numbers(1))
        log.flush()
    finally:
        os.umask(old)
    (piece,) = Path(area.folder.path).iterdir()
    above = [piece.parent, piece.parent.parent]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (piece, *above)] == [file, folder, folder]
    log.close()


REVERSALS = {
    "pieces have the modes of the umask": Reversal(
        TargetFolder.new_piece,
        '0o660 if self._access == "group" else 0o600',
        "0o666",
        lambda folder: test_a_staged_piece_is_its_owners_or_the_groups_whatever_the_umask(
            folder, UNGUARDED, 0o600, 0o700
        ),
    ),
    "folders have the modes of the umask": Reversal(
        TargetFolder._make,
        "0o777 if part == STAGING_FOLDER else 0o700",
        "0o777",
        lambda folder: test_a_staged_piece_is_its_owners_or_the_groups_whatever_the_umask(
            folder, UNGUARDED, 0o600, 0o700
        ),
    ),
}


@pytest.mark.parametrize("bug", REVERSALS)
def test_planted_bugs_are_found(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    REVERSALS[bug].is_seen(monkeypatch, tmp_path_factory)
