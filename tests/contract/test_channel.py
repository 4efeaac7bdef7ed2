"""The channel contract: one suite for local channels and for remote ones (two connections joined by a socket).

Both also with a receiver that keeps nothing in memory: every row goes through its file.
"""

from __future__ import annotations

import math
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import CutwaterError, InvariantError, StorageError
from cutwater.plan.graph import Channel
from cutwater.protocol.channel.items import Barrier, End, Item, Rows, Watermark
from cutwater.protocol.channel.receiving import CONTROL, EMPTY, NO_LIMIT, ROWS, URGENT, ReceivingEnd
from cutwater.protocol.wire import Peer
from cutwater.runtime.channels import spill as net_spill
from cutwater.runtime.channels.connection import Connection
from cutwater.runtime.channels.output import OutputChannel
from cutwater.runtime.channels.spill import SpillingFrames

SCHEMA = pa.schema([("n", pa.int64())])
KEY = Channel(3, 0, 1)


def batch(first: int, rows: int) -> pa.RecordBatch:
    """Rows that carry their own number."""
    return pa.record_batch([pa.array(range(first, first + rows), pa.int64())], schema=SCHEMA)


def numbers(items: Any) -> list[int]:
    return [n for item in items if isinstance(item, Rows) for n in item.batch.column(0).to_pylist()]


def until(condition: Callable[[], Any]) -> None:
    """Wait for something that another thread is about to do; the limit only ends a hanging test."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not happen within 20 s"
        time.sleep(0.0005)


class Pair:
    """Both ends of a channel."""

    def __init__(self, kind: str) -> None:
        self.kind, _, spill = kind.partition("+")
        self.store = SpillingFrames(0) if spill else None
        """With it every row goes through a file."""
        self.errors: list[CutwaterError] = []
        self.connections: list[Connection] = []
        self.out: OutputChannel
        self.inp: ReceivingEnd
        self.output_wakeups = self.input_wakeups = self.highest_queue = 0

    def make(
        self,
        *,
        capacity: int = 4,
        batch_rows: int = 100,
        buffer_timeout_ms: float = 2.0,
        schema: pa.Schema = SCHEMA,
        output: dict[str, Any] | None = None,
        input: dict[str, Any] | None = None,
        before_start: Callable[[ReceivingEnd], None] = lambda inp: None,
    ) -> tuple[OutputChannel, ReceivingEnd]:
        sender: dict[str, Any] = dict(
            batch_rows=batch_rows, buffer_timeout_ms=buffer_timeout_ms, on_ready=self._output_ready, **(output or {})
        )
        receiver = input or {}
        if self.kind == "local":
            self.inp = ReceivingEnd(KEY, capacity, self._input_ready, store=self.store, **receiver)
            self.out = OutputChannel(KEY, schema, self.inp.put, **{"credit": capacity, **sender})
            self.inp.on_credit = self.out.grant
            before_start(self.inp)
        else:
            a, b = socket.socketpair()
            left = Connection(a, Peer("data", "job", 1))
            right = Connection(b, Peer("data", "job", 0))
            self.connections = [left, right]
            self.out = OutputChannel(KEY, schema, left.sender(KEY), **sender)
            left.add_output(self.out)
            receiver = {"credit_batch": max(1, capacity // 2), **receiver}
            self.inp = ReceivingEnd(KEY, capacity, self._input_ready, store=self.store, **receiver)
            right.add_input(self.inp, schema)
            before_start(self.inp)
            for connection in self.connections:
                connection.start(lambda _, error: self.errors.append(error))
            until(lambda: self.out._end._credit == capacity)  # so that tests of a full channel count the same in both
        return self.out, self.inp

    def _output_ready(self) -> None:
        self.output_wakeups += 1

    def _input_ready(self) -> None:
        self.input_wakeups += 1
        self.highest_queue = max(self.highest_queue, self.inp.queued_frames)

    def take(self, count: int, max_rows: int = 1 << 30) -> list[Item]:
        """That many items, waiting for them."""
        taken: list[Item] = []
        while len(taken) < count:
            until(lambda: self.inp.head() != EMPTY or self.errors)
            taken.append(self.inp.take(max_rows))
        return taken

    def take_rows(self, rows: int, max_rows: int = 1 << 30) -> list[Item]:
        """Items up to that many rows."""
        taken: list[Item] = []
        while len(numbers(taken)) < rows:
            taken += self.take(1, max_rows)
        return taken

    def fails(self, act: Callable[[], Any], says: str) -> None:
        """It goes wrong: locally in the call, remotely at the peer, whose error may come after that of our own end."""
        if self.kind == "local":
            with pytest.raises(CutwaterError) as caught:
                act()
            assert says in str(caught.value)
            return
        act()
        until(lambda: any(says in str(e) for e in self.errors))


@pytest.fixture(params=["local", "remote", "local+spill", "remote+spill"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    before = set(threading.enumerate())
    pair = Pair(request.param)
    yield pair
    for connection in pair.connections:
        connection.close()
    assert set(threading.enumerate()) <= before, "close leaves no thread"


# -- order and numbers


def test_rows_arrive_in_order_with_their_numbers(pair: Pair) -> None:
    out, inp = pair.make(batch_rows=50)
    chance, sent, taken = random.Random(1), 0, []
    while sent < 2000:
        if not out.full:
            rows = chance.choice([1, 3, 10, 30, 70, 120])
            out.offer(batch(sent, rows))
            sent += rows
        else:
            taken += pair.take(1, chance.choice([7, 40, 1000]))
    out.flush()
    taken += pair.take_rows(sent - len(numbers(taken)))
    assert numbers(taken) == list(range(sent))
    assert [i.first_row for i in taken] == [i.batch.column(0)[0].as_py() for i in taken]
    assert out.next_row == inp.next_row == sent


def test_a_large_batch_is_taken_in_slices_and_its_watermark_comes_with_the_last(pair: Pair) -> None:
    out, inp = pair.make(output={"watermark": 5}, input={"watermark": 5})
    out.offer_watermark(9)
    out.offer(batch(0, 100))
    items = pair.take(4, 30)
    assert [(i.first_row, i.batch.num_rows, i.watermark) for i in items] == [
        (0, 30, 5),
        (30, 30, 5),
        (60, 30, 5),
        (90, 10, 9),
    ]
    assert numbers(items) == list(range(100))
    assert (inp.watermark, inp.next_row, inp.head()) == (9, 100, EMPTY)


def test_the_rest_of_a_sliced_batch_stays_counted(pair: Pair) -> None:
    out, inp = pair.make()
    out.offer(batch(0, 100))
    pair.take(1, 30)
    assert (inp.queued_rows, inp.queued_frames, inp.next_row) == (70, 1, 30)
    inp.take(100)
    assert (inp.queued_rows, inp.queued_frames, inp.next_row) == (0, 0, 100)


def test_rows_below_the_wanted_number_are_dropped_or_sliced_off(pair: Pair) -> None:
    out, inp = pair.make(batch_rows=10, capacity=2, input={"next_row": 25, "watermark": 3})
    out.offer_watermark(7)
    for first in range(0, 60, 10):
        out.offer(batch(first, 10))
    taken = pair.take_rows(35)
    assert numbers(taken) == list(range(25, 60))
    assert next(i for i in taken if isinstance(i, Rows)).first_row == 25
    assert taken[0] == Watermark(7), "what a replayed frame says of time still holds"
    assert inp.next_row == 60


def test_missing_rows_are_an_error(pair: Pair) -> None:
    out, _ = pair.make(output={"next_row": 11}, input={"next_row": 10})
    pair.fails(lambda: out.offer(batch(11, 90)), "row 10 is missing, row 11 arrived")


def test_a_large_batch_is_sent_in_frames_of_the_configured_size(pair: Pair) -> None:
    out, _ = pair.make(batch_rows=100, capacity=20)
    out.offer(batch(0, 1050))
    items = pair.take_rows(1050)
    assert [i.batch.num_rows for i in items] == [100] * 10 + [50]
    assert numbers(items) == list(range(1050))


def test_a_batch_of_another_schema_is_refused(pair: Pair) -> None:
    out, _ = pair.make()
    with pytest.raises(InvariantError, match=r"\[m string\], the edge has \[n int64\]"):
        out.offer(pa.record_batch({"m": ["a"]}))


# -- the builder


def test_small_batches_travel_together(pair: Pair) -> None:
    out, inp = pair.make(batch_rows=100)
    for first in range(0, 90, 10):
        out.offer(batch(first, 10))
    assert inp.head() == EMPTY
    out.offer(batch(90, 10))
    (item,) = pair.take(1)
    assert (numbers([item]), item.first_row) == (list(range(100)), 0)


def test_a_batch_of_half_the_size_goes_at_once_after_what_waited(pair: Pair) -> None:
    out, _ = pair.make(batch_rows=100)
    out.offer(batch(0, 3))
    large = batch(3, 50)
    out.offer(large)
    small, passed = pair.take(2)
    assert (numbers([small]), numbers([passed])) == ([0, 1, 2], list(range(3, 53)))
    assert pair.kind == "remote" or pair.store or passed.batch is large, "in one process a batch goes by reference"


def test_the_builder_flushes_when_due_on_the_clock_of_the_loop(pair: Pair) -> None:
    out, inp = pair.make(buffer_timeout_ms=20)
    assert out.flush_if_due(100.0) == math.inf
    out.offer(batch(0, 1))
    assert out.flush_if_due(100.0) == pytest.approx(100.02)
    out.offer(batch(1, 1))
    assert out.flush_if_due(100.019) == pytest.approx(100.02)
    assert inp.head() == EMPTY
    assert out.flush_if_due(100.02) == math.inf
    assert numbers(pair.take(1)) == [0, 1]
    out.offer(batch(2, 1))
    assert out.flush_if_due(200.0) == pytest.approx(200.02), "the timeout starts anew"


def test_a_worker_that_rests_sends_what_waits_unless_frames_wait_for_credit(pair: Pair) -> None:
    out, inp = pair.make(capacity=1, batch_rows=10)
    assert not out.flush_idle()
    out.offer(batch(0, 2))
    assert inp.head() == EMPTY
    assert out.flush_idle()
    assert not out.flush_idle()
    out.offer(batch(2, 10))  # waits for credit
    out.offer(batch(12, 1))
    assert not out.flush_idle(), "a slow receiver gets fewer, larger batches"
    assert numbers(pair.take(2)) == list(range(12))
    until(lambda: not out.full)
    out.offer_watermark(7)
    assert out.flush_idle()
    (rows,) = pair.take(1)
    assert (numbers([rows]), rows.watermark) == ([12], 7)


def test_next_row_counts_rows_that_still_wait_in_the_builder(pair: Pair) -> None:
    out, _ = pair.make(output={"next_row": 40}, input={"next_row": 40})
    out.offer(batch(40, 3))
    assert out.next_row == 43
    out.flush()
    assert out.next_row == 43
    assert pair.take(1)[0].first_row == 40


def test_nothing_is_flushed_while_frames_wait_for_credit(pair: Pair) -> None:
    out, _ = pair.make(capacity=1, batch_rows=10)
    for first in (0, 10):
        out.offer(batch(first, 10))
    assert out.full
    for first in (20, 21, 22):
        out.offer(batch(first, 1))
        assert out.flush_if_due(1e9) == math.inf
    assert out.waiting_frames == 1
    pair.take(2)
    until(lambda: not out.full)
    out.flush_if_due(1.0)
    out.flush_if_due(2.0)
    assert numbers(pair.take(1)) == [20, 21, 22]


# -- watermarks


def test_a_watermark_rides_on_the_next_frame(pair: Pair) -> None:
    out, inp = pair.make()
    out.offer(batch(0, 5))
    out.offer_watermark(11)
    out.offer_watermark(12)
    assert inp.head() == EMPTY
    out.flush()
    (rows,) = pair.take(1)
    assert (rows.watermark, inp.watermark) == (12, 12)
    out.offer_barrier(1)
    assert pair.take(1) == [Barrier(1)], "it was not sent a second time"


def test_a_watermark_goes_alone_when_due_or_flushed(pair: Pair) -> None:
    out, inp = pair.make(buffer_timeout_ms=1)
    out.offer_watermark(11)
    out.flush_if_due(0.0)
    assert inp.head() == EMPTY
    out.flush_if_due(1.0)
    assert pair.take(1) == [Watermark(11)]
    out.offer_watermark(12)
    out.flush()
    assert pair.take(1) == [Watermark(12)]
    assert inp.watermark == 12


def test_a_repeated_watermark_is_not_sent(pair: Pair) -> None:
    out, _ = pair.make()
    for _ in range(3):
        out.offer_watermark(4)
        out.flush()
    out.offer_barrier(1)
    assert pair.take(2) == [Watermark(4), Barrier(1)]


def test_w4_rows_that_break_a_promise_keep_what_they_are_judged_by_and_lie_in_frames_of_their_own(pair: Pair) -> None:
    out, _ = pair.make(batch_rows=100)
    for first, late_before in (
        (0, MIN_WATERMARK),
        (5, MIN_WATERMARK),
        (10, 70),
        (15, 70),
        (20, 80),
        (25, MIN_WATERMARK),
    ):
        out.offer(batch(first, 5), late_before)
    out.flush()
    taken = pair.take(4)
    assert [(i.first_row, i.batch.num_rows, i.late_before) for i in taken] == [
        (0, 10, MIN_WATERMARK),
        (10, 10, 70),
        (20, 5, 80),
        (25, 5, MIN_WATERMARK),
    ]
    assert numbers(taken) == list(range(30))


def test_w4_slices_and_rows_sent_again_keep_what_they_are_judged_by(pair: Pair) -> None:
    out, inp = pair.make(input={"next_row": 4})
    out.offer(batch(0, 10), 70)
    out.flush()
    until(lambda: inp.head() == ROWS)
    taken = [inp.take(2), inp.take(2), inp.take(10)]
    assert [(i.first_row, i.batch.num_rows, i.late_before) for i in taken] == [(4, 2, 70), (6, 2, 70), (8, 2, 70)]


def test_a_falling_watermark_is_refused(pair: Pair) -> None:
    out, _ = pair.make()
    out.offer_watermark(4)
    with pytest.raises(InvariantError, match="fell from 4 to 3"):
        out.offer_watermark(3)


def test_a_watermark_never_falls_at_the_receiver(pair: Pair) -> None:
    out, inp = pair.make(input={"watermark": 50})
    out.offer_watermark(20)
    out.flush()
    assert pair.take(1) == [Watermark(50)]
    out.offer_watermark(30)
    out.offer(batch(0, 60))
    assert pair.take(1)[0].watermark == 50
    assert inp.watermark == 50


def test_idleness_comes_after_the_rows_before_it_and_ends_with_the_next_row(pair: Pair) -> None:
    out, inp = pair.make()
    out.offer(batch(0, 5))
    out.offer_watermark(7, idle=True)
    out.flush()
    assert not inp.idle
    rows, idle = pair.take(2)
    assert (rows.watermark, idle, inp.idle) == (7, Watermark(7, idle=True), True)
    out.offer(batch(5, 5))
    out.flush()
    pair.take(1)
    assert not inp.idle
    out.offer_watermark(7, idle=True)
    out.flush()
    assert (pair.take(1), inp.idle) == ([Watermark(7, idle=True)], True)


def test_rows_after_idleness_cancel_it_in_the_builder(pair: Pair) -> None:
    out, inp = pair.make()
    out.offer_watermark(7, idle=True)
    out.offer(batch(0, 5))
    out.offer_barrier(1)
    rows, barrier = pair.take(2)
    assert (rows.watermark, barrier, inp.idle) == (7, Barrier(1), False)


def test_watermarks_do_not_pile_up_at_a_receiver_that_does_not_take(pair: Pair) -> None:
    out, inp = pair.make(capacity=2)
    inp.block()
    for watermark in range(100):
        out.offer_watermark(watermark)
        out.flush()
    assert (out.waiting_frames, out.full) == (1, True)
    inp.unblock()
    assert pair.take(3) == [Watermark(0), Watermark(1), Watermark(99)]


def test_a_watermark_joins_rows_that_wait_for_credit(pair: Pair) -> None:
    out, _ = pair.make(capacity=1, batch_rows=10)
    out.offer(batch(0, 10))
    out.offer(batch(10, 10))
    out.offer_watermark(5)
    out.flush()
    assert out.waiting_frames == 1
    assert [i.watermark for i in pair.take(2)] == [MIN_WATERMARK, 5]


# -- credit


def test_the_queue_never_exceeds_the_capacity_and_the_rest_waits_at_the_sender(pair: Pair) -> None:
    out, inp = pair.make(capacity=3, batch_rows=10)
    for first in range(0, 100, 10):
        out.offer(batch(first, 10))
    assert (out.full, out.waiting_frames) == (True, 7)
    until(lambda: inp.queued_frames == 3)
    assert numbers(pair.take_rows(100)) == list(range(100))
    assert pair.highest_queue <= 3
    until(lambda: not out.full)


def test_a_full_channel_that_drains_wakes_the_sender(pair: Pair) -> None:
    out, _ = pair.make(capacity=1, batch_rows=10)
    out.offer(batch(0, 10))
    assert (out.full, pair.output_wakeups) == (False, 0)
    out.offer(batch(10, 10))
    assert (out.full, pair.output_wakeups) == (True, 0)
    pair.take(1)
    until(lambda: pair.output_wakeups == 1)
    assert not out.full


def test_a_partly_taken_frame_keeps_its_place(pair: Pair) -> None:
    out, inp = pair.make(capacity=1, batch_rows=10)
    out.offer(batch(0, 10))
    out.offer(batch(10, 10))
    pair.take(1, 9)
    assert (inp.queued_frames, out.waiting_frames) == (1, 1)
    pair.take(1)
    until(lambda: not out.full)
    assert numbers(pair.take(1)) == list(range(10, 20))


def test_a_sender_without_credit_is_an_error(pair: Pair) -> None:
    out, _ = pair.make(capacity=1, batch_rows=10)
    out.grant(1)  # that nobody gave

    def send() -> None:
        out.offer(batch(0, 10))
        out.offer(batch(10, 10))

    pair.fails(send, "all 1 places are taken")


def test_many_frames_dropped_as_duplicates_still_return_their_credit(pair: Pair) -> None:
    out, _ = pair.make(capacity=2, batch_rows=10, input={"next_row": 500})
    sent, taken = 0, []
    while sent < 600:
        if not out.full:
            out.offer(batch(sent, 10))
            sent += 10
        else:
            taken += pair.take(1)
    taken += pair.take_rows(100 - len(numbers(taken)))
    assert numbers(taken) == list(range(500, 600))


# -- blocking


def test_a_blocked_channel_holds_its_items_and_goes_on_in_order(pair: Pair) -> None:
    out, inp = pair.make(capacity=4, batch_rows=10)
    out.offer(batch(0, 10))
    pair.take(1, 4)
    inp.block()
    out.offer(batch(10, 10))
    out.offer_barrier(2)
    out.offer(batch(20, 10))
    until(lambda: inp.queued_frames == 4)
    assert (inp.blocked, inp.head()) == (True, EMPTY)
    with pytest.raises(InvariantError, match="blocked"):
        inp.take(10)
    inp.unblock()
    items = pair.take(4)
    assert numbers(items) == list(range(4, 30))
    assert [type(i) for i in items] == [Rows, Rows, Barrier, Rows]


def test_taking_from_an_empty_channel_is_an_error(pair: Pair) -> None:
    _, inp = pair.make()
    with pytest.raises(InvariantError, match="empty"):
        inp.take(1)


# -- barriers


def test_a_barrier_lies_between_the_rows_before_and_after_it(pair: Pair) -> None:
    out, inp = pair.make()
    out.offer(batch(0, 3))
    out.offer_barrier(41)
    at_barrier = out.next_row
    out.offer(batch(3, 3))
    out.offer_barrier(42, final=True)
    first = pair.take(1)
    until(lambda: inp.head() == CONTROL)
    assert pair.take(1) == [Barrier(41)]
    assert (inp.next_row, at_barrier, numbers(first)) == (3, 3, [0, 1, 2])
    second = pair.take(2)
    assert (numbers(second), second[1]) == ([3, 4, 5], Barrier(42, final=True))


def test_a_barrier_carries_the_watermark_before_it(pair: Pair) -> None:
    out, _ = pair.make()
    out.offer_watermark(8)
    out.offer_barrier(1)
    assert pair.take(2) == [Watermark(8), Barrier(1)]


def test_a_barrier_needs_no_credit_but_waits_its_turn(pair: Pair) -> None:
    out, inp = pair.make(capacity=1, batch_rows=10)
    out.offer(batch(0, 10))
    out.offer_barrier(1)
    out.offer(batch(10, 10))
    out.offer_barrier(2)
    until(lambda: inp.queued_frames == 2)
    assert out.waiting_frames == 2
    assert [type(i) for i in pair.take(4)] == [Rows, Barrier, Rows, Barrier]


def test_an_overtaking_barrier_passes_all_rows_and_names_them(pair: Pair) -> None:
    out, inp = pair.make(capacity=2, batch_rows=10)
    for first in range(0, 50, 10):
        out.offer(batch(first, 10))
    out.offer(batch(50, 3))
    pair.take(1, 4)
    until(lambda: inp.queued_frames == 2)
    in_sender = out.offer_barrier(7, overtake=True)
    at_barrier = out.next_row
    out.offer(batch(53, 10))
    until(lambda: inp.head() == URGENT)
    barrier = inp.take(1)
    assert isinstance(barrier, Barrier)
    assert (barrier.checkpoint_id, barrier.overtake, at_barrier) == (7, True, 53)
    assert numbers([*barrier.overtaken, *in_sender]) == list(range(4, 53))
    assert barrier.overtaken[0].first_row == inp.next_row == 4
    assert numbers(pair.take_rows(59)) == list(range(4, 63)), "they are still delivered"


def test_an_overtaking_barrier_passes_a_blocked_channel(pair: Pair) -> None:
    out, inp = pair.make(batch_rows=10)
    out.offer(batch(0, 10))
    until(lambda: inp.queued_frames == 1)
    inp.block()
    assert inp.head() == EMPTY
    out.offer_barrier(7, overtake=True)
    until(lambda: inp.head() == URGENT)
    assert numbers(inp.take(1).overtaken) == list(range(10))
    assert inp.head() == EMPTY


def test_a_barrier_that_waits_at_the_sender_can_still_overtake(pair: Pair) -> None:
    out, inp = pair.make(capacity=1, batch_rows=10)
    for first in (0, 10, 20):
        out.offer(batch(first, 10))
    out.offer_barrier(7)
    out.offer(batch(30, 10))
    overtaken = out.offer_barrier(7, overtake=True)
    until(lambda: inp.head() == URGENT)
    barrier = inp.take(1)
    assert numbers([*barrier.overtaken, *overtaken]) == list(range(30)), "rows after the barrier are not part of it"
    rest = pair.take_rows(40)
    assert numbers(rest) == list(range(40))
    assert not any(isinstance(i, Barrier) for i in rest), "the barrier comes once"


def test_a_barrier_that_waits_at_the_receiver_can_still_overtake(pair: Pair) -> None:
    out, inp = pair.make(batch_rows=10)
    out.offer(batch(0, 10))
    out.offer_barrier(7)
    out.offer(batch(10, 10))
    until(lambda: inp.queued_frames == 3)
    inp.block()
    assert not inp.overtake(8)
    assert inp.overtake(7)
    barrier = inp.take(1)
    assert numbers(barrier.overtaken) == list(range(10))
    inp.unblock()
    assert numbers(pair.take(2)) == list(range(20))


def test_a_barrier_with_no_rows_behind_it_overtakes_all_waiting_rows(pair: Pair) -> None:
    out, inp = pair.make(batch_rows=10)
    out.offer(batch(0, 10))
    out.offer(batch(10, 10))
    out.offer_barrier(7)
    until(lambda: inp.queued_frames == 3)
    assert inp.overtake(7)
    assert numbers(inp.take(1).overtaken) == list(range(20))


def test_what_is_overtaken_names_the_watermarks_among_the_rows(pair: Pair) -> None:
    out, inp = pair.make(capacity=3, batch_rows=10)
    out.offer(batch(0, 10))
    out.offer_watermark(5, idle=True)
    out.flush()
    out.offer(batch(10, 10))
    until(lambda: inp.queued_frames == 3)
    for first in (20, 30):
        out.offer(batch(first, 10))
        out.offer_watermark(first, idle=True)
        out.flush()
    overtaken = out.offer_barrier(7, overtake=True)
    assert [i.first_row if isinstance(i, Rows) else i for i in overtaken] == [20, Watermark(20, idle=True), 30]
    until(lambda: inp.head() == URGENT)
    waiting = inp.take(1).overtaken
    assert [i.first_row if isinstance(i, Rows) else i for i in waiting] == [0, Watermark(5, idle=True), 10]
    pair.take(6)


def test_a_barrier_that_has_left_the_sender_overtakes_nothing_there(pair: Pair) -> None:
    out, inp = pair.make(capacity=1, batch_rows=10)
    out.offer_barrier(1)
    assert (out.holds(1), out.overtake(1)) == (False, [])
    assert pair.take(1) == [Barrier(1)]
    for first in (0, 10):
        out.offer(batch(first, 10))
    out.offer_barrier(2)
    out.offer(batch(20, 10))
    assert out.holds(2)
    assert not out.holds(3)
    assert numbers(out.overtake(2)) == list(range(10, 20))
    assert (out.holds(2), out.overtake(2)) == (False, [])
    until(lambda: inp.head() == URGENT)
    assert numbers(inp.take(1).overtaken) == list(range(10))
    assert numbers(pair.take_rows(30)) == list(range(30))


def test_an_arriving_barrier_is_announced_and_found_while_it_waits(pair: Pair) -> None:
    out, inp = pair.make(batch_rows=10)
    out.offer(batch(0, 10))
    out.offer_barrier(3)
    until(lambda: inp.announced)
    assert (list(inp.announced), inp.waits(3), inp.waits(4)) == ([Barrier(3)], True, False)
    pair.take(2)
    assert not inp.waits(3)


def test_a_probe_is_a_barrier_that_says_so(pair: Pair) -> None:
    out, inp = pair.make()
    out.offer_barrier(3, probe=True)
    out.offer_barrier(4, final=True, overtake=True)
    until(lambda: inp.head() == URGENT)
    assert pair.take(2) == [Barrier(4, final=True, overtake=True), Barrier(3, probe=True)]


# -- end of data


def test_only_barriers_follow_the_end_of_data(pair: Pair) -> None:
    out, inp = pair.make()
    out.offer(batch(0, 2))
    out.offer_end()
    out.offer_end()
    out.offer_barrier(9, final=True)
    assert [type(i) for i in pair.take(3)] == [Rows, End, Barrier]
    assert (inp.ended, out.ended, inp.head()) == (True, True, EMPTY)
    with pytest.raises(InvariantError, match="after the end of data"):
        out.offer(batch(2, 1))


# -- recording and restoring


def test_a_recording_holds_what_was_taken_while_it_ran(pair: Pair) -> None:
    out, inp = pair.make(batch_rows=10, capacity=10)
    for first in range(0, 50, 10):
        out.offer(batch(first, 10))
    pair.take(1)
    inp.record(1)
    pair.take(2, 5)
    inp.record(2)
    assert inp.recording
    pair.take(1)
    assert numbers(one := inp.stop_recording(1)) == list(range(10, 30))
    assert one[0].first_row == 10
    pair.take(1)
    assert numbers(inp.stop_recording(2)) == list(range(20, 40))
    pair.take(1)
    assert not inp.recording
    assert inp.stop_recording(2) == []


def test_a_recording_holds_the_watermarks_too(pair: Pair) -> None:
    out, inp = pair.make(batch_rows=10)
    inp.record(1)
    out.offer(batch(0, 10))
    out.offer_watermark(5, idle=True)
    out.flush()
    out.offer_watermark(6)
    out.offer(batch(10, 10))
    pair.take(3)
    log = inp.stop_recording(1)
    assert [(i.first_row, i.watermark) if isinstance(i, Rows) else i for i in log] == [
        (0, MIN_WATERMARK),
        Watermark(5, idle=True),
        (10, 6),
    ]


def test_restored_rows_come_before_anything_that_arrives(pair: Pair) -> None:
    """C5: what was logged on a back-edge, and what any other channel held, comes first."""
    recorded = [Rows(batch(20, 5), 20, 3), Watermark(4), Rows(batch(25, 15), 25, 4), Watermark(6, idle=True)]
    out, inp = pair.make(
        capacity=1,
        batch_rows=10,
        output={"next_row": 40},
        input={"next_row": 20},
        before_start=lambda inp: inp.restore(recorded),
    )
    assert (inp.head(), inp.queued_rows) == (ROWS, 20)
    out.offer(batch(40, 10))
    out.offer(batch(50, 10))
    until(lambda: inp.queued_frames == 5)
    assert out.waiting_frames == 1, "restored rows take no place"
    items = pair.take(4, 15)
    assert (numbers(items), inp.watermark, inp.idle) == (list(range(20, 40)), 6, True)
    assert items[1] == Watermark(4)
    assert out.waiting_frames == 1, "and give no credit"
    assert numbers(pair.take_rows(20)) == list(range(40, 60))


def test_restored_rows_must_continue_where_the_channel_stands(pair: Pair) -> None:
    def restore(inp: ReceivingEnd) -> None:
        with pytest.raises(InvariantError, match="row 20 is missing"):
            inp.restore([Rows(batch(21, 5), 21)])

    pair.make(input={"next_row": 20}, before_start=restore)


def test_a_restore_after_the_first_arrival_is_an_error(pair: Pair) -> None:
    out, inp = pair.make(batch_rows=10)
    out.offer(batch(0, 10))
    until(lambda: inp.queued_frames)
    with pytest.raises(InvariantError, match="after the first arrival"):
        inp.restore([Rows(batch(10, 1), 10)])


# -- overflow


def test_a_blocked_channel_that_is_relieved_does_not_hold_its_sender_up(pair: Pair) -> None:
    out, inp = pair.make(capacity=2, batch_rows=10)
    inp.block()
    for first in range(0, 200, 10):
        out.offer(batch(first, 10))
    while out.full:
        until(lambda: inp.queued_frames >= 2)
        inp.relieve()
        time.sleep(0.0005)
    until(lambda: inp.queued_frames == 20)
    inp.unblock()
    assert numbers(pair.take_rows(100)) == list(range(100))
    for first in range(200, 400, 10):
        out.offer(batch(first, 10))
    assert out.full, "a place is given back once"
    assert numbers(pair.take_rows(300)) == list(range(100, 400))


@pytest.mark.parametrize("memory_bytes", [0, 3_000])
@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_feedback_channel_takes_any_number_of_rows_and_few_stay_in_memory(
    kind: str, memory_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: no credit limit, and the rest lies on disk, in files that nobody has to remove."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(net_spill, "_FILE_BYTES", 2_000)  # so that several are needed
    pair = Pair(kind)
    store = pair.store = SpillingFrames(memory_bytes)
    out, inp = pair.make(capacity=NO_LIMIT, batch_rows=50, output={"credit": NO_LIMIT})
    chance, taken = random.Random(3), []
    for _ in range(300):
        out.offer(batch(out.next_row, chance.choice([1, 20, 50, 70])))
        assert not out.full
        assert store._bytes_in - store._bytes_out <= memory_bytes
        if chance.random() < 0.3 and inp.head() != EMPTY:
            taken.append(inp.take(37))
    out.flush()
    assert not list(tmp_path.iterdir()), "the files have no names"
    taken += pair.take_rows(out.next_row - len(numbers(taken)))
    assert numbers(taken) == list(range(out.next_row))
    assert store._file.stored_bytes > 20_000
    assert store._bytes_in - store._bytes_out == 0
    for connection in pair.connections:
        connection.close()


def test_a_log_of_overflowed_rows_outlives_channel_and_file(pair: Pair) -> None:
    out, inp = pair.make(batch_rows=10)
    inp.record(1)
    out.offer(batch(0, 10))
    pair.take(1)
    log = inp.stop_recording(1)
    if pair.store is not None:
        pair.store._file.close()
    assert numbers(log) == list(range(10))


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    inp = ReceivingEnd(KEY, 4, store=SpillingFrames(0))
    with pytest.raises(StorageError, match="No space left on device"):
        inp.put(Rows(batch(0, 1), 0))


# -- everything at once


@pytest.mark.parametrize("seed", range(8))
def test_any_cut_accounts_for_every_row_exactly_once(pair: Pair, seed: int) -> None:
    """For each barrier: rows taken before it, recorded or overtaken = the rows offered before it, in order."""
    chance = random.Random(seed)
    out, inp = pair.make(capacity=chance.randint(1, 5), batch_rows=20)
    offered_at: dict[int, int] = {}
    in_sender: dict[int, list[Rows]] = {}
    taken: list[Item] = []
    for step in range(600):
        if not out.full and chance.random() < 0.5:
            rows = chance.choice([1, 2, 5, 12, 25, 50])
            out.offer(batch(out.next_row, rows))
        if chance.random() < 0.05:
            out.offer_watermark(out.next_row)
            if chance.random() < 0.3:
                out.flush()
        if chance.random() < 0.05:
            offered_at[step] = out.next_row
            in_sender[step] = out.offer_barrier(step, overtake=chance.random() < 0.5)
        if chance.random() < 0.02:
            out.flush()
        if inp.head() != EMPTY and chance.random() < 0.6:
            taken.append(inp.take(chance.choice([3, 10, 100])))
    out.offer_end()
    while not inp.ended:
        taken += pair.take(1, 50)
    assert numbers(taken) == list(range(out.next_row))
    seen = 0
    barriers = 0
    for item in taken:
        if isinstance(item, Rows):
            assert item.watermark <= seen + item.batch.num_rows
            seen += item.batch.num_rows
        elif isinstance(item, Barrier):
            barriers += 1
            cut = list(range(seen)) + numbers([*item.overtaken, *in_sender[item.checkpoint_id]])
            assert cut == list(range(offered_at[item.checkpoint_id]))
    assert barriers == len(offered_at) > 5
