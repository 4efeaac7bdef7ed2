"""Bytes by key on the worker's disk, for state that need not fit in memory: the interface, and RocksDB behind it.

The database is scratch: what makes state durable is the snapshot in the checkpoint directory.  So there is no
write-ahead log and nothing is synced.  It lies in a private folder that its process holds a lock on; whoever opens the
next database removes the folders whose process is gone, however it ended.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from cutwater.errors import ConfigError, StorageError
from cutwater.state.disk.private_folder import PrivateFolder

if TYPE_CHECKING:
    from rocksdict import Rdict, RdictIter


Write: TypeAlias = tuple[bytes, bytes | None]
"""A key and what it is set to; ``None``: it is deleted."""


def two_bytes(number: int) -> bytes:
    """The number of a table, or of a key group, in a key of an ``OrderedStore``."""
    return number.to_bytes(2, "big")


class StoreSnapshot(Protocol):
    """An ``OrderedStore`` as it was at one instant, for another thread; one pass over it at a time.

    Raises:
        StorageError: of all methods: the disk fails.
    """

    def items(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys from ``begin`` to before ``end``, with their values, in order; nothing once it is released."""
        ...

    def get_many(self, keys: Iterable[bytes]) -> Iterator[bytes | None]:
        """The values of some keys, ``None`` for one that was not there."""
        ...

    def release(self) -> None:
        """Forget what is kept for this snapshot."""
        ...


class OrderedStore(Protocol):
    """The place of what memory does not hold of the tables of a step.  Used by one thread; its snapshots by others.

    Raises:
        StorageError: of all methods: the disk is full, or fails.
    """

    tables: int
    """Number of tables in it: the number of the next one, which begins its keys."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values, ``None`` for a key that is not there."""
        ...

    def write(self, writes: Sequence[Write]) -> None:
        """All of it, in order."""
        ...

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """All keys from ``begin`` to before ``end``."""
        ...

    def snapshot(self) -> StoreSnapshot:
        """The content as it is now, at no cost that grows with it; later writes are not seen."""
        ...

    def close(self) -> None:
        """Give it up, with all that lies in it; snapshots must be released before."""
        ...


_MIB: Final = 1 << 20
_OPEN_FILES: Final = 256


def require_rocksdb() -> Any:
    """The package ``rocksdict``.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import rocksdict
    except ImportError:
        raise ConfigError(
            "state_backend 'rocksdb' needs the package rocksdict, which is not installed",
            hint="Install cutwater[rocksdb] on the driver and all workers, or leave state_backend at 'memory'.",
        ) from None
    return rocksdict


class RocksStore:
    """An ``OrderedStore`` of RocksDB.

    Args:
        folder: where its private folder is made; by default the directory for temporary files.

    Raises:
        ConfigError: the package is not installed.
        StorageError: the folder cannot be made, or the database not be opened.
    """

    def __init__(self, memory_bytes: int, folder: str | None = None) -> None:
        self._rocks = require_rocksdb()
        self._parent = os.path.join(folder or tempfile.gettempdir(), f"cutwater-state-{os.getuid()}")
        with _reported("opened", self._parent):
            private = PrivateFolder(self._parent)
            self.folder = private.path
            remove = weakref.finalize(self, private.remove)  # also when the process ends, or forgets it
            try:
                self._db: Rdict = self._open(memory_bytes)
            except BaseException:
                remove()
                raise
        self._finally = remove
        self.tables = 0

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with _reported("read", self._parent):
            return self._db.get(list(keys)) or []

    def write(self, writes: Sequence[Write]) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        put, delete = batch.put, batch.delete
        for key, value in writes:
            if value is None:
                delete(key)
            else:
                put(key, value)
        with _reported("written", self._parent):
            self._db.write(batch, self._unlogged)

    def delete_range(self, begin: bytes, end: bytes) -> None:
        with _reported("written", self._parent):
            self._db.delete_range(begin, end, self._unlogged)

    def snapshot(self) -> RocksSnapshot:
        options = self._rocks.ReadOptions()
        options.fill_cache(False)
        return RocksSnapshot(self._db.iter(options))

    def close(self) -> None:
        if not self._finally.alive:
            return
        with contextlib.suppress(Exception):
            self._db.cancel_all_background(True)
        del self._db  # its own close would first write what nobody needs any more
        self._finally()

    def _open(self, memory_bytes: int) -> Rdict:
        rocks = self._rocks
        blocks = rocks.BlockBasedOptions()
        blocks.set_block_cache(rocks.Cache(max(memory_bytes // 2, _MIB)))
        blocks.set_bloom_filter(10, False)
        blocks.set_cache_index_and_filter_blocks(True)
        options = rocks.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_block_based_table_factory(blocks)
        options.set_write_buffer_size(min(max(memory_bytes // 4, _MIB), 64 * _MIB))
        options.set_max_open_files(_OPEN_FILES)
        options.set_compression_type(rocks.DBCompressionType.lz4())
        options.set_keep_log_file_num(1)
        self._unlogged = rocks.WriteOptions()
        self._unlogged.disable_wal = True
        return rocks.Rdict(os.path.join(self.folder, "db"), options)


class RocksSnapshot:
    """A ``RocksStore`` as it was at one instant, for another thread; one pass over it at a time.

    It is an iterator, which sees what was there when it was made (iterating over a ``Snapshot`` of the package, up to
    0.3.29 at least, sees the present).
    """

    def __init__(self, rows: RdictIter) -> None:
        self._rows: RdictIter | None = rows

    def items(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        if self._rows is not None:
            self._rows.seek(begin)
        while (rows := self._rows) is not None and rows.valid() and (key := rows.key()) < end:
            yield key, rows.value()
            rows.next()
        self._check()

    def get_many(self, keys: Iterable[bytes]) -> Iterator[bytes | None]:
        for key in keys:
            if (rows := self._rows) is None:
                yield None
                continue
            rows.seek(key)
            yield rows.value() if rows.valid() and rows.key() == key else None
        self._check()

    def release(self) -> None:
        self._rows = None

    def _check(self) -> None:
        """An iterator that meets an error is at its end."""
        if self._rows is not None:
            with _reported("read"):
                self._rows.status()


@contextlib.contextmanager
def _reported(done: str, place: str = "") -> Generator[None]:
    try:
        yield
    except (ConfigError, StorageError):
        raise
    except Exception as e:  # what RocksDB says comes as a plain Exception
        raise StorageError(
            f"state on the worker's disk cannot be {done}{place and f' in {place}'}: {e}",
            hint="Free space there, or set TMPDIR for the workers to another disk.",
        ) from e
