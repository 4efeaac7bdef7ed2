"""A coordinator with its clock, and short words for what happens to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cutwater.config import JobConfig
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.checkpoint.messages import (
    AckAnswered,
    AckReceived,
    DeclineReceived,
    JobRunning,
    Published,
    RequestCheckpoint,
    SendTrigger,
    Tick,
)
from cutwater.protocol.protocols import CheckpointKind, FailureReason

SUBTASKS = ("source", "map", "sink")


@dataclass
class Job:
    """A coordinator, its clock and short words for what happens to it."""

    settings: dict[str, Any] = field(default_factory=dict)
    running: bool = True
    now: float = 0.0

    def __post_init__(self) -> None:
        config = JobConfig(**{"interval_ms": 100.0, "timeout_ms": 1000.0, **self.settings})
        self.coordinator = CheckpointCoordinator(config, frozenset(SUBTASKS), frozenset({"source"}), 0)
        if self.running:
            self.feed(JobRunning(1, 0.0))

    def feed(self, event) -> list[Any]:
        effects = self.coordinator.handle(event)
        self.coordinator.validate()
        return effects

    def at(self, now: float) -> list[Any]:
        self.now = now
        return self.feed(Tick(now))

    def request(self, kind=CheckpointKind.ON_DEMAND, id="user") -> list[Any]:
        return self.feed(RequestCheckpoint(self.now, kind, id))

    def ack(self, id: int, subtask: str = "map", attempt: int = 1) -> list[Any]:
        return self.feed(AckReceived(id, attempt, subtask, f"{subtask}/{id}", self.now))

    def ack_all(self, id: int) -> list[Any]:
        return [e for s in SUBTASKS for e in self.ack(id, s) if not isinstance(e, AckAnswered)]

    def decline(self, id: int, reason=FailureReason.DECLINED, subtask="map") -> list[Any]:
        return self.feed(DeclineReceived(id, 1, subtask, reason, self.now))

    def published(self, id: int) -> list[Any]:
        return self.feed(Published(id, self.now))

    def complete(self, id: int) -> list[Any]:
        return self.ack_all(id) + self.published(id)

    @property
    def pending(self) -> list[int]:
        return [p.checkpoint_id for p in self.coordinator.pending]


def kinds(effects, *types) -> list[Any]:
    return [e for e in effects if isinstance(e, types)]


def triggered(effects) -> list[int]:
    return [e.checkpoint_id for e in kinds(effects, SendTrigger)]
