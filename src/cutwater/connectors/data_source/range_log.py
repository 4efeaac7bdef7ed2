"""What a job has planned to read of a data source, written down before a row of it is read.

A folder of the job's store:

    plan.json                 of a batch source: its reader and partitions; of a stream: where it begins
    at-<split>                the range that a reader of a split is at, for the pace
    000000000003/range.json   of a stream: from which offset to which, and the partitions
    000000000003/rows-...     rows that were made durable before they were used: see ``staged_rows``

Each file is made once and never changed: of two drivers the one that comes second takes what the first has written.
The user's objects in them are pickled by Spark's pickler. With a key all files are sealed, and driver and workers
check the seal before they unpickle anything.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from cutwater.connectors.base import Json
from cutwater.data.decoding import prepare
from cutwater.errors import CorruptSnapshotError, FormatVersionError
from cutwater.storage.store.base import Store
from cutwater.storage.store.seal import Kind, Seal

FORMAT = 1
_PLAN, _RANGE = "plan.json", "range.json"
_DIGITS = 12


class Plan(msgspec.Struct, frozen=True):
    """The beginning."""

    id: str
    """Of this plan; splits name it, so that they are never read of another one."""
    start: Json = None
    """Of a stream: the first offset."""
    reader: str = ""
    """Of a batch: pickled."""
    partitions: list[str] = []
    """Of a batch: each pickled."""
    format: int = FORMAT


class Range(msgspec.Struct, frozen=True):
    """A piece of a stream."""

    number: int
    start: Json
    end: Json
    partitions: list[str]
    """Each pickled."""
    last: bool = False
    """Nothing is read behind it."""
    format: int = FORMAT


prepare(Plan, Range)

T = TypeVar("T", bound=msgspec.Struct)


def sealed(value: msgspec.Struct, seal: Seal, kind: Kind = "input") -> bytes:
    """The content of a file."""
    body = msgspec.json.encode(value)
    return body + b"\n" + seal.digest(kind, body).encode()


def opened(data: bytes | memoryview, type: type[T], seal: Seal, path: str, kind: Kind = "input") -> T:
    """What lies in a file, once it is known to be as it was written.

    Raises:
        CorruptSnapshotError: it is damaged.
        SealError: it is not sealed with the job's key.
        FormatVersionError: written by a newer release.
    """
    body, _, said = bytes(data).rpartition(b"\n")
    problem = seal.problem(kind, body, said.decode("ascii", errors="replace"), path)
    if problem:
        raise CorruptSnapshotError(f"{path} is damaged: {problem}")
    try:
        if msgspec.json.decode(body)["format"] != FORMAT:
            raise FormatVersionError(f"{path} was written by a newer release")
        return msgspec.json.decode(body, type=type)
    except (msgspec.MsgspecError, TypeError, KeyError) as error:
        raise CorruptSnapshotError(f"{path} is damaged: {error}") from error


def folder_of(number: int) -> str:
    """Of a range.

    >>> folder_of(3)
    '000000000003'
    """
    return f"{number:0{_DIGITS}}"


class RangeLog:
    """The plan and the ranges of one read step.  Not for several threads.

    Args:
        store: of the folder.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._ranges: dict[int, Range] = {}
        self._lowest = 0

    # ----------------------------------------------------------------------------------------------------------- plan

    def plan(self) -> Plan | None:
        """What was planned, if it was.

        Raises:
            CorruptSnapshotError: it is damaged.
        """
        if not self.store.exists() or _PLAN not in self.store.names():
            return None
        return opened(self.store.read(_PLAN), Plan, self.store.seal, self.path(_PLAN))

    def begin(self, plan: Plan) -> Plan:
        """Write the plan down; returns the one that counts, which is the first."""
        self.store.create(_PLAN, sealed(plan, self.store.seal))
        found = self.plan()
        assert found is not None
        return found

    # --------------------------------------------------------------------------------------------------------- ranges

    def numbers(self) -> list[int]:
        """Of the ranges that are there, rising."""
        return sorted(int(n) for n in self.store.names() if len(n) == _DIGITS and n.isascii() and n.isdigit())

    def find(self, number: int) -> Range | None:
        """A range; ``None``: it is not planned yet, or not needed any more.

        Raises:
            CorruptSnapshotError: it is damaged.
        """
        if number not in self._ranges:
            folder = folder_of(number)
            if not self.store.exists(folder) or _RANGE not in self.store.names(folder):
                return None
            path = f"{folder}/{_RANGE}"
            self._ranges[number] = opened(self.store.read(path), Range, self.store.seal, self.path(path))
            for old in [n for n in self._ranges if n < number - _KEPT]:
                del self._ranges[old]
        return self._ranges[number]

    def append(self, planned: Range) -> Range:
        """Write a range down, durably; returns the one that counts, which is the first of its number."""
        self.store.create(f"{folder_of(planned.number)}/{_RANGE}", sealed(planned, self.store.seal))
        found = self.find(planned.number)
        assert found is not None
        return found

    def remove_below(self, number: int) -> None:
        """Remove the ranges before one, with their rows."""
        if number <= self._lowest:
            return
        self._lowest = number
        for old in self.numbers():
            if old < number:
                self.store.delete(folder_of(old))
                self._ranges.pop(old, None)

    # ----------------------------------------------------------------------------------------------------------- pace

    def tell(self, split: str, number: int) -> None:
        """Say which range a reader is at.  A hint: it may be lost, or be overwritten by an older reader's."""
        self.store.overwrite(f"at-{split}", f"{number:0{_DIGITS}}".encode())

    def told(self, split: str) -> int | None:
        """Which range the reader of a split said it is at."""
        try:
            return int(bytes(self.store.read(f"at-{split}")))
        except (CorruptSnapshotError, ValueError):
            return None

    def path(self, name: str) -> str:
        """For messages."""
        return f"{self.store.uri}/{name}"


_KEPT = 64
"""So many ranges before the one that is read stay in memory: readers of several splits are near each other."""
