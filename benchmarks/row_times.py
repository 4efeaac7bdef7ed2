"""What the programs share that note for each row when it began and when it came."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SKIP_S", "late_ms", "told"]

SKIP_S = 2.0
"""Rows at the beginning do not count: workers load what they need with the first ones."""


def late_ms(began_ns: npt.NDArray[Any], came_ns: npt.NDArray[Any] | int) -> npt.NDArray[np.float64]:
    """How long rows took, but for those that began in the first ``SKIP_S`` of all.

    >>> late_ms(np.array([0, 3_000_000_000]), 3_001_500_000).tolist()
    [1.5]
    """
    return ((came_ns - began_ns) / 1e6)[began_ns >= began_ns.min() + SKIP_S * 1e9]


def told(late_ms: npt.NDArray[np.float64]) -> str:
    """Percentiles, and of how many rows.

    >>> told(np.array([1.0, 2.0, 3.0]))
    'p50 2.0 ms  p99 3.0 ms  max 3.0 ms  (3 rows)'
    """
    p50, p99 = np.percentile(late_ms, [50, 99])
    return f"p50 {p50:.1f} ms  p99 {p99:.1f} ms  max {late_ms.max():.1f} ms  ({len(late_ms)} rows)"
