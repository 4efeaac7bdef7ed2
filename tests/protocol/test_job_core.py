"""The core of a job: what a decision of one machine means for the others, and in which order hosts hear of it."""

from __future__ import annotations

from collections.abc import Hashable
from random import Random

import pytest

from cutwater.config import JobConfig, RestartConfig
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.loops import SendVerdict
from cutwater.protocol.job import messages as j
from cutwater.protocol.job import rescale as r
from cutwater.protocol.job.core import JobCore
from cutwater.protocol.job.hosts import Follow, Topology
from cutwater.protocol.job.restart_budget import RestartDecider
from cutwater.protocol.protocols import CheckpointKind, FailureReason
from cutwater.protocol.subtask.host import LoopReport

A, B = (0, 0), (0, 1)
BOTH = frozenset({A, B})
TWO_REGIONS = Topology(2, BOTH, BOTH, regions=(frozenset({A}), frozenset({B})))
A_LOOP = Topology(2, BOTH, frozenset({A}), {0: frozenset({B})})
QUIET = LoopReport(quiet=True, outside_ended=True, drained=True)


class Host:
    """Notes what it is told; publishes when a test says so, or at once."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.at_once = True
        self.core: JobCore
        self.cores = frozenset[int]()
        self.after: Topology = TWO_REGIONS

    def begin(self, attempt: int, regions: tuple[int, ...] | None) -> None:
        self.told.append(("begin", attempt, regions))
        self.core.log_taken(10)

    def start_rows(self, attempt: int, regions: tuple[int, ...] | None) -> None:
        self.told.append(("start", attempt, regions))

    def runs(self) -> None:
        self.told.append("runs")

    def going_back(self, reason: str, regions: tuple[int, ...] | None) -> None:
        self.told.append(("going back", regions))

    def reset(self, regions: tuple[int, ...] | None) -> None:
        self.told.append(("reset", regions))

    def overdue(self, slots: list[int]) -> None:
        self.told.append(("overdue", slots))
        self.core.handle(j.TaskFailed(self.core.machine.attempt, "late", True, 0.0))

    def recruit(self, workers: int) -> None:
        self.told.append(("recruit", workers))

    def dismiss(self) -> None:
        self.told.append("dismiss")

    def switch(self, shape: r.Shape, reason: str) -> Topology:
        self.told.append(("switch", shape.workers))
        return self.after

    def shut_down(self, outcome: j.Outcome, reason: str) -> None:
        self.told.append(("shut down", outcome))
        self.core.handle(j.WorkersGone(0.0))

    def job_over(self, outcome: j.Outcome, reason: str) -> None:
        self.told.append(("ended", outcome))

    def note(self, text: str) -> None:
        self.told.append(("note", text))

    def rescaled(self, request: Hashable, error: str) -> None:
        self.told.append(("rescaled", request, error))

    def trigger(self, effect: cm.SendTrigger) -> None:
        self.told.append(("trigger", effect.checkpoint_id))

    def drain(self) -> None:
        self.told.append("drain")

    def verdict(self, verdict: SendVerdict) -> None:
        self.told.append(("verdict", verdict.checkpoint_id))

    def publish(self, effect: cm.Publish) -> cm.Published | cm.PublishFailed | None:
        self.told.append(("publish", effect.checkpoint_id))
        return cm.Published(effect.checkpoint_id, 0.0) if self.at_once else None

    def completed(self, checkpoint_id: int, kind: CheckpointKind) -> None:
        self.told.append(("completed", checkpoint_id))

    def complete(self, effect: cm.NotifyComplete) -> None:
        self.told.append(("complete", effect.checkpoint_id))

    def stopped_behind(self, checkpoint_id: int) -> None:
        self.told.append(("stopped behind", checkpoint_id))

    def abort(self, effect: cm.NotifyAborted) -> None:
        self.told.append(("abort", effect.checkpoint_id))

    def stopped(self, reason: str) -> None:
        self.told.append("stopped")

    def acknowledged(self, effect: cm.AckAnswered) -> None:
        pass

    def answered(self, answer: cm.RequestAnswered) -> None:
        self.told.append(("answered", answer.request_id, answer.reason))

    def too_many_failed(self, effect: cm.FailJob) -> None:
        self.told.append("too many failed")
        self.core.handle(j.TaskFailed(self.core.machine.attempt, effect.detail, True, 0.0))

    def in_doubt(self, checkpoint_id: int) -> None:
        self.told.append(("in doubt", checkpoint_id))
        self.core.handle(j.TaskFailed(self.core.machine.attempt, "in doubt", True, 0.0))

    def changed(self) -> None:
        pass

    def heard(self) -> list[object]:
        """What it was told since it was asked last."""
        told, self.told = self.told, []
        return told


def made(topology: Topology = TWO_REGIONS, *, catch_up_ms: float | None = None, **settings: object) -> Host:
    host = Host()
    config = JobConfig(interval_ms=1e9, **settings)  # type: ignore[arg-type]
    restart = RestartDecider(RestartConfig(strategy="fixed_delay", attempts=100, delay_ms=5.0), Random(0))
    rescaler = r.Rescaler(r.Shape(2, 2))
    host.core = JobCore(host, host, config, topology, restart, rescaler, catch_up_ms=catch_up_ms)
    for slot in range(2):
        host.core.handle(j.WorkerJoined(slot, 1, 0.0))
    return host


def ready(host: Host, attempt: int = 1, regions: tuple[int, ...] = (0, 1)) -> None:
    for slot, region in sorted(host.core.machine.parts):
        if region in regions:
            host.core.handle(j.WorkerReady(slot, attempt, 1.0, region))


def running(topology: Topology = TWO_REGIONS, *, catch_up_ms: float | None = None, **settings: object) -> Host:
    host = made(topology, catch_up_ms=catch_up_ms, **settings)
    ready(host)
    host.heard()
    return host


def acknowledge(host: Host, id: int, *subtasks: tuple[int, int]) -> None:
    host.core.acknowledged(id, [(s, "part") for s in subtasks or (A, B)], [], 2.0)


def checkpoint(host: Host, request: Hashable = "user", kind: CheckpointKind = CheckpointKind.ON_DEMAND) -> None:
    host.core.request(kind, request, 2.0)


def test_an_attempt_begins_then_starts_then_runs() -> None:
    host = made()
    assert host.heard() == [("begin", 1, None)]
    ready(host)
    assert host.heard() == [("start", 1, None), "runs"]
    assert host.core.running_attempt == 1


def test_ids_begin_above_what_the_log_has_when_it_is_taken() -> None:
    host = running()
    checkpoint(host)
    assert host.heard() == [("trigger", 11)]


def test_before_the_first_attempt_there_is_nothing_to_take_a_checkpoint_of() -> None:
    host = Host()
    host.core = JobCore(host, host, JobConfig(), TWO_REGIONS, RestartDecider(RestartConfig(), Random(0)),
                        r.Rescaler(r.Shape(2, 2)))  # fmt: skip
    checkpoint(host)
    host.core.request_drain("drained", 1.0)
    no = FailureReason.JOB_NOT_RUNNING
    assert host.heard() == [("answered", "user", no), ("answered", "drained", no)]


def test_workers_hear_of_a_checkpoint_once_it_is_published() -> None:
    host = running()
    host.at_once = False
    checkpoint(host)
    acknowledge(host, 11)
    assert host.heard() == [("trigger", 11), ("publish", 11)]
    host.core.published(cm.Published(11, 3.0))
    assert host.heard() == [("completed", 11), ("complete", 11), ("answered", "user", None)]


def test_what_follows_a_publication_is_performed_behind_what_was_decided_before_it() -> None:
    host = running(max_concurrent=2)
    checkpoint(host, "first")
    checkpoint(host, "second")
    host.heard()
    acknowledge(host, 12)
    assert host.heard() == [
        ("publish", 12), ("completed", 12), ("complete", 12), ("answered", "second", None), ("answered", "first", None),
        ("abort", 11),
    ]  # fmt: skip


def test_behind_a_savepoint_a_checkpoint_is_taken_and_it_comes_after_what_was_due() -> None:
    host = running()
    checkpoint(host, "saved", CheckpointKind.SAVEPOINT)
    acknowledge(host, 11)
    assert host.heard() == [
        ("trigger", 11), ("publish", 11), ("completed", 11), ("complete", 11), ("answered", "saved", None),
        ("trigger", 12),
    ]  # fmt: skip
    assert host.core.checkpoints is not None
    assert host.core.checkpoints.request_of(12) == Follow("saved")
    acknowledge(host, 12)
    assert host.heard()[-1] == ("answered", Follow("saved"), None)  # and no other one behind it


def test_a_failure_gives_up_what_is_under_way_before_the_workers_are_reset() -> None:
    host = running()
    checkpoint(host)
    host.heard()
    host.core.handle(j.TaskFailed(1, "broken", True, 3.0))
    job_stopped = FailureReason.JOB_STOPPED
    assert host.heard() == [
        ("going back", None), ("abort", 11), ("answered", "user", job_stopped), "stopped", ("reset", None),
    ]  # fmt: skip


def test_a_failure_that_is_reported_amid_a_completion_is_performed_behind_it() -> None:
    host = running(max_concurrent=2)
    complete = host.complete

    def failing(effect: cm.NotifyComplete) -> None:
        complete(effect)
        host.core.handle(j.TaskFailed(1, "the sink is gone", True, 3.0))

    host.complete = failing  # type: ignore[method-assign]
    checkpoint(host)
    acknowledge(host, 11)
    assert host.heard() == [
        ("trigger", 11), ("publish", 11), ("completed", 11), ("complete", 11), ("answered", "user", None),
        ("going back", None), "stopped", ("reset", None),
    ]  # fmt: skip


def test_too_many_failed_checkpoints_end_the_attempt() -> None:
    host = running()
    checkpoint(host)
    host.core.declined(11, A, FailureReason.DECLINED, "no", 3.0)
    assert host.heard() == [
        ("trigger", 11), ("abort", 11), ("answered", "user", FailureReason.DECLINED), "too many failed",
        ("going back", None), "stopped", ("reset", None),
    ]  # fmt: skip


@pytest.mark.parametrize("in_doubt", [False, True])
def test_an_attempt_ends_if_nobody_knows_whether_it_published(in_doubt: bool) -> None:
    host = running(tolerable_failed=5)
    host.at_once = False
    checkpoint(host)
    acknowledge(host, 11)
    host.core.published(cm.PublishFailed(11, "disk", 3.0, in_doubt=in_doubt))
    told = host.heard()
    assert (("in doubt", 11) in told) is in_doubt
    assert (("reset", None) in told) is in_doubt
    assert host.core.running_attempt == (0 if in_doubt else 1)


def test_a_doubt_about_an_attempt_that_is_over_ends_no_other() -> None:
    host = running(tolerable_failed=5)
    host.at_once = False
    checkpoint(host)
    acknowledge(host, 11)
    host.core.handle(j.TaskFailed(1, "broken", True, 3.0))
    host.core.on_time(20.0)
    host.heard()
    host.core.published(cm.PublishFailed(11, "disk", 21.0, in_doubt=True))
    ready(host, 2)
    assert host.core.running_attempt == 2


# ------------------------------------------------------------------------------------------------------------- regions


def goes_back(host: Host, region: int = 0) -> None:
    """A region fails and is restored as attempt 2."""
    host.core.handle(j.TaskFailed(1, "broken", True, 3.0, region))
    host.core.on_time(20.0)
    ready(host, 2, (region,))


def test_survivors_hear_which_checkpoint_is_given_up_and_only_the_region_is_reset() -> None:
    host = running()
    checkpoint(host)
    host.heard()
    host.core.handle(j.TaskFailed(1, "broken", True, 3.0, 0))
    told = host.heard()
    assert told == [("going back", (0,)), ("abort", 11), ("answered", "user", FailureReason.JOB_STOPPED), "stopped",
                    ("reset", (0,))]  # fmt: skip
    host.core.on_time(20.0)
    ready(host, 2, (0,))
    assert host.heard() == [("begin", 2, (0,)), ("start", 2, (0,)), "runs"]


def test_survivors_hear_that_what_was_being_published_is_complete() -> None:
    host = running()
    host.at_once = False
    checkpoint(host)
    acknowledge(host, 11)
    host.core.handle(j.TaskFailed(1, "broken", True, 3.0, 0))
    host.heard()
    host.core.published(cm.Published(11, 4.0))
    assert ("complete", 11) in host.heard()


def test_what_is_asked_for_while_a_region_is_away_waits_until_it_is_back() -> None:
    host = running()
    host.core.handle(j.TaskFailed(1, "broken", True, 3.0, 0))
    checkpoint(host)
    assert ("trigger", 11) not in host.heard()
    host.core.on_time(20.0)
    ready(host, 2, (0,))
    assert host.heard()[-1] == ("trigger", 11)


def test_everything_goes_back_if_the_others_may_read_nothing_more() -> None:
    host = running()
    checkpoint(host, "stop", CheckpointKind.STOP_WITH_SAVEPOINT)
    host.heard()
    host.core.handle(j.TaskFailed(1, "broken", True, 3.0, 0))
    told = host.heard()
    assert told[0] == ("going back", None)
    assert told[-1] == ("reset", None)


def test_r4_no_checkpoint_begins_before_all_have_caught_up() -> None:
    host = running(Topology(2, BOTH | {(1, 0)}, BOTH, regions=(frozenset({A, (1, 0)}), frozenset({B}))),
                   catch_up_ms=100.0)  # fmt: skip
    host.core.handle(j.TaskFailed(1, "broken", True, 3.0, 0))
    checkpoint(host)
    host.core.on_time(20.0)
    ready(host, 2, (0,))
    assert host.heard()[-1] == ("start", 2, (0,))
    assert host.core.awaited == [0]
    host.core.caught_up([A], 30.0)
    assert host.heard() == []
    host.core.caught_up([(1, 0)], 31.0)
    assert host.heard() == ["runs", ("trigger", 11)]
    host.core.caught_up([A], 32.0)
    assert host.heard() == []


def test_r4_who_does_not_catch_up_in_time_takes_everything_back() -> None:
    host = running(catch_up_ms=100.0)
    goes_back(host)
    host.heard()
    assert host.core.next_due_ms == 120.0
    host.core.on_time(119.0)
    assert host.heard() == []
    host.core.on_time(120.0)
    assert host.heard() == [("overdue", [0]), ("going back", None), "stopped", ("reset", None)]
    assert host.core.behind == {}


def test_a_region_that_goes_back_again_has_its_time_anew() -> None:
    host = running(catch_up_ms=100.0)
    goes_back(host)
    host.core.handle(j.TaskFailed(2, "broken", True, 50.0, 0))
    assert host.core.behind == {}
    host.core.on_time(60.0)
    assert host.core.behind == {A: 160.0}


def test_messages_count_by_worker_attempt_and_region() -> None:
    host = running()
    goes_back(host)
    hears = host.core.hears
    assert hears(0, 1)
    assert hears(0, 1, 2, 0)
    assert hears(1, 1, 1, 1)
    assert not hears(0, 1, 1, 0)  # its region is of attempt 2 now
    assert not hears(1, 1, 2, 1)  # and this one of attempt 1
    assert not hears(0, 2, 2, 0)  # another process than the one that fills the slot
    assert not hears(2, 1)
    assert hears(1, 1, 2)  # of the whole job
    assert not hears(1, 1, 1)


# --------------------------------------------------------------------------------------------------------------- loops


def test_c6_a_verdict_follows_the_wave_that_tells_it() -> None:
    host = running(A_LOOP)
    host.core.probe_wanted(B, 2.0)
    assert host.heard() == [("trigger", 11)]
    host.core.acknowledged(11, [(A, None)], [(A, QUIET)], 3.0)
    host.core.acknowledged(11, [(B, None)], [(B, QUIET)], 3.0)
    assert host.heard() == [("verdict", 11), ("complete", 11)]


def test_c6_a_probe_that_is_given_up_is_asked_for_again() -> None:
    host = running(A_LOOP, timeout_ms=10.0)
    host.core.probe_wanted(B, 2.0)
    host.core.on_time(12.0)
    assert host.heard() == [("trigger", 11), ("abort", 11)]
    assert host.core.next_due_ms == 17.0
    host.core.on_time(17.0)
    assert host.heard() == [("trigger", 12)]


def test_c6_a_probe_that_was_asked_for_while_a_region_was_away_begins_when_it_is_back() -> None:
    host = running(Topology(2, BOTH, BOTH, {0: frozenset({B})}, (frozenset({A}), frozenset({B}))))
    host.core.handle(j.TaskFailed(1, "broken", True, 3.0, 0))
    host.core.probe_wanted(B, 4.0)
    host.core.on_time(20.0)
    ready(host, 2, (0,))
    host.heard()
    due = host.core.next_due_ms
    assert due is not None
    host.core.on_time(due)
    assert host.heard() == [("trigger", 11)]


def test_nothing_is_due_of_loops_while_the_job_restarts() -> None:
    """A driver that waits for cores must not turn round and round for a probe that cannot begin."""
    host = running(A_LOOP)
    host.core.probe_wanted(B, 2.0)
    host.core.handle(j.TaskFailed(1, "broken", True, 3.0))
    host.core.handle(j.WorkerLost(1, 1, "gone", 3.0))
    host.core.on_time(8.0)
    assert host.core.machine.phase is j.JobPhase.FORMING
    assert host.core.next_due_ms is None


# ------------------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("kind", [CheckpointKind.FINAL, CheckpointKind.STOP_WITH_SAVEPOINT])
def test_a7_the_job_ends_when_every_worker_has_committed(kind: CheckpointKind) -> None:
    host = running()
    if kind is CheckpointKind.FINAL:
        for subtask in (A, B):
            host.core.handle(j.SubtaskFinished(1, subtask, 2.0))
    else:
        checkpoint(host, "stop", kind)
    acknowledge(host, 11)
    host.heard()
    host.core.committed([(0, 0)], 11, 4.0)
    host.core.committed([(1, 1)], 10, 4.0)  # of another one
    assert host.heard() == []
    host.core.committed([(1, 1)], 11, 4.0)
    finished = j.Outcome.FINISHED
    ends = [("stopped behind", 11)] if kind.user_owned else ["stopped", ("shut down", finished), ("ended", finished)]
    assert host.heard() == ends
    assert host.core.committed_id == (11 if kind.user_owned else 0)


def test_a_failure_behind_a_stop_forgets_who_had_committed() -> None:
    host = running()
    checkpoint(host, "stop", CheckpointKind.STOP_WITH_SAVEPOINT)
    acknowledge(host, 11)
    host.core.committed([(0, 0)], 11, 4.0)
    host.core.handle(j.TaskFailed(1, "broken", True, 5.0))
    host.heard()
    host.core.committed([(1, 1)], 11, 6.0)
    assert host.heard() == []


# ------------------------------------------------------------------------------------------------------------- rescale


def test_a_rescale_takes_a_checkpoint_and_switches_behind_all_that_this_decides() -> None:
    host = running()
    host.core.look(1.0)
    host.after = Topology(1, frozenset({A}), frozenset({A}))
    host.core.request_rescale(r.Shape(1, 1), "narrower", 2.0)
    assert host.heard() == [("trigger", 11)]
    acknowledge(host, 11)
    assert host.heard() == [
        ("publish", 11), ("completed", 11), ("complete", 11), "stopped", ("reset", None), ("switch", 1),
        ("begin", 2, None),
    ]  # fmt: skip
    host.core.handle(j.WorkerReady(0, 2, 4.0))
    assert host.heard() == [("start", 2, None), "runs", ("rescaled", "narrower", "")]
    assert host.core.machine.restart.latest.delay_ms == 0  # a switch is no failure


def test_a_rescale_whose_checkpoint_fails_is_answered_with_the_reason() -> None:
    host = running(tolerable_failed=5)
    host.core.look(1.0)
    host.core.request_rescale(r.Shape(1, 1), "narrower", 2.0)
    host.core.declined(11, A, FailureReason.DECLINED, "no", 3.0)
    [answer] = [told for told in host.heard() if isinstance(told, tuple) and told[0] == "rescaled"]
    assert "the checkpoint failed: a subtask declined" in answer[2]


def test_recruits_that_are_sent_away_are_no_failure() -> None:
    host = running()
    host.core.look(1.0)
    host.core.request_rescale(r.Shape(3, 3), "wider", 2.0)
    assert host.heard() == [("recruit", 3)]
    host.core.handle(j.WorkerJoined(2, 1, 3.0))
    host.core.handle(j.TaskFailed(1, "broken", True, 3.0))
    assert [told for told in host.heard() if told == "dismiss"] == ["dismiss"]
    assert host.core.machine.workers == {0: 1, 1: 1}


def test_a_job_begins_anew_at_the_parallelism_that_it_has() -> None:
    host = running()
    host.core.begin_anew("it was promoted", 2.0)
    assert host.heard() == ["stopped", ("reset", None), ("switch", 2), ("begin", 2, None)]


def test_a_job_without_checkpoints_has_attempts() -> None:
    host = Host()
    restart = RestartDecider(RestartConfig(strategy="fixed_delay", attempts=1, delay_ms=0.0), Random(0))
    host.core = JobCore(host, None, JobConfig(), Topology(1, frozenset({A})), restart, r.Rescaler(r.Shape(1, 1)))
    host.begin = lambda attempt, regions: host.told.append(("begin", attempt, regions))  # type: ignore[method-assign]
    host.core.handle(j.WorkerJoined(0, 1, 0.0))
    host.core.handle(j.WorkerReady(0, 1, 0.0))
    host.core.handle(j.TaskFailed(1, "broken", True, 1.0))
    assert host.heard() == [("begin", 1, None), ("start", 1, None), "runs", ("going back", None), ("reset", None)]


def test_who_has_caught_up_is_heard_only_while_it_is_waited_for() -> None:
    host = running()
    core = host.core
    core.behind = {A: 1e9, B: 1e9}
    core.caught_up([A], 3.0)
    assert host.heard() == [], "another one is still behind"
    core.behind.clear()  # its attempt failed, and what it said was on its way
    core.caught_up([B], 3.0)
    assert host.heard() == [], "the job does not run, and must not be said to"
