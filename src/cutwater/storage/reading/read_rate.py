"""How quickly a snapshot can be read where it lies: measured on a part of itself."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cutwater.storage.reading.any_snapshot import Snapshot
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.snapshot.segment_files import read_verified

MOST_BYTES = 64 << 20
MOST_S = 0.5
LEAST_BYTES = 1 << 20
"""Below this nothing can be said of a rate."""


@dataclass(frozen=True)
class ReadRate:
    """What was read and verified, in which time."""

    bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float | None:
        """``None`` if too little was read to tell."""
        return self.bytes / self.seconds if self.bytes >= LEAST_BYTES and self.seconds > 0 else None


def measure_read_rate(snapshot: Snapshot) -> ReadRate:
    """Read the largest pieces of a snapshot, up to 64 MiB and for half a second, and compare them with their digests.

    Raises:
        CorruptSnapshotError: a piece is damaged.
    """
    entries = sorted((e for e in snapshot.manifest.entries if e.file), key=_length, reverse=True)
    read, started = 0, time.perf_counter()
    for entry in entries:
        if read >= MOST_BYTES or time.perf_counter() - started > MOST_S:
            break
        read_verified(snapshot.store, snapshot.folder, entry)
        read += entry.length
    return ReadRate(read, time.perf_counter() - started)


def _length(entry: Entry) -> int:
    return entry.length
