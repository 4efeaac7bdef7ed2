"""``cw.files``: one name for files as a source and as a sink."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Never

from cutwater.connectors.files.part_formats import PART_FORMATS
from cutwater.connectors.files.sink import FileSink
from cutwater.errors import BuildError, ConfigError, did_you_mean
from cutwater.storage.store.objects import is_object

if TYPE_CHECKING:
    from datetime import timedelta

    import pyarrow as pa

    from cutwater.connectors.base import BadRows
    from cutwater.connectors.files.source import FileFormat, FileSource


@dataclass(frozen=True)
class Files:
    """A place in a file system; what it is used for decides what it becomes."""

    path: str | list[str]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those that are not what they are by default."""

    def as_source(self) -> FileSource:
        """These files as a replayable source.

        Raises:
            ConfigError: an option that a file source does not know.
        """
        from cutwater.connectors.files.source import FileSource

        known = [name for name in inspect.signature(FileSource).parameters if name != "path"]
        self._check_options("source", known, "writing")
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
        of_sink = [field.name for field in dataclasses.fields(FileSink) if field.name not in ("path", "parts", "guard")]
        self._check_options(f"{name} sink", [*of_sink, *of_format, "format"], "reading")
        parts = make(**{name: options.pop(name) for name in of_format if name in options})
        if is_object(self.path):
            from cutwater.connectors.files.object_parts import ObjectSink

            return ObjectSink(self.path, parts, **options)
        return FileSink(self.path, parts, **options)

    def _check_options(self, use: str, known: Sequence[str], other_use: str) -> None:
        for name in self.options:
            if name not in known:
                of_formats = ("header", "delimiter", "row_group_rows")
                other = "other formats" if "sink" in use and name in of_formats else other_use
                raise ConfigError(
                    f"files({self.path!r}) as a {use} has no option {name!r}",
                    hint=f"It is for {other}. There are: {', '.join(known)}.",
                )


def files(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format: FileFormat | None = None,
    header: bool = True,
    delimiter: str | None = None,
    schema: pa.Schema | str | None = None,
    rate: float | None = None,
    bad_rows: BadRows = "fail",
    watch: bool = False,
    follow: bool = False,
    discover_interval_ms: float | str | timedelta | None = None,
    settle_ms: float | str | timedelta = 2000.0,
    end_marker: str | os.PathLike[str] | None = None,
    time_ordered: bool = False,
    quote: str | None = '"',
    null_values: Sequence[str] = ("",),
    timestamp_formats: Sequence[str] = (),
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] | None = None,
    compression_level: int | None = None,
    row_group_rows: int = 1 << 20,
    roll_rows: int = 10_000_000,
    roll_bytes: int = 128 << 20,
    roll_interval_ms: float | str | timedelta = 10_000.0,
    **unknown: Never,
) -> Files:
    """Files to read from or to write to.

    Args:
        path: for reading a file, directory, glob or a list of them; for writing one directory.
        format: ``"parquet"``, ``"json"`` (lines) or ``"csv"``.  None: by the names of files; Parquet where one writes.
        header: of CSV: files begin with the names of the columns.
        delimiter: of CSV: one character between fields; None is a comma (read from ``.tsv`` files: a tab).
        schema: reading: Arrow schema or text such as ``"k long, at timestamp"``; None: the first file tells it.
        rate: reading: rows per second over all subtasks; None for as fast as possible.
        bad_rows: reading: a bad row fails the job (``"fail"``) or goes to the dead letters (``"dead_letter"``).
        watch: reading: the directory keeps growing.
        follow: watching: lines may be appended to the files, which are CSV or JSON lines without compression.
        discover_interval_ms: watching: look for new files so often (``"1s"``); None: every 20 ms to 1 s, as it costs.
        settle_ms: watching: how long a file must have been left alone; as above.  Not of files that are followed.
        end_marker: watching: this file says that the directory is complete.  A bare name lies in it, ``"./x"`` not.
        time_ordered: reading: in the order of paths no file begins earlier in event time than the one before.
        quote: reading CSV: quoting character, doubled inside quotes; None for no quoting.
        null_values: reading CSV: fields that mean null (only unquoted ones).
        timestamp_formats: reading text: ``strptime`` formats, tried in order; without them ISO 8601.
        compression: writing: ``"zstd"`` (Parquet by default), ``"snappy"``, ``"gzip"``, ``"lz4"``, ``"none"`` (text).
        compression_level: writing: of zstd (1 to 22) and gzip (1 to 9); None for 1 and 6.
        row_group_rows: writing Parquet: rows of a row group; the last of a file has fewer, and those of wide rows.
        roll_rows: writing: a file ends at the first barrier after about this many rows.
        roll_bytes: writing: the same by size, in bytes of Arrow data.
        roll_interval_ms: writing: the same by age; milliseconds or ``"10s"``.  0: at every checkpoint.
        unknown: nothing; the message names what was meant.

    Raises:
        ConfigError: an argument that there is not.

    >>> files("/data/out", format="json", compression="gzip").as_sink().parts
    JsonParts(compression='gzip', compression_level=None)
    """
    return _files(path, dict(locals()), unknown)


def _files(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], given: dict[str, Any], unknown: dict[str, Any]
) -> Files:
    for name in unknown:
        raise ConfigError(f"files has no option {name!r}", hint=did_you_mean(name, _DEFAULTS))
    options = {name: given[name] for name, default in _DEFAULTS.items() if given[name] != default}
    if isinstance(path, str | os.PathLike):
        return Files(os.fspath(path), options)
    return Files([os.fspath(one) for one in path], options)


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(files).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
