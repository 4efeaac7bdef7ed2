"""The public names: exactly these, each at its home, each documented."""

from __future__ import annotations

import importlib
import inspect
import tomllib

import pytest

import cutwater as cw
from source_tree import ROOT

PUBLIC = {
    "Dataflow",
    # connectors
    "avro",
    "connector",
    "cached",
    "console",
    "data_source",
    "debezium",
    "discard",
    "files",
    "iceberg",
    "kafka",
    "generate",
    "memory",
    "protobuf",
    "postgres_changes",
    "rate",
    "table",
    "EnrichmentTable",
    # windows and aggregates
    "all",
    "any",
    "approx_count_distinct",
    "compare_forks",
    "count",
    "count_distinct",
    "delta",
    "first",
    "last",
    "max",
    "mean",
    "min",
    "stddev",
    "sum",
    "tumbling",
    "variance",
    "sliding",
    "session",
    "global_window",
    "every",
    # process functions
    "BatchProcessFunction",
    "BroadcastProcessFunction",
    "BroadcastState",
    "CoProcessFunction",
    "ListState",
    "MapState",
    "OperatorListState",
    "ProcessContext",
    "ProcessFunction",
    "ReducingState",
    "UnionListState",
    "ValueState",
    # snapshots
    "Snapshot",
    "write_savepoint",
    # fault drills
    "fault_trial",
    # settings and errors
    "BuildError",
    "ConfigError",
    "CutwaterError",
    "FencedError",
    "JobCancelledError",
    "JobConfig",
    "RestartConfig",
    "__version__",
}


def test_the_public_names_are_pinned():
    assert set(cw.__all__) == PUBLIC
    assert len(cw.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_a_public_name_is_documented_and_its_home_exports_it(name):
    value = getattr(cw, name)
    assert inspect.getdoc(value)
    assert getattr(importlib.import_module(value.__module__), name) is value
    assert getattr(cw, name) is value


def test_every_public_name_is_listed_before_it_is_used():
    assert set(dir(cw)) >= PUBLIC


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'cutwater' has no attribute 'dataflow_'"):
        _ = cw.dataflow_


def test_builtins_are_untouched_inside_the_package():
    """``cw.sum`` shadows ``sum`` for users who ask for it only."""
    assert cw.sum is not sum
    assert vars(cw)["__builtins__"]["sum"] is sum


def test_the_version_is_that_of_the_distribution():
    with open(ROOT / "pyproject.toml", "rb") as f:
        assert cw.__version__ == tomllib.load(f)["project"]["version"]


RESULTS = ("DeduplicatedStream", "WindowedStream", "WindowedResult", "JoinedStream")


@pytest.mark.parametrize(
    ("home", "kind"), [("stream", "Stream"), ("keyed", "KeyedStream"), *(("keyed", kind) for kind in RESULTS)]
)
def test_every_method_a_user_calls_is_documented(home, kind):
    home = importlib.import_module(f"cutwater.api.streams.{home}")
    for name, member in inspect.getmembers(getattr(home, kind)):
        if not name.startswith("_"):
            assert inspect.getdoc(member), f"{kind}.{name}"


def test_the_earlier_name_of_process_networks_gives_the_same_names():
    now, earlier = importlib.import_module("cutwater.process_networks"), importlib.import_module("cutwater.network")
    assert {name: getattr(earlier, name) for name in earlier.__all__} == {n: getattr(now, n) for n in now.__all__}
