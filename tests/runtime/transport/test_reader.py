"""Frames read from a stream, however it is cut."""

from __future__ import annotations

import pytest

from cutwater.errors import WireError
from cutwater.protocol.wire import CUT, FINAL, IDLE, Header, Kind, encode_header
from frame_streams import frames_of

LIMIT = 1 << 20
BARRIER = Header(Kind.BARRIER, FINAL | CUT, 1, 2, 3, first_row=77)
CONTROL = [
    Header(Kind.WATERMARK, IDLE, 1, 2, 3, watermark=-(2**63)),
    BARRIER,
    Header(Kind.END, 0, 1, 2, 3, first_row=1000),
    Header(Kind.CREDIT, 0, 1, 2, 3, first_row=8),
    Header(Kind.GOODBYE),
    Header(Kind.ORDER, order_log_length=3),
]


@pytest.mark.parametrize("size", [1, 2, 7, 40, 41, 1000])
@pytest.mark.parametrize("body", [20, 20_000])
def test_frames_come_out_whole_however_the_stream_is_cut(size: int, body: int) -> None:
    headers = [Header(Kind.ROWS, 0, 1, 0, 1, 10 * i, 10, i, 3, body + i) for i in range(5)] + CONTROL
    whole = [(h, b"log"[: h.order_log_length], b"b" * h.body_length) for h in headers]
    stream = b"".join(encode_header(h) + log + content for h, log, content in whole)
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert frames_of(pieces, max_frame_bytes=LIMIT) == (whole, None)


@pytest.mark.parametrize("body", [2, 20_000])
def test_a_stream_may_only_end_between_frames(body: int) -> None:
    begun = encode_header(Header(Kind.ROWS, rows=1, body_length=body)) + b"b"
    frames, error = frames_of([begun], max_frame_bytes=LIMIT)
    assert not frames
    assert "in the middle of a frame" in str(error)
    assert frames_of([], max_frame_bytes=LIMIT) == ([], None)


def test_frames_before_the_error_are_delivered_and_none_after_it() -> None:
    good = encode_header(BARRIER)
    frames, error = frames_of([good + bytes(40) + good], max_frame_bytes=LIMIT)
    assert frames == [(BARRIER, b"", b"")]
    assert isinstance(error, WireError)
