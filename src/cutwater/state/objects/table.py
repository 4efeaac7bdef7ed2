"""Object state: Python values by key, frozen by redirecting writes.

Theory of operation.  The values lie in layers, a base below overlays.  A freeze puts an empty overlay on top and hands
out the layers below it, which nobody changes from then on: later writes go to the top, and a list or map that is to be
changed in place is copied there first.  So a freeze costs nothing per key, and a key that is changed afterwards costs
one copy.  Layers that no unreleased freeze reads any more are merged at the next freeze.

An overlay holds just what changed between two freezes.  So whoever keeps track of changes keeps the overlays, merged or
not, until nobody asks any more what changed since the freeze below them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, cast

from cutwater.state.table.intervals import RESTORED, History, Intervals

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)

Key: TypeAlias = tuple[Any, ...]
"""The values of the key columns."""


class FrozenObjects(Protocol[V_co]):
    """Values by key as they were at one instant.  Used by the snapshot thread, while the table goes on."""

    @property
    def size(self) -> int:
        """Number of keys, roughly."""
        ...

    def items(self) -> Iterator[tuple[Key, V_co]]:
        """Key and value of everything, in no particular order."""
        ...

    @property
    def tracked(self) -> bool:
        """True if it may know what changed."""
        ...

    def changed(self, since: int) -> Mapping[Key, V_co | None] | None:
        """Keys that may have changed since the freeze for a completed checkpoint, with what they had at this one.

        ``None`` in the place of a value: the key has gone.  ``None`` for the whole: not known.  Changes before that
        checkpoint are forgotten: nobody asks for them any more.

        Args:
            since: the checkpoint, or ``RESTORED``.
        """
        ...

    def release(self) -> None:
        """Nobody reads it any more."""
        ...


class KeyedObjects(Protocol[V]):
    """The contract of a table of values by key: what states of user logic and timers are kept in.

    All but what ``freeze`` returns belongs to one thread.  A freeze copies nothing that grows with the number of keys.
    """

    def get(self, key: Hashable) -> V | None:
        """The value, not to be changed in place; ``None`` if there is none."""
        ...

    def own(self, key: Hashable) -> V | None:
        """The value for changes in place, which no freeze sees; ``None`` if there is none.

        To be changed before anything else is asked of the table.
        """
        ...

    def get_many(self, keys: Sequence[Hashable]) -> list[V | None]:
        """``get`` of many keys."""
        ...

    def put(self, key: Hashable, value: V) -> None: ...

    def put_many(self, keys: Iterable[Hashable], values: Iterable[V]) -> None:
        """``put`` of many keys."""
        ...

    def remove(self, key: Hashable) -> None:
        """Forget a key, if it is there."""
        ...

    def track(self, *, restored: bool = False) -> None:
        """Keep track of changes from now (after a restore) or from the next freeze on: a frozen table tells them."""
        ...

    def freeze(self, checkpoint_id: int | None = None) -> FrozenObjects[V]:
        """The content of the table now.  ``release`` it when it is no longer read.

        Args:
            checkpoint_id: what the freeze is for, where changes are kept track of.
        """
        ...

    def __len__(self) -> int: ...


class _Gone:
    """Stands in an overlay for a key that was removed."""


_GONE: Final = _Gone()
_NOTHING: History[Collection[Hashable]] = History(None, ())


class ObjectTable(Generic[V]):
    """Values by key, in memory: see ``KeyedObjects``.

    Args:
        copy: makes a copy of a value that may then be changed in place; not needed for values that cannot change.

    >>> table = ObjectTable(list)
    >>> table.put(("a",), [1])
    >>> frozen = table.freeze()
    >>> table.own(("a",)).append(2)
    >>> table.get(("a",)), dict(frozen.items())
    ([1, 2], {('a',): [1]})
    """

    __slots__ = ("_below", "_copy", "_frozen", "_log", "_top")

    def __init__(self, copy: Callable[[V], V] | None = None) -> None:
        self._copy = copy
        self._below: list[dict[Hashable, V | _Gone]] = []
        """Layers that a freeze may be reading, the oldest first."""
        self._top: dict[Hashable, V | _Gone] = {}
        self._frozen: list[_FrozenTable[V]] = []
        self._log: Intervals[Collection[Hashable]] | None = None

    def get(self, key: Hashable) -> V | None:
        """The value, not to be changed in place; ``None`` if there is none."""
        found = self._top.get(key)
        if found is None:
            for layer in reversed(self._below):
                found = layer.get(key)
                if found is not None:
                    break
        return None if found is _GONE else cast("V | None", found)

    def own(self, key: Hashable) -> V | None:
        """The value for changes in place, which no freeze sees; ``None`` if there is none."""
        found = self._top.get(key)
        if found is None and (below := self.get(key)) is not None:
            found = self._top[key] = self._copy(below) if self._copy is not None else below
        return None if found is _GONE else cast("V | None", found)

    def get_many(self, keys: Sequence[Hashable]) -> list[V | None]:
        """``get`` of many keys."""
        found: list[V | _Gone | None] = list(map(self._top.get, keys))
        for layer in reversed(self._below):
            missing = [place for place, value in enumerate(found) if value is None]
            for place, value in zip(missing, map(layer.get, [keys[place] for place in missing]), strict=True):
                found[place] = value
        if self._below:  # only above other layers does anything stand for what was removed
            return [None if value is _GONE else cast("V | None", value) for value in found]
        return cast("list[V | None]", found)

    def put(self, key: Hashable, value: V) -> None:
        self._top[key] = value

    def put_many(self, keys: Iterable[Hashable], values: Iterable[V]) -> None:
        """``put`` of many keys."""
        self._top.update(zip(keys, values, strict=True))

    def remove(self, key: Hashable) -> None:
        if any(key in layer for layer in self._below):
            self._top[key] = _GONE
        else:
            self._top.pop(key, None)

    def track(self, *, restored: bool = False) -> None:
        """See ``KeyedObjects``."""
        self._log = Intervals(_joined, RESTORED if restored else None)
        if restored:
            self._below.append(self._top)  # what changes from now on is above it
            self._top = {}

    def freeze(self, checkpoint_id: int | None = None) -> FrozenObjects[V]:
        """See ``KeyedObjects``."""
        self._frozen = [frozen for frozen in self._frozen if not frozen.released]
        changed = self._top or ()  # an empty top goes on
        if not self._frozen:
            self._merge()
        if self._top or not self._below:
            self._below.append(self._top)
            self._top = {}
        history = _NOTHING if self._log is None or checkpoint_id is None else self._log.cut(checkpoint_id, changed)
        frozen = _FrozenTable(tuple(self._below), self._log, history)
        self._frozen.append(frozen)
        return frozen

    def __len__(self) -> int:
        if not self._below:
            return len(self._top)
        return sum(1 for _ in _items((*self._below, self._top)))

    def _merge(self) -> None:
        """Bring all layers into one.  The older ones are no longer read by anybody."""
        if not self._below:
            return
        base, *overlays = [*self._below, self._top]
        for overlay in overlays:
            for key, value in overlay.items():
                if value is _GONE:
                    base.pop(key, None)
                else:
                    base[key] = value
        self._below, self._top = [], base


class _FrozenTable(Generic[V]):
    """An ``ObjectTable`` as it was at one instant."""

    __slots__ = ("_history", "_layers", "_log", "released")

    def __init__(
        self,
        layers: tuple[dict[Hashable, V | _Gone], ...],
        log: Intervals[Collection[Hashable]] | None,
        history: History[Collection[Hashable]],
    ) -> None:
        self._layers = layers
        self._log = log
        self._history = history
        self.released = False

    @property
    def size(self) -> int:
        return max(map(len, self._layers), default=0)

    def items(self) -> Iterator[tuple[Key, V]]:
        return _items(self._layers)

    @property
    def tracked(self) -> bool:
        return self._history is not _NOTHING

    def changed(self, since: int) -> Mapping[Key, V | None] | None:
        if self._log is None or (intervals := self._history.since(since)) is None:
            return None
        self._log.completed(since)
        keys = dict.fromkeys(cast(Key, key) for interval in intervals for key in interval)
        return {key: self._get(key) for key in keys}

    def _get(self, key: Key) -> V | None:
        for layer in reversed(self._layers):
            found = layer.get(key)
            if found is not None:
                return None if found is _GONE else cast(V, found)
        return None

    def release(self) -> None:
        """The table may change these layers again."""
        self._layers = ()
        self._history = _NOTHING
        self.released = True


def _joined(first: Collection[Hashable], second: Collection[Hashable]) -> Collection[Hashable]:
    return {*first, *second}


def _items(layers: tuple[dict[Hashable, V | _Gone], ...]) -> Iterator[tuple[Key, V]]:
    merged = layers[0] if len(layers) == 1 else {}
    if len(layers) > 1:
        for layer in layers:
            merged.update(layer)
    for key, value in merged.items():
        if value is not _GONE:
            yield cast(Key, key), cast(V, value)
