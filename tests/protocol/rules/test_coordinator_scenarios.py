"""Behaviours that a checkpoint coordinator is tested for, each by itself.

Left to other rooms: sharing and retention of files, the store's recovery (storage); sources that are lost between plan
and trigger (a lost worker stops the attempt).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from cutwater.config import JobConfig
from cutwater.errors import InvariantError
from cutwater.protocol.coordinator import WAITING_REQUESTS_MAX, CheckpointCoordinator
from cutwater.protocol.messages import (
    AckAnswered,
    AckReceived,
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
    RequestCheckpoint,
    RequestFinal,
    SendTrigger,
    Tick,
)
from cutwater.protocol.reasons import AckAnswer, CheckpointKind, FailureReason

SUBTASKS = ("source", "map", "sink")


@dataclass
class Job:
    """A coordinator, its clock and short words for what happens to it."""

    settings: dict[str, Any] = field(default_factory=dict)
    running: bool = True
    now: float = 0.0

    def __post_init__(self) -> None:
        config = JobConfig(**{"interval_ms": 100.0, "timeout_ms": 1000.0, **self.settings})
        self.coordinator = CheckpointCoordinator(config, frozenset(SUBTASKS), frozenset({"source"}), 0)
        if self.running:
            self.feed(JobRunning(1, 0.0))

    def feed(self, event) -> list[Any]:
        effects = self.coordinator.handle(event)
        self.coordinator.validate()
        return effects

    def at(self, now: float) -> list[Any]:
        self.now = now
        return self.feed(Tick(now))

    def request(self, kind=CheckpointKind.ON_DEMAND, id="user") -> list[Any]:
        return self.feed(RequestCheckpoint(self.now, kind, id))

    def ack(self, id: int, subtask: str = "map", attempt: int = 1) -> list[Any]:
        return self.feed(AckReceived(id, attempt, subtask, f"{subtask}/{id}", self.now))

    def ack_all(self, id: int) -> list[Any]:
        return [e for s in SUBTASKS for e in self.ack(id, s) if not isinstance(e, AckAnswered)]

    def decline(self, id: int, reason=FailureReason.DECLINED, subtask="map") -> list[Any]:
        return self.feed(DeclineReceived(id, 1, subtask, reason, self.now))

    def published(self, id: int) -> list[Any]:
        return self.feed(Published(id, self.now))

    def complete(self, id: int) -> list[Any]:
        return self.ack_all(id) + self.published(id)

    @property
    def pending(self) -> list[int]:
        return [p.checkpoint_id for p in self.coordinator.pending]


def kinds(effects, *types) -> list[Any]:
    return [e for e in effects if isinstance(e, types)]


def triggered(effects) -> list[int]:
    return [e.checkpoint_id for e in kinds(effects, SendTrigger)]


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
