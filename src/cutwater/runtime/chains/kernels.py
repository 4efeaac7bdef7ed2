"""Kernels of the source runner."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import kernel


@kernel
def highest_in_bound(times: Any, highest: Any, bound: Any, floor: Any) -> Any:
    """Walk through times while none is more than ``bound`` below the highest before it, if that is above ``floor``.

    Returns the highest of all, and the number of times walked through.
    """
    for i in range(np.uint64(times.shape[0])):
        time = times[i]
        if time > highest:
            highest = time
        elif highest > floor and time < highest - bound:
            return highest, np.int64(i)
    return highest, np.int64(times.shape[0])
