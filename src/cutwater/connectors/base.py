"""The connector seam: replayable sources and transactional sinks.

A source is a set of *splits*; each split is read from a *position* (the next unread row, never the last read one) and
can be read again from any position of a retained snapshot.  A sink *pre-commits* with the snapshot and *commits* when
told that the checkpoint completed; commit is idempotent.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import msgspec
import numpy as np
import pyarrow as pa

from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import BuildError, CutwaterError

if TYPE_CHECKING:
    from cutwater.operators.row_filters import RowFilter

Json = Any
"""A value that JSON can hold: positions, handles and split descriptions are written into the manifest as they are."""

BadRows = Literal["fail", "dead_letter"]
Guarantee = Literal["exactly-once", "at-least-once"]

dead_letter_schema = pa.schema(
    [
        pa.field("step", pa.string(), nullable=False),
        pa.field("origin", pa.string()),  # file, table or split
        pa.field("position", pa.int64()),  # line (from 1) of a text file, row (from 0) elsewhere
        pa.field("reason", pa.string(), nullable=False),
        pa.field("raw", pa.string()),  # the line, or the row as JSON
    ]
)


def check_rate(rate: object) -> None:
    """Refuse a rate that is neither ``None`` (as fast as possible) nor a number of rows per second above 0.

    Raises:
        BuildError: with what to write.

    >>> check_rate(1000), check_rate(None)
    (None, None)
    """
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, Real) or not float(rate) > 0:  # not: NaN is no rate either
        raise BuildError(
            f"a rate is a number of rows per second above 0, not {rate!r}",
            hint="Write for example 1000 (or None: as fast as possible).",
        )


class Split(msgspec.Struct, frozen=True):
    """A piece of a source that one subtask reads in order.

    ``id`` is unique within the source and stable over runs; ``data`` says how to find the piece.
    """

    id: str
    data: Json = None


SIZE, WEIGHT = "size", "weight"
"""In ``Split.data``: bytes of the file that the split is or lies in, and how many of them it is to count for.

Splits are dealt so that each subtask gets about as many bytes; those that tell neither count for one.
"""
PART_OF = "part_of"
"""In ``Split.data``: the id of a split that is the whole of which this one is a part.

A snapshot of an older version may know the whole: then the parts are read already, or will be, and are not dealt.
"""


class SourceContext(Protocol):
    """Services of the runtime for a reader."""

    job_uid: str
    step: str
    subtask: int
    incarnation: int
    """See ``SinkContext``."""

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        """Hand over a bad row (only called when the source was made with ``bad_rows="dead_letter"``)."""


class SplitReader(Protocol):
    """Reads one split, in order, from one thread."""

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """Up to ``max_rows`` next rows (at least one), or ``None`` when there is nothing to read now.

        Must not block for long.  A bad row raises ``DataError`` with origin and line, or goes to ``ctx.dead_letter``.
        """
        ...

    @property
    def position(self) -> Json:
        """Position of the next read.  A reader opened at this position returns exactly the rows not yet returned."""
        ...

    @property
    def exhausted(self) -> bool:
        """True once the split is read to its end for ever."""
        ...

    @property
    def origin(self) -> str:
        """For messages: the file (or other name) and row range of the last batch."""
        ...

    def close(self) -> None: ...


class PassedOver(NamedTuple):
    """Rows of a split that a reader left out, since no step has a use for them."""

    rows: int
    latest_us: int
    """None of them has a later event time, in microseconds."""


def take_passed_over(reader: SplitReader) -> PassedOver | None:
    """What a reader has left out since this was asked last, all of it before the rows it gave last.

    A reader that leaves rows out has a method of this name; others leave none out.
    """
    own = getattr(reader, "take_passed_over", None)
    return None if own is None else own()


def lag_of(reader: SplitReader) -> int | None:
    """How many rows a reader has still to read, as far as it knows; ``None`` if it does not.

    A reader that knows has a property ``lag_rows``.
    """
    return getattr(reader, "lag_rows", None)


class SourceSnapshot(msgspec.Struct, frozen=True):
    """One read step in a checkpoint: where its splits are to be read on."""

    checkpoint_id: int
    positions: dict[str, Json]
    """By split; ``None``: it has not been begun."""


class SourceCommitter(Protocol):
    """Tells another system what no restore will ask for any more; in a driver that owns the job log.

    For systems that keep data until they are told: replication slots, queues, streams of Spark's ``DataSource``.  It is
    made by the driver's copy of the source, the one that is asked to ``discover``, and may share with it what only a
    driver has.  An error is told to the user, and is no reason to stop.
    """

    def settle(self, retained: Sequence[SourceSnapshot], incarnation: int) -> None:
        """At a restore, before the new readers open: clear away what older incarnations left and no checkpoint names.

        Never touches what readers of ``incarnation`` and above made.

        Args:
            retained: all checkpoints that a restore may choose, the restored one included; the oldest first.
            incarnation: of the readers to come.
        """

    def retain(self, retained: Sequence[SourceSnapshot]) -> None:
        """No restore goes to a checkpoint before the first of ``retained``: what lies before it may go.

        Called in a thread of its own, about once a second at most, with the newest state only, which may be one that
        it knows.  After an error the next call tries again.

        Args:
            retained: all checkpoints that a restore may choose; the oldest first, and at least one.
        """

    def finish(self, final: SourceSnapshot | None, incarnation: int) -> None:
        """The job has finished: everything may go that readers up to ``incarnation`` made.  Idempotent.

        Args:
            final: the last checkpoint; ``None``: there is none to be had.
            incarnation: of the last readers.
        """

    def close(self) -> None:
        """The driver ends, and calls nothing of this any more.  Idempotent."""


class Source(Protocol):
    """A source as passed to ``flow.read``: a picklable value.  ``SourceHooks`` has what it may have besides."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows.  May look at the data once (for example at the first file's footer).

        Raises:
            BuildError: nothing there to take a schema from and none given.
        """
        ...

    @property
    def bounded(self) -> bool:
        """True if ``discover`` returns all splits at once and for ever."""
        ...

    @property
    def replayable(self) -> bool:
        """False for a source that cannot be rewound: refused for exactly-once."""
        ...

    @property
    def rate(self) -> float | None:
        """Rows per second over all subtasks; ``None`` for as fast as possible."""
        ...

    @property
    def discover_interval_ms(self) -> float:
        """Time between two questions for new splits to an unbounded source."""
        ...

    def discover(self) -> list[Split]:
        """All splits known now, in reading order.  Runs in the driver.  Ids already known are ignored."""
        ...

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> SplitReader:
        """A reader at ``position`` (``None``: the beginning)."""
        ...


class SinkContext(Protocol):
    """Identity of a sink's subtask.  A pre-commit handle is named by it (T1)."""

    job_uid: str
    step: str
    subtask: int
    parallelism: int
    incarnation: int
    """Unique among all subtask runs of the job, over all attempts and drivers."""


class PreCommit(msgspec.Struct, frozen=True):
    """A sink's part of a snapshot.

    ``handles`` are committed when the checkpoint completes; ``state`` is given to the writer that continues after a
    restore (for example the file in progress and its durable length).  Both lie in the manifest.
    """

    handles: list[Json] = []
    state: Json = None


class SinkWriter(Protocol):
    """One subtask's writer."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows.  They must stay invisible to readers until committed."""

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        """Cut at the barrier: rows written so far belong to ``checkpoint_id``.  Cheap, runs in the loop.

        The returned function runs in the snapshot thread, makes the rows durable and returns the handles.
        ``final``: no row will follow; everything still open becomes part of the handles.
        """
        ...

    def roll(self) -> None:
        """A savepoint follows: the next ``pre_commit`` leaves no row in progress, all of them are in its handles."""

    def close(self) -> None:
        """Stop without committing anything.  Called once, also after a failure."""


class SinkSnapshot(msgspec.Struct, frozen=True):
    """One write step in a checkpoint: the ``PreCommit`` of all its subtasks."""

    checkpoint_id: int
    handles: list[Json] = []
    states: list[Json] = []


class Committer(Protocol):
    """Brings what readers see in line with the job log.

    ``commit`` is called in the worker when a checkpoint completed, in its loop, or in the thread of its commits where
    the sink ``commits_in_background``; the rest only in a driver that owns the job log.

    A sink that ``commits_globally`` has its ``commit`` called in the driver, too, with the handles of all its subtasks:
    in a thread of its own, never two at once nor beside the other methods.  A commit may cover several checkpoints, and
    name handles that were committed already: they are handed in until all subtasks know that they are.  So each handle
    carries the checkpoint at which it was cut; ids grow for as long as the job lives, whatever it goes back to (T5).
    """

    takes_back: bool
    """True if ``settle`` undoes what later checkpoints committed."""

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        """Make the rows visible.  Idempotent: handles already committed are skipped."""

    def settle(self, restored: SinkSnapshot | None, retained: Sequence[SinkSnapshot], incarnation: int) -> None:
        """At a restore, before the new writers open: commit what ``restored`` names, then undo all others (T2).

        Afterwards readers see what ``restored`` and the checkpoints before it committed, and nothing else: what later
        ones made visible is taken back, durably.  Staged rows stay if one of ``retained`` needs them, so that each of
        those can still be restored.  Can be repeated after a crash half way.

        Never touches what another job's uid wrote (T3), nor what writers of ``incarnation`` and above did: a driver
        that was paused may come here when its successor's writers are at work.

        Args:
            restored: the chosen checkpoint; ``None``: the job begins with nothing.
            retained: all checkpoints that a later restore may choose, ``restored`` included.
            incarnation: of the writers to come.
        """

    def retire(self, retired: SinkSnapshot, retained: Sequence[SinkSnapshot]) -> None:
        """``retired`` will not be restored any more: remove staged rows that it needed and ``retained`` do not."""

    def finish(self, incarnation: int) -> None:
        """The final checkpoint is committed and the job log says so: remove all staging up to ``incarnation``.

        Idempotent; nothing is restored after it.
        """


class SubtaskCommitter(Committer, Protocol):
    """One that can go back for some subtasks of its step, and leave the others' rows alone.

    Where a sink's committer cannot, all its subtasks go back together (``recovery="region"``).
    """

    def settle_subtasks(
        self,
        restored: SinkSnapshot | None,
        retained: Sequence[SinkSnapshot],
        incarnation: int,
        subtasks: Container[int],
    ) -> None:
        """``settle`` for what these subtasks wrote; ``restored`` names theirs only.

        No checkpoint after ``restored`` has completed, so nothing that is visible must be taken back.
        """


class Sink(Protocol):
    """A sink as passed to ``stream.write``: a picklable value.  ``SinkHooks`` has what it may have besides."""

    @property
    def guarantee(self) -> Guarantee: ...

    @property
    def parallelism(self) -> int | None:
        """A fixed parallelism of the step, or ``None`` for the job's."""
        ...

    def check(self, schema: pa.Schema) -> None:
        """Called when the dataflow is built.

        Raises:
            BuildError: the sink cannot write such rows, or its target cannot be written.
        """

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> SinkWriter:
        """A writer; ``restored``: the ``PreCommit.state`` values this subtask takes over (none at a first start)."""
        ...

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> Committer: ...


@dataclass(frozen=True)
class SourceHooks:
    """Optional parts of a source, by the names they have there; each has a default for a source without it."""

    source: Source

    @property
    def interleave(self) -> bool:
        """Splits are read in turns, a batch of each; by default one after the other."""
        return getattr(self.source, "interleave", False)

    @property
    def time_ordered(self) -> bool:
        """Each split begins no earlier in event time than the one before; by default nothing is known."""
        return getattr(self.source, "time_ordered", False)

    @property
    def ended(self) -> bool:
        """Of an unbounded source: no split will come any more.  By default some may always come."""
        return getattr(self.source, "ended", False)

    @property
    def lists_anew(self) -> bool:
        """What it lists of a split stands before what a snapshot says of it; by default the snapshot is right."""
        return getattr(self.source, "lists_anew", False)

    @property
    def bad_rows(self) -> BadRows | None:
        """Fate of rows that cannot be read; by default the source knows none."""
        return getattr(self.source, "bad_rows", None)

    def with_bad_rows(self, bad_rows: BadRows) -> Source:
        """The source with another fate for rows that cannot be read.

        Raises:
            BuildError: it knows none.
        """
        own = getattr(self.source, "with_bad_rows", None)
        if own is None:
            kind = type(self.source).__name__
            raise BuildError(f"a {kind} has no bad rows to divert", hint="Leave bad_rows out.")
        return own(bad_rows)

    def reading(self, columns: frozenset[str] | None, *, dictionaries: bool) -> Source:
        """The source where nobody reads other columns than these (``None``: all): those may be null.

        With ``dictionaries`` texts may come as such.  By default it is the source itself.
        """
        own = getattr(self.source, "reading", None)
        wanted = columns is not None or dictionaries
        return own(columns, dictionaries=dictionaries) if own is not None and wanted else self.source

    def passing_over(self, filters: tuple[RowFilter, ...], event_time: str | None) -> Source:
        """The source that may leave out rows that do not fulfil each of the filters; by default it leaves none out.

        Its readers tell how many they left out, and how far these had come in event time (``take_passed_over``).
        """
        own = getattr(self.source, "passing_over", None)
        return own(filters, event_time) if own is not None and filters else self.source

    @property
    def changes(self) -> tuple[str, ...] | None:
        """Columns that tell the rows of an updating stream apart, none if unknown; by default it is none (``None``)."""
        return getattr(self.source, "changes", None)

    @property
    def knows_lag(self) -> bool:
        """Its readers know how many rows they have still to read (``lag_of``); by default they do not."""
        return getattr(self.source, "knows_lag", False)

    @property
    def repeatable(self) -> bool:
        """From a position come the same rows in the same order; by default they do.

        Otherwise only rows after a restore of everything behind it are right (``recovery="job"`` or ``"region"``).
        """
        return getattr(self.source, "repeatable", True)

    @property
    def one_after_another(self) -> bool:
        """A row of one split may only count behind those of the splits before; by default their order is no matter.

        Then one subtask reads them all.
        """
        return getattr(self.source, "one_after_another", False)

    @property
    def partial_changes(self) -> bool:
        """A row that leaves may hold nothing but the columns of ``changes``, and ``flow.read`` makes it whole.

        By default it comes as it was added, or the user has asked for its key only.
        """
        return getattr(self.source, "partial_changes", False)

    def committer(self, job_uid: str, step: str) -> SourceCommitter | None:
        """What is told which checkpoints are retained; by default nobody has to be."""
        own = getattr(self.source, "committer", None)
        return None if own is None else own(job_uid, step)

    @property
    def passes_over_by(self) -> list[str]:
        """Filters by which rows may be left out, as text; by default none."""
        return getattr(self.source, "passes_over_by", [])

    @property
    def earliest_time(self) -> Callable[[Split, str, int], int | None] | None:
        """A function of a split, its event-time column and the bound: see ``earliest_time`` in ``connectors.files``."""
        return getattr(self.source, "earliest_time", None)

    @property
    def is_staged(self) -> bool:
        """``stage`` copies the rows into a folder of the job before they are read."""
        return hasattr(self.source, "stage")

    @property
    def stages_in_store(self) -> bool:
        """``stage`` is given a folder of the job's store by its URI; by default one of the file system."""
        return getattr(self.source, "stages_in_store", False)

    @property
    def pickles_user_code(self) -> bool:
        """``stage`` pickles objects of the user's for the workers; by default it pickles nothing."""
        return getattr(self.source, "pickles_user_code", False)

    def guarded(self, guard: object) -> Source:
        """The source in a worker, which compares what it finds in its folder with the job's seal; by default itself."""
        own = getattr(self.source, "guarded", None)
        return self.source if own is None else own(guard)

    def stage(self, *where: object) -> Source:
        """The source over a copy of its rows in a folder; by default itself."""
        return cast(Any, self.source).stage(*where) if self.is_staged else self.source

    def goes_on(self, known: Mapping[str, Json], listed: list[Split]) -> list[Split]:
        """What was listed, as it is to be read where a snapshot has some of the splits; by default as it is.

        Args:
            known: what the snapshot says of its splits (``Split.data``), by their ids.
            listed: by ``discover`` since the driver began, those known among them.
        """
        own = getattr(self.source, "goes_on", None)
        return listed if own is None else own(known, listed)

    def stop(self) -> None:
        """End whatever stages rows all the time; by default nothing does."""
        own = getattr(self.source, "stop", None)
        if own is not None:
            own()


@dataclass(frozen=True)
class SinkHooks:
    """Optional parts of a sink, by the names they have there; each has a default for a sink without it."""

    sink: Sink

    @property
    def for_people_only(self) -> bool:
        """Rows that come twice do no harm, whatever the job promises; by default they do."""
        return getattr(self.sink, "for_people_only", False)

    @property
    def commits_globally(self) -> bool:
        """One commit in the driver for all subtasks; by default each subtask commits its own in its worker."""
        return getattr(self.sink, "commits_globally", False)

    @property
    def commits_in_background(self) -> bool:
        """A commit takes long, as one in another system does, and runs beside the stream, in a thread of its own.

        By default it runs in the worker's loop, which makes a short one sooner and cheaper.
        """
        return getattr(self.sink, "commits_in_background", False)

    def bind(self, directory: str) -> Sink:
        """The sink with a directory of the job for its own use; by default it needs none."""
        return self._changed("bind", directory)

    def guarded(self, guard: object) -> Sink:
        """The sink that guards what it stages; by default it stages nothing."""
        return self._changed("guarded", guard)

    def applying(self, changes: tuple[str, ...]) -> Sink:
        """The sink for an updating stream, whose rows these columns tell apart (none if unknown); by default it writes
        what comes.

        Raises:
            BuildError: it cannot.
        """
        return self._changed("applying", changes)

    def _changed(self, hook: str, argument: object) -> Sink:
        own = getattr(self.sink, hook, None)
        return self.sink if own is None else own(argument)


def settles_subtasks(committer: Committer) -> bool:
    """True for a ``SubtaskCommitter``."""
    return hasattr(committer, "settle_subtasks")


_ROWS = 64
"""The first row that has a time is looked for among so many."""


class _Unheard:
    """A reader's context when it only has a look: what it finds wrong is said when the rows are read."""

    job_uid, step, subtask, incarnation = "", "", 0, 0

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        return


def earliest_time(source: Source, split: Split, column: str, bound_us: int) -> int | None:
    """No row of a split that keeps its promise has an event time before this, microseconds since the epoch.

    A source that knows better than by its first row has a method of this name, with the arguments behind ``source``.

    Args:
        source: of the split.
        split: not read yet.
        column: of the event time.
        bound_us: how far a row may come after a younger one of its split.

    Returns:
        the largest integer for a split without rows; ``None`` where it cannot be told.
    """
    told = SourceHooks(source).earliest_time
    try:
        if told is not None:
            return told(split, column, bound_us)
        return earliest_of_first_row(source.open(split, None, _Unheard()), column, bound_us)
    except CutwaterError:
        return None  # whoever reads the split will meet it again


def earliest_of_first_row(reader: SplitReader, column: str, bound_us: int) -> int | None:
    """As far before the first row as the bound allows; the reader is closed."""
    try:
        batch = reader.read(_ROWS)
        return earliest_of(batch, column, bound_us, ended=reader.exhausted)
    finally:
        reader.close()


def earliest_of(batch: pa.RecordBatch | None, column: str, bound_us: int, *, ended: bool) -> int | None:
    """As far before the first of the rows that has a time as the bound allows.

    Args:
        ended: there are no rows behind these.
    """
    if batch is None or not batch.num_rows:
        return MAX_WATERMARK if ended else None
    try:
        times: Any = batch.column(column)
        valid = times.drop_null().cast(pa.timestamp("us", getattr(times.type, "tz", None))).cast(pa.int64())
    except pa.ArrowException:
        return None
    return int(np.asarray(valid)[0]) - bound_us if len(valid) else None
