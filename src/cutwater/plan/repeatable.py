"""Which dataflows can go back in part (R3, R4): those whose steps make every row again as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, cast

from cutwater.config import JobConfig
from cutwater.errors import BuildError
from cutwater.operators.aggregate.running_spec import RunningAggregateSpec
from cutwater.operators.enrich.async_map import AsyncMapSpec
from cutwater.operators.enrich.lookup import EnrichSpec
from cutwater.operators.join.as_of_spec import AsOfJoinSpec
from cutwater.operators.join.interval_spec import IntervalJoinSpec
from cutwater.operators.join.table_spec import TableJoinSpec
from cutwater.operators.join.window_spec import WindowJoinSpec
from cutwater.operators.process.spec import ProcessSpec
from cutwater.operators.ranking.deduplicate_spec import DeduplicateSpec
from cutwater.operators.ranking.top_spec import TopSpec
from cutwater.operators.stateless.expressions import ExpressionSpec
from cutwater.operators.stateless.functions import FlatMapSpec, MapBatchesSpec, MapRowSpec
from cutwater.operators.stateless.key_check import KeyCheckSpec
from cutwater.operators.stateless.union import UnionSpec
from cutwater.operators.stateless.unnest import UnnestSpec
from cutwater.operators.window.spec import WindowAggregateSpec
from cutwater.plan.graph import PhysicalPlan, Step

_REPEATABLE: Final = (
    AsOfJoinSpec,
    AsyncMapSpec,
    DeduplicateSpec,
    EnrichSpec,
    ExpressionSpec,
    FlatMapSpec,
    IntervalJoinSpec,
    KeyCheckSpec,
    MapBatchesSpec,
    MapRowSpec,
    ProcessSpec,
    RunningAggregateSpec,
    TableJoinSpec,
    TopSpec,
    UnionSpec,
    UnnestSpec,
    WindowAggregateSpec,
    WindowJoinSpec,
)
"""What sends the same rows under the same numbers, given the same state and the same choices: shown by
tests/unit/operators_keyed/test_repeatable_operators.py for those with state."""


def check_recovery(plan: PhysicalPlan, config: JobConfig) -> None:
    """Check that every step can do again, row for row, what it did, where ``recovery`` relies on it.

    Raises:
        BuildError: one cannot; names it.
    """
    if not config.records_order:
        return
    for step in plan.steps.values():
        why = _why_not(step)
        if why:
            raise BuildError(
                f"{why}, and recovery is {config.recovery!r}: what it sent could not be made again row for row",
                step=step.id,
                hint="Choose recovery='region' or 'job'.",
            )


def pin_tables(plan: PhysicalPlan, config: JobConfig) -> PhysicalPlan:
    """The plan with tables in files as they are now, where ``recovery`` relies on every worker reading the same.

    Raises:
        BuildError: files cannot be read; names the step.
    """
    from cutwater.operators.stateful_processor.spec import ProcessorSpec  # late: few flows have one

    steps = dict(plan.steps)
    for step in plan.steps.values() if config.records_order else ():
        spec = cast(object, step.spec)
        try:
            if isinstance(spec, EnrichSpec) and not spec.table.in_memory:
                steps[step.id] = replace(step, spec=replace(spec, table=spec.table.pinned()))
            elif isinstance(spec, ProcessorSpec) and spec.initial is not None:
                steps[step.id] = replace(step, spec=replace(spec, initial=spec.initial.pinned()))
        except BuildError as e:
            raise BuildError(e.message, step=step.id, hint=e.hint) from e
    return replace(plan, steps=steps)


def _why_not(step: Step) -> str:
    """What keeps a step from making its rows again; empty: nothing."""
    if step.role != "operator":
        return ""
    from cutwater.operators.stateful_processor.spec import ProcessorSpec  # late: few flows have one

    spec = cast(object, step.spec)
    if not isinstance(spec, (*_REPEATABLE, ProcessorSpec)):
        return f"a step of kind {step.kind!r} may send its rows in another order after a restore"
    return ""
