"""How many rows a call of the operators gets: what a call costs is learnt from calls, and there is a time to keep to.

Theory of operation
-------------------
A call costs something fixed and something per row.  A budget alone (``slice_budget_ms``) is right while the fixed part
is small; where it is not, fewer rows make a call no shorter, and nothing moves.  So both parts are fitted, and a call
may last ``FIXED_SHARE`` times its fixed part, or the budget if that is more, and never more than ``max_call_ms``, for
which a barrier may have to wait.

The fit is a straight line through the mean calls of each order of magnitude of rows (powers of two).  Calls of one size
only say nothing about the two parts, so one call in ``PROBE_EVERY`` gets an eighth of the rows.  Three things keep it
honest: the first call, which compiles and imports, does not count; calls that last several times as long as the fit
says count only if there are some in a row, and then what was known before is forgotten; and no call is larger than one
that would keep the limit even if all that the largest known calls cost were per row.

While calls of ``max_rows`` stay within the budget nothing is fitted at all, nor of calls that are far below both what a
call may have and what it may last.
"""

from __future__ import annotations

import math
from typing import Final

MIN_ROWS: Final = 32
"""A call is never asked to take fewer rows than this, if there are more, but to learn what a call costs."""
FIRST_ROWS: Final = 128
"""Of the first call: one row may take a millisecond."""
FIXED_SHARE: Final = 7.0
"""A call may last so many times its fixed cost: six parts of seven go to rows."""
MARGIN: Final = 0.9
"""Of ``max_call_ms``, what a call is planned to last at most."""
LEAST_SHARE: Final = 0.25
"""Of the fixed cost, what the rows of a call may cost however large that is: a barrier waits for it anyhow."""
PROBE_EVERY: Final = 32
"""One call in so many is a probe; of the first calls, and of those after a change, the second, fourth, eighth ..."""
PROBE_SHARE: Final = 8
MIN_PROBE_ROWS: Final = 4
GROWTH: Final = 16
"""A call gets at most so many times the rows of those that are known, where that may cost more than the budget."""
OUTLIER: Final = 3.0
"""A call that lasts so many times what is expected, or as many times less, is a hiccup ..."""
DOUBTS: Final = 3
"""... unless there are so many in a row."""
_GAIN: Final = 0.2
"""Weight of a new call in the mean of its size."""
_FADING: Final = 0.93
"""What one call leaves of the weight of other sizes."""
_FADED: Final = 0.02
_FAR_BELOW: Final = 16
"""A call with so many times fewer rows than it might have, and that much shorter than it may last, is not fitted."""
_SPREAD: Final = 0.02
"""Of the sizes of calls, so that two parts can be told from each other."""


class _Level:
    """The mean call of one order of magnitude."""

    __slots__ = ("calls", "ms", "rows", "weight")

    def __init__(self, rows: int, ms: float) -> None:
        self.rows, self.ms = float(rows), ms
        self.calls, self.weight = 1, 1.0

    def add(self, rows: int, ms: float) -> None:
        self.calls += 1
        self.weight = 1.0
        gain = max(1 / self.calls, _GAIN)
        self.rows += gain * (rows - self.rows)
        self.ms += gain * (ms - self.ms)


class CallCost:
    """What a call costs, as far as the calls so far tell: ``fixed_ms`` and ``ms_per_row``.

    Calls of one size only count as all per row.

    >>> cost = CallCost()
    >>> for rows in (100, 100, 1000):
    ...     cost.add(rows, 50 + 0.1 * rows)
    >>> round(cost.fixed_ms), round(cost.ms_per_row, 3), round(cost.of(500))
    (50, 0.1, 100)
    """

    __slots__ = ("_doubts", "_levels", "calls", "fixed_ms", "ms_per_row", "suspect_ms")

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self.fixed_ms = self.ms_per_row = 0.0
        self.calls = 0
        """That count, since all began anew."""
        self._doubts = 0
        self.suspect_ms = 0.0
        """The last call did not count: so much more than expected (negative: less) it lasted."""

    def of(self, rows: float) -> float:
        """What a call with so many rows is expected to last, in milliseconds."""
        return self.fixed_ms + self.ms_per_row * rows

    @property
    def largest(self) -> tuple[float, float]:
        """Rows and milliseconds of the largest known calls; none are known: zeros."""
        if not self._levels:
            return 0.0, 0.0
        level = self._levels[max(self._levels)]
        return level.rows, level.ms

    def add(self, rows: int, ms: float) -> None:
        """A call with so many rows (at least one) lasted so long."""
        if not self._is_credible(rows, ms):
            return
        known = self._levels.get(rows.bit_length())
        for size in [size for size, level in self._levels.items() if level is not known]:
            level = self._levels[size]
            level.weight *= _FADING
            if level.weight < _FADED:
                del self._levels[size]
        if known is None:
            self._levels[rows.bit_length()] = _Level(rows, ms)
        else:
            known.add(rows, ms)
        self.calls += 1
        self._fit()

    def _is_credible(self, rows: int, ms: float) -> bool:
        """False for calls that last far longer or shorter than expected; with the third in a row all begins anew."""
        low, high = self._expected(rows)
        before, self.suspect_ms = self.suspect_ms, 0.0
        if low / OUTLIER <= ms <= high * OUTLIER:
            self._doubts = 0
            return True
        self.suspect_ms = ms - high if ms > high else ms - low
        self._doubts = self._doubts + 1 if before * self.suspect_ms > 0.0 else 1
        if self._doubts < DOUBTS:
            return False
        self._levels.clear()
        self.fixed_ms = self.ms_per_row = self.suspect_ms = 0.0
        self.calls = self._doubts = 0
        return True

    def _expected(self, rows: int) -> tuple[float, float]:
        """What such a call lasts at least and at most; one size alone tells no more than that."""
        if len(self._levels) > 1:
            return self.of(rows), self.of(rows)
        for level in self._levels.values():
            share = rows / level.rows
            return level.ms * min(share, 1.0), level.ms * max(share, 1.0)
        return 0.0, math.inf

    def _fit(self) -> None:
        """Weighted least squares of relative errors; neither part is below zero."""
        count = rows = rows2 = ms = both = 0.0
        for level in self._levels.values():
            weight = level.weight / max(level.ms, 1e-3) ** 2
            count += weight
            rows += weight * level.rows
            rows2 += weight * level.rows * level.rows
            ms += weight * level.ms
            both += weight * level.rows * level.ms
        spread = count * rows2 - rows * rows
        if spread < _SPREAD * count * rows2:  # nothing new about the parts: both grow or shrink
            scale = ms / expected if (expected := count * self.fixed_ms + rows * self.ms_per_row) > 0.0 else 0.0
            self.fixed_ms *= scale
            self.ms_per_row = self.ms_per_row * scale if scale else both / rows2
            return
        slope = (count * both - rows * ms) / spread
        fixed = (ms - slope * rows) / count
        if slope < 0.0:
            slope, fixed = 0.0, ms / count
        elif fixed < 0.0:
            slope, fixed = both / rows2, 0.0
        self.ms_per_row, self.fixed_ms = slope, fixed


class CallSize:
    """Says how many rows the next call gets (``rows``).

    Args:
        slice_budget_ms: what a call should last where its fixed cost is small.
        max_call_ms: what no call should last.
        max_rows: most rows of a call.

    >>> size = CallSize(slice_budget_ms=10.0, max_call_ms=1000.0, max_rows=100_000)
    >>> for _ in range(30):
    ...     size.observe(size.rows, 50.0 + 0.01 * size.rows)
    >>> round(size.rows, -2), round(size.cost.of(size.rows))
    (30000, 350)
    """

    def __init__(self, slice_budget_ms: float, max_call_ms: float, max_rows: int) -> None:
        self._budget_ms, self._max_ms = slice_budget_ms, max(max_call_ms, slice_budget_ms)
        self._max_rows = max(max_rows, 1)
        self._min_rows = min(MIN_ROWS, self._max_rows)
        self.rows = min(FIRST_ROWS, self._max_rows)
        self.cost = CallCost()
        self._wanted = self.rows
        self._calls = 0

    @property
    def is_large(self) -> bool:
        """The fixed cost of a call is above the budget."""
        return self.cost.fixed_ms > self._budget_ms

    def observe(self, rows: int, elapsed_ms: float) -> None:
        """A call with so many rows (at least one) lasted so long."""
        if elapsed_ms <= self._budget_ms and self.rows == self._max_rows:
            return
        if rows * _FAR_BELOW <= self.rows and elapsed_ms * _FAR_BELOW <= self._budget_ms:
            return  # a thousand calls a second of a few rows each tell nothing about the largest that is good
        self._calls += 1
        if self._calls > 1:
            self.cost.add(rows, elapsed_ms)
        if elapsed_ms > self._max_ms and (self._calls == 1 or self.cost.suspect_ms > 0.0):
            self.rows = self._within(rows * self._budget_ms / elapsed_ms)  # a hiccup or not: the next call tells
            return
        if self._calls == 1:
            return
        best = self._best()
        if abs(best - self._wanted) * 16 > self._wanted or best == self._max_rows:  # else a small change: left alone
            self._wanted = best
        probe = max(min(MIN_PROBE_ROWS, self._max_rows), self._wanted // PROBE_SHARE)
        self.rows = probe if self._is_probe else self._wanted

    @property
    def _is_probe(self) -> bool:
        """Whether the next call is to tell fixed cost and cost per row from each other."""
        calls = self.cost.calls
        if calls % PROBE_EVERY and (calls > PROBE_EVERY or calls < 2 or calls & (calls - 1)):
            return False
        return self._wanted < self._max_rows or self.is_large

    def _best(self) -> int:
        cost, budget = self.cost, self._budget_ms
        fixed, per_row = cost.fixed_ms, cost.ms_per_row
        target = max(budget, min(FIXED_SHARE * fixed, MARGIN * self._max_ms))
        for_rows = max(target - fixed, LEAST_SHARE * fixed)
        wanted = for_rows / per_row if per_row * self._max_rows > for_rows else float(self._max_rows)
        known_rows, known_ms = cost.largest
        if known_ms > 0.0:
            within_budget = known_rows * budget / known_ms
            within_limit = known_rows * max(MARGIN * self._max_ms, (1 + LEAST_SHARE) * fixed) / known_ms
            wanted = min(wanted, within_limit, max(within_budget, known_rows * GROWTH))
        return self._within(wanted)

    def _within(self, rows: float) -> int:
        return int(max(self._min_rows, min(rows, self._max_rows)))
