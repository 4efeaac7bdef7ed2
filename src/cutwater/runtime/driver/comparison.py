"""Differences of two forks of one job: of their shadows' rows, up to the same position of every source."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import polars as pl

from cutwater.config import parse_duration_ms
from cutwater.connectors.files.part_commit import checkpoint_of_part, is_visible
from cutwater.data.changes import OP
from cutwater.errors import ConfigError, CorruptSnapshotError
from cutwater.runtime.driver.forks import limits_of, not_reached
from cutwater.state_reader.compare import OF_ONE, OF_OTHER, PLACE, TIMES, differing_rows, rows_of
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import Fork
from cutwater.storage.reading import resolve_snapshot
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND
from cutwater.storage.snapshot.manifest import Manifest
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.base import Store
from cutwater.storage.store.paths import shadow_folder

_POLL_S = 0.1


class StepComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of two forks in one write step, compared as multisets."""

    step: str
    rows_one: int = 0
    rows_other: int = 0
    only_one: int = 0
    """Rows that the first fork has too many, each as often as it has."""
    only_other: int = 0
    samples: list[dict[str, Any]] = []
    """Differing rows, the first ones in the order of their columns."""
    columns_one: list[str] = []
    """With their types: columns that are not the same in the other; they do not count for the rows."""
    columns_other: list[str] = []
    missing_in: str = ""
    """The fork that has no such step."""

    @property
    def same(self) -> bool:
        """No difference was found."""
        columns = self.columns_one or self.columns_other
        return not (self.only_one or self.only_other or columns or self.missing_in)


class ForkComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs of two forks since their cut; ``print`` shows it as the command line does."""

    one: str
    other: str
    leader: str
    cut: int
    """The leader's checkpoint from which both began."""
    checkpoint_one: int
    """Up to here; in both the sources had been read exactly as far."""
    checkpoint_other: int
    steps: list[StepComparison]

    @property
    def same(self) -> bool:
        """Every step has the same rows, equally often."""
        return all(step.same for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {"same": self.same, **cast("dict[str, Any]", msgspec.to_builtins(self, enc_hook=str))}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"since checkpoint {self.cut} of {self.leader}"
        yield f"  {self.one} up to its checkpoint {self.checkpoint_one}"
        yield f"  {self.other} up to its checkpoint {self.checkpoint_other}, where the sources were read as far"
        for s in self.steps:
            if s.missing_in:
                yield f"{s.step}: {s.missing_in} has no such step"
                continue
            said = "the same" if s.same else f"only {self.one}: {s.only_one:,}, only {self.other}: {s.only_other:,}"
            yield f"{s.step}: {s.rows_one:,} and {s.rows_other:,} rows, {said}"
            for job, columns in ((self.one, s.columns_one), (self.other, s.columns_other)):
                if columns:
                    yield f"  columns of {job} only: {', '.join(columns)}"
            for sample in s.samples:
                row = ", ".join(f"{name}={value!r}" for name, value in sample["row"].items())
                yield f"  {row}: {sample['times_one']} and {sample['times_other']} times"


@dataclass(frozen=True)
class _Side:
    job: str
    fork: Fork
    store: Store
    folder: str
    """Of the shadows, in ``store``."""
    cuts: list[Manifest]
    """Checkpoints at which nothing was on its way, newest first."""

    def rows(self, step: str, checkpoint_id: int) -> pl.LazyFrame | None:
        folder = f"{self.folder}/{step}"
        place, names = self.store.local_folder(folder), self.store.names(folder)
        parts = [(n, checkpoint_of_part(n)) for n in names if is_visible(n, ".parquet")]
        kept = [f"{place}/{name}" for name, id in parts if id is not None and id <= checkpoint_id]
        return pl.scan_parquet(kept) if kept else None


def compare_forks(
    one: str,
    other: str,
    *,
    digits: int | None = None,
    ignore: Sequence[str] = (),
    samples: int = 5,
    timeout: str | float = 0,
) -> ForkComparison:
    """Compare what two forks of one job would have written, since the cut from which both began.

    Rows are compared as multisets, up to checkpoints at which both had read every source exactly as far and nothing was
    on its way.  Forks that follow their leader get there whenever it makes a pause, or ends.

    Args:
        one: ``DIR/JOB``.
        other: the same of the other fork.
        digits: floating point numbers are rounded to so many significant digits: their sums depend on the order.
        ignore: columns that do not count.
        samples: how many differing rows to show, of each step.
        timeout: how long to wait for such checkpoints: a duration such as ``"10s"``, or milliseconds.

    Returns:
        For each write step how many rows each fork has, how many only one of them has, and samples; ``same`` says it
        in one word, ``print`` shows all.

    Raises:
        ConfigError: a job is no fork, or serves already; they began from different cuts; or have no such checkpoint.

    Example::

        found = cw.compare_forks("checkpoints/as-it-is", "checkpoints/trial", ignore=["score"], timeout="60s")
        if not found.same:
            print(found)
    """
    deadline_s = time.monotonic() + parse_duration_ms(timeout, name="timeout") / 1000
    while (found := _common(first := _open(one), second := _open(other))) is None:
        if time.monotonic() >= deadline_s:
            raise ConfigError(
                f"{first.job} and {second.job} have no checkpoints at which both have read exactly as far",
                hint="They come to rest at the same place when their leader makes a pause, stops or ends: compare them "
                "then, or give timeout= (--timeout).",
            )
        time.sleep(_POLL_S)
    at_one, at_other = found
    steps = [
        _compare_step(s, first, second, (at_one, at_other), digits, ignore, samples)
        for s in sorted(_sinks(at_one) | _sinks(at_other))
    ]
    return ForkComparison(
        one=first.job,
        other=second.job,
        leader=first.fork.job,
        cut=first.fork.cut,
        checkpoint_one=at_one.checkpoint_id,
        checkpoint_other=at_other.checkpoint_id,
        steps=steps,
    )


def _open(address: str) -> _Side:
    found = resolve_snapshot(address)
    state = JobLog(found.store, found.job).read() if not found.is_savepoint else None
    if state is None or state.fork is None:
        raise ConfigError(
            f"{address} is no fork: what it wrote is not kept for a comparison",
            hint="Fork the program that serves as well, from the same snapshot, and compare the two forks.",
        )
    if state.fork.promoted:
        raise ConfigError(f"{address} was promoted and serves: what its shadows kept is gone")
    folder = shadow_folder(found.job)
    cuts: list[Manifest] = []
    for completed in state.completed:
        try:
            manifest = load_manifest(found.store, found.job, completed)
        except CorruptSnapshotError:
            continue  # or just removed
        on_their_way = any(e.kind == CHANNEL_KIND for e in manifest.entries)
        if not on_their_way and _committed(manifest, found.store, folder):
            cuts.append(manifest)
    return _Side(found.job, state.fork, found.store, folder, cuts)


def _committed(manifest: Manifest, store: Store, folder: str) -> bool:
    """True if all that a checkpoint hands out is to be seen."""
    handed = [(step, h) for r in manifest.subtasks for step, handles in r.handles.items() for h in handles]
    seen = {step: set(store.names(f"{folder}/{step}")) for step, _ in handed}
    return all(h["final"] in seen[step] for step, h in handed if "final" in h)


def _common(one: _Side, other: _Side) -> tuple[Manifest, Manifest] | None:
    """The newest checkpoints at which both had read as far.

    Raises:
        ConfigError: there are none and will be none.
    """
    if 0 not in (one.fork.cut, other.fork.cut) and (one.fork.uid, one.fork.cut) != (other.fork.uid, other.fork.cut):
        cuts = " and ".join(f"checkpoint {s.fork.cut} of {s.fork.job!r} ({s.job})" for s in (one, other))
        raise ConfigError(f"the forks began from different cuts: {cuts}", hint="Fork both from the same snapshot.")
    for a in one.cuts:
        for b in other.cuts:
            read_a, read_b = limits_of(a, {}), limits_of(b, {})
            if read_a.keys() & read_b.keys() and not (not_reached(a, read_b) and not_reached(b, read_a)):
                return a, b
    return None


def _sinks(manifest: Manifest) -> set[str]:
    inner = {edge.name.partition(".")[0] for edge in manifest.edges}
    return {s.id for s in manifest.steps if not s.outputs and s.id not in inner}


def _compare_step(
    step: str,
    one: _Side,
    other: _Side,
    at: tuple[Manifest, Manifest],
    digits: int | None,
    ignore: Sequence[str],
    samples: int,
) -> StepComparison:
    for side, manifest in zip((one, other), at, strict=True):
        if step not in _sinks(manifest):
            return StepComparison(step=step, missing_in=side.job)
    found = [side.rows(step, manifest.checkpoint_id) for side, manifest in zip((one, other), at, strict=True)]
    known = next((rows for rows in found if rows is not None), None)
    if known is None:
        return StepComparison(step=step)
    first, second = (known.limit(0) if rows is None else rows for rows in found)
    types = [dict(rows.collect_schema()) for rows in (first, second)]
    own = [
        {n: t for n, t in mine.items() if n not in ignore and theirs.get(n) != t}
        for mine, theirs in (types, types[::-1])
    ]
    shared = [n for n in types[0] if n not in own[0] and n not in ignore]
    updating = OP in shared
    counted = [rows_of(rows.select(shared), updating=updating, digits=digits, ignore=()) for rows in (first, second)]
    sums = pl.collect_all([rows.select(pl.col(TIMES).sum()) for rows in counted])
    differing = differing_rows(*counted)
    surplus = differing[OF_ONE] - differing[OF_OTHER]
    shown = differing.head(samples).drop(PLACE)
    return StepComparison(
        step=step,
        rows_one=sums[0].item(),
        rows_other=sums[1].item(),
        only_one=int(surplus.clip(lower_bound=0).sum()),
        only_other=int((-surplus).clip(lower_bound=0).sum()),
        samples=[{"times_one": r.pop(OF_ONE), "times_other": r.pop(OF_OTHER), "row": r} for r in shown.to_dicts()],
        columns_one=[f"{n} {t}" for n, t in own[0].items()],
        columns_other=[f"{n} {t}" for n, t in own[1].items()],
    )
