"""Incremental checkpoints of a real run: killed in the midst, it goes on from a chain of files."""

from __future__ import annotations

from pathlib import Path

from fake_host import FakeSpark
from runtime_world import assert_running_counts, counting, gated, kill_some, open_gate, wait_until

from cutwater.storage.job_log import JobLog
from cutwater.storage.snapshot.retention import list_shared, shared_files
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.local import LocalStore

ROWS, KEYS = 40_000, 4_000


def test_a_killed_job_goes_on_from_deltas_and_leaves_no_file_behind(
    start, fake_spark: FakeSpark, tmp_path: Path
) -> None:
    flow = counting("incremental", gated(tmp_path, ROWS, rate=4_000), tmp_path / "out", keys=KEYS)
    job = start(flow, inline_threshold_bytes=500)
    store = LocalStore(tmp_path / "chk")

    def chained() -> bool:
        checkpoints = job.status.checkpoints
        return 0 < checkpoints.last_written_bytes < checkpoints.last_size_bytes

    wait_until(chained, "an incremental checkpoint")
    kill_some(job, fake_spark, 1, seed=1)
    wait_until(lambda: job.status.checkpoints.restored_id > 0, "the restore")
    restored = job.status.checkpoints.restored_id
    wait_until(lambda: job.status.checkpoints.last_completed_id > restored and chained(), "another one")
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert_running_counts(tmp_path / "out", ROWS, keys=KEYS)
    retained = JobLog(store, "incremental").read().completed
    named = set[str]().union(*(shared_files(load_manifest(store, "incremental", c).entries) for c in retained))
    left = {file for file, _ in list_shared(store, "incremental")}
    assert named <= left
    newest = retained[0].checkpoint_id
    unnamed = {file for file in left - named if int(file.removeprefix("shared/").partition("-")[0]) <= newest}
    assert not unnamed, "the job has ended: nothing under way builds on what was retired"
