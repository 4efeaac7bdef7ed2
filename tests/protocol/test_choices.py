"""Determinant logs as bytes: what was written is read, from any mark on, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutwater.errors import WireError
from cutwater.protocol.determinants import Choice, ChoiceKind, ChoiceReader, ChoiceWriter

INPUTS = 3
numbers = st.integers(0, 2**40)
inputs = st.integers(0, INPUTS - 1)
watermarks = st.integers(-(2**63), 2**63 - 1)
K = ChoiceKind
none = st.just(0)
no_body = st.just(b"")
choices = st.one_of(
    st.builds(Choice, st.just(K.ROWS), inputs, numbers, none, no_body),
    st.builds(Choice, st.just(K.TIMED_ROWS), inputs, numbers, watermarks, no_body),
    st.builds(Choice, st.sampled_from([K.WATERMARK, K.IDLE]), inputs, none, watermarks, no_body),
    st.builds(Choice, st.just(K.END), inputs, none, none, no_body),
    st.builds(Choice, st.just(K.MARK), none, none, none, no_body),
    st.builds(Choice, st.sampled_from([K.TIMERS, K.CLOCK]), none, none, numbers, no_body),
    st.builds(Choice, st.just(K.READ), numbers, numbers, st.integers(0, 1), no_body),
    st.builds(Choice, st.just(K.READ_ON), none, none, none, no_body),
    st.builds(Choice, st.just(K.SPLITS), numbers, none, none, no_body),
    st.builds(Choice, st.just(K.VERDICT), st.integers(0, 1), none, watermarks, no_body),
    st.builds(Choice, st.just(K.STEP_TIME), none, none, watermarks, no_body),
    st.builds(Choice, st.just(K.IDLE_SPLIT), numbers, none, none, no_body),
    st.builds(Choice, st.just(K.ASYNC_RESULTS), numbers, none, none, st.binary(max_size=300)),
)


def read(data: bytes) -> list[Choice]:
    reader, found = ChoiceReader(data, INPUTS), []
    while (choice := reader.next()) is not None:
        found.append(choice)
    return found


@given(st.lists(choices, max_size=30), st.lists(choices, max_size=10))
def test_what_follows_a_mark_is_read_without_what_lies_before(before: list[Choice], after: list[Choice]) -> None:
    writer = ChoiceWriter(INPUTS)
    head = b"".join(writer.entry(choice) for choice in [*before, Choice(ChoiceKind.MARK)])
    tail = b"".join(writer.entry(choice) for choice in after)
    assert read(head + tail) == [*before, Choice(ChoiceKind.MARK), *after]
    assert read(tail) == after


@given(st.lists(choices, max_size=20), st.lists(choices, max_size=10))
def test_a_writer_goes_on_where_a_reader_ended(before: list[Choice], after: list[Choice]) -> None:
    writer = ChoiceWriter(INPUTS)
    data = b"".join(writer.entry(choice) for choice in before)
    reader = ChoiceReader(data, INPUTS)
    while reader.next() is not None:
        pass
    going_on = ChoiceWriter.after(reader)
    assert read(data + b"".join(going_on.entry(choice) for choice in after)) == [*before, *after]


@given(st.binary(max_size=40))
def test_any_bytes_are_choices_or_refused(data: bytes) -> None:
    try:
        read(data)
    except WireError:
        pass


@pytest.mark.parametrize(
    ("data", "story"),
    [
        (b"\x80", "ends within a number"),
        (b"\x0f", "begins no choice"),
        (b"\x30\x01", "begins no choice"),
        (b"\x0c\x03ab", "ends within async results of 3 bytes"),
    ],
    ids=["half a number", "unknown kind", "input 3 of 3", "half an async result"],
)
def test_damage_is_named(data: bytes, story: str) -> None:
    with pytest.raises(WireError, match=story):
        read(data)


def test_a_busy_subtask_needs_few_bytes_for_a_call() -> None:
    """Two inputs take turns, and the watermark rises by a millisecond with each batch of 8,192 rows."""
    writer, size = ChoiceWriter(2), 0
    for n in range(1_000):
        entry = writer.entry(Choice(ChoiceKind.TIMED_ROWS, n % 2, 8_192, 1_700_000_000_000_000 + 1_000 * n))
        size += len(entry)
    assert size <= 6 * 1_000
