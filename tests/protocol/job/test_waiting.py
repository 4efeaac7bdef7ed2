"""Lost cores are a state and no end: what a job that lacks workers waits for, how long, and what it says of it."""

from __future__ import annotations

import random

import pytest

from cutwater.config import RestartConfig
from cutwater.protocol.job import messages as j
from cutwater.protocol.job import rescale as r
from cutwater.protocol.job.machine import JobMachine
from cutwater.protocol.job.restart_budget import RestartDecider

HOUR_MS = 3_600_000.0


def machine(slots: int = 3, *, resource_timeout_ms: float | None = None, fewest: int = 0) -> JobMachine:
    subtasks = frozenset((0, slot) for slot in range(slots))
    restart = RestartDecider(RestartConfig(strategy="fixed_delay", delay_ms=100.0), random.Random(0))
    return JobMachine(slots, subtasks, restart, resource_timeout_ms, 10_000.0, fewest=fewest)


def running(m: JobMachine) -> JobMachine:
    for slot in range(m.slots):
        m.handle(j.WorkerJoined(slot, slot + 1, 1.0))
    for slot in range(m.slots):
        m.handle(j.WorkerReady(slot, m.attempt, 1.0))
    assert m.phase is j.JobPhase.RUNNING
    return m


def no_cores(*slots: int, now: float) -> j.Progress:
    return j.Progress(frozenset(slots), (), now)


def booting(slot: int, *, since: float, now: float) -> j.Progress:
    return j.Progress(frozenset(), (j.Starting(slot, "node7", since),), now)


def let_time_pass(m: JobMachine, until: float, progress: j.Progress | None = None) -> list[j.Effect]:
    """What the machine does by itself, looked at as often as the driver does."""
    found: list[j.Effect] = []
    now = m.now_ms
    while now < until:
        now = min(until, now + (400.0 if now < 200_000 else 10_000.0))
        if progress is not None:
            m.handle(j.Progress(progress.queued, progress.starting, now))
        found += m.handle(j.Tick(now))
    return found


# ------------------------------------------------------------------------------------------------------------ no end


def test_a_core_that_is_back_after_an_hour_is_a_core_that_is_back() -> None:
    m = running(machine())
    m.handle(j.WorkerLost(1, 2, "killed", 50.0))
    effects = let_time_pass(m, HOUR_MS, no_cores(1, now=0.0))
    assert [type(e) for e in effects] == [j.Wait]
    assert m.handle(j.WorkerJoined(1, 9, HOUR_MS)) == [j.BeginAttempt(2)]


def test_a_first_start_that_cannot_be_met_is_told_within_10_s_and_goes_on_waiting() -> None:
    m = machine()
    m.handle(j.WorkerJoined(0, 1, 500.0))
    m.handle(no_cores(1, 2, now=600.0))
    told = let_time_pass(m, 10_000.0, no_cores(1, 2, now=0.0))
    advice = "free 2 cores or ask for parallelism 1; the job goes on when they are there"
    assert told == [j.Wait(f"waiting for cores, 1 of 3 since 8 s ({advice})")]
    assert let_time_pass(m, HOUR_MS, no_cores(1, 2, now=0.0)) == []
    assert m.waits


def test_each_shortage_is_told_anew() -> None:
    m = running(machine())
    for incarnation, start in ((2, 50.0), (9, 100_000.0)):
        m.handle(j.WorkerLost(1, incarnation, "killed", start))
        effects = let_time_pass(m, start + 20_000, no_cores(1, now=0.0))
        assert [type(e) for e in effects] == [j.Wait]
        m.handle(j.WorkerJoined(1, 9, start + 20_000))
        for slot in range(3):
            m.handle(j.WorkerReady(slot, m.attempt, start + 20_000))
        assert m.phase is j.JobPhase.RUNNING


def test_a_short_loss_is_told_by_its_restart_alone() -> None:
    m = running(machine())
    m.handle(j.WorkerLost(1, 2, "killed", 50.0))
    assert let_time_pass(m, 5_000.0, no_cores(1, now=0.0)) == []


def test_with_a_resource_timeout_the_job_ends_so_long_after_the_last_core_that_came() -> None:
    m = machine(resource_timeout_ms=60_000.0)
    m.handle(no_cores(0, 1, 2, now=0.0))
    m.handle(j.WorkerJoined(0, 1, 50_000.0))
    assert [type(e) for e in let_time_pass(m, 109_900.0)] == [j.Wait]
    (effect,) = m.handle(j.Tick(110_000.0))
    shortage = "1 of 3 workers got a core of the Spark cluster; free 2 cores or ask for parallelism 1"
    assert effect == j.ShutDown(j.Outcome.FAILED, shortage)


# ------------------------------------------------------------------------------------------------ core, or just slow


def test_a_slow_boot_is_no_missing_core() -> None:
    m = machine(2, resource_timeout_ms=10_000.0)
    m.handle(j.WorkerJoined(0, 1, 500.0))
    told = let_time_pass(m, 65_000.0, booting(1, since=4_000.0, now=0.0))
    (wait,) = told
    assert isinstance(wait, j.Wait)
    assert wait.text == "worker 1 has a core, Python is starting since 30 s on host node7"
    now = m.waiting.text(65_000.0)
    assert now == "worker 1 has a core, Python is starting since 61 s on host node7"
    assert let_time_pass(m, HOUR_MS, booting(1, since=4_000.0, now=0.0)) == []


def test_a_slot_that_spark_does_not_know_of_yet_waits_for_no_core() -> None:
    m = machine(2, resource_timeout_ms=10_000.0)
    m.handle(j.WorkerJoined(0, 1, 500.0))
    assert let_time_pass(m, 30_000.0, j.Progress(frozenset(), (), 0.0)) == []
    assert m.waiting.text(30_000.0) == "waiting for workers, 1 of 2 since 30 s"


def test_both_are_told_apart_in_one_line() -> None:
    m = machine(6)
    m.handle(j.WorkerJoined(0, 1, 500.0))
    starting = tuple(j.Starting(slot, "", 0.0) for slot in (1, 2, 3, 4))
    m.handle(j.Progress(frozenset({5}), starting, 1_000.0))
    assert m.waiting.text(200_000.0) == (
        "waiting for cores, 5 of 6 since 3m 20s; "
        + "; ".join(f"worker {slot} has a core, Python is starting since 3m 20s" for slot in (1, 2, 3))
        + "; 1 more are starting"
    )
    assert (m.waiting.cores, m.waiting.present) == (5, 1)


def test_a_core_that_comes_starts_the_time_anew() -> None:
    m = machine(2, resource_timeout_ms=60_000.0)
    m.handle(no_cores(0, 1, now=0.0))
    let_time_pass(m, 50_000.0)
    m.handle(j.Progress(frozenset({0}), (j.Starting(1, "a", 50_000.0),), 50_000.0))
    assert m.waiting.deadline_ms(enough=False) == 110_000.0


# ---------------------------------------------------------------------------------------------------------- adaptive


def test_a_group_that_can_do_with_fewer_does_so_when_nobody_came_for_the_stabilization_timeout() -> None:
    m = running(machine(fewest=1))
    m.handle(j.WorkerLost(1, 2, "killed", 50.0))
    effects = let_time_pass(m, 10_800.0, no_cores(1, now=0.0))
    shortage = "2 of 3 workers got a core of the Spark cluster; free 1 core or ask for parallelism 2"
    assert effects == [j.GroupShort(2, shortage)], "and nothing is told besides"


def test_a_group_with_too_few_for_that_waits_and_says_so() -> None:
    m = running(machine(fewest=3))
    m.handle(j.WorkerLost(1, 2, "killed", 50.0))
    effects = let_time_pass(m, HOUR_MS, no_cores(1, now=0.0))
    assert [type(e) for e in effects] == [j.Wait]


def test_a_group_that_can_do_with_fewer_waits_for_a_process_that_is_starting() -> None:
    m = running(machine(fewest=1))
    m.handle(j.WorkerLost(1, 2, "killed", 50.0))
    assert let_time_pass(m, 29_000.0, booting(1, since=200.0, now=0.0)) == []


# ----------------------------------------------------------------------------------------------------------- rescale


def test_a_job_that_waits_for_cores_goes_on_with_fewer_at_once_when_its_user_says_so() -> None:
    rescaler = r.Rescaler(r.Shape(3, 3))
    rescaler.handle(r.AttemptRuns(0))
    rescaler.handle(r.AttemptFailed("worker 1 was lost", 10))
    there = frozenset({0, 2})
    rescaler.handle(r.GroupSeen(there, there, True, 20))
    assert rescaler.handle(r.Requested(r.Shape(2, 2), "fewer", 30)) == [r.Switch(r.Shape(2, 2), "rescaled from 3 to 2")]
    assert rescaler.handle(r.AttemptRuns(40)) == [r.Answered("fewer", "")]


def test_a_request_that_came_before_the_shortage_was_seen_is_not_forgotten() -> None:
    rescaler = r.Rescaler(r.Shape(3, 3))
    assert rescaler.handle(r.Requested(r.Shape(1, 1), "fewer", 30)) == []
    there = frozenset({2})
    assert rescaler.handle(r.GroupSeen(there, there, True, 40)) == [r.Switch(r.Shape(1, 1), "rescaled from 3 to 1")]


def test_a_rescale_that_lacks_cores_is_told_within_10_s_and_ends_by_its_own_timeout() -> None:
    rescaler = r.Rescaler(r.Shape(2, 2), deadline_ms=300_000.0)
    rescaler.handle(r.AttemptRuns(0))
    rescaler.handle(r.Requested(r.Shape(4, 4), "wider", 0))
    three = frozenset({0, 1, 2})
    rescaler.handle(r.GroupSeen(frozenset({0, 1}), three, False, 1_000))
    assert rescaler.handle(r.Tick(7_999)) == []
    shortage = "3 of 4 workers got a core of the Spark cluster; free 1 core"
    assert rescaler.handle(r.Tick(8_000)) == [
        r.Note(f"rescale to 4: {shortage}; the job runs on at parallelism 2 meanwhile")
    ]
    rescaler.handle(r.GroupSeen(three, three, False, 20_000))
    assert rescaler.handle(r.Tick(319_999)) == []
    answer = r.Answered("wider", f"{shortage}; the job goes on at parallelism 2")
    assert rescaler.handle(r.Tick(320_000)) == [r.Dismiss(), answer]


def test_recruits_that_have_a_core_and_are_slow_are_not_called_missing_cores() -> None:
    rescaler = r.Rescaler(r.Shape(1, 1), deadline_ms=50_000.0)
    rescaler.handle(r.AttemptRuns(0))
    rescaler.handle(r.Requested(r.Shape(2, 2), "wider", 0))
    rescaler.handle(r.GroupSeen(frozenset({0}), frozenset({0, 1}), False, 1_000))
    _, answered = rescaler.handle(r.Tick(60_000))
    assert isinstance(answered, r.Answered)
    assert answered.error.startswith("1 of 2 workers are there, the others have a core, and their Python is starting")


@pytest.mark.parametrize("runs", [True, False], ids=["recruiting", "waiting"])
def test_a_later_request_takes_the_place_of_one_that_waits(runs: bool) -> None:
    rescaler = r.Rescaler(r.Shape(2, 2))
    if runs:
        rescaler.handle(r.AttemptRuns(0))
    rescaler.handle(r.Requested(r.Shape(9, 9), "too wide", 0))
    withdrawn = r.Answered("too wide", "a rescale to parallelism 2 was asked for meanwhile")
    effects = rescaler.handle(r.Requested(r.Shape(2, 2), "as it is", 10))
    assert effects == [withdrawn, r.Answered("as it is", ""), *([r.Dismiss()] if runs else [])]
    assert rescaler.phase is r.RescalePhase.IDLE
