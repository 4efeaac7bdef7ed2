"""An exception in every hook in which a user's code runs: once, it costs a restart and no row; always, it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from faults import happens
from runtime_world import Gated, assert_ids, gated, open_gate, query

import cutwater as cw
from cutwater.connectors.base import Committer, Json, PreCommit, SinkContext, SinkWriter, SourceContext, Split
from cutwater.connectors.files.sink import FileSink
from cutwater.errors import CutwaterError

ROWS = 4_000
HOOKS = (
    *("source open", "source read", "source close"),
    *("open", "process", "timer", "close"),
    *("sink open", "sink restore", "sink write", "sink snapshot", "sink durable", "sink commit", "sink close"),
)


@dataclass(frozen=True)
class Fails:
    """Raises in some hooks, in each of them ``times`` times over all processes."""

    folder: Path
    hooks: tuple[str, ...]
    times: int = 1

    def __call__(self, hook: str) -> None:
        if hook in self.hooks and happens(self.folder / hook.replace(" ", "-"), self.times):
            raise ArithmeticError(f"broken hook: {hook}")


class Counts(cw.ProcessFunction):
    """Tells each row with its number within its key; the same once more by a timer."""

    seen = cw.ValueState("long")
    waiting = cw.ListState("long")

    def __init__(self, fails: Fails) -> None:
        self.fails = fails

    def open(self, ctx: cw.ProcessContext) -> None:
        self.fails("open")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        n = (self.seen.value or 0) + 1
        if n == 100:  # in the middle, after checkpoints
            self.fails("process")
        self.seen.value = n
        self.waiting.append(row["value"])
        ctx.timers.register_event(row["us"] + 1_000)
        yield {"eid": row["value"], "n": n}

    def on_timer(self, time: int, domain: str, ctx: cw.ProcessContext) -> None:
        self.fails("timer")
        for value in self.waiting:
            ctx.emit("late", {"eid": value})
        self.waiting.clear()

    def close(self) -> None:
        self.fails("close")


@dataclass(frozen=True)
class FailingSource(Gated):
    fails: Fails | None = None

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> Any:
        assert self.fails is not None
        self.fails("source open")
        return _FailingReader(super().open(split, position, ctx), self.fails)


class _FailingReader:
    def __init__(self, inner: Any, fails: Fails) -> None:
        self._inner, self._fails = inner, fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, max_rows: int) -> Any:
        self._fails("source read")
        return self._inner.read(max_rows)

    def close(self) -> None:
        self._inner.close()
        self._fails("source close")


@dataclass(frozen=True)
class FailingSink(FileSink):
    fails: Fails | None = None

    def bind(self, directory: str) -> FailingSink:
        return self

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> Any:
        assert self.fails is not None
        self.fails("sink restore" if restored else "sink open")
        return _FailingWriter(super().writer(schema, ctx, restored), self.fails)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> Any:
        return _FailingCommitter(super().committer(schema, job_uid, step), self.fails)


class _FailingWriter:
    def __init__(self, inner: SinkWriter, fails: Fails) -> None:
        self._inner, self._fails = inner, fails

    def write(self, batch: pa.RecordBatch) -> None:
        self._fails("sink write")
        self._inner.write(batch)

    def roll(self) -> None:
        self._inner.roll()

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        self._fails("sink snapshot")
        made = self._inner.pre_commit(checkpoint_id, final)

        def durable() -> PreCommit:
            self._fails("sink durable")
            return made()

        return durable

    def close(self) -> None:
        self._inner.close()
        self._fails("sink close")


class _FailingCommitter:
    def __init__(self, inner: Committer, fails: Fails | None) -> None:
        self._inner, self._fails = inner, fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        assert self._fails is not None
        self._fails("sink commit")
        self._inner.commit(checkpoint_id, handles)


def hooked(folder: Path, fails: Fails) -> cw.Dataflow:
    flow = cw.Dataflow("hooked")
    plain = gated(folder, ROWS, rate=8_000)
    source = FailingSource(**{field.name: getattr(plain, field.name) for field in fields(plain)}, fails=fails)
    rows = flow.read("in", source, event_time="timestamp", out_of_order="1s")
    keyed = rows.with_columns("key", key=pl.col("value") % 29, us=pl.col("timestamp").cast(pl.Int64)).key_by("key")
    made = keyed.process("count", Counts(fails), "eid long, n long", side={"late": "eid long"})
    made.write("out", FailingSink(str(folder / "out"), roll_rows=1_500, fails=fails))
    made.side("late").write("late", cw.files(str(folder / "late")))
    return flow


def failed(job: Any, hooks: tuple[str, ...]) -> list[str]:
    """The hooks that the job tells as reasons of restarts."""
    reasons = "\n".join(event.reason for event in job.status.failures)
    return [hook for hook in hooks if f"broken hook: {hook}" in reasons]


def assert_exact(folder: Path) -> None:
    assert_ids(folder / "out", ROWS)
    assert_ids(folder / "late", ROWS)
    wrong = query(
        "SELECT eid % 29 AS k, max(n), count(*) c FROM {out} GROUP BY k HAVING max(n) <> c", out=folder / "out"
    )
    assert not wrong, f"counts with gaps (key, highest, rows): {wrong}"


QUIET = ("close", "source close", "sink close")
"""They run when an attempt is over: what they raise must not hide why."""


def test_an_exception_in_every_hook_of_one_job(start, tmp_path: Path) -> None:
    open_gate(tmp_path)
    restart = {"strategy": "fixed_delay", "delay_ms": 0.0, "attempts": 100}
    job = start(hooked(tmp_path, Fails(tmp_path, HOOKS)), restart=restart)
    assert job.await_termination(60)
    assert {p.name.rpartition("-")[0] for p in tmp_path.glob("*-0")} >= {h.replace(" ", "-") for h in HOOKS}, "void"
    assert job.status.restarts >= 5, "several may come at once: the first is told"
    assert_exact(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_one_hook(start, tmp_path: Path, hook: str) -> None:
    hooks = (hook,) if hook not in (*QUIET, "sink restore") else (hook, "process")
    open_gate(tmp_path)
    job = start(hooked(tmp_path, Fails(tmp_path, hooks)))
    assert job.await_termination(30)
    assert job.status.restarts >= 1
    if hook not in QUIET:
        assert hook in failed(job, hooks)
    assert_exact(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("hook", [h for h in HOOKS if h not in (*QUIET, "sink restore")])
def test_a_hook_that_always_raises_ends_the_job_with_its_own_words(start, tmp_path: Path, hook: str) -> None:
    open_gate(tmp_path)
    restart = {"strategy": "fixed_delay", "delay_ms": 0.0, "attempts": 5}
    job = start(hooked(tmp_path, Fails(tmp_path, (hook,), times=10_000)), restart=restart)
    with pytest.raises(CutwaterError, match=f"broken hook: {hook}"):
        job.await_termination(30)
    assert job.status.outcome == "failed"
