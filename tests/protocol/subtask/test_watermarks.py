"""Merging of watermarks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import InvariantError
from cutwater.protocol.subtask.watermarks import InputTime, WatermarkMerger, merged_time


def updated(inputs, *updates):
    merger = WatermarkMerger(inputs)
    return merger, [merger.update(*u) for u in updates]


def test_the_smallest_active_input_counts_and_only_a_rise_is_told():
    _, told = updated("ab", ("a", 10, False), ("b", 7, False), ("b", 7, False), ("b", 12, False), ("a", 11, False))
    assert told == [None, 7, None, 10, 11]


def test_an_idle_input_does_not_hold_the_others_back_until_it_is_active_again():
    merger, told = updated("ab", ("a", 10, False), ("b", MIN_WATERMARK, True), ("a", 20, False))
    assert told == [None, 10, 20]
    assert merger.update("b", 5, False) is None  # never falls
    assert merger.combined == 20
    assert merger.update("a", 30, False) is None  # b is active and has only said 5
    assert merger.update("b", 25, False) == 25


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_when_all_are_idle_the_order_of_falling_idle_makes_no_difference(order):
    merger, _ = updated("ab", ("a", 10, False), ("b", 20, False))
    for input in order:
        merger.update(input, MIN_WATERMARK, True)
    assert merger.combined == 20
    assert merger.idle


def test_an_ended_input_counts_as_the_end_of_time_and_the_last_end_ends_all():
    merger, _ = updated("ab", ("a", 10, False), ("b", 5, False))
    assert merger.end("b") == 10
    assert merger.end("a") == MAX_WATERMARK
    assert not merger.idle


def test_the_end_of_one_input_does_not_end_an_idle_one():
    merger, _ = updated("ab", ("a", 10, False), ("b", MAX_WATERMARK, False))
    assert merger.update("a", 10, True) is None
    assert merger.combined == 10
    assert merger.idle


def test_a_snapshot_restores_every_input_and_the_combined_value():
    merger, _ = updated("abc", ("a", 10, False), ("b", 3, True), ("c", MAX_WATERMARK, False))
    again = WatermarkMerger("abc")
    again.restore(merger.snapshot(), merger.combined)
    assert (again.snapshot(), again.combined) == (merger.snapshot(), 10)
    assert again.update("a", 12, False) == 12
    with pytest.raises(KeyError):
        WatermarkMerger("a").restore({"z": InputTime()}, 0)


updates = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-5, 5) | st.just(MAX_WATERMARK), st.booleans()))


@given(updates)
def test_it_agrees_with_the_definition(sequence):
    merger, state, combined = WatermarkMerger("abc"), dict.fromkeys("abc", (MIN_WATERMARK, False)), MIN_WATERMARK
    for input, watermark, idle in sequence:
        state[input] = (max(watermark, state[input][0]), idle)
        open = {i: s for i, s in state.items() if s[0] != MAX_WATERMARK}
        active = [w for w, is_idle in open.values() if not is_idle]
        now = min(active) if active else max((w for w, _ in open.values()), default=MAX_WATERMARK)
        expected = now if now > combined else None
        combined = max(combined, now)
        assert merger.update(input, watermark, idle) == expected
        assert merger.combined == combined


def test_w5_the_time_of_no_input_is_not_the_end_of_time() -> None:
    with pytest.raises(InvariantError, match="not the end of time"):
        merged_time([])
    assert WatermarkMerger(["in"], loop_inputs=frozenset({"in"})).outside.watermark == MAX_WATERMARK


def test_w5_rows_behind_the_end_of_time_are_an_error_but_in_a_loop() -> None:
    merger = WatermarkMerger(["a", "b"])
    merger.end("a")
    merger.rows("b")
    with pytest.raises(InvariantError, match="'a' brought rows behind the end of its time"):
        merger.rows("a")
    head = WatermarkMerger(["in", "back"], frozenset({"back"}), frozenset({"in", "back"}))
    head.end("in")
    head.rows("in")
