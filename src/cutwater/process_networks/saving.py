"""Global snapshots in the project's snapshot format: log, manifest, segments, digests.

Three segments: ``processes``, ``channels`` and ``messages``; states and messages are msgpack with the names of their
fields, so that they can be read without the program that wrote them.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec
import pyarrow as pa

from cutwater import __version__
from cutwater.errors import ConfigError, CorruptSnapshotError
from cutwater.process_networks.graph import ChannelSpec, Network
from cutwater.process_networks.snapshot import GlobalSnapshot
from cutwater.runtime.control.process_network_messages import Message, ProcessPart, Timer
from cutwater.storage.log.job_log import JobLog, wall_clock_ms
from cutwater.storage.reading.addresses import resolve_snapshot
from cutwater.storage.reading.recovery import choose, next_checkpoint_id
from cutwater.storage.snapshot.manifest import Entry, Manifest, StepRecord
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.segment_files import SnapshotWriter, load_manifest, read_segment
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import open_store

KIND = "network"
"""``StepRecord.kind`` of the one step that a network's manifest names."""
_INLINE_BYTES = 20_480
_NUMBERS = pa.map_(pa.string(), pa.int64())

_PROCESSES = pa.schema(
    [
        ("process", pa.string()),
        ("kind", pa.string()),
        ("state", pa.binary()),
        ("events", pa.int64()),
        ("timers", pa.binary()),
        ("sent", _NUMBERS),
        ("taken", _NUMBERS),
        ("time_ms", pa.float64()),
    ]
)
_CHANNELS = pa.schema(
    [("channel", pa.string()), ("source", pa.string()), ("target", pa.string()), ("fifo", pa.bool_())]
)
_MESSAGES = pa.schema([("channel", pa.string()), ("number", pa.int64()), ("kind", pa.string()), ("body", pa.binary())])
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
                writer.add_batch(batch, step=KIND, subtask=0, name=name, kind="base")
                for name, batch in _batches(snapshot).items()
            ]
            writer.close()
        except BaseException:
            writer.abort()
            raise
        now = wall_clock_ms()
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
            steps=[StepRecord(KIND, KIND, 1, settings=_settings(snapshot))],
            subtasks=[],
            entries=entries,
            engine=__version__,
        )
        publish(self._store, log, manifest, kind="savepoint")
        return number


def save(snapshot: GlobalSnapshot, directory: str | os.PathLike[str]) -> int:
    """See ``GlobalSnapshot.save``."""
    return NetworkStore(directory, snapshot.network).save(snapshot)


def load(directory: str | os.PathLike[str], network: Network | None = None) -> GlobalSnapshot:
    """See ``GlobalSnapshot.load``."""
    address = resolve_snapshot(os.fspath(directory))
    state = JobLog(address.store, address.job).read()
    if address.checkpoint_id is None:
        found = choose(address.store, address.job, state, verify=False)
        if found is None:
            raise ConfigError(f"{address} holds no snapshot", hint="Save one there first: snapshot.save(directory).")
        manifest = found.manifest
    else:
        known = {c.checkpoint_id: c for c in state.completed}
        if address.checkpoint_id not in known:
            raise ConfigError(f"no snapshot {address}", hint=f"There are: {', '.join(map(str, known)) or 'none'}.")
        manifest = load_manifest(address.store, address.job, known[address.checkpoint_id])
    return _from_manifest(address.store, manifest, network)


def _from_manifest(store: Store, manifest: Manifest, network: Network | None) -> GlobalSnapshot:
    if not manifest.steps or manifest.steps[0].kind != KIND:
        raise ConfigError(
            f"checkpoint {manifest.checkpoint_id} of {manifest.job!r} is of a dataflow, not of a process network"
        )
    tables = {e.name: _rows(store, manifest.job, e) for e in manifest.entries}
    if missing := {"processes", "channels", "messages"} - tables.keys():
        raise CorruptSnapshotError(f"checkpoint {manifest.checkpoint_id} of {manifest.job!r} has no {sorted(missing)}")
    logs: dict[str, dict[str, list[Message]]] = {}
    channels = {c["channel"]: ChannelSpec(*c.values()) for c in tables["channels"]}
    for row in tables["messages"]:
        log = logs.setdefault(channels[row["channel"]].target, {}).setdefault(row["channel"], [])
        log.append(Message(row["number"], row["kind"], row["body"]))
    parts = {
        row["process"]: ProcessPart(
            row["process"],
            row["kind"],
            row["state"],
            row["events"],
            _TIMERS.decode(row["timers"]),
            dict(row["sent"]),
            dict(row["taken"]),
            logs.get(row["process"], {}),
            row["time_ms"],
        )
        for row in tables["processes"]
    }
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


def _rows(store: Store, job: str, entry: Entry) -> list[dict[str, Any]]:
    return read_segment(store, job, entry).batch.to_pylist()


def _settings(snapshot: GlobalSnapshot) -> dict[str, str]:
    return {"snapshot": str(snapshot.id), "initiators": msgspec.json.encode(snapshot.initiators).decode()}


def _batches(snapshot: GlobalSnapshot) -> dict[str, pa.RecordBatch]:
    processes = [
        {
            "process": p.process,
            "kind": p.kind,
            "state": p.state,
            "events": p.events,
            "timers": msgspec.msgpack.encode(p.timers),
            "sent": list(p.sent.items()),
            "taken": list(p.taken.items()),
            "time_ms": p.time_ms,
        }
        for p in snapshot.parts.values()
    ]
    channels = [
        {"channel": c.name, "source": c.source, "target": c.target, "fifo": c.fifo} for c in snapshot.channels.values()
    ]
    messages = [
        {"channel": c, "number": m.number, "kind": m.kind, "body": m.body}
        for c in snapshot.channels
        for m in snapshot.log(c)
    ]
    return {
        "processes": pa.RecordBatch.from_pylist(processes, schema=_PROCESSES),
        "channels": pa.RecordBatch.from_pylist(channels, schema=_CHANNELS),
        "messages": pa.RecordBatch.from_pylist(messages, schema=_MESSAGES),
    }
