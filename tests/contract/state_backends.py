"""The state backends that the contract suites run over: a new one is a line here."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec

import pytest

from cutwater.state.disk.rocks import OrderedStore, RocksStore, Write


class SortedStore:
    """The least that a store may be: sorted lists, copied for each snapshot."""

    def __init__(self, content: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self._content = dict(content)
        self.tables = 0
        self.closed = False

    def get_many(self, keys: Iterable[bytes]) -> list[bytes | None]:
        return [self._content.get(key) for key in keys]

    def write(self, writes: Sequence[Write]) -> None:
        for key, value in writes:
            if value is None:
                self._content.pop(key, None)
            else:
                self._content[key] = value

    def delete_range(self, begin: bytes, end: bytes) -> None:
        self._content = {key: value for key, value in self._content.items() if not begin <= key < end}

    def snapshot(self) -> SortedSnapshot:
        return SortedSnapshot(self._content)

    def close(self) -> None:
        self.closed = True


class SortedSnapshot:
    def __init__(self, content: dict[bytes, bytes]) -> None:
        self._keys, self._content = sorted(content), dict(content)

    def items(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key in self._keys[bisect.bisect_left(self._keys, begin) : bisect.bisect_left(self._keys, end)]:
            yield key, self._content[key]

    def get_many(self, keys: Iterable[bytes]) -> Iterator[bytes | None]:
        return (self._content.get(key) for key in keys)

    def release(self) -> None:
        self._keys, self._content = [], {}


Open = Callable[[int], OrderedStore]

STORES: dict[str, Open] = {"rocksdb": RocksStore, "sorted lists": lambda memory_bytes: SortedStore()}
"""What keeps that which memory does not hold, by the memory it may use."""

NEEDS = {"rocksdb": "rocksdict"}
"""Packages that are optional."""


def backend(name: str) -> object:
    """A parameter of a test; skipped where the package is missing."""
    missing = name in NEEDS and find_spec(NEEDS[name]) is None
    return pytest.param(name, id=name, marks=pytest.mark.skipif(missing, reason=f"{name} is not installed"))


BACKENDS = [backend(name) for name in ("memory", *STORES)]
