"""What a subtask chose, so that it can be made to choose the same once more (R0).

What a deterministic subtask sends depends on its state and on the order in which it took its inputs.  So the order is
all that must be known to make every row again under its old number, whatever reads it.  A *choice* is a row or a
control item (a watermark, the end of data) taken from an input, or what a verdict on its loop changed.  Barriers are
none, nor are watermarks that say nothing new: they change nothing that is sent, and after a restore some come twice.

Theory of operation.  The log belongs to one subtask and counts its choices.  Before anything depends on a choice, it is
known to somebody else: with what leaves a worker goes all that the worker knows of any log, of its own subtasks' and of
those that it has heard of.  So whoever survives knows every choice that anything it holds depends on, however many
workers die together.  A replacement goes back to the checkpoint and follows what survivors know from there on; on what
nobody knows nobody depends, and there it is free to choose anew.

A verdict on a loop rests on choices of all its subtasks, also on some of which the head that hears it has not heard: a
barrier on a back-edge tells only its receiver.  So acknowledgements of subtasks in loops tell the coordinator, too, and
a replacement asks it with the survivors.

A replacement takes over all that survivors know, also of subtasks that are not its own: to follow a choice is to depend
on what it depended on, and whoever told it may die next.

As bytes
--------
``DeterminantLog`` counts single rows, which is what the simulator judges.  A running subtask takes rows by the
thousand, and what it sends depends on how many came in one call, too: turns are taken batch by batch, and where two
ways meet again within a chain, rows lie by batches.  So a choice is a call here, and its entry says all that was not
determined by the choices before it: from which input how many rows were taken, and which watermark was seen after them;
which slice of timers fired at what time; what the clock said; from which split how many rows were read; what came from
outside.

An entry is a few varints (least significant seven bits first); watermarks and times are differences from the last one
of the same input, counted from the last mark.  A *mark* stands where the state was frozen: whoever goes back to that
checkpoint follows what lies behind it.  So entries behind a mark can be read without those before it, and a place in a
log is a number of bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from cutwater.errors import InvariantError, WireError
from cutwater.protocol.messages import InputId

Run = tuple[InputId, int]
"""So many rows from an input in a row; 0: a control item."""
CONTROL = 0
OWN: Final = "own"
"""Instead of an input: a choice that needs none, which the subtask knows how to make again."""


class Verdict(NamedTuple):
    """What a verdict on its loop changed in a subtask (C6, W3)."""

    watermark: int
    """The combined watermark after it, in microseconds since the epoch."""
    ended: bool
    """Its back-edges ended."""


class InputWatermark(NamedTuple):
    """A watermark that was taken from an input, alone or behind rows; where it stood among them is not the sender's."""

    input: InputId
    watermark: int
    """In microseconds since the epoch."""


OwnChoice: TypeAlias = Verdict | InputWatermark
"""A choice that needs nothing from outside."""
_Choice: TypeAlias = tuple[InputId, bool] | OwnChoice


class Order(Protocol):
    """What a subtask loop follows."""

    def next_run(self) -> Run | None:
        """What comes next; ``None`` where the log ends."""
        ...


class DeterminantLog:
    """The choices of one subtask since the job began, or since all of it last went back.

    >>> log = DeterminantLog()
    >>> log.took("a", 2); log.took("a", 1); log.took("b", CONTROL); log.position
    4
    >>> log.go_back(1, known=4); log.next_run()
    ('a', 2)
    >>> log.took("a", 2); log.next_run()
    ('b', 0)
    >>> log.go_back(1, known=2); log.took("a", 1); log.next_run()
    """

    def __init__(self) -> None:
        self.position = 0
        """Number of the next choice."""
        self._choices: list[_Choice] = []

    @property
    def length(self) -> int:
        """Choices that are in the log; more than ``position`` while they are being followed."""
        return len(self._choices)

    def took(self, input: InputId, rows: int) -> None:
        """Rows were taken, or with ``CONTROL`` a control item.

        Raises:
            InvariantError: the log says that something else comes next.
        """
        for choice in [(input, False)] if rows == CONTROL else [(input, True)] * rows:
            self._chose(choice)

    def chose(self, choice: OwnChoice) -> None:
        """A verdict on the loop of the subtask, or the watermark of an input, changed something.

        Raises:
            InvariantError: the log says that something else comes next.
        """
        self._chose(choice)

    def go_back(self, position: int, known: int) -> None:
        """The subtask is at ``position`` again; choices from ``known`` on are known to nobody, and forgotten.

        Raises:
            InvariantError: somebody knows of choices that are not in the log, which so could not be followed.
        """
        if max(position, known) > len(self._choices):
            raise InvariantError(
                f"a determinant log holds {len(self._choices)} choices; its subtask goes back to {position}, "
                f"and somebody knows {known}"
            )
        del self._choices[max(position, known) :]
        self.position = position

    def next_run(self) -> Run | None:
        """What comes next, ``OWN`` for a verdict or a watermark; ``None`` where the log ends."""
        choices, end = self._choices, self.position
        if end == len(choices):
            return None
        first = choices[end]
        if isinstance(first, Verdict | InputWatermark):
            return OWN, CONTROL
        while first[1] and end < len(choices) and choices[end] == first:
            end += 1
        return first[0], end - self.position

    def next_own(self) -> OwnChoice:
        """What comes next, where that is ``OWN``.

        Raises:
            InvariantError: it is something else.
        """
        choice = self._choices[self.position] if self.position < len(self._choices) else None
        if not isinstance(choice, Verdict | InputWatermark):
            raise InvariantError(f"choice {self.position} is {choice} in the determinant log, and needs an input")
        return choice

    def copy(self) -> DeterminantLog:
        """The same log, for a replacement, once nobody hears any more of whoever it replaces, and may still write."""
        other = DeterminantLog()
        other.position, other._choices = self.position, self._choices.copy()
        return other

    def _chose(self, choice: _Choice) -> None:
        if self.position == len(self._choices):
            self._choices.append(choice)
        elif self._choices[self.position] != choice:
            expected = self._choices[self.position]
            raise InvariantError(f"choice {self.position} was {choice} where the determinant log has {expected}")
        self.position += 1


_MAX_SHIFT: Final = 126


class ChoiceKind(enum.IntEnum):
    """Kind of a choice."""

    ROWS = 0
    """Rows of an input, with no news of its watermark."""
    TIMED_ROWS = 1
    """Rows of an input, and the watermark after them."""
    WATERMARK = 2
    """A watermark of an input by itself."""
    IDLE = 3
    """As ``WATERMARK``; the input has nothing to say for now."""
    END = 4
    """The end of an input."""
    MARK = 5
    """No choice: the state was frozen here."""
    TIMERS = 6
    """A slice of what is due by processing time; ``value`` is that time in milliseconds."""
    CLOCK = 7
    """Time that the operators saw on the clock, milliseconds since the epoch, during the choice before this one."""
    READ = 8
    """``rows`` of split number ``place``; with ``value`` 1 it gives no more."""
    READ_ON = 9
    """Rows that the last read left to be handed on."""
    SPLITS = 10
    """``place`` splits are known to the source."""
    VERDICT = 11
    """A verdict on the loop let the watermark ``value`` pass; with ``place`` 1 it ended the back-edges, too."""
    ASYNC_RESULTS = 12
    """Operator number ``place`` of the subtask took what came from outside: ``body``, in a form of its own."""
    STEP_TIME = 13
    """A source that had nothing of its own to go by took the event time ``value`` of its step."""
    IDLE_SPLIT = 14
    """Split number ``place`` had nothing to give for so long that it holds nobody back until it has."""


_TIMED: Final = frozenset({ChoiceKind.TIMED_ROWS, ChoiceKind.WATERMARK, ChoiceKind.IDLE})
_COUNTED: Final = frozenset({ChoiceKind.ROWS, ChoiceKind.TIMED_ROWS, ChoiceKind.READ})
_CLOCKED: Final = frozenset({ChoiceKind.TIMERS, ChoiceKind.CLOCK})
_VALUED: Final = frozenset({ChoiceKind.VERDICT, ChoiceKind.STEP_TIME})
_KINDS: Final = {int(kind): kind for kind in ChoiceKind}


class Choice(NamedTuple):
    """One entry.

    ``place``: number of the input, or see the kind.  ``value``: watermark in microseconds or time in milliseconds since
    the epoch, or see the kind.
    """

    kind: ChoiceKind
    place: int = 0
    rows: int = 0
    value: int = 0
    body: bytes = b""


class _Bases:
    """The last watermark of each input, and the last time: an entry says how much more it is."""

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self.watermarks = [0] * inputs
        self.clock_ms = 0

    def clear(self) -> None:
        self.watermarks = [0] * self._inputs
        self.clock_ms = 0


class ChoiceWriter:
    """Encodes the choices of one subtask.

    Args:
        inputs: how many the subtask has.

    >>> writer = ChoiceWriter(inputs=2)
    >>> data = writer.entry(Choice(ChoiceKind.TIMED_ROWS, 1, rows=300, value=7))
    >>> len(data), ChoiceReader(data, inputs=2).next()
    (4, Choice(kind=<ChoiceKind.TIMED_ROWS: 1>, place=1, rows=300, value=7, body=b''))
    """

    def __init__(self, inputs: int) -> None:
        self._bases = _Bases(inputs)

    @classmethod
    def after(cls, reader: ChoiceReader) -> ChoiceWriter:
        """Goes on where a reader stands."""
        writer = cls(0)
        writer._bases = reader.bases
        return writer

    def entry(self, choice: Choice) -> bytes:
        """The bytes of the next entry."""
        kind, place, rows, value, body = choice
        out = bytearray()
        write_varint(out, place << 4 | kind)
        if kind in _COUNTED:
            write_varint(out, rows)
        if kind in _TIMED:
            bases = self._bases.watermarks
            write_varint(out, _zigzag(value - bases[place]))
            bases[place] = value
        elif kind in _CLOCKED:
            write_varint(out, _zigzag(value - self._bases.clock_ms))
            self._bases.clock_ms = value
        elif kind is ChoiceKind.READ:
            write_varint(out, value)
        elif kind in _VALUED:
            write_varint(out, _zigzag(value))
        elif kind is ChoiceKind.ASYNC_RESULTS:
            write_varint(out, len(body))
            out += body
        elif kind is ChoiceKind.MARK:
            self._bases.clear()
        return bytes(out)


class ChoiceReader:
    """Decodes entries that begin behind a mark.

    Args:
        data: whole entries.
        inputs: how many the subtask has.
    """

    def __init__(self, data: bytes, inputs: int) -> None:
        self._data, self._at = data, 0
        self._inputs, self.bases = inputs, _Bases(inputs)

    def next(self) -> Choice | None:
        """The next entry; ``None`` at the end.

        Raises:
            WireError: these are no entries of such a subtask.
        """
        data, at = self._data, self._at
        if at == len(data):
            return None
        head, at = read_varint(data, at)
        kind, place = _KINDS.get(head & 15), head >> 4
        if kind is None or (kind <= ChoiceKind.END and place >= self._inputs):
            raise WireError(f"byte {self._at} of a determinant log of {len(data)} bytes begins no choice (head {head})")
        rows, value, body = 0, 0, b""
        if kind in _COUNTED:
            rows, at = read_varint(data, at)
        if kind in _TIMED:
            more, at = read_varint(data, at)
            value = self.bases.watermarks[place] = self.bases.watermarks[place] + _unzigzag(more)
        elif kind in _CLOCKED:
            more, at = read_varint(data, at)
            value = self.bases.clock_ms = self.bases.clock_ms + _unzigzag(more)
        elif kind is ChoiceKind.READ:
            value, at = read_varint(data, at)
        elif kind in _VALUED:
            more, at = read_varint(data, at)
            value = _unzigzag(more)
        elif kind is ChoiceKind.ASYNC_RESULTS:
            size, at = read_varint(data, at)
            body, at = data[at : at + size], at + size
            if at > len(data):
                raise WireError(f"a determinant log ends within async results of {size} bytes, after {len(data)} bytes")
        elif kind is ChoiceKind.MARK:
            self.bases.clear()
        self._at = at
        return Choice(kind, place, rows, value, body)


def write_varint(out: bytearray, value: int) -> None:
    """Append a number of at least 0.

    >>> out = bytearray(); write_varint(out, 300); read_varint(out, 0)
    (300, 2)
    """
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def read_varint(data: Sequence[int], at: int) -> tuple[int, int]:
    """The number that begins at ``at``, and where it ends.

    Raises:
        WireError: the data ends within it, or it is far too large.
    """
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > _MAX_SHIFT:
            raise WireError("a number of a determinant log does not end")
    raise WireError(f"a determinant log ends within a number, after {len(data)} bytes")


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else ~value << 1 | 1


def _unzigzag(value: int) -> int:
    return value >> 1 if not value & 1 else ~(value >> 1)
