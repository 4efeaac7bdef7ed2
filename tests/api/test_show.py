"""A handle and a status as a shell, ``print`` and a notebook show them."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from cutwater.api.jobs.job import Job
from cutwater.runtime.status.status import CheckpointStatus, JobStatus, RestartEvent, StepStatus, WorkerStatus

RUNNING = JobStatus(
    name="delays",
    uid="u1",
    phase="running",
    attempt=1,
    parallelism=2,
    rows_read=1_234_567,
    rows_per_second=412_345.6,
    checkpoint_dir="/chk/delays",
    checkpoints=CheckpointStatus(completed=4, last_completed_id=4, last_duration_ms=38.2, last_size_bytes=1_258_291),
    steps={"read": StepStatus(rows_out=1_234_567), "late": StepStatus(rows_in=1_234_567, counters={"late_rows": 3})},
    workers=[WorkerStatus(slot=0, pid=10, host="a", busy=0.8), WorkerStatus(slot=1, pid=11, host="b", busy=0.76)],
    log=["worker 0 info: hello"] * 200,
)
NASTY = "<script>alert('x')</script>&<b>"


class Handle(Job):
    """A handle on no job, only to be shown."""

    def __init__(self, status: JobStatus) -> None:
        self._status = status

    @property
    def status(self) -> JobStatus:
        return self._status


def changed(**changes: Any) -> JobStatus:
    return msgspec.structs.replace(RUNNING, **changes)


def test_a_status_and_a_handle_are_one_short_line_in_a_shell() -> None:
    line = "('delays': running, 1,234,567 rows, 412 k/s, checkpoint 4 (38 ms, 1.2 MiB))"
    assert repr(RUNNING) == f"JobStatus{line}"
    assert repr(Handle(RUNNING)) == f"Handle{line}"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"phase": "forming"}, "JobStatus('delays': waiting for workers, checkpoint 4 (38 ms, 1.2 MiB))"),
        ({"phase": "ended", "outcome": "finished", "reason": "x"}, "JobStatus('delays': finished, 1,234,567 rows)"),
        (
            {"phase": "ended", "outcome": "failed", "reason": "\nno space\nTraceback"},
            "JobStatus('delays': failed: no space, 1,234,567 rows)",
        ),
    ],
)
def test_other_phases_in_a_shell(changes: dict[str, Any], line: str) -> None:
    assert repr(changed(**changes)) == line


def test_printed_it_is_a_page_that_fits_a_terminal() -> None:
    failure = RestartEvent(
        time_ms=1, attempt=1, reason="worker 1 was lost\nTraceback", failed_ms=10.0, running_ms=410.0
    )
    text = str(Handle(changed(warnings=["step 'late': rows come late"], failures=[failure])))
    assert text.splitlines() == [
        "job delays",
        "  state       running, attempt 1",
        "  rows read   1,234,567, 412 k/s",
        "  checkpoint  4 (38 ms, 1.2 MiB), 4 completed",
        "  workers     2 of 2; 0: a, process 10, 80% busy; 1: b, process 11, 76% busy",
        "  folder      /chk/delays",
        "",
        "  step    rows in   rows out",
        "  read          0  1,234,567",
        "  late  1,234,567          0  3 late rows",
        "  failure: attempt 1 failed: worker 1 was lost (recovered in 400 ms)",
        "  warning: step 'late': rows come late",
    ]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_in_a_notebook_it_is_html_and_no_text_of_a_user_becomes_markup() -> None:
    failure = RestartEvent(time_ms=1, attempt=1, reason=NASTY, failed_ms=1.0)
    status = changed(
        name=NASTY,
        checkpoint_dir=f"/chk/{NASTY}",
        steps={NASTY: StepStatus(counters={NASTY: 1})},
        workers=[WorkerStatus(slot=0, pid=1, host=NASTY)],
        warnings=[NASTY],
        failures=[failure],
    )
    for state in (status, msgspec.structs.replace(status, phase="ended", outcome="failed", reason=NASTY)):
        parser = Tags()
        parser.feed(Handle(state)._repr_html_())
        parser.close()
        assert parser.open == []
        assert parser.tags <= {"div", "b", "table", "tr", "th", "td", "ul", "li"}


def test_many_workers_are_counted() -> None:
    workers = [WorkerStatus(slot=n, pid=n, host="a") for n in range(100)]
    assert "4: a, process 4, 0% busy; 95 more" in str(changed(workers=workers))
