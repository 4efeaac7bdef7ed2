"""The determinant log of one subtask, as its host sees it: written, or followed call by call (R0)."""

from __future__ import annotations

from collections.abc import Callable

from cutwater.errors import NondeterminismError
from cutwater.plan.graph import Channel
from cutwater.protocol.job.regions import Subtask as SubtaskKey
from cutwater.protocol.replay.choices import Choice, ChoiceKind, ChoiceReader, ChoiceWriter
from cutwater.protocol.replay.determinants import CONTROL, OWN, Run
from cutwater.runtime.chains.clock import ProcessingClock
from cutwater.runtime.control.determinant_news import DeterminantNews
from cutwater.runtime.transport.signal import nothing

_OF_INPUTS = {ChoiceKind.ROWS, ChoiceKind.TIMED_ROWS}
_DEEDS = {
    **dict.fromkeys(_OF_INPUTS, "took rows of an input"),
    **dict.fromkeys((ChoiceKind.WATERMARK, ChoiceKind.IDLE), "went on to other choices"),
    ChoiceKind.END: "came to the end of an input",
    ChoiceKind.MARK: "froze its state",
    ChoiceKind.TIMERS: "fired timers",
    ChoiceKind.CLOCK: "looked at the clock",
    **dict.fromkeys((ChoiceKind.READ, ChoiceKind.READ_ON), "read from its source"),
    ChoiceKind.SPLITS: "got splits to read",
    ChoiceKind.STEP_TIME: "heard how far its source had come",
    ChoiceKind.IDLE_SPLIT: "found that a split had nothing to give",
    ChoiceKind.VERDICT: "heard of its loop",
    ChoiceKind.ANSWERS: "took answers to its calls",
}
"""In a user's words, what each choice is."""


class ChosenClock(ProcessingClock):
    """The clock as the operators of one subtask see it: it stands still during a call; what it shows is a choice."""

    __slots__ = ("_base", "_order", "shows_ms")

    def __init__(self, order: SubtaskDeterminants, base: ProcessingClock) -> None:
        super().__init__()
        self._order, self._base = order, base
        self.shows_ms: int | None = None
        """During the call under way; ``None``: nobody has looked."""

    def now_ms(self) -> int:
        if self.shows_ms is None:
            self.shows_ms = self._order.clock_ms(self._base)
        return self.shows_ms


class SubtaskDeterminants:
    """The determinant log of one subtask: written, or followed as far as somebody knows it.

    Args:
        news: of the worker.
        key: of the subtask.
        steps: what runs in it.
        inputs: its inputs.
        clock: the worker's.
    """

    def __init__(
        self,
        news: DeterminantNews,
        key: SubtaskKey,
        steps: tuple[str, ...],
        inputs: list[Channel],
        clock: ProcessingClock,
    ) -> None:
        self._news, self._key, self._steps, self._inputs = news, key, steps, inputs
        self.clock = ChosenClock(self, clock)
        self._writer: ChoiceWriter | None = None
        self._reader: ChoiceReader | None = None
        self._next: Choice | None = None
        self.gathered = 0
        """Rows of the next choice that have been taken already."""
        self.on_mark: Callable[[], None] = nothing
        """Called where a freeze of then is passed that nobody goes back to."""

    @property
    def following(self) -> bool:
        return self._reader is not None

    @property
    def repeating(self) -> bool:
        """It follows, or may have to once everything is restored."""
        return self._writer is None

    @property
    def begun(self) -> bool:
        return self._writer is not None or self._reader is not None

    def begin(self, entries: bytes) -> None:
        """Follow these entries; write what comes after them."""
        self.clock.shows_ms = None
        if entries:
            self._reader = ChoiceReader(entries, len(self._inputs))
        else:
            self._writer = ChoiceWriter(len(self._inputs))

    def chose(self, kind: ChoiceKind, place: int = 0, rows: int = 0, value: int = 0, body: bytes = b"") -> None:
        """A choice is made, and nothing has come of it yet."""
        assert self._writer is not None
        self._news.append(self._key, self._writer.entry(Choice(kind, place, rows, value, body)))

    def mark(self, checkpoint_id: int) -> None:
        """The state was frozen."""
        assert self._writer is not None
        self._news.mark(self._key, checkpoint_id, self._writer.entry(Choice(ChoiceKind.MARK)))

    def clock_ms(self, base: ProcessingClock) -> int:
        """What the operators see of the clock."""
        if self._reader is not None:
            choice = self.peek()
            if choice is not None:
                return self.made(ChoiceKind.CLOCK).value
        now_ms = base.now_ms()
        if self._writer is not None:  # not while the state is being restored
            self.chose(ChoiceKind.CLOCK, value=now_ms)
        return now_ms

    # ---------------------------------------------------------------------------------------------------- following

    def peek(self) -> Choice | None:
        """The next choice of the log; ``None`` at its end, from where on choices are written."""
        if self._next is None and self._reader is not None:
            self._next = self._reader.next()
            if self._next is None:
                self._writer, self._reader = ChoiceWriter.after(self._reader), None
        return self._next

    def made(self, *kinds: ChoiceKind) -> Choice:
        """The next choice is made again.

        Raises:
            NondeterminismError: the log has another kind of choice.
        """
        choice = self.peek()
        if choice is None or choice.kind not in kinds:
            before = _DEEDS[choice.kind] if choice is not None else "did nothing more"
            chained = f" ({' -> '.join(self._steps)})" if self._steps[1:] else ""
            raise NondeterminismError(
                f"subtask {self._key[1]}{chained} {_DEEDS[kinds[0]]}, where with the same input it {before}",
                step=self._steps[0],
            )
        self._next = None
        return choice

    def next_run(self) -> Run | None:
        """What comes next, for the subtask loop."""
        choice = self.peek()
        while choice is not None and choice.kind is ChoiceKind.MARK:
            self.made(ChoiceKind.MARK)
            self.on_mark()
            choice = self.peek()
        if choice is None:
            return None
        if choice.kind in _OF_INPUTS:
            return self._inputs[choice.place], choice.rows - self.gathered
        return (self._inputs[choice.place], CONTROL) if choice.kind is ChoiceKind.END else (OWN, CONTROL)
