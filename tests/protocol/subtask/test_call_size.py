"""Rows per call, over random costs of calls: nothing starves, no call holds a barrier up for long.

The oracle is the cost model itself: what calls of the best size within the limit would reach.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from cutwater.protocol.subtask.call_size import FIXED_SHARE, MIN_ROWS, CallCost, CallSize

BUDGET_MS, MAX_CALL_MS, MAX_ROWS = 10.0, 1000.0, 131_072


class Cost(NamedTuple):
    """What a call costs."""

    fixed_ms: float
    ms_per_row: float

    def of(self, rows: int) -> float:
        return self.fixed_ms + self.ms_per_row * rows

    @property
    def limit(self) -> float:
        """Rows per millisecond of the best calls that keep the limit (and are not smaller than calls may be)."""
        within = (MAX_CALL_MS - self.fixed_ms) / self.ms_per_row if self.ms_per_row else MAX_ROWS
        rows = int(min(max(within, MIN_ROWS), MAX_ROWS))
        return rows / self.of(rows)


class Run(NamedTuple):
    """Calls one after the other."""

    rows: int
    ms: float
    over: int
    """Calls of more than the least rows whose expected cost was above the limit."""

    def share(self, cost: Cost) -> float:
        return self.rows / self.ms / cost.limit


def random_cost(rng: random.Random) -> Cost:
    fixed = rng.choice([0.0, rng.uniform(0, 500), 10 ** rng.uniform(-2, 2.7)])
    per_row = rng.choice([0.0, 10 ** rng.uniform(-6, 0), rng.uniform(0, 1)])
    return Cost(fixed, per_row if fixed + per_row else 1e-5)


def noise(rng: random.Random, sigma: float) -> float:
    """A factor of mean one; one call in a hundred is a hiccup."""
    hiccup = rng.uniform(3, 10) if sigma and rng.random() < 0.01 else 1.0
    return hiccup * math.exp(rng.gauss(-sigma * sigma / 2, sigma))


def run(size: CallSize, cost: Cost, calls: int, blur: Callable[[], float], warm: int = 0, first_ms: float = 0.0) -> Run:
    rows = over = 0
    ms = 0.0
    for call in range(calls):
        taken = size.rows
        size.observe(taken, cost.of(taken) * blur() + (first_ms if call == 0 else 0.0))
        if call >= warm:
            rows, ms = rows + taken, ms + cost.of(taken)
            over += taken > MIN_ROWS and cost.of(taken) > MAX_CALL_MS
    return Run(rows, ms, over)


def lasting(size: CallSize, cost: Cost) -> list[float]:
    """What the next calls last, in milliseconds."""
    found: list[float] = []
    for _ in range(50):
        found.append(cost.of(size.rows))
        size.observe(size.rows, found[-1])
    return found


@pytest.mark.parametrize(("sigma", "least"), [(0.0, 0.8), (0.2, 0.79), (0.3, 0.75)])
def test_four_fifths_of_what_large_calls_reach_whatever_a_call_costs(sigma: float, least: float) -> None:
    """Fixed cost 0 to 500 ms, 0 to 1 ms per row; the first call compiles for two seconds."""
    for seed in range(400):
        rng = random.Random(seed)
        cost, size = random_cost(rng), CallSize(BUDGET_MS, MAX_CALL_MS, MAX_ROWS)
        got = run(size, cost, 400, lambda rng=rng: noise(rng, sigma), warm=60, first_ms=2000.0)
        assert got.share(cost) >= least, (seed, cost, got)
        assert got.over <= 340 * sigma, (seed, cost, got)


def test_costs_that_change_are_followed() -> None:
    """A hundred calls later four fifths are reached again, but for a few where noise hides the change."""
    late = 0
    for seed in range(300):
        rng = random.Random(seed)
        before, after, size = random_cost(rng), random_cost(rng), CallSize(BUDGET_MS, MAX_CALL_MS, MAX_ROWS)
        run(size, before, 250, lambda rng=rng: noise(rng, 0.2))
        share = run(size, after, 350, lambda rng=rng: noise(rng, 0.2), warm=100).share(after)
        assert share > 0.6, (seed, before, after)
        late += share < 0.8
    assert late <= 3


def test_calls_of_cheap_steps_keep_to_the_budget() -> None:
    """With little fixed cost the slice budget means what it meant; a barrier waits no longer than that."""
    for seed in range(200):
        rng = random.Random(seed)
        cost = Cost(rng.uniform(0, BUDGET_MS / FIXED_SHARE), 10 ** rng.uniform(-4, -1))
        size = CallSize(BUDGET_MS, MAX_CALL_MS, MAX_ROWS)
        run(size, cost, 100, lambda rng=rng: noise(rng, 0.1))
        assert max(lasting(size, cost)) < 1.35 * BUDGET_MS or size.rows == MIN_ROWS, cost
        assert not size.is_large


def test_a_fixed_cost_above_the_longest_call_is_exceeded_by_a_quarter_only() -> None:
    cost, size = Cost(3000.0, 0.5), CallSize(BUDGET_MS, MAX_CALL_MS, MAX_ROWS)
    run(size, cost, 60, lambda: 1.0)
    assert size.is_large
    assert 3500 < max(lasting(size, cost)) < 3800


def test_a_hiccup_makes_no_call_small_for_long() -> None:
    cost, size = Cost(50.0, 0.01), CallSize(BUDGET_MS, MAX_CALL_MS, MAX_ROWS)
    run(size, cost, 100, lambda: 1.0)
    usual = size.cost.of(30_000)
    size.observe(30_000, 60_000.0)
    assert size.rows <= 30_000 * BUDGET_MS / 60_000 + MIN_ROWS  # at once: it may be no hiccup
    size.observe(size.rows, cost.of(size.rows))
    assert size.rows > 25_000
    assert size.cost.of(30_000) == pytest.approx(usual, rel=0.05)


def test_while_calls_of_the_most_rows_keep_to_the_budget_nothing_is_fitted() -> None:
    size = CallSize(BUDGET_MS, MAX_CALL_MS, MAX_ROWS)
    run(size, Cost(0.1, 1e-5), 20, lambda: 1.0)
    before = size.cost.calls
    assert size.rows == MAX_ROWS
    run(size, Cost(0.1, 1e-5), 100, lambda: 1.0)
    assert (size.rows, size.cost.calls) == (MAX_ROWS, before)


def test_calls_far_below_both_limits_are_not_fitted_and_long_ones_of_few_rows_are() -> None:
    size = CallSize(BUDGET_MS, MAX_CALL_MS, MAX_ROWS)
    for _ in range(100):
        size.observe(3, 0.1)
    assert size.cost.calls == 0
    for rows in (3, 4, 3, 5, 3, 4):
        size.observe(rows, 400.0)
    assert size.cost.of(4) == pytest.approx(400.0, rel=0.5)
    assert size.rows < MAX_ROWS


def test_calls_of_one_size_say_nothing_of_the_two_parts() -> None:
    cost = CallCost()
    for _ in range(10):
        cost.add(100, 50.0)
    assert (cost.fixed_ms, cost.of(100)) == (0.0, pytest.approx(50.0))
    cost.add(1000, 50.0)
    assert cost.fixed_ms == pytest.approx(50.0)
