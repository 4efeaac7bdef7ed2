"""A process network on Spark workers, and the user's handle on it."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cutwater.config import JobConfig, parse_duration_ms
from cutwater.errors import BuildError, ConfigError, CutwaterError
from cutwater.process_networks.coordinator import NetworkCoordinator, NetworkStatus
from cutwater.process_networks.graph import Network, suitable
from cutwater.process_networks.messages import names_of
from cutwater.process_networks.run import PendingSnapshot, Run
from cutwater.process_networks.saving import NetworkStore
from cutwater.process_networks.snapshot import GlobalSnapshot
from cutwater.protocol.job.messages import Outcome
from cutwater.runtime.control.process_network_messages import ProcessPart
from cutwater.runtime.driver.driver import MakeHost
from cutwater.runtime.hosts.spark import SparkHost
from cutwater.runtime.settings import make_config

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MAX_CHANNELS = 1 << 16
"""The header of a frame has so many numbers for them."""


class NetworkJob(Run):
    """Obtained from ``Network.start``.  The network runs by itself, until ``stop``.

    When a worker is lost, all processes go back to the last global snapshot: their states, and the messages in the
    channels, are those of the cut.
    """

    def __init__(
        self,
        network: Network,
        config: JobConfig,
        host: MakeHost,
        *,
        placement: dict[str, int],
        seed: int,
        restore: GlobalSnapshot | None,
        every_ms: float | None,
        store: NetworkStore | None,
    ) -> None:
        super().__init__(network, suitable(network), restore)
        self.uid = uuid.uuid4().hex
        self._condition = threading.Condition()
        self._coordinator = NetworkCoordinator(
            self, config, host, placement=placement, seed=seed, every_ms=every_ms, store=store
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
        self._coordinator.driver.request_end(Outcome.STOPPED, "stopped by the user")
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
                    raise self._coordinator.failure()
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
        """See ``Run.give_up``."""

        def drop() -> None:
            self._pending.pop(pending.id, None)
            self._coordinator.abort(pending.id)

        self._coordinator.driver.later(drop)

    # --------------------------------------------------------------------------------------- in the driver's thread

    @property
    def newest_id(self) -> int:
        """The highest id that was given to a snapshot."""
        return self._newest_id

    def begin_here(self, initiators: tuple[str, ...]) -> PendingSnapshot:
        """Give out an id, and have the initiators triggered."""
        pending = self._new_pending(initiators)
        self._coordinator.begin(pending)
        self.changed()
        return pending

    def part_arrived(self, id: int, part: ProcessPart) -> GlobalSnapshot | None:
        """A process has done its part; the snapshot, if that was the last one."""
        return self._part_arrived(id, part)

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


def start_network(
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
) -> NetworkJob:
    """See ``Network.start``."""
    network.check()
    config = make_config({**settings, "parallelism": workers})
    placement = _placement(network, workers, place)
    if len(network.channels) > _MAX_CHANNELS:
        raise BuildError(
            f"network {network.name!r} has {len(network.channels)} channels, workers can have {_MAX_CHANNELS}"
        )
    every_ms = parse_duration_ms(snapshot_every, name="snapshot_every") if snapshot_every is not None else None
    if checkpoint is not None and every_ms is None:
        raise ConfigError("checkpoint= says where, but not how often", hint="Give snapshot_every='10s' too.")
    from cutwater.spark.session import usable_session

    live = usable_session(spark, workers)
    store = NetworkStore(checkpoint, network.name) if checkpoint is not None else None
    group = f"cutwater-{network.name}-{os.getpid()}-{time.monotonic_ns()}"
    return NetworkJob(
        network,
        config,
        lambda on_end: SparkHost(live, group, on_end),
        placement=placement,
        seed=seed,
        restore=restore,
        every_ms=every_ms,
        store=store,
    )


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
