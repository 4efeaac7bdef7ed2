"""The driver looks for new splits: it is told of what is new, once, and of the end whatever there is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import cutwater as cw
from cutwater.connectors.base import Source, Split
from cutwater.plan.planner import make_plan
from cutwater.runtime.driver.splits import Splits


@dataclass
class Growing:
    """What it finds, look after look; after the last one it has ended."""

    looks: list[list[str]]
    discover_interval_ms: float = 0.0
    found: list[Split] = field(default_factory=list[Split])

    @property
    def ended(self) -> bool:
        return len(self.looks) == 1

    def discover(self) -> list[Split]:
        self.found[:] = [Split(id) for id in self.looks.pop(0)]  # the same list, look after look
        return self.found


def looked(*looks: list[str], known: list[str] | None = None) -> list[tuple[list[str], bool]]:
    flow = cw.Dataflow("job")
    flow.read("in", cw.memory(schema="n long")).write("out", cw.discard())
    splits = Splits(make_plan(flow, 1, 8), {"in": [Split(id) for id in known or []]})
    told: list[tuple[list[str], bool]] = []

    def found(step: str, those: list[Split], ended: bool) -> None:
        assert step == "in"
        told.append(([split.id for split in those], ended))

    def failed(step: str, error: Exception) -> None:
        raise error

    splits._discover("in", cast(Source, cast(Any, Growing(list(looks)))), found, failed)
    return told


def test_what_is_there_already_is_not_told_again() -> None:
    assert looked(["a"], ["a"], ["a", "b"], ["a", "b"], ["a", "b", "c"], known=["a"]) == [
        (["a", "b"], False),
        (["a", "b", "c"], True),
    ]


def test_the_end_is_told_though_nothing_is_new() -> None:
    assert looked(["a"], ["a"], ["a"], known=["a"]) == [(["a"], True)]
    assert looked([]) == [([], True)]
