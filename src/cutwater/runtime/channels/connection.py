"""One TCP connection per pair of workers: the frames of all their channels in both directions, and the credits.

The reader thread never waits for a channel: a frame of rows comes only when its receiver has granted a place for it.
So a blocked channel never holds up its neighbours.  The writing side is ``SocketWriter``.  ``DataServer`` listens for
connections, ``connect`` dials.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

import pyarrow as pa
import pyarrow.types as pt

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import BuildError, CutwaterError, DataError, InvariantError, WireError
from cutwater.plan.graph import Channel
from cutwater.protocol.channel.items import Barrier, End, Item, Rows, Watermark
from cutwater.protocol.channel.receiving import NO_LIMIT, ReceivingEnd, Remaker
from cutwater.protocol.wire import (
    CUT,
    FINAL,
    IDLE,
    LATE,
    LATE_BYTES,
    PROBE,
    SAVEPOINT,
    ClientHandshake,
    Header,
    Kind,
    Peer,
    Refusal,
    ServerHandshake,
    encode_header,
)
from cutwater.runtime.channels.output import OutputChannel
from cutwater.runtime.control.determinant_logs import PeerDeterminants
from cutwater.runtime.transport.door import Door
from cutwater.runtime.transport.secret import Secret
from cutwater.runtime.transport.sockets import JOIN_S, FrameReader, Part, SocketWriter, dial, nothing, shut, tune

_LATE: Final = struct.Struct("<q")
_NEWS_INLINE_BYTES: Final = 8 * 1024
"""Up to this size the news of determinant logs ride on the frame that they have to go before."""


class Connection:
    """The link to one other worker, after the handshake.

    Add all channels with ``add_input`` and ``add_output``, then ``start``: what the peer sends before that waits.

    Args:
        sock: connected and authenticated; the connection owns it from now on.
        peer: who is at the other end.
        max_frame_bytes: larger frames are an error on both sides.
    """

    def __init__(self, sock: socket.socket, peer: Peer, *, max_frame_bytes: int = 1 << 30) -> None:
        self.peer = peer
        self._sock, self._max_frame_bytes = sock, max_frame_bytes
        self._inputs: dict[tuple[int, int, int], ReceivingEnd] = {}
        self._outputs: dict[tuple[int, int, int], OutputChannel] = {}
        self._schemas: dict[tuple[int, int, int], pa.Schema] = {}
        """Of the inputs."""
        self._survivors: dict[Channel, ReceivingEnd] = {}
        self.arrived: dict[tuple[int, int, int], int] = {}
        """R3, R4: of outputs whose receivers lived on, the next row lacking."""
        self._lock = threading.Lock()
        self._over = self._started = self._peer_left = self._hung_up = False
        self._on_lost: Callable[[Connection, CutwaterError], None] | None = None
        self._news: PeerDeterminants | None = None
        self._news_lock = threading.Lock()  # news leave in the order in which they were taken out
        tune(sock)
        self._writer = SocketWriter(sock, f"cutwater-write-{peer.worker}", self._write_failed)
        self._reader = FrameReader(
            sock,
            f"cutwater-read-{peer.worker}",
            max_frame_bytes=max_frame_bytes,
            on_frame=self._dispatch,
            on_end=self._read_ended,
        )

    def add_input(self, channel: ReceivingEnd, schema: pa.Schema) -> None:
        """Hand what the peer sends to a receiving end, and return its credit, unless it has ``NO_LIMIT``."""
        self._check_new(channel.key, schema)
        self._inputs[channel.key], self._schemas[channel.key] = channel, schema
        if channel.capacity_frames < NO_LIMIT:
            channel.on_credit = self._credit_giver(channel.key)

    def add_output(self, channel: OutputChannel) -> None:
        """Grant the peer's credit to a sending end, which was made with ``sender``."""
        self._check_new(channel.key, channel.schema)
        self._outputs[channel.key] = channel

    def share(self, news: PeerDeterminants) -> None:
        """Tell the peer what this worker knows of determinant logs, and hear what it knows (R0).  Before ``start``.

        All that is known goes first, before any other frame; from then on what is new goes with every frame.
        """
        self._news = news

    def take_over_input(self, key: Channel, channel: ReceivingEnd, schema: pa.Schema, step: str) -> None:
        """Go on with a receiver that lives, and whose sender, of this step, was replaced (R3, R4).

        The peer learns what arrived.
        """
        self.add_input(channel, schema)
        channel.take_over(self._credit_giver(key), Remaker(step, key.source, key.target))
        self._survivors[key] = channel

    def take_over_output(self, channel: OutputChannel, checkpoint_id: int) -> None:
        """Go on with a sender that lives, and whose receiver was restored from this checkpoint (R4).

        Raises:
            InvariantError: what the receiver lacks is not kept.
        """
        self.add_output(channel)
        channel.take_over(self.sender(channel.key), checkpoint_id)

    def start(self, on_lost: Callable[[Connection, CutwaterError], None]) -> None:
        """Begin to read and write.

        Args:
            on_lost: called once, from a thread of the connection that holds no lock, if the peer is lost or breaks the
                protocol; never after ``close``.  From then on what is sent goes nowhere.
        """
        with self._lock:
            if self._over or self._started:
                raise InvariantError(f"connection to worker {self.peer.worker}: start after start or close")
            self._started, self._on_lost = True, on_lost
        self._writer.start()
        if self._news is not None:
            self._send(Header(Kind.ORDER))
        for key, channel in self._survivors.items():
            self._send(Header(Kind.ARRIVED, 0, *key, first_row=channel.next_arrival))
        for key, channel in self._inputs.items():
            if channel.capacity_frames < NO_LIMIT and channel.places > 0:
                self._send(Header(Kind.CREDIT, 0, *key, first_row=channel.places))
        self._reader.start()

    def close(self, flush_s: float = 0.0) -> None:
        """End both threads and free the socket.  Safe to call twice, and from ``on_lost``.

        Nothing is heard afterwards, not even what has come already: whoever hangs up on a worker that is replaced tells
        its replacement all that it knows, and must not learn more (R0).

        Args:
            flush_s: spend up to this long to get everything out that has credit, say goodbye and let the peer finish.
        """
        with self._lock:
            polite = flush_s > 0 and self._started and not self._over
            self._over = True
        if polite:
            deadline = time.monotonic() + flush_s
            self._send(Header(Kind.GOODBYE))
            if self._writer.drain(flush_s):
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_WR)
                self._reader.join(max(0.0, deadline - time.monotonic()))
        self._hung_up = True
        shut(self._sock)
        self._writer.stop()
        self._writer.join(JOIN_S)
        self._reader.join(JOIN_S)
        self._sock.close()

    # -- sending

    def _credit_giver(self, key: Channel) -> Callable[[int], None]:
        return lambda frames: self._send(Header(Kind.CREDIT, 0, *key, first_row=frames))

    def sender(self, key: Channel) -> Callable[[Item], None]:
        """Put items of a channel to the peer on the wire."""

        def send(item: Item) -> None:
            if type(item) is Rows:
                self._send_rows(key, item)
            else:
                self._send(_control_header(key, item, self._outputs[key]))

        return send

    def _send(self, header: Header, body: pa.Buffer | None = None, behind: bytes = b"") -> None:
        """A frame, with what the peer was not told of determinant logs; nothing that depends on a choice goes before
        it."""
        if self._news is None or header.kind in (Kind.CREDIT, Kind.GOODBYE, Kind.ARRIVED):
            self._write(header, b"", body, behind)
            return
        with self._news_lock:
            news = self._news.news()
            room = min(_NEWS_INLINE_BYTES, self._max_frame_bytes - header.body_length)
            if len(news) > room and header.kind != Kind.ORDER:
                self._write(Header(Kind.ORDER), news)
                news = b""
            self._write(header, news, body, behind)

    def _write(self, header: Header, news: bytes, body: pa.Buffer | None = None, behind: bytes = b"") -> None:
        if len(news) > self._max_frame_bytes:
            raise DataError(
                f"the determinant logs since the last checkpoint have {len(news)} bytes, a frame holds "
                f"{self._max_frame_bytes}",
                hint="Take checkpoints more often, or raise max_frame_bytes.",
            )
        head = encode_header(header._replace(order_log_length=len(news)) if news else header)
        parts: list[Part] = [part for part in (head, news, body, behind) if part is not None and len(part)]
        self._writer.send(parts, sum(len(part) for part in parts))

    def _send_rows(self, key: Channel, item: Rows) -> None:
        batch, first_row, watermark, late_before, body = item
        if body is None:
            body = batch.serialize()
        size = body.size
        if size + LATE_BYTES > self._max_frame_bytes:
            raise DataError(
                f"{key}: {batch.num_rows} rows from number {first_row} need {size} bytes, a frame holds "
                f"{self._max_frame_bytes}",
                hint="Raise max_frame_bytes, or keep such values in files and send their paths.",
            )
        if late_before == MIN_WATERMARK:
            self._send(Header(Kind.ROWS, 0, *key, first_row, batch.num_rows, watermark, 0, size), body)
            return
        header = Header(Kind.ROWS, LATE, *key, first_row, batch.num_rows, watermark, 0, size + LATE_BYTES)
        self._send(header, body, _LATE.pack(late_before))

    # -- receiving (the reader's thread)

    def _dispatch(self, header: Header, order: bytes, body: pa.Buffer | None) -> None:
        if self._hung_up:
            return
        kind = header.kind
        key = header[2:5]
        if self._peer_left:
            raise WireError(f"a frame follows the goodbye: {header}")
        if order or kind == Kind.ORDER:
            if self._news is None:
                raise WireError(f"a determinant log was not agreed upon: {header}")
            self._news.hear(order)
            if kind == Kind.ORDER:
                return
        if kind == Kind.CREDIT:
            output = self._outputs.get(key)
            if output is None:
                raise WireError(f"credit for an unknown channel: {header}")
            output.grant(header.first_row)
            return
        if kind == Kind.GOODBYE:
            self._peer_left = True
            return
        if kind == Kind.ARRIVED:
            output = self._outputs.get(key)
            if output is None:
                raise WireError(f"an arrival for an unknown channel: {header}")
            output.arrived(header.first_row)
            self.arrived[key] = header.first_row
            return
        channel = self._inputs.get(key)
        if channel is None:
            raise WireError(f"a frame for an unknown channel: {header}")
        if kind == Kind.ROWS:
            late_before = MIN_WATERMARK
            if header.flags & LATE and body is not None:
                (late_before,) = _LATE.unpack_from(body, body.size - LATE_BYTES)
                body = body.slice(0, body.size - LATE_BYTES)
            batch = decode_rows(header, body, self._schemas[key])
            channel.put(Rows(batch, header.first_row, header.watermark, late_before))
        elif kind == Kind.WATERMARK:
            channel.put(Watermark(header.watermark, bool(header.flags & IDLE)))
        elif kind == Kind.BARRIER:
            flags = header.flags
            final, cut, probe, savepoint = (bool(flags & flag) for flag in (FINAL, CUT, PROBE, SAVEPOINT))
            channel.put(Barrier(header.first_row, final, cut, probe=probe, behind=header.rows, savepoint=savepoint))
        else:
            if header.first_row > channel.next_arrival:
                raise WireError(
                    f"{channel.key}: ended after {header.first_row} rows, {channel.next_arrival} arrived here"
                )
            channel.put(End())

    # -- ending

    def _read_ended(self, reason: CutwaterError | None) -> None:
        if reason is None and self._peer_left:
            return
        self._lose(reason or WireError("it closed the connection without a goodbye"))

    def _write_failed(self, error: OSError) -> None:
        self._lose(WireError(f"the connection broke: {error.strerror or error}"))

    def _lose(self, reason: CutwaterError) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        self._writer.stop()
        shut(self._sock)
        lost = reason
        if reason.step is None:  # else it is not the connection's matter
            lost = type(reason)(f"lost worker {self.peer.worker}: {reason.message}", hint=reason.hint)
            lost.__cause__ = reason
        if self._on_lost is not None:
            self._on_lost(self, lost)

    def _check_new(self, key: Channel, schema: pa.Schema) -> None:
        check_plain(schema)
        if self._started or self._over:
            raise InvariantError(f"{key}: channels are made before the connection starts")
        if key in self._inputs or key in self._outputs:
            raise InvariantError(f"{key}: made twice")


def _control_header(key: Channel, item: Item, channel: OutputChannel) -> Header:
    if isinstance(item, Watermark):
        return Header(Kind.WATERMARK, IDLE if item.idle else 0, *key, watermark=item.watermark)
    if isinstance(item, Barrier):
        flags = (FINAL if item.final else 0) | (CUT if item.overtake else 0)
        flags |= (PROBE if item.probe else 0) | (SAVEPOINT if item.savepoint else 0)
        return Header(Kind.BARRIER, flags, *key, first_row=item.checkpoint_id, rows=item.behind)
    return Header(Kind.END, 0, *key, first_row=channel.next_row)


def decode_rows(header: Header, body: pa.Buffer | None, schema: pa.Schema) -> pa.RecordBatch:
    """The batch of a frame, without a copy.  Checks the layout of its buffers, not every value."""
    try:
        batch = pa.ipc.read_record_batch(body, schema)
        batch.validate()
    except (pa.ArrowException, EOFError, OSError, ValueError) as e:
        raise WireError(f"the rows of {header} cannot be read: {e}") from None
    if batch.num_rows != header.rows:
        raise WireError(f"{header} announces {header.rows} rows, its body has {batch.num_rows}")
    return batch


class DataServer(Door):
    """Listens for the connections of other workers.

    Args:
        me: this worker.
        secret: the job's.
        check: decides about an authenticated peer: wrong job, attempt or incarnation (fencing).
        on_connection: gets each accepted connection, not started, in the thread of the door.
        on_copies: gets what a peer of role "copies" has dialled; without it there is none that ``check`` may accept.
        host, port, timeout_s, strangers_max: see ``Door``.
    """

    def __init__(
        self,
        me: Peer,
        secret: Secret,
        check: Callable[[Peer], Refusal | None],
        on_connection: Callable[[Connection], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 5.0,
        strangers_max: int = 128,
        max_frame_bytes: int = 1 << 30,
        on_copies: Callable[[socket.socket], None] | None = None,
    ) -> None:
        def admitted(sock: socket.socket, peer: Peer) -> None:
            if peer.role == "copies" and on_copies is not None:
                on_copies(sock)
            else:
                on_connection(Connection(sock, peer, max_frame_bytes=max_frame_bytes))

        super().__init__(
            host,
            port,
            lambda: ServerHandshake(secret.reveal(), me, check),
            admitted,
            name=f"data of worker {me.worker}",
            timeout_s=timeout_s,
            strangers_max=strangers_max,
        )


def connect(
    address: tuple[str, int],
    me: Peer,
    secret: Secret,
    check: Callable[[Peer], Refusal | None] | None = None,
    *,
    deadline_s: float = 10.0,
    max_frame_bytes: int = 1 << 30,
    wanted: Callable[[], None] = nothing,
) -> Connection:
    """Dial a worker; tries again as ``dial`` does.

    Raises:
        FencedError: the peer refused us for good, or ``check`` refused it.
        WireError: no connection within ``deadline_s``, or the peer does not know the secret.
    """
    sock, peer = dial(
        address, secret, lambda key: ClientHandshake(key, me, check), deadline_s=deadline_s, wanted=wanted
    )
    return Connection(sock, peer, max_frame_bytes=max_frame_bytes)


def plain_type(type: pa.DataType) -> pa.DataType:
    """The type in which values travel: equal values, no dictionary, view or run-end encoding at any depth.

    >>> plain_type(pa.dictionary(pa.int32(), pa.string())), plain_type(pa.list_(pa.string_view()))
    (DataType(string), ListType(list<item: string>))
    """
    if pt.is_dictionary(type) or pt.is_run_end_encoded(type):
        return plain_type(type.value_type)
    if pt.is_string_view(type):
        return pa.string()
    if pt.is_binary_view(type):
        return pa.binary()
    if pt.is_map(type):
        return pa.map_(_plain_field(type.key_field), _plain_field(type.item_field), keys_sorted=type.keys_sorted)
    if pt.is_fixed_size_list(type):
        return pa.list_(_plain_field(type.value_field), type.list_size)
    if pt.is_list(type) or pt.is_list_view(type):
        return pa.list_(_plain_field(type.value_field))
    if pt.is_large_list(type) or pt.is_large_list_view(type):
        return pa.large_list(_plain_field(type.value_field))
    if pt.is_struct(type):
        return pa.struct([_plain_field(field) for field in type])
    return type


def check_plain(schema: pa.Schema) -> None:
    """Refuse a schema that cannot travel.

    Raises:
        BuildError: names the column.
    """
    for field in schema:
        wanted = plain_type(field.type)
        if not wanted.equals(field.type):
            raise BuildError(f"column {field.name!r} of an edge is {field.type}, rows travel as {wanted}")


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type))
