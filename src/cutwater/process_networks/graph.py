"""A network as a user builds it: named processes, directed channels, and what follows from their shape."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, dataclass_transform

from cutwater.errors import BuildError, ConfigError
from cutwater.plan.cycles import components, reachable
from cutwater.process_networks.messages import Codec, check_state, drop_caches, names_of
from cutwater.protocol.snapshot_algorithms import AlgorithmName
from cutwater.storage.store.paths import check_job_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutwater.process_networks.job import NetworkJob
    from cutwater.process_networks.local import LocalRun
    from cutwater.process_networks.snapshot import GlobalSnapshot


class Context(Protocol):
    """Everything that a process may ask for.  Whatever comes from elsewhere (a clock, chance, a file) is not in the
    snapshot, and a restored network would see it differently.

    A handler is one atomic event: its messages leave when it returns, and never if it raises.
    """

    @property
    def name(self) -> str:
        """Of this process."""
        ...

    @property
    def outputs(self) -> tuple[str, ...]:
        """Processes that this one can send to, each once, in the order of their channels."""
        ...

    @property
    def inputs(self) -> tuple[str, ...]:
        """Processes that can send to this one."""
        ...

    @property
    def channel(self) -> str:
        """Name of the channel that the message at hand came through; empty in ``on_start`` and ``on_timer``."""
        ...

    @property
    def now_ms(self) -> float:
        """Milliseconds of the network's clock: simulated in ``run_local``, since the epoch on Spark."""
        ...

    @property
    def random(self) -> random.Random:
        """Chance, a function of seed, process and event number: a restored process draws what it would have drawn."""
        ...

    def send(self, to: str, message: Any) -> None:
        """Send a message to a process, or through a channel by its name.

        Raises:
            UserCodeError: there is no such channel, there are several, or the type was not declared.
        """

    def timer(self, delay_ms: float, message: Any) -> None:
        """Have ``on_timer`` called with ``message``, not before ``delay_ms`` have passed.  Timers are in snapshots."""


@dataclass_transform()
class Process:
    """Base class of processes.  A subclass is made a dataclass: its declared fields are its state, and nothing else is.

    A field has any type that msgspec can encode (numbers, texts, lists, dictionaries, dataclasses ...).

    >>> class Account(Process):
    ...     balance: int = 100
    ...     def on_message(self, ctx, sender, message):
    ...         self.balance += message
    >>> Account(balance=7)
    Account(balance=7)
    >>> Account().limit = 3
    Traceback (most recent call last):
    AttributeError: Account declares no field 'limit': it would not be in a snapshot. Declare it in the class
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).__dict__["__dataclass_fields__"]:
            kind = type(self).__name__
            raise AttributeError(
                f"{kind} declares no field {name!r}: it would not be in a snapshot. Declare it in the class"
            )
        object.__setattr__(self, name, value)

    def on_start(self, ctx: Context) -> None:
        """Called once, before anything else; not after a restore.  Does nothing unless overridden."""

    def on_message(self, ctx: Context, sender: str, message: Any) -> None:
        """Called with each message.  A process that gets messages must override it."""
        raise TypeError(f"{type(self).__name__} got a message from {sender!r} and has no on_message")

    def on_timer(self, ctx: Context, message: Any) -> None:
        """Called with the message of each timer that is due.  A process that sets timers must override it."""
        raise TypeError(f"{type(self).__name__} set a timer and has no on_timer")


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
        reached = reachable(self._following(), initiators)
        return tuple(p for p in self.processes if p not in reached)

    def initiators(self) -> tuple[str, ...]:
        """A smallest set of processes from which all others are reached: one of each component nobody sends into."""
        following = self._following()
        first = {p: p for p in self.processes} | {p: group[0] for group in components(following) for p in group}
        entered = {first[t] for source, targets in following.items() for t in targets if first[t] != first[source]}
        return tuple(p for p in self.processes if first[p] == p and p not in entered)

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
        from cutwater.process_networks.job import NetworkJob

        return NetworkJob(
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
