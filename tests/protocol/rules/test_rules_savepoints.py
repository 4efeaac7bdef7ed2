"""Savepoints in the core: aligned under every protocol; draining; what the coordinator lets run beside them."""

from __future__ import annotations

import pytest
from coordinator_job import Job, kinds, triggered

from cutwater.protocol.messages import (
    BarrierTaken,
    Block,
    BroadcastBarrier,
    Durable,
    Effect,
    Event,
    FailJob,
    Freeze,
    JobRunning,
    JobStopped,
    RequestAnswered,
    RequestDrain,
    RequestFinal,
    RequestProbe,
    SendDrain,
    StartRecording,
    Trigger,
    Unblock,
)
from cutwater.protocol.reasons import CheckpointKind, FailureReason
from cutwater.protocol.rows import PROTOCOLS
from cutwater.protocol.subtask import SubtaskMachine

TAKEN = [n for n in PROTOCOLS if n != "none"]


def feed(machine: SubtaskMachine, *events: Event) -> list[Effect]:
    effects: list[Effect] = []
    for event in events:
        effects = machine.handle(event)
        machine.validate()
    return effects


@pytest.mark.parametrize("protocol", TAKEN)
def test_54_a_savepoint_is_aligned_under_every_protocol(protocol: str) -> None:
    machine = SubtaskMachine("t", ["a", "b"], protocol=PROTOCOLS[protocol])
    assert feed(machine, BarrierTaken("a", 1, savepoint=True)) == [Block("a")]
    assert feed(machine, BarrierTaken("b", 1, savepoint=True)) == [
        Freeze(1, False, savepoint=True),
        BroadcastBarrier(1, False, savepoint=True),
        Unblock("a"),
    ]
    assert not machine.halted
    assert feed(machine, Durable(1)), "no log is waited for"


@pytest.mark.parametrize("protocol", TAKEN)
def test_54_a_source_that_takes_one_goes_on_reading(protocol: str) -> None:
    source = SubtaskMachine("s", [], protocol=PROTOCOLS[protocol])
    feed(source, Trigger(1, savepoint=True))
    assert source.may_read


@pytest.mark.parametrize("protocol", TAKEN)
def test_c3_only_back_edges_are_in_it(protocol: str) -> None:
    head = SubtaskMachine("head", ["in", "back"], protocol=PROTOCOLS[protocol], back_edges=frozenset({"back"}))
    effects = feed(head, BarrierTaken("in", 1, savepoint=True))
    assert [e for e in effects if isinstance(e, StartRecording)] == [StartRecording(1, "back")]


def test_54_an_open_protocol_takes_its_own_checkpoints_beside_it() -> None:
    machine = SubtaskMachine("t", ["a", "b"], protocol=PROTOCOLS["chandy_lamport"])
    feed(machine, BarrierTaken("a", 1, savepoint=True))
    assert Freeze(2, False) in feed(machine, BarrierTaken("b", 2))
    assert Freeze(1, False, savepoint=True) in feed(machine, BarrierTaken("b", 1, savepoint=True))
    feed(machine, BarrierTaken("a", 2))
    assert machine.blocked == ()


@pytest.mark.parametrize(("protocol", "beside"), [("unaligned", False), ("synchronous", False), ("aligned", True)])
def test_25_a_checkpoint_whose_barriers_overtake_waits_for_the_savepoint(protocol: str, beside: bool) -> None:
    job = Job({"protocol": protocol})
    job.request(CheckpointKind.SAVEPOINT)
    assert (triggered(job.at(100.0)) == [2]) is beside
    if not beside:
        assert triggered(job.complete(1)) == [2]


# ------------------------------------------------------------------------------------------------------------ draining


def drained(**settings: object) -> Job:
    job = Job(dict(settings))
    assert job.feed(RequestDrain(0.0, "user")) == [SendDrain()]
    return job


def test_a_drained_job_ends_with_a_final_checkpoint_that_is_a_savepoint() -> None:
    job = drained()
    assert job.at(1000.0) == [], "a checkpoint in between would say that sources are exhausted, which they are not"
    assert job.request(id="late")[0].reason is FailureReason.JOB_ENDING
    effects = job.feed(RequestFinal(1100.0))
    assert [(e.checkpoint_id, e.kind, e.savepoint) for e in effects] == [(1, CheckpointKind.FINAL, True)]
    assert RequestAnswered("user", 1) in job.complete(1)


def test_c6_the_loops_of_a_drained_job_are_probed() -> None:
    job = drained()
    assert triggered(job.feed(RequestProbe(10.0))) == [1]


def test_58_a_drain_that_fails_restarts_the_job_and_is_answered() -> None:
    job = drained(tolerable_failed=10)
    job.feed(RequestFinal(10.0))
    effects = job.decline(1)
    assert kinds(effects, RequestAnswered) == [RequestAnswered("user", 1, FailureReason.DECLINED, "subtask map")]
    assert kinds(effects, FailJob)


def test_58_a_drain_ends_with_its_attempt() -> None:
    job = drained()
    answer = RequestAnswered("user", None, FailureReason.JOB_STOPPED, "a worker was lost")
    assert answer in job.feed(JobStopped("a worker was lost", 20.0))
    job.feed(JobRunning(2, 30.0))
    assert triggered(job.at(130.0)) == [1], "the next attempt takes checkpoints as if nobody had asked"


def test_a_drain_is_refused_like_any_savepoint() -> None:
    job = Job(running=False)
    assert job.feed(RequestDrain(0.0, "user")) == [RequestAnswered("user", None, FailureReason.JOB_NOT_RUNNING)]
    job = drained()
    again = RequestAnswered("second", None, FailureReason.JOB_ENDING)
    assert job.feed(RequestDrain(1.0, "second")) == [again]
