"""``cw.protobuf``: Protobuf as the format of messages, to read and to write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cutwater.connectors.messages.registry import KnownSchemas, Registered, Registry
from cutwater.connectors.protobuf.descriptors import Described, RegisteredFile, described, is_given
from cutwater.connectors.protobuf.types import Enums, ProtoField, ProtoMessage, arrow_schema
from cutwater.errors import BuildError, ConfigError, StorageError

if TYPE_CHECKING:
    from cutwater.connectors.messages.base import ValueDecoder
    from cutwater.connectors.messages.encoders import ValueEncoder

SERIALIZED = "serialized"
"""The form in which a registry gives descriptors."""


@dataclass(frozen=True)
class ProtobufMessages:
    """One message of a type in each value."""

    message: ProtoMessage
    enums: Enums = "text"
    registry: Registry | None = None
    """It knows the schemas of the writers, whose ids are in front of the messages."""

    @property
    def name(self) -> str:
        return "protobuf"

    @property
    def schema(self) -> pa.Schema:
        return arrow_schema(self.message, self.enums)

    def decoder(self, columns: frozenset[str] | None, *, dictionaries: bool) -> ValueDecoder:
        from cutwater.connectors.protobuf.decoder import ProtobufDecoder

        fits = None if self.registry is None else _fits(self.registry, self.message)
        return ProtobufDecoder(self.message, columns, self.enums, dictionaries=dictionaries, fits=fits)


def _fits(registry: Registry, message: ProtoMessage) -> Callable[[int, tuple[int, ...]], str]:
    def make(found: Registered) -> RegisteredFile | str:
        if found.kind != "PROTOBUF":
            return f"schema {found.id} of the registry at {registry.url} is {found.kind}, no Protobuf"
        try:
            return RegisteredFile(found, registry.url)
        except BuildError as error:  # of the registry, and of no message
            raise StorageError(error.message, hint=error.hint) from None

    schemas = KnownSchemas(registry, make, SERIALIZED)

    def fits(id: int, path: tuple[int, ...]) -> str:
        found = schemas(id)
        return found if isinstance(found, str) else found.why_not(path, message)

    return fits


@dataclass(frozen=True)
class Protobuf:
    """Protobuf with a message type, a registry, or both."""

    given: Described | None
    name: str | None
    registry: Registry | None
    subject: str | None
    enums: Enums = "text"

    def messages(self, topic: str | None) -> ProtobufMessages:
        """The format to read with.  The type is the one given, or of the newest schema of the subject now.

        Args:
            topic: if it is only one.

        Raises:
            BuildError: there is no schema, or its messages cannot be rows.
            StorageError: the registry does not answer.
        """
        found = self.given or self._newest(topic)[0]
        return ProtobufMessages(found.message, self.enums, self.registry)

    def encoder(self, topic: str) -> ValueEncoder:
        """What writes to a topic.

        Raises:
            BuildError: there is no schema, it needs others that we do not register, or its messages cannot be rows.
            StorageError: the registry does not answer.
        """
        from cutwater.connectors.protobuf.encoder import ProtobufEncoder

        if self.given is None:
            found, id = self._newest(topic)
            return ProtobufEncoder(found, self.registry, self._subject(topic), id)
        if self.registry is None:
            return ProtobufEncoder(self.given)
        if self.given.imports:
            raise BuildError(
                f"the file of {self.given.message.name} imports {', '.join(self.given.imports)}, which would have to "
                "be registered with it",
                hint="Register it with the tools of the registry, and leave the type out: the newest schema of the "
                "subject is used then.",
            )
        return ProtobufEncoder(self.given, self.registry, self._subject(topic))

    def _newest(self, topic: str | None) -> tuple[Described, int]:
        assert self.registry is not None
        subject = self._subject(topic)
        newest = self.registry.latest(subject, SERIALIZED)
        if newest is None:
            raise BuildError(
                f"the schema registry at {self.registry.url} has no schema for subject {subject!r}",
                hint="Name another subject, cw.protobuf(registry=..., subject=...), or give a message type.",
            )
        return RegisteredFile(newest, self.registry.url).described(self.name), newest.id

    def _subject(self, topic: str | None) -> str:
        if self.subject is not None:
            return self.subject
        if topic is None:
            raise BuildError(
                "which schema of the registry do rows of several topics have?",
                hint="Name its subject, cw.protobuf(registry=..., subject=...), or give a message type.",
            )
        return f"{topic}-value"


def protobuf(
    message: Any = None,
    *,
    name: str | None = None,
    registry: str | None = None,
    subject: str | None = None,
    options: Mapping[str, str] | None = None,
    enums: Enums = "text",
) -> Protobuf:
    """Protobuf as the format of messages: ``cw.kafka(servers, topic, format=cw.protobuf(Click))``.

    Needs ``pip install 'cutwater[protobuf]'``.

    Args:
        message: type of the messages, whose fields are the columns: a generated class, or a ``FileDescriptorSet`` (what
            ``protoc --descriptor_set_out`` makes) as bytes or as the path of a file.
        name: of the message type, where a set or a schema has several.
        registry: address of a schema registry.  Messages begin with a zero byte, the id of the schema that they were
            written with, and the place of their type in it (Confluent's wire format).
        subject: of the registry, ``"<topic>-value"`` unless it is given.  Without a message type, its newest schema
            when the flow is built has it.
        options: of the registry, as of ``cw.avro``.
        enums: columns of enums hold names (``"text"``; a number without name as digits) or ``"number"``.

    Raises:
        BuildError: the type is wrong: a group, one that holds itself.
        ConfigError: neither type nor registry, an option that there is not, or a password in plain.

    >>> from google.protobuf.timestamp_pb2 import Timestamp
    >>> protobuf(Timestamp).messages("times").schema.names
    ['seconds', 'nanos']
    """
    if message is None and registry is None:
        raise ConfigError(
            "protobuf needs a message type or a registry",
            hint="Write cw.protobuf(Click) or cw.protobuf(registry='http://localhost:8081').",
        )
    if registry is None and (subject is not None or options):
        raise ConfigError("protobuf: subject and options are of a registry", hint="Write registry='http://...' too.")
    if message is not None and not is_given(message):
        raise ConfigError(
            f"protobuf: {message!r} is no message type",
            hint="Give a generated class, the bytes of a FileDescriptorSet, or the path of a file with one.",
        )
    if enums not in ("text", "number"):
        raise ConfigError(f"protobuf: enums is 'text' or 'number', got {enums!r}")
    known = None if registry is None else Registry.of(registry, options)
    if message is None:
        return Protobuf(None, name, known, subject, enums)
    return Protobuf(described(message, name), None, known, subject, enums)


def warm_up() -> None:
    """Compile the kernels, by a row written and read."""
    from cutwater.connectors.messages.base import Values
    from cutwater.connectors.protobuf.decoder import ProtobufDecoder
    from cutwater.connectors.protobuf.encoder import ProtobufEncoder

    message = ProtoMessage("R", (ProtoField("n", 1, "int64"),))
    value = ProtobufEncoder(Described(message, b"", (0,), ())).encode(pa.table({"n": [1]})).value(0)
    decoder = ProtobufDecoder(message, None, "text", dictionaries=False, fits=lambda id, path: "")
    decoder.decode(Values.of([b"\0\0\0\0\1\0" + value]), first_only=False)
