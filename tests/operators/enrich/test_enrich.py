"""Enrichment against DuckDB, and its refusals."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from cutwater.errors import BuildError, DataError
from cutwater.operators.enrich.lookup import EnrichSpec
from cutwater.operators.enrich.table import EnrichmentTable, table_digest

STREAM = pa.schema({"id": pa.int64(), "k": pa.int32(), "s": pa.string(), "name": pa.string()})
AIRLINES = pa.table(
    {"code": ["UA", "DL", None, "AA"], "name": ["United", "Delta", "Nobody", None], "size": [3, 2, 0, 1]}
)


def stream(rows: int, seed: int = 0) -> pa.RecordBatch:
    rng = np.random.default_rng(seed)
    return pa.record_batch(
        {
            "id": pa.array(np.arange(rows)),
            "k": pa.array(rng.integers(-30, 30, rows), pa.int32(), mask=rng.random(rows) < 0.1),
            "s": pa.array(rng.choice(["UA", "DL", "XX", ""], rows), pa.string(), mask=rng.random(rows) < 0.1),
            "name": pa.array([f"n{i}" for i in range(rows)]),
        },
        schema=STREAM,
    )


def run(spec: EnrichSpec, ctx: Any, batch: pa.RecordBatch, cut: int = 1 << 30) -> pa.Table:
    operator = spec.build()
    operator.open(ctx)
    outputs: list[pa.RecordBatch] = []
    for at in range(0, batch.num_rows, cut):
        outputs += [out for _, out in operator.process(0, batch.slice(at, cut))]
        while operator.pending:
            outputs += [out for _, out in operator.resume()]
    return pa.Table.from_batches(outputs, spec.outputs[0])


@pytest.mark.parametrize("how", ["left", "inner"])
@pytest.mark.parametrize("cut", [1 << 30, 1, 7])
@pytest.mark.parametrize("duplicates", ["refuse", "all"])
@pytest.mark.parametrize("keys", [(("s", "s2"),), (("k", "k2"),), (("s", "s2"), ("k", "k2"))])
def test_rows_are_enriched_as_by_a_database_and_keep_their_order(
    make_context: Callable[..., Any], how: Any, cut: int, duplicates: Any, keys: tuple[tuple[str, str], ...]
) -> None:
    rng, rows = np.random.default_rng(5), 40
    table = pa.table(
        {
            "k2": pa.array(rng.integers(-40, 40, rows), pa.int64(), mask=rng.random(rows) < 0.1),
            "s2": pa.array(rng.choice(["UA", "DL", "AA"], rows), mask=rng.random(rows) < 0.2),
            "name": pa.array([f"t{i}" for i in range(rows)]),
            "at": pa.array(range(-rows, 0), pa.timestamp("us", "UTC")),
        }
    )
    right = [r for _, r in keys]
    if duplicates == "refuse":
        seen: set[Any] = set()
        first = [
            tuple(row.values()) not in seen and not seen.add(tuple(row.values()))
            for row in table.select(right).to_pylist()
        ]
        table = table.filter(pa.array(first))
    batch = stream(200)
    spec = EnrichSpec(STREAM, EnrichmentTable(table, duplicates=duplicates), keys, how)
    got = run(spec, make_context(), batch, cut)
    tbl, rows_ = table.append_column("n", pa.array(range(len(table)))), pa.Table.from_batches([batch])  # noqa: F841
    others = ", ".join(f'tbl."{c}"' for c in table.column_names if c not in right)
    condition = " and ".join(f"rows_.{a} = tbl.{b}" for a, b in keys)
    expected = (
        duckdb.sql(f"select rows_.*, {others} from rows_ {how} join tbl on {condition} order by rows_.id, tbl.n")
        .arrow()
        .read_all()
    )
    assert got.column_names == [
        *STREAM.names,
        *("name_right" if c == "name" else c for c in table.column_names if c not in right),
    ]
    assert [tuple(r.values()) for r in got.to_pylist()] == [
        tuple(r) for r in zip(*(c.to_pylist() for c in expected.columns), strict=True)
    ]
    assert got.num_rows > 3


def test_null_and_nan_keys_match_nothing(make_context: Callable[..., Any]) -> None:
    table = pa.table({"f": [None, float("nan"), 1.0], "v": [1, 2, 3]})
    batch = pa.record_batch({"f": [None, float("nan"), 1.0, -0.0]})
    got = run(EnrichSpec(batch.schema, EnrichmentTable(table), (("f", "f"),)), make_context(), batch)
    assert got.column("v").to_pylist() == [None, None, 3, None]


def test_duplicate_key_in_memory_is_refused_when_built() -> None:
    table = pa.table({"s": ["UA", "DL", "UA"], "v": [1, 2, 3]})
    with pytest.raises(BuildError, match=r"2 rows for the key \{s: 'UA'\}"):
        EnrichSpec(STREAM, EnrichmentTable(table), (("s", "s"),))


def test_duplicate_key_in_a_file_is_found_when_loaded(make_context: Callable[..., Any], tmp_path: Path) -> None:
    pq.write_table(pa.table({"s": ["UA", "DL", "UA"], "v": [1, 2, 3]}), tmp_path / "t.parquet")
    spec = EnrichSpec(STREAM, EnrichmentTable(tmp_path), (("s", "s"),))
    with pytest.raises(DataError, match=r"2 rows for the key \{s: 'UA'\}"):
        spec.build().open(make_context())


@pytest.mark.parametrize(
    ("on", "options", "message"),
    [
        ((("ss", "code"),), {}, "no such column 'ss'"),
        ((("s", "cod"),), {}, "no such column 'cod'"),
        ((("k", "code"),), {}, "different types"),
        ((("s", "code"),), {"how": "outer"}, "unknown"),
        ((("s", "code"),), {"suffix": ""}, "two columns"),
        ((), {}, "no key column"),
    ],
)
def test_wrong_enrichment_is_refused_when_built(on: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        EnrichSpec(STREAM, EnrichmentTable(AIRLINES), on, **options)


def test_many_matches_come_in_bounded_batches_in_order(make_context: Callable[..., Any]) -> None:
    rows = 1000
    table = pa.table({"k": pa.array([7] * rows), "v": range(rows)})
    batch = pa.record_batch({"k": [7, 8] * 150})
    spec = EnrichSpec(batch.schema, EnrichmentTable(table, duplicates="all"), (("k", "k"),), "inner")
    operator = spec.build()
    operator.open(make_context())
    batches = [out for _, out in operator.process(0, batch)]
    assert len(batches) == 1
    assert operator.pending
    while operator.pending:
        batches += [out for _, out in operator.resume()]
    assert max(b.num_rows for b in batches) <= 65_536
    assert pa.Table.from_batches(batches).column("v").to_pylist() == list(range(rows)) * 150


def test_wide_rows_come_in_smaller_batches(make_context: Callable[..., Any]) -> None:
    table = pa.table({"k": [1] * 40, "text": ["x" * 10_000_000] + ["y"] * 39})
    batch = pa.record_batch({"k": [1, 1]})
    got = run(EnrichSpec(batch.schema, EnrichmentTable(table, duplicates="all"), (("k", "k"),)), make_context(), batch)
    assert got.num_rows == 80
    assert got.column("text").num_chunks == 4


@pytest.mark.parametrize("kind", ["parquet", "csv", "csv.gz", "json", "jsonl.gz"])
def test_files_are_read_in_the_order_of_their_names(
    make_context: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    parts = [pa.table({"code": ["UA"], "v": [1]}), pa.table({"code": ["DL", "é"], "v": [2, 3]})]
    for number, part in enumerate(parts):
        path = tmp_path / f"part-{number}.{kind}"
        if kind == "parquet":
            pq.write_table(part, path)
            continue
        if kind.startswith("csv"):
            sink = pa.BufferOutputStream()
            pacsv.write_csv(part, sink)
            data = sink.getvalue().to_pybytes()
        else:
            data = "".join(json.dumps(row) + "\n" for row in part.to_pylist()).encode()
        path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    (tmp_path / "_SUCCESS").write_text("")
    table = EnrichmentTable(str(tmp_path))
    assert table.load().to_pydict() == {"code": ["UA", "DL", "é"], "v": [1, 2, 3]}
    assert table.digest == EnrichmentTable(pa.concat_tables(parts)).digest
    assert EnrichmentTable([tmp_path / f"part-{n}.{kind}" for n in (1, 0)]).digest == table.digest
    assert EnrichmentTable(str(tmp_path / f"*.{kind}")).digest == table.digest
    batch = stream(10)
    spec = pickle.loads(pickle.dumps(EnrichSpec(STREAM, table, (("s", "code"),))))
    assert run(spec, make_context(), batch).column("v").to_pylist() == [
        {"UA": 1, "DL": 2}.get(s) for s in batch.column("s").to_pylist()
    ]


def test_unusable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no file"):
        EnrichSpec(STREAM, EnrichmentTable(tmp_path / "none.parquet"), (("s", "s"),))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(BuildError, match=r"a\.parquet"):
        EnrichSpec(STREAM, EnrichmentTable(tmp_path), (("s", "s"),))
    (tmp_path / "b.txt").write_bytes(b"")
    with pytest.raises(BuildError, match=r"format of file .*b\.txt"):
        EnrichSpec(STREAM, EnrichmentTable(tmp_path / "b.txt"), (("s", "s"),))
    (tmp_path / "a.parquet").unlink()
    pq.write_table(pa.table({"s": ["x"], "v": [1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"s": ["y"], "v": ["1"]}), tmp_path / "2.parquet")
    with pytest.raises(DataError, match="column 'v' is string instead of int64"):
        EnrichmentTable([tmp_path / "1.parquet", tmp_path / "2.parquet"]).load()


CONTENT = pa.table(
    {
        "n": pa.array([1, None, 3], pa.int16()),
        "b": [True, None, False],
        "f": [1.5, None, float("nan")],
        "s": ["x", None, ""],
        "y": [b"\x00", b"", None],
        "l": [[1, None], None, []],
        "m": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        "st": [{"x": 1, "y": "a"}, None, {"x": None, "y": None}],
        "d": pa.array([1, None, 3], pa.decimal128(5, 0)),
        "t": pa.array([-1, None, 3], pa.timestamp("us", "Europe/Berlin")),
    }
)


@pytest.mark.parametrize("name", CONTENT.column_names)
def test_digest_depends_on_the_content_only(name: str) -> None:
    table = CONTENT.select([name])
    padded = pa.concat_tables([table.slice(2), table, table.slice(0, 1)])
    assert table_digest(padded.slice(1, 3)) == table_digest(table)
    rebuilt = pa.table({name: pa.array(table.column(name).to_pylist(), table.column(name).type)})
    assert table_digest(rebuilt) == table_digest(table)
    seen = {table_digest(table), table_digest(table.rename_columns(["other"]))}
    seen |= {table_digest(table.take(pa.array(order, pa.int64()))) for order in ([1, 0, 2], [2, 1, 0], [0, 1], [])}
    assert len(seen) == 6


@pytest.mark.parametrize("zero", [0, 0.0, False, "", b"", [], {"x": None}])
def test_digest_tells_null_from_nothing(zero: Any) -> None:
    kind = pa.array([zero]).type
    assert table_digest(pa.table({"v": pa.array([None], kind)})) != table_digest(
        pa.table({"v": pa.array([zero], kind)})
    )


def test_operator_knows_the_digest_it_loaded(make_context: Callable[..., Any]) -> None:
    spec = EnrichSpec(STREAM, EnrichmentTable(AIRLINES), (("s", "code"),))
    operator = spec.build()
    operator.open(make_context())
    assert operator.digest == spec.table.digest
    assert operator.process(0, stream(0)) == []
    assert not operator.pending


def test_dictionary_and_view_columns_are_decoded(make_context: Callable[..., Any]) -> None:
    table = pa.table({"s": pa.array(["UA", "DL"]).dictionary_encode(), "v": pa.array(["x", "y"], pa.string_view())})
    spec = EnrichSpec(STREAM, EnrichmentTable(table), (("s", "s"),))
    assert spec.outputs[0].field("v").type == pa.string()
    assert set(run(spec, make_context(), stream(20)).column("v").to_pylist()) == {"x", "y", None}


def test_table_without_rows_or_without_other_columns(make_context: Callable[..., Any]) -> None:
    batch = stream(20)
    empty = EnrichSpec(STREAM, EnrichmentTable(AIRLINES.slice(0, 0)), (("s", "code"),))
    assert run(empty, make_context(), batch).column("size").null_count == 20
    members = EnrichSpec(STREAM, EnrichmentTable(AIRLINES.select(["code"])), (("s", "code"),), "inner")
    assert set(run(members, make_context(), batch).column("s").to_pylist()) == {"UA", "DL"}
