"""Copies of snapshots on the workers' machines and in other workers: restores that read nothing from storage."""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeSpark
from runtime_world import assert_running_counts, counting, gated, open_gate, wait_until

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.errors import JobFailedError, StorageError
from cutwater.storage.job_log import JobLog
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.local import LocalStore

ROWS, KEYS = 20_000, 997
StartJob = Callable[..., Job]


def watch_storage(folder: Path) -> Callable[[Any], None]:
    """Every read of state in the checkpoint directory is noted once ``folder/watch`` is there, and fails with
    ``folder/down``."""

    def prepare(args: Any = None) -> None:
        read = LocalStore.read

        def watched(self: LocalStore, path: str, offset: int = 0, length: int | None = None) -> bytes:
            if path.endswith(".data") and (folder / "watch").exists():
                with open(folder / "reads", "a") as out:
                    out.write(f"{path}\n")
                if (folder / "down").exists():
                    raise StorageError(f"cannot read {path}: planted")
            return read(self, path, offset, length)

        LocalStore.read = watched  # type: ignore[method-assign]

    return prepare


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, fake_spark: FakeSpark, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver and all workers note what they read of the checkpoint directory."""
    prepare = watch_storage(tmp_path)
    fake_spark.prepare = prepare
    monkeypatch.setattr(LocalStore, "read", LocalStore.read)  # so that it is put back
    prepare()
    return tmp_path


@pytest.fixture
def memory_disk() -> Iterator[Path]:
    """A directory that is not on the disk of the checkpoints; nothing may be left in it."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("needs a second file system")
    folder = Path("/dev/shm") / f"cutwater-test-{uuid.uuid4().hex[:12]}"
    folder.mkdir()
    yield folder
    left = [str(path) for path in folder.glob("*/*")]
    shutil.rmtree(folder)
    assert not left, f"files were left: {left}"


def flow_of(folder: Path) -> cw.Dataflow:
    return counting("copied", gated(folder, ROWS, rate=None), folder / "out", keys=KEYS)


def held(start: StartJob, folder: Path, **settings: Any) -> Job:
    """The job stands still behind a checkpoint whose copies are where they should be."""
    job = start(flow_of(folder), interval="1h", inline_threshold_bytes=0, **settings)
    wait_until(lambda: job.status.rows_read >= ROWS * 9 // 10 // 64 * 64, "the rows before the gate", job=job)
    copied(job, job.checkpoint())
    return job


def copied(job: Job, checkpoint_id: int, missing: bool = False) -> None:
    def done() -> bool:
        copies = job.status.copies
        return copies is not None and copies.checkpoint_id >= checkpoint_id and missing == bool(copies.missing_bytes)

    wait_until(done, f"the copies of checkpoint {checkpoint_id}", job=job)


def kill(job: Job, spark: FakeSpark, *slots: int) -> None:
    """SIGKILL, and wait until all run again."""
    before = job.status.restarts
    pids = [worker.pid for worker in job.status.workers if worker.slot in slots]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not set(pids) & set(spark.pids), "the deaths")

    def again() -> bool:
        status = job.status
        restored = status.restarts > before and status.phase == "running" and status.failures[-1].running_ms
        return bool(restored) or not job.is_active

    wait_until(again, "the restart", job=job)


def end(job: Job, folder: Path) -> None:
    open_gate(folder)
    assert job.await_termination(40)
    assert_running_counts(folder / "out", ROWS, keys=KEYS)


def reads(folder: Path) -> list[str]:
    return (folder / "reads").read_text().split() if (folder / "reads").exists() else []


def test_a_lost_workers_state_comes_from_the_memory_of_another_one(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark
) -> None:
    job = held(start, tmp_path, state_replicas=1)
    (tmp_path / "watch").touch()
    (tmp_path / "down").touch()
    kill(job, fake_spark, 1)
    copies = job.status.copies
    assert copies is not None, (job.status, job.exception())
    assert copies.restored_storage_bytes == 0 < copies.restored_replica_bytes
    assert not reads(tmp_path)
    (tmp_path / "down").unlink()
    end(job, tmp_path)
    assert job.status.restarts == 1


@pytest.mark.parametrize("replicas", [0, 1])
def test_where_files_are_copied_each_checkpoint_has_its_own(tmp_path: Path, start: StartJob, replicas: int) -> None:
    """A file that goes on would be copied again and again."""

    def shared() -> bool:
        store = LocalStore(str(tmp_path / "chk"))
        completed = JobLog(store, "copied").read().completed
        return any(entry.written for each in completed for entry in load_manifest(store, "copied", each).entries)

    flow = counting("copied", gated(tmp_path, 400_000, rate=5_000), tmp_path / "out", keys=50)
    job = start(flow, inline_threshold_bytes=0, state_replicas=replicas, num_retained=1_000)
    if replicas:
        wait_until(lambda: job.status.checkpoints.completed >= 20, "checkpoints", job=job)
        assert not shared()
    else:
        wait_until(shared, "a checkpoint in a file of an earlier one", job=job)
    job.cancel()


def spoil_copies(folder: Path) -> Callable[[Any], None]:
    """With ``folder/spoil`` every copy that another worker hands out has a wrong byte."""
    watch = watch_storage(folder)

    def prepare(args: Any) -> None:
        from cutwater.storage.snapshot.copies import MemoryShelf

        watch(args)
        read = MemoryShelf.read

        def spoiled(self: MemoryShelf, file: str, offset: int, length: int) -> bytes | memoryview:
            data = bytearray(read(self, file, offset, length))
            if (folder / "spoil").exists():
                data[len(data) // 2] ^= 1
            return bytes(data)

        MemoryShelf.read = spoiled  # type: ignore[method-assign]

    return prepare


@pytest.mark.full
def test_a_damaged_copy_is_passed_over_for_storage(tmp_path: Path, start: StartJob, fake_spark: FakeSpark) -> None:
    fake_spark.prepare = spoil_copies(tmp_path)
    job = held(start, tmp_path, state_replicas=1)
    (tmp_path / "watch").touch()
    (tmp_path / "spoil").touch()
    kill(job, fake_spark, 1)
    copies = job.status.copies
    assert copies is not None, (job.status, job.exception())
    assert copies.restored_storage_bytes > 0 == copies.restored_local_bytes == copies.restored_replica_bytes
    assert reads(tmp_path)
    assert any("a copy" in line and "passed over" in line and "damaged" in line for line in job.status.log)
    end(job, tmp_path)


@pytest.mark.full
def test_storage_has_it_when_owner_and_holder_die_together(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark
) -> None:
    job = held(start, tmp_path, state_replicas=1)
    kill(job, fake_spark, 0, 1)
    copies = job.status.copies
    assert copies is not None, (job.status, job.exception())
    assert copies.restored_storage_bytes > 0 == copies.restored_replica_bytes
    copied(job, job.checkpoint())  # what the checkpoint before wrote is held again, too
    (tmp_path / "watch").touch()
    (tmp_path / "down").touch()
    kill(job, fake_spark, 0)
    assert not reads(tmp_path)
    (tmp_path / "down").unlink()
    end(job, tmp_path)


@pytest.mark.full
def test_what_does_not_fit_is_told_and_read_from_storage(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark
) -> None:
    job = start(
        flow_of(tmp_path), interval="1h", inline_threshold_bytes=0, state_replicas=1, replica_memory_bytes=1_000
    )
    wait_until(lambda: job.status.rows_read >= ROWS * 9 // 10 // 64 * 64, "the rows before the gate", job=job)
    copied(job, job.checkpoint(), missing=True)
    assert job.status.copies.memory_bytes <= 2 * 1_000  # type: ignore[union-attr]
    wait_until(lambda: any("fewer copies" in line for line in job.status.log), "a word on it", job=job)
    kill(job, fake_spark, 1)
    assert job.status.copies.restored_storage_bytes > 0  # type: ignore[union-attr]
    end(job, tmp_path)


@pytest.mark.full
def test_a_restarted_worker_finds_the_copies_of_its_predecessor_on_the_machine(
    tmp_path: Path, memory_disk: Path, start: StartJob, fake_spark: FakeSpark
) -> None:
    job = held(start, tmp_path, local_copies_dir=str(memory_disk))
    assert job.status.copies.local_bytes > 0  # type: ignore[union-attr]
    (tmp_path / "watch").touch()
    (tmp_path / "down").touch()
    kill(job, fake_spark, 0, 1)
    copies = job.status.copies
    assert copies is not None, (job.status, job.exception())
    assert copies.restored_local_bytes + copies.restored_replica_bytes > 0 == copies.restored_storage_bytes
    assert not reads(tmp_path)
    (tmp_path / "down").unlink()
    end(job, tmp_path)


@pytest.mark.parametrize(
    ("recovery", "slots", "back"),
    [
        ("task", [1], "1 of 2 workers go back"),
        pytest.param("task", [1, 0], "1 of 2 workers go back", marks=pytest.mark.full),
        pytest.param("region", [1, 0], "", marks=pytest.mark.full),
    ],
)
def test_who_goes_back_beside_others_reads_copies_too(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, recovery: str, slots: list[int], back: str
) -> None:
    """With ``task`` the survivor, which stays where it is, has them; and it gets the next ones of its new neighbour."""
    job = held(start, tmp_path, state_replicas=1, recovery=recovery)
    for slot in slots:
        (tmp_path / "watch").touch()
        (tmp_path / "down").touch()
        kill(job, fake_spark, slot)
        copies = job.status.copies
        assert copies is not None, (job.status, job.exception())
        assert copies.restored_storage_bytes == 0 < copies.restored_replica_bytes
        assert not reads(tmp_path)
        (tmp_path / "down").unlink()
        (tmp_path / "watch").unlink()
        copied(job, job.checkpoint())
    assert all(back in failure.reason for failure in job.status.failures)
    end(job, tmp_path)
    assert job.status.restarts == len(slots)


@pytest.mark.full
@pytest.mark.parametrize("recovery", ["job", "task"])
@pytest.mark.parametrize("way", ["cancelled", "stopped", "failed", "killed at once"])
def test_no_copy_is_left_on_the_machine_however_the_job_ends(
    tmp_path: Path, memory_disk: Path, start: StartJob, fake_spark: FakeSpark, way: str, recovery: str
) -> None:
    """``memory_disk`` looks at its end."""
    job = held(start, tmp_path, local_copies_dir=str(memory_disk), restart="none", recovery=recovery)
    assert list(memory_disk.glob("*/*")), "void: no copies"
    if way == "cancelled":
        job.cancel()
    elif way == "stopped":
        job.stop()
    else:
        for pid in [w.pid for w in job.status.workers][: 1 if way == "failed" else None]:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(JobFailedError):
            job.await_termination(30)
    assert not job.is_active
