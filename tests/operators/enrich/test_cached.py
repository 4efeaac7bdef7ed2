"""``cw.cached``: one question for each key at a time, remembered for as long as it holds, and no failure is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pyspark import cloudpickle

import cutwater as cw
from cutwater.errors import BuildError, UserCodeError
from cutwater.operators.enrich import cached as module


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the time that the cache goes by."""
    now = [1000.0]
    monkeypatch.setattr(module, "_now_s", lambda: now[0])

    def move(by_s: float) -> None:
        now[0] += by_s

    return move


class System:
    """What is asked: remembers the questions, knows even numbers, and fails when told to."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.fails = 0

    def _answer(self, key: int) -> dict[str, Any] | None:
        return {"half": key // 2} if key % 2 == 0 else None

    async def one(self, key: int) -> dict[str, Any] | None:
        self.asked.append(key)
        await asyncio.sleep(0.001)
        if self.fails:
            self.fails -= 1
            raise OSError("away")
        return self._answer(key)

    async def many(self, keys: list[int]) -> dict[int, Any]:
        self.asked.append(list(keys))
        return {key: found for key in keys if (found := self._answer(key)) is not None}

    def plain(self, key: int) -> dict[str, Any] | None:
        self.asked.append(key)
        return self._answer(key)


def asked_at_once(find: Any, *keys: int) -> list[Any]:
    async def all_() -> list[Any]:
        return await asyncio.gather(*(find({"n": key}) for key in keys), return_exceptions=True)

    return asyncio.run(all_())


def test_who_asks_at_the_same_time_shares_the_question() -> None:
    system = System()
    find = cw.cached(system.one, key="n")
    assert asked_at_once(find, 4, 4, 7, 4) == [{"n": 4, "half": 2}, {"n": 4, "half": 2}, {"n": 7}, {"n": 4, "half": 2}]
    assert system.asked == [4, 7]


@pytest.mark.parametrize("kind", ["one", "plain"])
def test_what_was_found_holds_for_its_time_and_what_was_not_for_another(kind: str, clock: Any) -> None:
    system = System()
    find = cw.cached(getattr(system, kind), key="n", ttl="10s", missing_ttl="2s")
    for by_s, questions in ((0, [4, 7]), (1, []), (1.5, [7]), (8, [4, 7])):
        clock(by_s)
        system.asked.clear()
        assert asked_at_once(find, 4, 7) == [{"n": 4, "half": 2}, {"n": 7}]
        assert system.asked == questions, by_s


def test_a_missing_key_need_not_be_remembered() -> None:
    system = System()
    find = cw.cached(system.one, key="n", missing_ttl=0)
    assert [asked_at_once(find, 7, 4) for _ in range(2)] == [[{"n": 7}, {"n": 4, "half": 2}]] * 2
    assert system.asked == [7, 4, 7]


def test_a_failure_is_told_to_all_who_wait_and_not_remembered() -> None:
    system = System()
    system.fails = 1
    find = cw.cached(system.one, key="n")
    assert [str(error) for error in asked_at_once(find, 4, 4)] == ["away", "away"]
    assert asked_at_once(find, 4) == [{"n": 4, "half": 2}]
    assert system.asked == [4, 4]


def test_the_least_used_go_first() -> None:
    system = System()
    find = cw.cached(system.one, key="n", size=2)
    for key in (2, 4, 2, 6, 2, 4):
        asked_at_once(find, key)
    assert system.asked == [2, 4, 6, 4]


def test_keys_are_asked_about_together() -> None:
    system = System()
    find = cw.cached(system.many, key="n", batch_keys=3, keep_missing=False)
    assert asked_at_once(find, 2, 3, 2, 4, 6) == [
        {"n": 2, "half": 1}, None, {"n": 2, "half": 1}, {"n": 4, "half": 2}, {"n": 6, "half": 3},
    ]  # fmt: skip
    assert system.asked == [[2, 3, 4], [6]]


def test_who_gives_up_does_not_take_the_answer_of_the_others_along() -> None:
    system = System()
    find = cw.cached(system.one, key="n")

    async def two() -> Any:
        first = asyncio.ensure_future(find({"n": 4}))
        second = asyncio.ensure_future(find({"n": 4}))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert asyncio.run(two()) == {"n": 4, "half": 2}
    assert system.asked == [4]


def test_several_columns_are_a_key() -> None:
    find = cw.cached(lambda key: {"sum": sum(key)}, key=["a", "b"])
    assert asyncio.run(find({"a": 1, "b": 2})) == {"a": 1, "b": 2, "sum": 3}


def test_a_copy_for_another_process_begins_empty() -> None:
    find = cw.cached(lambda key: {"twice": 2 * key}, key="n")
    assert asked_at_once(find, 1) == [{"n": 1, "twice": 2}]
    copy = cloudpickle.loads(cloudpickle.dumps(find))
    assert not copy._known
    assert asked_at_once(copy, 1) == [{"n": 1, "twice": 2}]


@pytest.mark.parametrize(
    ("fetch", "options", "match"),
    [(lambda keys: [1], {"batch_keys": 2}, "not a dict by key"), (lambda key: 7, {}, "not a dict of columns")],
)
def test_answers_that_are_none(fetch: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(UserCodeError, match=match):
        asyncio.run(cw.cached(fetch, key="n", **options)({"n": 1}))


def test_settings_that_make_no_sense() -> None:
    for fetch, options in ((7, {"key": "n"}), (len, {"key": ()}), (len, {"key": "n", "size": 0})):
        with pytest.raises(BuildError):
            cw.cached(fetch, **options)  # type: ignore[arg-type]
