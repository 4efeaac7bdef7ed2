"""Savepoints in the core: aligned under every protocol; draining; what the coordinator lets run beside them."""

from __future__ import annotations

import pytest
from coordinator_job import Job, kinds, triggered

from cutwater.errors import InvariantError
from cutwater.protocol.checkpoint.messages import (
    FailJob,
    JobRunning,
    JobStopped,
    RequestAnswered,
    RequestDrain,
    RequestFinal,
    RequestProbe,
    SendDrain,
)
from cutwater.protocol.messages import (
    BarrierTaken,
    Block,
    BroadcastBarrier,
    Decline,
    Durable,
    Effect,
    Event,
    Freeze,
    Record,
    RowsTaken,
    StartRecording,
    StopRecording,
    Trigger,
    Unblock,
)
from cutwater.protocol.protocols import PROTOCOLS, CheckpointKind, FailureReason
from cutwater.protocol.subtask.machine import SubtaskMachine

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


@pytest.mark.parametrize("protocol", ["aligned", "at_least_once", "chandy_lamport"])
def test_54_checkpoints_are_taken_beside_it(protocol: str) -> None:
    """Its log of a back-edge is still open when the next one begins."""
    head = SubtaskMachine("head", ["in", "back"], protocol=PROTOCOLS[protocol], back_edges=frozenset({"back"}))
    assert Freeze(1, False, savepoint=True) in feed(head, BarrierTaken("in", 1, savepoint=True))
    assert Freeze(2, False) in feed(head, BarrierTaken("in", 2))
    assert feed(head, RowsTaken("back", 3)) == [Record("back", (1, 2))]
    assert StopRecording(1, "back", 3) in feed(head, BarrierTaken("back", 1, savepoint=True))
    assert StopRecording(2, "back", 3) in feed(head, BarrierTaken("back", 2))


@pytest.mark.parametrize("protocol", TAKEN)
@pytest.mark.parametrize("final", [False, True])
def test_a1_only_a_source_is_triggered_for_a_savepoint(protocol: str, final: bool) -> None:
    """Elsewhere it would freeze in front of what is still on its way, and no log would hold that."""
    machine = SubtaskMachine("t", ["a", "b"], protocol=PROTOCOLS[protocol])
    with pytest.raises(InvariantError, match="only a source is triggered"):
        machine.handle(Trigger(1, final, savepoint=True))


@pytest.mark.parametrize("protocol", TAKEN)
@pytest.mark.parametrize("newer_first", [False, True])
def test_a8_of_two_savepoints_that_cross_the_older_one_ends(protocol: str, newer_first: bool) -> None:
    """Each would hold the input on which the other waits."""
    machine = SubtaskMachine("t", ["a", "b"], protocol=PROTOCOLS[protocol])
    crossing = [BarrierTaken("a", 5, savepoint=True), BarrierTaken("b", 6, savepoint=True)]
    effects = [effect for event in crossing[:: -1 if newer_first else 1] for effect in feed(machine, event)]
    declined = [(e.checkpoint_id, e.reason) for e in effects if isinstance(e, Decline)]
    assert declined == [(5, FailureReason.BARRIER_SKIPPED)]
    assert machine.blocked == ("b",)
    assert Freeze(6, False, savepoint=True) in feed(machine, BarrierTaken("a", 6, savepoint=True))
    assert machine.blocked == ()


@pytest.mark.parametrize("protocol", TAKEN)
def test_a8_a_source_that_hears_of_an_older_one_last_declines_it(protocol: str) -> None:
    """Its barrier would come behind the newer one's, and a sink commits all up to an id."""
    source = SubtaskMachine("s", [], protocol=PROTOCOLS[protocol])
    feed(source, Trigger(6, savepoint=True))
    assert [type(effect) for effect in feed(source, Trigger(5))] == [Decline]
    assert feed(source, Trigger(5)) == [], "once"


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
