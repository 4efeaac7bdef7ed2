"""What Cutwater holds its own sources, sinks and stores to, for the tests of yours.  Needs pytest.

A subclass in a module of tests says what is tested, by fixtures, and inherits the tests:

    class TestQueueSource(SourceContract):
        @pytest.fixture
        def source(self, tmp_path):
            fill(tmp_path / "jobs.db", ROWS)
            return queue(tmp_path / "jobs.db")

        @pytest.fixture
        def rows(self):
            return ROWS

``docs/guide/connectors.md`` has a source and a sink with their tests.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "cutwater.testing.sink_job", "cutwater.testing.sinks", "cutwater.testing.sources", "cutwater.testing.stores"
)

from cutwater.testing.sink_job import SinkTarget  # noqa: E402
from cutwater.testing.sinks import SinkBasicsContract, SinkContract  # noqa: E402
from cutwater.testing.sources import SourceContract  # noqa: E402
from cutwater.testing.stores import StoreContract  # noqa: E402

__all__ = ["SinkBasicsContract", "SinkContract", "SinkTarget", "SourceContract", "StoreContract"]
