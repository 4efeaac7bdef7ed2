"""Waking the subtask loop from other threads."""

from __future__ import annotations

import threading


def nothing() -> None:
    """The default wake-up: none."""
    return


class Signal:
    """One waiter, many setters; sets coalesce until the waiter wakes.

    A bare lock used as a binary semaphore: waking costs as little as ``SimpleQueue`` (about 45 us for a round trip
    between two threads; ``Condition`` and ``eventfd`` need about 60), and a set that finds the flag up costs 50 ns.

    The waiter must look for work *after* ``wait`` returned; then no work announced by ``set`` is missed.  A wait may
    return True without new work.

    >>> signal = Signal()
    >>> signal.set(); signal.set()
    >>> signal.wait(1.0), signal.wait(0.0)
    (True, False)
    """

    __slots__ = ("_lock", "_raised")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._raised = False

    def set(self) -> None:
        """Wake the waiter (any thread, never blocks)."""
        if self._raised:
            return
        self._raised = True
        try:
            self._lock.release()
        except RuntimeError:
            pass  # another setter was faster: the waiter is awake already

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until somebody called ``set`` since the last wait; False when the time ran out (``None``: no limit)."""
        if timeout_s is None or timeout_s > threading.TIMEOUT_MAX:
            timeout_s = -1
        else:
            timeout_s = max(0.0, timeout_s)
        woken = self._lock.acquire(timeout=timeout_s)
        self._raised = False
        return woken
