"""A topic as a sink: a reader of committed messages sees each row once, whoever is killed or wakes up when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from servers.kafka import Broker

from cutwater.connectors.base import SinkSnapshot
from cutwater.connectors.kafka import librdkafka
from cutwater.connectors.kafka import producer as producer_module
from cutwater.connectors.kafka.commit_records import CommitRecord, CommitRecords
from cutwater.connectors.kafka.kafka import kafka
from cutwater.connectors.kafka.sink import KafkaSink
from cutwater.errors import BuildError, ConfigError, FencedError, StorageError

SCHEMA = pa.schema({"row": pa.int64(), "t": pa.string()})


class Identity:
    """One subtask of the step."""

    job_uid, step, parallelism = "c0ffee", "out", 2

    def __init__(self, subtask: int, incarnation: int) -> None:
        self.subtask, self.incarnation = subtask, incarnation


def batch(*rows: int) -> pa.RecordBatch:
    return pa.record_batch([list(rows), [f"t{row}" for row in rows]], schema=SCHEMA)


@pytest.fixture
def sink(broker: Broker, topic: str, tmp_path: Path) -> KafkaSink:
    return kafka(broker.address, topic, key="t").as_sink().bind(str(tmp_path))


@pytest.fixture
def seen(broker: Broker, topic: str) -> Callable[[], list[int]]:
    """The rows that a reader of committed messages sees, sorted."""
    return lambda: sorted(json.loads(message.value())["row"] for message in broker.committed(topic))


class Job:
    """One attempt of a job with one write step."""

    def __init__(self, sink: KafkaSink, incarnation: int, subtasks: int = 2) -> None:
        self.sink = sink.bind(sink.directory or "")  # a process of its own has producers of its own
        self.incarnation = incarnation
        self.writers = [self.sink.writer(SCHEMA, Identity(n, incarnation), []) for n in range(subtasks)]
        self.committer = self.sink.committer(SCHEMA, "c0ffee", "out")

    def checkpoint(self, checkpoint_id: int, *rows: int) -> SinkSnapshot:
        """Rows in turns to the subtasks, and their part of a checkpoint."""
        for number, row in enumerate(rows):
            self.writers[number % len(self.writers)].write(batch(row))
        parts = [writer.pre_commit(checkpoint_id, False)() for writer in self.writers]
        return SinkSnapshot(checkpoint_id, [handle for part in parts for handle in part.handles])

    def commit(self, snapshot: SinkSnapshot) -> None:
        self.committer.commit(snapshot.checkpoint_id, snapshot.handles)

    def settle(self, restored: SinkSnapshot | None, incarnation: int) -> None:
        """As the driver of the next attempt does, from a process of its own."""
        driver = self.sink.bind(self.sink.directory or "").committer(SCHEMA, "c0ffee", "out")
        driver.settle(restored, [], incarnation)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def test_rows_come_with_their_checkpoint_and_once(sink: KafkaSink, seen: Callable[[], list[int]]) -> None:
    job = Job(sink, 1)
    first = job.checkpoint(1, 1, 2, 3)
    assert seen() == []
    job.commit(first)
    assert seen() == [1, 2, 3]
    job.commit(first)
    second = job.checkpoint(2, 4)
    job.close()
    job.settle(second, 2)  # the worker died before it committed
    assert seen() == [1, 2, 3, 4]
    job.settle(second, 3)
    assert seen() == [1, 2, 3, 4]


def test_staged_rows_that_are_in_already_stay_away(
    sink: KafkaSink, seen: Callable[[], list[int]], tmp_path: Path
) -> None:
    """Killed between commit and removal of the staged rows."""
    job = Job(sink, 1)
    snapshot = job.checkpoint(1, 1, 2)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.arrows")}
    job.commit(snapshot)
    for path, content in files.items():
        path.write_bytes(content)
    job.commit(snapshot)
    job.close()
    for path, content in files.items():
        path.write_bytes(content)
    job.settle(snapshot, 2)
    assert seen() == [1, 2]


def test_a_worker_that_wakes_up_writes_nothing(sink: KafkaSink, seen: Callable[[], list[int]], tmp_path: Path) -> None:
    zombie = Job(sink, 1)
    zombie.commit(zombie.checkpoint(1, 1, 2))
    late = zombie.checkpoint(2, 3, 4)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.arrows")}
    zombie.settle(SinkSnapshot(1), 2)  # the next driver goes on from checkpoint 1: checkpoint 2 is void
    for path, content in files.items():
        path.write_bytes(content)
    with pytest.raises(FencedError):
        zombie.commit(late)
    assert seen() == [1, 2]
    fresh = Job(sink, 2)
    fresh.commit(fresh.checkpoint(5, 3, 4))
    assert seen() == [1, 2, 3, 4]
    fresh.close()


def test_a_worker_that_wakes_up_with_a_new_producer_writes_nothing(
    sink: KafkaSink, seen: Callable[[], list[int]], tmp_path: Path
) -> None:
    zombie = Job(sink, 1)
    late = zombie.checkpoint(2, 3, 4)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.arrows")}
    zombie.close()  # its producers are gone, it knows nothing of the others
    zombie.settle(None, 2)
    for path, content in files.items():
        path.write_bytes(content)
    Job(sink, 1).commit(late)
    assert seen() == []


def test_a_driver_that_wakes_up_is_refused(sink: KafkaSink, seen: Callable[[], list[int]]) -> None:
    job = Job(sink, 1)
    snapshot = job.checkpoint(1, 1)
    job.settle(snapshot, 5)
    with pytest.raises(FencedError, match="attempt 5"):
        job.settle(snapshot, 4)
    assert seen() == [1]


def test_another_parallelism(sink: KafkaSink, seen: Callable[[], list[int]]) -> None:
    wide = Job(sink, 1, subtasks=3)
    wide.commit(wide.checkpoint(1, 1, 2, 3))
    last = wide.checkpoint(2, 4, 5, 6)
    wide.close()
    wide.settle(last, 2)
    narrow = Job(sink, 2, subtasks=1)
    narrow.commit(narrow.checkpoint(3, 7, 8))
    narrow.close()
    wider = Job(sink, 3, subtasks=4)
    wider.commit(wider.checkpoint(4, 9, 10, 11, 12))
    assert seen() == list(range(1, 13))


def test_a_lost_commit_record_is_said(
    broker: Broker, sink: KafkaSink, topic: str, seen: Callable[[], list[int]]
) -> None:
    job = Job(sink, 1)
    snapshot = job.checkpoint(1, 1)
    job.close()
    group = CommitRecords(sink.cluster, topic, "c0ffee", "out").group(0)
    admin = broker.admin
    admin.delete_consumer_groups([group])[group].result(30)
    with pytest.raises(StorageError, match="no commit record any more"):
        job.settle(snapshot, 2)
    assert seen() == []


KILLED = textwrap.dedent(
    """
    import os, signal, sys
    import test_kafka_sink as t
    from cutwater.connectors.kafka import producer as p
    from cutwater.connectors.kafka.kafka import kafka

    address, topic, folder, place = sys.argv[1:]
    job = t.Job(kafka(address, topic).as_sink().bind(folder), 1, subtasks=1)
    job.commit(job.checkpoint(1, *range(100)))
    snapshot = job.checkpoint(2, *range(100, 5_100))

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    producer, _ = job.sink._of("c0ffee", "out")._made[0]
    library, real = producer._library, producer._library
    if place == "begun":
        library.produce_batch = die
    elif place == "sent":
        producer._send_offset = lambda *_: (producer._library.flush(producer.client.handle, 10_000), die())
    elif place == "marked":
        library.commit_transaction = die
    elif place == "committed":
        commit = library.commit_transaction
        library.commit_transaction = lambda *a: (commit(*a), die())
    job.commit(snapshot)
    """
)


@pytest.mark.parametrize("place", ["begun", "sent", "marked", "committed"])
def test_killed_anywhere_in_a_commit(
    place: str, broker: Broker, topic: str, tmp_path: Path, seen: Callable[[], list[int]]
) -> None:
    command = [sys.executable, "-c", KILLED, broker.address, topic, str(tmp_path), place]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    sink = kafka(broker.address, topic).as_sink().bind(str(tmp_path))
    record = CommitRecords(sink.cluster, topic, "c0ffee", "out")
    pieces = sorted(path.name for path in tmp_path.rglob("*.arrows"))
    assert len(pieces) == 1  # those of the first checkpoint were handed over
    from cutwater.connectors.staging import PieceCut
    from cutwater.storage.store.seal import PLAIN

    path = next(tmp_path.rglob("*.arrows"))
    hasher = PLAIN.hasher("piece")
    hasher.update(path.read_bytes())
    cut = PieceCut(path.name, path.stat().st_size, 5_000, hasher.hexdigest())
    handle: dict[str, Any] = {"type": "epoch", "uid": "c0ffee", "checkpoint_id": 2, "subtask": 0, "rows": 5_000}
    handle["piece"] = {"file": cut.file, "length": cut.length, "rows": cut.rows, "digest": cut.digest}
    sink.committer(SCHEMA, "c0ffee", "out").settle(SinkSnapshot(2, [handle]), [], 2)
    assert seen() == list(range(5_100))
    assert record.of(0) == CommitRecord(2, 2)


@pytest.mark.parametrize("place", ["before it is sent", "after it"])
def test_a_call_of_the_library_that_does_not_return(
    place: str, sink: KafkaSink, seen: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a broker's restart: the next producer takes over, and the first one is ended when the call returns."""
    job = Job(sink, 1, subtasks=1)
    job.commit(job.checkpoint(1, 1, 2))
    library, began, returns = librdkafka.library(), threading.Event(), threading.Event()
    real, calls = library.send_offsets_to_transaction, list[int]()
    closed: list[int] = []

    def stalled(handle: int, *arguments: Any) -> Any:
        calls.append(handle)
        if handle != calls[0]:
            return real(handle, *arguments)
        result = real(handle, *arguments) if place == "after it" else None
        began.set()
        assert returns.wait(30)
        return result

    destroy = library.destroy
    monkeypatch.setattr(library, "send_offsets_to_transaction", stalled)
    monkeypatch.setattr(library, "destroy", lambda handle: (closed.append(handle), destroy(handle)))
    monkeypatch.setattr(producer_module, "_STALLED_S", 0.3)
    job.commit(job.checkpoint(2, 3, 4))
    assert began.is_set()
    assert len(calls) == 2
    assert seen() == [1, 2, 3, 4]
    assert calls[0] not in closed, "nobody may end a client in the middle of a call"
    returns.set()
    ends = time.monotonic() + 30
    while calls[0] not in closed and time.monotonic() < ends:
        time.sleep(0.01)
    assert calls[0] in closed
    monkeypatch.undo()
    job.commit(job.checkpoint(3, 5))
    job.close()
    assert seen() == [1, 2, 3, 4, 5]


def test_an_upsert_keeps_the_newest_row_of_each_key(broker: Broker, topic: str, tmp_path: Path) -> None:
    sink = kafka(broker.address, topic, key="k", mode="upsert").as_sink().bind(str(tmp_path)).applying(("k",))
    rows = [("+I", 1, 10), ("+I", 2, 20), ("-U", 1, 10), ("+U", 1, 11), ("-D", 2, 20)]
    schema = pa.schema({"op": pa.string(), "k": pa.int64(), "n": pa.int64()})
    columns = [list(column) for column in zip(*rows, strict=True)]
    writer = sink.writer(schema, Identity(0, 1), [])
    writer.write(pa.record_batch(columns, schema=schema))
    handles = writer.pre_commit(1, False)().handles
    sink.committer(schema, "c0ffee", "out").commit(1, handles)
    found: dict[bytes, list[Any]] = {}
    for message in broker.committed(topic):
        found.setdefault(message.key(), []).append(json.loads(message.value() or b"null"))
    assert found == {b"1": [{"k": 1, "n": 10}, {"k": 1, "n": 11}], b"2": [{"k": 2, "n": 20}, None]}
    writer.close()


def test_an_upsert_has_one_subtask(broker: Broker, topic: str) -> None:
    """Rows of a key that come from several have no order."""
    assert kafka(broker.address, topic, key="k", mode="upsert").as_sink().parallelism == 1
    with pytest.raises(ConfigError, match="in any order"):
        kafka(broker.address, topic, key="k", mode="upsert", parallelism=2).as_sink()


def test_at_least_once_shows_rows_at_once(broker: Broker, topic: str) -> None:
    sink = kafka(broker.address, topic, guarantee="at-least-once").as_sink()
    writer = sink.writer(SCHEMA, Identity(0, 1), [])
    writer.write(batch(1, 2))
    assert writer.pre_commit(1, False)().handles == []
    assert sorted(json.loads(m.value())["row"] for m in broker.committed(topic)) == [1, 2]
    writer.close()


def test_keys_lie_where_java_puts_them(broker: Broker, topic: str, sink: KafkaSink) -> None:
    """By murmur2 of the key, as Java's default partitioner does: known values of it."""
    job = Job(sink, 1, subtasks=1)
    job.commit(job.checkpoint(1, *range(20)))
    job.close()
    for message in broker.committed(topic):
        assert message.partition() == (murmur2(message.key()) & 0x7FFFFFFF) % 2


def murmur2(data: bytes) -> int:
    """From its description, in Python: the oracle."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = (0x9747B28C ^ len(data)) & mask
    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    rest = data[whole:]
    if rest:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def test_what_is_wrong_is_said_when_the_flow_is_built(broker: Broker, topic: str) -> None:
    with pytest.raises(BuildError, match="nowhere"):
        kafka(broker.address, "nowhere").as_sink().check(SCHEMA)
    with pytest.raises(BuildError, match="no such key column 'tt'"):
        kafka(broker.address, topic, key="tt").as_sink().check(SCHEMA)
    with pytest.raises(BuildError, match="one column of string or binary"):
        kafka(broker.address, topic, format="text").as_sink().check(SCHEMA)
