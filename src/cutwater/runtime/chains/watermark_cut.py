"""Where a batch must be cut so that lateness depends on the position in the split only (W1, W4).

The watermark of a split after row i is ``max(event time of rows 0..i) - bound - 1``: no later row may have an event
time at or below it.  A row that breaks this promise is judged by the watermark of its own split before it, which goes
with it to every step behind (``Rows.late_before``).  So a batch is cut before each such row, if the watermark rose
since the last cut.  Rows that keep the promise can never be late, wherever the cuts are, and need nothing.  Data within
its bound is never cut.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cutwater.data.time import MIN_WATERMARK
from cutwater.protocol.subtask.split_times import watermark_after


def watermark_cuts(times_us: npt.NDArray[np.int64], previous_max: int, bound_us: int) -> tuple[list[int], list[int]]:
    """Cut positions of a batch, and the watermarks between the parts.

    Args:
        times_us: event times of the batch's rows, microseconds, without nulls.
        previous_max: largest event time of the split's rows before the batch; ``MIN_WATERMARK`` if there are none.
        bound_us: how far a row may come after a younger one.

    Returns:
        ``cuts``: rising row numbers; the batch splits into ``[0, cuts[0]), [cuts[0], cuts[1]), ... [cuts[-1], n)``.
        ``watermarks``: one more than cuts; ``watermarks[k]`` is what row ``cuts[k]`` and those behind it are judged by,
        and the last one holds after the whole batch.  A cut at row 0 (an empty first part) says that the batch begins
        with such a row.

    With a bound far too small for the data there is a cut for every second row: correct, but slow.

    >>> watermark_cuts(np.array([10, 20, 17, 12, 30, 25]), MIN_WATERMARK, 5)
    ([3], [14, 24])
    """
    rows = len(times_us)
    if rows == 0:
        return [], [watermark_after(previous_max, bound_us)]
    running = np.maximum.accumulate(times_us)
    before = np.empty(rows, dtype=np.int64)
    before[0] = previous_max
    np.maximum(running[:-1], previous_max, out=before[1:])
    # Below this nothing can be violated; it also keeps the subtraction from wrapping round at the end of the range.
    floor = MIN_WATERMARK + bound_us
    violating = np.flatnonzero((before > floor) & (times_us < np.maximum(before, floor) - bound_us))
    if len(violating):
        seen = before[violating]
        rose = np.ones(len(violating), dtype=bool)
        rose[1:] = seen[1:] > seen[:-1]
        violating = violating[rose]
    cuts: list[int] = violating.tolist()
    maxima: list[int] = [*before[violating].tolist(), max(previous_max, int(running[-1]))]
    return cuts, [watermark_after(m, bound_us) for m in maxima]
