"""Choosing what to restore: the newest completed checkpoint of which every byte verifies."""

from __future__ import annotations

from dataclasses import dataclass

from cutwater.storage.base import Store
from cutwater.storage.log import CheckpointCompleted, LogState
from cutwater.storage.manifest import Manifest

__all__ = ["Problem", "Restorable", "VerifyReport", "choose", "next_checkpoint_id", "verify_checkpoint"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a checkpoint."""

    file: str
    what: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of reading every byte of a checkpoint."""

    checkpoint_id: int
    files: int
    bytes: int
    segments: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class Restorable:
    """A checkpoint to restore, and the reports on newer ones that had to be passed over."""

    completed: CheckpointCompleted
    manifest: Manifest
    passed_over: tuple[VerifyReport, ...] = ()


def verify_checkpoint(store: Store, job: str, completed: CheckpointCompleted) -> VerifyReport:
    """Compare every byte of a checkpoint with its digests; never raises for a damaged one."""
    ...


def choose(store: Store, job: str, state: LogState, *, verify: bool = True) -> Restorable | None:
    """The checkpoint to restore; ``None`` if none was ever completed.

    Raises:
        CorruptSnapshotError: checkpoints were completed and none is usable (never a silent start from nothing).
        FormatVersionError: the newest one was written by a newer release.
    """
    ...


def next_checkpoint_id(store: Store, job: str, state: LogState) -> int:
    """First checkpoint id of an attempt: above all completed ones and all leftovers on disk (A1)."""
    ...
