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
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from preloaded import work
from pyspark import cloudpickle

__all__ = ["FakeHost", "FakeSpark", "adopt", "context", "server_address"]

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


class FakeSpark:
    """Stands for the session: how many cores there are, and the hosts made on it.

    Args:
        cores: tasks that can run at once.
        retries: how often a task that died is started again before its job fails, as Spark does.
        crash_log: where a worker that crashes writes the stacks of its threads.
    """

    def __init__(self, cores: int = 16, retries: int = 0, crash_log: Path | None = None) -> None:
        self.cores = threading.Semaphore(cores)
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
        self._abandoned: set[ForkServerProcess] = set()
        self._cancelled = threading.Event()
        spark.hosts.append(self)

    def launch(self, slot: int, args: Any) -> None:
        self.launches += 1
        thread = threading.Thread(
            target=self._run,
            args=(slot, cloudpickle.dumps((self._spark.prepare, args, self._spark.crash_log))),
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def cancel(self, slot: int) -> None:
        process = self.processes.get(slot)
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

    @property
    def activity(self) -> tuple[int, int]:
        return sum(t.is_alive() for t in self._threads), len(self.processes)

    @property
    def address(self) -> str:
        return "127.0.0.1"

    def _run(self, slot: int, pickled: bytes) -> None:
        error: BaseException | None = None
        while not self._spark.cores.acquire(timeout=0.05):
            if self._cancelled.is_set():
                self._on_end(slot, RuntimeError("cancelled before it got a core"))
                return
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
        self._on_end(slot, error)
