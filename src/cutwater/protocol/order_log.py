"""What a subtask chose, so that it can be made to choose the same once more (R0).

What a deterministic subtask sends depends on its state and on the order in which it took its inputs.  So the order is
all that must be known to make every row again under its old number, whatever reads it.  A *choice* is a row or a
control item (a watermark, the end of data) taken from an input.  Barriers are none, nor are watermarks that say nothing
new: they change nothing that is sent, and after a restore some come twice.

Theory of operation.  The log belongs to one subtask and counts its choices.  Before anything depends on a choice, it is
known to somebody else: with what leaves a worker goes all that the worker knows of any log, of its own subtasks' and of
those that it has heard of.  So whoever survives knows every choice that anything it holds depends on, however many
workers die together.  A replacement goes back to the checkpoint and follows what survivors know from there on; on what
nobody knows nobody depends, and there it is free to choose anew.
"""

from __future__ import annotations

from typing import Final, Protocol

from cutwater.errors import InvariantError
from cutwater.protocol.messages import InputId

__all__ = ["CONTROL", "OWN", "Order", "OrderLog", "Run"]

Run = tuple[InputId, int]
"""So many rows from an input in a row; 0: a control item."""
CONTROL = 0
OWN: Final = "own"
"""Instead of an input: a choice that needs none, which the subtask knows how to make again."""


class Order(Protocol):
    """What a subtask loop follows."""

    def next_run(self) -> Run | None:
        """What comes next; ``None`` where the log ends."""
        ...


class OrderLog:
    """The choices of one subtask since the job began, or since all of it last went back.

    >>> log = OrderLog()
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
        self._choices: list[tuple[InputId, bool]] = []

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
            if self.position == len(self._choices):
                self._choices.append(choice)
            elif self._choices[self.position] != choice:
                expected = self._choices[self.position]
                raise InvariantError(f"choice {self.position} was {choice} where the order log has {expected}")
            self.position += 1

    def go_back(self, position: int, known: int) -> None:
        """The subtask is at ``position`` again; choices from ``known`` on are known to nobody, and forgotten."""
        del self._choices[max(position, known) :]
        self.position = position

    def next_run(self) -> Run | None:
        """What comes next; ``None`` where the log ends."""
        choices, end = self._choices, self.position
        if end == len(choices):
            return None
        first = choices[end]
        while first[1] and end < len(choices) and choices[end] == first:
            end += 1
        return first[0], end - self.position

    def copy(self) -> OrderLog:
        """The same log, for a replacement: whoever it replaces may still write."""
        other = OrderLog()
        other.position, other._choices = self.position, self._choices.copy()
        return other
