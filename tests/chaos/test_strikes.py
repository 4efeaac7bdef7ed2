"""What counts as a hit, and that a dataflow under faults recovers as the user's own would."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import cutwater as cw
from cutwater.chaos.shadow import Orders, Pace, shadowed
from cutwater.chaos.storm import _kill_living
from cutwater.connectors.staging import UNGUARDED
from cutwater.plan.planner import make_plan
from cutwater.plan.recovery import recovery_division
from cutwater.runtime.driver.preparing import prepare
from cutwater.runtime.status.status import WorkerStatus
from cutwater.storage.store.local import LocalStore


def test_only_a_kill_of_a_living_process_counts() -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
    worker = WorkerStatus(slot=0, pid=pid, host="here")
    assert _kill_living(worker)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, but nobody has asked after it
    assert not _kill_living(worker)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert not _kill_living(worker)


def test_regions_of_a_shadowed_dataflow_are_those_of_the_users(tmp_path: Path) -> None:
    flow = cw.Dataflow("aside")
    flow.read("in", cw.rate(None, rows=10)).write("out", cw.files(str(tmp_path)))
    graphs = flow.graph, shadowed(flow.graph, Orders(str(tmp_path)), Pace({}))
    plans = [prepare(make_plan(graph, 3, 8), LocalStore.open(tmp_path), None, {}, UNGUARDED) for graph in graphs]
    assert [len(recovery_division(plan, "region").regions) for plan in plans] == [3, 3]
