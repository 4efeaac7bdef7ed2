"""A worker that crashes in native code is seen, although the job recovers from it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeSpark
from faults import happens
from runtime_world import assert_running_counts
from scope_world import ROWS, StartJob, end, one_reader


@pytest.mark.parametrize(
    ("number", "seen"),
    [
        (signal.SIGSEGV, 1),
        pytest.param(signal.SIGABRT, 1, marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.full),
    ],
)
def test_a_crash_is_told_from_a_kill(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, number: signal.Signals, seen: int
) -> None:
    def prepare(args: Any) -> None:
        if args.slot == 1 and happens(tmp_path / "once"):
            os.kill(os.getpid(), number)

    fake_spark.prepare = prepare
    end(start(one_reader("crash", tmp_path, rate=None)), tmp_path)
    assert_running_counts(tmp_path / "out", ROWS)
    assert [crash.partition(",")[0] for crash in fake_spark.crashes] == ["worker 1"] * seen
    fake_spark.crashes.clear()
    assert fake_spark.crash_log is not None
    assert ("prepare" in fake_spark.crash_log.read_text()) == bool(seen)
