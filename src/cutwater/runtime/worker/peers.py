"""What every attempt in a worker has, whatever it runs: its number, and connections to others."""

from __future__ import annotations

import abc
import contextlib
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from cutwater.errors import CutwaterError, WireError
from cutwater.protocol.job.recovery_scope import Place
from cutwater.protocol.wire import Peer, Refusal
from cutwater.runtime.channels.connection import Connection, connect

if TYPE_CHECKING:
    from cutwater.runtime.control import messages as c
    from cutwater.runtime.control.messages import NetworkDeploy
    from cutwater.runtime.worker.worker import Worker

_CONNECT_DEADLINE_S = 15.0


class InterruptedBuildError(Exception):
    """The coordinator wants something else before the attempt was built."""


class ConnectedAttempt(abc.ABC):
    """One attempt in one worker.  Owned by the worker's loop thread.

    Args:
        deploy: what the coordinator asks for.
        worker: the process it lives in.
        region: number of the part of the job that it runs.
        others: whom it has a connection with; ``None``: those in all other workers.
    """

    def __init__(
        self, deploy: c.Deploy | NetworkDeploy, worker: Worker, region: int = 0, others: frozenset[Place] | None = None
    ) -> None:
        self.number, self.region = deploy.attempt, region
        self.abandoned = False
        """The coordinator wants something else before it was built."""
        self.building = True
        self.early: list[object] = []
        """Messages that came before it was built."""
        self._builder: threading.Thread | None = None
        self.running = False
        self.idle_s = 0.0
        self.rested = False
        """The loop has slept since the last round: there was nothing to do."""
        self._worker = worker
        self._slot, self._config = worker.args.slot, worker.args.config
        self._connections: dict[Place, Connection] = {}
        self._incarnations, self._addresses = deploy.incarnations, deploy.peers
        self._place = self._slot, region
        everywhere = frozenset((slot, region) for slot in range(len(deploy.peers)))
        self._others = (everywhere if others is None else others) - {self._place}
        self._arrived = threading.Event()

    @abc.abstractmethod
    def build(self) -> None:
        """Connect to all workers and restore everything.

        Raises:
            InterruptedBuildError: the coordinator changed its mind.
            CutwaterError: a peer cannot be reached, or the snapshot cannot be read.
        """

    def try_build(self) -> Exception | None:
        """Build; what went wrong, if something did."""
        try:
            self.build()
        except Exception as e:
            return e
        return None

    def build_aside(self) -> None:
        """Build in a thread, and put ``Built`` into the mailbox."""
        name = f"cutwater-build-{self.region}"
        self._builder = threading.Thread(target=lambda: self._worker.post(Built(self, self.try_build())), name=name)
        self._builder.start()

    def abandon(self) -> None:
        """Nobody wants it any more; returns when nobody builds it, either."""
        self.abandoned = True
        self._arrived.set()
        if self._builder is not None:
            self._builder.join()

    @abc.abstractmethod
    def round(self, now_s: float) -> float:
        """Do some work; returns how long the loop may sleep (0: not at all)."""

    @abc.abstractmethod
    def take(self, message: object) -> None:
        """A message of the coordinator, or something posted to the worker's mailbox."""

    @abc.abstractmethod
    def metrics(self) -> c.Metrics:
        """Counters since the attempt began."""

    def finish(self) -> None:
        """The coordinator wants the worker to end: do what it asked for before."""
        return

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
        if place_of(peer) not in self._others:
            return Refusal(f"nothing passes between here and region {peer.own_region} of worker {peer.worker}")
        return None

    def accept(self, connection: Connection) -> None:
        """A connection that another worker dialled (any thread)."""
        self._connections[place_of(connection.peer)] = connection
        self._arrived.set()

    def _connect(self) -> None:
        slot, uid = self._slot, self._worker.args.uid
        for other in sorted(other for other in self._others if self._dials(other)):
            me = Peer("data", uid, slot, self.number, self._incarnations[slot], other[1], self.region)
            address = self._addresses[other[0]]
            self._connections[other] = connect(
                (address[0], address[1]),
                me,
                self._worker.args.secret,
                deadline_s=_CONNECT_DEADLINE_S,
                max_frame_bytes=self._config.max_frame_bytes,
                wanted=self._check_wanted,
            )
        deadline = time.monotonic() + _CONNECT_DEADLINE_S
        while self._connections.keys() < self._others:
            self._arrived.wait(0.05)
            self._arrived.clear()
            self._check_wanted()
            if time.monotonic() > deadline:
                missing = sorted({slot for slot, _ in self._others - self._connections.keys()})
                raise WireError(f"workers {missing} did not dial worker {slot} within {_CONNECT_DEADLINE_S:.0f} s")

    def _dials(self, other: Place) -> bool:
        """Whether this one dials that one, or waits for it."""
        return other > self._place

    @property
    def has_company(self) -> bool:
        """Attempts of other regions in this very worker must be built beside it, since it may wait for them."""
        return False

    def _check_wanted(self) -> None:
        if self.abandoned or self._worker.wants_something_else(self.region):
            raise InterruptedBuildError

    def _start_connections(self) -> None:
        for connection in self._connections.values():
            connection.start(self._lost)

    def _close_connections(self) -> None:
        self.running = False
        for connection in list(self._connections.values()):
            with contextlib.suppress(Exception):
                connection.close()

    def _lost(self, connection: Connection, error: CutwaterError) -> None:
        self._post(PeerLost(error, connection))

    def _post(self, message: object) -> None:
        """Put something into the worker's mailbox for this attempt, if it lives then (any thread)."""
        self._worker.post(Posted(self, message))


def place_of(peer: Peer) -> Place:
    """Who dialled."""
    return peer.worker, peer.own_region


class Posted(msgspec.Struct, frozen=True):
    """Something that a thread of an attempt has to say to it."""

    attempt: ConnectedAttempt
    message: object


class Built(msgspec.Struct, frozen=True):
    """An attempt is built, or what went wrong."""

    attempt: ConnectedAttempt
    error: Exception | None


class PeerLost(msgspec.Struct, frozen=True):
    """The connection to another worker ended."""

    error: CutwaterError
    connection: Connection


class PeerArrived(msgspec.Struct, frozen=True):
    """A replacement dialled."""

    connection: Connection


class ExpectedPeer(msgspec.Struct, frozen=True):
    """The next worker in a place that went back."""

    attempt: int
    incarnation: int
    checkpoint_id: int
