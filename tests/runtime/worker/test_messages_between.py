"""Messages of and to workers: taken in the middle of a round, sent together; and a thread that is woken seldom."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from cutwater.protocol.wire import ControlDecoder
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.links import ControlLink
from cutwater.runtime.worker.attempt import Attempt
from cutwater.runtime.worker.commits import CommitService
from cutwater.runtime.worker.snapshots import FrozenSubtask, SnapshotService, WorkerCheckpoints, Written
from cutwater.runtime.worker.subtask import Subtask
from cutwater.state.segments import FrozenSegments, Segment
from cutwater.storage.snapshot.manifest import SubtaskRecord
from cutwater.storage.store.local import LocalStore

WAIT_S = 20.0


class Neighbour:
    """A subtask that always has work; messages come in the middle of some turns, at the end of others."""

    def __init__(self, name: str, worker: Any, did: list[str], called_in: str) -> None:
        self.name, self.worker, self.did, self.called_in = name, worker, did, called_in
        self.interrupted = False
        self.attended = 0

    source = None

    def attend(self, now_s: float) -> bool:
        """Nothing came for it."""
        self.attended += 1
        return False

    def round(self, now_s: float) -> bool:
        goes_on, self.interrupted = self.interrupted, self.name in self.called_in and not self.interrupted
        self.did.append(self.name.upper() if goes_on else self.name)
        self.worker.called = self.interrupted or self.name.upper() in self.called_in
        return True

    def flush_if_due(self, now_s: float) -> float:
        return float("inf")


@pytest.mark.parametrize(
    ("called_in", "rounds"),
    [
        ("", ["abc", "abc"]),
        ("a", ["a", "Abc", "a"]),
        ("b", ["ab", "Bc", "ab"]),
        ("abc", ["a", "Ab", "Bc", "C", "a"]),
        ("B", ["ab", "c", "ab"]),  # the turn was over all the same
    ],
)
def test_a_message_interrupts_a_turn_which_goes_on_before_the_neighbours(called_in: str, rounds: list[str]) -> None:
    did: list[str] = []
    worker = SimpleNamespace(called=False)
    attempt: Any = object.__new__(Attempt)
    attempt._commits = CommitService(lambda ended: None)
    attempt._worker, attempt._next, attempt._subtasks = worker, 0, [Neighbour(n, worker, did, called_in) for n in "abc"]
    attempt._behind, attempt._worked, attempt.rested = None, False, False
    for expected in rounds:
        worker.called = False
        assert attempt.round(0.0) == 0.0
        assert "".join(did) == expected
        did.clear()
    assert [n.attended for n in attempt._subtasks] == [len(rounds)] * 3, "what the coordinator wants waits for no turn"


class Lazy(Neighbour):
    """It works when it is asked first."""

    def round(self, now_s: float) -> bool:
        return super().round(now_s) and self.did.count(self.name) == 1

    def flush_idle(self) -> bool:
        return False

    def wait_s(self, now_s: float) -> float:
        return float("inf")


def test_a_worker_that_was_called_does_not_sleep_before_those_are_asked_again_who_worked_before() -> None:
    did: list[str] = []
    worker = SimpleNamespace(called=False)
    attempt: Any = object.__new__(Attempt)
    attempt._commits = CommitService(lambda ended: None)
    attempt._worker, attempt._next, attempt._worked, attempt._behind = worker, 0, False, None
    attempt.rested = False
    attempt._subtasks = [Lazy("a", worker, did, "A")]
    assert attempt.round(0.0) == 0.0, "it was called"
    worker.called, attempt._subtasks[0].called_in = False, ""
    assert attempt.round(0.0) == 0.0, "who has worked may have more to do"
    assert attempt.round(0.0) > 0.0


class Passing:
    """A subtask that passes on what it is handed, once it is flushed."""

    source = None
    interrupted = False

    def __init__(self, name: str, behind: Passing | None, attempt: Any, did: list[str], *, in_order: bool) -> None:
        self.name, self.behind, self.attempt, self.did, self.in_order = name, behind, attempt, did, in_order
        self.waiting = self.built = 0
        self.at_rest = False

    def attend(self, now_s: float) -> bool:
        return False

    def round(self, now_s: float) -> bool:
        self.did.append(self.name)
        taken, self.waiting, self.at_rest = self.waiting, 0, True
        self.built += taken
        return taken > 0

    def flush_idle(self) -> bool:
        sent, self.built = self.built, 0
        if sent and self.behind is not None:
            self.behind.waiting += sent
            if self.in_order:
                self.attempt._hand_down()
        return bool(sent)

    def flush_if_due(self, now_s: float) -> float:
        return float("inf")

    def wait_s(self, now_s: float) -> float:
        return float("inf")


@pytest.mark.parametrize(("rested", "rounds"), [(True, 1), (False, 7)])
def test_a_worker_that_had_nothing_to_do_is_done_after_one_round(rested: bool, rounds: int) -> None:
    """Rows go through all its subtasks in one round, and nobody is asked again; one that is busy gathers them."""
    did: list[str] = []
    attempt: Any = object.__new__(Attempt)
    attempt._commits = CommitService(lambda ended: None)
    attempt._worker, attempt._next, attempt._worked, attempt._behind = SimpleNamespace(called=False), 0, False, None
    attempt.rested = rested
    last = Passing("c", None, attempt, did, in_order=True)
    middle = Passing("b", last, attempt, did, in_order=True)
    first = Passing("a", middle, attempt, did, in_order=True)
    first.waiting, attempt._subtasks = 1, [first, middle, last]
    while attempt.round(0.0) == 0.0 and len(did) < 99:
        pass
    assert "".join(did) == "abc" * rounds
    assert [s.waiting + s.built for s in attempt._subtasks] == [0, 0, 0], "before it sleeps everything has left"


def test_what_is_handed_down_when_builders_are_due_is_taken_before_the_worker_sleeps() -> None:
    did: list[str] = []
    attempt: Any = object.__new__(Attempt)
    attempt._commits = CommitService(lambda ended: None)
    attempt._worker, attempt._next, attempt._worked, attempt._behind = SimpleNamespace(called=False), 0, False, None
    attempt.rested = False
    last = Passing("b", None, attempt, did, in_order=True)
    first = Passing("a", last, attempt, did, in_order=True)

    def due(now_s: float) -> float:
        first.flush_idle()
        return float("inf")

    first.flush_if_due, attempt._subtasks = due, [first, last]  # type: ignore[method-assign]
    first.built = 1
    assert attempt.round(0.0) == 0.0
    assert last.waiting == 1, "it is there for the next round"


class Turns:
    """A subtask whose batches cost as much as is said, with a worker that may call."""

    def __init__(self, cost_s: float) -> None:
        self.acted = 0
        self.called_at: tuple[int, ...] = ()
        self.events: list[Any] = []
        self.subtask: Any = object.__new__(Subtask)
        self.waiting = deque[Any]()
        self.subtask.core = self
        self.subtask.busy_s, self.subtask._round_s, self.subtask.interrupted = 0.0, 1.0, False
        self.subtask._port = SimpleNamespace(called=False)
        self.subtask.act = self._act
        self._cost_s = cost_s

    def tick(self, now_ms: float) -> None:
        """The core has nothing to look after."""

    @property
    def waits(self) -> bool:
        return bool(self.waiting)

    def _act(self, now_s: float) -> bool:
        if self.waiting:
            self.events.append(self.waiting.popleft())
            return True
        self.acted += 1
        self.subtask.busy_s += self._cost_s
        self.subtask._port.called = self.acted in self.called_at
        return True

    def turn(self) -> int:
        """Batches in the next turn, or the part of it until the worker is called."""
        before = self.acted
        assert self.subtask.round(0.0)
        return self.acted - before


@pytest.mark.parametrize(("cost_s", "whole"), [(0.0, 8), (0.3, 4)])
def test_a_turn_that_was_interrupted_is_as_long_as_any_other(cost_s: float, whole: int) -> None:
    world = Turns(cost_s)
    world.called_at = (1, 3, whole)
    assert [world.turn(), world.turn(), world.turn()] == [1, 2, whole - 3]
    assert not world.subtask.interrupted, "the worker might go to sleep before what it has to do: the turn is over"
    assert world.turn() == whole


def test_a_trigger_is_taken_at_once_and_rows_wait_for_the_turn() -> None:
    world = Turns(0.0)
    world.waiting.append("trigger")
    assert world.subtask.attend(0.0)
    assert (world.events, world.acted) == (["trigger"], 0)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def messages(sock: socket.socket, until: int) -> list[Any]:
    """The next so many messages."""
    decoder, found = ControlDecoder(), []
    sock.settimeout(WAIT_S)
    while len(found) < until:
        decoder.feed(sock.recv(1 << 16))
        while (body := decoder.next_message()) is not None:
            found.append(c.decode_from_worker(body))
    return found


def test_a_peer_that_does_not_read_holds_nobody_up(ends: tuple[socket.socket, socket.socket]) -> None:
    link = ControlLink(ends[0], lambda body: None, lambda reason: None, "test")
    link.start()
    texts = [f"{n} {'x' * 100_000}" for n in range(100)]  # far more than socket buffers hold
    for text in texts:
        link.send(c.Log("info", text))
    assert [message.message for message in messages(ends[1], len(texts))] == texts
    link.close()


def test_signs_of_life_come_whatever_the_loop_does(ends: tuple[socket.socket, socket.socket]) -> None:
    link = ControlLink(ends[0], lambda body: None, lambda reason: None, "test", heartbeat_s=0.01)
    link.start()
    assert messages(ends[1], 3) == [c.Heartbeat()] * 3
    link.close()


class Service:
    """A snapshot service of two subtasks, of which one has state."""

    def __init__(self, root: Any) -> None:
        self.written: list[Written] = []
        self.done = threading.Event()
        self.checkpoints = WorkerCheckpoints()
        self.service = SnapshotService(
            LocalStore.open(root),
            "job",
            attempt=1,
            writer=0,
            writers=1,
            subtasks=2,
            inline_threshold_bytes=1_000,
            incremental=False,
            continued=0,
            restored={},
            done=self._finished,
        )

    def _finished(self, written: Written) -> None:
        self.written.append(written)
        self.done.set()

    def submit(self, vertex: int, checkpoint_id: int, *, state: bool) -> None:
        segment = Segment("s", "base", pa.record_batch({"n": [1]}))
        states = [("step", FrozenSegments([segment]))] if state else []
        record = SubtaskRecord(vertex, 0, 1, "aligned")
        frozen = FrozenSubtask(checkpoint_id, record, states, [], 0.0, range(1))
        self.service.submit(self.checkpoints[checkpoint_id], frozen)

    def take(self) -> list[tuple[int, int]]:
        """Checkpoint and vertices of what is written next."""
        assert self.done.wait(WAIT_S)
        self.done.clear()
        (written,) = self.written
        self.written.clear()
        return [(written.checkpoint_id, record.vertex) for record in written.subtasks]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_part_without_state_waits_for_the_next_and_is_written_with_it(tmp_path: Any, order: tuple[int, int]) -> None:
    world = Service(tmp_path)
    for checkpoint_id in (1, 2):
        for vertex in order:
            world.submit(vertex, checkpoint_id, state=vertex == 1)
        assert world.take() == [(checkpoint_id, vertex) for vertex in order]
        world.service.completed(checkpoint_id)
    world.service.close(world.checkpoints.values())


def test_parts_without_any_state_are_written_once_all_are_there(tmp_path: Any) -> None:
    world = Service(tmp_path)
    world.submit(0, 1, state=False)
    assert not world.done.wait(0.05)
    assert world.checkpoints[1].part is None, "the thread was woken"
    world.submit(1, 1, state=False)
    assert world.take() == [(1, 0), (1, 1)]
    world.service.close(world.checkpoints.values())


def test_a_part_that_waits_goes_with_the_next_checkpoint_if_its_own_is_given_up(tmp_path: Any) -> None:
    world = Service(tmp_path)
    world.submit(0, 1, state=False)
    world.service.drop(world.checkpoints[1])
    world.submit(1, 1, state=True)  # too late: nobody waits for it
    for vertex in (0, 1):
        world.submit(vertex, 2, state=False)
    assert world.take() == [(2, 0), (2, 1)]
    world.service.close(world.checkpoints.values())
