"""Spark DataFrames as replayable sources: Spark stages the rows as Parquet, the file reader reads them.

A DataFrame cannot be read twice with the certainty of the same rows in the same order, so it is written out once.  A
job that resumes finds what was staged and reads that, whatever the DataFrame would give by now.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from cutwater.config import FileAccess
from cutwater.connectors.base import Json, SourceContext, Split, SplitReader, check_rate
from cutwater.connectors.files.listing import FileEntry
from cutwater.connectors.files.source import FileSource
from cutwater.connectors.staging_folders import fsync_path
from cutwater.errors import BuildError, CorruptSnapshotError, DataError, InvariantError, SealError, StorageError
from cutwater.storage.snapshot.staged_input import (
    STAGED_FILE,
    STAGING,
    Staged,
    differs,
    digest_maker,
    digest_text,
    is_sealed_list,
    read_staged,
    sealed_staged,
)
from cutwater.storage.store.no_follow import open_to_read, opened_folder
from cutwater.storage.store.opening import parted, store_at
from cutwater.storage.store.seal import PLAIN, Seal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


_READ_BYTES = 1 << 24


class StagedFiles(FileSource):
    """Files that nobody but the job writes: they may be copied elsewhere with it, so their times do not matter.

    The driver tells readers the digest of each, which they compare when they open it.
    """

    lists_anew = True
    """The digests are those of the list as it is now: it may have been sealed after a snapshot was taken."""

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
        if staged is None and self._seal.refuses_unsealed:
            raise SealError(
                f"{path.parent} was staged without a key, or somebody put it there",
                hint="If it is yours and was written before there was a key, start once with accept_unsealed=True.",
            )
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
    """The list of what Spark wrote into a folder.

    Raises:
        CorruptSnapshotError: something in it is no file.
    """
    sizes: dict[str, int] = {}
    digests: dict[str, str] = {}
    with opened_folder(str(folder), []) as opened:
        for name in sorted(name for name in os.listdir(opened) if name.startswith("part-")):
            hasher = digest_maker(keyed=seal.keyed)
            with open(open_to_read(name, opened, str(folder / name))[0], "rb") as file:
                while piece := file.read(_READ_BYTES):
                    hasher.update(piece)
                sizes[name], digests[name] = file.tell(), digest_text(hasher)
    return Staged(describe(schema), sizes, 2, digests)


def read_list(folder: Path, seal: Seal) -> Staged | None:
    """The list in a folder; ``None`` if nothing whole was staged there.

    Raises:
        CorruptSnapshotError: as ``read_staged``.
    """
    data = _list_in(folder)
    return None if data is None else read_staged(str(folder / STAGED_FILE), data, seal)


def _list_in(folder: Path) -> bytes | None:
    above, name = parted(folder)
    store = store_at(above, PLAIN)  # so that a link in place of the folder is not followed
    if not store.exists() or STAGED_FILE not in store.names(name):
        return None
    return bytes(store.read(f"{name}/{STAGED_FILE}"))


def seal_anew(folder: Path, schema: pa.Schema, seal: Seal, *, listed: bool) -> None:
    """While a key is turned on: seal what was staged without one, so that the starts to come find it sealed.

    Args:
        schema: of the rows, for a list where there is none.
        listed: without a list nothing whole was staged; else a release may have written it that made no lists.

    Raises:
        CorruptSnapshotError: the files are not those that were staged; nothing was sealed.
        SealError: it is sealed with a key that is not known.
    """
    if not seal.keyed or seal.refuses_unsealed:
        return
    data = _list_in(folder)
    if is_sealed_list(data) if data is not None else listed:
        return
    staged = None if data is None else read_staged(str(folder / STAGED_FILE), data, seal)
    made = list_of(folder, schema, seal)
    if staged is not None:
        store = store_at(str(folder), PLAIN)
        problems = [problem for name in staged.files if (problem := differs(store, name, staged, name))]
        if problems or made.files != staged.files:
            what = problems[0] if problems else "it holds other files, or files of other sizes, than its list says"
            raise CorruptSnapshotError(
                f"{folder} is not as it was staged: {what}",
                hint="Bring it back from a copy; or start under another job name, which stages the DataFrame anew.",
            )
        made = msgspec.structs.replace(made, columns=staged.columns)
    write_durably(folder / STAGED_FILE, sealed_staged(made, seal))


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
        fsync_path(str(file))
    fsync_path(str(directory))


def write_durably(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"_{uuid.uuid4().hex}.tmp")
    temporary.write_bytes(data)
    fsync_path(str(temporary))
    os.rename(temporary, path)
    fsync_path(str(path.parent))


def describe(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name} {f.type}" for f in schema)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_END, _FAILED, _CHECKPOINT = "_END", "_FAILED", "_spark_checkpoint"


class _Unstaged:
    """A DataFrame source before the job starts: held by the driver only, never shipped."""

    replayable = True

    def __init__(self, df: DataFrame, rate: float | None, discover_interval_ms: float) -> None:
        check_rate(rate)
        self._df = df
        self.rate, self.discover_interval_ms = rate, discover_interval_ms

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of the DataFrame; timestamps in microseconds, UTC.

        Raises:
            BuildError: a column's type has no place in Parquet or Arrow.
        """
        from pyspark.errors import PySparkException
        from pyspark.sql.pandas.types import to_arrow_schema

        try:
            # Earlier versions of PySpark have no such parameter and always mean UTC.
            zone: dict[str, Any] = (
                {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
            )
            found: pa.Schema = to_arrow_schema(self._df.schema, **zone)
        except PySparkException as e:
            raise BuildError(f"a column of the DataFrame cannot be read: {first_line(e)}", hint=_CAST) from e
        for field in found:
            if pa.types.is_duration(field.type):
                raise BuildError(f"column {field.name!r}: intervals cannot be staged", hint=_CAST)
        return pa.schema([pa.field(f.name, f.type) for f in found])

    def discover(self) -> list[Split]:
        raise InvariantError("a DataFrame has no splits before it is staged")

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> SplitReader:
        raise InvariantError("a DataFrame cannot be read before it is staged")


_CAST = "Cast the column to another type in the DataFrame."


class DataFrameSource(_Unstaged):
    """A batch DataFrame.

    Args:
        df: the DataFrame.
        order_by: column to sort by, usually the event time; the files then hold rising ranges of it.
        partitions: number of files; None leaves it to Spark.
        rate: rows per second over all subtasks.
    """

    bounded = True

    def __init__(
        self, df: DataFrame, *, order_by: str | None = None, partitions: int | None = None, rate: float | None = None
    ) -> None:
        super().__init__(df, rate, 3_600_000.0)
        self._order_by, self._partitions = order_by, partitions

    def stage(self, directory: str, seal: Seal = PLAIN, access: FileAccess = "owner", own: bool = True) -> FileSource:
        """Let Spark write the rows into ``directory``, unless that was done before; the source that reads them.

        Args:
            seal, access: of the job.
            own: the directory is the job's; what its leader staged a fork only reads.

        Raises:
            DataError: Spark failed while computing the DataFrame.
            StorageError: what was staged before is damaged, or the directory cannot be written.
            BuildError: what was staged before has other columns.
        """
        target, schema, df = Path(directory).absolute(), self.schema, self._df
        if own:
            seal_anew(target, schema, seal, listed=True)
        staged = read_list(target, seal)
        if staged is None:
            if self._order_by is not None:
                cut: tuple[Any, ...] = (self._partitions, self._order_by) if self._partitions else (self._order_by,)
                df = df.repartitionByRange(*cut).sortWithinPartitions(self._order_by)
            elif self._partitions is not None:
                df = df.repartition(self._partitions)
            staged = _stage(df, target, schema, seal, access)
        if staged.columns != describe(schema):
            raise BuildError(
                f"the DataFrame has columns {describe(schema)}, but {target} holds rows staged with {staged.columns}",
                hint="A job that resumes reads what was staged; give the step a new id to read the new columns.",
            )
        for name, size in staged.files.items():
            try:
                found = os.path.getsize(target / name)
            except OSError as e:
                raise StorageError(f"staged file {target / name} cannot be read: {e.strerror}") from e
            if found != size:
                raise StorageError(f"staged file {target / name} has {found} bytes, {size} were written")
        return StagedFiles(target, seal, format="parquet", schema=schema, rate=self.rate)


def _stage(df: DataFrame, target: Path, schema: pa.Schema, seal: Seal, access: FileAccess) -> Staged:
    """Write into a folder beside the target, then rename it in whole."""
    make_private(target.parent, access)
    temporary = target.with_name(f"{target.name}{STAGING}{uuid.uuid4().hex}")
    try:
        write_parquet(df, temporary)
        staged = list_of(temporary, schema, seal)
        if not staged.files:
            raise StorageError(
                f"Spark staged the DataFrame, but the driver sees no files in {temporary}",
                hint="The checkpoint directory must be on a file system that driver and executors share.",
            )
        write_durably(temporary / STAGED_FILE, sealed_staged(staged, seal))
        try:
            os.rename(temporary, target)
        except OSError as e:
            found = read_list(target, seal)
            if found is None:
                raise StorageError(f"cannot stage the DataFrame into {target}: {e.strerror}") from e
            return found  # another driver was quicker, and its rows are the ones that count
        fsync_path(str(target.parent))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for leftover in target.parent.glob(f"{target.name}{STAGING}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of drivers that died while staging
    return staged


class StreamingDataFrameSource(_Unstaged):
    """A streaming DataFrame: a Spark query stages every micro-batch, so every Spark connector is a source.

    The source ends when the query does (``trigger={"availableNow": True}``).  Spark's own checkpoint lies beside the
    staged batches: after a failure the query goes on where it was, and a batch staged before is not staged again.

    Args:
        df: the streaming DataFrame.
        trigger: arguments of ``DataStreamWriter.trigger``; None for micro-batches one after the other.
        rate: rows per second over all subtasks.
        discover_interval_ms: how often to look for new batches.
    """

    bounded = False

    def __init__(
        self,
        df: DataFrame,
        *,
        trigger: dict[str, Any] | None = None,
        rate: float | None = None,
        discover_interval_ms: float = 200.0,
    ) -> None:
        super().__init__(df, rate, discover_interval_ms)
        self._trigger = trigger

    def stage(self, directory: str, seal: Seal = PLAIN, access: FileAccess = "owner", own: bool = True) -> StagedStream:
        """Start the query (unless it has ended before); the source that reads its batches.  Its ``stop()`` stops both.

        Args:
            seal, access: of the job.
            own: always; forks do not read what a streaming query stages.

        Raises:
            CorruptSnapshotError: while a key is turned on, batches are not as they were staged.
            DataError: the query cannot be started.
        """
        target = Path(directory).absolute()
        make_private(target.parent, access)
        make_private(target, access)
        for batch in sorted(target.glob("batch-*")):
            seal_anew(batch, self.schema, seal, listed=False)
        (target / _FAILED).unlink(missing_ok=True)
        query = None if (target / _END).exists() else self._start(target, seal)
        return StagedStream(target, seal, query, self.schema, self.rate, self.discover_interval_ms)

    def _start(self, target: Path, seal: Seal) -> StreamingQuery:
        schema = self.schema

        def stage(batch: DataFrame, batch_id: int) -> None:
            _stage_batch(str(target), schema, seal, batch, batch_id)

        writer = self._df.writeStream.foreachBatch(stage)
        writer = writer.option("checkpointLocation", (target / _CHECKPOINT).as_uri())
        if self._trigger is not None:
            writer = writer.trigger(**self._trigger)
        try:
            return writer.start()
        except Exception as e:
            raise DataError(f"the streaming query cannot be started: {first_line(e)}") from e


class StagedStream(StagedFiles):
    """The staged batches of a streaming query.  The driver's copy watches over the query."""

    def __init__(
        self,
        directory: Path,
        seal: Seal,
        query: StreamingQuery | None,
        schema: pa.Schema,
        rate: float | None,
        discover_interval_ms: float,
    ) -> None:
        super().__init__(
            directory,
            seal,
            format="parquet",
            schema=schema,
            rate=rate,
            watch=True,
            discover_interval_ms=discover_interval_ms,
            settle_ms=0,
            end_marker=str(directory / _END),
        )
        self._directory = directory
        self._query = query
        self._stopped = threading.Event()
        if query is not None:
            self._watcher = threading.Thread(target=self._await_end, args=(query,), name="staged-stream", daemon=True)
            self._watcher.start()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {k: v for k, v in state.items() if k not in ("_query", "_stopped", "_watcher")}

    def discover(self) -> list[Split]:
        """One split per staged file.

        Raises:
            DataError: the query failed.
        """
        with contextlib.suppress(FileNotFoundError):
            raise DataError(f"the streaming query failed: {(self._directory / _FAILED).read_text()}")
        return super().discover()

    def stop(self) -> None:
        """Stop the query without calling the stream ended; only in the driver, when the job ends.  Idempotent."""
        if self._query is None:
            return
        self._stopped.set()
        with contextlib.suppress(Exception):  # the session may be gone, and the query with it
            self._query.stop()
        self._watcher.join(timeout=10)

    def _await_end(self, query: StreamingQuery) -> None:
        try:
            query.awaitTermination()
            name, text = _END, ""
        except Exception as e:
            name, text = _FAILED, first_line(e)
        if not self._stopped.is_set():
            write_durably(self._directory / name, text.encode())


def _stage_batch(directory: str, schema: pa.Schema, seal: Seal, batch: DataFrame, batch_id: int) -> None:
    """Write a micro-batch into its own folder.  One that is there already may have been read: it stays."""
    target = Path(directory, f"batch-{batch_id:012d}")
    if target.exists():
        return
    temporary = target.with_name(f"_staging-{batch_id}-{uuid.uuid4().hex}")
    try:
        write_parquet(batch, temporary)
        write_durably(temporary / STAGED_FILE, sealed_staged(list_of(temporary, schema, seal), seal))
        os.rename(temporary, target)
        fsync_path(str(target.parent))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
