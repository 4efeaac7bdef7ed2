"""A Kafka cluster: where it is, and what its clients are told."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cutwater.connectors.secrets import check_named, secret_at
from cutwater.errors import BuildError, ConfigError

SECRETS = frozenset(
    {
        "sasl.password",
        "sasl.oauthbearer.client.secret",
        "ssl.key.password",
        "ssl.key.pem",
        "ssl.keystore.password",
    }
)
"""Options that nobody may read: their values are found where a client is made, never in a plan or a message."""
END_OF_PARTITION, ALL_BROKERS_DOWN = -191, -187
REFUSED = (-169, -181)
"""The library's codes of an authentication, or a TLS handshake, that failed."""
_SETTLING = frozenset({5, 6, 14, 15, 16, -180, -195})
"""The codes of a leader or coordinator that is being chosen, or has just moved, and of a connection that was lost."""
_AGAIN_S = 0.1
PATIENCE_S = 120.0
"""How long all brokers may be away before a job fails: shorter than that is a restart of theirs."""
T = TypeVar("T")
_OURS = {
    "auto.offset.reset": "on_lost",
    "delivery.report.only.error": "the sink",
    "enable.auto.commit": "checkpoints, which hold the offsets",
    "enable.auto.offset.store": "checkpoints, which hold the offsets",
    "enable.idempotence": "guarantee",
    "enable.partition.eof": "the source",
    "transactional.id": "the job, the step and the subtask",
}
"""Options that are not the user's, and what decides instead."""


@dataclass(frozen=True)
class KafkaCluster:
    """Addresses and options of a cluster.  A picklable value that holds no secret.

    Args:
        servers: ``"host:port"``, several with commas between.
        options: of librdkafka, by its names (``"security.protocol"``, ``"sasl.username"``).  Values of passwords say
            where they are: ``"env:NAME"`` or ``"file:/path"``, which is looked up where a client is made.

    Raises:
        ConfigError: no address, an option that is not the user's, or a password in plain.

    >>> KafkaCluster.of("localhost:9092", {"sasl.password": "hunter2"})
    Traceback (most recent call last):
    cutwater.errors.ConfigError: kafka option 'sasl.password' holds a secret...
    """

    servers: str
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, servers: str, options: Mapping[str, object] | None) -> KafkaCluster:
        """The cluster, its options checked."""
        if not servers.strip():
            raise ConfigError("kafka needs the address of a server", hint="Write for example 'localhost:9092'.")
        given = {name.removeprefix("kafka."): _text(value) for name, value in (options or {}).items()}
        for name, value in given.items():
            if name in _OURS:
                raise ConfigError(f"kafka option {name!r} is decided by {_OURS[name]}", hint="Leave it out.")
            if name in ("bootstrap.servers", "metadata.broker.list"):
                raise ConfigError(f"kafka option {name!r}: the servers are the first argument", hint="Leave it out.")
            if name in SECRETS:
                check_named(f"kafka option {name!r}", name, value)
        return cls(servers.strip(), tuple(sorted(given.items())))

    def conf(self, **ours: object) -> dict[str, str]:
        """Options of one client: ours (dots written as underscores), the user's, and the secrets themselves.

        What a user gives wins over ``ours``.

        Raises:
            ConfigError: a secret is not where it should be.
        """
        made = {name.replace("_", "."): _text(value) for name, value in ours.items()}
        made |= {name: _found(name, value) if name in SECRETS else value for name, value in self.options}
        return {"bootstrap.servers": self.servers, "log_level": "2", **made}

    def hidden(self, text: str) -> str:
        """A message of the library's without the secrets that it may quote."""
        for name, value in self.options:
            if name in SECRETS:
                try:
                    secret = _found(name, value)
                except ConfigError:
                    continue
                text = text.replace(secret, "***") if secret else text
        return text


def client_library(module: str = "confluent_kafka") -> Any:
    """The Python client, or a module of it.

    Raises:
        BuildError: it is not installed; says how.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise BuildError(
            "reading and writing Kafka needs confluent-kafka",
            hint="Install it in the driver and where the workers run: pip install 'cutwater[kafka]'.",
        ) from None


def asked(ask: Callable[[], T], patience_s: float) -> T:
    """The answer of a cluster, asked again while it is settling: brokers that have just started know no coordinators.

    Raises:
        KafkaException: of the client: another error, or it goes on for too long.
    """
    failed = client_library().KafkaException
    ends_s = time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except failed as raised:
            if raised.args[0].code() not in _SETTLING or time.monotonic() > ends_s:
                raise
        time.sleep(_AGAIN_S)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _found(name: str, place: str) -> str:
    """The secret that lies in a variable or a file."""
    return secret_at(f"kafka option {name!r}", place)
