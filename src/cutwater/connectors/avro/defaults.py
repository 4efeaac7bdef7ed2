"""Values as they stand in a schema, as defaults do, in Avro's bytes."""

from __future__ import annotations

import struct
from typing import Any

from cutwater.connectors.avro.schemas import NO_DEFAULT, AvroType


def encoded(type: AvroType, value: Any) -> bytes:
    """A default in Avro's bytes.

    Raises:
        ValueError: it is none of the type.

    >>> encoded(AvroType("array", inner=(AvroType("string"),)), ["ab"])
    b'\\x02\\x04ab\\x00'
    """
    if type.kind == "union":
        return _of_union(type, value)
    if type.kind == "record" and isinstance(value, dict):
        given = [value.get(f.name, f.default) for f in type.fields]
        if NO_DEFAULT in given:
            raise ValueError(f"{value!r} has not all fields of {type}")
        return b"".join(encoded(f.type, one) for f, one in zip(type.fields, given, strict=True))
    if type.kind == "array" and isinstance(value, list):
        return _blocks([encoded(type.inner[0], one) for one in value])
    if type.kind == "map" and isinstance(value, dict):
        return _blocks([encoded(AvroType("string"), key) + encoded(type.inner[0], one) for key, one in value.items()])
    if type.kind == "enum" and value in type.symbols:
        return number(type.symbols.index(value))
    return _of_plain(type, value)


def _of_union(type: AvroType, value: Any) -> bytes:
    for place, branch in enumerate(type.inner):
        try:
            return number(place) + encoded(branch, value)
        except ValueError:
            continue
    raise ValueError(f"{value!r} is none of {type}")


def _of_plain(type: AvroType, value: Any) -> bytes:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if type.kind == "null" and value is None:
        return b""
    if type.kind == "boolean" and isinstance(value, bool):
        return bytes([value])
    if (type.kind == "int" and whole and -(2**31) <= value < 2**31) or (
        type.kind == "long" and whole and -(2**63) <= value < 2**63
    ):
        return number(value)
    if type.kind in ("float", "double") and (whole or isinstance(value, float)):
        return struct.pack("<f" if type.kind == "float" else "<d", value)
    if type.kind == "string" and isinstance(value, str):
        content = value.encode()
        return number(len(content)) + content
    if type.kind in ("bytes", "fixed") and isinstance(value, str):
        content = value.encode("latin-1")  # each character stands for a byte
        if type.kind == "bytes":
            return number(len(content)) + content
        if len(content) == type.size:
            return content
    raise ValueError(f"{value!r} is no {type}")


def _blocks(items: list[bytes]) -> bytes:
    return (number(len(items)) + b"".join(items) if items else b"") + b"\0"


def number(value: int) -> bytes:
    """A number of variable length.

    >>> number(-65)
    b'\\x81\\x01'
    """
    left, made = (value << 1) ^ (value >> 63), bytearray()
    while left > 127:
        made.append(left & 127 | 128)
        left >>= 7
    return bytes([*made, left])
