"""Making steps: ids, inputs, and every check that can be made before rows flow.

Only this module adds to a graph under construction; streams are thin handles over it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import pyarrow as pa

from cutwater.config import parse_duration_ms
from cutwater.data.changes import OP
from cutwater.data.rows import shorten_value
from cutwater.errors import BuildError, ConfigError, CutwaterError, did_you_mean
from cutwater.plan.graph import EdgeType, Input, LogicalGraph, Step, StreamType

if TYPE_CHECKING:
    from cutwater.connectors.base import Sink, Source
    from cutwater.operators.base import OperatorSpec

Duration: TypeAlias = "str | float | timedelta"
"""``"500ms"``, ``"1h 30m"``, a ``timedelta``, or 0."""

_STEP_ID = re.compile(r"[A-Za-z0-9._-]+")
_STEP_ID_MAX_CHARS = 128


@dataclass(frozen=True)
class Upstream:
    """One output of a step, and how the next step reads it."""

    step: str
    output: int
    type: StreamType
    edge: EdgeType = EdgeType.FORWARD
    keys: tuple[str, ...] = ()
    """Key columns, if ``edge`` is a hash edge."""

    @property
    def partitioning(self) -> tuple[str, ...]:
        """Columns whose key group decides in which subtask of the next step a row is; none if anything else does."""
        if self.edge is EdgeType.HASH:
            return self.keys
        return self.type.keys if self.edge is EdgeType.FORWARD else ()

    @property
    def input(self) -> Input:
        return Input(self.step, self.output, self.edge, self.keys)


@dataclass
class GraphBuilder:
    """The graph of one dataflow while it is written."""

    name: str
    steps: dict[str, Step] = field(default_factory=dict[str, Step])
    lost: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])

    @property
    def graph(self) -> LogicalGraph:
        return LogicalGraph(self.name, MappingProxyType(dict(self.steps)))

    @staticmethod
    def check_name(name: object) -> str:
        """The name, if a dataflow may have it (it names a folder, as step ids do)."""
        if not isinstance(name, str) or not _is_plain(name):
            raise BuildError(
                f"{shorten_value(name)} cannot be the name of a dataflow",
                hint=f"Use letters, digits, '.', '_' and '-', at most {_STEP_ID_MAX_CHARS} characters.",
            )
        return name

    def check_id(self, id: object) -> str:
        """The id, if a step may have it.

        Raises:
            BuildError: not a string, empty, too long, with other characters than ids may have, or taken.
        """
        hint = "Every step's first argument is its id: letters, digits, '.', '_' and '-', for example 'late-flights'."
        if not isinstance(id, str):
            raise BuildError(f"a step id is a string, not {shorten_value(id)}", hint=hint)
        if not _is_plain(id):
            raise BuildError(f"{id!r} cannot be a step id", hint=f"{hint} At most {_STEP_ID_MAX_CHARS} characters.")
        if id in self.steps:
            raise BuildError(
                f"the id is taken by the {self.steps[id].kind} step",
                step=id,
                hint="State is found again by step id: give every step its own.",
            )
        return id

    @contextlib.contextmanager
    def new_step(self, id: object, inputs: Sequence[Upstream], parallelism: int | None) -> Generator[NewStep]:
        """A step to be checked and added inside; every error raised there says that it is this step's."""
        with located(self.check_id(id)) as step:
            check_parallelism(parallelism)
            yield NewStep(self, step, tuple(inputs), parallelism)

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """All the steps that are added inside, or none of them if one is refused."""
        before = dict(self.steps)
        try:
            yield
        except BaseException:
            self.steps.clear()
            self.steps.update(before)
            raise

    def add_input(self, id: str, spec: OperatorSpec, upstream: Upstream) -> None:
        """Give a step one more input, and the specification that takes it: how a loop is closed."""
        step = self.steps[id]
        self.steps[id] = replace(step, spec=spec, inputs=(*step.inputs, upstream.input))

    def event_time_story(self, upstream: Upstream) -> tuple[str, str]:
        """Why a stream has no event time: (what happened, what to do)."""
        step, output = upstream.step, upstream.output
        while True:
            if (step, output) in self.lost:
                reason = self.lost[step, output]
                hint = "Keep the column up to here." if reason.startswith("column ") else ""
                return f"the stream's event time was lost at step {step!r}: {reason}", hint
            if output != 0:
                return f"the stream is a side output of step {step!r}, which has no event time", ""
            inputs = self.steps[step].inputs
            if self.steps[step].options.get("declared"):
                return (
                    f"the stream has no event time: loop {step!r} is declared without one",
                    f"Name the column there: flow.loop({step!r}, schema=..., event_time='...').",
                )
            if not inputs:
                return (
                    f"the stream has no event time: step {step!r} reads without one",
                    f"Name the column there: flow.read({step!r}, ..., event_time='...', out_of_order='10s').",
                )
            step, output = inputs[0].step, inputs[0].output

    def no_event_time(self, upstream: Upstream, needed: str, where: str = "") -> BuildError:
        """The error for a step that needs event time where a stream has none; ``needed`` begins its message."""
        story, hint = self.event_time_story(upstream)
        return BuildError(f"{needed}, but {where}{story}", hint=hint)

    def has_watermark(self, upstream: Upstream) -> bool:
        """True if every source above reads with an event time, so that a watermark comes."""
        if upstream.type.event_time is not None:
            return True
        step = self.steps[upstream.step]
        if not step.inputs or step.options.get("declared"):
            return upstream.output == 0 and step.outputs[0].event_time is not None
        # What is fed back to a loop carries no watermark: its first input alone decides (W3).
        inputs = step.inputs[:1] if step.kind == "loop" else step.inputs
        return all(self.has_watermark(Upstream(i.step, i.output, self.steps[i.step].outputs[i.output])) for i in inputs)


@dataclass(frozen=True)
class NewStep:
    """A step that is about to be added: its id, what it reads, and the parallelism of its own, if it has one."""

    builder: GraphBuilder
    id: str
    inputs: tuple[Upstream, ...]
    parallelism: int | None

    @property
    def upstream(self) -> Upstream:
        """The first of its inputs."""
        return self.inputs[0]

    def add(
        self,
        kind: str,
        spec: Source | OperatorSpec | Sink,
        outputs: Sequence[StreamType],
        *,
        lost: str | None = None,
        **options: object,
    ) -> tuple[Upstream, ...]:
        """Add the step, checked, and return its outputs.

        ``lost`` says why the event time of output 0 is gone.
        """
        inputs = tuple(u.input for u in self.inputs)
        self.builder.steps[self.id] = Step(self.id, kind, spec, inputs, tuple(outputs), self.parallelism, options)
        if lost is not None:
            self.builder.lost[self.id, 0] = lost
        return tuple(Upstream(self.id, n, t) for n, t in enumerate(outputs))


# ------------------------------------------------------------------------------------------------------------- types


def carry(upstream: Upstream, schema: pa.Schema, kept: dict[str, str]) -> tuple[StreamType, str | None]:
    """The type after a row-wise step, and why the event time is gone if it is.

    Args:
        kept: columns whose values pass unchanged, old name to new name.
    """
    event_time = upstream.type.event_time
    changes = _carry_changes(upstream.type.changes, kept)
    keys = upstream.partitioning
    keys = tuple(kept[k] for k in keys) if all(k in kept for k in keys) else ()
    if event_time is None:
        return StreamType(schema, None, keys, changes=changes), None
    if event_time in kept:
        return StreamType(schema, kept[event_time], keys, upstream.type.span, changes), None
    how = "is overwritten there" if event_time in schema.names else "is not among its columns"
    return StreamType(schema, None, keys, changes=changes), f"column {event_time!r} {how}"


def _carry_changes(changes: tuple[str, ...] | None, kept: dict[str, str]) -> tuple[str, ...] | None:
    """An updating stream is one as long as the mark of its rows stays under its name."""
    if changes is None or kept.get(OP) != OP:
        return None
    return tuple(kept[name] for name in changes) if all(name in kept for name in changes) else ()


def carry_by_name(upstream: Upstream, schema: pa.Schema) -> tuple[StreamType, str | None]:
    """The type after a user's function: event time goes on if its column comes out under the same name, as a time."""
    event_time = upstream.type.event_time
    changes = () if upstream.type.changes is not None and OP in schema.names else None
    plain = StreamType(schema, changes=changes)
    if event_time is None:
        return plain, None
    if event_time not in schema.names:
        return plain, f"column {event_time!r} is not in the function's schema"
    kind = schema.field(event_time).type
    if not (pa.types.is_timestamp(kind) and kind.unit == "us"):
        return plain, f"column {event_time!r} comes out of the function as {kind}, not as timestamp[us]"
    return replace(plain, event_time=event_time, span=upstream.type.span), None


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema without metadata: what two steps must agree on is names, types and nullability."""
    return pa.schema([f.remove_metadata() for f in schema])


# ------------------------------------------------------------------------------------------------------------ checks


@contextlib.contextmanager
def located(step: str) -> Generator[str]:
    """Say in every error raised inside which step it belongs to."""
    try:
        yield step
    except CutwaterError as e:
        e.step = e.step or step
        raise


def check_parallelism(parallelism: object) -> None:
    """Refuse a parallelism that is neither ``None`` nor a whole number above 0."""
    if parallelism is None:
        return
    if isinstance(parallelism, bool) or not isinstance(parallelism, int) or parallelism < 1:
        hint = ""
        if not isinstance(parallelism, bool | int | float):
            hint = (
                "A column of that name: pl.col(...).alias('parallelism') in select and with_columns, "
                "rename('id', {'old': 'parallelism'}) after an aggregate."
            )
        raise BuildError(f"parallelism must be a whole number above 0, not {shorten_value(parallelism)}", hint=hint)


def listed(values: Sequence[object]) -> list[Any]:
    """Arguments given one by one, or as a single list, as Spark and Polars take both.

    >>> listed(("k", "v")), listed((["k", "v"],))
    (['k', 'v'], ['k', 'v'])
    """
    only = values[0] if len(values) == 1 else None
    return list(cast("Sequence[Any]", only if isinstance(only, list | tuple) else values))


def require_column(schema: pa.Schema, name: object, what: str = "column") -> str:
    """The name, if the schema has exactly one column of it."""
    if not isinstance(name, str):
        hint = "Make a column of what is computed first: with_columns('id', k=pl.col('n') % 10)."
        if isinstance(name, list | tuple):
            hint = "Give the names one by one, or all in one list."
        elif (plain := _plain_column(name)) is not None:
            hint = f"Write {plain!r}."
        raise BuildError(f"a {what} is given by its name, not by {shorten_value(name)}", hint=hint)
    found = schema.names.count(name)
    if found == 0:
        raise BuildError(f"no such {what} {name!r}", hint=did_you_mean(name, schema.names))
    if found > 1:
        raise BuildError(f"{what} {name!r} is there {found} times", hint="Give every column its own name.")
    return name


def refuse_changes(builder: GraphBuilder, upstream: Upstream, what: str, *, timed: bool = True) -> None:
    """Refuse an updating stream where every row counts once and for all.

    Args:
        timed: the step needs event time, which an updating stream does not have.
    """
    if upstream.type.changes is None:
        return
    step = builder.steps[upstream.step]
    hint = f"Put this step before {step.id!r}"
    if step.kind == "deduplicate":
        hint += ", or let the first row of each key through there, keep='first': that is no updating stream"
    if not timed:
        hint += f". If the changes themselves are meant, drop column {OP!r} before"
    raise BuildError(
        f"{what} would take the rows of updating stream {step.id!r} as new ones, also what they were before",
        hint=f"{hint}.",
    )


def distinct_columns(schema: pa.Schema) -> pa.Schema:
    """The schema, if every column has a name of its own."""
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise BuildError(f"two columns are named {name!r}", hint="Rename one before this step.")
    return schema


def duration_us(value: Duration, name: str, *, signed: bool = False) -> int:
    """Microseconds of a duration.

    Raises:
        BuildError: not a duration, or negative where that makes no sense.

    >>> duration_us("-1h", "within", signed=True)
    -3600000000
    """
    try:
        if isinstance(value, timedelta):
            us = value // timedelta(microseconds=1)
        else:
            negative = isinstance(value, str) and value.lstrip().startswith("-")
            ms = parse_duration_ms(str(value).replace("-", "", 1) if negative else value, name=name)
            us = round(-ms * 1000 if negative else ms * 1000)
    except ConfigError as e:
        raise BuildError(e.message, hint=e.hint) from None
    if us < 0 and not signed:
        raise BuildError(f"{name} {value!r} is negative")
    return us


def _plain_column(value: object) -> str | None:
    """The column that a Polars expression only names."""
    meta = getattr(value, "meta", None)
    return meta.output_name() if meta is not None and meta.is_column() else None


def _is_plain(name: str) -> bool:
    """True if a name can stand in a path as it is."""
    return bool(_STEP_ID.fullmatch(name)) and not name.startswith(".") and len(name) <= _STEP_ID_MAX_CHARS
