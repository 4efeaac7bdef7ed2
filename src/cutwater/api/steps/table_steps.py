"""The steps that keep tables: deduplicate, joins of tables; their specifications, types and checks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from cutwater.api.steps.build import (
    Duration,
    GraphBuilder,
    Upstream,
    distinct_columns,
    duration_us,
    located,
    refuse_changes,
    require_column,
)
from cutwater.api.steps.keyed_steps import join_time, window_aggregate
from cutwater.data.changes import OP
from cutwater.errors import BuildError
from cutwater.plan.graph import StreamType

if TYPE_CHECKING:
    from cutwater.api.steps.keyed_steps import Windowing
    from cutwater.operators.join.spec import JoinType
    from cutwater.operators.ranking.top_spec import TopRows

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


def deduplicate(
    builder: GraphBuilder,
    id: str,
    upstream: Upstream,
    keep: Literal["first", "last"],
    within: Duration | None,
    parallelism: int | None,
) -> tuple[Upstream, ...]:
    from cutwater.operators.ranking.deduplicate_spec import DeduplicateSpec

    with located(builder.check_id(id)):
        refuse_changes(builder, upstream, "deduplicate", timed=within is not None)
        event_time = within_us = None
        if within is not None:
            within_us = duration_us(within, "within")
            event_time = upstream.type.event_time
            if event_time is None:
                story, hint = builder.event_time_story(upstream)
                raise BuildError(f"within= needs event time, but {story}", hint=hint)
        spec = DeduplicateSpec(upstream.type.schema, upstream.keys, keep, event_time, within_us)
        if keep == "first":
            out, lost = replace(upstream.type, keys=upstream.keys), None
        else:
            out, lost = StreamType(spec.outputs[0], None, upstream.keys, changes=upstream.keys), _NO_ORDER
        late = [StreamType(schema, None, upstream.keys) for schema in spec.outputs[1:]]
        return builder.add(id, "deduplicate", spec, [upstream], [out, *late], parallelism=parallelism, lost=lost)


def join_tables(
    builder: GraphBuilder,
    id: str,
    left: Upstream,
    right: Upstream,
    how: JoinType,
    suffix: str,
    keep: Literal["last"] | None,
    parallelism: int | None,
) -> Upstream:
    from cutwater.operators.join.spec import TableJoinSpec
    from cutwater.state.keys import NullableKeys

    with located(builder.check_id(id)):
        if keep not in (None, "last"):
            raise BuildError(f"keep={keep!r} is unknown", hint="Write keep='last', or leave it out.")
        for side, upstream in (("left", left), ("right", right)):
            _check_one_row_per_key(side, upstream)
        if keep is None:
            _tell_what_replaces(builder, id, left, right)
        updating = (left.type.changes is not None, right.type.changes is not None)
        spec = TableJoinSpec(left.type.schema, right.type.schema, left.keys, right.keys, how, suffix, updating)
        schema = distinct_columns(spec.outputs[0])
        # The left key columns hold the key of every row unless a row may have no left side.
        keyed = how in ("inner", "left") or left.keys == right.keys
        keys = left.keys if keyed else ()
        # A null key has no partner: in a full join it comes out of either side.
        unpaired = how == "full" and all(isinstance(side.keys, NullableKeys) for side in (left, right))
        out = StreamType(schema, None, keys, changes=() if unpaired else keys)
        return builder.add(id, "join_tables", spec, [left, right], [out], parallelism=parallelism, lost=_NO_ORDER)[0]


def top(
    builder: GraphBuilder,
    id: str,
    upstream: Upstream,
    order: tuple[int, str | Sequence[str], bool | Sequence[bool]],
    rank: str | None,
    parallelism: int | None,
) -> Upstream:
    """``order``: how many rows, by which columns, and whether descending."""
    from cutwater.operators.ranking.top_spec import TopSpec

    with located(builder.check_id(id)):
        changes = upstream.type.changes
        rows = top_rows(*order, removing=changes is not None, ranked=rank is not None)
        spec = TopSpec(upstream.type.schema, upstream.keys, rows, rank, changes is not None)
        schema = distinct_columns(spec.outputs[0])
        apart = (*upstream.keys, rank) if rank is not None else changes or ()
        out = StreamType(schema, None, upstream.keys, changes=apart)
        return builder.add(id, "top", spec, [upstream], [out], parallelism=parallelism, lost=_NO_ORDER)[0]


def window_top(
    builder: GraphBuilder,
    id: str,
    upstream: Upstream,
    order: tuple[int, str | Sequence[str], bool | Sequence[bool]],
    rank: str,
    windowing: Windowing,
    parallelism: int | None,
) -> tuple[Upstream, ...]:
    """A window step that collects the first rows, and a step that takes its lists apart."""
    from cutwater.api.steps.keyed_steps import INNER, apart
    from cutwater.operators.ranking.top_spec import ROWS, check_order
    from cutwater.operators.stateless.rows import UnnestSpec

    with located(builder.check_id(id)), builder.together():
        rows = top_rows(*order, removing=False, ranked=False)
        check_order(upstream.type.schema, rows)
        ranked_id = builder.check_id(f"{id}.rank")
        upstream, renames = apart(builder, id, upstream, windowing.window, INNER, upstream.type.schema.names)
        rows = replace(rows, by=tuple(renames.get(name, name) for name in rows.by))
        lists, *late = window_aggregate(builder, id, upstream, {ROWS: rows}, windowing, parallelism)
        kept = tuple(name for name in lists.type.schema.names if name not in (*upstream.keys, ROWS))
        spec = UnnestSpec(lists.type.schema, ROWS, kept, rank)
        out = replace(lists.type, schema=distinct_columns(spec.outputs[0]))
        return (builder.add(ranked_id, "unnest", spec, [lists], [out], parallelism=parallelism)[0], *late)


def top_rows(
    n: int, by: str | Sequence[str], descending: bool | Sequence[bool], *, removing: bool, ranked: bool
) -> TopRows:
    """The order, from what the user wrote."""
    from cutwater.operators.ranking.top_spec import ROWS, TopRows

    columns = (by,) if isinstance(by, str) else tuple(by)
    directions = (descending,) * len(columns) if isinstance(descending, bool) else tuple(descending)
    return TopRows(ROWS, "top", by=columns, descending=directions, n=n, removing=removing, ranked=ranked)


def join_as_of(
    builder: GraphBuilder,
    id: str,
    left: Upstream,
    right: Upstream,
    how: Literal["inner", "left"],
    suffix: str,
    parallelism: int | None,
) -> tuple[Upstream, ...]:
    from cutwater.operators.join.spec import AsOfJoinSpec

    with located(builder.check_id(id)):
        for upstream in (left, right):
            refuse_changes(builder, upstream, "an as-of join")
        times = (join_time(builder, "left", left), join_time(builder, "right", right))
        spec = AsOfJoinSpec(left.type.schema, right.type.schema, left.keys, right.keys, *times, how, suffix)
        # Rows come out when the watermark passes them, so their own time is in order.
        out = StreamType(distinct_columns(spec.outputs[0]), times[0], left.keys)
        late = [StreamType(s, None, u.keys) for s, u in zip(spec.outputs[1:], (left, right), strict=True)]
        return builder.add(id, "join_as_of", spec, [left, right], [out, *late], parallelism=parallelism)


def _check_one_row_per_key(side: str, upstream: Upstream) -> None:
    changes = upstream.type.changes
    if changes is None or (changes and set(changes) <= set(upstream.keys)):
        return
    known = f"are told apart by {', '.join(changes)}" if changes else "have no known key"
    raise BuildError(
        f"the {side} side is an updating stream whose rows {known}, but the join keeps one row for each "
        f"{', '.join(upstream.keys)}: they would replace each other",
        hint="Key it by the columns that tell its rows apart, or name those: .with_changes('column').",
    )


def _tell_what_replaces(builder: GraphBuilder, id: str, left: Upstream, right: Upstream) -> None:
    """Warn of sides whose rows are not known to be the latest of their keys: SQL would join each of them."""
    plain = [
        f"the {name} side, step {side.step!r},"
        for name, side in (("left", left), ("right", right))
        if side.type.changes is None and not _holds_latest(builder, side)
    ]
    if plain:
        warnings.warn(
            f"step {id!r}: join_tables keeps one row of each key, the latest, and {' and '.join(plain)} may have "
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
