"""A worker's log on its way to the driver."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from cutwater.connectors.console import CONSOLE_LOGGER
from cutwater.runtime.control import messages as c
from cutwater.runtime.worker import worker as worker_log
from cutwater.runtime.worker.worker import LINES_PER_S, log_to_driver


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(worker_log, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def lines(sent: list[c.Log]) -> list[tuple[str, str]]:
    return [(line.level, line.message) for line in sent]


def test_lines_from_the_level_on_are_sent_and_all_is_as_before_afterwards(clock: list[float]) -> None:
    root, sent = logging.getLogger(), list[c.Log]()
    before = root.level, list(root.handlers)
    log = logging.getLogger("a.users.module")
    with log_to_driver(sent.append, "info"):
        log.debug("not this")
        log.info("row %d", 7)
        log.error("bad")
    log.error("behind it")
    assert lines(sent) == [("info", "row 7"), ("error", "bad")]
    assert (root.level, root.handlers) == before


def test_of_a_flood_comes_so_much_a_second_and_the_number_of_the_others(clock: list[float]) -> None:
    sent: list[c.Log] = []
    with log_to_driver(sent.append, "warning"):
        for n in range(LINES_PER_S + 1_234):
            logging.warning("row %d", n)
        logging.getLogger(CONSOLE_LOGGER).error("rows that a console sink shows")
        assert lines(sent)[-2:] == [
            ("warning", f"row {LINES_PER_S - 1}"),
            (c.CONSOLE, "rows that a console sink shows"),
        ]
        clock[0] += 1.0
        logging.warning("later")
    assert lines(sent)[-2:] == [
        ("warning", "1,234 lines of this worker's log were left out: it logs too much"),
        ("warning", "later"),
    ]
