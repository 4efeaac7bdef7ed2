"""Connectors by their names: our own, and those that other installed packages provide."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, cast

from cutwater.entry_points import CONNECTORS, Provided, find, provided
from cutwater.errors import ConfigError, CutwaterError, did_you_mean

Promise = Literal["exactly-once", "at-least-once", "as asked", "unknown"]
"""What a sink promises; ``"as asked"``: an argument says."""
SOURCE_PARTS = ("schema", "discover", "open")
SINK_PARTS = ("guarantee", "writer", "committer")


@dataclass(frozen=True)
class Own:
    """A connector of this package.

    Args:
        home: module that has it.
        reads: it can be a source.
        writes: what it promises as a sink; ``None``: it is none.
        what: a few words for a table.
        extra: of this package, that it needs.
        imports: module that is there if the extra is installed.
        needs: for which part of it, if not for all.
    """

    home: str
    reads: bool
    writes: Promise | None
    what: str
    extra: str | None = None
    imports: str | None = None
    needs: str = ""


OWN: dict[str, Own] = {
    "console": Own("cutwater.connectors.console", False, "at-least-once", "rows to look at, where the job was started"),
    "data_source": Own(
        "cutwater.connectors.data_source.data_source",
        True,
        "as asked",
        "classes of PySpark's Python Data Source API",
        "spark",
        "pyspark",
    ),
    "delta": Own("cutwater.connectors.delta.delta", True, "exactly-once", "Delta Lake tables", "delta", "deltalake"),
    "discard": Own("cutwater.connectors.discard", False, "exactly-once", "nothing: rows are counted"),
    "files": Own(
        "cutwater.connectors.files.files",
        True,
        "exactly-once",
        "Parquet, CSV and JSON lines",
        "s3",
        "obstore",
        "buckets",
    ),
    "generate": Own("cutwater.connectors.generate", True, None, "rows that a function computes"),
    "iceberg": Own(
        "cutwater.connectors.iceberg.iceberg", True, "exactly-once", "Iceberg tables", "iceberg", "pyiceberg"
    ),
    "kafka": Own("cutwater.connectors.kafka.kafka", True, "as asked", "topics", "kafka", "confluent_kafka"),
    "memory": Own("cutwater.connectors.memory", True, None, "given rows, for tests"),
    "postgres_changes": Own(
        "cutwater.connectors.postgres.changes", True, None, "changes of Postgres tables", "postgres", "psycopg"
    ),
    "rate": Own("cutwater.connectors.generate", True, None, "numbers, so many a second"),
    "table": Own(
        "cutwater.connectors.table_sink",
        False,
        "exactly-once",
        "tables of SQLite and Postgres",
        "postgres",
        "psycopg",
        "Postgres",
    ),
}
"""By their public names in ``cutwater``."""


@dataclass(frozen=True)
class Connector:
    """A connector that is installed.

    Args:
        name: as ``cw.connector`` takes it.
        package: that provides it.
        version: of the package.
        source: whether it can be one; ``None`` if its types do not say.
        sink: what it promises as a sink; ``None`` if it is none.
        what: a few words.
        extra: what else is to be installed for it: ``"cutwater[kafka]"``; empty if nothing.
        missing: whether that is missing.
        problem: why it cannot be used; empty if it can.
    """

    name: str
    package: str
    version: str
    source: bool | None
    sink: Promise | None
    what: str = ""
    extra: str = ""
    missing: bool = False
    problem: str = ""


def connector(name: str) -> Callable[..., Any]:
    """The connector of a name: ``cw.connector("queue")("jobs.db")`` is a source or a sink.

    Those of Cutwater itself are found as well (``cw.connector("kafka")`` is ``cw.kafka``), and those that other
    installed packages provide, as entry points of the group ``cutwater.connectors``.  The package is imported now, and
    no other.

    Args:
        name: as ``cutwater connectors`` lists it.

    Raises:
        ConfigError: there is none of this name, several packages provide one, or it cannot be imported.

    >>> connector("rate")(1000, rows=5).rows
    5
    >>> connector("kafak")
    Traceback (most recent call last):
    cutwater.errors.ConfigError: no connector 'kafak' is installed. Did you mean 'kafka'? There are: ...
    """
    own = OWN.get(name)
    if own is not None:
        return cast("Callable[..., Any]", getattr(importlib.import_module(own.home), name))
    found = find(CONNECTORS, name)
    if found is None:
        known = sorted({*OWN, *(one.name for one in provided(CONNECTORS))})
        raise ConfigError(f"no connector {name!r} is installed", hint=did_you_mean(name, known))
    return _callable(found)


def connectors() -> list[Connector]:
    """All that are installed, ours first.  Packages are imported; one that cannot be is listed with its problem."""
    from cutwater import __version__

    ours = [
        Connector(
            name,
            "cutwater",
            __version__,
            own.reads,
            own.writes,
            own.what,
            "" if own.extra is None else f"cutwater[{own.extra}]" + (f" for {own.needs}" if own.needs else ""),
            own.imports is not None and importlib.util.find_spec(own.imports) is None,
        )
        for name, own in sorted(OWN.items())
    ]
    others = provided(CONNECTORS)
    names = [one.name for one in others]
    return ours + [_described(one, names) for one in others]


def _callable(found: Provided) -> Callable[..., Any]:
    value = found.load()
    if not callable(value):
        raise ConfigError(
            f"the package {found.package} {found.version} provides {found.name!r}, but {found.value} is a "
            f"{type(value).__name__}",
            hint="A connector is a function or class that makes a source or a sink.",
        )
    return value


def table() -> str:
    """Ours, as the guide lists them."""
    says = {None: "", "as asked": "exactly-once or at-least-once, as asked"}
    lines = ["| | source | sink | needs | what |", "|---|---|---|---|---|"]
    for name, own in sorted(OWN.items()):
        extra = "" if own.extra is None else f"`cutwater[{own.extra}]`" + (f" for {own.needs}" if own.needs else "")
        sink = says.get(own.writes, own.writes)
        lines.append(f"| `cw.{name}` | {'yes' if own.reads else ''} | {sink} | {extra} | {own.what} |")
    return "\n".join(lines)


def _described(found: Provided, names: list[str]) -> Connector:
    problem = ""
    if found.name in OWN:
        problem = f"Cutwater has a {found.name!r} of its own, which is used"
    elif names.count(found.name) > 1:
        problem = "several packages provide this name"
    try:
        made = result_of(_callable(found))
    except CutwaterError as error:
        return Connector(found.name, found.package, found.version, None, None, problem=str(error))
    reads: bool | None = None
    writes: Promise | None = "unknown"
    if made is not None:
        reads = hasattr(made, "as_source") or has(made, SOURCE_PARTS)
        sink = result_of(getattr(made, "as_sink", None)) or made
        writes = promise(sink) if hasattr(made, "as_sink") or has(made, SINK_PARTS) else None
    doc = (inspect.getdoc(found.load()) or "").partition("\n")[0]
    return Connector(found.name, found.package, found.version, reads, writes, doc, problem=problem)


def result_of(make: object) -> type | None:
    """The class of what a function returns, as its annotation says; of a class, itself."""
    if isinstance(make, type):
        return make
    noted = getattr(make, "__annotations__", {}).get("return")
    if isinstance(noted, str):
        module = sys.modules.get(getattr(make, "__module__", ""))
        noted = getattr(module, noted, None)
    return noted if isinstance(noted, type) else None


def has(kind: object, parts: tuple[str, ...]) -> bool:
    known = {name for base in getattr(kind, "__mro__", ()) for name in getattr(base, "__annotations__", {})}
    return all(part in known or hasattr(kind, part) for part in parts)


def promise(sink: object) -> Promise:
    said = (
        None
        if is_dataclass(sink) and "guarantee" in {f.name for f in fields(sink)}
        else getattr(sink, "guarantee", None)
    )
    return said if said in ("exactly-once", "at-least-once") else "as asked"
