"""One test per sentence of rules A1 to A8 (aligned barriers, acyclic), on one subtask."""

from __future__ import annotations

import pytest

from cutwater.config import JobConfig
from cutwater.errors import InvariantError
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.checkpoint.messages import JobRunning, SendTrigger, Tick
from cutwater.protocol.messages import (
    AbortNotice,
    Acknowledge,
    BarrierTaken,
    Block,
    BroadcastBarrier,
    Commit,
    CompleteNotice,
    Decline,
    Durable,
    EndOfInput,
    EndTaken,
    Forget,
    Freeze,
    RowsTaken,
    SourceExhausted,
    Trigger,
    Unblock,
    WriteFailed,
)
from cutwater.protocol.protocols import PROTOCOLS, FailureReason
from cutwater.protocol.subtask.machine import IDS_REMEMBERED, SubtaskMachine
from cutwater.protocol.subtask.stages import Phase, Stage


class Checked(SubtaskMachine):
    def handle(self, event):
        effects = super().handle(event)
        self.validate()
        return effects


def subtask(*inputs, protocol="aligned", **options):
    return Checked("sum 0", inputs, protocol=PROTOCOLS[protocol], **options)


def feed(machine, *events):
    return [effect for event in events for effect in machine.handle(event)]


# ------------------------------------------------------------------------------------------------------------- A1, A2


def test_a1_ids_grow_over_attempts_drivers_and_leftovers():
    coordinator = CheckpointCoordinator(JobConfig(interval_ms=10.0), frozenset("st"), frozenset("s"), 41)
    feed(coordinator, JobRunning(3, 0.0))
    (trigger,) = feed(coordinator, Tick(10.0))
    assert isinstance(trigger, SendTrigger)
    assert trigger.checkpoint_id == 42


def test_a2_a_source_snapshots_its_position_then_broadcasts():
    source = subtask()
    assert feed(source, Trigger(1)) == [Freeze(1, False), BroadcastBarrier(1, False)]


def test_a2_a_repeated_trigger_does_nothing():
    source = subtask(last_checkpoint_id=4)
    assert feed(source, Trigger(4)) == []
    feed(source, Trigger(6))
    assert feed(source, Trigger(6)) == []


# ----------------------------------------------------------------------------------------------------------------- A3


def test_a3_an_input_is_blocked_once_its_barrier_came_and_others_go_on():
    machine = subtask("a", "b", "c")
    assert feed(machine, BarrierTaken("b", 1)) == [Block("b")]
    assert [machine.can_take(i) for i in "abc"] == [True, False, True]
    assert feed(machine, RowsTaken("a", 5)) == []


def test_a3_taking_from_a_blocked_input_is_an_invariant_error_with_its_story():
    machine = subtask("a", "b")
    feed(machine, RowsTaken("b", 3), BarrierTaken("a", 1))
    with pytest.raises(InvariantError) as error:
        machine.handle(RowsTaken("a", 1))
    for part in ("sum 0", "aligned", "'a', which is blocked", "RowsTaken(input='b', rows=3)", "BarrierTaken(input='a'"):
        assert part in str(error.value)


# ------------------------------------------------------------------------------------------------------------- A4, A5


def test_a4_when_the_barrier_is_in_on_all_inputs_freeze_then_broadcast_then_unblock():
    machine = subtask("a", "b", "c")
    feed(machine, BarrierTaken("b", 1), BarrierTaken("a", 1))
    assert feed(machine, BarrierTaken("c", 1)) == [
        Freeze(1, False),
        BroadcastBarrier(1, False),
        Unblock("b"),
        Unblock("a"),
    ]
    assert all(machine.can_take(i) for i in "abc")


def test_a4_writing_is_asynchronous_and_a_newer_checkpoint_may_freeze_meanwhile():
    machine = subtask("a")
    feed(machine, BarrierTaken("a", 1), BarrierTaken("a", 2))
    assert machine.pending == {1: Stage.WRITING, 2: Stage.WRITING}
    assert feed(machine, Durable(2), Durable(1)) == [Acknowledge(2), Acknowledge(1)]


@pytest.mark.parametrize("order", ["abcd", "dcba", "cadb"])
def test_a5_inputs_are_unblocked_in_the_order_of_blocking(order):
    machine = subtask(*"abcde")
    feed(machine, *(BarrierTaken(i, 1) for i in order))
    effects = feed(machine, BarrierTaken("e", 1))
    assert [e.input for e in effects if isinstance(e, Unblock)] == list(order)
    assert machine.unblocked == tuple(order)


# ----------------------------------------------------------------------------------------------------------------- A6


def test_a6_the_acknowledgement_is_sent_only_once_everything_is_durable():
    machine = subtask("a")
    assert not any(isinstance(e, Acknowledge) for e in feed(machine, BarrierTaken("a", 1)))
    assert feed(machine, Durable(1)) == [Acknowledge(1)]


def test_a6_a_failed_write_declines_and_forgets():
    machine = subtask("a")
    feed(machine, BarrierTaken("a", 1))
    assert feed(machine, WriteFailed(1, "disk full")) == [
        Decline(1, FailureReason.WRITE_FAILED, "disk full"),
        Forget(1),
    ]
    assert feed(machine, Durable(1)) == []  # a report that comes late


@pytest.mark.parametrize("report", [Durable(1), WriteFailed(1, "")])
def test_a6_a_report_of_the_writer_about_what_never_began_is_an_invariant_error(report):
    with pytest.raises(InvariantError, match="never began"):
        subtask("a").handle(report)


def test_a6_durable_twice_or_before_the_freeze_is_an_invariant_error():
    machine = subtask("a", "b")
    feed(machine, BarrierTaken("a", 1))
    with pytest.raises(InvariantError, match="not handed to the writer"):
        machine.handle(Durable(1))


# ----------------------------------------------------------------------------------------------------------------- A7


def test_a7_an_exhausted_source_goes_on_forwarding_barriers():
    source = subtask()
    assert feed(source, SourceExhausted()) == [EndOfInput()]
    assert feed(source, Trigger(1)) == [Freeze(1, False), BroadcastBarrier(1, False)]


def test_a7_end_of_data_is_passed_on_when_the_last_input_ended():
    machine = subtask("a", "b")
    assert feed(machine, EndTaken("a")) == []
    assert feed(machine, EndTaken("b")) == [EndOfInput()]
    assert machine.phase is Phase.ENDED


def test_a7_an_ended_input_still_brings_barriers_and_is_waited_for():
    machine = subtask("a", "b")
    feed(machine, EndTaken("a"))
    assert feed(machine, BarrierTaken("b", 1)) == [Block("b")]
    assert feed(machine, BarrierTaken("a", 1))[:2] == [Freeze(1, False), BroadcastBarrier(1, False)]


def test_a7_the_final_checkpoint_finishes_and_its_abort_takes_that_back():
    machine = subtask("a")
    effects = feed(machine, EndTaken("a"), BarrierTaken("a", 1, final=True))
    assert effects == [EndOfInput(), Freeze(1, True), BroadcastBarrier(1, True)]
    assert machine.phase is Phase.FINISHED
    assert feed(machine, AbortNotice(1)) == [Forget(1)]
    assert machine.phase is Phase.ENDED
    assert feed(machine, BarrierTaken("a", 2, final=True), Durable(2), CompleteNotice(2))[-1] == Commit(2)


def test_a7_a_source_stopped_with_a_savepoint_reads_no_more_until_that_is_aborted():
    source = subtask()
    feed(source, Trigger(1, final=True))
    assert source.phase is Phase.STOPPED
    assert not source.may_read
    feed(source, AbortNotice(1))
    assert source.may_read


@pytest.mark.parametrize("event", [RowsTaken("a", 1), EndTaken("a")])
def test_a7_rows_after_the_end_and_a_second_end_are_invariant_errors(event):
    machine = subtask("a", "b")
    feed(machine, EndTaken("a"))
    with pytest.raises(InvariantError):
        machine.handle(event)


def test_w5_ends_come_again_after_a_restore():
    machine = subtask("a", "b", last_checkpoint_id=3)
    assert machine.ended == frozenset()
    assert feed(machine, EndTaken("b")) == []
    assert feed(machine, EndTaken("a")) == [EndOfInput()]
    assert feed(subtask(last_checkpoint_id=3), SourceExhausted()) == [EndOfInput()]


# ----------------------------------------------------------------------------------------------------------------- A8


def test_a8_an_abort_unblocks_in_order_and_forgets():
    machine = subtask("a", "b", "c")
    feed(machine, BarrierTaken("c", 1), BarrierTaken("a", 1))
    assert feed(machine, AbortNotice(1)) == [Unblock("c"), Unblock("a")]
    assert machine.pending == {}


def test_a8_an_abort_after_the_freeze_drops_what_was_frozen():
    machine = subtask("a")
    feed(machine, BarrierTaken("a", 1))
    assert feed(machine, AbortNotice(1)) == [Forget(1)]


def test_a8_late_barriers_of_an_aborted_id_are_dropped():
    machine = subtask("a", "b")
    feed(machine, BarrierTaken("a", 1), AbortNotice(1))
    assert feed(machine, BarrierTaken("b", 1)) == []
    assert feed(machine, AbortNotice(2), BarrierTaken("a", 2), BarrierTaken("b", 2)) == []  # aborted before it came


def test_a8_barriers_up_to_the_restored_id_are_dropped():
    assert feed(subtask("a", last_checkpoint_id=7), BarrierTaken("a", 6), BarrierTaken("a", 7)) == []


def test_a8_a_later_barrier_on_an_input_that_never_brought_the_older_one_aborts_that_here():
    machine = subtask("a", "b")
    feed(machine, BarrierTaken("a", 1))
    effects = feed(machine, BarrierTaken("b", 2))
    assert effects[0].checkpoint_id == 1
    assert effects[0].reason is FailureReason.BARRIER_SKIPPED
    assert effects[1:] == [Unblock("a"), Block("b")]
    assert feed(machine, BarrierTaken("a", 2))[:1] == [Freeze(2, False)]


def test_a8_an_older_barrier_that_comes_after_a_newer_one_began_is_declined_once():
    machine = subtask("a", "b", "c", protocol="at_least_once")
    feed(machine, BarrierTaken("a", 2))
    (declined,) = feed(machine, BarrierTaken("b", 1))
    assert (declined.checkpoint_id, declined.reason) == (1, FailureReason.BARRIER_SKIPPED)
    assert feed(machine, BarrierTaken("c", 1), BarrierTaken("c", 2)) == []
    assert feed(machine, BarrierTaken("b", 2))[0] == Freeze(2, False)


def test_a8_the_memory_of_aborted_ids_is_bounded():
    machine = subtask("a")
    feed(machine, *(AbortNotice(i) for i in range(1, IDS_REMEMBERED + 50)))
    assert feed(machine, BarrierTaken("a", IDS_REMEMBERED + 40)) == []


@pytest.mark.parametrize("second", [1, 2])
def test_barriers_of_one_input_must_grow(second):
    machine = subtask("a")
    feed(machine, BarrierTaken("a", 2))
    with pytest.raises(InvariantError, match="brought barrier"):
        machine.handle(BarrierTaken("a", second))


# ------------------------------------------------------------------------------------------------- complete and commit


def test_sinks_commit_on_the_complete_notice_and_once():
    machine = subtask("a")
    feed(machine, BarrierTaken("a", 1), Durable(1))
    assert feed(machine, CompleteNotice(1)) == [Commit(1)]
    assert feed(machine, CompleteNotice(1)) == []


def test_a_newer_notice_commits_all_older_and_the_older_one_then_nothing():
    machine = subtask("a")
    feed(machine, BarrierTaken("a", 1), Durable(1), BarrierTaken("a", 2), Durable(2))
    assert feed(machine, CompleteNotice(2), CompleteNotice(1), CompleteNotice(2)) == [Commit(2)]
    assert machine.pending == {}


def test_a_plain_savepoint_commits_nothing():
    machine = subtask("a")
    feed(machine, BarrierTaken("a", 1), Durable(1), BarrierTaken("a", 2), Durable(2))
    assert feed(machine, CompleteNotice(1, commit=False), CompleteNotice(2)) == [Commit(2)]


@pytest.mark.parametrize("before", [[], [BarrierTaken("a", 1)]])
def test_a_checkpoint_cannot_complete_without_an_acknowledgement_from_here(before):
    machine = subtask("a")
    feed(machine, *before)
    with pytest.raises(InvariantError):
        machine.handle(CompleteNotice(1))


def test_an_aborted_checkpoint_cannot_complete_even_if_a_newer_one_has():
    machine = subtask("a")
    feed(machine, BarrierTaken("a", 1), Durable(1), AbortNotice(1), BarrierTaken("a", 2), Durable(2), CompleteNotice(2))
    with pytest.raises(InvariantError, match="checkpoint 1 completed"):
        machine.handle(CompleteNotice(1))


# -------------------------------------------------------------------------------------------------- the other protocols


def test_at_least_once_counts_barriers_and_never_blocks():
    machine = subtask("a", "b", protocol="at_least_once")
    assert feed(machine, BarrierTaken("a", 1), BarrierTaken("a", 2), RowsTaken("a", 1)) == []
    assert feed(machine, BarrierTaken("b", 1)) == [Freeze(1, False), BroadcastBarrier(1, False)]
    assert feed(machine, BarrierTaken("b", 2)) == [Freeze(2, False), BroadcastBarrier(2, False)]


def test_none_takes_only_the_final_checkpoint():
    with pytest.raises(InvariantError, match="none"):
        subtask(protocol="none").handle(Trigger(1))
    assert feed(subtask(protocol="none"), Trigger(1, final=True))[0] == Freeze(1, True)


def test_a_barrier_that_is_final_on_one_input_only_is_an_invariant_error():
    machine = subtask("a", "b")
    feed(machine, BarrierTaken("a", 1, final=True))
    with pytest.raises(InvariantError, match="final"):
        machine.handle(BarrierTaken("b", 1))


@pytest.mark.parametrize("event", [Trigger(1), SourceExhausted(), BarrierTaken("z", 1), EndTaken("z"), "nonsense"])
def test_events_that_do_not_belong_here_are_invariant_errors(event):
    with pytest.raises(InvariantError):
        subtask("a").handle(event)


def test_a_machine_checks_how_it_is_built():
    with pytest.raises(InvariantError, match="twice"):
        subtask("a", "a")
    with pytest.raises(InvariantError, match="back-edges"):
        subtask("a", back_edges=frozenset("a"))
