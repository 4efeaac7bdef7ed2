"""A running network as its user sees it, whichever host runs it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable

from cutwater.config import parse_duration_ms
from cutwater.errors import CutwaterError, IncompleteSnapshotError, InvariantError
from cutwater.process_networks.detectors import Detector, Finding, terminated
from cutwater.process_networks.graph import Network
from cutwater.process_networks.messages import names_of
from cutwater.process_networks.snapshot import GlobalSnapshot
from cutwater.protocol.snapshot_algorithms import AlgorithmName
from cutwater.runtime.control.messages import ProcessPart

DEADLINE = "10s"
"""Of a snapshot, unless the user says otherwise."""


class PendingSnapshot:
    """A snapshot that has begun; several may be under way at once (CL5)."""

    def __init__(self, run: Run, id: int, initiators: tuple[str, ...], processes: Iterable[str]) -> None:
        self.id, self.initiators = id, initiators
        self.failure: CutwaterError | None = None
        """Error for which it cannot be complete any more."""
        self.interrupted = False
        """The network had to go back to an older snapshot meanwhile."""
        self._run = run
        self._missing = dict.fromkeys(processes)
        self._parts: dict[str, ProcessPart] = {}
        self._snapshot: GlobalSnapshot | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """Processes that have not done their part."""
        return tuple(self._missing)

    @property
    def done(self) -> bool:
        """It is complete, or has failed."""
        return self._snapshot is not None or self.failure is not None

    def add(self, part: ProcessPart) -> GlobalSnapshot | None:
        """A process has done its part; the snapshot, if that was the last one.

        Raises:
            InvariantError: it had done so before (CL4: each process records itself once).
        """
        if part.process not in self._missing:
            raise InvariantError(f"snapshot {self.id}: process {part.process!r} did its part twice")
        del self._missing[part.process]
        self._parts[part.process] = part
        if not self._missing:
            self._snapshot = self._run.assemble(self.id, self.initiators, self._parts)
        return self._snapshot

    def result(self, deadline: str = DEADLINE) -> GlobalSnapshot:
        """Wait for the snapshot.

        Args:
            deadline: give the snapshot up after so long, by the network's clock ("500ms", "10s").

        Raises:
            IncompleteSnapshotError: it is not complete by then, or cannot be any more; names who is missing.
        """
        in_time = self._run.wait_until(lambda: self.done, parse_duration_ms(deadline, name="deadline"))
        if self._snapshot is not None:
            return self._snapshot
        if self.failure is None:
            why = f"not complete after {deadline}" if not in_time else "never going to be complete"
            self.failure = IncompleteSnapshotError(
                f"snapshot {self.id} of network {self._run.network.name!r} is {why}: no answer from "
                f"{names_of(self.missing)} ({len(self._parts)} of {len(self._parts) + len(self.missing)} processes "
                "have answered)",
                hint="A process answers when every one of its channels has brought the marker: look for one that does "
                "not take its messages, on the way to them; or give a later deadline.",
            )
            self._run.give_up(self)
        raise self.failure


class Run(abc.ABC):
    """Running network, as ``Network.run_local`` and ``Network.start`` return it."""

    def __init__(self, network: Network, algorithm: AlgorithmName, restore: GlobalSnapshot | None) -> None:
        network.check()
        if restore is not None:
            restore.check_fits(network)
        self.network = network
        self.algorithm: AlgorithmName = algorithm
        self.last_snapshot: GlobalSnapshot | None = restore
        """The newest complete snapshot: recovery goes back to it."""
        self.newest_id = restore.id if restore is not None else 0
        self._pending: dict[int, PendingSnapshot] = {}

    # --------------------------------------------------------------------------------------------- what users call

    def snapshot(self, initiators: Iterable[str] | None = None, *, deadline: str = DEADLINE) -> GlobalSnapshot:
        """Take a global snapshot while the network runs.

        Args:
            initiators: the processes that begin it (CL1); a smallest set that reaches all others if none are given.
            deadline: give it up after so long, by the network's clock.

        Raises:
            ConfigError: some process cannot be reached from the initiators; the message names it.
            IncompleteSnapshotError: not complete in time; the message names who is missing.
        """
        return self.begin_snapshot(initiators).result(deadline)

    def begin_snapshot(self, initiators: Iterable[str] | None = None) -> PendingSnapshot:
        """Begin a snapshot, and wait for it later with ``result()``; any number may be under way at once.

        Raises:
            ConfigError: as ``snapshot``.
        """
        return self._begin(self.network.check_initiators(initiators))

    def watch(
        self,
        detector: Detector,
        *,
        every: str = "1s",
        timeout: str | None = None,
        on_found: Callable[[GlobalSnapshot, Finding], None] | None = None,
    ) -> Finding | None:
        """Take a snapshot every so often until the detector finds what it looks for.

        Args:
            detector: ``terminated()``, ``deadlock(...)``, ``conserved(...)``, ``tokens(...)``, ``holds(...)``.
            every: pause between two snapshots, by the network's clock.
            timeout: give up after so long.
            on_found: called with the snapshot and the finding before they are returned.

        Returns:
            What was found; ``None`` after the timeout.
        """
        every_ms = parse_duration_ms(every, name="every")
        end_ms = None if timeout is None else self.now_ms + parse_duration_ms(timeout, name="timeout")
        while True:
            snapshot = self._look()
            found = detector(snapshot) if snapshot is not None else None
            if snapshot is not None and found is not None:
                if on_found is not None:
                    on_found(snapshot, found)
                return found
            left_ms = every_ms if end_ms is None else min(every_ms, end_ms - self.now_ms)
            if left_ms <= 0:
                return None
            self.wait_until(lambda: False, left_ms)

    def _look(self) -> GlobalSnapshot | None:
        """A snapshot; ``None`` if a recovery came between."""
        pending = self.begin_snapshot()
        try:
            return pending.result()
        except IncompleteSnapshotError:
            if not pending.interrupted:
                raise
            return None

    def await_termination(self, *, every: str = "100ms", timeout: str | None = None) -> Finding | None:
        """Wait until nothing more can happen: no message, no timer.  ``None`` after the timeout."""
        return self.watch(terminated(), every=every, timeout=timeout)

    @property
    @abc.abstractmethod
    def now_ms(self) -> float:
        """The network's clock."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End the run.  What is to be kept must be in a snapshot."""

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ------------------------------------------------------------------------------------------- what hosts perform

    @abc.abstractmethod
    def wait_until(self, condition: Callable[[], bool], timeout_ms: float) -> bool:
        """Let the network go on until a condition holds or the time is up; true if it will not change any more."""

    @abc.abstractmethod
    def _begin(self, initiators: tuple[str, ...]) -> PendingSnapshot:
        """Give out an id and trigger the initiators."""

    @abc.abstractmethod
    def give_up(self, pending: PendingSnapshot) -> None:
        """Nobody waits for the snapshot any more: tell the processes to forget it."""

    # -------------------------------------------------------------------------------------------------- the pending

    def assemble(self, id: int, initiators: tuple[str, ...], parts: dict[str, ProcessPart]) -> GlobalSnapshot:
        """Collect the parts into one global state (CL4)."""
        ordered = {name: parts[name] for name in self.network.processes}
        snapshot = GlobalSnapshot(
            id, self.network.name, initiators, self.algorithm, ordered, dict(self.network.channels), self.network
        )
        self._check(snapshot)
        return snapshot

    def _check(self, snapshot: GlobalSnapshot) -> None:
        snapshot.check()

    def _new_pending(self, initiators: tuple[str, ...]) -> PendingSnapshot:
        self.newest_id += 1
        pending = PendingSnapshot(self, self.newest_id, initiators, self.network.processes)
        self._pending[pending.id] = pending
        return pending

    def part_arrived(self, id: int, part: ProcessPart) -> GlobalSnapshot | None:
        """A process has done its part; the snapshot if it was the last one."""
        pending = self._pending.get(id)
        snapshot = pending.add(part) if pending is not None else None
        if snapshot is None:
            return None
        del self._pending[id]
        if self.last_snapshot is None or snapshot.id > self.last_snapshot.id:
            self.last_snapshot = snapshot
        return snapshot

    def _fail_pending(self, error: CutwaterError) -> None:
        """The attempt is over: what was under way will never be complete."""
        for pending in self._pending.values():
            if pending.failure is None:
                pending.failure, pending.interrupted = error, True
        self._pending.clear()
