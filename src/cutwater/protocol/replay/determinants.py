"""What a subtask chose, so that it can be made to choose the same once more (R0).

What a deterministic subtask sends depends on its state and on the order in which it took its inputs.  So the order is
all that must be known to make every row again under its old number, whatever reads it.  A *choice* is a row or a
control item (a watermark, the end of data) taken from an input, or what a verdict on its loop changed.  Barriers are
none, nor are watermarks that say nothing new: they change nothing that is sent, and after a restore some come twice.

Theory of operation.  The log belongs to one subtask and counts its choices.  Before anything depends on a choice, it is
known to somebody else: with what leaves a worker goes all that the worker knows of any log, of its own subtasks' and of
those that it has heard of.  So whoever survives knows every choice that anything it holds depends on, however many
workers die together.  A replacement goes back to the checkpoint and follows what survivors know from there on; on what
nobody knows nobody depends, and there it is free to choose anew.

A verdict on a loop rests on choices of all its subtasks, also on some of which the head that hears it has not heard: a
barrier on a back-edge tells only its receiver.  So acknowledgements of subtasks in loops tell the coordinator, too, and
a replacement asks it with the survivors.

A replacement takes over all that survivors know, also of subtasks that are not its own: to follow a choice is to depend
on what it depended on, and whoever told it may die next.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol, TypeAlias

from cutwater.errors import InvariantError
from cutwater.protocol.messages import InputId

Run = tuple[InputId, int]
"""So many rows from an input in a row; 0: a control item."""
CONTROL = 0
OWN: Final = "own"
"""Instead of an input: a choice that needs none, which the subtask knows how to make again."""


class Verdict(NamedTuple):
    """What a verdict on its loop changed in a subtask (C6, W3)."""

    watermark: int
    """The combined watermark after it, in microseconds since the epoch."""
    ended: bool
    """Its back-edges ended."""


class InputWatermark(NamedTuple):
    """A watermark that was taken from an input, alone or behind rows; where it stood among them is not the sender's."""

    input: InputId
    watermark: int
    """In microseconds since the epoch."""


OwnChoice: TypeAlias = Verdict | InputWatermark
"""A choice that needs nothing from outside."""
_Choice: TypeAlias = tuple[InputId, bool] | OwnChoice


class Order(Protocol):
    """What a subtask loop follows."""

    def next_run(self) -> Run | None:
        """What comes next; ``None`` where the log ends."""
        ...


class DeterminantLog:
    """The choices of one subtask since the job began, or since all of it last went back.

    >>> log = DeterminantLog()
    >>> log.took("a", 2); log.took("a", 1); log.took("b", CONTROL); log.position
    4
    >>> log.go_back(1, known=4); log.next_run()
    ('a', 2)
    >>> log.took("a", 2); log.next_run()
    ('b', 0)
    >>> log.go_back(1, known=2); log.took("a", 1); log.next_run()
    """

    def __init__(self) -> None:
        self.position = 0
        """Number of the next choice."""
        self._choices: list[_Choice] = []

    @property
    def length(self) -> int:
        """Choices that are in the log; more than ``position`` while they are being followed."""
        return len(self._choices)

    def took(self, input: InputId, rows: int) -> None:
        """Rows were taken, or with ``CONTROL`` a control item.

        Raises:
            InvariantError: the log says that something else comes next.
        """
        for choice in [(input, False)] if rows == CONTROL else [(input, True)] * rows:
            self._chose(choice)

    def chose(self, choice: OwnChoice) -> None:
        """A verdict on the loop of the subtask, or the watermark of an input, changed something.

        Raises:
            InvariantError: the log says that something else comes next.
        """
        self._chose(choice)

    def go_back(self, position: int, known: int) -> None:
        """The subtask is at ``position`` again; choices from ``known`` on are known to nobody, and forgotten.

        Raises:
            InvariantError: somebody knows of choices that are not in the log, which so could not be followed.
        """
        if max(position, known) > len(self._choices):
            raise InvariantError(
                f"a determinant log holds {len(self._choices)} choices; its subtask goes back to {position}, "
                f"and somebody knows {known}"
            )
        del self._choices[max(position, known) :]
        self.position = position

    def next_run(self) -> Run | None:
        """What comes next, ``OWN`` for a verdict or a watermark; ``None`` where the log ends."""
        choices, end = self._choices, self.position
        if end == len(choices):
            return None
        first = choices[end]
        if isinstance(first, Verdict | InputWatermark):
            return OWN, CONTROL
        while first[1] and end < len(choices) and choices[end] == first:
            end += 1
        return first[0], end - self.position

    def next_own(self) -> OwnChoice:
        """What comes next, where that is ``OWN``.

        Raises:
            InvariantError: it is something else.
        """
        choice = self._choices[self.position] if self.position < len(self._choices) else None
        if not isinstance(choice, Verdict | InputWatermark):
            raise InvariantError(f"choice {self.position} is {choice} in the determinant log, and needs an input")
        return choice

    def copy(self) -> DeterminantLog:
        """The same log, for a replacement, once nobody hears any more of whoever it replaces, and may still write."""
        other = DeterminantLog()
        other.position, other._choices = self.position, self._choices.copy()
        return other

    def _chose(self, choice: _Choice) -> None:
        if self.position == len(self._choices):
            self._choices.append(choice)
        elif self._choices[self.position] != choice:
            expected = self._choices[self.position]
            raise InvariantError(f"choice {self.position} was {choice} where the determinant log has {expected}")
        self.position += 1
