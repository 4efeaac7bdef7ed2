"""Recovery of a part of a job (R3, R4): only where all steps make every row again as it was."""

from __future__ import annotations

from dataclasses import replace

from cutwater.config import JobConfig
from cutwater.errors import BuildError
from cutwater.plan.graph import PhysicalPlan


def check_recovery(plan: PhysicalPlan, config: JobConfig) -> None:
    """Check that every step can do again, row for row, what it did, where ``recovery`` relies on it.

    Raises:
        BuildError: one cannot; names it.
    """
    for step in plan.steps.values() if config.records_order else ():
        if step.operator is not None and not step.operator.repeatable:
            raise BuildError(
                f"a step of kind {step.kind!r} may send its rows in another order after a restore, and recovery is "
                f"{config.recovery!r}: what it sent could not be made again row for row",
                step=step.id,
                hint="Choose recovery='region' or 'job'.",
            )


def pin_tables(plan: PhysicalPlan, config: JobConfig) -> PhysicalPlan:
    """The plan with tables in files as they are now, where ``recovery`` relies on every worker reading the same.

    Raises:
        BuildError: files cannot be read; names the step.
    """
    steps = dict(plan.steps)
    for step in plan.steps.values() if config.records_order else ():
        if step.operator is not None:
            try:
                steps[step.id] = replace(step, spec=step.operator.pinned())
            except BuildError as e:
                raise BuildError(e.message, step=step.id, hint=e.hint) from e
    return replace(plan, steps=steps)
