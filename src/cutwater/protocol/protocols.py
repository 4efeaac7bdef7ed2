"""The protocols: each is a row of three parameters of one machine.

| protocol | freeze on | input whose barrier came, before the freeze | input without barrier, after the freeze |
|---|---|---|---|
| ``none`` | never (the final wave of a bounded job only) | blocked | |
| ``aligned`` | all regular barriers | blocked | back-edges: recorded |
| ``at_least_once`` | all regular barriers | open | back-edges: recorded |
| ``chandy_lamport`` | first barrier | open | recorded |
| ``unaligned`` | like ``aligned``; once it switches, like ``chandy_lamport``, with barriers that overtake | | |
| ``synchronous`` | trigger, at every subtask | everything stands still until the outcome is known | recorded |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias


class FreezeOn(enum.Enum):
    """Moment at which a subtask freezes."""

    NEVER = "never"
    """Only for a final barrier, when nothing is in flight: sinks commit once, nothing is kept on the way."""
    FIRST = "first"
    TRIGGER = "trigger"
    """Every subtask is triggered; a barrier that is faster than the trigger counts as one."""
    ALL_REGULAR = "all_regular"
    """Barriers of back-edges are not waited for."""


class BeforeFreeze(enum.Enum):
    """Treatment of an input whose barrier came before the freeze."""

    BLOCK = "block"
    OPEN = "open"


class AfterFreeze(enum.Enum):
    """Inputs that are recorded from the freeze until their barrier comes."""

    RECORD_BACK_EDGES = "record_back_edges"
    RECORD_ALL = "record_all"


Guarantee: TypeAlias = Literal["at-most-once", "at-least-once", "exactly-once"]


@dataclass(frozen=True, slots=True)
class ProtocolSpec:
    """One protocol of the family.

    >>> PROTOCOLS["aligned"].before_freeze
    <BeforeFreeze.BLOCK: 'block'>
    """

    name: str
    freeze_on: FreezeOn
    before_freeze: BeforeFreeze
    after_freeze: AfterFreeze
    guarantee: Guarantee = "exactly-once"
    """Promise of a job under it, on loops too."""
    concurrent: bool = True
    """Several of its checkpoints may be under way."""
    switches: bool = False
    """A checkpoint may go over from this row to freezing at once, with overtaking barriers and all inputs recorded."""
    halts: bool = False
    """From its freeze until it hears the outcome a subtask takes and reads nothing; its barriers overtake."""
    any_order: bool = False
    """Any process begins snapshots, and those of several may cross: ids come in any order on a channel (CL1, CL5).

    Not in a job, under no row: its coordinator alone begins them, and its sinks commit all that came before an id.
    """


PROTOCOLS: dict[str, ProtocolSpec] = {
    row.name: row
    for row in (
        ProtocolSpec("none", FreezeOn.NEVER, BeforeFreeze.BLOCK, AfterFreeze.RECORD_BACK_EDGES, "at-most-once"),
        ProtocolSpec("aligned", FreezeOn.ALL_REGULAR, BeforeFreeze.BLOCK, AfterFreeze.RECORD_BACK_EDGES),
        ProtocolSpec(
            "at_least_once",
            FreezeOn.ALL_REGULAR,
            BeforeFreeze.OPEN,
            AfterFreeze.RECORD_BACK_EDGES,
            guarantee="at-least-once",
        ),
        ProtocolSpec("chandy_lamport", FreezeOn.FIRST, BeforeFreeze.OPEN, AfterFreeze.RECORD_ALL),
        ProtocolSpec(
            "unaligned",
            FreezeOn.ALL_REGULAR,
            BeforeFreeze.BLOCK,
            AfterFreeze.RECORD_BACK_EDGES,
            concurrent=False,
            switches=True,
        ),
        ProtocolSpec(
            "synchronous", FreezeOn.TRIGGER, BeforeFreeze.OPEN, AfterFreeze.RECORD_ALL, concurrent=False, halts=True
        ),
    )
}
"""All protocols that run today, by the name in ``JobConfig.protocol``."""

NETWORK = replace(PROTOCOLS["chandy_lamport"], any_order=True)
"""The same for process networks."""
