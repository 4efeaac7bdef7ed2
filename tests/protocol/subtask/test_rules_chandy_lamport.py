"""Rules CL1 to CL5 on one process; CL6 is checked in ``test_networks.py`` and by the simulator."""

from __future__ import annotations

import pytest

from cutwater.errors import InvariantError
from cutwater.protocol.messages import (
    AbortNotice,
    Acknowledge,
    BarrierTaken,
    BroadcastBarrier,
    CompleteNotice,
    Durable,
    Freeze,
    LogsDurable,
    Record,
    RowsTaken,
    StartRecording,
    StopRecording,
    Trigger,
    WriteLogs,
)
from cutwater.protocol.protocols import NETWORK, PROTOCOLS
from cutwater.protocol.subtask.machine import SubtaskMachine


def process(*inputs, **options):
    return SubtaskMachine("p", inputs, protocol=NETWORK, **options)


def feed(machine, *events):
    effects = []
    for event in events:
        effects += machine.handle(event)
        machine.validate()
    return effects


def test_cl1_any_process_may_start_records_itself_sends_markers_then_records_every_input():
    assert feed(process("a", "b"), Trigger(1)) == [
        Freeze(1, False),
        BroadcastBarrier(1, False),
        StartRecording(1, "a"),
        StartRecording(1, "b"),
    ]


@pytest.mark.parametrize("before", [[BarrierTaken("a", 1)], [Trigger(1)]])
def test_cl1_several_may_start_the_same_snapshot_a_trigger_for_one_that_began_is_ignored(before):
    machine = process("a", "b")
    feed(machine, *before)
    assert feed(machine, Trigger(1)) == []


def test_cl2_the_markers_own_channel_is_recorded_as_empty():
    machine = process("a", "b")
    assert StartRecording(1, "a") not in feed(machine, BarrierTaken("a", 1))
    assert feed(machine, RowsTaken("a", 1)) == []


def test_cl4_a_self_loop_is_recorded_until_the_own_marker_comes_back():
    machine = process("self")
    feed(machine, Trigger(1))
    assert feed(machine, RowsTaken("self", 2)) == [Record("self", (1,))]
    assert feed(machine, BarrierTaken("self", 1)) == [StopRecording(1, "self", 2), WriteLogs(1)]


def test_cl4_a_process_without_inputs_is_done_when_its_state_is_durable():
    machine = process()
    assert feed(machine, Trigger(1)) == [Freeze(1, False), BroadcastBarrier(1, False)]
    assert feed(machine, Durable(1)) == [Acknowledge(1)]


def test_cl4_a_marker_that_comes_twice_is_an_error_also_after_the_snapshot():
    machine = process("a", "b")
    feed(machine, BarrierTaken("a", 1))
    with pytest.raises(InvariantError, match="twice"):
        machine.handle(BarrierTaken("a", 1))
    machine = process("a")
    feed(machine, BarrierTaken("a", 1), Durable(1), CompleteNotice(1))
    with pytest.raises(InvariantError, match="twice"):
        machine.handle(BarrierTaken("a", 1))


def test_cl5_snapshots_of_several_initiators_cross_in_any_order():
    machine = process("a", "b")
    feed(machine, BarrierTaken("a", 2), RowsTaken("b", 1))
    assert feed(machine, BarrierTaken("b", 1))[0] == Freeze(1, False)
    assert feed(machine, RowsTaken("a", 1), RowsTaken("b", 4)) == [Record("a", (1,)), Record("b", (2,))]
    assert feed(machine, BarrierTaken("b", 2)) == [StopRecording(2, "b", 5), WriteLogs(2)]
    assert feed(machine, BarrierTaken("a", 1)) == [StopRecording(1, "a", 1), WriteLogs(1)]
    assert feed(machine, Durable(1), LogsDurable(1), CompleteNotice(1))[0] == Acknowledge(1, quiet=False)
    assert feed(machine, Durable(2), LogsDurable(2))[0] == Acknowledge(2, quiet=False)


def test_cl5_an_aborted_snapshot_begins_nowhere_again():
    machine = process("a", "b")
    feed(machine, AbortNotice(3))
    assert feed(machine, Trigger(3), BarrierTaken("a", 3)) == []
    assert feed(machine, BarrierTaken("a", 2))[0] == Freeze(2, False)


def test_a_restored_process_drops_what_belongs_to_older_snapshots():
    machine = process("a", last_checkpoint_id=5)
    assert feed(machine, BarrierTaken("a", 5), BarrierTaken("a", 4), Trigger(5)) == []
    assert feed(machine, Trigger(6))[0] == Freeze(6, False)


def test_with_other_rows_only_a_source_is_triggered():
    machine = SubtaskMachine("t", ["a"], protocol=PROTOCOLS["unaligned"])
    with pytest.raises(InvariantError, match="only a source is triggered"):
        machine.handle(Trigger(1))
