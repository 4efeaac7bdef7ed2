"""Workers as plain processes: the interface of ``SparkHost`` without Spark.

A fork server that has the data path loaded plays the part of Spark's Python daemon.  Plans travel as cloudpickle, as
they do in Spark's closures.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from preloaded import work
from pyspark import cloudpickle

from cutwater.runtime.spark_host import SlotTask

__all__ = ["Cores", "FakeHost", "FakeSpark", "adopt", "context", "server_address"]

_CRASHES = {-number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)}


def context() -> ForkServerContext:
    """The fork server, started at the first call."""
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(["preloaded", "runtime_world", "loop_world", "faults"])  # a worker's pickles name them
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent) + (f":{old}" if old else "")
    try:
        from multiprocessing import forkserver

        forkserver.ensure_running()
    finally:
        if old is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = old
    return made


def server_address() -> str:
    """Where the fork server listens; for ``adopt``."""
    context()
    return str(_server()._forkserver_address)


def adopt(address: str) -> None:
    """In a process made by the fork server: go on with that server, instead of loading the data path into another."""
    from multiprocessing import forkserver

    server: Any = _server()
    server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = forkserver.ensure_running = lambda: None


def _server() -> Any:
    from multiprocessing import forkserver

    return forkserver._forkserver  # type: ignore[attr-defined]


class Cores:
    """Cores that tasks hold, and that can be lost while they do."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._free, self._owed = count, 0

    def acquire(self, timeout: float | None = None) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: self._free > 0, timeout):
                return False
            self._free -= 1
            return True

    def release(self, count: int = 1) -> None:
        """Cores come back, from a task or from nowhere; those that were lost meanwhile do not."""
        with self._changed:
            paid = min(self._owed, count)
            self._owed -= paid
            self._free += count - paid
            self._changed.notify_all()

    def lose(self, count: int = 1) -> None:
        """So many are gone: free ones now, others when their tasks end."""
        with self._changed:
            free = min(self._free, count)
            self._free -= free
            self._owed += count - free


class FakeSpark:
    """Stands for the session and its context: how many cores there are, and the hosts made on it.

    Args:
        cores: tasks that can run at once.
        retries: how often a task that died is started again before its job fails, as Spark does.
        crash_log: where a worker that crashes writes the stacks of its threads.
    """

    def __init__(self, cores: int = 16, retries: int = 0, crash_log: Path | None = None) -> None:
        self.cores = Cores(cores)
        self.sparkContext = self
        self.master = "local[*]"
        """Decides which scheduler a job has."""
        self.retries = retries
        self.crash_log = crash_log
        self.crashes: list[str] = []
        """Workers that died of a fault in native code: the job recovers, and nobody would see it."""
        self.hosts: list[FakeHost] = []
        self.prepare: Callable[[Any], None] | None = None
        """Called in each worker's process with its arguments before anything else: faults come in here."""
        self.zombies = False
        """A worker that is to be cancelled lives on, as behind a cut network; its slot counts as free."""

    @property
    def pids(self) -> list[int]:
        """Processes of all workers that live now."""
        return [pid for host in self.hosts for pid in host.pids]


class FakeHost:
    """One process per slot."""

    def __init__(self, spark: FakeSpark, group: str, on_end: Callable[[int, BaseException | None], None]) -> None:
        self._spark, self._on_end = spark, on_end
        self.group = group
        self.launches = 0
        self.processes: dict[int, ForkServerProcess] = {}
        self._threads: list[threading.Thread] = []
        self._submitted: dict[int, float] = {}
        """Slots with a task, and when it got its core; 0: it has none."""
        self._dropped: set[int] = set()
        """Slots whose task was cancelled before it had a core."""
        self._abandoned: set[ForkServerProcess] = set()
        self._cancelled = threading.Event()
        spark.hosts.append(self)

    def launch(self, slot: int, args: Any) -> None:
        self.launches += 1
        self._dropped.discard(slot)
        self._submitted[slot] = 0.0
        thread = threading.Thread(
            target=self._run,
            args=(slot, cloudpickle.dumps((self._spark.prepare, args, self._spark.crash_log))),
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def cancel(self, slot: int) -> None:
        process = self.processes.get(slot)
        if process is None:
            self._dropped.add(slot)
        if self._spark.zombies and process is not None and not self._cancelled.is_set():
            self._abandoned.add(process)
            return
        if process is not None:
            with contextlib.suppress(OSError, ValueError):  # it is just going by itself
                process.kill()

    def cancel_all(self) -> None:
        self._cancelled.set()
        for slot in list(self.processes):
            self.cancel(slot)

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(t.is_alive() for t in self._threads)

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in list(self.processes.values()) if p.pid]

    def activity(self, slots: Iterable[int]) -> dict[int, SlotTask | None]:
        now, known = time.monotonic(), dict(self._submitted)
        return {
            slot: SlotTask("here", (now - known[slot]) * 1000) if known[slot] else None
            for slot in slots
            if slot in known
        }

    @property
    def address(self) -> str:
        return "127.0.0.1"

    def _run(self, slot: int, pickled: bytes) -> None:
        error: BaseException | None = None
        while not self._spark.cores.acquire(timeout=0.05):
            if self._cancelled.is_set() or slot in self._dropped:
                self._submitted.pop(slot, None)
                self._on_end(slot, RuntimeError("cancelled before it got a core"))
                return
        self._submitted[slot] = time.monotonic()
        try:
            for _ in range(self._spark.retries + 1):
                process = context().Process(target=work, args=(pickled,), daemon=True)
                process.start()
                self.processes[slot] = process
                while process not in self._abandoned and process.is_alive():
                    process.join(0.05 if self._spark.zombies else None)
                if process.exitcode in _CRASHES:
                    self._spark.crashes.append(f"worker {slot}, process {process.pid}: exit code {process.exitcode}")
                error = None if process.exitcode == 0 else RuntimeError(f"exit code {process.exitcode}")
                if process not in self._abandoned:
                    del self.processes[slot]
                    process.close()
                if error is None or self._cancelled.is_set():
                    break
        except BaseException as e:
            error = e
        finally:
            self._spark.cores.release()
            self._submitted.pop(slot, None)
        self._on_end(slot, error)
