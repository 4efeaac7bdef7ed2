"""Notes of a full check besides: clocks, states, contents, and the history of each attempt for CL7."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from cutwater.trace.books import ChannelBook, SnapshotBook
from cutwater.trace.events import Cut, Header, Restored, Span, Step, Survived
from cutwater.trace.reordering import History, reorder
from cutwater.trace.result import Kind, Reordering, Violation


class FullBooks:
    """The part of a ``Checker`` that a quick check goes without."""

    def __init__(self, header: Header, channels: Mapping[str, ChannelBook]) -> None:
        self.states: dict[str, str] = {}
        """Process -> the state it is in."""
        self.reorderings: list[Reordering] = []
        self._header, self._channels = header, channels
        self._values: dict[int, dict[str, dict[int, str]]] = {}
        """Attempt -> channel -> row -> content: while a recovery is on its way, a row number can mean two rows."""
        self._survivors: dict[str, int] = {}
        """Process -> the attempt that it survived."""
        self._clocks: dict[int, VectorClocks] = {}
        self._histories: dict[int, History] = {}
        self._cut_clocks: dict[int, dict[str, tuple[int, ...]]] = {}

    def step(self, number: int, step: Step) -> list[Violation]:
        """A step that the quick checks have booked already."""
        found: list[Violation] = []
        state = self.states.get(step.process)
        if state and step.before and state != step.before:
            text = f"it was in state {state!r} and goes on from {step.before!r}"
            found.append(Violation(Kind.STATE, text, process=step.process, events=(number,)))
        if step.after:
            self.states[step.process] = step.after
        history = self._history(step.attempt)
        contents = self._values[step.attempt]
        for span in step.takes:
            found += _compare(contents[span.channel], number, span)
        for span in step.sends:
            found += self._compare_again(number, span)
            contents[span.channel].update(zip(range(span.first, span.end), span.values, strict=False))
        history.step(number, step)
        self._clocks[step.attempt].step(number, step)
        return found

    def cut(self, number: int, cut: Cut) -> list[Violation]:
        """A process recorded itself."""
        self._history(cut.attempt).cut(cut.snapshot, cut.process, cut.state)
        clock = self._clocks[cut.attempt].now(cut.process)
        self._cut_clocks.setdefault(cut.snapshot, {})[cut.process] = clock
        state = self.states.get(cut.process) or cut.state
        self.states[cut.process] = state
        if cut.state and cut.state != state:
            text = f"it recorded state {cut.state!r} while it was in {state!r}"
            return [Violation(Kind.STATE, text, cut.snapshot, process=cut.process, events=(number,))]
        return []

    def complete(self, snapshot: SnapshotBook, *, consistent: bool) -> list[Violation]:
        """Vector clocks, then CL7; both must agree with what the counts said."""
        attempt = next(iter(snapshot.attempts))
        found = self._clocks[attempt].inconsistencies(snapshot.id, dict(self._cut_clocks[snapshot.id]))
        reordering, broken = reorder(self._histories[attempt], snapshot.id, snapshot.states, snapshot.recorded)
        if reordering is not None and not broken:
            self.reorderings.append(reordering)
        found += broken
        if consistent and not found:
            found += self._contents_of(snapshot)
        return found

    def restored(self, event: Restored, snapshot: SnapshotBook) -> None:
        """A process is in its state at the cut again."""
        process = event.process
        state = self.states[process] = snapshot.states.get(process, "")
        self._survivors.pop(process, None)
        history = self._history(event.attempt)
        before = self._values.get(min(snapshot.attempts, default=event.attempt), {})
        for channel in self._channels.values():
            if channel.source == process:
                self._values[event.attempt][channel.name] = {
                    **before.get(channel.name, {}), **self._here(channel, event.attempt)
                }  # fmt: skip
        history.begins(process, state, snapshot.sent | event.sent, snapshot.taken | event.taken)

    def survived(self, event: Survived) -> None:
        """It begins the attempt where it is; what has come to it was sent in the attempt before."""
        process, attempt = event.process, event.attempt
        self._survivors[process] = before = max((a for a in self._values if a < attempt), default=attempt)
        history, contents, old = self._history(attempt), self._values[attempt], self._values.get(before, {})
        sent, taken = dict[str, int](), dict[str, int]()
        for channel in self._channels.values():
            name = channel.name
            if channel.source == process:
                sent[name] = channel.sent
                contents[name] = dict(old.get(name, {}))
            if channel.target == process:
                taken[name] = channel.taken
                history.has(name, channel.here)
                contents[name] = {**contents[name], **self._here(channel, attempt)}
        history.begins(process, self.states.get(process, ""), sent, taken)

    def _here(self, channel: ChannelBook, attempt: int) -> dict[int, str]:
        """Contents of rows that a survivor has already, taken or not: whoever sends them again sends the same."""
        survived = self._survivors.get(channel.target)
        old = self._values.get(survived, {}).get(channel.name, {}) if survived not in (None, attempt) else {}
        return {row: value for row, value in old.items() if row < channel.here}

    def _history(self, attempt: int) -> History:
        if attempt not in self._histories:
            values = self._values[attempt] = {name: dict[int, str]() for name in self._channels}
            self._histories[attempt] = History(self._header, values)
            self._clocks[attempt] = VectorClocks(self._header)
        return self._histories[attempt]

    def _compare_again(self, number: int, span: Span) -> list[Violation]:
        """A row that a survivor has already taken must be sent again as it was (R0)."""
        channel = self._channels[span.channel]
        if channel.target not in self._survivors or span.first >= channel.taken:
            return []
        contents = self._values[self._survivors[channel.target]][span.channel]
        for row, value in zip(range(span.first, span.end), span.values, strict=False):
            before = contents.get(row, value)
            if row < channel.taken and before != value:
                text = f"row {row} is sent again as {value!r}, and {channel.target} has taken it as {before!r}"
                return [Violation(Kind.CONTENT, text, channel=span.channel, events=(number,))]
        return []

    def _contents_of(self, snapshot: SnapshotBook) -> list[Violation]:
        found: list[Violation] = []
        contents = self._values[next(iter(snapshot.attempts))]
        for name, spans in snapshot.recorded.items():
            for span in spans:
                for row, value in zip(range(span.first, span.end), span.values, strict=False):
                    sent = contents[name].get(row, value)
                    if sent != value:
                        text = f"row {row} was sent as {sent!r} and recorded as {value!r}"
                        found.append(Violation(Kind.CONTENT, text, snapshot.id, name))
        return found


def _compare(contents: Mapping[int, str], number: int, span: Span) -> list[Violation]:
    """A row must be taken as it was sent."""
    for row, value in zip(range(span.first, span.end), span.values, strict=False):
        if contents.get(row, value) != value:
            text = f"row {row} was sent as {contents[row]!r} and taken as {value!r}"
            return [Violation(Kind.CONTENT, text, channel=span.channel, events=(number,))]
    return []


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
