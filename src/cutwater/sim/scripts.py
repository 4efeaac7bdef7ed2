"""A schedule as a short text that people can read, keep and play again."""

from __future__ import annotations

import msgspec

from cutwater.errors import CutwaterError, DataError
from cutwater.sim.schedules.schedule import FAULTS, REQUESTS, Fault, Schedule

_NUMBERS = (
    "rows", "pace_ms", "interval_ms", "timeout_ms", "max_concurrent", "min_pause_ms", "tolerable_failed",
    "aligned_timeout_ms", "roll_rows",
)  # fmt: skip


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
    if schedule.publishes_aside:
        lines.append("publishes_aside")
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
    if word == "publishes_aside":
        return True
    if word == "restart":
        return msgspec.json.decode(rest)
    if word not in (*_NUMBERS, "seed"):
        raise ValueError(f"no setting {word!r}")
    return float(rest) if word.endswith("_ms") else int(float(rest))
