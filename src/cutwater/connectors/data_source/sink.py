"""A stream writer as a sink: the user's ``write`` runs in the subtasks, its ``commit`` in the driver.

``write`` takes the rows between two barriers while they come, from a bounded queue, in a thread of its own: they are
written once, and memory holds a few batches of them.  Kept until the barrier they would be written twice, or held as a
whole; what that would buy, another try of ``write`` without going back, is not worth it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import msgspec
import pyarrow as pa

from cutwater.connectors.base import Json, PreCommit, SinkContext
from cutwater.connectors.data_source import spark_api
from cutwater.connectors.data_source.committer import GlobalCommitter, MessageHandle, Messages
from cutwater.connectors.data_source.hosted import Hosted, pickled_by
from cutwater.connectors.files.schemas import cast_batch, plain_schema
from cutwater.connectors.staging import UNGUARDED, Guard
from cutwater.errors import BuildError, ConfigError, CutwaterError, InvariantError, UserCodeError
from cutwater.storage.store.opening import absolute_uri

_BATCHES = 4
"""So many wait for ``write``."""
_LOOK_S = 0.1


@dataclass(frozen=True)
class DataSourceSink:
    """What ``DataSource.streamWriter`` gives.

    Args:
        hosted: the data source.
        parallelism: number of subtasks; ``None``: the job's.
        idempotent: ``commit`` bears being called again with the same batch id.  If not, the sink says at-least-once.
        directory: for what ``write`` returned, until it is committed; given by the runtime through ``bind``.
        guard: of it; given through ``guarded``.

    Raises:
        ConfigError: the parallelism is below 1.
    """

    commits_globally = True

    hosted: Hosted
    parallelism: int | None = None
    idempotent: bool = True
    directory: str | None = field(default=None, kw_only=True)
    guard: Guard = field(default=UNGUARDED, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.parallelism is not None and self.parallelism < 1:
            raise ConfigError(f"parallelism must be at least 1, got {self.parallelism}")

    @property
    def guarantee(self) -> Literal["exactly-once", "at-least-once"]:
        return "exactly-once" if self.idempotent else "at-least-once"

    def bind(self, directory: str) -> Self:
        """The same sink, with a directory."""
        return replace(self, directory=absolute_uri(directory))

    def guarded(self, guard: Guard) -> Self:
        """The same sink, whose files are guarded."""
        return replace(self, guard=guard)

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink.check``.

        Raises:
            BuildError: the data source has no stream writer, or Spark no such column.
        """
        if not spark_api.overridden(self.hosted.cls, "streamWriter"):
            raise BuildError(
                f"{self.hosted.name} has no streamWriter()",
                hint="A batch writer() knows no batch id by which a commit that comes twice could be told.",
            )
        spark_api.arrow_schema(spark_api.struct_type(plain_schema(schema)))

    def messages(self, job_uid: str, step: str) -> Messages:
        """What was written and is not committed."""
        if self.directory is None:
            raise InvariantError("a data source's writer was started before it was bound to a directory", step=step)
        return Messages(self.directory, job_uid, self.guard)

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> DataSourceWriter:
        """See ``Sink.writer``."""
        struct = spark_api.struct_type(plain_schema(schema))
        return DataSourceWriter(self.hosted, struct, self.messages(ctx.job_uid, ctx.step), ctx)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> GlobalCommitter:
        """See ``Sink.committer``."""
        struct = spark_api.struct_type(plain_schema(schema))
        return GlobalCommitter(self.hosted, struct, self.messages(job_uid, step), job_uid)


def stream_writer(hosted: Hosted, struct: Any) -> Any:
    """A writer of the user's; rows are appended."""
    with hosted.calling("streamWriter() failed"):
        return hosted.made().streamWriter(struct, False)


class _AbandonedError(Exception):
    """The subtask ends: nobody wants the rows any more."""


class Writing:
    """One call of the user's ``write``, in a thread.

    Args:
        hosted, struct: whose, and of which rows.
        what: is written, for errors.
    """

    def __init__(self, hosted: Hosted, struct: Any, what: str) -> None:
        self._hosted, self._struct, self._what = hosted, struct, what
        self._queue: queue.SimpleQueue[pa.RecordBatch | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(_BATCHES)
        self._abandoned = threading.Event()
        self._error: CutwaterError | None = None
        self._message = ""
        self.rows = 0
        self._thread = threading.Thread(target=self._run, name="cutwater-write", daemon=True)
        self._thread.start()

    def put(self, batch: pa.RecordBatch) -> None:
        """Hand rows over; waits while many wait already.

        Raises:
            UserCodeError: ``write`` failed.
        """
        self.rows += batch.num_rows
        while not self._free.acquire(timeout=_LOOK_S):
            if not self._thread.is_alive():
                break  # it wants no more rows, which is its right
        if self._error is not None:
            raise self._error
        self._queue.put(batch)

    def end(self) -> None:
        """No row will follow."""
        self._queue.put(None)

    def message(self) -> str:
        """What ``write`` returned, pickled; waits for it.  After ``end``.

        Raises:
            UserCodeError: it failed.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._message

    def abandon(self) -> None:
        """Let ``write`` fail, at the next row that it wants."""
        self._abandoned.set()
        self._queue.put(None)

    def _run(self) -> None:
        try:
            writer = stream_writer(self._hosted, self._struct)
            rows = self._batches() if spark_api.takes_batches(writer) else self._rows()
            with self._hosted.calling(f"write() failed on {self._what}"):
                message = writer.write(rows)
            if not spark_api.is_commit_message(message):
                raise UserCodeError(
                    f"{self._hosted.name}: write() returned a {type(message).__name__}, no WriterCommitMessage"
                )
            self._message = pickled_by(self._hosted, message, f"what write() returned, {message!r:.200},")
        except CutwaterError as error:
            self._error = error
        except BaseException as error:  # a thread that ends without a word would count as one that has written
            self._error = UserCodeError(f"{self._hosted.name}: write() failed on {self._what}: {error!r}")

    def _batches(self) -> Iterator[pa.RecordBatch]:
        while (batch := self._queue.get()) is not None:
            self._free.release()
            yield batch
        if self._abandoned.is_set():
            raise _AbandonedError("the job goes back, or has ended: these rows will not be committed")

    def _rows(self) -> Iterator[Any]:
        to_rows = spark_api.ColumnsToRows(self._struct)
        for batch in self._batches():
            yield from to_rows.rows(batch)


class _Cut:
    """A call of ``write`` that a barrier has ended."""

    def __init__(self, checkpoint_id: int, writing: Writing) -> None:
        self.checkpoint_id, self.writing = checkpoint_id, writing
        self.handle: MessageHandle | None = None


class DataSourceWriter:
    """One subtask's writer.

    Args:
        hosted, struct: whose, and of which rows.
        messages: where what ``write`` returns is kept.
        ctx: who writes.
    """

    def __init__(self, hosted: Hosted, struct: Any, messages: Messages, ctx: SinkContext) -> None:
        self._hosted, self._struct, self._messages, self._ctx = hosted, struct, messages, ctx
        messages.make()
        self._schema = spark_api.arrow_schema(struct)
        self._writing: Writing | None = None
        self._told: list[_Cut] = []
        """Cuts that no snapshot has yet."""

    def write(self, batch: pa.RecordBatch) -> None:
        """See ``SinkWriter``.

        Raises:
            UserCodeError: the user's ``write`` failed.
        """
        if not batch.num_rows:
            return
        if self._writing is None:
            what = f"the rows of subtask {self._ctx.subtask}"
            self._writing = Writing(self._hosted, self._struct, what)
        self._writing.put(cast_batch(batch, self._schema))

    def roll(self) -> None:
        """Every ``pre_commit`` ends a ``write``."""

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        """See ``SinkWriter``.  A subtask without rows since the last barrier has nothing to commit."""
        if self._writing is not None:
            self._writing.end()
            self._told.append(_Cut(checkpoint_id, self._writing))
            self._writing = None
        cuts = list(self._told)

        def snapshot() -> PreCommit:
            handles = [self._handle(cut) for cut in cuts]
            self._told = [cut for cut in self._told if cut not in cuts]
            return PreCommit([msgspec.to_builtins(handle) for handle in handles])

        return snapshot

    def _handle(self, cut: _Cut) -> MessageHandle:
        if cut.handle is None:
            ctx, message = self._ctx, cut.writing.message()
            made = MessageHandle(
                ctx.job_uid, cut.checkpoint_id, ctx.subtask, ctx.incarnation, cut.writing.rows, message
            )
            self._messages.keep(made)
            cut.handle = made
        return cut.handle

    def close(self) -> None:
        """See ``SinkWriter``."""
        if self._writing is not None:
            self._writing.abandon()
