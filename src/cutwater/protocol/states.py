"""Base of the enumerations of states of the machines, and of the steps between them."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """A value that a transition table is looked up with.

    >>> class Door(State):
    ...     OPEN = "open"
    >>> hash(Door.OPEN) == hash(Door("open"))
    True
    """

    __hash__ = object.__hash__  # there is one object for each value, and that of Enum is slow: it is written in Python
