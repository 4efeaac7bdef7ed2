"""Rescaler and job machine together, in random orders of events: none loses a request or leaves the job standing."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cutwater.config import RestartConfig
from cutwater.protocol.job import messages as j
from cutwater.protocol.job import rescale as r
from cutwater.protocol.job.machine import JobMachine
from cutwater.protocol.job.restart_budget import RestartDecider


class Cluster:
    """A driver as ``runtime`` has it, with workers that come and go as the dice say."""

    def __init__(self, seed: int, *, adaptive: bool) -> None:
        self.dice = random.Random(seed)
        self.now_ms = 0.0
        self.cores = 4
        self.submitted: set[int] = set()
        self.alive: dict[int, int] = {}
        self.incarnation = 0
        self.snapshot_due = self.deployed = False
        self.completed = 0
        self.answers: Counter[int] = Counter()
        self.errors: dict[int, str] = {}
        self.ended: j.Outcome | None = None
        least = r.Shape(1, 1) if adaptive else None
        self.rescaler = r.Rescaler(r.Shape(2, 2), deadline_ms=80, least=least, stable_ms=20)
        restart = RestartDecider(RestartConfig(strategy="fixed_delay", delay_ms=1.0, attempts=10_000), self.dice)
        self.job = JobMachine(2, subtasks(2), restart, 80.0, 40.0, fewest=self.rescaler.fewest)
        self.recruit(2)

    def recruit(self, workers: int) -> None:
        self.submitted |= set(range(workers))

    def resize(self, workers: int) -> None:
        self.recruit(workers)
        self.submitted -= {slot for slot in self.submitted if slot >= workers}
        for slot in [slot for slot in self.alive if slot >= workers]:
            self.feed(j.WorkerLost(slot, self.alive.pop(slot), "dismissed", self.now_ms))

    def feed(self, event: j.Event) -> None:
        for effect in self.job.handle(event):
            match effect:
                case j.BeginAttempt():
                    assert set(self.alive) >= set(range(self.job.slots))
                    self.deployed = True
                case j.StartProcessing():
                    self.rescale(r.AttemptRuns(self.now_ms))
                    self.job.fewest = self.rescaler.fewest
                case j.StopAttempt(reason=reason):
                    self._stopped(reason)
                    self.rescale(r.AttemptFailed(reason, self.now_ms))
                case j.GroupShort(workers=workers, reason=reason):
                    self.rescale(r.Short(workers, reason, self.now_ms))
                case j.ShutDown(outcome=outcome):
                    self.ended = outcome
                    assert self.rescaler.fewest == 0 or len(self.alive) < self.rescaler.fewest, "it could go on"
                case _:
                    pass

    def _stopped(self, reason: str) -> None:
        self.deployed = False
        if self.snapshot_due:
            self.snapshot_due = False
            self.rescale(r.SnapshotEnded(reason, self.now_ms))

    def rescale(self, event: r.RescaleEvent) -> None:
        for effect in self.rescaler.handle(event):
            match effect:
                case r.Recruit(workers=workers):
                    self.recruit(workers)
                case r.Dismiss():
                    self.resize(self.job.slots)
                case r.TakeSnapshot():
                    assert self.job.phase is j.JobPhase.RUNNING
                    self.snapshot_due, self.completed = True, 0
                case r.Switch(shape=shape):
                    self.snapshot_due = self.deployed = False
                    self.submitted = {s for s in self.submitted if s < shape.workers} | set(range(shape.workers))
                    for slot in [slot for slot in self.alive if slot >= shape.workers]:
                        del self.alive[slot]
                    fewest = self.rescaler.fewest
                    self.feed(j.Reshape(shape.workers, subtasks(shape.workers), fewest, self.now_ms))
                case r.Answered(request=request, error=error):
                    assert isinstance(request, int)
                    self.answers[request] += 1
                    self.errors[request] = error
                case r.Note():
                    pass

    def step(self, *, calm: bool = False) -> None:
        """One event; with ``calm`` nothing fails."""
        self.now_ms += self.dice.choice([0.5, 2.0, 30.0])
        joining = [slot for slot in sorted(self.submitted) if slot not in self.alive]
        if joining and len(self.alive) < self.cores and self.dice.random() < 0.7:
            slot = self.dice.choice(joining)
            self.incarnation += 1
            self.alive[slot] = self.incarnation
            self.feed(j.WorkerJoined(slot, self.incarnation, self.now_ms))
        elif not calm and self.alive and self.dice.random() < 0.08:
            slot = self.dice.choice(sorted(self.alive))
            self.feed(j.WorkerLost(slot, self.alive.pop(slot), "killed", self.now_ms))
        elif self.snapshot_due and self.dice.random() < 0.5:
            self.snapshot_due = False
            failed = not calm and self.dice.random() < 0.2
            self.rescale(r.SnapshotEnded("the checkpoint failed" if failed else "", self.now_ms))
        elif self.deployed:
            self.deployed = False
            for slot in range(self.job.slots):
                self.feed(j.WorkerReady(slot, self.job.attempt, self.now_ms))
        alive = frozenset(self.alive)
        self.rescale(r.GroupSeen(alive, alive, self.job.waits, self.now_ms))
        self.rescale(r.Tick(self.now_ms))
        self.feed(j.Progress(frozenset(self.submitted - alive), (), self.now_ms))
        self.feed(j.Tick(self.now_ms))
        running = self.job.phase is j.JobPhase.RUNNING
        assert not running or self.rescaler.shape.workers == self.job.slots


def subtasks(workers: int) -> frozenset[tuple[int, int]]:
    return frozenset((0, i) for i in range(workers))


@pytest.mark.parametrize("adaptive", [False, True], ids=["asked for", "adaptive"])
def test_every_request_is_answered_once_and_the_job_runs_where_the_last_answer_says(adaptive: bool) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(400):
        cluster = Cluster(seed, adaptive=adaptive)
        requests = 0
        for _ in range(60):
            if cluster.dice.random() < 0.1:
                requests += 1
                workers = cluster.dice.randrange(1, 6)
                cluster.rescale(r.Requested(r.Shape(workers, workers), requests, cluster.now_ms))
            cluster.step()
        for _ in range(60):
            cluster.step(calm=True)
        if cluster.ended is not None:  # the cores did not come back in time
            outcomes["ended"] += 1
            continue
        assert cluster.answers == Counter(range(1, requests + 1)), f"seed {seed}"
        assert cluster.job.phase is j.JobPhase.RUNNING, f"seed {seed}: {cluster.job.phase}"
        assert set(range(cluster.job.slots)) <= set(cluster.alive)
        outcomes["rescaled"] += sum(not error for error in cluster.errors.values())
        outcomes["refused"] += sum(bool(error) for error in cluster.errors.values())
    assert min(outcomes["rescaled"], outcomes["refused"]) > 100, outcomes


def test_a_new_group_that_stays_incomplete_makes_way_for_the_old_one() -> None:
    rescaler = r.Rescaler(r.Shape(2, 2))
    rescaler.handle(r.AttemptRuns(0))
    rescaler.handle(r.Requested(r.Shape(3, 3), "wider", 0))
    rescaler.handle(r.GroupSeen(frozenset(range(3)), frozenset(range(3)), False, 1))
    assert rescaler.handle(r.SnapshotEnded("", 2)) == [r.Switch(r.Shape(3, 3), "rescaled from 2 to 3")]
    assert rescaler.fewest == 2
    note, answered, switch = rescaler.handle(r.Short(2, "2 of 3 workers got a core", 60))
    assert note == r.Note("2 of 3 workers got a core; the job goes on at parallelism 2")
    assert answered == r.Answered("wider", "2 of 3 workers got a core; the job goes on at parallelism 2")
    assert switch == r.Switch(r.Shape(2, 2), "2 of 3 workers got a core")
    assert rescaler.handle(r.AttemptRuns(70)) == []
    assert (rescaler.shape, rescaler.fewest) == (r.Shape(2, 2), 0)
