"""Files that a path, directory or glob stands for, and a check that an open file is still the one that was listed."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from cutwater.connectors.base import SIZE, WEIGHT, Json
from cutwater.errors import BuildError, DataError
from cutwater.storage.store.object_input import ObjectInput, open_object
from cutwater.storage.store.objects import bucket_and_prefix, is_object, object_at

SPLIT_BYTES = 64 << 20
"""A larger file is read in several splits, each of about this many bytes on disk.

A constant and not a setting: ids and positions in snapshots depend on it.
"""
_FIRST_BYTES = 1 << 16
_HIDDEN_ENDS = (".tmp", ".crc", "._COPYING_")


class FileEntry(NamedTuple):
    """A file as it was when it was listed.

    What changed since then is not read, as it would not be the same rows.  Lines may be appended to one that grows.
    """

    path: str
    size: int
    mtime_ns: int | None
    """Time of the last change; None where only the size is to be compared."""
    grows_until: str | None = None
    """Lines are appended until this file is there, or for ever (``""``); None: it stays as it is."""
    tag: str = ""
    """Of an object: changes with its content."""

    @classmethod
    def from_data(cls, data: Json) -> FileEntry:
        return cls(data["file"], data["size"], data["mtime_ns"], data.get("grows_until"), data.get("tag", ""))

    def to_data(self) -> dict[str, Json]:
        """For ``Split.data``."""
        data = {"file": self.path, SIZE: self.size, "mtime_ns": self.mtime_ns}
        if self.tag:
            data["tag"] = self.tag
        # What a file that grows holds by now tells nothing of what will come: each counts for as much.
        return data if self.grows_until is None else {**data, "grows_until": self.grows_until, WEIGHT: 1}

    @property
    def is_over(self) -> bool:
        """Nothing is appended any more."""
        return self.grows_until is None or (self.grows_until != "" and os.path.exists(self.grows_until))

    def check(self, file: pa.OSFile | ObjectInput) -> None:
        """Compare with the open file.  Of an object each read does, on the server.

        Raises:
            DataError: it was changed or replaced since it was listed, other than by growing where it may.
        """
        if isinstance(file, ObjectInput):
            return
        now = os.fstat(file.fileno())
        if self.grows_until is not None and now.st_size >= self.size:
            return
        if now.st_size != self.size:
            what = "shrank" if now.st_size < self.size else "grew"
            raise self._changed(f"it {what} from {self.size} to {now.st_size} bytes")
        if self.mtime_ns is not None and now.st_mtime_ns != self.mtime_ns:
            raise self._changed("its time of change is another one")

    def is_unchanged(self) -> bool:
        """Whether the file is there as it was listed."""
        if is_object(self.path):
            return entry_of(self.path) == self
        try:
            now = os.stat(self.path)
        except OSError:
            return False
        return now.st_size == self.size and self.mtime_ns in (None, now.st_mtime_ns)

    def open(self, *, ahead: bool = False) -> pa.OSFile | ObjectInput:
        """The file, open.

        Args:
            ahead: it is read from front to back.

        Raises:
            DataError: it is gone, cannot be read, or was changed or replaced since it was listed.
        """
        if is_object(self.path):
            bucket, key = object_at(self.path)
            return open_object(bucket, key, self.size, self.tag, ahead=ahead, changed=self._changed)
        try:
            file = pa.OSFile(self.path)
        except FileNotFoundError:
            raise DataError(
                f"{self.path} vanished before it was read to its end",
                hint="Keep input files in place until the job has ended and no snapshot that refers to them is needed.",
            ) from None
        except OSError as e:
            raise DataError(f"cannot open {self.path}: {e}") from e
        try:
            self.check(file)
        except DataError:
            file.close()
            raise
        return file

    def shrank(self, size: int, offset: int) -> DataError:
        """The error of a file that grows and now ends before the position that was reached."""
        return self._changed(f"it has {size} bytes, and had been read up to byte {offset}")

    def _changed(self, how: str) -> DataError:
        return DataError(
            f"{self.path} was changed or replaced after the job had found it: {how}",
            hint="Input files must not change: write a new file under another name, and rename it in when it is whole.",
        )


def has_whole_line(path: str) -> bool:
    """Whether a text file that is being written has a whole line, as far as its first 64 KiB tell.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(_FIRST_BYTES)
    except FileNotFoundError:
        return False
    except OSError as e:
        raise DataError(f"cannot open {path}: {e}") from e
    return b"\n" in head or len(head) == _FIRST_BYTES


def absolute_paths(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The paths, absolute, so that workers with another working directory find them.

    Raises:
        BuildError: no path, or a place that is neither in the file system nor in a bucket.
        ConfigError: a URI with more than bucket and key.
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    if not paths:
        raise BuildError("files: an empty list of paths")
    result: list[str] = []
    for p in paths:
        text = os.fspath(p).removeprefix("file://")
        if is_object(text):
            bucket_and_prefix(text.partition("*")[0].partition("?")[0].partition("[")[0])
            result.append(text.rstrip("/"))
            continue
        if "://" in text:
            raise BuildError(
                f"files: cannot read {text.partition('://')[0]}:// directly",
                hint="Pass the DataFrame instead: flow.read(id, spark.read.parquet(...)); Spark then stages the rows.",
            )
        if not text:
            raise BuildError("files: an empty path")
        result.append(os.path.abspath(text))
    return tuple(result)


def marker_path(marker: str | os.PathLike[str], paths: Sequence[str]) -> str:
    """Path of the end marker of watched paths: a bare name in the watched directory, else where its path says.

    Args:
        marker: as the user gave it.
        paths: what is watched, absolute; of a glob the directory before its first wildcard counts.

    Raises:
        BuildError: a bare name of several directories, or a path into a directory that is not there.

    >>> marker_path("_DONE", ["/data/in/*.csv"])
    '/data/in/_DONE'
    """
    text = os.fspath(marker)
    if not text or text.endswith(os.sep):
        raise BuildError(f"files: end_marker {text!r} names no file", hint="Write for example end_marker='_DONE'.")
    if os.path.basename(text) == text:
        folders = sorted({_watched(path) for path in paths})
        if len(folders) > 1:
            raise BuildError(
                f"files: end_marker {text!r} could lie in {' or '.join(map(repr, folders))}",
                hint=f"Write it as a path: end_marker={os.path.join(folders[0], text)!r}.",
            )
        return os.path.join(folders[0], text)
    if is_object(text):
        return text
    path = os.path.abspath(text.removeprefix("file://"))
    if not os.path.isdir(os.path.dirname(path)):
        raise BuildError(
            f"files: there is no {os.path.dirname(path)!r} for end_marker {text!r} to lie in",
            hint="A bare name lies in the watched directory; anything with a slash is a path.",
        )
    return path


def _watched(path: str) -> str:
    """The directory in which files may come."""
    while glob.has_magic(path):
        path = os.path.dirname(path)
    if is_object(path):
        return path
    return path if os.path.isdir(path) or not os.path.exists(path) else os.path.dirname(path)


def list_files(paths: Sequence[str], *, may_be_empty: bool) -> list[FileEntry]:
    """All files behind the paths, sorted by path (this is the reading order), each one once.

    Directories are searched at every depth.  Names that begin with ``.`` or ``_`` or end with ``.tmp``, ``.crc`` or
    ``._COPYING_`` do not count (Spark's ``_SUCCESS`` and ``_temporary``, and files that are still being written).

    Args:
        may_be_empty: a glob may match nothing yet.

    Raises:
        BuildError: a path is not there, or a directory is partitioned by a column.
    """
    parts = [expanded(path, may_be_empty=may_be_empty) for path in paths]
    known = {file: entry for part in parts for file, entry in part.entries.items()}
    found = sorted({file for part in parts for file in part.files})
    return [entry for file in found if (entry := known.get(file) or entry_of(file)) is not None]


def is_there(path: str) -> bool:
    """True if there is a file, or an object, of this name."""
    if is_object(path):
        bucket, key = object_at(path)
        return bucket.info(key) is not None
    return os.path.exists(path)


def entry_of(file: str) -> FileEntry | None:
    """A file as it is now; ``None`` if it is gone, as if it had never been there.

    Raises:
        BuildError: it cannot be looked at.
        StorageError: it lies in a bucket that cannot be looked at.
    """
    if is_object(file):
        bucket, key = object_at(file)
        info = bucket.info(key)
        return None if info is None else FileEntry(file, info.size, None, tag=info.tag)
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise BuildError(f"files: cannot look at {file!r}: {e.strerror}") from e
    return FileEntry(file, status.st_size, status.st_mtime_ns)


class Expanded(NamedTuple):
    """What a path stands for."""

    files: list[str]
    folders: dict[str, int] | None
    """The folders that were listed for it, and the time of change of each before that, nanoseconds since the epoch;
    ``None``: they alone do not tell what the path stands for."""
    entries: dict[str, FileEntry] = {}
    """Of objects, which their listing tells."""


def expanded(path: str, *, may_be_empty: bool) -> Expanded:
    """The files behind a path, in no particular order.

    Args:
        may_be_empty: as of ``list_files``, whose errors it raises.
    """
    folders: dict[str, int] = {}
    if is_object(path):
        return _expanded_objects(path, may_be_empty=may_be_empty)
    if os.path.isdir(path):
        return Expanded(list(_walk(path, folders)), folders)
    if os.path.exists(path):
        return Expanded([path], None)
    if not glob.has_magic(path):
        raise BuildError(f"files: there is no {path!r}", hint="Check the path; a directory to watch must exist.")
    one_folder = os.path.dirname(path)
    tells = not glob.has_magic(one_folder) and _stamp(one_folder, folders)
    hits = [hit for hit in glob.glob(path, recursive=True) if _all_visible(hit, path)]
    if not hits and not may_be_empty:
        raise BuildError(f"files: nothing matches {path!r}", hint="Check the pattern and the working directory.")
    files: list[str] = []
    for hit in hits:
        if os.path.isdir(hit):
            files += _walk(hit, folders)
        else:
            files.append(hit)
    return Expanded(files, folders if tells and "**" not in path else None)


def _expanded_objects(path: str, *, may_be_empty: bool) -> Expanded:
    folder = path
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    bucket, prefix = object_at(folder)
    found = bucket.objects(prefix)
    # Some tools make an empty object for a folder.
    above = {os.path.dirname(info.key) for info in found}
    found = [info for info in found if info.size or info.key not in above]
    root = folder[: len(folder) - len(prefix)]
    if glob.has_magic(path):
        pattern = path[len(folder) :].strip("/").split("/")
        keys = [info for info in found if _matches(pattern, info.key[len(prefix) :].strip("/").split("/"))]
        spelled = set(path[len(folder) :].split("/"))
    elif found:
        keys, spelled = found, set[str]()
    else:
        info = bucket.info(prefix) if prefix else None
        keys, spelled = [info] if info is not None else [], {os.path.basename(prefix)}
        prefix = os.path.dirname(prefix)
    entries = {
        f"{root}{info.key}": FileEntry(f"{root}{info.key}", info.size, None, tag=info.tag)
        for info in keys
        if _is_visible_below(info.key[len(prefix) :].strip("/").split("/"), spelled, f"{root}{info.key}")
    }
    if not entries and not may_be_empty:
        what = "nothing matches" if glob.has_magic(path) else "there is no"
        raise BuildError(f"files: {what} {path!r}", hint="Check bucket, path and endpoint.")
    return Expanded(list(entries), None, entries)


def _is_visible_below(parts: list[str], spelled: set[str], path: str) -> bool:
    found = [part for part in parts if part not in spelled]
    if not all(map(_visible, found)):
        return False
    for part in found:
        if part != parts[-1]:
            _refuse_partition(part, path)
    return True


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """True if a path, or a folder that it lies in, matches a glob: ``*`` stays within a folder, ``**`` does not.

    >>> [_matches(["a", "**", "*.csv"], path.split("/")) for path in ("a/1.csv", "a/b/c/1.csv", "a/b/1.json")]
    [True, True, False]
    """
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(pattern[1:], parts[left:]) for left in range(len(parts)))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(pattern[1:], parts[1:])


def _stamp(directory: str, folders: dict[str, int]) -> bool:
    """Keep a folder's time of change; false if it has none."""
    try:
        folders[directory] = os.stat(directory).st_mtime_ns
    except OSError:
        return False
    return True


def _walk(directory: str, folders: dict[str, int]) -> Iterator[str]:
    _stamp(directory, folders)
    try:
        entries = sorted(os.scandir(directory), key=lambda e: e.name)
    except FileNotFoundError:
        return
    except OSError as e:
        raise BuildError(f"files: cannot list {directory!r}: {e.strerror}") from e
    for entry in entries:
        if not _visible(entry.name):
            continue
        if not entry.is_dir():
            yield entry.path
        else:
            _refuse_partition(entry.name, entry.path)
            yield from _walk(entry.path, folders)


def _all_visible(hit: str, pattern: str) -> bool:
    """True if every part of the path that the pattern left open counts."""
    spelled = set(pattern.split(os.sep))
    found = [part for part in hit.split(os.sep) if part not in spelled]
    for folder in found:
        if folder != os.path.basename(hit):
            _refuse_partition(folder, hit)
    return all(map(_visible, found))


def _refuse_partition(folder: str, path: str) -> None:
    if "=" in folder:
        raise BuildError(
            f"files: {path!r} looks like a directory partitioned by {folder.partition('=')[0]!r}, "
            "a column that is not in its files",
            hint="Read it with Spark and pass the DataFrame to flow.read, so that the column is there.",
        )


def _visible(name: str) -> bool:
    return not name.startswith((".", "_")) and not name.endswith(_HIDDEN_ENDS)
