"""What goes back after a failure: regions, which are subtasks that must go back together.

*Regions* (R2) are the connected components of the physical graph.  Rows never pass from one region to another, and a
barrier reaches each region through its own sources.  So a region that goes back to the last completed checkpoint makes
nothing wrong in the others, wherever they are: every later checkpoint cuts each region by itself.

*Units* (R3) are its strongly connected components: single subtasks, and whole loops.  What goes back takes with it all
that it depends on, up to the sources, so that nobody need keep what was sent; what depends on it stays where it is, and
drops by number what it has.

A host that loses whole workers need not tell apart what it loses together: ``lost_together`` joins such units.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from cutwater.config import RecoveryName

Subtask: TypeAlias = tuple[int, int]
"""Vertex and index; the index is the slot of the worker that it lives in."""
Region: TypeAlias = frozenset[Subtask]
Place: TypeAlias = tuple[int, int]
"""Slot and region: what one worker holds of a region."""


def regions_of(subtasks: Iterable[Subtask], together: Iterable[tuple[Subtask, Subtask]]) -> tuple[Region, ...]:
    """The classes of subtasks that are connected, in the order of their first subtasks.

    Args:
        subtasks: all of them.
        together: pairs that belong together: both ends of every channel, and what else cannot be told apart.

    >>> [sorted(r) for r in regions_of([(0, 0), (0, 1), (1, 0)], [((0, 0), (1, 0))])]
    [[(0, 0), (1, 0)], [(0, 1)]]
    """
    above = {subtask: subtask for subtask in subtasks}

    def top(subtask: Subtask) -> Subtask:
        while above[subtask] != subtask:
            above[subtask] = subtask = above[above[subtask]]
        return subtask

    for one, other in together:
        a, b = sorted((top(one), top(other)))
        above[b] = a
    found: dict[Subtask, set[Subtask]] = {}
    for subtask in sorted(above):
        found.setdefault(top(subtask), set()).add(subtask)
    return tuple(frozenset(members) for members in found.values())


def units_of(
    subtasks: Iterable[Subtask], channels: Iterable[tuple[Subtask, Subtask]]
) -> tuple[tuple[Region, ...], tuple[frozenset[int], ...]]:
    """The units (R3) in the order of their first subtasks, and for each the numbers of those that go back with it.

    Args:
        subtasks: all of them.
        channels: sender and receiver of each.

    >>> source, loop, also, sink = (0, 0), (1, 0), (1, 1), (2, 0)
    >>> channels = [(source, loop), (loop, also), (also, loop), (loop, sink)]
    >>> units, upstream = units_of([source, loop, also, sink], channels)
    >>> [sorted(unit) for unit in units], [sorted(found) for found in upstream]
    ([[(0, 0)], [(1, 0), (1, 1)], [(2, 0)]], [[0], [0, 1], [0, 1, 2]])
    """
    senders: dict[Subtask, set[Subtask]] = {subtask: set() for subtask in subtasks}
    for sender, receiver in channels:
        senders[receiver].add(sender)
    needs: dict[Subtask, set[Subtask]] = {}
    for subtask in senders:
        seen, todo = {subtask}, [subtask]
        while todo:
            fresh = senders[todo.pop()] - seen
            seen |= fresh
            todo += fresh
        needs[subtask] = seen
    unit_of: dict[Subtask, int] = {}
    units: list[Region] = []
    for subtask in sorted(senders):
        if subtask not in unit_of:
            unit = frozenset(other for other in needs[subtask] if subtask in needs[other])
            unit_of.update(dict.fromkeys(unit, len(units)))
            units.append(unit)
    return tuple(units), tuple(frozenset(unit_of[s] for s in needs[min(unit)]) for unit in units)


def lost_together(
    units: tuple[Region, ...], upstream: tuple[frozenset[int], ...]
) -> tuple[tuple[Region, ...], tuple[frozenset[int], ...]]:
    """Units joined that go back at the loss of the same workers, and for each such region what goes back with it.

    A worker's loss takes as much down as before, in fewer regions.

    Args:
        units, upstream: as from ``units_of``.

    >>> sources, counts, sink = [(0, 0), (0, 1)], [(1, 0), (1, 1)], (2, 0)
    >>> channels = [(s, c) for s in sources for c in counts] + [(c, sink) for c in counts]
    >>> regions, needed = lost_together(*units_of([*sources, *counts, sink], channels))
    >>> [sorted(region) for region in regions], [sorted(found) for found in needed]
    ([[(0, 0), (0, 1), (1, 1)], [(1, 0), (2, 0)]], [[0], [0, 1]])
    """
    lost_with: list[set[int]] = [set() for _ in units]
    for unit, needed in zip(units, upstream, strict=True):
        for other in needed:
            lost_with[other] |= slots_of(unit)
    number: dict[frozenset[int], int] = {}
    region_of = [number.setdefault(frozenset(slots), len(number)) for slots in lost_with]
    regions = [frozenset[Subtask]()] * len(number)
    needs: list[set[int]] = [set() for _ in number]
    for region, unit, needed in zip(region_of, units, upstream, strict=True):
        regions[region] |= unit
        needs[region].update(region_of[other] for other in needed)
    for region in sorted(range(len(regions)), key=lambda r: -len(lost_with[region_of.index(r)])):
        needs[region].update(*(needs[other] for other in needs[region]))  # those are lost with more, and complete
    return tuple(regions), tuple(map(frozenset, needs))


class Division:
    """A job divided into parts that are restarted by themselves.

    Args:
        regions: the parts; every subtask is in one.
        slots: number of workers.
        upstream: of each part, the numbers of those that go back with it; none: each goes back alone.

    >>> source, sink, other = (0, 0), (1, 0), (1, 1)
    >>> division = Division(*units_of([source, sink, other], [(source, sink), (source, other)]), slots=2)
    >>> sorted(division.at(1)), sorted(division.with_upstream({2}))
    ([2], [0, 2])
    """

    def __init__(self, regions: tuple[Region, ...], upstream: tuple[frozenset[int], ...], slots: int) -> None:
        everywhere = frozenset(range(slots))
        self.regions, self.upstream = regions, upstream
        self.slots = [slots_of(r) if len(regions) > 1 else everywhere for r in regions]
        """Of each part, the slots whose workers hold something of it."""
        self.parts: frozenset[Place] = frozenset((slot, r) for r, found in enumerate(self.slots) for slot in found)
        """Slots and the regions that their workers hold a part of."""
        self.region_of = {subtask: r for r, region in enumerate(regions) for subtask in region}

    def at(self, slot: int) -> set[int]:
        """Regions that a failure of the slot's worker concerns."""
        return {region for region, slots in enumerate(self.slots) if slot in slots}

    def with_upstream(self, regions: Iterable[int]) -> set[int]:
        """Regions that go back when these do."""
        found = set(regions)
        return found.union(*(self.upstream[region] for region in found)) if self.upstream else found


def divide(
    recovery: RecoveryName,
    subtasks: Iterable[Subtask],
    channels: Iterable[tuple[Subtask, Subtask]],
    slots: int,
    tied: Iterable[tuple[Subtask, Subtask]] = (),
) -> Division:
    """The parts that go back by themselves after a failure: connected ones (R2), what lives in one worker (R4).

    With ``"upstream"`` (R3) they are what goes back at the loss of the same workers: most often all that stands before
    the last exchange of rows, and of what stands behind it, what lives in one worker.

    Args:
        recovery: the scope.
        subtasks: all of them.
        channels: sender and receiver of each.
        slots: number of workers.
        tied: pairs that go back together for another reason.

    >>> source, one, other = (0, 0), (1, 0), (1, 1)
    >>> channels = [(source, one), (source, other)]
    >>> scopes = ("job", "region", "task", "upstream")
    >>> [len(divide(scope, [source, one, other], channels, 2).regions) for scope in scopes]
    [1, 1, 2, 3]
    """
    everything = frozenset(subtasks)
    if recovery == "job":
        return Division((everything,), (), slots)
    if recovery == "upstream":
        both_ways = [pair for one, other in tied for pair in ((one, other), (other, one))]
        return Division(*lost_together(*units_of(everything, [*channels, *both_ways])), slots)
    first: dict[int, Subtask] = {}
    of_one_worker = ((first.setdefault(slot, (vertex, slot)), (vertex, slot)) for vertex, slot in sorted(everything))
    together = channels if recovery == "region" else of_one_worker
    return Division(regions_of(everything, [*together, *tied]), (), slots)


def partners(division: Division, recovery: RecoveryName, place: Place) -> frozenset[Place]:
    """Slots and regions with which a worker's part of a region has connections.

    They are those that rows pass to or from, and those that may be the only ones to know of its choices, or whose
    choices only it may know of.

    >>> source, one, other = (0, 0), (1, 0), (1, 1)
    >>> division = divide("upstream", [source, one, other], [(source, one), (source, other)], 2)
    >>> sorted(partners(division, "upstream", (0, 0))), sorted(partners(division, "upstream", (1, 2)))
    ([(0, 1), (1, 2)], [(0, 0)])
    """
    _, region = place
    if recovery == "task":
        return division.parts - {place}
    needs = [division.with_upstream({other}) for other in range(len(division.regions))]
    return frozenset((s, r) for s, r in division.parts if r in needs[region] or region in needs[r]) - {place}


def slots_of(region: Region) -> frozenset[int]:
    """The slots whose workers hold a part of a region.

    >>> sorted(slots_of(frozenset({(0, 1), (1, 0), (2, 1)})))
    [0, 1]
    """
    return frozenset(slot for _, slot in region)
