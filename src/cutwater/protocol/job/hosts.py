"""Ports of ``JobCore``: what a host performs with its workers, and with its storage and users."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol

import msgspec

from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.loops import SendVerdict
from cutwater.protocol.job import messages as j
from cutwater.protocol.job import rescale as r
from cutwater.protocol.job.recovery_scope import Region, Subtask
from cutwater.protocol.protocols import CheckpointKind


class Topology(msgspec.Struct, frozen=True):
    """A job at one parallelism, as its machines know it."""

    slots: int
    """Workers of a full group."""
    subtasks: frozenset[Subtask]
    sources: frozenset[Subtask] = frozenset()
    """Those that are triggered."""
    loops: Mapping[int, frozenset[Hashable]] = {}
    """The subtasks of each loop, by its number."""
    regions: tuple[Region, ...] = ()
    """Parts of ``subtasks`` that can go back by themselves; none: only all together."""
    upstream: tuple[frozenset[int], ...] = ()
    """Of each region, the numbers of those that go back with it (R3)."""


class Follow(msgspec.Struct, frozen=True):
    """The request for the checkpoint that commits what was handed out before a savepoint."""

    request: Hashable
    """The request for the savepoint."""


class JobHost(Protocol):
    """Performs what concerns attempts and workers.  Events for the core may be reported from within."""

    @property
    def cores(self) -> frozenset[int]:
        """Slots with a worker, or a core for one."""
        ...

    def begin(self, attempt: int, regions: tuple[int, ...] | None) -> None:
        """Take the log, choose the checkpoint, deploy; ``None``: everything.

        Once the log is taken for the first time ``JobCore.log_taken`` hears of it, before anything is deployed.
        """

    def start_rows(self, attempt: int, regions: tuple[int, ...] | None) -> None:
        """Let the rows of an attempt flow; ``None``: of all regions."""

    def runs(self) -> None:
        """Hear that all subtasks run, and that checkpoints go on."""

    def going_back(self, reason: str, regions: tuple[int, ...] | None) -> None:
        """Hear that a failure ended the attempt, or that of these regions; nothing was done about it yet."""

    def reset(self, regions: tuple[int, ...] | None) -> None:
        """Have all workers drop the subtasks of these regions; ``None``: all subtasks."""

    def overdue(self, slots: list[int]) -> None:
        """Report a failure: these workers have not caught up in time."""

    def recruit(self, workers: int) -> None:
        """Start a worker for every slot below ``workers`` that has none."""

    def dismiss(self) -> None:
        """Send away the workers beyond the group."""

    def switch(self, shape: r.Shape, reason: str) -> Topology:
        """Take on another shape: workers beyond it leave, missing ones are started."""
        ...

    def shut_down(self, outcome: j.Outcome, reason: str) -> None:
        """Have all workers leave; answered by ``WorkersGone``."""

    def job_over(self, outcome: j.Outcome, reason: str) -> None:
        """Hear that the job is over."""

    def note(self, text: str) -> None:
        """Tell the user."""

    def rescaled(self, request: Hashable, error: str) -> None:
        """Answer a request for another parallelism; with ``error``: it failed."""


class CheckpointHost(Protocol):
    """Performs what concerns checkpoints.  Events for the core may be reported from within."""

    def trigger(self, effect: cm.SendTrigger) -> None:
        """Trigger the sources."""

    def drain(self) -> None:
        """Tell the sources that they have read their last row."""

    def verdict(self, verdict: SendVerdict) -> None:
        """Tell the subtasks of a loop."""

    def publish(self, effect: cm.Publish) -> cm.Published | cm.PublishFailed | None:
        """Write manifest and log entry; ``None``: ``JobCore.published`` hears of the outcome."""
        ...

    def completed(self, checkpoint_id: int, kind: CheckpointKind) -> None:
        """Hear that a checkpoint, which is no probe, is published, before the workers hear of it."""

    def complete(self, effect: cm.NotifyComplete) -> None:
        """Tell every subtask that a wave is complete."""

    def stopped_behind(self, checkpoint_id: int) -> None:
        """Hear that every worker has committed a savepoint with which the job is to stop."""

    def abort(self, effect: cm.NotifyAborted) -> None:
        """Tell every subtask that a wave is given up."""

    def stopped(self, reason: str) -> None:
        """Hear that what was under way is given up: nothing commits what was handed out before savepoints."""

    def acknowledged(self, effect: cm.AckAnswered) -> None:
        """Hear what became of an acknowledgement."""

    def answered(self, answer: cm.RequestAnswered) -> None:
        """Answer a user's request."""

    def too_many_failed(self, effect: cm.FailJob) -> None:
        """Report a failure: of checkpoints."""

    def in_doubt(self, checkpoint_id: int) -> None:
        """Report a failure: nobody knows whether a checkpoint was published."""

    def changed(self) -> None:
        """Hear that the coordinator did more than to take an acknowledgement."""
