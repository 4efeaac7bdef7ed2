"""What workers tell each other of determinant logs: whoever holds what depends on a choice knows the choice."""

from __future__ import annotations

import random
import threading

import pytest

from cutwater.errors import InvariantError, WireError
from cutwater.runtime.control.determinant_logs import DeterminantLogs, PeerDeterminants


class Workers:
    """Several workers, each with subtask 0 and a connection to each other one."""

    def __init__(self, count: int) -> None:
        self.news = [DeterminantLogs() for _ in range(count)]
        self.lines: dict[tuple[int, int], PeerDeterminants] = {}
        for a in range(count):
            for b in range(count):
                if a != b:
                    self.lines[a, b] = self.news[a].peer(b)
        for slot, news in enumerate(self.news):
            assert news.begin([(0, slot)], 0) == {(0, slot): b""}

    def tell(self, a: int, b: int) -> bytes:
        data = self.lines[a, b].news()
        self.lines[b, a].hear(data)
        return data

    def log(self, at: int, of: int, checkpoint_id: int = 0) -> bytes:
        return self.news[at].log_of((0, of), checkpoint_id)


def test_news_are_passed_on_and_told_once() -> None:
    workers = Workers(3)
    workers.news[0].append((0, 0), b"abc")
    workers.tell(0, 1)
    workers.tell(1, 2)
    assert workers.log(2, of=0) == b"abc"
    assert workers.tell(0, 1) == b""
    assert b"abc" not in workers.tell(1, 0)
    workers.news[0].append((0, 0), b"de")
    assert b"abc" not in workers.tell(0, 1)
    assert workers.log(1, of=0) == b"abcde"


def test_any_order_of_telling_and_trimming_leaves_the_same_log() -> None:
    """Against a model: what a worker knows is a prefix of the log, from the newest completed mark that it knows on."""
    chance = random.Random(5)
    workers, logs = Workers(4), [bytearray() for _ in range(4)]
    marks: list[dict[int, int]] = [{0: 0} for _ in range(4)]
    depends = [[0] * 4 for _ in range(4)]
    completed, newest = 0, 0
    for _ in range(3_000):
        what, a, b = chance.random(), chance.randrange(4), chance.randrange(4)
        if what < 0.5 and a != b:
            workers.tell(a, b)
            depends[b] = [max(x, y) for x, y in zip(depends[a], depends[b], strict=True)]
        elif what < 0.9:
            entry = chance.randbytes(chance.randint(1, 9))
            workers.news[a].append((0, a), entry)
            logs[a] += entry
            depends[a][a] = len(logs[a])
        elif what < 0.95:
            newest += 1
            for slot, log in enumerate(logs):
                log += b"!"
                workers.news[slot].mark((0, slot), newest, b"!")
                marks[slot][newest] = len(log)
                depends[slot][slot] = len(log)
        else:
            completed = newest
            for slot in chance.sample(range(4), chance.randint(1, 4)):
                workers.news[slot].completed(completed)
        for of, log in enumerate(logs):
            since = marks[of][completed]
            if depends[a][of] >= since:
                assert workers.log(a, of, completed) == bytes(log[since : depends[a][of]])
    assert completed > 10


def test_a_replacement_follows_what_any_survivor_knows_and_is_free_after_it() -> None:
    workers = Workers(3)
    workers.news[0].append((0, 0), b"abc")
    workers.tell(0, 1)
    workers.news[0].append((0, 0), b"def")
    workers.tell(0, 2)
    fresh = DeterminantLogs()
    for survivor in (1, 2):
        fresh.peer(survivor).hear(workers.news[survivor].peer(0).news())
    assert fresh.await_first({1, 2}, lambda: None, 0.0)
    assert fresh.begin([(0, 0)], 0) == {(0, 0): b"abcdef"}
    fresh.append((0, 0), b"xyz")
    line = workers.news[1].peer(0)
    line.news()
    line.hear(fresh.peer(1).news())
    assert workers.log(1, of=0) == b"abcdefxyz"


def test_where_nobody_knows_of_the_freeze_the_log_goes_on_behind_all_that_anybody_heard() -> None:
    workers = Workers(2)
    workers.news[0].append((0, 0), b"abc")
    workers.tell(0, 1)
    workers.news[0].append((0, 0), b"de")
    workers.news[0].mark((0, 0), 4, b"!")  # and dies before it says so
    workers.news[1].completed(4)
    fresh = DeterminantLogs(4)
    fresh.peer(1).hear(workers.news[1].peer(0).news())
    assert fresh.begin([(0, 0)], 4) == {(0, 0): b""}
    fresh.append((0, 0), b"xyz")
    workers.news[1].peer(0).hear(fresh.peer(1).news())
    assert workers.log(1, of=0, checkpoint_id=4) == b"xyz"


def test_choices_that_a_living_subtask_has_not_made_are_an_error() -> None:
    workers = Workers(2)
    ghost = DeterminantLogs()
    ghost.begin([(0, 0)], 0)
    ghost.append((0, 0), b"ghost")
    with pytest.raises(InvariantError, match="has not made"):
        workers.lines[0, 1].hear(ghost.peer(0).news())


def test_damaged_news_are_an_error() -> None:
    workers = Workers(2)
    workers.news[0].append((0, 0), b"abcdef")
    data = workers.lines[0, 1].news()
    with pytest.raises(WireError, match="end within"):
        workers.lines[1, 0].hear(data[:6])


def test_nobody_waits_for_ever_for_the_first_news() -> None:
    news, asked = DeterminantLogs(), []
    news.peer(1).hear(b"")
    assert not news.await_first({1, 2}, lambda: asked.append(1), 0.1)
    assert asked
    thread = threading.Thread(target=lambda: news.peer(2).hear(b""))
    thread.start()
    assert news.await_first({1, 2}, lambda: None, 20.0)
    thread.join()


def test_a_peer_is_told_only_of_logs_that_it_can_depend_on() -> None:
    here, there = DeterminantLogs(), DeterminantLogs()
    here.begin([(0, 0), (1, 0)], 0)
    line, answer = here.peer(1, concern=frozenset({(0, 0)})), there.peer(0)
    here.append((0, 0), b"abc")
    here.append((1, 0), b"secret")
    answer.hear(line.news())
    here.append((1, 0), b"more")
    assert line.news() == b""
    assert there.log_of((0, 0), 0) == b"abc"
    assert there.log_of((1, 0), 0) == b""
