"""Kernels of the windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import kernel

__all__ = ["assign"]


@kernel
def assign(times: Any, size: Any, offset: Any, limit: Any, starts: Any) -> Any:
    """Window start of each row.  Returns (first start, last start, first row beyond +-``limit`` or -1)."""
    current = np.int64(0)
    known = False
    lowest = np.int64(2**63 - 1)
    highest = np.int64(-(2**63))
    for i in range(times.shape[0]):
        time = times[i]
        if not known or time < current or time >= current + size:
            if time > limit or time < -limit:
                return lowest, highest, i
            current = time - (time - offset) % size  # the remainder is never negative: floor division
            known = True
            lowest = min(lowest, current)
            highest = max(highest, current)
        starts[i] = current
    return lowest, highest, -1
