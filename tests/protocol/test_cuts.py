"""Random graphs and interleavings: every completed checkpoint is a consistent cut, every row is committed once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from cut_graphs import random_dag, random_loops
from cut_world import World

CHAOS = {"quiet": {}, "failing": {"chaos": 0.03}, "expiring": {"timeout_ms": 25.0, "chaos": 0.02}}


def run_many(seeds: range, graphs=random_dag, **options) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += World(graphs(random.Random(seed)), seed, **options).run().seen
    return seen


@pytest.mark.parametrize("chaos", CHAOS)
def test_aligned_cuts_of_acyclic_graphs_are_consistent_and_rows_are_committed_once(chaos):
    seen = run_many(range(28), **CHAOS[chaos])
    assert seen["completed"] > 56
    assert seen["blocked"] > 200
    assert seen["concurrent"] > 60
    assert not seen["doubled"]
    assert not seen["recorded"]
    if chaos == "failing":
        assert seen["write_failed"] > 10
        assert seen["aborted: publish_failed"]
        assert seen["commits of an older id"]
    if chaos == "expiring":
        assert seen["aborted: expired"] > 10
        assert seen["barrier_skipped"]


@pytest.mark.parametrize("chaos", CHAOS)
def test_at_least_once_loses_nothing_blocks_nothing_and_really_doubles(chaos):
    seen = run_many(range(25), protocol="at_least_once", **CHAOS[chaos])
    assert seen["completed"] > 50
    assert not seen["blocked"]
    assert seen["doubled"] > 10


@pytest.mark.parametrize("chaos", CHAOS)
def test_chandy_lamport_cuts_record_what_is_between_the_freeze_and_the_barrier(chaos):
    seen = run_many(range(25), protocol="chandy_lamport", **CHAOS[chaos])
    assert seen["completed"] > 50
    assert not seen["blocked"]
    assert seen["recorded"] > 100
    assert not seen["doubled"]


@pytest.mark.parametrize("protocol", ["aligned", "at_least_once", "chandy_lamport"])
@pytest.mark.parametrize("chaos", CHAOS)
def test_cuts_of_graphs_with_loops_are_consistent(protocol, chaos):
    seen = run_many(range(20), random_loops, protocol=protocol, **CHAOS[chaos])
    assert seen["completed"] > 50
    assert seen["recorded"] > 50
    assert bool(seen["blocked"]) == (protocol == "aligned")


def test_protocol_none_takes_only_the_final_wave_and_commits_every_row():
    seen = run_many(range(20), protocol="none")
    assert seen["completed"] == 20


@pytest.mark.parametrize("chaos", CHAOS)
def test_the_loop_decisions_end_every_run_over_bounded_channels(chaos):
    seen = run_many(range(15), loop=True, **CHAOS[chaos])
    assert seen["completed"] > 30
    assert seen["blocked"] > 50
