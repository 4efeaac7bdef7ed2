"""Findings of a check of a trace."""

from __future__ import annotations

import enum

import msgspec


class Kind(enum.Enum):
    """Kind of promise that is broken."""

    CUT = "inconsistent cut"
    """A row is taken in the cut, and sent after it (CL6: m > n)."""
    LOST = "lost from the cut"
    """A row was on its way at the cut, and the channel's recorded state lacks it (n' < n or m' > m)."""
    DOUBLED = "doubled in the cut"
    """A row is in the receiver's state and in the channel's too (m' < m), or it is recorded twice."""
    FUTURE = "from after the cut"
    """A row in the channel's recorded state was sent after the sender's cut (n' > n)."""
    INCOMPLETE = "incomplete snapshot"
    """A process has no cut in a snapshot that is said to be complete, or several."""
    MARKER = "marker out of its place"
    FIFO = "order of a channel"
    """A row was taken out of turn, twice, or before it was sent."""
    STATE = "history of a process"
    """A process went on from another state than the one it was in, or did something while it was down."""
    CONTENT = "content of a row"
    RESTORE = "restore"
    """A process went on from something that is no complete snapshot."""
    OUTPUT = "committed output"
    REORDERING = "reordering"
    """No equivalent history leads through the recorded state (CL7)."""
    TRACE = "trace"
    """The trace contradicts its own header."""


class Violation(msgspec.Struct, frozen=True):
    """One broken promise, as a sentence; ``events`` are numbers of events, the first of a trace is 1."""

    kind: Kind
    text: str
    snapshot: int | None = None
    channel: str | None = None
    process: str | None = None
    events: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = [] if self.snapshot is None else [f"snapshot {self.snapshot}"]
        where += [f"process {self.process}"] if self.process else []
        where += [f"channel {self.channel}"] if self.channel else []
        numbers = list(dict.fromkeys(self.events))
        at = f" (event{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))})" if numbers else ""
        return ": ".join(part for part in (self.kind.value, ", ".join(where), f"{self.text}{at}") if part)


class ChannelCounts(msgspec.Struct, frozen=True):
    """The four counts of CL6 for one channel of one snapshot.

    Rows sent before the sender's cut (``sent``, the n of the theory) and before the channel's (``sent_recorded``, n'),
    rows taken before the receiver's cut (``taken``, m) and before the channel's (``taken_recorded``, m').

    >>> ChannelCounts(1, "c", sent=5, sent_recorded=5, taken=3, taken_recorded=3).holds
    True
    >>> ChannelCounts(1, "c", sent=0, sent_recorded=1, taken=0, taken_recorded=0).holds  # n' > n
    False
    """

    snapshot: int
    channel: str
    sent: int
    sent_recorded: int
    taken: int
    taken_recorded: int

    @property
    def holds(self) -> bool:
        """n = n', m = m', n' >= m'."""
        return (
            self.sent == self.sent_recorded
            and self.taken == self.taken_recorded
            and self.sent_recorded >= self.taken_recorded
        )


class Reordering(msgspec.Struct, frozen=True):
    """An equivalent history through the recorded state S* (CL7).

    Attributes:
        before, after: numbers of the events between the first and the last cut, in the order of the new history; S*
            lies between the two.
        swaps: how many adjacent pairs had to change places.
        occurred_after: number of the event after which the real history was in S* (0: in its first state), or ``None``
            if it never was.
        states, channels: S* itself; channels that are empty in it are left out.
    """

    snapshot: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    swaps: int
    occurred_after: int | None
    states: dict[str, str]
    channels: dict[str, tuple[str, ...]]

    @property
    def occurred(self) -> bool:
        """The system really was in S* at some moment."""
        return self.occurred_after is not None


class CheckResult(msgspec.Struct, frozen=True):
    """Everything that a checker found.

    >>> print(CheckResult(events=3, snapshots=1))
    3 events, 1 complete snapshot: no violation
    """

    events: int = 0
    snapshots: int = 0
    violations: tuple[Violation, ...] = ()
    counts: tuple[ChannelCounts, ...] = ()
    """Of every channel and complete snapshot; full checks only."""
    reorderings: tuple[Reordering, ...] = ()
    """Of every complete snapshot; full checks only."""
    in_flight: int = 0
    """Rows that were sent and not taken when the trace ended."""
    restores: int = 0
    """Recoveries: attempts that began with a restored process."""

    @property
    def ok(self) -> bool:
        """Nothing is broken."""
        return not self.violations

    def kinds(self) -> set[Kind]:
        """The kinds of all violations."""
        return {v.kind for v in self.violations}

    def __str__(self) -> str:
        """The summary, then one line for each violation."""
        head = f"{_plural(self.events, 'event')}, {_plural(self.snapshots, 'complete snapshot')}: "
        head += _plural(len(self.violations), "violation")
        return "\n".join([head, *map(str, self.violations)])


def _plural(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'s' if count > 1 else ''}"
