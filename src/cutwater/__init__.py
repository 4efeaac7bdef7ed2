"""Exactly-once stateful streaming for PySpark, on distributed snapshots.

    import cutwater as cw
    import polars as pl

    flow = cw.Dataflow("delays")
    flights = flow.read("flights", cw.files("flights/*.parquet"), event_time="scheduled", out_of_order="1h")
    (
        flights.filter("late", pl.col("delay") > 15)
        .key_by("origin")
        .window("hourly", cw.tumbling("1h"))
        .aggregate("worst", n=cw.count(), worst=cw.max("delay"))
        .write("out", cw.files("out/"))
    )
    job = flow.start(spark, checkpoint="chk/", interval="1s")

Every name below is imported when it is first used, so that ``import cutwater`` itself is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "BatchProcessFunction",
    "BroadcastProcessFunction",
    "BroadcastState",
    "BuildError",
    "CoProcessFunction",
    "ConfigError",
    "CutwaterError",
    "Dataflow",
    "EnrichmentTable",
    "FencedError",
    "JobCancelledError",
    "JobConfig",
    "ListState",
    "MapState",
    "OperatorListState",
    "ProcessContext",
    "ProcessFunction",
    "ReducingState",
    "RestartConfig",
    "Snapshot",
    "UnionListState",
    "ValueState",
    "__version__",
    "all",
    "any",
    "approx_count_distinct",
    "avro",
    "cached",
    "compare_forks",
    "connector",
    "console",
    "count",
    "count_distinct",
    "data_source",
    "debezium",
    "delta",
    "discard",
    "every",
    "fault_trial",
    "files",
    "first",
    "generate",
    "global_window",
    "iceberg",
    "kafka",
    "last",
    "max",
    "mean",
    "memory",
    "min",
    "postgres_changes",
    "protobuf",
    "rate",
    "session",
    "sliding",
    "stddev",
    "sum",
    "table",
    "tumbling",
    "variance",
    "write_savepoint",
]

_HOMES = {
    "cutwater.chaos.trial": ("fault_trial",),
    "cutwater.config": ("JobConfig", "RestartConfig"),
    "cutwater.connectors.console": ("console",),
    "cutwater.connectors.delta.delta": ("delta",),
    "cutwater.connectors.data_source.data_source": ("data_source",),
    "cutwater.connectors.debezium.formats": ("debezium",),
    "cutwater.connectors.discard": ("discard",),
    "cutwater.connectors.files.files": ("files",),
    "cutwater.connectors.generate": ("generate", "rate"),
    "cutwater.connectors.iceberg.iceberg": ("iceberg",),
    "cutwater.connectors.kafka.kafka": ("kafka",),
    "cutwater.connectors.memory": ("memory",),
    "cutwater.connectors.registry": ("connector",),
    "cutwater.connectors.avro.formats": ("avro",),
    "cutwater.connectors.postgres.changes": ("postgres_changes",),
    "cutwater.connectors.protobuf.formats": ("protobuf",),
    "cutwater.connectors.table_sink": ("table",),
    "cutwater.api.aggregates": (
        "all",
        "any",
        "approx_count_distinct",
        "count",
        "count_distinct",
        "first",
        "last",
        "max",
        "mean",
        "min",
        "stddev",
        "sum",
        "variance",
    ),
    "cutwater.api.flow": ("Dataflow",),
    "cutwater.api.windows": ("every", "global_window", "session", "sliding", "tumbling"),
    "cutwater.errors": ("BuildError", "ConfigError", "CutwaterError", "FencedError", "JobCancelledError"),
    "cutwater.operators.enrich.cached": ("cached",),
    "cutwater.operators.enrich.table": ("EnrichmentTable",),
    "cutwater.operators.process.operator_state": ("BroadcastState", "OperatorListState", "UnionListState"),
    "cutwater.operators.process.functions": (
        "BatchProcessFunction",
        "BroadcastProcessFunction",
        "CoProcessFunction",
        "ProcessContext",
        "ProcessFunction",
    ),
    "cutwater.operators.process.states": ("ListState", "MapState", "ReducingState", "ValueState"),
    "cutwater.runtime.driver.comparison": ("compare_forks",),
    "cutwater.state_reader.reader": ("Snapshot",),
    "cutwater.state_reader.writer": ("write_savepoint",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    from cutwater.api.aggregates import (
        all,
        any,
        approx_count_distinct,
        count,
        count_distinct,
        first,
        last,
        max,
        mean,
        min,
        stddev,
        sum,
        variance,
    )
    from cutwater.api.flow import Dataflow
    from cutwater.api.windows import every, global_window, session, sliding, tumbling
    from cutwater.chaos.trial import fault_trial
    from cutwater.config import JobConfig, RestartConfig
    from cutwater.connectors.avro.formats import avro
    from cutwater.connectors.console import console
    from cutwater.connectors.data_source.data_source import data_source
    from cutwater.connectors.debezium.formats import debezium
    from cutwater.connectors.delta.delta import delta
    from cutwater.connectors.discard import discard
    from cutwater.connectors.files.files import files
    from cutwater.connectors.generate import generate, rate
    from cutwater.connectors.iceberg.iceberg import iceberg
    from cutwater.connectors.kafka.kafka import kafka
    from cutwater.connectors.memory import memory
    from cutwater.connectors.postgres.changes import postgres_changes
    from cutwater.connectors.protobuf.formats import protobuf
    from cutwater.connectors.registry import connector
    from cutwater.connectors.table_sink import table
    from cutwater.errors import BuildError, ConfigError, CutwaterError, FencedError, JobCancelledError
    from cutwater.operators.enrich.cached import cached
    from cutwater.operators.enrich.table import EnrichmentTable
    from cutwater.operators.process.functions import (
        BatchProcessFunction,
        BroadcastProcessFunction,
        CoProcessFunction,
        ProcessContext,
        ProcessFunction,
    )
    from cutwater.operators.process.operator_state import BroadcastState, OperatorListState, UnionListState
    from cutwater.operators.process.states import ListState, MapState, ReducingState, ValueState
    from cutwater.runtime.driver.comparison import compare_forks
    from cutwater.state_reader.reader import Snapshot
    from cutwater.state_reader.writer import write_savepoint


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'cutwater' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
