"""The key hash is a frozen format: golden values, and the documented text worked out in plain Python."""

import datetime
import decimal
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.errors import BuildError, DataError
from cutwater.state.keys import (
    check_key_types,
    hash_keys,
    key_group_owner,
    key_group_range,
    key_groups,
    require_valid_keys,
    valid_key_mask,
)

M64 = 2**64 - 1


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
    return x ^ x >> 31


def reference(value: object) -> int:
    if isinstance(value, bool | int):
        return mix((int(value) + 0x9E3779B97F4A7C15) & M64)
    if isinstance(value, float):
        return reference(struct.unpack("<q", struct.pack("<d", value + 0.0))[0])
    data = value.encode() if isinstance(value, str) else value
    assert isinstance(data, bytes)
    h = len(data) * 0x9E3779B97F4A7C15 & M64
    for at in range(0, len(data), 8):
        word = int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little")
        h = (h ^ word) * 0xBF58476D1CE4E5B9 & M64
        h ^= h >> 32
    return mix(h)


def test_golden_values_never_change() -> None:
    golden = [
        (pa.array([0]), 0xE220A8397B1DCDAF),
        (pa.array([True]), 0x910A2DEC89025CC1),
        (pa.array([-1], pa.int8()), 0xE4D971771B652C20),
        (pa.array([1.5]), 0xD6DAB18E1392608A),
        (pa.array([""]), 0x0),
        (pa.array(["cutwater"]), 0x7728702BA19EF436),
        (pa.array(["über 9 bytes"]), 0xF03685C96A39B9BB),
    ]
    assert [int(hash_keys([column])[0]) for column, _ in golden] == [value for _, value in golden]
    both = hash_keys([pa.array([7]), pa.array(["JFK"])])
    assert both.tolist() == [0xB63865BD37C3E3A0]
    assert key_groups(hash_keys([pa.array(["JFK", "EWR", "LGA"])]), 128).tolist() == [95, 39, 15]


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_integers_follow_the_documented_hash(values: list[int]) -> None:
    assert hash_keys([pa.array(values, pa.int64())]).tolist() == [reference(v) for v in values]


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1))
def test_floats_follow_the_documented_hash_at_both_widths(values: list[float]) -> None:
    expected = [reference(v) for v in values]
    assert hash_keys([pa.array(values, pa.float32())]).tolist() == expected
    assert hash_keys([pa.array(values, pa.float64())]).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), min_size=1), st.integers(0, 3))
def test_bytes_follow_the_documented_hash_also_in_a_slice(values: list[bytes], skipped: int) -> None:
    expected = [reference(v) for v in values]
    for kind in (pa.binary(), pa.large_binary()):
        whole = pa.array([b"skipped"] * skipped + values, kind)
        assert hash_keys([whole.slice(skipped)]).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-100, 100), st.text(max_size=20)), min_size=1))
def test_several_columns_are_combined_from_left_to_right(rows: list[tuple[int, str]]) -> None:
    numbers, texts = pa.array([r[0] for r in rows], pa.int16()), pa.array([r[1] for r in rows], pa.string())
    expected = [mix((reference(n) * 0x9E3779B97F4A7C15 + reference(t)) & M64) for n, t in rows]
    assert hash_keys([numbers, texts]).tolist() == expected


def test_a_wider_type_keeps_every_row_in_its_group() -> None:
    values = [-128, -1, 0, 1, 127]
    hashes = {tuple(hash_keys([pa.array(values, t)])) for t in (pa.int8(), pa.int16(), pa.int32(), pa.int64())}
    assert len(hashes) == 1
    assert (
        hash_keys([pa.array(["a", "xyz"])]).tolist() == hash_keys([pa.array(["a", "xyz"], pa.large_string())]).tolist()
    )


def test_both_zeros_are_one_key() -> None:
    assert len(set(hash_keys([pa.array([0.0, -0.0])]))) == 1


def test_times_and_decimals_hash_by_their_raw_number() -> None:
    day = datetime.date(1969, 12, 31)
    assert hash_keys([pa.array([day])]).tolist() == [reference(-1)]
    assert hash_keys([pa.array([5], pa.timestamp("ns", "UTC"))]).tolist() == [reference(5)]
    price = pa.array([None, decimal.Decimal("1.25")], pa.decimal128(10, 2)).slice(1)
    assert hash_keys([price]).tolist() == [reference((125).to_bytes(16, "little"))]


def test_bools_hash_as_zero_and_one_at_any_offset() -> None:
    values = [True, False, True, True, False, False, True, False, True, True]
    for offset in range(10):
        got = hash_keys([pa.array(values).slice(offset)]).tolist()
        assert got == [reference(v) for v in values[offset:]]


@given(st.integers(1, 300), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_every_key_group_has_exactly_one_owner(parallelism: int, groups: int) -> None:
    parallelism = min(parallelism, groups)
    ranges = [key_group_range(s, parallelism, groups) for s in range(parallelism)]
    assert [g for r in ranges for g in r] == list(range(groups))
    assert all(g in ranges[key_group_owner(g, parallelism, groups)] for g in range(groups))


def test_key_groups_are_the_high_half_of_a_product_and_cover_all() -> None:
    hashes = np.array([0, 2**63, 2**64 - 1, 2**57], np.uint64)
    assert key_groups(hashes, 128).tolist() == [(int(h) >> 32) * 128 >> 32 for h in hashes]
    spread = np.bincount(key_groups(hash_keys([pa.array(np.arange(128_000))]), 128), minlength=128)
    assert spread.min() > 800
    assert spread.max() < 1200


def test_keys_are_checked_when_the_dataflow_is_built() -> None:
    schema = pa.schema([("a", pa.int8()), ("l", pa.list_(pa.int8())), ("h", pa.float16())])
    check_key_types(schema, ["a"])
    with pytest.raises(BuildError, match="'l' of type list"):
        check_key_types(schema, ["a", "l"])
    with pytest.raises(BuildError, match="'h'"):
        check_key_types(schema, ["h"])
    with pytest.raises(BuildError, match=r"no such key column 'b'.*a, l, h"):
        check_key_types(schema, ["b"])
    with pytest.raises(BuildError, match="twice"):
        check_key_types(schema, ["a", "a"])
    with pytest.raises(BuildError, match="no key"):
        check_key_types(schema, [])


def test_a_null_or_nan_key_names_column_row_and_content() -> None:
    rows = pa.record_batch({"k": [1.0, float("nan"), None], "s": ["a", "b", None]})
    with pytest.raises(DataError, match=r"'k' is NaN in row 1 of the batch: \{.*\"s\": \"b\"\}"):
        require_valid_keys(rows, ["s", "k"])
    with pytest.raises(DataError, match="'s' is null in row 2"):
        require_valid_keys(rows, ["s"])
    mask = valid_key_mask(rows, ["s", "k"])
    assert mask is not None
    assert mask.tolist() == [True, False, False]
    assert valid_key_mask(rows.slice(0, 1), ["s", "k"]) is None


def test_a_message_does_not_carry_a_huge_row() -> None:
    rows = pa.record_batch({"k": pa.array([None], pa.int64()), "s": ["x" * 10_000_000]})
    with pytest.raises(DataError) as caught:
        require_valid_keys(rows, ["k"])
    assert len(str(caught.value)) < 1000
