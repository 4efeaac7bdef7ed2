"""What goes back together, and a job of which only a part goes back (R2, R3)."""

from __future__ import annotations

import random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutwater.config import RestartConfig
from cutwater.errors import InvariantError
from cutwater.protocol.job import messages as j
from cutwater.protocol.job.machine import JobMachine
from cutwater.protocol.job.recovery_scope import Division, lost_together, regions_of, slots_of, units_of
from cutwater.protocol.job.restart_budget import RestartDecider

A = frozenset({(0, 0), (0, 1)})
B = frozenset({(1, 0), (1, 1)})
C = frozenset({(2, 2)})
"""Slots 0 and 1 hold a part of A and of B, slot 2 all of C."""

subtasks = st.tuples(st.integers(0, 5), st.integers(0, 3))


@given(st.sets(subtasks, min_size=1), st.data())
def test_r2_regions_are_the_connected_components(nodes: set[tuple[int, int]], data: st.DataObject) -> None:
    node = st.sampled_from(sorted(nodes))
    edges = data.draw(st.lists(st.tuples(node, node)))
    graph = nx.Graph(edges)
    graph.add_nodes_from(nodes)
    regions = regions_of(nodes, edges)
    assert {*regions} == {frozenset(found) for found in nx.connected_components(graph)}
    assert [min(region) for region in regions] == sorted(min(region) for region in regions)


@given(st.sets(subtasks, min_size=1), st.data())
def test_r3_units_are_whole_loops_and_take_along_what_they_depend_on(
    nodes: set[tuple[int, int]], data: st.DataObject
) -> None:
    node = st.sampled_from(sorted(nodes))
    channels = data.draw(st.lists(st.tuples(node, node)))
    graph = nx.DiGraph(channels)
    graph.add_nodes_from(nodes)
    units, upstream = units_of(nodes, channels)
    assert {*units} == {frozenset(found) for found in nx.strongly_connected_components(graph)}
    for unit, needed in zip(units, upstream, strict=True):
        depends_on = unit.union(*(nx.ancestors(graph, subtask) for subtask in unit))
        assert frozenset().union(*(units[other] for other in needed)) == depends_on


@given(st.sets(subtasks, min_size=1), st.data())
def test_r3_the_loss_of_workers_takes_the_same_down_in_joined_units(
    nodes: set[tuple[int, int]], data: st.DataObject
) -> None:
    node = st.sampled_from(sorted(nodes))
    channels = data.draw(st.lists(st.tuples(node, node)))
    lost = data.draw(st.sets(st.integers(0, 3), min_size=1))
    graph = nx.DiGraph(channels)
    graph.add_nodes_from(nodes)
    units, upstream = units_of(nodes, channels)
    regions, needed = lost_together(units, upstream)
    assert sorted(s for region in regions for s in region) == sorted(nodes)
    assert all(any(unit <= region for region in regions) for unit in units)
    division = Division(regions, needed, 4)
    down = division.with_upstream(r for r, region in enumerate(regions) if slots_of(region) & lost)
    assert division.with_upstream(down) == down
    gone = [subtask for subtask in nodes if subtask[1] in lost]
    depends_on = frozenset(gone).union(*(nx.ancestors(graph, subtask) for subtask in gone))
    assert frozenset().union(*(regions[r] for r in down)) == depends_on


def test_r3_a_failure_takes_down_what_it_depends_on() -> None:
    read, also, count, sink = (0, 0), (0, 1), (1, 1), (2, 0)
    units, upstream = units_of([read, also, count, sink], [(read, count), (also, count), (count, sink)])
    decider = RestartDecider(RestartConfig(strategy="fixed_delay", delay_ms=0.0), random.Random(0))
    m = JobMachine(2, frozenset({read, also, count, sink}), decider, regions=units, upstream=upstream)
    for slot in range(2):
        m.handle(j.WorkerJoined(slot, slot + 1, 0.0))
    for slot, region in sorted(m.parts):
        m.handle(j.WorkerReady(slot, 1, 0.0, region))
    assert m.handle(j.WorkerLost(1, 2, "killed", 1.0)) == [j.StopRegions((0, 1, 2), "worker 1 was lost: killed")]
    assert m.handle(j.WorkerJoined(1, 9, 2.0)) == [j.BeginRegions(2, (0, 1, 2))]
    m.down.remove(0)
    with pytest.raises(InvariantError, match="without what they depend on"):
        m.validate()


def job(*, delay_ms: float = 0.0, attempts: int = 9) -> JobMachine:
    """All is running in attempt 1, with the workers 1, 2 and 3."""
    restart = RestartConfig(strategy="fixed_delay", attempts=attempts, delay_ms=delay_ms)
    decider = RestartDecider(restart, random.Random(0))
    m = JobMachine(3, A | B | C, decider, resource_timeout_ms=10_000.0, regions=(A, B, C))
    for slot in range(3):
        m.handle(j.WorkerJoined(slot, slot + 1, 0.0))
    assert m.phase is j.JobPhase.DEPLOYING
    effects = [e for r, region in enumerate((A, B, C)) for s in slots_of(region) for e in ready(m, s, r)]
    assert effects == [j.StartProcessing(1)]
    return m


def ready(m: JobMachine, slot: int, region: int, attempt: int = 0) -> list[j.Effect]:
    return m.handle(j.WorkerReady(slot, attempt or m.attempt, m.now_ms, region))


def failed(m: JobMachine, region: int | None, attempt: int) -> list[j.Effect]:
    return m.handle(j.TaskFailed(attempt, "oops", True, m.now_ms, region))


def test_r2_only_the_region_that_failed_goes_back() -> None:
    m = job()
    assert failed(m, 0, 1) == [j.StopRegions((0,), "oops")]
    assert m.phase is j.JobPhase.RUNNING
    assert m.handle(j.Tick(1.0)) == [j.BeginRegions(2, (0,))]
    current = {(attempt, region) for attempt in (1, 2) for region in range(3) if m.is_current(attempt, region)}
    assert current == {(2, 0), (1, 1), (1, 2)}
    assert ready(m, 0, 0) == []
    assert ready(m, 1, 0, attempt=1) == []  # what the old attempt says is nothing
    assert ready(m, 1, 0) == [j.StartRegions(2, (0,))]
    assert not m.down


def test_a_lost_worker_takes_the_regions_down_that_it_held_a_part_of() -> None:
    m = job()
    assert m.handle(j.WorkerLost(0, 1, "killed", 1.0)) == [j.StopRegions((0, 1), "worker 0 was lost: killed")]
    assert m.handle(j.Tick(2.0)) == []  # its slot is empty
    assert m.handle(j.WorkerJoined(0, 7, 3.0)) == [j.BeginRegions(2, (0, 1))]
    assert m.handle(j.WorkerLost(2, 3, "killed", 4.0)) == [
        j.StopAttempt("worker 2 was lost: killed")
    ]  # nothing is left


def test_what_fails_meanwhile_joins_what_is_down() -> None:
    m = job()
    failed(m, 0, 1)
    assert m.handle(j.Tick(1.0)) == [j.BeginRegions(2, (0,))]
    assert failed(m, 2, 1) == [j.StopRegions((0, 2), "oops")]
    assert m.handle(j.Tick(2.0)) == [j.BeginRegions(3, (0, 2))]
    assert [*ready(m, 0, 0), *ready(m, 1, 0)] == []
    assert ready(m, 2, 2) == [j.StartRegions(3, (0, 2))]


def test_a_failure_of_what_is_down_already_is_none() -> None:
    m = job(delay_ms=50.0)
    failed(m, 0, 1)
    assert failed(m, 0, 1) == []
    assert m.next_due_ms == 50.0
    assert m.handle(j.Tick(49.0)) == []


def test_a_region_counts_as_unfinished_when_it_goes_back() -> None:
    m = job()
    for subtask in sorted(A | C):
        assert m.handle(j.SubtaskFinished(1, subtask, 0.0)) == []
    failed(m, 2, 1)
    m.handle(j.Tick(1.0))
    ready(m, 2, 2)
    assert [e for subtask in sorted(B) for e in m.handle(j.SubtaskFinished(1, subtask, 0.0))] == []
    assert m.handle(j.SubtaskFinished(1, (2, 2), 0.0)) == []  # of the attempt that is over
    assert m.handle(j.SubtaskFinished(2, (2, 2), 0.0)) == [j.TakeFinalCheckpoint(2)]


@pytest.mark.parametrize("region", [0, None])
def test_while_the_job_begins_or_where_nobody_knows_what_failed_all_goes_back(region: int | None) -> None:
    m = job()
    assert failed(m, None, 1) == [j.StopAttempt("oops")]
    assert m.handle(j.Tick(1.0)) == [j.BeginAttempt(2)]
    assert failed(m, region, 2) == [j.StopAttempt("oops")]


def test_regions_that_cannot_be_restored_alone_take_the_job_with_them() -> None:
    m = job()
    failed(m, 1, 1)
    m.handle(j.Tick(1.0))
    assert m.handle(j.Widened(2, "the newest checkpoint is damaged", 2.0)) == [
        j.StopAttempt("the newest checkpoint is damaged")
    ]
    assert m.handle(j.Tick(2.0)) == [j.BeginAttempt(3)]
    assert all(m.is_current(3, region) for region in range(3))


def test_restarts_of_regions_come_out_of_the_same_budget() -> None:
    m = job(attempts=1)
    failed(m, 0, 1)
    m.handle(j.Tick(1.0))
    (effect,) = failed(m, 1, 1)
    assert isinstance(effect, j.ShutDown)
    assert effect.outcome is j.Outcome.FAILED


def test_a_slot_that_stays_empty_ends_the_job_only_where_that_is_wanted() -> None:
    m = job()
    m.handle(j.WorkerLost(2, 3, "killed", 1.0))
    m.handle(j.Progress(frozenset({2}), (), 2.0))
    assert m.waits
    assert isinstance(m.handle(j.Tick(8_001.0))[0], j.Wait)
    (effect,) = m.handle(j.Tick(10_002.0))
    assert isinstance(effect, j.ShutDown)
    assert "2 of 3 workers" in effect.reason
    patient = job()
    patient.resource_timeout_ms = patient.waiting.resource_timeout_ms = None
    patient.handle(j.WorkerLost(2, 3, "killed", 1.0))
    patient.handle(j.Progress(frozenset({2}), (), 2.0))
    patient.handle(j.Tick(8_001.0))
    assert patient.next_due_ms is None
    assert patient.handle(j.Tick(1e9)) == []
    assert patient.down == {2}
    patient.handle(j.WorkerJoined(2, 9, 1e9))
    assert patient._deploying


def test_a_job_that_can_go_on_with_fewer_workers_does_not_wait_beside_an_empty_slot_for_ever() -> None:
    m = job()
    m.fewest = 2
    m.handle(j.WorkerLost(2, 3, "killed", 1.0))
    m.handle(j.Progress(frozenset({2}), (), 2.0))
    due = m.next_due_ms
    assert due is not None
    (effect,) = m.handle(j.Tick(due))
    assert isinstance(effect, j.StopAttempt)
    found: list[j.Effect] = []
    while not found:
        due = m.next_due_ms
        assert due is not None
        found = m.handle(j.Tick(due))
    assert isinstance(found[0], j.GroupShort)
