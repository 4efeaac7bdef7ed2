"""Makes a failing schedule short: fewer faults, fewer rows, plainer draws, and the same broken promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from cutwater.sim.schedules.schedule import Schedule
from cutwater.sim.simulate import play

RUNS_MAX = 500

_T = TypeVar("_T")


def shrink(schedule: Schedule, *, runs_max: int = RUNS_MAX) -> tuple[Schedule, str]:
    """A shorter schedule that breaks the same promise, and its kind ("ok": it breaks none).

    Args:
        runs_max: how many schedules may be tried.
    """
    world, violation = play(schedule)
    if violation is None:
        return schedule, "ok"
    kind = violation.kind
    best = msgspec.structs.replace(schedule, seed=None, draws=world.draws.values())
    left = [runs_max]

    def fails(candidate: Schedule) -> bool:
        if left[0] <= 0:
            return False
        left[0] -= 1
        _, found = play(candidate)
        return found is not None and found.kind == kind

    if not fails(best):
        return schedule, kind
    for _ in range(2):
        best = _fewer_faults(best, fails)
        best = _fewer_rows(best, fails)
        best = _plainer(best, fails)
        best = _fewer_draws(best, fails)
    used = play(best)[0].draws.used
    return msgspec.structs.replace(best, draws={p: v for p, v in best.draws.items() if p < used}), kind


def _minimal(items: Sequence[_T], fails: Callable[[list[_T]], bool]) -> list[_T]:
    """Delta debugging: leave out ever smaller parts."""
    kept, size = list(items), max(len(items) // 2, 1)
    while kept:
        before, place = len(kept), 0
        while place < len(kept):
            without = kept[:place] + kept[place + size :]
            if fails(without):
                kept = without
            else:
                place += size
        if size == 1 and len(kept) == before:
            break
        size = max(size // 2, 1)
    return kept


def _fewer_faults(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    replace = msgspec.structs.replace
    faults = _minimal(schedule.faults, lambda kept: fails(replace(schedule, faults=tuple(kept))))
    schedule = replace(schedule, faults=tuple(faults))
    requests = _minimal(schedule.requests, lambda kept: fails(replace(schedule, requests=tuple(kept))))
    return replace(schedule, requests=tuple(requests))


def _fewer_rows(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    for rows in (2, 4, 8, 12):
        candidate = msgspec.structs.replace(schedule, rows=rows)
        if rows < schedule.rows and fails(candidate):
            return candidate
    return schedule


def _plainer(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Settings as they are by default."""
    plain = Schedule(world=schedule.world, protocol=schedule.protocol)
    for name in ("recovery", "restart", "pace_ms", "interval_ms", "timeout_ms", "max_concurrent", "min_pause_ms",
                 "tolerable_failed", "aligned_timeout_ms", "roll_rows", "publishes_aside"):  # fmt: skip
        if getattr(schedule, name) != getattr(plain, name):
            candidate = msgspec.structs.replace(schedule, **{name: getattr(plain, name)})
            schedule = candidate if fails(candidate) else schedule
    return schedule


def _fewer_draws(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    replace = msgspec.structs.replace
    places = _minimal(sorted(schedule.draws), lambda kept: fails(replace(schedule, draws=_only(schedule, kept))))
    return replace(schedule, draws=_only(schedule, places))


def _only(schedule: Schedule, places: list[int]) -> dict[int, int]:
    return {place: schedule.draws[place] for place in places}
