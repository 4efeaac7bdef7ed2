"""For all unit tests."""

from __future__ import annotations

import pytest

from cutwater.state.table import capture


@pytest.fixture(autouse=True)
def small_tables_are_captured_like_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have small tables, which are copied at once; what needs testing is the capture of large ones."""
    monkeypatch.setattr(capture, "COPIED_AT_ONCE_BYTES", 0)
