"""The files of one run become one trace, whatever became of those who wrote them."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from trace_world import run

from cutwater.errors import ConfigError, DataError
from cutwater.trace.checker import check
from cutwater.trace.events import Crashed, Cut, Header, Link, Restored, Span, Step, Trace, encode, write_trace
from cutwater.trace.parts import read_run
from cutwater.trace.result import Kind
from cutwater.ui.cli import cli


def split(trace: Trace, folder: Path, *, skew_ms: float = 0.0) -> None:
    """One file per process and attempt, as workers write them: without crashes, by clocks that disagree."""
    folder.mkdir()
    rng = random.Random(7)
    for process in sorted({event.process for event in trace.events}):
        late_ms = rng.uniform(-skew_ms, skew_ms)
        own = [msgspec.structs.replace(e, time_ms=e.time_ms + late_ms) for e in trace.events if e.process == process]
        for attempt in sorted({event.attempt for event in own}):
            events = tuple(e for e in own if e.attempt == attempt and not isinstance(e, Crashed))
            write_trace(folder / f"{process or 'driver'}-{9 - attempt}.jsonl", Trace(trace.header, events))


@pytest.mark.parametrize("skew_ms", [0.0, 30.0])
def test_a_directory_is_one_run_of_several_attempts(tmp_path, skew_ms):
    whole = run(2, crash=True)
    split(whole, tmp_path / "trace", skew_ms=skew_ms)
    trace = read_run([tmp_path / "trace"])
    assert check(trace).ok, str(check(trace))
    again = [e for e in trace.events if isinstance(e, Restored)]
    assert len([e for e in trace.events if isinstance(e, Crashed)]) == len(again) > 0
    assert CliRunner().invoke(cli, ["check-trace", str(tmp_path / "trace")]).exit_code == 0
    assert "<svg" in CliRunner().invoke(cli, ["diagram", str(tmp_path / "trace")]).output


def test_what_a_killed_worker_left_is_read_up_to_the_torn_line(tmp_path):
    header = Header(("p", "q"), (Link("c", "p", "q"),))
    lines = [encode(r) for r in (header, Step(0.0, "p", 1, sends=(Span("c", 0),)), Cut(1.0, "p", 1, 7))]
    (tmp_path / "p.jsonl").write_bytes(b"".join(lines)[:-5])
    (tmp_path / "q.jsonl").write_bytes(lines[0])
    (tmp_path / "killed-at-once.jsonl").write_bytes(lines[0][:10])
    (tmp_path / "before-that.jsonl").touch()
    assert read_run([tmp_path]).events == (Step(0.0, "p", 1, sends=(Span("c", 0),)),)


def test_a_line_torn_in_the_middle_is_still_an_error(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(encode(Header(("p",), ())) + b'{"event":"Cu\n' + encode(Cut(1.0, "p", 1, 7)))
    with pytest.raises(DataError, match=r"p\.jsonl, line 2"):
        read_run([tmp_path])


def test_two_runs_in_one_directory_are_told_apart(tmp_path):
    for uid in ("a", "b"):
        write_trace(tmp_path / f"{uid}.jsonl", Trace(Header(("p",), (), run=uid), ()))
    with pytest.raises(ConfigError, match="different runs"):
        read_run([tmp_path])


def test_a_directory_without_traces_says_so(tmp_path):
    with pytest.raises(DataError, match="holds no trace"):
        read_run([tmp_path])


# -------------------------------------------------------------------------------------- where a process goes on from

HEADER = Header(("p", "q"), (Link("c", "p", "q"),))


def going_on(sent: int, taken: int, *, first: int = 5) -> tuple[Restored | Step, ...]:
    return (
        Restored(0.0, "q", 2, 7, {}, {"c": taken}),
        Restored(0.0, "p", 2, 7, {"c": sent}, {}),
        Step(1.0, "q", 2, takes=(Span("c", first),)),
        Step(2.0, "p", 2, sends=(Span("c", sent),)),
    )


def test_a_snapshot_from_before_the_trace_is_believed():
    assert check(Trace(HEADER, going_on(6, 5))).ok
    assert check(Trace(HEADER, going_on(6, 5, first=4))).kinds() == {Kind.FIFO}
    assert check(Trace(HEADER, going_on(5, 5)), quick=True).kinds() == {Kind.FIFO}, "nobody had sent row 5"


def test_a_process_that_goes_on_elsewhere_than_its_snapshot_is_found_out():
    whole = run(2, crash=True)
    for change in (1, -1):
        events = [
            msgspec.structs.replace(e, taken={c.name: change for c in whole.header.channels if c.target == e.process})
            if isinstance(e, Restored)
            else e
            for e in whole.events
        ]
        assert Kind.RESTORE in check(Trace(whole.header, tuple(events))).kinds()
