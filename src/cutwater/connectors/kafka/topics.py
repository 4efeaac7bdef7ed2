"""What the driver asks a cluster: topics, their partitions, and where these begin and end."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from cutwater.connectors.kafka.cluster import KafkaCluster, asked, client_library
from cutwater.errors import BuildError, ConfigError, CutwaterError, StorageError

_TIMEOUT_S = 15.0
_NO_TOPIC = (3, 17, 29)
"""The broker's codes for a topic that is unknown, has no name of one, or may not be seen."""
T = TypeVar("T")


class Topic(NamedTuple):
    """A topic as it is now."""

    name: str
    id: str
    """Another one for each topic of this name that there ever was."""
    partitions: int


class Topics:
    """Questions to a cluster.

    Args:
        cluster: which.

    Raises:
        BuildError: the client library is not installed.
        ConfigError: an option that it refuses.
    """

    def __init__(self, cluster: KafkaCluster) -> None:
        admin = client_library("confluent_kafka.admin")
        self._cluster = cluster
        self._errors: list[str] = []
        self._admin: Any = _made(lambda: admin.AdminClient({**cluster.conf(), "error_cb": self._report}))

    def _report(self, error: Any) -> None:
        self._errors = [*self._errors[-3:], self._cluster.hidden(error.str())]

    def named(self, names: Sequence[str]) -> list[Topic]:
        """The topics of these names.

        Raises:
            BuildError: one does not exist, or may not be read.
            StorageError: the cluster does not answer.
        """
        found: list[Topic] = []
        for name in names:
            try:
                told = self._asked(lambda name=name: self._described(name))
            except UnknownTopicError as error:
                raise BuildError(
                    f"kafka topic {name!r}: {error.message}",
                    hint="Make the topic first, or look at its name, and at what the user may read.",
                ) from None
            found.append(Topic(name, str(told.topic_id), len(told.partitions)))
        return found

    def _described(self, name: str) -> Any:
        topics = client_library().TopicCollection([name])
        return self._admin.describe_topics(topics, request_timeout=_TIMEOUT_S)[name].result()

    def matching(self, pattern: str) -> list[Topic]:
        """Topics whose whole names a regular expression matches; those of Kafka itself are none.

        Raises:
            StorageError: the cluster does not answer.
        """
        names = self._asked(lambda: self._admin.list_topics(timeout=_TIMEOUT_S)).topics
        return self.named([n for n in sorted(names) if re.fullmatch(pattern, n) and not n.startswith("__")])

    def offsets(self, places: Sequence[tuple[str, int]], spec: Any) -> dict[tuple[str, int], int]:
        """Where partitions begin (``"earliest"``), end (``"latest"``), or what comes first at or after a time.

        Raises:
            StorageError: the cluster does not answer.
        """
        kafka = client_library()
        if not places:
            return {}
        specs = client_library("confluent_kafka.admin").OffsetSpec
        if isinstance(spec, datetime):
            wanted = specs.for_timestamp(int(spec.timestamp() * 1000))
        else:
            wanted = {"earliest": specs.earliest, "latest": specs.latest}[spec]()
        request = {kafka.TopicPartition(topic, partition): wanted for topic, partition in places}

        def ask() -> dict[tuple[str, int], int]:
            futures = self._admin.list_offsets(request, request_timeout=_TIMEOUT_S)
            return {(p.topic, p.partition): future.result().offset for p, future in futures.items()}

        found = self._asked(ask)
        behind = [place for place, offset in found.items() if offset < 0]  # nothing is as young as that time
        return {**found, **(self.offsets(behind, "latest") if behind else {})}

    def _asked(self, ask: Callable[[], T]) -> T:
        kafka = client_library()
        try:
            return asked(ask, _TIMEOUT_S)
        except kafka.KafkaException as raised:
            error: Any = raised.args[0]
            text = self._cluster.hidden(error.str())
            if error.code() in _NO_TOPIC:
                raise UnknownTopicError(text) from None
            self._admin.poll(0)
            why = f" ({'; '.join(self._errors)})" if self._errors else ""
            raise StorageError(
                f"kafka at {self._cluster.servers} does not answer: {text}{why}",
                hint="Look whether the brokers run and can be reached from here, and at security.protocol and sasl.*.",
            ) from None


class UnknownTopicError(CutwaterError):
    """A topic does not exist, or may not be seen."""


def _made(make: Callable[[], T]) -> T:
    kafka = client_library()
    try:
        return make()
    except kafka.KafkaException as raised:
        raise ConfigError(f"kafka: {raised.args[0].str()}", hint="Options are those of librdkafka.") from None


def given_offsets(start: Mapping[str, Mapping[int, int]]) -> dict[tuple[str, int], int]:
    """Offsets by topic and partition, as a user writes them.

    >>> given_offsets({"clicks": {0: 5, 1: 7}})
    {('clicks', 0): 5, ('clicks', 1): 7}
    """
    return {(topic, int(p)): int(offset) for topic, offsets in start.items() for p, offset in offsets.items()}
