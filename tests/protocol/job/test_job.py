"""The job machine: membership, attempts, restarts, the end."""

from __future__ import annotations

import random

import pytest

from cutwater.config import RestartConfig
from cutwater.errors import InvariantError
from cutwater.protocol.job import messages as j
from cutwater.protocol.job.machine import JobMachine
from cutwater.protocol.job.restart_budget import RestartDecider

SUBTASKS = frozenset({(0, 0), (0, 1)})


def machine(restart: RestartConfig | None = None, *, slots: int = 2, attempt: int = 0) -> JobMachine:
    config = restart or RestartConfig(strategy="fixed_delay", attempts=3, delay_ms=100.0)
    return JobMachine(slots, SUBTASKS, RestartDecider(config, random.Random(0)), attempt=attempt)


def running(m: JobMachine, now: float = 1.0) -> JobMachine:
    first = max(m.workers.values(), default=0) + 1
    for slot in range(m.slots):
        if slot not in m.workers:
            m.handle(j.WorkerJoined(slot, first + slot, now))
    for slot in range(m.slots):
        m.handle(j.WorkerReady(slot, m.attempt, now))
    assert m.phase is j.JobPhase.RUNNING
    return m


def test_an_attempt_begins_when_the_last_slot_is_filled() -> None:
    m = machine(attempt=4)
    assert m.handle(j.WorkerJoined(1, 1, 1.0)) == []
    assert m.handle(j.WorkerJoined(0, 2, 2.0)) == [j.BeginAttempt(5)]


def test_rows_flow_when_every_worker_is_ready() -> None:
    m = machine()
    m.handle(j.WorkerJoined(0, 1, 1.0))
    m.handle(j.WorkerJoined(1, 2, 1.0))
    assert m.handle(j.WorkerReady(0, 1, 2.0)) == []
    assert m.handle(j.WorkerReady(0, 1, 2.0)) == []  # said twice is not two workers
    assert m.handle(j.WorkerReady(1, 1, 2.0)) == [j.StartProcessing(1)]


def test_a_lost_worker_stops_the_attempt_and_the_next_begins_after_the_delay() -> None:
    m = running(machine())
    lost = j.WorkerLost(0, 1, "killed", 50.0, "on host node7 (pid 42)")
    assert m.handle(lost) == [j.StopAttempt("worker 0 on host node7 (pid 42) was lost: killed")]
    assert m.next_due_ms == 150.0
    assert m.handle(j.WorkerJoined(0, 9, 60.0)) == []  # the replacement is quicker than the delay
    assert m.handle(j.Tick(149.0)) == []
    assert m.handle(j.Tick(150.0)) == [j.BeginAttempt(2)]


def test_survivors_stay_members() -> None:
    m = running(machine())
    m.handle(j.WorkerLost(0, 1, "killed", 50.0))
    assert m.workers == {1: 2}


def test_a_replacement_that_joins_before_the_loss_is_seen_fails_the_attempt() -> None:
    m = running(machine())
    (effect,) = m.handle(j.WorkerJoined(0, 9, 50.0, "on host node7 (pid 42)"))
    assert effect == j.StopAttempt("worker 0 on host node7 (pid 42) was replaced")
    assert m.workers[0] == 9
    assert m.handle(j.WorkerLost(0, 1, "late news", 51.0)) == []


def test_an_older_incarnation_never_takes_a_slot_back() -> None:
    m = machine()
    m.handle(j.WorkerJoined(0, 7, 1.0))
    assert m.handle(j.WorkerJoined(0, 3, 2.0)) == []
    assert m.workers == {0: 7}


@pytest.mark.parametrize(
    "event", [j.WorkerReady(0, 1, 1.0), j.SubtaskFinished(1, (0, 0), 0.0), j.FinalCommitted(1, 0.0)]
)
def test_news_of_an_older_attempt_are_ignored(event: j.Event) -> None:
    m = running(machine())
    m.handle(j.WorkerLost(0, 1, "killed", 50.0))
    m.handle(j.WorkerJoined(0, 9, 60.0))
    m.handle(j.Tick(150.0))
    assert m.attempt == 2
    assert m.handle(event) == []
    assert m.phase is j.JobPhase.DEPLOYING


def test_a_failure_of_an_older_attempt_does_not_restart_the_new_one() -> None:
    m = running(machine())
    m.handle(j.TaskFailed(1, "first", True, 10.0))
    m.handle(j.Tick(110.0))
    running(m, 111.0)
    assert m.handle(j.TaskFailed(1, "an echo", True, 120.0)) == []
    assert m.phase is j.JobPhase.RUNNING


def test_several_failures_of_one_attempt_cost_one_restart() -> None:
    m = running(machine(RestartConfig(strategy="fixed_delay", attempts=1, delay_ms=0.0)))
    m.handle(j.WorkerLost(0, 1, "killed", 50.0))
    assert m.handle(j.TaskFailed(1, "its neighbour noticed", True, 51.0)) == []
    assert m.phase is j.JobPhase.RESTARTING


def test_a_used_up_budget_ends_the_job_with_the_reason() -> None:
    m = running(machine(RestartConfig(strategy="none")))
    (effect,) = m.handle(j.TaskFailed(1, "boom", True, 10.0))
    assert isinstance(effect, j.ShutDown)
    assert effect.outcome is j.Outcome.FAILED
    assert effect.reason.startswith("boom")


def test_a_failure_that_no_restart_can_help_ends_the_job_at_once() -> None:
    m = running(machine())
    assert m.handle(j.TaskFailed(1, "bad row", False, 10.0)) == [j.ShutDown(j.Outcome.FAILED, "bad row")]


def test_A7_the_final_checkpoint_comes_after_the_last_subtask_finished() -> None:
    m = running(machine())
    assert m.handle(j.SubtaskFinished(1, (0, 0), 0.0)) == []
    assert m.handle(j.SubtaskFinished(1, (0, 0), 0.0)) == []
    assert m.handle(j.SubtaskFinished(1, (0, 1), 0.0)) == [j.TakeFinalCheckpoint(1)]
    assert m.handle(j.FinalCommitted(1, 0.0)) == [
        j.ShutDown(j.Outcome.FINISHED, "every row is processed and committed")
    ]
    assert m.handle(j.WorkerLost(0, 1, "left", 5.0)) == []
    assert m.handle(j.WorkerLost(1, 2, "left", 6.0)) == []  # a closed connection is not yet a process that is gone
    assert m.handle(j.WorkersGone(0.0)) == [j.Ended(j.Outcome.FINISHED, "every row is processed and committed")]


def test_a_worker_lost_while_the_final_checkpoint_runs_restarts_the_job() -> None:
    m = running(machine())
    for subtask in SUBTASKS:
        m.handle(j.SubtaskFinished(1, subtask, 0.0))
    (effect,) = m.handle(j.WorkerLost(1, 2, "killed", 5.0))
    assert isinstance(effect, j.StopAttempt)


def test_a_restored_final_checkpoint_ends_the_job_without_running_it() -> None:
    m = machine()
    m.handle(j.WorkerJoined(0, 1, 1.0))
    m.handle(j.WorkerJoined(1, 2, 1.0))
    assert m.handle(j.FinalCommitted(1, 0.0)) == [
        j.ShutDown(j.Outcome.FINISHED, "every row is processed and committed")
    ]


@pytest.mark.parametrize("phase", ["forming", "running", "restarting"])
def test_cancel_ends_the_job_in_every_phase(phase: str) -> None:
    m = machine()
    if phase != "forming":
        running(m)
    if phase == "restarting":
        m.handle(j.TaskFailed(1, "boom", True, 10.0))
    ending = m.handle(j.EndRequested(j.Outcome.CANCELLED, "the user", 20.0))
    assert ending == [j.ShutDown(j.Outcome.CANCELLED, "the user")]
    assert m.phase is j.JobPhase.ENDING
    assert m.handle(j.WorkersGone(0.0)) == [j.Ended(j.Outcome.CANCELLED, "the user")]
    assert m.phase is j.JobPhase.ENDED
    assert m.handle(j.EndRequested(j.Outcome.STOPPED, "again", 30.0)) == []


def test_a_broken_invariant_tells_its_story() -> None:
    m = running(machine())
    m.workers.clear()
    with pytest.raises(InvariantError, match=r"0 of 2 workers.*Story"):
        m.handle(j.Tick(5.0))


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_the_invariants_hold_and_the_job_can_end(seed: int) -> None:
    rng = random.Random(seed)
    m = machine(RestartConfig(strategy="exponential", initial_ms=10.0, max_ms=50.0))
    now = 0.0
    for incarnation in range(1, 201):
        now += rng.random() * 30
        slot = rng.randrange(2)
        attempt = m.attempt - (rng.random() < 0.2)
        lost = j.WorkerLost(slot, m.workers.get(slot, 0), "lost", now)
        m.handle(
            rng.choice(
                [
                    j.WorkerJoined(slot, incarnation, now),
                    j.WorkerJoined(slot, incarnation, now),
                    lost,
                    j.WorkerReady(slot, attempt, now),
                    j.WorkerReady(1 - slot, attempt, now),
                    j.SubtaskFinished(attempt, (0, slot), 0.0),
                    j.TaskFailed(attempt, f"failure {incarnation}", True, now),
                    j.CheckpointCompleted(attempt, now),
                    j.Tick(now),
                ]
            )
        )
    m.handle(j.EndRequested(j.Outcome.CANCELLED, "enough", now))
    m.handle(j.WorkersGone(0.0))
    assert m.phase is j.JobPhase.ENDED
