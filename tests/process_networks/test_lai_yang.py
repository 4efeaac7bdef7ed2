"""The machine of Lai and Yang's colouring, rule by rule, and every cell of its table."""

from __future__ import annotations

import itertools

import pytest

from cutwater.errors import InvariantError
from cutwater.protocol import messages as m
from cutwater.protocol.snapshot_algorithms import LAI_YANG_STAGES, Coloured, ColourStage, LaiYang, NoticeTaken


def kinds(effects: list[m.Effect]) -> list[str]:
    return [type(e).__name__ for e in effects]


def finish(machine: LaiYang, id: int) -> list[m.Effect]:
    return [*machine.handle(m.Durable(id)), *machine.handle(m.LogsDurable(id))]


def test_cl1_an_initiator_freezes_then_sends_notices_then_records():
    machine = LaiYang("p", ["a", "b"])
    assert kinds(machine.handle(m.Trigger(1))) == ["Freeze", "BroadcastBarrier", "StartRecording", "StartRecording"]
    assert machine.handle(m.Trigger(1)) == []
    assert machine.colour == 1


def test_cl2_a_message_of_a_newer_colour_freezes_before_it_is_taken_and_is_not_recorded():
    machine = LaiYang("p", ["a"])
    assert kinds(machine.handle(Coloured("a", 1))) == ["Freeze", "BroadcastBarrier", "StartRecording"]


def test_cl3_messages_of_older_colours_belong_to_the_channel_in_any_order_with_the_notice():
    """Two messages before the sender's cut, one after it, and the notice: all 24 orders give the same channel."""
    for order in itertools.permutations([("old", 0), ("old", 0), ("new", 1), ("notice", 2)]):
        machine = LaiYang("p", ["a"])
        machine.handle(m.Trigger(1))
        recorded, closed = 0, False
        for what, value in order:
            event = NoticeTaken("a", 1, value) if what == "notice" else Coloured("a", value)
            for effect in machine.handle(event):
                recorded += isinstance(effect, m.Record)
                if isinstance(effect, m.StopRecording):
                    assert effect.rows == 2
                    closed = True
            machine.validate()
        assert (recorded, closed) == (2, True)
        assert finish(machine, 1) == [m.Acknowledge(1)]


def test_messages_taken_before_the_own_cut_are_counted_and_not_recorded():
    machine = LaiYang("p", ["a"])
    machine.handle(Coloured("a", 0))
    machine.handle(m.Trigger(1))
    assert machine.handle(Coloured("a", 0)) == [m.Record("a", (1,))]
    assert machine.handle(NoticeTaken("a", 1, 2)) == [m.StopRecording(1, "a", 1), m.WriteLogs(1)]


def test_a_restored_machine_counts_on():
    machine = LaiYang("p", ["a"], colour=5, taken={"a": 7})
    machine.handle(m.Trigger(6))
    assert machine.handle(Coloured("a", 5)) == [m.Record("a", (6,))]
    assert machine.handle(NoticeTaken("a", 6, 8)) == [m.StopRecording(6, "a", 1), m.WriteLogs(6)]
    assert machine.handle(NoticeTaken("a", 5, 3)) == []


def test_cl5_a_newer_colour_records_all_snapshots_up_to_it_each_with_its_own_recording():
    machine = LaiYang("p", ["a", "b"])
    effects = machine.handle(Coloured("a", 2))
    assert [e.checkpoint_id for e in effects if isinstance(e, m.Freeze)] == [1, 2]
    assert machine.handle(Coloured("b", 1)) == [m.Record("b", (2,))]
    assert machine.handle(Coloured("b", 0)) == [m.Record("b", (1, 2))]
    assert machine.handle(m.Trigger(1)) == []
    machine.handle(NoticeTaken("b", 1, 1))
    machine.handle(NoticeTaken("a", 1, 0))
    assert finish(machine, 1) == [m.Acknowledge(1)]
    assert set(machine.pending) == {2}


def test_a_process_without_inputs_is_done_once_its_state_is_durable():
    machine = LaiYang("p", [])
    assert kinds(machine.handle(m.Trigger(1))) == ["Freeze", "BroadcastBarrier"]
    assert machine.handle(m.Durable(1)) == [m.Acknowledge(1)]


def test_an_aborted_snapshot_is_forgotten_and_its_late_notices_dropped():
    machine = LaiYang("p", ["a"])
    machine.handle(m.Trigger(1))
    assert machine.handle(m.AbortNotice(1)) == [m.Forget(1)]
    assert machine.handle(NoticeTaken("a", 1, 0)) == []
    assert machine.handle(m.Durable(1)) == []
    assert machine.handle(m.AbortNotice(2)) == []
    assert machine.handle(Coloured("a", 2)) == []  # no cut for what nobody wants, but the colour rises
    assert machine.colour == 2


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([Coloured("z", 0)], "'z' is not an input"),
        ([NoticeTaken("z", 1, 0)], "'z' is not an input"),
        ([NoticeTaken("a", 1, 5), NoticeTaken("a", 1, 5)], "two notices of snapshot 1"),
        ([Coloured("a", 0), Coloured("a", 0), m.Trigger(1), NoticeTaken("a", 1, 1)], "more messages than were sent"),
        ([m.Durable(1)], "not recorded here"),
        ([m.Trigger(1), m.LogsDurable(1)], "logs durable, but not handed to the writer"),
        ([m.Trigger(1), m.Durable(1), m.Durable(1)], "state durable, but not handed to the writer or durable already"),
    ],
)
def test_what_cannot_be_raises_with_its_story(events: list, text: str):
    machine = LaiYang("p", ["a"])
    with pytest.raises(InvariantError, match=text) as raised:
        for event in events:
            machine.handle(event)
    assert f"{events[-1]}" in str(raised.value)


def test_every_stage_of_the_table_is_left_and_none_but_the_last_two_is_an_end():
    left = {stage for stage, _ in LAI_YANG_STAGES}
    assert set(ColourStage) - left == {ColourStage.ACKNOWLEDGED, ColourStage.ABORTED}
    assert set(LAI_YANG_STAGES.values()) == set(ColourStage) - {ColourStage.ABSENT}
