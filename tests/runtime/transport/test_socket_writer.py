"""The outbox of a connection, on a socket that takes only a little at a time."""

from __future__ import annotations

import random
import socket
import threading

import pyarrow as pa
import pytest
from wire_ends import until

from cutwater.runtime.transport.sockets import SocketWriter


def narrow_pair() -> tuple[socket.socket, socket.socket]:
    a, b = socket.socketpair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    b.settimeout(20)
    return a, b


def test_every_byte_arrives_once_and_in_order_through_a_narrow_socket() -> None:
    a, b = narrow_pair()
    writer = SocketWriter(a, "writer", lambda error: None)
    writer.start()
    chance = random.Random(3)
    sent = bytearray()
    for _ in range(400):
        parts = [chance.randbytes(chance.choice([1, 40, 300, 5000, 40_000])) for _ in range(chance.randint(1, 4))]
        mixed = [pa.py_buffer(p) if chance.random() < 0.5 else p for p in parts]
        writer.send(mixed, sum(map(len, parts)))
        sent += b"".join(parts)
    received = bytearray()
    while len(received) < len(sent):
        received += b.recv(chance.choice([10, 1000, 50_000]))
    assert received == sent
    assert writer.drain(20.0)
    writer.stop()
    writer.join(20)
    a.close()
    b.close()


@pytest.mark.parametrize("size", [1000, 20_000])
def test_the_thread_goes_on_where_a_sender_could_not(size: int) -> None:
    """A sender's own call takes part of a frame, or none of it, when the socket is full."""
    a, b = narrow_pair()
    writer = SocketWriter(a, "writer", lambda error: None)
    writer.start()
    for number in range(20):
        sent = b""
        while not writer._owned:  # until a call of the sender was cut short
            frame = bytes([number, len(sent) % 251]) + random.Random(len(sent)).randbytes(size)
            writer.send([frame[:7], frame[7:]], len(frame))
            sent += frame
            assert len(sent) < 1 << 20, "a full socket took everything"
        received = b""
        while len(received) < len(sent):
            received += b.recv(1 << 16)
        assert received == sent
        assert writer.drain(20.0)
    writer.stop()
    writer.join(20)
    a.close()
    b.close()


def test_frames_of_several_threads_are_not_mixed() -> None:
    a, b = narrow_pair()
    writer = SocketWriter(a, "writer", lambda error: None)
    writer.start()

    def send(name: int) -> None:
        for number in range(500):
            head = bytes([name, number % 256])
            writer.send((head, bytes([name]) * 200), 202)

    threads = [threading.Thread(target=send, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    received = bytearray()
    while len(received) < 3 * 500 * 202:
        received += b.recv(1 << 16)
    for thread in threads:
        thread.join(20)
    seen = {0: 0, 1: 0, 2: 0}
    for start in range(0, len(received), 202):
        name, number = received[start], received[start + 1]
        assert number == seen[name] % 256
        assert received[start + 2 : start + 202] == bytes([name]) * 200
        seen[name] += 1
    writer.stop()
    writer.join(20)
    a.close()
    b.close()


def test_a_drain_that_cannot_finish_says_so_and_a_stop_ends_it() -> None:
    a, b = narrow_pair()
    writer = SocketWriter(a, "writer", lambda error: None)
    writer.start()
    writer.send([bytes(1 << 20)], 1 << 20)
    assert not writer.drain(0.02)
    a.shutdown(socket.SHUT_RDWR)
    writer.stop()
    writer.join(20)
    assert writer.drain(0.0)
    writer.send([b"late"], 4)
    b.close()
    a.close()


def test_a_broken_socket_is_reported_once() -> None:
    a, b = narrow_pair()
    errors: list[OSError] = []
    writer = SocketWriter(a, "writer", errors.append)
    writer.start()
    b.close()
    for _ in range(5):
        writer.send([b"x"], 1)
    until(lambda: errors)
    writer.send([b"x"], 1)
    writer.join(20)
    assert len(errors) == 1
    a.close()
