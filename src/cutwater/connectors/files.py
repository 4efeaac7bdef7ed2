"""``cw.files``: one name for files as a source and as a sink."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cutwater.connectors.file_sink import FileSink
from cutwater.connectors.part_formats import PART_FORMATS
from cutwater.errors import BuildError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from cutwater.connectors.file_source import FileSource

__all__ = ["Files", "files"]


@dataclass(frozen=True)
class Files:
    """A place in a file system; what it is used for decides what it becomes."""

    path: str | list[str]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def as_source(self) -> FileSource:
        """These files as a replayable source.

        Raises:
            ConfigError: an option that a file source does not know.
        """
        from cutwater.connectors.file_source import FileSource

        self._check_options("source", [name for name in inspect.signature(FileSource).parameters if name != "path"])
        return FileSource(self.path, **self.options)

    def as_sink(self) -> FileSink:
        """This directory as an exactly-once sink.

        Raises:
            BuildError: several paths, an unknown format, or a place that cannot be written to.
            ConfigError: an option that the sink, or its format, does not know.
        """
        if not isinstance(self.path, str):
            raise BuildError(f"a sink writes to one directory, got {len(self.path)} paths")
        options = dict(self.options)
        name = options.pop("format", "parquet")
        make = PART_FORMATS.get(name)
        if make is None:
            raise BuildError(
                f"a file sink does not write {name!r}",
                hint=f"Choose one of {', '.join(map(repr, PART_FORMATS))}, or write other formats with foreach_batch.",
            )
        of_format = list(inspect.signature(make).parameters)
        of_sink = [field.name for field in dataclasses.fields(FileSink) if field.name not in ("path", "parts")]
        self._check_options(f"{name} sink", [*of_sink, *of_format, "format"])
        parts = make(**{name: options.pop(name) for name in of_format if name in options})
        return FileSink(self.path, parts, **options)

    def _check_options(self, use: str, known: Sequence[str]) -> None:
        for name in self.options:
            if name not in known:
                raise ConfigError(
                    f"files({self.path!r}) as a {use} has no option {name!r}", hint=did_you_mean(name, known)
                )


def files(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], **options: Any) -> Files:
    """Files to read from or to write to.

    Args:
        path: for reading a file, directory, glob or a list of them; for writing one directory.
        options: of ``FileSource`` when read (``format``, ``schema``, ``rate``, ``bad_rows``, ``watch`` ...).  When
            written: ``format`` (``"parquet"``, ``"json"`` for JSON lines or ``"csv"``), ``roll_rows``, ``roll_bytes``
            and ``roll_interval_ms`` (see ``FileSink``), and what the format takes: ``compression``, and for CSV
            ``header`` and ``delimiter``.

    >>> files("/data/out", format="json", compression="gzip").as_sink().parts
    JsonParts(compression='gzip')
    """
    if isinstance(path, str | os.PathLike):
        return Files(os.fspath(path), options)
    return Files([os.fspath(one) for one in path], options)
