"""The driver's port: who proved the secret and is no worker of the job, or sends rubbish, is refused or let go."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from wire_ends import until

from cutwater.errors import FencedError
from cutwater.protocol.wire import ClientHandshake, Peer, ServerHandshake, encode_control
from cutwater.runtime.control import links
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.links import ControlServer, WorkerLink
from cutwater.runtime.transport.secret import Secret
from cutwater.runtime.transport.sockets import dial

SECRET = Secret(b"the secret of this very job")
HELLO = c.Hello(0, 1, "here", ("127.0.0.1", 1), [])


class Driver:
    """Keeps what the port tells."""

    def __init__(self) -> None:
        self.links: list[WorkerLink] = []
        self.joined: list[c.Hello] = []
        self.heard: list[Any] = []
        self.lost: list[str] = []
        self.port = ControlServer(
            "127.0.0.1",
            SECRET,
            "job",
            joined=self._joined,
            received=lambda _, message: self.heard.append(message),
            lost=self._lost,
            told=lambda _: None,
        )
        self.port.start()

    def _joined(self, link: WorkerLink, hello: c.Hello) -> None:
        self.links.append(link)
        self.joined.append(hello)

    def _lost(self, link: WorkerLink, reason: str) -> None:
        self.links.append(link)
        self.lost.append(reason)

    def connected(self, peer: Peer) -> socket.socket:
        return dial(self.port.address, SECRET, lambda key: ClientHandshake(key, peer), deadline_s=20)[0]


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.port.close()
    for link in made.links:
        link.close()


STRANGE = [Peer("control", "another"), Peer("data", "job"), Peer("copies", "job"), Peer("coordinator", "job")]


@pytest.mark.parametrize("peer", STRANGE, ids=lambda peer: f"{peer.role} of {peer.job}")
def test_who_knows_the_secret_and_is_no_worker_of_the_job_is_refused(driver: Driver, peer: Peer) -> None:
    with pytest.raises(FencedError, match="this is the coordinator of job 'job'"):
        driver.connected(peer).close()
    assert driver.joined == driver.lost == []


RUBBISH = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "nothing": bytes(4),
    "a length without end": b"\xff" * 16,
    "no message": encode_control(b"rubbish"),
    "half a message": encode_control(c.encode(c.Heartbeat())[:-1]),
}


@pytest.mark.parametrize("kind", RUBBISH)
def test_a_worker_that_sends_rubbish_is_lost_and_not_answered(driver: Driver, kind: str) -> None:
    with driver.connected(Peer("control", "job", 0)) as sock:
        sock.sendall(encode_control(c.encode(HELLO)) + RUBBISH[kind])
        until(lambda: driver.lost)
        driver.links[0].close()
        sock.settimeout(20)
        assert sock.recv(1) == b""
    assert (driver.joined, driver.heard) == ([HELLO], [])
    with driver.connected(Peer("control", "job", 1)) as honest:
        honest.sendall(encode_control(c.encode(HELLO)))
        until(lambda: len(driver.joined) == 2)


def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """Whoever knows the secret is taken for a worker of the job."""
    monkeypatch.setattr(links, "ServerHandshake", lambda secret, me, check: ServerHandshake(secret, me))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_who_knows_the_secret_and_is_no_worker_of_the_job_is_refused(driver, STRANGE[0])
    until(lambda: driver.lost)
