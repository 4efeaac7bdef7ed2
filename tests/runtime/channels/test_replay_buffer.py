"""What a channel keeps for a receiver that goes back by itself: all that was sent since the checkpoint, and no more."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.errors import InvariantError, NondeterminismError
from cutwater.plan.graph import Channel
from cutwater.protocol.channel.items import Barrier, End, Item, Rows, Watermark
from cutwater.protocol.channel.receiving import ReceivingEnd, Remaker
from cutwater.protocol.channel.sending import ReplayBuffer
from cutwater.runtime.channels.output import OutputChannel
from cutwater.runtime.channels.spill import KeptRows

SCHEMA = pa.schema([("n", pa.int64())])
KEY = Channel(0, 0, 1)


def keeping(memory_bytes: int) -> ReplayBuffer:
    """A replay buffer as the runtime has it."""
    return ReplayBuffer(KeptRows(memory_bytes), most_memory_bytes=memory_bytes)


actions = st.one_of(
    st.tuples(st.just("rows"), st.integers(1, 9)),
    st.tuples(st.just("watermark"), st.integers(0, 5)),
    st.tuples(st.just("flush"), st.just(0)),
    st.tuples(st.just("credit"), st.integers(1, 3)),
    st.tuples(st.just("checkpoint"), st.booleans()),
    st.tuples(st.just("settle"), st.booleans()),
    st.tuples(st.just("take over"), st.booleans()),
    st.tuples(st.just("let go"), st.booleans()),
)


class Run:
    """A channel whose receiver is replaced now and then, and what the newest completed checkpoint says of it."""

    def __init__(self, memory_bytes: int) -> None:
        self.kept = keeping(memory_bytes)
        self.sent: list[Item] = []
        self.out = OutputChannel(KEY, SCHEMA, self.sent.append, batch_rows=8, kept=self.kept)
        self.pending: list[tuple[int, int, int]] = []
        self.base = (0, 0, -(1 << 63))
        self.ids = 0
        self.gone = False

    def act(self, what: str, value: int) -> None:
        out = self.out
        if what == "rows":
            first = out.next_row
            out.offer(pa.record_batch([pa.array(range(first, first + value), pa.int64())], schema=SCHEMA))
        elif what == "watermark":
            out.offer_watermark(max(out.watermark, value * 10))
        elif what == "flush":
            out.flush()
        elif what == "credit":
            out.grant(value)
        elif what == "checkpoint" and not self.gone:  # none begins before everybody is there again
            self.ids += 1
            out.mark(self.ids)
            self.pending.append((self.ids, out.next_row, out.watermark))
            out.offer_barrier(self.ids, overtake=bool(value))
        elif what == "settle" and self.pending:
            settled = self.pending.pop(0)
            out.settled(settled[0], bool(value))
            self.base = settled if value else self.base
        elif what in ("take over", "let go"):
            for id, _, _ in self.pending:  # a failure ends every checkpoint
                out.settled(id, completed=False)
            self.pending.clear()
            self.sent.clear()
            self.gone = what == "let go"
            if self.gone:
                out.let_go()
            else:
                out.take_over(self.sent.append, self.base[0])

    def replaced(self) -> tuple[list[int], int, bool]:
        """What a new receiver has in the end: numbers of rows, watermark, whether the end came."""
        self.act("take over", 0)
        self.out.flush()
        self.out.grant(1 << 20)
        receiver = ReceivingEnd(KEY, 1 << 20, next_row=self.base[1], watermark=self.base[2])
        rows: list[int] = []
        for item in self.sent:
            assert type(item) is not Barrier
            receiver.put(item)
        while receiver.head():
            item = receiver.take(1 << 20)
            if type(item) is Rows:
                assert item.first_row == self.base[1] + len(rows)
                rows += item.batch.column(0).to_pylist()
        return rows, receiver.watermark, receiver.ended


@settings(deadline=None)
@given(st.lists(actions, max_size=40), st.sampled_from([0, 100, 1 << 20]), st.booleans())
def test_a_new_receiver_gets_all_since_the_checkpoint_in_order(
    history: list[tuple[str, int]], memory_bytes: int, ends: bool
) -> None:
    run = Run(memory_bytes)
    for what, value in history:
        run.act(what, value)
    if ends:
        run.out.offer_end()
    rows, watermark, ended = run.replaced()
    assert rows == list(range(run.base[1], run.out.next_row))
    assert watermark == run.out.watermark
    assert ended is ends
    assert run.kept.memory_bytes <= memory_bytes


def test_who_sends_to_a_lost_receiver_goes_on_until_a_limit() -> None:
    """Nothing waits in the channel, and later what comes next waits behind what is sent again."""
    ready: list[None] = []
    sent: list[Item] = []
    kept = keeping(400)
    out = OutputChannel(KEY, SCHEMA, sent.append, batch_rows=8, kept=kept, on_ready=lambda: ready.append(None))

    def offer() -> None:
        first = out.next_row
        out.offer(pa.record_batch([pa.array(range(first, first + 8), pa.int64())], schema=SCHEMA))

    offer()
    assert out.full
    out.let_go()
    assert not out.full
    assert len(ready) == 1
    for _ in range(6):
        offer()
        assert not out.full
    out.take_over(sent.append, 0)
    assert out.waiting_frames == 7
    assert not out.full
    offer()
    assert out.full, "that was the 448th byte since the loss"
    out.grant(7)
    assert out.full, "until the receiver has everything"
    out.grant(2)
    assert not out.full
    offer()
    offer()
    assert out.full, "without credit, as ever"
    assert [item.first_row for item in sent if type(item) is Rows] == list(range(0, 72, 8))


def test_an_end_is_kept_although_the_checkpoint_is_younger() -> None:
    run = Run(0)
    run.act("rows", 3)
    run.out.offer_end()
    run.act("checkpoint", 0)
    run.act("settle", 1)
    assert run.replaced() == ([], run.out.watermark, True)


def test_what_a_completed_checkpoint_covers_is_not_kept() -> None:
    kept = keeping(1 << 20)
    batch = pa.record_batch({"n": [1]})
    for id in (1, 2, 3):
        kept.add(Rows(batch, id - 1))
        kept.mark(id)
    kept.aborted(2)
    kept.completed(1)
    assert [item.first_row for item in kept.since(1) if type(item) is Rows] == [1, 2]
    with pytest.raises(InvariantError, match="checkpoint 2 is not kept"):
        list(kept.since(2))
    kept.add(End())
    kept.completed(3)
    assert (list(kept.since(3)), kept.memory_bytes) == ([End()], 0)
    with pytest.raises(InvariantError, match="only since 3"):
        list(kept.since(1))


def test_a_watermark_behind_a_barrier_is_not_lost_with_the_rows_before_it() -> None:
    """Where rows wait for credit, watermarks join them: but not those on the other side of a barrier that overtook."""
    run = Run(1 << 20)
    run.act("rows", 3)
    run.act("flush", 0)
    run.act("checkpoint", 1)
    run.act("watermark", 5)
    run.act("flush", 0)
    run.act("settle", 1)
    assert run.replaced() == ([], 50, False)


def test_what_a_living_receiver_has_is_no_part_of_a_snapshot_when_a_barrier_overtakes_it() -> None:
    run = Run(1 << 20)
    for rows in (3, 4):
        run.act("rows", rows)
        run.act("flush", 0)
    run.out.arrived(3)
    run.act("watermark", 1)
    run.act("flush", 0)
    run.out.arrived(5)  # the first frame, and a part of the second one
    run.act("watermark", 2)
    run.act("flush", 0)  # it must not take the place of what is kept
    run.act("rows", 1)
    overtaken = run.out.offer_barrier(1, overtake=True)
    assert [n for i in overtaken if type(i) is Rows for n in i.batch.column(0).to_pylist()] == [5, 6, 7]
    assert run.replaced()[0] == list(range(8))


@pytest.mark.parametrize("kept", [keeping(1 << 20), None], ids=["kept", "made again only"])
def test_what_is_made_again_although_the_receiver_has_it_is_no_part_of_a_snapshot(kept: ReplayBuffer | None) -> None:
    out = OutputChannel(KEY, SCHEMA, lambda _: None, kept=kept)
    out.arrived(5)
    for first in (0, 3, 6):  # there is no credit: all of it waits
        out.offer(pa.record_batch([pa.array(range(first, first + 3), pa.int64())], schema=SCHEMA))
        out.flush()
    overtaken = out.offer_barrier(1, overtake=True)
    assert [n for i in overtaken if type(i) is Rows for n in i.batch.column(0).to_pylist()] == [5, 6, 7, 8]


def test_a_living_receiver_says_what_it_has_and_takes_only_what_is_new() -> None:
    credits: list[int] = []
    receiver = ReceivingEnd(KEY, 4)
    batch = pa.record_batch([pa.array(range(4), pa.int64())], schema=SCHEMA)
    receiver.put(Rows(batch, 0))
    receiver.put(Watermark(7))
    receiver.take_over(credits.append, Remaker("draw", 0, 1))
    assert (receiver.places, receiver.next_arrival) == (2, 4)
    receiver.put(Rows(batch.slice(2), 2))
    receiver.put(Rows(pa.record_batch([pa.array(range(3, 6), pa.int64())], schema=SCHEMA), 3))
    taken = [receiver.take(10) for _ in range(4)]
    assert [n for i in taken if type(i) is Rows for n in i.batch.column(0).to_pylist()] == list(range(6))
    assert sum(credits) == 4


def test_a_sender_that_makes_more_than_before_its_end_contradicts_itself() -> None:
    receiver = ReceivingEnd(KEY, 4)
    batch = pa.record_batch([pa.array(range(4), pa.int64())], schema=SCHEMA)
    receiver.put(Rows(batch.slice(0, 3), 0))
    receiver.put(End())
    receiver.take_over(lambda _: None, Remaker("draw", 0, 1))
    receiver.put(Rows(batch.slice(0, 2), 0))
    said = f"'draw'.*subtask {KEY.source} made at least 4 rows .* where it had made 3 of the same input"
    with pytest.raises(NondeterminismError, match=said):
        receiver.put(Rows(batch.slice(1), 1))
