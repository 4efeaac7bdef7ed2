"""Vector clocks over the steps of a trace: who can have known what."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from cutwater.trace.events import Header, Step
from cutwater.trace.result import Kind, Violation


class VectorClocks:
    """One clock per process: how many steps of each process lie in its past, its own included.

    >>> from cutwater.trace.events import Link, Span
    >>> clocks = VectorClocks(Header(("p", "q"), (Link("c", "p", "q"),)))
    >>> clocks.step(1, Step(0.0, "p", 1, sends=(Span("c", 0),)))
    >>> clocks.step(2, Step(1.0, "q", 1, takes=(Span("c", 0),)))
    >>> clocks.now("q")
    (1, 1)
    >>> [v.text for v in clocks.inconsistencies(7, {"p": (0, 0), "q": (1, 1)})]
    ['it knows of event 1, which p did after its cut']
    """

    def __init__(self, header: Header) -> None:
        self._processes = header.processes
        self._index = {process: i for i, process in enumerate(header.processes)}
        self._clocks = [[0] * len(header.processes) for _ in header.processes]
        self._numbers: list[list[int]] = [[] for _ in header.processes]
        self._ends: dict[str, list[int]] = {link.name: [] for link in header.channels}
        self._sent: dict[str, list[tuple[int, ...]]] = {link.name: [] for link in header.channels}
        self._first: dict[str, int] = {}
        """Rows below the first one sent come from a restored channel state, and know of nothing here."""

    def step(self, number: int, step: Step) -> None:
        """A process took its next step: event ``number`` of the trace."""
        own = self._index[step.process]
        clock = self._clocks[own]
        for span in step.takes:
            sent = self._sent[span.channel]
            at = bisect_right(self._ends[span.channel], span.end - 1)
            if at < len(sent) and span.end > self._first[span.channel]:
                clock[:] = map(max, clock, sent[at])
        clock[own] += 1
        self._numbers[own].append(number)
        if step.sends:
            stamp = tuple(clock)
            for span in step.sends:
                self._first.setdefault(span.channel, span.first)
                self._ends[span.channel].append(span.end)
                self._sent[span.channel].append(stamp)

    def now(self, process: str) -> tuple[int, ...]:
        """The clock of a process."""
        return tuple(self._clocks[self._index[process]])

    def inconsistencies(self, snapshot: int, cuts: dict[str, Sequence[int]]) -> list[Violation]:
        """A cut is consistent if no process knows more of another than that one's own cut has.

        Args:
            cuts: the clock of each process at its cut.
        """
        found: list[Violation] = []
        for process, clock in cuts.items():
            for other, at in cuts.items():
                i = self._index[other]
                if clock[i] > at[i]:
                    number = self._numbers[i][at[i]]
                    text = f"it knows of event {number}, which {other} did after its cut"
                    found.append(Violation(Kind.CUT, text, snapshot, process=process, events=(number,)))
        return found
