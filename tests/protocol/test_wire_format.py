"""Frames and control messages as bytes."""

from __future__ import annotations

import struct

import pytest

from cutwater.errors import WireError
from cutwater.protocol.wire import (
    CUT,
    FINAL,
    HEADER_BYTES,
    IDLE,
    ControlDecoder,
    Header,
    Kind,
    decode_header,
    encode_control,
    encode_header,
)

LIMIT = 1 << 20

VALID = [
    Header(Kind.ROWS, 0, 65535, 1, 2, 2**62, 2**32 - 1, -5, 0, 100),
    Header(Kind.ROWS, 0, 0, 0, 0, 0, 1, 2**63 - 1, 24, LIMIT - 24),
    Header(Kind.WATERMARK, IDLE, 1, 2, 3, watermark=-(2**63)),
    Header(Kind.BARRIER, FINAL | CUT, 1, 2, 3, first_row=77),
    Header(Kind.END, 0, 1, 2, 3, first_row=1000),
    Header(Kind.CREDIT, 0, 1, 2, 3, first_row=8),
    Header(Kind.GOODBYE),
    Header(Kind.ORDER, order_log_length=3),
]

INVALID = {
    "kind 0": Header(0),
    "kind 9": Header(9),
    "flag of another kind": Header(Kind.ROWS, IDLE, rows=1, body_length=8),
    "unknown flag": Header(Kind.BARRIER, 128),
    "rows without rows": Header(Kind.ROWS, body_length=8),
    "rows without body": Header(Kind.ROWS, rows=1),
    "row numbers that overflow": Header(Kind.ROWS, first_row=2**63 - 1, rows=1, body_length=8),
    "body above the limit": Header(Kind.ROWS, rows=1, body_length=LIMIT + 1),
    "body of 2**64 - 1": Header(Kind.ROWS, rows=1, body_length=2**64 - 1),
    "determinant log above the limit": Header(Kind.ROWS, rows=1, body_length=LIMIT, order_log_length=1),
    "watermark with a body": Header(Kind.WATERMARK, body_length=1),
    "watermark with a number": Header(Kind.WATERMARK, first_row=1),
    "barrier with a watermark": Header(Kind.BARRIER, first_row=1, watermark=0),
    "barrier with rows": Header(Kind.BARRIER, first_row=1, rows=1),
    "checkpoint id above i64": Header(Kind.BARRIER, first_row=2**63),
    "credit with a determinant log": Header(Kind.CREDIT, first_row=8, order_log_length=1),
    "goodbye with a determinant log": Header(Kind.GOODBYE, order_log_length=1),
    "determinant log with a body": Header(Kind.ORDER, order_log_length=1, body_length=1),
    "credit of 0": Header(Kind.CREDIT),
    "credit beyond reason": Header(Kind.CREDIT, first_row=2**21),
    "goodbye with a number": Header(Kind.GOODBYE, first_row=1),
}


def test_the_layout_is_little_endian_and_40_bytes() -> None:
    data = encode_header(Header(Kind.ROWS, 0, 0x0102, 0x0304, 0x0506, 7, 8, -9, 10, 11))
    assert data == (
        b"\x01\x00\x02\x01\x04\x03\x06\x05"
        + (7).to_bytes(8, "little")
        + (8).to_bytes(4, "little")
        + (-9).to_bytes(8, "little", signed=True)
        + (10).to_bytes(4, "little")
        + (11).to_bytes(8, "little")
    )
    assert len(data) == HEADER_BYTES == 40


@pytest.mark.parametrize("header", VALID, ids=lambda h: Kind(h.kind).name)
def test_a_valid_header_survives(header: Header) -> None:
    assert decode_header(b"xy" + encode_header(header), max_frame_bytes=LIMIT, offset=2) == header


@pytest.mark.parametrize("header", INVALID.values(), ids=INVALID.keys())
def test_a_field_out_of_range_or_out_of_place_is_refused(header: Header) -> None:
    with pytest.raises(WireError):
        decode_header(encode_header(header), max_frame_bytes=LIMIT)


def test_a_field_that_does_not_fit_is_refused_when_encoding() -> None:
    with pytest.raises(WireError, match="does not fit"):
        encode_header(Header(Kind.ROWS, edge=65536))


def test_a_short_header_is_refused() -> None:
    with pytest.raises(WireError, match="40 bytes, got 39"):
        decode_header(encode_header(VALID[0])[:39], max_frame_bytes=LIMIT)


@pytest.mark.parametrize("size", [1, 3, 5, 100])
def test_control_messages_come_out_whole_however_the_stream_is_cut(size: int) -> None:
    bodies = [b"x" * n for n in (1, 2, 100, 5)]
    stream = b"".join(encode_control(body) for body in bodies)
    decoder, out = ControlDecoder(max_message_bytes=100), []
    for start in range(0, len(stream), size):
        decoder.feed(stream[start : start + size])
        while (body := decoder.next_message()) is not None:
            out.append(body)
    assert out == bodies
    assert not decoder._data


@pytest.mark.parametrize("length", [0, 101, 2**32 - 1])
def test_a_control_message_out_of_bounds_is_refused_for_good(length: int) -> None:
    decoder = ControlDecoder(max_message_bytes=100)
    decoder.feed(struct.pack("<I", length) + b"x")
    for _ in range(2):
        with pytest.raises(WireError, match=f"announces {length} bytes"):
            decoder.next_message()
    with pytest.raises(WireError):
        decoder.feed(b"x")


@pytest.mark.parametrize("body", [b"", b"x" * 11])
def test_a_control_message_out_of_bounds_is_not_sent(body: bytes) -> None:
    with pytest.raises(WireError, match="1 to 10 bytes"):
        encode_control(body, max_message_bytes=10)
