"""Avro's schemas in a schema registry."""

from __future__ import annotations

from typing import NamedTuple

from cutwater.connectors.avro.schemas import AvroType, SchemaText, parsed
from cutwater.connectors.messages.registry import KnownSchemas, Registered, Registry
from cutwater.errors import BuildError


class Newest(NamedTuple):
    """The newest schema of a subject."""

    id: int
    text: SchemaText


def newest_schema(registry: Registry, subject: str) -> Newest | None:
    """The newest schema of a subject; ``None``: it has none.

    Raises:
        StorageError: the registry does not answer, or refuses.
        BuildError: it is no Avro.
    """
    found = registry.latest(subject)
    if found is None:
        return None
    if found.kind != "AVRO":
        raise BuildError(f"the newest schema of subject {subject!r} at {registry.url} is {found.kind}, no Avro")
    return Newest(found.id, _text(found))


def writers_schemas(registry: Registry) -> KnownSchemas[AvroType]:
    """The schemas that values were written with, by their ids."""

    def make(found: Registered) -> AvroType | str:
        if found.kind != "AVRO":
            return f"schema {found.id} of the registry at {registry.url} is {found.kind}, no Avro"
        try:
            return parsed(_text(found))
        except BuildError as error:
            return f"schema {found.id} of the registry at {registry.url}: {error.message}"

    return KnownSchemas(registry, make)


def _text(found: Registered) -> SchemaText:
    return SchemaText(found.text, tuple(one.text for one in found.references))
