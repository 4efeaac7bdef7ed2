"""Random Protobuf types and messages of them, and what the official library makes of both."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, timestamp_pb2, wrappers_pb2
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import strategies as st

from cutwater.connectors.messages.base import Decoded, Values
from cutwater.connectors.protobuf.decoder import ProtobufDecoder
from cutwater.connectors.protobuf.types import WRAPPERS, Enums, message_type

_F: Any = descriptor_pb2.FieldDescriptorProto
_numbers = itertools.count()
WELL_KNOWN = ("google/protobuf/timestamp.proto", "google/protobuf/duration.proto", "google/protobuf/wrappers.proto")
SCALARS = (
    "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "bytes", "uint32",
    "sfixed32", "sfixed64", "sint32", "sint64",
)  # fmt: skip


def kind_of(name: str) -> int:
    return int(getattr(_F, f"TYPE_{name.upper()}"))


def pool_of(file: Any) -> Any:
    """A pool with a file, and those that Google gives."""
    pool = descriptor_pool.DescriptorPool()
    for module in (timestamp_pb2, duration_pb2, wrappers_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return pool


def file_of(message: Any, syntax: str = "proto3") -> Any:
    """A file with a message type, which it gives a package of its own."""
    package = f"world{next(_numbers)}"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax=syntax)
    file.dependency.extend(WELL_KNOWN)
    file.message_type.append(message)
    if syntax == "proto2":
        _without_optional(file.message_type[0])
    return file


def _without_optional(message: Any) -> None:
    for field in message.field:
        field.ClearField("proto3_optional")
    for nested in message.nested_type:
        _without_optional(nested)


def class_of(file: Any) -> Any:
    """The class of the first message of a file."""
    pool = pool_of(file)
    named = pool.FindMessageTypeByName(f"{file.package}.{file.message_type[0].name}")
    return message_factory.GetMessageClass(named)


def simple(syntax: str = "proto3", **fields: str) -> Any:
    """A class with scalar fields: ``simple(n="int64", tags="repeated string", m="optional int32")``."""
    message = descriptor_pb2.DescriptorProto(name="M")
    for number, (name, kind) in enumerate(fields.items(), start=1):
        label, _, scalar = kind.rpartition(" ")
        field = message.field.add(name=name, number=number, type=kind_of(scalar), label=_F.LABEL_OPTIONAL)
        if label == "repeated":
            field.label = _F.LABEL_REPEATED
        elif label == "optional" and syntax == "proto3":
            _optional(message, field)
    return class_of(file_of(message, syntax))


def timed() -> Any:
    """A class with a timestamp ``at``."""
    message = descriptor_pb2.DescriptorProto(name="M")
    message.field.add(name="at", number=1, type=_F.TYPE_MESSAGE, label=1, type_name=".google.protobuf.Timestamp")
    return class_of(file_of(message))


def choice() -> Any:
    """A class with a oneof ``c`` of a number ``a`` and a text ``b``."""
    message = descriptor_pb2.DescriptorProto(name="M")
    message.oneof_decl.add(name="c")
    message.field.add(name="a", number=1, type=kind_of("int64"), label=1, oneof_index=0)
    message.field.add(name="b", number=2, type=kind_of("string"), label=1, oneof_index=0)
    return class_of(file_of(message))


def with_enum(syntax: str = "proto3") -> Any:
    """A class with an enum ``e`` of A and B."""
    message = descriptor_pb2.DescriptorProto(name="M")
    enum = message.enum_type.add(name="E")
    enum.value.add(name="A", number=0)
    enum.value.add(name="B", number=1)
    field = message.field.add(name="e", number=1, type=_F.TYPE_ENUM, label=1)
    file = file_of(message, syntax)
    file.message_type[0].field[0].type_name = f".{file.package}.M.E"
    del field
    return class_of(file)


def whole_micros(message: Any) -> Any:
    """A copy of a message with its times cut to microseconds."""
    copy = type(message)()
    copy.CopyFrom(message)
    _cut(copy)
    return copy


def _cut(message: Any) -> None:
    if message.DESCRIPTOR.full_name in ("google.protobuf.Timestamp", "google.protobuf.Duration"):
        message.nanos = int(message.nanos / 1000) * 1000
    for field, value in message.ListFields():
        for one in _messages(field, value):
            _cut(one)


def _optional(message: Any, field: Any) -> None:
    field.proto3_optional = True
    field.oneof_index = len(message.oneof_decl)
    message.oneof_decl.add(name=f"_{field.name}")


def decode(
    cls: Any, values: Sequence[bytes | None], columns: frozenset[str] | None = None, enums: Enums = "text", **more: Any
) -> Decoded:
    """By our decoder."""
    decoder = ProtobufDecoder(message_type(cls.DESCRIPTOR), columns, enums, dictionaries=False, **more)
    found = decoder.decode(Values.of(values), first_only=False)
    found.rows.validate(full=True)
    return found


# -------------------------------------------------------------------------------------------- what messages should be


def row_of(message: Any) -> dict[str, Any]:
    """A message of the official library as Arrow's row should be: maps as sorted pairs."""
    return {field.name: _field_of(message, field) for field in message.DESCRIPTOR.fields}


def _field_of(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if _is_map(field):
        inner = field.message_type.fields_by_name["value"]
        return sorted((key, _plain(inner, value[key])) for key in value)
    if field.is_repeated:
        return [_plain(field, one) for one in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _plain(field, value)


def _plain(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        known = [one.name for one in field.enum_type.values if one.number == value]
        return known[0] if known else str(value)
    if field.message_type is None:
        if field.type == _F.TYPE_STRING and isinstance(value, bytes):  # proto2 lets anything pass
            value.decode()
        return value
    name = field.message_type.full_name
    if name in WRAPPERS:
        return value.value
    if name == "google.protobuf.Timestamp":
        return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(
            seconds=value.seconds, microseconds=value.nanos // 1000
        )
    if name == "google.protobuf.Duration":
        return dt.timedelta(seconds=value.seconds, microseconds=int(value.nanos / 1000))
    return row_of(value)


def rows_of(decoded: Decoded) -> list[dict[str, Any]]:
    """Rows as ``row_of`` makes them: pairs of maps sorted."""
    return [_sorted(row) for row in decoded.rows.to_pylist()]


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(one) for name, one in value.items()}
    if isinstance(value, list):
        plain = [_sorted(one) for one in value]
        return sorted(plain, key=lambda pair: pair[0]) if plain and isinstance(plain[0], tuple) else plain
    if isinstance(value, tuple):
        return tuple(_sorted(one) for one in value)
    return value


def is_row(message: Any) -> bool:
    """False where we refuse what the library reads: a known field's number with another wire type, a time that is
    none."""
    for one in UnknownFieldSet(message):
        field = message.DESCRIPTOR.fields_by_number.get(one.field_number)
        if field is not None and not (field.enum_type is not None and one.wire_type == 0):  # a closed enum's number
            return False
    name = message.DESCRIPTOR.full_name
    if name == "google.protobuf.Timestamp":
        return -62135596800 <= message.seconds <= 253402300799 and 0 <= message.nanos < 10**9
    if name == "google.protobuf.Duration":
        same = message.seconds == 0 or message.nanos == 0 or (message.seconds > 0) == (message.nanos > 0)
        return abs(message.seconds) <= 315576000000 and abs(message.nanos) < 10**9 and same
    return all(is_row(one) for field, value in message.ListFields() for one in _messages(field, value))


def is_undecided(message: Any) -> bool:
    """True where the library takes the whole entry of a map for unknown because something in it is; others do not."""
    for one in UnknownFieldSet(message):
        field = message.DESCRIPTOR.fields_by_number.get(one.field_number)
        if field is not None and one.wire_type == 2 and _is_map(field):
            return True
    return any(is_undecided(one) for field, value in message.ListFields() for one in _messages(field, value))


def _is_map(field: Any) -> bool:
    return field.is_repeated and field.message_type is not None and field.message_type.GetOptions().map_entry


def _messages(field: Any, value: Any) -> list[Any]:
    if field.message_type is None:
        return []
    if not field.is_repeated:
        return [value]
    if _is_map(field):
        return list(value.values()) if field.message_type.fields_by_name["value"].message_type else []
    return list(value)


# --------------------------------------------------------------------------------------------------- random types


class _Draft:
    """A message type being made, and a strategy that fills in a message of it."""

    def __init__(self, name: str) -> None:
        self.proto = descriptor_pb2.DescriptorProto(name=name)
        self.values: dict[str, st.SearchStrategy[Any]] = {}


_I32, _I64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
_U32, _U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
_TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "double": st.floats(allow_nan=False),
    "float": st.floats(width=32, allow_nan=False),
    "bool": st.booleans(),
    "string": _TEXT,
    "bytes": st.binary(max_size=12),
    **dict.fromkeys(("int32", "sint32", "sfixed32"), _I32),
    **dict.fromkeys(("int64", "sint64", "sfixed64"), _I64),
    **dict.fromkeys(("uint32", "fixed32"), _U32),
    **dict.fromkeys(("uint64", "fixed64"), _U64),
}
_KEYS = [kind for kind in SCALARS if kind not in ("double", "float", "bytes")]
_TIMES = st.builds(
    lambda seconds, nanos: {"seconds": seconds, "nanos": nanos},
    st.integers(-62135596800, 253402300799),
    st.integers(0, 999_999_999),
)
_SPANS = st.integers(-(10**18), 10**18).map(
    lambda n: {"seconds": int(n / 10**9), "nanos": n - int(n / 10**9) * 10**9 if abs(n) < 10**9 else 0}
)


def _well_known(draw: st.DrawFn) -> tuple[str, st.SearchStrategy[Any]]:
    kind = draw(st.sampled_from(["Timestamp", "Duration", "Int64Value", "StringValue", "BoolValue", "DoubleValue"]))
    if kind in ("Timestamp", "Duration"):
        return f".google.protobuf.{kind}", _TIMES if kind == "Timestamp" else _SPANS
    scalar = kind.removesuffix("Value").lower()
    return f".google.protobuf.{kind}", VALUES[scalar].map(lambda value: {"value": value})


@st.composite
def drafts(draw: st.DrawFn, path: str, depth: int, syntax: str, maps: bool) -> _Draft:
    """A message type below a path of names."""
    name = path.rpartition(".")[2]
    made = _Draft(name)
    numbers = draw(st.lists(st.integers(1, 20) | st.integers(1, 18_000), min_size=1, max_size=5, unique=True))
    for n, number in enumerate(numbers):
        _add_field(draw, made, path, f"f{n}", number, depth, syntax, maps)
    if draw(st.booleans()):
        free = [f for f in made.proto.field if f.label != _F.LABEL_REPEATED and not f.proto3_optional]
        if len(free) > 1:
            index = len(made.proto.oneof_decl)
            made.proto.oneof_decl.add(name="choice")
            for field in free:
                field.oneof_index = index
    _synthetic_last(made.proto)
    return made


def _synthetic_last(proto: Any) -> None:
    """The oneofs of optional fields come behind the others, as the library wants it."""
    for field in proto.field:
        if field.proto3_optional:
            field.oneof_index = len(proto.oneof_decl)
            proto.oneof_decl.add(name=f"_{field.name}")


def _add_field(
    draw: st.DrawFn, made: _Draft, path: str, name: str, number: int, depth: int, syntax: str, maps: bool
) -> None:
    shape = draw(
        st.sampled_from(["one", "one", "optional", "repeated", "unpacked"] + (["map"] if depth and maps else []))
    )
    kinds = ["scalar"] * 4 + ["enum", "known"] + (["message"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    field = made.proto.field.add(name=name, number=number, label=_F.LABEL_OPTIONAL)
    values = _set_type(draw, made, field, path, name, kind, depth, syntax, maps)
    if shape == "map":
        entry = made.proto.nested_type.add(name=f"{name.upper()}Entry")
        entry.options.map_entry = True
        key = draw(st.sampled_from(_KEYS))
        entry.field.add(name="key", number=1, type=kind_of(key), label=_F.LABEL_OPTIONAL)
        inner = entry.field.add()
        inner.CopyFrom(field)
        inner.name, inner.number = "value", 2
        field.type, field.type_name = _F.TYPE_MESSAGE, f".{path}.{entry.name}"
        field.label = _F.LABEL_REPEATED
        made.values[name] = st.dictionaries(VALUES[key], values, max_size=3)
    elif shape in ("repeated", "unpacked"):
        field.label = _F.LABEL_REPEATED
        if field.type not in (_F.TYPE_STRING, _F.TYPE_BYTES, _F.TYPE_MESSAGE):
            field.options.packed = shape == "repeated"
        made.values[name] = st.lists(values, max_size=4)
    else:
        field.proto3_optional = shape == "optional" and syntax == "proto3"
        made.values[name] = values


def _set_type(
    draw: st.DrawFn, made: _Draft, field: Any, path: str, name: str, kind: str, depth: int, syntax: str, maps: bool
) -> st.SearchStrategy[Any]:
    if kind == "scalar":
        scalar = draw(st.sampled_from(SCALARS))
        field.type = kind_of(scalar)
        return VALUES[scalar]
    if kind == "enum":
        enum = made.proto.enum_type.add(name=f"{name.upper()}E")
        known = draw(st.lists(st.integers(-5, 40), min_size=1, max_size=4, unique=True).map(lambda n: [0, *n]))
        for number in dict.fromkeys(known):
            enum.value.add(name=f"{name.upper()}_{'M' if number < 0 else 'P'}{abs(number)}", number=number)
        field.type, field.type_name = _F.TYPE_ENUM, f".{path}.{enum.name}"
        return st.sampled_from(known) | (_I32 if syntax == "proto3" else st.nothing())
    field.type = _F.TYPE_MESSAGE
    if kind == "known":
        field.type_name, values = _well_known(draw)
        return values
    inner = draw(drafts(f"{path}.{name.upper()}", depth - 1, syntax, maps))
    made.proto.nested_type.append(inner.proto)
    field.type_name = f".{path}.{inner.proto.name}"
    return contents(inner)


def contents(draft: _Draft) -> st.SearchStrategy[dict[str, Any]]:
    """What some of the fields of a message hold, at most one of a oneof."""

    def one_of_a_choice(found: dict[str, Any]) -> dict[str, Any]:
        seen: set[int] = set()
        kept: dict[str, Any] = {}
        for field in draft.proto.field:
            if field.name in found and not (field.HasField("oneof_index") and field.oneof_index in seen):
                kept[field.name] = found[field.name]
                if field.HasField("oneof_index"):
                    seen.add(field.oneof_index)
        return kept

    return st.fixed_dictionaries({}, optional=draft.values).map(one_of_a_choice)


@st.composite
def messages(draw: st.DrawFn, syntax: str | None = None, maps: bool = True) -> tuple[Any, st.SearchStrategy[Any]]:
    """A class of messages, and a strategy of its messages."""
    chosen = draw(st.sampled_from(["proto3", "proto3", "proto2"])) if syntax is None else syntax
    package = f"world{next(_numbers)}"
    draft = draw(drafts(f"{package}.M", 2, chosen, maps))
    file = file_of(draft.proto, chosen)
    file.package = package
    cls = class_of(file)
    return cls, contents(draft).map(lambda found: filled(cls(), found))


def filled(message: Any, found: dict[str, Any]) -> Any:
    """A message with such contents."""
    for name, value in found.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        target = getattr(message, name)
        if field.is_repeated and isinstance(value, dict):
            for key, one in value.items():
                if field.message_type.fields_by_name["value"].message_type is not None:
                    filled(target[key], one)
                else:
                    target[key] = one
        elif field.is_repeated:
            for one in value:
                if field.message_type is not None:
                    filled(target.add(), one)
                else:
                    target.append(one)
        elif field.message_type is not None:
            target.SetInParent()
            filled(target, value)
        else:
            setattr(message, name, value)
    return message
