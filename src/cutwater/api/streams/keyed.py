"""Keyed streams: aggregates, windows and joins, whose state lives in the subtask that owns the key."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never, cast

import pyarrow as pa

from cutwater.api.steps.build import (
    Duration,
    GraphBuilder,
    NewStep,
    Upstream,
    carry_by_name,
    distinct_columns,
    duration_us,
    located,
    plain_schema,
    refuse_changes,
    require_column,
)
from cutwater.api.steps.keyed_steps import (
    Windowing,
    deduplicate,
    interval_join,
    join_as_of,
    join_tables,
    refuse_unnamed,
    running_aggregate,
    top,
    window_aggregate,
    window_join,
    window_top,
    with_changes,
)
from cutwater.api.steps.steps import enrichment_table, with_event_time
from cutwater.api.streams.stream import MissingMethodError, Stream
from cutwater.errors import BuildError
from cutwater.plan.graph import StreamType

if TYPE_CHECKING:
    from cutwater.operators.aggregate.accumulators import AggregateCall
    from cutwater.operators.join.spec import JoinType, WindowJoinType
    from cutwater.operators.stateful_processor.spark_types import SparkSchema
    from cutwater.operators.stateful_processor.spec import Form
    from cutwater.operators.window.kinds import Early, Window


class KeyedStream(Stream):
    """A stream whose rows of one key go to the same subtask of the next step.

    The methods of ``Stream`` are there too; what they return has no key any more.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        """The key columns."""
        return self._upstream.keys

    def with_event_time(self, column: str) -> KeyedStream:
        """As ``Stream.with_event_time``; the key stays."""
        return KeyedStream(self._builder, with_event_time(self._builder, self._upstream, column), self._dead_letters)

    def aggregate(
        self, id: str, /, *unnamed: Never, parallelism: int | None = None, **aggregates: AggregateCall
    ) -> Stream:
        """Running aggregates: one row for each row, with the values so far of its key.

        Columns: the keys, the event time (if any), then one per aggregate.

        Args:
            unnamed: nothing; each aggregate needs a name.
            aggregates: name of the column = ``cw.count()``, ``cw.sum("x")``, ``cw.max("x")`` ...  Any name but
                ``parallelism``, which ``rename`` can give.

        Raises:
            BuildError: no aggregate, one without a name, or one that does not fit its column.
        """
        refuse_unnamed(id, unnamed)
        return self._step(running_aggregate, id, parallelism, aggregates)

    def window(
        self,
        id: str,
        window: Window,
        *,
        allowed_lateness: Duration = 0,
        early: Early | None = None,
        discarding: bool = False,
    ) -> WindowedStream:
        """Cut the stream into windows.  Not a step of its own: ``id`` is a label in ``explain()``.

        Args:
            window: ``cw.tumbling(size)``, ``cw.sliding(size, every)``, ``cw.session(gap)`` or ``cw.global_window()``;
                by the clock with ``time="processing"``.
            allowed_lateness: how long after its end a window still takes rows, and comes out again with each.
            early: when a window comes out before its end too: ``cw.every(rows=100)``, ``cw.every(event_time="1m")``.
            discarding: a result holds only what has not come out before; else it holds everything so far.

        Raises:
            BuildError: the stream has no event time (the message says where it was lost), or a wrong argument.
        """
        from cutwater.operators.window.kinds import Early, Window

        with located(self._builder.check_id(id)):
            if not isinstance(window, Window):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise BuildError(f"{window!r} is not a window", hint="Write for example cw.tumbling('1h').")
            if early is not None and not isinstance(early, Early):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise BuildError(f"early={early!r} says not when", hint="Write for example early=cw.every(rows=100).")
            refuse_changes(self._builder, self._upstream, "a window")
            timeless = window.endless or window.processing_time
            if self._upstream.type.event_time is None and not timeless:
                raise self._builder.no_event_time(self._upstream, "a window needs event time")
            lateness_us = duration_us(allowed_lateness, "allowed_lateness")
        return WindowedStream(
            self._builder, self._upstream, Windowing(id, window, lateness_us, early, bool(discarding))
        )

    def join(
        self,
        id: str,
        right: KeyedStream,
        *,
        within: tuple[Duration, Duration] | None = None,
        window: Window | None = None,
        how: WindowJoinType = "inner",
        suffix: str = "_right",
        parallelism: int | None = None,
    ) -> JoinedStream:
        """Rows of equal key whose event times are near each other, or lie in the same window: say which of the two.

        Args:
            within: (lo, hi): ``left time + lo <= right time <= left time + hi``, for example ``("-1h", "30m")``.  Each
                pair comes out when its later row comes.
            window: ``cw.tumbling("1h")`` or ``cw.sliding("1h", "5m")``.  Rows come out when the window closes, after
                its ``window_start`` and ``window_end``.
            how: with ``window``, pairs only ("inner"), also rows without a partner ("left", "right", "full"), or only
                left rows that have one ("semi") or none ("anti").
            suffix: added to a column of the right side whose name is taken.

        Raises:
            BuildError: a side without key or event time, keys of different types, ``lo`` above ``hi``, a session or a
                window by processing time, ``within`` with another ``how`` than "inner".
        """
        with self._joining(id, right, parallelism) as step:
            if (within is None) == (window is None):
                raise BuildError(
                    "a join needs either within= or window=",
                    hint="Write within=('-1h', '30m'), or window=cw.tumbling('1h').",
                )
            if window is not None:
                made = window_join(step, window, how, suffix)
            elif how == "inner":
                made = interval_join(step, _bounds_us(within), suffix)
            else:
                raise BuildError(
                    f"how={how!r} is for joins of windows: an interval join gives pairs only",
                    hint="Write window=cw.tumbling('1h') instead of within=.",
                )
        return JoinedStream(self._builder, made)

    def transform_with_state(
        self,
        id: str,
        processor: object,
        output_schema: SparkSchema,
        output_mode: str = "Append",
        time_mode: str = "None",
        *,
        initial_state: object = None,
        renames: Mapping[str | tuple[str, str], str] | None = None,
        event_time: str | None = None,
        parallelism: int | None = None,
    ) -> TransformedStream:
        """An unmodified PySpark ``StatefulProcessor`` that takes and yields ``Row`` objects.

        Args:
            processor: an object of the user's class.
            output_schema: of its rows: a ``StructType``, a text (``"k long, n long"``), or an Arrow schema.
            output_mode: "Append" or "Update"; what comes out is the same.
            time_mode: "None", "ProcessingTime" or "EventTime": what its timers go by.
            initial_state: rows for ``handleInitialState``: a table, as ``enrich`` takes it, with the key columns.
            renames: what states and columns of the class's last version are called now: ``{"count": "visits"}`` by the
                old name, ``{("count", "n"): "total"}`` by old state and old column.
            event_time: the output's event-time column, for steps that follow (Spark's ``eventTimeColumnName``); if
                not given, the input's, if it comes out under its name.

        Raises:
            BuildError: not a processor, an ``init`` that fails, event time where the stream has none, or a schema or
                mode that is none.
        """
        with self._new_step(id, parallelism) as step:
            output = (output_schema, output_mode, time_mode)
            return _transform(step, processor, output, "rows", initial_state, renames, event_time)

    def transform_with_state_in_pandas(
        self,
        id: str,
        processor: object,
        output_schema: SparkSchema,
        output_mode: str = "Append",
        time_mode: str = "None",
        *,
        initial_state: object = None,
        renames: Mapping[str | tuple[str, str], str] | None = None,
        event_time: str | None = None,
        parallelism: int | None = None,
    ) -> TransformedStream:
        """As ``transform_with_state``, for a processor that takes and yields pandas DataFrames."""
        with self._new_step(id, parallelism) as step:
            output = (output_schema, output_mode, time_mode)
            return _transform(step, processor, output, "pandas", initial_state, renames, event_time)

    def with_changes(self, *columns: str) -> KeyedStream:
        """As ``Stream.with_changes``; the key stays."""
        return KeyedStream(self._builder, with_changes(self._upstream, columns), self._dead_letters)

    def deduplicate(
        self,
        id: str,
        *,
        keep: Literal["first", "last"] = "first",
        within: Duration | None = None,
        parallelism: int | None = None,
    ) -> DeduplicatedStream:
        """One row of each key, in the order in which they come.

        Args:
            keep: "first" lets the first row through and drops the others; "last" is an updating stream of the latest.
                It takes an updating stream too, if its key tells the rows apart: each row that leaves then comes as it
                was added, also where the stream says no more of it than its key, or says something twice.
            within: how long a row makes others of its key duplicates, in event time: the first one at or after its
                time plus ``within`` is a first row again.  Without it a key is remembered for ever.

        Raises:
            BuildError: ``within`` without event time, an updating stream (``keep="first"``, ``within``, or one whose
                rows the key does not tell apart), or (``keep="last"``) a column named ``op``.
        """
        with self._new_step(id, parallelism) as step:
            return DeduplicatedStream(self._builder, deduplicate(step, keep, within))

    def join_as_of(
        self,
        id: str,
        right: KeyedStream,
        *,
        how: Literal["inner", "left"] = "inner",
        suffix: str = "_right",
        parallelism: int | None = None,
    ) -> JoinedStream:
        """Each row with the row of the other side that was the latest of its key at the row's event time.

        The right side is a table with versions: a row is valid from its event time until the next one of its key.  A
        row comes out when the watermark of both sides has passed its time.  Late rows of the left side are in
        ``late_left``; versions that came too late for rows that are out already are in ``late_right`` too.

        Args:
            how: rows without a version are left out ("inner") or come with nulls ("left").
            suffix: added to a column of the right side whose name the left side has too.

        Raises:
            BuildError: a side without key or event time, keys of different types, an updating stream.
        """
        with self._joining(id, right, parallelism) as step:
            return JoinedStream(self._builder, join_as_of(step, how, suffix))

    def top(
        self,
        id: str,
        n: int,
        *,
        by: str | Sequence[str],
        descending: bool | Sequence[bool] = True,
        rank: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """An updating stream of the first ``n`` rows of each key.

        Rows that compare equal rank in the order in which they come; nulls rank last.  Of an updating stream all rows
        are kept, so that the next one moves up when one is removed.

        Args:
            n: how many rows, up to 10,000.
            by: column to order by, or several: numbers, booleans, dates or times.
            descending: whether the largest comes first; one answer, or one for each column.
            rank: name of a column with the rank, from 1 on.  Each row that moves is then updated: up to ``n`` changes
                for one row that comes; without it there are two at most.

        Raises:
            BuildError: an unknown column, one without such an order, or a name that is taken.
        """
        return self._step(top, id, parallelism, (n, by, descending), rank)

    def join_tables(
        self,
        id: str,
        right: KeyedStream,
        *,
        how: JoinType = "inner",
        suffix: str = "_right",
        keep: Literal["last"] | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """An updating stream of the join of two tables, each holding the latest row of every key.

        This is not SQL's join of two streams, which pairs every row with every other one: ``join`` does that.

        Args:
            how: rows without a partner come out of no side ("inner"), of one ("left", "right") or of both ("full").
            suffix: added to a column of the right side whose name the left side has too.
            keep: "last" says that the latest row of each key is meant where a side is a stream of plain rows.  Without
                it a warning tells of such a side, unless its rows are known to replace each other (aggregates).

        Raises:
            BuildError: a side without key, keys of different types, a column named ``op``, or an updating stream whose
                rows the key does not tell apart.
        """
        with self._joining(id, right, parallelism) as step:
            return self._stream(join_tables(step, how, suffix, keep))

    @contextlib.contextmanager
    def _joining(self, id: str, right: Stream, parallelism: int | None) -> Generator[NewStep]:
        with located(self._builder.check_id(id)):
            other = self._same_flow(right)
            if not isinstance(other, KeyedStream):
                raise BuildError("the right side of the join has no key", hint="Call key_by(...) on it first.")
        with self._new_step(id, parallelism, other._upstream) as step:
            yield step


def _bounds_us(within: object) -> tuple[int, int]:
    if not isinstance(within, tuple | list) or len(cast("tuple[object, ...]", within)) != 2:
        raise BuildError(f"within is a pair of durations, not {within!r}", hint="Write within=('-1h', '30m').")
    lower, upper = cast("tuple[Duration, Duration]", within)
    return duration_us(lower, "within", signed=True), duration_us(upper, "within", signed=True)


class WindowedStream:
    """A keyed stream cut into windows: call ``aggregate`` or ``top``."""

    def __init__(self, builder: GraphBuilder, upstream: Upstream, windowing: Windowing) -> None:
        self._builder = builder
        self._upstream = upstream
        self._windowing = windowing

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"windows have no {name!r}")
            raise MissingMethodError(
                f"windows have no {name!r}: they are no stream yet",
                step=self._upstream.step,
                hint="Say what comes out of each: .aggregate('id', n=cw.count()) or .top('id', 3, by='column').",
            )

    def aggregate(
        self, id: str, /, *unnamed: Never, parallelism: int | None = None, **aggregates: AggregateCall
    ) -> WindowedResult:
        """One row for each key and window, when the watermark passes the window's end (and when ``window`` says so).

        Columns: the keys, ``window_start``, ``window_end`` (not with the global window), then one per aggregate.
        ``window_start`` of tumbling windows is the result's event time, so that larger windows can be built on it.

        Args:
            id: names the state.
            unnamed, aggregates: as in ``KeyedStream.aggregate``.
        """
        refuse_unnamed(id, unnamed)
        with self._builder.new_step(id, [self._upstream], parallelism) as step:
            return WindowedResult(self._builder, window_aggregate(step, aggregates, self._windowing))

    def top(
        self,
        id: str,
        n: int,
        *,
        by: str | Sequence[str],
        descending: bool | Sequence[bool] = True,
        rank: str = "rank",
        parallelism: int | None = None,
    ) -> WindowedResult:
        """The first ``n`` rows of each key and window, when results of the window come out; nothing is updated.

        Columns: ``window_start``, ``window_end`` (not with the global window), those of the rows, then the rank.

        Args:
            id: names the state; the step ``<id>.rank`` takes the lists of the windows apart.
            rank: name of the column with the rank, from 1 on; the others are as in ``KeyedStream.top``.
        """
        with self._builder.new_step(id, [self._upstream], parallelism) as step:
            return WindowedResult(self._builder, window_top(step, (n, by, descending), rank, self._windowing))


class _WithLateRows(Stream):
    """A main output, and the rows that came too late for it, where a row can be late."""

    _never_late: ClassVar[str]
    """Why no row is late if there is no second output."""
    _late_hint: ClassVar[str] = ""

    def __init__(self, builder: GraphBuilder, outputs: tuple[Upstream, ...]) -> None:
        super().__init__(builder, outputs[0])
        self._outputs = outputs

    @property
    def late(self) -> Stream:
        """Rows that lay behind the watermark (of windows: behind their end plus the allowed lateness).

        Of a processor also those at the watermark: all that Spark drops.

        Raises:
            BuildError: no row can be late: windows by processing time, keys that are remembered for ever, or a
                processor whose time mode is not event time.
        """
        if len(self._outputs) == 1:
            raise BuildError(self._never_late, step=self._outputs[0].step, hint=self._late_hint)
        return Stream(self._builder, self._outputs[1])


class WindowedResult(_WithLateRows):
    """Results of windows, with the rows that came too late for them."""

    _never_late = "by processing time no row is late"


class DeduplicatedStream(_WithLateRows):
    """Rows without duplicates, with those that came too late to tell."""

    _never_late = "without within= no row is late"


class JoinedStream(Stream):
    """Pairs of a join, with the rows that came too late to be joined."""

    def __init__(self, builder: GraphBuilder, outputs: tuple[Upstream, ...]) -> None:
        super().__init__(builder, outputs[0])
        self._late = outputs[1:]

    @property
    def late_left(self) -> Stream:
        """Rows of the left side that lay behind the watermark."""
        return Stream(self._builder, self._late[0])

    @property
    def late_right(self) -> Stream:
        """Rows of the right side that lay behind the watermark."""
        return Stream(self._builder, self._late[1])


def _transform(
    step: NewStep,
    processor: object,
    output: tuple[Any, str, str],
    form: Form,
    initial_state: object,
    renames: Mapping[str | tuple[str, str], str] | None,
    event_time: str | None,
) -> TransformedStream:
    """Add the step of a processor.

    Args:
        output: the output schema, and the names of output mode and time mode.
        event_time: the output's event-time column.
    """
    from cutwater.operators.stateful_processor.spark_types import TimeMode, arrow_schema, check_output_mode
    from cutwater.operators.stateful_processor.spec import ProcessorSpec

    upstream, (output_schema, output_mode, time_mode) = step.upstream, output
    check_output_mode(output_mode)
    mode = TimeMode.named(time_mode)
    time = upstream.type.event_time if mode is TimeMode.EVENT else None
    if mode is TimeMode.EVENT and time is None:
        raise step.builder.no_event_time(upstream, "time_mode='EventTime' needs event time")
    schema = distinct_columns(plain_schema(arrow_schema(output_schema)))
    initial = None if initial_state is None else enrichment_table(initial_state)
    spec = ProcessorSpec(
        upstream.type.schema, upstream.keys, processor, schema, mode, form, time, initial, dict(renames or {})
    )
    out, lost = carry_by_name(upstream, schema)
    if event_time is not None:
        out, lost = _with_event_time(step.builder, upstream, out, event_time), None
    late = [StreamType(s, None, upstream.keys) for s in spec.outputs[1:]]
    return TransformedStream(step.builder, step.add("processor", spec, [out, *late], lost=lost))


def _with_event_time(builder: GraphBuilder, upstream: Upstream, out: StreamType, column: str) -> StreamType:
    require_column(out.schema, column)
    kind = out.schema.field(column).type
    if not (pa.types.is_timestamp(kind) and kind.unit == "us"):
        raise BuildError(f"column {column!r} is of type {kind}, an event time is a timestamp")
    if not builder.has_watermark(upstream):
        story, hint = builder.event_time_story(upstream)
        raise BuildError(f"no watermark comes from above: {story}", hint=hint)
    return replace(out, event_time=column, span=None)


class TransformedStream(_WithLateRows):
    """Stream of a processor, with the rows that came too late for it."""

    _never_late = "no row is late here"
    _late_hint = "Rows are late with time_mode='EventTime' only."
