"""The restart budget: whether and when a failed job starts again, by each strategy (R5)."""

from __future__ import annotations

import random
from collections import deque
from typing import TypeAlias

import msgspec

from cutwater.config import RestartConfig


class Restart(msgspec.Struct, frozen=True):
    """Start a new attempt after ``delay_ms``."""

    delay_ms: float


class GiveUp(msgspec.Struct, frozen=True):
    """The restart budget is used up; ``reason`` is for people."""

    reason: str


Decision: TypeAlias = Restart | GiveUp


class RestartDecider:
    """Decides after each failure.

    ``none`` never restarts.  ``fixed_delay`` restarts ``attempts`` times in all.  ``failure_rate`` restarts until there
    are more than ``rate_failures`` failures within ``rate_window_ms``.  ``exponential`` waits longer after each
    failure; running ``reset_ms`` without one makes the pause short again, and ``max_consecutive`` failures with no
    completed checkpoint in between are the end.

    Args:
        config: the strategy and its numbers.
        rng: for the jitter; seeded by the caller.

    >>> decider = RestartDecider(RestartConfig(strategy="fixed_delay", attempts=1, delay_ms=10), random.Random(0))
    >>> decider.on_failure(0.0)
    Restart(delay_ms=10)
    >>> decider.on_failure(50.0)
    GiveUp(reason='restarted 1 times, as often as restart.attempts allows')
    """

    def __init__(self, config: RestartConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._restarts = 0
        self._consecutive = 0
        self._pause_ms = config.initial_ms
        self._running_since_ms: float | None = None
        self._failures_ms: deque[float] = deque()
        self.latest = Restart(0.0)
        """The last restart that was decided."""

    @property
    def budget(self) -> tuple[int, int]:
        """Number of failures that count now, and the number after which the job is still restarted."""
        match self._config.strategy:
            case "none":
                return 0, 0
            case "fixed_delay":
                return self._restarts, self._config.attempts
            case "failure_rate":
                return len(self._failures_ms), self._config.rate_failures
            case "exponential":
                return self._consecutive, self._config.max_consecutive

    def on_failure(self, now_ms: float) -> Decision:
        """The job failed at ``now_ms`` (monotonic milliseconds)."""
        decision = self._decide(now_ms)
        if isinstance(decision, Restart):
            self.latest = decision
        return decision

    def _decide(self, now_ms: float) -> Decision:
        match self._config.strategy:
            case "none":
                return GiveUp("restart strategy 'none'")
            case "fixed_delay":
                if self._restarts >= self._config.attempts:
                    return GiveUp(f"restarted {self._restarts} times, as often as restart.attempts allows")
                self._restarts += 1
                return Restart(self._config.delay_ms)
            case "failure_rate":
                return self._failure_rate(now_ms)
            case "exponential":
                return self._exponential(now_ms)

    def on_checkpoint_completed(self) -> None:
        """The job made progress that no restart takes back."""
        self._consecutive = 0

    def _failure_rate(self, now_ms: float) -> Decision:
        config, failures = self._config, self._failures_ms
        failures.append(now_ms)
        while failures[0] <= now_ms - config.rate_window_ms:
            failures.popleft()
        if len(failures) > config.rate_failures:
            return GiveUp(
                f"{len(failures)} failures within {config.rate_window_ms:g} ms, "
                f"restart.rate_failures allows {config.rate_failures}"
            )
        return Restart(config.delay_ms)

    def _exponential(self, now_ms: float) -> Decision:
        config = self._config
        self._consecutive += 1
        if self._consecutive > config.max_consecutive:
            return GiveUp(
                f"{self._consecutive} failures without a completed checkpoint in between, "
                f"restart.max_consecutive allows {config.max_consecutive}"
            )
        if self._running_since_ms is not None and now_ms - self._running_since_ms >= config.reset_ms:
            self._pause_ms = config.initial_ms
        pause_ms = self._pause_ms
        self._pause_ms = min(pause_ms * config.multiplier, config.max_ms)
        delay_ms = min(pause_ms * (1 + self._rng.uniform(-config.jitter, config.jitter)), config.max_ms)
        self._running_since_ms = now_ms + delay_ms
        return Restart(delay_ms)
