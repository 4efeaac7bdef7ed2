"""Loads (at the very first time: compiles) the kernels of keyed steps before rows come."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from pathlib import Path

import llvmlite.binding
import numba
import numpy as np
import pyarrow as pa

from cutwater.connectors.files.line_blocks import find_newlines
from cutwater.connectors.text.text_columns import TextColumns
from cutwater.connectors.text.time_texts import date_texts, time_texts
from cutwater.operators.aggregate.accumulators import Aggregate, aggregate_functions
from cutwater.operators.aggregate.running_spec import RunningAggregateSpec
from cutwater.operators.window.kinds import SessionWindow, SlidingWindow, TumblingWindow
from cutwater.operators.window.spec import WindowAggregateSpec
from cutwater.runtime.chains.source_runner import watermark_cuts
from cutwater.runtime.channels.partitioner import HashPartitioner
from cutwater.runtime.channels.texts import plain_rows
from cutwater.state.growing_array import GrowingArray, gather, populate
from cutwater.state.kernels import cache_directory
from cutwater.state.key_index import NullableIndex
from cutwater.state.table.changes import ChangeLog
from cutwater.state.table.keyed_table import Capture

_GROUPS = 128
_GROWN_ROWS = 5_000
"""Keys for which an index has to grow."""


class _Context:
    """A subtask that owns every key group; nothing it counts is seen."""

    step = "warm_up"
    subtask = 0
    parallelism = 1
    max_parallelism = _GROUPS
    key_groups = range(_GROUPS)
    incremental = True
    state_memory_bytes: int | None = None
    repeatable = repeating = False

    def processing_time_ms(self) -> int:
        return 0

    def count(self, metric: str, amount: int = 1) -> None:
        return None

    def wake(self) -> None:
        return None


def is_warm() -> bool:
    """Whether ``warm_up`` would only load: it has run to its end for this installation on such a machine.

    Kernels in the cache say nothing: they may be the few that one job needed, or those of another installation.
    """
    marker = _marker()
    return marker is not None and marker.exists()


def _marker() -> Path | None:
    place = cache_directory()
    if place is None:
        return None
    compiled_for = (str(Path(__file__).parent), sys.version, numba.__version__, llvmlite.binding.get_host_cpu_name())
    return Path(place, f"warm-{hashlib.sha256(repr(compiled_for).encode()).hexdigest()[:16]}")


def warm_up() -> None:
    """Run partitioner, running aggregates and windows over a few rows, for number, text and composite keys.

    Takes a fraction of a second once the kernels lie in the cache (see ``cutwater.state.kernels``), and some ten
    seconds the first time on a machine.
    """
    rows = pa.record_batch(
        {
            "number": np.arange(8),
            "text": [f"text-{i}" for i in range(8)],
            "value": pa.array(np.arange(8), mask=np.arange(8) == 3),
            "ratio": np.linspace(0, 1, 8),
            "flag": np.arange(8) > 3,
            "time": pa.array(np.arange(8), pa.timestamp("us")),
        }
    )
    for keys in (("number",), ("text",), ("number", "number2"), ("number", "text")):
        batch = rows.append_column("number2", rows.column("number")) if "number2" in keys else rows
        HashPartitioner(batch.schema, keys, 2, _GROUPS).split(batch)
        aggregates = tuple(
            Aggregate(f"{kind}_{column}", kind, column)
            for kind, function in aggregate_functions().items()
            for column in (("value", "ratio") if function.fits(pa.float64()) else ("flag",))
        )
        running = RunningAggregateSpec(batch.schema, keys, aggregates).build()
        kinds = (TumblingWindow(4), SlidingWindow(4, 2), SessionWindow(1))
        windows = [WindowAggregateSpec(batch.schema, keys, "time", kind, aggregates, 9).build() for kind in kinds]
        for operator in (running, *windows):
            operator.open(_Context())
            operator.process(0, batch)
            operator.on_watermark(4)
            frozen = operator.freeze(0)
            operator.restore(list(frozen.segments()))
            frozen.release()
            operator.process(0, batch)  # late by now, so that windows come out again
            operator.close()
    _warm_up_large_tables()
    _warm_up_texts(rows)
    marker = _marker()
    if marker is not None:
        with contextlib.suppress(OSError):  # then the next process looks again
            marker.touch()


def compile_connectors() -> None:
    """Compile kernels that only some jobs need, which load them when they do."""
    from cutwater.connectors.avro import formats as avro
    from cutwater.connectors.debezium import formats as debezium
    from cutwater.connectors.kafka import native_consumer
    from cutwater.connectors.postgres import log_rows
    from cutwater.connectors.protobuf import formats as protobuf

    native_consumer.warm_up()
    avro.warm_up()
    debezium.warm_up()
    protobuf.warm_up()
    log_rows.warm_up()


def _warm_up_texts(rows: pa.RecordBatch) -> None:
    """Lines of JSON and CSV, and their times, read and written."""
    columns = TextColumns(rows.schema, rows.schema.names)
    columns.json(b'{"number":1}\n', 1, ignore=True)
    columns.csv(b",,,,,\n", 1, delimiter=",", quote='"')
    _ = find_newlines(b"\n")
    time_texts(rows.column("time"), "T")
    date_texts(rows.column("number").cast(pa.int32()).cast(pa.date32()))
    few = pa.record_batch({"number": np.arange(8) % 2, "text": pa.array(["a", "b"] * 4).dictionary_encode()})
    plain = few.schema.set(1, pa.field("text", pa.string()))
    for _, part in HashPartitioner(plain, ["number"], 2, _GROUPS).split(few):
        plain_rows(part, plain)
    watermark_cuts(rows.column("time").cast(pa.int64()).to_numpy(), 0, 0)


def _warm_up_large_tables() -> None:
    """What a table of few rows does without: growing, setting chunks aside, telling what changed."""
    numbers = pa.array(np.arange(_GROWN_ROWS))
    short, long = (pa.array([f"{start}-{i}" for i in range(_GROWN_ROWS)]) for start in ("text", "a text of more bytes"))
    for columns in ([numbers], [numbers, numbers], [short], [short, numbers], [long]):
        NullableIndex([column.type for column in columns]).upsert(columns)
    gather(np.arange(_GROWN_ROWS), np.zeros(_GROWN_ROWS, np.int32))
    gid = np.zeros(1, np.int32)
    column, copy = GrowingArray(np.int64), GrowingArray(np.int64)
    column.reserve(1)
    copy.reserve(1)
    populate(column.values, 0, 1)
    capture = Capture([column.values], 1, [copy])
    capture.preserve(gid)
    capture.complete()
    log = ChangeLog(rows=lambda: 2)
    log.cut(1)
    log.mark(gid)
    log.mark(gid)  # enough to count how many differ: one, which are not most of them
    log.cut(2).since(1)
