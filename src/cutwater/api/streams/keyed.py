"""Keyed streams: aggregates, windows and joins, whose state lives in the subtask that owns the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Never, cast

from cutwater.api.steps.build import Duration, duration_us, located, refuse_changes
from cutwater.api.steps.keyed_steps import Windowing, interval_join, refuse_unnamed, running_aggregate, window_join
from cutwater.api.steps.steps import with_event_time
from cutwater.api.steps.table_steps import deduplicate, join_as_of, join_tables, top, with_changes
from cutwater.api.streams.keyed_results import DeduplicatedStream, JoinedStream, WindowedStream
from cutwater.api.streams.stream import Stream
from cutwater.api.streams.transformed import TransformedStream, transform_with_state
from cutwater.errors import BuildError

if TYPE_CHECKING:
    from cutwater.operators.aggregate.accumulators import AggregateCall
    from cutwater.operators.join.spec import JoinType, WindowJoinType
    from cutwater.operators.stateful_processor.spark_types import SparkSchema
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
        return self._stream(running_aggregate(self._builder, id, self._upstream, aggregates, parallelism))

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
                story, hint = self._builder.event_time_story(self._upstream)
                raise BuildError(f"a window needs event time, but {story}", hint=hint)
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
        with located(self._builder.check_id(id)):
            other = self._same_flow(right)
            if not isinstance(other, KeyedStream):
                raise BuildError("the right side of the join has no key", hint="Call key_by(...) on it first.")
            sides = (self._upstream, other._upstream)
            if (within is None) == (window is None):
                raise BuildError(
                    "a join needs either within= or window=",
                    hint="Write within=('-1h', '30m'), or window=cw.tumbling('1h').",
                )
            if window is not None:
                made = window_join(self._builder, id, sides, window, how, suffix, parallelism)
            elif how == "inner":
                made = interval_join(self._builder, id, *sides, _bounds_us(within), suffix, parallelism)
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
        return transform_with_state(
            self._builder,
            id,
            self._upstream,
            processor,
            (output_schema, output_mode, time_mode),
            "rows",
            initial_state=initial_state,
            renames=renames,
            event_time=event_time,
            parallelism=parallelism,
        )

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
        return transform_with_state(
            self._builder,
            id,
            self._upstream,
            processor,
            (output_schema, output_mode, time_mode),
            "pandas",
            initial_state=initial_state,
            renames=renames,
            event_time=event_time,
            parallelism=parallelism,
        )

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
            within: how long a row makes others of its key duplicates, in event time: the first one at or after its
                time plus ``within`` is a first row again.  Without it a key is remembered for ever.

        Raises:
            BuildError: ``within`` without event time, an updating stream, or (``keep="last"``) a column named ``op``.
        """
        return DeduplicatedStream(
            self._builder, deduplicate(self._builder, id, self._upstream, keep, within, parallelism)
        )

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
        with located(self._builder.check_id(id)):
            other = self._same_flow(right)
            if not isinstance(other, KeyedStream):
                raise BuildError("the right side of the join has no key", hint="Call key_by(...) on it first.")
        made = join_as_of(self._builder, id, self._upstream, other._upstream, how, suffix, parallelism)
        return JoinedStream(self._builder, made)

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
        order = (n, by, descending)
        return self._stream(top(self._builder, id, self._upstream, order, rank, parallelism))

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
        with located(self._builder.check_id(id)):
            other = self._same_flow(right)
            if not isinstance(other, KeyedStream):
                raise BuildError("the right side of the join has no key", hint="Call key_by(...) on it first.")
        made = join_tables(self._builder, id, self._upstream, other._upstream, how, suffix, keep, parallelism)
        return self._stream(made)


def _bounds_us(within: object) -> tuple[int, int]:
    if not isinstance(within, tuple | list) or len(cast("tuple[object, ...]", within)) != 2:
        raise BuildError(f"within is a pair of durations, not {within!r}", hint="Write within=('-1h', '30m').")
    lower, upper = cast("tuple[Duration, Duration]", within)
    return duration_us(lower, "within", signed=True), duration_us(upper, "within", signed=True)
