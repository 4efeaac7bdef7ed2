"""Faults that happen inside a worker, at a chosen moment: what ``FakeSpark.prepare`` is set to."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["after_sending", "before_taking", "failing_writes", "happens", "reporting_at_the_end"]


def happens(marker: Path, times: int = 1) -> bool:
    """Note one more occurrence, over all processes; False once there were ``times``."""
    for i in range(times):
        try:
            os.close(os.open(f"{marker}-{i}", os.O_CREAT | os.O_EXCL))
            return True
        except FileExistsError:
            continue
    return False


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_taking(
    kind: type, marker: Path, *, times: int = 1, where: Callable[[Any], bool] = lambda message: True
) -> Callable[[Any], None]:
    """The worker dies when it is about to act on such a message of the coordinator."""

    def prepare(args: Any) -> None:
        from cutwater.runtime.worker import Worker

        take = Worker._take

        def dying(self: Worker, message: Any) -> None:
            if isinstance(message, kind) and where(message) and happens(marker, times):
                _die()
            take(self, message)

        Worker._take = dying

    return prepare


def after_sending(
    kind: type, marker: Path, *, times: int = 1, where: Callable[[Any], bool] = lambda message: True
) -> Callable[[Any], None]:
    """The worker dies when such a message of its own is on the way to the coordinator."""

    def prepare(args: Any) -> None:
        from cutwater.runtime.control_server import ControlLink

        send = ControlLink.send

        def dying(self: ControlLink, message: Any) -> None:
            send(self, message)
            if isinstance(message, kind) and where(message) and happens(marker, times):
                time.sleep(0.05)  # the link's own thread writes it
                _die()

        ControlLink.send = dying

    return prepare


def failing_writes(count: int, marker: Path, *, slots: tuple[int, ...] = (0,)) -> Callable[[Any], None]:
    """The first ``count`` snapshots of these slots cannot be written: no space left."""

    def prepare(args: Any) -> None:
        from cutwater.storage.snapshot import SnapshotWriter

        close = SnapshotWriter.close

        def full(self: SnapshotWriter) -> Any:
            if args.slot in slots and happens(marker, count):
                raise OSError(28, "No space left on device", "the checkpoint's file")
            return close(self)

        SnapshotWriter.close = full

    return prepare


def reporting_at_the_end(args: Any) -> None:
    """Counters go to the driver at the end only, and worker 1 hears of the end after worker 0 has left."""
    from cutwater.runtime import control as c
    from cutwater.runtime import worker
    from cutwater.runtime.peers import PeerLost

    worker._REPORT_S = 3_600.0
    left, post = threading.Event(), worker.Worker.post

    def posted(self: worker.Worker, message: Any) -> None:
        if isinstance(message, c.Stop) and args.slot == 1:
            left.wait(10)
        post(self, message)
        if isinstance(message, PeerLost):
            deadline = time.monotonic() + 10
            while self._mailbox and time.monotonic() < deadline:
                time.sleep(0.001)
            left.set()

    worker.Worker.post = posted
