"""The dry run of a restore: what would become of every step, and how long reading would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cutwater.plan.compatibility import compare
from cutwater.plan.planner import HasGraph, make_plan
from cutwater.plan.restore_report import Compatibility
from cutwater.plan.upgrade import Upgrade
from cutwater.storage.reading.any_snapshot import Snapshot, measure_read_rate, open_snapshot

if TYPE_CHECKING:
    from cutwater.storage.reading.addresses import SnapshotAddress

TIMES_READ = 2
"""The driver verifies every byte, then the workers load what is theirs."""


class ReadingTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time for reading the snapshot; starting Spark and building tables come on top."""

    bytes: int
    """Of the snapshot's data."""
    sample_bytes: int
    """Read for this estimate, just now."""
    bytes_per_s: float | None
    """As measured on the sample; ``None`` if it was too small to tell."""

    @property
    def seconds(self) -> float | None:
        """``None`` if the snapshot is too small for an estimate: then it is next to nothing."""
        return None if self.bytes_per_s is None else TIMES_READ * self.bytes / self.bytes_per_s


class RestorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of a program that begins from a snapshot.

    ``print`` shows it as the command line does.
    """

    program: str
    snapshot: str
    job: str
    """That wrote the snapshot."""
    checkpoint_id: int
    parallelism: int
    was_parallelism: int
    outlook: Compatibility
    reading: ReadingTime

    @property
    def ok(self) -> bool:
        """True if the program can begin from the snapshot."""
        return self.outlook.ok

    @property
    def foreign(self) -> bool:
        """True if another job would begin from it: the one that wrote it keeps its uncommitted rows."""
        return self.program != self.job

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        made: dict[str, Any] = msgspec.to_builtins(self)
        outlook = made.pop("outlook")
        return {
            "ok": self.ok,
            "foreign": self.foreign,
            **made,
            **outlook,
            "reading": {**made["reading"], "seconds": self.reading.seconds},
            "reasons": self.outlook.all_reasons,
            "warnings": self.outlook.warnings,
        }

    def __str__(self) -> str:
        from cutwater.api.jobs.restore_plan_text import render_restore_plan

        return render_restore_plan(self)


def plan_restore(
    flow: HasGraph,
    snapshot: str | SnapshotAddress,
    *,
    parallelism: int = 2,
    max_parallelism: int = 128,
    upgrade: Upgrade | None = None,
) -> RestorePlan:
    """Forecast of a dataflow that begins from the snapshot; see ``Dataflow.plan_restore``."""
    found: Snapshot = open_snapshot(snapshot)
    manifest = found.manifest
    plan = make_plan(flow, parallelism, max_parallelism)
    bound = compare(plan, manifest, upgrade or Upgrade(), foreign=plan.name != manifest.job)
    rate = measure_read_rate(found)
    return RestorePlan(
        program=plan.name,
        snapshot=str(snapshot),
        job=manifest.job,
        checkpoint_id=manifest.checkpoint_id,
        parallelism=plan.parallelism,
        was_parallelism=manifest.parallelism,
        outlook=bound.outlook,
        reading=ReadingTime(
            bytes=sum(e.length for e in manifest.entries), sample_bytes=rate.bytes, bytes_per_s=rate.bytes_per_s
        ),
    )
