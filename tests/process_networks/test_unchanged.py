"""A snapshot does not change the run: with and without snapshots the same draws give the same computation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from network_world import random_bank

from cutwater.process_networks.local import ReadySet
from cutwater.trace.checker import check
from cutwater.trace.events import Step, Trace, read_trace

STEPS = 400


def computation(trace: Trace) -> list[tuple[object, ...]]:
    """What the processes did: rows and their contents, states before and after."""
    return [(e.process, e.takes, e.sends, e.before, e.after) for e in trace.events if isinstance(e, Step)]


@pytest.mark.parametrize("seed", range(30))
def test_cl7_processes_do_the_same_whether_snapshots_are_taken_or_not(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which row comes next is drawn once; in the second run markers no longer come in between."""
    network = random_bank(seed)
    run = network.run_local(seed=seed, snapshot_every="0.3ms", trace=tmp_path / "with")
    for _ in range(4):
        run.step(STEPS // 4)
        run.snapshot()
    run.stop()
    told = read_trace(tmp_path / "with")
    result = check(told)
    assert result.ok, str(result)
    assert result.snapshots >= 4

    tape: Iterator[str] = iter([e.takes[0].channel for e in told.events if isinstance(e, Step) and e.takes])
    monkeypatch.setattr(ReadySet, "pick", lambda self: next(tape))
    alone = network.run_local(seed=seed, trace=tmp_path / "without")
    rows = sum(bool(e.takes) for e in told.events if isinstance(e, Step))
    assert alone.step(rows) == rows
    alone.stop()
    without = read_trace(tmp_path / "without")
    assert check(without).snapshots == 0
    assert computation(without) == computation(told)
