"""Windows in incremental checkpoints: what closes is deleted, and a restore is that of a full snapshot."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from keyed_world import opened, rescaled

from cutwater.operators.accumulators import Aggregate
from cutwater.operators.base import Operator
from cutwater.operators.keyed_table import KeyedTable
from cutwater.operators.window import WindowAggregateSpec
from cutwater.operators.window_kinds import TumblingWindow
from cutwater.state.segments import Segment
from cutwater.storage.chains import extended

SCHEMA = pa.schema([("k", pa.string()), ("t", pa.timestamp("us")), ("v", pa.int64())])
AGGREGATES = (Aggregate("n", "count"), Aggregate("most", "max", "v"))
SIZE_US = 10


def content(segments: list[Segment]) -> list[str]:
    """Rows of the windows and the watermarks, whatever the order."""
    batches = [(s.name, s.batch.to_pylist()) for s in segments]
    return sorted(f"{name} {sorted(row.items())}" for name, rows in batches for row in rows)


def snapshot_of(operators: list[Operator]) -> list[str]:
    frozen = [operator.freeze(99) for operator in operators]
    return content([segment for each in frozen for segment in each.segments()])


def run(seed: int) -> set[str]:
    """Checkpoints in sequence, each built on a random older one; returns the kinds of segments that came up."""
    dice = random.Random(seed)
    spec = WindowAggregateSpec(SCHEMA, ("k",), "t", TumblingWindow(SIZE_US), AGGREGATES, dice.choice([0, 7]))
    operator = opened(spec)
    chains: dict[int, list[Segment]] = {}
    base, now, kinds = 0, 0, set[str]()
    for checkpoint_id in range(1, 25):
        for _ in range(dice.randint(1, 3)):
            now += dice.randint(0, SIZE_US)
            rows = [
                {"k": "abcdefgh"[dice.randint(0, 7)], "t": max(0, now + dice.randint(-5, 60)), "v": dice.randint(0, 99)}
                for _ in range(dice.randint(1, 30))
            ]
            operator.process(0, pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
            operator.on_watermark(now)
            while operator.pending:
                operator.resume()
        frozen = operator.freeze(checkpoint_id)
        full = list(frozen.segments())
        changes = frozen.changes(base) if base else None
        chain = full if changes is None else extended(chains[base], list(changes))  # type: ignore[type-var]
        frozen.release()
        kinds |= {s.kind for s in chain}
        assert snapshot_of(rescaled(spec, chain, dice.randint(1, 3))) == content(full)
        chains[checkpoint_id] = chain
        if dice.random() < 0.6:
            base = checkpoint_id  # completed; else the next one builds on the same
    return kinds


def test_a_chain_restores_what_a_full_snapshot_does() -> None:
    assert set[str]().union(*(run(seed) for seed in range(12))) == {"base", "delta", "delete"}


@pytest.mark.parametrize("bug", ["delete", "touch"])
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Windows that closed are not deleted; that a window fired is no change."""
    upsert, touch = KeyedTable.upsert, KeyedTable.touch
    if bug == "touch":  # only rows count as changes
        monkeypatch.setattr(KeyedTable, "upsert", lambda self, keys: _touched(self, upsert(self, keys), touch))
    monkeypatch.setattr(KeyedTable, bug, lambda self, slots: None)
    with pytest.raises(AssertionError):
        for seed in range(12):
            run(seed)


def _touched(table: KeyedTable, slots, touch):
    touch(table, slots)
    return slots
