"""Strangers at a port: however many come, they end each other, and never somebody who knows the secret."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from wire_ends import guests, until

from cutwater.errors import WireError
from cutwater.protocol.wire import ClientHandshake, Peer, Refusal, ServerHandshake
from cutwater.runtime.control.links import dial_coordinator
from cutwater.runtime.transport import door, sockets
from cutwater.runtime.transport.door import Door
from cutwater.runtime.transport.secret import Secret, new_secret, shake
from cutwater.runtime.transport.sockets import dial

SECRET = Secret(b"the secret of this very job")
WORKER = Peer("control", "job", 3)


class Host:
    """Opens doors, and keeps who came in."""

    def __init__(self) -> None:
        self.doors: list[Door] = []
        self.admitted: list[socket.socket] = []
        self.told: list[str] = []

    def open(
        self, check: Callable[[Peer], Refusal | None] = lambda _: None, *, start: bool = True, **settings: Any
    ) -> Door:
        opened = Door(
            "127.0.0.1",
            0,
            lambda: ServerHandshake(SECRET.reveal(), Peer("coordinator", "job"), check),
            lambda sock, peer: self.admitted.append(sock),
            name="test",
            told=self.told.append,
            **settings,
        )
        if start:
            opened.start()
        self.doors.append(opened)
        return opened


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    for opened in made.doors:
        opened.close()
        assert not guests(opened)
    for sock in made.admitted:
        sock.close()


def knock(opened: Door, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(opened.address, timeout=20)
    sock.sendall(data)
    return sock


def join(opened: Door, deadline_s: float = 20.0) -> socket.socket:
    return dial(opened.address, SECRET, lambda key: ClientHandshake(key, WORKER), deadline_s=deadline_s)[0]


def is_open(sock: socket.socket) -> bool:
    sock.settimeout(0.05)
    try:
        return sock.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def test_the_newest_stranger_takes_the_place_of_the_oldest(host: Host) -> None:
    opened = host.open(timeout_s=600, strangers_max=3)
    crowd = []
    for count in range(1, 6):
        crowd.append(knock(opened))
        until(lambda count=count: guests(opened) == min(count, 3))
    until(lambda: [is_open(sock) for sock in crowd] == [False, False, True, True, True])
    for sock in crowd:
        sock.close()


def test_two_hundred_silent_connections_keep_nobody_out(host: Host) -> None:
    opened = host.open(timeout_s=600)
    crowd = [knock(opened) for _ in range(200)]
    join(opened).close()
    until(lambda: len(host.admitted) == 1)
    assert guests(opened) <= 128
    for sock in crowd:
        sock.close()


def test_who_knocked_is_no_stranger_any_more_and_is_not_ended_by_them(host: Host) -> None:
    """Half a handshake, then a crowd, then the other half."""
    opened = host.open(timeout_s=600, strangers_max=4)
    handshake = ClientHandshake(SECRET.reveal(), WORKER)
    sock = knock(opened, handshake.start())
    until(lambda: len(opened._known) == 1)
    crowd = [knock(opened, data) for data in [b"", b"CUTW\x02"] * 20]
    until(lambda: len(opened._strangers) == 4)
    sock.sendall(handshake.receive(sock.recv(37)))
    until(lambda: len(host.admitted) == 1)
    for each in [sock, *crowd]:
        each.close()


def test_who_knocked_before_he_was_accepted_never_was_a_stranger(host: Host) -> None:
    """All come before anybody is heard, and more strangers than there is room for come after him."""
    opened = host.open(start=False, timeout_s=600, strangers_max=2)
    crowd = [knock(opened) for _ in range(3)]
    sock = knock(opened, ClientHandshake(SECRET.reveal(), WORKER).start())
    crowd += [knock(opened) for _ in range(3)]
    opened._accept()
    assert (len(opened._known), len(opened._strangers)) == (1, 2)
    assert len(sock.recv(37)) == 37
    opened.start()
    for each in [sock, *crowd]:
        each.close()


def test_knocks_that_were_recorded_make_way_for_newer_ones(host: Host) -> None:
    opened = host.open(timeout_s=600, strangers_max=2)
    recorded = ClientHandshake(SECRET.reveal(), WORKER).start()
    crowd = [knock(opened, recorded) for _ in range(20)]
    join(opened).close()
    until(lambda: guests(opened) <= 4)
    for sock in crowd:
        sock.close()


def test_a_crowd_is_told_of_and_not_again_and_again(host: Host) -> None:
    opened = host.open(timeout_s=600, strangers_max=2)
    crowd = [knock(opened) for _ in range(20)]
    until(lambda: host.told)
    port = opened.address[1]
    assert host.told[0].startswith(f"strangers crowd port {port} of 127.0.0.1 (test): 1 connections that showed no")
    assert "more than 2 came at a time; workers are let in all the same" in host.told[0]
    join(opened).close()
    assert len(host.told) == 1
    for sock in crowd:
        sock.close()


def test_who_greets_with_a_wrong_knock_hears_the_same_whatever_is_wrong_and_others_hear_nothing(host: Host) -> None:
    """No oracle: it tells neither how near the guess was nor anything of the job."""
    opened = host.open()
    right = ClientHandshake(SECRET.reveal(), WORKER).start()
    wrong = [ClientHandshake(new_secret().reveal(), WORKER).start() for _ in range(3)]
    wrong += [right[:-1] + bytes([right[-1] ^ 1]), right[:37] + bytes(32)]
    heard = {said(opened, greeting) for greeting in wrong}
    assert len(heard) == 1
    (answer,) = heard
    assert len(answer) == 5, "only who knocks rightly is greeted, with a nonce"
    for rubbish in (b"GET / HTTP/1.1", b"CUTW\x09" + bytes(64), b"CUTW\0" + bytes(64)):
        assert said(opened, rubbish) == b""
    until(lambda: not guests(opened))


def said(door: Door, data: bytes) -> bytes:
    """All that a door says until it hangs up."""
    heard = b""
    with socket.create_connection(door.address, timeout=20) as sock, contextlib.suppress(ConnectionResetError):
        sock.sendall(data)
        while part := sock.recv(4096):
            heard += part
    return heard


def test_rubbish_is_hung_up_on_at_its_first_byte(host: Host) -> None:
    opened = host.open(timeout_s=600)
    for rubbish in (b"G", b"\x16\x03\x01", b"CUTX", b"CUTW\x01"):
        sock = knock(opened, rubbish)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        sock.close()
    assert not guests(opened)


def test_no_stranger_has_a_thread(host: Host) -> None:
    opened = host.open(timeout_s=600)
    before = threading.active_count()
    crowd = [knock(opened, data) for data in [b"", b"CUTW\x02"] * 50]
    until(lambda: guests(opened) == 100)
    assert threading.active_count() == before
    for sock in crowd:
        sock.close()
    until(lambda: not guests(opened))


def test_whoever_came_while_nobody_listened_is_heard_or_makes_way(host: Host) -> None:
    opened = host.open(start=False, timeout_s=600)
    crowd = [knock(opened) for _ in range(300)]
    joining = [threading.Thread(target=lambda: join(opened).close()) for _ in range(8)]
    for thread in joining:
        thread.start()
    crowd += [knock(opened) for _ in range(300)]
    opened.start()
    for thread in joining:
        thread.join(20)
    until(lambda: len(host.admitted) == 8)
    for sock in crowd:
        sock.close()


def test_without_file_descriptors_strangers_go_first(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    opened = host.open(start=False)
    crowd = [knock(opened) for _ in range(5)]
    opened._accept()
    assert guests(opened) == 5

    class Full:
        def accept(self) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

    listener, opened._listener = opened._listener, Full()  # type: ignore[assignment]
    opened._accept()
    opened._listener = listener
    assert "test: accepting a connection failed: [Errno 24] Too many open files" in caplog.text
    assert not guests(opened)
    opened.start()
    join(opened).close()
    for sock in crowd:
        sock.close()


# ----------------------------------------------------------------------------------------------------------- dialling


class Hanging(ServerHandshake):
    """One that fails without a word, as when another takes the place in a crowd."""

    def receive(self, data: bytes) -> bytes:
        raise WireError("no place")


def test_who_is_turned_away_dials_again(host: Host) -> None:
    """Three times the other end hangs up in the middle; then it is itself again."""
    opened = host.open()
    honest, tries = opened._handshake, []

    def moody() -> ServerHandshake:
        tries.append(1)
        return honest() if len(tries) > 3 else Hanging(SECRET.reveal(), WORKER)

    opened._handshake = moody
    join(opened).close()
    assert len(tries) == 4


def test_pauses_grow_and_are_not_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    class Clock:
        now = 0.0

        @classmethod
        def monotonic(cls) -> float:
            return cls.now

        @classmethod
        def sleep(cls, seconds: float) -> None:
            slept.append(seconds)
            cls.now += seconds

    monkeypatch.setattr(sockets, "time", Clock)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = reserved.getsockname()
    with pytest.raises(WireError, match="within 30 s"):
        dial(address, SECRET, lambda key: ClientHandshake(key, WORKER), deadline_s=30)
    assert 0.005 <= slept[0] <= 0.01
    assert max(slept) <= 0.5
    assert len({round(s, 6) for s in slept[6:]}) > 10, "those that were turned away together do not come together"
    assert all(0.25 <= s <= 0.5 for s in slept[6:])


def test_a_refusal_that_is_proved_is_not_tried_again(host: Host) -> None:
    asked: list[Peer] = []

    def check(peer: Peer) -> Refusal | None:
        asked.append(peer)
        return Refusal("this is another job")

    opened = host.open(check)
    with pytest.raises(Exception, match="connection refused: this is another job"):
        join(opened)
    assert len(asked) == 1
    until(lambda: not guests(opened))


def test_a_worker_that_is_kept_out_says_why(host: Host) -> None:
    def ask(address: tuple[str, int], timeout_s: float = 0.3) -> None:
        nobody: Callable[[Any], None] = lambda _: None  # noqa: E731
        dial_coordinator(address, SECRET, "job", 3, nobody, nobody, heartbeat_s=1, timeout_s=timeout_s)

    opened = host.open()
    opened._handshake = lambda: Hanging(SECRET.reveal(), WORKER)
    with pytest.raises(WireError, match=r"cannot be reached: no connection .*(hung up|broke).*strangers crowd"):
        ask(opened.address)
    opened._handshake = lambda: ServerHandshake(new_secret().reveal(), WORKER)
    with pytest.raises(WireError, match=r"cannot be reached: no connection .*: authentication failed.* which driver"):
        ask(opened.address, timeout_s=60)
    opened.close()
    with pytest.raises(WireError, match=r"refused\. Executors must be able to reach the driver"):
        ask(opened.address)


def test_an_error_in_its_thread_does_not_close_a_door(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    opened = host.open(start=False)
    honest = opened._handshake

    def broken() -> ServerHandshake:
        opened._handshake = honest
        raise KeyError("oops")

    opened._handshake = broken
    opened.start()
    knock(opened).close()
    until(lambda: "test: listening failed, and goes on" in caplog.text)
    join(opened).close()


def test_a_handshake_in_pieces_is_a_handshake(host: Host) -> None:
    opened = host.open()
    client = ClientHandshake(SECRET.reveal(), WORKER)
    sock = socket.create_connection(opened.address, timeout=20)
    to_send = client.start()
    while True:
        for byte in to_send:
            sock.sendall(bytes([byte]))
            time.sleep(0.0005)
        if not client.wanted:
            break
        to_send = client.receive(sock.recv(client.wanted))
    until(lambda: len(host.admitted) == 1)
    sock.close()


def test_the_socket_that_is_admitted_blocks(host: Host) -> None:
    opened = host.open()
    sock = socket.create_connection(opened.address, timeout=20)
    shake(sock, ClientHandshake(SECRET.reveal(), WORKER), 20)
    until(lambda: len(host.admitted) == 1)
    assert host.admitted[0].gettimeout() is None
    assert door._BACKLOG >= 1_024
    sock.close()
