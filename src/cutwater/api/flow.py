"""``Dataflow``: where a program begins, and what starts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from cutwater.api.steps import keyed_steps, steps
from cutwater.api.steps.build import (
    Duration,
    GraphBuilder,
    NewStep,
    Upstream,
    distinct_columns,
    duration_us,
    plain_schema,
    require_column,
)
from cutwater.api.streams.loop import LoopStream
from cutwater.api.streams.stream import Stream
from cutwater.connectors.base import SourceHooks, dead_letter_schema
from cutwater.errors import BuildError, JobCancelledError
from cutwater.plan.checks import check_complete
from cutwater.plan.graph import LogicalGraph, StreamType

if TYPE_CHECKING:
    from os import PathLike

    from pyspark.sql import SparkSession

    from cutwater.api.jobs.job import Job
    from cutwater.api.jobs.restore_plan import RestorePlan
    from cutwater.config import ProtocolName
    from cutwater.connectors.base import BadRows, Source

_SOURCE_PARTS = ("schema", "bounded", "replayable", "rate", "discover_interval_ms", "discover", "open")


class Dataflow:
    """A program of streams.  Writing it runs nothing; ``start`` does.

    Args:
        name: of the job; its folder below the checkpoint directory.

    Raises:
        BuildError: the name cannot be that of a folder.
    """

    def __init__(self, name: str) -> None:
        self._builder = GraphBuilder(GraphBuilder.check_name(name))

    @property
    def name(self) -> str:
        """Name of the job."""
        return self._builder.name

    @property
    def graph(self) -> LogicalGraph:
        """The steps written so far."""
        return self._builder.graph

    def __repr__(self) -> str:
        return f"Dataflow({self.name!r}, {len(self._builder.steps)} steps)"

    def read(
        self,
        id: str,
        source: object,
        *,
        event_time: str | None = None,
        out_of_order: Duration = 0,
        idle_timeout: Duration | None = None,
        bad_rows: BadRows | None = None,
        rate: float | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """A stream of the rows of a source.

        Args:
            source: ``cw.files(...)``, ``cw.generate(...)``, any ``Source``, or a Spark DataFrame, batch or streaming.
            event_time: column that says when a row happened: a timestamp or a date; comes out as ``timestamp[us]``.
            out_of_order: how far behind the newest event time of its split a row may come without being late.
            idle_timeout: what has had nothing to give for so long holds back nobody's event time until it has; what it
                gives then may be late.  ``None``: everything waits for it.  It goes by the clock.
            rate: of a Spark DataFrame: rows per second over all subtasks (other sources take it themselves).
            bad_rows: "fail" the job on a row that cannot be read, or put it into ``.dead_letters``.

        A source of changes of tables (``cw.debezium``, ``cw.postgres_changes``, ``cw.delta``) gives an updating stream.
        Where a row that leaves may say no more than its key, a step ``"<id>.latest"`` keeps the rows, so that it leaves
        whole.

        Raises:
            BuildError: not a source, a source without schema, or an event-time column that is missing or no time.
        """
        with self._builder.together(), self._builder.new_step(id, (), parallelism) as step:
            made = _as_source(source, event_time, rate)
            made, bad = _with_bad_rows(made, bad_rows)
            out_of_order_us = duration_us(out_of_order, "out_of_order")
            if event_time is None and out_of_order_us:
                raise BuildError("out_of_order says nothing without event_time", hint="Name the event-time column.")
            if event_time is None and idle_timeout is not None:
                raise BuildError("idle_timeout says nothing without event_time", hint="Name the event-time column.")
            hooks = SourceHooks(made)
            outputs = [_type_read(hooks, event_time)]
            diverts = bad == "dead_letter"
            if diverts:
                outputs.append(StreamType(dead_letter_schema))
            idle = {} if idle_timeout is None else {"idle_timeout_ms": _idle_timeout_ms(idle_timeout)}
            told: dict[str, Any] = {
                "event_time": event_time,
                "out_of_order_us": out_of_order_us,
                "bad_rows": bad,
                **idle,
            }
            rows, *dead_letters = _by_one(step, hooks, id).add("read", made, outputs, **told)
            if hooks.partial_changes:
                rows = self._latest(id, rows)
        return Stream(self._builder, rows, dead_letters[0] if diverts else None)

    def _latest(self, id: str, rows: Upstream) -> Upstream:
        """The latest row of each key of a table; one that leaves comes as it is known here."""
        assert rows.type.changes is not None
        keyed, _ = steps.key_by(self._builder, rows, rows.type.changes, "error", None)
        with self._builder.new_step(f"{id}.latest", (keyed,), None) as step:
            return keyed_steps.deduplicate(step, "last", None)[0]

    def loop(
        self,
        id: str,
        stream: Stream | None = None,
        *,
        schema: str | pa.Schema | None = None,
        event_time: str | None = None,
        parallelism: int | None = None,
    ) -> LoopStream:
        """A stream that more rows are fed back to: ``loop = flow.loop("id", s)``, steps, ``loop.feed_back(result)``.

        Loops may be nested, cross each other, and lead through keys.  The columns of the loop are nullable.

        Args:
            stream: what enters the loop.
            schema: instead of a stream, of a loop that rows enter further on, at a union or join.
            event_time: with ``schema``: its event-time column.  What is fed back carries no watermark: the loop goes by
                that of the rows from outside (W3).

        Raises:
            BuildError: neither stream nor schema or both, or a stream of another dataflow.

        >>> import cutwater as cw, polars as pl
        >>> flow = cw.Dataflow("halving")
        >>> numbers = flow.loop("numbers", flow.read("in", cw.memory([], schema="n long")))
        >>> halves = numbers.with_columns("halve", n=pl.col("n") // 2)
        >>> numbers.feed_back(halves.filter("more", pl.col("n") > 1))
        >>> halves.filter("ones", pl.col("n") == 1).write("out", cw.discard())
        >>> flow.validate()
        """
        return LoopStream.begin(self._builder, id, stream, schema, event_time, parallelism)

    def validate(self) -> None:
        """Check that the dataflow is whole: every step's rows end in a sink, every loop is closed and can end.

        Raises:
            BuildError: no sink, rows that nobody reads, a loop that is never closed, that no source reaches, or that
                rows never leave; names the step.
        """
        check_complete(self.graph)

    def explain(self, *, parallelism: int = 2, max_parallelism: int = 128, protocol: ProtocolName = "aligned") -> str:
        """The logical and the physical graph as text: edges, keys, chains, parallelism, state, guarantees."""
        from cutwater.plan.explain import explain

        return explain(self.graph, parallelism=parallelism, max_parallelism=max_parallelism, protocol=protocol)

    def plan_restore(
        self,
        snapshot: str,
        *,
        parallelism: int = 2,
        max_parallelism: int = 128,
        step_ids: Mapping[str, str] | None = None,
        state_names: Mapping[str, str] | None = None,
        allow_dropped_state: bool = False,
    ) -> RestorePlan:
        """Forecast of a job that begins from a snapshot; starts and changes nothing.  Print it to read it.

        Args:
            snapshot: as ``restore=`` of ``start`` takes it: ``DIR/JOB``, ``DIR/JOB@7``, ``DIR/JOB/chk-7``, a savepoint.
            parallelism: of the job.
            max_parallelism: of the job; that of the snapshot, or it cannot be restored.
            step_ids: new ids of steps by those that they have in the snapshot.
            state_names: new names of aggregates, states and their columns, by ``"step/name"`` or
                ``"step/state/column"``.
            allow_dropped_state: state that the program no longer has may go.

        Raises:
            ConfigError: there is no such snapshot, or the mappings name steps that there are not.
            CorruptSnapshotError: it is damaged.
        """
        from cutwater.api.jobs.restore_plan import plan_restore
        from cutwater.plan.upgrade import Upgrade

        upgrade = Upgrade(dict(step_ids or {}), dict(state_names or {}), allow_dropped_state)
        return plan_restore(self, snapshot, parallelism=parallelism, max_parallelism=max_parallelism, upgrade=upgrade)

    def start(self, spark: SparkSession | None = None, **settings: Any) -> Job:
        """Start the job on a Spark session and return its handle at once.

        Args:
            spark: the session; ``None`` makes a local one.
            settings: ``checkpoint=`` (directory), ``interval=``, ``parallelism=``, ``protocol=`` ... as in
                ``JobConfig``; durations without ``_ms`` are texts such as ``"1s"``.
        """
        from cutwater.api.jobs import job

        return job.start(self, spark, **settings)

    def fork(
        self,
        snapshot: str,
        spark: SparkSession | None = None,
        *,
        name: str,
        checkpoint: str | PathLike[str] | None = None,
        follow: bool = True,
        **settings: Any,
    ) -> Job:
        """Start a second job, with this program, from a snapshot of another one, which goes on.

        Its sinks are shadows: what they would be given lies, exactly once, below the job's folder
        (``cw.compare_forks``).  Nothing of the other job is touched, until ``Job.promote`` lets this one take over.
        The same call again goes on with the fork.

        Args:
            snapshot: where to begin: ``DIR/JOB``, ``DIR/JOB@7``, ``DIR/JOB/chk-7``, or the folder of a savepoint.
            name: of the new job.
            checkpoint: directory for its checkpoints (default: the other job's).
            follow: read what the other job has checkpointed and not beyond, so that this one can take over.
            settings: as of ``start``; ``step_ids=`` and others tell how to read the snapshot.

        Returns:
            The second job's handle, at once, as ``start`` does.

        Raises:
            BuildError: a source cannot be read twice at once, or the rows of a sink cannot be kept.
            ConfigError: there is no such snapshot, the name is taken, or there is nobody to follow.
            CorruptSnapshotError: the snapshot is damaged.
            StorageError: it does not fit the program.

        Example::

            cut = job.savepoint("savepoints")
            trial = changed.fork(cut, spark, name="visits-2", checkpoint="checkpoints", interval="1s")
            trial.promote()  # once you are content with what it made
        """
        from cutwater.api.jobs import forks

        return forks.fork(self, snapshot, spark, name=name, checkpoint=checkpoint, follow=follow, **settings)

    def run(self, spark: SparkSession | None = None, *, progress: bool | None = None, **settings: Any) -> Job:
        """``start``, then wait until the job ends; raises what made it fail.

        A job that somebody stopped ends as ``stopped``: look at the ``outcome`` of what is returned, if that makes a
        difference to you.

        Args:
            spark: the session; ``None`` makes a local one.
            progress: show on standard error how far the job is: a line that is drawn anew on a terminal, else a line
                every ten seconds, by the logger ``cutwater.progress`` if logging is set up.  Standard output stays
                yours.  ``None``: yes, unless the environment has ``CUTWATER_PROGRESS=off``.
            settings: as of ``start``.

        Raises:
            JobCancelledError: somebody cancelled it: what it wrote is not all.
            CutwaterError: it failed.
        """
        from cutwater.api.jobs.script import shown

        with shown(progress) as show:
            job = self.start(spark, **settings)
            show(job)
        if job.outcome == "cancelled":
            raise JobCancelledError(
                f"job {job.name!r} was cancelled: what it wrote before stays, the rest of its input was not read",
                hint="Start it again with the same checkpoint directory to go on where its last checkpoint is.",
            )
        return job


def _as_source(value: object, event_time: str | None, rate: float | None) -> Source:
    """The source in what the user gave."""
    if hasattr(value, "as_source"):
        value = cast(Any, value).as_source()
    if type(value).__module__.startswith("pyspark.") and hasattr(value, "isStreaming"):
        from cutwater.connectors import spark_source

        frame = cast(Any, value)
        if frame.isStreaming:
            return spark_source.StreamingDataFrameSource(frame, rate=rate)
        return spark_source.DataFrameSource(frame, order_by=event_time, rate=rate)
    if rate is not None:
        raise BuildError(
            f"rate belongs to the source, here a {type(value).__name__}",
            hint="Write for example cw.files(..., rate=1000).",
        )
    # Looked up on the class: the schema of a source may need a look at the data, which must happen once and not here.
    known = (
        {f.name for f in fields(value)}
        if is_dataclass(value)
        else set(vars(value) if hasattr(value, "__dict__") else ())
    )
    if not all(part in known or hasattr(type(value), part) for part in _SOURCE_PARTS):
        hint = "Write for example cw.files('in/*.parquet'), cw.generate(...) or give a Spark DataFrame."
        raise BuildError(f"a {type(value).__name__} is not a source", hint=hint)
    return cast("Source", value)


def _with_bad_rows(source: Source, bad_rows: BadRows | None) -> tuple[Source, BadRows]:
    """The source told what to do with bad rows, and what it does."""
    if bad_rows not in (None, "fail", "dead_letter"):
        raise BuildError(f"bad_rows={bad_rows!r} is unknown", hint="Choose 'fail' or 'dead_letter'.")
    hooks = SourceHooks(source)
    own = hooks.bad_rows
    if bad_rows is None or bad_rows == own:
        return source, own or "fail"
    if own is None and bad_rows == "fail":
        return source, "fail"
    return hooks.with_bad_rows(bad_rows), bad_rows


def _idle_timeout_ms(given: Duration) -> float:
    timeout_us = duration_us(given, "idle_timeout")
    if timeout_us <= 0:
        raise BuildError(f"idle_timeout {given!r} is not above 0", hint="Write for example '30s'.")
    return timeout_us / 1000


def _type_read(hooks: SourceHooks, event_time: str | None) -> StreamType:
    """Columns, event time and changes of what a source gives."""
    schema, changes = distinct_columns(plain_schema(hooks.source.schema)), hooks.changes
    if changes is not None and event_time is not None:
        raise BuildError(
            "the rows of an updating stream have no event time: one that leaves is as old as it is",
            hint="Leave event_time out; the column itself stays.",
        )
    if event_time is not None:
        schema = _with_event_time(schema, event_time)
    return StreamType(schema, event_time, changes=changes)


def _by_one(step: NewStep, hooks: SourceHooks, id: str) -> NewStep:
    """The step, read by one subtask if the order of all its splits counts."""
    if not hooks.one_after_another:
        return step
    if step.parallelism not in (None, 1):
        raise BuildError(
            "a change must not overtake the row that it changes, so that one subtask reads this source",
            hint=f"Leave parallelism={step.parallelism} out; the steps behind {id!r} have the job's.",
        )
    return replace(step, parallelism=1)


def _with_event_time(schema: pa.Schema, name: str) -> pa.Schema:
    """The schema with the event-time column as ``timestamp[us]``, its time zone kept."""
    index = schema.get_field_index(require_column(schema, name, "event-time column"))
    field = schema.field(index)
    kind = field.type
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        raise BuildError(
            f"event-time column {name!r} is {kind}, neither a timestamp nor a date",
            hint="Give the source a schema that reads it as a timestamp.",
        )
    zone = kind.tz if pa.types.is_timestamp(kind) else None
    return schema.set(index, field.with_type(pa.timestamp("us", zone)))
