"""What a write step has committed, as the table itself says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cutwater.errors import CorruptSnapshotError


class CommitRecord(NamedTuple):
    """How far a write step has come.  It lies in a property of the table, changed with the snapshot that it tells of.

    >>> CommitRecord.parsed(CommitRecord(3, 17).text())
    CommitRecord(attempt=3, checkpoint_id=17)
    """

    attempt: int
    """Nobody of a smaller one commits: the fence."""
    checkpoint_id: int
    """All rows up to this checkpoint are in the table, and none of later ones."""

    def text(self) -> str:
        """As it is written."""
        return f"{self.attempt}.{self.checkpoint_id}"

    @classmethod
    def parsed(cls, text: str) -> CommitRecord:
        """As it was written.

        Raises:
            CorruptSnapshotError: by somebody else.
        """
        attempt, _, checkpoint_id = text.partition(".")
        if not (attempt.isascii() and attempt.isdigit() and checkpoint_id.isascii() and checkpoint_id.isdigit()):
            raise CorruptSnapshotError(
                f"the table's commit record says {text[:64]!r}, which no sink has written",
                hint="Somebody has changed a property cutwater.* of the table. Set it back to what it was.",
            )
        return cls(int(attempt), int(checkpoint_id))


NOTHING = CommitRecord(0, 0)


def record_key(job_uid: str, step: str) -> str:
    """Name of a write step's property, of the table and of its snapshots.

    >>> record_key("c0ffee", "out")
    'cutwater.c0ffee.out'
    """
    return f"cutwater.{job_uid}.{step}"


def record_of(metadata: Any, key: str) -> CommitRecord:
    """The commit record of a step.

    Where somebody has replaced the table's properties, its newest snapshot that has one is asked.

    Raises:
        CorruptSnapshotError: it is not ours.
    """
    text = metadata.properties.get(key)
    if text is not None:
        return CommitRecord.parsed(text)
    return next((record for _, record in own_snapshots(metadata, key)), NOTHING)


def own_snapshots(metadata: Any, key: str) -> Iterator[tuple[Any, CommitRecord]]:
    """The snapshots of a step with their commit records, newest first, as far back as the table knows them.

    Raises:
        CorruptSnapshotError: a record is not ours.
    """
    for snapshot in ancestors(metadata):
        text = properties_of(snapshot).get(key)
        if text is not None:
            yield snapshot, CommitRecord.parsed(text)


def ancestors(metadata: Any) -> Iterator[Any]:
    """The table's current snapshot and those before it, newest first, as far back as the table knows them."""
    snapshot = metadata.current_snapshot()
    while snapshot is not None:
        yield snapshot
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else metadata.snapshot_by_id(parent)


def properties_of(snapshot: Any) -> Mapping[str, str]:
    """Properties of a snapshot, besides its operation."""
    return {} if snapshot.summary is None else snapshot.summary.additional_properties
