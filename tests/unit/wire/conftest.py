"""Fixtures of the tests of connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from wire_ends import Ends, until


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    for connection in ends.connections:
        connection.close()
    for sock in ends.sockets:
        sock.close()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    until(lambda: set(threading.enumerate()) <= before)
