"""Fixtures of the tests of connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from wire_ends import Ends, no_thread_is_left

__all__ = ["ends", "no_thread_is_left"]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    for connection in ends.connections:
        connection.close()
    for sock in ends.sockets:
        sock.close()
