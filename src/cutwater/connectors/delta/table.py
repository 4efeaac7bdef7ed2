"""A Delta table: opened by the library, with its errors told in our words."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
from collections.abc import Generator
from typing import Any, NamedTuple

import pyarrow as pa

from cutwater.connectors.delta.features import Asked
from cutwater.errors import BuildError, ConfigError, StorageError

LOG_FOLDER = "_delta_log"


def delta_library(module: str = "deltalake") -> Any:
    """The library, or a module of it.

    Raises:
        BuildError: it is not installed; says how.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise BuildError(
            "reading and writing Delta tables needs deltalake",
            hint="Install it in the driver and where the workers run: pip install 'cutwater[delta]'.",
        ) from None


def table_path(path: str | os.PathLike[str]) -> str:
    """Absolute form of a local path or ``file:`` address.

    Raises:
        BuildError: the path names another kind of storage.
        ConfigError: no path.

    >>> table_path("file:///data/clicks/")
    '/data/clicks'
    """
    text = os.fspath(path)
    scheme, colon, rest = text.partition("://")
    if colon and scheme != "file":
        raise BuildError(
            f"the Delta table {text!r} is not in a file system: {scheme} is not supported",
            hint="Name a path that every worker mounts, or write with foreach_batch and deltalake.",
        )
    if not text:
        raise ConfigError("delta needs the path of a table, got an empty one")
    return os.path.abspath(rest if colon else text.removeprefix("file:"))


class Conflict(StorageError):
    """Somebody else has committed what does not go together with ours: look again at what the table says."""


@contextlib.contextmanager
def delta_errors(what: str, path: str) -> Generator[None]:
    """Turn the library's errors into ours.

    Raises:
        Conflict: a commit met another one.
        StorageError: anything else.
    """
    exceptions = delta_library("deltalake.exceptions")
    try:
        yield
    except exceptions.CommitFailedError as error:
        raise Conflict(f"{what} {path!r}: {error}") from error
    except (exceptions.DeltaError, OSError, ValueError) as error:
        raise StorageError(
            f"{what} {path!r}: {error}", hint="Look at the table with another reader; is its _delta_log whole?"
        ) from error


class Description(NamedTuple):
    """What a table says of itself."""

    schema: pa.Schema
    partition_by: tuple[str, ...]
    asked: Asked


def described(table: Any) -> Description:
    """What a handle's version of a table says."""
    protocol, metadata, schema = table.protocol(), table.metadata(), table.schema()
    asked = Asked(
        protocol.min_reader_version,
        protocol.min_writer_version,
        frozenset(protocol.reader_features or ()),
        frozenset(protocol.writer_features or ()),
        metadata.configuration,
        tuple(json.loads(schema.to_json())["fields"]),
    )
    return Description(pa.schema(schema.to_arrow()), tuple(metadata.partition_columns), asked)


def opened(path: str, version: int | None = None) -> Any | None:
    """A handle of a table, of a version or the newest one; ``None`` where there is no table.

    Raises:
        StorageError: it cannot be read.
    """
    library = delta_library()
    if not os.path.isdir(os.path.join(path, LOG_FOLDER)):
        return None
    with delta_errors("cannot open the Delta table", path):
        try:
            return library.DeltaTable(path, version=version)
        except delta_library("deltalake.exceptions").TableNotFoundError:
            return None


def log_entry(version: int) -> str:
    """The name of a version's entry in the log.

    >>> log_entry(7)
    '00000000000000000007.json'
    """
    return f"{version:020}.json"


_ENTRY = re.compile(r"(\d{20})\.json", re.ASCII)


def entry_version(name: str) -> int | None:
    """The version of an entry's name; ``None`` if it is another file."""
    match = _ENTRY.fullmatch(name)
    return None if match is None else int(match[1])
