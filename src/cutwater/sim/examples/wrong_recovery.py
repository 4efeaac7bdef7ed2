"""Ways of dropping what comes twice after a partial rollback, two of them wrong."""

from __future__ import annotations

import random

from cutwater.sim.examples.stage import Stage
from cutwater.trace.checker import check
from cutwater.trace.result import CheckResult

FRAME_ROWS_MAX = 4


def replay_unlogged(seed: int, rows: int = 6, before_crash: int = 7) -> Stage:
    """Two sources feed a count; it dies, and takes the same rows again in another order."""
    return _replay(seed, rows, before_crash, logged=False)


def replay_logged(seed: int, rows: int = 6, before_crash: int = 7) -> Stage:
    """The same with a determinant log: what was taken before the crash is taken again in the same order."""
    return _replay(seed, rows, before_crash, logged=True)


def _replay(seed: int, rows: int, before_crash: int, *, logged: bool) -> Stage:
    rng = random.Random(seed)
    links = [("a", "a", "count"), ("b", "b", "count"), ("out", "count", "sink")]
    how = "the order was logged" if logged else "the order was not logged"
    stage = Stage(f"The count goes back, the sink does not; {how}", ("a", "b", "count", "sink"), links, machine=None)
    _send_all(stage, rows)
    order = [_count(stage, rng) for _ in range(before_crash)]
    seen = [stage.take("out") for _ in range(before_crash)]
    stage.crash("count")
    stage.go_back(("a", "b", "count"))
    _send_all(stage, rows)
    for i in range(2 * rows):
        _count(stage, rng, order[i] if logged and i < len(order) else None)
    for _ in range(before_crash):
        stage.queues["out"].popleft()  # dropped by their numbers: they have been seen
    seen += [stage.take("out") for _ in range(2 * rows - before_crash)]
    _end(stage, "sink", [row.value.partition("#")[0] for row in seen if row])
    return stage


def _send_all(stage: Stage, rows: int) -> None:
    for i in range(rows):
        for source in ("a", "b"):
            stage.send(source, source, f"{source}{i}")


def _count(stage: Stage, rng: random.Random, channel: str | None = None) -> str:
    """The count takes a row from one of its inputs, and says which number it has."""
    if channel is None:
        channel = rng.choice([c for c in ("a", "b") if stage.queues[c]])
    number = int(stage.states["count"] or 0) + 1
    row = stage.head(channel)
    stage.take(channel, state=str(number), send=[("out", f"{row.value if row else ''}#{number}")])
    return channel


def _end(stage: Stage, sink: str, output: list[str]) -> None:
    for process in stage.header.processes:
        stage.cut(process, 1)
    stage.finish(1)
    stage.commit(sink, 1, output)


def judge_order(stage: Stage, rows: int = 6) -> CheckResult:
    """Every row of both sources is committed once."""
    return check(stage.trace(), oracle=[f"{source}{i}" for source in ("a", "b") for i in range(rows)], drained=True)


def by_frame_number(seed: int, rows: int = 20) -> Stage:
    """The receiver drops as many frames as it has seen; frames are cut differently when they come again."""
    return _frames(seed, rows, by_row=False)


def by_row_number(seed: int, rows: int = 20) -> Stage:
    """The receiver drops, and slices, by the number of the row."""
    return _frames(seed, rows, by_row=True)


def _frames(seed: int, rows: int, *, by_row: bool) -> Stage:
    rng = random.Random(seed)
    what = "rows" if by_row else "frames"
    stage = Stage(f"Dropping by the number of {what}", ("step", "sink"), [("c", "step", "sink")], machine=None)
    taken: list[str] = []
    frames = _send_frames(stage, rng, rows)
    seen = frames[: len(frames) // 2]
    for frame in seen:
        taken += [row.value for row in stage.take_several("c", frame)]
    stage.crash("step")
    stage.go_back(("step",))
    again = _send_frames(stage, rng, rows)
    for _ in range(sum(seen) if by_row else sum(again[: len(seen)])):
        stage.queues["c"].popleft()
    for frame in again[len(seen) :]:
        if stage.queues["c"]:
            taken += [row.value for row in stage.take_several("c", min(frame, len(stage.queues["c"])))]
    if stage.queues["c"]:
        taken += [row.value for row in stage.take_several("c", len(stage.queues["c"]))]
    _end(stage, "sink", taken)
    return stage


def _send_frames(stage: Stage, rng: random.Random, rows: int) -> list[int]:
    """How many rows each frame has."""
    frames: list[int] = []
    while sum(frames) < rows:
        frames.append(min(rng.randint(1, FRAME_ROWS_MAX), rows - sum(frames)))
        first = sum(frames) - frames[-1]
        stage.send_several("step", "c", [f"r{first + i}" for i in range(frames[-1])])
    return frames


def judge_frames(stage: Stage, rows: int = 20) -> CheckResult:
    """Every row is committed once."""
    return check(stage.trace(), oracle=[f"r{i}" for i in range(rows)])
