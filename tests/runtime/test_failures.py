"""Which failures count, and what the user is told in the end."""

from __future__ import annotations

import pytest

from cutwater.errors import JobFailedError, ResourceError, UserCodeError
from cutwater.protocol.job.messages import JobPhase
from cutwater.runtime.failures import FailureLedger

STORY = "function 'f' raised KeyError: 'x'\nTraceback (most recent call last):\n  line 3, in f"


def test_a_user_error_keeps_its_type_step_and_traceback_and_gets_the_verdict():
    ledger = FailureLedger()
    assert ledger.note("UserCodeError", STORY, "score", True, "Mend f.")
    error = ledger.final(f"{ledger.error} (restarted 3 times, as often as restart.attempts allows)")
    assert type(error) is UserCodeError
    assert (error.step, error.hint) == ("score", "Mend f.")
    assert error.message == f"{STORY}\nThe job was given up: restarted 3 times, as often as restart.attempts allows"


def test_the_same_failure_is_recognised_whatever_row_and_worker_tell_of_it():
    """Rows are shown cut to a length, so that their text differs in more than its numbers."""
    ledger = FailureLedger()
    text = "function 'f' raised ZeroDivisionError on row {} of the batch, {{at: {}}} (in subtask {} of 'in -> f')"
    rows = [(0, "datetime(2020, 1, 1, tzinfo=zoneinfo...", 0), (3, "datetime(2020, 1, 1, 0, 12, tzinfo=z...", 1)]
    told = [ledger.note("UserCodeError", text.format(*row), "f", True) for row in (*rows, rows[0])]
    assert told == [True, True, False]


def test_an_error_that_no_restart_helps_against_is_shown_as_it_is():
    ledger = FailureLedger()
    assert not ledger.note("DataError", "numbers.csv: line 7 is no number", "in", True)
    assert ledger.final(str(ledger.error)) is ledger.error


def test_a_worker_lost_after_another_failure_is_not_mistaken_for_it():
    ledger = FailureLedger()
    ledger.note("UserCodeError", STORY, "score", True)
    error = ledger.final("worker 1 was lost: the connection was closed (restart strategy 'none')")
    assert type(error) is JobFailedError
    assert str(error) == "worker 1 was lost: the connection was closed (restart strategy 'none')"


def test_too_few_cores_are_a_matter_of_resources():
    assert type(FailureLedger().final("1 of 2 workers got a core of the Spark cluster; free 1 core")) is ResourceError


@pytest.mark.parametrize(
    ("phase", "first", "hopeless"),
    [
        (JobPhase.RUNNING, True, True),
        (JobPhase.DEPLOYING, True, True),
        (JobPhase.DRAINING, True, True),
        (JobPhase.RESTARTING, False, True),
        (JobPhase.FORMING, False, True),
        (JobPhase.ENDING, False, False),
        (JobPhase.ENDED, False, False),
    ],
)
def test_of_one_attempt_the_first_failure_counts(phase: JobPhase, first: bool, hopeless: bool):
    assert FailureLedger.counts("UserCodeError", True, phase) is first
    assert FailureLedger.counts("DataError", True, phase) is hopeless
    assert FailureLedger.counts("StorageError", False, phase) is hopeless
