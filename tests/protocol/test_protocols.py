"""A protocol is a row: what settings refuse of it, and what a job promises under it, is what the row says."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from cutwater.config import JobConfig, ProtocolName
from cutwater.errors import ConfigError
from cutwater.plan.checks import guarantee_of
from cutwater.protocol.protocols import PROTOCOLS, FreezeOn


def accepted(**settings: Any) -> bool:
    try:
        JobConfig(**settings)
    except ConfigError:
        return False
    return True


def test_settings_know_the_names_of_all_rows() -> None:
    assert set(get_args(ProtocolName)) == set(PROTOCOLS)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_settings_refuse_what_the_row_does_not_allow(name: str) -> None:
    row = PROTOCOLS[name]
    assert accepted(protocol=name)
    assert accepted(protocol=name, max_concurrent=2) == row.concurrent
    assert accepted(protocol=name, recovery="task") == (row.guarantee == "exactly-once")
    assert accepted(protocol=name, scheduler="adaptive") == (row.freeze_on is not FreezeOn.NEVER)
    assert accepted(protocol=name, state_replicas=1, parallelism=2) == (row.freeze_on is not FreezeOn.NEVER)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_promise_of_a_row_is_what_its_cuts_allow(name: Any) -> None:
    """Rows go into a snapshot twice where an input is read on before the freeze and is not recorded after it."""
    row = PROTOCOLS[name]
    open_and_unrecorded = row.before_freeze.value == "open" and row.after_freeze.value == "record_back_edges"
    never = row.freeze_on is FreezeOn.NEVER
    wanted = "at-most-once" if never else "at-least-once" if open_and_unrecorded else "exactly-once"
    assert guarantee_of(name) == wanted
