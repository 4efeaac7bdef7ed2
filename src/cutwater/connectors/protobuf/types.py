"""Types of messages as plain values, made of the official library's descriptors, and the columns they become."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from cutwater.errors import BuildError

Kind = Literal[
    "int32", "int64", "uint32", "uint64", "sint32", "sint64", "bool", "enum", "fixed32", "fixed64", "sfixed32",
    "sfixed64", "float", "double", "string", "bytes", "message",
]  # fmt: skip
Enums = Literal["text", "number"]

KINDS: tuple[str, ...] = (
    "", "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group", "message",
    "bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64",
)  # fmt: skip
"""By the number of the type in a descriptor."""
_PLAIN: dict[str, pa.DataType] = {
    "int32": pa.int32(),
    "sint32": pa.int32(),
    "sfixed32": pa.int32(),
    "uint32": pa.uint32(),
    "fixed32": pa.uint32(),
    "int64": pa.int64(),
    "sint64": pa.int64(),
    "sfixed64": pa.int64(),
    "uint64": pa.uint64(),
    "fixed64": pa.uint64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
    "bytes": pa.binary(),
}
_WELL_KNOWN = "google.protobuf."
TIMESTAMP, DURATION = _WELL_KNOWN + "Timestamp", _WELL_KNOWN + "Duration"
WRAPPERS = frozenset(
    _WELL_KNOWN + name + "Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_DEEPEST, _MOST_FIELDS = 100, 100_000
"""What anybody's type needs less of."""


@dataclass(frozen=True)
class ProtoEnum:
    """An enum: its names by their numbers, the first where two have one."""

    name: str
    values: tuple[tuple[int, str], ...]
    closed: bool
    """A number that it does not have is as an unknown field (proto2)."""


@dataclass(frozen=True)
class ProtoField:
    """A field of a message."""

    name: str
    number: int
    kind: Kind
    repeated: bool = False
    packed: bool = False
    """Repeated numbers are written in one piece; read they are either way."""
    presence: bool = False
    """It is there or not: a column that may be null.  Without, a default stands for what is not there."""
    oneof: str = ""
    """The choice that it is one of."""
    message: ProtoMessage | None = None
    enum: ProtoEnum | None = None
    is_map: bool = False
    """Repeated messages of a key (1) and a value (2)."""

    @property
    def wire_type(self) -> int:
        """How one value of it is framed."""
        if self.kind in ("fixed64", "sfixed64", "double"):
            return 1
        if self.kind in ("fixed32", "sfixed32", "float"):
            return 5
        return 2 if self.kind in ("string", "bytes", "message") else 0

    @property
    def coding(self) -> str:
        """See ``coding_of``."""
        return coding_of(self.kind, is_map=self.is_map)


def coding_of(kind: str, *, is_map: bool) -> str:
    """What the bytes of a type mean: types of one coding can be read as each other.

    >>> coding_of("int32", is_map=False) == coding_of("bool", is_map=False) != coding_of("sint32", is_map=False)
    True
    """
    if is_map:
        return "map"
    return _CODINGS.get(kind, kind)


_CODINGS = {
    **dict.fromkeys(("int32", "int64", "uint32", "uint64", "bool", "enum"), "varint"),
    **dict.fromkeys(("sint32", "sint64"), "zigzag"),
    **dict.fromkeys(("fixed32", "sfixed32"), "fixed32"),
    **dict.fromkeys(("fixed64", "sfixed64"), "fixed64"),
    **dict.fromkeys(("string", "bytes"), "bytes"),
}


@dataclass(frozen=True)
class ProtoMessage:
    """A type of messages; its fields in the order in which they are declared."""

    name: str
    """With its package."""
    fields: tuple[ProtoField, ...]
    count: int = field(default=0, init=False, compare=False)
    """Of the fields in it and in those."""

    def __post_init__(self) -> None:
        inner = sum(f.message.count for f in self.fields if f.message is not None)
        object.__setattr__(self, "count", len(self.fields) + inner)

    @property
    def well_known(self) -> Literal["timestamp", "duration", "wrapper"] | None:
        """A type of Google's that becomes a column of its own kind."""
        if self.name in WRAPPERS:
            return "wrapper"
        return {TIMESTAMP: "timestamp", DURATION: "duration"}.get(self.name)  # type: ignore[return-value]


def message_type(descriptor: Any) -> ProtoMessage:
    """The type that a descriptor of the official library describes.

    Raises:
        BuildError: a group, a type that holds itself, or no fields; names the field.
    """
    return _message(descriptor, "", ())


def _message(descriptor: Any, path: str, outer: tuple[str, ...]) -> ProtoMessage:
    name = str(descriptor.full_name)
    if name in outer:
        raise _refused(path, f"makes {name} hold itself, which no column can")
    if len(outer) >= _DEEPEST:
        raise _refused(path, f"is nested more than {_DEEPEST} deep")
    if not descriptor.fields:
        raise (
            _refused(path, f"is of type {name}, which has no fields")
            if path
            else BuildError(f"messages of type {name} have no fields, which would be the columns")
        )
    made = [_field(one, f"{path}.{one.name}" if path else str(one.name), (*outer, name)) for one in descriptor.fields]
    found = ProtoMessage(name, tuple(made))
    if found.count > _MOST_FIELDS:
        raise _refused(path, f"holds more than {_MOST_FIELDS} fields with those in it")
    return found


def _field(one: Any, path: str, outer: tuple[str, ...]) -> ProtoField:
    kind: Any = KINDS[one.type]
    if kind == "group":
        raise _refused(path, "is a group, an encoding that Protobuf has given up")
    repeated = bool(one.is_repeated)
    oneof = one.containing_oneof
    choice = "" if oneof is None or len(oneof.fields) == 1 else str(oneof.name)
    is_map = repeated and kind == "message" and bool(one.message_type.GetOptions().map_entry)
    in_entry = bool(one.containing_type.GetOptions().map_entry)
    return ProtoField(
        str(one.name),
        int(one.number),
        kind,
        repeated,
        packed=repeated and kind not in ("string", "bytes", "message") and bool(one.is_packed),
        presence=not repeated and not in_entry and bool(one.has_presence),
        oneof=choice,
        message=_message(one.message_type, path, outer) if kind == "message" else None,
        enum=_enum(one.enum_type) if kind == "enum" else None,
        is_map=is_map,
    )


def _enum(descriptor: Any) -> ProtoEnum:
    names: dict[int, str] = {}
    for value in descriptor.values:
        names.setdefault(int(value.number), str(value.name))
    return ProtoEnum(str(descriptor.full_name), tuple(sorted(names.items())), bool(descriptor.is_closed))


def _refused(path: str, what: str) -> BuildError:
    return BuildError(
        f"field {path!r} of the Protobuf message {what}",
        hint="Read with a message type that leaves the field out: fields that it does not have are passed over.",
    )


def arrow_schema(message: ProtoMessage, enums: Enums) -> pa.Schema:
    """Columns for the fields of a message.

    >>> user = ProtoField("user", 1, "int64")
    >>> tags = ProtoField("tags", 2, "string", repeated=True)
    >>> arrow_schema(ProtoMessage("Click", (user, tags)), "text")
    user: int64 not null
    tags: list<element: string not null> not null
      child 0, element: string not null
    """
    return pa.schema([pa.field(f.name, arrow_type(f, enums), f.presence) for f in message.fields])


def arrow_type(field: ProtoField, enums: Enums) -> pa.DataType:
    """The type of a column for a field."""
    if field.is_map:
        assert field.message is not None
        key, value = map_parts(field.message)
        return pa.map_(item_type(key, enums), pa.field("value", item_type(value, enums), False))
    item = item_type(field, enums)
    return pa.list_(pa.field("element", item, False)) if field.repeated else item


def item_type(field: ProtoField, enums: Enums) -> pa.DataType:
    """The type of one value of a field."""
    if field.message is not None:
        return struct_type(field.message, enums)
    if field.kind == "enum":
        return pa.string() if enums == "text" else pa.int32()
    return _PLAIN[field.kind]


def struct_type(message: ProtoMessage, enums: Enums) -> pa.DataType:
    """The type of a column of messages."""
    known = message.well_known
    if known == "wrapper":
        return item_type(message.fields[0], enums)
    if known is not None:
        return pa.timestamp("us", "UTC") if known == "timestamp" else pa.duration("us")
    return pa.struct(list(arrow_schema(message, enums)))


def map_parts(entry: ProtoMessage) -> tuple[ProtoField, ProtoField]:
    """The key and the value of a map's entry."""
    key, value = sorted(entry.fields, key=lambda f: f.number)
    return key, value
