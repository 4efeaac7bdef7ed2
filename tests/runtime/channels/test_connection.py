"""One connection: many channels, faults of the peer, closing."""

from __future__ import annotations

import datetime
import decimal
import random
import socket
import threading

import pyarrow as pa
import pytest
from wire_ends import NUMBERS, Ends, batch, receiving, sending, until

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import BuildError, DataError, InvariantError
from cutwater.plan.graph import Channel
from cutwater.protocol.channel.items import Barrier, Rows
from cutwater.protocol.channel.receiving import EMPTY, ReceivingEnd
from cutwater.protocol.wire import Header, Kind, Peer, encode_header
from cutwater.runtime.channels.connection import Connection
from cutwater.runtime.channels.output import OutputChannel
from cutwater.runtime.transport.sockets import Signal

KEY = Channel(0, 1, 0)


def rows_frame(first: int, rows: int, key: Channel = KEY, watermark: int = 0) -> bytes:
    body = batch(first, rows).serialize().to_pybytes()
    return encode_header(Header(Kind.ROWS, 0, *key, first, rows, watermark, 0, len(body))) + body


def values(inp: ReceivingEnd) -> list[int]:
    taken = []
    while inp.head() != EMPTY:
        item = inp.take(1 << 30)
        if isinstance(item, Rows):
            taken += item.batch.column(0).to_pylist()
    return taken


# -- data


def test_values_of_every_type_survive(ends: Ends) -> None:
    moment = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
    table = {
        "null": pa.nulls(7),
        "bool": pa.array([True, None, False, True, True, None, False]),
        "i8": pa.array([1, None, -128, 127, 0, 5, 6], pa.int8()),
        "u64": pa.array([1, None, 2**64 - 1, 0, 1, 2, 3], pa.uint64()),
        "f64": pa.array([1.5, None, float("inf"), -0.0, 1e-300, 2.0, 3.0]),
        "text": pa.array(["a", None, "", "päivää", "x" * 1000, "e", "f"]),
        "large_text": pa.array(["a", None, "", "b", "c", "d", "e"], pa.large_string()),
        "bytes": pa.array([b"\x00", None, b"", b"b", b"c", b"d", b"e"]),
        "decimal": pa.array([decimal.Decimal("1.25"), None] + [decimal.Decimal("-9.75")] * 5, pa.decimal128(10, 2)),
        "time": pa.array([moment, None] + [moment] * 5, pa.timestamp("us", "UTC")),
        "date": pa.array([moment.date(), None] + [moment.date()] * 5, pa.date32()),
        "list": pa.array([[1, 2], None, [], [None], [3], [4], [5]], pa.list_(pa.int32())),
        "fixed": pa.array([[1, 2], None, [3, 4], [5, 6], [7, 8], [9, 10], [None, 1]], pa.list_(pa.int16(), 2)),
        "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": None}] + [{"a": 2, "b": "y"}] * 4),
        "map": pa.array([[("k", 1)], None, []] + [[("k", 2), ("l", None)]] * 4, pa.map_(pa.string(), pa.int64())),
    }
    whole = pa.record_batch(table)
    left, right = ends.joined()
    out = sending(left, KEY, whole.schema, batch_rows=1)
    inp = receiving(right, KEY, whole.schema)
    ends.start()
    for part in (whole, whole.slice(1, 3), whole.slice(6, 1)):
        out.offer(part)
        for row in range(part.num_rows):
            until(lambda: inp.head() != EMPTY)
            got = inp.take(1).batch
            got.validate(full=True)
            assert str(got.to_pylist()) == str(part.slice(row, 1).to_pylist())


def test_a_slice_does_not_carry_the_whole_batch_it_was_cut_from(ends: Ends) -> None:
    left, peer = ends.half()
    schema = pa.schema([("n", pa.int64()), ("t", pa.string()), ("l", pa.list_(pa.int64()))])
    parent = pa.record_batch([range(50_000), ["text"] * 50_000, [[1, 2]] * 50_000], schema=schema)
    out = sending(left, KEY, schema, batch_rows=10)
    ends.start()
    peer.sendall(encode_header(Header(Kind.CREDIT, 0, *KEY, first_row=1)))
    out.offer(parent.slice(20_000, 10))
    until(lambda: peer.recv(1 << 20, socket.MSG_PEEK))
    assert len(peer.recv(1 << 20)) < 2000


def test_frames_larger_than_every_buffer_arrive(ends: Ends) -> None:
    left, right = ends.joined()
    out, inp = sending(left, KEY, NUMBERS, batch_rows=200_000), receiving(right, KEY, NUMBERS)
    ends.start()
    for first in range(0, 600_000, 200_000):
        out.offer(batch(first, 200_000))
    for first in range(0, 600_000, 200_000):
        until(lambda: inp.head() != EMPTY)
        assert inp.take(1 << 30).batch.equals(batch(first, 200_000))


@pytest.mark.parametrize("size", [1, 97, 5000, 16_385])
def test_frames_are_read_whole_however_the_stream_is_cut(ends: Ends, size: int) -> None:
    connection, peer = ends.half()
    inp = receiving(connection, KEY, NUMBERS, 1000)
    ends.start()
    chance, stream, total = random.Random(size), b"", 0
    while len(stream) < (5_000 if size == 1 else 200_000):
        rows = chance.choice([1, 10, 500, 2000, 2030, 2040, 2100, 5000])
        stream += rows_frame(total, rows)
        total += rows
    for start in range(0, len(stream), size):
        peer.sendall(stream[start : start + size])
    until(lambda: inp.queued_rows == total or ends.lost)
    assert values(inp) == list(range(total))


def test_a_batch_above_the_frame_limit_is_split(ends: Ends) -> None:
    left, right = ends.joined(max_frame_bytes=4096)
    out, inp = sending(left, KEY, NUMBERS, batch_rows=1000), receiving(right, KEY, NUMBERS, 100)
    ends.start()
    out.offer(batch(0, 1000))
    until(lambda: inp.queued_rows == 1000)
    assert values(inp) == list(range(1000))


def test_a_row_above_the_frame_limit_is_refused_with_the_setting_to_change(ends: Ends) -> None:
    left, right = ends.joined(max_frame_bytes=4096)
    schema = pa.schema([("t", pa.string())])
    out, _ = sending(left, KEY, schema, batch_rows=2), receiving(right, KEY, schema)
    ends.start()
    until(lambda: out._end._credit)
    with pytest.raises(DataError, match="Raise max_frame_bytes"):
        out.offer(pa.record_batch([["x" * 5000]], schema=schema))


def test_a_schema_that_does_not_travel_is_refused(ends: Ends) -> None:
    left, _ = ends.joined()
    coded = pa.schema([("c", pa.dictionary(pa.int32(), pa.string()))])
    with pytest.raises(BuildError, match=r"column 'c' of an edge is dictionary.*, rows travel as string"):
        sending(left, KEY, coded)


def test_a_blocked_full_channel_does_not_hold_up_its_neighbour(ends: Ends) -> None:
    left, right = ends.joined()
    keys = [Channel(0, 0, 1), Channel(1, 0, 1)]
    outs = [sending(left, k, NUMBERS, batch_rows=10) for k in keys]
    inps = [receiving(right, k, NUMBERS, 2) for k in keys]
    ends.start()
    inps[0].block()
    for first in range(0, 200, 10):
        outs[0].offer(batch(first, 10))
    until(lambda: inps[0].queued_frames == 2)
    sent, taken = 0, []
    while len(taken) < 1000:
        if sent < 1000 and not outs[1].full:
            outs[1].offer(batch(sent, 10))
            sent += 10
        taken += values(inps[1])
    assert taken == list(range(1000))
    assert (outs[0].full, inps[0].queued_frames) == (True, 2)


def test_channels_of_both_directions_with_a_thread_each_lose_nothing(ends: Ends) -> None:
    """Senders in several threads share the writer; every receiver checks its own numbers."""
    total, results = 20_000, {}
    arrived, room = [Signal() for _ in range(4)], [Signal() for _ in range(4)]
    pairs: list[tuple[Channel, OutputChannel, ReceivingEnd]] = []
    sides = ends.joined()
    for edge in range(4):
        side = edge % 2
        key = Channel(edge, side, 1 - side)
        out = sending(sides[side], key, NUMBERS, batch_rows=64, on_ready=room[edge].set)
        pairs.append((key, out, receiving(sides[1 - side], key, NUMBERS, 3, arrived[edge].set)))

    def send(key: Channel, out: OutputChannel) -> None:
        chance = random.Random(key.edge)
        while out.next_row < total:
            if out.full:
                room[key.edge].wait(20)
            else:
                out.offer(batch(out.next_row, chance.choice([1, 5, 40, 100, 3000])))
        out.offer_end()

    def receive(key: Channel, inp: ReceivingEnd) -> None:
        got = []
        while not inp.ended:
            if inp.head() == EMPTY:
                arrived[key.edge].wait(20)
                continue
            item = inp.take(500)
            if isinstance(item, Rows):
                got += item.batch.column(0).to_pylist()
        results[key] = got == list(range(len(got))) and len(got) >= total

    ends.start()
    threads = [threading.Thread(target=send, args=(k, out)) for k, out, _ in pairs]
    threads += [threading.Thread(target=receive, args=(k, inp)) for k, _, inp in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {key: True for key, _, _ in pairs}
    assert not ends.lost


def test_channels_are_made_once_and_before_the_start(ends: Ends) -> None:
    left, _ = ends.joined()
    receiving(left, KEY, NUMBERS)
    with pytest.raises(InvariantError, match="made twice"):
        receiving(left, KEY, NUMBERS)
    ends.start()
    with pytest.raises(InvariantError, match="before the connection starts"):
        receiving(left, Channel(1, 1, 0), NUMBERS)
    with pytest.raises(InvariantError, match="start after start"):
        left.start(lambda *_: None)


# -- a peer that breaks the rules: it is lost, with a reason, and nothing after the mistake is delivered

MISTAKES = {
    "garbage": (b"\xee" * 64, "unknown kind of frame 238"),
    "unknown channel": (rows_frame(10, 1, Channel(9, 1, 0)), "unknown channel"),
    "credit for an unknown channel": (
        encode_header(Header(Kind.CREDIT, 0, *KEY, first_row=1)),
        "credit for an unknown",
    ),
    "a gap": (rows_frame(11, 1), "row 10 is missing"),
    "wrong number of rows": (
        encode_header(Header(Kind.ROWS, 0, *KEY, 10, 2, 0, 0, batch(0, 1).serialize().size))
        + batch(0, 1).serialize().to_pybytes(),
        "announces 2 rows, its body has 1",
    ),
    "a body that is no batch": (
        encode_header(Header(Kind.ROWS, 0, *KEY, 10, 1, 0, 0, 64)) + b"\x01" * 64,
        "cannot be read",
    ),
    "a determinant log": (
        encode_header(Header(Kind.ROWS, 0, *KEY, 10, 1, 0, 4, 8)) + b"x" * 12,
        "determinant log was not agreed",
    ),
    "an early end": (encode_header(Header(Kind.END, 0, *KEY, first_row=12)), "ended after 12 rows, 10 arrived"),
    "rows after the end": (encode_header(Header(Kind.END, 0, *KEY, first_row=10)) + rows_frame(10, 1), "after the end"),
    "a frame after the goodbye": (encode_header(Header(Kind.GOODBYE)) + rows_frame(10, 1), "follows the goodbye"),
    "more than its credit": (b"".join(rows_frame(n, 1) for n in range(10, 15)), "all 3 places are taken"),
    "too large": (encode_header(Header(Kind.ROWS, 0, *KEY, 10, 1, 0, 0, 1 << 21)), "allowed are 1048576"),
}


@pytest.mark.parametrize(("data", "reason"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_peer_that_breaks_the_protocol_is_lost_and_nothing_after_it_is_delivered(
    ends: Ends, data: bytes, reason: str
) -> None:
    connection, peer = ends.half(max_frame_bytes=1 << 20)
    inp = receiving(connection, KEY, NUMBERS, 3)
    ends.start()
    with_later = rows_frame(0, 10) + data + rows_frame(10, 5, watermark=99)
    peer.sendall(with_later)
    message = ends.reason()
    assert message.startswith("lost worker 1: ")
    assert reason in message
    assert not {10, 11, 12, 13, 14}.issubset(values(inp))
    assert inp.watermark == 0
    assert len(ends.lost) == 1


@pytest.mark.parametrize("cut", [1, 39, 40, 41, 100])
def test_a_peer_that_dies_in_the_middle_of_a_frame_is_lost(ends: Ends, cut: int) -> None:
    connection, peer = ends.half()
    inp = receiving(connection, KEY, NUMBERS)
    ends.start()
    peer.sendall(rows_frame(0, 5) + rows_frame(5, 5)[:cut])
    peer.shutdown(socket.SHUT_WR)
    assert "in the middle of a frame" in ends.reason()
    assert values(inp) == [0, 1, 2, 3, 4]


def test_a_peer_that_dies_in_the_middle_of_a_large_body_is_lost(ends: Ends) -> None:
    connection, peer = ends.half()
    inp = receiving(connection, KEY, NUMBERS)
    ends.start()
    data = rows_frame(0, 100_000)
    peer.sendall(data[: len(data) // 2])
    peer.shutdown(socket.SHUT_WR)
    assert "bytes of it came" in ends.reason()
    assert inp.head() == EMPTY


def test_an_end_of_stream_without_goodbye_is_a_lost_peer(ends: Ends) -> None:
    _, peer = ends.half()
    ends.start()
    peer.close()
    assert "without a goodbye" in ends.reason()


def test_a_peer_that_is_gone_is_noticed_when_sending(ends: Ends) -> None:
    connection, peer = ends.half()
    out = sending(connection, KEY, NUMBERS, batch_rows=10)
    ends.start()
    peer.sendall(encode_header(Header(Kind.CREDIT, 0, *KEY, first_row=1000)) + encode_header(Header(Kind.GOODBYE)))
    until(lambda: connection._peer_left)
    peer.close()
    sent = 0
    while not ends.lost and sent < 1000:
        out.offer(batch(sent, 10))
        sent += 10
    assert "the connection broke" in ends.reason()
    out.offer(batch(sent, 10))  # goes nowhere: the loss was reported
    assert len(ends.lost) == 1


def test_a_wake_up_that_fails_is_reported_not_swallowed(ends: Ends) -> None:
    connection, peer = ends.half()

    def fail() -> None:
        raise KeyError("oops")

    receiving(connection, KEY, NUMBERS, 3, fail)
    ends.start()
    peer.sendall(rows_frame(0, 1))
    assert "KeyError: 'oops'" in ends.reason()


# -- closing


def test_a_polite_close_delivers_everything_and_nobody_is_lost(ends: Ends) -> None:
    left, right = ends.joined()
    out, inp = sending(left, KEY, NUMBERS, batch_rows=50_000), receiving(right, KEY, NUMBERS, 8)
    ends.start()
    until(lambda: out._end._credit == 8)
    for first in range(0, 400_000, 50_000):
        out.offer(batch(first, 50_000))
    out.offer_end()
    closing = threading.Thread(target=left.close, args=(10.0,))
    closing.start()
    until(lambda: right._peer_left)
    right.close(10.0)
    closing.join(20)
    assert values(inp) == list(range(400_000))
    assert inp.ended
    assert not ends.lost


def test_a_polite_close_waits_for_a_slow_reader(ends: Ends) -> None:
    connection, peer = ends.half()
    out = sending(connection, KEY, NUMBERS, batch_rows=100_000)
    ends.start()
    peer.sendall(encode_header(Header(Kind.CREDIT, 0, *KEY, first_row=50)))
    until(lambda: out._end._credit == 50)
    for first in range(0, 1_000_000, 100_000):
        out.offer(batch(first, 100_000))
    closing = threading.Thread(target=connection.close, args=(20.0,))
    closing.start()
    received = b""
    while data := peer.recv(1 << 20):
        received += data
    peer.close()
    closing.join(20)
    expected = b"".join(rows_frame(n, 100_000, watermark=MIN_WATERMARK) for n in range(0, 1_000_000, 100_000))
    assert received == expected + encode_header(Header(Kind.GOODBYE))


def test_closing_while_full_ends_at_once(ends: Ends) -> None:
    left, right = ends.joined()
    out, inp = sending(left, KEY, NUMBERS, batch_rows=10), receiving(right, KEY, NUMBERS, 1)
    ends.start()
    inp.block()
    for first in range(0, 100, 10):
        out.offer(batch(first, 10))
    assert out.full
    left.close()
    left.close()
    assert "without a goodbye" in ends.reason()
    out.grant(100)  # late credit of a closed connection
    right.close()


def test_closing_while_the_socket_takes_nothing_ends_at_once(ends: Ends) -> None:
    """The writer's thread sleeps in a system call, because the peer reads nothing."""
    connection, peer = ends.half()
    out = sending(connection, KEY, NUMBERS, batch_rows=100_000)
    ends.start()
    peer.sendall(encode_header(Header(Kind.CREDIT, 0, *KEY, first_row=50)))
    until(lambda: out._end._credit == 50)
    for first in range(0, 2_000_000, 100_000):
        out.offer(batch(first, 100_000))
    connection.close(flush_s=0.05)
    assert not ends.lost


def test_close_may_be_called_from_on_lost(ends: Ends) -> None:
    a, b = socket.socketpair()
    connection, closed = Connection(a, Peer("data", "job", 1)), threading.Event()
    connection.start(lambda c, _: (c.close(), closed.set()))
    b.close()
    assert closed.wait(20)
    connection.close()


def test_a_sender_that_notices_the_loss_is_not_the_one_who_reports_it(ends: Ends) -> None:
    """The sending thread holds the channel's lock: closing in ``on_lost`` would wait for a reader that wants it."""
    a, b = socket.socketpair()
    connection, reporters = Connection(a, Peer("data", "job", 1)), []
    out = sending(connection, KEY, NUMBERS)
    b.shutdown(socket.SHUT_RD)  # sending fails, reading goes on

    def lost(connection: Connection, _: Exception) -> None:
        connection.close()
        reporters.append(threading.current_thread().name)

    connection.start(lost)
    out.offer_barrier(1)
    until(lambda: reporters)
    assert reporters == ["cutwater-write-1"]
    b.close()


def test_a_connection_that_never_started_closes() -> None:
    a, b = socket.socketpair()
    Connection(a, Peer("data", "job", 1)).close(1.0)
    assert b.recv(1) == b""
    b.close()


def test_a_barrier_passes_a_socket_full_of_other_channels_frames_in_order(ends: Ends) -> None:
    left, right = ends.joined()
    out, inp = sending(left, KEY, NUMBERS, batch_rows=10), receiving(right, KEY, NUMBERS, 4)
    ends.start()
    for checkpoint in range(1, 200):
        out.offer_barrier(checkpoint, final=checkpoint == 199)
    until(lambda: inp.queued_frames == 199)
    assert [inp.take(1) for _ in range(199)] == [Barrier(n, n == 199) for n in range(1, 200)]
