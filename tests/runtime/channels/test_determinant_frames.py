"""News of determinant logs on a connection: before whatever depends on them, once, and first of all when it begins."""

from __future__ import annotations

import threading

import pytest
from wire_ends import NUMBERS, Ends, batch, receiving, sending, until

from cutwater.plan.graph import Channel
from cutwater.protocol.channel.items import Item
from cutwater.protocol.channel.receiving import ROWS
from cutwater.protocol.wire import Header, Kind, encode_header
from cutwater.runtime.channels import connection as net_connection
from cutwater.runtime.control.determinant_logs import DeterminantLogs

KEY = Channel(0, 1, 0)
SUBTASK = (4, 1)


def sharing(ends: Ends, **settings: int) -> tuple[DeterminantLogs, DeterminantLogs]:
    left, right = ends.joined(**settings)
    there, here = DeterminantLogs(), DeterminantLogs()
    there.begin([SUBTASK], 0)
    here.begin([(4, 0)], 0)
    left.share(here.peer(1))
    right.share(there.peer(0))
    return there, here


def test_the_first_frame_says_all_that_is_known(ends: Ends) -> None:
    there, here = sharing(ends)
    there.append(SUBTASK, b"before the beginning")
    ends.start()
    until(lambda: here.log_of(SUBTASK, 0))
    assert here.log_of(SUBTASK, 0) == b"before the beginning"
    assert here.await_first({1}, lambda: None, 20)


@pytest.mark.parametrize("size", [1, 100, 8_000, 9_000, 100_000], ids=lambda size: f"{size} bytes")
def test_a_choice_is_known_before_the_rows_that_come_of_it(ends: Ends, size: int) -> None:
    there, here = sharing(ends)
    inp = receiving(ends.connections[0], KEY, NUMBERS)
    out = sending(ends.connections[1], KEY, NUMBERS)
    known: list[int] = []

    class Noting(type(inp)):  # type: ignore[misc]
        __slots__ = ()

        def put(self, item: Item) -> None:
            known.append(len(here.log_of(SUBTASK, 0)))
            super().put(item)

    inp.__class__ = Noting
    ends.start()
    until(lambda: out._end._credit)
    for n in range(1, 6):
        there.append(SUBTASK, b"x" * size)
        out.offer(batch(10 * n - 10, 10))
        out.flush()
        until(lambda: inp.head() == ROWS)
        inp.take(100)
    assert known == [size * n for n in range(1, 6)]
    assert not ends.lost


def test_frames_without_news_have_no_order_log(ends: Ends) -> None:
    connection, peer = ends.half()
    news = DeterminantLogs()
    news.begin([SUBTASK], 0)
    connection.share(news.peer(1))
    out = sending(connection, KEY, NUMBERS, credit=10)
    ends.start()
    out.offer_watermark(5)
    out.flush()
    data = b""
    while len(data) < 80:
        data += peer.recv(1 << 16)
    first = Header(Kind.ORDER, order_log_length=len(data) - 80)
    assert data[:40] == encode_header(first)
    assert data[-40:] == encode_header(Header(Kind.WATERMARK, 0, *KEY, watermark=5))


def test_a_peer_that_was_not_asked_for_news_is_lost(ends: Ends) -> None:
    _, peer = ends.half()
    ends.start()
    peer.sendall(encode_header(Header(Kind.ORDER, order_log_length=3)) + b"abc")
    assert "was not agreed upon" in ends.reason()


def test_an_order_log_of_a_frame_may_come_in_pieces(ends: Ends) -> None:
    connection, peer = ends.half()
    news = DeterminantLogs()
    connection.share(news.peer(1))
    ends.start()
    log = b"\x04\x01\x00\x03abc\x01\x00\x00"
    frame = encode_header(Header(Kind.WATERMARK, 0, *KEY, watermark=5, order_log_length=len(log))) + log
    for byte in frame[:-1]:
        peer.sendall(bytes([byte]))
    assert not news.log_of(SUBTASK, 0)
    peer.sendall(frame[-1:])
    until(lambda: news.log_of(SUBTASK, 0))
    assert news.log_of(SUBTASK, 0) == b"abc"


def test_nothing_is_heard_after_hanging_up_not_even_what_has_come(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net_connection, "JOIN_S", 0.0)
    connection, peer = ends.half()
    news, at_work, go_on = DeterminantLogs(), threading.Event(), threading.Event()
    connection.share(news.peer(1))

    def busy() -> None:
        at_work.set()
        go_on.wait(20)

    receiving(connection, KEY, NUMBERS, on_ready=busy)
    for start, entries in ((0, b"abc"), (3, b"def")):
        log = bytes([*SUBTASK, start, 3]) + entries + (b"\x01\x00\x00" if not start else b"\x00")
        peer.sendall(
            encode_header(Header(Kind.WATERMARK, 0, *KEY, watermark=5 + start, order_log_length=len(log))) + log
        )
    ends.start()
    assert at_work.wait(20)
    connection.close()
    go_on.set()
    connection._reader.join(20)
    assert news.log_of(SUBTASK, 0) == b"abc"
    assert not ends.lost
