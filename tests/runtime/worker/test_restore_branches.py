"""A snapshot is found again by the ids of steps, also where another order of the program gives them other numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

import cutwater as cw
from cutwater.plan.compatibility import edge_records, step_records
from cutwater.plan.graph import PhysicalPlan
from cutwater.plan.planner import make_plan
from cutwater.plan.upgrade import Upgrade
from cutwater.runtime.worker import restore as restore_module
from cutwater.runtime.worker.restore import Restore
from cutwater.storage.snapshot.manifest import ChannelRecord, Manifest, SubtaskRecord

WATERMARKS = {"read": 30, "slow": 10, "fast": 20}
"""By the first step of a subtask."""


def program(*branches: str) -> PhysicalPlan:
    flow = cw.Dataflow("job")
    keyed = flow.read("read", cw.memory([], schema="t timestamp, k long"), event_time="t").key_by("k")
    for branch in branches:
        keyed.aggregate(branch, n=cw.count()).write(f"{branch}-out", cw.discard())
    return make_plan(flow, 1, 128)


def snapshot(plan: PhysicalPlan) -> Manifest:
    """The channel to each step has seen as many rows as the watermark of that step says."""

    def ends(sending: bool, vertex: int) -> list[ChannelRecord]:
        edges = [e for e in plan.edges if (e.source if sending else e.target) == vertex]
        reached = [WATERMARKS[plan.vertices[e.target].steps[0]] for e in edges]
        return [ChannelRecord(e.index, 0, 0, number, number) for e, number in zip(edges, reached, strict=True)]

    subtasks = [
        SubtaskRecord(v.index, 0, 1, "aligned", inputs=ends(False, v.index), output_rows=ends(True, v.index),
                      watermark=WATERMARKS[v.steps[0]])
        for v in plan.vertices
    ]  # fmt: skip
    return Manifest(
        "job", "uid", 1, 1, "aligned", 128, 1, 0, 0, step_records(plan), subtasks, [], edges=edge_records(plan)
    )


def restored(monkeypatch: pytest.MonkeyPatch, manifest: Manifest, plan: PhysicalPlan) -> Restore:
    monkeypatch.setattr(restore_module, "load_snapshot", lambda store, job, checkpoint_id: manifest)
    deploy = SimpleNamespace(restore=1, restore_from=None, upgrade=Upgrade(), fresh_sinks=False)
    return Restore.load(cast(Any, None), "job", "uid", cast(Any, deploy), plan)


@pytest.mark.parametrize("branches", [("slow", "fast"), ("fast", "slow")])
def test_branches_that_changed_places_keep_their_time_and_their_channels(
    monkeypatch: pytest.MonkeyPatch, branches: tuple[str, str]
) -> None:
    plan = program(*branches)
    restore = restored(monkeypatch, snapshot(program("slow", "fast")), plan)
    for step, watermark in WATERMARKS.items():
        assert restore.watermark(plan.vertex_of(step).index, 0) == watermark
    for edge in plan.edges:
        (key,) = plan.channels(edge)
        found = restore.channel(key, sending=False)
        assert found is not None
        assert found.watermark == WATERMARKS[edge.target_step]
        assert found.next_row in (0, WATERMARKS[edge.target_step]), "numbered anew, or going on"


def test_in_the_same_order_rows_are_numbered_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = program("slow", "fast")
    restore = restored(monkeypatch, snapshot(plan), plan)
    assert restore.same_shape
    numbers = {e.target_step: restore.channel(c, sending=True) for e in plan.edges for c in plan.channels(e)}
    assert {step: end.next_row for step, end in numbers.items() if end is not None} == {"slow": 10, "fast": 20}
