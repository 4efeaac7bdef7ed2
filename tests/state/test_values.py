"""Words, value store, and where kernels are cached."""

import datetime
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.data.words import from_words, to_words, valid_rows
from cutwater.state.table.row_store import ValueStore

WORD_VALUES: dict[pa.DataType, st.SearchStrategy[object]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.uint16(): st.integers(0, 2**16 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float32(): st.floats(allow_nan=False, width=32).map(lambda x: x + 0.0),
    pa.float64(): st.floats(allow_nan=False).map(lambda x: x + 0.0),
    pa.date32(): st.dates(),
    pa.time64("us"): st.times(),
    pa.timestamp("us"): st.datetimes(datetime.datetime(1900, 1, 1)),
}


@pytest.mark.parametrize("kind", WORD_VALUES, ids=str)
@pytest.mark.parametrize("ordered", [False, True])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_words_come_back_as_values_and_keep_their_order(kind: pa.DataType, ordered: bool, data: st.DataObject) -> None:
    values = data.draw(st.lists(WORD_VALUES[kind], min_size=1, max_size=30))
    skipped = data.draw(st.integers(0, 9))
    array = pa.array(values[:1] * skipped + values, kind).slice(skipped)
    words = to_words(array, ordered=ordered)
    assert words.dtype == np.int64
    assert not words.flags.writeable
    assert from_words(words, kind, ordered=ordered).to_pylist() == values
    if ordered:
        assert [values[i] for i in np.argsort(words, kind="stable")] == sorted(values)  # type: ignore[type-var]


def test_every_nan_is_one_word_above_infinity() -> None:
    negative_nan = np.array([-(2**51)], np.int64).view(np.float64)
    words = to_words(pa.array(np.array([np.nan, negative_nan[0], np.inf, -np.inf])), ordered=True)
    assert words[0] == words[1] > words[2] > words[3]


def test_masks_and_words_hold_at_any_offset_with_nulls() -> None:
    values = [1, None, 3, None, None, 6, 7, None, 9, 10, None]
    for offset in range(len(values)):
        part = pa.array(values).slice(offset)
        mask = valid_rows(part)
        assert mask is not None
        assert from_words(to_words(part), pa.int64(), mask).to_pylist() == values[offset:]


@given(st.lists(st.lists(st.text(max_size=5), max_size=8), max_size=12), st.data())
@settings(deadline=None)
def test_references_into_the_value_store_never_move(batches: list[list[str]], data: st.DataObject) -> None:
    store, oracle = ValueStore(pa.string()), [value for batch in batches for value in batch]
    for batch in batches:
        first = store.append(pa.array(batch, pa.string()))
        assert oracle[first : first + len(batch)] == batch
    wanted = data.draw(st.lists(st.integers(-1, len(oracle) - 1), max_size=20))
    expected = [None if w < 0 else oracle[w] for w in wanted]
    assert store.take(np.array(wanted, np.int64)).to_pylist() == expected


def test_compacting_works_around_a_limit_on_one_array() -> None:
    class Limited(ValueStore):
        def take(self, references: npt.NDArray[np.int64]) -> pa.Array:
            if len(references) > 3:
                raise pa.ArrowInvalid("Take operation overflowed binary array capacity")
            return super().take(references)

    store = Limited(pa.string())
    store.append(pa.array([f"v{i}" for i in range(20)]))
    wanted = np.array([19, 3, 7, 7, 0, 12, 1, 15])
    compact = store.compacted(wanted)
    assert compact.take(np.arange(8)).to_pylist() == [f"v{i}" for i in wanted]


def test_a_frozen_value_store_shares_what_was_there() -> None:
    store = ValueStore(pa.list_(pa.int8()))
    store.append(pa.array([[1], [2, 3]], pa.list_(pa.int8())))
    frozen = store.frozen()
    for i in range(5):
        store.append(pa.array([[i]] * 3, pa.list_(pa.int8())))
    assert len(frozen) == 2
    assert frozen.take(np.array([1, 0])).to_pylist() == [[2, 3], [1]]


def test_kernels_are_cached_where_numba_is_told_to(tmp_path: Path) -> None:
    code = "from cutwater.state.keys import hash_keys; import pyarrow as pa; print(hash_keys([pa.array([0])])[0])"
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert int(done.stdout) == 0xE220A8397B1DCDAF
        files = sorted(path.name for path in tmp_path.rglob("*.nbc"))
        assert any(name.startswith("kernels.hash_words") for name in files)
    assert len(list(tmp_path.iterdir())) == 1, "one folder per state of the kernel sources"


def test_importing_compiles_nothing_and_the_dataflow_does_without_numba() -> None:
    code = """
import sys
import cutwater.plan.graph, cutwater.operators.aggregate.running_spec
import cutwater.operators.window.spec, cutwater.operators.aggregate.accumulators
assert "numba" not in sys.modules
from cutwater.operators.aggregate import keyed_operator as running
from cutwater.operators.window import operator as windowing
from cutwater.runtime.channels import partitioner as partition
from cutwater.state import kernels
assert not kernels.hash_words.signatures
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_without_a_home_the_cache_is_private_or_nowhere(tmp_path: Path) -> None:
    code = "from cutwater.state.kernels import cache_directory; print(cache_directory())"
    environment = {"HOME": "/dev/null", "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}

    def place() -> str:
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    private = Path(place())
    assert private.parent == tmp_path
    assert private.stat().st_mode & 0o077 == 0
    private.chmod(0o777)
    assert place() == "None", "what others can write to is not loaded as code"
