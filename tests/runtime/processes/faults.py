"""Faults that happen inside a worker, at a chosen moment: what ``FakeSpark.prepare`` is set to."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cutwater.protocol.wire import Peer

__all__ = [
    "after_sending",
    "after_taking",
    "barriers_before_rows",
    "before_taking",
    "cut_connections",
    "failing_states",
    "failing_writes",
    "forgetful",
    "forgetting_the_log",
    "happens",
    "markers_first",
    "reporting_at_the_end",
    "sending_before_writing",
]


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
    return _around_taking(kind, marker, times, where, before=True)


def after_taking(
    kind: type, marker: Path, *, times: int = 1, where: Callable[[Any], bool] = lambda message: True
) -> Callable[[Any], None]:
    """The worker dies when it has just acted on such a message of the coordinator."""
    return _around_taking(kind, marker, times, where, before=False)


def _around_taking(
    kind: type, marker: Path, times: int, where: Callable[[Any], bool], *, before: bool
) -> Callable[[Any], None]:
    def prepare(args: Any) -> None:
        from cutwater.runtime.worker.worker import Worker

        take = Worker._take

        def dying(self: Worker, message: Any) -> None:
            if not before:
                take(self, message)
            if isinstance(message, kind) and where(message) and happens(marker, times):
                _die()
            if before:
                take(self, message)

        Worker._take = dying

    return prepare


def after_sending(
    kind: type, marker: Path, *, times: int = 1, where: Callable[[Any], bool] = lambda message: True
) -> Callable[[Any], None]:
    """The worker dies when such a message of its own is on the way to the coordinator."""

    def prepare(args: Any) -> None:
        from cutwater.runtime.control.links import ControlLink

        send = ControlLink.send

        def dying(self: ControlLink, message: Any) -> None:
            send(self, message)
            if isinstance(message, kind) and where(message) and happens(marker, times):
                time.sleep(0.05)  # the link's own thread writes it
                _die()

        ControlLink.send = dying

    return prepare


def cut_connections(marker: Path, *, silent: bool) -> Callable[[Any], None]:
    """Once ``marker`` is there, a connection between workers breaks, or stays open and carries nothing any more.

    What a worker dials goes through a relay in its process, so that the other end and the system notice nothing else.
    """

    def relay(source: socket.socket, target: socket.socket, cut: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if marker.exists() and happens(marker):
                    cut.set()
                if cut.is_set() and silent:
                    continue
                if cut.is_set():
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def prepare(args: Any) -> None:
        from cutwater.runtime.channels import connection as connections

        really = connections.dial

        def dial(*arguments: Any, **more: Any) -> tuple[socket.socket, Peer]:
            far, peer = really(*arguments, **more)
            (near, end), cut = socket.socketpair(), threading.Event()
            far.settimeout(None)
            for pair in ((end, far), (far, end)):
                threading.Thread(target=relay, args=(*pair, cut), daemon=True).start()
            return near, peer

        connections.dial = dial

    return prepare


def failing_writes(count: int, marker: Path, *, slots: tuple[int, ...] = (0,)) -> Callable[[Any], None]:
    """The first ``count`` snapshots of these slots cannot be written: no space left."""

    def prepare(args: Any) -> None:
        from cutwater.storage.snapshot.segment_files import SnapshotWriter

        close = SnapshotWriter.close

        def full(self: SnapshotWriter, **how: Any) -> Any:
            if args.slot in slots and happens(marker, count):
                raise OSError(28, "No space left on device", "the checkpoint's file")
            return close(self, **how)

        SnapshotWriter.close = full

    return prepare


def failing_states(step: str) -> Callable[[Any], None]:
    """The state of a step has something that the format of snapshots does not know."""

    def prepare(args: Any) -> None:
        import pyarrow as pa

        from cutwater.storage.snapshot.segment_files import SnapshotWriter

        add = SnapshotWriter.add

        def unable(self: SnapshotWriter, whose: str, *rest: Any, **more: Any) -> Any:
            if whose == step:
                raise pa.ArrowNotImplementedError(f"no way to write type number {args.slot}")
            return add(self, whose, *rest, **more)

        SnapshotWriter.add = unable

    return prepare


def reporting_at_the_end(args: Any) -> None:
    """Counters go to the driver at the end only, and worker 1 hears of the end after worker 0 has left."""
    from cutwater.runtime.control import messages as c
    from cutwater.runtime.worker import worker
    from cutwater.runtime.worker.peers import PeerLost

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


def barriers_before_rows(args: Any) -> None:
    """A planted bug: a barrier is sent before the rows that wait in the builder, which lie before it."""
    from cutwater.protocol.channel.items import Barrier
    from cutwater.runtime.channels.output import OutputChannel

    def early(self: OutputChannel, id: int, final: bool, overtake: bool, probe: bool, savepoint: bool) -> Any:
        self._end._enqueue(Barrier(id, final, overtake, probe=probe, savepoint=savepoint))
        return []

    OutputChannel.offer_barrier = early


def forgetful(args: Any) -> None:
    """Planted: a replacement asks nobody for the order, and everything else is as it should be."""
    from cutwater.runtime.control.determinant_logs import DeterminantLogs

    begin = DeterminantLogs.begin
    DeterminantLogs.begin = lambda self, own, id: dict.fromkeys(begin(self, own, id), b"")  # type: ignore[method-assign]


def forgetting_the_log(args: Any) -> None:
    """A planted bug: what was recorded of the channels is not written."""
    from cutwater.protocol.subtask.performer import Performer

    overtook = Performer._overtook

    def nothing(self: Performer, effect: Any, checkpoint_id: int, key: Any) -> None:
        self._inputs[key].stop_recording(checkpoint_id)

    Performer._stop_recording = nothing
    Performer._overtook = lambda self, id, overtaken, keep: overtook(self, id, overtaken, keep=False)


def sending_before_writing(marker: Path) -> Callable[[Any], None]:
    """A worker dies when rows have left it and the line of the trace that tells of them is not written."""

    def prepare(args: Any) -> None:
        from cutwater.runtime.worker.tracing import SubtaskTrace

        written = SubtaskTrace.moved

        def dying(self: SubtaskTrace) -> None:
            sent = args.slot == 0 and [c.next_row for c in self._outputs] != self._sent
            if sent and self._sent[0] > 300 and happens(marker):
                time.sleep(0.05)  # what was sent has time to arrive
                _die()
            written(self)

        SubtaskTrace.moved = dying

    return prepare


def markers_first(args: Any) -> None:
    """A planted bug: a marker between workers goes ahead of the messages of the same round (CL1)."""
    from cutwater.process_networks.attempt import NetworkAttempt
    from cutwater.process_networks.messages import Marker

    send = NetworkAttempt._send

    def early(self: NetworkAttempt, spec: Any, item: Any) -> None:
        if isinstance(item, Marker) and spec.name in self._outputs:
            self._outputs[spec.name].offer_barrier(item.snapshot)
        else:
            send(self, spec, item)

    NetworkAttempt._send = early
