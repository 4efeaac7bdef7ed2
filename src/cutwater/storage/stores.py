"""From the user's ``checkpoint=`` setting to a store."""

from __future__ import annotations

import os

from cutwater.storage.base import Store

__all__ = ["open_store", "require_exactly_once"]


def open_store(uri: str | os.PathLike[str]) -> Store:
    """A store for a path or a ``file://`` URI; the folder is made if it is not there.

    Raises:
        ConfigError: another scheme, or not a folder.
        StorageError: the folder cannot be made or written.
    """
    ...


def require_exactly_once(store: Store) -> None:
    """Refuse a store that cannot be a fence.

    Raises:
        ConfigError: the store has no atomic create.
    """
    ...
