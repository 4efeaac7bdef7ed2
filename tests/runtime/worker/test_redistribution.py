"""A snapshot with rows on their way, gone on with at every other parallelism."""

from __future__ import annotations

import random

import pytest
from rescale_world import Cut, World, go_on


def check(old: int, new: int, seed: int, *, late: bool) -> None:
    """Late rows are those of a run without a cut where one source decides alone; with more of them none is late."""
    rng = random.Random(f"{old} {new} {seed}")
    world = World.make(rng, splits=1 if late else old, portions=6, late=late)
    cut = Cut.take(world, old, 1 if late else None, rng)
    go_on(world, cut, new, 1 if late else None, rng)
    results, lost = world.expected()
    assert world.windows == results
    assert sorted(world.late) == lost


PAIRS = [(old, new) for old in range(1, 17) for new in range(1, 17)]
SAMPLE = [(1, 2), (2, 1), (2, 4), (4, 2), (3, 5), (5, 3), (16, 1), (1, 16), (7, 16), (4, 4)]


@pytest.mark.parametrize("late", [False, True], ids=["in order", "with late rows"])
def test_windows_fire_once_and_the_same_rows_are_late(late: bool) -> None:
    for old, new in SAMPLE:
        for seed in range(3):
            check(old, new, seed, late=late)


def test_all_pairs_of_parallelism_from_1_to_16() -> None:
    for old, new in PAIRS:
        check(old, new, 0, late=True)


@pytest.mark.full
def test_all_pairs_of_parallelism_with_as_many_sources() -> None:
    for old, new in PAIRS:
        check(old, new, 0, late=False)
