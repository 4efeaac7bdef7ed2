"""The seam of a state backend: bytes by key, in the order of the keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

Write: TypeAlias = tuple[bytes, bytes | None]
"""A key and what it is set to; ``None``: it is deleted."""


class StoreSnapshot(Protocol):
    """An ``OrderedStore`` as it was at one instant, for another thread; one pass over it at a time."""

    def items(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys from ``begin`` to before ``end``, with their values, in order; nothing once it is released.

        Raises:
            StorageError: the disk fails.
        """
        ...

    def get_many(self, keys: Iterable[bytes]) -> Iterator[bytes | None]:
        """The values of some keys, ``None`` for one that was not there.

        Raises:
            StorageError: the disk fails.
        """
        ...

    def release(self) -> None:
        """Forget what is kept for this snapshot."""
        ...


class OrderedStore(Protocol):
    """The place of what memory does not hold of the tables of a step.  Used by one thread; its snapshots by others.

    It is scratch: what makes state durable is the snapshot in the checkpoint directory.
    """

    tables: int
    """Number of tables in it: the number of the next one, which begins its keys."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values, ``None`` for a key that is not there.

        Raises:
            StorageError: the disk fails.
        """
        ...

    def write(self, writes: Sequence[Write]) -> None:
        """All of it, in order.

        Raises:
            StorageError: the disk is full, or fails.
        """
        ...

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """All keys from ``begin`` to before ``end``.

        Raises:
            StorageError: the disk is full, or fails.
        """
        ...

    def snapshot(self) -> StoreSnapshot:
        """The content as it is now, at no cost that grows with it; later writes are not seen."""
        ...

    def close(self) -> None:
        """Give it up, with all that lies in it; snapshots must be released before."""
        ...
