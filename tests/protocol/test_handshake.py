"""The handshake, without sockets: what an attacker may try, byte by byte."""

from __future__ import annotations

import hashlib
import hmac

import msgspec
import pytest

from cutwater.errors import FencedError, WireError
from cutwater.protocol.wire import (
    MAX_IDENTITY_BYTES,
    ClientHandshake,
    Handshake,
    Peer,
    Refusal,
    ServerHandshake,
    TryLaterError,
)
from reversal import Reversal

SECRET = b"s" * 32
CLIENT = Peer("data", "job-1", 0, attempt=3, incarnation=2)
SERVER = Peer("data", "job-1", 1, attempt=3)


def fence(peer: Peer) -> Refusal | None:
    if peer.attempt != 3:
        return Refusal(f"attempt {peer.attempt} is not 3", later=peer.attempt > 3)
    return None


def pair(
    *, client_secret: bytes = SECRET, client: Peer = CLIENT, server: Peer = SERVER
) -> tuple[ClientHandshake, ServerHandshake]:
    return ClientHandshake(client_secret, client, fence), ServerHandshake(SECRET, server, fence)


def run(client: ClientHandshake, server: ServerHandshake, size: int = 10_000) -> None:
    """Carry bytes to and fro, in pieces."""
    to_server = client.start()
    while to_server:
        to_client = b"".join(server.receive(to_server[i : i + size]) for i in range(0, len(to_server), size))
        to_server = b"".join(client.receive(to_client[i : i + size]) for i in range(0, len(to_client), size))


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_both_sides_learn_who_the_other_is(size: int) -> None:
    client, server = pair()
    assert not client.done
    run(client, server, size)
    assert (client.done, server.done, client.wanted, server.wanted) == (True, True, 0, 0)
    assert (client.peer, server.peer) == (SERVER, CLIENT)


def test_a_wrong_secret_is_found_by_the_server_before_it_says_anything() -> None:
    client, server = pair(client_secret=b"x" * 32)
    hello = client.start()
    for _ in range(2):
        with pytest.raises(WireError, match="could not prove"):
            server.receive(hello)
    assert not server.done
    assert not server.knocked
    with pytest.raises(WireError, match="not finished"):
        _ = server.peer


def test_a_server_without_the_secret_is_found_by_the_client() -> None:
    client = ClientHandshake(SECRET, CLIENT)
    client.receive(b"CUTW\x02" + bytes(32))
    forged = msgspec.msgpack.encode({"peer": SERVER, "refusal": None})
    with pytest.raises(WireError, match="could not prove"):
        client.receive(bytes(32) + len(forged).to_bytes(2, "little") + forged)
    assert not client.done


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    client, server = pair()
    hello = client.start()
    proof = client.receive(server.receive(hello))
    server.receive(proof)
    assert server.done
    again = ServerHandshake(SECRET, SERVER, fence)
    again.receive(hello)
    assert again.knocked, "a knock is no proof"
    with pytest.raises(WireError, match="could not prove"):
        again.receive(proof)


def test_who_knocked_is_known_by_his_first_bytes() -> None:
    client, server = pair()
    assert not server.knocked
    for byte in client.start()[:-1]:
        assert server.receive(bytes([byte])) == b""
        assert not server.knocked
    server.receive(client.start()[-1:])
    assert server.knocked


@pytest.mark.parametrize("position", range(69))
def test_every_bit_of_a_knock_counts(position: int) -> None:
    client, server = pair()
    hello = bytearray(client.start())
    hello[position] ^= 1
    with pytest.raises(WireError):
        server.receive(bytes(hello))
    assert not server.knocked


def test_a_proof_is_no_knock() -> None:
    """Each has a label of its own: what somebody else was made to sign opens nothing."""
    client, server = pair()
    hello = client.start()[:37]
    proof = hmac.new(SECRET, b"cutwater client" + hello, hashlib.sha256).digest()
    with pytest.raises(WireError, match="could not prove"):
        server.receive(hello + proof)


def test_a_recorded_server_cannot_be_replayed_to_a_client() -> None:
    client, server = pair()
    greeting = server.receive(client.start())
    verdict = server.receive(client.receive(greeting))
    again = ClientHandshake(SECRET, CLIENT, fence)
    again.start()
    again.receive(greeting)
    with pytest.raises(WireError, match="could not prove"):
        again.receive(verdict)


def test_a_clients_own_proof_cannot_be_reflected_to_it() -> None:
    client = ClientHandshake(SECRET, CLIENT)
    proof = client.receive(client.start()[:37])
    with pytest.raises(WireError, match="could not prove"):
        client.receive(proof)


def test_a_proof_cannot_be_relayed_from_another_server() -> None:
    """A man in the middle who shows the client his own nonce cannot use its proof elsewhere."""
    client, honest = pair()
    honest.receive(client.start())
    other = ServerHandshake(SECRET, SERVER, fence)
    proof_for_other = client.receive(other.receive(client.start()))
    with pytest.raises(WireError, match="could not prove"):
        honest.receive(proof_for_other)


def test_a_changed_identity_breaks_the_proof() -> None:
    client, server = pair()
    proof = client.receive(server.receive(client.start()))
    forged = proof.replace(b"job-1", b"job-2")
    assert forged != proof
    with pytest.raises(WireError, match="could not prove"):
        server.receive(forged)


def test_a_changed_verdict_breaks_the_proof() -> None:
    client, server = pair()
    verdict = server.receive(client.receive(server.receive(client.start())))
    for position in range(len(verdict)):
        victim = ClientHandshake.__new__(ClientHandshake)
        victim.__dict__.update(client.__dict__)
        victim._data = bytearray()
        forged = bytearray(verdict)
        forged[position] ^= 1
        try:
            victim.receive(bytes(forged))
        except WireError:
            continue
        assert not victim.done, f"byte {position}"


def test_the_proof_covers_label_version_nonces_and_identity() -> None:
    """An independent computation of the client's proof, straight from the description."""
    client, server = pair()
    hello = client.start()
    greeting = server.receive(hello)
    proof = client.receive(greeting)
    assert (len(hello), hello[:5], len(greeting), greeting[:5]) == (69, b"CUTW\x02", 37, b"CUTW\x02")
    assert hello[5:37] != greeting[5:]
    assert hello[37:] == hmac.new(SECRET, b"cutwater knock" + hello[:37], hashlib.sha256).digest()
    said = b"cutwater client" + hello + greeting + proof[32:]
    assert proof[:32] == hmac.new(SECRET, said, hashlib.sha256).digest()


@pytest.mark.parametrize(("attempt", "error"), [(2, FencedError), (4, TryLaterError)])
def test_both_sides_are_told_of_a_refusal(attempt: int, error: type[Exception]) -> None:
    client, server = pair(client=Peer("data", "job-1", 0, attempt=attempt))
    run(client, server)
    for side in (client, server):
        assert (side.done, side.wanted) == (False, 0)
        with pytest.raises(error, match=f"attempt {attempt} is not 3"):
            _ = side.peer


def test_a_client_may_refuse_the_server() -> None:
    client, server = pair(server=Peer("data", "job-1", 1, attempt=2))
    run(client, server)
    with pytest.raises(FencedError, match="attempt 2"):
        _ = client.peer


def test_the_version_must_agree() -> None:
    client, server = pair()
    hello = bytearray(client.start())
    hello[4] = 1
    with pytest.raises(WireError, match=r"version 1 of the protocol, this side 2\. Install the same release"):
        server.receive(bytes(hello[:5]))


@pytest.mark.parametrize("data", [b"G", b"GET / HTTP/1.1\r\nHost: localhost:8080\r\n\r\n", b"CUTE", b"\x00"])
def test_anything_else_than_a_handshake_is_refused_at_its_first_bytes(data: bytes) -> None:
    for side, greeting in zip(pair(), (37, 69), strict=True):
        assert side.wanted == greeting
        with pytest.raises(WireError, match="does not speak"):
            side.receive(data)
        assert not side._data


def test_who_was_refused_stays_so_whatever_comes_then() -> None:
    client, server = pair()
    with pytest.raises(WireError, match="does not speak"):
        server.receive(b"G")
    with pytest.raises(WireError, match="does not speak"):
        server.receive(client.start())
    assert not server.knocked


@pytest.mark.parametrize("length", [0, MAX_IDENTITY_BYTES + 1, 65535])
def test_an_identity_out_of_bounds_is_refused_before_it_is_read(length: int) -> None:
    client, server = pair()
    server.receive(client.start())
    with pytest.raises(WireError, match=f"announced {length}"):
        server.receive(bytes(32) + length.to_bytes(2, "little"))


def test_a_proved_identity_of_the_wrong_shape_is_refused() -> None:
    client, server = pair()
    hello = client.start()
    greeting = server.receive(hello)
    identity = msgspec.msgpack.encode({"peer": {"role": "root", "job": "job-1"}})
    length = len(identity).to_bytes(2, "little")
    proof = hmac.new(SECRET, b"cutwater client" + hello + greeting + length + identity, hashlib.sha256).digest()
    with pytest.raises(WireError, match="identity cannot be read"):
        server.receive(proof + length + identity)


def test_bytes_after_the_handshake_are_not_swallowed() -> None:
    client, server = pair()
    verdict = server.receive(client.receive(server.receive(client.start())))
    with pytest.raises(WireError, match="sent more than a handshake"):
        client.receive(verdict + b"x")
    assert not client.done


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(WireError, match="at least 16 bytes"):
        ClientHandshake(b"short", CLIENT)


# ----------------------------------------------------------------------------------------------------------- the alarm

REVERSALS = {
    "rubbish is waited for": Reversal(
        Handshake.receive,
        "self._check_prefix()",
        "pass",
        lambda: test_anything_else_than_a_handshake_is_refused_at_its_first_bytes(b"G"),
    ),
    "the version is not compared": Reversal(
        Handshake._check_prefix, "_PREFIX.startswith(begun)", "_MAGIC == begun[:4]", test_the_version_must_agree
    ),
    "every knock is answered": Reversal(
        ServerHandshake._answer_greeting,
        "not hmac.compare_digest(self._knock(message[:_HELLO_BYTES]), message[_HELLO_BYTES:])",
        "False",
        test_a_wrong_secret_is_found_by_the_server_before_it_says_anything,
    ),
    "proofs are not compared": Reversal(
        Handshake._step,
        "not hmac.compare_digest(self._prove(self._peer_label, message), self._proof)",
        "False",
        test_a_server_without_the_secret_is_found_by_the_client,
    ),
    "lengths are not bounded": Reversal(
        Handshake._step,
        "not 0 < self._length <= MAX_IDENTITY_BYTES",
        "False",
        lambda: test_an_identity_out_of_bounds_is_refused_before_it_is_read(65535),
    ),
    "what comes too early is kept": Reversal(
        Handshake.receive, "not whole and self._data", "False", test_bytes_after_the_handshake_are_not_swallowed
    ),
    "a refusal is forgotten": Reversal(
        Handshake.receive, "self._error is not None", "False", test_who_was_refused_stays_so_whatever_comes_then
    ),
    "nobody is fenced off": Reversal(
        Handshake._accept,
        "(self._check(said.peer) if self._check is not None else None)",
        "None",
        lambda: test_both_sides_are_told_of_a_refusal(2, FencedError),
    ),
}


@pytest.mark.parametrize("bug", REVERSALS)
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    REVERSALS[bug].is_seen(monkeypatch)
