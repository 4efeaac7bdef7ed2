"""Full check of a trace: clocks, states, contents, and for every snapshot the reordered history of CL7.

CL7: an equivalent history leads through the recorded state; it is rebuilt and replayed.

A step is *pre-recording* if its process had not yet recorded itself, else *post-recording*.  Wherever a post-recording
step is followed at once by a pre-recording one, the two may change places: they are in different processes, and the
second cannot take a row that the first sent, or the marker would have come before that row.  When no such pair is left,
all pre-recording steps come first, and the state between the two groups is S*, the recorded one.

Nothing of this is believed here.  Every exchange is checked, and both histories are replayed over the states of all
processes and the contents of all channels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cutwater.trace.events import Cut, Header, Restored, Span, Step, Survived
from cutwater.trace.result import Kind, Reordering, Violation

if TYPE_CHECKING:
    from cutwater.trace.checker import ChannelNotes, SnapshotNotes


class FullNotes:
    """The part of a ``Checker`` that a quick check goes without."""

    def __init__(self, header: Header, channels: Mapping[str, ChannelNotes]) -> None:
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
        """A step that the quick checks have noted already."""
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

    def complete(self, snapshot: SnapshotNotes, *, consistent: bool) -> list[Violation]:
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

    def restored(self, event: Restored, snapshot: SnapshotNotes) -> None:
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
                history.here[name] = channel.here
                contents[name] = {**contents[name], **self._here(channel, attempt)}
        history.begins(process, self.states.get(process, ""), sent, taken)

    def _here(self, channel: ChannelNotes, attempt: int) -> dict[int, str]:
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

    def _contents_of(self, snapshot: SnapshotNotes) -> list[Violation]:
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


# ------------------------------------------------------------------------------------------- the reordering of CL7


class History:
    """The steps of one attempt, and the state it began in.

    That state is made of what each process began with: where its cut lies, or, of a survivor, where it was.

    Args:
        values: channel -> row -> printable content, where traced.
    """

    def __init__(self, header: Header, values: Mapping[str, Mapping[int, str]]) -> None:
        self.header, self.values = header, values
        self.states: dict[str, str] = {}
        """Process -> its first state."""
        self.taken: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        """Channel -> number of the next row to be taken, and sent, at the beginning."""
        self.here: dict[str, int] = {}
        """Channel -> the receiver has survived, and has all rows below this number: they are dropped if sent again."""
        self.numbers: list[int] = []
        self.steps: list[Step] = []
        self.cuts: dict[int, dict[str, int]] = {}
        """Snapshot -> process -> how many steps of all processes the trace had before its cut."""
        self._seen: set[str] = set()

    def begins(self, process: str, state: str, sent: Mapping[str, int], taken: Mapping[str, int]) -> None:
        """Position of a process at the beginning, and of its ends of channels; those of others are left out."""
        self.states[process] = state
        for link in self.header.channels:
            if link.source == process and link.name in sent:
                self.sent[link.name] = sent[link.name]
            if link.target == process and link.name in taken:
                self.taken[link.name] = taken[link.name]

    def on_its_way(self, channel: str) -> range:
        """The rows in a channel at the beginning."""
        return range(self.taken.get(channel, 0), max(self.sent.get(channel, 0), self.here.get(channel, 0)))

    def step(self, number: int, step: Step) -> None:
        """Event ``number`` of the trace."""
        if step.process not in self._seen:
            self._seen.add(step.process)
            self.states[step.process] = self.states.get(step.process) or step.before
        self.numbers.append(number)
        self.steps.append(step)

    def cut(self, snapshot: int, process: str, state: str) -> None:
        """The process recorded itself after the steps so far."""
        if process not in self._seen and state:
            self.states[process] = state
        self.cuts.setdefault(snapshot, {})[process] = len(self.steps)


class _Replay:
    """The global state, moved on by one step after the other."""

    def __init__(self, history: History) -> None:
        self._values, self._here = history.values, history.here
        self.states = dict(history.states)
        self.queues = {link.name: list(history.on_its_way(link.name)) for link in history.header.channels}

    def step(self, step: Step) -> str | None:
        """Move on; what makes the step impossible here, if something does."""
        now = self.states.get(step.process, "")
        if step.before and now != step.before:
            return f"{step.process} is in state {now!r} and not in {step.before!r}"
        for span in step.takes:
            rows = range(span.first, span.end)
            queue = self.queues[span.channel]
            if queue[: span.count] == list(rows):
                del queue[: span.count]
            elif set(rows) <= set(queue):
                self.queues[span.channel] = [row for row in queue if row not in rows]
            else:
                return f"row {span.first} is not in channel {span.channel}"
        for span in step.sends:
            self.queues[span.channel].extend(range(max(span.first, self._here.get(span.channel, 0)), span.end))
        if step.after:
            self.states[step.process] = step.after
        return None

    def content(self, channel: str) -> tuple[str, ...]:
        """Contents of a channel: printable where traced, else row numbers."""
        values = self._values.get(channel, {})
        return tuple(values.get(row, f"#{row}") for row in self.queues[channel])


def reorder(
    history: History, snapshot: int, states: Mapping[str, str], recorded: Mapping[str, Sequence[Span]]
) -> tuple[Reordering | None, list[Violation]]:
    """Rebuild the history through S* and replay it.

    Args:
        states: process -> its recorded state; empty ones are not compared.
        recorded: channel -> its recorded state; channels left out are empty.
    """
    cuts = history.cuts[snapshot]
    first, last = min(cuts.values()), max(cuts.values())
    pre, post, swaps, violations = _sort(history, snapshot, cuts, first, last)
    real, other = _Replay(history), _Replay(history)
    for i in range(first):
        real.step(history.steps[i])
        other.step(history.steps[i])
    for i in pre:
        problem = other.step(history.steps[i])
        if problem is not None:
            violations.append(_broken(snapshot, f"before S*, {problem}", history.numbers[i]))
            return None, violations
    star = dict(other.states)
    channels = {link.name: other.content(link.name) for link in history.header.channels}
    rows = {name: list(queue) for name, queue in other.queues.items()}
    violations += _differences(snapshot, star, rows, states, recorded)
    for i in post:
        problem = other.step(history.steps[i])
        if problem is not None:
            violations.append(_broken(snapshot, f"after S*, {problem}", history.numbers[i]))
            return None, violations
    for i in range(first, last):
        real.step(history.steps[i])
    same_channels = all(sorted(real.queues[name]) == sorted(queue) for name, queue in other.queues.items())
    if real.states != other.states or not same_channels:
        violations.append(_broken(snapshot, "the new history ends in another state than the real one", last))
    found = Reordering(
        snapshot,
        tuple(history.numbers[i] for i in pre),
        tuple(history.numbers[i] for i in post),
        swaps,
        _moment(history, star, channels, cuts),
        star,
        {name: content for name, content in channels.items() if content},
    )
    return found, violations


def _sort(
    history: History, snapshot: int, cuts: Mapping[str, int], first: int, last: int
) -> tuple[list[int], list[int], int, list[Violation]]:
    """All pre-recording steps, then all others, with the number of exchanges and those that are not allowed."""
    pre: list[int] = []
    post: list[int] = []
    swaps = 0
    violations: list[Violation] = []
    sent_by_post: dict[str, tuple[int, int]] = {}
    for i in range(first, last):
        step = history.steps[i]
        if i >= cuts[step.process]:
            post.append(i)
            for span in step.sends:
                sent_by_post.setdefault(span.channel, (span.first, history.numbers[i]))
            continue
        pre.append(i)
        swaps += len(post)
        for span in step.takes:
            row, sender = sent_by_post.get(span.channel, (span.end, 0))
            if span.end > row:
                text = f"{step.process} takes row {row} before its cut, and it was sent after the sender's"
                numbers = sender, history.numbers[i]
                violations.append(Violation(Kind.REORDERING, text, snapshot, span.channel, step.process, numbers))
    return pre, post, swaps, violations


def _differences(
    snapshot: int,
    star: Mapping[str, str],
    rows: Mapping[str, list[int]],
    states: Mapping[str, str],
    recorded: Mapping[str, Sequence[Span]],
) -> list[Violation]:
    """Differences between the state that the history goes through and the recorded one."""
    found: list[Violation] = []
    for process, state in states.items():
        if state and star.get(process, "") not in ("", state):
            text = f"the history goes through state {star[process]!r}, recorded is {state!r}"
            found.append(Violation(Kind.REORDERING, text, snapshot, process=process))
    for channel, queue in rows.items():
        stored = sorted(row for span in recorded.get(channel, ()) for row in range(span.first, span.end))
        if stored != sorted(queue):
            text = f"the history goes through rows {queue} in the channel, recorded are {stored}"
            found.append(Violation(Kind.REORDERING, text, snapshot, channel))
    return found


def _moment(
    history: History, star: Mapping[str, str], channels: Mapping[str, tuple[str, ...]], cuts: Mapping[str, int]
) -> int | None:
    """The event after which the real history was in S*.

    States are compared as they are printed; where none are traced, by how many steps each process had done.
    """
    replay = _Replay(history)
    done = dict.fromkeys(history.header.processes, 0)
    wanted = dict.fromkeys(history.header.processes, 0)
    for i, step in enumerate(history.steps):
        wanted[step.process] += i < cuts[step.process]
    blind = {p for p in history.header.processes if not star.get(p)}

    def differs(process: str) -> bool:
        return done[process] != wanted[process] if process in blind else replay.states.get(process) != star[process]

    different = {("process", p) for p in history.header.processes if differs(p)}
    different |= {("channel", name) for name, content in channels.items() if replay.content(name) != content}
    for i in range(len(history.steps) + 1):
        if not different:
            return history.numbers[i - 1] if i else 0
        if i == len(history.steps):
            break
        step = history.steps[i]
        if replay.step(step) is not None:
            break
        done[step.process] += 1
        touched = {("process", step.process, differs(step.process))}
        names = {span.channel for span in (*step.takes, *step.sends)}
        touched |= {("channel", name, replay.content(name) != channels[name]) for name in names}
        for kind, name, is_different in touched:
            (different.add if is_different else different.discard)((kind, name))
    return None


def _broken(snapshot: int, text: str, number: int) -> Violation:
    return Violation(Kind.REORDERING, text, snapshot, events=(number,))
