"""Copies between two workers over real sockets: what arrives, what is refused, and peers that go, hang or lie."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from cutwater.errors import CorruptSnapshotError, WireError
from cutwater.protocol.wire import Peer
from cutwater.runtime.channels.connection import DataServer
from cutwater.runtime.copies import links as copy_links
from cutwater.runtime.copies.copies import Copier, choose_holders
from cutwater.runtime.copies.links import CopyLink, CopyServer, dial_copies
from cutwater.runtime.transport.secret import Secret
from cutwater.storage.snapshot.copies import MemoryShelf
from cutwater.storage.store.local import LocalStore

SECRET = Secret(b"0123456789abcdef")
DATA = random.Random(7).randbytes(3_000_001)


class Holder:
    """A worker that holds copies."""

    def __init__(self, capacity_bytes: int) -> None:
        self.shelf = MemoryShelf(capacity_bytes)
        self.server = CopyServer([self.shelf], self.shelf, lambda: None)
        self.port = DataServer(
            Peer("data", "uid", 1), SECRET, lambda peer: None, lambda made: made.close(), on_copies=self.server.serve
        )
        self.port.start()

    def dial(self, slot: int = 1) -> CopyLink:
        return dial_copies(self.port.address, SECRET, "uid", 0)

    def close(self) -> None:
        self.port.close()
        self.server.close()
        self.shelf.close()


@pytest.fixture
def holder() -> Iterator[Holder]:
    made = Holder(4_000_000)
    yield made
    made.close()
    for thread in [t for t in threading.enumerate() if t.name == "cutwater-copies"]:
        thread.join(10)  # one whose peer hung up ends by itself
        assert not thread.is_alive()


def give(link: CopyLink, file: str, data: bytes, checkpoint_id: int = 1) -> str:
    answer = link.offer(file, len(data), checkpoint_id)
    if answer == "send":
        link.send(data)
        assert link.sent()
    return answer


def test_what_is_given_can_be_fetched_in_parts_and_no_more_than_fits_is_taken(holder: Holder) -> None:
    link = holder.dial()
    assert give(link, "shared/1-1-0.data", DATA) == "send"
    assert give(link, "shared/1-1-0.data", DATA) == "have"
    assert give(link, "shared/1-1-1.data", DATA) == "full"
    assert holder.shelf.held_bytes == len(DATA)
    other = holder.dial()
    cuts = [0, 1, 1_000_000, len(DATA)]
    assert b"".join(other.fetch("shared/1-1-0.data", a, b - a) for a, b in pairwise(cuts)) == DATA
    for file, offset in (("shared/9-1-0.data", 0), ("shared/1-1-0.data", len(DATA))):
        with pytest.raises(CorruptSnapshotError):
            other.fetch(file, offset, 10)
    holder.shelf.keep(2, ["shared/2-1-0.data"])
    assert give(link, "shared/1-1-0.data", DATA, checkpoint_id=1) == "stale"
    link.close()
    other.close()


def test_a_sender_that_goes_half_way_leaves_nothing(holder: Holder) -> None:
    link = holder.dial()
    assert link.offer("shared/1-1-0.data", len(DATA), 1) == "send"
    link.send(DATA[:1_000])
    link.close()
    again = holder.dial()
    for _ in range(1_000):
        if give(again, "shared/1-1-0.data", DATA) in ("send", "have"):
            break
    assert again.fetch("shared/1-1-0.data", 0, len(DATA)) == DATA
    again.close()


def test_a_holder_that_is_gone_or_silent_is_an_error_soon(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_links, "_PATIENCE_S", 1)
    link = holder.dial()
    holder.server.close()
    with pytest.raises(WireError):
        link.fetch("shared/1-1-0.data", 0, 1)
    link.close()
    ours, theirs = socket.socketpair()
    silent = CopyLink(ours)
    with pytest.raises(WireError, match="silent for 1 s"):
        silent.fetch("shared/1-1-0.data", 0, 1)
    silent.close()
    theirs.close()


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff", struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1", b""])
def test_nonsense_ends_the_connection_and_nothing_else(holder: Holder, said: bytes) -> None:
    ours, theirs = socket.socketpair()
    holder.server.serve(theirs)
    ours.sendall(said)
    ours.shutdown(socket.SHUT_WR)
    assert ours.recv(1) == b""
    ours.close()
    link = holder.dial()
    assert give(link, "shared/1-1-0.data", b"state") == "send"
    link.close()


def test_somebody_without_the_secret_gets_nothing(holder: Holder) -> None:
    with pytest.raises(WireError):
        dial_copies(holder.port.address, Secret(b"another secret!!"), "uid", 0)


def test_a_copier_brings_what_lacks_where_it_lacks(tmp_path, holder: Holder) -> None:
    store = LocalStore.open(tmp_path)
    files = {f"shared/{i}-1-0.data": 1_000 * i for i in range(1, 5)}
    for file, length in files.items():
        assert store.create(f"job/{file}", DATA[:length])
    own = MemoryShelf(1 << 20)
    looked_after = threading.Semaphore(0)
    copier = Copier(store, "job", own, holder.dial, looked_after.release)

    def complete(checkpoint_id: int) -> None:
        copier.completed(checkpoint_id, files)
        while copier.checkpoint_id < checkpoint_id:
            assert looked_after.acquire(timeout=10)

    copier.placed([1], "first")
    complete(1)
    assert own.files == holder.shelf.files == sorted(files)
    assert copier.missing_bytes == 0
    holder.shelf.forget("shared/3-1-0.data")  # as a replaced worker, which has none
    holder.shelf.forget("shared/4-1-0.data")
    store.delete("job/shared/4-1-0.data")
    own.forget("shared/4-1-0.data")
    copier.placed([1], "second")
    complete(2)
    assert holder.shelf.files == ["shared/1-1-0.data", "shared/2-1-0.data", "shared/3-1-0.data"]
    assert copier.missing_bytes == 4_000
    copier.close()


@pytest.mark.parametrize("seed", range(20))
def test_holders_are_others_even_and_on_other_machines(seed: int) -> None:
    dice = random.Random(seed)
    slots, copies = dice.randrange(1, 12), dice.randrange(0, 4)
    hosts = [f"host-{dice.randrange(1, 5)}" for _ in range(slots)]
    chosen = choose_holders(hosts, copies)
    for slot, holders in enumerate(chosen):
        assert len(holders) == len(set(holders)) == min(copies, slots - 1)
        assert slot not in holders
        elsewhere = {hosts[other] for other in range(slots)} - {hosts[slot]}
        assert len({hosts[other] for other in holders} - {hosts[slot]}) == min(len(elsewhere), len(holders))
