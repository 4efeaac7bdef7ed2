"""What a program consists of is packed for one worker after the other."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

from cutwater.runtime import spark_host

BUSY = threading.Lock()


class Delicate:
    """Cannot be packed by two threads at once."""

    def __reduce__(self) -> tuple[Any, ...]:
        assert BUSY.acquire(blocking=False)
        try:
            time.sleep(0.02)
            return Delicate, ()
        finally:
            BUSY.release()


def test_the_threads_of_two_slots_do_not_pack_the_program_at_once() -> None:
    args = cast("Any", SimpleNamespace(steps={"in": Delicate()}))
    with ThreadPoolExecutor(4) as slots:
        made = list(slots.map(spark_host._slot_function, [args] * 4))
    assert len(made) == 4
