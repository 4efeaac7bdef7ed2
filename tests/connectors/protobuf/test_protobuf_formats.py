"""What ``cw.protobuf`` takes: classes, descriptor sets, registries; and what it refuses, by name."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, struct_pb2, timestamp_pb2
from servers.schema_registry import SchemaRegistry

import cutwater as cw
import protobuf_world as world
from cutwater.connectors.messages import registry as registry_module
from cutwater.connectors.messages.base import Decoded, Values
from cutwater.connectors.messages.registry import KnownSchemas
from cutwater.connectors.protobuf.formats import Protobuf
from cutwater.errors import BuildError, ConfigError, StorageError

Click = world.simple(user="int64", page="string")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[SchemaRegistry]:
    monkeypatch.setattr(registry_module, "_WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(KnownSchemas, "_known", {})
    with SchemaRegistry() as started:
        yield started


def register(registry: SchemaRegistry, subject: str, file: Any, **more: Any) -> int:
    text = base64.b64encode(file if isinstance(file, bytes) else file.SerializeToString()).decode()
    return registry.register(subject, text, schemaType="PROTOBUF", **more)


def file_of(cls: Any) -> Any:
    return descriptor_pb2.FileDescriptorProto.FromString(cls.DESCRIPTOR.file.serialized_pb)


def headed(id: int, value: bytes, path: bytes = b"\0") -> bytes:
    return b"\0" + id.to_bytes(4, "big") + path + value


def decode(format: Protobuf, values: list[bytes | None]) -> Decoded:
    decoder = pickle.loads(pickle.dumps(format.messages("clicks"))).decoder(None, dictionaries=False)
    return decoder.decode(Values.of(values), first_only=False)


VALUE = Click(user=7, page="p").SerializeToString()
ROW = {"user": 7, "page": "p"}


def test_a_class_and_a_set_of_descriptors_are_the_same(tmp_path: Any) -> None:
    files = descriptor_pb2.FileDescriptorSet(file=[file_of(Click)])
    (tmp_path / "click.desc").write_bytes(files.SerializeToString())
    for format in (
        cw.protobuf(Click),
        cw.protobuf(files.SerializeToString()),
        cw.protobuf(tmp_path / "click.desc", name="M"),
        cw.protobuf(str(tmp_path / "click.desc"), name=Click.DESCRIPTOR.full_name),
    ):
        assert decode(format, [VALUE]).rows.to_pylist() == [ROW]
        assert format == cw.protobuf(Click)


def test_a_schema_is_asked_for_once(registry: SchemaRegistry) -> None:
    id = register(registry, "clicks-value", file_of(Click))
    format = cw.protobuf(registry=registry.address)
    for _ in range(2):  # two decoders, as of two splits
        assert decode(format, [headed(id, VALUE)] * 2).rows.to_pylist() == [ROW, ROW]
    assert registry.asked.count(f"GET /schemas/ids/{id}?format=serialized") == 1


def test_the_type_is_said_by_its_place_in_the_schema(registry: SchemaRegistry) -> None:
    file = file_of(Click)
    outer = file.message_type.add(name="Other")
    outer.field.add(name="n", number=1, type=world.kind_of("int32"), label=1)
    inner = outer.nested_type.add(name="Inner")
    inner.field.add(name="x", number=1, type=world.kind_of("string"), label=1)
    id = register(registry, "clicks-value", file)
    with pytest.raises(BuildError, match=r"which of the message types is meant\? There are .*\.M, .*\.Other"):
        cw.protobuf(registry=registry.address).messages("clicks")
    values = [
        headed(id, VALUE),
        headed(id, VALUE, b"\2\0"),
        headed(id, b"\x08\5", b"\2\2"),
        headed(id, b"\x0a\1y", b"\4\2\0"),
        headed(id, b"", b"\2\6"),
        headed(id, b"", b"\x0a\0\0\0\0\0"),
        headed(id, b"", b"\1"),
        headed(id, b"", b"\4\0"),
    ]
    first = decode(cw.protobuf(registry=registry.address, name="M"), values)
    assert first.rows.to_pylist() == [ROW, ROW]
    reasons = [bad.reason for bad in first.bad]
    assert [reason.partition(" ")[0] for reason in reasons] == ["it", "it", "schema", "the", "the", "the"]
    package = file.package
    assert reasons[:2] == [f"it is of type {package}.{name}, and no {package}.M" for name in ("Other", "Other.Inner")]
    assert decode(cw.protobuf(registry=registry.address, name="Other"), values).rows.to_pylist() == [{"n": 5}]


def test_what_is_no_message_of_the_schema_is_a_bad_row(registry: SchemaRegistry) -> None:
    id = register(registry, "clicks-value", file_of(Click))
    avro = registry.register("x-value", '{"type": "string"}')
    values = [None, b"", b"\1" + headed(id, VALUE)[1:], headed(99, VALUE), headed(avro, VALUE), headed(id, VALUE)]
    found = decode(cw.protobuf(Click, registry=registry.address), values)
    assert found.rows.to_pylist() == [ROW]
    assert [bad.reason for bad in found.bad] == [
        "the value is null",
        "the value has fewer than 6 bytes: no id of a schema is in front",
        "the value does not begin with a zero byte and the id of a schema",
        f"the schema registry at {registry.address} knows no schema 99",
        f"schema {avro} of the registry at {registry.address} is AVRO, no Protobuf",
    ]


def test_fields_that_a_writer_has_in_another_coding_are_no_rows(registry: SchemaRegistry) -> None:
    """``sint32`` and ``int32`` look the same on the wire, and mean other numbers."""
    ids: dict[str, int] = {}
    for kind in ("sint64", "int32", "fixed64", "double"):
        file = file_of(Click)
        file.message_type[0].field[0].type = world.kind_of(kind)
        ids[kind] = register(registry, "clicks-value", file)
    newer = file_of(Click)
    newer.message_type[0].field.add(name="more", number=9, type=world.kind_of("string"), label=1)
    ids["newer"] = register(registry, "clicks-value", newer)
    format = cw.protobuf(Click, registry=registry.address)
    assert decode(format, [headed(ids[kind], VALUE) for kind in ("int32", "newer")]).rows.num_rows == 2
    for kind in ("sint64", "fixed64", "double"):
        (bad,) = decode(format, [headed(ids[kind], VALUE)]).bad
        assert bad.reason == (
            f'field "user": schema {ids[kind]} of the registry at {registry.address} has it as {kind}, '
            "which is not read as int64"
        )


def test_types_of_other_subjects(registry: SchemaRegistry) -> None:
    place = descriptor_pb2.FileDescriptorProto(name="place.proto", package="shop", syntax="proto3")
    place.message_type.add(name="Place").field.add(name="zip", number=1, type=world.kind_of("string"), label=1)
    file = descriptor_pb2.FileDescriptorProto(package="shop", syntax="proto3")
    file.dependency.extend(["place.proto", "google/protobuf/timestamp.proto", "confluent/meta.proto"])
    message = file.message_type.add(name="Click")
    message.field.add(name="at", number=1, type=11, label=1, type_name=".shop.Place")
    message.field.add(name="time", number=2, type=11, label=1, type_name=".google.protobuf.Timestamp")
    place_file = descriptor_pb2.FileDescriptorProto()
    place_file.CopyFrom(place)
    place_file.name = ""  # a registry knows it by the name of the reference
    register(registry, "place", place_file)
    id = register(
        registry,
        "clicks-value",
        file,
        references=[{"name": "place.proto", "subject": "place", "version": 1}],
    )
    found = decode(cw.protobuf(registry=registry.address), [headed(id, b"\x0a\3\x0a\1z")])
    assert found.rows.to_pylist() == [{"at": {"zip": "z"}, "time": None}]


def test_a_registry_that_gives_no_descriptors_is_said_and_no_row_is_bad(registry: SchemaRegistry) -> None:
    id = register(registry, "clicks-value", file_of(Click))
    registry.serializes = False
    with pytest.raises(BuildError, match="comes as no descriptor, although format=serialized was asked for"):
        cw.protobuf(registry=registry.address).messages("clicks")
    with pytest.raises(StorageError, match="comes as no descriptor"):
        decode(cw.protobuf(Click, registry=registry.address), [headed(id, VALUE)])


def test_rows_are_written_with_the_id_of_their_schema(registry: SchemaRegistry) -> None:
    rows = pa.table({"user": [7], "page": ["p"]})
    own = descriptor_pb2.FileDescriptorProto(name="own.proto", package="own", syntax="proto3")
    own.message_type.add().CopyFrom(file_of(Click).message_type[0])
    given = cw.protobuf(descriptor_pb2.FileDescriptorSet(file=[own]).SerializeToString(), registry=registry.address)
    encoder = pickle.loads(pickle.dumps(given.encoder("clicks")))
    assert encoder.encode(rows).value(0) == headed(1, VALUE)
    encoder.encode(rows)
    assert registry.asked == ["POST /subjects/clicks-value/versions"]
    newest = cw.protobuf(registry=registry.address, subject="clicks-value").encoder("other")
    assert newest.encode(rows).value(0) == headed(1, VALUE)
    assert decode(cw.protobuf(registry=registry.address), [headed(1, VALUE)]).rows.to_pylist() == [ROW]
    registry.refuse = True
    with pytest.raises(StorageError, match=r"refuses the schema for .*: Schema being registered is incompatible"):
        cw.protobuf(Click, registry=registry.address).encoder("other").encode(rows)


def test_a_file_that_imports_others_is_not_registered(registry: SchemaRegistry) -> None:
    other = descriptor_pb2.FileDescriptorProto(name="other.proto", package="o", syntax="proto3")
    other.message_type.add(name="O").field.add(name="x", number=1, type=world.kind_of("string"), label=1)
    file = descriptor_pb2.FileDescriptorProto(name="f.proto", package="p", syntax="proto3", dependency=["other.proto"])
    file.message_type.add(name="M").field.add(name="o", number=1, type=11, label=1, type_name=".o.O")
    files = descriptor_pb2.FileDescriptorSet(file=[file, other]).SerializeToString()
    format = cw.protobuf(files, name="M", registry=registry.address)
    with pytest.raises(BuildError, match=r"imports other.proto, which would have to be registered"):
        format.encoder("clicks")
    alone = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    with pytest.raises(BuildError, match=r"f.proto imports other.proto, which is not there"):
        cw.protobuf(alone)


def test_what_is_wrong_is_said_when_the_flow_is_built(registry: SchemaRegistry) -> None:
    address = registry.address
    with pytest.raises(BuildError, match="no schema for subject 'clicks-value'"):
        cw.protobuf(registry=address).messages("clicks")
    with pytest.raises(BuildError, match="which schema of the registry do rows of several topics have"):
        cw.protobuf(registry=address).messages(None)
    registry.register("a-value", '{"type": "string"}')
    with pytest.raises(BuildError, match="is AVRO, no Protobuf"):
        cw.protobuf(registry=address).messages("a")
    with pytest.raises(ConfigError, match="protobuf needs a message type or a registry"):
        cw.protobuf()
    with pytest.raises(ConfigError, match="subject and options are of a registry"):
        cw.protobuf(Click, subject="x")
    with pytest.raises(ConfigError, match="5 is no message type"):
        cw.protobuf(5)
    with pytest.raises(ConfigError, match="enums is 'text' or 'number'"):
        cw.protobuf(Click, enums="code")  # type: ignore[arg-type]
    with pytest.raises(BuildError, match=r"cannot read 'click.desc'"):
        cw.protobuf("click.desc")
    with pytest.raises(BuildError, match="is no FileDescriptorSet"):
        cw.protobuf(b"\xff")
    with pytest.raises(BuildError, match="has no files"):
        cw.protobuf(b"")
    with pytest.raises(BuildError, match="there is no message type 'Clack'"):
        cw.protobuf(descriptor_pb2.FileDescriptorSet(file=[file_of(Click)]).SerializeToString(), name="Clack")
    with pytest.raises(BuildError, match="a class is a message type already"):
        cw.protobuf(Click, name="M")


def group() -> Any:
    message = descriptor_pb2.DescriptorProto(name="M")
    message.nested_type.add(name="G").field.add(name="n", number=1, type=world.kind_of("int32"), label=1)
    message.field.add(name="g", number=1, type=10, label=1)
    file = world.file_of(message, "proto2")
    file.message_type[0].field[0].type_name = f".{file.package}.M.G"
    return world.class_of(file)


def nothing() -> Any:
    return world.class_of(world.file_of(descriptor_pb2.DescriptorProto(name="M")))


REFUSED = {
    "a group": (group, "field 'g' of the Protobuf message is a group"),
    "itself": (
        lambda: struct_pb2.Struct,
        r"field 'fields.value.struct_value' .* makes google.protobuf.Struct hold itself",
    ),
    "no fields": (nothing, "have no fields"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_types_that_no_column_can_hold_are_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(BuildError, match=message):
        cw.protobuf(make())


def test_the_columns() -> None:
    assert cw.protobuf(timestamp_pb2.Timestamp).messages(None).schema == pa.schema(
        [pa.field("seconds", pa.int64(), False), pa.field("nanos", pa.int32(), False)]
    )
    cls = world.simple(a="uint32", b="optional bool", c="repeated float", d="bytes")
    assert cw.protobuf(cls).messages(None).schema == pa.schema(
        [
            pa.field("a", pa.uint32(), False),
            pa.field("b", pa.bool_()),
            pa.field("c", pa.list_(pa.field("element", pa.float32(), False)), False),
            pa.field("d", pa.binary(), False),
        ]
    )
    assert cw.protobuf(world.with_enum()).messages(None).schema.field("e").type == pa.string()
    assert cw.protobuf(world.with_enum(), enums="number").messages(None).schema.field("e").type == pa.int32()
