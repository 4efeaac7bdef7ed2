"""What coordinator and workers say to each other about copies of snapshots: a part of ``control``'s messages."""

from __future__ import annotations

import msgspec


class CopyPlaces(msgspec.Struct, frozen=True, tag="places"):
    """Who keeps copies of snapshots, and where; sent to all workers before some of them build something."""

    incarnations: list[int]
    """Per slot."""
    peers: list[tuple[str, int]]
    """Per slot: address of its data server."""
    holders: list[int]
    """Slots whose workers hold copies of what this worker writes."""


class CopiesHeld(msgspec.Struct, frozen=True, tag="copies"):
    """Which files of the job the worker has copies of, its own and for others, and what became of them."""

    files: list[str]
    checkpoint_id: int
    """The newest one whose files were brought where they should be, as far as there was room."""
    missing_bytes: int
    """Of the worker's part of it, without some of the copies that were asked for."""
    memory_bytes: int
    """Held for other workers."""
    local_bytes: int
    restored_bytes: tuple[int, int, int] = (0, 0, 0)
    """By the last restore: from copies on the machine, from other workers, from the checkpoint directory."""
