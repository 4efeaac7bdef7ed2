"""Rules C2 to C4 (aligned barriers, cyclic) and CL2, CL3, CL5 on one subtask; C1 is the planner's."""

from __future__ import annotations

import pytest

from cutwater.errors import InvariantError
from cutwater.protocol.messages import (
    AbortNotice,
    Acknowledge,
    BarrierTaken,
    Block,
    BroadcastBarrier,
    Durable,
    Forget,
    Freeze,
    LogsDurable,
    Record,
    RowsTaken,
    StartRecording,
    StopRecording,
    Unblock,
    WriteLogs,
)
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.machine import SubtaskMachine


def head(protocol="aligned"):
    return SubtaskMachine("head 0", ["in", "back"], protocol=PROTOCOLS[protocol], back_edges=frozenset({"back"}))


def feed(machine, *events):
    effects = []
    for event in events:
        effects += machine.handle(event)
        machine.validate()
    return effects


def test_c2_a_subtask_aligns_on_its_regular_inputs_only():
    assert feed(head(), BarrierTaken("in", 1))[:2] == [Freeze(1, False), BroadcastBarrier(1, False)]


def test_c2_an_early_barrier_on_a_back_edge_blocks_it_and_its_log_is_empty():
    machine = head()
    assert feed(machine, BarrierTaken("back", 1)) == [Block("back")]
    assert feed(machine, BarrierTaken("in", 1)) == [Freeze(1, False), BroadcastBarrier(1, False), Unblock("back")]
    assert not machine.recording("back")


def test_c3_rows_taken_after_the_freeze_are_logged_until_the_barrier_comes():
    machine = head()
    assert feed(machine, RowsTaken("back", 9)) == []
    assert feed(machine, BarrierTaken("in", 1))[2:] == [StartRecording(1, "back")]
    assert feed(machine, RowsTaken("back", 2), RowsTaken("in", 4), RowsTaken("back", 3)) == [Record("back", (1,))] * 2
    assert feed(machine, BarrierTaken("back", 1)) == [StopRecording(1, "back", 5), WriteLogs(1)]
    assert feed(machine, RowsTaken("back", 1)) == []


def test_c3_two_checkpoints_may_record_one_back_edge():
    machine = head()
    feed(machine, BarrierTaken("in", 1), RowsTaken("back", 1), BarrierTaken("in", 2))
    assert feed(machine, RowsTaken("back", 1)) == [Record("back", (1, 2))]
    assert feed(machine, BarrierTaken("back", 1))[0] == StopRecording(1, "back", 2)
    assert feed(machine, BarrierTaken("back", 2))[0] == StopRecording(2, "back", 1)


@pytest.mark.parametrize("parts", [(Durable(1), LogsDurable(1)), (LogsDurable(1), Durable(1))])
def test_c4_the_acknowledgement_waits_for_state_and_logs(parts):
    machine = head()
    feed(machine, BarrierTaken("in", 1), BarrierTaken("back", 1))
    assert feed(machine, parts[0]) == []
    assert feed(machine, parts[1]) == [Acknowledge(1)]


def test_c4_logs_cannot_be_durable_before_they_are_complete():
    machine = head()
    feed(machine, BarrierTaken("in", 1))
    with pytest.raises(InvariantError):
        machine.handle(LogsDurable(1))


def test_an_abort_while_recording_stops_the_recording():
    machine = head()
    feed(machine, BarrierTaken("in", 1))
    assert feed(machine, AbortNotice(1)) == [Forget(1)]
    assert not machine.recording("back")
    assert feed(machine, BarrierTaken("back", 1)) == []


def test_at_least_once_records_back_edges_too():
    machine = head("at_least_once")
    assert feed(machine, BarrierTaken("in", 1))[-1] == StartRecording(1, "back")


def test_cl2_the_first_barrier_freezes_and_all_other_inputs_are_recorded():
    machine = SubtaskMachine("p", ["a", "b", "c"], protocol=PROTOCOLS["chandy_lamport"])
    assert feed(machine, BarrierTaken("b", 1)) == [
        Freeze(1, False),
        BroadcastBarrier(1, False),
        StartRecording(1, "a"),
        StartRecording(1, "c"),
    ]


def test_cl3_cl5_a_later_barrier_ends_the_record_of_its_input_for_its_own_snapshot():
    machine = SubtaskMachine("p", ["a", "b"], protocol=PROTOCOLS["chandy_lamport"])
    feed(machine, BarrierTaken("a", 1), RowsTaken("b", 2), BarrierTaken("a", 2))
    assert feed(machine, RowsTaken("b", 3)) == [Record("b", (1, 2))]
    assert feed(machine, BarrierTaken("b", 1)) == [StopRecording(1, "b", 5), WriteLogs(1)]
    assert feed(machine, BarrierTaken("b", 2)) == [StopRecording(2, "b", 3), WriteLogs(2)]
