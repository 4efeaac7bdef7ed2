"""A registry gives each schema once, and what is wrong with it is said; secrets are in no plan and no message."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from servers.schema_registry import SchemaRegistry

import avro_world as world
import cutwater as cw
from cutwater.connectors.avro.formats import Avro
from cutwater.connectors.messages import registry as registry_module
from cutwater.connectors.messages.base import Decoded, Values
from cutwater.connectors.messages.registry import KnownSchemas
from cutwater.errors import BuildError, ConfigError, StorageError

CLICK = world.record(("user", "long"), ("page", "string"), name="Click")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[SchemaRegistry]:
    monkeypatch.setattr(registry_module, "_WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(KnownSchemas, "_known", {})
    monkeypatch.setattr(KnownSchemas, "_refused", {})
    with SchemaRegistry() as started:
        yield started


def headed(id: int, value: bytes) -> bytes:
    return b"\0" + id.to_bytes(4, "big") + value


def decode(format: Avro, values: list[bytes | None]) -> Decoded:
    decoder = pickle.loads(pickle.dumps(format.messages("clicks"))).decoder(None, dictionaries=False)
    return decoder.decode(Values.of(values), first_only=False)


def test_a_schema_is_asked_for_once(registry: SchemaRegistry) -> None:
    id = registry.register("clicks-value", CLICK)
    newer = {**CLICK, "fields": [*CLICK["fields"], {"name": "n", "type": "int", "default": 5}]}
    registry.register("clicks-value", newer)
    value = headed(id, world.encoded(CLICK, {"user": 7, "page": "p"}))
    format = cw.avro(registry=registry.address)
    for _ in range(2):  # two decoders, as of two splits
        assert decode(format, [value, value]).rows.to_pylist() == 2 * [{"user": 7, "page": "p", "n": 5}]
    assert registry.asked.count(f"GET /schemas/ids/{id}") == 1


def test_an_id_that_the_registry_does_not_know_is_a_bad_row(registry: SchemaRegistry) -> None:
    id = registry.register("clicks-value", CLICK)
    other = registry.register("x-value", "syntax = 'proto3';", schemaType="PROTOBUF")
    broken = registry.register("y-value", '{"type": "nothing"}')
    good = headed(id, world.encoded(CLICK, {"user": 7, "page": "p"}))
    values = [headed(99, b"\2"), good, headed(other, b""), headed(broken, b""), headed(2**32 - 1, b"")]
    found = decode(cw.avro(CLICK, registry=registry.address), values)
    assert found.rows.num_rows == 1
    assert registry.asked.count("GET /schemas/ids/99") == 1
    reasons = [bad.reason for bad in found.bad]
    assert reasons[0] == f"the schema registry at {registry.address} knows no schema 99"
    assert reasons[1] == f"schema {other} of the registry at {registry.address} is PROTOBUF, no Avro"
    assert "there is no type 'nothing'" in reasons[2]
    assert reasons[3].endswith("knows no schema 4294967295")


def test_ids_that_are_not_known_are_asked_for_once_each_and_again_after_a_while(registry: SchemaRegistry) -> None:
    """By all splits together; a schema that is registered later is found without a restart."""
    format = cw.avro(CLICK, registry=registry.address)
    decoders = [format.messages("clicks").decoder(None, dictionaries=False) for _ in range(3)]
    value = world.encoded(CLICK, {"user": 7, "page": "p"})

    def rows() -> list[int]:
        batch = Values.of([headed(id, value) for id in (1, 2, 3, 2, 1, 3, 1)])
        return [decoder.decode(batch, first_only=False).rows.num_rows for decoder in (*decoders, *decoders)]

    assert rows() == [0] * 6
    assert sorted(registry.asked) == [f"GET /schemas/ids/{id}" for id in (1, 2, 3)]
    assert registry.register("clicks-value", CLICK) == 1
    assert rows() == [0] * 6
    for place, (_, why) in KnownSchemas._refused.items():
        KnownSchemas._refused[place] = (0.0, why)  # a while later
    assert rows() == [3] * 6
    assert registry.asked.count("GET /schemas/ids/1") == 2


def test_a_registry_that_is_away_for_a_moment_is_asked_again(registry: SchemaRegistry) -> None:
    id = registry.register("clicks-value", CLICK)
    registry.broken = 2
    assert decode(cw.avro(CLICK, registry=registry.address), [headed(id, b"\2\2p")]).bad == []


def test_a_registry_that_stays_away_fails_the_job_and_no_row(registry: SchemaRegistry) -> None:
    registry.broken = 99
    with pytest.raises(
        StorageError, match=rf"registry at {registry.address}: 503 not now.*goes on from its last checkp"
    ):
        decode(cw.avro(CLICK, registry=registry.address), [headed(1, b"")])
    registry.close()
    with pytest.raises(StorageError, match=r"it does not answer: .*refused"):
        decode(cw.avro(CLICK, registry=registry.address), [headed(1, b"")])


def test_what_is_no_registry_is_not_taken_for_one(registry: SchemaRegistry) -> None:
    wrong = f"{registry.address}/elsewhere"  # 404, but not a registry's
    with pytest.raises(StorageError, match=r"404 HTTP 404 Not Found for /schemas/ids/1.*Is the address right"):
        decode(cw.avro(CLICK, registry=wrong), [headed(1, b"")])


def test_the_password_is_looked_up_where_it_is_needed(
    registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    registry.user = "me:open-sesame"
    registry.register("clicks-value", CLICK)
    monkeypatch.setenv("REGISTRY_USER", "me:wrong-one")
    format = cw.avro(registry=registry.address, options={"basic.auth.user.info": "env:REGISTRY_USER"})
    with pytest.raises(StorageError, match="refuses /subjects/clicks-value/versions/latest: 401") as raised:
        format.messages("clicks")
    assert "wrong-one" not in str(raised.value)
    monkeypatch.setenv("REGISTRY_USER", registry.user)
    assert format.messages("clicks").schema.names == ["user", "page"]
    assert b"open-sesame" not in pickle.dumps(format)
    (tmp_path / "user").write_text(registry.user + "\n")
    by_file = cw.avro(registry=registry.address, options={"basic.auth.user.info": f"file:{tmp_path}/user"})
    assert by_file.messages("clicks").schema.names == ["user", "page"]
    monkeypatch.delenv("REGISTRY_USER")
    with pytest.raises(ConfigError, match="there is no variable 'REGISTRY_USER' here"):
        format.messages("clicks")


def test_tls_and_a_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(registry_module, "_WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setenv("REGISTRY_USER", "me:open-sesame")
    authority = str(tmp_path / "authority.pem")
    with SchemaRegistry("me:open-sesame", tls=authority) as registry:
        id = registry.register("clicks-value", CLICK)
        options = {"basic.auth.user.info": "env:REGISTRY_USER", "ssl.ca.location": authority}
        format = cw.avro(registry=registry.address, options=options)
        value = headed(id, world.encoded(CLICK, {"user": 7, "page": "p"}))
        assert decode(format, [value]).rows.to_pylist() == [{"user": 7, "page": "p"}]
        encoder = cw.avro(CLICK, registry=registry.address, options=options).encoder("clicks")
        encoder.encode(pa.table({"user": [7], "page": ["p"]}))
        assert registry.asked[-1] == "POST /subjects/clicks-value/versions"
        unknown = cw.avro(registry=registry.address, options={**options, "ssl.ca.location": __file__})
        with pytest.raises(ConfigError, match=r"ssl\.ca\.location"):
            unknown.messages("clicks")
        other = cw.avro(registry=registry.address, options={"basic.auth.user.info": "env:REGISTRY_USER"})
        with pytest.raises(StorageError, match="certificate verify failed") as raised:
            other.messages("clicks")
        assert "open-sesame" not in str(raised.value)


def test_types_of_other_subjects(registry: SchemaRegistry) -> None:
    place = world.record(("zip", "string"), name="Place")
    user = world.record(("name", "string"), ("at", "Place"), name="User")
    registry.register("place", place)
    of_place = {"name": "Place", "subject": "place", "version": 1}
    registry.register("user", user, references=[of_place])
    of_user = {"name": "User", "subject": "user", "version": 1}
    id = registry.register(
        "clicks-value", world.record(("by", "User"), ("at", "Place")), references=[of_user, of_place]
    )
    (row,) = decode(cw.avro(registry=registry.address), [headed(id, b"\4me\2a\2b")]).rows.to_pylist()
    assert row == {"by": {"name": "me", "at": {"zip": "a"}}, "at": {"zip": "b"}}


def test_rows_are_written_with_the_id_of_their_schema(registry: SchemaRegistry) -> None:
    rows = pa.table({"user": [7], "page": ["p"]})
    encoder = pickle.loads(pickle.dumps(cw.avro(CLICK, registry=registry.address).encoder("clicks")))
    assert encoder.encode(rows).value(0) == headed(1, world.encoded(CLICK, {"user": 7, "page": "p"}))
    encoder.encode(rows)
    assert registry.asked == ["POST /subjects/clicks-value/versions"]
    newest = cw.avro(registry=registry.address, subject="clicks-value").encoder("other")
    assert newest.encode(rows).value(0) == encoder.encode(rows).value(0)
    registry.refuse = True
    with pytest.raises(StorageError, match=r"refuses the schema for .*: Schema being registered is incompatible"):
        cw.avro(world.record(("user", "long")), registry=registry.address).encoder("clicks").encode(
            rows.select(["user"])
        )


def test_what_is_wrong_is_said_when_the_flow_is_built(registry: SchemaRegistry, tmp_path: Any) -> None:
    address = registry.address
    with pytest.raises(BuildError, match="no schema for subject 'clicks-value'"):
        cw.avro(registry=address).messages("clicks")
    with pytest.raises(BuildError, match="no schema for subject 'clicks-value'"):
        cw.avro(registry=address).encoder("clicks")
    with pytest.raises(BuildError, match="which schema of the registry do rows of several topics have"):
        cw.avro(registry=address).messages(None)
    registry.register("p-value", "syntax", schemaType="PROTOBUF")
    with pytest.raises(BuildError, match="is PROTOBUF, no Avro"):
        cw.avro(registry=address).messages("p")
    with pytest.raises(ConfigError, match="avro needs a schema or a registry"):
        cw.avro()
    with pytest.raises(ConfigError, match="subject and options are of a registry"):
        cw.avro(CLICK, subject="x")
    with pytest.raises(ConfigError, match="must not hold a password"):
        cw.avro(registry="http://me:secret@localhost")
    with pytest.raises(ConfigError, match="begins with http"):
        cw.avro(registry="file:///etc/passwd")
    with pytest.raises(ConfigError, match="holds a secret") as raised:
        cw.avro(registry=address, options={"basic.auth.user.info": "me:hunter2"})
    assert "hunter2" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"has no option 'basic.auth'"):
        cw.avro(registry=address, options={"basic.auth": "env:X"})
    with pytest.raises(BuildError, match=r"cannot read the Avro schema 'click.avsc'"):
        cw.avro("click.avsc")
    (tmp_path / "click.avsc").write_text(json.dumps(CLICK))
    assert cw.avro(tmp_path / "click.avsc") == cw.avro(str(tmp_path / "click.avsc")) == cw.avro(CLICK)


def nested(name: str, type: Any) -> dict[str, Any]:
    return world.record(("a", "int"), ("b", {"type": "array", "items": world.record((name, type), name="I")}))


def doubled(times: int) -> list[tuple[str, Any]]:
    """Fields of which each holds the one before twice."""
    fields: list[tuple[str, Any]] = [("f0", world.record(("x", "int"), name="Twice0"))]
    for n in range(1, times):
        fields.append((f"f{n}", world.record(("a", f"Twice{n - 1}"), ("b", f"Twice{n - 1}"), name=f"Twice{n}")))
    return fields


WRONG = {
    "two types": (nested("u", ["null", "int", "string"]), "field 'b.u' of the Avro schema is a union of several types"),
    "itself": (nested("r", ["null", "R"]), "field 'b.r' of the Avro schema makes 'R' hold itself"),
    "no type": (nested("x", "thing"), "field 'b.x' of the Avro schema is wrong: there is no type 'thing'"),
    "no record": ({"type": "array", "items": "int"}, "the Avro schema is of type array"),
    "no fields": (world.record(), "a record without fields"),
    "no json": ("{", "an Avro schema is no JSON"),
    "many digits": (
        nested("d", {"type": "bytes", "logicalType": "decimal", "precision": 39}),
        "field 'b.d' of the Avro schema is a decimal of 39 digits",
    ),
    "a name twice": (world.record(("a", "int"), ("a", "int")), "two fields of 'R' have the same name"),
    "a type twice": (nested("e", {"type": "fixed", "name": "R", "size": 1}), "field 'b.e' .* 'R' is defined twice"),
    "no size": (nested("f", {"type": "fixed", "name": "F"}), "'F' has no size"),
    "no symbols": (nested("e", {"type": "enum", "name": "E", "symbols": []}), "'E' has no symbols"),
    "no name": (nested("e", {"type": "enum", "symbols": ["a"]}), "the enum has no name"),
    "no items": (nested("e", {"type": "array"}), "the array does not say what its items are"),
    "a union in a union": (nested("e", ["null", ["int"]]), "is no union"),
    "no field": ({"type": "record", "name": "R", "fields": [{"name": "a"}]}, "is no field: it has a name and a type"),
    "too deep": (json.loads('{"type": "array", "items": ' * 120 + '"int"' + "}" * 120), "nested more than 100 deep"),
    "too large": (world.record(*doubled(20)), "holds more than 100000 types"),
    "a number": (nested("e", 5), "field 'b.e' .* 5 is no type"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_schema_that_is_wrong_names_the_field(name: str) -> None:
    schema, message = WRONG[name]
    with pytest.raises(BuildError, match=message):
        cw.avro(schema)


def test_names_in_namespaces() -> None:
    inner = {"type": "record", "name": "I", "namespace": "b", "fields": [{"name": "n", "type": "int"}]}
    fields = [{"name": "x", "type": inner}, {"name": "y", "type": "b.I"}, {"name": "z", "type": ["null", "b.I"]}]
    schema = cw.avro({"type": "record", "name": "a.R", "fields": fields}).messages(None).schema
    of_inner = pa.struct([pa.field("n", pa.int32(), nullable=False)])
    assert schema == pa.schema([pa.field(name, of_inner, name == "z") for name in "xyz"])
