"""Requests from another process: performed once, by the owner, or not at all."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from cutwater.errors import CutwaterError, StorageError
from cutwater.runtime.driver.requests import Request, send, watch
from cutwater.storage.job_log import JobLog
from cutwater.storage.store.local import LocalStore
from memory_store import MemoryStore

POLL_S = 0.01


class Driver:
    """Owns the job and notes what it was asked for."""

    def __init__(self, store) -> None:
        self.store, self.done = store, []
        self.log = JobLog(store, "job")
        self.attempt = self.log.begin_attempt("driver")
        self.ended = threading.Event()

    def perform(self, what: str):
        def action(request: Request) -> str | None:
            self.done.append(what)
            self.ended.set()
            return f"{request.savepoint}/made" if request.savepoint else None

        return action

    @contextmanager
    def watching(self, **changes):
        actions = {kind: self.perform(kind) for kind in ("cancel", "stop", "savepoint")}
        actions["rescale"] = lambda request: self.perform(f"rescale {request.parallelism}")(request)
        actions |= changes
        close = watch(self.store, "job", attempt=lambda: self.attempt, actions=actions, ended=self.ended, poll_s=POLL_S)
        try:
            yield close
        finally:
            close()


@pytest.fixture(params=["memory", "local"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path)


@pytest.fixture
def driver(store):
    return Driver(store)


def control(store) -> list[str]:
    return store.names("job/control")


@pytest.mark.parametrize("kind", ["cancel", "stop", "savepoint"])
def test_a_request_is_performed_and_answered(driver, kind):
    with driver.watching():
        answer = send(driver.store, "job", kind, savepoint="/there" if kind == "savepoint" else "", claim_s=10)
    assert answer is not None
    assert answer.ok
    assert answer.savepoint == ("/there/made" if kind == "savepoint" else "")
    assert driver.done == [kind]
    assert control(driver.store) == [], "the sender removes its files"


def test_a_request_that_fails_says_why(driver):
    def refuse(_: Request) -> None:
        raise CutwaterError("the disk is full")

    with driver.watching(stop=refuse):
        answer = send(driver.store, "job", "stop", claim_s=10)
        assert answer is not None
        assert (answer.ok, answer.detail) == (False, "the disk is full")
        assert send(driver.store, "job", "cancel", claim_s=10).ok, "the driver still listens"


def test_without_a_driver_the_request_is_withdrawn_and_never_performed_later(driver):
    assert send(driver.store, "job", "cancel", claim_s=0.0) is None
    assert control(driver.store) == []
    with driver.watching():
        pass
    assert driver.done == []


def test_requests_from_before_a_driver_are_not_for_it(driver):
    driver.store.create("job/control/old-request.json", b'{"kind":"cancel","sender":"x","time_ms":1}')
    with driver.watching():
        assert send(driver.store, "job", "stop", claim_s=10).ok
    assert driver.done == ["stop"]
    assert control(driver.store) == ["old-request.json"]


def test_a_driver_that_lost_the_job_does_not_answer_for_its_successor(driver):
    successor = Driver(driver.store)
    with driver.watching():
        with successor.watching():
            assert send(driver.store, "job", "cancel", claim_s=10).ok
        assert driver.done == []
        assert send(driver.store, "job", "cancel", claim_s=0.2) is None
    assert (driver.done, successor.done) == ([], ["cancel"])


def test_of_two_watchers_only_one_performs(driver):
    driver.ended = threading.Event()
    both = []

    def action(_: Request) -> None:
        both.append(1)

    with driver.watching(stop=action), driver.watching(stop=action):
        for _ in range(5):
            assert send(driver.store, "job", "stop", claim_s=10).ok
    assert len(both) == 5


def test_a_request_withdrawn_between_look_and_claim_is_not_performed():
    """The claim succeeds because the sender removed its own: the request is gone too, and that is seen."""

    class Store(MemoryStore):
        def create(self, path, data):
            if path.endswith("-claim.json"):
                self.delete(path.replace("-claim", "-request"))
            return super().create(path, data)

    driver = Driver(Store())
    with driver.watching():
        driver.store.create("job/control/a-request.json", b'{"kind":"cancel","sender":"x","time_ms":1}')
        while control(driver.store):
            driver.ended.wait(POLL_S)
    assert driver.done == []


def test_closing_waits_for_the_answer_in_hand(driver):
    begun, go_on = threading.Event(), threading.Event()

    def slow(_: Request) -> None:
        begun.set()
        go_on.wait(10)
        driver.done.append("stop")

    answers = []
    with driver.watching(stop=slow) as close:
        sender = threading.Thread(target=lambda: answers.append(send(driver.store, "job", "stop", claim_s=10)))
        sender.start()
        begun.wait(10)
        threading.Timer(0.05, go_on.set).start()
        close()
        assert driver.done == ["stop"]
        sender.join(10)
    assert answers[0].ok


def test_a_driver_that_hangs_is_reported(driver):
    go_on = threading.Event()
    with driver.watching(stop=lambda _: go_on.wait(10) and None):
        try:
            with pytest.raises(StorageError, match="took the request to stop and did not finish it in 0 s"):
                send(driver.store, "job", "stop", claim_s=10, done_s=0.0)
        finally:
            go_on.set()


def test_a_watch_ends_with_the_job(driver):
    with driver.watching():
        driver.ended.set()
        assert send(driver.store, "job", "cancel", claim_s=0.2) is None


def test_the_control_folder_belongs_to_the_job(store):
    """A request made before the first attempt does not make the job's folder a foreign one."""
    store.create("job/control/a-request.json", b"{}")
    assert JobLog(store, "job").begin_attempt("driver") == 1
