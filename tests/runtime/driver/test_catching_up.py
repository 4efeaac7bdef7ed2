"""Who is behind the others after a part of the job went back."""

from __future__ import annotations

from typing import Any, cast

from cutwater.config import JobConfig
from cutwater.runtime.driver.deploying import Deploying


def test_who_has_caught_up_is_heard_only_while_it_is_waited_for() -> None:
    nobody = cast(Any, None)
    deploying = Deploying(nobody, nobody, nobody, JobConfig(recovery="task"), nobody)
    deploying.behind = {(0, 1): 1e9, (1, 1): 1e9}
    assert not deploying.caught_up((0, 1))
    assert deploying.caught_up((1, 1))
    deploying.behind = {(0, 1): 1e9}
    deploying.behind.clear()  # its attempt failed, and what it said was on its way
    assert not deploying.caught_up((0, 1)), "the job does not run, and must not be said to"
