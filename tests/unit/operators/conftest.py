"""A context for operators that runs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest


class FakeContext:
    """Counts into ``counters``; time stands still."""

    incremental = True

    def __init__(self, subtask: int = 0, parallelism: int = 1, max_parallelism: int = 128) -> None:
        from cutwater.state.keys import key_group_range

        self.step = "step"
        self.subtask = subtask
        self.parallelism = parallelism
        self.max_parallelism = max_parallelism
        self.key_groups = key_group_range(subtask, parallelism, max_parallelism)
        self.counters: Counter[str] = Counter()

    def processing_time_ms(self) -> int:
        return 0

    def count(self, metric: str, amount: int = 1) -> None:
        self.counters[metric] += amount


@pytest.fixture
def make_context() -> Callable[..., FakeContext]:
    return FakeContext
