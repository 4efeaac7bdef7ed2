"""Windows of windows: rows that have a ``window_start`` of their own get it out of the way of the new one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from cutwater.api.steps.build import GraphBuilder, Upstream
from cutwater.api.steps.expression_steps import rename
from cutwater.operators.window.spec import WINDOW_END, WINDOW_START
from cutwater.plan.graph import EdgeType

if TYPE_CHECKING:
    from cutwater.operators.window.kinds import Window

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
