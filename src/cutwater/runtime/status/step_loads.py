"""How busy each step is, and what its calls cost, out of what the workers count."""

from __future__ import annotations

from collections.abc import Collection

from cutwater.config import JobConfig
from cutwater.runtime.control import reports as cr
from cutwater.runtime.status.status import SubtaskLoad

_TOLD_AFTER = 5
"""Reports in a row that say so before the user is told: a fit may be wrong for a moment."""


class StepLoads:
    """Shares of the time between the last two reports of each worker."""

    def __init__(self) -> None:
        self._loads: dict[tuple[int, int], dict[str, SubtaskLoad]] = {}
        """By slot and region, then by step."""

    def clear(self, regions: Collection[int] | None = None) -> None:
        """These regions begin anew; ``None``: all do."""
        self._loads = {w: found for w, found in self._loads.items() if regions is not None and w[1] not in regions}

    def report(self, slot: int, before: cr.Metrics, now: cr.Metrics) -> None:
        """Two reports of one attempt of a worker."""
        span_ms = now.time_ms - before.time_ms
        if span_ms > 0:
            self._loads[slot, now.region] = {
                step: SubtaskLoad(
                    subtask=slot,
                    busy=_share(busy_ms - before.busy_ms.get(step, 0.0), span_ms),
                    backpressured=_share(
                        now.backpressured_ms.get(step, 0.0) - before.backpressured_ms.get(step, 0.0), span_ms
                    ),
                )
                for step, busy_ms in now.busy_ms.items()
            }

    def of_step(self, step: str) -> list[SubtaskLoad]:
        """One for each subtask that has told, by its number."""
        found = [loads[step] for loads in self._loads.values() if step in loads]
        return sorted(found, key=lambda load: load.subtask)

    def mean(self, step: str) -> tuple[float, float]:
        """Busy and backpressured, over the subtasks; zeros if none has told."""
        loads = self.of_step(step)
        count = max(len(loads), 1)
        return round(sum(x.busy for x in loads) / count, 3), round(sum(x.backpressured for x in loads) / count, 3)

    def of_worker(self, slot: int) -> tuple[float, float]:
        """Busy is the sum of its steps, which share one thread; backpressured the most of any step."""
        loads = [load for where, found in self._loads.items() if where[0] == slot for load in found.values()]
        busy = round(min(sum((load.busy for load in loads), 0.0), 1.0), 3)
        return busy, max((load.backpressured for load in loads), default=0.0)


def _share(part_ms: float, span_ms: float) -> float:
    return round(max(0.0, min(part_ms / span_ms, 1.0)), 3)


class SlowCalls:
    """Makes the warnings on steps whose calls cost more than the budget without any row: one for each.

    >>> from cutwater.runtime.control.messages import FixedCost, Metrics
    >>> calls = SlowCalls(JobConfig())
    >>> costs = {"call": FixedCost("call", 50, 50, 350, 9000)}
    >>> report = Metrics(1, 0.0, {}, {}, {}, {}, {}, {}, 0.0, fixed_costs=costs)
    >>> told = [calls.fresh(0, report) for _ in range(6)]
    >>> len(told[0]), told[4][0].partition(". ")[0], len(told[5])
    (0, "step 'call': a call costs 50 ms whatever the number of its rows, and slice_budget_ms is 10", 0)
    """

    def __init__(self, config: JobConfig) -> None:
        self._budget_ms, self._max_ms = config.slice_budget_ms, config.max_call_ms
        self._seen: dict[tuple[int, int, str], int] = {}
        """By slot, region and step: reports in a row."""
        self._told: set[str] = set()

    def fresh(self, slot: int, report: cr.Metrics) -> list[str]:
        """Warnings of what a report of a worker says for some time now, and nobody said before."""
        place = slot, report.region
        for where in [w for w in self._seen if w[:2] == place and w[2] not in report.fixed_costs]:
            del self._seen[where]
        new: list[str] = []
        for step, cost in report.fixed_costs.items():
            seen = self._seen[*place, step] = self._seen.get((*place, step), 0) + 1
            if seen >= _TOLD_AFTER and step not in self._told:
                self._told.add(step)
                new.append(self._text(step, cost))
        return new

    def _text(self, step: str, cost: cr.FixedCost) -> str:
        name = f"step {step!r}" if cost.first == step else f"steps {cost.first!r} to {step!r}, which run as one"
        chain = f" (its whole chain {cost.chain_ms:.0f} ms)" if cost.chain_ms > 1.2 * cost.step_ms else ""
        limit = "at most" if cost.call_ms <= self._max_ms else "more than"
        return (
            f"{name}: a call costs {cost.step_ms:.0f} ms{chain} whatever the number of its rows, and slice_budget_ms "
            f"is {self._budget_ms:g}. So that rows get on, calls have {cost.rows:,} rows and last {cost.call_ms:.0f} "
            f"ms, {limit} max_call_ms ({self._max_ms:g}); barriers wait for them. Make a call cheaper, or set "
            "max_call_ms: lower for quicker checkpoints, higher for more rows per second."
        )
