"""Message types given by users and by registries, as descriptors of the official library, which resolves them."""

from __future__ import annotations

import base64
import binascii
import importlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutwater.connectors.messages.registry import Referenced, Registered
from cutwater.connectors.protobuf.types import KINDS, ProtoField, ProtoMessage, coding_of, message_type
from cutwater.errors import BuildError, did_you_mean

_KNOWN = ("any", "api", "duration", "empty", "field_mask", "source_context", "struct", "timestamp", "type", "wrappers")
"""Files of Google's that others import and nobody sends along."""
_PASSED_OVER = ("confluent/meta.proto",)
"""Imported for the names of options only."""


def library(module: str) -> Any:
    """A module of the official library.

    Raises:
        BuildError: it is not installed; says how.
    """
    try:
        return importlib.import_module(f"google.protobuf.{module}")
    except ImportError:
        raise BuildError(
            "messages of Protobuf need the library protobuf",
            hint="Install it in the driver and where the workers run: pip install 'cutwater[protobuf]'.",
        ) from None


@dataclass(frozen=True)
class Described:
    """A message type, and where it is defined.  A picklable value."""

    message: ProtoMessage
    file: bytes
    """The descriptor of the file."""
    path: tuple[int, ...]
    """The number of the type in the file, or of those that it lies in and then its own."""
    imports: tuple[str, ...]
    """Files that are not Google's."""


def described(given: Any, name: str | None) -> Described:
    """The message type that a user gives: a generated class, or a ``FileDescriptorSet`` as bytes or in a file.

    Args:
        name: of the type in the set; may be left out if there is one only.

    Raises:
        BuildError: it is none, or cannot be rows.
    """
    descriptor = getattr(given, "DESCRIPTOR", None)
    if descriptor is not None and hasattr(descriptor, "fields"):
        if name is not None:
            raise BuildError("protobuf: a class is a message type already", hint="Leave name=... out.")
        return _described(descriptor)
    content = given if isinstance(given, bytes) else _read(given)
    files = library("descriptor_pb2").FileDescriptorSet()
    try:
        files.MergeFromString(content)
    except library("message").DecodeError:
        raise BuildError("protobuf: what is given is no FileDescriptorSet", hint=_MAKE_ONE) from None
    if not files.file:
        raise BuildError("protobuf: the FileDescriptorSet has no files", hint=_MAKE_ONE)
    pool = _pool(files.file)
    own = [file for file in files.file if not _is_known(file.name)]
    return _described(_named(pool, [f"{f.package}.{m.name}".lstrip(".") for f in own for m in f.message_type], name))


def _read(given: Any) -> bytes:
    try:
        return Path(given).read_bytes()
    except (OSError, TypeError) as error:
        raise BuildError(
            f"protobuf: cannot read {given!r}: {error}",
            hint="Give a generated class, the bytes of a FileDescriptorSet, or the path of a file with one.",
        ) from None


_MAKE_ONE = "protoc --include_imports --descriptor_set_out=clicks.desc clicks.proto makes one."


def _described(descriptor: Any) -> Described:
    file = descriptor.file
    imports = tuple(one.name for one in file.dependencies if not _is_known(one.name))
    return Described(message_type(descriptor), bytes(file.serialized_pb), _path(descriptor), imports)


def _path(descriptor: Any) -> tuple[int, ...]:
    proto = library("descriptor_pb2").FileDescriptorProto.FromString(descriptor.file.serialized_pb)
    names: list[str] = []
    while descriptor is not None:
        names.insert(0, descriptor.name)
        descriptor = descriptor.containing_type
    path: list[int] = []
    types: Sequence[Any] = proto.message_type
    for name in names:
        path.append([one.name for one in types].index(name))
        types = types[path[-1]].nested_type
    return tuple(path)


def _is_known(file: str) -> bool:
    return file.startswith("google/protobuf/") or file in _PASSED_OVER


def _pool(files: Iterable[Any]) -> Any:
    """A pool with files, each after those that it imports.

    Raises:
        BuildError: one is missing, or they do not fit together.
    """
    pool = library("descriptor_pool").DescriptorPool()
    given = {file.name: file for file in files}
    added: set[str] = set()

    def add(name: str, by: str) -> None:
        if name in added:
            return
        added.add(name)
        file = given.get(name) or _google(name)
        if file is None:
            raise BuildError(f"protobuf: {by} imports {name}, which is not there", hint=_MAKE_ONE)
        kept = [one for one in file.dependency if one not in _PASSED_OVER]
        if len(kept) < len(file.dependency):
            del file.dependency[:], file.public_dependency[:], file.weak_dependency[:]
            file.dependency.extend(kept)
        for one in kept:
            add(one, name)
        try:
            pool.Add(file)
        except TypeError as error:
            raise BuildError(f"protobuf: {name} is wrong: {error}") from None

    for name in given:
        add(name, name)
    return pool


def _google(name: str) -> Any:
    stem = name.removeprefix("google/protobuf/").removesuffix(".proto")
    if not name.startswith("google/protobuf/") or stem not in (*_KNOWN, "descriptor"):
        return None
    file = library(f"{stem}_pb2").DESCRIPTOR.serialized_pb
    return library("descriptor_pb2").FileDescriptorProto.FromString(file)


def _named(pool: Any, names: list[str], name: str | None) -> Any:
    if name is None:
        if len(names) != 1:
            raise BuildError(
                f"protobuf: which of the message types is meant? There are {', '.join(names) or 'none'}",
                hint="Name it: cw.protobuf(..., name='shop.Click').",
            )
        name = names[0]
    found = name if name in names else next((one for one in names if one.rpartition(".")[2] == name), name)
    try:
        return pool.FindMessageTypeByName(found)
    except KeyError:
        raise BuildError(f"protobuf: there is no message type {name!r}", hint=did_you_mean(name, names)) from None


# -------------------------------------------------------------------------------------------------------- registries


class RegisteredFile:
    """A file with message types, of a registry that gave it as a descriptor.

    Raises:
        BuildError: it is no Protobuf, no descriptor, or cannot be resolved.
    """

    def __init__(self, found: Registered, url: str) -> None:
        self._where = f"schema {found.id} of the registry at {url}"
        if found.kind != "PROTOBUF":
            raise BuildError(f"{self._where} is {found.kind}, no Protobuf")
        root = self._file(Referenced("", found.text))
        root.name = root.name or f"schema-{found.id}.proto"
        self._proto = root
        self._pool = _pool([*(self._file(one) for one in found.references), root])

    def _file(self, one: Referenced) -> Any:
        try:
            content = base64.b64decode(one.text, validate=True)
            file = library("descriptor_pb2").FileDescriptorProto.FromString(content)
        except (binascii.Error, ValueError, library("message").DecodeError):
            raise BuildError(
                f"{self._where} comes as no descriptor, although format=serialized was asked for",
                hint="Registries that only give the text of .proto files cannot be used: read without one, "
                "where messages have no header.",
            ) from None
        if one.name:
            file.name = one.name
        return file

    def described(self, name: str | None) -> Described:
        """A message type by its name; without one, the only one.

        Raises:
            BuildError: there is none, or it cannot be rows.
        """
        names = [f"{self._proto.package}.{one.name}".lstrip(".") for one in self._proto.message_type]
        return _described(_named(self._pool, names, name))

    def why_not(self, path: tuple[int, ...], reader: ProtoMessage) -> str:
        """Why messages of the type at a path cannot be read as another one's; empty: they can."""
        types: Sequence[Any] = self._proto.message_type
        names: list[str] = []
        for index in path:
            if index >= len(types):
                return f"{self._where} has no message type at {list(path)}"
            names.append(types[index].name)
            types = types[index].nested_type
        name = ".".join([*([self._proto.package] if self._proto.package else []), *names])
        if name != reader.name:
            return f"it is of type {name}, and no {reader.name}"
        return self._differs(self._pool.FindMessageTypeByName(name), reader, "")

    def _differs(self, writer: Any, reader: ProtoMessage, path: str) -> str:
        for field in reader.fields:
            theirs = writer.fields_by_number.get(field.number)
            why = "" if theirs is None else self._differs_in(theirs, field, f"{path}{field.name}")
            if why:
                return why
        return ""

    def _differs_in(self, theirs: Any, ours: ProtoField, path: str) -> str:
        entry = theirs.message_type is not None and theirs.message_type.GetOptions().map_entry
        if coding_of(KINDS[theirs.type], is_map=bool(entry)) != ours.coding:
            return f'field "{path}": {self._where} has it as {KINDS[theirs.type]}, which is not read as {ours.kind}'
        return self._differs(theirs.message_type, ours.message, f"{path}.") if ours.message is not None else ""


def header_of(id: int, path: tuple[int, ...]) -> bytes:
    """What Confluent's wire format has in front of a message.

    >>> header_of(7, (0,)), header_of(7, (1, 0))
    (b'\\x00\\x00\\x00\\x00\\x07\\x00', b'\\x00\\x00\\x00\\x00\\x07\\x04\\x02\\x00')
    """
    words = (0,) if path == (0,) else (len(path), *path)
    return b"\0" + id.to_bytes(4, "big") + b"".join(_varint(2 * word) for word in words)


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def is_given(given: object) -> bool:
    """True for what a user may give as a message type."""
    return isinstance(given, bytes | str | os.PathLike) or hasattr(given, "DESCRIPTOR")
