"""How a planted bug gets into a world: another class in the place of one of the simulator's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutwater.sim.world.attempt import Attempt
    from cutwater.sim.world.subtask import SimSubtask
    from cutwater.sim.world.world import World


def of_subtasks(mutant: type[SimSubtask]) -> Callable[[World], None]:
    """Prepares a world whose subtasks are of this class."""

    def prepare(world: World) -> None:
        world.subtask_class = mutant

    return prepare


def of_attempts(mutant: type[Attempt]) -> Callable[[World], None]:
    """Prepares a world whose attempts are of this class."""

    def prepare(world: World) -> None:
        world.attempt_class = mutant

    return prepare
