"""What the job log says of forks, and whom it refuses."""

from __future__ import annotations

import pytest

from cutwater.errors import FencedError
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import CheckpointCompleted, Fork, Forked, HandedOver, JobEnded, Promoted
from memory_store import MemoryStore

FORK = Fork("/chk", "a", "uid-a", "/chk/a")


def completed(log: JobLog, *ids: int) -> None:
    for id in ids:
        log.append(CheckpointCompleted(id, log.attempt, "digest", f"chk-{id}/manifest", 0))


def test_t3_a_job_that_was_handed_over_is_nobodys_until_it_is_taken_back() -> None:
    store = MemoryStore()
    log = JobLog(store, "a")
    log.begin_attempt("first")
    completed(log, 1, 2)
    log.append(HandedOver(log.attempt, 2, "/chk", "b", "uid-b", "/savepoints/s", 0))
    log.append(JobEnded(log.attempt, "stopped", "handed over", 0))
    state = JobLog(store, "a").read()
    assert state.handed_over is not None
    assert (state.handed_over.job, state.outcome) == ("b", "stopped")
    other = JobLog(store, "a")
    with pytest.raises(FencedError, match="handed over to job 'b' at checkpoint 2"):
        other.begin_attempt("second", after=1)
    with pytest.raises(FencedError):
        other.begin_attempt("third")
    assert other.begin_attempt("fourth", take_back=True) == 2
    assert JobLog(store, "a").read().handed_over is None


def test_a_promoted_fork_knows_no_checkpoint_of_the_time_before() -> None:
    store = MemoryStore()
    log = JobLog(store, "b")
    assert log.create(FORK).fork == FORK
    log.begin_attempt("driver")
    log.append(Forked(log.attempt, 7, 0))
    completed(log, 1, 2, 3)
    assert log.state.fork is not None
    assert (log.state.fork.cut, log.state.fork.promoted) == (7, 0)
    log.append(Promoted(log.attempt, 3, 0))
    state = JobLog(store, "b").read()
    assert state.fork is not None
    assert (state.fork.promoted, [c.checkpoint_id for c in state.completed]) == (3, [3])
    completed(log, 4)
    assert [c.checkpoint_id for c in log.state.completed] == [4, 3]


def test_a_job_stays_what_it_was_made_as() -> None:
    store = MemoryStore()
    JobLog(store, "b").create(FORK)
    assert JobLog(store, "b").create().fork == FORK
    JobLog(store, "c").create()
    assert JobLog(store, "c").create(FORK).fork is None
