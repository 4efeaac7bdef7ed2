"""What is kept and what goes."""

from __future__ import annotations

import pytest
from storage_world import JOB, expected_values, restored_values, take_checkpoint, write_parts

from cutwater.errors import FencedError
from cutwater.storage.job_log import JobLog
from cutwater.storage.reading import choose, next_checkpoint_id
from cutwater.storage.snapshot.retention import Retention, list_jobs
from cutwater.storage.store.local import LocalStore
from memory_store import Fault, MemoryStore


def begun(store, num_retained=2):
    log = JobLog(store, JOB, num_retained=num_retained)
    log.begin_attempt("driver")
    return log, Retention(store, log)


def checkpoints(store):
    return [n for n in store.names(JOB) if n.startswith("chk-")]


@pytest.mark.parametrize("num_retained", [1, 2, 3])
def test_the_newest_completed_stay_and_are_whole(num_retained):
    store = MemoryStore()
    log, retention = begun(store, num_retained)
    for n in range(1, 10):
        take_checkpoint(store, log, n)
        assert retention.collect() == []
        assert checkpoints(store) == [f"chk-{i}" for i in range(max(1, n - num_retained + 1), n + 1)]
        assert restored_values(store, choose(store, JOB, log.state)) == expected_values(n)


def test_nothing_completed_nothing_deleted():
    store = MemoryStore()
    log, retention = begun(store)
    write_parts(store, 1, log.attempt)
    assert retention.collect() == []
    assert checkpoints(store) == ["chk-1"]


def test_aborted_and_late_leftovers_below_the_newest_go_and_pending_ones_stay():
    store = MemoryStore()
    log, retention = begun(store)
    write_parts(store, 1, log.attempt)  # aborted
    take_checkpoint(store, log, 2)
    write_parts(store, 4, log.attempt)  # pending
    retention.collect()
    assert checkpoints(store) == ["chk-2", "chk-4"]
    take_checkpoint(store, log, 6)
    retention.collect()
    assert checkpoints(store) == ["chk-2", "chk-6"]
    write_parts(store, 4, log.attempt, incarnation=5)  # a slow worker's file of the subsumed one
    retention.collect()
    assert checkpoints(store) == ["chk-2", "chk-6"]


def test_leftovers_of_dead_attempts_go_once_ids_are_above_them():
    store = MemoryStore()
    log, _ = begun(store)
    take_checkpoint(store, log, 1)
    write_parts(store, 2, log.attempt)
    log, retention = begun(store)
    first = next_checkpoint_id(store, JOB, log.state)
    assert first == 3, "ids grow over leftovers on disk (A1)"
    retention.collect()
    assert checkpoints(store) == ["chk-1", "chk-2"]
    take_checkpoint(store, log, first)
    retention.collect()
    assert checkpoints(store) == ["chk-1", "chk-3"]


def test_a_fenced_driver_deletes_nothing():
    store = MemoryStore()
    old, retention = begun(store, num_retained=1)
    take_checkpoint(store, old, 1)
    take_checkpoint(store, old, 2)
    begun(store)
    before = dict(store.files)
    with pytest.raises(FencedError):
        retention.collect()
    assert store.files == before


def test_what_a_newer_attempt_wrote_is_not_touched():
    store = MemoryStore()
    log, retention = begun(store, num_retained=1)
    write_parts(store, 1, log.attempt + 1)
    take_checkpoint(store, log, 2)
    assert retention.collect() == []
    assert checkpoints(store) == ["chk-1", "chk-2"]


def test_a_failed_delete_is_a_warning_and_tried_again():
    store = MemoryStore([Fault(1, "error", "delete", "chk-1")])
    log, retention = begun(store, num_retained=1)
    take_checkpoint(store, log, 1)
    take_checkpoint(store, log, 2)
    (warning,) = retention.collect()
    assert "checkpoint 1 stays for now" in warning
    take_checkpoint(store, log, 3)
    assert retention.collect() == []
    assert checkpoints(store) == ["chk-3"]


def test_a_call_after_each_checkpoint_costs_little():
    store = MemoryStore()
    log, retention = begun(store)
    costs = []
    for n in range(1, 60):
        take_checkpoint(store, log, n)
        store.operations.clear()
        retention.collect()
        costs.append(len(store.operations))
    assert max(costs) <= 6  # one reads the manifest, which a publisher tells instead


def test_jobs_are_the_folders_with_a_log(tmp_path):
    store = LocalStore.open(tmp_path)
    JobLog(store, "b").begin_attempt("x")
    JobLog(store, "a").begin_attempt("x")
    store.create("c/data", b"")
    store.create("d/log/app.log", b"")
    store.create("file", b"")
    assert list_jobs(store) == ["a", "b"]
