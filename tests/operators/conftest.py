"""A context for operators that runs nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from subtask_context import Subtask


def context(subtask: int = 0, parallelism: int = 1, max_parallelism: int = 128) -> Subtask:
    """Time stands still."""
    return Subtask(subtask, parallelism, max_parallelism, now_ms=0)


@pytest.fixture
def make_context() -> Callable[..., Subtask]:
    return context
