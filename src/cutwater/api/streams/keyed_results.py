"""Results of steps of keyed streams besides a stream: windows to fill, and rows that came too late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Never

from cutwater.api.steps.build import GraphBuilder, Upstream
from cutwater.api.steps.elsewhere import MissingMethodError
from cutwater.api.steps.keyed_steps import Windowing, refuse_unnamed, window_aggregate
from cutwater.api.steps.table_steps import window_top
from cutwater.api.streams.stream import Stream
from cutwater.errors import BuildError

if TYPE_CHECKING:
    from cutwater.operators.aggregate.accumulators import AggregateCall


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
        made = window_aggregate(self._builder, id, self._upstream, aggregates, self._windowing, parallelism)
        return WindowedResult(self._builder, made)

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
        order = (n, by, descending)
        made = window_top(self._builder, id, self._upstream, order, rank, self._windowing, parallelism)
        return WindowedResult(self._builder, made)


class _WithLateRows(Stream):
    """A main output, and the rows that came too late for it, where a row can be late."""

    _never_late: ClassVar[str]
    """Why no row is late if there is no second output."""

    def __init__(self, builder: GraphBuilder, outputs: tuple[Upstream, ...]) -> None:
        super().__init__(builder, outputs[0])
        self._outputs = outputs

    @property
    def late(self) -> Stream:
        """Rows that lay behind the watermark (of windows: behind their end plus the allowed lateness).

        Raises:
            BuildError: no row can be late: windows by processing time, or keys that are remembered for ever.
        """
        if len(self._outputs) == 1:
            raise BuildError(self._never_late, step=self._outputs[0].step)
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
