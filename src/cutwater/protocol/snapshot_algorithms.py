"""The two snapshot algorithms behind one interface: markers in FIFO channels, colours in channels that reorder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

from cutwater.protocol import messages as m
from cutwater.protocol.lai_yang import Coloured, LaiYangMachine, NoticeTaken
from cutwater.protocol.protocols import NETWORK
from cutwater.protocol.subtask.machine import SubtaskMachine

AlgorithmName: TypeAlias = Literal["chandy_lamport", "lai_yang"]


class Algorithm(Protocol):
    """One process's part in all snapshots.  Each method returns effects to be performed in their order, at once."""

    @property
    def colour(self) -> int:
        """What messages sent now carry."""
        ...

    def trigger(self, snapshot: int) -> Sequence[m.Effect]:
        """This process is an initiator (CL1)."""
        ...

    def marker(self, channel: str, snapshot: int, position: int) -> Sequence[m.Effect]:
        """A marker was taken from a channel (CL2, CL3)."""
        ...

    def message(self, channel: str, colour: int) -> Sequence[m.Effect]:
        """A message is about to be taken from a channel."""
        ...

    def durable(self, event: m.Durable | m.LogsDurable) -> Sequence[m.Effect]:
        """What was recorded is safe."""
        ...

    def abort(self, snapshot: int) -> Sequence[m.Effect]:
        """The snapshot was given up."""
        ...


class ChandyLamport:
    """Markers: the subtask machine in its row ``chandy_lamport``."""

    colour = 0

    def __init__(self, process: str, inputs: Sequence[str], last: int) -> None:
        protocol = NETWORK
        self._machine = SubtaskMachine(process, tuple(inputs), protocol=protocol, last_checkpoint_id=last)

    def trigger(self, snapshot: int) -> Sequence[m.Effect]:
        return self._machine.handle(m.Trigger(snapshot))

    def marker(self, channel: str, snapshot: int, position: int) -> Sequence[m.Effect]:
        return self._machine.handle(m.BarrierTaken(channel, snapshot))

    def message(self, channel: str, colour: int) -> Sequence[m.Effect]:
        return self._machine.handle(m.RowsTaken(channel, 1)) if self._machine.recording(channel) else ()

    def durable(self, event: m.Durable | m.LogsDurable) -> Sequence[m.Effect]:
        effects = self._machine.handle(event)
        if any(isinstance(e, m.Acknowledge) for e in effects):
            # Nothing is committed in a network: a process need not hear whether all others did their part, too.
            self._machine.handle(m.CompleteNotice(event.checkpoint_id, commit=False))
        return effects

    def abort(self, snapshot: int) -> Sequence[m.Effect]:
        return self._machine.handle(m.AbortNotice(snapshot))


class LaiYang:
    """Colours: right with and without FIFO channels."""

    def __init__(self, process: str, inputs: Sequence[str], colour: int, taken: Mapping[str, int]) -> None:
        self._machine = LaiYangMachine(process, inputs, colour=colour, taken=taken)

    @property
    def colour(self) -> int:
        return self._machine.colour

    def trigger(self, snapshot: int) -> Sequence[m.Effect]:
        return self._machine.handle(m.Trigger(snapshot))

    def marker(self, channel: str, snapshot: int, position: int) -> Sequence[m.Effect]:
        return self._machine.handle(NoticeTaken(channel, snapshot, position))

    def message(self, channel: str, colour: int) -> Sequence[m.Effect]:
        return self._machine.handle(Coloured(channel, colour))

    def durable(self, event: m.Durable | m.LogsDurable) -> Sequence[m.Effect]:
        return self._machine.handle(event)

    def abort(self, snapshot: int) -> Sequence[m.Effect]:
        return self._machine.handle(m.AbortNotice(snapshot))
