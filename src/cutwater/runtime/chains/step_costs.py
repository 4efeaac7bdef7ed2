"""Which step of a chain makes its calls expensive, whatever the number of their rows."""

from __future__ import annotations

from collections.abc import Sequence

from cutwater.protocol.subtask.call_size import CallCost, CallSize
from cutwater.runtime.chains.chain import Node
from cutwater.runtime.control.reports import FixedCost


class StepCosts:
    """Fits the share of each step, while calls of the whole chain cost more than the budget without any row.

    Args:
        nodes: of the chain; they count their own time.
        calls: what calls of the whole chain cost.
    """

    def __init__(self, nodes: Sequence[Node], calls: CallSize) -> None:
        self._nodes, self._calls = nodes, calls
        self._costs: list[CallCost] = []
        self._began: list[float] | None = None

    def begin(self) -> None:
        """A call begins."""
        self._began = [node.busy_s for node in self._nodes] if self._calls.is_large else None

    def observe(self, rows: int) -> None:
        """The call had so many rows."""
        if self._began is None:
            self._costs = []
            return
        self._costs = self._costs or [CallCost() for _ in self._nodes]
        for cost, node, began in zip(self._costs, self._nodes, self._began, strict=True):
            cost.add(rows, (node.busy_s - began) * 1000)

    def report(self) -> tuple[str, FixedCost] | None:
        """The step with the largest fixed cost; ``None`` while calls are cheap."""
        if not self._costs or not self._calls.is_large:
            return None
        fixed_ms, at = max((cost.fixed_ms, at) for at, cost in enumerate(self._costs))
        node, calls = self._nodes[at], self._calls
        return node.step, FixedCost(node.steps[0], fixed_ms, calls.cost.fixed_ms, calls.cost.of(calls.rows), calls.rows)
