"""Behaviours that a checkpoint coordinator is tested for, each by itself.

Left to other rooms: sharing and retention of files, the store's recovery (storage); sources that are lost between plan
and trigger (a lost worker stops the attempt).
"""

from __future__ import annotations

import pytest
from coordinator_job import SUBTASKS, Job, kinds, triggered

from cutwater.protocol.checkpoint.coordinator import WAITING_REQUESTS_MAX
from cutwater.protocol.checkpoint.messages import (
    AckAnswered,
    DeclineReceived,
    Discard,
    JobRunning,
    JobStopped,
    NotifyAborted,
    NotifyComplete,
    Publish,
    Published,
    PublishFailed,
    RequestAnswered,
    RequestDrain,
    RequestFinal,
    SendDrain,
    SendTrigger,
)
from cutwater.protocol.protocols import AckAnswer, CheckpointKind, FailureReason

# --------------------------------------------------------------------------------------------------------- triggering


@pytest.mark.parametrize(
    "kind", [CheckpointKind.ON_DEMAND, CheckpointKind.SAVEPOINT, CheckpointKind.STOP_WITH_SAVEPOINT]
)
def test_01_a_trigger_of_a_job_that_does_not_run_is_refused_and_leaves_nothing_pending(kind):
    job = Job(running=False)
    assert job.request(kind) == [RequestAnswered("user", None, FailureReason.JOB_NOT_RUNNING)]
    assert job.pending == []


def test_05_trigger_and_confirm_a_simple_checkpoint():
    job = Job()
    assert job.at(100.0) == [SendTrigger(1, CheckpointKind.PERIODIC, False)]
    assert job.ack(1, "source") == [AckAnswered(1, "source", AckAnswer.SUCCESS)]
    assert job.ack(1, "source") == [AckAnswered(1, "source", AckAnswer.DUPLICATE)]
    assert job.ack(1, "map") == [AckAnswered(1, "map", AckAnswer.SUCCESS)]
    answer, publish = job.ack(1, "sink")
    assert answer == AckAnswered(1, "sink", AckAnswer.SUCCESS)
    assert dict(publish.payloads) == {s: f"{s}/1" for s in SUBTASKS}
    assert job.published(1) == [NotifyComplete(1, CheckpointKind.PERIODIC, True)]
    assert triggered(job.at(200.0)) == [2]


def test_18_the_timer_waits_for_the_job_to_run():
    job = Job(running=False)
    assert job.at(5000.0) == []
    assert job.coordinator.next_due_ms is None
    job.feed(JobRunning(1, 5000.0))
    assert job.coordinator.next_due_ms == 5100.0
    assert triggered(job.at(5100.0)) == [1]


def test_19_requests_after_stopping_are_refused_and_nothing_leaks():
    job = Job()
    job.feed(JobStopped("cancelled", 10.0))
    assert job.request() == [RequestAnswered("user", None, FailureReason.JOB_NOT_RUNNING)]
    assert job.at(10_000.0) == []
    assert job.coordinator.next_due_ms is None
    assert job.feed(JobStopped("again", 11.0)) == []


@pytest.mark.parametrize("at_most", [1, 2, 5])
def test_15_never_more_than_max_concurrent_pending_and_the_next_starts_when_one_completes(at_most):
    job = Job({"max_concurrent": at_most})
    for i in range(1, at_most + 4):
        job.at(100.0 * i)
    assert job.pending == list(range(1, at_most + 1))
    assert job.coordinator.next_due_ms == 1100.0  # only an expiry is left to wait for
    job.ack_all(1)
    assert triggered(job.published(1)) == [at_most + 1]


def test_16_subsuming_frees_several_places_at_once():
    job = Job({"max_concurrent": 3})
    for i in range(1, 5):
        job.at(100.0 * i)
    effects = job.complete(3)
    assert [e.checkpoint_id for e in kinds(effects, NotifyAborted)] == [1, 2]
    assert triggered(effects) == [4]
    job.at(500.0)
    job.at(600.0)
    assert job.pending == [4, 5, 6]


def test_17_the_pause_counts_from_the_end_of_the_last_checkpoint_and_a_savepoint_does_not_wait():
    job = Job({"min_pause_ms": 80.0})
    job.at(100.0)
    job.now = 190.0
    job.complete(1)
    assert job.coordinator.next_due_ms == 270.0
    assert job.at(269.0) == []
    assert triggered(job.request(CheckpointKind.SAVEPOINT)) == [2]
    assert triggered(job.at(270.0)) == [3]


def test_17_the_pause_counts_from_an_abort_too():
    job = Job({"min_pause_ms": 80.0, "tolerable_failed": 5})
    job.at(100.0)
    job.now = 150.0
    job.decline(1)
    assert job.coordinator.next_due_ms == 230.0


def test_missed_intervals_are_not_made_up_for():
    job = Job({"max_concurrent": 2})
    assert triggered(job.at(950.0)) == [1]
    assert job.at(999.0) == []
    assert triggered(job.at(1000.0)) == [2]


def test_a_request_waits_for_a_place_and_is_answered_when_complete():
    job = Job()
    job.at(100.0)
    assert job.request() == []
    assert triggered(job.complete(1)) == [2]
    assert RequestAnswered("user", 2) in job.complete(2)


@pytest.mark.parametrize(
    "kind", [CheckpointKind.ON_DEMAND, CheckpointKind.SAVEPOINT, CheckpointKind.STOP_WITH_SAVEPOINT]
)
def test_a_request_waits_until_a_part_that_went_back_is_there_again(kind):
    job = Job()
    job.feed(JobStopped("worker 1 was lost", 10.0, survivors=True))
    assert job.request(kind) == []
    job.feed(JobStopped("worker 1 was lost again", 20.0, survivors=True))
    assert [(e.checkpoint_id, e.kind) for e in job.feed(JobRunning(2, 30.0))] == [(1, kind)]
    acks = [e for s in SUBTASKS for e in job.ack(1, s, attempt=2)]
    assert kinds(acks, Publish)
    assert RequestAnswered("user", 1) in job.published(1)


def test_a_drain_waits_until_a_part_that_went_back_is_there_again():
    job = Job()
    job.feed(JobStopped("worker 1 was lost", 10.0, survivors=True))
    assert job.feed(RequestDrain(10.0, "user")) == []
    assert job.request(id="later") == []
    back = job.feed(JobRunning(2, 30.0))
    assert back == [RequestAnswered("later", None, FailureReason.JOB_ENDING), SendDrain()]


def test_who_waits_for_a_place_goes_on_waiting_while_a_part_goes_back():
    job = Job()
    job.at(100.0)
    assert job.request() == []
    assert kinds(job.feed(JobStopped("worker 1 was lost", 110.0, survivors=True)), RequestAnswered) == []
    assert triggered(job.feed(JobRunning(2, 120.0))) == [2]


def test_what_waits_for_a_part_hears_that_everything_goes_back():
    job = Job()
    job.feed(JobStopped("worker 1 was lost", 10.0, survivors=True))
    job.request()
    job.request(CheckpointKind.SAVEPOINT, id="second")
    assert job.feed(JobStopped("and worker 0", 20.0)) == [
        RequestAnswered(id, None, FailureReason.JOB_STOPPED, "and worker 0") for id in ("user", "second")
    ]
    assert job.request() == [RequestAnswered("user", None, FailureReason.JOB_NOT_RUNNING)]


def test_waiting_requests_are_bounded_also_while_a_part_goes_back():
    job = Job()
    job.feed(JobStopped("worker 1 was lost", 10.0, survivors=True))
    for i in range(WAITING_REQUESTS_MAX):
        assert job.request(id=i) == []
    assert job.request(id="last") == [RequestAnswered("last", None, FailureReason.TOO_MANY_REQUESTS)]


def test_waiting_requests_are_bounded():
    job = Job()
    job.at(100.0)
    for i in range(WAITING_REQUESTS_MAX):
        assert job.request(id=i) == []
    assert job.request(id="last") == [RequestAnswered("last", None, FailureReason.TOO_MANY_REQUESTS)]


def test_protocol_none_takes_only_the_final_checkpoint():
    job = Job({"protocol": "none"})
    assert job.coordinator.next_due_ms is None
    assert job.at(1e6) == []
    assert job.request()[0].reason is FailureReason.CHECKPOINTING_DISABLED
    assert job.feed(RequestFinal(1e6)) == [SendTrigger(1, CheckpointKind.FINAL, True)]


# ----------------------------------------------------------------------------------------------- declines and lateness


def test_06_one_decline_discards_the_checkpoint_and_its_state_and_further_ones_do_nothing():
    job = Job({"tolerable_failed": 1})
    job.at(100.0)
    job.ack(1, "source")
    effects = job.decline(1)
    assert effects == [NotifyAborted(1, FailureReason.DECLINED, 0, "subtask map"), Discard(1, "source/1")]
    assert job.decline(1, subtask="sink") == []
    assert job.pending == []


def test_07_declining_the_first_of_two_leaves_the_second_alone_and_it_completes():
    job = Job({"tolerable_failed": 1, "max_concurrent": 2})
    job.at(100.0)
    job.at(200.0)
    job.decline(1)
    assert job.pending == [2]
    assert NotifyComplete(2, CheckpointKind.PERIODIC, True) in job.complete(2)


@pytest.mark.parametrize("reason", [FailureReason.WRITE_FAILED, FailureReason.BARRIER_SKIPPED])
def test_08_a_failure_at_a_subtask_aborts_that_checkpoint_only(reason):
    job = Job({"tolerable_failed": 1, "max_concurrent": 2})
    job.at(100.0)
    job.at(200.0)
    assert kinds(job.decline(2, reason), NotifyAborted)[0].reason is reason
    assert job.pending == [1]


def test_06_a_decline_of_a_subtask_that_has_acknowledged_or_is_no_subtask_does_nothing():
    job = Job()
    job.at(100.0)
    job.ack(1, "map")
    assert job.decline(1, subtask="map") == []
    assert job.decline(1, subtask="stranger") == []
    assert job.feed(DeclineReceived(1, 7, "sink", FailureReason.DECLINED, 110.0)) == []
    assert job.pending == [1]


def test_10_two_concurrent_checkpoints_complete_each_by_itself_and_are_published_one_by_one():
    job = Job({"max_concurrent": 2})
    job.at(100.0)
    job.at(200.0)
    for subtask in SUBTASKS[:-1]:
        job.ack(1, subtask)
        job.ack(2, subtask)
    assert kinds(job.ack(1, "sink"), Publish)
    assert not kinds(job.ack(2, "sink"), Publish)
    effects = job.published(1)
    assert [type(e) for e in effects] == [NotifyComplete, Publish]
    assert NotifyComplete(2, CheckpointKind.PERIODIC, True) in job.published(2)


def test_11_completing_a_newer_one_subsumes_an_older_one_and_a_later_ack_is_discarded():
    job = Job({"max_concurrent": 2})
    job.at(100.0)
    job.at(200.0)
    job.ack(1, "source")
    effects = job.complete(2)
    assert [type(e) for e in effects] == [Publish, NotifyComplete, NotifyAborted, Discard]
    assert effects[2].reason is FailureReason.SUBSUMED
    assert job.ack(1, "map") == [AckAnswered(1, "map", AckAnswer.DISCARDED), Discard(1, "map/1")]


def test_11_an_older_one_that_is_ready_waits_for_the_publishing_of_a_newer_one_and_is_subsumed_or_published():
    for event, expected in ((Published, NotifyAborted), (lambda i, t: PublishFailed(i, "full", t), Publish)):
        job = Job({"max_concurrent": 2, "tolerable_failed": 3})
        job.at(100.0)
        job.at(200.0)
        job.ack_all(2)
        assert job.ack_all(1) == []
        assert [e.checkpoint_id for e in kinds(job.feed(event(2, 300.0)), expected)][-1] == 1


def test_12_a_checkpoint_not_acknowledged_in_time_is_discarded_with_all_state_received():
    job = Job({"tolerable_failed": 1, "interval_ms": 5000.0})
    job.at(5000.0)
    job.ack(1, "source")
    assert job.coordinator.next_due_ms == 6000.0
    effects = job.at(6000.0)
    assert effects == [NotifyAborted(1, FailureReason.EXPIRED, 0, "missing: map, sink"), Discard(1, "source/1")]
    assert job.ack(1, "sink")[0].answer is AckAnswer.DISCARDED


def test_12_what_is_being_published_does_not_expire():
    job = Job({"interval_ms": 5000.0})
    job.at(5000.0)
    job.ack_all(1)
    assert job.at(9000.0) == []
    assert kinds(job.published(1), NotifyComplete)


def test_13_acks_with_a_wrong_id_attempt_or_subtask_are_refused():
    job = Job()
    job.at(100.0)
    assert job.ack(9) == [AckAnswered(9, "map", AckAnswer.UNKNOWN)]
    assert job.ack(1, attempt=7) == [AckAnswered(1, "map", AckAnswer.UNKNOWN)]
    assert job.ack(1, "stranger")[0].answer is AckAnswer.UNKNOWN
    assert kinds(job.ack_all(1), Publish)


def test_14_state_of_late_acks_and_strangers_is_deleted_but_never_that_of_others_or_of_a_complete_checkpoint():
    job = Job({"tolerable_failed": 1})
    job.at(100.0)
    assert kinds(job.ack(1, "stranger"), Discard) == [Discard(1, "stranger/1")]
    job.decline(1)
    assert kinds(job.ack(1), Discard) == [Discard(1, "map/1")]
    assert not kinds(job.ack(1, attempt=2), Discard)
    job.at(200.0)
    job.complete(2)
    assert job.ack(2) == [AckAnswered(2, "map", AckAnswer.DUPLICATE)]
