"""Kernels that parse plain lines: what they accept they read as Arrow's readers do, and the rest is left to those."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from cutwater.connectors.files.text_formats import CsvFormat, JsonFormat
from cutwater.connectors.files.text_reader import block_bytes_of
from cutwater.connectors.text import text_columns

SCHEMA = pa.schema(
    [
        ("i", pa.int64()),
        ("small", pa.int16()),
        ("u", pa.uint32()),
        ("x", pa.float64()),
        ("flag", pa.bool_()),
        ("text", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
        ("wall", pa.timestamp("us")),
        ("day", pa.date32()),
        ("another text", pa.string()),
    ]
)
JSON, CSV = JsonFormat(ignore_unknown=True), CsvFormat()
UNQUOTED, SEMICOLONS = CsvFormat(quote=None), CsvFormat(delimiter=";", quote="'")

_NUMBERS = """0 -0 7 -1 32767 32768 -32768 4294967295 123456789012345678 9223372036854775807 9223372036854775808 1.0 1e3
1E+2 0.1 -0.5 123456.789 1e22 1e23 1e-22 1e-30 2.2250738585072014e-308 9007199254740993 0.30000000000000004 01 -01 +1 1.
.5 1e - 0x10 1_000 nan inf 1e400 0.1000000000000000055511151231257827 -9223372036854775808 1.7976931348623157e308"""
NUMBERS = _NUMBERS.split()
_TIMES = """2026-01-31T12:00:00Z
2026-01-31 12:00:00|2026-01-31T12:00|2026-01-31T12:00Z|2026-01-31T12:00:00.5Z|1970-01-01
2026-01-31T12:00:00.123456+01:00|1969-12-31T23:59:59.999999-05:30|2026-01-31T12:00:00.1234567Z|2026-02-29T00:00:00Z
2024-02-29T00:00:00Z|1900-02-29T00:00:00Z|2000-02-29T00:00:00Z|0001-01-01T00:00:00Z|9999-12-31T23:59:59Z|1969-12-31
2026-13-01T00:00:00Z|2026-01-32T00:00:00Z|2026-04-31T00:00:00|2026-01-31T24:00:00Z|2026-01-31T23:60:00Z|2026-01-31
2026-1-31|2026-01-31T12:00:00+0100|2026-01-31T12:00:00+01|2026-01-31t12:00:00z|2026-01-31T23:59:60Z|2026-01-31T12
2026-01-31T12:00:00Zx| 2026-01-31T12:00:00|2026-01-31T12:00:00.5|2026-01-31T12:00:00."""
TIMES = _TIMES.replace("\n", "|").split("|")
TEXTS = ["", "a", "abc", "12345678", "123456789", "ä", "日本語", "\U0001f600", 'a "quote"', "back\\slash", "tab\there"]
TEXTS += ["new\nline", "null", "a,b", "x" * 300, " padded ", "\x7f", "é" * 9, "a;b", "'"]
UNKNOWN = ['{"a":tru}', "[1,]", '{"a" 1}', '{"a":[}]', '"\\x"', "01", "1e400", "-", "[1 2]", '[[],{},[{"c":null}]]']
UNKNOWN += [
    "0.12345678901234567",
    "-0.0",
    "1E+05",
    "1e300",
    "9" * 400,
    "1.e5",
    "1e",
    "00",
    '"\\ud83d\\ude00"',
    '"\\ud83d"',
]
UNKNOWN += [
    '"\\ude00"',
    '"\\ud83d\\u0041"',
    '"ten bytes and \\n more"',
    '"ten bytes \t and more"',
    '"ten bytes and no end',
]
UNKNOWN += ["1", '"a\\"b"', '{"a":[1,{"b":"}"}]}', "[]", "null", "false", "-1.5e3", '"\\u00e9"']


def by_arrow(text: JsonFormat | CsvFormat, data: bytes, rows: int, newlines: bool = False) -> pa.RecordBatch | None:
    """What the slow means make of the lines; ``None``: they refuse them."""
    try:
        return text.parse(data, rows, SCHEMA, SCHEMA.names, newlines=newlines)
    except (pa.ArrowInvalid, ValueError):
        return None


def plain(text: JsonFormat | CsvFormat, schema: pa.Schema = SCHEMA) -> Callable[[bytes, int], pa.RecordBatch | None]:
    parser = text.plain(schema, schema.names, False)
    assert parser is not None
    return parser


def number(rng: random.Random, kind: pa.DataType) -> str:
    if rng.random() < 0.04:
        return rng.choice(NUMBERS)
    if pa.types.is_integer(kind):
        return str(rng.randint(0, 10 ** rng.randint(1, 4)) * rng.choice([1, 1 if kind == pa.uint32() else -1]))
    real = rng.choice(
        [rng.random(), rng.gauss(0, 1e6), rng.random() * 10 ** rng.randint(-300, 300), rng.randint(-99, 99)]
    )
    return rng.choice([repr(real), f"{real:.3f}", f"{real:.17g}", f"{real:.2e}"])


def json_value(rng: random.Random, kind: pa.DataType) -> str:
    if rng.random() < 0.02:
        return rng.choice(["null", "true", '""', "{}", "[]", "nul", "tru", '"x"', "1"])
    if rng.random() < 0.05:
        return "null"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return number(rng, kind)
    if pa.types.is_boolean(kind):
        return rng.choice(["true", "false"])
    if pa.types.is_string(kind):
        return json.dumps(rng.choice(TEXTS), ensure_ascii=rng.random() < 0.5)
    return json.dumps(time_text(rng, kind))


def time_text(rng: random.Random, kind: pa.DataType) -> str:
    if rng.random() < 0.1:
        return rng.choice(TIMES)
    day = f"{rng.randint(1, 9999):04}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    if pa.types.is_date(kind):
        return day
    time = f"{day}{rng.choice('T ')}{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    if rng.random() < 0.9:
        time += f":{rng.randint(0, 59):02}" + rng.choice(
            ["", f".{rng.randint(0, 999):03}", f".{rng.randint(0, 999999):06}"]
        )
    return time + (rng.choice(["Z", "", "+05:30", "-11:00"]) if kind.tz else "")


def json_line(rng: random.Random) -> str:
    space = rng.choice(["", "", "", " ", "\t"])
    names = [n for n in SCHEMA.names if rng.random() < 0.9]
    if rng.random() < 0.2:
        rng.shuffle(names)
    if rng.random() < 0.02:
        names.append(rng.choice(SCHEMA.names))
    fields = [f"{space}{json.dumps(n)}{space}:{space}{json_value(rng, SCHEMA.field(n).type)}" for n in names]
    if rng.random() < 0.2:
        unknown = rng.choice(UNKNOWN)
        name = rng.choice(["more", "k", "smalL", "another texT"])
        fields.insert(rng.randint(0, len(fields)), f'"{name}":{unknown}')
    line = "{" + f"{space},".join(fields) + space + "}"
    if rng.random() < 0.02:
        line = rng.choice([line[:-1], line + "}", line + " x", line + line, "{" + line, line.replace(":", "", 1), ""])
    return line + rng.choice(["\n", "\n", "\n", "\r\n", " \n"])


def csv_value(rng: random.Random, kind: pa.DataType) -> str:
    if rng.random() < 0.07:
        return rng.choice(["", "", "", "", '""', "true", "x", " 1", "1 "])
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return number(rng, kind)
    if pa.types.is_boolean(kind):
        return rng.choice([*["true", "false"] * 9, "1", "0", "True"])
    text = rng.choice(TEXTS) if pa.types.is_string(kind) else time_text(rng, kind)
    quoted = rng.random() < 0.3 or any(c in text for c in ',"\n')
    return '"' + text.replace('"', '""') + '"' if quoted else text


def csv_line(rng: random.Random) -> str:
    fields = [csv_value(rng, field.type) for field in SCHEMA]
    if rng.random() < 0.02:
        fields = rng.choice(
            [fields[:-1], [*fields, "1"], ['a"b', *fields[1:]], ['"a"b', *fields[1:]], ['"open', *fields[1:]]]
        )
    return ",".join(fields) + rng.choice(["\n", "\n", "\n", "\r\n"])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("text", "line"), [(JSON, json_line), (CSV, csv_line)])
def test_what_is_accepted_is_read_as_arrow_reads_it(text: Any, line: Any, seed: int):
    rng, parse = random.Random(seed), plain(text)
    accepted = refused = 0
    for _ in range(1500):
        data = line(rng).encode("utf-8", "surrogatepass")
        found, expected = parse(data, 1), by_arrow(text, data, 1, newlines=True)
        if found is None:
            refused += 1
            continue
        accepted += 1
        found.validate(full=True)
        assert expected is not None, data
        assert found.equals(expected), (data, found.to_pylist(), expected.to_pylist())
    assert min(accepted, refused) > 200


@pytest.mark.parametrize(("text", "line"), [(JSON, json_line), (CSV, csv_line)])
def test_a_block_of_plain_rows_is_read_as_arrow_reads_it(text: Any, line: Any):
    rng, parse = random.Random(1), plain(text)
    for rows in (1, 2, 7, 64, 500):
        found: list[bytes] = []
        while len(found) < rows:
            data = line(rng).encode("utf-8", "surrogatepass")
            if parse(data, 1) is not None and (data.endswith(b"\r\n") or b"\r" not in data):
                found.append(data)
        batch = parse(b"".join(found), rows)
        assert batch is not None
        assert batch.equals(by_arrow(text, b"".join(found), rows, newlines=True))


@pytest.mark.parametrize("seed", range(4))
def test_fields_that_nobody_reads_are_passed_over(seed: int):
    """Any of the columns may be read: the others are skipped, several at once."""
    rng, accepted = random.Random(seed), 0
    for _ in range(30):
        read = pa.schema([field for field in SCHEMA if rng.random() < 0.3] or [SCHEMA.field(0)])
        parse = CSV.plain(read, SCHEMA.names, False)
        assert parse is not None
        for _ in range(50):
            data = csv_line(rng).encode("utf-8", "surrogatepass")
            found = parse(data, 1)
            if found is not None:
                accepted += 1
                assert found.equals(CSV.parse(data, 1, read, SCHEMA.names, newlines=True)), data
    assert accepted > 500


@pytest.mark.parametrize("before", range(20))
def test_a_quote_within_a_field_that_nobody_reads_opens_nothing(before: int):
    """Wherever words of eight bytes end: as Arrow has it, a quote opens only where a field begins."""
    parse = CSV.plain(pa.schema([("n", pa.int64())]), ["a", "b", "c", "d", "n"], False)
    assert parse is not None
    assert parse(f'{"x" * before},"u,v",w,,1\n'.encode(), 1).to_pylist() == [{"n": 1}]  # type: ignore[union-attr]
    assert parse(f'{"x" * before},{"y" * before}z"u,v",w,1\n'.encode(), 1) is None
    assert parse(f'{"x" * before},{"y" * before}z"u,v",w,{"q" * before},1\n'.encode(), 1) is None


@pytest.mark.parametrize(
    "value", ["0.12345678901234567", "-1.7976931348623157e+30", '"\\ud83d\\ude00"', '"\\"' + "x" * 9 + '"']
)
def test_a_value_that_nobody_reads_need_only_be_json(value: str):
    parse = plain(JSON, pa.schema([("n", pa.int64())]))
    assert parse(f'{{"x":{value},"n":1}}\n'.encode(), 1).to_pylist() == [{"n": 1}]  # type: ignore[union-attr]


@pytest.mark.parametrize("text", [UNQUOTED, SEMICOLONS, CSV], ids=["no quotes", "semicolons", "quotes"])
def test_fields_of_any_bytes_are_read_as_arrow_reads_them(text: CsvFormat):
    """Whatever quotes and delimits: a zero byte is a character as any other; so is a quote where nothing quotes."""
    rng, schema = random.Random(3), pa.schema([("a", pa.string()), ("n", pa.int64()), ("b", pa.string())])
    parse, accepted = text.plain(schema, schema.names, False), 0
    assert parse is not None
    for _ in range(3000):
        fields = ["".join(rng.choices("\0\x01\t ab'\"\x7fäß;,", k=rng.randint(0, 12))) for _ in range(2)]
        data = f"{fields[0]}{text.delimiter}{rng.randint(0, 99)}{text.delimiter}{fields[1]}\n".encode()
        found = parse(data, 1)
        if found is not None:
            accepted += 1
            assert found.equals(text.parse(data, 1, schema, schema.names, newlines=True)), data
    assert accepted > 300


def test_a_block_that_would_need_much_memory_is_left_to_others(monkeypatch: pytest.MonkeyPatch):
    parse = plain(JSON, pa.schema([("t", pa.string())]))
    assert parse(b'{"t":"x"}\n', 1) is not None
    monkeypatch.setattr(text_columns, "_MOST_BYTES", 30)
    assert parse(b'{"t":"x"}\n', 1) is None


def test_another_number_of_rows_is_left_to_others():
    parse = plain(JSON, pa.schema([("n", pa.int64())]))
    assert parse(b'{"n":1}\n\n{"n":2}\n', 2).to_pydict() == {"n": [1, 2]}  # type: ignore[union-attr]
    assert parse(b'{"n":1}\n{"n":2}\n', 1) is None
    assert parse(b'{"n":1}\n', 2) is None


def test_a_field_that_comes_twice_is_left_to_others():
    parse = plain(JSON, pa.schema([("n", pa.int64())]))
    assert parse(b'{"n":1,"n":2}\n', 1) is None


def test_bytes_that_are_no_utf8_are_left_to_others():
    parse = plain(JSON, pa.schema([("t", pa.string())]))
    assert parse(b'{"t":"\xc3\xa4"}\n', 1) is not None
    assert parse(b'{"t":"\xc3"}\n', 1) is None


def test_a_null_where_none_may_be_is_left_to_others():
    parse = plain(JSON, pa.schema([pa.field("n", pa.int64(), nullable=False)]))
    assert parse(b'{"n":null}\n', 1) is None
    assert parse(b"{}\n", 1) is None


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        (JSON, pa.schema([("n", pa.list_(pa.int64()))])),
        (JSON, pa.schema([('a"b', pa.int64())])),
        (JSON, pa.schema([("t", pa.timestamp("us", "Europe/Berlin"))])),
        (JsonFormat(timestamp_formats=("%d.%m.%Y",)), SCHEMA),
        (CsvFormat(null_values=("", "NA")), SCHEMA),
    ],
)
def test_what_kernels_do_not_know_has_no_fast_parser(text: Any, schema: pa.Schema):
    assert text.plain(schema, schema.names, False) is None


@pytest.mark.parametrize("columns", [1, 32, 64, 100, 200])
def test_a_block_of_many_columns_of_texts_has_room(columns: int) -> None:
    """Else all such blocks would be parsed the slow way."""
    schema = pa.schema({f"t{n}": pa.string() for n in range(columns)})
    assert columns * (block_bytes_of(schema) + 16) <= text_columns._MOST_BYTES
