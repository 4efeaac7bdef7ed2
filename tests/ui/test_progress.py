"""What a person is told of a job's successive states."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from cutwater.runtime.status.progress import events, json_status, status_line, summary_line
from cutwater.runtime.status.status import (
    CheckpointStatus,
    JobStatus,
    RestartEvent,
    StartingStatus,
    StepStatus,
    SubtaskLoad,
    WaitingStatus,
    WorkerStatus,
)
from cutwater.ui.views import JsonView, LiveView, PlainView, panel

FORMING = JobStatus(name="delays", uid="u1", phase="forming", parallelism=2)
RUNNING = msgspec.structs.replace(
    FORMING,
    phase="running",
    attempt=1,
    rows_read=1_234_567,
    rows_per_second=412_345.6,
    watermark_ms=1_795_000_000_000,
    checkpoints=CheckpointStatus(completed=4, last_completed_id=4, last_duration_ms=38.2, last_size_bytes=1_258_291),
    steps={
        "read": StepStatus(rows_out=1_234_567, busy=0.1, subtasks=[SubtaskLoad(subtask=0, busy=0.1)]),
        "late": StepStatus(rows_in=1_234_567, rows_out=17),
    },
    workers=[WorkerStatus(slot=0, pid=10, host="a", busy=0.8), WorkerStatus(slot=1, pid=11, host="a", busy=0.76)],
)
FAILURE = RestartEvent(time_ms=1, attempt=1, reason="worker 1 was lost: the connection was closed", failed_ms=1000.0)


def changed(status: JobStatus, **changes) -> JobStatus:
    return msgspec.structs.replace(status, **changes)


def told(before, now) -> list[tuple[str, str]]:
    return [(e.kind, e.text) for e in events(before, now)]


def drawn(status: JobStatus, width: int = 80, **more) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(panel(status, 72.0, 1_795_000_001_200, **more))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


# --------------------------------------------------------------------------------------------------------- events


def test_nothing_is_told_of_a_state_seen_before():
    assert told(RUNNING, RUNNING) == []
    assert told(RUNNING, changed(RUNNING, rows_read=2_000_000)) == []


def test_the_start_is_told_once():
    started = changed(FORMING, phase="running", attempt=1)
    assert told(None, FORMING) == []
    assert told(FORMING, started) == [("started", "running on 2 workers, attempt 1")]
    assert told(started, changed(started, phase="draining")) == []


def test_a_start_says_from_which_checkpoint():
    started = changed(FORMING, phase="running", attempt=3, checkpoints=CheckpointStatus(restored_id=17))
    assert told(FORMING, started) == [("started", "running on 2 workers, attempt 3, from checkpoint 17")]


def test_checkpoints_completed_between_two_looks_are_one_event():
    later = changed(RUNNING, checkpoints=CheckpointStatus(completed=7, last_completed_id=7, last_duration_ms=9.0))
    assert told(RUNNING, later) == [("checkpoint", "checkpoint 7 (9.0 ms, 0 B) completed")]


def test_failed_checkpoints_are_counted():
    later = changed(RUNNING, checkpoints=msgspec.structs.replace(RUNNING.checkpoints, failed=2))
    assert told(RUNNING, later) == [("checkpoint_failed", "2 checkpoints failed (2 in all)")]


def test_failure_and_recovery_are_told_when_they_happen():
    down = changed(RUNNING, phase="restarting", restarts=1, failures=[FAILURE])
    recovered = msgspec.structs.replace(FAILURE, running_ms=1456.0, restored_id=4)
    up = changed(down, phase="running", attempt=2, failures=[recovered])
    assert told(RUNNING, down) == [("failure", "attempt 1 failed: worker 1 was lost: the connection was closed")]
    assert told(down, up) == [("recovered", "recovered in 456 ms from checkpoint 4")]
    assert told(up, up) == []


def test_a_recovery_that_fell_between_two_looks_is_told_whole():
    recovered = msgspec.structs.replace(FAILURE, running_ms=3500.0, restored_id=0)
    now = changed(RUNNING, attempt=2, restarts=1, failures=[recovered])
    assert [kind for kind, _ in told(RUNNING, now)] == ["failure", "recovered"]
    assert told(RUNNING, now)[1][1] == "recovered in 2.5 s from the beginning"


def test_only_the_first_line_of_a_reason_is_told():
    failure = msgspec.structs.replace(FAILURE, reason="\nKeyError: 'x'\nTraceback ...")
    assert told(RUNNING, changed(RUNNING, failures=[failure])) == [("failure", "attempt 1 failed: KeyError: 'x'")]


def test_new_warnings_and_log_lines_are_told_although_old_ones_fall_out():
    before = changed(RUNNING, warnings=["a"], log=["1", "2", "3"])
    now = changed(RUNNING, warnings=["a", "b"], log=["2", "3", "3", "4"])
    assert told(before, now) == [("warning", "b"), ("log", "3"), ("log", "4")]


def test_a_failure_that_comes_again_is_told_shortly_with_what_is_left():
    second = msgspec.structs.replace(
        FAILURE, attempt=2, failed_ms=2000.0, again=True, counted=2, allowed=12, pause_ms=4049.0
    )
    once = changed(RUNNING, failures=[FAILURE])
    assert told(once, changed(once, failures=[FAILURE, second])) == [
        ("failure", "attempt 2 failed: the same (2 of 12), next in 4s")
    ]


@pytest.mark.parametrize(
    ("outcome", "reason", "text"),
    [
        ("finished", "every row is processed", "finished"),
        ("failed", "no such column\nmore", "failed: no such column"),
        ("cancelled", "by the user", "cancelled: by the user"),
    ],
)
def test_the_end_is_told_once(outcome, reason, text):
    ended = changed(RUNNING, phase="ended", outcome=outcome, reason=reason)
    assert told(RUNNING, ended) == [("ended", text)]
    assert told(ended, ended) == []


# ---------------------------------------------------------------------------------------------------------- lines


def test_status_line_of_a_running_job():
    line = status_line(RUNNING, RUNNING.watermark_ms + 1_200)
    assert line == "1,234,567 rows, 412 k/s, lag 1.2 s, checkpoint 4 (38 ms, 1.2 MiB)"


def test_status_line_names_the_phase_while_nothing_flows():
    assert status_line(FORMING, 0) == "waiting for workers"
    assert status_line(changed(FORMING, phase="restarting", restarts=2), 0) == "restarting, 2 restarts"


def test_old_data_shows_its_time_instead_of_years_of_lag():
    assert "event time 2013-01-05 12:00:00" in status_line(changed(RUNNING, watermark_ms=1_357_387_200_000), 1.8e12)


def test_rows_after_a_restore_say_since_when_they_count():
    restored = changed(RUNNING, checkpoints=msgspec.structs.replace(RUNNING.checkpoints, restored_id=3))
    assert status_line(restored, 0).startswith("1,234,567 rows since checkpoint 3, ")


def test_summary_line():
    ended = changed(RUNNING, phase="ended", outcome="finished", restarts=1)
    assert summary_line(ended, 12.34) == "finished after 12.3 s: 1,234,567 rows, 4 checkpoints, 1 restart"


def test_json_of_a_state_is_the_state():
    body = json.loads(json.dumps(json_status(RUNNING, 7)))
    event, time_ms = body.pop("event"), body.pop("time_ms")
    assert (event, time_ms) == ("progress", 7)
    assert msgspec.convert(body, JobStatus) == RUNNING


# ---------------------------------------------------------------------------------------------------------- panel

PANEL = """\
delays  running  01:12
rows         1,234,567   412 k/s   ▂▄█
lag          1.2 s
checkpoint   4   38 ms   1.2 MiB   4 completed
workers      2 of 2   0: 80% busy   1: 76% busy

step                          rows in         rows out  busy
read                                         1,234,567   10%
late                        1,234,567               17

Ctrl-C: stop"""


def test_panel():
    assert drawn(RUNNING, rates=[100.0, 200.0, 400.0], hint="Ctrl-C: stop") == PANEL.splitlines()


def test_panel_tells_of_restarts_failed_checkpoints_lost_workers_and_counters():
    failures = [msgspec.structs.replace(FAILURE, running_ms=1456.0)]
    status = changed(
        RUNNING,
        restarts=3,
        failures=failures,
        workers=RUNNING.workers[:1],
        checkpoints=msgspec.structs.replace(RUNNING.checkpoints, failed=2),
        steps={"hourly": StepStatus(rows_in=9, rows_out=1, counters={"late_rows": 4, "other": 0})},
    )
    lines = "\n".join(drawn(status))
    assert "restarts     3   last recovered in 456 ms" in lines
    assert "4 completed   2 failed" in lines
    assert "workers      1 of 2" in lines
    assert "4 late rows" in lines
    assert "other" not in lines


@pytest.mark.parametrize("width", [80, 60])
def test_panel_keeps_within_the_terminal(width):
    steps = {f"a step with quite a long name {i}": StepStatus(rows_in=10**13, rows_out=10**13) for i in range(30)}
    workers = [WorkerStatus(slot=i, pid=i, host="a", busy=1.0, backpressured=0.9) for i in range(40)]
    lines = drawn(changed(RUNNING, steps=steps, workers=workers, parallelism=40), width)
    assert max(map(len, lines)) <= width
    assert len(lines) < 24


def test_who_holds_whom_up_is_told_in_the_line_and_in_the_panel():
    load = [SubtaskLoad(subtask=0, busy=0.02, backpressured=0.97)]
    steps = {
        "read": StepStatus(rows_out=9, busy=0.02, backpressured=0.97, subtasks=load),
        "score": StepStatus(rows_in=9, busy=0.98, backpressured=0.01, subtasks=[SubtaskLoad(subtask=0, busy=0.98)]),
    }
    held = changed(RUNNING, steps=steps)
    assert status_line(held, 0).endswith(", held up by step 'score' (98% busy)")
    assert drawn(held)[-2:] == [
        "read                                                 9    2%  97% blocked",
        "score                               9                    98%",
    ]
    assert "held up" not in status_line(RUNNING, 0)
    assert "held up" not in status_line(changed(held, phase="restarting"), 0)


# ---------------------------------------------------------------------------------------------------------- views

STORY = [
    FORMING,
    changed(FORMING, phase="running", attempt=1),
    changed(FORMING, phase="running", attempt=1, checkpoints=CheckpointStatus(completed=1, last_completed_id=1)),
    changed(FORMING, phase="running", attempt=1, checkpoints=CheckpointStatus(completed=2, last_completed_id=2)),
    changed(RUNNING, warnings=["disk is slow"], log=["worker 0 info: hello"]),
    changed(RUNNING, phase="ended", outcome="finished", warnings=["disk is slow"], log=["worker 0 info: hello"]),
]


def shown(view, story=STORY) -> None:
    for status in story:
        view.update(status)
    view.close()


def test_plain_lines_tell_events_once_and_only_the_first_checkpoint():
    out = io.StringIO()
    shown(PlainView(out, period_s=1e9))
    lines = [line[10:] for line in out.getvalue().splitlines()]
    assert lines[:3] == [
        "delays  running on 2 workers, attempt 1",
        "delays  checkpoint 1 (0.0 ms, 0 B) completed",
        "delays  disk is slow",
    ]
    assert lines[3].startswith("delays  finished after ")
    assert len(lines) == 4


def test_plain_lines_tell_the_state_every_period():
    out = io.StringIO()
    shown(PlainView(out, period_s=0.0), [RUNNING, RUNNING])
    assert sum("1,234,567 rows, 412 k/s" in line for line in out.getvalue().splitlines()) == 2


def test_log_lines_of_workers_are_for_debugging():
    out = io.StringIO()
    shown(PlainView(out, period_s=1e9, debug=True))
    assert "worker 0 info: hello" in out.getvalue()


def test_json_lines_hold_every_event_and_the_last_state():
    out = io.StringIO()
    shown(JsonView(out, period_s=1e9))
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    kinds = [line["event"] for line in lines]
    assert kinds == ["progress", "started", *["checkpoint"] * 2, "warning", "log", "checkpoint", "ended", "progress"]
    assert lines[-1]["outcome"] == "finished"


def test_the_live_display_leaves_only_events_and_the_summary():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    view = LiveView(console)
    view.preparing("starting Spark")
    shown(view)
    text = console.file.getvalue()
    assert "running on 2 workers, attempt 1" in text
    last = text.splitlines()[-1]
    assert "✓ delays finished after " in last
    assert "1,234,567 rows, 4 checkpoints" in last


def test_a_view_of_a_job_that_never_began_says_nothing():
    out = io.StringIO()
    for view in (PlainView(out), JsonView(out)):
        view.close()
    assert out.getvalue() == ""


# ------------------------------------------------------------------------------------------------------ lost cores

CORES = "waiting for cores, 3 of 4 since 61 s"
BOOT = "worker 2 has a core, Python is starting since 61 s on host node7"
WAITING = WaitingStatus(
    text=f"{CORES}; {BOOT}",
    waiting_ms=61_000,
    wanted=4,
    present=2,
    cores=3,
    starting=[StartingStatus(slot=2, host="node7", starting_ms=61_000)],
)


def test_what_a_job_waits_for_is_in_every_view():
    waits = changed(FORMING, parallelism=4, waiting=WAITING, workers=RUNNING.workers)
    assert status_line(waits, 0) == f"{CORES}; {BOOT}"
    shown = drawn(waits)
    assert [line for line in shown if CORES in line or BOOT in line] == [
        f"waits        {CORES}",
        f"             {BOOT}",
    ]
    body = json_status(waits, 0)["waiting"]
    assert (body["wanted"], body["present"], body["cores"]) == (4, 2, 3)
    assert body["starting"] == [{"slot": 2, "host": "node7", "starting_ms": 61_000}]


def test_a_job_that_runs_on_beside_the_part_that_waits_says_both():
    line = status_line(changed(RUNNING, waiting=WAITING), 1_795_000_001_200)
    assert line.startswith(f"1,234,567 rows, 412 k/s, {CORES}; {BOOT}, lag 1.2 s")
