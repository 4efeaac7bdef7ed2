"""Schemas as text: every type, and errors that say where."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cutwater.data.schema_text import as_schema, parse_schema
from cutwater.errors import BuildError

TYPES = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "BYTE": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "Integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "varchar(20)": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "decimal": pa.decimal128(10, 0),
    "decimal(12)": pa.decimal128(12, 0),
    "decimal( 38 , 18 )": pa.decimal128(38, 18),
    "array<int>": pa.list_(pa.int32()),
    "array<array<string>>": pa.list_(pa.list_(pa.string())),
    "map<string, array<long>>": pa.map_(pa.string(), pa.list_(pa.int64())),
    "struct<>": pa.struct([]),
    "struct<x: int, y: struct<`a b` : decimal(5,2)>>": pa.struct(
        [("x", pa.int32()), ("y", pa.struct([("a b", pa.decimal128(5, 2))]))]
    ),
    "struct<x int, y string comment 'spoken'>": pa.struct([("x", pa.int32()), ("y", pa.string())]),
}


@pytest.mark.parametrize("text", TYPES)
def test_type(text: str) -> None:
    assert parse_schema(f"before int, it {text}, after int").field("it").type == TYPES[text]


def test_names_nullability_and_comments() -> None:
    schema = parse_schema(
        "a int NOT NULL, `b``c d` string comment 'it, is', größe: double\n\t, array array<int not null> not null "
    )
    assert schema.names == ["a", "b`c d", "größe", "array"]
    assert [field.nullable for field in schema] == [False, True, True, False]
    assert not schema.field("array").type.value_field.nullable


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a column name at character 1"),
        ("a", "expected a type at character 2"),
        ("a int,", "expected a column name"),
        ("a int b int", "expected ',' after column 'a' at character 7"),
        ("a int; b int", "unexpected ';' at character 6"),
        ("a itn", "unknown type 'itn'"),
        ("a int, a long", "column 'a' appears twice"),
        ("a array<int", "expected '>' at character 12"),
        ("a array", "expected '<'"),
        ("a map<int>", "expected ','"),
        ("a decimal(39,2)", "whole number from 1 to 38"),
        ("a decimal(5,6)", "whole number from 0 to 5"),
        ("a decimal(x)", "whole number"),
        ("a int not", "expected 'null' after 'not'"),
        ("a int comment b", "quoted comment"),
        ("`a int", "unexpected '`'"),
        ("a struct<x: int", "expected ',' after column 'x'"),
        ("a int)", r"expected ',' after column 'a'"),
    ],
)
def test_wrong_text_says_where(text: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        parse_schema(text)


def test_as_schema_takes_both() -> None:
    schema = pa.schema({"a": pa.int32()})
    assert as_schema(schema) is schema
    assert as_schema("a int") == schema
