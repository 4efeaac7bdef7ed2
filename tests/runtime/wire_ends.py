"""What the tests of connections share."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from cutwater.errors import CutwaterError
from cutwater.plan.graph import Channel
from cutwater.protocol.channel.receiving import ReceivingEnd
from cutwater.protocol.wire import Peer
from cutwater.runtime.channels.connection import Connection
from cutwater.runtime.channels.output import OutputChannel
from cutwater.runtime.transport.sockets import nothing

NUMBERS = pa.schema([("n", pa.int64())])


def batch(first: int, rows: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(range(first, first + rows), pa.int64())], schema=NUMBERS)


def until(condition: Callable[[], Any]) -> None:
    """Wait for something that another thread is about to do; the limit only ends a hanging test."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not happen within 20 s"
        time.sleep(0.0005)


def sending(connection: Connection, key: Channel, schema: pa.Schema, **settings: Any) -> OutputChannel:
    """The sending end of a channel to the peer; batches are as large as its frames allow."""
    most = connection._max_frame_bytes // 2
    channel = OutputChannel(key, schema, connection.sender(key), max_batch_bytes=most, **settings)
    connection.add_output(channel)
    return channel


def receiving(
    connection: Connection,
    key: Channel,
    schema: pa.Schema,
    frames: int = 8,
    on_ready: Callable[[], None] = nothing,
    **settings: Any,
) -> ReceivingEnd:
    """The receiving end of a channel from the peer, which returns credit by halves as a worker's does."""
    channel = ReceivingEnd(key, frames, on_ready, credit_batch=max(1, frames // 2), **settings)
    connection.add_input(channel, schema)
    return channel


class Ends:
    """Two connections joined by a socket, or one with a bare socket at the other end."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.sockets: list[socket.socket] = []
        self.lost: list[CutwaterError] = []

    def joined(self, **settings: Any) -> tuple[Connection, Connection]:
        a, b = socket.socketpair()
        self.connections += [Connection(a, Peer("data", "job", 1), **settings)]
        self.connections += [Connection(b, Peer("data", "job", 0), **settings)]
        return self.connections[0], self.connections[1]

    def half(self, **settings: Any) -> tuple[Connection, socket.socket]:
        a, b = socket.socketpair()
        self.connections.append(Connection(a, Peer("data", "job", 1), **settings))
        b.settimeout(20)  # no test hangs
        self.sockets.append(b)
        return self.connections[0], b

    def start(self) -> None:
        for connection in self.connections:
            connection.start(lambda _, error: self.lost.append(error))

    def reason(self) -> str:
        """Why the peer was lost, once it was."""
        until(lambda: self.lost)
        return str(self.lost[0])


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    until(lambda: set(threading.enumerate()) <= before)


def guests(door: Any) -> int:
    """Connections that are heard and not admitted yet."""
    return len(door._strangers) + len(door._known)
