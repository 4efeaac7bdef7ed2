"""Channels of a local run, and choosing among those that have something to take."""

from __future__ import annotations

import random

from cutwater.process_networks.graph import ChannelSpec
from cutwater.process_networks.messages import Item


class ItemQueue:
    """What is under way in one channel: first in, first out, or any order if the channel says so."""

    __slots__ = ("_head", "_items", "_random", "spec")

    def __init__(self, spec: ChannelSpec, random: random.Random) -> None:
        self.spec = spec
        self._random = random
        self._items: list[Item] = []
        self._head = 0

    def __len__(self) -> int:
        return len(self._items) - self._head

    def push(self, item: Item) -> None:
        self._items.append(item)

    def pop(self) -> Item:
        """Take the next item."""
        items = self._items
        if not self.spec.fifo:
            at = self._random.randrange(len(items))
            items[at], items[-1] = items[-1], items[at]
            return items.pop()
        item = items[self._head]
        self._head += 1
        if self._head * 2 > len(items):
            del items[: self._head]
            self._head = 0
        return item


class ReadySet:
    """A set with a fair random choice, each operation in constant time.

    >>> ready = ReadySet(random.Random(1))
    >>> for name in ("a", "b", "c"): ready.add(name)
    >>> ready.discard("b")
    >>> sorted({ready.pick() for _ in range(50)})
    ['a', 'c']
    """

    __slots__ = ("_names", "_places", "_random")

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._names: list[str] = []
        self._places: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        """Add a name; nothing if it is in."""
        if name not in self._places:
            self._places[name] = len(self._names)
            self._names.append(name)

    def discard(self, name: str) -> None:
        """Remove a name; nothing if it is not in."""
        place = self._places.pop(name, None)
        if place is not None:
            last = self._names.pop()
            if last != name:
                self._names[place] = last
                self._places[last] = place

    def clear(self) -> None:
        self._names.clear()
        self._places.clear()

    def pick(self) -> str:
        """One of the names."""
        return self._names[int(self._random.random() * len(self._names))]
