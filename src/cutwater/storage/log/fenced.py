"""What a driver is told whose job is another one's by now."""

from __future__ import annotations

from datetime import UTC, datetime

from cutwater.errors import FencedError
from cutwater.storage.log.entries import LogState


def fenced_error(job: str, attempt: int, state: LogState) -> FencedError:
    """Who owns the job instead of an attempt.

    Args:
        job: its folder.
        attempt: of the driver that is told.
        state: what the log says.
    """
    since = datetime.fromtimestamp(state.began_ms / 1000, UTC).isoformat(timespec="seconds")
    if state.finished:
        return FencedError(
            f"job {job!r} finished, with attempt {state.attempt} of {state.driver or 'nobody'}",
            hint="Nothing is left to do; stop this driver.",
        )
    if (over := state.handed_over) is not None:
        return FencedError(
            f"job {job!r} was handed over to job {over.job!r} at checkpoint {over.checkpoint_id}",
            hint=f"Job {over.job!r} goes on in {over.directory}. To take this one back: stop that one, then start "
            f"with restore={over.savepoint!r}.",
        )
    return FencedError(
        f"attempt {attempt} of job {job!r} was superseded by attempt {state.attempt} "
        f"of {state.driver or 'nobody'}, begun {since}",
        hint="Nothing was committed; stop this driver, the other one goes on.",
    )
