"""W5 where channels are dealt anew: no time on a new channel is beyond what its sender goes on from."""

from __future__ import annotations

import random

import pytest

from cutwater.errors import InvariantError
from cutwater.protocol.subtask.watermarks import InputTime, OldChannel, RedistributedEdge

MAX = 2**63 - 1


def mine(row: int) -> int:
    return row


def test_w5_a_receiver_that_nothing_concerns_begins_where_its_sender_does() -> None:
    edge = RedistributedEdge([InputTime(9), InputTime(6)], 7)
    assert edge.receives([]) == edge.begins == 6
    assert list(edge.replayed([], mine)) == []


def test_w5_what_was_on_its_way_takes_no_channel_beyond_its_new_sender() -> None:
    """The old channel that concerns the receiver had ended; its new sender goes on with what another one read."""
    edge = RedistributedEdge([InputTime(MAX), InputTime(6)], 6)
    old = [OldChannel(InputTime(3), [(1, InputTime(8)), (None, InputTime(20))], InputTime(MAX))]
    assert [(p.rows, p.watermark) for p in edge.replayed(old, mine)] == [(1, 6)]


def test_w5_time_ends_on_a_new_channel_where_it_had_ended_on_all_old_ones() -> None:
    edge = RedistributedEdge([InputTime(MAX), InputTime(MAX)], MAX)
    old = [OldChannel(InputTime(3), [(1, InputTime(8))], InputTime(MAX))]
    assert [(p.rows, p.watermark) for p in edge.replayed(old, mine)] == [(1, 8), (None, MAX)]
    with pytest.raises(InvariantError):
        RedistributedEdge([], None)


def test_an_idle_channel_holds_none_back_and_the_new_one_is_not_idle() -> None:
    edge = RedistributedEdge([InputTime(2, idle=True), InputTime(9)], None)
    old = [OldChannel(InputTime(2, idle=True), [], InputTime(2, idle=True))]
    assert edge.begins == 9
    assert [p.watermark for p in edge.replayed(old, mine)][-1] == 9


@pytest.mark.parametrize("seed", range(200))
def test_rows_meet_no_later_time_than_in_their_own_channel_and_keep_its_order(seed: int) -> None:
    rng = random.Random(seed)
    old: list[OldChannel[tuple[int, int]]] = []
    before: dict[tuple[int, int], int] = {}
    for channel in range(rng.randrange(1, 5)):
        time = received = rng.randrange(10)
        items: list[tuple[tuple[int, int] | None, InputTime]] = []
        for place in range(rng.randrange(6)):
            before[channel, place] = time
            time += rng.randrange(5)
            items.append(((channel, place), InputTime(time)))
        ended = rng.random() < 0.3
        old.append(OldChannel(InputTime(received), items, InputTime(MAX if ended else time)))
    others = [InputTime(rng.randrange(30)) for _ in range(rng.randrange(3))]
    edge = RedistributedEdge([*(o.sent for o in old), *others], None)
    told, seen = edge.receives(old), list[tuple[int, int]]()
    for passed in edge.replayed(old, lambda row: row):
        if passed.rows is not None:
            assert told <= before[passed.rows]
            seen.append(passed.rows)
        assert told <= passed.watermark <= edge.begins
        told = passed.watermark
    assert told == edge.begins
    assert sorted(seen) == sorted(before)
    for channel in range(len(old)):
        places = [place for c, place in seen if c == channel]
        assert places == sorted(places)
