"""What the states of a step have of each key, found by one lookup for all of them: the contract of memory and disk.

A key has one record for each state, and these hang together: who has found the first has found them all.  ``bind``
tells the columns, one for each state, which records the key has; from then on a state reads and writes the record of
its column.  Keys of one column are looked up as that column's value (the *bare* key), without a tuple around it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from cutwater.state.objects.table import Key, KeyedObjects

V = TypeVar("V")


class KeyRecord(msgspec.Struct, gc=False):
    """What one state has of one key.

    Attributes:
        held: the value, not to be changed in place; ``None``: there is none.
        written: the epoch of its column in which it was last written; 0: never.
        before: what was held at the end of an earlier epoch, while somebody may read that.
        next: the key's record of the next state.
    """

    held: Any = None
    written: float = 0
    before: Any = None
    next: Any = None


NOTHING: Final = KeyRecord()
"""Stands for all records of a key that has none."""
NOTHING.next = NOTHING


class _Unbound:
    """Stands for the records of no key: what stands for that key has no hash, and says why using it is an error."""

    __slots__ = ("_key",)

    def __init__(self, key: Hashable) -> None:
        self._key = key

    @property
    def next(self) -> _Unbound:
        return self

    def __getattr__(self, name: str) -> Any:
        hash(self._key)
        raise AttributeError(name)


class StateColumn(ABC, Generic[V]):
    """One state of all keys.

    Attributes:
        record: of the current key.
        epoch: a value may be put into the record while ``record.written`` is this object; else ``claim`` the record.
    """

    record: Any
    epoch: int

    @property
    @abstractmethod
    def objects(self) -> KeyedObjects[V]:
        """The values by key."""

    @abstractmethod
    def fill(self, keys: Sequence[Hashable], values: Iterable[V]) -> None:
        """Put values of many bare keys."""

    @abstractmethod
    def claim(self, record: Any, key: Hashable, value: V) -> KeyRecord:
        """The current key's record, into which this value is then to be put.

        Args:
            record: of the current key, as it was shown.
            key: the current one, bare.
            value: not ``None``.
        """

    @abstractmethod
    def owned(self, record: Any, key: Hashable) -> V | None:
        """The current key's value for changes in place, which no freeze sees; ``None`` if there is none.

        To be changed before anything else is asked of the column.

        Args:
            record: of the current key, as it was shown.
            key: the current one, bare.
        """

    @abstractmethod
    def vacate(self, record: Any, key: Hashable) -> None:
        """The current key has no value any more.  Arguments as for ``owned``."""


class Records(ABC):
    """The records of a step.  All but what is frozen belongs to one thread.

    Args:
        single: whether keys are of one column, and looked up as that column's value.

    Attributes:
        key: the current one, bare.
        columns: one for each state.
    """

    columns: Sequence[StateColumn[Any]]

    def __init__(self, *, single: bool) -> None:
        self.single = single
        self.key: Any = None

    @abstractmethod
    def find(self, key: Hashable) -> KeyRecord:
        """The first record of a bare key."""

    @abstractmethod
    def begin(self) -> None:
        """A slice begins."""

    @abstractmethod
    def of(self, keys: Sequence[Hashable]) -> Iterator[KeyRecord | None]:
        """``begin``, and the first record of each bare key, looked up when it is taken; ``None``: ask ``find``."""

    def whole(self, key: Any) -> Key:
        """A bare key as a tuple."""
        return (key,) if self.single else key

    def bare(self, keys: Sequence[Any]) -> Sequence[Hashable]:
        """Whole keys as they are looked up."""
        return [key for (key,) in keys] if self.single else keys

    def bind(self, key: Hashable) -> None:
        """States are about this bare key from now on."""
        self.key = key
        self.show(self.find(key))

    def unbind(self, key: Hashable) -> None:
        """States are about no key from now on.  What stands for it raises when somebody wants its hash."""
        self.key = key
        self.show(unbound(key))

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Afterwards states are about the same key as before."""
        key, was_bound = self.key, not isinstance(self.columns[0].record, _Unbound)
        try:
            yield
        finally:
            if was_bound:
                self.bind(key)
            else:
                self.unbind(key)

    def show(self, record: Any) -> None:
        """Let the columns have this record and those that hang at it."""
        for column in self.columns:
            column.record = record
            record = record.next


def unbound(key: Hashable) -> Any:
    """The records of no key; see ``Records.unbind``."""
    return _Unbound(key)
