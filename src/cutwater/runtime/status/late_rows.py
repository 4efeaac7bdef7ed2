"""Rows that came too late and that nobody reads: what the user is told of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cutwater.plan.graph import PhysicalPlan
from cutwater.runtime.control import reports as cr

_SIDES = {1: "late_left", 2: "late_right"}
_STREAMS: Mapping[str, Mapping[int, str]] = {
    "window": {1: "late"},
    "deduplicate": {1: "late"},
    "processor": {1: "late"},
    "join": _SIDES,
    "window_join": _SIDES,
    "join_as_of": _SIDES,
}
"""By kind of step and number of its output: what the stream of late rows is called."""


class LateRows:
    """Makes the warnings: one for each stream of late rows when its first ones are seen, one with the sum in the end.

    >>> from cutwater.runtime.control.reports import Metrics
    >>> import cutwater as cw
    >>> from cutwater.plan.planner import make_plan
    >>> flow = cw.Dataflow("example")
    >>> rows = flow.read("in", cw.rate(10), event_time="timestamp")
    >>> rows.key_by("value").deduplicate("once", within="1s").write("out", cw.discard())
    >>> late = LateRows(make_plan(flow, 1))
    >>> late.count([Metrics(1, 0.0, {"once": 9}, {}, {}, {}, {}, {}, 0.0, rows_unread={"once": {1: 7}})])
    >>> [warning.partition(". ")[0] for warning in late.fresh()], late.fresh()
    (["step 'once': rows come too late and are dropped (7 so far)"], [])
    >>> [warning.partition(". ")[0] for warning in late.total(3)]
    ["step 'once': 7 of 9 rows came too late and were dropped, since checkpoint 3"]
    """

    def __init__(self, plan: PhysicalPlan) -> None:
        self._kinds = {step.id: step.kind for step in plan.steps.values()}
        self._late: dict[tuple[str, int], int] = {}
        self._rows_in: dict[str, int] = {}
        self._told: set[tuple[str, int]] = set()

    def count(self, reports: Iterable[cr.Metrics]) -> None:
        """The newest reports of all workers."""
        self._late.clear()
        self._rows_in.clear()
        for report in reports:
            for step, rows in report.rows_in.items():
                self._rows_in[step] = self._rows_in.get(step, 0) + rows
            for step, outputs in report.rows_unread.items():
                for output, rows in outputs.items():
                    if output in _STREAMS.get(self._kinds[step], {}):
                        self._late[step, output] = self._late.get((step, output), 0) + rows

    def fresh(self) -> list[str]:
        """Warnings of what has begun to come late."""
        new = [where for where in self._late if where not in self._told]
        self._told.update(new)
        return [
            f"step {step!r}: rows come too late and are {self._fate(step, output)} "
            f"({self._late[step, output]:,} so far). {self._advice(step, output)}"
            for step, output in new
        ]

    def total(self, restored_id: int) -> list[str]:
        """Warnings with the sums.

        Args:
            restored_id: the checkpoint since which rows are counted; 0: the beginning.
        """
        since = f", since checkpoint {restored_id}" if restored_id else ""
        return [
            f"step {step!r}: {rows:,} of {self._rows_in[step]:,} rows came too late and were "
            f"{self._fate(step, output)}{since}. {self._advice(step, output)}"
            for (step, output), rows in self._late.items()
        ]

    def _fate(self, step: str, output: int) -> str:
        versions = self._kinds[step] == "join_as_of" and output == 2  # they count for rows to come
        return "missing in what is out already" if versions else "dropped"

    def _advice(self, step: str, output: int) -> str:
        kind = self._kinds[step]
        stream = _STREAMS[kind][output]
        lateness = ", or window(...) a larger allowed_lateness=" if kind == "window" else ""
        return f"Read them as .{stream}, or give read(...) a larger out_of_order={lateness}."
