"""A global snapshot: every process's state and every channel's messages at one consistent cut.

It is saved in the project's snapshot format (log, manifest, segments, digests) as three segments: ``processes``,
``channels`` and ``messages``; states and messages are msgpack with the names of their fields, so that they can be read
without the program that wrote them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from cutwater import __version__
from cutwater.errors import BuildError, ConfigError, CorruptSnapshotError, InvariantError
from cutwater.process_networks.graph import ChannelSpec, Network
from cutwater.process_networks.messages import decode_state, names_of
from cutwater.runtime.control.messages import Message, ProcessPart, Timer
from cutwater.storage.job_log import JobLog, wall_clock_ms
from cutwater.storage.reading import choose, next_checkpoint_id, resolve_snapshot
from cutwater.storage.snapshot.manifest import Manifest, StepRecord
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.segment_files import SnapshotWriter, load_manifest, read_segment
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import open_store

_KIND = "network"
"""``StepRecord.kind`` of the one step that a network's manifest names."""
_INLINE_BYTES = 20_480


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
        return NetworkStore(directory, self.network).save(self)

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
        address = resolve_snapshot(os.fspath(directory))
        state = JobLog(address.store, address.job).read()
        if address.checkpoint_id is None:
            found = choose(address.store, address.job, state, verify=False)
            if found is None:
                raise ConfigError(
                    f"{address} holds no snapshot", hint="Save one there first: snapshot.save(directory)."
                )
            manifest = found.manifest
        else:
            known = {c.checkpoint_id: c for c in state.completed}
            if address.checkpoint_id not in known:
                raise ConfigError(f"no snapshot {address}", hint=f"There are: {', '.join(map(str, known)) or 'none'}.")
            manifest = load_manifest(address.store, address.job, known[address.checkpoint_id])
        return _from_manifest(address.store, manifest, network)


def _json(data: bytes) -> str:
    return msgspec.json.encode(msgspec.msgpack.decode(data)).decode()


def _schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema(list(types.items()))


_TEXT, _COUNT = pa.string(), pa.int64()
_PROCESSES = _schema(process=_TEXT, kind=_TEXT, events=_COUNT, timers=_COUNT, state=_TEXT)
_CHANNELS = _schema(channel=_TEXT, source=_TEXT, target=_TEXT, sent=_COUNT, taken=_COUNT, messages=_COUNT)
_MESSAGES = _schema(channel=_TEXT, position=_COUNT, number=_COUNT, kind=_TEXT, message=_TEXT)

# As they are saved.
_NUMBERS = pa.map_(_TEXT, _COUNT)
_SEGMENTS = {
    "processes": _schema(
        process=_TEXT,
        kind=_TEXT,
        state=pa.binary(),
        events=_COUNT,
        timers=pa.binary(),
        sent=_NUMBERS,
        taken=_NUMBERS,
        time_ms=pa.float64(),
    ),
    "channels": _schema(channel=_TEXT, source=_TEXT, target=_TEXT, fifo=pa.bool_()),
    "messages": _schema(channel=_TEXT, number=_COUNT, kind=_TEXT, body=pa.binary()),
}
_TIMERS = msgspec.msgpack.Decoder(list[Timer])


class NetworkStore:
    """One network's folder in a checkpoint directory, taken by one driver: an older driver can save nothing any more.

    Raises:
        StorageError: the directory cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str], network: str, *, num_retained: int = 3) -> None:
        self._store: Store = open_store(directory)
        self._log = JobLog(self._store, network, num_retained=num_retained)
        self._log.begin_attempt(f"{socket.gethostname()} {os.getpid()}")

    def save(self, snapshot: GlobalSnapshot) -> int:
        """Write a snapshot; returns its number in the directory (A1: above all that are there).

        Raises:
            FencedError: another driver has taken the folder.
            StorageError: the snapshot does not count.
        """
        log = self._log
        number = next_checkpoint_id(self._store, log.job, log.state)
        writer = SnapshotWriter(self._store, log.job, number, log.attempt, 0, _INLINE_BYTES)
        try:
            entries = [
                writer.add_batch(batch, step=_KIND, subtask=0, name=name, kind="base")
                for name, batch in _batches(snapshot).items()
            ]
            writer.close()
        except BaseException:
            writer.abort()
            raise
        now = wall_clock_ms()
        settings = {"snapshot": str(snapshot.id), "initiators": msgspec.json.encode(snapshot.initiators).decode()}
        manifest = Manifest(
            job=log.job,
            uid=log.state.uid,
            checkpoint_id=number,
            attempt=log.attempt,
            protocol=snapshot.algorithm,
            max_parallelism=1,
            parallelism=1,
            triggered_ms=now,
            completed_ms=now,
            steps=[StepRecord(_KIND, _KIND, 1, settings=settings)],
            subtasks=[],
            entries=entries,
            engine=__version__,
        )
        publish(self._store, log, manifest, kind="savepoint")
        return number


def _from_manifest(store: Store, manifest: Manifest, network: Network | None) -> GlobalSnapshot:
    if not manifest.steps or manifest.steps[0].kind != _KIND:
        raise ConfigError(
            f"checkpoint {manifest.checkpoint_id} of {manifest.job!r} is of a dataflow, not of a process network"
        )
    tables = {e.name: read_segment(store, manifest.job, e).batch.to_pylist() for e in manifest.entries}
    if missing := _SEGMENTS.keys() - tables.keys():
        raise CorruptSnapshotError(f"checkpoint {manifest.checkpoint_id} of {manifest.job!r} has no {sorted(missing)}")
    logs: dict[str, dict[str, list[Message]]] = {}
    channels = {c["channel"]: ChannelSpec(*c.values()) for c in tables["channels"]}
    for row in tables["messages"]:
        log = logs.setdefault(channels[row["channel"]].target, {}).setdefault(row["channel"], [])
        log.append(Message(row["number"], row["kind"], row["body"]))
    for row in tables["processes"]:
        row |= {"timers": _TIMERS.decode(row["timers"]), "sent": dict(row["sent"]), "taken": dict(row["taken"])}
    parts = {row["process"]: ProcessPart(**row, logs=logs.get(row["process"], {})) for row in tables["processes"]}
    settings = manifest.steps[0].settings
    snapshot = GlobalSnapshot(
        id=int(settings["snapshot"]),
        network=manifest.job,
        initiators=tuple(msgspec.json.decode(settings["initiators"], type=list[str])),
        algorithm=manifest.protocol,
        parts=parts,
        channels=channels,
        program=network,
    )
    if network is not None:
        snapshot.check_fits(network)
    return snapshot


def _batches(snapshot: GlobalSnapshot) -> dict[str, pa.RecordBatch]:
    channels = snapshot.channels.values()
    rows = {
        "processes": [
            msgspec.structs.asdict(p)
            | {"timers": msgspec.msgpack.encode(p.timers), "sent": [*p.sent.items()], "taken": [*p.taken.items()]}
            for p in snapshot.parts.values()
        ],
        "channels": [{"channel": c.name, "source": c.source, "target": c.target, "fifo": c.fifo} for c in channels],
        "messages": [{"channel": c.name, **m._asdict()} for c in channels for m in snapshot.log(c.name)],
    }
    return {name: pa.RecordBatch.from_pylist(rows[name], schema=schema) for name, schema in _SEGMENTS.items()}
