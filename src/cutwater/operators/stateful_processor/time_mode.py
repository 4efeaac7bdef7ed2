"""The time modes and output modes, as Spark names them."""

from __future__ import annotations

import enum

from cutwater.errors import BuildError
from cutwater.state.objects.timers import EVENT, PROCESSING, TimerDomain


class TimeMode(enum.Enum):
    """What a processor's timers go by.

    >>> TimeMode.named("eventtime").unit
    1000
    """

    NONE = "None"
    PROCESSING = "ProcessingTime"
    EVENT = "EventTime"

    @property
    def domain(self) -> TimerDomain:
        """The clock of its timers."""
        return EVENT if self is TimeMode.EVENT else PROCESSING

    @property
    def unit(self) -> int:
        """How much one millisecond is on that clock."""
        return 1000 if self is TimeMode.EVENT else 1

    @classmethod
    def named(cls, name: object) -> TimeMode:
        """The mode of a name, whatever its case.

        Raises:
            BuildError: no such mode.
        """
        for mode in cls:
            if isinstance(name, str) and name.lower() == mode.value.lower():
                return mode
        raise BuildError(
            f"time_mode={name!r} is unknown", hint="Choose 'None', 'ProcessingTime' or 'EventTime' (as texts)."
        )


def check_output_mode(name: object) -> None:
    """Check an output mode.  A stream of rows is all there is here, so Append and Update come out the same.

    Raises:
        BuildError: no such mode, or one that only a table has.
    """
    if isinstance(name, str) and name.lower() in ("append", "update"):
        return
    if isinstance(name, str) and name.lower() == "complete":
        raise BuildError(
            "output_mode='Complete' would give out the whole result again and again, and a processor makes rows",
            hint="Write output_mode='Update'.",
        )
    raise BuildError(f"output_mode={name!r} is unknown", hint="Choose 'Append' or 'Update'.")
