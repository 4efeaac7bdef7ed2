"""Object state: Python values by key, frozen by redirecting writes.

Theory of operation.  The values lie in layers, a base below overlays.  A freeze puts an empty overlay on top and hands
out the layers below it, which nobody changes from then on: later writes go to the top, and a list or map that is to be
changed in place is copied there first.  So a freeze costs nothing per key, and a key that is changed afterwards costs
one copy.  Layers that no unreleased freeze reads any more are merged at the next freeze.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar, cast

__all__ = ["FrozenObjects", "ObjectTable"]

V = TypeVar("V")


class _Gone:
    """Stands in an overlay for a key that was removed."""


_GONE: Final = _Gone()


class ObjectTable(Generic[V]):
    """Values by key.

    Args:
        copy: makes a copy of a value that may then be changed in place; not needed for values that cannot change.

    >>> table = ObjectTable(list)
    >>> table.put(("a",), [1])
    >>> frozen = table.freeze()
    >>> table.own(("a",)).append(2)
    >>> table.get(("a",)), dict(frozen.items())
    ([1, 2], {('a',): [1]})
    """

    __slots__ = ("_below", "_copy", "_frozen", "_top")

    def __init__(self, copy: Callable[[V], V] | None = None) -> None:
        self._copy = copy
        self._below: list[dict[Hashable, V | _Gone]] = []
        """Layers that a freeze may be reading, the oldest first."""
        self._top: dict[Hashable, V | _Gone] = {}
        self._frozen: list[FrozenObjects[V]] = []

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

    def freeze(self) -> FrozenObjects[V]:
        """What is in the table now.  ``release`` it when it is no longer read."""
        self._frozen = [frozen for frozen in self._frozen if not frozen.released]
        if not self._frozen:
            self._merge()
        if self._top or not self._below:
            self._below.append(self._top)
            self._top = {}
        frozen = FrozenObjects(tuple(self._below))
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


class FrozenObjects(Generic[V]):
    """An ``ObjectTable`` as it was at one instant, for another thread."""

    __slots__ = ("_layers", "released")

    def __init__(self, layers: tuple[dict[Hashable, V | _Gone], ...]) -> None:
        self._layers = layers
        self.released = False

    def items(self) -> Iterator[tuple[tuple[Any, ...], V]]:
        """Key and value of everything, in no particular order."""
        return _items(self._layers)

    def release(self) -> None:
        """The table may change these layers again."""
        self._layers = ()
        self.released = True


def _items(layers: tuple[dict[Hashable, V | _Gone], ...]) -> Iterator[tuple[tuple[Any, ...], V]]:
    merged = layers[0] if len(layers) == 1 else {}
    if len(layers) > 1:
        for layer in layers:
            merged.update(layer)
    for key, value in merged.items():
        if value is not _GONE:
            yield cast("tuple[Any, ...]", key), cast(V, value)
