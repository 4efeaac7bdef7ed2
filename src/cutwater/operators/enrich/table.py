"""The table side of an enrichment: in memory, or files that each worker loads when it starts."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
import xxhash

from cutwater.data.schema_text import schema_differences
from cutwater.errors import BuildError, DataError
from cutwater.operators.stateless.expression_plan import plain_type

Format: TypeAlias = Literal["parquet", "csv", "json"]

_FORMATS: dict[str, Format] = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}


@dataclass(frozen=True, eq=False)
class EnrichmentTable:
    """A table that rows of a stream are looked up in.

    Args:
        source: a ``pyarrow.Table`` (shipped to the workers), or a path, a pattern, a folder or a list of them (read by
            each worker when it opens the step; the paths must lead to the same files everywhere).
        format: of the files; by their names if not given (``.gz`` may follow).
        duplicates: "refuse" rows with a key that came before (an enrichment must not multiply rows by accident), or
            keep "all", which makes one output row per match.

    Raises:
        BuildError: ``duplicates`` is neither, or no path is given.

    >>> table = EnrichmentTable(pa.table({"code": ["UA"], "name": ["United"]}))
    >>> table.schema.names, table.digest
    (['code', 'name'], 'a179fca6f7cbe76d2515e972c2099d24')
    """

    source: pa.Table | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    format: Format | None = None
    duplicates: Literal["refuse", "all"] = "refuse"

    pinned_digest: str = field(default="", kw_only=True, repr=False)
    """What ``digest`` must be whenever it is loaded; empty: it may change."""
    paths: tuple[str, ...] = field(init=False, repr=False)
    """Of files: absolute, because workers run in other folders than the driver."""

    def __post_init__(self) -> None:
        if self.duplicates not in ("refuse", "all"):
            raise BuildError(f"duplicates={self.duplicates!r} is unknown", hint="Choose 'refuse' or 'all'.")
        source: Any = self.source
        if self.in_memory:
            source = []
        elif isinstance(source, str | os.PathLike):
            source = [source]
        paths = tuple(os.path.abspath(path) for path in source)
        if not self.in_memory and not paths:
            raise BuildError("an enrichment table needs at least one path")
        object.__setattr__(self, "paths", paths)

    @property
    def in_memory(self) -> bool:
        return isinstance(self.source, pa.Table)

    @property
    def schema(self) -> pa.Schema:
        """Plain types only.  Of files: of the first one.

        Raises:
            BuildError: no such file, or not readable.
        """
        try:
            return _plain_schema(next(self._tables()).schema)
        except DataError as exc:
            raise BuildError(exc.message, hint=exc.hint) from exc

    @property
    def digest(self) -> str:
        """xxh3_128 (hex) of the content: the same for equal rows in equal order, however they are stored."""
        return table_digest(self.load())

    def pinned(self) -> EnrichmentTable:
        """The table as it is now: whoever loads it finds these rows in this order, or fails.

        Raises:
            BuildError: of files: as ``schema``.
        """
        if self.in_memory:
            return self
        try:
            return replace(self, pinned_digest=self.digest)
        except DataError as exc:
            raise BuildError(exc.message, hint=exc.hint) from exc

    def load(self) -> pa.Table:
        """All rows, in plain types; files in the order of their names.

        Raises:
            DataError: a file is missing, unreadable, or has other columns than the first; or the table is pinned, and
                is another now.
        """
        table = self._read()
        if self.pinned_digest and table_digest(table) != self.pinned_digest:
            raise DataError(
                f"the enrichment table {', '.join(self.paths)} is not what it was when the job started; "
                "what was looked up in it could not be made again",
                hint="Start the job once more: everything then goes on with the table of now. "
                "With recovery='region' or 'job' files may change while a job runs.",
            )
        return table

    def _read(self) -> pa.Table:
        tables: list[pa.Table] = []
        for table in self._tables():
            table = table.cast(_plain_schema(table.schema))
            differences = schema_differences(tables[0].schema, table.schema) if tables else []
            if differences:
                raise DataError(
                    f"files of the enrichment table {', '.join(self.paths)} differ: {'; '.join(differences)}"
                )
            tables.append(table)
        return pa.concat_tables(tables)

    def _tables(self) -> Iterator[pa.Table]:
        if self.in_memory:
            yield self.source
            return
        for path in self._files():
            read = _READERS[self.format or _format_of(path)]
            try:
                yield read(path)
            except (pa.ArrowException, OSError, ValueError) as exc:
                raise DataError(f"file {path} of an enrichment table cannot be read: {exc}") from exc

    def _files(self) -> list[str]:
        found: list[str] = []
        for path in self.paths:
            matches = [p for p in glob.glob(path, recursive=True) if not _hidden(p)]
            for match in matches:
                inside = [os.path.join(match, name) for name in os.listdir(match)] if os.path.isdir(match) else [match]
                found += [p for p in inside if os.path.isfile(p) and not _hidden(p)]
            if not matches:
                raise DataError(f"no file {path} for the enrichment table", hint="Check the path on every worker.")
        if not found:
            raise DataError(f"no file in {', '.join(self.paths)} for the enrichment table")
        return sorted(set(found))


def _hidden(path: str) -> bool:
    return os.path.basename(path).startswith((".", "_"))


def _format_of(path: str) -> Format:
    name = path.removesuffix(".gz")
    found = _FORMATS.get(os.path.splitext(name)[1].lower())
    if found is None:
        raise DataError(f"the format of file {path} is unknown", hint="Say format='parquet', 'csv' or 'json'.")
    return found


def _read_parquet(path: str) -> pa.Table:
    import pyarrow.parquet as pq

    return pq.ParquetFile(path).read()


def _read_csv(path: str) -> pa.Table:
    import pyarrow.csv

    with pa.input_stream(path, compression="detect") as stream:
        return pyarrow.csv.read_csv(stream)


def _read_json(path: str) -> pa.Table:
    import pyarrow.json

    with pa.input_stream(path, compression="detect") as stream:
        return pyarrow.json.read_json(stream)


_READERS: dict[Format, Callable[[str], pa.Table]] = {"parquet": _read_parquet, "csv": _read_csv, "json": _read_json}


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(plain_type(field.type)).remove_metadata() for field in schema])


def table_digest(table: pa.Table) -> str:
    """xxh3_128 of names, types and values.  Chunks, offsets, padding and what lies under nulls make no difference.

    >>> a, b = pa.table({"n": [7, 1, None]}), pa.table({"n": pa.chunked_array([[1], [None]], pa.int64())})
    >>> table_digest(a.slice(1)) == table_digest(b)
    True
    """
    hasher = xxhash.xxh3_128()
    for name, column in zip(table.column_names, table.columns, strict=True):
        hasher.update(f"{name}\0{column.type}\0{len(column)}\0".encode())
        combined = column.combine_chunks()
        chunks = combined.chunks if isinstance(combined, pa.ChunkedArray) else [combined]
        for chunk in chunks:
            _digest(chunk, hasher)
    return hasher.hexdigest()


def _digest(array: pa.Array, hasher: Any) -> None:
    """Validity, then the values: fixed-width ones with nulls as zero, lengths and bytes of texts, lists by content."""
    kind = array.type
    if pt.is_null(kind):
        return
    hasher.update(np.packbits(np.asarray(array.is_valid())).tobytes())
    if pt.is_struct(kind):
        for child in array.flatten():
            _digest(child, hasher)
    elif pt.is_list(kind) or pt.is_fixed_size_list(kind) or pt.is_map(kind):
        if pt.is_map(kind):
            array = array.cast(pa.list_(pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)])))
        lengths = pc.call_function("list_value_length", [array]).fill_null(0)
        hasher.update(np.asarray(lengths).astype(np.int64).tobytes())
        _digest(array.flatten(), hasher)
    elif pt.is_string(kind) or pt.is_binary(kind):
        filled = array.cast(pa.binary()).fill_null(b"")
        hasher.update(np.asarray(pc.call_function("binary_length", [filled])).tobytes())
        offsets, data = (np.frombuffer(buffer or b"", np.uint8) for buffer in filled.buffers()[1:])
        places = offsets.view(np.int32)[filled.offset : filled.offset + len(filled) + 1]
        if len(places):
            hasher.update(data[places[0] : places[-1]])
    elif pt.is_boolean(kind):
        hasher.update(np.packbits(np.asarray(array.fill_null(False))).tobytes())
    else:
        _digest_fixed(array, hasher)


def _digest_fixed(array: pa.Array, hasher: Any) -> None:
    width = array.type.bit_width // 8
    if len(array) == 0:
        return
    content = np.frombuffer(array.buffers()[1], np.uint8)[array.offset * width : (array.offset + len(array)) * width]
    values = content.reshape(len(array), width)
    if array.null_count:
        values = np.where(np.asarray(array.is_valid())[:, None], values, np.uint8(0))
    hasher.update(np.ascontiguousarray(values))
