"""The job log: attempts, order, ownership, size."""

from __future__ import annotations

import json
import os

import pytest

from cutwater.errors import (
    ConfigError,
    CorruptSnapshotError,
    FencedError,
    ForeignDirectoryError,
    FormatVersionError,
    InvariantError,
)
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import CheckpointCompleted, JobEnded, JobFinished, LogState, RolledBack, attached_to
from cutwater.storage.store.local import LocalStore
from memory_store import Fault, MemoryStore


def open_log(store, **options):
    return JobLog(store, "job", clock_ms=lambda: 1_700_000_000_000, **options)


def completed(log, checkpoint_id):
    return CheckpointCompleted(checkpoint_id, log.attempt, "d", f"chk-{checkpoint_id}/m", 5)


def test_a_job_that_never_ran_has_an_empty_state():
    assert open_log(MemoryStore()).read() == LogState()


def test_first_attempt_creates_the_job_with_a_uid_that_stays():
    store = MemoryStore()
    first = open_log(store, name="delays")
    assert first.begin_attempt("one") == 1
    second = open_log(store, name="other program")
    assert second.begin_attempt("two") == 2
    assert second.state.uid == first.state.uid
    assert second.state.name == "delays"
    assert len(first.state.uid) == 32
    assert store.names("job/log") == ["000000000001.json", "000000000002.json", "000000000003.json"]


def test_completed_checkpoints_come_newest_first_and_are_bounded():
    log = open_log(MemoryStore(), num_retained=2)
    log.begin_attempt("one")
    for n in (3, 4, 9):
        log.append(completed(log, n))
    assert [c.checkpoint_id for c in log.state.completed] == [9, 4]
    assert log.state.latest.checkpoint_id == log.state.newest_id == 9


def test_going_back_takes_later_checkpoints_out_of_the_history_and_ids_grow_on():
    store = MemoryStore()
    log = open_log(store)
    log.begin_attempt("one")
    for n in (3, 4, 9):
        log.append(completed(log, n))
    log.append(RolledBack(log.attempt, 4, 6))
    assert [c.checkpoint_id for c in open_log(store).read().completed] == [4, 3]
    with pytest.raises(InvariantError, match="ids grow"):
        log.append(completed(log, 5))
    log.append(completed(log, 10))
    assert [c.checkpoint_id for c in log.state.completed] == [10, 4, 3]


def test_a_fenced_driver_does_not_go_back():
    store = MemoryStore()
    old, new = open_log(store), open_log(store)
    old.begin_attempt("one")
    old.append(completed(old, 1))
    new.begin_attempt("two")
    with pytest.raises(FencedError):
        old.append(RolledBack(old.attempt, 1, 6))


def test_a_fenced_driver_is_told_by_whom_and_adds_nothing():
    store = MemoryStore()
    old, new = open_log(store), open_log(store)
    old.begin_attempt("host-a")
    new.begin_attempt("host-b pid 7")
    before = dict(store.files)
    with pytest.raises(FencedError, match=r"attempt 1 .* superseded by attempt 2 of host-b pid 7, begun 2023-11-14T22"):
        old.append(completed(old, 1))
    assert store.files == before
    with pytest.raises(FencedError):
        old.append(JobFinished(old.attempt, 1, 5))


def test_check_fence_sees_a_newer_attempt_without_writing():
    store = MemoryStore()
    old, new = open_log(store), open_log(store)
    old.begin_attempt("a")
    old.check_fence()
    new.begin_attempt("b")
    before = dict(store.files)
    with pytest.raises(FencedError):
        old.check_fence()
    assert store.files == before


def test_a_restarting_driver_does_not_take_the_job_back():
    store = MemoryStore()
    mine, other = open_log(store), open_log(store)
    assert mine.begin_attempt("a") == 1
    assert mine.begin_attempt("a", after=1) == 2
    other.begin_attempt("b")
    with pytest.raises(FencedError, match=r"attempt 2 .* superseded by attempt 3 of b"):
        mine.begin_attempt("a", after=2)
    assert open_log(store).read().attempt == 3


def test_a_driver_that_was_about_to_replace_another_does_not_begin_a_finished_job():
    store = MemoryStore()
    mine, other = open_log(store), open_log(store)
    other.begin_attempt("b")
    mine.read()
    other.append(JobFinished(1, 0, 5))
    with pytest.raises(FencedError, match="finished, with attempt 1 of b"):
        mine.begin_attempt("a", after=1)
    assert open_log(store).read().finished


def test_a_new_attempt_removes_what_dead_drivers_left_in_the_log(tmp_path):
    store = LocalStore.open(tmp_path)
    open_log(store).begin_attempt("a")
    old = tmp_path / "job" / "log" / ".cw-tmp-otherhost-1-x"
    old.touch()
    os.utime(old, (0, 0))
    open_log(store).begin_attempt("b")
    assert not old.exists()


def test_an_old_first_entry_alone_is_not_taken_for_a_new_job():
    """A driver that slept since the very first start left it at a deleted number, and all others were lost."""
    store = MemoryStore()
    log = open_log(store, keep=2)
    log.begin_attempt("a")
    first = store.files["job/log/000000000001.json"]
    for n in range(1, 9):
        log.append(completed(log, n))
    store.files = {"job/log/trimmed": b"", "job/log/000000000001.json": first}
    with pytest.raises(CorruptSnapshotError, match=r"newer entries .* are missing"):
        open_log(store).read()


def test_a_log_that_began_no_attempt_cannot_append():
    store = MemoryStore()
    open_log(store).begin_attempt("a")
    reader = open_log(store)
    reader.read()
    with pytest.raises(FencedError):
        reader.append(completed(reader, 1))


def test_an_event_of_an_earlier_attempt_of_the_same_driver_is_refused():
    log = open_log(MemoryStore())
    log.begin_attempt("a")
    late = completed(log, 1)
    log.begin_attempt("a")
    with pytest.raises(FencedError, match="attempt 1"):
        log.append(late)


@pytest.mark.parametrize("checkpoint_id", [1, 2])
def test_checkpoint_ids_only_grow(checkpoint_id):
    log = open_log(MemoryStore())
    log.begin_attempt("a")
    log.append(completed(log, 2))
    with pytest.raises(InvariantError, match="ids grow"):
        log.append(completed(log, checkpoint_id))


def test_finished_until_a_new_attempt_begins():
    log = open_log(MemoryStore())
    log.begin_attempt("a")
    log.append(JobFinished(1, 0, 5))
    assert log.read().finished
    log.begin_attempt("b")
    assert not log.read().finished


@pytest.mark.parametrize("outcome", ["stopped", "cancelled", "failed"])
def test_ended_early_until_a_new_attempt_begins(outcome):
    store = MemoryStore()
    log = open_log(store)
    log.begin_attempt("a")
    log.append(JobEnded(1, outcome, "because", 5))
    found = open_log(store).read()
    assert (found.outcome, found.reason, found.finished) == (outcome, "because", False)
    open_log(store).begin_attempt("b")
    found = log.read()
    assert (found.outcome, found.reason) == ("", "")


def test_a_fenced_driver_does_not_say_that_the_job_ended():
    store = MemoryStore()
    old, new = open_log(store), open_log(store)
    old.begin_attempt("a")
    new.begin_attempt("b")
    with pytest.raises(FencedError):
        old.append(JobEnded(1, "failed", "fenced", 5))
    assert open_log(store).read().outcome == ""


def test_a_long_log_stays_small_and_costs_a_bounded_read():
    store = MemoryStore()
    log = open_log(store)
    log.begin_attempt("a")
    most = 0
    for n in range(1, 1_000):
        log.append(completed(log, n))
        most = max(most, len(store.names("job/log")))
    assert most <= 2 * 64 + 2
    store.operations.clear()
    assert open_log(store).read() == log.state
    assert len(store.operations) <= 2 * 64 + 1
    assert max(len(data) for data in store.files.values()) < 1_000


def test_an_append_costs_one_create_and_one_read():
    store = MemoryStore()
    log = open_log(store)
    log.begin_attempt("a")
    store.operations.clear()
    log.append(completed(log, 1))
    assert store.operations == [("create", "job/log/000000000003.json"), ("read", "job/log/000000000002.json")]


def test_a_trim_that_fails_stops_there_and_is_made_up_for_later():
    store = MemoryStore([Fault(2, "error", "delete")])
    log = open_log(store, keep=2)
    log.begin_attempt("a")
    for n in range(1, 5):
        log.append(completed(log, n))
    numbers = [int(n[:12]) for n in store.names("job/log") if n[0] == "0"]
    assert numbers == list(range(numbers[0], 7)), "deleted upwards, no hole"
    for n in range(5, 12):
        log.append(completed(log, n))
    assert len(store.names("job/log")) <= 6


@pytest.mark.parametrize("num_retained", [1, 3, 20])
def test_entries_that_hold_manifests_of_retained_checkpoints_stay_and_others_go(num_retained):
    store = MemoryStore()
    log = open_log(store, keep=2, num_retained=num_retained)
    log.begin_attempt("a")
    for n in range(1, 60):
        log.append(completed(log, n), f"manifest {n}\n".encode())
        retained = open_log(store).read().completed
        assert [c.checkpoint_id for c in retained] == list(range(n, max(0, n - num_retained), -1))
        for each in retained:
            assert attached_to(store.files[f"job/{each.path}"]) == f"manifest {each.checkpoint_id}\n".encode()
        assert len(store.names("job/log")) <= max(num_retained, 2) + 4
    assert not any("chk-" in path for path in store.files)


def test_what_lies_behind_an_entry_without_manifest_is_damage():
    store = MemoryStore()
    open_log(store).begin_attempt("a")
    store.files["job/log/000000000002.json"] += b"{}"
    with pytest.raises(CorruptSnapshotError, match=r"000000000002.json is damaged: something lies behind it"):
        open_log(store).read()


def test_a_gap_is_told_and_filled_so_that_no_late_driver_finds_its_number_free():
    store = MemoryStore()
    late = open_log(store)
    late.begin_attempt("late")
    log = open_log(store)
    log.begin_attempt("a")
    for n in (1, 2, 3):
        log.append(completed(log, n))
    store.delete("job/log/000000000003.json")  # where the second attempt began: what the late driver wants next
    log = open_log(store)
    assert [c.checkpoint_id for c in log.read().completed] == [3, 2, 1]
    assert log.damaged == {3: "log entry job/log/000000000003.json is missing"}
    log.begin_attempt("b")
    with pytest.raises(FencedError, match="superseded by attempt 3 of b"):
        late.append(completed(late, 4))
    again = open_log(store)
    again.read()
    assert again.damaged == {3: ""}, "it was told"


def test_without_any_entry_below_the_newest_the_log_is_refused():
    """It may be what a late driver left at a number that had been trimmed, and all newer ones be lost."""
    store = MemoryStore()
    log = open_log(store)
    log.begin_attempt("a")
    for n in (1, 2, 3):
        log.append(completed(log, n))
    for seq in (1, 2, 3, 4):
        store.delete(f"job/log/{seq:012d}.json")
    with pytest.raises(CorruptSnapshotError, match=r"log entry job/log/000000000001\.json is missing"):
        open_log(store).read()


@pytest.mark.parametrize("gone", [[5], [4, 5], [2, 3, 4, 5]])
@pytest.mark.parametrize("changed", [False, True])
def test_a_driver_whose_newest_entry_is_gone_or_changed_stops_at_once(gone, changed):
    """Another one may have begun, and be gone, too; the next start finds what was written last, and goes on from it."""
    store = MemoryStore()
    log = open_log(store)
    log.begin_attempt("a")
    for n in (1, 2, 3):
        log.append(completed(log, n))
    for seq in gone:
        path = f"job/log/{seq:012d}.json"
        store.delete(path)
        if changed:
            store.files[path] = b"{}"
    for _ in range(2):
        with pytest.raises(FencedError, match=r"000000000005\.json, the newest that attempt 1 knew, is gone or was"):
            log.append(completed(log, 4))
    with pytest.raises(FencedError, match="is gone or was changed"):
        log.begin_attempt("a", after=1)
    log = open_log(store)
    assert log.read().newest_id == 4
    assert log.begin_attempt("b") == 2
    log.append(completed(log, 5))


def test_a_driver_goes_on_whatever_is_lost_below_its_newest_entry():
    store = MemoryStore()
    log = open_log(store)
    log.begin_attempt("a")
    for n in (1, 2, 3):
        log.append(completed(log, n))
    for seq in (2, 3, 4):
        store.delete(f"job/log/{seq:012d}.json")
    log.append(completed(log, 4))
    assert log.begin_attempt("a", after=1) == 2
    log.append(completed(log, 5))
    assert open_log(store).read().newest_id == 5


def test_a_newer_log_format_is_refused_with_its_version():
    import xxhash

    store = MemoryStore()
    open_log(store).begin_attempt("a")
    path = "job/log/000000000002.json"
    entry = json.loads(store.files[path].splitlines()[0])
    body = json.dumps({**entry, "version": 7}).encode()
    store.files[path] = body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n"
    with pytest.raises(FormatVersionError, match="log format version 7, this release knows 1"):
        open_log(store).read()


@pytest.mark.parametrize("foreign", ["data.parquet", "offsets/0", "log/app.log"])
def test_a_folder_of_another_program_is_refused(tmp_path, foreign):
    store = LocalStore.open(tmp_path)
    store.create(f"job/{foreign}", b"precious")
    with pytest.raises(ForeignDirectoryError, match=r"holds .* and no job log"):
        open_log(store).begin_attempt("a")
    assert store.list() == [f"job/{foreign}"]


def test_input_staged_before_the_first_attempt_is_not_foreign():
    store = MemoryStore()
    store.create("job/input/flights/part-0.parquet", b"")
    assert open_log(store).begin_attempt("a") == 1


def test_checkpoints_without_a_log_are_no_fresh_start():
    store = MemoryStore()
    store.create("job/chk-3/manifest-1.json", b"")
    with pytest.raises(CorruptSnapshotError, match="entries of job/log are missing although the job has run"):
        open_log(store).begin_attempt("a")


def test_a_deleted_log_stops_the_driver_before_it_commits():
    store = MemoryStore()
    log = open_log(store)
    log.begin_attempt("a")
    store.delete("job")
    with pytest.raises(FencedError, match="is gone or was changed"):
        log.append(completed(log, 1))


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "-x", "a\n"])
def test_job_names_are_folder_names(name):
    with pytest.raises(ConfigError, match="cannot name a folder"):
        JobLog(MemoryStore(), name)


def test_the_log_reads_as_text():
    store = MemoryStore()
    log = open_log(store)
    log.begin_attempt("host-a")
    first, second = store.files["job/log/000000000002.json"].splitlines()
    entry = json.loads(first)
    assert entry["event"] == {"type": "attempt_began", "attempt": 1, "driver": "host-a", "time_ms": 1_700_000_000_000}
    assert len(second) == 32
