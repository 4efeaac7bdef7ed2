"""The sink for anything else: a user's function gets the rows of each checkpoint, as in Spark's ``foreachBatch``."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import msgspec
import pyarrow as pa

from cutwater.connectors.base import Json, PreCommit, SinkContext, SinkSnapshot
from cutwater.connectors.files.schemas import cast_batch, plain_schema
from cutwater.connectors.staging import (
    UNGUARDED,
    EndHandle,
    Guard,
    PieceCut,
    StagingArea,
    StagingLog,
    check_piece,
    converted,
    open_piece,
    staging_in_store,
)
from cutwater.connectors.staging_folders import StoreFolder
from cutwater.data.decoding import prepare
from cutwater.errors import BuildError, ConfigError, InvariantError, UserCodeError
from cutwater.storage.store.opening import absolute_uri


class EpochHandle(msgspec.Struct, frozen=True, tag="epoch"):
    """The rows of one subtask between two barriers."""

    uid: str
    checkpoint_id: int
    subtask: int
    rows: int
    piece: PieceCut


prepare(EpochHandle | EndHandle)


@dataclass(frozen=True)
class EpochSink:
    """Base of sinks whose rows wait in the job's store until their checkpoint is complete."""

    directory: str | None = field(default=None, kw_only=True)
    """Where rows wait; given by the runtime through ``bind``."""
    guard: Guard = field(default=UNGUARDED, repr=False, compare=False, kw_only=True)
    """Of these rows; given through ``guarded``."""

    @property
    def commits_in_background(self) -> bool:
        """See ``SinkHooks``: an epoch goes into another system, or to a user's function."""
        return True

    def bind(self, directory: str) -> Self:
        """The same sink, staging below ``directory``."""
        return replace(self, directory=absolute_uri(directory))

    def guarded(self, guard: Guard) -> Self:
        """The same sink, whose staged rows are guarded."""
        return replace(self, guard=guard)

    def area(self, job_uid: str, step: str) -> StagingArea[StoreFolder]:
        """The staging of a write step."""
        if self.directory is None:
            raise InvariantError(f"a {type(self).__name__} was started before it was bound to a directory", step=step)
        return staging_in_store(self.directory, job_uid, step, self.guard)


@dataclass(frozen=True)
class ForeachBatchSink(EpochSink):
    """Calls ``fn(table, checkpoint_id)`` with the rows between two barriers, once their checkpoint is safe.

    Without a failure there is one call per checkpoint, none for a checkpoint without rows.  After a failure the last
    call may come again, with the same rows in the same order and the same id, in a worker or in the driver: an ``fn``
    that skips an id which it has written already makes the output exactly-once.  (If a checkpoint is aborted, its rows
    come with the next one that completes, in a call of their own, under the id at which they were cut.)

    The function runs in a Spark worker (there is no session), or in the driver when a job is restored.

    Args:
        fn: the function.  With a parallelism above 1 every subtask hands over its own share, and ``fn`` is called as
            ``fn(table, checkpoint_id, subtask)``: the pair names the rows.
        parallelism: number of subtasks.
        idempotent: whether ``fn`` bears being called again with the same id.  If not, the sink says at-least-once.

    Raises:
        ConfigError: the parallelism is below 1.
    """

    fn: Callable[..., Any]
    parallelism: int = 1
    idempotent: bool = True

    def __post_init__(self) -> None:
        if self.parallelism < 1:
            raise ConfigError(f"parallelism must be at least 1, got {self.parallelism}")

    @property
    def guarantee(self) -> Literal["exactly-once", "at-least-once"]:
        return "exactly-once" if self.idempotent else "at-least-once"

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink.check``.

        Raises:
            BuildError: ``fn`` cannot be called with what it will be given.
        """
        arguments = ("table", "checkpoint_id", "subtask")[: 2 if self.parallelism == 1 else 3]
        try:
            inspect.signature(self.fn).bind(*arguments)
        except TypeError as error:
            raise BuildError(
                f"{getattr(self.fn, '__name__', self.fn)!r} cannot be called as fn({', '.join(arguments)}): {error}",
                hint="The function gets a pyarrow.Table and the id of the checkpoint; with a parallelism above 1 also "
                "the number of the subtask.",
            ) from error
        except ValueError:
            return  # a builtin without a signature: the first call shows

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> EpochWriter:
        return EpochWriter(self.area(ctx.job_uid, ctx.step), plain_schema(schema), ctx)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> EpochCommitter:
        return EpochCommitter(self.area(job_uid, step), lambda table, epoch: self._call(table, epoch, step))

    def _call(self, table: pa.Table, epoch: EpochHandle, step: str) -> None:
        key = (epoch.checkpoint_id, epoch.subtask)[: 1 if self.parallelism == 1 else 2]
        try:
            self.fn(table, *key)
        except Exception as error:
            raise UserCodeError(
                f"foreach_batch failed on the {epoch.rows} rows of checkpoint {epoch.checkpoint_id}:\n"
                + "".join(traceback.format_exception(error)),
                step=step,
            ) from error


def check_upsert_key(changes: tuple[str, ...], key: tuple[str, ...], otherwise: str) -> None:
    """Refuse an upsert of an updating stream by a key that does not tell its rows apart.

    Args:
        changes: the columns that do; none if unknown.
        key: of the upsert.
        otherwise: why that cannot be, for the error.

    Raises:
        BuildError: with the key to write.

    >>> check_upsert_key(("k",), ("k", "n"), "the table has one row for each k, n")
    """
    if changes and set(changes) <= set(key):
        return
    known = f"are told apart by {', '.join(changes)}" if changes else "have no known key"
    raise BuildError(
        f"the rows of the updating stream {known}, but {otherwise}",
        hint=f"Write key=[{', '.join(map(repr, changes))}]."
        if changes
        else "Say which columns tell its rows apart: .with_changes('column'); of top(...) rank='place' is one.",
    )


class EpochWriter:
    """One subtask's writer: rows of an epoch go to one piece, which the barrier seals."""

    def __init__(self, area: StagingArea[StoreFolder], schema: pa.Schema, ctx: SinkContext) -> None:
        self._area = area
        self._schema = schema
        self._ctx = ctx
        self._log = StagingLog(area, schema, ctx.subtask, ctx.incarnation)
        self._pending: list[EpochHandle] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._log.append(cast_batch(batch, self._schema))

    def roll(self) -> None:
        """Every ``pre_commit`` seals what was written."""

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        self._log.seal()
        uid, subtask = self._ctx.job_uid, self._ctx.subtask
        self._area.require("rows that are not handed over yet", self._pending)
        # Epochs whose checkpoint was aborted, or whose commit has not come yet, go along: their rows must not be lost.
        there = self._area.folder.names() if self._pending else []
        self._pending = [epoch for epoch in self._pending if epoch.piece.file in there]
        for cut in self._log.cuts():
            self._pending.append(EpochHandle(uid, checkpoint_id, subtask, cut.rows, cut))
            self._log.drop({cut.file})
        epochs = list(self._pending)
        ends = [EndHandle(uid)] if final else []

        def snapshot() -> PreCommit:
            self._log.make_durable([epoch.piece for epoch in epochs])
            return PreCommit([msgspec.to_builtins(handle) for handle in (*epochs, *ends)])

        return snapshot

    def close(self) -> None:
        self._log.close()


class EpochCommitter:
    """Hands epochs over, oldest first, and removes what was taken.

    Args:
        area: the step's staging.
        take: takes the rows of an epoch; after a failure perhaps once more.
    """

    takes_back = False

    def __init__(self, area: StagingArea[StoreFolder], take: Callable[[pa.Table, EpochHandle], None]) -> None:
        self._area = area
        self._take = take

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        """Hand over every epoch that was not yet.

        Raises:
            CorruptSnapshotError: staged rows are torn or flipped.
            CutwaterError: they were not taken, and stay for the next try.
        """
        own = [handle for handle in self.decode(handles) if handle.uid == self._area.job_uid]
        epochs = [handle for handle in own if isinstance(handle, EpochHandle)]
        if len(epochs) == len(own):  # else the job has ended, and a first commit may have taken the folder away
            self._area.require("rows that are not handed over yet", epochs)
        there = set(self._area.folder.names() if epochs else ())
        for epoch in sorted(epochs, key=lambda epoch: (epoch.checkpoint_id, epoch.subtask)):
            if epoch.piece.file not in there:
                continue
            table = open_piece(self._area, epoch.piece, verify=True).read_all()
            self._take(table, epoch)
            self._area.folder.remove([epoch.piece.file])
            there.discard(epoch.piece.file)

    def settle(self, restored: SinkSnapshot | None, retained: Sequence[SinkSnapshot], incarnation: int) -> None:
        """Hand over what ``restored`` names, and remove the epochs that no checkpoint will.

        Raises:
            CutwaterError: as ``commit``.
        """
        self.settle_subtasks(restored, retained, incarnation, None)

    def settle_subtasks(
        self,
        restored: SinkSnapshot | None,
        retained: Sequence[SinkSnapshot],
        incarnation: int,
        subtasks: Container[int] | None,
    ) -> None:
        """See ``SubtaskCommitter``; without ``subtasks``, all of them.

        Raises:
            CutwaterError: as ``commit``.
        """
        if restored is not None:
            self.commit(restored.checkpoint_id, restored.handles)
        self._area.sweep(incarnation, subtasks=subtasks)

    def retire(self, retired: SinkSnapshot, retained: Sequence[SinkSnapshot]) -> None:
        """Nothing to do: what was not handed over when the next one was cut, that one names, too."""

    def finish(self, incarnation: int) -> None:
        """See ``Committer.finish``."""
        self._area.finish(incarnation)

    @staticmethod
    def decode(handles: list[Json]) -> list[EpochHandle | EndHandle]:
        """Handles as they lie in a manifest; what they name is checked here."""
        found: list[EpochHandle | EndHandle] = [converted(handle, EpochHandle | EndHandle) for handle in handles]
        for handle in found:
            if isinstance(handle, EpochHandle):
                check_piece(handle.piece.file)
        return found
