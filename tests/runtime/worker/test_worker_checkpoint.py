"""An abort leaves nothing of a checkpoint behind on the worker, in whichever stage it comes."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from cutwater.data.time import MIN_WATERMARK
from cutwater.operators.base import Operator, Outputs
from cutwater.plan.graph import Channel
from cutwater.protocol.channel.items import Barrier, Item, Rows
from cutwater.protocol.channel.receiving import ReceivingEnd
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.loop import SubtaskLoop
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.watermarks import WatermarkMerger
from cutwater.runtime.chains.chain import Chain, EdgeOut, Node, ProcessingClock
from cutwater.runtime.channels.output import OutputChannel
from cutwater.runtime.control import messages as c
from cutwater.runtime.worker.attempt import Attempt
from cutwater.runtime.worker.snapshots import CheckpointStage, SnapshotService, WorkerCheckpoints, Written
from cutwater.runtime.worker.subtask import Subtask, SubtaskParts
from cutwater.state.segments import FrozenSegments, Segment
from cutwater.storage.snapshot.data_file import Continued
from cutwater.storage.store.local import LocalStore

ID = 7_654_321
"""A number that nothing else has."""
WAIT_S = 20.0
SCHEMA = pa.schema([("n", pa.int64())])
ROWS = Rows(pa.record_batch({"n": [1, 2, 3]}), 0, MIN_WATERMARK)


class _Keeps(Operator):
    """Its state can be written when it is allowed."""

    def __init__(self, allowed: threading.Event, broken: bool) -> None:
        self.allowed, self.broken = allowed, broken
        self.frozen = self.released = 0

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        return [(0, batch)]

    def freeze(self, checkpoint_id: int) -> Any:
        def make() -> Iterator[Segment]:
            assert self.allowed.wait(WAIT_S)
            assert not self.broken
            yield Segment("t", "base", pa.record_batch({"n": list(range(1_000))}))

        self.frozen += 1
        frozen = FrozenSegments(make)
        release = frozen.release

        def count() -> None:
            release()
            self.released += 1

        frozen.release = count  # type: ignore[method-assign]
        return frozen


class _World:
    """Two subtasks with two inputs each in an attempt of a worker that is none, and a real snapshot thread."""

    def __init__(self, folder: Path, protocol: str = "unaligned", *, broken: bool = False, loop: bool = False) -> None:
        self.sent: list[Any] = []
        self.posted: deque[Any] = deque()
        self.allowed, self.store = threading.Event(), LocalStore.open(folder)
        self.attempt: Any = object.__new__(Attempt)
        worker = SimpleNamespace(called=False, link=SimpleNamespace(send=self.sent.append))
        self.attempt._worker, self.attempt._config = worker, SimpleNamespace(protocol=protocol)
        self.attempt.number, self.attempt.region, self.attempt._logs = 1, 0, None
        self.attempt._copies = self.attempt._to_coordinator = None
        self.attempt._checkpoints = WorkerCheckpoints()
        self.operators = [_Keeps(self.allowed, broken) for _ in range(2)]
        self.inputs: list[list[ReceivingEnd]] = []
        self.attempt._subtasks = [self._subtask(n, protocol, loop) for n in range(2)]
        self.attempt._by_key = {subtask.key: subtask for subtask in self.attempt._subtasks}
        settings: Any = {"attempt": 1, "writer": 0, "writers": 1, "subtasks": 2, "inline_threshold_bytes": 100}
        self.attempt._snapshots = SnapshotService(
            self.store, "job", **settings, incremental=True, continued=2, restored={}, done=self.posted.append
        )

    def _subtask(self, number: int, protocol: str, loop: bool) -> Subtask:
        inputs = [ReceivingEnd(Channel(0, source, number), 8) for source in range(2)]
        output = OutputChannel(Channel(1, number, 0), SCHEMA, lambda item: None, credit=0)
        out = EdgeOut((output,), partitioner=None, broadcast=True, schema=SCHEMA)
        keys = [channel.key for channel in inputs]
        self.inputs.append(inputs)
        back = frozenset(keys[1:]) if loop else frozenset[Channel]()
        parts = SubtaskParts(
            key=(1, number),
            name="keeps",
            incarnation=1,
            inputs=inputs,
            input_numbers=[0, 0],
            chain=Chain([Node(("keeps",), self.operators[number], [[out]])], [out]),
            clock=ProcessingClock(),
            source=None,
            sinks=[],
            edges=dict.fromkeys([*keys, output.key], cast(Any, SimpleNamespace(source_step="a", target_step="b"))),
            back_edges=back,
            loop_inputs=back,
            loop_outputs=frozenset(),
            key_groups=range(1),
            aligned_timeout_ms=1_000.0,
            spill=False,
        )
        machine = SubtaskMachine("keeps", keys, protocol=PROTOCOLS[protocol], back_edges=back, loop_inputs=back)
        merger = WatermarkMerger(keys, back, back)
        return Subtask(parts, machine, SubtaskLoop(machine, keys, 0.0, 100), merger, self.attempt, 0.0)

    def put(self, input: int, item: Item, only: int | None = None) -> None:
        for number, subtask in enumerate(self.attempt._subtasks):
            if only is None or number == only:
                self.inputs[number][input].put(item)
                subtask.round(time.monotonic())

    def late(self) -> None:
        """The alignment takes too long."""
        for subtask in self.attempt._subtasks:
            subtask.round(time.monotonic() + 10)
            subtask.round(time.monotonic())

    def take_written(self) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not self.posted:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        written = self.posted.popleft()
        assert isinstance(written, Written)
        self.attempt.take(written)

    def settle(self, done: Callable[[], bool]) -> None:
        """What was under way comes to its end: the thread, and what it says."""
        self.allowed.set()
        deadline_s = time.monotonic() + WAIT_S
        while not done() and time.monotonic() < deadline_s:
            while self.posted:
                self.attempt.take(self.posted.popleft())
            for subtask in self.attempt._subtasks:
                subtask.round(time.monotonic() + 20)
            gc.collect()

    def barriers(self, *inputs: int, **kind: bool) -> None:
        for input in inputs:
            self.put(input, Barrier(ID, **kind))


def _aligning(world: _World) -> None:
    world.barriers(0)


def _barrier_waits_in_the_output(world: _World) -> None:
    world.put(0, ROWS)
    world.barriers(0, 1)


def _recording(world: _World) -> None:
    world.barriers(0)
    world.late()
    world.put(1, ROWS)
    world.attempt._subtasks[0].round(time.monotonic())
    assert world.inputs[0][1].recording


def _overtaken(world: _World) -> None:
    world.put(0, ROWS)
    world.barriers(0)
    world.late()


def _one_subtask_is_frozen(world: _World) -> None:
    world.put(0, Barrier(ID), only=0)
    world.put(1, Barrier(ID), only=0)
    assert world.attempt._checkpoints[ID].handed_over == 1


def _writing(world: _World) -> None:
    world.barriers(0, 1)
    deadline_s = time.monotonic() + WAIT_S
    while world.attempt._checkpoints[ID].part is None:
        assert time.monotonic() < deadline_s


def _written_and_not_acknowledged(world: _World) -> None:
    world.allowed.set()
    world.put(0, ROWS)
    world.barriers(0, 1)  # its barriers may still overtake rows: it is known only later whether there are logs
    world.take_written()
    assert world.attempt._checkpoints[ID].written


def _written_and_nobody_knows(world: _World) -> None:
    world.allowed.set()
    world.barriers(0, 1)
    deadline_s = time.monotonic() + WAIT_S
    while not world.posted:
        assert time.monotonic() < deadline_s


def _acknowledged(world: _World) -> None:
    world.allowed.set()
    world.barriers(0, 1)
    world.take_written()
    assert world.attempt._checkpoints[ID].stage is CheckpointStage.ACKNOWLEDGED
    assert isinstance(world.sent[-1], c.Ack)


def _savepoint_without_a_folder(world: _World) -> None:
    world.barriers(0, 1, savepoint=True)
    assert len(world.attempt._checkpoints[ID].homeless) == 2


def _savepoint_that_is_written(world: _World) -> None:
    world.attempt.take(c.Trigger(1, ID, False, False, str(world.store.root / "save")))
    world.barriers(0, 1, savepoint=True)


def _in_a_loop(world: _World) -> None:
    world.barriers(0)


def _probe(world: _World) -> None:
    world.barriers(0, probe=True)


def _write_failed(world: _World) -> None:
    world.allowed.set()
    world.barriers(0, 1)
    world.take_written()
    assert world.attempt._checkpoints[ID].error is not None
    assert isinstance(world.sent[-1], c.Decline)


def _declined_by_one(world: _World) -> None:
    """A newer barrier came where this one is missing; its neighbour goes on and freezes."""
    world.put(0, Barrier(ID), only=0)
    world.put(1, Barrier(ID), only=0)
    world.put(0, Barrier(ID), only=1)
    world.put(1, Barrier(ID + 1), only=1)
    assert isinstance(world.sent[-1], c.Decline)


STAGES: list[tuple[Callable[[_World], None], dict[str, Any]]] = [
    (_aligning, {}),
    (_barrier_waits_in_the_output, {}),
    (_recording, {}),
    (_overtaken, {}),
    (_one_subtask_is_frozen, {}),
    (_writing, {}),
    (_writing, {"protocol": "aligned"}),
    (_writing, {"protocol": "synchronous"}),
    (_written_and_not_acknowledged, {}),
    (_written_and_nobody_knows, {"protocol": "aligned"}),
    (_acknowledged, {"protocol": "aligned"}),
    (_savepoint_without_a_folder, {}),
    (_savepoint_that_is_written, {}),
    (_in_a_loop, {"protocol": "aligned", "loop": True}),
    (_probe, {"protocol": "aligned", "loop": True}),
    (_write_failed, {"broken": True, "protocol": "aligned"}),
    (_declined_by_one, {"protocol": "aligned"}),
]

DURABLE = (_written_and_not_acknowledged, _written_and_nobody_knows, _acknowledged)


@pytest.mark.parametrize(
    ("reach", "settings"), STAGES, ids=[f"{reach.__name__[1:]}-{settings}" for reach, settings in STAGES]
)
def test_an_abort_in_any_stage_leaves_nothing_behind(
    tmp_path: Path, reach: Callable[[_World], None], settings: dict[str, Any]
) -> None:
    world = _World(tmp_path, **settings)
    try:
        reach(world)
        record = weakref.ref(world.attempt._checkpoints[ID])
        world.attempt.take(c.AbortNotice(1, ID, 0))
        assert ID not in world.attempt._checkpoints
        world.settle(lambda: record() is None)
        assert record() is None, gc.get_referrers(record())
        assert not list(_where(world.attempt))
        if reach not in DURABLE:  # their files are the coordinator's to delete
            assert world.store.list("") == []
        assert [o.released for o in world.operators] == [o.frozen for o in world.operators], "memory is given back"
    finally:
        world.allowed.set()
        world.attempt._snapshots.close(world.attempt._checkpoints.values())


@pytest.mark.parametrize("container", [dict, set, list], ids=lambda kind: kind.__name__)
def test_what_is_kept_beside_the_record_is_found(tmp_path: Path, container: type) -> None:
    """Planted: one more container by checkpoint, which an abort does not know of."""
    world = _World(tmp_path, protocol="aligned")
    _writing(world)
    world.attempt._subtasks[1]._seen = container({ID: None})
    world.attempt.take(c.AbortNotice(1, ID, 0))
    world.settle(lambda: not world.posted)
    assert [path[-2] for path in _where(world.attempt)] == ["_seen"]
    world.attempt._snapshots.close(())


_PASSED_OVER = SubtaskMachine, WatermarkMerger, Barrier, Continued, threading.Thread, str, bytes, pa.RecordBatch


def _where(root: Any) -> Iterator[list[Any]]:
    """Paths in an object to the number of the checkpoint.

    Passed over are the core, which remembers some that were aborted (A8), barriers that are still on their way, and the
    files that take turns in holding checkpoints.
    """
    seen: set[int] = set()

    def walk(value: Any, path: list[Any]) -> Iterator[list[Any]]:
        if type(value) is int:
            if value == ID:
                yield path
            return
        if isinstance(value, _PASSED_OVER) or callable(value):
            return
        if id(value) in seen or not _is_ours(value):
            return
        seen.add(id(value))
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from walk(key, [*path, key])
                yield from walk(inner, [*path, key])
        elif isinstance(value, list | tuple | set | frozenset | deque):
            for place, inner in enumerate(value):
                yield from walk(inner, [*path, place])
        else:
            names = [
                *getattr(value, "__dict__", ()),
                *(n for t in type(value).__mro__ for n in getattr(t, "__slots__", ())),
            ]
            for name in names:
                if hasattr(value, name):
                    yield from walk(getattr(value, name), [*path, name])

    yield from walk({name: value for name, value in vars(root).items() if name != "_worker"}, [])


def _is_ours(value: Any) -> bool:
    containers = Mapping, list, tuple, set, frozenset, deque
    return isinstance(value, containers) or type(value).__module__.startswith("cutwater")
