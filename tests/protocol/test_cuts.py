"""Random graphs and interleavings: every completed checkpoint is a consistent cut, every row is committed once.

CUT_RUNS=n makes n times as many runs.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from cut_graphs import random_dag, random_loops
from cut_world import World

from cutwater.protocol.protocols import PROTOCOLS

TIMES = int(os.environ.get("CUT_RUNS", "1"))
CHAOS = {
    "quiet": {},
    "failing": {"chaos": 0.03},
    "expiring": {"timeout_ms": 45.0, "chaos": 0.02},
    "bounded": {"loop": True, "rows": 15},
    "bounded and expiring": {"loop": True, "rows": 15, "timeout_ms": 45.0},
}
QUICK = ("failing", "bounded and expiring")
"""What the others do happens in these, too."""
EACH = [pytest.param(chaos, marks=() if chaos in QUICK else pytest.mark.full) for chaos in CHAOS]


def run_many(runs: int, graphs=random_dag, first=0, **options) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + runs * TIMES):
        try:
            seen += World(graphs(random.Random(seed)), seed, **options).run().seen
        except BaseException as error:
            error.add_note(f"World({graphs.__name__}(random.Random({seed})), {seed}, **{options})")
            raise
    return seen


def expect_chaos(seen: Counter[str], chaos: str) -> None:
    if chaos == "failing":
        assert seen["write_failed"] > 3
        assert seen["commits of an older id"]
    if "expiring" in chaos:
        assert seen["aborted: expired"] > 3


@pytest.mark.parametrize("chaos", EACH)
def test_aligned_cuts_of_acyclic_graphs_are_consistent_and_rows_are_committed_once(chaos):
    seen = run_many(16, **CHAOS[chaos])
    expect_chaos(seen, chaos)
    assert seen["completed"] > 20
    assert seen["blocked"] > 100
    assert seen["concurrent"] > 30
    assert not seen["recorded"]


@pytest.mark.parametrize("chaos", EACH)
def test_at_least_once_loses_nothing_blocks_nothing_and_really_doubles(chaos):
    seen = run_many(16, protocol="at_least_once", **CHAOS[chaos])
    expect_chaos(seen, chaos)
    assert seen["completed"] > 20
    assert not seen["blocked"]
    assert seen["doubled"] > 3


@pytest.mark.parametrize("chaos", EACH)
def test_chandy_lamport_cuts_record_what_is_between_the_freeze_and_the_barrier(chaos):
    seen = run_many(16, protocol="chandy_lamport", **CHAOS[chaos])
    expect_chaos(seen, chaos)
    assert seen["completed"] > 20
    assert not seen["blocked"]
    assert seen["recorded"] > 50


@pytest.mark.parametrize("switch", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("chaos", EACH)
def test_unaligned_cuts_hold_what_was_overtaken_at_both_ends_whenever_they_switch(chaos, switch):
    seen = run_many(12, protocol="unaligned", switch=switch, **CHAOS[chaos])
    assert seen["completed"] > 10
    if not switch:
        assert not seen["overtaken at the receiver"] + seen["overtaken at the sender"] + seen["recorded"]
    elif switch == 1:
        assert seen["overtaken at the receiver"] > 20
        assert seen["overtaken at the sender"] > 5
    elif switch == 0.5:
        assert seen["blocked"]
        assert seen["expedited"] > 5
        assert seen["switched after the freeze"] > 2


@pytest.mark.parametrize("chaos", EACH)
def test_synchronous_cuts_hold_what_was_on_its_way_while_everything_stood_still(chaos):
    seen = run_many(10, protocol="synchronous", **CHAOS[chaos])
    assert seen["completed"] > 10
    assert not seen["blocked"] + seen["recorded"]
    assert seen["overtaken at the receiver"] > 20
    assert seen["overtaken at the sender"] > 5


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("chaos", EACH)
def test_cuts_of_graphs_with_loops_are_consistent_and_the_job_ends(protocol, chaos):
    """C2 to C6 and W3: late rows, early verdicts and verdicts that never come are violations, too."""
    seen = run_many(8, random_loops, 100, protocol=protocol, **CHAOS[chaos])
    assert seen["completed"] >= 8
    assert seen["loops ended"] > 3
    assert seen["released"] > 10
    if protocol not in ("none", "synchronous"):
        assert seen["recorded"] > 10


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_probes_find_the_end_of_loops_when_no_checkpoint_is_due(protocol):
    seen = run_many(6, random_loops, 200, protocol=protocol, interval_ms=1e6)
    assert seen["completed"] == 6 * TIMES
    assert seen["probes"] > 12


def test_protocol_none_takes_only_the_final_wave_and_commits_every_row():
    assert run_many(16, protocol="none")["completed"] == 16 * TIMES


def test_a_checkpoint_that_begins_ends_the_probe_under_way():
    assert run_many(10, random_loops, protocol="none")["aborted: subsumed"]
