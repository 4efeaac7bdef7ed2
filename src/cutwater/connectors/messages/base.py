"""The seam between what brings messages and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from cutwater.connectors.messages.encoders import ValueEncoder


@dataclass(frozen=True)
class Values:
    """The values of some messages, one behind the other in one piece of memory.

    Made with ``gap=1`` there is a newline behind each that is not null, and none in any of them: they are lines.
    """

    data: pa.Buffer
    starts: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int32]
    """One more than there are values, the first is 0: the offsets of an Arrow array where there is no gap."""
    valid: npt.NDArray[np.bool_]
    nulls: int

    def __len__(self) -> int:
        return len(self.starts)

    def value(self, number: int) -> bytes | None:
        """One of them; ``None`` for null.

        >>> Values.of([b"a", None, b"bc"]).value(2)
        b'bc'
        """
        if not self.valid[number]:
            return None
        return self.data[int(self.starts[number]) : int(self.ends[number + 1])].to_pybytes()

    def array(self) -> pa.Array:
        """As an Arrow array of binary, without a copy; they must have been made without gap."""
        mask = pa.py_buffer(np.packbits(self.valid, bitorder="little")) if self.nulls else None
        return pa.Array.from_buffers(pa.binary(), len(self), [mask, pa.py_buffer(self.ends), self.data], self.nulls)

    def first(self, count: int) -> Values:
        """The first ones.

        >>> Values.of([b"a", b"bc"], gap=1).first(1).data.to_pybytes()
        b'a\\n'
        """
        if count == len(self):
            return self
        data = self.data.slice(0, int(self.starts[count]))
        valid = self.valid[:count]
        return Values(data, self.starts[:count], self.ends[: count + 1], valid, count - int(valid.sum()))

    @classmethod
    def of(cls, values: Sequence[bytes | None], gap: int = 0) -> Values:
        """Those of a list; what compiled code makes of messages in memory."""
        starts, ends = np.empty(len(values), np.int32), np.zeros(len(values) + 1, np.int32)
        parts: list[bytes] = []
        at = 0
        for number, value in enumerate(values):
            starts[number] = at
            if value is not None:
                parts.append(value.replace(b"\n", b" ") + b"\n" if gap else value)
            ends[number + 1] = at + len(value or b"")
            at = int(ends[number + 1]) + (gap if value is not None else 0)
        valid = np.array([value is not None for value in values], np.bool_)
        return cls(pa.py_buffer(b"".join(parts)), starts, ends, valid, len(values) - int(valid.sum()))


class BadValue(NamedTuple):
    """A value that is no row."""

    number: int
    """Of the message."""
    reason: str


class Decoded(NamedTuple):
    """The rows of some messages."""

    rows: pa.RecordBatch
    good: npt.NDArray[np.int64] | None
    """The number of the message of each row; ``None``: each message is a row."""
    bad: list[BadValue] = []


class ValueDecoder(Protocol):
    """Decodes the messages of one source in one subtask, from one thread."""

    gap: int
    """1 if values are to come as lines (``Values``)."""

    def decode(self, values: Values, *, first_only: bool) -> Decoded:
        """The rows.

        Args:
            first_only: the first bad value is enough to know: the job fails with it.
        """
        ...


class MessageFormat(Protocol):
    """What the values of messages are: a frozen, picklable value."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> pa.Schema:
        """Of the rows.

        Raises:
            BuildError: types that the format cannot hold, or none were given.
        """
        ...

    def decoder(self, columns: frozenset[str] | None, *, dictionaries: bool) -> ValueDecoder:
        """A decoder; what is in no column of these (``None``: all are wanted) may come as null.

        With ``dictionaries`` texts may come as such.
        """
        ...


class FormatOfTopic(Protocol):
    """A format with settings of its own, such as ``cw.avro(...)``: both ways, given as ``format=``."""

    def messages(self, topic: str | None) -> MessageFormat:
        """For reading a topic; ``None``: several.

        Raises:
            BuildError, StorageError: there is no schema for it, or it cannot be had.
        """
        ...

    def encoder(self, topic: str) -> ValueEncoder:
        """For writing a topic; errors as of ``messages``."""
        ...
