"""Warnings on steps whose calls cost much without any row."""

from __future__ import annotations

from cutwater.config import JobConfig
from cutwater.runtime.control.messages import FixedCost, Metrics
from cutwater.runtime.status.board import SlowCalls


def told(step_ms: float, chain_ms: float) -> list[str]:
    calls = SlowCalls(JobConfig())
    costs = {"paid": FixedCost("paid", step_ms, chain_ms, chain_ms, 86_008)}
    report = Metrics(1, 0.0, {}, {}, {}, {}, {}, {}, 0.0, fixed_costs=costs)
    return [text for _ in range(10) for text in calls.fresh(0, report)]


def test_a_slow_step_is_told_of_once():
    (text,) = told(50, 60)
    assert "'paid'" in text
    assert "50 ms" in text


def test_a_step_that_costs_nothing_is_not_blamed_for_a_busy_machine():
    assert told(0.2, 11) == []
