"""The fence, proved by exhaustion: all interleavings of a few drivers at every store operation.

A driver is a plain function over a store.  It is run again and again against the answers it has had so far, until it
asks for one more operation; which driver's operation comes next is then tried in every order.  States are visited once
each.  Since a driver may be left waiting for ever, this covers a crash at every operation, too.

The oracle does not use the log's code: the *first* create of each number is what happened, in the order of numbers.
"""

from __future__ import annotations

import functools
import itertools
import json
import uuid
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from cutwater.errors import CorruptSnapshotError, CutwaterError, FencedError
from cutwater.storage import job_log as log_module
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import CheckpointCompleted
from cutwater.storage.store.seal import PLAIN
from memory_store import MemoryStore

KEEP = 2


class Pause(BaseException):
    """The driver wants an operation that has no answer yet."""

    def __init__(self, operation, args):
        self.operation, self.args_ = operation, args


class Replayed:
    """A store that answers from a history.  With ``torn_listing``, a folder is listed in two parts, as readdir does."""

    atomic_create = True
    seal = PLAIN

    def __init__(self, history, torn_listing):
        self.history, self.torn_listing, self.at = history, torn_listing, 0

    def _ask(self, operation, *args):
        if self.at == len(self.history):
            raise Pause(operation, args)
        answer = self.history[self.at]
        self.at += 1
        if isinstance(answer, Failed):
            raise answer.kind(answer.message)
        return answer

    def create(self, path, data):
        return self._ask("create", path, data)

    def read(self, path, offset=0, length=None):
        return self._ask("read", path)

    def delete_files(self, paths):
        for path in paths:
            self.delete(path)

    def delete(self, path):
        return self._ask("delete", path)

    def sweep(self, prefix=""):
        return 0

    def names(self, folder=""):
        if not self.torn_listing:
            return list(self._ask("names", folder))
        return sorted({*self._ask("even_names", folder), *self._ask("odd_names", folder)})


class Failed(NamedTuple):
    """An answer that is an error."""

    kind: type[CutwaterError]
    message: str


@functools.cache
def perform(files, operation, args):
    """One operation: the files after it, the answer, and the (number, content) of a log entry that it created."""
    store = MemoryStore()
    store.files = dict(files)
    try:
        if operation in ("even_names", "odd_names"):
            parity = int(operation == "odd_names")
            answer = tuple(n for n in store.names(*args) if sum(n.encode()) % 2 == parity)
        else:
            answer = getattr(store, operation)(*args)
    except CutwaterError as error:
        answer = Failed(type(error), error.message)
    created = None
    if operation == "create" and answer is True and args[0].endswith(".json"):
        created = (int(args[0][-17:-5]), args[1])
    return tuple(sorted(store.files.items())), tuple(answer) if isinstance(answer, list) else answer, created


def open_log(store):
    return JobLog(store, "j", clock_ms=lambda: 0, keep=KEEP)


def completed(log, checkpoint_id):
    return CheckpointCompleted(checkpoint_id, log.attempt, "d", "p", 0)


def publisher(name, ids, *, log=None):
    """A driver that publishes; returns the ids it believes in, and whether it was fenced."""

    def run(store, believed):
        mine = log(store) if log else open_log(store)
        try:
            if not log:
                mine.begin_attempt(name)
                believed.append(("began", mine.attempt, name))
            for checkpoint_id in ids:
                mine.append(completed(mine, max(checkpoint_id, mine.state.newest_id + 1)))
                believed.append(("completed", mine.state.newest_id, mine.attempt))
        except FencedError:
            believed.append(("fenced",))

    return run


def reader(times):
    def run(store, believed):
        for _ in range(times):
            state = open_log(store).read()
            believed.append(("read", state.attempt, state.newest_id))

    return run


def advance(program, name, history, torn_listing, monkeypatch):
    """Run a driver on its history: the operation it wants next (or ``None``), and what it believes by then."""
    counter = itertools.count()
    monkeypatch.setattr(log_module, "uuid", SimpleNamespace(uuid4=lambda: uuid.UUID(int=hash_of(name, next(counter)))))
    believed: list[tuple] = []
    try:
        program(Replayed(history, torn_listing), believed)
    except Pause as pause:
        return (pause.operation, pause.args_), tuple(believed)
    return None, tuple(believed)


def hash_of(name, number):
    return int.from_bytes(f"{name}{number}".encode(), "big")


def check(chain, beliefs):
    """No driver believes in anything that did not happen, and nothing happened after its attempt was over."""
    happened = []
    owner = 0
    for seq in sorted(chain):
        event = json.loads(chain[seq].partition(b"\n")[0])["event"]
        if event["type"] == "attempt_began":
            assert event["attempt"] == owner + 1, "attempts are unique and grow"
            owner = event["attempt"]
            happened.append(("began", owner, event["driver"]))
        elif event["type"] == "checkpoint_completed":
            assert event["attempt"] == owner, f"entry {seq}: attempt {event['attempt']} published after {owner} began"
            happened.append(("completed", event["checkpoint_id"], event["attempt"]))
    believed = [b for mine in beliefs for b in mine if b[0] in ("began", "completed")]
    assert len(set(believed)) == len(believed), "two drivers believe in the same event"
    assert set(believed) <= set(happened), "a driver believes in what never became part of the log"
    return owner, max([h[1] for h in happened if h[0] == "completed"], default=0)


def until_create(program, monkeypatch, torn_listing):
    """History of a driver that runs on an empty store and is paused before its first create."""
    history = ()
    while True:
        (operation, args), _ = advance(program, "d0", history, torn_listing, monkeypatch)
        if operation == "create":
            return history
        history = (*history, perform((), operation, args)[1])


def explore(programs, monkeypatch, *, files=(), chain=(), torn_listing=False, histories=None):
    """Visit all states; returns how many, and all beliefs that drivers ended with."""
    start = (tuple(sorted(files)), histories or tuple(() for _ in programs), tuple(chain))
    todo, seen, endings = [start], {start}, set()

    @functools.cache
    def driver(i, history):
        return advance(programs[i], f"d{i}", history, torn_listing, monkeypatch)

    @functools.cache
    def found_after_crash(files):
        store = MemoryStore()
        store.files = dict(files)
        state = open_log(store).read()
        return state.attempt, state.newest_id

    while todo:
        files, histories, chain = todo.pop()
        wanted, beliefs = zip(*itertools.starmap(driver, enumerate(histories)), strict=True)
        assert found_after_crash(files) == check(dict(chain), beliefs), "a new driver finds exactly what happened"
        if not any(wanted):
            endings.add(beliefs)
        for i, want in enumerate(wanted):
            if want is None:
                continue
            new_files, answer, created = perform(files, *want)
            new_chain = chain
            if created and created[0] not in dict(chain):
                new_chain = (*chain, created)
            new_histories = (*histories[:i], (*histories[i], answer), *histories[i + 1 :])
            # Of a driver that has ended, only what it believes matters.
            ended = [driver(k, h) for k, h in enumerate(new_histories)]
            key = (
                new_files,
                tuple(e if e[0] is None else h for e, h in zip(ended, new_histories, strict=True)),
                new_chain,
            )
            if key not in seen:
                seen.add(key)
                todo.append((new_files, new_histories, new_chain))
    return len(seen), endings


def prepared(attempts, published=0):
    """A log in which so many attempts began; each driver has the view it had then, the last one published meanwhile."""
    store = MemoryStore()
    chain = {}
    views = []

    def create(path, data):
        if path.endswith(".json"):
            chain.setdefault(int(path[-17:-5]), data)
        return MemoryStore.create(store, path, data)

    store.create = create
    for i in range(attempts):
        log = open_log(store)
        log.begin_attempt(f"old{i}")
        if i == attempts - 1:
            for n in range(published):
                log.append(completed(log, n + 1))
        views.append((log._known, log.attempt))

    def resumed(i):
        def make(replayed):
            log = open_log(replayed)
            log._known, log.attempt = views[i]
            return log

        return make

    return list(store.files.items()), tuple(chain.items()), resumed


TORN = pytest.mark.parametrize("torn_listing", [False, True], ids=["atomic listing", "torn listing"])


@TORN
def test_two_drivers_start_the_job_at_the_same_time(monkeypatch, torn_listing):
    programs = [publisher("d0", [1]), publisher("d1", [1])]
    visited, endings = explore(programs, monkeypatch, torn_listing=torn_listing)
    assert visited > 200
    assert any(("fenced",) in e[0] for e in endings)
    assert any(("fenced",) in e[1] for e in endings)
    assert all(e[0][-1] != ("fenced",) or e[1][-1] != ("fenced",) for e in endings), "one of them gets on"


@TORN
def test_paused_driver_against_its_successor_that_trims_the_log(monkeypatch, torn_listing):
    files, chain, resumed = prepared(1)
    programs = [publisher("d0", [1], log=resumed(0)), publisher("d1", [1] * 4)]
    visited, endings = explore(programs, monkeypatch, files=files, chain=chain, torn_listing=torn_listing)
    assert visited > 1_500
    assert {("fenced",) in e[0] for e in endings} == {True, False}


@TORN
def test_paused_first_starter_against_a_job_that_trims_its_beginning(monkeypatch, torn_listing):
    files, chain, resumed = prepared(1)
    late = publisher("d0", [])
    programs = [late, publisher("d1", [1] * 4, log=resumed(0))]
    histories = (until_create(late, monkeypatch, torn_listing), ())
    visited, endings = explore(
        programs, monkeypatch, files=files, chain=chain, torn_listing=torn_listing, histories=histories
    )
    assert visited > 300
    assert all(e[0] == (("began", 2, "d0"),) for e in endings)
    assert {("fenced",) in e[1] for e in endings} == {True, False}


def test_two_paused_drivers_at_neighbouring_numbers_against_a_third(monkeypatch):
    files, chain, resumed = prepared(3, published=1)
    programs = [
        publisher("d0", [1], log=resumed(0)),
        publisher("d1", [1], log=resumed(1)),
        publisher("d2", [1] * 2, log=resumed(2)),
    ]
    visited, endings = explore(programs, monkeypatch, files=files, chain=chain)
    assert visited > 1_000
    assert all(("fenced",) in e[0] for e in endings), "the oldest never gets through"


def test_a_late_entry_at_a_deleted_number_is_seen_and_harmless(monkeypatch):
    """The dangerous thing does happen in the explored space: a paused driver's create succeeds at a deleted number."""
    files, _, resumed = prepared(1)
    store = MemoryStore()
    store.files = dict(files)
    late = resumed(0)(store)
    owner = open_log(store)
    owner.begin_attempt("new")
    for n in range(9):
        owner.append(completed(owner, n + 1))
    number = late._known.entry.seq + 1
    assert f"j/log/{number:012d}.json" not in store.files
    with pytest.raises(FencedError, match="superseded by attempt 2 of new"):
        late.append(completed(late, 1))
    assert f"j/log/{number:012d}.json" in store.files
    assert open_log(store).read() == owner.state
    for n in range(9, 15):
        owner.append(completed(owner, n + 1))
    assert f"j/log/{number:012d}.json" not in store.files, "the next trim removes it"


@TORN
def test_a_reader_sees_a_state_that_was_true_however_the_log_is_trimmed(monkeypatch, torn_listing):
    files, chain, resumed = prepared(1, published=2)
    programs = [reader(2), publisher("d1", [1] * 4, log=resumed(0))]
    visited, endings = explore(programs, monkeypatch, files=files, chain=chain, torn_listing=torn_listing)
    assert visited > 100
    for (first, second), _ in endings:
        assert 2 <= first[2] <= second[2] <= 6


def test_the_alarm_works_without_the_predecessor_check(monkeypatch):
    """A log that believes every create lets two drivers publish: the exploration must find it."""
    monkeypatch.setattr(JobLog, "_never_used_before", lambda self: True)
    files, chain, resumed = prepared(1)
    programs = [publisher("d0", [1], log=resumed(0)), publisher("d1", [1] * 4)]
    with pytest.raises((AssertionError, CorruptSnapshotError)):
        explore(programs, monkeypatch, files=files, chain=chain)


def test_the_alarm_works_without_the_mark_of_the_first_trim(monkeypatch):
    real = JobLog._never_used_before
    monkeypatch.setattr(JobLog, "_never_used_before", lambda self: self._known is None or real(self))
    files, chain, resumed = prepared(1)
    late = publisher("d0", [])
    histories = (until_create(late, monkeypatch, False), ())
    with pytest.raises((AssertionError, CorruptSnapshotError)):
        explore(
            [late, publisher("d1", [1] * 4, log=resumed(0))], monkeypatch, files=files, chain=chain, histories=histories
        )


def test_the_alarm_works_for_downward_deletion(monkeypatch):
    real = JobLog._numbers
    monkeypatch.setattr(JobLog, "_numbers", lambda self: sorted(real(self), reverse=True))
    files, chain, resumed = prepared(2)
    programs = [publisher("d0", [1], log=resumed(1)), publisher("d1", [1] * 3)]
    with pytest.raises((AssertionError, CorruptSnapshotError)):
        explore(programs, monkeypatch, files=files, chain=chain)
