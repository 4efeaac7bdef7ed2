"""One attempt in one worker: its subtasks, their channels and the snapshots in progress."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from cutwater.errors import CutwaterError, StorageError, WireError
from cutwater.operators.base import MIN_WATERMARK
from cutwater.protocol import messages as m
from cutwater.protocol.handshake import Peer, Refusal
from cutwater.runtime import control as c
from cutwater.runtime.connections import Connection, connect
from cutwater.runtime.restore import Restore
from cutwater.runtime.snapshots import FrozenSubtask, SnapshotService, Written
from cutwater.runtime.subtask import Subtask
from cutwater.runtime.wiring import Wiring

if TYPE_CHECKING:
    from cutwater.runtime.worker import Worker

__all__ = ["Attempt", "InterruptedBuildError"]

_CONNECT_DEADLINE_S = 15.0


class InterruptedBuildError(Exception):
    """The coordinator wants something else before the attempt was built."""


class Attempt:
    """Everything of one attempt.  Owned by the worker's loop thread.

    Args:
        deploy: what the coordinator asks for.
        worker: the process it lives in.
    """

    def __init__(self, deploy: c.Deploy, worker: Worker) -> None:
        self.number = deploy.attempt
        self.running = False
        self.idle_s = 0.0
        self._deploy, self._worker = deploy, worker
        self._slot, self._plan, self._config = worker.args.slot, worker.args.plan, worker.args.config
        self._connections: dict[int, Connection] = {}
        self._arrived = threading.Event()
        self._subtasks: list[Subtask] = []
        self._by_key: dict[tuple[int, int], Subtask] = {}
        self._written: dict[int, Written] = {}
        self._acknowledged: dict[int, set[tuple[int, int]]] = {}
        self._counters: dict[str, dict[str, int]] = {}
        self._started_s = time.monotonic()
        self._snapshots: SnapshotService | None = None

    # ------------------------------------------------------------------------------------------------------ build

    def check_peer(self, peer: Peer) -> Refusal | None:
        """Whether a dialling worker belongs to this attempt (any thread)."""
        if peer.attempt > self.number:
            return Refusal(f"attempt {peer.attempt} is not deployed here yet", later=True)
        if peer.attempt < self.number:
            return Refusal(f"attempt {peer.attempt} is over")
        slots = self._deploy.incarnations
        if not 0 <= peer.worker < len(slots) or slots[peer.worker] != peer.incarnation:
            return Refusal(f"worker {peer.worker} was replaced")
        return None

    def accept(self, connection: Connection) -> None:
        """A connection that another worker dialled (any thread)."""
        self._connections[connection.peer.worker] = connection
        self._arrived.set()

    def build(self) -> None:
        """Connect to all workers, build the subtasks and restore them.

        Raises:
            InterruptedBuildError: the coordinator changed its mind.
            CutwaterError: a peer cannot be reached, or the snapshot cannot be read.
        """
        self._connect()
        deploy, config = self._deploy, self._config
        restore = Restore.load(self._worker.store, self._worker.args.job, deploy, self._plan)
        wiring = Wiring(
            self._plan,
            config,
            slot=self._slot,
            attempt=self.number,
            job_uid=self._worker.args.uid,
            connections=self._connections,
            restore=restore,
            deploy=deploy,
            notify=self._worker.signal.set,
            count=self._count,
        )
        self._subtasks = wiring.build(self)
        self._by_key = {s.key: s for s in self._subtasks}
        self._snapshots = SnapshotService(
            self._worker.store,
            self._worker.args.job,
            attempt=self.number,
            incarnation=self._slot,
            subtasks=len(self._subtasks),
            inline_threshold_bytes=config.inline_threshold_bytes,
            done=self._worker.post,
        )
        for connection in self._connections.values():
            connection.start(self._lost)

    def _connect(self) -> None:
        deploy, slot = self._deploy, self._slot
        me = Peer("data", self._worker.args.uid, slot, self.number, deploy.incarnations[slot])
        for other in range(slot + 1, len(deploy.peers)):  # the lower number dials
            address = (deploy.peers[other][0], deploy.peers[other][1])
            self._connections[other] = connect(
                address,
                me,
                self._worker.args.secret,
                deadline_s=_CONNECT_DEADLINE_S,
                max_frame_bytes=self._config.max_frame_bytes,
            )
        deadline = time.monotonic() + _CONNECT_DEADLINE_S
        while len(self._connections) < len(deploy.peers) - 1:
            self._arrived.wait(0.05)
            self._arrived.clear()
            if self._worker.wants_something_else:
                raise InterruptedBuildError
            if time.monotonic() > deadline:
                missing = sorted(set(range(slot)) - set(self._connections))
                raise WireError(f"workers {missing} did not dial worker {slot} within {_CONNECT_DEADLINE_S:.0f} s")

    def _lost(self, connection: Connection, error: CutwaterError) -> None:
        self._worker.post(PeerLost(self.number, error))

    def close(self) -> None:
        """Stop everything of this attempt; commits nothing."""
        self.running = False
        for connection in list(self._connections.values()):
            with contextlib.suppress(Exception):
                connection.close()
        if self._snapshots is not None:
            self._snapshots.close()  # first: its thread uses the sinks' writers
        for subtask in self._subtasks:
            with contextlib.suppress(Exception):
                subtask.close()

    # ------------------------------------------------------------------------------------------------------ running

    def round(self, now_s: float) -> float:
        """A turn of every subtask; returns how long the loop may sleep (0: not at all)."""
        worked = False
        for subtask in self._subtasks:
            worked |= subtask.round(now_s)
        wake_s = min((s.flush_if_due(now_s) for s in self._subtasks), default=float("inf"))
        if worked:
            return 0.0
        sleep_s = min((s.wait_s(now_s) for s in self._subtasks), default=float("inf"))
        return max(0.0, min(sleep_s, wake_s - now_s))

    def take(self, message: object) -> None:
        """A message of the coordinator, or the outcome of a snapshot."""
        match message:
            case c.Start():
                self.running = True
            case c.Trigger(checkpoint_id=checkpoint_id, final=final):
                for subtask in self._subtasks:
                    if subtask.source is not None:
                        subtask.trigger(m.Trigger(checkpoint_id, final))
            case c.AssignSplits(step=step, splits=splits, no_more=no_more):
                for subtask in self._subtasks:
                    if subtask.source is not None and subtask.source.step == step:
                        subtask.source.assign(splits, no_more)
            case c.CompleteNotice(checkpoint_id=checkpoint_id):
                for subtask in self._subtasks:
                    subtask.handle(m.CompleteNotice(checkpoint_id))
                self._worker.link.send(c.Committed(self.number, checkpoint_id))
            case c.AbortNotice(checkpoint_id=checkpoint_id, latest_completed=latest):
                self._acknowledged.pop(checkpoint_id, None)
                self._written.pop(checkpoint_id, None)
                for subtask in self._subtasks:
                    subtask.handle(m.AbortNotice(checkpoint_id, latest))
            case Written():
                self._on_written(message)
            case PeerLost(attempt=attempt, error=error):
                if attempt == self.number:
                    raise error
            case _:
                pass

    def _on_written(self, written: Written) -> None:
        if written.attempt != self.number:
            return
        if written.fatal:
            raise StorageError(f"checkpoint {written.checkpoint_id}: a sink could not pre-commit: {written.fatal}")
        checkpoint_id = written.checkpoint_id
        self._written[checkpoint_id] = written
        for subtask in self._subtasks:
            failed = m.WriteFailed(checkpoint_id, written.error)
            subtask.handle(failed if written.error else m.Durable(checkpoint_id))
        if written.error:
            self._written.pop(checkpoint_id, None)

    # ------------------------------------------------------------------------------- what subtasks ask for (port)

    def submit_snapshot(self, frozen: FrozenSubtask) -> None:
        assert self._snapshots is not None
        self._snapshots.submit(frozen)

    def forget_snapshot(self, checkpoint_id: int) -> None:
        assert self._snapshots is not None
        self._snapshots.forget(checkpoint_id)

    def acknowledge(self, subtask: tuple[int, int], checkpoint_id: int) -> None:
        """One message for all subtasks of the worker, once the last of them acknowledges."""
        done = self._acknowledged.setdefault(checkpoint_id, set())
        done.add(subtask)
        if len(done) < len(self._subtasks):
            return
        del self._acknowledged[checkpoint_id]
        w = self._written.pop(checkpoint_id)
        self._worker.link.send(
            c.Ack(self.number, checkpoint_id, w.subtasks, w.entries, round(w.freeze_ms, 3), round(w.write_ms, 3))
        )

    def decline(self, subtask: tuple[int, int], effect: m.Decline) -> None:
        vertex, index = subtask
        self._worker.link.send(
            c.Decline(self.number, effect.checkpoint_id, vertex, index, effect.reason.code, effect.detail)
        )

    def finished(self, subtask: tuple[int, int]) -> None:
        self._worker.link.send(c.Finished(self.number, *subtask))

    # ------------------------------------------------------------------------------------------------------ metrics

    def _count(self, step: str, metric: str, amount: int) -> None:
        counters = self._counters.setdefault(step, {})
        counters[metric] = counters.get(metric, 0) + amount

    def metrics(self) -> c.Metrics:
        """Counters since the attempt began."""
        rows_in: dict[str, int] = {}
        rows_out: dict[str, int] = {}
        watermarks: dict[str, int] = {}
        for subtask in self._subtasks:
            for node in subtask.chain.nodes:
                rows_in[node.step] = rows_in.get(node.step, 0) + node.rows_in
                rows_out[node.step] = rows_out.get(node.step, 0) + node.rows_out
            if subtask.chain.watermark != MIN_WATERMARK:
                watermarks[subtask.chain.nodes[0].step] = subtask.chain.watermark
        elapsed_ms = (time.monotonic() - self._started_s) * 1000
        busy_ms = sum(s.busy_s for s in self._subtasks) * 1000
        return c.Metrics(
            attempt=self.number,
            time_ms=elapsed_ms,
            rows_in=rows_in,
            rows_out=rows_out,
            watermarks=watermarks,
            counters=self._counters,
            busy_ms=busy_ms,
            backpressured_ms=sum(s.full_s for s in self._subtasks) * 1000,
            idle_ms=self.idle_s * 1000,
        )


class PeerLost:
    """The connection to another worker ended."""

    __match_args__ = ("attempt", "error")
    __slots__ = ("attempt", "error")

    def __init__(self, attempt: int, error: CutwaterError) -> None:
        self.attempt, self.error = attempt, error
