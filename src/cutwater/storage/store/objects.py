"""A checkpoint directory in a bucket: ``s3://bucket/prefix``, and ``gs://`` and ``az://`` by the same library.

Whole objects under flat names, no renames and no appends.  An entry of the job log is a conditional put
(``If-None-Match: *``), which of two creators of one name lets exactly one succeed.  Servers that ignore the condition
are refused where a place is made: there two drivers could both own a job.

Endpoint, region and credentials come from the environment, by the names that AWS tools have, so that they are in no
URI, plan, log or pickle.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterable
from functools import cached_property
from typing import BinaryIO, cast
from urllib.parse import urlsplit

from cutwater.config import FileAccess
from cutwater.errors import ConfigError, CorruptSnapshotError, StorageError
from cutwater.storage.store.bucket import PATIENCE, Bucket, Patience, Scheme
from cutwater.storage.store.no_follow import check_relative
from cutwater.storage.store.object_file import ObjectFile
from cutwater.storage.store.seal import PLAIN, Seal

SCHEMES = ("s3", "gs", "az")
FOLDER_MARK = ".folder"
"""Object that keeps a folder there when nothing else is in it."""
_READ_BYTES_MAX = 1 << 28
"""Largest object that is read whole."""
_SETTINGS = ("AWS_", "GOOGLE_", "AZURE_")
_buckets: dict[tuple[object, ...], Bucket] = {}
_lock = threading.Lock()


def shared_bucket(scheme: Scheme, name: str, patience: Patience = PATIENCE) -> Bucket:
    """The bucket of this process and environment, with its connections.

    Raises:
        ConfigError: as ``Bucket``.
    """
    settings = sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS))
    # Of this process: what a connection belongs to does not survive a fork.
    key = (os.getpid(), scheme, name, patience, hash(tuple(settings)))
    with _lock:
        if key not in _buckets:
            _buckets[key] = Bucket(scheme, name, patience)
        return _buckets[key]


def bucket_and_prefix(uri: str) -> tuple[Scheme, str, str]:
    """What a URI names.

    Raises:
        ConfigError: no bucket, or things that are no part of a name.

    >>> bucket_and_prefix("s3://data/chk/delays")
    ('s3', 'data', 'chk/delays')
    >>> bucket_and_prefix("s3://key:secret@data/chk")
    Traceback (most recent call last):
    cutwater.errors.ConfigError: an s3:// URI names a bucket and a prefix, and nothing else. Credentials and ...
    """
    scheme, _, rest = uri.partition("://")
    name, _, prefix = rest.partition("/")
    parts = urlsplit(uri)
    if not name or parts.netloc != name or any(mark in name for mark in "@:?#") or "?" in prefix:
        raise ConfigError(
            f"an {scheme.lower()}:// URI names a bucket and a prefix, and nothing else",
            hint="Credentials and endpoint come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
            "AWS_SHARED_CREDENTIALS_FILE, AWS_ENDPOINT_URL, AWS_REGION.",
        )
    return cast(Scheme, scheme.lower()), name, "/".join(check_relative(prefix.strip("/")))


def is_object(path: str) -> bool:
    """True if a path is the URI of something in a bucket.

    >>> is_object("s3://data/in"), is_object("/data/in"), is_object("file:///data/in")
    (True, False, False)
    """
    return path.partition("://")[0].lower() in SCHEMES and "://" in path


def object_at(path: str) -> tuple[Bucket, str]:
    """The bucket and key of an object that a listing has told."""
    scheme, _, rest = path.partition("://")
    name, _, key = rest.partition("/")
    return shared_bucket(cast(Scheme, scheme.lower()), name), key


class ObjectStore:
    """Implements ``Store``.

    Args:
        uri: a bucket, and a prefix in it.
        seal, access: see ``Store``; who may read objects is the bucket's matter.
        patience: how long requests may take.

    Raises:
        ConfigError: it is no such URI.
    """

    atomic_create = True
    appends = False
    look_s = 3.0

    def __init__(
        self, uri: str, seal: Seal = PLAIN, access: FileAccess = "owner", patience: Patience = PATIENCE
    ) -> None:
        self._scheme: Scheme
        self._scheme, self._name, self._prefix = bucket_and_prefix(uri)
        self.uri = f"{self._scheme}://{self._name}/{self._prefix}".rstrip("/")
        self.seal = seal
        self.access: FileAccess = access
        self._patience = patience

    @cached_property
    def _bucket(self) -> Bucket:
        return shared_bucket(self._scheme, self._name, self._patience)

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectStore, (self.uri, PLAIN, self.access, self._patience)

    def __repr__(self) -> str:
        return f"ObjectStore({self.uri!r})"

    def sealed(self, seal: Seal) -> ObjectStore:
        return ObjectStore(self.uri, seal, self.access, self._patience)

    def connect(self) -> None:
        """See to it that requests can be made; none is yet.

        Raises:
            ConfigError: the library is missing, or the environment makes no sense to it.
        """
        assert self._bucket

    def make(self) -> None:
        """Make the place, and try out whether a name can be taken twice.

        Raises:
            ConfigError: it can: the server ignores the condition.
            StorageError: there is no such bucket, or it cannot be written.
        """
        mark = self._key(FOLDER_MARK)
        if self._bucket.create(mark, b"") and self._bucket.create(mark, b""):
            self._bucket.delete([mark])
            raise ConfigError(
                f"the server of {self.uri} ignores If-None-Match: it let one object be created twice, so that two "
                "drivers could both own the job",
                hint="Put the checkpoints into a store with conditional writes, such as Amazon S3, or a file system.",
            )

    def _key(self, path: str) -> str:
        return "/".join([*([self._prefix] if self._prefix else []), *check_relative(path)])

    def create(self, path: str, data: bytes) -> bool:
        return self._bucket.create(self._key(path), data)

    def overwrite(self, path: str, data: bytes) -> None:
        self._bucket.put(self._key(path), data)

    def write(self, path: str) -> BinaryIO:
        """See ``Store.write``.  The object is there with ``close_durably``, which finds one that exists already."""
        return cast(BinaryIO, ObjectFile(self._bucket, self._key(path)))

    def sync(self, file: BinaryIO) -> None:
        """Make the object; it cannot be written on (``appends``)."""
        cast(ObjectFile, file).finish()

    def close_durably(self, file: BinaryIO) -> None:
        try:
            self.sync(file)
        finally:
            cast(io.RawIOBase, file).close()

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        key = self._key(path)
        if offset == 0 and length is None:
            return self._bucket.get(key, _READ_BYTES_MAX)
        if length is not None and length > 0 and offset >= 0:
            data = self._bucket.get_range(key, offset, length)
            if len(data) == length:
                return data
        found = self._bucket.info(key)
        if found is None:
            raise CorruptSnapshotError(f"{self._bucket.address(key)} is missing")
        wanted = max(0, found.size - offset) if length is None else length
        if wanted < 0 or offset < 0 or offset + wanted > found.size:
            raise CorruptSnapshotError(
                f"{self._bucket.address(key)} is too short: {wanted} bytes expected at offset {offset}, "
                f"{max(0, found.size - offset)} there"
            )
        return self._bucket.get_range(key, offset, wanted)

    def exists(self, folder: str = "") -> bool:
        return self._bucket.any_below(self._key(folder))

    def list(self, prefix: str = "") -> list[str]:
        start = f"{self._prefix}/" if self._prefix else ""
        found = (info.key[len(start) :] for info in self._bucket.objects(self._key(prefix)))
        return [path for path in found if path.rpartition("/")[2] != FOLDER_MARK]

    def names(self, folder: str = "") -> list[str]:
        return [name for name in self._bucket.names(self._key(folder)) if name != FOLDER_MARK]

    def make_folder(self, path: str) -> None:
        self._bucket.create(self._key(f"{path}/{FOLDER_MARK}"), b"")

    def delete(self, path: str) -> None:
        """See ``Store.delete``.  What is being written into a folder appears after it; the next delete takes it."""
        if not check_relative(path):
            raise StorageError(f"refused to delete the whole checkpoint directory {self.uri}")
        key = self._key(path)
        self._bucket.delete([key, *(info.key for info in self._bucket.objects(key))])

    def delete_files(self, paths: Iterable[str]) -> None:
        self._bucket.delete(map(self._key, paths))

    def copy(self, path: str, another: str) -> bool:
        """Make an object of the same content, in the bucket; ``False`` if there is none to copy."""
        return self._bucket.copy(self._key(path), self._key(another))

    def is_object(self, path: str) -> bool:
        """True if there is an object at a path."""
        return self._bucket.info(self._key(path)) is not None

    def delete_empty(self, folder: str) -> bool:
        key = self._key(folder)
        found = self._bucket.names(key)
        if set(found) - {FOLDER_MARK}:
            return False
        self._bucket.delete([f"{key}/{FOLDER_MARK}"] if found else [])
        return True

    def local_folder(self, path: str = "") -> str:
        raise ConfigError(f"{self.uri}/{path} is no folder of a file system", hint="Choose a directory for it.")

    def shares_device(self, directory: str) -> bool:
        """False: a bucket is on no device of this machine."""
        return False

    def sweep(self, prefix: str = "") -> int:
        """Nothing: a create leaves nothing behind; uploads that nobody ended are the bucket's rule to remove."""
        return 0


def open_objects(uri: str, seal: Seal, access: FileAccess, *, make: bool) -> ObjectStore:
    """See ``StoreOpener``."""
    store = ObjectStore(uri, seal, access)
    store.connect()
    if make:
        store.make()
    return store
