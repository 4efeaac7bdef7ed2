"""A failing schedule made short, and any schedule as a text that people can read, keep and play again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from cutwater.errors import CutwaterError, DataError
from cutwater.sim.schedules.schedule import FAULTS, REQUESTS, Fault, Schedule
from cutwater.sim.simulate import play

_NUMBERS = (
    "rows", "pace_ms", "interval_ms", "timeout_ms", "max_concurrent", "min_pause_ms", "tolerable_failed",
    "aligned_timeout_ms", "roll_rows",
)  # fmt: skip
_SWITCHES = ("publishes_aside", "joins_frames")


def script_of(schedule: Schedule, expect: str, comment: str = "") -> str:
    """The text of a schedule.

    Args:
        expect: "ok", or the kind of the promise that it breaks.
        comment: for people; goes first.

    >>> print(script_of(Schedule(world="four", protocol="aligned", rows=3, draws={4: 7}), "ok", "nothing happens"))
    # nothing happens
    world four
    protocol aligned
    rows 3
    draws 4=7
    expect ok
    <BLANKLINE>
    """
    plain = Schedule(world=schedule.world, protocol=schedule.protocol)
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"world {schedule.world}", f"protocol {schedule.protocol}"]
    if schedule.planted:
        lines.append(f"planted {schedule.planted}")
    if schedule.seed is not None:
        lines.append(f"seed {schedule.seed}")
    for name in _NUMBERS:
        value = getattr(schedule, name)
        if value != getattr(plain, name):
            lines.append(f"{name} {value:g}")
    lines += [name for name in _SWITCHES if getattr(schedule, name)]
    if schedule.recovery != plain.recovery:
        lines.append(f"recovery {schedule.recovery}")
    if schedule.restart != plain.restart:
        lines.append(f"restart {msgspec.json.encode(schedule.restart).decode()}")
    lines += [f"fault {f.at_ms:g} {f.kind} {f.place} {f.for_ms:g}" for f in schedule.faults]
    lines += [f"request {r.at_ms:g} {r.kind} {r.place}" for r in schedule.requests]
    draws = [f"{place}={value}" for place, value in sorted(schedule.draws.items())]
    lines += ["draws " + " ".join(draws[i : i + 16]) for i in range(0, len(draws), 16)]
    return "\n".join([*lines, f"expect {expect}", ""])


def parse_script(text: str, where: str = "script") -> tuple[Schedule, str]:
    """The schedule of a script, and what it expects.

    Raises:
        DataError: a line says nothing known; the message names it.
    """
    found: dict[str, object] = {}
    faults: list[Fault] = []
    requests: list[Fault] = []
    draws: dict[int, int] = {}
    expect = "ok"
    for number, line in enumerate(text.splitlines(), start=1):
        word, _, rest = line.partition(" ")
        try:
            if not line.strip() or word.startswith("#"):
                continue
            if word == "fault":
                faults.append(_fault(*rest.split()))
            elif word == "request":
                requests.append(_request(*rest.split()))
            elif word == "draws":
                draws |= {int(p): int(v) for p, v in (pair.split("=") for pair in rest.split())}
            elif word == "expect":
                expect = rest
            else:
                found[word] = _value(word, rest)
        except (ValueError, TypeError, msgspec.DecodeError) as error:
            raise DataError(f"{where}, line {number}: {line!r}: {error}") from error
    whole = found | {"faults": faults, "requests": requests, "draws": draws}
    try:
        return msgspec.convert(whole, Schedule), expect
    except (msgspec.ValidationError, CutwaterError) as error:
        raise DataError(f"{where}: {error}") from error


def _fault(at: str, kind: str, place: str, duration: str) -> Fault:
    if kind not in FAULTS:
        raise ValueError(f"no fault {kind!r}")
    return Fault(float(at), kind, int(place), float(duration))


def _request(at: str, kind: str, place: str) -> Fault:
    if kind not in REQUESTS:
        raise ValueError(f"no request {kind!r}")
    return Fault(float(at), kind, int(place), 0.0)


def _value(word: str, rest: str) -> object:
    if word in ("world", "protocol", "planted", "recovery"):
        return rest
    if word in _SWITCHES:
        return True
    if word == "restart":
        return msgspec.json.decode(rest)
    if word not in (*_NUMBERS, "seed"):
        raise ValueError(f"no setting {word!r}")
    return float(rest) if word.endswith("_ms") else int(float(rest))


# ------------------------------------------------------------------------------------------------------- shorter

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
    for name in ("faults", "requests"):

        def only(kept: Sequence[Fault], name: str = name, schedule: Schedule = schedule) -> Schedule:
            return msgspec.structs.replace(schedule, **{name: tuple(kept)})

        schedule = only(_minimal(getattr(schedule, name), lambda kept, only=only: fails(only(kept))))
    return schedule


def _fewer_rows(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    for rows in (2, 4, 8, 12):
        candidate = msgspec.structs.replace(schedule, rows=rows)
        if rows < schedule.rows and fails(candidate):
            return candidate
    return schedule


def _plainer(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Settings as they are by default."""
    plain = Schedule(world=schedule.world, protocol=schedule.protocol)
    for name in ("recovery", "restart", *_NUMBERS[1:], *_SWITCHES):
        if getattr(schedule, name) != getattr(plain, name):
            candidate = msgspec.structs.replace(schedule, **{name: getattr(plain, name)})
            schedule = candidate if fails(candidate) else schedule
    return schedule


def _fewer_draws(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    def only(places: list[int]) -> Schedule:
        return msgspec.structs.replace(schedule, draws={place: schedule.draws[place] for place in places})

    return only(_minimal(sorted(schedule.draws), lambda kept: fails(only(kept))))
