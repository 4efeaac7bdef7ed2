"""What Spark stages of a DataFrame: Parquet files, a list of them with their digests, in private folders."""

from __future__ import annotations

import functools
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cutwater.config import FileAccess
from cutwater.connectors.base import Json, SourceContext, Split, SplitReader
from cutwater.connectors.files.listing import FileEntry
from cutwater.connectors.files.source import FileSource
from cutwater.errors import DataError, SealError, StorageError
from cutwater.storage.snapshot.staged_input import STAGED_FILE, Staged, differs, digest_maker, digest_text, read_staged
from cutwater.storage.store.opening import parted, store_at
from cutwater.storage.store.seal import PLAIN, Seal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_READ_BYTES = 1 << 24


class StagedFiles(FileSource):
    """Files that nobody but the job writes: they may be copied elsewhere with it, so their times do not matter.

    The driver tells readers the digest of each, which they compare when they open it.
    """

    def __init__(self, directory: Path, seal: Seal, **options: Any) -> None:
        super().__init__(directory, **options)
        self._root, self._seal = directory, seal
        self._lists: dict[Path, Staged | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_seal": PLAIN, "_lists": {}}

    def _listed(self, entry: FileEntry) -> FileEntry:
        return entry._replace(mtime_ns=None)

    def _splits(self, entry: FileEntry) -> list[Split]:
        splits, path = super()._splits(entry), Path(entry.path)
        if path.parent not in self._lists:
            self._lists[path.parent] = read_list(path.parent, self._seal)
        staged = self._lists[path.parent]
        if staged is None and self._seal.keyed:
            raise SealError(f"{path.parent} was staged without a key, or somebody put it there")
        if staged is not None and staged.files.get(path.name) != entry.size:
            raise StorageError(f"staged file {path} has {entry.size} bytes, {staged.files.get(path.name)} were written")
        digest = "" if staged is None else staged.digests.get(path.name, "")
        return [Split(s.id, {**s.data, "digest": digest}) if digest else s for s in splits]

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> SplitReader:
        """See ``FileSource.open``; the file is compared with its digest first.

        Raises:
            DataError: it differs.
        """
        digest = split.data.get("digest", "")
        if digest:
            _compare(split.data["file"], split.data["size"], digest)
        return super().open(split, position, ctx)


@functools.lru_cache(maxsize=1024)  # a large file is read in many splits
def _compare(path: str, size: int, digest: str) -> None:
    folder, name = os.path.split(path)
    problem = differs(store_at(folder, PLAIN), name, Staged("", {name: size}, 2, {name: digest}), name)
    if problem:
        raise DataError(
            f"staged file {path} was changed since it was staged: {problem}",
            hint="Bring it back from a copy; or start under another job name, which stages the DataFrame anew.",
        )


def list_of(folder: Path, schema: pa.Schema, seal: Seal) -> Staged:
    """The list of what Spark wrote into a folder."""
    sizes: dict[str, int] = {}
    digests: dict[str, str] = {}
    for path in sorted(folder.glob("part-*")):
        hasher = digest_maker(keyed=seal.keyed)
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                hasher.update(piece)
            sizes[path.name], digests[path.name] = file.tell(), digest_text(hasher)
    return Staged(describe(schema), sizes, 2, digests)


def read_list(folder: Path, seal: Seal) -> Staged | None:
    """The list in a folder; ``None`` if nothing whole was staged there.

    Raises:
        CorruptSnapshotError: as ``read_staged``.
    """
    above, name = parted(folder)
    store = store_at(above, seal)  # so that a link in place of the folder is not followed
    if not store.exists() or STAGED_FILE not in store.names(name):
        return None
    return read_staged(str(folder / STAGED_FILE), bytes(store.read(f"{name}/{STAGED_FILE}")), seal)


def make_private(folder: Path, access: FileAccess) -> None:
    """Rows are nobody else's business: Spark writes as its umask says, into a folder that only the user opens."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        if access == "group":
            folder.chmod(0o770)


def write_parquet(df: DataFrame, directory: Path) -> None:
    try:
        df.write.mode("errorifexists").parquet(directory.as_uri())
    except Exception as e:
        raise DataError(f"Spark could not compute or write the DataFrame: {first_line(e)}") from e
    for file in directory.glob("part-*"):
        sync(file)
    sync(directory)


def write_durably(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"_{uuid.uuid4().hex}.tmp")
    temporary.write_bytes(data)
    sync(temporary)
    os.rename(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or a directory's names, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def describe(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name} {f.type}" for f in schema)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
