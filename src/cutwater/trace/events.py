"""A run's history as data: what every process did, one event after the other.

A trace is a ``Header`` and then events.  On disk each is one JSON object per line.  The events must come in an order in
which every row is sent before it is taken and the events of a process stay in theirs (``parts.causal_order`` makes it
from the parts of several processes); nothing else is asked of it, and no clock is trusted.

Rows of a channel are numbered from 0, for ever: after a recovery the sender goes on with the number that it had at the
restored cut, and the rows of the channel's recorded state come again under their old numbers.

>>> header = Header(("p", "q"), (Link("c", "p", "q"),))
>>> first = Step(0.0, "p", 1, sends=(Span("c", 0, 1, ("token",)),), before="has it", after="has it not")
>>> text = encode(header) + encode(first) + encode(Cut(1.0, "p", 1, snapshot=7, state="has it not"))
>>> trace = decode(text)
>>> trace.header.processes, trace.events[1].snapshot
(('p', 'q'), 7)
>>> print(encode(Crashed(3.5, "p", 1)).decode().strip())
{"event":"Crashed","time_ms":3.5,"process":"p","attempt":1}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from cutwater.errors import DataError, FormatVersionError

FORMAT = 1
"""Version of the lines; a reader refuses any other."""


class Link(msgspec.Struct, frozen=True, gc=False):
    """A channel: from one process to one process."""

    name: str
    source: str
    target: str


class Header(msgspec.Struct, frozen=True, tag_field="event", tag=True):
    """First line of a trace.

    ``fifo`` is false for channels that may reorder their rows; ``title`` is for pictures; ``run`` tells the parts of
    one run from those of another.  ``marked``: every snapshot sends one marker along every channel, and is complete
    only when all of them were taken.
    """

    processes: tuple[str, ...]
    channels: tuple[Link, ...]
    fifo: bool = True
    title: str = ""
    format: int = FORMAT
    run: str = ""
    marked: bool = False

    def __post_init__(self) -> None:
        """Refuse names that mean two things."""
        known = set(self.processes)
        if len(known) < len(self.processes) or len({c.name for c in self.channels}) < len(self.channels):
            raise DataError("two processes or two channels of a trace have one name")
        for channel in self.channels:
            if channel.source not in known or channel.target not in known:
                raise DataError(f"channel {channel.name!r} joins a process that the header does not name")


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows ``first`` to ``first + count - 1`` of a channel; ``values`` are their printable contents, or nothing."""

    channel: str
    first: int
    count: int = 1
    values: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """The number after the last row."""
        return self.first + self.count


class _Event(msgspec.Struct, frozen=True, tag_field="event", tag=True, omit_defaults=True):
    time_ms: float
    process: str
    attempt: int


class Step(_Event, frozen=True):
    """One atomic event in a process, the (p, s, s', M, c) of the theory.

    It takes rows, goes from state ``before`` to state ``after`` (printable, or a digest; both empty if not traced) and
    sends rows.  ``label`` names it in pictures.
    """

    takes: tuple[Span, ...] = ()
    sends: tuple[Span, ...] = ()
    before: str = ""
    after: str = ""
    label: str = ""


class Cut(_Event, frozen=True):
    """The process recorded its own state for a snapshot."""

    snapshot: int
    state: str = ""


class MarkerSent(_Event, frozen=True):
    """A marker (barrier) went into a channel; ``position`` is the number of the next row of the channel."""

    snapshot: int
    channel: str
    position: int


class MarkerTaken(_Event, frozen=True):
    """A marker (barrier) was taken from a channel; ``position`` as in ``MarkerSent``.

    It may be larger than the number of the next row to be taken: then the marker overtook the rows between.
    """

    snapshot: int
    channel: str
    position: int


class Recorded(_Event, frozen=True):
    """The state of a channel as it stands in the snapshot; an empty one may be left out of the trace.

    ``process`` is who recorded it.  Several parts of one channel (overtaken at the sender, recorded at the receiver)
    add up.
    """

    snapshot: int
    channel: str
    spans: tuple[Span, ...] = ()


class Completed(_Event, frozen=True):
    """The snapshot is whole; ``process`` may be a coordinator that the header does not name."""

    snapshot: int


class Aborted(_Event, frozen=True):
    """The snapshot was given up."""

    snapshot: int


class Crashed(_Event, frozen=True):
    """The process lost everything that was not in a snapshot."""


class Restored(_Event, frozen=True):
    """The process goes on from its part of a snapshot (``None``: from the beginning); ``attempt`` is the new one.

    ``sent`` and ``taken``, where they are told: number of the next row to be sent and to be taken, per channel.  They
    must be those of the snapshot; of one from before the trace began they are all that is known.
    """

    snapshot: int | None
    sent: dict[str, int] = {}
    taken: dict[str, int] = {}


class Survived(_Event, frozen=True):
    """The process joins a new attempt with the state it has: only others went back (R3, R4).

    What they send again under numbers that it has already taken is dropped before it is taken, and must be the same.
    """


class Committed(_Event, frozen=True):
    """A sink made its output up to this snapshot visible; ``values`` are the printable rows, where traced."""

    snapshot: int
    values: tuple[str, ...] = ()


Event: TypeAlias = (
    Step | Cut | MarkerSent | MarkerTaken | Recorded | Completed | Aborted | Crashed | Restored | Survived | Committed
)

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Header | Event] = msgspec.json.Decoder(Header | Event)


class Trace(msgspec.Struct, frozen=True):
    """A whole history."""

    header: Header
    events: tuple[Event, ...]


def encode(record: Header | Event) -> bytes:
    """One line, with its newline."""
    return _ENCODER.encode(record) + b"\n"


def decode(text: bytes, where: str = "trace", *, unfinished: bool = False) -> Trace:
    """A trace from its lines.

    Args:
        unfinished: whoever wrote it may have been killed meanwhile: a last line without its end is left out.

    Raises:
        DataError: a line is no record of a trace; the message names its number in ``where``.
        FormatVersionError: the header is of another format version.
    """
    if unfinished:
        text = text[: text.rfind(b"\n") + 1]
    records = list(_records(text.splitlines(), where))
    header = records[0] if records else None
    if not isinstance(header, Header):
        raise DataError(f"{where}: the first line is no header", hint="Is this file a trace?")
    events: list[Event] = []
    for number, record in enumerate(records[1:], start=2):
        if isinstance(record, Header):
            raise DataError(f"{where}, line {number}: a second header", hint="Two traces lie in one file: part them.")
        events.append(record)
    return Trace(header, tuple(events))


def _records(lines: Iterable[bytes], where: str) -> Iterator[Header | Event]:
    for number, line in enumerate(lines, start=1):
        if number == 1:
            _check_format(line, where)
        try:
            yield _DECODER.decode(line)
        except (msgspec.MsgspecError, DataError) as error:
            raise DataError(f"{where}, line {number}: {error}", hint="The file is torn, or no trace.") from error


def _check_format(line: bytes, where: str) -> None:
    """Before anything else is read: another version may have other fields."""
    try:
        version = msgspec.json.decode(line).get("format", FORMAT)
    except (msgspec.MsgspecError, AttributeError):
        return  # the decoder of records says what is wrong
    if version != FORMAT:
        raise FormatVersionError(f"{where} is a trace of format {version}; this version reads {FORMAT}")


class Stream(Protocol):
    """Stream that a trace is written into: any binary one."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class TraceWriter:
    """Writes a trace line by line into a stream, which it does not close.

    >>> import io
    >>> stream = io.BytesIO()
    >>> writer = TraceWriter(stream, Header(("p",), ()))
    >>> writer.write(Crashed(3.5, "p", 1))
    >>> stream.getvalue().decode().splitlines()[1]
    '{"event":"Crashed","time_ms":3.5,"process":"p","attempt":1}'
    """

    def __init__(self, stream: Stream, header: Header) -> None:
        self._stream = stream
        stream.write(encode(header))

    def write(self, event: Event) -> None:
        """Append one event."""
        self._stream.write(encode(event))


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write a whole trace into a file."""
    with Path(path).open("wb") as stream:
        writer = TraceWriter(stream, trace.header)
        for event in trace.events:
            writer.write(event)


def read_trace(path: str | Path, *, unfinished: bool = False) -> Trace:
    """Read a whole trace from a file.  ``unfinished`` as for ``decode``.

    Raises:
        DataError: there is no such file, or it is no trace.
        FormatVersionError: it is of another format version.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return decode(text, str(path), unfinished=unfinished)
