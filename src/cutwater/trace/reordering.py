"""The reordering of CL7: an equivalent history that leads through the recorded state, rebuilt and replayed.

A step is *pre-recording* if its process had not yet recorded itself, else *post-recording*.  Wherever a post-recording
step is followed at once by a pre-recording one, the two may change places: they are in different processes, and the
second cannot take a row that the first sent, or the marker would have come before that row.  When no such pair is left,
all pre-recording steps come first, and the state between the two groups is S*, the recorded one.

Nothing of this is believed here.  Every exchange is checked, and both histories are replayed over the states of all
processes and the contents of all channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cutwater.trace.events import Header, Span, Step
from cutwater.trace.result import Kind, Reordering, Violation


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

    def has(self, channel: str, end: int) -> None:
        """Its receiver has all rows below this number."""
        self.here[channel] = end

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
