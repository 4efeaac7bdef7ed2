"""Which subtasks must go back together (R2): the connected components of the physical graph.

Rows never pass from one region to another, and a barrier reaches each region through its own sources.  So a region that
goes back to the last completed checkpoint makes nothing wrong in the others, wherever they are: every later checkpoint
cuts each region by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

__all__ = ["Region", "Subtask", "regions_of", "slots_of"]

Subtask: TypeAlias = tuple[int, int]
"""Vertex and index; the index is the slot of the worker that it lives in."""
Region: TypeAlias = frozenset[Subtask]


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


def slots_of(region: Region) -> frozenset[int]:
    """The slots whose workers hold a part of a region.

    >>> sorted(slots_of(frozenset({(0, 1), (1, 0), (2, 1)})))
    [0, 1]
    """
    return frozenset(slot for _, slot in region)
