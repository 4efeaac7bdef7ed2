"""One schedule as data: world, protocol, settings, faults, draws.  A seed makes one; a script is one written down."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from cutwater.config import RestartConfig
from cutwater.data.decoding import prepare
from cutwater.errors import DataError
from cutwater.protocol.protocols import PROTOCOLS, ProtocolSpec
from cutwater.sim.schedules.graphs import WORLDS, Graph, dataflow

FAULTS = (
    "kill_worker", "kill_driver", "zombie_driver", "pause", "partition", "clog", "swizzle", "slow", "slow_disk",
    "reorder", "jitter", "write_error", "full_disk", "doubt", "rot", "clock_jump", "fail_subtask", "cross",
    "no_cores",
)  # fmt: skip
"""Every kind of fault.  Torn and lost writes come with the kills."""

REQUESTS = ("checkpoint", "savepoint", "stop", "stop_with_savepoint", "cancel", "go_back", "rescale", "burst")
"""Requests of users.  A job that was stopped or cancelled is started again, after ``go_back`` from an older
checkpoint.  A rescale is to parallelism 1, 2 or 3, as the place says; a burst is of 2 to 5 savepoints at once."""

_FAULT_PHASE_MS = 80.0
_MOST_OF_A_KIND = {"kill_driver": 2, "zombie_driver": 1, "kill_worker": 3}


Recovery: TypeAlias = Literal["job", "region", "task", "upstream"]
"""Scope of recovery: what goes back after a failure (R1, R2, R4, R3)."""


class Fault(NamedTuple):
    """A fault or a request: when, what, at which place (a number taken modulo what there is), and for how long."""

    at_ms: float
    kind: str
    place: int
    for_ms: float


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides how a simulated run goes.

    >>> schedule = make_schedule(7, "four", "aligned")
    >>> schedule == make_schedule(7, "four", "aligned"), schedule.seed
    (True, 7)
    """

    world: str
    protocol: str
    seed: int | None = None
    """Of the draws; ``None``: they are in ``draws``."""
    draws: dict[int, int] = {}
    rows: int = 24
    """Of every source."""
    pace_ms: float = 1.0
    """Between two reads of a source, four times that at most."""
    interval_ms: float = 10.0
    timeout_ms: float = 400.0
    max_concurrent: int = 1
    min_pause_ms: float = 0.0
    tolerable_failed: int = 1000
    aligned_timeout_ms: float = 0.0
    roll_rows: int = 0
    """Rows that make a part of the output; fewer wait for a later checkpoint."""
    recovery: Recovery = "job"
    """Scope of recovery."""
    publishes_aside: bool = False
    """The driver hears messages while it publishes."""
    joins_frames: bool = False
    """Receivers take frames that wait as one."""
    restart: RestartConfig = RestartConfig(strategy="fixed_delay", attempts=1_000_000, delay_ms=2.0)
    faults: tuple[Fault, ...] = ()
    requests: tuple[Fault, ...] = ()
    """Requests of users meanwhile."""
    planted: str = ""
    """Name of a planted bug."""

    def __post_init__(self) -> None:
        dataflow(self.world)
        if self.protocol not in PROTOCOLS:
            raise DataError(f"no protocol {self.protocol!r}", hint=f"Protocols: {', '.join(PROTOCOLS)}.")

    @property
    def faults_over_ms(self) -> float:
        """From here on nothing disturbs the run."""
        return max((f.at_ms + f.for_ms for f in self.faults), default=0.0)


prepare(Schedule)


_RESTARTS = (
    RestartConfig(strategy="fixed_delay", attempts=1_000_000, delay_ms=2.0),
    RestartConfig(strategy="exponential", initial_ms=1.0, max_ms=30.0, reset_ms=50.0, max_consecutive=1_000_000),
    RestartConfig(strategy="failure_rate", delay_ms=3.0, rate_failures=1_000_000, rate_window_ms=100.0),
)


def make_schedule(seed: int, world: str, protocol: str, *, planted: str = "") -> Schedule:
    """The schedule of a seed.  Which faults are on, and how often, is drawn first (a swarm), then the rest."""
    rng = random.Random(f"{seed} {world} {protocol}")
    chance = rng.random
    on = [kind for kind in FAULTS if kind != "no_cores" and chance() < (0.5 if kind == "rot" else 0.3)]
    faults: list[Fault] = []
    for kind in on:
        for _ in range(1 + int(chance() * _MOST_OF_A_KIND.get(kind, 4))):
            at = round(5.0 + chance() * _FAULT_PHASE_MS, 1)
            faults.append(Fault(at, kind, int(chance() * 256), round(1.0 + chance() ** 2 * 60.0, 1)))
    faults.sort()
    requests = sorted(
        Fault(round(5 + chance() * _FAULT_PHASE_MS, 1), REQUESTS[int(chance() * len(REQUESTS))], int(chance() * 6), 0.0)
        for _ in range(int(chance() * 3))
    )
    alone = PROTOCOLS[protocol].switches or PROTOCOLS[protocol].halts
    recovery = _recovery(dataflow(world), PROTOCOLS[protocol], chance)
    far_apart = recovery in ("task", "upstream") and chance() < 0.3
    if far_apart:  # replacements of replacements, of what nothing but determinant logs knows
        kind = "kill_worker" if chance() < 0.7 else "fail_subtask"
        faults = sorted([*faults, *(Fault(30.0 + 20 * k, kind, int(chance() * 256), 0.0) for k in range(4))])
    joins = random.Random(f"{seed} {world} {protocol} frames").random() < 0.5
    lost, asked = _lost_cores(random.Random(f"{seed} {world} {protocol} cores").random)
    return Schedule(
        world=world,
        protocol=protocol,
        seed=seed,
        rows=12 + int(chance() * 16),
        pace_ms=(0.5, 1.0, 2.0)[int(chance() * 3)],
        interval_ms=(6.0, 10.0, 16.0)[int(chance() * 3)] * (20 if far_apart else 3 if PROTOCOLS[protocol].halts else 1),
        timeout_ms=(60.0, 150.0, 400.0)[int(chance() * 3)] * (1 if world in WORLDS else 2),  # some have long loops
        max_concurrent=1 if alone else 1 + int(chance() * 2),
        min_pause_ms=(0.0, 4.0)[int(chance() * 2)],
        tolerable_failed=(0, 3, 1000)[int(chance() * 3)],
        aligned_timeout_ms=(0.0, 2.0, 8.0)[int(chance() * 3)],
        roll_rows=(0, 6, 12)[int(chance() * 3)],
        publishes_aside=chance() < 0.3,
        joins_frames=joins,
        restart=_RESTARTS[int(chance() * 3)],
        faults=tuple(sorted([*faults, *lost])),
        requests=tuple(sorted([*requests, *asked])),
        planted=planted,
        recovery=recovery,
    )


def _lost_cores(chance: Callable[[], float]) -> tuple[list[Fault], list[Fault]]:
    """Some schedules lose a machine and find no other one for a while; then users may ask for less, or for more."""
    if chance() > 0.25:
        return [], []
    at, for_ms = 5.0 + chance() * _FAULT_PHASE_MS, 10.0 + chance() * 50.0
    lost = [Fault(round(at, 1), "no_cores", 0, round(for_ms, 1)),
            Fault(round(at + 0.5, 1), "kill_worker", int(chance() * 256), 0.0)]  # fmt: skip
    asked = [Fault(round(at + chance() * for_ms, 1), "rescale", int(chance() * 6), 0.0)] if chance() < 0.7 else []
    return lost, asked


def _recovery(graph: Graph, row: ProtocolSpec, chance: Callable[[], float]) -> Recovery:
    """Whatever the world allows; ``task`` and ``upstream`` where every row is there once."""
    if len(graph.regions) > 1 and chance() < 0.5:
        return "region"
    if graph.workers == 1 or row.guarantee != "exactly-once":
        return "job"
    return ("job", "job", "task", "upstream")[int(chance() * 4)]


_CHUNK = 4096


class ChoiceTape:
    """All chance of a schedule: a tape of bytes, read from the beginning.

    A seed makes a random tape.  A script brings its own: what it does not name is 0, and 0 is always the plainest
    choice (the first candidate, the shortest latency).  So a failing tape is made simpler by writing zeros into it.

    Args:
        seed: of the random tape; ``None``: the tape is ``values`` and otherwise zeros.
        values: number of the draw -> byte.

    >>> tape = ChoiceTape(None, {1: 7})
    >>> tape.below(4), tape.below(4), tape.below(4), tape.used
    (0, 3, 0, 3)
    """

    __slots__ = ("_rng", "_tape", "used")

    def __init__(self, seed: int | None, values: Mapping[int, int] | None = None) -> None:
        self._rng = None if seed is None else random.Random(seed)
        if self._rng is not None:
            self._tape = self._rng.randbytes(_CHUNK)
        else:
            tape = bytearray(max(values, default=-1) + 1 if values else 0)
            for place, value in (values or {}).items():
                tape[place] = value
            self._tape = bytes(tape)
        self.used = 0
        """Choices so far."""

    def below(self, count: int) -> int:
        """A number from 0 to ``count - 1``; ``count`` is at most 256."""
        place = self.used
        self.used = place + 1
        try:
            return self._tape[place] % count
        except IndexError:
            return self._beyond(place) % count

    def chance(self, of_256: int) -> bool:
        """True ``of_256`` times out of 256; never for a draw of 0."""
        return self.below(256) >= 256 - of_256

    def values(self) -> dict[int, int]:
        """The draws that were not 0, as a script names them."""
        return {place: value for place, value in enumerate(self._tape[: self.used]) if value}

    def _beyond(self, place: int) -> int:
        if self._rng is None:
            return 0
        self._tape += self._rng.randbytes(_CHUNK)
        return self._tape[place]
