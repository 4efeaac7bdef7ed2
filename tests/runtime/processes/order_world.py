"""Attempts of a job in one process: real subtasks, channels and sockets, and a coordinator of a few lines.

The test says whose turn it is, so that every run takes its inputs in another order.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cutwater as cw
from cutwater.config import JobConfig
from cutwater.connectors.base import Source
from cutwater.plan.compatibility import edge_records, step_records
from cutwater.plan.graph import Channel
from cutwater.plan.planner import make_plan
from cutwater.plan.recovery import subtasks_of
from cutwater.plan.upgrade import Upgrade
from cutwater.protocol.channel.items import Rows
from cutwater.protocol.job.recovery_scope import Division
from cutwater.protocol.wire import Peer
from cutwater.runtime.channels.connection import Connection
from cutwater.runtime.control import messages as c
from cutwater.runtime.driver.splits import Enumerator
from cutwater.runtime.worker.attempt import Attempt
from cutwater.runtime.worker.peers import ConnectedAttempt, Posted
from cutwater.storage.job_log import JobLog
from cutwater.storage.reading import load_snapshot
from cutwater.storage.snapshot.manifest import Manifest
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.store.local import LocalStore

__all__ = ["Generation", "Hub", "Lines", "Numbered", "differences"]

Lines = dict[Channel, dict[int, tuple[Any, ...]]]
"""Rows by channel and number."""


class _Worker:
    """What an attempt asks of the process that it lives in."""

    def __init__(self, hub: Hub, slot: int) -> None:
        self.args = SimpleNamespace(
            slot=slot, config=hub.config, job=hub.flow.name, uid=hub.log.state.uid, plan=hub.plan, store=hub.store,
            division=Division((subtasks_of(hub.plan),), (), hub.parallelism),
        )  # fmt: skip
        self.signal = SimpleNamespace(set=lambda: None)
        self.link = SimpleNamespace(send=self.sent)
        self.copies = None
        self.mailbox: deque[Any] = deque()
        self.messages: list[Any] = []

    @property
    def called(self) -> bool:
        return bool(self.mailbox)

    def sent(self, message: Any) -> None:
        self.messages.append(message)

    def post(self, message: Any) -> None:
        self.mailbox.append(message)

    def wants_something_else(self, region: int) -> bool:
        return False


class _Attempt(Attempt):
    """Its connections are there already."""

    def join(self, connections: dict[int, Connection]) -> None:
        self._connections = {(slot, 0): connection for slot, connection in connections.items()}

    def _connect(self) -> None:
        """Nobody is dialled."""


class Hub:
    """A flow, its plan, and the directory of its checkpoints."""

    def __init__(self, flow: cw.Dataflow, folder: Path, parallelism: int, **settings: Any) -> None:
        self.flow, self.parallelism = flow, parallelism
        self.config = JobConfig(parallelism=parallelism, **settings)
        self.plan = make_plan(flow, parallelism, 16)
        self.store = LocalStore.open(str(folder))
        self.log = JobLog(self.store, flow.name, num_retained=10)
        self.checkpoint: Any = None
        """The newest one."""
        self.next_id = 1

    def publish(self, checkpoint_id: int, attempt: int, acks: list[c.Ack]) -> None:
        shape = {"max_parallelism": 16, "parallelism": self.parallelism, "triggered_ms": 0, "completed_ms": 1}
        manifest = Manifest(
            self.flow.name, self.log.state.uid, checkpoint_id, attempt, "aligned", **shape,
            steps=step_records(self.plan),
            subtasks=sorted((s for a in acks for s in a.subtasks), key=lambda r: (r.vertex, r.subtask)),
            entries=[entry for a in acks for entry in a.entries],
            edges=edge_records(self.plan), back_edges=self.plan.back_edges,
        )  # fmt: skip
        publish(self.store, self.log, manifest)
        self.checkpoint = self.log.state.completed[-1]

    def splits(self, slot: int) -> dict[str, list[c.SplitAssignment]]:
        """As a coordinator deals them: those of the checkpoint, then what else there is."""
        records: dict[tuple[str, int], Any] = {}
        if self.checkpoint is not None:
            for record in load_snapshot(self.store, self.flow.name, self.checkpoint).subtasks:
                records |= {(step, record.subtask): found for step, found in record.splits.items()}
        result: dict[str, list[c.SplitAssignment]] = {}
        for step in self.plan.steps.values():
            if step.role == "source":
                source = cast(Source, step.spec)
                enumerator = Enumerator(step.id, source, self.parallelism)
                enumerator.assign(source.discover())
                result[step.id] = enumerator.again(slot, records.get((step.id, slot), []))
        return result


class Generation:
    """All subtasks, begun at the newest checkpoint."""

    def __init__(self, hub: Hub, seed: int, *, heard: bytes = b"", **settings: Any) -> None:
        self.hub, self.chance = hub, random.Random(seed)
        self.number = hub.log.begin_attempt("test")
        self.arrived: Lines = {}
        self.sent: Lines = {}
        slots = range(hub.parallelism)
        self.workers = [_Worker(hub, slot) for slot in slots]
        for worker in self.workers:
            worker.args.config = hub.config.replace(**settings)
        addresses = [("", 0) for _ in slots]
        checkpoint_id = hub.checkpoint.checkpoint_id if hub.checkpoint is not None else 0
        sources = [s.id for s in hub.plan.steps.values() if s.role == "source"]
        self.attempts = [
            _Attempt(
                c.Deploy(
                    self.number, [self.number for _ in slots], addresses, hub.checkpoint, hub.parallelism, None,
                    Upgrade(), hub.splits(slot), {}, sources, max(checkpoint_id, hub.next_id - 1),
                ),
                cast(Any, self.workers[slot]),
                cast(Any, self.workers[slot].args),
            )
            for slot in slots
        ]  # fmt: skip
        self._join()
        if heard:
            for attempt in self.attempts:
                assert attempt._logs is not None
                attempt._logs.peer(99).hear(heard)
        errors: list[Exception | None] = []
        threads = [threading.Thread(target=lambda a=a: errors.append(a.try_build())) for a in self.attempts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if error is not None:
                raise error
        for attempt in self.attempts:
            self._watch(attempt)

    def _join(self) -> None:
        ends: list[dict[int, Connection]] = [{} for _ in self.attempts]
        for a in range(len(ends)):
            for b in range(a):
                one, other = socket.socketpair()
                ends[a][b] = Connection(one, Peer("data", "job", b))
                ends[b][a] = Connection(other, Peer("data", "job", a))
        for attempt, connections in zip(self.attempts, ends, strict=True):
            attempt.join(connections)

    def _watch(self, attempt: Attempt) -> None:
        for subtask in attempt._subtasks:
            for channel in subtask.outputs:
                note(channel, self.sent)
            for channel in subtask.inputs:
                note_taken(channel, self.arrived)

    # --------------------------------------------------------------------------------------------------------- turns

    def run(self, turns: int) -> None:
        """So many turns, each of a worker that chance picks."""
        for _ in range(turns):
            self._turn(self.chance.choice(self.attempts))

    def run_until(self, condition: Any) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "did not happen within 60 s"
            self.run(10)

    def _turn(self, attempt: ConnectedAttempt) -> None:
        worker = self.workers[self.attempts.index(cast(Any, attempt))]
        while worker.mailbox:
            posted = worker.mailbox.popleft()
            attempt.take(posted.message if isinstance(posted, Posted) else posted)
        attempt.round(time.monotonic())

    def take_checkpoint(self, complete: bool = True) -> int:
        """Returns its number."""
        checkpoint_id = self.hub.next_id
        self.hub.next_id += 1
        for attempt in self.attempts:
            attempt.take(c.Trigger(self.number, checkpoint_id, False))

        def acks() -> list[c.Ack]:
            found = [m for w in self.workers for m in w.messages if isinstance(m, c.Ack)]
            return [ack for ack in found if ack.checkpoint_id == checkpoint_id]

        self.run_until(lambda: len(acks()) == len(self.workers))
        if complete:
            self.hub.publish(checkpoint_id, self.number, acks())
            told: Any = c.CompleteNotice(self.number, checkpoint_id, False)
        else:
            told = c.AbortNotice(self.number, checkpoint_id, checkpoint_id - 1)
        for attempt in self.attempts:
            attempt.take(told)
        return checkpoint_id

    @property
    def following(self) -> bool:
        return any(attempt.following for attempt in self.attempts)

    def known_to(self, slot: int) -> bytes:
        """All that this worker knows."""
        order = self.attempts[slot]._logs
        assert order is not None
        return order.peer(98).news()

    def end(self) -> None:
        for attempt in self.attempts:
            attempt.close()


def note(channel: Any, lines: Lines) -> None:
    """Write down all rows that leave through a channel."""
    rows = lines.setdefault(channel.key, {})
    before: Any = None

    def send(item: Any) -> None:
        if type(item) is Rows:
            keep(rows, item)
        before(item)

    before = channel.send_through(send)


def note_taken(channel: Any, lines: Lines) -> None:
    """Write down all rows that are taken from a channel, by a subclass of its own."""
    rows = lines.setdefault(channel.key, {})
    kind = type(channel)

    class Noted(kind):  # type: ignore[misc, valid-type]
        __slots__ = ()

        def take(self, max_rows: int) -> Any:
            item = super().take(max_rows)
            if type(item) is Rows:
                keep(rows, item)
            return item

    channel.__class__ = Noted


def keep(rows: dict[int, tuple[Any, ...]], item: Rows) -> None:
    for place, row in enumerate(item.batch.to_pylist()):
        rows[item.first_row + place] = tuple(row.values())


class Numbered(cw.ProcessFunction):
    seen = cw.ValueState("long")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        self.seen.value = (self.seen.value or 0) + 1
        yield {"k": row["k"], "n": self.seen.value}


def differences(before: Lines, after: Lines, mine: Callable[[Channel], bool]) -> list[Any]:
    """Rows that came again under their number and are others."""
    return [
        (key, number, row, after[key][number])
        for key, rows in before.items()
        if mine(key)
        for number, row in rows.items()
        if number in after.get(key, {}) and after[key][number] != row
    ]
