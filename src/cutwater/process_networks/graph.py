"""A network as a user builds it: named processes, directed channels, and what follows from their shape."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutwater.errors import BuildError, ConfigError
from cutwater.process_networks.messages import Codec, check_state, drop_caches, names_of
from cutwater.process_networks.process import Process
from cutwater.protocol.snapshot_algorithms import AlgorithmName
from cutwater.storage.store.paths import check_job_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutwater.process_networks.job import NetworkJob
    from cutwater.process_networks.local import LocalRun
    from cutwater.process_networks.snapshot import GlobalSnapshot


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """A directed channel.  ``fifo`` is false if it may deliver messages in another order than they were sent."""

    name: str
    source: str
    target: str
    fifo: bool = True


class Network:
    """Processes and channels.  Building runs nothing; one network may be run any number of times.

    Any topology will do: pairs, rings, stars, channels from a process to itself, several channels between the same two,
    several components.

    Args:
        name: of the network; a folder's name where snapshots are saved.
        messages: the classes of its messages (``int``, ``str``, dataclasses, msgspec structs ...).

    Raises:
        BuildError: a message type cannot be encoded.

    >>> class Relay(Process):
    ...     seen: int = 0
    >>> network = Network("ring", messages=[str])
    >>> for name in "abc": network.add(name, Relay())
    >>> network.ring("a", "b", "c")
    >>> list(network.channels), network.unreachable(["a"]), network.initiators()
    (['a->b', 'b->c', 'c->a'], (), ('a',))
    """

    def __init__(self, name: str, *, messages: Sequence[Any] = ()) -> None:
        self.name = check_job_name(name)
        self.codec = Codec(messages)
        self.processes: dict[str, Process] = {}
        self.channels: dict[str, ChannelSpec] = {}

    def __getstate__(self) -> dict[str, Any]:
        for kind in (*self.codec.types, *(type(p) for p in self.processes.values())):
            drop_caches(kind)
        return {**self.__dict__, "codec": self.codec.types}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.codec = Codec(state["codec"])

    # ---------------------------------------------------------------------------------------------------- building

    def add(self, name: str, process: Process) -> None:
        """Add a process with its first state.

        Raises:
            BuildError: the name is taken, or the state cannot be put into a snapshot.
        """
        if not name or name in self.processes or name in self.channels:
            raise BuildError(f"network {self.name!r}: the name {name!r} is empty or taken")
        check_state(name, process)
        self.processes[name] = process

    def connect(self, source: str, target: str, *, name: str | None = None, fifo: bool = True) -> None:
        """Add a channel; ``source`` and ``target`` may be the same process.

        Args:
            name: ``"source->target"`` unless given; a second channel between the same two needs a name.
            fifo: with False a local run delivers its messages in any order, and snapshots use Lai-Yang colouring.

        Raises:
            BuildError: an end is not there, or the name is taken.
        """
        name = name or f"{source}->{target}"
        missing = [p for p in (source, target) if p not in self.processes]
        if missing:
            known = names_of(self.processes) or "none"
            raise BuildError(
                f"channel {name!r}: there is no process {missing[0]!r}", hint=f"Add it first; there are: {known}."
            )
        if name in self.channels or name in self.processes:
            raise BuildError(f"network {self.name!r}: the name {name!r} is taken", hint="Give connect(..., name=...).")
        self.channels[name] = ChannelSpec(name, source, target, fifo)

    def connect_both(self, one: str, other: str, *, fifo: bool = True) -> None:
        """A channel each way."""
        self.connect(one, other, fifo=fifo)
        self.connect(other, one, fifo=fifo)

    def ring(self, *names: str, fifo: bool = True) -> None:
        """Channels from each process to the next, and from the last to the first."""
        for one, other in zip(names, (*names[1:], names[0]), strict=True):
            self.connect(one, other, fifo=fifo)

    def star(self, center: str, *leaves: str, fifo: bool = True) -> None:
        """Channels both ways between the center and each leaf."""
        for leaf in leaves:
            self.connect_both(center, leaf, fifo=fifo)

    # --------------------------------------------------------------------------------------------------- questions

    def inputs(self, process: str) -> tuple[ChannelSpec, ...]:
        """Channels that end in a process."""
        return tuple(c for c in self.channels.values() if c.target == process)

    def outputs(self, process: str) -> tuple[ChannelSpec, ...]:
        """Channels that begin in a process."""
        return tuple(c for c in self.channels.values() if c.source == process)

    def unreachable(self, initiators: Iterable[str]) -> tuple[str, ...]:
        """Processes that no marker from these initiators can reach (CL4)."""
        following = self._following()
        reached, waiting = set(initiators), list(initiators)
        while waiting:
            for target in following[waiting.pop()]:
                if target not in reached:
                    reached.add(target)
                    waiting.append(target)
        return tuple(p for p in self.processes if p not in reached)

    def initiators(self) -> tuple[str, ...]:
        """A smallest set of processes from which all others are reached: one of each component nobody sends into."""
        following = self._following()
        entered: set[str] = set()
        groups = components(following)
        group_of = {p: i for i, group in enumerate(groups) for p in group}
        for source, targets in following.items():
            entered |= {t for t in targets if group_of[t] != group_of[source]}
        order = {p: i for i, p in enumerate(self.processes)}
        firsts = [min(g, key=order.__getitem__) for g in groups if not entered & set(g)]
        return tuple(sorted(firsts, key=order.__getitem__))

    def check_initiators(self, initiators: Iterable[str] | None) -> tuple[str, ...]:
        """The initiators of a snapshot; a smallest set if none are given.

        Raises:
            ConfigError: one is no process, or some process cannot be reached from them; it is named.
        """
        if initiators is None:
            return self.initiators()
        chosen = tuple(dict.fromkeys(initiators))
        unknown = [p for p in chosen if p not in self.processes]
        if unknown or not chosen:
            raise ConfigError(
                f"initiators {unknown} are no processes" if unknown else "a snapshot needs an initiator",
                hint=f"Processes are: {names_of(self.processes)}.",
            )
        missing = self.unreachable(chosen)
        if missing:
            raise ConfigError(
                f"no channels lead from the initiators {names_of(chosen)} to {names_of(missing)}: "
                "the snapshot would never be complete",
                hint=f"Add initiators, for example {names_of(self._enough(chosen))}, or leave them out.",
            )
        return chosen

    def _enough(self, chosen: tuple[str, ...]) -> list[str]:
        """Initiators to add, one after the other, until everything is reached."""
        added: list[str] = []
        candidates = list(self.initiators())
        while missing := self.unreachable((*chosen, *added)):
            added.append(next((p for p in candidates if p in missing), missing[0]))
        return added

    def check(self) -> None:
        """The network can run.

        Raises:
            BuildError: it has no process, or messages are to flow and none are declared.
        """
        if not self.processes:
            raise BuildError(f"network {self.name!r} has no process")
        if self.channels and not self.codec.types:
            raise BuildError(
                f"network {self.name!r} has channels and declares no messages",
                hint="Name their classes: Network(..., messages=[Transfer]).",
            )

    def _following(self) -> dict[str, list[str]]:
        following: dict[str, list[str]] = {p: [] for p in self.processes}
        for channel in self.channels.values():
            following[channel.source].append(channel.target)
        return following

    # ----------------------------------------------------------------------------------------------------- running

    def run_local(
        self,
        *,
        seed: int = 0,
        restore: GlobalSnapshot | None = None,
        snapshot_every: str | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> LocalRun:
        """Run in this process, in one thread, with a seeded order of events and a simulated clock.

        Nothing happens by itself: the run's methods (``snapshot``, ``advance``, ``watch`` ...) let it go on.

        Args:
            seed: of the order of events and of ``ctx.random``; the same seed gives the same run.
            restore: go on from a snapshot of this network instead of from the first states.
            snapshot_every: take a snapshot regularly, to recover from (``run.crash``).
            trace: a file that gets the history, for ``cutwater.trace``.

        Raises:
            BuildError, ConfigError: the network cannot run, or the snapshot is not of it.
        """
        from cutwater.process_networks.local import LocalRun

        return LocalRun(self, seed=seed, restore=restore, snapshot_every=snapshot_every, trace=trace)

    def start(
        self,
        spark: SparkSession | None = None,
        *,
        workers: int = 2,
        place: Mapping[str, int] | None = None,
        seed: int = 0,
        restore: GlobalSnapshot | None = None,
        snapshot_every: str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> NetworkJob:
        """Run on Spark workers, one core each; returns at once.

        Args:
            spark: the session; ``None`` makes a local one.
            workers: over which the processes are spread, in turn.
            place: process -> worker, for those that are not to be spread in turn.
            seed: of ``ctx.random``.
            restore: go on from a snapshot of this network instead of from the first states.
            snapshot_every: take a snapshot regularly, to recover from when a worker is lost; without it a lost worker
                means the newest snapshot that was taken, or the beginning.
            checkpoint: directory to save these snapshots in, for the case that the driver is lost.
            settings: ``heartbeat_timeout``, ``restart``, ``group_deadline`` ... as for a dataflow.

        Raises:
            BuildError, ConfigError: the network cannot run, or the snapshot is not of it.
        """
        from cutwater.process_networks.job import start_network

        return start_network(
            self,
            spark,
            workers=workers,
            place=place or {},
            seed=seed,
            restore=restore,
            snapshot_every=snapshot_every,
            checkpoint=checkpoint,
            settings=settings,
        )


def suitable(network: Network) -> AlgorithmName:
    """Markers where all channels are FIFO, colours otherwise."""
    return "chandy_lamport" if all(c.fifo for c in network.channels.values()) else "lai_yang"


def components(following: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Strongly connected components (Tarjan), without recursion; sources last.

    >>> components({"a": ["b"], "b": ["c"], "c": ["b"]})
    [['b', 'c'], ['a']]
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    open: set[str] = set()
    found: list[list[str]] = []
    for root in following:
        if root in index:
            continue
        work = [(root, iter(following[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        open.add(root)
        while work:
            node, rest = work[-1]
            child = next(rest, None)
            if child is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    group, stack = stack[at:], stack[:at]
                    open -= set(group)
                    found.append(group)
            elif child not in index:
                index[child] = low[child] = len(index)
                stack.append(child)
                open.add(child)
                work.append((child, iter(following[child])))
            elif child in open:
                low[node] = min(low[node], index[child])
    return found
