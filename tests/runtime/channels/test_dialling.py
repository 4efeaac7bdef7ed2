"""Listening and dialling over TCP: secrets, fencing, strangers, timeouts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from wire_ends import NUMBERS, batch, guests, receiving, sending, until

from cutwater.errors import FencedError, WireError
from cutwater.plan.graph import Channel
from cutwater.protocol.channel.receiving import EMPTY
from cutwater.protocol.wire import ClientHandshake, Peer, Refusal, ServerHandshake, TryLaterError, encode_control
from cutwater.runtime.channels.connection import Connection, DataServer, connect
from cutwater.runtime.transport.secret import Secret, new_secret, shake

SECRET = Secret(b"the secret of this very job")
ME = Peer("data", "job", 0, attempt=5)


class Listening:
    def __init__(self) -> None:
        self.attempt = 5
        self.accepted: list[Connection] = []
        self.servers: list[DataServer] = []

    def check(self, peer: Peer) -> Refusal | None:
        if peer.job != "job":
            return Refusal(f"job {peer.job} is not mine")
        if peer.attempt != self.attempt:
            return Refusal(f"attempt {peer.attempt}, I am at {self.attempt}", later=peer.attempt > self.attempt)
        return None

    def server(self, **settings: Any) -> DataServer:
        server = DataServer(Peer("data", "job", 1, attempt=5), SECRET, self.check, self.accepted.append, **settings)
        self.servers.append(server)
        server.start()
        return server


@pytest.fixture
def listening() -> Iterator[Listening]:
    listening = Listening()
    yield listening
    for server in listening.servers:
        server.close()
    for connection in listening.accepted:
        connection.close()


def stranger(server: DataServer, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(server.address, timeout=20)
    sock.sendall(data)
    return sock


def hung_up(sock: socket.socket) -> bool:
    """The other end closes without a word (after its greeting, if there was one)."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    sock.close()
    return True


def test_who_is_told_no_address_listens_on_loopback(listening: Listening) -> None:
    assert listening.server().address[0] == "127.0.0.1"


def test_two_workers_meet_and_exchange_rows(listening: Listening) -> None:
    server = listening.server()
    left = connect(server.address, ME, SECRET)
    until(lambda: listening.accepted)
    right = listening.accepted[0]
    assert (left.peer.worker, right.peer) == (1, ME)
    key = Channel(0, 0, 1)
    out, inp = sending(left, key, NUMBERS, batch_rows=10), receiving(right, key, NUMBERS)
    for connection in (left, right):
        connection.start(lambda *_: None)
    out.offer(batch(0, 10))
    until(lambda: inp.head() != EMPTY)
    assert inp.take(100).batch.equals(batch(0, 10))
    left.close()


def test_frames_that_follow_the_handshake_at_once_are_not_lost(listening: Listening) -> None:
    """The side that is done first may send before the other has even made its channels."""
    server = listening.server()
    left = connect(server.address, ME, SECRET)
    key = Channel(0, 0, 1)
    out = sending(left, key, NUMBERS)
    left.start(lambda *_: None)
    out.offer_barrier(3)
    until(lambda: listening.accepted)
    inp = receiving(listening.accepted[0], key, NUMBERS)
    listening.accepted[0].start(lambda *_: None)
    until(lambda: inp.head() != EMPTY)
    assert inp.take(1).checkpoint_id == 3
    left.close()


def test_a_wrong_secret_is_refused_and_the_server_lives_on(listening: Listening) -> None:
    """At once: it is not as being turned away in a crowd, which is tried again."""
    server = listening.server()
    tried: list[str] = []
    with pytest.raises(WireError, match=r"no connection to 127\.0\.0\.1:\d+: .* authentication failed"):
        connect(server.address, ME, new_secret(), deadline_s=60, wanted=lambda: tried.append("again"))
    assert not tried
    connect(server.address, ME, SECRET).close()
    until(lambda: len(listening.accepted) == 1)


def test_a_server_with_a_wrong_secret_is_refused(listening: Listening) -> None:
    server = listening.server()
    other = Peer("data", "job", 1, attempt=5)
    server._handshake = lambda: ServerHandshake(new_secret().reveal(), other, listening.check)
    with pytest.raises(WireError, match="authentication failed"):
        connect(server.address, ME, SECRET, deadline_s=60)
    assert not listening.accepted


def test_a_server_that_fakes_a_greeting_is_found_at_once() -> None:
    def fake(sock: socket.socket) -> None:
        sock.recv(69)
        sock.sendall(b"CUTW\x02" + bytes(32))
        sock.recv(4096)
        sock.sendall(bytes(32) + b"\x01\x00\x80")

    with socket.create_server(("127.0.0.1", 0)) as server:
        dialling = threading.Thread(target=lambda: fake(server.accept()[0]))
        dialling.start()
        with pytest.raises(WireError, match="could not prove"):
            connect(server.getsockname(), ME, SECRET, deadline_s=600)
        dialling.join(20)


@pytest.mark.parametrize("peer", [Peer("data", "job", 0, attempt=4), Peer("data", "other", 0, attempt=5)])
def test_an_older_attempt_or_another_job_is_fenced_off(listening: Listening, peer: Peer) -> None:
    server = listening.server()
    with pytest.raises(FencedError, match=r"attempt 4, I am at 5|job other is not mine"):
        connect(server.address, peer, SECRET, deadline_s=600)
    assert not listening.accepted


def test_a_newer_attempt_waits_until_the_peer_is_ready(listening: Listening) -> None:
    server = listening.server()
    calls = []

    def check(peer: Peer) -> Refusal | None:
        calls.append(peer)
        if len(calls) == 3:
            listening.attempt = 6
        return listening.check(peer)

    asked = Peer("data", "job", 1, attempt=5)
    server._handshake = lambda: ServerHandshake(SECRET.reveal(), asked, check)
    connect(server.address, Peer("data", "job", 0, attempt=6), SECRET).close()
    assert len(calls) == 3


def test_a_peer_that_is_never_ready_ends_with_the_deadline(listening: Listening) -> None:
    server = listening.server()
    with pytest.raises(WireError, match=r"within 0\.2 s: not yet: attempt 6, I am at 5"):
        connect(server.address, Peer("data", "job", 0, attempt=6), SECRET, deadline_s=0.2)


def test_the_dialler_may_refuse_who_answers(listening: Listening) -> None:
    server = listening.server()
    with pytest.raises(FencedError, match="you are not worker 2"):
        connect(server.address, ME, SECRET, lambda peer: Refusal("you are not worker 2"))


def test_dialling_waits_for_a_peer_that_does_not_listen_yet(listening: Listening) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    made: list[Connection] = []
    dialling = threading.Thread(target=lambda: made.append(connect(("127.0.0.1", port), ME, SECRET)))
    dialling.start()
    time.sleep(0.03)
    listening.server(port=port)
    dialling.join(20)
    made[0].close()


def test_dialling_nobody_ends_with_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = reserved.getsockname()
    with pytest.raises(WireError, match=r"no connection to 127\.0\.0\.1:\d+ within 0\.1 s"):
        connect(address, ME, SECRET, deadline_s=0.1)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n", bytes(10_000), b"CUTW\x09" + bytes(32)]
)
def test_a_stranger_is_hung_up_on(listening: Listening, data: bytes) -> None:
    server = listening.server(timeout_s=600)
    assert hung_up(stranger(server, data))
    assert not listening.accepted


def test_an_oversized_identity_is_hung_up_on_before_it_is_read(listening: Listening) -> None:
    server = listening.server(timeout_s=600)
    sock = stranger(server, ClientHandshake(SECRET.reveal(), ME).start())
    sock.sendall(bytes(32) + b"\xff\xff" + bytes(65535))
    assert hung_up(sock)
    assert not listening.accepted


def test_a_stalled_stranger_is_hung_up_on_after_the_timeout(listening: Listening) -> None:
    server = listening.server(timeout_s=0.1)
    assert hung_up(stranger(server))
    assert hung_up(stranger(server, b"CUTW"))
    until(lambda: not guests(server))


def test_dribbling_bytes_does_not_extend_the_timeout(listening: Listening) -> None:
    server = listening.server(timeout_s=0.15)
    sock = stranger(server)
    sent = 0
    with pytest.raises(OSError):
        for byte in ClientHandshake(SECRET.reveal(), ME).start() * 100:
            sock.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.02)
    assert sent < 69, "the greeting was not even complete"
    sock.close()


def test_who_knocked_and_says_no_more_is_hung_up_on_after_the_timeout(listening: Listening) -> None:
    server = listening.server(timeout_s=0.1)
    sock = stranger(server, ClientHandshake(SECRET.reveal(), ME).start())
    until(lambda: len(server._known) == 1)
    assert hung_up(sock)
    until(lambda: not guests(server))


def test_closing_leaves_no_port_no_thread_and_no_stranger(listening: Listening) -> None:
    server = listening.server(timeout_s=600)
    sock = stranger(server)
    until(lambda: guests(server) == 1)
    server.close()
    server.close()
    assert hung_up(sock)
    assert not guests(server)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address, timeout=1)
    with socket.create_server(server.address):
        pass


@pytest.mark.parametrize("where", ["_handshake", "_admitted"])
def test_a_failing_callback_hangs_up_and_the_server_lives_on(
    listening: Listening, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = listening.server()
    original = getattr(server, where)

    def fail(*_: Any) -> Any:
        setattr(server, where, original)
        if where == "_admitted":
            raise KeyError("oops")
        return ServerHandshake(SECRET.reveal(), ME, fail_check)

    def fail_check(_: Peer) -> None:
        raise KeyError("oops")

    setattr(server, where, fail)
    connect(server.address, ME, SECRET).close()  # tries again where it was hung up on
    until(lambda: not guests(server) and "oops" in caplog.text)
    connect(server.address, ME, SECRET).close()
    until(lambda: len(listening.accepted) == (2 if where == "_handshake" else 1))


def test_accepted_connections_outlive_the_server(listening: Listening) -> None:
    server = listening.server()
    left = connect(server.address, ME, SECRET)
    until(lambda: listening.accepted)
    server.close()
    lost: list[Any] = []
    for connection in (left, listening.accepted[0]):
        connection.start(lambda _, error: lost.append(error))
    closing = threading.Thread(target=left.close, args=(20.0,))
    closing.start()
    until(lambda: listening.accepted[0]._peer_left)
    listening.accepted[0].close()
    closing.join(20)
    assert not lost


def test_shake_leaves_the_first_message_in_the_socket() -> None:
    a, b = socket.socketpair()
    peers: list[Peer] = []
    server = threading.Thread(
        target=lambda: (
            peers.append(shake(b, ServerHandshake(SECRET.reveal(), Peer("coordinator", "job")), 20)),
            b.sendall(encode_control(b"welcome")),
        )
    )
    server.start()
    assert shake(a, ClientHandshake(SECRET.reveal(), ME), 20).role == "coordinator"
    server.join(20)
    assert (peers, a.recv(100)) == ([ME], b"\x07\x00\x00\x00welcome")
    a.close()
    b.close()


def test_shake_reports_a_silent_peer_and_one_that_hangs_up() -> None:
    a, b = socket.socketpair()
    with pytest.raises(WireError, match=r"longer than 0\.05 s"):
        shake(a, ClientHandshake(SECRET.reveal(), ME), 0.05)
    b.close()
    with pytest.raises(WireError, match=r"hung up|broke"):
        shake(a, ClientHandshake(SECRET.reveal(), ME), 20)
    a.close()


def test_try_later_is_a_wire_error_that_is_told_apart() -> None:
    assert issubclass(TryLaterError, WireError)


@pytest.mark.parametrize("show", [repr, str, lambda s: f"{s}", lambda s: str([s])])
def test_a_secret_is_never_shown(show: Callable[[Secret], str]) -> None:
    secret = new_secret()
    assert secret.reveal().hex() not in show(secret)
    assert str(secret.reveal()) not in show(secret)
    assert "***" in show(secret)


def test_secrets_differ_and_compare_by_value() -> None:
    assert new_secret() != new_secret()
    assert Secret(b"0123456789abcdef") == Secret(b"0123456789abcdef")
    with pytest.raises(WireError, match="at least 16 bytes"):
        Secret(b"short")
