"""The steps with keyed state: their specifications, types and checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from cutwater.api.steps.build import (
    GraphBuilder,
    Upstream,
    check_parallelism,
    distinct_columns,
    located,
    refuse_changes,
    require_column,
)
from cutwater.api.steps.expression_steps import rename
from cutwater.config import format_us
from cutwater.errors import BuildError
from cutwater.operators.window.spec import WINDOW_END, WINDOW_START
from cutwater.plan.graph import EdgeType, StreamType

if TYPE_CHECKING:
    from cutwater.operators.aggregate.accumulators import Aggregate, AggregateCall
    from cutwater.operators.join.spec import WindowJoinType
    from cutwater.operators.window.kinds import Early, Window
    from cutwater.operators.window.spec import WindowAggregateSpec

_OVERLAPPING = "its windows overlap or have no common size; with_event_time('window_end') goes by their ends"


@dataclass(frozen=True)
class Windowing:
    """Arguments of ``KeyedStream.window``."""

    label: str
    window: Window
    allowed_lateness_us: int
    early: Early | None
    discarding: bool


def refuse_unnamed(id: str, unnamed: tuple[object, ...]) -> None:
    """Say to whom gave an aggregate by its place how to write it.

    >>> import cutwater as cw
    >>> refuse_unnamed("totals", (cw.sum("value"),))
    Traceback (most recent call last):
    cutwater.errors.BuildError: step 'totals': an aggregate without a name. Name its column: n=cw.sum('value').
    """
    from cutwater.operators.aggregate.accumulators import AggregateCall

    if not unnamed:
        return
    first = unnamed[0]
    if not isinstance(first, AggregateCall):
        raise BuildError(f"{first!r} is not an aggregate", step=id, hint="Write for example n=cw.count().")
    call = f"cw.{first.kind}({'' if first.column is None else repr(first.column)})"
    raise BuildError("an aggregate without a name", step=id, hint=f"Name its column: n={call}.")


def running_aggregate(
    builder: GraphBuilder,
    id: str,
    upstream: Upstream,
    calls: Mapping[str, AggregateCall],
    parallelism: int | None,
) -> Upstream:
    from cutwater.operators.aggregate.running_spec import RunningAggregateSpec

    with located(builder.check_id(id)):
        check_parallelism(id, parallelism)
        refuse_changes(builder, upstream, "an aggregate", timed=False)
        aggregates = _aggregates(upstream.type.schema, calls)
        event_time = upstream.type.event_time
        spec = RunningAggregateSpec(upstream.type.schema, upstream.keys, aggregates, event_time)
        schema = distinct_columns(spec.outputs[0])
        out = StreamType(schema, event_time, upstream.keys, upstream.type.span)
        return builder.add(id, "aggregate", spec, [upstream], [out], parallelism=parallelism)[0]


def window_aggregate(
    builder: GraphBuilder,
    id: str,
    upstream: Upstream,
    calls: Mapping[str, AggregateCall | Aggregate],
    windowing: Windowing,
    parallelism: int | None,
) -> tuple[Upstream, ...]:
    from cutwater.api.steps.keyed_steps import INNER, apart
    from cutwater.operators.window.spec import WindowAggregateSpec

    window, lateness_us = windowing.window, windowing.allowed_lateness_us
    with located(builder.check_id(id)), builder.together():
        check_parallelism(id, parallelism)
        refuse_changes(builder, upstream, "a window")
        upstream, renames = apart(builder, id, upstream, window, INNER, upstream.keys)
        aggregates = _aggregates(upstream.type.schema, calls, renames)
        event_time = None if window.processing_time else upstream.type.event_time
        if event_time is None and not (window.endless or window.processing_time):
            story, hint = builder.event_time_story(upstream)
            raise BuildError(f"a window needs event time, but {story}", hint=hint)
        if not window.processing_time:
            _check_nesting(upstream.type, window)
        spec = WindowAggregateSpec(
            upstream.type.schema,
            upstream.keys,
            event_time,
            window,
            aggregates,
            lateness_us,
            windowing.early,
            windowing.discarding,
            windowing.label,
        )
        schema = distinct_columns(spec.outputs[0])
        lost = _why_no_event_time(spec)
        event_time, span = (None, None) if lost is not None else ("window_start", window.span)
        out = StreamType(schema, event_time, upstream.keys, span)
        late = StreamType(spec.outputs[1], None, upstream.keys)
        made = builder.add(id, "window", spec, [upstream], [out, late], parallelism=parallelism, lost=lost)
        return made[:1] if window.processing_time else made


def _why_no_event_time(spec: WindowAggregateSpec) -> str | None:
    """Why the results of windows have no event time of their own accord; ``None`` if they have."""
    if spec.window.endless:
        return "the global window has no borders"
    if spec.window.processing_time:
        return "its windows go by processing time"
    if spec.allowed_lateness_us:
        return "with allowed_lateness a window may come out again, updated, and would count twice"
    if spec.early is not None:
        return "with early results a window comes out several times, and would count as often"
    return _OVERLAPPING if spec.window.span is None else None


def interval_join(
    builder: GraphBuilder,
    id: str,
    left: Upstream,
    right: Upstream,
    bounds_us: tuple[int, int],
    suffix: str,
    parallelism: int | None,
) -> tuple[Upstream, ...]:
    from cutwater.operators.join.spec import IntervalJoinSpec

    with located(builder.check_id(id)):
        for side in (left, right):
            refuse_changes(builder, side, "an interval join")
        lower_us, upper_us = bounds_us
        if lower_us > upper_us:
            raise BuildError("within: the lower bound is above the upper", hint="Write within=('-1h', '30m').")
        left_time, right_time = (join_time(builder, side, u) for side, u in (("left", left), ("right", right)))
        spec = IntervalJoinSpec(
            left.type.schema,
            right.type.schema,
            left.keys,
            right.keys,
            left_time,
            right_time,
            lower_us,
            upper_us,
            suffix,
        )
        schema = distinct_columns(spec.outputs[0])
        # A pair comes out when its later row comes; only the time of a row that is never the earlier one is in time.
        event_time = lost = None
        if upper_us <= 0:
            event_time = left_time
        elif lower_us >= 0:
            event_time = _right_name(schema, left.type.schema, right_time, suffix)
        else:
            lost = "either row of a pair may be the older one; with_event_time says which column to go by"
        out = StreamType(schema, event_time, left.keys)
        late = [StreamType(s, None, u.keys) for s, u in zip(spec.outputs[1:], (left, right), strict=True)]
        return builder.add(id, "join", spec, [left, right], [out, *late], parallelism=parallelism, lost=lost)


def window_join(
    builder: GraphBuilder,
    id: str,
    sides: tuple[Upstream, Upstream],
    window: Window,
    how: WindowJoinType,
    suffix: str,
    parallelism: int | None,
) -> tuple[Upstream, ...]:
    from cutwater.api.steps.keyed_steps import LEFT, apart
    from cutwater.operators.join.spec import WindowJoinSpec

    left, right = sides
    with located(builder.check_id(id)), builder.together():
        for side in sides:
            refuse_changes(builder, side, "a window join")
            _check_nesting(side.type, window)
        left, _ = apart(builder, id, left, window, LEFT, left.type.schema.names)
        sides = (left, right)
        times = [_side_time(builder, name, side) for name, side in zip(("left", "right"), sides, strict=True)]
        types = (left.type.schema, right.type.schema)
        spec = WindowJoinSpec(*types, left.keys, right.keys, times[0], times[1], window, how, suffix)
        schema = distinct_columns(spec.outputs[0])
        # A row without a left side has no left key, unless both keys have one name.
        keys = left.keys if left.keys == right.keys or not spec.outer[1] else ()
        event_time, lost = (None, _OVERLAPPING) if window.span is None else ("window_start", None)
        out = StreamType(schema, event_time, keys, window.span)
        late = [StreamType(s, None, u.keys) for s, u in zip(spec.outputs[1:], sides, strict=True)]
        return builder.add(id, "window_join", spec, sides, [out, *late], parallelism=parallelism, lost=lost)


def _right_name(joined: pa.Schema, left: pa.Schema, name: str, suffix: str) -> str:
    """Name of a right column in the result; a key that did not come out is the left side's column."""
    other = name + suffix if name in left.names else name
    return other if other in joined.names else name


def _aggregates(
    schema: pa.Schema, calls: Mapping[str, AggregateCall | Aggregate], renames: Mapping[str, str] | None = None
) -> tuple[Aggregate, ...]:
    """Checked aggregates; ``renames`` are the names that columns have got since the user named them."""
    from cutwater.operators.aggregate.accumulators import Aggregate, AggregateCall

    if not calls:
        raise BuildError("aggregate needs at least one aggregate", hint="Write for example n=cw.count().")
    made: list[Aggregate] = []
    for name, call in calls.items():
        if isinstance(call, Aggregate):  # checked already
            made.append(call)
            continue
        if not isinstance(call, AggregateCall):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BuildError(
                f"{name}= is a {type(call).__name__}, not an aggregate", hint="Write for example n=cw.count()."
            )
        column = call.column
        if column is not None:
            column = require_column(schema, (renames or {}).get(column, column))
        made.append(Aggregate(name, call.kind, column, call.precision))
    return tuple(made)


def _check_nesting(upstream: StreamType, window: Window) -> None:
    """Windows over the results of windows: each result must lie in exactly one of the larger."""
    if upstream.span is None or window.endless:
        return
    size_us, offset_us = upstream.span
    if window.period is None:
        raise BuildError(
            "sessions of the results of windows: a result stands for a stretch of time, a session is made of instants",
            hint="Take the end of the window as event time: .with_event_time('window_end').",
        )
    of = window.period
    if any(border % size_us for border in (of.size_us, of.every_us, of.offset_us - offset_us)):
        raise BuildError(
            f"windows of {format_us(of.size_us)} cut the results of windows of {format_us(size_us)} in two",
            hint="Choose a multiple of the inner size, with borders on its borders.",
        )


def join_time(builder: GraphBuilder, side: str, upstream: Upstream) -> str:
    event_time = _side_time(builder, side, upstream)
    if upstream.type.span is not None:
        raise BuildError(
            f"the {side} side of the join holds results of windows, which come out after their event time",
            hint="Take the end of the window as event time: .with_event_time('window_end').",
        )
    return event_time


def _side_time(builder: GraphBuilder, side: str, upstream: Upstream) -> str:
    if upstream.type.event_time is None:
        story, hint = builder.event_time_story(upstream)
        raise BuildError(f"a join needs event time, but on its {side} side {story}", hint=hint)
    return upstream.type.event_time


INNER, LEFT = "inner", "left"


def apart(
    builder: GraphBuilder, id: str, upstream: Upstream, window: Window, ending: str, columns: Collection[str]
) -> tuple[Upstream, dict[str, str]]:
    """The upstream with other names where its columns have those of a window's borders.

    A step ``<id>.<ending>`` renames them; where nothing collides there is none.

    Args:
        id: of the step with the window.
        window: the global one has no borders.
        ending: what the new names end with: ``window_start_inner``.
        columns: those that come out beside the borders.

    Returns:
        The upstream, with the same key under its new names, and new names by old ones.

    Raises:
        BuildError: the id of the step that renames is taken.
    """
    names = upstream.type.schema.names
    renames: dict[str, str] = {}
    for border in () if window.endless else (WINDOW_START, WINDOW_END):
        if border in columns and border in names:
            new = f"{border}_{ending}"
            while new in names:
                new += f"_{ending}"
            renames[border] = new
    if not renames:
        return upstream, {}
    plain = replace(upstream, edge=EdgeType.FORWARD, keys=())
    beside = builder.steps[upstream.step].parallelism if upstream.edge is EdgeType.FORWARD else None
    renamed = rename(builder, f"{id}.{ending}", plain, renames, beside)
    keys = type(upstream.keys)(renames.get(name, name) for name in upstream.keys)
    return replace(renamed, edge=upstream.edge, keys=keys), renames
