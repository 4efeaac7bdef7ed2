"""Probes in the coordinator (C6): waves that store nothing, count as nothing and hold nothing up."""

from __future__ import annotations

import pytest
from coordinator_job import Job, kinds, triggered

from cutwater.errors import InvariantError
from cutwater.protocol.checkpoint.messages import (
    AckAnswered,
    AckReceived,
    Discard,
    FailJob,
    JobRunning,
    JobStopped,
    NotifyAborted,
    NotifyComplete,
    Publish,
    RequestCheckpoint,
    RequestFinal,
    RequestProbe,
    SendTrigger,
)
from cutwater.protocol.protocols import AckAnswer, CheckpointKind, FailureReason


def probe(job):
    return job.feed(RequestProbe(job.now))


@pytest.mark.parametrize("protocol", ["none", "aligned"])
def test_a_probe_is_triggered_acknowledged_and_over_without_being_published(protocol):
    job = Job({"protocol": protocol})
    assert probe(job) == [SendTrigger(1, CheckpointKind.PROBE, False)]
    effects = job.ack_all(1)
    assert effects == [NotifyComplete(1, CheckpointKind.PROBE, False)]
    assert job.pending == []


def test_a_probe_is_in_no_statistics_and_no_recovery_relies_on_it():
    job = Job()
    before = job.coordinator.statistics
    probe(job)
    assert job.coordinator.statistics == before
    job.ack_all(1)
    assert job.coordinator.statistics == before
    assert job.coordinator.latest_completed is None
    assert job.coordinator.last_id == 1


def test_a_probe_disturbs_neither_the_schedule_nor_the_pause():
    job = Job({"min_pause_ms": 50.0})
    job.now = 99.0
    probe(job)
    job.ack_all(1)
    assert job.coordinator.next_due_ms == 100.0
    assert triggered(job.at(100.0)) == [2]


def test_a_checkpoint_that_is_due_ends_the_probe_under_way_and_serves_in_its_place():
    job = Job()
    probe(job)
    effects = job.at(100.0)
    assert kinds(effects, NotifyAborted, SendTrigger) == [
        NotifyAborted(1, FailureReason.SUBSUMED, 0, "by checkpoint 2"),
        SendTrigger(2, CheckpointKind.PERIODIC, False),
    ]
    assert job.coordinator.statistics.failed == job.coordinator.statistics.subsumed == 0


def test_a_checkpoint_that_is_due_goes_first():
    job = Job()
    job.now = 100.0
    assert probe(job) == [SendTrigger(1, CheckpointKind.PERIODIC, False)]


def test_what_is_under_way_serves_whoever_wants_a_probe():
    job = Job()
    job.request(CheckpointKind.SAVEPOINT)
    assert probe(job) == []
    assert triggered(job.complete(1)) == []


def test_a_probe_expires_and_may_be_declined_without_counting():
    job = Job({"tolerable_failed": 0, "interval_ms": 1e9})
    probe(job)
    assert job.coordinator.next_due_ms == 1000.0
    assert [e.reason for e in kinds(job.at(1000.0), NotifyAborted)] == [FailureReason.EXPIRED]
    probe(job)
    effects = job.decline(2)
    assert kinds(effects, FailJob) == []
    assert job.coordinator.statistics.consecutive_failed == job.coordinator.statistics.failed == 0


def test_acknowledgements_of_a_probe_are_answered_like_others():
    job = Job({"interval_ms": 1e9})
    probe(job)
    job.ack_all(1)
    assert kinds(job.ack(1), AckAnswered)[0].answer is AckAnswer.DUPLICATE
    probe(job)
    job.decline(2)
    assert kinds(job.ack(2), AckAnswered)[0].answer is AckAnswer.DISCARDED
    stranger = job.feed(AckReceived(99, 1, "map", "x", 0.0))
    assert kinds(stranger, Discard) == []


def test_no_probe_of_a_job_that_does_not_run_and_none_survives_its_attempt():
    assert probe(Job(running=False)) == []
    job = Job()
    probe(job)
    assert [e.reason for e in kinds(job.feed(JobStopped("crash", 1.0)), NotifyAborted)] == [FailureReason.JOB_STOPPED]
    assert job.coordinator.statistics.failed == 0
    assert job.feed(JobRunning(2, 2.0)) == []


def test_the_final_checkpoint_ends_a_probe():
    job = Job()
    probe(job)
    effects = job.feed(RequestFinal(1.0))
    assert kinds(effects, SendTrigger) == [SendTrigger(2, CheckpointKind.FINAL, True)]
    assert [e.checkpoint_id for e in kinds(effects, NotifyAborted)] == [1]
    assert kinds(job.ack_all(2), Publish)


def test_nobody_requests_a_probe_as_a_checkpoint():
    job = Job()
    with pytest.raises(InvariantError, match="kind probe"):
        job.feed(RequestCheckpoint(0.0, CheckpointKind.PROBE, "user"))
