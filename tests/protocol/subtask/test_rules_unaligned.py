"""Row ``unaligned``: aligned first, then the switch, at every moment at which it can come."""

from __future__ import annotations

import pytest

from cutwater.config import JobConfig
from cutwater.errors import ConfigError, InvariantError
from cutwater.protocol.messages import (
    AbortNotice,
    Acknowledge,
    AlignmentTimeout,
    BarriersSent,
    BarrierTaken,
    BarrierWaits,
    Block,
    BroadcastBarrier,
    Decline,
    Durable,
    EndOfInput,
    EndTaken,
    Expedite,
    Forget,
    Freeze,
    LogsDurable,
    Overtake,
    Record,
    RowsOvertaken,
    RowsTaken,
    StartRecording,
    StopRecording,
    Trigger,
    Unblock,
    WatchAlignment,
    WriteLogs,
)
from cutwater.protocol.protocols import PROTOCOLS, FailureReason
from cutwater.protocol.subtask.machine import SubtaskMachine

OVERTAKING = BroadcastBarrier(1, False, overtake=True)


def subtask(*inputs, **options):
    return SubtaskMachine("t", inputs, protocol=PROTOCOLS["unaligned"], **options)


def feed(machine, *events):
    effects = []
    for event in events:
        effects += machine.handle(event)
        machine.validate()
    return effects


# -------------------------------------------------------------------------------------------------- without a switch


def test_it_begins_like_aligned_and_watches_the_alignment():
    machine = subtask("a", "b")
    assert feed(machine, BarrierTaken("a", 1)) == [WatchAlignment(1), Block("a")]
    assert feed(machine, BarrierTaken("b", 1)) == [Freeze(1, False), BroadcastBarrier(1, False), Unblock("a")]


@pytest.mark.parametrize("events", [(Durable(1), BarriersSent(1)), (BarriersSent(1), Durable(1))])
def test_the_acknowledgement_waits_until_its_barriers_have_left(events):
    machine = subtask("a")
    feed(machine, BarrierTaken("a", 1))
    assert feed(machine, events[0]) == []
    assert feed(machine, events[1]) == [Acknowledge(1)]


def test_a_source_watches_its_outputs():
    assert feed(subtask(), Trigger(1)) == [WatchAlignment(1), Freeze(1, False), BroadcastBarrier(1, False)]


def test_the_alignment_begins_when_the_first_barrier_waits_in_a_queue():
    machine = subtask("a", "b")
    assert feed(machine, BarrierWaits("a", 1)) == [WatchAlignment(1)]
    assert feed(machine, BarrierWaits("b", 1)) == []
    assert feed(machine, BarrierTaken("a", 1)) == [Block("a")]


# --------------------------------------------------------------------------------------------------------- the switch


def test_a_timeout_freezes_at_once_and_expedites_the_barriers_that_wait():
    machine = subtask("a", "b", "c")
    feed(machine, BarrierWaits("b", 1), BarrierTaken("a", 1))
    assert feed(machine, AlignmentTimeout(1)) == [
        Freeze(1, False),
        OVERTAKING,
        StartRecording(1, "b"),
        StartRecording(1, "c"),
        Expedite("b", 1),
        Unblock("a"),
    ]
    assert feed(machine, RowsTaken("c", 2), BarrierTaken("b", 1, overtook=3)) == [
        Record("c", (1,)),
        StopRecording(1, "b", 3),
    ]
    assert feed(machine, BarrierWaits("c", 1)) == [Expedite("c", 1)]  # it came later
    assert feed(machine, BarrierTaken("c", 1, overtook=1), RowsOvertaken(1, 7)) == [
        StopRecording(1, "c", 3),
        WriteLogs(1),
    ]
    assert feed(machine, Durable(1), LogsDurable(1)) == [Acknowledge(1, quiet=False)]


def test_what_came_aligned_before_the_switch_has_an_empty_log():
    machine = subtask("a", "b")
    feed(machine, BarrierTaken("a", 1), AlignmentTimeout(1))
    assert feed(machine, RowsTaken("a", 5)) == []


def test_an_overtaking_barrier_switches_the_receiver_also_from_a_blocked_input():
    machine = subtask("a", "b")
    feed(machine, BarrierTaken("a", 1))
    assert feed(machine, BarrierTaken("b", 1, overtook=4, overtook_time=True)) == [
        Freeze(1, False),
        OVERTAKING,
        StopRecording(1, "b", 4),
        Unblock("a"),
    ]
    assert feed(machine, RowsOvertaken(1, 0)) == [WriteLogs(1)]


def test_a_barrier_in_its_turn_ends_the_log_after_the_switch():
    machine = subtask("a", "b")
    feed(machine, BarrierTaken("a", 1, overtook=0))
    assert feed(machine, RowsTaken("b", 2), BarrierTaken("b", 1))[-1] == StopRecording(1, "b", 2)


def test_a_timeout_after_the_freeze_lets_the_barriers_in_the_outputs_overtake():
    machine = subtask("a")
    feed(machine, BarrierTaken("a", 1))
    assert feed(machine, AlignmentTimeout(1)) == [Overtake(1)]
    assert feed(machine, BarriersSent(1), Durable(1)) == []  # it crossed; the answer is still to come
    assert feed(machine, RowsOvertaken(1, 2)) == [WriteLogs(1)]
    assert feed(machine, LogsDurable(1)) == [Acknowledge(1, quiet=False)]


def test_a_timeout_after_the_barriers_have_left_changes_nothing():
    machine = subtask("a")
    feed(machine, BarrierTaken("a", 1), BarriersSent(1))
    assert feed(machine, AlignmentTimeout(1)) == []
    feed(machine, Durable(1))
    assert feed(machine, AlignmentTimeout(1)) == []


def test_a_switch_while_a_back_edge_is_recorded_expedites_its_barrier():
    machine = subtask("in", "back", back_edges=frozenset({"back"}))
    feed(machine, BarrierTaken("in", 1), BarrierWaits("back", 1), RowsTaken("back", 1))
    assert feed(machine, AlignmentTimeout(1)) == [Overtake(1), Expedite("back", 1)]
    assert feed(machine, BarrierTaken("back", 1, overtook=2))[0] == StopRecording(1, "back", 3)


@pytest.mark.parametrize("options", [{"final": True}, {"probe": True}, {"savepoint": True}])
def test_54_final_waves_probes_and_savepoints_stay_aligned(options):
    machine = subtask("a", "b")
    assert feed(machine, BarrierWaits("b", 1, **options), BarrierTaken("a", 1, **options)) == [Block("a")]
    assert feed(machine, AlignmentTimeout(1)) == []
    assert feed(machine, BarrierTaken("b", 1, **options))[1] == BroadcastBarrier(
        1, options.get("final", False), options.get("probe", False), savepoint=options.get("savepoint", False)
    )
    feed(machine, Durable(1))
    machine = subtask("a", "b")
    with pytest.raises(InvariantError, match="final, a probe or a savepoint"):
        machine.handle(BarrierTaken("a", 1, overtook=1, **options))


def test_a_barrier_that_overtakes_in_another_row_is_an_error():
    machine = SubtaskMachine("t", ["a"], protocol=PROTOCOLS["aligned"])
    with pytest.raises(InvariantError, match="overtook"):
        machine.handle(BarrierTaken("a", 1, overtook=0))


def test_inputs_that_have_ended_still_bring_barriers_and_the_end_may_be_overtaken():
    machine = subtask("a", "b")
    feed(machine, EndTaken("a"), BarrierTaken("a", 1), AlignmentTimeout(1))
    assert feed(machine, BarrierTaken("b", 1, overtook=2))[0] == StopRecording(1, "b", 2)
    assert feed(machine, EndTaken("b")) == [EndOfInput()]


# ------------------------------------------------------------------------------------------------------------- aborts


@pytest.mark.parametrize(
    ("before", "effects"),
    [
        ([BarrierWaits("a", 1)], []),
        ([BarrierTaken("a", 1)], [Unblock("a")]),
        ([BarrierTaken("a", 1), AlignmentTimeout(1)], [Forget(1)]),
        ([BarrierTaken("a", 1, overtook=1), RowsTaken("b", 1)], [Forget(1)]),
        ([BarrierTaken("a", 1), BarrierTaken("b", 1)], [Forget(1)]),
        ([BarrierTaken("a", 1), BarrierTaken("b", 1), AlignmentTimeout(1)], [Forget(1)]),
    ],
)
def test_a8_an_abort_at_any_point_is_forgotten_and_what_is_late_ignored(before, effects):
    machine = subtask("a", "b")
    feed(machine, *before)
    assert feed(machine, AbortNotice(1)) == effects
    late = [AlignmentTimeout(1), BarrierWaits("b", 1), RowsOvertaken(1, 3), BarriersSent(1), Durable(1)]
    assert feed(machine, *late) == []
    assert not machine.recording("b")
    assert feed(machine, BarrierTaken("a", 2))[0] == WatchAlignment(2)


def test_a8_an_overtaking_barrier_of_an_aborted_id_is_dropped():
    machine = subtask("a", "b")
    feed(machine, AbortNotice(1))
    assert feed(machine, BarrierTaken("a", 1, overtook=2)) == []


def test_a8_a_newer_barrier_may_overtake_the_older_one_of_an_aborted_checkpoint():
    machine = subtask("a", "b")
    feed(machine, BarrierTaken("a", 1))
    effects = feed(machine, BarrierTaken("b", 2, overtook=1))
    assert effects[0] == Decline(1, FailureReason.BARRIER_SKIPPED, "input 'b' brought barrier 2 without 1")
    assert Unblock("a") in effects
    assert Freeze(2, False) in effects
    assert feed(machine, BarrierTaken("b", 1)) == []  # it was overtaken, and comes now


def test_an_overtaking_barrier_ends_an_older_alignment_whose_barrier_its_input_has_brought():
    machine = subtask("a", "b")
    feed(machine, BarrierTaken("a", 1))
    effects = feed(machine, BarrierTaken("a", 2, overtook=0))
    assert effects[0] == Decline(1, FailureReason.BARRIER_SKIPPED, "overtaken by checkpoint 2")
    assert feed(machine, BarrierTaken("b", 1)) == []
    assert machine.pending.keys() == {2}


def test_nobody_answers_what_nobody_asked():
    machine = subtask("a")
    feed(machine, BarrierTaken("a", 1))
    with pytest.raises(InvariantError, match="nobody asked"):
        machine.handle(RowsOvertaken(1, 0))


@pytest.mark.parametrize("protocol", ["unaligned", "synchronous"])
def test_it_takes_one_checkpoint_at_a_time(protocol):
    with pytest.raises(ConfigError, match="one checkpoint at a time"):
        JobConfig(protocol=protocol, max_concurrent=2)
    with pytest.raises(ConfigError, match="aligned_timeout_ms"):
        JobConfig(protocol=protocol, aligned_timeout_ms=-1.0)
