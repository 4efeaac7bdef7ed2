"""The subtask loop's decisions: what goes first, what waits, and how many rows a call gets."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cutwater.protocol.channel.items import Head
from cutwater.protocol.messages import AbortNotice, BarrierTaken, Trigger
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.call_size import MIN_ROWS
from cutwater.protocol.subtask.loop import (
    OUTSIDE_EVERY,
    FireTimers,
    Idle,
    IdleReason,
    ReadSource,
    Resume,
    SubtaskLoop,
    TakeControl,
    TakeRows,
)
from cutwater.protocol.subtask.machine import SubtaskMachine

E, R, C, U = Head.EMPTY, Head.ROWS, Head.CONTROL, Head.URGENT


def loop_of(*inputs, max_rows=8192, budget_ms=5.0):
    machine = SubtaskMachine("t", inputs, protocol=PROTOCOLS["aligned"])
    return SubtaskLoop(machine, inputs, budget_ms, max_rows), machine


def head_of_a_loop(*outside, inside=(), back=("back",), max_rows=100):
    machine = SubtaskMachine(
        "head 0",
        (*outside, *inside, *back),
        protocol=PROTOCOLS["aligned"],
        back_edges=frozenset(back),
        loop_inputs=frozenset([*inside, *back]),
    )
    return SubtaskLoop(machine, (*outside, *inside, *back), 5.0, max_rows), machine


def decide(loop, *heads, full=False, pending=False, ready=False, timers=False, loop_rows=0):
    return loop.decide(
        heads,
        outputs_full=full,
        operator_pending=pending,
        source_ready=ready,
        timers_due=timers,
        loop_rows=loop_rows,
    )


def test_pending_work_of_the_operator_comes_first():
    loop, _ = loop_of("a")
    assert decide(loop, C, pending=True) == Resume()


def test_with_a_full_output_no_rows_are_made_but_control_items_go():
    loop, _ = loop_of("a", "b")
    full = Idle(IdleReason.OUTPUTS_FULL)
    assert decide(loop, R, E, full=True) == full
    assert {decide(loop, R, C, full=True) for _ in range(100)} == {TakeControl(1)}
    assert decide(loop, R, C, full=True, pending=True) == full  # a freeze must not see half-done work
    source, _ = loop_of()
    assert decide(source, full=True, ready=True) == full


def test_timers_that_are_due_take_turns_with_everything_else():
    loop, _ = loop_of("a", "b")
    taken = [decide(loop, R, C, timers=True) for _ in range(6)]
    assert taken[::2] == [FireTimers()] * 3
    assert taken[1::2] == [TakeControl(1)] * 3
    assert [decide(loop, E, E, timers=True) for _ in range(2)] == [FireTimers(), Idle(IdleReason.NOTHING_TO_DO)]
    source, _ = loop_of()
    assert {type(decide(source, ready=True, timers=True)) for _ in range(2)} == {FireTimers, ReadSource}


def test_no_timer_fires_over_a_full_output_before_pending_work_or_after_a_final_barrier():
    loop, _ = loop_of("a")
    assert {decide(loop, E, full=True, timers=True) for _ in range(4)} == {Idle(IdleReason.NOTHING_TO_DO)}
    assert {decide(loop, R, pending=True, timers=True) for _ in range(4)} == {Resume()}
    assert {decide(loop, U, timers=True) for _ in range(4)} == {TakeControl(0)}
    loop, machine = loop_of()
    machine.handle(Trigger(1, final=True))
    assert {decide(loop, ready=True, timers=True) for _ in range(4)} == {Idle(IdleReason.STOPPED)}
    halting = SubtaskMachine("t", (), protocol=PROTOCOLS["synchronous"])
    loop = SubtaskLoop(halting, (), 5.0, 100)
    halting.handle(Trigger(1))
    assert {decide(loop, ready=True, timers=True) for _ in range(4)} == {Idle(IdleReason.HALTED)}


def test_a_source_reads_when_it_is_ready_and_not_after_a_final_barrier():
    loop, machine = loop_of()
    assert decide(loop, ready=True) == ReadSource(loop.calls.rows)
    assert decide(loop) == Idle(IdleReason.NOTHING_TO_DO)
    machine.handle(Trigger(1, final=True))
    assert decide(loop, ready=True) == Idle(IdleReason.STOPPED)
    machine.handle(AbortNotice(1))
    assert isinstance(decide(loop, ready=True), ReadSource)


def test_a3_nothing_is_taken_from_a_blocked_input():
    loop, machine = loop_of("a", "b")
    machine.handle(BarrierTaken("a", 1))
    assert decide(loop, R, R).input == 1
    assert decide(loop, C, R).input == 1
    assert decide(loop, R, E) == Idle(IdleReason.BLOCKED)
    assert decide(loop, E, E) == Idle(IdleReason.NOTHING_TO_DO)


def test_a5_after_the_unblocking_the_turn_is_with_the_input_blocked_first():
    for order in ("cab", "bca", "acb"):
        loop, machine = loop_of("a", "b", "c", "d")
        for input in order:
            machine.handle(BarrierTaken(input, 1))
        assert decide(loop, R, R, R, R).input == 3
        machine.handle(BarrierTaken("d", 1))
        assert decide(loop, R, R, R, R).input == "abcd".index(order[0])


def test_rows_are_taken_round_robin():
    loop, _ = loop_of(*"abc")
    assert [decide(loop, R, R, R).input for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [decide(loop, R, E, R).input for _ in range(4)] == [2, 0, 2, 0]


def test_a_control_item_goes_before_rows_of_other_inputs():
    loop, _ = loop_of(*"abc")
    assert decide(loop, R, R, C) == TakeControl(2)


def test_a_stream_of_control_items_does_not_starve_rows_nor_rows_starve_control_items():
    loop, _ = loop_of(*"abc")
    taken = Counter(str(type(decide(loop, C, R, R)).__name__) + "x" for _ in range(500))
    assert taken["TakeRowsx"] >= 15
    assert taken["TakeControlx"] >= 400


def test_every_input_with_rows_has_its_turn_whatever_the_others_do():
    rng = random.Random(1)
    loop, _ = loop_of(*"abcd")
    waited = 0
    for _ in range(3000):
        action = decide(loop, *(rng.choice([E, R, C]) for _ in range(3)), R)
        waited = 0 if action == TakeRows(3, loop.calls.rows) else waited + 1
        assert waited <= 3 + 8 * 4 * 4


def test_rows_of_the_loop_go_first_while_more_than_a_call_of_them_waits():
    loop, _ = head_of_a_loop("a", "b", back=("back", "again"))
    assert [decide(loop, R, R, R, R, loop_rows=101).input for _ in range(4)] == [2, 3, 2, 3]
    assert [decide(loop, R, R, E, R, loop_rows=101).input for _ in range(2)] == [3, 3]
    assert [decide(loop, R, R, R, R, loop_rows=100).input for _ in range(4)] == [0, 1, 2, 3]
    assert [decide(loop, R, R, E, E, loop_rows=101).input for _ in range(2)] == [0, 1]  # it has a barrier at its head
    assert decide(loop, C, R, R, R, loop_rows=101) == TakeControl(0)
    assert decide(loop, R, R, R, R, full=True, loop_rows=101) == Idle(IdleReason.OUTPUTS_FULL)


def test_rows_that_never_leave_the_loop_do_not_keep_the_others_out():
    loop, _ = head_of_a_loop("a", "b")
    taken = [decide(loop, R, R, R, loop_rows=10**9).input for _ in range(4 * OUTSIDE_EVERY)]
    assert Counter(taken) == {2: 4 * (OUTSIDE_EVERY - 1), 0: 2, 1: 2}


def test_every_input_has_its_turn_while_the_loop_fills_and_empties():
    loop, _ = head_of_a_loop("a", "b", back=("back", "again"))
    taken = Counter(decide(loop, R, R, R, R, loop_rows=n % 2 * 101).input for n in range(160))
    assert taken == {0: 20, 1: 20, 2: 60, 3: 60} or min(taken.values()) >= 20


def test_c2_rows_from_outside_are_taken_while_the_back_edge_is_blocked():
    loop, machine = head_of_a_loop("a", "b")
    machine.handle(BarrierTaken("back", 1))
    assert {decide(loop, R, R, R, loop_rows=10**9).input for _ in range(4)} == {0, 1}
    machine.handle(BarrierTaken("a", 1))
    machine.handle(BarrierTaken("b", 1))
    assert [decide(loop, R, R, R, loop_rows=10**9).input for _ in range(3)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("outside", "inside", "back", "first"),
    [
        (["a"], [], ["back"], [1]),
        (["a"], ["x"], ["back"], [1, 2]),
        ([], ["x"], ["back"], [1]),  # the head of an inner loop
        (["a"], ["x"], [], [1]),  # a loop that is entered elsewhere too
        ([], ["x"], [], []),
        (["a", "b"], [], [], []),
    ],
)
def test_what_goes_first_is_what_comes_from_the_innermost_loop(outside, inside, back, first):
    loop, _ = head_of_a_loop(*outside, inside=inside, back=back)
    assert list(loop.loop_first) == first


def test_c7_putting_rows_of_the_loop_first_makes_nobody_wait():
    """Whatever is to be done without the preference is to be done with it; only rows of another input may be taken."""
    rng = random.Random(2)
    for _ in range(3000):
        pair = [head_of_a_loop("a", "b", inside=["x"], back=["back"]) for _ in range(2)]
        for input in rng.sample(["a", "b", "x", "back"], rng.randrange(4)):
            for _, machine in pair:
                machine.handle(BarrierTaken(input, 1))
        heads = [rng.choice([E, R, C]) for _ in range(4)]
        full = rng.random() < 0.2
        plain, first = (
            decide(loop, *heads, full=full, loop_rows=n) for (loop, _), n in zip(pair, (0, 999), strict=True)
        )
        assert type(plain) is type(first)
        if isinstance(first, TakeRows):
            assert heads[first.input] == R
            assert pair[1][1].can_take(["a", "b", "x", "back"][first.input])
        else:
            assert plain == first


def test_rows_per_call_adapt_to_the_budget_within_their_bounds():
    loop, _ = loop_of("a", max_rows=10_000)
    for _ in range(40):
        loop.observe(loop.calls.rows, loop.calls.rows * 0.01)  # 10 us a row: 500 rows are 5 ms
    assert 450 <= loop.calls.rows <= 550
    assert decide(loop, R) == TakeRows(0, loop.calls.rows)
    for _ in range(40):
        loop.observe(loop.calls.rows, loop.calls.rows * 10.0)
    assert loop.calls.rows == MIN_ROWS
    for _ in range(60):
        loop.observe(loop.calls.rows, loop.calls.rows * 1e-6)
    assert loop.calls.rows == 10_000


def test_one_call_far_over_budget_is_answered_at_once():
    loop, _ = loop_of("a", max_rows=8192)
    for _ in range(2):  # the first call does not count
        loop.observe(4096, 1.0)
    assert loop.calls.rows == 8192
    loop.observe(8192, 8192.0)
    assert loop.calls.rows == MIN_ROWS


def test_short_calls_of_few_rows_say_little_about_the_cost_of_a_row():
    loop, _ = loop_of("a", max_rows=8192)
    for _ in range(2):
        loop.observe(8192, 2.0)
    for _ in range(50):
        loop.observe(1, 0.05)  # the overhead of a call, not the cost of a row
    assert loop.calls.rows > 2000


@pytest.mark.parametrize("max_rows", [1, 10, MIN_ROWS])
def test_a_small_max_rows_bounds_everything(max_rows):
    loop, _ = loop_of("a", max_rows=max_rows)
    loop.observe(max_rows, 1000.0)
    assert loop.calls.rows == max_rows
    loop.observe(0, 5.0)
    assert loop.calls.rows == max_rows


def test_an_urgent_barrier_goes_before_everything_also_from_a_blocked_input():
    loop, machine = loop_of("a", "b")
    machine.handle(BarrierTaken("a", 1))
    assert decide(loop, U, C) == TakeControl(0)
    assert decide(loop, U, R, full=True) == TakeControl(0)


def test_pending_work_is_finished_over_full_outputs_while_an_urgent_barrier_waits():
    """Bounded work; a barrier that waited for free outputs would wait for the slowest consumer."""
    loop, _ = loop_of("a", "b")
    assert decide(loop, R, U, full=True, pending=True) == Resume()
