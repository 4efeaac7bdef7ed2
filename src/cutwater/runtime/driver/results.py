"""What a finished job has collected."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa

from cutwater.errors import ConfigError
from cutwater.plan.graph import PhysicalPlan


def result_directory(plan: PhysicalPlan, step: str) -> str:
    """Where the rows of a ``collect`` step lie.

    Raises:
        ConfigError: it is none; the hint lists those that are.
    """
    known = plan.steps.get(step)
    if known is None or known.kind != "collect":
        collects = ", ".join(s.id for s in plan.steps.values() if s.kind == "collect")
        raise ConfigError(f"step {step!r} collects nothing", hint=f"Steps that do: {collects or 'none'}.")
    return str(cast(Any, known.spec).directory)


def result_schema(plan: PhysicalPlan, step: str) -> pa.Schema:
    """Of the rows that a ``collect`` step gets."""
    source = plan.steps[step].inputs[0]
    return plan.steps[source.step].outputs[source.output].schema
