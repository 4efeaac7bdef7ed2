"""Row ``synchronous``: every subtask is triggered and stands still until the outcome is known."""

from __future__ import annotations

import pytest

from cutwater.errors import InvariantError
from cutwater.protocol.channel.items import Head
from cutwater.protocol.messages import (
    AbortNotice,
    Acknowledge,
    BarrierTaken,
    BroadcastBarrier,
    Commit,
    CompleteNotice,
    Durable,
    EndTaken,
    Forget,
    Freeze,
    LogsDurable,
    RowsOvertaken,
    RowsTaken,
    SourceExhausted,
    StartRecording,
    StopRecording,
    Trigger,
    WriteLogs,
)
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.loop import Idle, IdleReason, SubtaskLoop, TakeControl
from cutwater.protocol.subtask.machine import SubtaskMachine


def subtask(*inputs, **options):
    return SubtaskMachine("t", inputs, protocol=PROTOCOLS["synchronous"], **options)


def feed(machine, *events):
    effects = []
    for event in events:
        effects += machine.handle(event)
        machine.validate()
    return effects


def test_the_trigger_freezes_and_halts_every_subtask():
    machine = subtask("a", "b")
    assert feed(machine, Trigger(1)) == [
        Freeze(1, False),
        BroadcastBarrier(1, False, overtake=True),
        StartRecording(1, "a"),
        StartRecording(1, "b"),
    ]
    assert machine.halted
    assert not machine.can_take("a")
    assert machine.blocked == ()


def test_a_halted_source_reads_nothing():
    machine = subtask()
    assert machine.may_read
    feed(machine, Trigger(1))
    assert not machine.may_read


def test_a_barrier_that_is_faster_than_the_trigger_counts_as_one():
    machine = subtask("a", "b")
    assert feed(machine, BarrierTaken("a", 1, overtook=3)) == [
        Freeze(1, False),
        BroadcastBarrier(1, False, overtake=True),
        StartRecording(1, "b"),
        StopRecording(1, "a", 3),
    ]
    assert feed(machine, Trigger(1)) == []


def test_rows_on_their_way_are_in_the_snapshot_and_nothing_else_moves():
    machine = subtask("a", "b")
    feed(machine, Trigger(1), BarrierTaken("a", 1, overtook=2), BarrierTaken("b", 1, overtook=0))
    assert feed(machine, RowsOvertaken(1, 4)) == [WriteLogs(1)]
    assert feed(machine, Durable(1), LogsDurable(1)) == [Acknowledge(1, quiet=False)]
    assert machine.halted


@pytest.mark.parametrize("event", [RowsTaken("a", 1), EndTaken("a"), BarrierTaken("a", 1)])
def test_taking_something_in_its_turn_while_halted_is_an_error(event):
    machine = subtask("a")
    feed(machine, Trigger(1))
    with pytest.raises(InvariantError, match="everything stands still"):
        machine.handle(event)


@pytest.mark.parametrize(
    ("outcome", "effects"), [(CompleteNotice(1), [Commit(1)]), (AbortNotice(1), [Forget(1)])], ids=["complete", "abort"]
)
def test_the_outcome_sets_everything_going_again(outcome, effects):
    machine = subtask("a")
    feed(machine, Trigger(1), BarrierTaken("a", 1, overtook=1), RowsOvertaken(1, 0), Durable(1), LogsDurable(1))
    version = machine.block_version
    assert feed(machine, outcome) == effects
    assert not machine.halted
    assert machine.can_take("a")
    assert machine.block_version > version


def test_an_abort_while_barriers_are_on_their_way_leaves_nothing():
    machine = subtask("a", "b")
    feed(machine, Trigger(1), BarrierTaken("a", 1, overtook=1))
    assert feed(machine, AbortNotice(1)) == [Forget(1)]
    assert feed(machine, BarrierTaken("b", 1, overtook=5), RowsOvertaken(1, 2)) == []
    assert not machine.halted


def test_a_final_wave_halts_for_ever_and_an_aborted_one_does_not():
    machine = subtask()
    feed(machine, SourceExhausted(), Trigger(1, final=True))
    assert feed(machine, AbortNotice(1)) == [Forget(1)]
    assert not machine.halted
    feed(machine, Trigger(2, final=True), RowsOvertaken(2, 0), Durable(2), LogsDurable(2))
    assert feed(machine, CompleteNotice(2)) == [Commit(2)]
    assert machine.halted


def test_the_loop_takes_only_urgent_barriers_while_halted():
    machine = subtask("a", "b")
    loop = SubtaskLoop(machine, ["a", "b"], 5.0, 100)

    def decide(*heads):
        return loop.decide(heads, outputs_full=False, operator_pending=False, source_ready=False)

    feed(machine, Trigger(1))
    assert decide(Head.ROWS, Head.CONTROL) == Idle(IdleReason.HALTED)
    assert decide(Head.ROWS, Head.URGENT) == TakeControl(1)
