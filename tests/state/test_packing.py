"""Values and keys of every type come back from bytes as Arrow gives them."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.state.keys import is_key_type
from cutwater.state.packing import KeyPacker, Packer
from keyed_world import VALUES

KINDS = {
    **{name: (kind, values) for name, (kind, values) in VALUES.items()},
    "map": (pa.map_(pa.string(), pa.timestamp("us")), st.lists(st.tuples(st.text(max_size=3), st.none()), max_size=3)),
    "nested": (
        pa.list_(pa.struct([("at", pa.timestamp("us")), ("d", pa.decimal128(9, 2)), ("s", pa.string())])),
        st.lists(
            st.fixed_dictionaries({"at": st.none() | st.datetimes(), "s": st.text(max_size=3)}) | st.none(), max_size=3
        ),
    ),
    "interval": (pa.month_day_nano_interval(), st.tuples(*[st.integers(0, 9)] * 3).map(pa.MonthDayNano)),
    "time": (pa.time64("us"), st.times()),
}


def _same(a: Any, b: Any) -> bool:
    return (isinstance(a, float) and math.isnan(a) and math.isnan(b)) or (type(a) is type(b) and a == b)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_value_comes_back_as_arrow_gives_it(name: str, data: st.DataObject) -> None:
    kind, values = KINDS[name]
    given_value = data.draw(st.none() | values)
    expected = pa.array([given_value], kind)[0].as_py()
    packer = Packer(kind)
    assert _same(packer.unpack(packer.pack(expected)), expected)


@pytest.mark.parametrize("name", [name for name, (kind, _) in VALUES.items() if is_key_type(kind)])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_key_comes_back_and_equal_keys_are_equal_bytes(name: str, data: st.DataObject) -> None:
    kind, values = VALUES[name]
    key = data.draw(values.filter(lambda value: value == value))
    expected = pa.array([key, key], kind).to_pylist()
    packer = KeyPacker([kind, kind])
    packed = packer.pack(expected)
    assert packer.unpack(packed) == tuple(expected)
    assert packer.pack(packer.unpack(packed)) == packed
