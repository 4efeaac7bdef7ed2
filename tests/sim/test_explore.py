"""All interleavings of small worlds: every invariant in every state, every complete snapshot a consistent cut."""

from __future__ import annotations

import pytest

from cutwater.protocol.rows import PROTOCOLS
from cutwater.sim.explore import SMALL_WORLDS, explore_world

STATES_MAX = 3_000


@pytest.mark.parametrize("world", SMALL_WORLDS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_interleaving_breaks_a_promise(world: str, protocol: str) -> None:
    found = explore_world(world, protocol, states_max=STATES_MAX)
    assert not found.violation
    assert found.states > 50
