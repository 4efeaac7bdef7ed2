"""The number that tells which checkpoint of a job is in a table, and which attempt may go on."""

from __future__ import annotations

from typing import NamedTuple

from cutwater.errors import FencedError, InvariantError

_BITS = 32


class CommitNumber(NamedTuple):
    """The version of the table's transaction that stands for a step of a job.

    A later attempt has a larger number than all before it, whatever it goes back to; within one checkpoints grow.  So a
    number that may only grow is record and fence in one.

    >>> CommitNumber(2, 1).value > CommitNumber(1, 900).value, CommitNumber.of(CommitNumber(2, 7).value)
    (True, CommitNumber(attempt=2, checkpoint_id=7))
    """

    attempt: int
    checkpoint_id: int

    @classmethod
    def of(cls, value: int) -> CommitNumber:
        return cls(value >> _BITS, value & ((1 << _BITS) - 1))

    @property
    def value(self) -> int:
        if not (0 <= self.checkpoint_id < 1 << _BITS and 0 <= self.attempt < 1 << (63 - _BITS)):
            raise InvariantError(f"{self} has no number of 64 bits")
        return self.attempt << _BITS | self.checkpoint_id

    def check(self, attempt: int, path: str) -> None:
        """Refuse an attempt that another one has followed.

        Raises:
            FencedError: it has.
        """
        if self.attempt > attempt:
            raise FencedError(
                f"Delta table {path!r}: attempt {self.attempt} of the job writes already, this is {attempt}",
                hint="Another driver has taken over the job.",
            )
