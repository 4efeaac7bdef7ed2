"""Restart strategies (R5)."""

from __future__ import annotations

import random

import pytest

from cutwater.config import RestartConfig
from cutwater.protocol.job.restart_budget import GiveUp, Restart, RestartDecider


def decider(seed=0, **config):
    return RestartDecider(RestartConfig(**config), random.Random(seed))


def test_none_never_restarts():
    assert isinstance(decider(strategy="none").on_failure(0.0), GiveUp)


def test_fixed_delay_restarts_as_often_as_told_however_long_the_job_ran():
    d = decider(strategy="fixed_delay", attempts=3, delay_ms=40.0)
    assert [d.on_failure(t * 1e6) for t in range(3)] == [Restart(40.0)] * 3
    d.on_checkpoint_completed()
    assert isinstance(d.on_failure(4e6), GiveUp)


def test_exponential_grows_to_the_longest_pause():
    d = decider(strategy="exponential", initial_ms=50.0, max_ms=300.0, multiplier=2.0, jitter=0.0)
    assert [d.on_failure(t * 10.0).delay_ms for t in range(5)] == [50.0, 100.0, 200.0, 300.0, 300.0]


def test_exponential_starts_anew_after_running_long_enough():
    d = decider(strategy="exponential", initial_ms=50.0, jitter=0.0, reset_ms=1000.0)
    assert d.on_failure(0.0) == Restart(50.0)
    assert d.on_failure(1049.0) == Restart(100.0)  # the pause itself is no running: 999 ms
    assert d.on_failure(2149.0) == Restart(50.0)


def test_exponential_gives_up_after_too_many_failures_without_a_completed_checkpoint():
    d = decider(strategy="exponential", max_consecutive=2)
    for _ in range(5):
        assert isinstance(d.on_failure(0.0), Restart)
        assert isinstance(d.on_failure(0.0), Restart)
        d.on_checkpoint_completed()
    d.on_failure(0.0)
    d.on_failure(0.0)
    assert "max_consecutive allows 2" in d.on_failure(0.0).reason


def test_jitter_stays_in_its_bounds_and_is_the_same_for_the_same_seed():
    def delays(seed):
        d = decider(seed, strategy="exponential", initial_ms=100.0, multiplier=1.0, jitter=0.2, max_consecutive=99)
        return [d.on_failure(0.0).delay_ms for _ in range(50)]

    assert all(80.0 <= d <= 120.0 for d in delays(1))
    assert max(delays(1)) - min(delays(1)) > 10.0
    assert delays(1) == delays(1) != delays(2)


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        ({"strategy": "exponential", "max_consecutive": 3}, 3),
        ({"strategy": "fixed_delay", "attempts": 2}, 2),
        ({"strategy": "failure_rate", "rate_failures": 4, "rate_window_ms": 1000.0}, 4),
        ({"strategy": "none"}, 0),
    ],
)
def test_the_budget_counts_up_to_the_last_failure_after_which_the_job_is_restarted(config, allowed):
    d = decider(**config)
    seen = []
    while isinstance(decision := d.on_failure(0.0), Restart):
        assert d.latest == decision
        seen.append(d.budget)
    assert seen == [(n, allowed) for n in range(1, allowed + 1)]
    assert d.budget[1] == allowed


@pytest.mark.parametrize(("last", "expected"), [(99.0, GiveUp), (100.0, Restart)])
def test_failure_rate_counts_within_its_window(last, expected):
    d = decider(strategy="failure_rate", rate_failures=2, rate_window_ms=100.0, delay_ms=5.0)
    assert d.on_failure(0.0) == Restart(5.0)
    assert d.on_failure(50.0) == Restart(5.0)
    assert isinstance(d.on_failure(last), expected)
