"""What a change log knows, and when it does not look."""

from __future__ import annotations

import numpy as np

from cutwater.state.table.changes import ChangeLog, Changes


def _gids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def _found(changes: Changes, since: int) -> list[int] | None:
    found = changes.since(since)
    return None if found is None else found[0].tolist()


def test_it_rests_ever_longer_while_most_rows_change_and_never_guesses_what_it_missed() -> None:
    log = ChangeLog()
    log.cut(1)
    checkpoint_id, rests = 1, []
    for _ in range(7):
        log.mark(_gids(1, 2, 3))
        log.learn(most_changed=True)
        checkpoint_id += 1
        assert _found(log.cut(checkpoint_id), checkpoint_id - 1) == [1, 2, 3], "what was marked before the rest counts"
        rest = 0
        while _found(log.cut(checkpoint_id + 1), checkpoint_id) is None:
            log.mark(_gids(4))
            checkpoint_id, rest = checkpoint_id + 1, rest + 1
        checkpoint_id += 1
        rests.append(rest)
    assert rests == [1, 2, 4, 8, 16, 16, 16]


def test_changes_missed_by_a_rest_are_not_told_since_a_freeze_before_its_end() -> None:
    log = ChangeLog()
    log.cut(1)
    log.learn(most_changed=True)
    log.cut(2)  # the rest begins
    log.mark(_gids(7))
    log.cut(3)  # and ends
    log.mark(_gids(8))
    changes = log.cut(4)
    assert [_found(changes, since) for since in (1, 2, 3)] == [None, None, [8]]


def test_a_quiet_interval_makes_the_next_rest_short_again() -> None:
    log = ChangeLog()
    log.cut(1)
    for most in (True, False, True):
        log.learn(most_changed=most)
        log.cut(2)
        log.cut(3)
    assert _found(log.cut(4), 3) == []


def test_an_interval_in_which_most_rows_have_changed_is_given_up_at_once() -> None:
    log = ChangeLog(rows=lambda: 4)
    log.cut(1)
    log.mark(_gids(0, 0, 0, 1))
    assert log.tracking, "half of the rows are not most"
    log.mark(_gids(2, 2, 2))
    assert not log.tracking
    assert _found(log.cut(2), 1) is None
    assert _found(log.cut(3), 2) is None, "as after a word from outside, it rests for a freeze"
    log.mark(_gids(3))
    assert _found(log.cut(4), 3) == [3]


def test_before_the_first_freeze_nothing_is_marked() -> None:
    asked: list[int] = []
    log = ChangeLog(rows=lambda: asked.append(1) or 1_000)
    log.mark(_gids(5))
    assert asked == [], "who marks asks at once how many rows there are"
    log.cut(1)
    assert _found(log.cut(2), 1) == []
    log.mark(_gids(5))
    assert asked
