"""Mutated and random bytes: a reader raises ``WireError`` and nothing else, delivers nothing after it, and allocates
no more than arrived."""

from __future__ import annotations

import random
import tracemalloc

import pyarrow as pa
import pytest

from cutwater.errors import WireError
from cutwater.protocol.wire import (
    HEADER_BYTES,
    ClientHandshake,
    ControlDecoder,
    Handshake,
    Header,
    Kind,
    Peer,
    ServerHandshake,
    decode_header,
    encode_control,
    encode_header,
)
from cutwater.runtime.channels.connection import decode_rows
from frame_streams import Frame, frames_of

LIMIT = 1 << 16
SCHEMA = pa.schema([("n", pa.int64()), ("flag", pa.bool_())])


def some_frame(chance: random.Random, number: int) -> bytes:
    kind = chance.choice(list(Kind))
    if kind is Kind.ROWS:
        log, body = chance.randbytes(chance.randint(0, 9)), chance.randbytes(chance.randint(1, 60))
        header = Header(kind, 0, 1, 0, 1, number, 5, number, len(log), len(body))
        return encode_header(header) + log + body
    if kind is Kind.WATERMARK:
        return encode_header(Header(kind, chance.randint(0, 1), 1, 0, 1, watermark=number))
    if kind is Kind.ORDER:
        log = chance.randbytes(chance.randint(1, 9))
        return encode_header(Header(kind, order_log_length=len(log))) + log
    if kind is Kind.GOODBYE:
        return encode_header(Header(kind))
    return encode_header(Header(kind, 0, 1, 0, 1, first_row=number + 1))


def mutate(chance: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(out) + 1)
        match chance.randint(0, 4):
            case 0:
                out[at : at + 1] = chance.randbytes(1)
            case 1:
                del out[at : at + chance.randint(1, 50)]
            case 2:
                out[at:at] = chance.randbytes(chance.randint(1, 50))
            case 3:
                out[at : at + 8] = b"\xff" * 8
            case _:
                out = out[: max(1, at)]
        if not out:
            out += b"\x00"
    return bytes(out)


def pieces(chance: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randint(0, 6)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def reference(data: bytes) -> tuple[list[Frame], bool]:
    """Decoded in one go by slicing: the frames before the first error, and whether there is one."""
    frames, at = [], 0
    while len(data) - at >= HEADER_BYTES:
        try:
            header = decode_header(data[at : at + HEADER_BYTES], max_frame_bytes=LIMIT)
        except WireError:
            return frames, True
        middle = at + HEADER_BYTES + header.order_log_length
        end = middle + header.body_length
        if end > len(data):
            break
        frames.append((header, data[at + HEADER_BYTES : middle], data[middle:end]))
        at = end
    return frames, at < len(data)


def decode(parts: list[bytes]) -> tuple[list[Frame], bool]:
    frames, error = frames_of(parts, max_frame_bytes=LIMIT)
    assert error is None or isinstance(error, WireError)
    return frames, error is not None


@pytest.mark.parametrize("seed", range(4))
def test_5000_mutated_streams_give_the_frames_before_the_first_error_and_nothing_after_it(seed: int) -> None:
    chance = random.Random(seed)
    errors = 0
    for _ in range(5000):
        data = b"".join(some_frame(chance, n) for n in range(chance.randint(1, 6)))
        data = mutate(chance, data)
        got = decode(pieces(chance, data))
        assert got == reference(data)
        errors += got[1]
    assert 500 < errors < 4900, "both outcomes were tried"


def test_every_boundary_of_a_stream_is_a_fine_place_to_cut_it() -> None:
    chance = random.Random(7)
    data = b"".join(some_frame(chance, n) for n in range(12))
    whole, failed = reference(data)
    assert len(whole) == 12
    assert not failed
    for cut in range(len(data) + 1):
        assert decode([data[:cut], data[cut:]]) == (whole, False)


def test_random_bytes_are_refused_within_one_header() -> None:
    chance = random.Random(11)
    for _ in range(3000):
        assert decode([chance.randbytes(chance.choice([40, 41, 200]))]) == ([], True)


def test_an_announced_size_allocates_nothing() -> None:
    header = encode_header(Header(Kind.ROWS, rows=1, body_length=1 << 30))
    assert decode([header + b"x" * 100]) == ([], True)
    allocated = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        for _ in range(50):
            assert decode([header + b"x" * 100]) == ([], True)
        assert pa.total_allocated_bytes() - allocated < 1 << 20
        control = ControlDecoder(max_message_bytes=1 << 30)
        control.feed((1 << 30).to_bytes(4, "little") + b"x")
        assert control.next_message() is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_mutated_control_streams_raise_wire_errors_only() -> None:
    chance = random.Random(13)
    for _ in range(3000):
        data = mutate(chance, b"".join(encode_control(chance.randbytes(chance.randint(1, 30))) for _ in range(4)))
        decoder, total = ControlDecoder(max_message_bytes=64), 0
        try:
            for part in pieces(chance, data):
                decoder.feed(part)
                while (body := decoder.next_message()) is not None:
                    assert 0 < len(body) <= 64
                    total += len(body) + 4
        except WireError:
            with pytest.raises(WireError):
                decoder.next_message()
        assert total <= len(data)


def test_mutated_bodies_of_rows_are_refused_or_keep_their_shape() -> None:
    chance = random.Random(17)
    batch = pa.record_batch([list(range(20)), [True, None, False, True] * 5], schema=SCHEMA)
    body = batch.serialize().to_pybytes()
    header = Header(Kind.ROWS, 0, 1, 0, 1, 0, 20, 0, 0, len(body))
    refused = 0
    for _ in range(2000):
        damaged = mutate(chance, body)
        try:
            got = decode_rows(header, pa.py_buffer(damaged), SCHEMA)
        except WireError:
            refused += 1
            continue
        assert (got.num_rows, got.schema) == (20, SCHEMA)
        assert len(got.to_pylist()) == 20  # every value can be read
    assert refused > 500


def test_mutated_handshakes_never_succeed() -> None:
    chance = random.Random(19)
    client_id, server_id = Peer("data", "job", 0, 1), Peer("data", "job", 1, 1)
    outcomes = {"client": 0, "server": 0}
    for _ in range(3000):
        client: Handshake = ClientHandshake(bytes(32), client_id)
        server: Handshake = ServerHandshake(bytes(32), server_id)
        victim, name = chance.choice([(client, "client"), (server, "server")])
        damaged_at = chance.randint(0, 2)
        to_server, turn = client.start(), 0
        try:
            for _ in range(4):
                if victim is server and turn == damaged_at % 2:
                    original, to_server = to_server, mutate(chance, to_server)
                    if original == to_server:
                        break
                to_client = server.receive(to_server)
                if victim is client and turn == damaged_at % 2:
                    original, to_client = to_client, mutate(chance, to_client or b"x")
                    if original == to_client:
                        break
                to_server = client.receive(to_client)
                turn += 1
            else:
                assert not (client.done and server.done)
        except WireError:
            outcomes[name] += 1
    assert min(outcomes.values()) > 200
