"""How a planted bug gets into a world: another class in the place of one of the simulator's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutwater.protocol.channel.receiving import ReceivingEnd
    from cutwater.protocol.channel.sending import SendingEnd
    from cutwater.protocol.job.core import JobCore
    from cutwater.protocol.subtask.core import SubtaskCore
    from cutwater.protocol.subtask.performer import Performer
    from cutwater.sim.world.attempt import Attempt
    from cutwater.sim.world.choices import Choices
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


def of_cores(mutant: type[SubtaskCore]) -> Callable[[World], None]:
    """Prepares a world whose subtasks decide by this class."""

    def prepare(world: World) -> None:
        world.core_class = mutant

    return prepare


def of_performers(mutant: type[Performer]) -> Callable[[World], None]:
    """Prepares a world in which this class performs effects."""

    def prepare(world: World) -> None:
        world.performer_class = mutant

    return prepare


def of_ends(
    sending: type[SendingEnd] | None = None, receiving: type[ReceivingEnd] | None = None
) -> Callable[[World], None]:
    """Prepares a world whose channels have these ends."""

    def prepare(world: World) -> None:
        world.sending_class = sending or world.sending_class
        world.receiving_class = receiving or world.receiving_class

    return prepare


def of_choices(mutant: type[Choices]) -> Callable[[World], None]:
    """Prepares a world whose determinant logs are kept by this class."""

    def prepare(world: World) -> None:
        world.choices_class = mutant

    return prepare


def of_job_cores(mutant: type[JobCore]) -> Callable[[World], None]:
    """Prepares a world in which such a core decides over the job."""

    def prepare(world: World) -> None:
        world.job_core_class = mutant
        world.driver.core = world.driver.make_core()

    return prepare
