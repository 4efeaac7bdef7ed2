"""Running aggregates, against DuckDB's window functions and against plain Python."""

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.errors import BuildError, DataError, StorageError
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.running_spec import RunningAggregateSpec
from cutwater.operators.base import Operator, Outputs
from cutwater.state.key_index import GroupIds
from cutwater.state.keys import hash_keys, key_groups
from cutwater.state.segments import GROUP_COLUMN, Segment
from cutwater.state.table.keyed_segments import group_segments, keyed_rows
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.snapshot.segment_files import SnapshotWriter, read_segment
from keyed_world import AGGREGATES, VALUES, aggregate, cuts, feed, fitting, opened, rescaled, rows_of, same, snapshot
from memory_store import MemoryStore


def spec_of(batch: pa.RecordBatch, keys: tuple[str, ...], kinds: list[str]) -> RunningAggregateSpec:
    return RunningAggregateSpec(batch.schema, keys, tuple(Aggregate(f"{kind}_v", kind, "v") for kind in kinds))


def test_it_agrees_with_duckdb_over_several_keys_and_batches() -> None:
    random = np.random.default_rng(5)
    n = 20_000
    values = pa.array(random.integers(-1000, 1000, n), mask=random.random(n) < 0.1)
    texts = pa.array([f"t{i}" for i in random.integers(0, 300, n)], mask=random.random(n) < 0.1)
    batch = pa.record_batch(
        {
            "a": random.integers(0, 50, n),
            "b": pa.array([f"key-{i}" for i in random.integers(0, 20, n)]),
            "v": values,
            "f": random.normal(size=n),
            "s": texts,
            "row": np.arange(n),
        }
    )
    wanted = [
        Aggregate("n", "count"),
        *(
            Aggregate(f"{kind}_v", kind, "v")
            for kind in ("count", "sum", "mean", "min", "max", "variance", "stddev_pop", "count_distinct")
        ),
        *(Aggregate(f"{kind}_f", kind, "f") for kind in ("sum", "min", "max")),
        *(Aggregate(f"{kind}_s", kind, "s") for kind in ("min", "max", "count", "count_distinct")),
        *(Aggregate(f"{kind}_{c}", kind, c) for kind in ("first", "last") for c in ("v", "s")),
    ]
    operator = opened(RunningAggregateSpec(batch.schema, ("a", "b"), tuple(wanted), "row"))
    outputs: Outputs = []
    for part in cuts(batch, range(0, n, 1777)):
        outputs += operator.process(0, part)
    got = pa.Table.from_batches([b for _, b in outputs])
    sql = {"mean": "avg", "first": "first_value", "last": "last_value", "variance": "var_samp"}

    def call(w: Aggregate) -> str:
        if w.kind == "count_distinct":
            return f"count(distinct {w.column})"
        nulls = " ignore nulls" if w.kind in ("first", "last") else ""
        return f"{sql.get(w.kind, w.kind)}({w.column or '*'}{nulls})"

    columns = ", ".join(f"{call(w)} over w as {w.name}" for w in wanted)
    window = "partition by a, b order by row rows between unbounded preceding and current row"
    table = pa.Table.from_batches([batch])
    expected = duckdb.from_arrow(table).query(
        "t", f"select a, b, row, {columns} from t window w as ({window}) order by row"
    )
    for name, ours, theirs in zip(got.column_names, got.columns, expected.to_arrow_table().columns, strict=True):
        left, right = ours.to_pylist(), theirs.to_pylist()
        if isinstance(next(v for v in right if v is not None), float):
            np.testing.assert_allclose(
                np.array(left, float), np.array(right, float), rtol=1e-9, atol=1e-9, err_msg=name
            )
        else:
            assert left == [int(v) if isinstance(w := v, float) else w for v in right], name


@pytest.mark.parametrize("kind", AGGREGATES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_type_with_nulls_in_any_cut_equals_plain_python(kind: str, data: st.DataObject) -> None:
    arrow, strategy = VALUES[data.draw(st.sampled_from(fitting(kind)))]
    rows = data.draw(st.lists(st.tuples(st.integers(0, 3), st.none() | strategy), min_size=1, max_size=40))
    batch = pa.record_batch(
        {"k": pa.array([r[0] for r in rows], pa.int8()), "v": pa.array([r[1] for r in rows], arrow)}
    )
    values = batch["v"].to_pylist()
    operator = opened(spec_of(batch, ("k",), [kind]))
    outputs: Outputs = []
    for part in cuts(batch, data.draw(st.lists(st.integers(0, 40), max_size=4))):
        outputs += operator.process(0, part)
    got = rows_of(outputs)
    assert [row["k"] for row in got] == [r[0] for r in rows]
    for i, row in enumerate(got):
        so_far = [values[j] for j in range(i + 1) if rows[j][0] == rows[i][0]]
        expected = aggregate(kind, so_far)
        if kind == "sum" and pa.types.is_floating(arrow):
            expected = None if expected is None else float(expected)  # type: ignore[arg-type]
        elif kind == "sum" and expected is not None:
            expected = int(expected)  # type: ignore[call-overload]
        assert same(row[f"{kind}_v"], expected), (i, row, so_far)


@given(data=st.data(), before=st.integers(1, 5), after=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_freeze_and_restore_at_any_point_and_parallelism_equals_never_having_stopped(
    data: st.DataObject, before: int, after: int
) -> None:
    name = data.draw(st.sampled_from(["int64", "float32", "string", "bool"]))
    arrow, strategy = VALUES[name]
    key = st.tuples(st.integers(-2, 2), st.sampled_from(["", "a", "bb"]))
    rows = data.draw(st.lists(st.tuples(key, st.none() | strategy), min_size=1, max_size=60))
    batch = pa.record_batch(
        {
            "a": pa.array([r[0][0] for r in rows], pa.int32()),
            "b": pa.array([r[0][1] for r in rows]),
            "v": pa.array([r[1] for r in rows], arrow),
            "row": range(len(rows)),
        }
    )
    keys = ("a", "b") if data.draw(st.booleans()) else ("a",)
    kinds = [k for k in AGGREGATES if name in fitting(k)]
    spec = RunningAggregateSpec(batch.schema, keys, tuple(Aggregate(f"{k}_v", k, "v") for k in kinds), "row")
    expected = rows_of(opened(spec).process(0, batch))

    cut = data.draw(st.integers(0, len(rows)))
    operators = [opened(spec, s, before) for s in range(before)]
    parts = feed(operators, batch.slice(0, cut), keys)
    segments = [segment for operator in operators for segment in snapshot(operator)]
    operators = rescaled(spec, data.draw(st.permutations(segments)), after)
    parts += feed(operators, batch.slice(cut), keys)
    outputs = [output for part in parts for output in part]
    got = sorted(rows_of(outputs), key=lambda row: row["row"])  # type: ignore[arg-type,return-value]
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert all(same(ours[name], theirs[name]) for name in theirs), (ours, theirs)


def test_what_comes_after_the_freeze_is_not_in_the_segments() -> None:
    batch = pa.record_batch({"k": np.arange(3000) % 50, "v": np.arange(3000), "s": [f"s{i}" for i in range(3000)]})
    sketches = [Aggregate(f"about{p}", "approx_count_distinct", "v", p) for p in (4, 12)]  # dense and sparse
    picks = [Aggregate(kind, kind, "v") for kind in ("sum", "stddev", "count_distinct")]
    aggregates = (Aggregate("n", "count"), *picks, *sketches, Aggregate("s", "last", "s"))
    spec = RunningAggregateSpec(batch.schema, ("k",), aggregates)
    operator = opened(spec)
    operator.process(0, batch.slice(0, 1000))
    at_once = snapshot(operator)
    frozen = operator.freeze(2)
    for i in range(5):
        operator.process(0, batch.slice(1000 + 400 * i, 400))
    later = list(frozen.segments())
    assert [s.batch.to_pylist() for s in later] == [s.batch.to_pylist() for s in at_once]
    frozen.release()
    assert list(frozen.segments()) == []


def test_freezes_share_memory_only_after_release() -> None:
    batch = pa.record_batch({"k": np.arange(100), "v": np.arange(100)})
    operator = opened(spec_of(batch, ("k",), ["sum", "mean", "max"]))
    operator.process(0, batch)
    released = operator.freeze(1)
    contents: list[list[object]] = [[s.batch.to_pylist() for s in released.segments()]]
    released.release()
    open_ones = []
    for checkpoint in range(2, 5):
        frozen = operator.freeze(checkpoint)
        contents.append([s.batch.to_pylist() for s in frozen.segments()])
        open_ones.append(frozen)
        operator.process(0, batch)
    for frozen, content in zip(open_ones, contents[1:], strict=True):
        assert [s.batch.to_pylist() for s in frozen.segments()] == content
    assert contents[0] == contents[1] != contents[2] != contents[3]


def test_segments_read_like_a_table() -> None:
    batch = pa.record_batch({"k": ["a", "b", "a"], "v": [1, None, 3]})
    spec = spec_of(batch, ("k",), ["sum", "mean"])
    operator = opened(spec)
    operator.process(0, batch)
    [segment] = snapshot(operator)
    assert segment.batch.schema.names == [GROUP_COLUMN, "k", "sum_v", "mean_v.sum", "mean_v.count"]
    assert pa.schema(list(segment.batch.schema)[1:]) == spec.state_schema
    rows = {row.pop("k"): row for row in segment.batch.drop_columns([GROUP_COLUMN]).to_pylist()}
    assert rows["a"] == {"sum_v": 4, "mean_v.sum": 4.0, "mean_v.count": 2}
    assert rows["b"] == {"sum_v": None, "mean_v.sum": 0.0, "mean_v.count": 0}


def test_state_that_does_not_fit_one_array_is_cut_and_comes_back() -> None:
    """Arrow refuses more than 2 GB in one string column; here a limit of five rows stands for it."""
    schema = pa.schema([("k", pa.int64()), ("text", pa.string())])

    def rows(gids: GroupIds) -> list[pa.Array]:
        if len(gids) > 5:
            raise pa.ArrowInvalid("Take operation overflowed binary array capacity")
        return [pa.array(gids, pa.int64()), pa.array([f"t{gid}" for gid in gids])]

    gids = np.arange(40, dtype=np.int32)
    segments = list(group_segments("s", schema, gids, lambda s: [pa.array(s, pa.int64())], rows, 4))
    assert [segment.kind for segment in segments] == ["base", *["delta"] * (len(segments) - 1)]
    assert all(segment.batch.num_rows <= 5 for segment in segments)
    back = [row for part in keyed_rows(segments, schema, range(4)) for row in part.to_pylist()]
    assert sorted(row["k"] for row in back) == list(range(40))
    assert all(row["text"] == f"t{row['k']}" for row in back)
    half = [row["k"] for part in keyed_rows(segments, schema, range(1, 3)) for row in part.to_pylist()]
    assert sorted(half) == [i for i in range(40) if key_groups(hash_keys([pa.array([i])]), 4)[0] in (1, 2)]


def test_a_later_base_replaces_and_a_delta_updates_by_key() -> None:
    batch = pa.record_batch({"k": [1, 2], "v": [10, 20]})
    spec = spec_of(batch, ("k",), ["sum"])
    old, new = opened(spec), opened(spec)
    old.process(0, batch)
    new.process(0, pa.record_batch({"k": [1], "v": [99]}))
    everything = (0, 16)
    first = [Segment(s.name, "base", s.batch, everything) for s in snapshot(old)]
    second = [Segment(s.name, "base", s.batch, everything) for s in snapshot(new)]
    delta = [Segment(s.name, "delta", s.batch, everything) for s in snapshot(new)]
    probe = pa.record_batch({"k": [1, 2], "v": [0, 0]})
    for segments, sums in ((first + second, [99, 0]), (first + delta, [99, 20])):
        operator = opened(spec)
        operator.restore(segments)
        assert [row["sum_v"] for row in rows_of(operator.process(0, probe))] == sums


def test_a_restore_forgets_what_was_there() -> None:
    batch = pa.record_batch({"k": [1, 2], "v": [10, 20]})
    operator = opened(spec_of(batch, ("k",), ["sum"]))
    operator.process(0, batch)
    operator.restore([])
    assert [row["sum_v"] for row in rows_of(operator.process(0, batch))] == [10, 20]


def test_a_snapshot_that_lacks_a_column_is_refused() -> None:
    batch = pa.record_batch({"k": [1, 2], "v": [10, 20]})
    operator = opened(spec_of(batch, ("k",), ["sum"]))
    operator.process(0, batch)
    other = opened(spec_of(batch, ("k",), ["max"]))
    with pytest.raises(StorageError, match="no column 'max_v'"):
        other.restore(snapshot(operator))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int64(), [2**62, 2**62]),
        (pa.int64(), [-(2**63), -1]),
        (pa.uint64(), [1, 2**63]),
    ],
)
def test_an_integer_sum_fails_rather_than_wraps(kind: pa.DataType, values: list[int]) -> None:
    batch = pa.record_batch({"k": [0, 0], "v": pa.array(values, kind)})
    operator = opened(spec_of(batch, ("k",), ["sum"]))
    with pytest.raises(DataError, match="sum of column 'v' leaves the range of int64 in row 1"):
        operator.process(0, batch)


def test_a_large_uint64_below_a_null_is_no_overflow() -> None:
    values = pa.array(np.array([1, 2**63], np.uint64), mask=np.array([False, True]))
    batch = pa.record_batch({"k": [0, 0], "v": values})
    assert [r["sum_v"] for r in rows_of(opened(spec_of(batch, ("k",), ["sum"])).process(0, batch))] == [1, 1]


def test_replaced_strings_are_swept_out() -> None:
    batch = pa.record_batch({"k": np.arange(6000) % 3, "v": [f"{i:0100}" for i in range(6000)]})
    operator = opened(spec_of(batch, ("k",), ["last", "first"]))
    for start in range(0, 6000, 3):
        operator.process(0, batch.slice(start, 3))
    store = operator._table.accumulators[0]._store  # type: ignore[attr-defined]
    assert len(store) < 4200
    got = rows_of(operator.process(0, batch.slice(0, 3)))
    assert [(r["last_v"], r["first_v"]) for r in got] == [(f"{i:0100}", f"{i:0100}") for i in range(3)]


def test_very_large_strings_and_empty_batches() -> None:
    batch = pa.record_batch({"k": ["x" * 10_000_000, "k", "x" * 10_000_000], "v": ["a", "z" * 10_000_000, "b"]})
    spec = spec_of(batch, ("k",), ["max", "last"])
    operator = opened(spec)
    assert operator.process(0, batch.slice(0, 0)) == []
    assert [len(r["max_v"]) for r in rows_of(operator.process(0, batch))] == [1, 10_000_000, 1]  # type: ignore[arg-type]
    [restored] = rescaled(spec, snapshot(operator), 1)
    assert rows_of(restored.process(0, batch.slice(0, 1)))[0]["max_v"] == "b"


def test_a_row_without_a_key_is_refused() -> None:
    batch = pa.record_batch({"k": pa.array([1, None]), "v": [1, 2]})
    with pytest.raises(DataError, match=r"'k' is null in row 1 of the batch: \{\"k\": null, \"v\": 2\}"):
        opened(spec_of(batch, ("k",), ["sum"])).process(0, batch)


def test_what_cannot_work_is_refused_when_built() -> None:
    schema = pa.schema([("k", pa.int64()), ("s", pa.string()), ("l", pa.list_(pa.int8()))])

    def build(*aggregates: Aggregate, event_time: str | None = None) -> RunningAggregateSpec:
        return RunningAggregateSpec(schema, ("k",), aggregates, event_time)

    refused = {
        "column 's' of type string does not fit": (Aggregate("x", "sum", "s"),),
        "column 'l' of type list": (Aggregate("x", "max", "l"),),
        "no such column 'dealy'": (Aggregate("x", "max", "dealy"),),
        "no such aggregate 'median'": (Aggregate("x", "median", "s"),),
        "'x' needs a column": (Aggregate("x", "max"),),
        "named 'k'": (Aggregate("k", "count"),),
        "named 'x'": (Aggregate("x", "count"), Aggregate("x", "max", "s")),
        "no aggregate": (),
    }
    for message, aggregates in refused.items():
        with pytest.raises(BuildError, match=message):
            build(*aggregates)
    with pytest.raises(BuildError, match="event-time column 'when'"):
        build(Aggregate("n", "count"), event_time="when")


def test_a_small_table_is_written_as_it_lies_and_sorted_when_it_is_read() -> None:
    store, keys = MemoryStore(), [7 * i for i in range(300)]
    batch = pa.record_batch({"k": keys, "v": [key + 1 for key in keys]})
    spec = spec_of(batch, ("k",), ["sum"])
    operators = [opened(spec, subtask, 2) for subtask in range(2)]
    feed(operators, batch, ("k",))
    entries: list[Entry] = []
    for subtask, operator in enumerate(operators):
        frozen = operator.freeze(1)
        (unsorted,), (ordered,) = frozen.segments(unsorted=True), frozen.segments()
        assert GROUP_COLUMN not in unsorted.batch.schema.names
        assert unsorted.key_groups == (8 * subtask, 8 * subtask + 8), "all that the subtask owns, which a base replaces"
        writer = SnapshotWriter(store, "job", 1, 1, subtask, 0)
        (entry,) = writer.add("agg", subtask, [unsorted])
        writer.close()
        frozen.release()
        assert read_segment(store, "job", entry).batch.equals(ordered.batch)
        entries.append(entry)
    for parallelism in (1, 2, 3):
        operators = rescaled(spec, [read_segment(store, "job", entry) for entry in entries], parallelism)
        found = [row for operator in operators for row in state_of(operator)]
        assert sorted(found) == [(key, key + 1) for key in keys]


def state_of(operator: Operator) -> list[tuple[int, int]]:
    return [(row["k"], row["sum_v"]) for s in snapshot(operator) for row in s.batch.to_pylist()]
