"""Failures, savepoints, the end and restarts: behaviours of the coordinator, each by itself."""

from __future__ import annotations

import pytest
from coordinator_job import SUBTASKS, Job, kinds, triggered

from cutwater.errors import InvariantError
from cutwater.protocol.checkpoint.messages import (
    DeclineReceived,
    Discard,
    FailJob,
    JobRunning,
    JobStopped,
    NotifyAborted,
    NotifyComplete,
    Publish,
    Published,
    PublishFailed,
    RequestAnswered,
    RequestFinal,
    SendTrigger,
)
from cutwater.protocol.protocols import CheckpointKind, FailureReason

# ------------------------------------------------------------------------------------------------- failing the job


def test_20_a_failed_store_does_not_stop_the_next_periodic_checkpoint():
    job = Job({"tolerable_failed": 1})
    job.at(100.0)
    job.ack_all(1)
    effects = job.feed(PublishFailed(1, "disk full", 150.0))
    assert effects[0] == NotifyAborted(1, FailureReason.PUBLISH_FAILED, 0, "disk full")
    assert len(kinds(effects, Discard)) == 3
    assert triggered(job.at(200.0)) == [2]


@pytest.mark.parametrize("tolerable", [0, 1, 3])
def test_21_failures_beyond_the_tolerated_number_fail_the_job_and_up_to_it_they_do_not(tolerable):
    job = Job({"tolerable_failed": tolerable})
    for i in range(1, tolerable + 2):
        job.at(100.0 * i)
        assert bool(kinds(job.decline(i), FailJob)) == (i == tolerable + 1)
    assert job.at(10_000.0) == []  # nothing more until the job runs again


@pytest.mark.parametrize("how", ["decline", "expiry", "publish"])
def test_21_every_kind_of_failure_counts(how):
    job = Job({"interval_ms": 5000.0})
    job.at(5000.0)
    if how == "decline":
        effects = job.decline(1)
    elif how == "expiry":
        effects = job.at(6000.0)
    else:
        job.ack_all(1)
        effects = job.feed(PublishFailed(1, "disk full", 5001.0))
    assert kinds(effects, FailJob)


def test_22_only_consecutive_failures_count():
    job = Job({"tolerable_failed": 1})
    for i in range(1, 8):
        job.at(100.0 * i)
        effects = job.complete(i) if i % 2 else job.decline(i)
        assert not kinds(effects, FailJob)


def test_22_a_new_attempt_starts_to_count_anew():
    job = Job({"tolerable_failed": 1})
    job.at(100.0)
    job.decline(1)
    job.feed(JobStopped("worker lost", 110.0))
    job.feed(JobRunning(2, 120.0))
    job.at(220.0)
    assert not kinds(job.feed(DeclineReceived(2, 2, "map", FailureReason.DECLINED, 230.0)), FailJob)


def test_23_several_declines_of_one_id_count_once():
    job = Job({"tolerable_failed": 1})
    job.at(100.0)
    for subtask in SUBTASKS:
        assert not kinds(job.decline(1, subtask=subtask), FailJob)
    assert job.coordinator.statistics.consecutive_failed == 1


def test_24_only_declines_expiry_and_io_count():
    counting = {r for r in FailureReason if r.counts}
    assert counting == {
        FailureReason.EXPIRED,
        FailureReason.BARRIER_SKIPPED,
        FailureReason.WRITE_FAILED,
        FailureReason.DECLINED,
        FailureReason.PUBLISH_FAILED,
    }
    assert not any(r.preflight for r in counting)
    assert {FailureReason.of(r.code) for r in FailureReason} == set(FailureReason)


def test_24_subsumption_and_restarts_do_not_count():
    job = Job({"max_concurrent": 2})
    job.at(100.0)
    job.at(200.0)
    assert not kinds(job.complete(2), FailJob)
    job.at(300.0)
    assert not kinds(job.feed(JobStopped("worker lost", 310.0)), FailJob)


def test_24_a_decline_for_a_reason_that_does_not_count_aborts_without_counting():
    job = Job()
    job.at(100.0)
    assert [type(e) for e in job.decline(1, FailureReason.JOB_STOPPED)] == [NotifyAborted]
    assert job.coordinator.statistics.consecutive_failed == 0


# ----------------------------------------------------------------------------------------------- savepoints and the end


def test_25_savepoints_run_side_by_side_and_are_neither_subsumed_nor_subsume():
    job = Job()
    job.at(100.0)
    job.request(CheckpointKind.SAVEPOINT, "x")
    job.request(CheckpointKind.SAVEPOINT, "y")
    assert job.pending == [1, 2, 3]
    effects = job.complete(3)
    assert NotifyComplete(3, CheckpointKind.SAVEPOINT, False) in effects
    assert RequestAnswered("y", 3) in effects
    assert job.pending == [1, 2]
    job.complete(1)
    job.at(200.0)
    job.complete(4)
    assert job.pending == [2]
    assert RequestAnswered("x", 2) in job.complete(2)


def test_25_a_failed_savepoint_is_answered_and_does_not_fail_the_job():
    job = Job()
    job.request(CheckpointKind.SAVEPOINT)
    effects = job.decline(1)
    assert kinds(effects, RequestAnswered) == [RequestAnswered("user", 1, FailureReason.DECLINED, "subtask map")]
    assert not kinds(effects, FailJob)


def test_26_a_stop_with_savepoint_that_is_discarded_fails_the_attempt_instead_of_stopping_silently():
    job = Job({"tolerable_failed": 10})
    assert job.request(CheckpointKind.STOP_WITH_SAVEPOINT)[0].final
    assert job.at(100.0) == []  # nothing periodic behind the last barrier
    assert job.request(id="late")[0].reason is FailureReason.JOB_ENDING
    assert kinds(job.decline(1), FailJob)


def test_a7_the_final_checkpoint_goes_before_everything_and_is_tried_again():
    job = Job({"tolerable_failed": 5})
    job.at(100.0)
    job.request(id="waiting")
    effects = job.feed(RequestFinal(110.0))
    assert RequestAnswered("waiting", None, FailureReason.JOB_ENDING) in effects
    assert triggered(effects) == [2]
    job.complete(1)
    effects = job.decline(2)
    assert kinds(effects, SendTrigger) == [SendTrigger(3, CheckpointKind.FINAL, True)]
    assert NotifyComplete(3, CheckpointKind.FINAL, True) in job.complete(3)
    assert job.at(1e6) == []


def test_a_subsumed_request_is_served_by_the_newer_checkpoint():
    job = Job({"max_concurrent": 2})
    job.request()
    job.at(100.0)
    assert kinds(job.complete(2), RequestAnswered) == [RequestAnswered("user", 2)]


# ------------------------------------------------------------------------------------------- restarts and statistics


def test_27_29_subtasks_hear_the_aborted_and_the_newest_completed_id_not_the_newest_triggered():
    job = Job({"tolerable_failed": 3})
    for i in (1, 2):
        job.at(100.0 * i)
        job.complete(i)
    job.at(300.0)
    assert kinds(job.decline(3), NotifyAborted)[0].latest_completed == 2
    assert job.coordinator.latest_completed.checkpoint_id == 2
    job.request(CheckpointKind.SAVEPOINT)
    job.complete(4)  # the user may delete it: no recovery relies on it
    assert job.coordinator.latest_completed.checkpoint_id == 2


def test_a_restart_aborts_what_is_pending_and_ids_go_on():
    job = Job({"max_concurrent": 2})
    job.at(100.0)
    job.ack(1)
    job.at(200.0)
    effects = job.feed(JobStopped("worker lost", 210.0))
    assert [e.checkpoint_id for e in kinds(effects, NotifyAborted)] == [1, 2]
    assert kinds(effects, Discard) == [Discard(1, "map/1")]
    job.feed(JobRunning(2, 500.0))
    assert triggered(job.at(600.0)) == [3]


def test_what_is_being_published_when_the_attempt_ends_is_decided_by_the_store_alone():
    job = Job()
    job.at(100.0)
    job.ack_all(1)
    assert job.feed(JobStopped("worker lost", 110.0)) == []
    assert job.pending == [1]
    with pytest.raises(InvariantError, match="undecided"):
        job.coordinator.handle(JobRunning(2, 120.0))
    job = Job()
    job.at(100.0)
    job.ack_all(1)
    job.feed(JobStopped("worker lost", 110.0))
    assert job.published(1) == []  # nobody is left to be told, but a recovery starts from it
    assert job.coordinator.statistics.latest_completed_id == 1


def test_what_is_published_when_the_job_gets_another_shape_stays_that_of_the_old_one():
    job = Job()
    job.at(100.0)
    job.ack_all(1)
    job.feed(JobStopped("rescaled", 150.0))
    wider = ("source", "map 0", "map 1", "sink")
    job.coordinator.reshape(frozenset(wider), frozenset({"source"}))
    job.coordinator.validate()
    assert kinds(job.ack(1, "map"), Discard) == []  # told once more: the manifest that is being written names it
    assert kinds(job.published(1), NotifyAborted) == []
    assert job.coordinator.latest_completed.checkpoint_id == 1
    job.feed(JobRunning(2, 200.0))
    assert triggered(job.at(300.0)) == [2]
    effects = [e for subtask in wider for e in job.ack(2, subtask, attempt=2)]
    assert [e.checkpoint_id for e in kinds(effects, Publish)] == [2]


def test_requests_that_wait_are_refused_when_a_stop_with_a_savepoint_begins():
    job = Job({"max_concurrent": 1})
    job.request(id="first")
    job.request(id="waits")
    effects = job.request(CheckpointKind.STOP_WITH_SAVEPOINT, "stop")
    assert kinds(effects, RequestAnswered) == [RequestAnswered("waits", None, FailureReason.JOB_ENDING)]
    assert [a.request_id for a in kinds(job.complete(1) + job.complete(2), RequestAnswered)] == ["first", "stop"]
    assert kinds(job.feed(JobStopped("the job ends", 10.0)), RequestAnswered) == []


@pytest.mark.parametrize("event", [Published(1, 0.0), PublishFailed(1, "", 0.0), JobRunning(2, 0.0)])
def test_reports_that_nobody_asked_for_are_invariant_errors(event):
    job = Job()
    with pytest.raises(InvariantError, match="last events"):
        job.coordinator.handle(event)


def test_published_before_all_acknowledged_is_an_invariant_error():
    job = Job()
    job.at(100.0)
    with pytest.raises(InvariantError, match="published"):
        job.published(1)


def test_31_numbers_of_failed_and_in_progress_go_up_and_down():
    job = Job({"tolerable_failed": 3, "max_concurrent": 2})

    def numbers():
        s = job.coordinator.statistics
        return s.triggered, s.in_progress, s.completed, s.failed, s.subsumed

    job.at(100.0)
    assert numbers() == (1, 1, 0, 0, 0)
    job.decline(1)
    assert numbers() == (1, 0, 0, 1, 0)
    job.at(200.0)
    job.at(300.0)
    job.now = 340.0
    job.complete(3)
    assert numbers() == (3, 0, 1, 1, 1)
    assert job.coordinator.statistics.last_duration_ms == 40.0
