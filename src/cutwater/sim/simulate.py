"""Many schedules, one after the other, and what came of them."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import msgspec

from cutwater.data.decoding import prepare
from cutwater.errors import CutwaterError, InvariantError
from cutwater.protocol.checkpoint.coordinator import (
    PENDING_STAGES,
    CheckpointCoordinator,
    PendingCheckpoint,
    PendingStep,
)
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.stages import PHASES, STAGES, PhaseStep, Snapshot, StageStep
from cutwater.sim.mutants.core import MUTANTS_OF_THE_CORE, Mutant
from cutwater.sim.mutants.hosts import MUTANTS_OF_HOSTS
from cutwater.sim.schedules.graphs import RANDOM, WORLDS
from cutwater.sim.schedules.schedule import FAULTS, REQUESTS, Schedule, make_schedule
from cutwater.sim.world.disk import RolledBack
from cutwater.sim.world.oracle import Violation
from cutwater.sim.world.record import check_run, digest
from cutwater.sim.world.world import World

MUTANTS = {mutant.name: mutant for mutant in (*MUTANTS_OF_THE_CORE, *MUTANTS_OF_HOSTS)}
"""Every mutant by its name."""

DRAWN = 5
"""Of so many dataflows drawn by chance there is one schedule each, for one of every fixed one."""
COLLECT_EVERY = 200
"""Schedules between two searches for garbage: what is drawn by chance is seldom used twice."""


_TABLES = {"subtask": PHASES, "snapshot": STAGES, "checkpoint": PENDING_STAGES}

UNREACHABLE = {
    "subtask: stopped + freeze for a final barrier": (
        "Needs two final barriers in one attempt, the first of them before the input ended, that is of a stop with "
        "savepoint.  If that one is given up, the coordinator fails the attempt; if it completes, it starts no other "
        "but FINAL, and FINAL only when every subtask has handled its end of data, so that none is in STOPPED."
    ),
}
"""Transitions that one subtask allows and no coordinator brings about, each with the proof."""


class Coverage:
    """Counts of the transitions of machines that it makes: what no run walked, no run has proved anything about.

    >>> coverage = Coverage()
    >>> machine = coverage.machine(SubtaskMachine)
    >>> len(coverage.by_name()) > 30, sum(coverage.by_name().values())
    (True, 0)
    """

    def __init__(self) -> None:
        walked = defaultdict[tuple[int, int], int](int)
        self._walked = walked
        """(state before, step), by their addresses: the hash of an enum is slow Python."""

        @cache
        def counting_machine(machine: type[SubtaskMachine]) -> type[SubtaskMachine]:
            make_step, make_turn = machine._step, machine._turn  # pyright: ignore[reportPrivateUsage]

            class Counting(machine):
                def _step(self, snapshot: Snapshot, step: StageStep) -> None:
                    walked[id(snapshot.stage), id(step)] += 1
                    make_step(self, snapshot, step)

                def _turn(self, step: PhaseStep) -> None:
                    walked[id(self.phase), id(step)] += 1
                    make_turn(self, step)

            return Counting

        @cache
        def counting_coordinator(coordinator: type[CheckpointCoordinator]) -> type[CheckpointCoordinator]:
            class Counting(coordinator):
                def _step(self, pending: PendingCheckpoint, step: PendingStep) -> None:
                    walked[id(pending.stage), id(step)] += 1
                    super()._step(pending, step)

            return Counting

        self.machine, self.coordinator = counting_machine, counting_coordinator
        """The same machine or coordinator, counting."""

    def by_name(self) -> dict[str, int]:
        """Every transition of every table, and how often it was walked."""
        return {
            f"{table}: {before.value} + {step.value}": self._walked[id(before), id(step)]
            for table, transitions in _TABLES.items()
            for before, step in transitions
        }


_CRASHES = CutwaterError, ArithmeticError, LookupError, AttributeError, TypeError, ValueError, AssertionError


class Failure(msgspec.Struct, frozen=True):
    """A schedule that broke a promise."""

    world: str
    protocol: str
    seed: int
    kind: str
    text: str


class Report(msgspec.Struct):
    """Counts of the outcomes of a number of schedules; reports add up."""

    schedules: int = 0
    failures: list[Failure] = []
    checkpoints: int = 0
    recoveries: int = 0
    fallbacks: int = 0
    """Recoveries that went back behind a completed checkpoint."""
    void: int = 0
    events: int = 0
    cpu_s: float = 0.0
    digest: str = ""
    """Of the trace, if it was one schedule."""
    struck: dict[str, int] = {}
    """Faults and requests by kind, where they hit something."""
    walked: dict[str, int] = {}
    """Transitions of the core's tables, by name."""
    by_protocol: dict[str, int] = {}
    """Schedules by protocol."""

    @property
    def inconsistent(self) -> int:
        """Failures that are inconsistent cuts."""
        return sum("cut" in f.kind for f in self.failures)

    @property
    def passed(self) -> int:
        """Schedules that proved something: a void one is none."""
        return self.schedules - len(self.failures) - self.void

    @property
    def per_second(self) -> float:
        """Schedules per second of one core."""
        return self.schedules / self.cpu_s if self.cpu_s else 0.0

    def missing(self) -> list[str]:
        """Transitions and faults that were never reached, but for what cannot be."""
        return [name for name, n in {**self.walked, **self.struck}.items() if not n and name not in UNREACHABLE]

    def add(self, other: Report) -> None:
        """Take another report's numbers in."""
        for name in ("schedules", "failures", "checkpoints", "recoveries", "fallbacks", "void", "events", "cpu_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in (
            (self.struck, other.struck), (self.walked, other.walked), (self.by_protocol, other.by_protocol),
        ):  # fmt: skip
            _add(mine, theirs)


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


prepare(Report)


def play(schedule: Schedule, *, coverage: Coverage | None = None) -> tuple[World, Violation | None]:
    """Run one schedule to its end; the world as it was left, and the broken promise if there is one."""
    mutant = MUTANTS[schedule.planted] if schedule.planted else Mutant("")
    machine, coordinator = mutant.machine, mutant.coordinator
    if coverage is not None:
        machine, coordinator = coverage.machine(machine), coverage.coordinator(coordinator)
    world = World(schedule, machine=machine, coordinator=coordinator, monitor=mutant.monitor)
    mutant.plant(world)
    try:
        world.run()
        result = check_run(world)
        if not result.ok:
            first = result.violations[0]
            raise Violation(first.kind.value, str(first))
    except Violation as violation:
        return world, violation
    except InvariantError as error:
        return world, Violation("invariant", str(error))
    except (
        CutwaterError,
        ArithmeticError,
        LookupError,
        AttributeError,
        TypeError,
        ValueError,
        AssertionError,
    ) as error:
        return world, Violation("crash", f"{type(error).__name__}: {error}")
    return world, None


def verdict(schedule: Schedule) -> str:
    """ "ok", or the kind of the broken promise."""
    _, violation = play(schedule)
    return violation.kind if violation else "ok"


class Simulation:
    """A range of seeds over worlds and protocols.

    Args:
        worlds, protocols: names; each seed runs one pair, in turn.  ``random`` is another dataflow for every seed.
        planted: name of a mutant.

    >>> report = Simulation(["four"], ["aligned"]).run(range(3))
    >>> report.schedules, report.failures, report.checkpoints > 0
    (3, [], True)
    """

    def __init__(self, worlds: list[str] | None = None, protocols: list[str] | None = None, planted: str = "") -> None:
        self.pairs = [(w, p) for w in worlds or (*WORLDS, *[RANDOM] * DRAWN) for p in protocols or PROTOCOLS]
        self.planted = planted

    def schedule(self, seed: int) -> Schedule:
        """The schedule that a seed stands for."""
        world, protocol = self.pairs[seed % len(self.pairs)]
        world = f"{RANDOM}-{seed}" if world == RANDOM else world
        schedule = make_schedule(seed, world, protocol, planted=self.planted)
        settings = MUTANTS[self.planted].settings if self.planted else {}
        return msgspec.structs.replace(schedule, **settings)

    def run(self, seeds: range, *, told: Callable[[Report], None] = lambda _: None) -> Report:
        """Run them all; ``told`` hears of the report now and then."""
        coverage = Coverage()
        report = Report(struck=dict.fromkeys((*FAULTS, "torn", "lost", *REQUESTS), 0))
        started = time.process_time()
        with _no_collections():
            for number, seed in enumerate(seeds):
                self._one(report, seed, coverage)
                if number % 50 == 49:
                    report.cpu_s = time.process_time() - started
                    told(report)
                if number % COLLECT_EVERY == COLLECT_EVERY - 1:
                    gc.collect()
        report.cpu_s = time.process_time() - started
        if len(seeds) == 1:
            report.digest = digest(play(self.schedule(seeds[0]))[0])
        report.walked = coverage.by_name()
        return report

    def violations(self, seeds: range) -> Iterator[tuple[int, Violation]]:
        """The seeds that break a promise."""
        for seed in seeds:
            _, violation = play(self.schedule(seed))
            if violation is not None:
                yield seed, violation

    def _one(self, report: Report, seed: int, coverage: Coverage) -> None:
        schedule = self.schedule(seed)
        world, violation = play(schedule, coverage=coverage)
        report.schedules += 1
        _add(report.by_protocol, {schedule.protocol: 1})
        report.checkpoints += world.completed
        report.recoveries += max(world.restores - 1, 0)
        report.fallbacks += sum(type(entry) is RolledBack for entry in world.disk.log)
        report.events += len(world.history)
        _add(report.struck, world.struck)
        if violation is not None:
            report.failures.append(Failure(schedule.world, schedule.protocol, seed, violation.kind, str(violation)))
        elif world.void:
            report.void += 1
        world.dissolve()


@contextmanager
def _no_collections() -> Generator[None]:
    """Looking for garbage costs a sixth of the time, and there is little: worlds take themselves apart."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
