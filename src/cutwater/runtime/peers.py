"""What every attempt in a worker has, whatever it runs: its number, and a connection to each other worker."""

from __future__ import annotations

import abc
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Protocol

from cutwater.errors import CutwaterError, WireError
from cutwater.protocol.handshake import Peer, Refusal
from cutwater.runtime.connections import Connection, connect

if TYPE_CHECKING:
    from cutwater.runtime import control as c
    from cutwater.runtime.worker import Worker

__all__ = ["ConnectedAttempt", "Deployment", "InterruptedBuildError", "PeerLost"]

_CONNECT_DEADLINE_S = 15.0


class InterruptedBuildError(Exception):
    """The coordinator wants something else before the attempt was built."""


class Deployment(Protocol):
    """The part of a deploy message that says who belongs to the attempt."""

    @property
    def attempt(self) -> int: ...

    @property
    def incarnations(self) -> list[int]:
        """Per slot."""
        ...

    @property
    def peers(self) -> list[tuple[str, int]]:
        """Per slot: address of its data server."""
        ...


class ConnectedAttempt(abc.ABC):
    """One attempt in one worker.  Owned by the worker's loop thread.

    Args:
        deploy: what the coordinator asks for.
        worker: the process it lives in.
    """

    def __init__(self, deploy: Deployment, worker: Worker) -> None:
        self.number = deploy.attempt
        self.running = False
        self.idle_s = 0.0
        self._worker = worker
        self._slot, self._config = worker.args.slot, worker.args.config
        self._connections: dict[int, Connection] = {}
        self._incarnations, self._addresses = deploy.incarnations, deploy.peers
        self._arrived = threading.Event()

    @abc.abstractmethod
    def build(self) -> None:
        """Connect to all workers and restore everything.

        Raises:
            InterruptedBuildError: the coordinator changed its mind.
            CutwaterError: a peer cannot be reached, or the snapshot cannot be read.
        """

    @abc.abstractmethod
    def round(self, now_s: float) -> float:
        """Do some work; returns how long the loop may sleep (0: not at all)."""

    @abc.abstractmethod
    def take(self, message: object) -> None:
        """A message of the coordinator, or something posted to the worker's mailbox."""

    @abc.abstractmethod
    def metrics(self) -> c.Metrics:
        """Counters since the attempt began."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop everything of this attempt; commits nothing."""

    # ------------------------------------------------------------------------------------------------------- peers

    def check_peer(self, peer: Peer) -> Refusal | None:
        """Whether a dialling worker belongs to this attempt (any thread)."""
        if peer.attempt > self.number:
            return Refusal(f"attempt {peer.attempt} is not deployed here yet", later=True)
        if peer.attempt < self.number:
            return Refusal(f"attempt {peer.attempt} is over")
        slots = self._incarnations
        if not 0 <= peer.worker < len(slots) or slots[peer.worker] != peer.incarnation:
            return Refusal(f"worker {peer.worker} was replaced")
        return None

    def accept(self, connection: Connection) -> None:
        """A connection that another worker dialled (any thread)."""
        self._connections[connection.peer.worker] = connection
        self._arrived.set()

    def _connect(self) -> None:
        slot = self._slot
        me = Peer("data", self._worker.args.uid, slot, self.number, self._incarnations[slot])
        for other in range(slot + 1, len(self._addresses)):  # the lower number dials
            address = (self._addresses[other][0], self._addresses[other][1])
            self._connections[other] = connect(
                address,
                me,
                self._worker.args.secret,
                deadline_s=_CONNECT_DEADLINE_S,
                max_frame_bytes=self._config.max_frame_bytes,
            )
        deadline = time.monotonic() + _CONNECT_DEADLINE_S
        while len(self._connections) < len(self._addresses) - 1:
            self._arrived.wait(0.05)
            self._arrived.clear()
            if self._worker.wants_something_else:
                raise InterruptedBuildError
            if time.monotonic() > deadline:
                missing = sorted(set(range(slot)) - set(self._connections))
                raise WireError(f"workers {missing} did not dial worker {slot} within {_CONNECT_DEADLINE_S:.0f} s")

    def _start_connections(self) -> None:
        for connection in self._connections.values():
            connection.start(self._lost)

    def _close_connections(self) -> None:
        self.running = False
        for connection in list(self._connections.values()):
            with contextlib.suppress(Exception):
                connection.close()

    def _lost(self, connection: Connection, error: CutwaterError) -> None:
        self._worker.post(PeerLost(self.number, error))


class PeerLost:
    """The connection to another worker ended."""

    __match_args__ = ("attempt", "error")
    __slots__ = ("attempt", "error")

    def __init__(self, attempt: int, error: CutwaterError) -> None:
        self.attempt, self.error = attempt, error
