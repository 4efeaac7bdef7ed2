"""Where workers find the driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cutwater.runtime.spark_host import SparkHost


def test_in_local_mode_everything_listens_on_loopback() -> None:
    context: Any = SimpleNamespace(master="local[4]")
    assert SparkHost(context, "job", lambda slot, error: None).address == "127.0.0.1"
