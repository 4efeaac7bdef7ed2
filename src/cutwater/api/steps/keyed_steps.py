"""The steps with keyed state, tables among it: their specifications, types and checks."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from cutwater.api.steps.build import (
    Duration,
    GraphBuilder,
    NewStep,
    Upstream,
    distinct_columns,
    duration_us,
    located,
    refuse_changes,
    require_column,
)
from cutwater.api.steps.steps import rename
from cutwater.config import format_us
from cutwater.data.changes import OP
from cutwater.errors import BuildError
from cutwater.operators.window.spec import WINDOW_END, WINDOW_START
from cutwater.plan.graph import EdgeType, StreamType

if TYPE_CHECKING:
    from cutwater.operators.aggregate.accumulators import Aggregate, AggregateCall
    from cutwater.operators.join.spec import JoinType, WindowJoinType
    from cutwater.operators.ranking.top_spec import TopRows
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


def running_aggregate(step: NewStep, calls: Mapping[str, AggregateCall]) -> Upstream:
    from cutwater.operators.aggregate.running_spec import RunningAggregateSpec

    upstream = step.upstream
    refuse_changes(step.builder, upstream, "an aggregate", timed=False)
    aggregates = _aggregates(upstream.type.schema, calls)
    event_time = upstream.type.event_time
    spec = RunningAggregateSpec(upstream.type.schema, upstream.keys, aggregates, event_time)
    schema = distinct_columns(spec.outputs[0])
    out = StreamType(schema, event_time, upstream.keys, upstream.type.span)
    return step.add("aggregate", spec, [out])[0]


def window_aggregate(
    step: NewStep, calls: Mapping[str, AggregateCall | Aggregate], windowing: Windowing
) -> tuple[Upstream, ...]:
    from cutwater.operators.window.spec import WindowAggregateSpec

    upstream = step.upstream
    window, lateness_us = windowing.window, windowing.allowed_lateness_us
    with step.builder.together():
        upstream, renames = apart(step, upstream, window, INNER, upstream.keys)
        step = replace(step, inputs=(upstream,))
        aggregates = _aggregates(upstream.type.schema, calls, renames)
        event_time = None if window.processing_time else upstream.type.event_time
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
        made = step.add("window", spec, [out, late], lost=lost)
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


def interval_join(step: NewStep, bounds_us: tuple[int, int], suffix: str) -> tuple[Upstream, ...]:
    from cutwater.operators.join.spec import IntervalJoinSpec

    left, right = step.inputs
    for side in step.inputs:
        refuse_changes(step.builder, side, "an interval join")
    lower_us, upper_us = bounds_us
    if lower_us > upper_us:
        raise BuildError("within: the lower bound is above the upper", hint="Write within=('-1h', '30m').")
    left_time, right_time = (join_time(step.builder, side, u) for side, u in (("left", left), ("right", right)))
    spec = IntervalJoinSpec(
        left.type.schema, right.type.schema, left.keys, right.keys, left_time, right_time, lower_us, upper_us, suffix
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
    return step.add("join", spec, [out, *late], lost=lost)


def window_join(step: NewStep, window: Window, how: WindowJoinType, suffix: str) -> tuple[Upstream, ...]:
    from cutwater.operators.join.spec import WindowJoinSpec

    left, right = step.inputs
    with step.builder.together():
        for side in step.inputs:
            refuse_changes(step.builder, side, "a window join")
            _check_nesting(side.type, window)
        left, _ = apart(step, left, window, LEFT, left.type.schema.names)
        sides = (left, right)
        step = replace(step, inputs=sides)
        times = [_side_time(step.builder, name, side) for name, side in zip(("left", "right"), sides, strict=True)]
        types = (left.type.schema, right.type.schema)
        spec = WindowJoinSpec(*types, left.keys, right.keys, times[0], times[1], window, how, suffix)
        schema = distinct_columns(spec.outputs[0])
        # A row without a left side has no left key, unless both keys have one name.
        keys = left.keys if left.keys == right.keys or not spec.outer[1] else ()
        event_time, lost = (None, _OVERLAPPING) if window.span is None else ("window_start", None)
        out = StreamType(schema, event_time, keys, window.span)
        late = [StreamType(s, None, u.keys) for s, u in zip(spec.outputs[1:], sides, strict=True)]
        return step.add("window_join", spec, [out, *late], lost=lost)


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
        raise builder.no_event_time(upstream, "a join needs event time", f"on its {side} side ")
    return upstream.type.event_time


INNER, LEFT = "inner", "left"


def apart(
    step: NewStep, upstream: Upstream, window: Window, ending: str, columns: Collection[str]
) -> tuple[Upstream, dict[str, str]]:
    """The upstream with other names where its columns have those of a window's borders.

    A step ``<id>.<ending>`` renames them; where nothing collides there is none.

    Args:
        step: with the window.
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
    beside = step.builder.steps[upstream.step].parallelism if upstream.edge is EdgeType.FORWARD else None
    with step.builder.new_step(f"{step.id}.{ending}", [plain], beside) as renaming:
        renamed = rename(renaming, renames)
    keys = type(upstream.keys)(renames.get(name, name) for name in upstream.keys)
    return replace(renamed, edge=upstream.edge, keys=keys), renames


_ROW_WISE = frozenset({"filter", "select", "with_columns", "drop", "rename"})
_NO_ORDER = "rows of an updating stream come out when their table changes, in no order of event time"


def with_changes(upstream: Upstream, columns: tuple[str, ...]) -> Upstream:
    """The upstream as an updating stream."""
    with located(upstream.step):
        kind = upstream.type.schema.field(require_column(upstream.type.schema, OP)).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise BuildError(f"column {OP!r} is {kind}, not string", hint="It holds '+I', '-U', '+U' or '-D'.")
        changes = tuple(require_column(upstream.type.schema, name) for name in columns)
    return replace(upstream, type=replace(upstream.type, changes=changes))


def deduplicate(step: NewStep, keep: Literal["first", "last"], within: Duration | None) -> tuple[Upstream, ...]:
    from cutwater.operators.ranking.deduplicate_spec import DeduplicateSpec

    upstream = step.upstream
    changes = upstream.type.changes
    updating = keep == "last" and within is None and changes is not None
    if updating and not (changes and set(changes) <= set(upstream.keys)):
        raise BuildError(
            f"the updating stream's rows {_told_apart(changes or ())}, but deduplicate keeps one row for each "
            f"{', '.join(upstream.keys)}: they would replace each other",
            hint=_KEY_HINT,
        )
    if not updating:
        refuse_changes(step.builder, upstream, "deduplicate", timed=within is not None)
    event_time = within_us = None
    if within is not None:
        within_us = duration_us(within, "within")
        event_time = upstream.type.event_time
        if event_time is None:
            raise step.builder.no_event_time(upstream, "within= needs event time")
    spec = DeduplicateSpec(upstream.type.schema, upstream.keys, keep, event_time, within_us, updating)
    if keep == "first":
        out, lost = replace(upstream.type, keys=upstream.keys), None
    else:
        out, lost = StreamType(spec.outputs[0], None, upstream.keys, changes=upstream.keys), _NO_ORDER
    late = [StreamType(schema, None, upstream.keys) for schema in spec.outputs[1:]]
    return step.add("deduplicate", spec, [out, *late], lost=lost)


def join_tables(step: NewStep, how: JoinType, suffix: str, keep: Literal["last"] | None) -> Upstream:
    from cutwater.operators.join.spec import TableJoinSpec
    from cutwater.state.keys import NullableKeys

    left, right = step.inputs
    if keep not in (None, "last"):
        raise BuildError(f"keep={keep!r} is unknown", hint="Write keep='last', or leave it out.")
    for side, upstream in (("left", left), ("right", right)):
        _check_one_row_per_key(side, upstream)
    if keep is None:
        _tell_what_replaces(step)
    updating = (left.type.changes is not None, right.type.changes is not None)
    spec = TableJoinSpec(left.type.schema, right.type.schema, left.keys, right.keys, how, suffix, updating)
    schema = distinct_columns(spec.outputs[0])
    # The left key columns hold the key of every row unless a row may have no left side.
    keyed = how in ("inner", "left") or left.keys == right.keys
    keys = left.keys if keyed else ()
    # A null key has no partner: in a full join it comes out of either side.
    unpaired = how == "full" and all(isinstance(side.keys, NullableKeys) for side in (left, right))
    out = StreamType(schema, None, keys, changes=() if unpaired else keys)
    return step.add("join_tables", spec, [out], lost=_NO_ORDER)[0]


def top(step: NewStep, order: tuple[int, str | Sequence[str], bool | Sequence[bool]], rank: str | None) -> Upstream:
    """``order``: how many rows, by which columns, and whether descending."""
    from cutwater.operators.ranking.top_spec import TopSpec

    upstream = step.upstream
    changes = upstream.type.changes
    rows = top_rows(*order, removing=changes is not None, ranked=rank is not None)
    spec = TopSpec(upstream.type.schema, upstream.keys, rows, rank, changes is not None)
    schema = distinct_columns(spec.outputs[0])
    apart = (*upstream.keys, rank) if rank is not None else changes or ()
    out = StreamType(schema, None, upstream.keys, changes=apart)
    return step.add("top", spec, [out], lost=_NO_ORDER)[0]


def window_top(
    step: NewStep, order: tuple[int, str | Sequence[str], bool | Sequence[bool]], rank: str, windowing: Windowing
) -> tuple[Upstream, ...]:
    """A window step that collects the first rows, and a step that takes its lists apart."""
    from cutwater.operators.ranking.top_spec import ROWS, check_order
    from cutwater.operators.stateless.rows import UnnestSpec

    upstream = step.upstream
    with step.builder.together():
        rows = top_rows(*order, removing=False, ranked=False)
        check_order(upstream.type.schema, rows)
        ranked_id = step.builder.check_id(f"{step.id}.rank")
        upstream, renames = apart(step, upstream, windowing.window, INNER, upstream.type.schema.names)
        rows = replace(rows, by=tuple(renames.get(name, name) for name in rows.by))
        lists, *late = window_aggregate(replace(step, inputs=(upstream,)), {ROWS: rows}, windowing)
        kept = tuple(name for name in lists.type.schema.names if name not in (*upstream.keys, ROWS))
        spec = UnnestSpec(lists.type.schema, ROWS, kept, rank)
        out = replace(lists.type, schema=distinct_columns(spec.outputs[0]))
        return (replace(step, id=ranked_id, inputs=(lists,)).add("unnest", spec, [out])[0], *late)


def top_rows(
    n: int, by: str | Sequence[str], descending: bool | Sequence[bool], *, removing: bool, ranked: bool
) -> TopRows:
    """The order, from what the user wrote."""
    from cutwater.operators.ranking.top_spec import ROWS, TopRows

    columns = (by,) if isinstance(by, str) else tuple(by)
    directions = (descending,) * len(columns) if isinstance(descending, bool) else tuple(descending)
    return TopRows(ROWS, "top", by=columns, descending=directions, n=n, removing=removing, ranked=ranked)


def join_as_of(step: NewStep, how: Literal["inner", "left"], suffix: str) -> tuple[Upstream, ...]:
    from cutwater.operators.join.spec import AsOfJoinSpec

    left, right = step.inputs
    for upstream in (left, right):
        refuse_changes(step.builder, upstream, "an as-of join")
    times = (join_time(step.builder, "left", left), join_time(step.builder, "right", right))
    spec = AsOfJoinSpec(left.type.schema, right.type.schema, left.keys, right.keys, *times, how, suffix)
    # Rows come out when the watermark passes them, so their own time is in order.
    out = StreamType(distinct_columns(spec.outputs[0]), times[0], left.keys)
    late = [StreamType(s, None, u.keys) for s, u in zip(spec.outputs[1:], (left, right), strict=True)]
    return step.add("join_as_of", spec, [out, *late])


def _check_one_row_per_key(side: str, upstream: Upstream) -> None:
    changes = upstream.type.changes
    if changes is None or (changes and set(changes) <= set(upstream.keys)):
        return
    raise BuildError(
        f"the {side} side is an updating stream whose rows {_told_apart(changes)}, but the join keeps one row for each "
        f"{', '.join(upstream.keys)}: they would replace each other",
        hint=_KEY_HINT,
    )


_KEY_HINT = "Key it by the columns that tell its rows apart, or name those: .with_changes('column')."


def _told_apart(changes: tuple[str, ...]) -> str:
    return f"are told apart by {', '.join(changes)}" if changes else "have no known key"


def _tell_what_replaces(step: NewStep) -> None:
    """Warn of sides whose rows are not known to be the latest of their keys: SQL would join each of them."""
    plain = [
        f"the {name} side, step {side.step!r},"
        for name, side in zip(("left", "right"), step.inputs, strict=True)
        if side.type.changes is None and not _holds_latest(step.builder, side)
    ]
    if plain:
        warnings.warn(
            f"step {step.id!r}: join_tables keeps one row of each key, the latest, and {' and '.join(plain)} may have "
            "several. If that is meant, write keep='last'. To pair every row with every other one use join(..., "
            "within=...).",
            stacklevel=4,
        )


def _holds_latest(builder: GraphBuilder, side: Upstream) -> bool:
    """True if a row of a stream stands for its key: one that replaces those before it, or the only one."""
    step = builder.steps[side.step]
    while step.kind in _ROW_WISE:
        step = builder.steps[step.inputs[0].step]
    apart = set(side.type.keys)
    if step.kind == "window" and side.type.event_time is not None:
        apart.add(side.type.event_time)
    elif step.kind not in ("aggregate", "deduplicate") or getattr(step.spec, "within_us", None) is not None:
        return False
    return bool(side.type.keys) and apart <= set(side.keys)
