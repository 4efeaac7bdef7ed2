"""The two snapshot algorithms behind one interface: markers in FIFO channels, colours in channels that reorder."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from cutwater.errors import InvariantError
from cutwater.protocol import messages as m
from cutwater.protocol.messages import InputId
from cutwater.protocol.protocols import NETWORK
from cutwater.protocol.subtask.machine import SubtaskMachine

AlgorithmName: TypeAlias = Literal["chandy_lamport", "lai_yang"]


class Algorithm(Protocol):
    """One process's part in all snapshots.  Each method returns effects to be performed in their order, at once."""

    @property
    def colour(self) -> int:
        """Colour that messages sent now carry."""
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
        """A recording is safe."""
        ...

    def abort(self, snapshot: int) -> Sequence[m.Effect]:
        """The snapshot was given up."""
        ...


class ChandyLamport:
    """Markers: the subtask machine in its row ``chandy_lamport``."""

    colour = 0

    def __init__(self, process: str, inputs: Sequence[str], last: int) -> None:
        self._machine = SubtaskMachine(process, tuple(inputs), protocol=NETWORK, last_checkpoint_id=last)

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


STORY_EVENTS = 16


class Coloured(msgspec.Struct, frozen=True):
    """A message is about to be taken from an input.  The effects are to be performed before it is processed."""

    input: InputId
    colour: int


class NoticeTaken(msgspec.Struct, frozen=True):
    """The sender of an input has recorded itself, after ``sent`` messages on this channel."""

    input: InputId
    checkpoint_id: int
    sent: int


LaiYangEvent: TypeAlias = Coloured | NoticeTaken | m.Trigger | m.Durable | m.LogsDurable | m.AbortNotice


class ColourStage(enum.Enum):
    """Stage of one snapshot in one process."""

    ABSENT = "absent"
    """Not recorded.  Notices may have come."""
    RECORDING = "recording"
    """Recorded; messages sent before the sender's cut are still to come, or it is not known whether."""
    WRITING = "writing"
    """Every channel is complete; something is not durable yet."""
    ACKNOWLEDGED = "acknowledged"
    ABORTED = "aborted"


class ColourStep(enum.Enum):
    FREEZE = "recorded, channels open"
    FREEZE_COMPLETE = "recorded, every channel complete"
    CHANNEL_COMPLETE = "a channel is complete, others are not"
    LOGS_COMPLETE = "the last channel is complete"
    PART_DURABLE = "state or logs durable, the other not"
    ALL_DURABLE = "everything durable"
    ABORT = "abort notice"


LAI_YANG_STAGES: dict[tuple[ColourStage, ColourStep], ColourStage] = {
    (ColourStage.ABSENT, ColourStep.FREEZE): ColourStage.RECORDING,
    (ColourStage.ABSENT, ColourStep.FREEZE_COMPLETE): ColourStage.WRITING,
    (ColourStage.ABSENT, ColourStep.ABORT): ColourStage.ABORTED,
    (ColourStage.RECORDING, ColourStep.CHANNEL_COMPLETE): ColourStage.RECORDING,
    (ColourStage.RECORDING, ColourStep.LOGS_COMPLETE): ColourStage.WRITING,
    (ColourStage.RECORDING, ColourStep.PART_DURABLE): ColourStage.RECORDING,
    (ColourStage.RECORDING, ColourStep.ABORT): ColourStage.ABORTED,
    (ColourStage.WRITING, ColourStep.PART_DURABLE): ColourStage.WRITING,
    (ColourStage.WRITING, ColourStep.ALL_DURABLE): ColourStage.ACKNOWLEDGED,
    (ColourStage.WRITING, ColourStep.ABORT): ColourStage.ABORTED,
}


@dataclass(slots=True)
class _Recording:
    """One snapshot in one process."""

    id: int
    stage: ColourStage = ColourStage.ABSENT
    white: dict[InputId, int] = field(default_factory=dict[InputId, int])
    """Per open channel: messages of older colours taken so far, since the beginning of the channel."""
    rows: dict[InputId, int] = field(default_factory=dict[InputId, int])
    """Per channel: those of them taken after the cut."""
    undurable: set[str] = field(default_factory=set[str])


class LaiYang:
    """Colours: right with and without FIFO channels.

    Args:
        name: for messages.
        inputs: all input channels.
        colour: the newest snapshot recorded (or given out) before the start or restore.
        taken: messages taken from each input before the start (after a restore).

    >>> machine = LaiYang("q", ["pq"])
    >>> for effect in machine.handle(Coloured("pq", colour=1)): print(type(effect).__name__)
    Freeze
    BroadcastBarrier
    StartRecording
    >>> machine.handle(Coloured("pq", colour=0))  # was overtaken by the first
    [Record(input='pq', checkpoint_ids=(1,))]
    >>> machine.handle(NoticeTaken("pq", 1, sent=1))
    [StopRecording(checkpoint_id=1, input='pq', rows=1), WriteLogs(checkpoint_id=1)]
    """

    def __init__(
        self, name: str, inputs: Sequence[InputId], colour: int = 0, taken: Mapping[Any, int] | None = None
    ) -> None:
        self.name, self.colour = name, colour
        self._first = colour
        self._inputs = tuple(inputs)
        self._taken: dict[InputId, int] = {input: (taken or {}).get(input, 0) for input in self._inputs}
        self._snapshots: dict[int, _Recording] = {}
        self._notices: dict[int, dict[InputId, int]] = {}
        self._given_up: set[int] = set()
        self._events: deque[LaiYangEvent] = deque(maxlen=STORY_EVENTS)

    @property
    def pending(self) -> dict[int, ColourStage]:
        """Snapshots that are recorded here and not acknowledged."""
        return {id: s.stage for id, s in self._snapshots.items()}

    def trigger(self, snapshot: int) -> Sequence[m.Effect]:
        return self.handle(m.Trigger(snapshot))

    def marker(self, channel: str, snapshot: int, position: int) -> Sequence[m.Effect]:
        return self.handle(NoticeTaken(channel, snapshot, position))

    def message(self, channel: str, colour: int) -> Sequence[m.Effect]:
        return self.handle(Coloured(channel, colour))

    def durable(self, event: m.Durable | m.LogsDurable) -> Sequence[m.Effect]:
        return self.handle(event)

    def abort(self, snapshot: int) -> Sequence[m.Effect]:
        return self.handle(m.AbortNotice(snapshot))

    def handle(self, event: LaiYangEvent) -> list[m.Effect]:
        """Take one event; the effects are to be performed in their order.

        Raises:
            InvariantError: the event is illegal in this state.
        """
        self._events.append(event)
        match event:
            case Coloured():
                return self._on_message(event.input, event.colour)
            case NoticeTaken():
                return self._on_notice(event)
            case m.Trigger():
                return self._rise(event.checkpoint_id)
            case m.Durable():
                return self._durable(event.checkpoint_id, "state")
            case m.LogsDurable():
                return self._durable(event.checkpoint_id, "logs")
            case m.AbortNotice():
                return self._abort(event.checkpoint_id)

    def _on_message(self, input: InputId, colour: int) -> list[m.Effect]:
        if input not in self._taken:
            raise self._broken(f"{input!r} is not an input")
        effects = self._rise(colour)
        self._taken[input] += 1
        late = [s for s in self._snapshots.values() if colour < s.id and input in s.white]
        if late:
            effects.append(m.Record(input, tuple(s.id for s in late)))
        for snapshot in late:
            snapshot.white[input] += 1
            snapshot.rows[input] += 1
            effects += self._complete(snapshot, input)
        return effects

    def _on_notice(self, event: NoticeTaken) -> list[m.Effect]:
        id, input = event.checkpoint_id, event.input
        if input not in self._taken:
            raise self._broken(f"{input!r} is not an input")
        if id <= self._first or id in self._given_up:
            return []
        known = self._notices.setdefault(id, {})
        if input in known:
            raise self._broken(f"input {input!r} brought two notices of snapshot {id}")
        known[input] = event.sent
        # The sender has recorded every snapshot up to this one, and whatever it sends next says so.
        effects = self._rise(id)
        snapshot = self._snapshots.get(id)
        return effects + (self._complete(snapshot, input) if snapshot is not None else [])

    def _rise(self, colour: int) -> list[m.Effect]:
        """Record every snapshot up to this colour that is not recorded yet (CL1, CL2)."""
        effects: list[m.Effect] = []
        while self.colour < colour:
            self.colour += 1
            if self.colour not in self._given_up:
                effects += self._freeze(self.colour)
        return effects

    def _freeze(self, id: int) -> list[m.Effect]:
        snapshot = _Recording(id, white=dict(self._taken), rows=dict.fromkeys(self._inputs, 0))
        snapshot.undurable = {"state", "logs"} if self._inputs else {"state"}
        self._snapshots[id] = snapshot
        self._step(snapshot, ColourStep.FREEZE if self._inputs else ColourStep.FREEZE_COMPLETE)
        effects: list[m.Effect] = [m.Freeze(id, False), m.BroadcastBarrier(id, False)]
        effects += [m.StartRecording(id, input) for input in self._inputs]
        for input in self._notices.get(id, {}):
            effects += self._complete(snapshot, input)
        return effects

    def _complete(self, snapshot: _Recording, input: InputId) -> list[m.Effect]:
        """CL3 without markers: the channel's state is complete once every message of an older colour was taken."""
        sent = self._notices.get(snapshot.id, {}).get(input)
        if sent is None or input not in snapshot.white or snapshot.white[input] < sent:
            return []
        if snapshot.white[input] > sent:
            raise self._broken(f"snapshot {snapshot.id}: {input!r} brought more messages than were sent before the cut")
        del snapshot.white[input]
        stopped = m.StopRecording(snapshot.id, input, snapshot.rows[input])
        self._step(snapshot, ColourStep.CHANNEL_COMPLETE if snapshot.white else ColourStep.LOGS_COMPLETE)
        return [stopped] if snapshot.white else [stopped, m.WriteLogs(snapshot.id)]

    def _durable(self, id: int, part: str) -> list[m.Effect]:
        snapshot = self._snapshots.get(id)
        if snapshot is None:
            if id in self._given_up:
                return []
            raise self._broken(f"the writer reports snapshot {id}, which is not recorded here")
        if part not in snapshot.undurable or (part == "logs" and snapshot.white):
            raise self._broken(f"snapshot {id}: {part} durable, but not handed to the writer or durable already")
        snapshot.undurable.discard(part)
        self._step(snapshot, ColourStep.PART_DURABLE if snapshot.undurable else ColourStep.ALL_DURABLE)
        if snapshot.undurable:
            return []
        self._drop(id)
        return [m.Acknowledge(id)]

    def _abort(self, id: int) -> list[m.Effect]:
        self._given_up.add(id)
        snapshot = self._snapshots.get(id)
        if snapshot is not None:
            self._step(snapshot, ColourStep.ABORT)
        self._drop(id)
        return [m.Forget(id)] if snapshot is not None else []

    def _drop(self, id: int) -> None:
        self._snapshots.pop(id, None)
        self._notices.pop(id, None)

    def _step(self, snapshot: _Recording, step: ColourStep) -> None:
        after = LAI_YANG_STAGES.get((snapshot.stage, step))
        if after is None:
            raise self._broken(f"snapshot {snapshot.id} is {snapshot.stage.value}: no '{step.value}'")
        snapshot.stage = after

    def _broken(self, what: str) -> InvariantError:
        events = "".join(f"\n  {event}" for event in self._events) or " none"
        return InvariantError(
            f"process {self.name!r}, Lai-Yang, colour {self.colour}: {what}\n"
            f"pending {self._snapshots}, last events, newest last:{events}"
        )

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            InvariantError: one is broken.
        """
        for what, holds in (
            ("recorded snapshots are not above the colour", all(id <= self.colour for id in self._snapshots)),
            ("nothing given up is pending", not self._given_up & self._snapshots.keys()),
            ("exactly the recording ones have open channels", all(
                (s.stage is ColourStage.RECORDING) == bool(s.white) for s in self._snapshots.values())),
            ("nobody took more old messages than were sent", all(
                s.white[i] < sent for s in self._snapshots.values()
                for i, sent in self._notices.get(s.id, {}).items() if i in s.white)),
        ):  # fmt: skip
            if not holds:
                raise self._broken(f"invariant broken: {what}")
