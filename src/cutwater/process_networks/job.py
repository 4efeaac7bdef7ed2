"""A process network on Spark workers: the user's handle, and the coordinator, which deploys the network, takes its
snapshots and goes back to the last one."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from cutwater.config import JobConfig, parse_duration_ms
from cutwater.errors import BuildError, ConfigError, CutwaterError, IncompleteSnapshotError
from cutwater.process_networks.attempt import NetworkArgs
from cutwater.process_networks.cell import Tracer
from cutwater.process_networks.graph import Network, suitable
from cutwater.process_networks.messages import names_of
from cutwater.process_networks.run import PendingSnapshot, Run
from cutwater.process_networks.snapshot import GlobalSnapshot, NetworkStore
from cutwater.protocol.job import messages as j
from cutwater.protocol.job import rescale as r
from cutwater.protocol.job.hosts import Topology
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.links import WorkerLink, now_ms
from cutwater.runtime.control.messages import NetworkDeploy, SnapshotAbort, SnapshotParts, SnapshotTrigger
from cutwater.runtime.driver.driver import Driver, Duties
from cutwater.runtime.failures import first_line
from cutwater.runtime.settings import make_config
from cutwater.runtime.spark_host import SparkHost
from cutwater.runtime.worker.worker import SlotArgs

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from cutwater.runtime.worker.tracing import PartFile

_LOG = logging.getLogger(__name__)
_MAX_CHANNELS = 1 << 16
"""The header of a frame has so many numbers for them."""


class NetworkJob(Run):
    """Obtained from ``Network.start``.  The network runs by itself, until ``stop``.

    When a worker is lost, all processes go back to the last global snapshot: their states, and the messages in the
    channels, are those of the cut.

    Arguments as for ``Network.start``.
    """

    def __init__(
        self,
        network: Network,
        spark: SparkSession | None,
        *,
        workers: int,
        place: Mapping[str, int],
        seed: int,
        restore: GlobalSnapshot | None,
        snapshot_every: str | None,
        checkpoint: str | os.PathLike[str] | None,
        settings: dict[str, Any],
    ) -> None:
        super().__init__(network, suitable(network), restore)
        config = make_config({**settings, "parallelism": workers})
        placement = _placement(network, workers, place)
        if len(network.channels) > _MAX_CHANNELS:
            raise BuildError(
                f"network {network.name!r} has {len(network.channels)} channels, workers can have {_MAX_CHANNELS}"
            )
        every_ms = parse_duration_ms(snapshot_every, name="snapshot_every") if snapshot_every is not None else None
        if checkpoint is not None and every_ms is None:
            raise ConfigError("checkpoint= says where, but not how often", hint="Give snapshot_every='10s' too.")
        from cutwater.spark.session import usable_context

        live = usable_context(spark, workers)
        store = NetworkStore(checkpoint, network.name) if checkpoint is not None else None
        self.uid = uuid.uuid4().hex
        self._condition = threading.Condition()
        self._coordinator = NetworkCoordinator(
            self, config, live, placement=placement, seed=seed, every_ms=every_ms, store=store
        )
        self._coordinator.driver.start()

    # ---------------------------------------------------------------------------------------------- what users call

    @property
    def now_ms(self) -> float:
        """Milliseconds since the epoch."""
        return time.time() * 1000

    @property
    def status(self) -> NetworkStatus:
        """State of the network as it is now."""
        return self._coordinator.status

    @property
    def is_active(self) -> bool:
        return not self._coordinator.driver.ended.is_set()

    def exception(self) -> CutwaterError | None:
        """Error that made the network fail; ``None`` while it runs or if it did not fail."""
        return self._coordinator.driver.error

    def stop(self) -> None:
        """End all processes.  Returns when all workers are gone."""
        self._coordinator.driver.request_end(j.Outcome.STOPPED, "stopped by the user")
        self._coordinator.driver.ended.wait()
        self._coordinator.driver.join()

    # --------------------------------------------------------------------------------------------------- see ``Run``

    def wait_until(self, condition: Callable[[], bool], timeout_ms: float) -> bool:
        """See ``Run.wait_until``.

        Raises:
            CutwaterError: the network has failed or was stopped.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        with self._condition:
            while not condition():
                if self._coordinator.driver.ended.is_set():
                    raise self.exception() or CutwaterError(f"network {self.network.name!r} was stopped")
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._condition.wait(min(left_s, 0.2))  # in slices, so that Ctrl-C gets through
        return True

    def _begin(self, initiators: tuple[str, ...]) -> PendingSnapshot:
        found: list[PendingSnapshot] = []
        self._coordinator.driver.later(lambda: found.append(self.begin_here(initiators)))
        while not self.wait_until(lambda: bool(found), 1000.0):
            pass
        return found[0]

    def give_up(self, pending: PendingSnapshot) -> None:

        def drop() -> None:
            self._pending.pop(pending.id, None)
            self._coordinator.abort(pending.id)

        self._coordinator.driver.later(drop)

    # --------------------------------------------------------------------------------------- in the driver's thread

    def begin_here(self, initiators: tuple[str, ...]) -> PendingSnapshot:
        """Give out an id, and have the initiators triggered."""
        pending = self._new_pending(initiators)
        self._coordinator.begin(pending)
        self.changed()
        return pending

    def attempt_over(self, error: CutwaterError, waiting: set[int]) -> None:
        """Fail the snapshots under way, which will never be complete; keep those that wait to be triggered."""
        kept = {id: p for id, p in self._pending.items() if id in waiting}
        self._pending = {id: p for id, p in self._pending.items() if id not in waiting}
        self._fail_pending(error)
        self._pending = kept

    def changed(self) -> None:
        """Wake whoever waits."""
        with self._condition:
            self._condition.notify_all()


def _placement(network: Network, workers: int, place: Mapping[str, int]) -> dict[str, int]:
    unknown = [p for p in place if p not in network.processes]
    outside = [p for p, slot in place.items() if not 0 <= slot < workers]
    if unknown or outside:
        raise ConfigError(
            f"place= names {names_of(unknown or outside)}, "
            + ("no process" if unknown else f"which is not to be put on one of workers 0 to {workers - 1}")
        )
    free = [p for p in network.processes if p not in place]
    placement = dict(place) | {p: i % workers for i, p in enumerate(free)}
    return {p: placement[p] for p in network.processes}


class NetworkWorker(msgspec.Struct, frozen=True):
    """One worker as it was last seen."""

    slot: int
    pid: int
    host: str
    processes: int
    taken: int = 0
    """Messages and markers taken in this attempt."""


class NetworkStatus(msgspec.Struct, frozen=True):
    """State of a network as it is now."""

    name: str
    phase: str
    attempt: int
    workers: list[NetworkWorker]
    failures: list[str]
    """Reasons for which attempts ended, oldest first."""
    restored: int | None
    """Id of the snapshot that the attempt went on from."""
    waiting: str = ""
    """Text on the workers that it waits for before it goes on, if it lacks any."""


class NetworkCoordinator(Duties):
    """Belongs to a ``NetworkJob``, whose snapshots it performs.

    Args:
        job: the user's handle.
        config: settings; ``parallelism`` is the number of workers.
        context: where the workers run.
        placement: process -> slot.
        every_ms: pause between periodic snapshots; None: none are taken.
        store: where they are kept; None: in memory only.
    """

    def __init__(
        self,
        job: NetworkJob,
        config: JobConfig,
        context: SparkContext,
        *,
        placement: dict[str, int],
        seed: int,
        every_ms: float | None,
        store: NetworkStore | None,
    ) -> None:
        self._job_handle, self._placement, self._seed = job, placement, seed
        self._network: Network = job.network
        self._config, self._every_ms, self._store = config, every_ms, store
        self._next_ms: float | None = None
        self._periodic: PendingSnapshot | None = None
        self._untriggered: list[PendingSnapshot] = []
        self._triggered_id = job.newest_id
        self._hellos: dict[int, c.Hello] = {}
        self._taken: dict[int, int] = {}
        self._told: list[str] = []
        self._restored: int | None = None
        self.name = job.network.name
        self._trace: PartFile | None = None
        self._tracer = self._open_trace(config)
        slots = config.parallelism
        topology, rescaler = Topology(slots, frozenset({(0, 0)})), r.Rescaler(r.Shape(slots, slots))
        group = f"cutwater-{self.name}-{os.getpid()}-{time.monotonic_ns()}"
        self.driver = Driver(
            self,
            self.name,
            config,
            lambda on_end: SparkHost(context, group, on_end),
            self,
            topology=topology,
            rescaler=rescaler,
        )

    # ----------------------------------------------------------------------------------------- from other threads

    @property
    def status(self) -> NetworkStatus:
        hellos = dict(self._hellos)
        sizes = [sum(slot == s for s in self._placement.values()) for slot in range(self._config.parallelism)]
        workers = [
            NetworkWorker(slot, h.pid, h.host, sizes[slot], self._taken.get(slot, 0)) for slot, h in hellos.items()
        ]
        machine, told, restored = self.driver.machine, list(self._told), self._restored
        waiting = machine.waiting.text(now_ms()) if machine.waits else ""
        return NetworkStatus(self.name, machine.phase.value, machine.attempt, workers, told, restored, waiting)

    # ------------------------------------------------------------------------------------------------- snapshots

    def begin(self, pending: PendingSnapshot) -> None:
        """Trigger the initiators, as soon as the network runs."""
        if self.driver.machine.phase is not j.JobPhase.RUNNING:
            self._untriggered.append(pending)
            return
        self._triggered_id = pending.id
        trigger = SnapshotTrigger(self.driver.machine.attempt, pending.id, list(pending.initiators))
        self.driver.group.broadcast(trigger)

    def abort(self, id: int) -> None:
        """Nobody waits for the snapshot any more."""
        self._untriggered = [p for p in self._untriggered if p.id != id]
        if self._tracer is not None:
            self._tracer.aborted(id)
        self.driver.group.broadcast(SnapshotAbort(self.driver.machine.attempt, id))

    def _complete(self, snapshot: GlobalSnapshot) -> None:
        if self._tracer is not None:
            self._tracer.completed(snapshot.id)
        self.driver.failures.progressed()
        self.driver.handle(j.CheckpointCompleted(self.driver.machine.attempt, now_ms()))
        if self._periodic is not None and self._periodic.id == snapshot.id and self._store is not None:
            self._store.save(snapshot)

    # ------------------------------------------------------------------------------------------------ see ``Duties``

    def joined(self, hello: c.Hello) -> None:
        """A worker is there."""
        self._hellos[hello.slot] = hello

    def left(self, slot: int) -> None:
        """A worker is gone."""
        self._hellos.pop(slot, None)

    def note(self, text: str) -> None:
        """Something that the user should know: in the log of this process."""
        _LOG.warning("network %r: %s", self.name, text)

    def copied(self, slot: int, copies: c.CopiesHeld) -> None:
        """Nobody tells of copies: the workers of networks keep none."""

    def worker_args(self, slot: int) -> SlotArgs:
        return NetworkArgs(
            slot=slot,
            address=self.driver.address,
            secret=self.driver.secret,
            job=self.name,
            uid=self._job_handle.uid,
            config=self._config,
            network=self._network,
            placement=self._placement,
            algorithm=self._job_handle.algorithm,
            seed=self._seed,
        )

    def deploy(self, attempt: int, regions: tuple[int, ...] | None) -> None:
        last = self._job_handle.last_snapshot
        self._restored = last.id if last is not None else None
        if self._tracer is not None:
            self._tracer.attempt = attempt
        self._taken.clear()
        links = [self.driver.group.links[slot] for slot in range(self._config.parallelism)]
        for slot, link in enumerate(links):
            mine = [n for n, s in self._placement.items() if s == slot]
            sent: dict[str, int] = {}
            if last is not None:
                ends = {
                    ch.name: ch.source for ch in self._network.channels.values() if self._placement[ch.target] == slot
                }
                sent = {name: last.parts[source].sent[name] for name, source in ends.items()}
            deploy = NetworkDeploy(
                attempt=attempt,
                incarnations=[other.incarnation for other in links],
                peers=[cast(c.Hello, other.hello).data_address for other in links],
                parts=[last.parts[n] for n in mine] if last is not None else None,
                sent=sent,
                last_id=self._triggered_id,
                restored=self._restored,
            )
            link.send(deploy)

    def running(self) -> None:
        waiting, self._untriggered = self._untriggered, []
        for pending in waiting:
            self.begin(pending)
        if self._every_ms is not None:
            self._next_ms = now_ms() + self._every_ms

    def going_back(self, reason: str, regions: tuple[int, ...] | None) -> None:
        reason = first_line(reason)
        self._told.append(reason)
        self._next_ms = None
        self._interrupt(reason)

    def shutting_down(self, reason: str) -> None:
        self._next_ms = None
        self._interrupt(first_line(reason))

    def _interrupt(self, reason: str) -> None:
        waiting = {p.id for p in self._untriggered}
        self._job_handle.attempt_over(
            IncompleteSnapshotError(
                f"the snapshot of network {self.name!r} was not complete when its workers had to start anew: {reason}",
                hint="The network goes on from its last snapshot: take a new one.",
            ),
            waiting,
        )

    def message(self, link: WorkerLink, message: c.FromWorker) -> None:
        match message:
            case SnapshotParts(snapshot=snapshot, parts=parts):
                for part in parts:
                    found = self._job_handle.part_arrived(snapshot, part)
                    if found is not None:
                        self._complete(found)
            case c.Metrics(rows_in=rows):
                self._taken[link.slot] = rows.get("taken", 0)
            case _:
                pass

    def due_ms(self) -> float | None:
        return self._next_ms

    def on_time(self) -> None:
        if self._next_ms is None or self._every_ms is None or now_ms() < self._next_ms:
            return
        self._next_ms = now_ms() + self._every_ms
        if self.driver.machine.phase is j.JobPhase.RUNNING and (self._periodic is None or self._periodic.done):
            self._periodic = self._job_handle.begin_here(self._network.initiators())

    def closing(self) -> None:
        if self._trace is not None:
            self._trace.close()

    def _open_trace(self, config: JobConfig) -> Tracer | None:
        if config.trace_dir is None:
            return None
        from cutwater.runtime.worker.tracing import part_of_driver

        uid = self._job_handle.uid
        self._trace = part_of_driver(config.trace_dir, self.name, uid)
        return Tracer(self._trace, self._network, lambda: time.time() * 1000, run=uid, contents=False)

    def stepped(self) -> None:
        self._job_handle.changed()
