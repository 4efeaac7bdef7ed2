"""The splits that a subtask was given: where each is, and what a snapshot says of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from cutwater.connectors.base import Split, SplitReader
from cutwater.runtime.control.messages import SplitAssignment
from cutwater.storage.snapshot.manifest import SplitRecord
from cutwater.storage.snapshot.packed_splits import BLOCK_SPLITS, pack


@dataclass(slots=True)
class AssignedSplit:
    """A split, and how far its subtask has come with it."""

    record: Split
    position: Any
    max_time: int
    done: bool
    idle: bool
    place: int
    """Among those that the subtask was given."""
    reader: SplitReader | None = None
    retry_s: float = 0.0
    pause_s: float = 0.0
    """How long it was left alone the last time; 0: it had something to give."""
    quiet_since_s: float | None = None
    """It has had nothing to give since then."""

    @property
    def at_cut(self) -> SplitRecord:
        """For a snapshot: the position is that of the next unread row."""
        position = self.reader.position if self.reader else self.position
        return SplitRecord(self.record.id, self.record.data, position, self.max_time, self.done, self.idle)


class SplitRecords(NamedTuple):
    """What a snapshot says of the splits of a subtask, in the order in which they were given to it."""

    packed: list[bytes]
    """Blocks of the first ones."""
    splits: list[SplitRecord]


class AssignedSplits:
    """The splits of a subtask in the order in which they came.

    >>> splits = AssignedSplits()
    >>> split = splits.add(SplitAssignment("a.json", {}, position=None, max_time=0, done=False))
    >>> "a.json" in splits, splits["a.json"] is splits.at(0) is split
    (True, True)
    """

    def __init__(self) -> None:
        self._by_id: dict[str, AssignedSplit] = {}
        self._in_order: list[AssignedSplit] = []
        self._blocks: dict[int, bytes] = {}
        """Those of snapshots, as long as nothing changes in them."""

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[AssignedSplit]:
        return iter(self._in_order)

    def __contains__(self, id: str) -> bool:
        return id in self._by_id

    def __getitem__(self, id: str) -> AssignedSplit:
        return self._by_id[id]

    def at(self, place: int) -> AssignedSplit:
        """The split that was given at this place."""
        return self._in_order[place]

    def add(self, given: SplitAssignment) -> AssignedSplit:
        """A further split, to be read from its position on."""
        split = AssignedSplit(
            Split(given.id, given.data), given.position, given.max_time, given.done, given.idle, len(self)
        )
        self._by_id[given.id] = split
        self._in_order.append(split)
        return split

    def changed(self, split: AssignedSplit) -> None:
        """What a snapshot says of the split is not what it said before."""
        self._blocks.pop(split.place // BLOCK_SPLITS, None)

    def records(self) -> SplitRecords:
        """The next unread row of each split; blocks in which nothing has changed are those of before."""
        whole = len(self) // BLOCK_SPLITS
        for block in range(whole):
            if block not in self._blocks:
                first = block * BLOCK_SPLITS
                self._blocks[block] = pack([split.at_cut for split in self._in_order[first : first + BLOCK_SPLITS]])
        packed = [self._blocks[block] for block in range(whole)]
        return SplitRecords(packed, [split.at_cut for split in self._in_order[whole * BLOCK_SPLITS :]])
