"""From the user's ``checkpoint=`` setting to a store."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from cutwater.config import FileAccess
from cutwater.errors import ConfigError
from cutwater.storage.store.base import Store
from cutwater.storage.store.keys import environment_seal
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.seal import Seal

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def open_store(uri: str | os.PathLike[str], seal: Seal | None = None, access: FileAccess = "owner") -> LocalStore:
    """A store for a path or a ``file://`` URI; the folder is made if it is not there.

    Args:
        seal: of what lies there; ``None``: that of the environment.
        access: who may read and write what is made there.

    Raises:
        ConfigError: another scheme, or not a folder.
        StorageError: the folder cannot be made or written.

    >>> open_store("s3://bucket/chk")
    Traceback (most recent call last):
    cutwater.errors.ConfigError: no store for 's3://bucket/chk'. Give a path or a file:// URI ...
    """
    text = os.fspath(uri)
    seal = environment_seal() if seal is None else seal
    found = _SCHEME.match(text)
    if not text.strip():
        raise ConfigError("the checkpoint directory is empty", hint="Give a path or a file:// URI.")
    if found is None:
        return LocalStore.open(text, seal, access)
    parts = urlsplit(text)
    if found[1].lower() != "file" or parts.netloc not in ("", "localhost"):
        raise ConfigError(
            f"no store for {text!r}",
            hint="Give a path or a file:// URI of a file system that driver and workers share (a mounted one will do).",
        )
    return LocalStore.open(unquote(parts.path), seal, access)


def require_exactly_once(store: Store) -> None:
    """Refuse a store that cannot be a fence.

    Raises:
        ConfigError: the store has no atomic create.
    """
    if not store.atomic_create:
        raise ConfigError(
            f"{store!r} has no atomic create: two drivers could both publish, and rows be committed twice",
            hint="Put the checkpoints on a file system with hard links, or run 'at_least_once' or 'none'.",
        )
