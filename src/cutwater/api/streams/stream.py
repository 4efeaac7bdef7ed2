"""Streams: handles over the graph under construction.  Every method adds a step and returns the stream it makes.

A stream is a value: using it twice gives two branches.  Nothing runs until the dataflow is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from cutwater.api.steps import keyed_steps, steps
from cutwater.api.steps.build import GraphBuilder, NewStep, Upstream, carry_by_name, located, plain_schema
from cutwater.config import format_us
from cutwater.errors import BuildError, did_you_mean
from cutwater.plan.graph import EdgeType, StreamType

if TYPE_CHECKING:
    import polars as pl

    from cutwater.api.steps.build import Duration
    from cutwater.api.streams.keyed import KeyedStream
    from cutwater.operators.enrich.async_map import AsyncFunction
    from cutwater.operators.process.functions import (
        BroadcastProcessFunction,
        CoProcessFunction,
        ProcessFunction,
        StatefulFunction,
    )
    from cutwater.plan.graph import StreamType


class Stream:
    """Rows of one schema.  Made by ``Dataflow.read`` and by the methods below, never directly."""

    def __init__(self, builder: GraphBuilder, upstream: Upstream, dead_letters: Upstream | None = None) -> None:
        self._builder = builder
        self._upstream = upstream
        self._dead_letters = dead_letters

    @property
    def type(self) -> StreamType:
        """Schema, event-time column and partitioning."""
        return self._upstream.type

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows."""
        return self._upstream.type.schema

    @property
    def dead_letters(self) -> Stream:
        """Rows that were diverted where this stream was made.

        Raises:
            BuildError: nothing is diverted there.
        """
        if self._dead_letters is None:
            raise BuildError(
                "this stream has no dead letters",
                step=self._upstream.step,
                hint="Ask for them: read(..., bad_rows='dead_letter'), key_by(..., dead_letters='bad-keys') or "
                "map_async(..., on_timeout='dead_letter').",
            )
        return Stream(self._builder, self._dead_letters)

    def __repr__(self) -> str:
        columns = ", ".join(f"{f.name}: {f.type}" for f in self.schema)
        return f"{type(self).__name__}(step {self._upstream.step!r}, {columns})"

    if not TYPE_CHECKING:  # a type checker shall go on refusing names that are not there

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"a stream has no {name!r}")
            from cutwater.api.streams.keyed import KeyedStream

            keyed = callable(getattr(KeyedStream, name, None))
            raise missing_method(name, dir(type(self)), keyed=keyed, step=self._upstream.step, type=self.type)

    # ------------------------------------------------------------------------------------------------- expressions

    def filter(self, id: str, *predicates: pl.Expr, parallelism: int | None = None) -> Stream:
        """Keep the rows for which every predicate is true (a null is not true).

        Args:
            predicates: Polars expressions over the row's columns, of type boolean.

        Raises:
            BuildError: unknown column, not a boolean, or an expression that looks across rows.
        """
        return self._step(steps.filter_rows, id, parallelism, predicates)

    def select(
        self,
        id: str,
        /,
        *exprs: str | pl.Expr | Sequence[str | pl.Expr],
        parallelism: int | None = None,
        **named: pl.Expr,
    ) -> Stream:
        """Only these columns: names, or Polars expressions over one row.

        A column to be named ``parallelism`` gets its name by ``.alias("parallelism")``.
        """
        return self._step(steps.select, id, parallelism, exprs, named)

    def with_columns(
        self, id: str, /, *exprs: pl.Expr | Sequence[pl.Expr], parallelism: int | None = None, **named: pl.Expr
    ) -> Stream:
        """Add or replace columns: ``s.with_columns("id", total=pl.col("x") + 1)``.

        A column to be named ``parallelism`` gets its name by ``.alias("parallelism")``.
        """
        return self._step(steps.with_columns, id, parallelism, exprs, named)

    def drop(self, id: str, *columns: str | Sequence[str], parallelism: int | None = None) -> Stream:
        """All columns but these."""
        return self._step(steps.drop, id, parallelism, columns)

    def rename(
        self, id: str, mapping: Mapping[str, str] | None = None, /, *, parallelism: int | None = None, **names: str
    ) -> Stream:
        """Give columns other names: ``s.rename("id", {"old": "new"})`` or ``s.rename("id", old="new")``.

        A column that is named ``parallelism`` is renamed the first way.
        """
        return self._step(steps.rename, id, parallelism, {**(mapping or {}), **names})

    # --------------------------------------------------------------------------------------------------- functions

    def map_batches(
        self,
        id: str,
        fn: Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]],
        schema: str | pa.Schema,
        *,
        parallelism: int | None = None,
    ) -> Stream:
        """Rows from a function of batches, the convention of Spark's ``mapInArrow``.

        The function is called once per slice and must not keep anything from one slice for the next.

        Args:
            schema: of the result, as text (``"k long, v double"``) or as an Arrow schema.
        """
        return self._step(steps.function_step, id, parallelism, "map_batches", fn, schema)

    def map(
        self,
        id: str,
        fn: Callable[[dict[str, Any]], Mapping[str, Any] | None],
        schema: str | pa.Schema,
        *,
        parallelism: int | None = None,
    ) -> Stream:
        """One row for each row, from a function of a dict; ``None`` drops the row."""
        return self._step(steps.function_step, id, parallelism, "map", fn, schema)

    def flat_map(
        self,
        id: str,
        fn: Callable[[dict[str, Any]], Iterable[Mapping[str, Any]]],
        schema: str | pa.Schema,
        *,
        parallelism: int | None = None,
    ) -> Stream:
        """Any number of rows for each row, from a function of a dict."""
        return self._step(steps.function_step, id, parallelism, "flat_map", fn, schema)

    def process(
        self,
        id: str,
        function: ProcessFunction,
        schema: str | pa.Schema,
        *,
        side: Mapping[str, str | pa.Schema] | None = None,
        parallelism: int | None = None,
    ) -> ProcessedStream:
        """Your own logic with state, called once for every row.

        After ``key_by`` it may have keyed states and timers, without it only operator states.

        Args:
            function: an object of a subclass of ``cw.ProcessFunction``.
            schema: of the rows that it yields, as text (``"k long, v double"``) or as an Arrow schema.
            side: schemas of side outputs by name; ``ctx.emit(name, row)`` writes to them.

        Raises:
            BuildError: not a process function, states that need a key where there is none, or a schema that is none.
        """

        with self._new_step(id, parallelism) as step:
            return _process(step, function, schema, side)

    def map_async(
        self,
        id: str,
        fn: AsyncFunction,
        schema: str | pa.Schema,
        *,
        ordered: bool = True,
        capacity: int = 100,
        timeout: Duration = "5s",
        retries: int = 0,
        retry_delay: Duration = "100ms",
        on_timeout: Literal["error", "dead_letter"] = "error",
        batch_rows: int | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """One row for each row, from a function that waits for something else; ``None`` drops the row.

        Up to ``capacity`` rows are under way at a time, and nothing else waits for them.  They are in each snapshot;
        after a restore the function is called for them again, so a call may happen twice, its result comes out once.

        Args:
            fn: ``async def fn(row: dict) -> dict | None``; a plain function runs in threads, ``capacity`` at most.
            schema: of the result, as text or as an Arrow schema.
            ordered: results leave in the order of their rows.  False: as they come, but never across a watermark.
            capacity: rows under way in each subtask; a step that has so many takes no more.
            timeout: time for a result, retries included.
            retries: how often a call that raised is tried again, after ``retry_delay``, then twice that, and so on.
            on_timeout: "error" fails the job, "dead_letter" puts the row into ``.dead_letters``.
            batch_rows: call ``fn`` with a list of up to so many rows, for a list of as many results.
        """
        settings = {
            "ordered": ordered,
            "capacity": capacity,
            "retries": retries,
            "retry_delay": retry_delay,
            "on_timeout": on_timeout,
            "batch_rows": batch_rows,
        }
        with self._new_step(id, parallelism) as step:
            made = steps.map_async(step, fn, schema, timeout, settings)
        return Stream(self._builder, made[0], made[1] if len(made) > 1 else None)

    # ----------------------------------------------------------------------------------------------- joining streams

    def connect(self, right: Stream) -> ConnectedStreams:
        """This stream and another one, for a process function that sees the rows of both.

        Either both have a key, or neither, or the right one is ``broadcast()``.  Not a step of its own.

        Raises:
            BuildError: only one of them has a key, or they are of different dataflows.
        """

        return ConnectedStreams(self._builder, self._upstream, self._same_flow(right)._upstream)

    def union(self, id: str, *others: Stream, parallelism: int | None = None) -> Stream:
        """The rows of all these streams, which must have one schema, in the order in which they arrive."""
        with located(self._builder.check_id(id)):
            upstreams = [self._same_flow(other)._upstream for other in others]
        with self._new_step(id, parallelism, *upstreams) as step:
            return self._stream(steps.union(step))

    def enrich(
        self,
        id: str,
        table: object,
        on: str | tuple[str, ...] | list[str] | Mapping[str, str],
        *,
        how: Literal["left", "inner"] = "left",
        suffix: str = "_right",
        parallelism: int | None = None,
    ) -> Stream:
        """Add the columns of a table that every worker loads when it starts.

        Args:
            table: a ``pyarrow.Table``, a Polars or pandas frame, a path (or list of paths) of Parquet, CSV or JSON
                files, ``cw.files(...)``, or a ``cw.EnrichmentTable`` (which may hold several rows of one key).
            on: key columns, same name on both sides, or ``{"stream column": "table column"}``.
            how: "left" keeps rows without a match, "inner" drops them.
        """
        return self._step(steps.enrich, id, parallelism, table, on, how, suffix)

    # ------------------------------------------------------------------------------------------------- partitioning

    def key_by(
        self,
        *columns: str | Sequence[str],
        nulls: Literal["error", "key"] = "error",
        dead_letters: str | None = None,
    ) -> KeyedStream:
        """The stream with a key: rows of one key go to the same subtask.  A property, not a step.

        A NaN key, and a null one if ``nulls`` is "error", fails the job when it comes, or is diverted.

        Args:
            columns: names, ``key_by("k", "v")``, or one list of them.
            nulls: "key" makes null a key like any other, equal to itself, as SQL's GROUP BY does.  In joins a row with
                a null in its key has no partner, as in SQL.
            dead_letters: id of a step that diverts rows without a usable key to ``.dead_letters``.

        Raises:
            BuildError: no such column, a type that cannot be a key, or another ``nulls``.
        """
        from cutwater.api.streams.keyed import KeyedStream

        main, bad = steps.key_by(self._builder, self._upstream, columns, nulls, dead_letters)
        return KeyedStream(self._builder, main, bad)

    def rebalance(self) -> Stream:
        """The same stream; the next step's subtasks take batches in turn."""
        return Stream(self._builder, replace(self._upstream, edge=EdgeType.REBALANCE, keys=()), self._dead_letters)

    def broadcast(self) -> Stream:
        """The same stream; every subtask of the next step gets every row."""
        return Stream(self._builder, replace(self._upstream, edge=EdgeType.BROADCAST, keys=()), self._dead_letters)

    def with_event_time(self, column: str) -> Stream:
        """The same stream with another event-time column (``timestamp[us]``).

        The watermark stays: rows whose new event time lies behind it are late.

        Raises:
            BuildError: the stream has no watermark, the column is unknown or not ``timestamp[us]``.
        """
        return Stream(self._builder, steps.with_event_time(self._builder, self._upstream, column), self._dead_letters)

    def with_changes(self, *columns: str) -> Stream:
        """The same stream as an updating one: its column ``op`` marks rows that come ("+I"), are updated ("-U" as they
        were, "+U" as they are now) or leave ("-D"), as steps like ``join_tables`` write it.

        Args:
            columns: that tell rows of the table apart, if any are known.

        Raises:
            BuildError: no column ``op`` of type string, or an unknown column.
        """
        return Stream(self._builder, keyed_steps.with_changes(self._upstream, columns), self._dead_letters)

    # -------------------------------------------------------------------------------------------------------- sinks

    def write(self, id: str, sink: object, *, parallelism: int | None = None) -> None:
        """Write the rows: ``s.write("out", cw.files("out/"))``.

        Raises:
            BuildError: not a sink, or one that cannot take such rows.
        """
        with self._new_step(id, parallelism) as step:
            steps.write(step, sink)

    def foreach_batch(
        self, id: str, fn: Callable[[pa.Table, int], None], *, idempotent: bool = True, parallelism: int | None = None
    ) -> None:
        """Call ``fn(rows, checkpoint_id)`` when a checkpoint completed; after a failure again, with the same rows.

        It runs in a worker process, so it must write somewhere: what it does to a variable stays there.

        Args:
            idempotent: ``fn`` takes a second call of one id as one: only then is the output exactly-once.
        """
        with self._new_step(id, parallelism) as step:
            steps.foreach_batch(step, fn, idempotent)

    def collect(self, id: str, *, parallelism: int | None = None) -> None:
        """Keep the rows as the job's result: ``job.result(id)``."""
        with self._new_step(id, parallelism) as step:
            steps.collect(step)

    # ------------------------------------------------------------------------------------------------------ internal

    def _step(self, make: Callable[..., Upstream], id: str, parallelism: int | None, *arguments: object) -> Stream:
        with self._new_step(id, parallelism) as step:
            return self._stream(make(step, *arguments))

    def _new_step(
        self, id: str, parallelism: int | None, *others: Upstream
    ) -> contextlib.AbstractContextManager[NewStep]:
        return self._builder.new_step(id, (self._upstream, *others), parallelism)

    def _stream(self, upstream: Upstream) -> Stream:
        return Stream(self._builder, upstream)

    def _same_flow(self, other: object) -> Stream:
        return self._of_flow(self._builder, other)

    @staticmethod
    def _of_flow(builder: GraphBuilder, other: object) -> Stream:
        if not isinstance(other, Stream):
            raise BuildError(f"a stream is needed here, not {other.__class__.__name__}")
        if other._builder is not builder:
            raise BuildError(
                f"the stream of step {other._upstream.step!r} belongs to dataflow {other._builder.name!r}",
                hint="Streams of one dataflow only can be joined.",
            )
        return other


_HERE = {
    "where": "filter('id', expression)",
    **dict.fromkeys(("groupBy", "group_by", "groupby", "keyBy"), "key_by('column')"),
    **dict.fromkeys(("withColumn", "withColumns"), "with_columns('id', name=expression)"),
    "withColumnRenamed": "rename('id', old='new')",
    **dict.fromkeys(("dropDuplicates", "drop_duplicates", "distinct"), "key_by('column').deduplicate('id')"),
    **dict.fromkeys(
        ("withWatermark", "assign_timestamps_and_watermarks"), "read(..., event_time='at', out_of_order='10s')"
    ),
    **dict.fromkeys(("agg", "reduce", "sum", "count"), "key_by('column').aggregate('id', n=cw.count())"),
    **dict.fromkeys(("mapInArrow", "map_partitions", "mapPartitions"), "map_batches('id', function, schema)"),
    "flatMap": "flat_map('id', function, schema)",
    "unionByName": "union('id', other)",
    "foreachBatch": "foreach_batch('id', function)",
    **dict.fromkeys(("show", "print"), "write('id', cw.console())"),
    **dict.fromkeys(("writeStream", "sink", "sink_to", "add_sink", "sinkTo"), "write('id', sink)"),
}
"""Names of other libraries for methods that are here."""
_OVER_ALL = ("aggregate", "window", "top")


class MissingMethodError(BuildError, AttributeError):
    """A stream has no such method; an ``AttributeError`` as well, so that ``hasattr`` tells the truth."""


def missing_method(
    name: str, there: Iterable[str], *, keyed: bool, step: str, type: StreamType | None = None
) -> MissingMethodError:
    """The error for a method that a stream does not have.

    Args:
        name: of the method.
        there: names of the methods that it has.
        keyed: whether a stream with a key has it.
        step: where the stream comes from.
        type: of the stream, if it is one.
    """
    if keyed:
        hint = f"Write .key_by('column').{name}(...)."
        if type is not None and type.span is not None and name in _OVER_ALL:
            size, offset = type.span
            same = f"cw.tumbling({format_us(size)!r}{f', offset={format_us(offset)!r}' if offset else ''})"
            rest = f".{name}" if name != "window" else ".aggregate"
            hint += f" Over the results of each window: .key_by({type.event_time!r}).window('id', {same}){rest}(...)."
        elif name in _OVER_ALL:
            hint += (
                " For one result over all rows give them one key: "
                f".with_columns('id', everything=pl.lit(0)).key_by('everything').{name}(...)."
            )
        return MissingMethodError(f"{name} needs a key, this stream has none", step=step, hint=hint)
    hint = f"Write {_HERE[name]}." if name in _HERE else did_you_mean(name, [n for n in there if n[0] != "_"])
    return MissingMethodError(f"a stream has no {name!r}", step=step, hint=hint)


Sides = Mapping[str, "str | pa.Schema"]


def _process(step: NewStep, function: StatefulFunction, schema: str | pa.Schema, side: Sides | None) -> ProcessedStream:
    """Add the step of a process function over one or two streams."""
    from cutwater.data.schema_text import as_schema
    from cutwater.operators.process.spec import ProcessInput, ProcessSpec

    sides = tuple((name, plain_schema(as_schema(fields))) for name, fields in (side or {}).items())
    output = plain_schema(as_schema(schema))
    left, *others = (ProcessInput(u.type.schema, u.keys, u.edge is EdgeType.BROADCAST) for u in step.inputs)
    right = others[0] if others else None
    spec = ProcessSpec(left.schema, left.keys, function, output, sides, right, left.broadcast)
    types = [carry_by_name(step.upstream, schema) for schema in spec.outputs]
    out, lost = types[0]
    if out.event_time is not None and not all(step.builder.has_watermark(u) for u in step.inputs):
        out = replace(out, event_time=None, span=None)
        lost = "its right stream has no event time, so that no watermark passes"
    outputs = [out, *(found for found, _ in types[1:])]
    made = step.add("process", spec, outputs, lost=lost)
    return ProcessedStream(step.builder, made, tuple(name for name, _ in sides))


class ConnectedStreams:
    """Two streams that share the state of a process function: call ``process``."""

    def __init__(self, builder: GraphBuilder, left: Upstream, right: Upstream) -> None:
        self._builder, self._left, self._right = builder, left, right
        if left.edge is EdgeType.BROADCAST:
            raise BuildError(
                "the broadcast stream is the left one",
                step=left.step,
                hint="Write stream.connect(rules.broadcast()).",
            )
        if right.edge is not EdgeType.BROADCAST and bool(left.keys) != bool(right.keys):
            raise BuildError(
                f"the {'right' if left.keys else 'left'} stream has no key, the other one has",
                step=(right if left.keys else left).step,
                hint="Call key_by on both or on neither, or connect to a broadcast() stream.",
            )

    def process(
        self,
        id: str,
        function: CoProcessFunction | BroadcastProcessFunction,
        schema: str | pa.Schema,
        *,
        side: Sides | None = None,
        parallelism: int | None = None,
    ) -> ProcessedStream:
        """Your own logic over the rows of both streams; the arguments are those of ``Stream.process``.

        Args:
            function: a ``cw.CoProcessFunction``, or a ``cw.BroadcastProcessFunction`` if the right stream is broadcast.

        Raises:
            BuildError: another function, keys that do not fit each other, or a schema that is none.
        """
        with self._builder.new_step(id, (self._left, self._right), parallelism) as step:
            return _process(step, function, schema, side)


class ProcessedStream(Stream):
    """Stream of a process function, with its side outputs."""

    def __init__(self, builder: GraphBuilder, outputs: tuple[Upstream, ...], names: tuple[str, ...]) -> None:
        super().__init__(builder, outputs[0])
        self._outputs = dict(zip(names, outputs[1:], strict=True))
        self._id = outputs[0].step

    def side(self, name: str) -> Stream:
        """Rows that the function emitted for a side output.

        Raises:
            BuildError: the step declares no such side output.
        """
        if name not in self._outputs:
            known = ", ".join(map(repr, self._outputs)) or "none"
            raise BuildError(
                f"no side output {name!r}",
                step=self._id,
                hint=f"Declared are: {known}. Declare it with side={{{name!r}: schema}}.",
            )
        return Stream(self._builder, self._outputs[name])
