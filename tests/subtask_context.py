"""What an operator knows of its subtask, without a worker around it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cutwater.state.keys import key_group_range

__all__ = ["Subtask"]


@dataclass
class Subtask:
    """A context that owns its share of the key groups, and counts; without ``now_ms`` nobody may ask for the time."""

    subtask: int = 0
    parallelism: int = 1
    max_parallelism: int = 16
    step: str = "step"
    incremental: bool = True
    state_memory_bytes: int | None = None
    repeatable: bool = False
    repeating: bool = False
    now_ms: int | None = None
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def key_groups(self) -> range:
        return key_group_range(self.subtask, self.parallelism, self.max_parallelism)

    def processing_time_ms(self) -> int:
        assert self.now_ms is not None, "no clock is needed"
        return self.now_ms

    def count(self, metric: str, amount: int = 1) -> None:
        self.counters[metric] += amount

    def wake(self) -> None:
        """Nobody sleeps."""
