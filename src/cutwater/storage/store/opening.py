"""Stores by URI: the one place that knows which schemes there are, and what of a URI is the place of a store.

A store of another kind is one file, whose ``StoreOpener`` is registered for its scheme, or an entry point of an
installed package in the group ``cutwater.stores``, named as the scheme. All others pass URIs on as text and take them
apart with the functions here. A path without a scheme is one of the file system, and so is what is written down of such
a place: in logs and manifests lie paths, as they always did.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import unquote, urlsplit

from cutwater.config import FileAccess
from cutwater.entry_points import STORES, find
from cutwater.errors import ConfigError
from cutwater.storage.store.base import Store
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.seal import Seal, environment_seal

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


class StoreOpener(Protocol):
    """Opener of the stores of one scheme."""

    def __call__(self, uri: str, seal: Seal, access: FileAccess, *, make: bool) -> Store:
        """A store at a URI.

        Args:
            uri: absolute, as ``absolute_uri`` gives it.
            access: who may read and write what is made there.
            make: make the place durably, and try out what it can do; else nothing is looked at.

        Raises:
            ConfigError: the URI cannot name a place of this kind.
            StorageError: with ``make``, the place cannot be made or written.
        """
        ...


def _open_local(uri: str, seal: Seal, access: FileAccess, *, make: bool) -> LocalStore:
    return LocalStore.open(uri, seal, access) if make else LocalStore(uri, seal, access)


def _open_objects(uri: str, seal: Seal, access: FileAccess, *, make: bool) -> Store:
    from cutwater.storage.store.objects import open_objects  # who has no bucket does not wait for it

    return open_objects(uri, seal, access, make=make)


_OPENERS: dict[str, StoreOpener] = {
    "file": _open_local,
    "s3": _open_objects,
    "gs": _open_objects,
    "az": _open_objects,
}


def register_store(scheme: str, opener: StoreOpener) -> None:
    """Open the stores of a scheme with this opener from now on; workers unpickle stores, which must do the same."""
    _OPENERS[scheme.lower()] = opener


def open_store(uri: str | os.PathLike[str], seal: Seal | None = None, access: FileAccess = "owner") -> Store:
    """A store for a path or a URI; the place is made if it is not there.

    Args:
        uri: a path, or ``file://`` or another scheme that is registered.
        seal: of what lies there; ``None``: that of the environment.
        access: who may read and write what is made there.

    Raises:
        ConfigError: no such scheme, or not a folder.
        StorageError: the folder cannot be made or written.

    >>> open_store("hdfs://cluster/chk")
    Traceback (most recent call last):
    cutwater.errors.ConfigError: no store for 'hdfs://cluster/chk'. Give a path or a file:// URI ...
    """
    return _opener(uri)(absolute_uri(uri), environment_seal() if seal is None else seal, access, make=True)


def store_at(uri: str | os.PathLike[str], seal: Seal | None = None, access: FileAccess = "owner") -> Store:
    """A store of which nothing is made or looked at yet; see ``open_store``."""
    return _opener(uri)(absolute_uri(uri), environment_seal() if seal is None else seal, access, make=False)


def open_existing(uri: str | os.PathLike[str], seal: Seal | None = None) -> Store:
    """A store for reading: nothing is made or tried out, so a folder without write permission will do.

    Args:
        seal: of what lies there; ``None``: that of the environment.

    Raises:
        ConfigError: no such folder, or a scheme without a store.
    """
    store = store_at(uri, seal)
    if not store.exists():
        raise ConfigError(
            f"no folder {os.fspath(uri)!r}", hint="Give the directory that the job was started with as checkpoint."
        )
    return store


def another(store: Store, uri: str | os.PathLike[str]) -> Store:
    """Another place, of whichever scheme, with the seal and access of a store; nothing is made or looked at."""
    return store_at(uri, store.seal, store.access)


def absolute_uri(uri: str | os.PathLike[str]) -> str:
    """The same place for every process: an absolute path for one of the file system, else the URI without end slash.

    Raises:
        ConfigError: nothing is named, or there is no store for the scheme.

    >>> absolute_uri("file:///data/check%20points/")
    '/data/check points'
    """
    _opener(uri)
    if not os.fspath(uri).strip():
        raise ConfigError("the checkpoint directory is empty", hint="Give a path or a file:// URI.")
    return _absolute(os.fspath(uri))


def _absolute(text: str) -> str:
    found = _SCHEME.match(text)
    if found is None:
        return str(Path(text).absolute())
    parts = urlsplit(text)
    if found[1].lower() == "file" and parts.netloc in ("", "localhost"):
        return str(Path(unquote(parts.path)))
    return text.rstrip("/")


def joined(uri: str, *names: str) -> str:
    """The place of these names, one in the other, below a place.

    >>> joined("/data/chk", "delays", "input/rides"), joined("s3://bucket/chk", "delays")
    ('/data/chk/delays/input/rides', 's3://bucket/chk/delays')
    """
    return "/".join([uri.rstrip("/"), *names])


def parted(uri: str | os.PathLike[str]) -> tuple[str, str]:
    """The place that something lies in, and its name there; the name is empty for a root.

    >>> parted("/data/chk/delays"), parted("s3://bucket/chk"), parted("s3://bucket")
    (('/data/chk', 'delays'), ('s3://bucket', 'chk'), ('s3://bucket', ''))
    """
    whole = _absolute(os.fspath(uri))
    found = _SCHEME.match(whole)
    above, _, name = whole.rpartition("/")
    if found is None:
        return above or "/", name
    return (above, name) if above.rstrip("/") != found[0].rstrip("/") else (whole, "")


def require_exactly_once(store: Store) -> None:
    """Refuse a store that cannot be a fence."""
    if not store.atomic_create:
        raise ConfigError(
            f"{store!r} has no atomic create: two drivers could both publish, and rows be committed twice",
            hint="Put the checkpoints on a file system with hard links, or run 'at_least_once' or 'none'.",
        )


def _installed(scheme: str) -> StoreOpener | None:
    """The opener that an installed package provides; it is kept.

    Raises:
        ConfigError: several packages do, or it cannot be imported.
    """
    found = find(STORES, scheme)
    if found is None:
        return None
    opener = found.load()
    if not callable(opener):
        raise ConfigError(
            f"the package {found.package} {found.version} provides a store for {scheme}:// which is a "
            f"{type(opener).__name__}",
            hint="It must be a StoreOpener: a function of uri, seal, access and make.",
        )
    register_store(scheme, cast("StoreOpener", opener))
    return cast("StoreOpener", opener)


def _opener(uri: str | os.PathLike[str]) -> StoreOpener:
    found = _SCHEME.match(os.fspath(uri))
    scheme = found[1].lower() if found is not None else "file"
    opener = _OPENERS.get(scheme) or _installed(scheme)
    local = found is not None and found[1].lower() == "file"
    if opener is None or (local and urlsplit(os.fspath(uri)).netloc not in ("", "localhost")):
        raise ConfigError(
            f"no store for {os.fspath(uri)!r}",
            hint="Give a path or a file:// URI of a file system that driver and workers share (a mounted one will do), "
            "or a bucket, s3://.",
        )
    return opener
