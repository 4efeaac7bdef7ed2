"""What the sinks of a run committed, against what they should have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cutwater.trace.events import Committed
from cutwater.trace.result import Kind, Violation

SHOWN = 5
"""Rows named in one sentence."""


class OutputBook:
    """Committed rows.  A commit that is told again (after a restore, to make sure) counts once."""

    def __init__(self, at_least_once: bool) -> None:
        self._at_least_once = at_least_once
        self._rows: Counter[str] = Counter()
        self._told: dict[tuple[str, int], tuple[str, ...]] = {}

    def commit(self, event: Committed) -> str | None:
        """Book a commit; what is wrong, if something is."""
        key = event.process, event.snapshot
        before = self._told.get(key)
        if before is None:
            self._told[key] = event.values
            self._rows.update(event.values)
        elif event.values and event.values != before:
            return "committed a second time, with other rows"
        return None

    def compare(self, oracle: Iterable[str]) -> list[Violation]:
        """Rows that are missing, and rows that should not be there."""
        wanted = Counter(oracle)
        missing, extra = wanted - self._rows, self._rows - wanted
        if self._at_least_once:
            extra = Counter({row: n for row, n in extra.items() if row not in wanted})
        found: list[Violation] = []
        for rows, what in ((missing, "missing"), (extra, "too many")):
            if rows:
                named = ", ".join(map(repr, list(rows.elements())[:SHOWN]))
                more = f" and {rows.total() - SHOWN} others" if rows.total() > SHOWN else ""
                found.append(Violation(Kind.OUTPUT, f"{what}: {named}{more}"))
        return found
