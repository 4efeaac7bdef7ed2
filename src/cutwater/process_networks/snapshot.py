"""A global snapshot: every process's state and every channel's messages at one consistent cut."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from cutwater.errors import BuildError, ConfigError, InvariantError
from cutwater.process_networks.graph import ChannelSpec, Network
from cutwater.process_networks.messages import decode_state, names_of
from cutwater.runtime.control.process_network_messages import Message, ProcessPart


@dataclass(frozen=True)
class GlobalSnapshot:
    """Global state, as ``Run.snapshot`` returns it.  It does not change, and it refers to nothing of the run.

    ``state`` and ``messages`` give Python values, ``table`` gives Arrow tables, ``save`` and ``load`` keep it on disk,
    and ``network.run_local(restore=...)`` or ``network.start(spark, restore=...)`` go on from it.
    """

    id: int
    network: str
    initiators: tuple[str, ...]
    algorithm: str
    """"chandy_lamport" or "lai_yang"."""
    parts: Mapping[str, ProcessPart]
    """Per process: what it recorded (CL4)."""
    channels: Mapping[str, ChannelSpec]
    program: Network | None = None
    """Knows the classes; without it states and messages are plain data."""

    # ------------------------------------------------------------------------------------------------------ values

    @property
    def processes(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def state(self, process: str) -> Any:
        """The state of a process, as a new object of its class (plain data if the snapshot was loaded without one).

        Raises:
            ConfigError: there is no such process.
        """
        part = self.parts.get(process)
        if part is None:
            raise ConfigError(f"no process {process!r} in the snapshot", hint=f"There are: {names_of(self.parts)}.")
        if self.program is None:
            return msgspec.msgpack.decode(part.state)
        return decode_state(process, part.state, type(self.program.processes[process]))

    def states(self) -> Iterator[tuple[str, Any]]:
        """Every process with its state."""
        return ((process, self.state(process)) for process in self.parts)

    def messages(self, channel: str | None = None) -> list[Any]:
        """The messages in a channel, first sent first; in all channels, without one.

        Raises:
            ConfigError: there is no such channel.
        """
        if channel is None:
            return [self._message(m) for c in self.channels for m in self.log(c)]
        return [self._message(m) for m in self.log(channel)]

    def log(self, channel: str) -> list[Message]:
        """The same, encoded and numbered."""
        spec = self.channels.get(channel)
        if spec is None:
            raise ConfigError(f"no channel {channel!r} in the snapshot", hint=f"There are: {names_of(self.channels)}.")
        return self.parts[spec.target].logs.get(channel, [])

    def _message(self, message: Message) -> Any:
        if self.program is None:
            return msgspec.msgpack.decode(message.body)
        return self.program.codec.decode(message.kind, message.body)

    def timers(self, process: str) -> list[Any]:
        """The messages of the pending timers of a process, the next due one first."""
        return [self._message(Message(0, t.kind, t.body)) for t in self.parts[process].timers]

    # ------------------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        """The counts of CL6, per channel: sent before the sender's cut minus taken before the receiver's cut messages
        are in its state, and they are just those with the numbers between.

        Raises:
            InvariantError: a channel is wrong: the cut is not consistent.
        """
        for channel in self.channels.values():
            sent = self.parts[channel.source].sent[channel.name]
            taken = self.parts[channel.target].taken[channel.name]
            numbers = [message.number for message in self.log(channel.name)]
            expected = list(range(taken, sent))
            # Without FIFO those taken before the cut need not be the first ones: then only the count is known here.
            right = numbers == expected if channel.fifo else len(set(numbers)) == len(numbers) == sent - taken
            if not right:
                raise InvariantError(
                    f"snapshot {self.id}, channel {channel.name!r}: {sent} messages were sent before the cut of "
                    f"{channel.source!r} and {taken} taken before that of {channel.target!r}; its state holds {numbers}"
                )

    def check_fits(self, network: Network) -> None:
        """The snapshot can be restored into a network.

        Raises:
            BuildError: the network has other processes or channels; the message names them.
        """
        ours, theirs = set(self.parts), set(network.processes)
        if ours != theirs:
            raise BuildError(
                f"the snapshot is of a network with other processes than {network.name!r}: only in the snapshot "
                f"{names_of(sorted(ours - theirs)) or 'none'}, only in the network "
                f"{names_of(sorted(theirs - ours)) or 'none'}"
            )
        before = {(c.name, c.source, c.target) for c in self.channels.values()}
        now = {(c.name, c.source, c.target) for c in network.channels.values()}
        if before != now:
            names = names_of(sorted(c[0] for c in before ^ now))
            raise BuildError(f"the snapshot is of a network with other channels than {network.name!r}: {names}")
        for name, part in self.parts.items():
            decode_state(name, part.state, type(network.processes[name]))

    # ------------------------------------------------------------------------------------------------------- tables

    def table(self, what: str = "processes") -> pa.Table:
        """The snapshot as an Arrow table (``.to_pandas()``, ``spark.createDataFrame(...)`` take it from there).

        Args:
            what: ``"processes"``: process, kind, events, timers, state (JSON); ``"channels"``: channel, source, target,
                sent, taken, messages (how many lie in it); ``"messages"``: channel, position, number, kind, message
                (JSON); or the name of a process class: one column per field.

        Raises:
            ConfigError: there is no such table.
        """
        if what == "processes":
            rows = [
                {"process": n, "kind": p.kind, "events": p.events, "timers": len(p.timers), "state": _json(p.state)}
                for n, p in self.parts.items()
            ]
            return pa.Table.from_pylist(rows, schema=_PROCESSES)
        if what == "channels":
            return pa.Table.from_pylist([self._channel_row(c) for c in self.channels.values()], schema=_CHANNELS)
        if what == "messages":
            rows = [
                {"channel": c, "position": i, "number": m.number, "kind": m.kind, "message": _json(m.body)}
                for c in self.channels
                for i, m in enumerate(self.log(c))
            ]
            return pa.Table.from_pylist(rows, schema=_MESSAGES)
        found = [(n, p) for n, p in self.parts.items() if p.kind == what]
        if not found:
            kinds = names_of(dict.fromkeys(p.kind for p in self.parts.values()))
            raise ConfigError(
                f"no table {what!r} in a snapshot", hint=f"There are processes, channels, messages and: {kinds}."
            )
        return pa.Table.from_pylist([{"process": n, **msgspec.msgpack.decode(p.state)} for n, p in found])

    def _channel_row(self, channel: ChannelSpec) -> dict[str, Any]:
        return {
            "channel": channel.name,
            "source": channel.source,
            "target": channel.target,
            "sent": self.parts[channel.source].sent[channel.name],
            "taken": self.parts[channel.target].taken[channel.name],
            "messages": len(self.log(channel.name)),
        }

    # --------------------------------------------------------------------------------------------------------- disk

    def save(self, directory: str | os.PathLike[str]) -> int:
        """Write it into a checkpoint directory, durably and with digests, under the network's name.

        Several snapshots may be saved in one directory.  Returns the number of this one there.

        Raises:
            StorageError: the directory cannot be written.
        """
        from cutwater.process_networks.saving import save

        return save(self, directory)

    @staticmethod
    def load(directory: str | os.PathLike[str], network: Network | None = None) -> GlobalSnapshot:
        """Read a saved snapshot; every byte is compared with its digest first.

        Args:
            directory: what was given to ``save``, or ``DIR/NETWORK`` or ``DIR/NETWORK@3`` for a certain one; the newest
                whole one otherwise.
            network: knows the classes; without it states and messages are plain data.

        Raises:
            ConfigError: there is none.
            CorruptSnapshotError: it is damaged; the message names the file.
        """
        from cutwater.process_networks.saving import load

        return load(directory, network)


def _json(data: bytes) -> str:
    return msgspec.json.encode(msgspec.msgpack.decode(data)).decode()


def _schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema(list(types.items()))


_TEXT, _COUNT = pa.string(), pa.int64()
_PROCESSES = _schema(process=_TEXT, kind=_TEXT, events=_COUNT, timers=_COUNT, state=_TEXT)
_CHANNELS = _schema(channel=_TEXT, source=_TEXT, target=_TEXT, sent=_COUNT, taken=_COUNT, messages=_COUNT)
_MESSAGES = _schema(channel=_TEXT, position=_COUNT, number=_COUNT, kind=_TEXT, message=_TEXT)
