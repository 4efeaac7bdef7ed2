"""A store as object stores are, opened by its own scheme: whole objects under flat names in a bucket, no renames.

``elsewhere://BUCKET/prefix`` with the quoted path of a folder as bucket.  Objects lie there under the hash of their
name, behind a header, so that nobody finds or reads them who does not ask the store.  Whoever unpickles one imports
this module, which registers the scheme.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import quote, unquote, urlsplit

from cutwater.config import FileAccess
from cutwater.errors import ConfigError, CorruptSnapshotError, StorageError
from cutwater.storage.store.base import Store
from cutwater.storage.store.no_follow import check_relative
from cutwater.storage.store.opening import register_store
from cutwater.storage.store.seal import PLAIN, Seal

_FOLDER = "\n"
"""Name of the object that marks a folder, in it."""


def elsewhere(bucket: Path, prefix: str = "chk") -> str:
    """The URI of a prefix in a bucket."""
    return f"elsewhere://{quote(str(bucket), safe='')}/{prefix}"


class ElsewhereStore:
    """Implements ``Store``."""

    atomic_create = appends = True
    look_s = 0.0

    def __init__(self, uri: str, seal: Seal = PLAIN, access: FileAccess = "owner") -> None:
        parts = urlsplit(uri)
        self.uri, self.seal, self.access = uri, seal, access
        self.bucket, self._prefix = unquote(parts.netloc), parts.path.strip("/")
        self._names: dict[str, str] = {}
        """By file of the bucket: its object's name, which never changes."""

    def __reduce__(self) -> tuple[object, ...]:
        return ElsewhereStore, (self.uri, PLAIN, self.access)

    def __repr__(self) -> str:
        return f"ElsewhereStore({self.uri!r})"

    def sealed(self, seal: Seal) -> ElsewhereStore:
        return ElsewhereStore(self.uri, seal, self.access)

    # -- objects

    def _key(self, path: str) -> str:
        return "/".join(part for part in (self._prefix, *check_relative(path)) if part)

    def _file(self, key: str) -> str:
        return os.path.join(self.bucket, hashlib.sha256(key.encode()).hexdigest())

    def _keys(self, folder: str) -> list[str]:
        """Below a folder, relative to it; with the marks of folders."""
        above = self._key(folder)
        start = f"{above}/" if above else ""
        try:
            files = os.listdir(self.bucket)
        except FileNotFoundError:
            return []
        return [key[len(start) :] for file in files if (key := self._name(file)).startswith(start)]

    def _name(self, file: str) -> str:
        name = self._names.get(file)
        if name is None:
            try:
                with open(os.path.join(self.bucket, file), "rb") as opened:
                    name = opened.read(int.from_bytes(opened.read(4), "big")).decode()
            except FileNotFoundError:
                return ""
            if file.startswith("."):
                return ""  # an upload that is not whole
            self._names[file] = name
        return name

    def _upload(self, key: str, data: bytes) -> str:
        temporary = os.path.join(self.bucket, f".{os.getpid()}-{threading.get_ident()}-{os.urandom(4).hex()}")
        Path(temporary).write_bytes(_header(key) + data)
        return temporary

    # -- Store

    def create(self, path: str, data: bytes) -> bool:
        temporary = self._upload(self._key(path), data)
        try:
            os.link(temporary, self._file(self._key(path)))
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        return True

    def overwrite(self, path: str, data: bytes) -> None:
        os.replace(self._upload(self._key(path), data), self._file(self._key(path)))

    def write(self, path: str) -> BinaryIO:
        if not self.create(path, b""):
            raise StorageError(f"{path} exists already: no path is ever written twice")
        return cast(BinaryIO, io.FileIO(self._file(self._key(path)), "ab"))

    def sync(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())

    def close_durably(self, file: BinaryIO) -> None:
        self.sync(file)
        file.close()

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        key = self._key(path)
        try:
            data = Path(self._file(key)).read_bytes()[len(_header(key)) :]
        except FileNotFoundError:
            raise CorruptSnapshotError(f"{path} is missing in {self.uri}") from None
        wanted = max(0, len(data) - offset) if length is None else length
        if len(data[offset : offset + wanted]) < wanted:
            raise CorruptSnapshotError(
                f"{path} is too short: {wanted} bytes expected at offset {offset}, {len(data)} there"
            )
        return data[offset : offset + wanted]

    def list(self, prefix: str = "") -> list[str]:
        start = f"{prefix.strip('/')}/" if prefix else ""
        return sorted(start + key for key in self._keys(prefix) if not key.endswith(_FOLDER))

    def names(self, folder: str = "") -> list[str]:
        return sorted({key.partition("/")[0] for key in self._keys(folder)} - {_FOLDER})

    def exists(self, folder: str = "") -> bool:
        return bool(self._keys(folder)) if folder else os.path.isdir(self.bucket)

    def make_folder(self, path: str) -> None:
        self.create(f"{path}/{_FOLDER}", b"")

    def delete(self, path: str) -> None:
        if not check_relative(path):
            raise StorageError("refused to delete the whole checkpoint directory")
        for key in (path, *(f"{path}/{key}" for key in self._keys(path))):
            Path(self._file(self._key(key))).unlink(missing_ok=True)

    def delete_files(self, paths):
        for path in paths:
            self.delete(path)

    def delete_empty(self, folder: str) -> bool:
        if self.names(folder):
            return False
        Path(self._file(self._key(f"{folder}/{_FOLDER}"))).unlink(missing_ok=True)
        return True

    def local_folder(self, path: str = "") -> str:
        raise ConfigError(f"{self.uri}/{path} is no folder of a file system", hint="Choose a directory for it.")

    def shares_device(self, directory: str) -> bool:
        return False

    def sweep(self, prefix: str = "") -> int:
        return 0


def _header(key: str) -> bytes:
    return len(key.encode()).to_bytes(4, "big") + key.encode()


def _open(uri: str, seal: Seal, access: FileAccess, *, make: bool) -> Any:
    store: Store = ElsewhereStore(uri, seal, access)
    if make:
        os.makedirs(unquote(urlsplit(uri).netloc), exist_ok=True)
    return store


register_store("elsewhere", _open)
